"""Plans: what an epoch says was applied is what its plan says, and the plan is one that the policy allows."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache

from lamina.errors import LaminaError
from lamina.ledger.check.depth import outside
from lamina.ledger.check.policy import PolicyInForce
from lamina.ledger.check.problem import bad
from lamina.ledger.depth import read_profile
from lamina.ledger.records import Epoch, Preset
from lamina.ledger.store.base import Reader
from lamina.plan.rescale import effective_sigma
from lamina.plan.rules import FollowBudget, FollowQuantile
from lamina.plan.step import Clipping, PlannedClass, StepPlan

_NEAR = 1e-9  # relative: what is computed twice on two machines
_ADAPTED = 1e-6  # the same of noise that moved during a run, in single precision


class Plans:
    """The plans of a ledger, read once each."""

    def __init__(self, rows: Reader, policy: PolicyInForce) -> None:
        self._rows, self._policy = rows, policy
        self._read = lru_cache(maxsize=64)(self._load)
        self._differs = lru_cache(maxsize=1024)(self._compared)
        self._began: dict[bytes, int] = {}  # run → leaves that its first segment read

    def of(self, seq: int, epoch: Epoch) -> StepPlan:
        """The plan of an epoch, with all that can be said of it without its accounts."""
        plan = self._read(epoch.plan)
        if isinstance(plan, str):
            bad(seq, Epoch, "verify.of", plan)
        for segment in epoch.segments:
            if segment.last > plan.steps:
                bad(
                    seq,
                    Epoch,
                    "verify.segment-ends-step",
                    f"segment {segment.index} ends at step {segment.last}, its plan has {plan.steps}",
                )
        began = self._began.setdefault(epoch.run, min(each.eligibility for each in epoch.segments))
        for entry in plan.classes:
            if (wrong := self._class(epoch.plan, entry, began)) is not None:
                bad(seq, Epoch, "verify.of-2", wrong)
        if (wrong := _variance(plan, epoch.variance)) is not None:
            bad(seq, Epoch, "verify.of-2", wrong)
        return plan

    def _load(self, digest: bytes) -> StepPlan | str:
        data = self._rows.blob(digest)
        if data is None:
            return f"its plan {digest.hex()[:16]} is not there, and the spend cannot be computed without it"
        if hashlib.sha256(data).digest() != digest:
            return f"the plan that is kept as {digest.hex()[:16]} is another one"
        try:
            return StepPlan.from_cbor(data)
        except LaminaError as error:
            return f"its plan {digest.hex()[:16]} cannot be read: {error.problem}"

    def _class(self, digest: bytes, entry: PlannedClass, began: int) -> str | None:
        """A class means in the plan what it meant in the policy when its run began, or means since."""
        presets = self._policy.presets_since(entry.name, began)
        if not presets:
            return f"class {entry.name!r} of its plan is not one of the policy"
        wrongs = [self._differs(digest, entry, preset) for preset in presets]
        return None if None in wrongs else wrongs[-1]

    def _compared(self, digest: bytes, entry: PlannedClass, preset: Preset) -> str | None:
        plan = self._read(digest)
        assert isinstance(plan, StepPlan)
        return differs(plan, entry, preset)


def differs(plan: StepPlan, entry: PlannedClass, preset: Preset) -> str | None:
    """In what a class of a plan is another one than the policy has; in words."""
    if entry.public and not preset.public:
        return f"class {entry.name!r} is public in its plan, and private in the policy"
    if None not in (entry.population, preset.population) and entry.population != preset.population:
        numbers = f"{entry.population} in its plan, {preset.population} in the policy"
        return f"class {entry.name!r} has a population of {numbers}"
    return _deeper(plan, entry, preset.profile)


def _deeper(plan: StepPlan, entry: PlannedClass, text: str) -> str | None:
    """Where a class reaches beyond its profile: by the words of the profile, and by the layers of the plan."""
    if text.startswith("sha256:"):
        return None
    try:
        profile = read_profile(text)
    except (LaminaError, ValueError, TypeError, ArithmeticError, RecursionError):
        if entry.profile == text:  # a ledger without a policy repeats the words of its first plan
            return None
        return f"the profile {text[:80]!r} of class {entry.name!r} is of a schema that is not known"
    if not profile.told_by(entry.profile):
        return f"class {entry.name!r} reaches {entry.profile[:80]} in its plan, {text[:80]} in the policy"
    if (layer := outside(plan, plan.index(entry.name), profile)) is not None:
        return (
            f"class {entry.name!r} has a threshold for layer {layer[:80]!r} in its plan, which lies outside its "
            f"profile, {text[:80]}"
        )
    return None


def _variance(plan: StepPlan, variance: tuple[float, ...]) -> str | None:
    """S² per layer is the plan's; where a rule moves S, it leaves every class the multiplier that was declared."""
    if len(variance) != len(plan.noise):
        return f"it has variances of {len(variance)} layers, its plan has {len(plan.noise)}"
    for layer, s, v in zip(plan.layers, plan.noise, variance, strict=True):
        if (s == 0) != (v == 0) or (not plan.rules and not math.isclose(v, s * s, rel_tol=_NEAR)):
            return f"the variance of layer {layer.name!r} is {v:.9g}, its plan has {s * s:.9g}"
    if plan.rules and plan.clipping is Clipping.BOX and plan.rule(FollowQuantile) is None:
        budget, applied = plan.rule(FollowBudget), [math.sqrt(v) for v in variance]
        for k, entry in enumerate(plan.classes):
            least = plan.sigma(k) * (1.0 if budget is None else budget.least)
            if not entry.public and effective_sigma(plan.clip[k], applied) < least * (1 - _ADAPTED):
                return f"with these variances class {entry.name!r} has less noise than its plan declares"
        if budget is not None and _loudest(plan, applied) > budget.most * (1 + _ADAPTED):
            return (
                f"with these variances every class has more than {budget.most:g} times the noise of its plan"
            )
    return None


def _loudest(plan: StepPlan, applied: Sequence[float]) -> float:
    """How often the declared multiplier the class has that decides the noise."""
    private = [k for k, entry in enumerate(plan.classes) if not entry.public and math.isfinite(plan.sigma(k))]
    return min((effective_sigma(plan.clip[k], applied) / plan.sigma(k) for k in private), default=0.0)
