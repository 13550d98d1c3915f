"""`lamina plan --proxy`: measuring on inputs that are nobody's, keeping it, and refusing what makes no sense."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from asking import refused, succeeded
from refusals import raises_code

from lamina.allocate.measure.measure import Measure
from lamina.cli import by_name
from lamina.cli.proxy_measure import parse_shape, random_labels
from lamina.signals.presets import run_file

if TYPE_CHECKING:
    from conftest import Project

MODULE = """
import torch
from torch import nn

def auto():
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 6))

def classes():
    return nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))

def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(40, 6, generator=generator)

def labelled():
    return data(), torch.arange(40) % 3
"""
QUICK = ("--passes", "40", "--batch", "12", "--steps", "6")


@pytest.fixture
def asked(project: Project) -> Project:
    project.write(f"{project.module}.py", MODULE)
    project.write(
        "policy.toml",
        '[corpus]\norigin = "t"\naccountant = "zcdp"\ndelta = 1e-5\n[class.a]\npopulation = 60\nepsilon = 3.0\n',
    )
    return project


def ask(project: Project, model: str, *words: str) -> tuple[int, str, str]:
    return project.plan(*QUICK, *words, model=model)


def test_a_measure_is_made_kept_and_read_again(asked: Project) -> None:
    words = ("--allocate", "lsab", "--json")
    code, out, err = ask(asked, "auto", "--proxy", "gaussian", "--input", "6", "--save-measure", "m.json", *words)
    assert code == 0, err
    assert "measuring 2 layers" in err
    made = json.loads(out)
    assert made["proxy"] == "gaussian"
    assert all(layer["delta_tight"] <= layer["delta_global"] for layer in made["layers"])
    kept = Measure.load("m.json")
    assert [layer["norm"] for layer in made["layers"]] == list(kept.norms)
    out = succeeded(ask(asked, "auto", "--measure", "m.json", *words))
    assert json.loads(out) == made  # the same plan, bit for bit


def test_measuring_twice_gives_the_same_and_another_seed_another(asked: Project) -> None:
    found = {}
    for name, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        succeeded(
            ask(asked, "auto", "--proxy", "gaussian", "--input", "6", "--seed", seed, "--save-measure", f"{name}.json")
        )
        found[name] = Measure.load(f"{name}.json")
    assert found["a"] == found["b"]
    assert found["a"] != found["c"]


def test_the_seed_decides_the_weights(asked: Project) -> None:
    """On the same public inputs the typical norms depend on nothing but the weights."""
    norms = []
    for seed in ("3", "4"):
        out = succeeded(ask(asked, "auto", "--proxy", f"public:{asked.module}:data", "--seed", seed, "--json"))
        norms.append([layer["norm"] for layer in json.loads(out)["layers"]])
    assert norms[0] != norms[1]


def test_a_classifier_needs_a_loss_and_gets_random_labels(asked: Project) -> None:
    gaussian = ("--proxy", "gaussian", "--input", "6")
    refused(ask(asked, "classes", *gaussian), "cli.proxy-needs-loss")
    out = succeeded(ask(asked, "classes", *gaussian, "--loss", "cross_entropy", "--json"))
    assert json.loads(out)["proxy"] == "simulated: Gaussian inputs, labels at random"


def test_public_data_by_name(asked: Project) -> None:
    out = succeeded(ask(asked, "auto", "--proxy", f"public:{asked.module}:data", "--json"))
    assert json.loads(out)["proxy"] == f"public: {asked.module}:data"
    out = succeeded(
        ask(asked, "classes", "--proxy", f"simulated:{asked.module}:labelled", "--loss", "cross_entropy", "--json")
    )
    assert json.loads(out)["proxy"].startswith("simulated: ")
    refused(ask(asked, "classes", "--proxy", f"simulated:{asked.module}:labelled"), "cli.proxy-needs-loss")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--proxy", "gaussian"), "cli.input-shape-missing"),
        (("--proxy", "gaussian", "--input", "6,zero"), "input is '6,zero', must be whole numbers > 0"),
        (("--proxy", "gaussian", "--input", "0"), "must be whole numbers > 0"),
        (("--proxy", "gaussian", "--input", "7"), "does not take an input of shape (7,)"),
        (("--proxy", "private"), "cli.proxy-not-known"),
        (("--proxy", "private:a:b"), "cli.proxy-not-known"),
        (("--proxy", "public"), "cli.proxy-not-known"),
        (("--proxy", "gaussian:a:b"), "cli.proxy-not-known"),
        (("--proxy", "public:nowhere:data"), "no module 'nowhere'"),
        (("--proxy", "gaussian", "--input", "6", "--radius", "0"), "radius is 0.0, must be a number > 0"),
        (("--proxy", "gaussian", "--input", "6", "--save-measure", "no/where.json"), "cannot be written"),
        (("--measure", "nowhere.json"), "nowhere.json"),
        (("--measure", "policy.toml"), "is not JSON"),
    ],
)
def test_what_cannot_be_measured_is_told(asked: Project, words: tuple[str, ...], problem: str) -> None:
    code, out, err = ask(asked, "auto", *words)
    assert (code, out) == (1, "")
    assert problem in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "words",
    [
        ("--measure", "m.json", "--proxy", "gaussian"),
        ("--input", "6"),
        ("--loss", "mse"),
        ("--save-measure", "m.json"),
        ("--influence",),
        ("--reinitialise", "2"),
        ("--gamma", "none"),
        ("--slopes", "gaussian"),
        ("--measure", "m.json", "--influence"),
        ("--proxy", "gaussian", "--passes", "0"),
        ("--proxy", "gaussian", "--input", "6", "--reinitialise", "-1"),
    ],
)
def test_combinations_that_mean_nothing_are_misuse(asked: Project, words: tuple[str, ...]) -> None:
    code, out, err = ask(asked, "auto", *words)
    assert (code, out) == (2, "")
    assert "Usage" in err


GAUSSIAN = ("--proxy", "gaussian", "--input", "6")


def test_influence_is_measured_and_kept_where_it_is_asked_for(asked: Project) -> None:
    succeeded(ask(asked, "auto", *GAUSSIAN, "--save-measure", "plain.json"))
    succeeded(ask(asked, "auto", *GAUSSIAN, "--influence", "--save-measure", "asked.json"))
    plain, found = Measure.load("plain.json"), Measure.load("asked.json")
    assert plain.influence == ()
    assert len(found.influence) == 2
    assert min(found.influence) > 0
    assert found.norms == plain.norms
    words = ("--allocate", "printed-ladp:split=influence", "--measure")
    refused(ask(asked, "auto", *words, "plain.json"), "allocate.measure-without-influence")
    succeeded(ask(asked, "auto", *words, "asked.json"))


def test_bounds_over_copies_with_weights_drawn_anew(asked: Project) -> None:
    found = {}
    for name, words in {"0": (), "1": ("--reinitialise", "3"), "2": ("--reinitialise", "3")}.items():
        succeeded(ask(asked, "auto", *GAUSSIAN, *words, "--save-measure", f"{name}.json"))
        found[name] = Measure.load(f"{name}.json")
    assert found["1"] == found["2"]
    assert found["1"].worst != found["0"].worst
    assert found["1"].norms == found["0"].norms  # measured at the weights that will be trained


def test_what_cannot_draw_its_weights_anew_is_refused(asked: Project) -> None:
    own = "class Own(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    own += "        self.w = nn.Parameter(torch.eye(6))\n    def forward(self, x):\n        return x @ self.w\n"
    asked.write(f"{asked.module}.py", MODULE + own)
    refused(ask(asked, "Own", *GAUSSIAN, "--reinitialise", "3"), "sensitivity.cannot-reinitialise")


def test_gamma_is_in_the_printed_bound_alone(asked: Project) -> None:
    asked.write(f"{asked.module}.py", MODULE.replace("nn.Tanh()", "nn.LayerNorm(4), nn.Tanh()"))
    found = []
    for gamma in ("all", "none"):
        succeeded(ask(asked, "auto", *GAUSSIAN, "--gamma", gamma, "--save-measure", "m.json"))
        found.append(Measure.load("m.json"))
    assert found[0].printed != found[1].printed
    assert found[0].tight == found[1].tight


def test_local_constants_over_the_inputs_or_over_a_gaussian_fit(asked: Project) -> None:
    """Both are offered, the measure says which was taken, and only Δ tight depends on it."""
    found = {}
    for slopes in ("empirical", "gaussian"):
        succeeded(ask(asked, "auto", *GAUSSIAN, "--slopes", slopes, "--save-measure", "m.json"))
        found[slopes] = Measure.load("m.json")
    seen, fitted = found["empirical"], found["gaussian"]
    assert seen.tight != fitted.tight and seen.tight == pytest.approx(fitted.tight, rel=0.05)
    assert (seen.printed, seen.worst) == (fitted.printed, fitted.worst)
    assert any("inputs that were seen" in note for note in seen.notes)
    assert any("Gaussian fits" in note for note in fitted.notes)


def test_a_measure_of_another_model_is_refused(asked: Project) -> None:
    row = (1.0, 1.0, 1.0)
    Measure(
        proxy="gaussian", layers=("0", "2", "4"), tight=row, worst=row, printed=row, harm=row, norms=row, fisher=row
    ).save(asked.folder / "m.json")
    refused(ask(asked, "auto", "--measure", "m.json"), "sensitivity.measure-of-other-layers")


@pytest.mark.parametrize("name", by_name.BUILT_IN_MODELS)
def test_built_in_models_know_their_input(name: str) -> None:
    shape = parse_shape(None, name)
    with torch.no_grad():
        output = by_name.make_model(name).eval()(torch.zeros(1, *shape))
    assert (output[0] if isinstance(output, tuple) else output).shape == (1, *shape)
    assert parse_shape("3,4", name) == parse_shape("3x4", name) == (3, 4)


def test_a_model_of_several_outputs_is_measured_by_a_loss_of_its_own(asked: Project) -> None:
    vae = "from lamina.signals import VAE\ndef wave():\n    return VAE(1, 8, depth=4, latent=2, width=8)\n"
    asked.write(f"{asked.module}.py", MODULE + vae)
    words = ("--allocate", "lsab", "--proxy", "gaussian", "--input", "1,8", "--passes", "20")
    refused(ask(asked, "wave", *words), "cli.output-not-tensor")
    code, out, err = ask(asked, "wave", *words, "--loss", "lamina.signals:SignalLoss")
    assert code in (0, None), err
    assert "log_variance" in out


def test_a_paper_run_is_measured_by_the_loss_that_it_names_into_the_file_that_it_names(asked: Project) -> None:
    """RUN.toml names measure.json, which the command is about to write; its loss, arguments and channels count."""
    model = (
        '{ factory = "res-ae", args = { channels = 1, samples = 32, depth = 4, latent = 2, width = 8, classes = 3 } }'
    )
    text = run_file("paper-ptbxl")
    table = re.sub(r"(?m)^model = .*$", f"model = {model}", text).replace("epochs = 100", "epochs = 1")
    asked.write("RUN.toml", table.replace("batch = 256", "batch = 12"))
    asked.monkeypatch.chdir(asked.folder)
    lamina = partial(asked.call, "plan", "RUN.toml")
    refused(lamina(), "cli.file-missing")
    words = ("--proxy", "gaussian", "--passes", "10")
    out = succeeded(lamina(*words, "--save-measure", "measure.json", "--json"))
    assert json.loads(out)["proxy"] == "simulated: Gaussian inputs, labels at random"
    assert Measure.load(asked.folder / "measure.json").has_bounds
    succeeded(lamina())  # now the run has what it names
    succeeded(lamina(*words, "--loss", "lamina.signals:SignalLoss"))
    refused(lamina(*words, "--loss", "mse"), "cli.output-not-tensor")


def test_a_loss_that_fails_on_the_proxy_is_refused_with_its_line(asked: Project) -> None:
    asked.write(f"{asked.module}.py", MODULE + "def bad(output, y):\n    return output @ torch.zeros(99)\n")
    words = ("--proxy", f"simulated:{asked.module}:labelled", "--loss", f"{asked.module}:bad")
    assert "bad" in refused(ask(asked, "classes", *words), "train.user-code-failed")


def test_labels_fit_the_loss() -> None:
    generator, x = torch.Generator().manual_seed(0), torch.zeros(50, 4)
    loss = by_name.make_loss
    numbers = random_labels(loss("cross_entropy", {}), torch.zeros(2, 3, 7), x, generator)
    assert (numbers.shape, set(numbers.flatten().tolist())) == ((50, 7), {0, 1, 2})
    assert set(random_labels(loss("bce", {}), torch.zeros(2, 5), x, generator).flatten().tolist()) == {0.0, 1.0}
    assert random_labels(loss("mse", {}), torch.zeros(2, 4), x, generator) is x  # an autoencoder
    assert random_labels(loss("huber", {}), torch.zeros(2, 3), x, generator).shape == (50, 3)
    with raises_code("cli.loss-needs-class-scores"):
        random_labels(loss("cross_entropy", {}), torch.zeros(2), x, generator)
