"""Charges: what an epoch takes from an account is what its plan takes in the steps of its segments.

exact      the plan's schedule over the steps of every attempt, given up or not: neither more nor less
followed   noise that follows its budget: a filter proves that the run never passes its budget, not that it has cost
           less on the way. So the whole of it must be charged when the run first charges the account, and once more for
           every time that its attempts use it up (pace.py)
capped     raw noise with a cap on occurrences, counted along the weights: as often as one contribution may have
           occurred over all attempts (occurrences.py). A run that was copied, or redid steps, may have paid for more
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from lamina.account.pooled import Events, Kind
from lamina.ledger.check import pace
from lamina.ledger.check.occurrences import Occurrences
from lamina.ledger.records import Account, Charge, Epoch
from lamina.ledger.spend import Bound, due, followed_order, summed, whole
from lamina.plan.step import StepPlan

_NEAR = 1e-12  # relative: a multiplier that is computed twice on two machines
_ADAPTED = 1e-6  # the same of noise that moved during a run, in single precision


@dataclass(slots=True)
class _Run:
    """What a run was charged under one plan, by account."""

    charged: dict[Bound, dict[Kind, int]] = field(default_factory=dict)
    used: dict[Bound, float] = field(default_factory=dict)  # of a budget that is followed, in declared steps


class Charges:
    """What runs were charged. One question for each account of each epoch, in order."""

    def __init__(self) -> None:
        self._runs: dict[tuple[bytes, bytes], _Run] = {}
        self._capped: dict[
            bytes, dict[bytes, Occurrences]
        ] = {}  # run → plan → how often one may have occurred

    def begin(self, epoch: Epoch, plan: StepPlan) -> None:
        """An epoch comes: its segments were tried."""
        self._runs.setdefault((epoch.run, epoch.plan), _Run())
        plans = self._capped.setdefault(epoch.run, {})
        if (cap := plan.injection.occurrences) is not None:
            plans.setdefault(epoch.plan, Occurrences(cap))
        for digest, attempts in plans.items():
            attempts.add(epoch.segments, counts=digest == epoch.plan)

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
        least = summed(whole(plan, account.cls, account.scale))
        if cap is not None:
            least = dict.fromkeys(least, self._capped[epoch.run][epoch.plan].most)
        wrong = _compared(total, least, exact=False)
        if wrong is None and cap is None and least:
            steps = sum(each.last - each.first for each in epoch.segments)
            more = pace.used(plan, account.cls, account.scale, epoch.variance, steps)
            run.used[account.bound] = run.used.get(account.bound, 0.0) + more
            wrong = _overdrawn(run.used[account.bound], total, least)
        return account.charges if wrong is None else wrong


def _overdrawn(used: float, charged: Events, whole: Events) -> str | None:
    """The attempts of a run, and of its copies, have used more than the budgets that were charged."""
    kind, steps = max(whole.items(), key=lambda pair: pair[1])
    budget = steps * (sum(charged[each] for each in _near(charged, kind)) // steps)
    if used > budget * (1 + _ADAPTED) + _ADAPTED:
        return f"has used its budget for {used:.6g} steps, and {budget} are charged"
    return None


def _compared(stated: Events, expected: Events, *, exact: bool) -> str | None:
    """What the plan takes and is not charged; where it must be exact, also what is charged beyond that."""
    left: dict[Kind, int] = dict(stated)
    for kind, steps in expected.items():
        found = sum(left.pop(each) for each in _near(left, kind))
        if found < steps or (exact and found > steps):
            return f"charges {found} steps {_told(kind)}, its plan takes {steps}"
    for kind, steps in left.items():
        return f"charges {steps} steps {_told(kind)}, which its plan does not take"
    return None


def _near(events: Mapping[Kind, int], kind: Kind) -> list[Kind]:
    """The same, as one or another machine computed it."""
    sigma, rate, order = kind
    return [
        each for each in events if each[1:] == (rate, order) and math.isclose(each[0], sigma, rel_tol=_NEAR)
    ]


def _told(kind: Kind) -> str:
    sigma, rate, order = kind
    return f"at multiplier {sigma:.9g} and rate {rate:.9g}" + (f", order {order:g}" if order else "")
