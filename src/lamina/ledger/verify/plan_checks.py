"""Checks of a plan: that it keeps to the policy and its depth profiles.

And that accounts are charged what it takes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache

from lamina.account.accountants import EventCounts, EventKey
from lamina.account.gaussian_rdp import step_rdp
from lamina.errors import LaminaError
from lamina.ledger.governance_records import Preset, parse_profile
from lamina.ledger.records import Epoch, EpochAccount, EpochCharge, Segment, SegmentOutcome
from lamina.ledger.spending import Bound, adaptive_order, planned_charges, steps_by_kind, whole_plan_charges
from lamina.ledger.store.interface import StoreReader
from lamina.ledger.verify.replay_state import PolicyInForce, fail
from lamina.plan.depth_profile import DepthProfile, ProfileKind, exact_fraction
from lamina.plan.rules import FollowBudget, FollowEnergy, FollowQuantile, effective_sigma
from lamina.plan.selection import matches_pattern
from lamina.plan.step_plan import Clipping, PlannedClass, PlannedLayer, StepPlan

# Depth: outside its profile a class has no threshold, in the layers that the plan itself lists.
#
# A plan names its layers, their depth and their tensors, and not the model. So what is asked is what a model must have
# for the plan to keep to the profile:
#
# place     TOP, BAND, BLOCKS: a layer whose first block is b, of n, has depth b/(n-1). How many blocks there are is not
#           in the plan, since some may be frozen: some n must fit the depth of every layer, and let the profile reach
#           those that the class has a threshold for
#           LAYERS: the layer by its number or name, or patterns that mean its name and all of its tensors
#           ADAPTER: every tensor lies below the adapter's name, or the class has an empty slice of it
# weights   a layer with the factor 0 is out
#
# Which heads or experts a tensor holds only the model knows; of these the words of the profile are compared (plans.py).

_MOST_BLOCKS = 1_000_000  # blocks; depths that ask for more were not counted in blocks


def first_layer_outside(plan: StepPlan, k: int, profile: DepthProfile) -> str | None:
    """The first layer for which class k has a threshold, and which its profile does not reach on any model."""
    reached = [i for i, c in enumerate(plan.clip[k]) if c > 0]
    for i in reached:
        if any(not factor and matches_pattern(pattern, plan.layers[i].name) for pattern, factor in profile.weights):
            return plan.layers[i].name
    wrong: Iterator[int]
    if profile.kind is ProfileKind.LAYERS:
        wrong = (i for i in reached if not _named_by_profile(profile.names, plan.layers[i], i, len(plan.layers)))
    elif profile.kind is ProfileKind.ADAPTER:
        wrong = (i for i in reached if not _only_adapter_tensors(profile.name or "", plan, k, plan.layers[i]))
    elif profile.kind is ProfileKind.ALL:
        return None
    else:
        wrong = iter(
            _first_without_block_count(profile, [exact_fraction(layer.depth) for layer in plan.layers], reached)
        )
    first = next(wrong, None)
    return None if first is None else plan.layers[first].name


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
    for tensor in layer.parameters:
        if name not in tensor.split(".")[1:]:
            closed = plan.slice(k, tensor)
            if closed is None or closed.ranges:
                return False
    return True


# ------------------------------------------------------------------------------------ depth in blocks


def _first_without_block_count(
    profile: DepthProfile, depths: Sequence[Fraction], reached: Sequence[int]
) -> Sequence[int]:
    """The first layer with which no number of blocks is left; nothing if some number fits all."""
    if all(depth == 1 for depth in depths) and _reaches_single_block(profile):
        return ()
    step = math.lcm(*(depth.denominator for depth in depths))
    step = 1 if step > _MOST_BLOCKS else step  # n-1 is a multiple of it
    least, most = Fraction(2), Fraction(_MOST_BLOCKS**2)
    for i in reached:
        low, high = _block_count_range(profile, depths[i])
        least, most = max(least, low), min(most, high)
        if 1 + step * math.ceil((least - 1) / step) > most:
            return (i,)
    return ()


def _reaches_single_block(profile: DepthProfile) -> bool:
    """Whether it reaches the only block of a model; its depth is 1, and it is the first."""
    first, last = profile.bounds
    if profile.kind is ProfileKind.BLOCKS:
        return first in (0, -1) and last in (0, -1)
    return first == 0 and last == 1


_NO_BLOCK_COUNT = (Fraction(1), Fraction(0))


def _block_count_range(profile: DepthProfile, d: Fraction) -> tuple[Fraction, Fraction]:
    """The least and the most blocks, of two or more, of which the profile holds the one at depth d = b/(n-1)."""
    if profile.kind is ProfileKind.BLOCKS:
        return _block_count_range_by_number(int(profile.bounds[0]), int(profile.bounds[1]), d)
    low, high = map(exact_fraction, profile.bounds)
    least = [Fraction(2)]
    for room, needed in ((d - low, d), (high - d, 1 - d)):  # low·n ≤ b and b+1 ≤ high·n, over n
        if room <= 0 and (room < 0 or needed > 0):
            return _NO_BLOCK_COUNT
        if room > 0:
            least.append(needed / room)
    return max(least), Fraction(_MOST_BLOCKS**2)


def _block_count_range_by_number(first: int, last: int, d: Fraction) -> tuple[Fraction, Fraction]:
    """The same of blocks by number; a negative one is counted from the end."""
    least, most = (
        [Fraction(2), *(Fraction(-b if b < 0 else b + 1) for b in (first, last))],
        [Fraction(_MOST_BLOCKS**2)],
    )
    if first >= 0:  # first ≤ d(n-1)
        if d == 0 and first > 0:
            return _NO_BLOCK_COUNT
        least.append(first / d + 1 if d else Fraction(2))
    elif d < 1:  # n+first ≤ d(n-1)
        most.append((-first - d) / (1 - d))
    if last >= 0:  # d(n-1) ≤ last
        if d > 0:
            most.append(last / d + 1)
    elif d < 1:  # d(n-1) ≤ n+last
        least.append((-last - d) / (1 - d))
    elif last < -1:
        return _NO_BLOCK_COUNT
    return max(least), min(most)


_VARIANCE_TOLERANCE = 1e-9  # relative: what is computed twice on two machines
_ADAPTED_TOLERANCE = 1e-6  # the same of noise that moved during a run, in single precision


class PlanChecks:
    """The plans of a ledger, read once each."""

    def __init__(self, rows: StoreReader, policy: PolicyInForce) -> None:
        self._rows, self._policy = rows, policy
        self._read = lru_cache(maxsize=64)(self._load)
        self._differs = lru_cache(maxsize=1024)(self._compared)
        self._began: dict[bytes, int] = {}  # run → leaves that its first segment read

    def of(self, seq: int, epoch: Epoch) -> StepPlan:
        """The plan of an epoch, with all that can be said of it without its accounts."""
        plan = self._read(epoch.plan)
        if isinstance(plan, str):
            fail(seq, Epoch, "verify.of", plan)
        for segment in epoch.segments:
            if segment.last > plan.steps:
                fail(
                    seq,
                    Epoch,
                    "verify.segment-ends-step",
                    f"segment {segment.index} ends at step {segment.last}, its plan has {plan.steps}",
                )
        began = self._began.setdefault(epoch.run, min(each.eligibility for each in epoch.segments))
        for entry in plan.classes:
            if (wrong := self._class(epoch.plan, entry, began)) is not None:
                fail(seq, Epoch, "verify.of-2", wrong)
        if (wrong := _variance_difference(plan, epoch.variance)) is not None:
            fail(seq, Epoch, "verify.of-2", wrong)
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
        return difference_from_policy(plan, entry, preset)


def difference_from_policy(plan: StepPlan, entry: PlannedClass, preset: Preset) -> str | None:
    """In what a class of a plan is another one than the policy has; in words."""
    if entry.public and not preset.public:
        return f"class {entry.name!r} is public in its plan, and private in the policy"
    if None not in (entry.population, preset.population) and entry.population != preset.population:
        numbers = f"{entry.population} in its plan, {preset.population} in the policy"
        return f"class {entry.name!r} has a population of {numbers}"
    return _profile_difference(plan, entry, preset.profile)


def _profile_difference(plan: StepPlan, entry: PlannedClass, text: str) -> str | None:
    """Where a class reaches beyond its profile: by the words of the profile, and by the layers of the plan."""
    if text.startswith("sha256:"):
        return None
    try:
        profile = parse_profile(text)
    except (LaminaError, ValueError, TypeError, ArithmeticError, RecursionError):
        if entry.profile == text:  # a ledger without a policy repeats the words of its first plan
            return None
        return f"the profile {text[:80]!r} of class {entry.name!r} is of a schema that is not known"
    if not profile.described_by(entry.profile):
        return f"class {entry.name!r} reaches {entry.profile[:80]} in its plan, {text[:80]} in the policy"
    if (layer := first_layer_outside(plan, plan.index(entry.name), profile)) is not None:
        return (
            f"class {entry.name!r} has a threshold for layer {layer[:80]!r} in its plan, which lies outside its "
            f"profile, {text[:80]}"
        )
    return None


def _variance_difference(plan: StepPlan, variance: tuple[float, ...]) -> str | None:
    """S² per layer is the plan's; where a rule moves S, it leaves every class the multiplier that was declared."""
    if len(variance) != len(plan.noise):
        return f"it has variances of {len(variance)} layers, its plan has {len(plan.noise)}"
    for layer, s, v in zip(plan.layers, plan.noise, variance, strict=True):
        if (s == 0) != (v == 0) or (not plan.rules and not math.isclose(v, s * s, rel_tol=_VARIANCE_TOLERANCE)):
            return f"the variance of layer {layer.name!r} is {v:.9g}, its plan has {s * s:.9g}"
    if plan.rules and plan.clipping is Clipping.BOX and plan.rule(FollowQuantile) is None:
        budget, applied = plan.rule(FollowBudget), [math.sqrt(v) for v in variance]
        for k, entry in enumerate(plan.classes):
            least = plan.sigma(k) * (1.0 if budget is None else budget.least)
            if not entry.public and effective_sigma(plan.clip[k], applied) < least * (1 - _ADAPTED_TOLERANCE):
                return f"with these variances class {entry.name!r} has less noise than its plan declares"
        if budget is not None and _least_noise_ratio(plan, applied) > budget.most * (1 + _ADAPTED_TOLERANCE):
            return f"with these variances every class has more than {budget.most:g} times the noise of its plan"
    return None


def _least_noise_ratio(plan: StepPlan, applied: Sequence[float]) -> float:
    """How often the declared multiplier the class has that decides the noise."""
    private = [k for k, entry in enumerate(plan.classes) if not entry.public and math.isfinite(plan.sigma(k))]
    return min((effective_sigma(plan.clip[k], applied) / plan.sigma(k) for k in private), default=0.0)


# Occurrences: how often the attempts of a run, and of its copies, may have used one contribution under a cap.
#
# A contribution occurs at most `cap` times along the weights of a run. Attempts hang together as a tree: each goes on
# from the weights that another one left, and what was given up, lost, or done by a copy is a branch of its own. The
# most occurrences over all branches, none with more than the cap along its way, are
#
#     Σ over lines of min(cap, steps of the line),
#
# where the tree is cut into lines such that each goes on into its longest branch: what occurs before a fork is lost to
# every branch after it, so that the worst case occurs as late as it can. Steps under another plan count nothing here.


class _AttemptLine:
    """Attempts that go on from each other, the first one from `before`; `start` and `tip` count steps from the root."""

    def __init__(self, before: _TreeAttempt | None) -> None:
        self.before = before
        self.start = self.tip = 0 if before is None else before.depth
        self.attempts: list[_TreeAttempt] = []

    def take(self, attempts: Iterable[_TreeAttempt]) -> None:
        for each in attempts:
            each.line, each.at = self, len(self.attempts)
            self.attempts.append(each)


class _TreeAttempt:
    """The steps from the root to its end, its line, and its place there."""

    def __init__(self, depth: int, line: _AttemptLine) -> None:
        self.depth, self.at = depth, 0
        self.line = line


class AttemptTree:
    """The attempts of a run in the order of their epochs. `most` is what they come to under one plan."""

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self._closed: dict[tuple[int, int], _TreeAttempt] = {}
        self.most = 0

    def add(self, segments: Iterable[Segment], *, counts: bool = True) -> None:
        """`counts`: whether they were attempts under the plan."""
        for each in segments:
            before = self._closed.get((each.index - 1, each.after or 0))
            if before is not None and before.line.attempts[-1] is before:
                line = before.line
            else:
                line = _AttemptLine(before)
            made = _TreeAttempt(line.tip + (each.last - each.first if counts else 0), line)
            line.take([made])
            if each.outcome is SegmentOutcome.CLOSED:
                self._closed[each.index, each.generation] = made
            self.most -= self._of(line)
            line.tip = made.depth
            self.most += self._of(line)
            self._swap_longer_branch(line)

    def _swap_longer_branch(self, line: _AttemptLine) -> None:
        """A branch that is longer than what it branched off from changes places with it, unless both have `cap`."""
        while line.before is not None:
            above = line.before.line
            if line.tip <= above.tip or above.tip - line.start >= self._cap:
                return
            self.most -= self._of(line) + self._of(above)
            mine, rest = line.attempts, above.attempts[line.before.at + 1 :]
            del above.attempts[line.before.at + 1 :]
            line.attempts = []
            above.take(mine)
            line.take(rest)
            above.tip, line.tip = line.tip, above.tip
            self.most += self._of(line) + self._of(above)
            line = above

    def _of(self, line: _AttemptLine) -> int:
        return min(self._cap, line.tip - line.start)


# Pace: how much of a budget that its noise follows an attempt has used, by the noise that its epoch says was applied.
#
# At the plan's one Rényi order prices add: n steps at f times the declared sigma cost as much as
# n·RDP(f·sigma)/RDP(sigma) declared ones. A run is charged its budget once, as a whole; what it then may not do is to
# use more of it than there is.


def declared_steps_used(plan: StepPlan, cls: str, scale: float, variance: Sequence[float], steps: int) -> float:
    """How many declared steps these steps of a class cost as much as, at least."""
    order, schedule = adaptive_order(plan), plan.schedule(cls, scale)
    if order is None or not schedule:
        return 0.0
    event = schedule[0]
    price = step_rdp(event.q, event.sigma * _noise_factor(plan, cls, variance), order)
    return steps * price / step_rdp(event.q, event.sigma, order)


def _noise_factor(plan: StepPlan, cls: str, variance: Sequence[float]) -> float:
    """How often the declared sigma was applied. Where thresholds move too, the most that its rule allows."""
    budget = plan.rule(FollowBudget)
    assert budget is not None
    known = all(isinstance(rule, FollowBudget | FollowEnergy) for rule in plan.rules)
    if not known or plan.clipping is not Clipping.BOX:
        return budget.most
    k = plan.index(cls)
    return effective_sigma(plan.clip[k], [math.sqrt(v) for v in variance]) / plan.sigma(k)


# Charges: what an epoch takes from an account is what its plan takes in the steps of its segments.
#
# exact      the plan's schedule over the steps of every attempt, given up or not: neither more nor less
# followed   noise that follows its budget: a filter proves that the run never passes its budget, not that it has cost
#            less on the way. So the whole of it must be charged when the run first charges the account, and once more for
#            every time that its attempts use it up (pace.py)
# capped     raw noise with a cap on occurrences, counted along the weights: as often as one contribution may have
#            occurred over all attempts (occurrences.py). A run that was copied, or redid steps, may have paid for more

_MULTIPLIER_TOLERANCE = 1e-12  # relative: a multiplier that is computed twice on two machines


@dataclass(slots=True)
class _RunCharges:
    """What a run was charged under one plan, by account."""

    charged: dict[Bound, dict[EventKey, int]] = field(default_factory=dict)
    used: dict[Bound, float] = field(default_factory=dict)  # of a budget that is followed, in declared steps


class ChargeChecks:
    """What runs were charged. One question for each account of each epoch, in order."""

    def __init__(self) -> None:
        self._runs: dict[tuple[bytes, bytes], _RunCharges] = {}
        self._capped: dict[bytes, dict[bytes, AttemptTree]] = {}  # run → plan → how often one may have occurred

    def begin(self, epoch: Epoch, plan: StepPlan) -> None:
        """An epoch comes: its segments were tried."""
        self._runs.setdefault((epoch.run, epoch.plan), _RunCharges())
        plans = self._capped.setdefault(epoch.run, {})
        if (cap := plan.injection.occurrences) is not None:
            plans.setdefault(epoch.plan, AttemptTree(cap))
        for digest, attempts in plans.items():
            attempts.add(epoch.segments, counts=digest == epoch.plan)

    def counted(self, epoch: Epoch, plan: StepPlan, account: EpochAccount) -> tuple[EpochCharge, ...] | str:
        """What is to be counted for an account; or why what it states cannot be."""
        cap = plan.injection.occurrences
        if adaptive_order(plan) is None and cap is None:
            expected = planned_charges(plan, account.cls, account.scale, epoch.segments)
            wrong = _charge_difference(steps_by_kind(account.charges), steps_by_kind(expected), exact=True)
            return expected if wrong is None else wrong
        run = self._runs[epoch.run, epoch.plan]
        total = run.charged.setdefault(account.bound, {})
        for kind, steps in steps_by_kind(account.charges).items():
            total[kind] = total.get(kind, 0) + steps
        least = steps_by_kind(whole_plan_charges(plan, account.cls, account.scale))
        if cap is not None:
            least = dict.fromkeys(least, self._capped[epoch.run][epoch.plan].most)
        wrong = _charge_difference(total, least, exact=False)
        if wrong is None and cap is None and least:
            steps = sum(each.last - each.first for each in epoch.segments)
            more = declared_steps_used(plan, account.cls, account.scale, epoch.variance, steps)
            run.used[account.bound] = run.used.get(account.bound, 0.0) + more
            wrong = _budget_overdrawn(run.used[account.bound], total, least)
        return account.charges if wrong is None else wrong


def _budget_overdrawn(used: float, charged: EventCounts, whole: EventCounts) -> str | None:
    """The attempts of a run, and of its copies, have used more than the budgets that were charged."""
    kind, steps = max(whole.items(), key=lambda pair: pair[1])
    budget = steps * (sum(charged[each] for each in _nearly_equal_keys(charged, kind)) // steps)
    if used > budget * (1 + _ADAPTED_TOLERANCE) + _ADAPTED_TOLERANCE:
        return f"has used its budget for {used:.6g} steps, and {budget} are charged"
    return None


def _charge_difference(stated: EventCounts, expected: EventCounts, *, exact: bool) -> str | None:
    """What the plan takes and is not charged; where it must be exact, also what is charged beyond that."""
    left: dict[EventKey, int] = dict(stated)
    for kind, steps in expected.items():
        found = sum(left.pop(each) for each in _nearly_equal_keys(left, kind))
        if found < steps or (exact and found > steps):
            return f"charges {found} steps {_event_text(kind)}, its plan takes {steps}"
    for kind, steps in left.items():
        return f"charges {steps} steps {_event_text(kind)}, which its plan does not take"
    return None


def _nearly_equal_keys(events: Mapping[EventKey, int], kind: EventKey) -> list[EventKey]:
    """The same, as one or another machine computed it."""
    sigma, rate, order = kind
    return [
        each
        for each in events
        if each[1:] == (rate, order) and math.isclose(each[0], sigma, rel_tol=_MULTIPLIER_TOLERANCE)
    ]


def _event_text(kind: EventKey) -> str:
    sigma, rate, order = kind
    return f"at multiplier {sigma:.9g} and rate {rate:.9g}" + (f", order {order:g}" if order else "")
