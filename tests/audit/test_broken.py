"""The audit can fail: steps that are broken on purpose, each in one way that happens, are flagged."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from nets import Net
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import lamina
from lamina.audit.paired_step import paired_step
from lamina.audit.step_audit import Check, audit_step, noise_levels
from lamina.audit.target import AuditTarget
from lamina.engine.batch import Batch
from lamina.engine.engine import Engine
from lamina.engine.noise import NoiseSource
from lamina.engine.step import route
from lamina.plan.step_plan import StepPlan

Plans = Callable[..., StepPlan]


class Model(nn.Module):
    """Linear layers, one of them used twice, optionally with batch statistics between them."""

    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        self.into, self.again, self.out = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 2)
        self.norm = nn.BatchNorm1d(5, affine=False, track_running_stats=False) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(torch.tanh(self.into(x)))
        return self.out(torch.tanh(self.again(torch.tanh(self.again(h)))))


class Reference:
    """A sound step from per-example gradients, by `vmap` and `route`, with one thing left to break."""

    def __init__(self, model: nn.Module, plan: StepPlan, noise: NoiseSource) -> None:
        self.model, self.plan, self.noise = model, plan, noise

    def per_example(self, batch: Batch) -> dict[str, Tensor]:
        params = {n: p.detach() for n, p in self.model.named_parameters()}

        def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return loss_of(functional_call(self.model, values, (x.unsqueeze(0),)), y.unsqueeze(0))[0]

        grads = vmap(grad(loss), in_dims=(None, 0, 0))(params, batch.x, batch.y)
        here = cast(Tensor, batch.weight) > 0
        return {n: torch.where(here.view(-1, *[1] * (g.dim() - 1)), g, 0.0) for n, g in grads.items()}

    def released(self, batch: Batch) -> dict[str, Tensor]:
        if not len(batch):
            empty = {n: p.detach().new_zeros(0, *p.shape) for n, p in self.model.named_parameters()}
            return route(empty, cast(Tensor, batch.cls), self.plan, noise=self.noise)
        return route(self.per_example(batch), cast(Tensor, batch.cls), self.plan, noise=self.noise)

    def backward(self, losses: Tensor | None, batch: Batch) -> None:
        grads = self.released(batch)
        for name, p in self.model.named_parameters():
            p.grad = grads[name].to(p.dtype)

    def detach(self) -> None:
        pass


class NoClipping(Reference):
    def __init__(self, model: nn.Module, plan: StepPlan, noise: NoiseSource) -> None:
        super().__init__(model, replace(plan, clip=tuple((1e19,) * len(plan.layers) for _ in plan.clip)), noise)


class SomeLayersUnclipped(Reference):
    def __init__(self, model: nn.Module, plan: StepPlan, noise: NoiseSource) -> None:
        super().__init__(model, replace(plan, clip=tuple((1e19, *row[1:]) for row in plan.clip)), noise)


class ClippedBySum(Reference):
    """The summed gradient is clipped, not each contribution's: fine for one, wrong beside others."""

    def per_example(self, batch: Batch) -> dict[str, Tensor]:
        return {n: g.sum(0, keepdim=True) for n, g in super().per_example(batch).items()}

    def released(self, batch: Batch) -> dict[str, Tensor]:
        if not len(batch):
            return super().released(batch)
        return route(self.per_example(batch), torch.zeros(1, dtype=torch.long), self.plan, noise=self.noise)


class NormByTensor(Reference):
    """Each tensor of a layer is clipped to C by itself: √2 too much for weight and bias together."""

    def per_example(self, batch: Batch) -> dict[str, Tensor]:
        bound = {n: c for layer, c in zip(self.plan.layers, self.plan.clip[0], strict=True) for n in layer.parameters}
        grads = super().per_example(batch)
        return {n: _shrunk(g, bound[n]) for n, g in grads.items()}

    def released(self, batch: Batch) -> dict[str, Tensor]:
        if not len(batch):
            return super().released(batch)
        wide = replace(self.plan, clip=tuple(tuple(2 * c for c in row) for row in self.plan.clip))
        return route(self.per_example(batch), cast(Tensor, batch.cls), wide, noise=self.noise)


class WrongNoise(Reference):
    factor: tuple[float, ...] = (1.0, 0.8, 1.0)

    def __init__(self, model: nn.Module, plan: StepPlan, noise: NoiseSource) -> None:
        scaled = tuple(s * f for s, f in zip(plan.noise, self.factor, strict=True))
        super().__init__(model, replace(plan, noise=scaled), noise)


class NoNoiseWhenEmpty(Reference):
    def released(self, batch: Batch) -> dict[str, Tensor]:
        if not len(batch):
            return {n: torch.zeros_like(p) for n, p in self.model.named_parameters()}
        return super().released(batch)


class TooMuchNoise(WrongNoise):
    factor = (1.0, 1.0, 1.3)


class MeanOverTheRealised(Reference):
    """Divided by how many were sampled, not by B."""

    def released(self, batch: Batch) -> dict[str, Tensor]:
        count = max(1.0, float((cast(Tensor, batch.weight) > 0).sum()))
        return {n: g * self.plan.batch / count for n, g in super().released(batch).items()}


class IgnoresBands(Reference):
    def released(self, batch: Batch) -> dict[str, Tensor]:
        if not len(batch):
            return super().released(batch)
        return route(self.per_example(batch), torch.zeros(len(batch), dtype=torch.long), self.plan, noise=self.noise)


class NaNSpreads(Reference):
    """0 · NaN is NaN."""

    def released(self, batch: Batch) -> dict[str, Tensor]:
        poison = sum(g.sum() * 0 for g in self.per_example(batch).values()) if len(batch) else 0.0
        return {n: g + poison for n, g in super().released(batch).items()}


class PlainBackward(Engine):
    """The engine with its own checks out of the way: coverage, graph walk, ownership."""

    def __init__(self, model: nn.Module, plan: StepPlan, noise: NoiseSource) -> None:
        modes = [(m, m.training) for m in model.modules()]
        hidden = [m for m in model.modules() if isinstance(m, nn.BatchNorm1d)]
        for m in hidden:
            m.__class__ = type("Statistics", (Standardise,), {})  # type: ignore[assignment]
        super().__init__(model, plan, noise=noise)
        self._ownership.due = lambda *_: False  # type: ignore[method-assign]
        for m, mode in modes:
            m.training = mode


class Standardise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt()


def _shrunk(g: Tensor, bound: float) -> Tensor:
    norm = g.flatten(1).norm(dim=1).clamp(min=1e-30)
    return g * (bound / norm).clamp(max=1.0).view(-1, *[1] * (g.dim() - 1))


def loss_of(out: Tensor, y: Tensor) -> Tensor:
    return torch.sin(out).sum(1) * y


def subject_of(
    make: Any, plans: Plans, clipping: str = "box", *, several: bool = False, norm: bool = False
) -> AuditTarget:
    model = Model(norm=norm)
    plan = plans(model, clipping, several=several)
    return AuditTarget(model=model, plan=plan, losses_of=lambda x, y: loss_of(model(x), y), make=make)


def batch_of(size: int = 4) -> Batch:
    return Batch(torch.randn(size, 4), torch.tensor([3.0] * size), cls=torch.zeros(size, dtype=torch.long))


def failed(checks: tuple[Check, ...]) -> set[str]:
    return {check.name for check in checks if not check.passed}


@pytest.mark.parametrize("clipping", ["box", "joint"])
@pytest.mark.parametrize("make", [None, Reference])
def test_sound_steps_pass(make: Any, clipping: str, plan_for: Plans) -> None:
    checks = audit_step(subject_of(make, plan_for, clipping, several=True), batch_of(), tries=1, quick=True)
    assert failed(checks) == set()
    for check in checks:
        if check.unit == "epsilon":
            assert check.lower_bound <= check.claimed
        if check.name.startswith("sensitivity"):
            assert check.lower_bound >= 0.98 * check.claimed  # 0.99 of the sensitivity


BROKEN = {
    NoClipping: {"sensitivity/plain"},
    SomeLayersUnclipped: {"sensitivity/plain"},
    NormByTensor: {"sensitivity/plain"},
    ClippedBySum: {"independence/slot"},
    MeanOverTheRealised: {"sensitivity/plain", "independence/slot"},
    WrongNoise: {"noise/plain"},
    NoNoiseWhenEmpty: {"noise/plain"},
    TooMuchNoise: {"noise/plain"},
    NaNSpreads: {"sensitivity/plain"},
    PlainBackward: {"sensitivity/plain", "independence/slot", "independence/absent"},
}


@pytest.mark.parametrize("make", BROKEN, ids=lambda kind: kind.__name__)
def test_broken_steps_are_flagged(make: type[Reference], plan_for: Plans) -> None:
    subject = subject_of(make, plan_for, norm=make is PlainBackward)
    checks = audit_step(subject, batch_of(), tries=1, quick=True)
    assert BROKEN[make] <= failed(checks), [check.to_dict() for check in checks]
    for check in checks:
        if check.name == "sensitivity/plain" and not check.passed:
            assert check.lower_bound > 1.05 * check.claimed


def test_ignored_bands_are_flagged(plan_for: Plans) -> None:
    checks = audit_step(subject_of(IgnoresBands, plan_for, several=True), batch_of(), tries=1, quick=True)
    assert {"routing/top", "sensitivity/top"} <= failed(checks)
    assert "routing/plain" not in failed(checks)


def test_reused_weight_clipped_per_use(plan_for: Plans) -> None:
    """Two uses, each clipped to C: up to 2C. The sound engine completes the layer first."""
    model = nn.Sequential(shared := nn.Linear(4, 4, bias=False), shared)
    plan = plan_for(model)

    class PerUse(Reference):
        def released(self, batch: Batch) -> dict[str, Tensor]:
            x, y = batch.x, batch.y * (cast(Tensor, batch.weight) > 0)
            w = shared.weight.detach()
            h, g = x @ w.t(), torch.cos(x @ w.t() @ w.t()) * y.unsqueeze(1)
            uses = [g.unsqueeze(2) * h.unsqueeze(1), (g @ w).unsqueeze(2) * x.unsqueeze(1)]
            total = sum(_shrunk(use, self.plan.clip[0][0]).sum(0, keepdim=True) for use in uses)
            wide = replace(self.plan, clip=((1e19,),))
            return route({"0.weight": cast(Tensor, total)}, torch.zeros(1, dtype=torch.long), wide, noise=self.noise)

    batch = Batch(torch.eye(4)[:2], torch.tensor([1e3, 1.0]))
    with torch.no_grad():
        shared.weight.copy_(torch.eye(4))
    for make, sound in ((None, True), (PerUse, False)):
        p = paired_step(
            AuditTarget(model=model, plan=plan, losses_of=lambda x, y: loss_of(model(x), y), make=make), batch, 0
        )
        assert p.sound is sound
        assert p.ratio == pytest.approx(1.0 if sound else 2.0, rel=1e-3)


def test_rows_read_as_contributions(plan_for: Plans) -> None:
    """64 rows of one contribution, each clipped by itself: norm 64 instead of 1."""
    model = nn.Linear(3, 2, bias=False)
    plan = plan_for(model)

    def as_rows(model: nn.Module, plan: StepPlan, noise: NoiseSource) -> Any:
        class Misread(Engine):
            def backward(self, losses: Tensor | None, batch: Batch) -> None:
                if losses is not None:
                    owner, weight = cast(Tensor, batch.unit), cast(Tensor, batch.weight)
                    batch = Batch(batch.x, batch.y, cls=cast(Tensor, batch.cls)[owner], weight=weight)
                super().backward(losses, batch)

        return Misread(model, plan, noise=noise)

    unit = torch.tensor([0] * 64 + [1])
    batch = Batch(torch.ones(65, 3), torch.full((65,), 1e3), unit=unit)
    p = paired_step(AuditTarget(model=model, plan=plan, losses_of=lambda x, y: loss_of(model(x), y)), batch, 0)
    assert p.sound
    p = paired_step(
        AuditTarget(model=model, plan=plan, losses_of=lambda x, y: loss_of(model(x), y), make=as_rows), batch, 0
    )
    assert not p.sound
    assert p.ratio == pytest.approx(64, rel=1e-3)


@pytest.mark.parametrize("kind", ["tokens of the batch", "batch mean", "order in the batch"])
def test_coupled_losses(kind: str, plan_for: Plans) -> None:
    """What the engine cannot see in one graph: the others' gradients change with who is there."""
    model = nn.Linear(4, 2)
    plan = plan_for(model)

    def losses_of(x: Tensor, y: Tensor) -> Tensor:
        losses = loss_of(model(x), y)
        if kind == "tokens of the batch":
            return losses / (x != 0).sum()
        if kind == "batch mean":
            return losses - losses.detach().mean() * losses
        return losses * torch.arange(1, len(x) + 1)

    subject = AuditTarget(model=model, plan=plan, losses_of=losses_of)
    checks = audit_step(subject, batch_of(), tries=1, quick=True)
    assert "independence/absent" in failed(checks)


def test_a_row_that_decides_where_others_go(plan_for: Plans) -> None:
    """Experts chosen by place in the flattened batch: taking one example away moves everyone's tokens."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        owner = torch.arange(len(x)).repeat_interleave(x.shape[1])
        flat, first = x.flatten(0, 1), torch.arange(x.shape[0] * x.shape[1]) % 2 == 0
        out = flat.new_zeros(len(flat), 2)
        for expert, mine in ((m.a, first), (m.b, ~first)):
            with lamina.rows(owner[mine]):
                out = out.index_put((mine.nonzero().flatten(),), expert(flat[mine]))
        return out.view(len(x), -1)

    model = Net(forward, a=nn.Linear(4, 2), b=nn.Linear(4, 2))
    subject = AuditTarget(model=model, plan=plan_for(model), losses_of=lambda x, y: loss_of(model(x), y))
    batch = Batch(torch.randn(4, 3, 4), torch.full((4,), 5.0))
    assert paired_step(subject, batch, 0).sound  # a slot of weight 0 keeps everybody's place
    assert not paired_step(subject, batch, 0, without="absent").sound


def test_noise_limits_hold_the_truth(plan_for: Plans) -> None:
    subject = subject_of(None, plan_for)
    levels = noise_levels(subject, batch_of())
    for level, planned in zip(levels, subject.plan.noise, strict=True):
        assert level.low < planned < level.high
        assert level.as_planned
        assert level.high / level.low < 1.35
    assert any(not level.as_planned for level in noise_levels(subject_of(WrongNoise, plan_for), batch_of()))
    silent = noise_levels(subject_of(NoNoiseWhenEmpty, plan_for), batch_of())
    assert all(level.high == 0 and not level.as_planned for level in silent)
    assert math.isfinite(levels[0].measured)
