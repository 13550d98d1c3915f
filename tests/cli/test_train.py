"""`lamina train`: from a run file to a private model, again to go on, and nothing private on any stream."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from asking import answer, refused, succeeded
from open_charges import SECRET_FILE, has_begun, open_charges
from refusals import raises_code
from safetensors.torch import load_file

from lamina.allocate.noise_kind import NoiseHardware
from lamina.cli.app import main
from lamina.cli.explain import NOT_SIGNED
from lamina.engine.execute.compiled import CompiledExecutor
from lamina.ledger.reader import LedgerReader
from lamina.ledger.records import Epoch
from lamina.ledger.run_records import RunBegin
from lamina.ledger.spend_ledger import SpendLedger
from lamina.ledger.verify.verifier import verify
from lamina.ledger.writer import Ledger
from lamina.plan.policy import Policy
from lamina.plan.rules import NoiseKind
from lamina.plan.step_plan import StepPlan
from lamina.run.trainer import Trainer
from lamina.sign.keys import PrivateKey

if TYPE_CHECKING:
    from conftest import Project

KEYS = {"run", "folder", "steps", "planned_steps", "private", "classes", "metrics", "notes", "model"}


def weights(result: dict[str, str]) -> dict[str, torch.Tensor]:
    return load_file(result["model"])


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ------------------------------------------------------------------------------------ the whole way


def test_from_npz_to_a_private_model(project: Project) -> None:
    code, out, err = project.train()
    assert code == 0, err
    folder = project.folder / "runs" / "first"
    rows = out.splitlines()
    assert rows[0].startswith("2 layers")  # the plan comes first
    table = next(i for i, row in enumerate(rows) if row.startswith("class") and "ε of this run" in row)
    for word in ("unit", "δ", "ε over all runs", "steps"):
        assert word in rows[table]
    name, unit, delta, mine, total, steps = rows[table + 1].split()
    assert (name, unit, delta, steps) == ("clinical", "patient", "1e-05", "6")
    assert 1.9 < float(mine) <= 2.0
    assert mine == total
    ledger = project.folder / "runs" / "test.ledger.db"
    for path in (folder / "model.safetensors", ledger, ledger.with_suffix(".pem"), folder / SECRET_FILE):
        assert str(path) in out
        assert path.exists()
    assert f"lamina ledger verify {ledger}" in out
    assert "the factory talks" in err  # the user's prints are no results
    assert "the factory talks" not in out
    assert "step 6 of 6" in err


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler is installed")
def test_compiled_steps_by_a_key_of_the_run_file(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    begin = CompiledExecutor.begin_segment
    monkeypatch.setattr(CompiledExecutor, "begin_segment", lambda self: (taken.append(self.steps), begin(self))[1])
    run = project.run.replace("steps = 6\nsegment = 2", "steps = 12\nsegment = 6\ncompiled = true")
    refused(project.train(run=run), "train.compiled-misplaced")  # patients of several windows
    policy = project.folder / "policy.toml"
    project.write("policy.toml", policy.read_text().replace("population = 60", "population = 120"))
    found = project.train_json(run=run.replace('unit = "patient"', 'unit = "each"'))
    assert taken == [0, 3]  # the first two steps of a segment are the hook engine's, and the third is compared
    assert list((Path(found["folder"]) / "compiled").rglob("*.so"))
    assert verify(found["ledger"]).problem is None


def test_json_has_the_keys_of_the_contract(project: Project) -> None:
    run = project.run + f'[evaluate]\nfunction = "{project.module}:evaluate"\non = "public"\n'
    found = project.train_json(run=run)
    assert found.keys() >= KEYS
    assert found["steps"] == found["planned_steps"] == 6
    assert found["private"] is True
    figures = found["classes"]["clinical"]
    assert figures.keys() == {"epsilon", "total", "delta", "unit"}
    assert 1.9 < figures["epsilon"] == figures["total"] <= 2.0
    assert figures["delta"] == 1e-5
    assert figures["unit"] == "patient"
    assert found["metrics"].keys() == {"mean"}
    assert set(weights(found)) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert found["ledger"] == str(project.folder / "runs" / "test.ledger.db")
    with Ledger.open(found["ledger"]) as ledger:
        assert SpendLedger(ledger).total("clinical", delta=1e-5).spent == pytest.approx(figures["total"])


def test_the_origin_of_the_starting_weights_is_recorded_and_checked(project: Project) -> None:
    """A folder is relative to the run file: that run wrote other weights than the new model has."""
    found = project.train_json(run='starting_weights = "public"\n' + project.run)
    with LedgerReader.read_only(found["ledger"]) as ledger:
        (begin,) = (leaf.record for leaf in ledger.of_kind(RunBegin))
    assert isinstance(begin, RunBegin) and begin.declaration == "public"
    for given, code in (("runs/first", "train.starting-weights-differ"), ("runs/x", "train.starting-weights-unknown")):
        status, _, err = project.train(run=f'starting_weights = "{given}"\noutput = "runs/second"\n' + project.run)
        assert status == 1 and code in err


def test_views_and_a_proxy_that_the_shares_follow(project: Project) -> None:
    module = "\ndef shaken(x):\n    return x + 0.1 * torch.randn_like(x)\n\ndef proxy():\n    return PUBLIC, torch.arange(20) % 2\n"
    path = project.folder / f"{project.module}.py"
    path.write_text(path.read_text() + module)
    live = '{ name = "ladp", estimator = "fisher", proxy = "public", every = 1 }'
    run = f'augment = "{project.module}:shaken"\nviews = 2\nallocate = {live}\n' + project.run
    code, _, err = project.train(run=run)
    assert code == 1
    assert "engine.proxy-misplaced" in err
    code, _, err = project.train(run=run + f'[proxy]\nfunction = "{project.module}:proxy"\non = "public"\n')
    assert code == 0, err


def test_the_ledger_says_what_the_run_did_and_verifies(project: Project) -> None:
    found = project.train_json()
    where = Path(found["ledger"])
    key = where.with_name("test.ledger.pem")
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    link = Path(found["folder"]) / "ledger.db"
    assert link.is_symlink() and link.resolve() == where.resolve()
    out = succeeded(project.call("ledger", "verify", str(link), "--json"))
    told = json.loads(out)
    assert told["verified"] and told["origin"] == "test"
    assert told["signed"] == told["size"]  # nothing is left unsigned
    epochs = answer(project.call("ledger", "show", str(where), "--kind", "epoch", "--json"))["records"]
    assert {epoch["run"] for epoch in epochs} == {found["run"]}
    steps = [(s["first"], s["last"]) for epoch in epochs for s in epoch["segments"]]
    assert steps == [(0, 2), (2, 4), (4, 6)]


def test_a_key_and_a_ledger_of_ones_own(project: Project) -> None:
    PrivateKey.generate().save(project.folder / "own.key", None)
    run = 'ledger = "own.ledger.db"\nledger_key = "own.key"\n' + project.run
    found = project.train_json(run=run)
    assert found["ledger"] == str(project.folder / "own.ledger.db")
    assert not (project.folder / "own.ledger.pem").exists()
    with Ledger.open(found["ledger"]) as ledger:
        assert ledger.header.keys[0].x == PrivateKey.load(project.folder / "own.key", None).public.x
    refused(project.train(run=run.replace("own.key", "gone.key")), "cli.file-missing")


def test_an_origin_that_cannot_name_a_ledger_is_refused_with_one_that_can(project: Project) -> None:
    policy = (project.folder / "policy.toml").read_text()
    project.write("policy.toml", policy.replace('"test"', '"ward 7, north"'))
    for words in ((), ("--plan-only",)):
        assert "for example 'ward-7" in refused(project.train(*words), "plan.policy-invalid")
    assert not (project.folder / "runs").exists()


def test_a_password_is_not_written_down(project: Project) -> None:
    address = "postgresql://me:secret@127.0.0.1:1/nowhere"
    code, out, err = project.train(run=f'ledger = "{address}"\n{project.run}')
    assert code == 1
    assert "secret" not in out + err
    asked = project.folder / "runs" / "first" / "run.json"
    assert "postgresql://me@127.0.0.1:1/nowhere" in asked.read_text() and "secret" not in asked.read_text()


def everything(module: str) -> str:
    """A run file with every key."""
    return f"""
policy = "policy.toml"
model = {{ factory = "{module}:build", args = {{ width = 5 }} }}
loss = {{ name = "cross_entropy", label_smoothing = 0.1 }}
optimizer = {{ name = "sgd", lr = 0.1, momentum = 0.9 }}
scheduler = {{ name = "one_cycle", max_lr = 0.2 }}
batch = {{ clinical = 12 }}
epochs = 1
allocate = "flat"
clipping = "box"
epsilon = {{ clinical = 1.5 }}
segment = 2
microbatches = 2
ema = 0.9
threads = 1
max_occurrences = 4
hardened = true
output = "elsewhere/named"
ledger = "ledgers/mine.db"
[data]
kind = "csv"
path = "data.csv"
x = ["a", "b", "c", "d"]
y = "label"
unit = "patient"
class = "clinical"
examples_per_unit = 1
version = "1"
[evaluate]
function = "{module}:evaluate"
on = "simulated"
every = 2
best = "-mean"
patience = 50
"""


def test_from_csv_with_everything_said(project: Project) -> None:
    run = everything(project.module)
    (project.folder / "ledgers").mkdir()
    found = project.train_json(run=run)
    folder = project.folder / "elsewhere" / "named"
    assert found["folder"] == str(folder)
    assert found["planned_steps"] == 5
    assert found["classes"]["clinical"]["epsilon"] <= 1.5
    assert {"ema.safetensors", "best.safetensors", "model.safetensors"} <= {p.name for p in folder.iterdir()}
    assert {"mine.db", "mine.pem"} <= {p.name for p in (project.folder / "ledgers").iterdir()}
    assert weights(found)["0.weight"].shape == (5, 4)


def test_a_public_class_costs_nothing(project: Project) -> None:
    """Two classes by an array of names; the public one trains every layer, the other one the upper half."""
    project.write(
        "policy.toml",
        """
[corpus]
origin = "test"
delta = 1e-5
[class.volunteers]
public = true
population = 25
[class.sensitive]
population = 30
epsilon = 6.0
profile = { top = 0.5 }
""",
    )
    held = dict(np.load(project.folder / "data.npz"))
    np.savez(project.folder / "data.npz", **held, kind=np.repeat(["volunteers", "sensitive"], 50))
    run = project.run.replace("epsilon = 2.0", "").replace('unit = "patient"', 'unit = "patient"\nclass = "kind"')
    out = succeeded(project.train(run=run))
    rows = [line.split() for line in out.splitlines()]
    assert ["volunteers", "contribution", "–", "not", "protected", "not", "protected", "6"] in rows
    found = project.train_json(run=run)
    assert found["classes"]["volunteers"] == {"epsilon": None, "total": None, "delta": None, "unit": "contribution"}
    assert 5.5 < found["classes"]["sensitive"]["total"] <= 6.0


@pytest.mark.parametrize(
    ("function", "data"),
    [
        ("def data():\n    return torch.randn(50, 4), torch.zeros(50).long()\n", "unit = 'each'\n"),
        ("def data(n):\n    return torch.utils.data.TensorDataset(torch.randn(n, 4), torch.zeros(n).long())\n",
         "args = { n = 50 }\nclass = 'clinical'\nversion = '1'\nunit = 'each'\n"),
        ("import lamina\ndef data(policy):\n    return lamina.Corpus(torch.randn(50, 4), torch.zeros(50).long(), "
         "unit=list(range(25)) * 2, policy=policy)\n", ""),
    ],
)  # fmt: skip
def test_data_from_a_factory(project: Project, again: Callable[[str], None], function: str, data: str) -> None:
    again((project.folder / f"{project.module}.py").read_text() + function)
    head = project.run.partition("[data]")[0]
    run = f'{head}[data]\nkind = "factory"\nfactory = "{project.module}:data"\n{data}'
    assert project.train_json(run=run)["private"] is True


def test_data_from_a_folder(project: Project) -> None:
    rng = np.random.default_rng(1)
    for i in range(20):
        (project.folder / "people" / f"p{i}").mkdir(parents=True)
        x = rng.normal(size=(2, 4)).astype("f4")
        np.savez(project.folder / "people" / f"p{i}" / "payload.npz", x=x, y=(x[:, 0] > 0).astype(int))
    head = project.run.partition("[data]")[0]
    assert project.train_json(run=f'{head}[data]\nkind = "folder"\npath = "people"\n')["steps"] == 6


def test_an_autoencoder_needs_no_labels(project: Project, again: Callable[[str], None]) -> None:
    again("from torch import nn\ndef build():\n    return nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 4))\n")
    run = project.run.replace('y = "y"\n', "").replace('"cross_entropy"', '"mse"')
    assert project.train_json(run=run)["private"] is True


# ------------------------------------------------------------------------------------ again, and anew


def test_the_same_command_again_spends_nothing(project: Project) -> None:
    first = project.train_json()
    second = project.train_json()
    assert second["run"] == first["run"]
    assert second["classes"] == first["classes"]
    assert same(weights(first), weights(second))
    assert any("already finished" in note for note in second["notes"])
    assert not any("already finished" in note for note in first["notes"])


STOPPING = """
import pathlib
calls = pathlib.Path(__file__).with_name("calls")

def stopping(model):
    calls.write_text(calls.read_text() + "x" if calls.exists() else "x")
    if len(calls.read_text()) == 4:
        raise KeyboardInterrupt
    return {"mean": 0.0}
"""


def test_stopped_by_hand_it_goes_on(project: Project, again: Callable[[str], None]) -> None:
    """Ctrl-C between segments: the message says how to go on; nothing is charged twice."""
    again((project.folder / f"{project.module}.py").read_text() + STOPPING)
    run = project.run + f'[evaluate]\nfunction = "{project.module}:stopping"\non = "public"\n'
    code, out, err = project.train(run=run)
    assert code == 130
    assert f"lamina train {project.folder / 'first.toml'}" in err
    assert "Nothing is lost" in err
    assert "Traceback" not in err
    assert "ε of this run" not in out
    metrics = json.loads((project.folder / "runs" / "first" / "metrics.json").read_text())
    assert 0 < metrics["steps"] < 6
    sys.modules.pop(project.module)
    found = project.train_json(run=run)
    assert found["run"] == metrics["run"]
    assert found["steps"] == 6
    assert 1.9 < found["classes"]["clinical"]["epsilon"] <= 2.0
    assert found["notes"] == [NOT_SIGNED]  # nothing was done again, nothing was finished before


def test_noise_of_kind_auto_is_chosen_once(
    project: Project, again: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that goes on keeps the noise of its plan, also on a processor for which "auto" would be other noise."""
    policy = (project.folder / "policy.toml").read_text()
    first = policy.replace("[corpus]", '[corpus]\naccountant = "rdp-integer"', 1) + '\n[noise]\nkind = "auto"\n'
    project.write("policy.toml", first)
    again((project.folder / f"{project.module}.py").read_text() + STOPPING)
    run = project.run + f'[evaluate]\nfunction = "{project.module}:stopping"\non = "public"\n'
    monkeypatch.setattr(NoiseHardware, "here", classmethod(lambda cls: NoiseHardware(aes=True, entropy=True)))
    assert project.train(run=run)[0] == 130
    kept = (project.folder / "runs" / "first" / "plan.cbor").read_bytes()
    assert StepPlan.from_cbor(kept).noise_kind is NoiseKind.DISCRETE_GAUSSIAN
    monkeypatch.setattr(NoiseHardware, "here", classmethod(lambda cls: NoiseHardware(aes=False, entropy=True)))
    sys.modules.pop(project.module)
    assert project.train_json(run=run)["steps"] == 6
    assert (project.folder / "runs" / "first" / "plan.cbor").read_bytes() == kept
    assert not list((project.folder / "runs" / "first").glob("plan-*.cbor"))
    found = project.train_json("--fresh", run=run)
    assert StepPlan.from_cbor((Path(found["folder"]) / "plan.cbor").read_bytes()).noise_kind is NoiseKind.GAUSSIAN


def test_fresh_is_another_run_until_the_budget_is_gone(project: Project) -> None:
    first = project.train_json()
    second = project.train_json("--fresh")
    assert Path(second["folder"]).name == "first-2"
    assert second["run"] != first["run"]
    assert not same(weights(first), weights(second))
    one, two = first["classes"]["clinical"], second["classes"]["clinical"]
    assert one["epsilon"] == pytest.approx(two["epsilon"])
    assert two["total"] > 1.2 * one["total"]
    assert project.train_json()["run"] == second["run"]  # without --fresh: the newest goes on
    project.write("policy.toml", (project.folder / "policy.toml").read_text().replace("6.0", "2.9"))
    for _ in range(2):
        told = answer(project.train("--fresh", "--json"), code=1)
        assert told.keys() == {"refused", "remedy", "code", "family"} and told["code"] == "spend.budget-exceeded"
        assert not (project.folder / "runs" / "first-4").exists()  # a refused folder is used again
    assert project.train_json()["run"] == second["run"]


def test_fresh_leaves_folders_of_others_alone(project: Project) -> None:
    project.train_json()
    (project.folder / "runs" / "first-2").mkdir()
    (project.folder / "runs" / "first-2" / "run.cbor").write_text("somebody's")
    (project.folder / "runs" / "first-2" / "run.json").write_text('{"output": "first-2"}')
    (project.folder / "runs" / "first-02").mkdir()
    (project.folder / "runs" / "first-night").mkdir()
    assert Path(project.train_json()["folder"]).name == "first"
    assert Path(project.train_json("--fresh")["folder"]).name == "first-3"
    assert Path(project.train_json()["folder"]).name == "first-3"


def test_a_killed_command_goes_on_and_costs_what_was_planned(project: Project) -> None:
    run = project.run.replace("steps = 6", "steps = 300").replace("segment = 2", "segment = 60")
    project.write("first.toml", run)
    options = project.train_killed_in_a_segment(project.folder / "first.toml")
    found = project.train_again(project.folder / "first.toml", options)
    plan = StepPlan.from_cbor((project.folder / "runs" / "first" / "plan.cbor").read_bytes())
    assert found["steps"] == 300 and found["notes"] == [NOT_SIGNED]
    assert found["classes"]["clinical"]["epsilon"] == pytest.approx(plan.epsilon("clinical"), rel=1e-12)
    checked = verify(found["ledger"])
    assert checked.problem is None and checked.signed == checked.size
    with LedgerReader.read_only(found["ledger"]) as ledger:
        segments = [each for leaf in ledger.of_kind(Epoch) for each in leaf.record.segments]
        assert [(each.first, each.last) for each in segments] == [(i, i + 60) for i in range(0, 300, 60)]
        assert open_charges(ledger) == []  # nothing is reserved or open any more


# ------------------------------------------------------------------------------------ before anything is spent


def test_plan_only_spends_and_writes_nothing(project: Project) -> None:
    before = sorted(project.folder.rglob("*"))
    out = succeeded(project.train("--plan-only"))
    written = {p.relative_to(project.folder).parts[0] for p in set(project.folder.rglob("*")) - set(before)}
    assert written <= {"first.toml", "__pycache__"}
    assert "nothing was spent or written" in out
    assert "would begin" in out
    spent = project.train_json()["classes"]["clinical"]["total"]
    ledger = (project.folder / "runs" / "test.ledger.db").read_bytes()
    found = project.train_json("--plan-only")
    assert found["classes"].keys() == {"clinical"}  # the keys of `lamina plan`, and more
    assert {"layers", "folder", "begun", "ledger", "standing", "notes"} <= found.keys()
    assert found["ledger"] == str(project.folder / "runs" / "test.ledger.db")
    assert found["begun"] == 6
    assert found["standing"]["clinical"]["spent"] == pytest.approx(spent)
    assert found["standing"]["clinical"]["bound"] == 6.0
    assert (project.folder / "runs" / "test.ledger.db").read_bytes() == ledger
    _, out, _ = project.train("--plan-only", "--fresh")
    assert "first-2: would begin" in out


def test_plan_only_says_what_remains_afterwards(project: Project) -> None:
    out = succeeded(project.train("--plan-only"))
    assert "after this run there remains ε 4.0" in out and "for clinical" in out and "simulated" in out
    found = project.train_json("--plan-only")["standing"]["clinical"]
    assert found["remaining"] == pytest.approx(6.0 - found["planned"])
    spent = project.train_json()["classes"]["clinical"]["total"]
    again = project.train_json("--plan-only")["standing"]["clinical"]  # the same run, which holds its part already
    assert again["remaining"] == pytest.approx(6.0 - spent)
    fresh = project.train_json("--plan-only", "--fresh")["standing"]["clinical"]  # both together: less than the sum
    assert 6.0 - 2 * spent < fresh["remaining"] < again["remaining"]


def test_ledgers_beside_each_other_are_listed_before_training(project: Project) -> None:
    """A run under another origin; its owner states that these are other people, in the policy."""
    project.train_json()
    policy = project.folder / "policy.toml"
    other = policy.read_text().replace('origin = "test"', 'origin = "other"\nother_people = "another town"')
    policy.write_text(other)
    found = project.train_json("--plan-only", "--fresh")
    (beside,) = found["ledgers_beside"]
    assert (beside["ledger"], beside["origin"], beside["runs"]) == ("test.ledger.db", "test", 1)
    out = succeeded(project.train("--plan-only", "--fresh"))
    assert "another ledger lies near, and a person in both loses the sum" in out and "test.ledger.db" in out
    assert any("test.ledger.db" in note for note in project.train_json("--fresh")["notes"])
    page = succeeded(project.call("ledger", "show", str(project.folder / "runs" / "other.ledger.db")))
    assert "another town" in page


def test_plan_only_says_that_nothing_remains(project: Project) -> None:
    out = succeeded(project.train("--plan-only", run=project.run.replace("epsilon = 2.0\n", "")))
    assert "after this run nothing remains for clinical" in out


def test_a_run_file_is_planned_as_it_would_train(project: Project) -> None:
    path = str(project.write("first.toml", project.run))
    planned = answer(project.call("plan", path, "--json"))
    trained = project.train_json("--plan-only")
    assert planned["digest"] == trained["digest"]
    assert not any("built-in" in note for note in planned["notes"])
    longer = answer(project.call("plan", path, "--steps", "9", "--batch", "20", "--json"))
    assert (longer["steps"], longer["batch"]) == (9, 20)
    own = answer(project.call("plan", str(project.folder / "policy.toml"), "--steps", "9", "--batch", "20", "--json"))
    assert any("built-in 'residual'" in note for note in own["notes"])
    wrong = project.write("b.toml", project.run.replace("batch", "bacth"))
    refused(project.call("plan", str(wrong)), "cli.run-keys-unknown")


def test_plan_only_says_that_the_ledger_would_refuse(project: Project) -> None:
    """Two runs of ε = 4 do not fit into a bound of 6; the second would be refused, and is told so."""
    project.train_json(run=project.run.replace("epsilon = 2.0", "epsilon = 4.0"))
    code, out, _ = project.train("--plan-only", "--fresh", run=project.run.replace("epsilon = 2.0", "epsilon = 5.5"))
    assert code == 1
    assert "would be refused: the ledger has too little ε left for class 'clinical'" in out
    refused(
        project.train("--fresh", run=project.run.replace("epsilon = 2.0", "epsilon = 5.5")), "spend.budget-exceeded"
    )


def test_plan_only_says_that_the_ledger_would_not_follow_the_policy(project: Project) -> None:
    """One that protects less than was promised, and one of another δ."""
    project.train_json()
    policy = (project.folder / "policy.toml").read_text()
    for old, new, words in (
        ("epsilon = 6.0", "epsilon = 9.0", "protect"),
        ("1e-5", "1e-6", "counts by pld at δ = 1e-05 for good"),
    ):
        project.write("policy.toml", policy.replace(old, new))
        for words_too in (("--plan-only", "--fresh"), ("--fresh",)):
            code, _, err = project.train(*words_too)
            assert code == 1
            assert words in err
    assert not has_begun(project.folder / "runs" / "first-2")


def test_plan_only_rehearses(project: Project) -> None:
    run = project.run.replace(f'"{project.module}:build"', '{ factory = "torch.nn:Linear", args = { in_features = 5, '
                              "out_features = 2 } }")  # fmt: skip
    refused(project.train("--plan-only", run=run), "train.model-or-loss-failed")
    assert not (project.folder / "runs").exists()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('path = "data.npz"', 'path = "gone.npz"', "path is 'gone.npz'"),
        ('unit = "patient"', 'unit = "person"', "has no array 'person'"),
        ('kind = "npz"', 'kind = "csv"', "data.npz"),
        ('policy = "policy.toml"', 'policy = "gone.toml"', "gone.toml"),
        ("batch = 12", "batch = 61", "above its population of 60"),
        ("epsilon = 2.0", "epsilon = 7.0", "above the policy's"),
        ("epsilon = 2.0", "epsilon = { clinic = 1.0 }", "class 'clinic'"),
        ("segment = 2", "max_occurrences = { clinic = 1 }", "the plan has no class 'clinic'"),
        ('"cross_entropy"', '"torch.nn:CrossEntropyLoss"', "reduction='mean'"),
        ('"cross_entropy"', '"mse"', "the model gives (2,) per example, y is one number"),
        ("segment = 2", 'scheduler = "plateau"', "no budget pays"),
        ("[data]", '[data]\nclass = "other"', "has no array 'other'"),
        (":build", ":bild", "did you mean 'build'"),
    ],
)
def test_refusals_name_the_thing_and_leave_nothing_behind(project: Project, old: str, new: str, words: str) -> None:
    assert old in project.run
    code, out, err = project.train("--json", run=project.run.replace(old, new))
    assert code == 1
    told = json.loads(out)
    assert words in told["refused"]
    assert words in err
    assert told["remedy"]
    assert "Traceback" not in err
    assert not list((project.folder / "runs").glob("*ledger*"))


def test_a_corpus_under_another_policy_is_refused(project: Project, again: Callable[[str], None]) -> None:
    text = "import lamina\ndef data():\n    return lamina.Corpus(torch.randn(9, 4), torch.zeros(9).long())\n"
    again((project.folder / f"{project.module}.py").read_text() + text)
    head = project.run.partition("[data]")[0]
    refused(
        project.train(run=f'{head}[data]\nkind = "factory"\nfactory = "{project.module}:data"\n'), "cli.data-not-usable"
    )


def test_an_evaluation_that_fails_is_told_in_full(project: Project, again: Callable[[str], None]) -> None:
    """It sees public data only. The run can go on once it is corrected, without being charged again."""
    good = (project.folder / f"{project.module}.py").read_text()
    run = project.run + f'[evaluate]\nfunction = "{project.module}:evaluate"\non = "public"\n'
    again(good.replace("float(model(PUBLIC).mean())", "model(PUBLIC[:, :3])"))
    code, _, err = project.train(run=run)
    assert code == 1
    assert "evaluate.function" in err
    assert "layer '0', Linear(in_features=4, out_features=4, bias=True), was given float32 (20, 3)" in err
    assert err.count(f"{project.module}.py:") == 1
    again(good)
    found = project.train_json(run=run)
    assert found["steps"] == 6
    assert found["classes"]["clinical"]["epsilon"] <= 2.0


def test_a_layer_that_does_not_fit_is_named(project: Project, again: Callable[[str], None]) -> None:
    again("""
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(4, 4), nn.Linear(3, 2)
    def forward(self, x):
        return self.head(self.first(x))
build = Net
""")
    err = refused(project.train(), "train.model-or-loss-failed")
    assert "layer 'head', Linear(in_features=3, out_features=2, bias=True)" in err
    assert f"{project.module}.py:8, in forward" in err
    assert "float32 (6, 4)" in err  # the rehearsal's own size, not a batch's
    assert not list((project.folder / "runs").glob("*ledger*"))


# ------------------------------------------------------------------------------------ nothing private on a stream

LATE = """
import warnings, torch.nn.functional as F
calls = []

def late(output, y):
    if output.requires_grad and (len(y) > 6 or (calls and calls[-1] == "real")):
        calls.append("real")
        {act}
    return F.cross_entropy(output, y, reduction="none")
"""


def late(project: Project, again: Callable[[str], None], act: str) -> str:
    """A run whose loss does something once it sees a real batch: the rehearsal has 6 examples."""
    again((project.folder / f"{project.module}.py").read_text() + LATE.format(act=act))
    return project.run.replace('"cross_entropy"', f'"{project.module}:late"')


def test_an_error_in_training_keeps_its_text(project: Project, again: Callable[[str], None]) -> None:
    run = late(project, again, "raise ValueError(f'hidden {len(y)} hidden')")
    code, out, err = project.train("--json", run=run)
    assert code == 1
    assert "hidden" not in out + err
    assert "ValueError" in err
    assert f"{project.module}.py:" in json.loads(out)["refused"]
    assert "in late" in err


def test_debug_shows_the_lines_and_not_the_text(project: Project, again: Callable[[str], None]) -> None:
    """Standard error is not a terminal here: what is printed there is written down."""
    run = late(project, again, "raise ValueError(f'hidden {len(y)} hidden')")
    path = project.write("first.toml", run)
    with raises_code("train.error-text-withheld") as caught:
        main(["train", str(path), "--debug"])
    shown = "".join(map(str, caught.getrepr(style="native").reprtraceback.reprentries))
    assert "in late" in shown
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    assert "hidden" not in str(caught.value)


def test_debug_on_a_terminal_shows_the_text(
    project: Project, again: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = late(project, again, "raise ValueError(f'hidden {len(y)} hidden')")
    path = project.write("first.toml", run)
    monkeypatch.setattr("lamina.cli.app.stderr_is_terminal", lambda: True)
    with raises_code("train.error-text-withheld") as caught:
        main(["train", str(path), "--debug"])
    assert "hidden" in str(caught.value.__cause__)


def test_a_warning_in_training_keeps_its_text(project: Project, again: Callable[[str], None]) -> None:
    run = late(project, again, "warnings.warn(f'hidden {len(y)}', UserWarning)")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, out, err = project.train(run=run)
    assert code == 0, err
    assert f"warning: UserWarning at {project.folder / project.module}.py:" in err
    assert "hidden" not in out + err


def test_inside_needs_a_terminal(project: Project) -> None:
    code, out, err = project.train("--inside")
    assert code == 1
    assert "not a terminal" in err
    assert out == ""
    assert not (project.folder / "runs").exists()


class Seen(Exception):
    pass


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the trainer is given."""
    found: dict[str, Any] = {}

    def init(self: Trainer, *given: object, **options: object) -> None:
        names = ("model", "optimizer", "loss_fn", "corpus", "plan")
        found.update(zip(names, given, strict=True), **options)
        raise Seen

    monkeypatch.setattr(Trainer, "__init__", init)
    return found


def test_inside_reaches_the_trainer(project: Project, seen: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    project.train()
    assert seen["inside"] is False
    monkeypatch.setattr("lamina.cli.train.stderr_is_terminal", lambda: True)
    project.train("--inside")
    assert seen["inside"] is True


def test_every_key_reaches_the_trainer(project: Project, seen: dict[str, Any]) -> None:
    project.train(run=everything(project.module))
    plan, tool, rule = seen["plan"], seen["optimizer"], seen["evaluate"]
    assert (plan.allocation, plan.clipping.value, plan.batch, plan.steps) == ("flat", "box", 12, 5)
    assert isinstance(tool, torch.optim.SGD)
    assert tool.defaults["momentum"] == 0.9
    assert isinstance(seen["scheduler"], torch.optim.lr_scheduler.OneCycleLR)
    assert seen["scheduler"].total_steps == 5
    assert seen["loss_fn"].arguments == {"label_smoothing": 0.1}
    assert (seen["segment"], seen["microbatches"], seen["ema"], seen["hardened"]) == (2, 2, 0.9, True)
    assert seen["max_occurrences"] == {"clinical": 4}
    assert (rule.on, rule.every, rule.best, rule.patience) == ("simulated", 2, "-mean", 50)
    assert seen["corpus"].examples_per_unit == 1
    assert len(seen["corpus"]) == 50
    assert seen["corpus"].policy == Policy.load(project.folder / "policy.toml")
    assert torch.get_num_threads() == 1


def test_a_schedule_by_epoch_and_the_log_reach_the_trainer(project: Project, seen: dict[str, Any]) -> None:
    """60 people in batches of 12: five steps are an epoch."""
    run = 'log = "csv"\nscheduler = { name = "cosine", interval = "epoch" }\n' + project.run
    project.train(run=run.replace("steps = 6", "epochs = 3"))
    assert (seen["log"], seen["interval"], seen["scheduler"].T_max) == ("csv", "epoch", 3)
    refused(project.train(run=run.replace('"epoch"', '"day"')), "train.interval-unknown")


def test_a_version_stands_for_the_data(project: Project, seen: dict[str, Any]) -> None:
    project.train(run=everything(project.module))
    before = seen["corpus"].digest(b"key")
    table = (project.folder / "data.csv").read_text().replace(",0,p", ",1,p")
    project.write("data.csv", table)
    project.train(run=everything(project.module))
    assert seen["corpus"].digest(b"key") == before
    project.train(run=everything(project.module).replace('version = "1"', 'version = "2"'))
    assert seen["corpus"].digest(b"key") != before


# ------------------------------------------------------------------------------------ small things


def test_the_template_is_printed(project: Project) -> None:
    out = succeeded(project.call("train", "--template"))
    assert out.startswith("# A training run")
    assert answer(project.call("train", "--template", "--json")) == {"template": out}


def test_threads(project: Project) -> None:
    project.train_json(run="threads = 2\n" + project.run)
    assert torch.get_num_threads() == 2
    project.train_json("--threads", "1", run="threads = 2\n" + project.run)
    assert torch.get_num_threads() == 1
    assert project.train("--threads", "0")[0] == 2


def test_paths_are_relative_to_the_file(project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert project.train_json()["folder"] == str(project.folder / "runs" / "first")
    assert list((tmp_path / "other").iterdir()) == []


def test_what_the_run_was_asked_is_written_down(project: Project) -> None:
    found = project.train_json()
    asked = json.loads((Path(found["folder"]) / "run.json").read_text())
    assert asked["output"] == "first"
    assert asked["settings"]["data"]["unit"] == "patient"
    assert asked["settings"]["optimizer"] == {"name": "adam", "lr": 0.01}


# ------------------------------------------------------------------------------------ what changed since


def test_a_finished_run_does_not_take_a_new_learning_rate(project: Project) -> None:
    project.train_json()
    told = refused(project.train(run=project.run.replace("lr = 1e-2", "lr = 1e-3")), "cli.finished-run-settings")
    assert "0.01" in told and "0.001" in told and "--fresh" in told
    assert project.train_json()["steps"] == 6  # run.json still says what it was trained with


def test_a_folder_that_was_put_back_is_refused_or_takes_over(project: Project, again: Callable[[str], None]) -> None:
    again((project.folder / f"{project.module}.py").read_text() + STOPPING)
    run = project.run + f'[evaluate]\nfunction = "{project.module}:stopping"\non = "public"\n'
    assert project.train(run=run)[0] == 130
    folder, saved = project.folder / "runs" / "first", project.folder / "saved"
    shutil.copytree(folder, saved, symlinks=True)
    sys.modules.pop(project.module)
    before = project.train_json(run=run)
    shutil.rmtree(folder)
    saved.rename(folder)
    assert "--take-over" in refused(project.train(run=run), "train.folder-behind-ledger")
    after = project.train_json("--take-over", run=run)
    assert after["run"] == before["run"] and after["steps"] == 6
    assert any("took over" in note for note in after["notes"])
    assert after["classes"]["clinical"]["epsilon"] > before["classes"]["clinical"]["epsilon"]  # what it did again
    assert project.train_json(run=run)["classes"] == after["classes"]  # and nothing more


def test_a_restored_ledger_is_completed_from_receipts(project: Project) -> None:
    """A finished run enters its start, epochs and end again, once; another run can train then."""
    project.train_json()
    ledger, older = project.folder / "runs" / "test.ledger.db", project.folder / "older.db"
    succeeded(project.call("ledger", "copy", str(ledger), str(older)))
    second = project.train_json("--fresh")
    for path in ledger.parent.glob("test.ledger.db*"):
        path.unlink()
    older.rename(ledger)
    told = refused(project.train("--fresh"), "ledger.older-than-kept")
    assert "lamina ledger complete" in told
    entered = answer(project.call("ledger", "complete", str(ledger), second["folder"], "--json"))
    assert entered["entered"] == 1 + 3 + 1 and verify(ledger).problem is None
    assert answer(project.call("ledger", "complete", str(ledger), second["folder"], "--json"))["entered"] == 0
    third = project.train_json("--fresh")
    assert third["classes"]["clinical"]["total"] > second["classes"]["clinical"]["total"]


def test_a_changed_model_is_named_by_its_tensor(project: Project) -> None:
    run = project.run.replace("steps = 6", "steps = 300").replace("segment = 2", "segment = 60")
    project.train_killed_in_a_segment(project.write("first.toml", run))
    changed = run.replace(
        f'model = "{project.module}:build"', f'model = {{ factory = "{project.module}:build", args = {{ width = 5 }} }}'
    )
    told = refused(project.train(run=changed), "train.checkpoint-not-of-model")
    assert "'0.weight' has shape (4, 4)" in told and "(5, 4)" in told


def test_another_output_does_not_begin_another_ledger(project: Any) -> None:
    """Contributions would be in both, each within its bound."""
    project.train_json()
    elsewhere = 'output = "other/first"\n' + project.run
    refused(project.train(run=elsewhere), "train.second-ledger")
    assert not (project.folder / "other").exists()
    (there,) = (project.folder / "runs").glob("*.ledger.db")
    asked = f'ledger = "other/{there.name}"\n'
    project.train_json(run=asked + elsewhere)
    assert (project.folder / "other" / there.name).is_file()
