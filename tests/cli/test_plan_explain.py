"""`lamina plan --explain`, `--compare`, `--picture`: figures that agree with the plan, reasons, and honest warnings."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from asking import answer, refused, succeeded

from lamina.allocate.make_plan import ALLOCATIONS
from lamina.allocate.measure.measure import Measure
from lamina.cli.layer_figures import draw_plan, layer_figures
from lamina.plan.step_plan import PlannedClass, PlannedLayer, StepPlan

if TYPE_CHECKING:
    from conftest import Project

POLICY = """
[corpus]
origin = "test"
accountant = "gaussian"
delta = 1e-5
[class.clinical]
population = 200
epsilon = 4.0
unit = "patient"
[class.sensitive]
population = 100
epsilon = 4.0
profile = { top = 0.5 }
"""
COMMON = ("--batch", "30", "--steps", "20")
LAYERS = ("0", "2", "4", "6")


@pytest.fixture
def asked(project: Project) -> Project:
    project.write("policy.toml", POLICY)
    project.write(
        f"{project.module}.py",
        "from torch import nn\n"
        "def build():\n"
        "    sizes = (8, 6, 4, 6, 8)\n"
        "    layers = [m for a, b in zip(sizes, sizes[1:]) for m in (nn.Linear(a, b), nn.Tanh())]\n"
        "    return nn.Sequential(*layers[:-1])\n",
    )
    Measure(
        proxy="simulated: by hand",
        layers=LAYERS,
        tight=(1.0, 0.5, 0.25, 0.2),
        worst=(2.0, 3.0, 4.0, 5.0),
        printed=(1.0, 0.4, 0.2, 0.1),
        harm=(1.0, 2.0, 1.0, 2.0),
        norms=(0.1, 0.2, 0.4, 0.8),
        fisher=(0.01, 0.04, 0.16, 0.64),
        notes=("a remark of the measurement",),
    ).save(project.folder / "measure.json")
    return project


def ask(project: Project, *words: str) -> tuple[int, str, str]:
    return project.plan(*COMMON, *words)


def told(project: Project, *words: str) -> str:
    return succeeded(ask(project, *words))


def figures(project: Project, *words: str) -> dict[str, Any]:
    return answer(ask(project, *words, "--json"))


# ------------------------------------------------------------------------------------ why this plan


def test_explain_shows_a_row_and_a_bar_for_every_layer(asked: Project) -> None:
    out = told(asked, "--explain", "--measure", "measure.json")
    head = next(line for line in out.splitlines() if line.startswith("layer  depth"))
    for word in ("parameters", "Δ tight", "Δ global", "norm n", "C clinical", "C sensitive", "noise S", "share", "S/N"):
        assert word in head
    rows = [line.split() for line in out.splitlines() if line.split()[:1] and line.split()[0] in LAYERS][
        1:
    ]  # without the head
    assert len(rows) == 2 * len(LAYERS)  # once in the table, once with bars
    assert rows[0][3:6] == ["1", "2", "0.1"]
    assert any("█" in word for word in rows[-1])
    assert "S/N: signal to noise" in out
    assert "measured on the proxy (simulated: by hand)" in out
    assert "note: measured: a remark of the measurement" in out


def test_explain_says_why(asked: Project) -> None:
    out = told(asked, "--explain", "--measure", "measure.json")
    why = out.partition("why this plan")[2]
    assert "C follows the typical norms n on the proxy" in why  # the allocation
    assert "Class clinical: sigma " in why  # the accountant
    assert "by gaussian" in why
    assert "the gradient of an example has norm 0.922" in why  # what clipping keeps
    assert "C and S are the same in every step" in why  # the rules
    assert "clipping keeps 96.9 % of it in class clinical" in why  # its clip norm holds in the worst direction too


def test_explain_without_a_measure_says_what_stands_for_it(asked: Project) -> None:
    out = told(asked, "--explain")
    assert "Δ tight" not in out
    assert "Nothing was measured, so n̂ is the threshold C" in out


def test_the_object_has_the_keys_of_before_and_the_new_ones(asked: Project) -> None:
    found = figures(asked, "--measure", "measure.json")
    plain = figures(asked)
    assert {"classes", "layers", "batch", "steps", "clipping", "accountant", "allocation", "digest"} <= found.keys()
    assert {"rules", "why", "notes", "total_noise", "signal_to_noise", "proxy"} <= found.keys()
    assert "compare" not in found
    for layer, tight, worst in zip(found["layers"], (1.0, 0.5, 0.25, 0.2), (2.0, 3.0, 4.0, 5.0), strict=True):
        assert {"name", "depth", "parameters", "noise_std", "clip", "share"} <= layer.keys()
        assert (layer["delta_tight"], layer["delta_global"]) == (tight, worst)
        assert layer["signal_to_noise"] > 0
    for layer in plain["layers"]:
        assert layer["delta_tight"] is layer["delta_global"] is layer["norm"] is None
    assert plain["proxy"] is None
    power = sum(layer["parameters"] * layer["noise_std"] ** 2 for layer in plain["layers"])
    assert plain["total_noise"] == pytest.approx(power)
    layer = plain["layers"][-1]
    signal = 20 * layer["clip"]["clinical"] + 10 * layer["clip"]["sensitive"]
    noise = layer["noise_std"] * math.sqrt(layer["parameters"])
    assert layer["signal_to_noise"] == pytest.approx(signal / noise)


def test_rules_are_told_with_and_without_explain(asked: Project) -> None:
    words = "Shares follow the energy of the noised gradient"
    assert f"rule: {words}" in told(asked, "--allocate", "ladp")
    assert f"- {words}" in told(asked, "--allocate", "ladp", "--explain")
    found = figures(asked, "--allocate", "ladp:every=4")
    assert found["rules"][0] == {"kind": "follow energy", "decay": 0.9, "least": 0.1, "every": 4}
    assert any(words in reason for reason in found["why"])


def test_a_printed_allocation_is_never_shown_without_its_true_price(asked: Project) -> None:
    for words in ((), ("--explain",)):
        out = told(asked, "--allocate", "printed-ladp", *words)
        assert "the paper claims ε = 4; the true figure is" in out
    assert "NOT WHAT IT CLAIMS" in out
    assert "claimed ε = 4, true ε = " in out
    assert "NOT WHAT IT CLAIMS" in figures(asked, "--allocate", "printed-ladp")["why"][-1]


def test_rho_is_shared_out_over_the_steps(asked: Project) -> None:
    found = figures(asked, "--rho", "0.1", "--allocate", "flat")
    assert found["accountant"] == "zcdp"
    rho = [entry["rho"] for entry in found["classes"].values()]
    assert max(rho) == pytest.approx(0.1, rel=1e-11)
    assert max(rho) <= 0.1
    assert not any("below the" in note for note in found["notes"])
    refused(ask(asked, "--rho", "-1"), "allocate.rho-not-positive")


# ------------------------------------------------------------------------------------ side by side


def test_compare_shows_everything_that_can_run(asked: Project) -> None:
    found = figures(asked, "--compare", "--measure", "measure.json")
    rows = {row["allocation"]: row for row in found["compare"]}
    assert set(rows) == set(ALLOCATIONS)
    assert all(row["ran"] for row in rows.values())
    assert rows["flat"]["noise_against_flat"] == pytest.approx(1.0)
    assert rows["pareto"]["noise_against_flat"] < 1.0
    assert rows["pareto"]["digest"] == found["digest"]
    for name, row in rows.items():
        epsilon = [entry["epsilon"] for entry in row["classes"].values()]
        assert row["when"]
        assert row["printed"] is name.startswith("printed")
        assert row["worst_layer"]["name"] in LAYERS
        if row["printed"]:
            assert max(epsilon) > 2 * max(entry["claimed"] for entry in row["classes"].values())
        else:
            assert max(epsilon) <= 4.0
            assert max(epsilon) > 3.9
    assert rows["ladp"]["rules"]
    assert rows["flat"]["rules"] == []
    alone = figures(asked, "--allocate", "proportional", "--measure", "measure.json")
    assert rows["proportional"]["total_noise"] == alone["total_noise"]
    assert rows["proportional"]["signal_to_noise"] == alone["signal_to_noise"]
    assert rows["proportional"]["worst_layer"]["signal_to_noise"] == min(
        layer["signal_to_noise"] for layer in alone["layers"]
    )


def test_what_needs_a_measure_is_listed_with_the_reason(asked: Project) -> None:
    out = told(asked, "--compare")
    table, _, rest = out.partition("not compared:")
    for name in ("flat", "uniform", "proportional", "pareto", "ladp", "quantile", "automatic"):
        assert f"  {name} " in table
    assert "lsab: lsab needs a measure of the layers" in rest
    assert "printed-lsab: " in rest
    claims = table.partition("which are not what they claim:")[2]
    assert "printed-ladp" in claims
    assert "printed-ladp" not in table.partition("when to use:")[0]
    assert "→ pareto" in table
    assert "the first run, and what others are compared with" in table


def test_compare_among_some(asked: Project) -> None:
    found = figures(asked, "--among", "flat,ladp:every=2,choose_every=5,uniform")
    assert [row["allocation"] for row in found["compare"]] == ["flat", "ladp:every=2,choose_every=5", "uniform"]
    assert len(found["compare"][1]["rules"]) == 2
    out = told(asked, "--among", "flat,pareto:shrink=1", "--allocate", "pareto:shrink=1")
    assert "→ pareto:shrink=1" in out


def test_the_chosen_one_is_always_in_the_comparison(asked: Project) -> None:
    found = figures(asked, "--compare", "--allocate", "pareto:shrink=0.5")
    assert found["compare"][-1]["allocation"] == "pareto:shrink=0.5"
    assert found["compare"][-1]["digest"] == found["digest"]


def test_a_wrong_name_in_a_comparison_is_refused(asked: Project) -> None:
    code, out, err = ask(asked, "--among", "flat,lapd")
    assert (code, out) == (1, "")
    assert "did you mean 'ladp'" in err


# ------------------------------------------------------------------------------------ pictures


@pytest.mark.parametrize("suffix", ["png", "svg", "html"])
def test_a_picture_is_written(asked: Project, suffix: str) -> None:
    if suffix != "html":
        pytest.importorskip("matplotlib")
    path = asked.folder / "new" / f"plan.{suffix}"
    out = told(asked, "--measure", "measure.json", "--allocate", "ladp", "--picture", str(path))
    assert f"written: {path}" in out
    start = path.read_bytes()[:200]
    assert {"png": b"\x89PNG", "svg": b"<?xml", "html": b"<!doctype html>"}[suffix] in start


def test_the_page_needs_nothing_and_says_why(asked: Project) -> None:
    asked.monkeypatch.setitem(sys.modules, "matplotlib", None)
    told(asked, "--measure", "measure.json", "--picture", "plan.html")
    page = Path("plan.html").read_text(encoding="utf-8")
    assert page.count('<td class="bar">') == 5 * len(LAYERS)
    assert "C follows the typical norms n on the proxy" in page
    assert "http" not in page and "<script" not in page
    refused(ask(asked, "--picture", "plan.png"), "cli.matplotlib-missing")


def test_a_picture_without_a_format_is_refused(asked: Project) -> None:
    refused(ask(asked, "--picture", "plan.txt"), "cli.picture-format-not-known")


def test_names_in_a_page_are_only_text(tmp_path: Path) -> None:
    """Nothing that a user names can become markup."""
    plan = StepPlan(
        layers=(PlannedLayer(name="<script>", depth=0.0, parameters=("w",), size=3),),
        classes=(PlannedClass(name="<b>", population=10, sampling_rate=0.5, delta=1e-5),),
        clip=((1.0,),),
        noise=(2.0,),
        batch=5.0,
        steps=1,
        accountant="zcdp",
        allocation="<i>",
    )
    draw_plan(plan, layer_figures(plan, None), ["because <u>"], tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    for word in ("script", "b", "i", "u"):
        assert f"&lt;{word}&gt;" in page
        assert f"<{word}>" not in page
