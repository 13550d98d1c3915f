"""What contributions have lost: from recorded charges to epsilon, over all runs and generations of a ledger.

An epoch says what was charged; what that comes to is computed here, the same way by who writes and by who verifies. A
charge is never taken back: an attempt that was given up has drawn its noise, and an attempt that was redone was paid
twice.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from lamina import cbor
from lamina.account.accountants import pooled_epsilon
from lamina.account.charges import Account
from lamina.account.gaussian_rdp import epsilon_of_noise_multiplier
from lamina.account.schedule import Event, EventCounts, EventKey, add_events, event_counts, grouped, rdp_order_of
from lamina.codec import exact_text
from lamina.ledger.checked_leaves import CheckedLeaves
from lamina.ledger.governance_records import Header
from lamina.ledger.records import Epoch, EpochAccount, Segment
from lamina.ledger.run_records import RunEnd
from lamina.ledger.schema import NANO, nano_epsilon
from lamina.ledger.store.rows import StoreReader
from lamina.plan.risk import UNPROVEN, RiskBound, curve_marks
from lamina.plan.rules import FollowBudget
from lamina.plan.step_plan import StepPlan

CLASS_TOLERANCE = 1e-6  # relative: the bound of a class is kept in 1e-6
_MICRO = 1_000_000
_MACHINES = 1e-7  # relative: an ε computed on two machines
_SPENDING_CONTEXT = b"lamina/spending/1\n"


@lru_cache(maxsize=1 << 16)  # asked for every bound at every charge
def signed_spend(noise_multiplier: int, delta: float) -> int:
    """The most that a contribution may lose that signed this multiplier, in 1e-9: exact, μ = 1/z."""
    return nano_epsilon(epsilon_of_noise_multiplier(noise_multiplier / _MICRO, delta))


def signed_limit(noise_multiplier: int, delta: float) -> float:
    """The largest ε that a ledger states as at most `signed_spend`: what the filter of a signed bound admits."""
    return math.nextafter(signed_spend(noise_multiplier, delta) / NANO, 0.0)


def adaptive_order(plan: StepPlan) -> float | None:
    """The Rényi order at which a plan follows its budget; None for any other plan."""
    return rdp_order_of(plan.accountant) if plan.rule(FollowBudget) is not None else None


def planned_charges(plan: StepPlan, cls: str, scale: float, segments: Iterable[Segment]) -> tuple[Event, ...]:
    """What the steps of these attempts take, by the plan, from a contribution whose thresholds are scaled.

    Where noise follows a budget this is no upper bound: the whole budget is charged when its run begins.
    """
    order = adaptive_order(plan)
    if not scale:  # left out
        return ()
    schedule = [event for each in segments for event in plan.schedule_between(cls, each.first, each.last, scale)]
    return tuple(replace(event, order=order) for event in grouped(schedule))


def whole_plan_charges(plan: StepPlan, cls: str, scale: float) -> tuple[Event, ...]:
    """The price of a whole plan: what a run that follows its budget is charged at once."""
    order, schedule = adaptive_order(plan), grouped(plan.schedule(cls, scale))
    return tuple(replace(event, order=order) for event in schedule)


def epoch_marks(epoch: Epoch, plan: StepPlan | None) -> dict[str, frozenset[str]]:
    """Return the limits of the curves of an epoch's charges, by charged class.

    Nothing is proven where the plan is not known, or where signed bounds are charged and not the class as a whole: what
    one contribution lost may then be split over two accounts.
    """
    marks = frozenset((UNPROVEN,)) if plan is None else curve_marks(plan)
    whole = {each.cls for each in epoch.accounts if not each.noise_multiplier}
    return {each.cls: marks if each.cls in whole else marks | {UNPROVEN} for each in epoch.accounts}


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """A limit: ε ≤ `epsilon` at `delta`, by `accountant`; inf is no limit. `risk` replaces the limit on ε."""

    epsilon: float = math.inf
    delta: float
    accountant: str
    risk: RiskBound | None = None

    @property
    def most(self) -> float:
        """Return the largest price within the limit."""
        return self.epsilon if self.risk is None else self.risk.tpr

    def within(self, other: Limit) -> bool:
        """Return whether this limit implies the other."""
        if self.risk is not None and other.risk is not None:
            return self.accountant == other.accountant and self.risk.implies(other.risk)
        same = (self.delta, self.accountant, self.risk) == (other.delta, other.accountant, other.risk)
        return same and self.epsilon <= other.epsilon

    def price(self, events: EventCounts, marks: frozenset[str] = frozenset()) -> float:
        """Return ε of all events together, or the rate that the risk bound limits (1 if no bound is proven)."""
        if self.risk is not None:
            return self.risk.rate(events, accountant=self.accountant, marks=marks)
        return pooled_epsilon(events, delta=self.delta, name=self.accountant)


class Spending:
    """All charges of every account, and their ε at the header's δ by the header's accountant.

    `follow` and `add` read epochs and also keep what each run was charged. `charge` adds to the accounts alone.
    """

    def __init__(self, header: Header) -> None:
        self.accountant, self.delta = header.accountant, header.delta
        self._reset()

    def _reset(self) -> None:
        self._events: dict[Account, dict[EventKey, int]] = {}
        self._of_runs: dict[tuple[bytes, Account], dict[EventKey, int]] = {}
        self._attempts: dict[tuple[bytes, int, int], dict[Account, int]] = {}  # run, segment, generation → steps
        self._scales: dict[tuple[bytes, bytes], dict[Account, float]] = {}  # by run and plan
        self._plans: dict[str, set[bytes]] = {}  # by class
        self.epochs = self._upto = 0
        self.split: set[str] = set()  # classes of which an epoch charges signed bounds and not the whole class
        self.content_only: set[str] = set()  # classes of runs that ended with a public number of contributions

    def follow(self, rows: StoreReader, size: int, leaves: CheckedLeaves) -> None:
        """Read the checked leaves up to leaf `size`. Each is read once, since leaves do not change."""
        if size < self._upto:  # the view of an older transaction
            self._reset()
        for leaf in leaves.records(rows, Epoch, self._upto, size):
            assert isinstance(leaf.record, Epoch)
            self.add(leaf.record)
        for leaf in leaves.records(rows, RunEnd, self._upto, size):
            if isinstance(leaf.record, RunEnd) and leaf.record.public_number:
                self.content_only |= self.classes((leaf.record.run,))
        self._upto = size

    def add(self, epoch: Epoch) -> None:
        """Charge what an epoch charges."""
        self.epochs += 1
        whole = {each.cls for each in epoch.accounts if not each.noise_multiplier}
        self.split |= {each.cls for each in epoch.accounts} - whole
        last = epoch.segments[-1]
        steps = self._attempts.setdefault((epoch.run, last.index, last.generation), {})
        for each in epoch.accounts:
            self.charge(each.bound, each.charges)
            events = event_counts(each.charges)
            add_events(self._of_runs.setdefault((epoch.run, each.bound), {}), events)
            self._scales.setdefault((epoch.run, epoch.plan), {})[each.bound] = each.scale
            self._plans.setdefault(each.cls, set()).add(epoch.plan)
            if events:
                steps[each.bound] = steps.get(each.bound, 0) + sum(events.values())

    def charge(self, bound: Account, charges: Iterable[Event]) -> None:
        """Charge one account."""
        add_events(self._events.setdefault(bound, {}), event_counts(charges))

    def bounds(self) -> Sequence[Account]:
        """Every account that there is."""
        return sorted(self._events)

    def events(self, bound: Account, run: bytes | None = None) -> dict[EventKey, int]:
        """Return all charges of one account, or those of one run."""
        return dict(self._events.get(bound, {}) if run is None else self._of_runs.get((run, bound), {}))

    def classes(self, runs: Container[bytes]) -> set[str]:
        """Return the classes that these runs charged."""
        return {account.cls for run, account in self._of_runs if run in runs}

    def scales(self, run: bytes, plan: bytes) -> dict[Account, float]:
        """Return the accounts that a run charged under a plan, each with its scale."""
        return dict(self._scales.get((run, plan), {}))

    def plans(self, cls: str) -> set[bytes]:
        """Return the digests of the plans under which a class was charged."""
        return set(self._plans.get(cls, ()))

    def attempts(self, bound: Account) -> Iterator[tuple[bytes, int, int, int]]:
        """Return (run, segment, generation, steps) of every attempt that charged the account."""
        return ((*key, steps[bound]) for key, steps in self._attempts.items() if bound in steps)

    def epsilon(self, bound: Account, more: Iterable[Event] = ()) -> float:
        """ε of an account, or what it would be after `more`."""
        events = self.events(bound)
        add_events(events, event_counts(more))
        return pooled_epsilon(events, delta=self.delta, name=self.accountant)

    def spend(self, bound: Account) -> int:
        """The same as a ledger writes it, in 1e-9, rounded up."""
        return nano_epsilon(self.epsilon(bound))

    def state(self) -> bytes:
        """Digest of all charges: what `Epoch.state` holds. Two who agree on it agree on every ε that follows."""
        rows = [
            [*bound, [[*map(exact_text, kind), steps] for kind, steps in sorted(events.items())]]
            for bound, events in sorted(self._events.items())
        ]
        return hashlib.sha256(_SPENDING_CONTEXT + cbor.encode(rows, max_size=1 << 28)).digest()

    def exhausted(self, account: EpochAccount, plan: StepPlan, segments: Iterable[Segment]) -> bool:
        """Whether what was charged before forbids the next larger factor than the account has."""
        more = planned_charges(plan, account.cls, account.scale * account.next_factor, segments)
        limit = signed_limit(account.noise_multiplier, self.delta)
        return self.epsilon(account.bound, more) > limit * (1 - _MACHINES)

    def copy(self, *only: Account) -> Spending:
        """To try a charge on; of some accounts alone, if they are named."""
        made = copy.copy(self)
        made._reset()
        made._events = {bound: dict(found) for bound, found in self._events.items() if not only or bound in only}
        return made
