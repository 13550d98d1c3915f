"""Measure: kept exactly, refused when it makes no sense; measure(): everything at once, without a trace."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from refusals import raises_code
from torch import Tensor, nn

from lamina.allocate.basic import LSAB
from lamina.allocate.make_plan import make_plan
from lamina.allocate.measure.bounds import bounds
from lamina.allocate.measure.example_gradients import fisher
from lamina.allocate.measure.measure import Measure, measure, noise_cost
from lamina.allocate.measure.profile import profile
from lamina.allocate.measure.trace import trace
from lamina.errors import PlanError
from lamina.plan.layer_stack import LayerStack
from lamina.plan.policy import Policy
from lamina.signals.autoencoders import ResidualAutoencoder, TransformerAutoencoder

ROWS = ("tight", "worst", "printed", "harm", "norms", "fisher")
POSITIVE = st.floats(min_value=5e-324, allow_infinity=False, allow_nan=False)


def made(**given: Any) -> Measure:
    row = (0.1, 1.0 / 3.0)
    return Measure(**{"proxy": "gaussian", "layers": ("a", "b"), **dict.fromkeys(ROWS, row), **given})


@given(rows=st.lists(st.tuples(POSITIVE, POSITIVE), min_size=6, max_size=6), proxy=st.text(min_size=1))
def test_json_gives_back_the_same_value(rows: list[tuple[float, float]], proxy: str) -> None:
    proxy = proxy.encode("utf-8", "ignore").decode() or "x"
    value = made(proxy=proxy, **dict(zip(ROWS, rows, strict=True)))
    assert Measure.from_json(value.to_json()) == value
    value = dataclasses.replace(value, worst=(1.0, math.inf))  # the one that may overflow
    assert Measure.from_json(value.to_json()) == value


def test_a_file_gives_back_the_same_value(tmp_path: Path) -> None:
    value = made(notes=("β raised",))
    value.save(tmp_path / "m.json")
    assert Measure.load(tmp_path / "m.json") == value
    with raises_code("sensitivity.measure-unreadable"):
        Measure.load(tmp_path / "none.json")


@pytest.mark.parametrize("what", ROWS)
@pytest.mark.parametrize(
    "value",
    [
        0.0,
        -1.0,
        math.nan,
        math.inf,
        pytest.param(10**400, id="large"),
        pytest.param(10**5000, id="huge"),
        "1",
        None,
        True,
    ],
)
def test_what_is_not_a_positive_number_is_refused_with_its_layer(what: str, value: Any) -> None:
    if what == "worst" and value == math.inf:
        return
    with raises_code("sensitivity.value-not-positive"):
        made(**{what: (1.0, value)})


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"norms": (1.0,)}, "sensitivity.measure-length"),
        ({"norms": 1.0}, "sensitivity.measure-length"),
        ({"layers": ()}, "sensitivity.layer-names"),
        ({"layers": ("a", "a")}, "sensitivity.layer-names"),
        ({"proxy": ""}, "sensitivity.proxy-missing"),
        ({"notes": "text"}, "sensitivity.measure-text"),
        ({"notes": 5}, "sensitivity.measure-text"),
        ({"notes": {"a": 1}}, "sensitivity.measure-text"),
        ({"layers": 5}, "sensitivity.measure-text"),
        ({"layers": {"a": 1, "b": 2}}, "sensitivity.measure-text"),
        ({"proxy": 5}, "sensitivity.proxy-missing"),
    ],
)
def test_bad_shapes_are_refused(given: dict[str, Any], named: str) -> None:
    with raises_code(named):
        made(**given)


@pytest.mark.parametrize(
    "damage",
    [
        lambda t: t.replace("0.1,", "NaN,", 1),
        lambda t: t.replace("0.1,", "Infinity,", 1),
        lambda t: t.replace("0.1,", "1e999,", 1),
        lambda t: t.replace("0.1,", "-0.1,", 1),
        lambda t: t.replace("0.1,", "1" + 400 * "0" + ",", 1),
        lambda t: t.replace("0.1,", "1" + 5000 * "0" + ",", 1),
        lambda t: json.dumps({**json.loads(t), "worst": [10**400, 1.0]}),
        lambda t: json.dumps({**json.loads(t), "notes": 5}),
        lambda t: json.dumps({**json.loads(t), "layers": 5}),
        lambda t: json.dumps({**json.loads(t), "layers": {"a": 1, "b": 1}}),
        lambda t: json.dumps({**json.loads(t), "worst": 5}),
        lambda t: t.replace('"harm"', '"harms"'),
        lambda t: t.replace('"notes"', '"tight"'),
        lambda t: t.replace('"version": 1', '"version": 2'),
        lambda t: t.replace('"proxy"', '"extra": 1, "proxy"'),
        lambda t: t[:-3],
        lambda t: "[]",
        lambda t: json.dumps({k: v for k, v in json.loads(t).items() if k != "fisher"}),
    ],
)
def test_a_damaged_file_is_refused(damage: Any) -> None:
    text = made().to_json()
    assert damage(text) != text
    with pytest.raises(PlanError, match="Remedy"):
        Measure.from_json(damage(text))


def test_another_stack_is_refused() -> None:
    stack = LayerStack.from_model(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    made(layers=("0", "1")).check(stack)
    made().check(("a", "b"))
    with raises_code("sensitivity.measure-of-other-layers"):
        made().check(stack)
    with raises_code("sensitivity.measure-of-other-layers"):
        made().check(("a",))


def test_the_report() -> None:
    value = made(notes=("harm of 'a' was raised",))
    assert "note: harm of 'a' was raised" in value.report()
    assert len(value.report().splitlines()) == 2 + 2 + 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        value.proxy = "x"  # type: ignore[misc]


# --------------------------------------------------------------------------------------------------------- measure()

QUICK: dict[str, Any] = {"passes": 50, "examples": 12, "draws": 2}


def classifier() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3))


def test_it_joins_the_parts_and_leaves_no_trace(no_trace: Any) -> None:
    model = classifier()
    stack = LayerStack.from_model(model)
    x, y = torch.randn(40, 6), torch.randint(0, 3, (40,))

    def losses_of(x: Any, y: Any) -> Tensor:
        return F.cross_entropy(model(x), y, reduction="none")

    options: dict[str, Any] = {"x": x, "y": y, "losses_of": losses_of, "proxy": "simulated: noise", "radius": 3.0}
    with no_trace(model):
        found = measure(model, stack, seed=5, **options, **QUICK)
        again = measure(model, stack, seed=5, **options, **QUICK)
    assert found == again
    found.check(stack)
    assert found.proxy == "simulated: noise"
    seen = profile(model, inputs=x, proxy="simulated", passes=50, radius=3.0, seed=5)
    deltas = bounds(trace(model, x), seen, stack)
    assert (found.tight, found.worst, found.printed) == (deltas.tight, deltas.worst, deltas.printed)
    assert found.harm == noise_cost(model, losses_of, x[:12], y[:12], stack, draws=2, seed=5).values
    norms = fisher(model, losses_of, x[:12], y[:12], stack)
    assert (found.norms, found.fisher) == (norms.norms, norms.information)


def test_made_up_inputs_need_only_an_example(no_trace: Any) -> None:
    model = ResidualAutoencoder(3, (8,))
    stack, example = LayerStack.from_model(model), torch.zeros(1, 3, 16)
    with no_trace(model):
        found = measure(model, stack, example=example, radius=100.0, **QUICK)
        small = measure(model, stack, example=example, radius=0.1, **QUICK)
    assert found.proxy == "gaussian"
    assert Measure.from_json(found.to_json()) == found
    # the radius concerns Δ alone, and is told where it clips
    assert found.norms == small.norms
    assert found.tight != small.tight
    assert not any("clips most" in note for note in found.notes)
    assert any("radius 0.1 clips most proxy inputs" in note for note in small.notes)


def test_attention(no_trace: Any) -> None:
    model = TransformerAutoencoder(4, 6, width=8, layers=2, heads=2, hidden=8, code=4)
    stack = LayerStack.from_model(model)
    with no_trace(model):
        measure(model, stack, example=torch.zeros(1, 6, 4), **QUICK).check(stack)


def test_floored_harm_and_unreached_layers_are_told() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + F.relu(self.b(x) - 0.5)

    model = Two()
    found = measure(model, LayerStack.from_model(model), example=torch.zeros(1, 2), radius=10.0, **QUICK)
    assert any("of the proxy examples reach layer 'b'" in note for note in found.notes)

    class Ridge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.a(x)
            return out

    ridge = Ridge()
    # a loss that bends downwards in the weights
    told = measure(
        ridge, LayerStack.from_model(ridge), example=torch.zeros(1, 2), radius=10.0,
        losses_of=lambda x, y: -ridge(x).square().sum(1), **QUICK,
    )  # fmt: skip
    assert told.harm == (6.0,)  # d: nothing better is known
    assert any(
        note.startswith("the noise cost was raised in 1 of 1 layers") and note.endswith("a") for note in told.notes
    )


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "sensitivity.no-example"),
        ({"example": torch.zeros(1, 6), "y": torch.zeros(1)}, "sensitivity.no-example"),
        ({"x": torch.zeros(4, 6)}, "sensitivity.proxy-not-named"),
        ({"example": torch.zeros(1, 6), "proxy": "public"}, "sensitivity.proxy-not-named"),
        ({"example": torch.zeros(1, 6), "examples": 1}, "sensitivity.examples-too-few"),
        ({"example": torch.zeros(1, 6)}, "sensitivity.not-an-autoencoder"),  # no autoencoder
        ({"example": torch.zeros(1, 6), "losses_of": lambda x, y: x.sum()}, "sensitivity.losses-shape"),
        (
            {"x": torch.full((4, 6), math.nan), "proxy": "public", "losses_of": lambda x, y: x.sum(1)},
            "sensitivity.losses-not-finite",
        ),
        ({"example": torch.zeros(1, 6), "losses_of": lambda x, y: x.sum(1)}, "sensitivity.no-gradient"),
    ],
)
def test_misuse_is_refused(options: dict[str, Any], named: str) -> None:
    model = classifier()
    with raises_code(named):
        measure(model, LayerStack.from_model(model), **{**QUICK, **options})


@pytest.mark.slow
def test_a_residual_autoencoder_within_a_minute() -> None:
    model = ResidualAutoencoder()  # 12 residual and resampling blocks, 31 layers
    stack = LayerStack.from_model(model)
    start = time.process_time()  # one thread; not the wall clock of a busy machine
    found = measure(model, stack, example=torch.zeros(1, 12, 256), radius=55.0)
    assert time.process_time() - start < 60
    found.check(stack)


def test_a_model_that_cannot_be_followed_is_measured_without_delta() -> None:
    """A head that begins at zero stops every change of the input; norms, harm and Fisher information are there."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    nn.init.zeros_(model[2].weight)
    model[0].requires_grad_(False)  # behind the zeros nothing would arrive
    stack = LayerStack.from_model(model)
    found = measure(model, stack, x=torch.randn(32, 6), proxy="simulated", passes=32, draws=4)
    assert not found.has_bounds and found.tight == found.worst == found.printed == ()
    assert any(note.startswith("no Δ, which lsab needs: layer '2' has Δ tight 0") for note in found.notes)
    assert len(found.norms) == len(found.harm) == 1 and Measure.from_json(found.to_json()) == found
    assert found.report().splitlines()[1].split() == ["layer", "harm", "norms", "fisher"]
    policy = Policy.parse('[corpus]\norigin = "x"\ndelta = 1e-5\n[class.a]\npopulation = 1000\nepsilon = 1.0\n')
    with raises_code("allocate.measure-without-delta"):
        make_plan(stack, policy, batch=50, steps=10, allocate="lsab", measure=found)
    assert make_plan(stack, policy, batch=50, steps=10, measure=found).epsilon("a") <= 1.0


def test_some_delta_without_the_others_is_refused() -> None:
    row = {"proxy": "public", "layers": ("a",), "harm": (1.0,), "norms": (1.0,), "fisher": (1.0,)}
    with raises_code("sensitivity.delta-incomplete"):
        Measure(**row, tight=(1.0,), worst=(), printed=(1.0,))  # type: ignore[arg-type]


class Branching(nn.Module):
    """Which way it goes depends on a value, so that torch.export cannot say."""

    def __init__(self, tokens: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4) if tokens else None
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x if self.table is None else self.table(x))
        if h.detach().sum().item() > 1e9:
            h = 2 * h
        out: Tensor = self.b(torch.tanh(h))
        return out


def test_made_up_inputs_for_a_model_that_cannot_be_traced(no_trace: Any) -> None:
    torch.manual_seed(0)
    model = Branching().double()
    stack, example = LayerStack.from_model(model), torch.zeros(1, 4, dtype=torch.float64)
    with no_trace(model):
        found = measure(model, stack, example=example, **QUICK)
        assert found == measure(model, stack, example=example, **QUICK)
        assert found != measure(model, stack, example=example, seed=1, **QUICK)
    assert not found.has_bounds
    assert any("no Δ" in note and "cannot be traced" in note for note in found.notes)
    assert len(found.harm) == len(found.norms) == 2
    # the data are standard normal: the same as with such data given
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(1)).double()
    assert found.norms == measure(model, stack, x=x, proxy="simulated", **QUICK).norms


def test_token_ids_for_a_model_that_cannot_be_traced_are_refused() -> None:
    model = Branching(tokens=True)
    with raises_code("sensitivity.model-not-traceable"):
        measure(
            model, LayerStack.from_model(model), example=torch.zeros(1, 3, dtype=torch.long),
            losses_of=lambda x, y: model(x).square().flatten(1).sum(1), **QUICK,
        )  # fmt: skip


@pytest.mark.parametrize("worst", [(math.inf, math.inf), (math.inf, 1.0), (1e300, 1e-300), (1.0, 5e-324)])
def test_a_spread_that_overflows_is_refused_without_a_warning(worst: tuple[float, float]) -> None:
    stack = LayerStack.from_model(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    policy = Policy.parse('[corpus]\norigin = "x"\ndelta = 1e-5\n[class.a]\npopulation = 1000\nepsilon = 1.0\n')
    known = made(layers=("0", "1"), worst=worst)
    with raises_code("allocate.delta-spread"):
        make_plan(stack, policy, batch=50, steps=10, allocate=LSAB(bound="worst"), measure=known)


def norm_net() -> nn.Sequential:
    """The first layer widens the spread, so that the norm after it compresses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 5))
    with torch.no_grad():
        model[0].weight.mul_(8.0)
    return model


def test_influence_is_measured_where_it_is_asked_for() -> None:
    model, example = norm_net(), torch.zeros(1, 5)
    stack = LayerStack.from_model(model)
    plain = measure(model, stack, example=example, passes=50, draws=2)
    asked = measure(model, stack, example=example, passes=50, draws=2, influences=True)
    assert plain.influence == ()
    assert len(asked.influence) == len(stack)
    assert all(value > 0 for value in asked.influence)
    assert dataclasses.replace(asked, influence=()) == plain
    assert Measure.from_json(asked.to_json()) == asked
    old = json.loads(plain.to_json())
    del old["influence"]  # as files of before have it
    assert Measure.from_json(json.dumps(old)) == plain


def test_gamma_of_equation_12_where_it_is_wanted() -> None:
    """Leaving γ out, at norm layers or elsewhere, can only raise Δ as printed; nothing else changes."""
    model, example = norm_net(), torch.zeros(1, 5)
    stack = LayerStack.from_model(model)
    found = {
        g: measure(model, stack, example=example, passes=50, draws=2, gamma=g)
        for g in ("all", "norm", "elsewhere", "none")
    }
    last = {g: made.printed[-1] for g, made in found.items()}
    assert last["all"] < min(last["norm"], last["elsewhere"])
    assert max(last["norm"], last["elsewhere"]) <= last["none"]
    assert last["all"] * last["none"] == pytest.approx(last["norm"] * last["elsewhere"])  # two ablations, independent
    assert len({(made.tight, made.worst, made.harm) for made in found.values()}) == 1
    with raises_code("sensitivity.gamma-unknown"):
        measure(model, stack, example=example, gamma="some")


def test_delta_over_weights_that_are_drawn_anew() -> None:
    model, example = norm_net(), torch.zeros(1, 5)
    stack, before = LayerStack.from_model(model), [p.clone() for p in model.parameters()]
    plain = measure(model, stack, example=example, passes=50, draws=2)
    found = measure(model, stack, example=example, passes=50, draws=2, reinitialise=3)
    assert found == measure(model, stack, example=example, passes=50, draws=2, reinitialise=3)
    assert found.tight != plain.tight
    assert (found.harm, found.fisher) == (plain.harm, plain.fisher)  # at the present weights
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(5))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.gain

    own = nn.Sequential(nn.Linear(5, 5), Own())
    with raises_code("sensitivity.cannot-reinitialise"):
        measure(own, LayerStack.from_model(own), example=example, passes=50, reinitialise=2)
