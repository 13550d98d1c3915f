"""The paired-seed audit of every form in which noise may enter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from audit_steps import plan_for
from torch import Tensor, nn

from lamina.audit.paired_step import Without, paired_step
from lamina.audit.step_audit import Verdict, audit_step, noise_levels
from lamina.audit.target import AuditTarget
from lamina.engine.batch import Batch
from lamina.engine.engine import Engine
from lamina.engine.noise.gaussian import NoiseInShares, NoisePerContribution
from lamina.engine.noise.source import NoiseSource
from lamina.plan.rules import Injection
from lamina.plan.step_plan import StepPlan

FORMS = [
    Injection(form="per_microbatch", parts=3),
    Injection(form="per_sample", parts=4),
    Injection(form="per_sample_raw"),
    Injection(form="per_sample_raw", occurrences=20),
]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 4))


def subject_of(injection: Injection, clipping: str = "box", parts: int = 1, hardened: bool = False) -> AuditTarget:
    model = net()

    def losses_of(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x), y, reduction="none")

    plan = replace(plan_for(model, clipping, several=True), injection=injection)
    return AuditTarget(model=model, plan=plan, losses_of=losses_of, parts=parts, hardened=hardened)


def batch_of(size: int = 5) -> Batch:
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(size, 8, generator=generator), torch.randint(0, 4, (size,), generator=generator)
    return Batch(x, y, cls=torch.tensor([0, 1, 2, 0, 1])[:size])


@pytest.mark.parametrize("clipping", ["box", pytest.param("joint", marks=pytest.mark.slow)])
@pytest.mark.parametrize("injection", FORMS, ids=str)
def test_every_form_keeps_its_claim(injection: Injection, clipping: str) -> None:
    subject = subject_of(injection, clipping, parts=2)
    checks = audit_step(subject, batch_of(), tries=2, quick=True)
    assert [c.name for c in checks if c.verdict is not Verdict.PASSED] == []
    reached = {c.name: c.lower_bound / c.claimed for c in checks if c.name.startswith("sensitivity/")}
    assert len(reached) == 2
    assert min(reached.values()) > 0.95  # a canary comes close: the audit could have seen more


@pytest.mark.parametrize("injection", [FORMS[0], FORMS[2]], ids=str)
def test_hardened_too(injection: Injection) -> None:
    checks = audit_step(subject_of(injection, hardened=True), batch_of(), tries=1, quick=True)
    assert [c.name for c in checks if c.verdict is not Verdict.PASSED] == []


def test_raw_noise_does_not_hide_who_is_there() -> None:
    """Why its claim is zero-out: a contribution that is gone takes its noise along, and the step moves by it."""
    subject = subject_of(FORMS[2])
    there = paired_step(subject, batch_of(), 0, without=Without.SLOT, noise=1.0)
    gone = paired_step(subject, batch_of(), 0, without=Without.ABSENT, noise=1.0)
    assert there.sound
    assert not gone.sound and gone.sensitivity > 5 * gone.bound


class _Forgetful(NoiseInShares):
    """Nothing is topped up: slots that nobody took stay empty."""

    def gather_rest(self) -> None:
        pass


class _Busy(NoisePerContribution):
    """Noise for those only who have something to say."""

    def saw(self, classes: Tensor) -> None:
        super().saw(classes[:-1])


@pytest.mark.parametrize(("form", "wrong"), [(1, _Forgetful), (2, _Busy)])
def test_the_audit_sees_noise_that_is_missing(monkeypatch: pytest.MonkeyPatch, form: int, wrong: type) -> None:
    monkeypatch.setattr(
        f"lamina.engine.noise.gaussian.{'NoiseInShares' if form == 1 else 'NoisePerContribution'}", wrong
    )

    def make(model: nn.Module, plan: StepPlan, noise: NoiseSource) -> Engine:
        return Engine(model, plan, noise=noise)

    subject = replace(subject_of(FORMS[form]), make=make)
    assert not all(level.as_planned for level in noise_levels(subject, batch_of()))
    checks = audit_step(subject, batch_of(), tries=1, quick=True)
    assert any(c.verdict is Verdict.FAILED for c in checks if c.name.startswith("noise/"))
