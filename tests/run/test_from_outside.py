"""Instances from outside the package: a rule of a layer, and an adaptive rule, from plan to certificate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import problem
import pytest
import torch
from oracle import clip_by_hand, example_grads, plan_of
from refusals import raises_code
from stopping import killed, same, weights
from torch import Tensor, nn

from lamina import Batch, Engine, StepPlan
from lamina.engine import layers
from lamina.engine.batch import RowLayout
from lamina.engine.execute.grads import DenseGrads
from lamina.engine.layers import declare_layer
from lamina.engine.layers.layer_rule import LayerForward, LayerRule
from lamina.ledger.reader import LedgerReader
from lamina.ledger.verify.verifier import verify
from lamina.plan import rules
from lamina.plan.rules import FreeRule, declare_rule
from lamina.release.certificate import certify

pytestmark = pytest.mark.usefixtures("known_seeds")


class Gate(nn.Module):
    """y = x · (1 + w)², by feature."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + self.gate) ** 2


class GateRule(LayerRule):
    """One contribution: dw = Σ 2 (1 + w) g·x over its positions."""

    def run(self, x: Tensor, params: Sequence[Tensor | None]) -> tuple[Tensor, Sequence[Tensor]]:
        (gate,) = params
        assert gate is not None
        return x * (1 + gate) ** 2, (x * (2 * (1 + gate)),)

    def input_grad(self, saved: Sequence[Tensor], params: Sequence[Tensor | None], g: Tensor) -> Tensor:
        (gate,) = params
        assert gate is not None
        return g * (1 + gate) ** 2

    def contribution_grads(
        self, saved: Sequence[Tensor], g: Tensor, layout: RowLayout, need: Sequence[bool]
    ) -> list[Any]:
        return [DenseGrads(layout.sum_rows((g * saved[0]).flatten(1, -2).sum(1) if g.dim() > 2 else g * saved[0]))]


class GateForward(LayerForward):
    parameters = ("gate",)

    def __init__(self, module: Gate) -> None:
        self.made_for = module

    def forward(self, apply: Any, x: Tensor) -> Tensor:
        return apply(GateRule(), x, "gate")  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeTurns(FreeRule):
    """One layer after another gets most of the budget; the larger its released sum was, the more of it."""

    every: int = 2
    most: float = 0.5

    def next(
        self, seen: Sequence[float], squares: Sequence[float], noise: Sequence[float], sizes: Sequence[int]
    ) -> tuple[Sequence[float], Sequence[float]]:
        turn = int(seen[0]) if seen else 0
        heights = [1 + square / (square + size * s * s) for square, s, size in zip(squares, noise, sizes, strict=True)]
        heights[turn % len(heights)] *= 1 / self.most
        return [h / sum(heights) for h in heights], [turn + 1, sum(squares)]


@dataclass(frozen=True, kw_only=True)
class Nameless(FreeRule):
    every: int = 1


@pytest.fixture(scope="module", autouse=True)
def _declared() -> Iterator[None]:
    """Known until every ledger of these tests was verified."""
    declare_layer(Gate, GateForward)
    declare_rule("take turns", TakeTurns)
    yield
    del layers._declared[Gate], rules.RULE_KINDS["take turns"]


def certified(folder: Path) -> dict[str, Any]:
    """What the certificate of a run says, once its ledger was verified."""
    place = next(folder.parent.glob("*.ledger.db"))
    assert verify(place).problem is None
    with LedgerReader.read_only(place) as ledger:
        found: dict[str, Any] = certify(folder, ledger).content
    return found


def gated() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 12), Gate(12), nn.Tanh(), nn.Linear(12, 3))


def test_a_rule_of_a_layer_from_outside_runs_from_plan_to_certificate(tmp_path: Path) -> None:
    model = gated()
    plan, x = plan_of(model, [[0.05] * 3, [0.02] * 3], 0.5), torch.randn(9, 6)
    classes = torch.arange(9) % 2
    with Engine(model, plan) as engine:
        assert engine._attachment.run_per_contribution == []
        losses = model(x).square().mean(1)
        sums = engine.clipped_sums(losses, Batch(x, cls=classes))
    expected = clip_by_hand(
        example_grads(model, x, None, lambda m, xi, _: m(xi).square().mean(1)), classes.tolist(), plan
    )
    for name, total in expected.sums.items():
        assert float((sums[name].double() - total).abs().max()) <= 1e-5 * expected.sizes[name] + 1e-6
    with raises_code("engine.layer-not-declared"):
        declare_layer(Gate, GateForward)

    def trainer(place: str) -> Any:
        torch.manual_seed(1)
        made = gated()
        return problem.trainer(tmp_path / place / "a", model=made, plan=problem.plan(made), corpus=problem.singles())

    first = trainer("first")
    outcome = first.fit()
    found = certified(tmp_path / "first" / "a")
    assert len(found["layers"]) == 3 and "1.gate" in {name for layer in first.plan.layers for name in layer.parameters}
    assert found["classes"]["clinical"]["epsilon"] == pytest.approx(outcome.epsilon["clinical"], rel=1e-6)


def test_an_adaptive_rule_from_outside_runs_from_plan_to_certificate(tmp_path: Path) -> None:
    model = problem.net()
    with raises_code("plan.rule-unknown"):
        replace(problem.plan(model), rules=(Nameless(),)).digest()
    with raises_code("plan.rule-not-declared"):
        declare_rule("take turns", TakeTurns)
    plan = replace(problem.plan(model), rules=(TakeTurns(),))
    assert StepPlan.from_cbor(plan.to_cbor()) == plan
    with raises_code("plan.shares-follow-two-rules"):
        replace(plan, rules=(TakeTurns(), rules.FollowEnergy()))

    whole = problem.trainer(tmp_path / "whole" / "a", plan=plan)
    outcome = whole.fit()
    moved = whole._engine.rules.adaptation
    assert moved is not None and moved.applied.noise != plan.noise and moved._free_seen[0] == 12
    assert all(moved.applied.sigma(k) >= plan.sigma(k) for k in range(len(plan.classes)))
    killed(tmp_path / "cut" / "a", 13, plan=plan)
    resumed = problem.trainer(tmp_path / "cut" / "a", seed=9, plan=plan)
    again = resumed.fit()
    assert same(weights(whole), weights(resumed)) and again.epsilon == outcome.epsilon
    found = certified(tmp_path / "cut" / "a")
    assert found["classes"]["clinical"]["epsilon"] == pytest.approx(plan.epsilon("clinical"), rel=1e-6)


@pytest.mark.parametrize("shares", [[0.5], [0.7, 0.7], [1.5, -0.5], [float("nan"), 1.0]])
def test_shares_that_are_none_move_nothing(shares: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TakeTurns, "next", lambda *_: (shares, [1.0]))
    model = problem.net()
    plan = replace(problem.plan(model), rules=(TakeTurns(every=1),))
    with Engine(model, plan) as engine:
        adaptation = engine.rules.adaptation
        assert adaptation is not None
        adaptation.update([1.0, 2.0], None)  # type: ignore[arg-type]
        assert engine.applied == plan and adaptation.to_state()["free"] == {"seen": [], "shares": []}
