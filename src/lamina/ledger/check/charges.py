"""Charges: what an epoch takes from an account is what its plan takes in the steps of its segments.

exact      the plan's schedule over the steps of every attempt, given up or not: neither more nor less
followed   noise that follows its budget: a filter proves that the run never passes its budget, not that it has cost
           less on the way. So the whole of it must be charged when the run first charges the account
capped     raw noise with a cap N on occurrences: min(N, steps) along the weights, and min(N, steps) of every attempt
           beside them; a run that was copied may have been charged more. Occurrences are counted along the weights, so
           an attempt that goes on from them is beside them only once another one has begun without it
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from lamina.account.pooled import Events, Kind
from lamina.ledger.records import Account, Charge, Epoch, Outcome, Segment
from lamina.ledger.spend import Bound, due, followed_order, summed, whole
from lamina.plan.step import StepPlan

_NEAR = 1e-12  # relative: a multiplier that is computed twice on two machines


@dataclass(slots=True)
class _Run:
    """What a run was charged under one plan, and how often its contributions were used at most."""

    charged: dict[Bound, dict[Kind, int]] = field(default_factory=dict)
    closed: set[range] = field(default_factory=set)
    beside: int = 0
    end: int = 0  # where the weights are
    tried: int = 0  # steps of the last attempt, if it was given up: along the weights until there is another

    def add(self, segments: Iterable[Segment], cap: int) -> None:
        for each in segments:
            self.beside += min(cap, self.tried)
            steps, self.tried = range(each.first, each.last), 0
            if each.outcome is Outcome.CLOSED and steps not in self.closed:
                self.closed.add(steps)
                self.end = max(self.end, each.last)
            elif each.outcome is Outcome.ABANDONED and each.first >= self.end:
                self.tried = len(steps)
            else:
                self.beside += min(cap, len(steps))

    def occurrences(self, cap: int) -> int:
        return min(cap, sum(map(len, self.closed)) + self.tried) + self.beside


class Charges:
    """What runs were charged. One question for each account of each epoch, in order."""

    def __init__(self) -> None:
        self._runs: dict[tuple[bytes, bytes], _Run] = {}

    def begin(self, epoch: Epoch, plan: StepPlan) -> None:
        """An epoch comes: its segments were tried."""
        run = self._runs.setdefault((epoch.run, epoch.plan), _Run())
        if plan.injection.occurrences is not None:
            run.add(epoch.segments, plan.injection.occurrences)

    def counted(self, epoch: Epoch, plan: StepPlan, account: Account) -> tuple[Charge, ...] | str:
        """What is to be counted for an account; or why what it states cannot be."""
        cap = plan.injection.occurrences
        if followed_order(plan) is None and cap is None:
            expected = due(plan, account.cls, account.scale, epoch.segments)
            wrong = _compared(summed(account.charges), summed(expected), exact=True)
            return expected if wrong is None else wrong
        run = self._runs[epoch.run, epoch.plan]
        total = run.charged.setdefault(account.bound, {})
        for kind, steps in summed(account.charges).items():
            total[kind] = total.get(kind, 0) + steps
        if cap is None:
            least = summed(whole(plan, account.cls, account.scale))
        else:
            most = run.occurrences(cap)
            least = dict.fromkeys(summed(whole(plan, account.cls, account.scale)), most)
        wrong = _compared(total, least, exact=False)
        return account.charges if wrong is None else wrong


def _compared(stated: Events, expected: Events, *, exact: bool) -> str | None:
    """What the plan takes and is not charged; where it must be exact, also what is charged beyond that."""
    left: dict[Kind, int] = dict(stated)
    for (sigma, rate, order), steps in expected.items():
        kind = _find(left, sigma, rate, order)
        found = 0 if kind is None else left.pop(kind)
        if found < steps or (exact and found > steps):
            return (
                f"charges {found} steps at multiplier {sigma:.9g} and rate {rate:.9g}, its plan takes {steps}"
            )
    if left and exact:
        (sigma, rate, _), steps = next(iter(left.items()))
        return f"charges {steps} steps at multiplier {sigma:.9g} and rate {rate:.9g}, which its plan does not take"
    if any(not order for _, _, order in left) and any(order for _, _, order in expected):
        return "charges steps whose noise followed its budget as if it had been fixed"
    return None


def _find(events: Mapping[Kind, int], sigma: float, rate: float, order: float) -> Kind | None:
    near = (
        kind for kind in events if kind[1:] == (rate, order) and math.isclose(kind[0], sigma, rel_tol=_NEAR)
    )
    return next(near, None)
