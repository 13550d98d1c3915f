"""The paired-seed audit passes every policy and flags the printed ones, and counts that nobody paid for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lamina.allocate.ladp import LADP, plan_candidates
from lamina.allocate.make_plan import ALLOCATIONS, make_plan
from lamina.allocate.measure.measure import Measure
from lamina.allocate.paper import PaperLSAB
from lamina.allocate.problem import Allocate
from lamina.audit.canaries import named_canaries
from lamina.audit.paired_step import PairedStep, paired_step
from lamina.audit.step_audit import Check, audit_step, epsilon_of_sensitivity, noise_levels
from lamina.audit.target import AuditTarget
from lamina.engine.batch import Batch, Draw
from lamina.engine.engine import Engine
from lamina.engine.execute.collectors import BoxCollector
from lamina.engine.noise.source import NoiseSource, SeededNoise
from lamina.plan.layer_stack import LayerStack
from lamina.plan.policy import Policy
from lamina.plan.rules import FollowQuantile
from lamina.plan.step_plan import StepPlan

CHOICE = LADP(choose_every=10)
SOUND: dict[str, tuple[str | Allocate, tuple[str, ...]]] = {
    "flat": ("flat", ("box", "joint")),
    "uniform": ("uniform", ("box", "joint")),
    "proportional": ("proportional", ("box", "joint")),
    "pareto": ("pareto", ("box", "joint")),
    "lsab": ("lsab", ("box", "joint")),
    "ladp": ("ladp", ("box", "joint")),
    "ladp-budget": ("ladp-budget", ("box", "joint")),
    "ladp-choice": (CHOICE, ("box", "joint")),
    "quantile": ("quantile", ("box",)),
    "automatic": ("automatic", ("joint",)),
}
CASES = [(name, form) for name, (_, forms) in SOUND.items() for form in forms]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.mid, self.out = nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.mid(torch.tanh(self.into(x)))))


def subject_of(
    allocate: str | Allocate, form: str | None = None, *, several: bool = True, **options: Any
) -> AuditTarget:
    torch.manual_seed(3)
    model = Model()
    stack = LayerStack.from_model(model)
    classes: dict[str, Any] = {"plain": {"population": 1000, "clip_norm": 1.0, "epsilon": 1.0}}
    if several:
        classes["top"] = {"population": 500, "clip_norm": 0.5, "epsilon": 2.0, "profile": {"top": 0.67}}
    row = (1.0, 0.6, 0.3)
    measure = Measure(
        proxy="gaussian", layers=tuple(layer.name for layer in stack), tight=row, worst=row, printed=row,
        harm=(20.0, 24.0, 10.0), norms=row, fisher=row,
    )  # fmt: skip
    policy = Policy.from_dict({"corpus": {"origin": "audit", "delta": 1e-5}, "class": classes})
    plan = make_plan(stack, policy, batch=30, steps=50, allocate=allocate, clipping=form, measure=measure)
    return AuditTarget(model=model, plan=plan, losses_of=lambda x, y: losses(model, x, y), **options)


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean(1)


@pytest.fixture
def batch() -> Batch:
    source = torch.Generator().manual_seed(4)
    x, y = torch.randn(4, 3, generator=source), torch.randn(4, 2, generator=source)
    return Batch(x, y, cls=torch.zeros(4, dtype=torch.long))


def attacked(subject: AuditTarget, batch: Batch, k: int) -> list[PairedStep]:
    """What a few canaries of class k move, in both senses of "without"."""
    mine = Batch(batch.x, batch.y, cls=torch.tensor([k, 0, 1, 0]))
    canaries = dict(named_canaries(mine, 0))
    names = ("as given", "y large", "x and y large", "x not a number")
    return [paired_step(subject, canaries[name], 0, without=form) for name in names for form in ("slot", "absent")]


def audit(subject: AuditTarget, batch: Batch) -> dict[str, Check]:
    return {check.name: check for check in audit_step(subject, batch, tries=2, quick=True)}


def test_every_policy_is_audited() -> None:
    printed = {"printed-lsab", "printed-ladp"}
    assert set(SOUND) - {"ladp-choice"} | printed == set(ALLOCATIONS)


@pytest.mark.parametrize(("name", "form"), CASES)
def test_every_policy_stays_within_its_bound(name: str, form: str, batch: Batch) -> None:
    subject = subject_of(SOUND[name][0], form)
    for k in range(2):
        seen = attacked(subject, batch, k)
        assert all(paired.sound for paired in seen)
        # the canaries are strong enough to tell: one of them moves the step as far as it may
        assert max(paired.ratio for paired in seen) > 0.98


@pytest.mark.slow
@pytest.mark.parametrize(("name", "form"), CASES)
def test_every_policy_passes(name: str, form: str, batch: Batch) -> None:
    subject = subject_of(SOUND[name][0], form)
    found = audit(subject, batch)
    assert [check for check in found.values() if not check.passed] == []
    for k, entry in enumerate(subject.plan.classes):
        most = epsilon_of_sensitivity(subject.plan, k, 1 / subject.plan.sigma(k))
        assert found[f"sensitivity/{entry.name}"].lower_bound > 0.95 * min(most, subject.plan.epsilon(k))


@pytest.mark.parametrize("name", ["ladp", "quantile"])
def test_the_step_is_sound_after_it_has_adapted(name: str, batch: Batch) -> None:
    """Some steps of a run, and the step that comes next is audited as a plan of its own."""
    subject = subject_of(name, "box")
    with Engine(subject.model, subject.plan, noise=SeededNoise(1)) as engine:
        for _ in range(11):
            drawn = replace(batch, draw=Draw())
            engine.backward(subject.losses_of(batch.x, batch.y), drawn)
            subject.model.zero_grad(set_to_none=True)
        applied = engine.applied
    assert applied.noise != subject.plan.noise
    for k in range(2):
        assert applied.sigma(k) >= subject.plan.sigma(k) * (1 - 1e-15)
        assert applied.epsilon(k) <= subject.plan.epsilon(k) * (1 + 1e-10)  # the last digits of `pld` are not monotone
    assert all(p.sound for k in range(2) for p in attacked(replace(subject, plan=applied), batch, k))


@pytest.mark.parametrize("form", ["box", "joint"])
def test_every_candidate_of_a_choice_is_sound(form: str, batch: Batch) -> None:
    subject = subject_of(CHOICE, form)
    for offer in plan_candidates(subject.plan):
        chosen = replace(subject, plan=replace(subject.plan, clip=offer.clip, noise=offer.noise))
        for k in range(2):
            assert chosen.plan.sigma(k) >= subject.plan.sigma(k)
            assert all(paired.sound for paired in attacked(chosen, batch, k)[2:4]), offer.name


@pytest.mark.parametrize("allocate", ["printed-ladp", "printed-lsab", PaperLSAB(per_step=True)])
def test_the_printed_ones_are_flagged(allocate: str | Allocate, batch: Batch) -> None:
    subject = subject_of(allocate, several=False)
    check = audit(subject, batch)["sensitivity/plain"]
    assert not check.passed
    assert check.claimed == subject.plan.claimed[0] == pytest.approx(1.0)
    assert check.claimed < check.lower_bound <= subject.plan.epsilon(0) * (1 + 1e-9)
    assert f"ε = {subject.plan.epsilon(0):.4g} is true" in check.detail


# ------------------------------------------------------------------------------ the audit can fail


def rule_of(plan: StepPlan) -> FollowQuantile:
    rule = plan.rule(FollowQuantile)
    assert rule is not None
    return rule


def with_counts(noise: float) -> Callable[[nn.Module, StepPlan, NoiseSource], Engine]:
    """Engines that release counts with this noise, whatever the plan says."""

    def make(model: nn.Module, plan: StepPlan, source: NoiseSource) -> Engine:
        return Engine(model, replace(plan, rules=(FollowQuantile(noise=noise),)), noise=source)

    return make


def test_counts_that_nobody_paid_for_are_flagged(batch: Batch) -> None:
    sound = subject_of("quantile")
    unpaid = replace(sound, plan=replace(sound.plan, rules=()), make=with_counts(rule_of(sound.plan).noise))
    for k in range(2):
        assert not all(paired.sound for paired in attacked(unpaid, batch, k))
        assert all(paired.sound for paired in attacked(replace(unpaid, make=None), batch, k))


def test_whole_bits_for_the_price_of_half_ones_are_flagged(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = subject_of("quantile")
    honest = BoxCollector.finish
    large = Batch(torch.cat([batch.x[:1] * 1e3, batch.x[1:]]), batch.y, cls=batch.cls)
    seen = paired_step(subject, large, 0)
    assert seen.sound and seen.counts == pytest.approx([0.5 / rule_of(subject.plan).noise] * 3)
    assert seen.sensitivity == pytest.approx(math.hypot(*seen.per_layer, *seen.counts), rel=1e-12)
    assert seen.bound == pytest.approx(1 / subject.plan.sigma(0), rel=1e-12)

    def doubled(self: BoxCollector) -> None:
        honest(self)
        if self.counts is not None:
            self.counts *= 2

    monkeypatch.setattr(BoxCollector, "finish", doubled)
    assert not paired_step(subject, large, 0).sound


def test_counts_with_too_little_noise_are_flagged(batch: Batch) -> None:
    subject = subject_of("quantile")
    planned = rule_of(subject.plan).noise
    assert all(level.as_planned for level in noise_levels(subject, batch))
    quiet = replace(subject, make=with_counts(0.5 * planned))
    assert [level.layer for level in noise_levels(quiet, batch) if not level.as_planned] == ["counts/unclipped"]


def test_a_slot_of_weight_zero_is_nobody(batch: Batch) -> None:
    """If an empty slot counted as unclipped, a clipped canary would move the count by a whole."""
    subject = subject_of("quantile")
    for size in (1e-6, 1e6):
        canary = Batch(torch.cat([batch.x[:1] * size, batch.x[1:]]), batch.y * size, cls=batch.cls)
        for without in ("slot", "absent"):
            seen = paired_step(subject, canary, 0, without=without)
            assert seen.sound and max(seen.counts) == pytest.approx(0.5 / rule_of(subject.plan).noise)
