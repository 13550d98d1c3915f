"""Checks of step plans: against themselves, the policy, depth profiles, and the noise that was applied."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache

from lamina.account.schedule import INTEGER_RDP
from lamina.errors import LaminaError, PlanError
from lamina.ledger.governance_records import ClassBounds, parse_profile
from lamina.ledger.key_state import PolicyInForce, Violation
from lamina.ledger.records import Epoch
from lamina.ledger.store.rows import StoreReader
from lamina.ledger.verify.tree_checks import fail
from lamina.plan.depth_profile import DepthProfile, ProfileKind
from lamina.plan.profile_reach import spans_in_band
from lamina.plan.rules import Choose, FollowBudget, FollowQuantile, effective_sigma
from lamina.plan.selection import matches_pattern
from lamina.plan.step_plan import Clipping, PlannedClass, PlannedLayer, StepPlan

ADAPTED_TOLERANCE = 1e-6  # noise that moved during a run, in single precision
_VARIANCE_TOLERANCE = 1e-9  # relative: a variance computed on two machines
_BATCH_TOLERANCE = 1e-9  # relative: a batch size as the sum of rates times populations


class PlanChecks:
    """Checks of plans. Each plan is read once."""

    def __init__(self, rows: StoreReader, policy: PolicyInForce, delta: float, accountant: str) -> None:
        """`delta` and `accountant` are the header's."""
        self._rows, self._policy, self._delta, self._accountant = rows, policy, delta, accountant
        self._read = lru_cache(maxsize=64)(self._load)
        self._differs = lru_cache(maxsize=1024)(self._compared)
        self._began: dict[bytes, int] = {}  # run → leaves that its first segment had read
        self.other_deltas: set[tuple[str, float]] = set()  # (class, δ) of private classes that are not at the header's

    def of(self, seq: int, epoch: Epoch) -> StepPlan:
        """The plan of an epoch, checked as far as possible without its accounts."""
        plan = self._read(epoch.plan)
        if isinstance(plan, Violation):
            fail(seq, Epoch, *plan)
        for segment in epoch.segments:
            if segment.last > plan.steps:
                reason = f"segment {segment.index} ends at step {segment.last}, its plan has {plan.steps}"
                fail(seq, Epoch, "verify.segment-beyond-plan", reason)
        private = (entry for entry in plan.classes if not entry.public)
        self.other_deltas |= {(entry.name, entry.delta) for entry in private if entry.delta != self._delta}
        began = self._began.setdefault(epoch.run, min(each.eligibility for each in epoch.segments))
        for entry in plan.classes:
            if (wrong := self._class(epoch.plan, entry, began)) is not None:
                fail(seq, Epoch, *wrong)
        for _, variance in epoch.applied:
            if (wrong := _variance_difference(plan, variance)) is not None:
                fail(seq, Epoch, *wrong)
        return plan

    def _load(self, digest: bytes) -> StepPlan | Violation:
        data, name = self._rows.blob(digest), f"plan {digest.hex()[:16]}"
        if data is None:
            return Violation("verify.plan-missing", f"{name} is missing, and the spend cannot be computed without it")
        if hashlib.sha256(data).digest() != digest:
            return Violation("verify.plan-swapped", f"the stored {name} has another digest")
        try:
            plan = StepPlan.from_cbor(data)
        except LaminaError as error:
            return Violation("verify.plan-unreadable", f"{name} cannot be read: {error.problem}")
        return sampling_violation(plan) or accountant_violation(plan, self._accountant) or plan

    def _class(self, digest: bytes, entry: PlannedClass, began: int) -> Violation | None:
        """A class of the plan must agree with the policy when its run began, or with a later one."""
        presets = self._policy.presets_since(entry.name, began)
        if not presets:
            return Violation("verify.class-unknown", f"class {entry.name!r} of its plan is not in the policy")
        wrongs = [self._differs(digest, entry, preset) for preset in presets]
        return None if None in wrongs else wrongs[-1]

    def _compared(self, digest: bytes, entry: PlannedClass, preset: ClassBounds) -> Violation | None:
        plan = self._read(digest)
        assert isinstance(plan, StepPlan)
        return difference_from_policy(plan, entry, preset, self._delta)


def sampling_violation(plan: StepPlan) -> Violation | None:
    """Where a plan contradicts itself: q_k = b_k/N_k, N_k the declared population, and B = Σ b_k (docs/theory.md).

    A public class may have no population. The mean of a batch, which a paper clips, is divided by nothing.
    """
    for entry in plan.classes:
        if entry.population is None and not entry.public:
            reason = f"class {entry.name!r} of its plan is private and declares no population"
            return Violation("verify.population-missing", reason)
    least = math.fsum(entry.sampling_rate * (entry.population or 0) for entry in plan.classes)
    exact = all(entry.population is not None for entry in plan.classes)
    slack = _BATCH_TOLERANCE * least
    if plan.clipping is Clipping.ELEMENTWISE or -slack <= plan.batch - least <= (slack if exact else math.inf):
        return None
    reason = f"its plan divides by {plan.batch:.9g}, and draws {least:.9g} contributions in a step on average"
    return Violation("verify.batch-size-differs", reason)


def accountant_violation(plan: StepPlan, accountant: str) -> Violation | None:
    """Noise on integers is priced by integer orders, and so is all that is added to it: both count so, or neither."""
    if (plan.accountant == INTEGER_RDP) == (accountant == INTEGER_RDP):
        return None
    noise = f"{plan.noise_kind.value} noise priced by {plan.accountant}"
    reason = f"its plan has {noise}, and the ledger counts by {accountant}"
    return Violation("verify.noise-not-priced", reason)


def difference_from_policy(plan: StepPlan, entry: PlannedClass, preset: ClassBounds, delta: float) -> Violation | None:
    """In what a class of a plan differs from the policy, which states every ε at `delta`.

    A class without a clip norm comes from a plan, and promised nothing at any δ.
    """
    name = f"class {entry.name!r}"
    if preset.clip_norm and entry.delta > delta:
        reason = f"{name} has δ = {entry.delta:g} in its plan, above the {delta:g} of the header"
        return Violation("verify.plan-delta-above-header", reason)
    if entry.public and not preset.public:
        return Violation("verify.plan-class-public", f"{name} is public in its plan and private in the policy")
    if None not in (entry.population, preset.population) and entry.population != preset.population:
        numbers = f"{entry.population} in its plan and {preset.population} in the policy"
        return Violation("verify.plan-population-differs", f"{name} has a population of {numbers}")
    return _profile_difference(plan, entry, preset.profile)


def _profile_difference(plan: StepPlan, entry: PlannedClass, text: str) -> Violation | None:
    """Where a class reaches beyond its profile: by the text of the profile, and by the layers of the plan."""
    name = f"class {entry.name!r}"
    if text.startswith("sha256:"):
        return None
    try:
        profile = parse_profile(text)
    except (LaminaError, ValueError, TypeError, ArithmeticError, RecursionError):
        if entry.profile == text:  # a ledger without a policy repeats the text of its first plan
            return None
        return Violation("verify.profile-unreadable", f"the profile of {name}, {text[:80]!r}, has an unknown schema")
    if not profile.described_by(entry.profile):
        reason = f"{name} has profile {entry.profile[:80]} in its plan and {text[:80]} in the policy"
        return Violation("verify.plan-profile-differs", reason)
    if (layer := first_layer_outside(plan, plan.index(entry.name), profile)) is not None:
        reason = f"its plan trains layer {layer[:80]!r} on {name}, outside the profile {text[:80]}"
        return Violation("verify.layer-outside-profile", reason)
    return None


def _variance_difference(plan: StepPlan, variance: tuple[float, ...]) -> Violation | None:
    """S² per layer is the plan's; where a rule moves S, every class keeps the noise multiplier of the plan."""
    if len(variance) != len(plan.noise):
        reason = f"it has noise variances for {len(variance)} layers, its plan has {len(plan.noise)}"
        return Violation("verify.noise-variance-differs", reason)
    for layer, s, v in zip(plan.layers, plan.noise, variance, strict=True):
        if (s == 0) != (v == 0) or (not plan.rules and not math.isclose(v, s * s, rel_tol=_VARIANCE_TOLERANCE)):
            reason = f"layer {layer.name!r} has noise variance {v:.9g}, its plan has {s * s:.9g}"
            return Violation("verify.noise-variance-differs", reason)
    if plan.rules and clip_norms_stay(plan):
        budget, applied = plan.rule(FollowBudget), [math.sqrt(v) for v in variance]
        for k, entry in enumerate(plan.classes):
            least = plan.sigma(k) * (1.0 if budget is None else budget.least)
            if not entry.public and effective_sigma(plan.clip[k], applied) < least * (1 - ADAPTED_TOLERANCE):
                reason = f"class {entry.name!r} has less noise than its plan declares"
                return Violation("verify.noise-below-plan", reason)
        if budget is not None and _least_noise_ratio(plan, applied) > budget.most * (1 + ADAPTED_TOLERANCE):
            reason = f"every class has more than {budget.most:g} times the noise of its plan"
            return Violation("verify.noise-above-plan", reason)
    return None


def clip_norms_stay(plan: StepPlan) -> bool:
    """Whether rules move S alone: what was applied then tells sigma. Under a box, C goes with a chosen S."""
    return plan.rule(FollowQuantile) is None and (plan.rule(Choose) is None or plan.clipping is Clipping.JOINT)


def _least_noise_ratio(plan: StepPlan, applied: Sequence[float]) -> float:
    """The least ratio, over private classes, of applied to declared noise multiplier."""
    private = [k for k, entry in enumerate(plan.classes) if not entry.public and math.isfinite(plan.sigma(k))]
    return min((effective_sigma(plan.clip[k], applied) / plan.sigma(k) for k in private), default=0.0)


def first_layer_outside(plan: StepPlan, k: int, profile: DepthProfile) -> str | None:
    """The first layer for which class k has a clip norm, and which its profile does not reach on any model.

    A plan lists its layers with their tensors and blocks, not the model:

    TOP, BAND, BLOCKS  all spans of the layer lie in the band
    LAYERS             the layer by number or name, or patterns that match its name and all of its tensors
    ADAPTER            every tensor lies below the adapter's name, or the class has an empty slice of it
    weights            a layer with factor 0 is out

    Only the model knows which heads or experts a tensor holds; for these `_profile_difference` compares the texts.
    """
    reached = [i for i, c in enumerate(plan.clip[k]) if c > 0]
    zero = [pattern for pattern, factor in profile.weights if not factor]
    out = {i for i in reached if any(matches_pattern(pattern, plan.layers[i].name) for pattern in zero)}
    if profile.kind is ProfileKind.LAYERS:
        inside = [_named_by_profile(profile.names, layer, i, len(plan.layers)) for i, layer in enumerate(plan.layers)]
    elif profile.kind is ProfileKind.ADAPTER:
        inside = [_only_adapter_tensors(profile.name or "", plan, k, layer) for layer in plan.layers]
    elif profile.kind is ProfileKind.ALL:
        inside = [True] * len(plan.layers)
    else:
        inside = _layers_in_band(profile, plan)
    return next((plan.layers[i].name for i in reached if i in out or not inside[i]), None)


def _named_by_profile(names: Sequence[str | int], layer: PlannedLayer, index: int, count: int) -> bool:
    if layer.name in names or index in names or index - count in names:
        return True
    patterns = [name for name in names if isinstance(name, str)]
    inside = f"{layer.name}."
    elsewhere = [tensor for tensor in layer.parameters if not tensor.startswith(inside)]
    if len(elsewhere) == len(layer.parameters):  # a group with a name of its own
        elsewhere = []
    return all(any(matches_pattern(p, name) for p in patterns) for name in (layer.name, *elsewhere))


def _only_adapter_tensors(name: str, plan: StepPlan, k: int, layer: PlannedLayer) -> bool:
    others = (plan.slice(k, tensor) for tensor in layer.parameters if name not in tensor.split(".")[1:])
    return all(closed is not None and not closed.ranges for closed in others)


def _layers_in_band(profile: DepthProfile, plan: StepPlan) -> list[bool]:
    try:
        return list(spans_in_band(profile, [layer.spans for layer in plan.layers], plan.blocks))
    except PlanError:  # the plan's model has no such blocks
        return [False] * len(plan.layers)
