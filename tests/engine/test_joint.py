"""Joint clipping: one bound for all layers, kept by book-keeping; and the bound of both forms, exactly."""

from __future__ import annotations

from math import sqrt

import pytest
import torch
from oracle import FORMS, clip_by_hand, example_grads, losses_of, plan_of
from torch import Tensor, nn

from lamina import Batch, Engine
from lamina.engine.execute import collectors
from lamina.engine.execute.sums import SumMemory
from lamina.plan.step_plan import StepPlan


def models() -> dict[str, tuple[nn.Module, Tensor]]:
    return {
        "rows": (nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)), torch.randn(1, 5)),
        "sequences": (nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 3)), torch.randn(1, 4, 5)),
        "images": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Conv2d(4, 2, 1)), torch.randn(1, 3, 6, 6)),
        "tokens": (nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 3)), torch.randint(0, 9, (1, 6))),
        "wide": (nn.Sequential(nn.Linear(700, 700), nn.Tanh(), nn.Linear(700, 3)), torch.randn(1, 3, 700)),
    }


def sensitivity(sums: dict[str, Tensor], plan: StepPlan) -> tuple[float, list[float]]:
    """‖(g_l/S_l)_l‖ and the norms of the layers, in float64."""
    norms = [
        sqrt(
            sum(float(sums[name].double().square().sum()) for name in layer.parameters)
            if layer.parameters[0] in sums
            else 0
        )
        for layer in plan.layers
    ]
    return sqrt(sum((n / s) ** 2 for n, s in zip(norms, plan.noise, strict=True) if s)), norms


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", list(models()))
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6, 1e15])
def test_one_contribution_never_exceeds_its_bound(kind: str, form: str, scale: float) -> None:
    """The removal of one contribution moves the sums by at most 1/sigma, and a large one reaches 0.999 of it."""
    model, x = models()[kind]
    layers = len(list(plan_of(model).layers))
    plan = plan_of(model, [0.3 * (i + 1) for i in range(layers)], [0.5 + 0.7 * i for i in range(layers)], clipping=form)
    with Engine(model, plan) as engine:
        sums = engine.clipped_sums(losses_of(model, x, None) * scale, Batch(x))
    size, norms = sensitivity(sums, plan)
    assert size <= 1 / plan.sigma(0)
    if form == "box":
        assert all(n <= c for n, c in zip(norms, plan.clip[0], strict=True))
    if scale >= 1e6:
        assert size >= 0.999 / plan.sigma(0)


def test_joint_keeps_the_direction_and_box_does_not() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    x = torch.randn(1, 5)
    norms = {}
    for form in FORMS:
        plan = plan_of(model, [0.1, 0.1], [1.0, 1.0], clipping=form)
        with Engine(model, plan) as engine:
            big = engine.clipped_sums(losses_of(model, x, None) * 1e4, Batch(x))
            direction = engine.gradient_of(losses_of(model, x, None), Batch(x), 0)
        norms[form] = sensitivity(big, plan)[1]
        ratio = [float(big[n].norm() / direction[n].norm()) for n in ("0.weight", "2.weight")]
        if form == "joint":
            assert ratio[0] == pytest.approx(ratio[1], rel=1e-4)
    assert norms["box"] == pytest.approx([0.1, 0.1], rel=1e-4)
    assert norms["joint"][0] != pytest.approx(0.1, rel=1e-2)


def test_joint_never_clips_more_than_the_box_inside_it() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    x = torch.randn(8, 5)
    for unit in range(8):
        size = {}
        for form in FORMS:
            plan = plan_of(model, [0.05, 0.1], [0.4, 1.0], clipping=form)
            with Engine(model, plan) as engine:
                one = x[unit : unit + 1]
                size[form] = sensitivity(engine.clipped_sums(losses_of(model, one, None), Batch(one)), plan)[0]
        assert size["joint"] >= size["box"] * (1 - 1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_adding_a_contribution_moves_the_sum_by_its_own_share_only(form: str) -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))
    x = torch.randn(6, 4, 5)
    x[3] *= 1e4
    plan = plan_of(model, 0.1, clipping=form)
    with Engine(model, plan) as engine:
        whole = engine.clipped_sums(losses_of(model, x, None), Batch(x))
        for unit in range(6):
            rest = torch.arange(6) != unit
            less = engine.clipped_sums(losses_of(model, x[rest], None), Batch(x[rest]))
            moved = {name: whole[name] - less[name] for name in whole}
            assert sensitivity(moved, plan)[0] <= (1 + 1e-5) / plan.sigma(0)


def test_a_joint_event_is_not_priced_as_independent_layers() -> None:
    """Six layers under one draw: pricing each as an event of its own, with its own amplification, reads low."""
    from lamina.account.accountants import find_accountant
    from lamina.account.schedule import Event

    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(6)))
    plan = plan_of(model, 1.0, 2.0, rate=0.01, steps=2000)
    assert plan.sigma(0) == pytest.approx(2 / sqrt(6))
    (event,) = plan.schedule(0)
    assert (event.q, event.steps) == (0.01, 2000)
    layerwise = find_accountant("pld").epsilon((Event(sigma=2.0, q=0.01, steps=6 * 2000),), 1e-5)
    assert plan.epsilon(0) > 1.1 * layerwise


def test_the_price_so_far_rises_to_the_plans() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    plan = plan_of(model, 1.0, 1.0, steps=3)
    with Engine(model, plan) as engine:
        seen = [engine.epsilon("c0")]
        for _ in range(3):
            engine.backward(losses_of(model, x, None), Batch(x))
            seen.append(engine.epsilon(0))
    assert seen[0] == 0
    assert seen == sorted(seen)
    assert seen[-1] == pytest.approx(plan.epsilon(0), rel=1e-6)
    assert all(e > 0 for e in seen[1:])


class Attention(nn.Module):
    """Three layers of one input, and one of another."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x * 1.0)
        return self.out(torch.softmax(self.q(x) @ self.k(x).transpose(1, 2), 2) @ self.v(x))


@pytest.mark.parametrize("form", FORMS)
def test_layers_that_share_their_input(form: str) -> None:
    """A leading layer gives the shared input a place in the graph; sums are those of the oracle."""
    torch.manual_seed(2)
    model, x = nn.Sequential(nn.Linear(5, 6), Attention()), torch.randn(7, 12, 5)
    plan, batch = plan_of(model, 0.05, 0.5, clipping=form), Batch(x)
    with Engine(model, plan) as engine:
        sums = engine.clipped_sums(losses_of(model, x, None), batch)
    expected = clip_by_hand(example_grads(model, x), [0] * 7, plan)
    for name, total in expected.sums.items():
        assert float((sums[name].double() - total).abs().max()) <= 1e-5 * expected.sizes[name] + 1e-7


@pytest.mark.parametrize("form", FORMS)
def test_how_sums_lie_in_memory_and_how_many_are_added_at_once_changes_nothing(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)), torch.randn(9, 5)
    x[4, 2] = torch.nan
    plan, made = plan_of(model, 0.05, 0.5, clipping=form), []

    def transposed(memory: SumMemory, name: str, p: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.zeros(p.t().shape).t()

    for change in (None, "one at a time", "transposed"):
        with monkeypatch.context() as patch, Engine(model, plan) as engine:
            if change == "one at a time":
                patch.setattr(collectors, "_MAX_TOGETHER_ELEMENTS", 0)
            if change == "transposed":
                patch.setattr(SumMemory, "zeros", transposed)
            made.append(engine.clipped_sums(losses_of(model, x, None), Batch(x)))
    first, second, third = made
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not t.is_contiguous() for t in third.values())
    for name, t in first.items():
        torch.testing.assert_close(third[name], t, rtol=1e-5, atol=1e-7)
