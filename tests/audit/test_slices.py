"""Slices and stricter contributions under audit: what is sound passes, and each way to get it wrong is flagged."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from audit_steps import Reference, failed, target_of
from oracle import layers_of
from torch import Tensor, nn

from lamina.audit.paired_step import paired_step, without_rows
from lamina.audit.step_audit import audit_step, noise_levels
from lamina.audit.target import AuditTarget
from lamina.engine.batch import Batch
from lamina.engine.engine import Engine
from lamina.engine.noise.source import NoiseSource
from lamina.engine.slices import zero_outside_slices
from lamina.plan.selection import Slice
from lamina.plan.step_plan import Clipping, PlannedClass, StepPlan

CLASSES = [
    PlannedClass(name=name, population=1000, sampling_rate=0.02, delta=1e-5) for name in ("plain", "rows", "columns")
]


def part(cls: str, tensor: str, length: int, *ranges: tuple[int, int], axis: int = 0) -> Slice:
    return Slice(cls=cls, tensor=tensor, axis=axis, length=length, ranges=ranges)


SLICES = (
    # nobody reaches rows 0 and 5 of the first layer
    part("rows", "0.weight", 6, (1, 3)),
    part("rows", "0.bias", 6, (1, 3)),
    part("columns", "0.weight", 6, (2, 5)),
    part("columns", "0.bias", 6, (2, 3)),
    # the second layer: all of it, some rows, some columns would need two axes; so rows again
    part("rows", "2.weight", 6, (0, 2), (4, 6)),
    part("rows", "2.bias", 6),
    part("columns", "4.weight", 6, (3, 6), axis=1),
    part("columns", "4.bias", 2),
)


def model_of() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


def plan_of(model: nn.Module, clipping: str = "box") -> StepPlan:
    return StepPlan(
        layers=layers_of(model), classes=tuple(CLASSES), clip=((0.0, 0.6, 0.5), (0.4, 0.3, 0.0), (0.5, 0.0, 0.7)),
        noise=(0.8, 1.1, 0.9), batch=4.0, steps=100, clipping=Clipping(clipping), slices=SLICES,
    )  # fmt: skip


def batch_of(n: int = 5, **options: Any) -> Batch:
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(2))
    return Batch(x, torch.full((n,), 30.0), cls=torch.arange(n) % 3, **options)


def subject_of(make: Callable[..., Any] | None = None, clipping: str = "box", **options: Any) -> AuditTarget:
    model = model_of()
    return target_of(model, plan_of(model, clipping), make=make, **options)


@pytest.mark.parametrize("clipping", ["box", pytest.param("joint", marks=pytest.mark.slow)])
@pytest.mark.parametrize("hardened", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "hardened"])
def test_sliced_steps_pass(clipping: str, hardened: bool) -> None:
    subject = subject_of(clipping=clipping, hardened=hardened, parts=2 if hardened else 1)
    checks = audit_step(subject, batch_of(), tries=2, quick=True)
    assert not failed(checks), [check.to_dict() for check in checks if not check.passed]
    assert {"routing/rows", "routing/columns", "untouched", "noise/rows"} <= {check.name for check in checks}


@pytest.mark.parametrize("clipping", ["box", "joint"])
@pytest.mark.parametrize("unit", range(3))
def test_a_canary_reaches_its_bound_inside_its_slice_alone(clipping: str, unit: int) -> None:
    subject, batch = subject_of(clipping=clipping), batch_of()
    large = replace(batch, y=torch.where(torch.arange(5) == unit, 1e6, batch.y))
    for without in ("slot", "absent"):
        found = paired_step(subject, large, unit, without=without)
        assert found.sound
        assert found.ratio > 0.99
        assert not found.layers_outside
        assert max(found.outside) <= found.rounding
        assert found.norm <= found.most


# ------------------------------------------------------------------------------- broken on purpose


class Unmasked(Reference):
    """Clipped, never masked."""

    def summed(self, batch: Batch) -> dict[str, Tensor]:
        open_ = replace(self.plan, slices=())
        return self.route(self.grads(batch), cast(Tensor, batch.cls), open_)


class MaskedAfterClipping(Unmasked):
    """Clipped by the norm of everything, then masked: smaller than it may be, and sound."""

    def summed(self, batch: Batch) -> dict[str, Tensor]:
        total: dict[str, Tensor] = {n: torch.zeros_like(p).double() for n, p in self.model.named_parameters()}
        for u, k in enumerate(cast(Tensor, batch.cls).tolist()):
            grads = {n: g[u : u + 1] for n, g in self.grads(batch).items()}
            alone = self.route(grads, torch.tensor([k]), replace(self.plan, slices=()), **_limits(batch, u))
            for name, value in alone.items():
                total[name] += zero_outside_slices(self.plan, k, name, value)
        return total


class OneTensorUnmasked(Reference):
    """The bias was forgotten."""

    def summed(self, batch: Batch) -> dict[str, Tensor]:
        less = replace(self.plan, slices=tuple(s for s in SLICES if s.tensor != "0.bias"))
        return self.route(self.grads(batch), cast(Tensor, batch.cls), less)


class MaskedAfterMeasuringByTensor(Reference):
    """Thresholds are applied to what lies inside the slice of each tensor by itself."""

    def summed(self, batch: Batch) -> dict[str, Tensor]:
        grads = self.grads(batch)
        total = {}
        for name in grads:
            only = {n: g if n == name else torch.zeros_like(g) for n, g in grads.items()}
            total[name] = self.route(only, cast(Tensor, batch.cls))[name]
        return total


class NoiseEverywhere(Reference):
    def drawn(self, batch: Batch) -> dict[str, Tensor]:
        keep, self.plan = self.plan, replace(self.plan, slices=())
        try:
            return super().drawn(batch)
        finally:
            self.plan = keep


class QuietSlice(Reference):
    """Where one class alone reaches there is no noise, or too little."""

    factor = 0.0

    def drawn(self, batch: Batch) -> dict[str, Tensor]:
        noise = super().drawn(batch)
        noise["0.bias"][1] *= self.factor  # one number of 30: invisible in the noise of the layer
        return noise


class FaintSlice(QuietSlice):
    factor = 0.5


class NoScale(Reference):
    def summed(self, batch: Batch) -> dict[str, Tensor]:
        return super().summed(replace(batch, scale=None))


class NoCeiling(Reference):
    def summed(self, batch: Batch) -> dict[str, Tensor]:
        return super().summed(replace(batch, ceiling=None))


def _limits(batch: Batch, unit: int) -> dict[str, Tensor | None]:
    given = {"scale": batch.scale, "ceiling": batch.ceiling}
    return {name: None if t is None else t[unit : unit + 1] for name, t in given.items()}


def limited() -> Batch:
    """Contribution 0 is stricter than its class by its ceiling more than by its scale."""
    wide = torch.float64
    return batch_of(
        scale=torch.tensor([0.3, 1.0, 1.0, 0.5, 1.0], dtype=wide),
        ceiling=torch.tensor([0.1, 9.0, 0.1, 9.0, 9.0], dtype=wide),
    )


@pytest.mark.parametrize(
    ("make", "flagged"),
    [
        pytest.param(Reference, set(), marks=pytest.mark.slow),
        (MaskedAfterClipping, set()),
        (Unmasked, {"routing/rows", "routing/columns", "untouched"}),
        pytest.param(OneTensorUnmasked, {"routing/rows", "routing/columns"}, marks=pytest.mark.slow),
        pytest.param(MaskedAfterMeasuringByTensor, {"sensitivity/rows", "sensitivity/columns"}, marks=pytest.mark.slow),
        pytest.param(NoiseEverywhere, {"untouched"}, marks=pytest.mark.slow),
        (QuietSlice, {"noise/rows"}),
        pytest.param(FaintSlice, {"noise/rows"}, marks=pytest.mark.slow),
        (NoScale, {"sensitivity/rows", "sensitivity/plain"}),
        pytest.param(NoCeiling, {"sensitivity/rows", "sensitivity/plain"}, marks=pytest.mark.slow),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_the_audit_flags_what_is_broken(make: type[Reference], flagged: set[str]) -> None:
    strict: dict[type[Reference], dict[str, Any]] = {
        NoScale: {"scale": limited().scale},
        NoCeiling: {"ceiling": limited().ceiling},
    }
    checks = audit_step(subject_of(make), batch_of(**strict.get(make, {})), tries=1, quick=True)
    assert flagged <= failed(checks)
    if not flagged:
        assert not failed(checks)
    if make in (QuietSlice, FaintSlice):
        levels = noise_levels(subject_of(make), batch_of())
        assert [level.layer for level in levels if not level.as_planned] == ["0.bias[1:2, axis 0]"]


@pytest.mark.slow
def test_an_engine_that_never_heard_of_slices() -> None:
    def make(model: nn.Module, plan: StepPlan, noise: NoiseSource) -> Engine:
        return Engine(model, replace(plan, slices=()), noise=noise)

    assert {"routing/rows", "routing/columns", "untouched"} <= failed(
        audit_step(subject_of(make), batch_of(), tries=1, quick=True)
    )


# ------------------------------------------------------------------------------- stricter contributions


@pytest.mark.parametrize("clipping", ["joint", pytest.param("box", marks=pytest.mark.slow)])
def test_scaled_contributions_pass_at_their_own_price(clipping: str) -> None:
    checks = audit_step(subject_of(clipping=clipping), limited(), tries=2, quick=True)
    assert not failed(checks)
    subject = subject_of(clipping=clipping)
    claims = {check.name: check.claimed for check in checks}
    for k, entry in enumerate(CLASSES):
        by = min(0.3, 0.1 / subject.plan.norm(k))
        assert claims[f"sensitivity/{entry.name}"] == pytest.approx(subject.plan.epsilon(k, scale=by))
        assert claims[f"sensitivity/{entry.name}"] < 0.5 * subject.plan.epsilon(k)


@pytest.mark.parametrize("clipping", ["box", "joint"])
@pytest.mark.parametrize(("scale", "ceiling"), [(0.25, math.inf), (1.0, 0.05), (0.7, 0.6)])
def test_sensitivity_of_a_scaled_canary(clipping: str, scale: float, ceiling: float) -> None:
    subject = subject_of(clipping=clipping)
    for k in range(3):
        scales, ceilings = torch.ones(5), torch.full((5,), 1e6)
        scales[0], ceilings[0] = scale, min(ceiling, 1e6)
        batch = batch_of(scale=scales, ceiling=ceilings)
        cls = cast(Tensor, batch.cls).clone()
        cls[0] = k
        batch = replace(batch, cls=cls, y=torch.where(torch.arange(5) == 0, 1e6, batch.y))
        by = min(scale, ceiling / subject.plan.norm(k))
        for without in ("slot", "absent"):
            found = paired_step(subject, batch, 0, without=without)
            assert found.sound
            assert found.scale == pytest.approx(by)
            assert 0.99 / subject.plan.sigma(k, by) < found.sensitivity <= 1 / subject.plan.sigma(k, by) * (1 + 1e-6)
            assert found.norm <= min(ceiling, by * subject.plan.norm(k)) * (1 + 1e-6)


def test_batches_keep_their_limits_when_one_is_taken_away() -> None:
    gone = without_rows(limited(), 1)
    assert gone.scale.tolist() == [0.3, 1.0, 0.5, 1.0]
    assert gone.ceiling.tolist() == [0.1, 0.1, 9.0, 9.0]
