"""The audit can fail: steps that are broken on purpose, each in one way that happens, are flagged."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from audit_steps import Reference, failed, loss_of, plan_for, target_of
from net_builders import Net
from refusals import raises_code
from torch import Tensor, nn

import lamina
from lamina.audit.paired_step import paired_step
from lamina.audit.step_audit import audit_step, noise_levels
from lamina.audit.target import AuditTarget
from lamina.engine.batch import Batch
from lamina.engine.engine import Engine
from lamina.engine.noise.source import NoiseSource
from lamina.plan.step_plan import StepPlan


class Model(nn.Module):
    """Linear layers, one of them used twice, optionally with batch statistics between them."""

    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        self.into, self.again, self.out = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 2)
        self.norm = nn.BatchNorm1d(5, affine=False, track_running_stats=False) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(torch.tanh(self.into(x)))
        return self.out(torch.tanh(self.again(torch.tanh(self.again(h)))))


class NoClipping(Reference):
    unclipped = slice(None)

    def summed(self, batch: Batch) -> dict[str, Tensor]:
        rows = [list(row) for row in self.plan.clip]
        for row in rows:
            row[self.unclipped] = [1e19] * len(row[self.unclipped])
        return self.route(self.grads(batch), cast(Tensor, batch.cls), replace(self.plan, clip=tuple(map(tuple, rows))))


class SomeLayersUnclipped(NoClipping):
    unclipped = slice(0, 1)


class ClippedBySum(Reference):
    """The summed gradient is clipped, not each contribution's: fine for one, wrong beside others."""

    def summed(self, batch: Batch) -> dict[str, Tensor]:
        grads = {n: g.sum(0, keepdim=True) for n, g in self.grads(batch).items()}
        return self.route(grads, torch.zeros(1, dtype=torch.long))


class NormByTensor(Reference):
    """Each tensor of a layer is clipped to C by itself: √2 too much for weight and bias together."""

    def summed(self, batch: Batch) -> dict[str, Tensor]:
        bound = {n: c for layer, c in zip(self.plan.layers, self.plan.clip[0], strict=True) for n in layer.parameters}
        return {n: _shrunk(g, bound[n]).sum(0) for n, g in self.grads(batch).items()}


class WrongNoise(Reference):
    factor: tuple[float, ...] = (1.0, 0.8, 1.0)

    def drawn(self, batch: Batch) -> dict[str, Tensor]:
        by = {n: f for layer, f in zip(self.plan.layers, self.factor, strict=True) for n in layer.parameters}
        return {n: z * by[n] for n, z in super().drawn(batch).items()}


class NoNoiseWhenEmpty(Reference):
    def drawn(self, batch: Batch) -> dict[str, Tensor]:
        return {n: z * bool(len(batch)) for n, z in super().drawn(batch).items()}


class TooMuchNoise(WrongNoise):
    factor = (1.0, 1.0, 1.3)


class MeanOverTheRealised(Reference):
    """Divided by how many were sampled, not by B."""

    def released(self, batch: Batch) -> dict[str, Tensor]:
        count = max(1.0, float((cast(Tensor, batch.weight) > 0).sum()))
        return {n: g * self.plan.batch / count for n, g in super().released(batch).items()}


class IgnoresBands(Reference):
    def summed(self, batch: Batch) -> dict[str, Tensor]:
        return self.route(self.grads(batch), torch.zeros(len(batch), dtype=torch.long))


class NaNSpreads(Reference):
    """0 · NaN is NaN."""

    def released(self, batch: Batch) -> dict[str, Tensor]:
        poison = sum(g.sum() * 0 for g in self.grads(batch).values())
        return {n: g + poison for n, g in super().released(batch).items()}


class PlainBackward(Engine):
    """The engine with its own checks out of the way: coverage, graph walk, ownership."""

    def __init__(self, model: nn.Module, plan: StepPlan, noise: NoiseSource) -> None:
        modes = [(m, m.training) for m in model.modules()]
        hidden = [m for m in model.modules() if isinstance(m, nn.BatchNorm1d)]
        for m in hidden:
            m.__class__ = type("Statistics", (Standardise,), {})  # type: ignore[assignment]
        super().__init__(model, plan, noise=noise)
        self.eager.ownership.due = lambda *_: False  # type: ignore[method-assign]
        for m, mode in modes:
            m.training = mode


class Standardise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt()


def _shrunk(g: Tensor, bound: float) -> Tensor:
    norm = g.flatten(1).norm(dim=1).clamp(min=1e-30)
    return g * (bound / norm).clamp(max=1.0).view(-1, *[1] * (g.dim() - 1))


def subject_of(make: Any, clipping: str = "box", *, several: bool = False, norm: bool = False) -> AuditTarget:
    model = Model(norm=norm)
    plan = plan_for(model, clipping, several=several)
    return target_of(model, plan, make=make)


def batch_of(size: int = 4) -> Batch:
    return Batch(torch.randn(size, 4), torch.tensor([3.0] * size), cls=torch.zeros(size, dtype=torch.long))


@pytest.mark.parametrize("clipping", ["box", "joint"])
@pytest.mark.parametrize("make", [None, Reference])
def test_sound_steps_pass(make: Any, clipping: str) -> None:
    checks = audit_step(subject_of(make, clipping, several=True), batch_of(), tries=1, quick=True)
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
def test_broken_steps_are_flagged(make: type[Reference]) -> None:
    subject = subject_of(make, norm=make is PlainBackward)
    checks = audit_step(subject, batch_of(), tries=1, quick=True)
    assert BROKEN[make] <= failed(checks), [check.to_dict() for check in checks]
    for check in checks:
        if check.name == "sensitivity/plain" and not check.passed:
            assert check.lower_bound > 1.05 * check.claimed


def test_one_contribution_is_too_few() -> None:
    with raises_code("audit.too-few-contributions"):
        audit_step(subject_of(None), batch_of(1))


def test_ignored_bands_are_flagged() -> None:
    checks = audit_step(subject_of(IgnoresBands, several=True), batch_of(), tries=1, quick=True)
    assert {"routing/top", "sensitivity/top"} <= failed(checks)
    assert "routing/plain" not in failed(checks)


def test_reused_weight_clipped_per_use() -> None:
    """Two uses, each clipped to C: up to 2C. The sound engine completes the layer first."""
    model = nn.Sequential(shared := nn.Linear(4, 4, bias=False), shared)
    plan = plan_for(model)

    class PerUse(Reference):
        def summed(self, batch: Batch) -> dict[str, Tensor]:
            x, y = batch.x, batch.y * (cast(Tensor, batch.weight) > 0)
            w = shared.weight.detach()
            h, g = x @ w.t(), torch.cos(x @ w.t() @ w.t()) * y.unsqueeze(1)
            uses = [g.unsqueeze(2) * h.unsqueeze(1), (g @ w).unsqueeze(2) * x.unsqueeze(1)]
            return {"0.weight": torch.stack([_shrunk(use, self.plan.clip[0][0]).sum(0) for use in uses]).sum(0)}

    batch = Batch(torch.eye(4)[:2], torch.tensor([1e3, 1.0]))
    with torch.no_grad():
        shared.weight.copy_(torch.eye(4))
    for make, sound in ((None, True), (PerUse, False)):
        p = paired_step(target_of(model, plan, make=make), batch, 0)
        assert p.sound is sound
        assert p.ratio == pytest.approx(1.0 if sound else 2.0, rel=1e-3)


def test_rows_read_as_contributions() -> None:
    """64 rows of one contribution, each clipped by itself: norm 64 instead of 1."""
    model = nn.Linear(3, 2, bias=False)

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
    assert paired_step(target_of(model), batch, 0).sound
    p = paired_step(target_of(model, make=as_rows), batch, 0)
    assert not p.sound
    assert p.ratio == pytest.approx(64, rel=1e-3)


@pytest.mark.parametrize("kind", ["tokens of the batch", "batch mean", "order in the batch"])
def test_coupled_losses(kind: str) -> None:
    """What the engine cannot see in one graph: the others' gradients change with who is there."""
    model = nn.Linear(4, 2)

    def losses_of(x: Tensor, y: Tensor) -> Tensor:
        losses = loss_of(model(x), y)
        if kind == "tokens of the batch":
            return losses / (x != 0).sum()
        if kind == "batch mean":
            return losses - losses.detach().mean() * losses
        return losses * torch.arange(1, len(x) + 1)

    checks = audit_step(target_of(model, losses_of=losses_of), batch_of(), tries=1, quick=True)
    assert "independence/absent" in failed(checks)


def test_a_row_that_decides_where_others_go() -> None:
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
    subject = target_of(model)
    batch = Batch(torch.randn(4, 3, 4), torch.full((4,), 5.0))
    assert paired_step(subject, batch, 0).sound  # a slot of weight 0 keeps everybody's place
    assert not paired_step(subject, batch, 0, without="absent").sound


def test_noise_limits_hold_the_truth() -> None:
    subject = subject_of(None)
    levels = noise_levels(subject, batch_of())
    for level, planned in zip(levels, subject.plan.noise, strict=True):
        assert level.low < planned < level.high
        assert level.as_planned
        assert level.high / level.low < 1.35
    assert any(not level.as_planned for level in noise_levels(subject_of(WrongNoise), batch_of()))
    silent = noise_levels(subject_of(NoNoiseWhenEmpty), batch_of())
    assert all(level.high == 0 and not level.as_planned for level in silent)
    assert math.isfinite(levels[0].measured)
