"""`audit_step`: everything the paired-seed audit can say about one step, class by class."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from lamina.audit.ascent import ascend
from lamina.audit.canary import random_canaries, variants
from lamina.audit.check import Check, Verdict
from lamina.audit.independence import moved_others
from lamina.audit.noise import Level, noise_levels
from lamina.audit.paired import Paired, Without, paired_step
from lamina.audit.price import claim, epsilon_of_noise, epsilon_of_sensitivity
from lamina.audit.regions import regions
from lamina.audit.subject import Subject
from lamina.engine import Batch
from lamina.errors import EngineError
from lamina.plan.step import StepPlan

_COUPLED = 1e-4
_QUICK = (
    "as given",
    "x large",
    "y large",
    "x like another",
    "y like another",
    "x cancelling",
    "x not a number",
    "y huge",
)

Found = list[tuple[str, Paired]]


def audit_step(
    subject: Subject, batch: Batch, *, unit: int = 0, tries: int = 8, seed: int = 0, quick: bool = False
) -> tuple[Check, ...]:
    """Check a step's claims on a batch of public or simulated contributions.

    Contribution `unit` takes every class of the plan in turn and becomes one canary after another: the named
    ones of `variants` (eight of them if `quick`), `tries` random ones, and one found by gradient ascent. Per
    private class:

      sensitivity  the farthest a canary moved the step, priced over the plan's steps, against the claimed ε (of a
                   contribution stricter than its class: at its scale)
      routing      how far a layer outside the class's band, or a part outside its slices, moved: must be 0, up to
                   rounding
    and for the step:
      noise        ε with the noise that was seen (its upper confidence limit), against the claimed ε
      untouched    layers, and places of layers, that no class reaches got no gradient and no noise
      independence how far the others' parts move when the canary appears: must be 0 up to rounding
    """
    if len(batch) < 2:
        raise EngineError(
            "audit.audit-got-contributions",
            f"the audit got {len(batch)} contributions",
            "give two or more, public or simulated",
        )
    checks, fixed = [], subject.fixed(batch)
    for k, entry in enumerate(subject.plan.classes):
        if not entry.public:
            found = _attack(subject, _as_class(batch, unit, k), unit, tries, seed, fixed, quick)
            checks += [_sensitivity(subject, k, found), _routing(subject, k, found)]
    levels = noise_levels(subject, batch, seed=seed + 1)
    for k, entry in enumerate(subject.plan.classes):
        if not entry.public:
            checks.append(_noise(subject.plan, k, levels))
    return (*checks, _untouched(subject, batch), *_independence(subject, batch, unit, fixed))


def _attack(
    subject: Subject, batch: Batch, unit: int, tries: int, seed: int, fixed: bool, quick: bool
) -> Found:
    def canaries() -> Iterable[tuple[str, Batch]]:
        yield from (pair for pair in variants(batch, unit) if not quick or pair[0] in _QUICK)
        yield from random_canaries(batch, unit, count=tries, seed=seed)
        yield "ascent", ascend(subject, batch, unit)

    # Raw noise goes with its contribution: what is claimed is a gradient of 0 in its place.
    absent = fixed and not subject.plan.injection.raw
    forms = [Without.SLOT, Without.ABSENT] if absent else [Without.SLOT]
    found = [
        (f"{name}, {form.value}", paired_step(subject, b, unit, without=form, seed=seed))
        for name, b in canaries()
        for form in forms
    ]
    # Noise that depends on who is there does not cancel: seen only where it is not turned down.
    loud = [
        (f"full noise, {form.value}", paired_step(subject, batch, unit, without=form, noise=1.0))
        for form in forms
    ]
    return found + loud


def _noise(plan: StepPlan, k: int, levels: tuple[Level, ...]) -> Check:
    counts = [level for level in levels if level.index is None]
    highs = [
        min((level.high for level in levels if level.index == i and k in level.classes), default=s)
        for i, s in enumerate(plan.noise)
    ]
    more = counts[0].high / counts[0].planned if counts and counts[0].high > 0 else 1.0
    worst = epsilon_of_noise(plan, k, highs, more)
    wrong = [level.layer for level in levels if not level.as_planned]
    detail = f"not as planned: {', '.join(wrong)}" if wrong else f"{len(levels)} layers as planned"
    holds = not plan.claimed or worst <= claim(plan, k)
    name = f"noise/{plan.classes[k].name}"
    return _check(name, worst, claim(plan, k), not wrong and holds, detail=detail + _truth(plan, k))


def _truth(plan: StepPlan, k: int) -> str:
    """Of a printed plan: what is claimed, and what is so."""
    return f"; ε = {claim(plan, k):.4g} is claimed, ε = {plan.epsilon(k):.4g} is true" if plan.claimed else ""


def _sensitivity(subject: Subject, k: int, found: Found) -> Check:
    plan = subject.plan
    claimed = claim(plan, k, found[0][1].scale)
    name, worst = max(found, key=lambda pair: (not pair[1].sound, pair[1].sensitivity))
    bound = epsilon_of_sensitivity(plan, k, worst.sensitivity)
    sound = all(p.sound for _, p in found) and (not plan.claimed or bound <= claimed)
    return _check(
        f"sensitivity/{plan.classes[k].name}",
        min(bound, claimed) if sound else bound,  # equal steps may differ in the PLD's last digit
        claimed,
        sound,
        detail=f"{len(found)} canaries; '{name}' moved {worst.sensitivity:.6g} of {worst.bound:.6g} allowed"
        + _truth(plan, k),
    )


def _routing(subject: Subject, k: int, found: Found) -> Check:
    slots = [p for name, p in found if name.endswith(Without.SLOT.value)]
    worst, layer = max(
        ((p.astray[i], subject.plan.layers[i].name) for p in slots for i in p.strays), default=(0.0, "")
    )
    detail = f"layer '{layer}' is outside the band, or a part of it outside the slices" if layer else ""
    return _check(f"routing/{subject.plan.classes[k].name}", worst, 0.0, worst == 0, "noise std", detail)


def _untouched(subject: Subject, batch: Batch) -> Check:
    grads = subject.release(batch)
    idle = (r for r in regions(subject.plan, dict(subject.model.named_parameters())) if not r.classes)
    moved = [part.name for part in idle if part.moved(grads)]
    return _check("untouched", float(len(moved)), 0.0, not moved, "tensors", ", ".join(moved))


def _independence(subject: Subject, batch: Batch, unit: int, fixed: bool) -> Iterable[Check]:
    worst = moved_others(subject, batch, unit)
    yield _check(
        "independence/slot", worst, 0.0, worst <= _COUPLED, "relative", "the others' parts, canary present"
    )
    if fixed:
        worst = moved_others(subject, batch, unit, absent=True)
        yield _check(
            "independence/absent", worst, 0.0, worst <= _COUPLED, "relative", "the others' parts, row gone"
        )


def _as_class(batch: Batch, unit: int, k: int) -> Batch:
    cls = cast(Tensor, batch.cls).clone()
    cls[unit] = torch.tensor(k)
    return replace(batch, cls=cls)


def _check(
    name: str, found: float, claimed: float, passed: bool, unit: str = "epsilon", detail: str = ""
) -> Check:
    verdict = Verdict.PASSED if passed else Verdict.FAILED
    return Check(name=name, lower_bound=found, claimed=claimed, verdict=verdict, unit=unit, detail=detail)
