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
    """What a run was charged under one plan, and how often its contributions were used at most."""

    charged: dict[Bound, dict[Kind, int]] = field(default_factory=dict)
    attempts: Occurrences | None = None  # where they are capped
    used: dict[str, float] = field(
        default_factory=dict
    )  # by class, of a budget that is followed, in declared steps


class Charges:
    """What runs were charged. One question for each account of each epoch, in order."""

    def __init__(self) -> None:
        self._runs: dict[tuple[bytes, bytes], _Run] = {}

    def begin(self, epoch: Epoch, plan: StepPlan) -> None:
        """An epoch comes: its segments were tried."""
        run = self._runs.setdefault((epoch.run, epoch.plan), _Run())
        if (cap := plan.injection.occurrences) is not None:
            run.attempts = run.attempts or Occurrences(cap)
            run.attempts.add(epoch.segments)
        steps = sum(each.last - each.first for each in epoch.segments)
        for cls, more in pace.used(plan, epoch.variance, steps).items():
            run.used[cls] = run.used.get(cls, 0.0) + more

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
        if run.attempts is not None:
            least = dict.fromkeys(least, run.attempts.most)
        wrong = _compared(total, least, exact=False)
        if wrong is None and cap is None and account.bound == (account.cls, 0, 0):
            wrong = _overdrawn(run.used.get(account.cls, 0.0), total, least)
        return account.charges if wrong is None else wrong


def _overdrawn(used: float, charged: Events, whole: Events) -> str | None:
    """The attempts of a run, and of its copies, have used more than the budgets that were charged."""
    (sigma, rate, order), steps = max(whole.items(), key=lambda pair: pair[1])
    kind = _find(charged, sigma, rate, order)
    budget = steps * (0 if kind is None else charged[kind] // steps)
    if used > budget * (1 + _ADAPTED) + _ADAPTED:
        return f"has used its budget for {used:.6g} steps, and {budget} are charged"
    return None


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
