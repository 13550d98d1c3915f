"""`Total`: what a class of a corpus has lost over all runs, and the words of a refusal."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from lamina.account.pooled import Events, pooled
from lamina.errors import BudgetExceeded
from lamina.train.book import account


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpend:
    """What one run took from one account.

    `steps` were charged, `redone` of them for segments that were charged again; `reserved` may still come.
    """

    run: str
    label: str
    day: str
    steps: int
    redone: int
    reserved: int
    finished: bool

    @property
    def name(self) -> str:
        """What people call it: its label, or the beginning of its id."""
        return called(self.run, self.label)


@dataclass(frozen=True, kw_only=True, slots=True)
class Total:
    """ε of all that was ever charged, and of that with all that is reserved; spent ≤ committed."""

    spent: float
    committed: float
    runs: tuple[RunSpend, ...]


def called(run: str, label: str = "") -> str:
    return f"{label!r} ({run[:8]})" if label else run[:8]


def total(
    charged: Events, committed: Events, runs: tuple[RunSpend, ...], *, delta: float, name: str
) -> Total:
    """Both figures. What was charged is part of what is committed, so the larger price bounds it too."""
    most = pooled(committed, delta=delta, name=name)
    return Total(spent=min(most, pooled(charged, delta=delta, name=name)), committed=most, runs=runs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """Under what a charge is booked: at most `bound` at `delta`, priced by `accountant`; inf is no bound."""

    bound: float
    delta: float
    accountant: str

    def within(self, other: Terms) -> bool:
        """Whether what holds these terms holds the others."""
        return (self.delta, self.accountant) == (other.delta, other.accountant) and self.bound <= other.bound


def refusal(
    *,
    book: str,
    origin: str,
    cls: str,
    terms: Terms,
    now: Total,
    run: str,
    label: str,
    asked: int,
    epsilon: float,
) -> BudgetExceeded:
    """Why a booking was refused: the bound, who spent and reserved what, what was asked, and the ways out."""
    label = label or next((each.label for each in now.runs if each.run == run), "")
    problem = (
        f"{account.told(cls)} of corpus {origin!r} is bound to ε ≤ {terms.bound:.6g} at δ = {terms.delta:g} over all "
        f"runs; ε {_up(now.spent)} is spent, {_up(now.committed)} with what is reserved{_told(now.runs, run)}; "
        f"run {called(run, label)} asks for {_steps(asked)}, which would make it {_up(epsilon)} "
        f"(accountant {terms.accountant})"
    )
    holding = [each.run[:8] for each in now.runs if each.reserved and each.run != run]
    release = f"lamina spend {shlex.quote(book)} --release {holding[0]}" if holding else ""
    return BudgetExceeded(
        "spend.give-up-run",
        problem,
        (f"give up a run that holds a reservation ({release}), or " if holding else "")
        + "plan with a smaller epsilon or fewer steps; "
        + (
            "or leave out those who signed it, for whom this is final"
            if account.is_bound(cls)
            else "a new bound in the policy is a decision of whoever answers for the corpus"
        ),
    )


def _told(runs: Sequence[RunSpend], this: str, most: int = 5) -> str:
    """Who spent and reserved it: the largest holders first."""
    first = sorted(runs, key=lambda each: (-each.reserved, -each.steps, each.run))
    parts = [
        f"{'this run' if each.run == this else each.name}: {_steps(each.steps)} charged"
        + (f", {each.reserved:,} reserved" if each.reserved else "")
        for each in first[:most]
    ]
    if len(first) > most:
        parts.append(f"and {len(first) - most} more")
    return f" ({'; '.join(parts)})" if parts else ""


def _steps(count: int) -> str:
    return f"{count:,} step{'' if count == 1 else 's'}"


def _up(epsilon: float) -> str:
    """Four digits, never printed smaller than it is."""
    return f"{math.ceil(epsilon * 1e4) / 1e4:.4f}" if epsilon < 1e9 else f"{epsilon:.3g}"
