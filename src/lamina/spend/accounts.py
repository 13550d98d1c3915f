"""Accounts of a ledger: classes and signed bounds, what epochs recorded for them.

And their totals over all runs.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal

from lamina.account.accountants import pooled_epsilon
from lamina.account.schedule import EventCounts, EventKey
from lamina.errors import BudgetExceeded, RunError
from lamina.ledger import records
from lamina.ledger.governance_records import Header
from lamina.ledger.records import KIND_NUMBERS, Epoch
from lamina.ledger.spending import Bound, Spending, steps_by_kind
from lamina.ledger.store.interface import StoreReader
from lamina.plan.step_plan import StepPlan

BOUND_SEPARATOR = "@"  # of a name: CLASS@BOUND; no class of a policy has it in its own
_MICRO = 1_000_000
_NUMBER = r"((?:0|[1-9][0-9]*)(?:\.[0-9]{0,5}[1-9])?)"
_BOUND_TEXT = re.compile(f"c={_NUMBER},z={_NUMBER}", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class SignedAccount:
    """Contributions of class `cls` that signed one and the same bound.

    name     CLASS@c=…,z=…, the bound that was signed, the same in every run; the ledger adds up under it
    scale    in (0, 1]: of the class's thresholds, in this run; `plan.epsilon(cls, scale=scale)` is what they lose
    epsilon  the most that they may lose over all runs: ε(z) at the δ of the class
    """

    name: str
    cls: str
    scale: float
    epsilon: float

    def __post_init__(self) -> None:
        label = self.name.removeprefix(f"{self.cls}{BOUND_SEPARATOR}")
        if label == self.name or not _BOUND_TEXT.fullmatch(label) or 0 in account_bound(self.name):
            raise RunError(
                "spend.account-class-not",
                f"account {self.name!r} of class {self.cls!r} does not name its class and what was signed",
                f"name it '{self.cls}{BOUND_SEPARATOR}' and the bound: '{self.cls}{BOUND_SEPARATOR}c=0.5,z=2.25'",
            )
        object.__setattr__(self, "scale", _checked_number(self, "scale", 1.0))
        object.__setattr__(self, "epsilon", _checked_number(self, "epsilon", math.inf))


def _checked_number(account: SignedAccount, what: str, most: float) -> float:
    value = getattr(account, what)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= most or math.isinf(value):
        raise RunError(
            "spend.account-finite",
            f"{what} of account {account.name!r} is {value!r}, must be finite and in (0, {most:g}]",
            "resolve the signed bound against the plan: lamina.plan.signed_bounds.scale_for",
        )
    return float(value)


def account_name(bound: Bound) -> str:
    """What an account of the ledger is called: its class, or class and signed bound.

    >>> account_name(("clinical", 500_000, 2_250_000)), account_name(("clinical", 0, 0))
    ('clinical@c=0.5,z=2.25', 'clinical')
    """
    cls, clip, noise = bound
    return f"{cls}{BOUND_SEPARATOR}c={_micro_decimal(clip)},z={_micro_decimal(noise)}" if clip or noise else cls


def account_bound(name: str) -> Bound:
    """The account of the ledger that has this name.

    >>> account_bound("clinical@c=0.5,z=2.25"), account_bound("clinical")
    (('clinical', 500000, 2250000), ('clinical', 0, 0))
    """
    cls, mark, label = name.partition(BOUND_SEPARATOR)
    if not mark:
        return cls, 0, 0
    found = _BOUND_TEXT.fullmatch(label)
    if found is None:
        raise RunError(
            "spend.names-no-account",
            f"{name!r} names no account",
            f"write '{cls}', or '{cls}{BOUND_SEPARATOR}c=0.5,z=2.25'",
        )
    clip, noise = (int(Decimal(part) * _MICRO) for part in found.groups())
    return cls, clip, noise


def _micro_decimal(micro: int) -> str:
    whole, rest = divmod(micro, _MICRO)
    return f"{whole}.{rest:06d}".rstrip("0").rstrip(".")


def is_bound(name: str) -> bool:
    """Whether what is booked under this name is a signed bound, and not a whole class."""
    return BOUND_SEPARATOR in name


def describe_account(name: str) -> str:
    """A class or a signed bound, in words."""
    cls, mark, label = name.partition(BOUND_SEPARATOR)
    return f"signed bound {label!r} of class {cls!r}" if mark else f"class {cls!r}"


def check_accounts(plan: StepPlan, accounts: Sequence[SignedAccount]) -> tuple[SignedAccount, ...]:
    """Accounts of private classes of the plan, each once."""
    private, seen = {entry.name for entry in plan.classes if not entry.public}, set()
    for each in accounts:
        if not isinstance(each, SignedAccount):
            raise RunError(
                "spend.account", f"an account is a {type(each).__name__}", "give lamina.spend.accounts.SignedAccount(…)"
            )
        if each.cls not in private:
            raise RunError(
                "spend.account-class-public",
                f"account {each.name!r} is of class {each.cls!r}, which is public or not in the plan",
                "leave it out",
            )
        if each.name in seen or each.name in {entry.name for entry in plan.classes}:
            raise RunError(
                "spend.account-given-twice",
                f"account {each.name!r} is given twice, or is a class",
                "give every bound once",
            )
        seen.add(each.name)
    return tuple(accounts)


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
        return run_name(self.run, self.label)


@dataclass(frozen=True, kw_only=True, slots=True)
class AccountTotal:
    """ε of all that was ever charged, and of that with all that is reserved; spent ≤ committed."""

    spent: float
    committed: float
    runs: tuple[RunSpend, ...]


def run_name(run: str, label: str = "") -> str:
    return f"{label!r} ({run[:8]})" if label else run[:8]


def account_total(
    charged: EventCounts, committed: EventCounts, runs: tuple[RunSpend, ...], *, delta: float, name: str
) -> AccountTotal:
    """Both figures. What was charged is part of what is committed, so the larger price bounds it too."""
    most = pooled_epsilon(committed, delta=delta, name=name)
    return AccountTotal(spent=min(most, pooled_epsilon(charged, delta=delta, name=name)), committed=most, runs=runs)


@dataclass(frozen=True, kw_only=True, slots=True)
class AccountBudget:
    """Under what a charge is booked: at most `bound` at `delta`, priced by `accountant`; inf is no bound."""

    bound: float
    delta: float
    accountant: str

    def within(self, other: AccountBudget) -> bool:
        """Whether what holds these terms holds the others."""
        return (self.delta, self.accountant) == (other.delta, other.accountant) and self.bound <= other.bound


def budget_exceeded(
    *,
    book: str,
    origin: str,
    cls: str,
    terms: AccountBudget,
    now: AccountTotal,
    run: str,
    label: str,
    asked: int,
    epsilon: float,
) -> BudgetExceeded:
    """Why a booking was refused: the bound, who spent and reserved what, what was asked, and the ways out."""
    label = label or next((each.label for each in now.runs if each.run == run), "")
    problem = (
        f"{describe_account(cls)} of corpus {origin!r} is bound to ε ≤ {terms.bound:.6g} at δ = {terms.delta:g} over all "
        f"runs; ε {_epsilon_rounded_up(now.spent)} is spent, {_epsilon_rounded_up(now.committed)} with what is "
        f"reserved{_largest_holders(now.runs, run)}; "
        f"run {run_name(run, label)} asks for {_steps_text(asked)}, which would make it {_epsilon_rounded_up(epsilon)} "
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
            if is_bound(cls)
            else "a new bound in the policy is a decision of whoever answers for the corpus"
        ),
    )


def _largest_holders(runs: Sequence[RunSpend], this: str, most: int = 5) -> str:
    """Who spent and reserved it: the largest holders first."""
    first = sorted(runs, key=lambda each: (-each.reserved, -each.steps, each.run))
    parts = [
        f"{'this run' if each.run == this else each.name}: {_steps_text(each.steps)} charged"
        + (f", {each.reserved:,} reserved" if each.reserved else "")
        for each in first[:most]
    ]
    if len(first) > most:
        parts.append(f"and {len(first) - most} more")
    return f" ({'; '.join(parts)})" if parts else ""


def _steps_text(count: int) -> str:
    return f"{count:,} step{'' if count == 1 else 's'}"


def _epsilon_rounded_up(epsilon: float) -> str:
    """Four digits, never printed smaller than it is."""
    return f"{math.ceil(epsilon * 1e4) / 1e4:.4f}" if epsilon < 1e9 else f"{epsilon:.3g}"


AttemptKey = tuple[int, int]  # segment, generation


class RecordedSpend:
    """Read once, and on from there: leaves do not change. `spending` is what `verify` would find."""

    def __init__(self, header: Header) -> None:
        self._header = header
        self._begin()

    def _begin(self) -> None:
        self._upto = 0
        self.epochs = 0
        self.spending = Spending(self._header)
        self._runs: dict[bytes, dict[str, dict[EventKey, int]]] = {}
        self._attempts: dict[bytes, dict[AttemptKey, dict[str, int]]] = {}
        self._scales: dict[tuple[bytes, bytes], dict[str, float]] = {}

    def follow(self, rows: StoreReader, size: int) -> None:
        """Up to `size` leaves, which are committed."""
        if size < self._upto:  # another ledger was put in its place
            self._begin()
        for _, data in rows.of_kind(KIND_NUMBERS[Epoch], self._upto, size):
            record = records.decode_leaf(data).record
            assert isinstance(record, Epoch)
            self._add(record)
        self._upto = size

    def _add(self, epoch: Epoch) -> None:
        self.epochs += 1
        self.spending.add(epoch.accounts)
        run = self._runs.setdefault(epoch.run, {})
        last = epoch.segments[-1]
        steps = self._attempts.setdefault(epoch.run, {}).setdefault((last.index, last.generation), {})
        for account in epoch.accounts:
            name = account_name(account.bound)
            self._scales.setdefault((epoch.run, epoch.plan), {})[name] = account.scale
            events = run.setdefault(name, {})
            for kind, count in steps_by_kind(account.charges).items():
                events[kind] = events.get(kind, 0) + count
                steps[name] = steps.get(name, 0) + count

    def names(self) -> list[str]:
        """Every account that was charged."""
        return [account_name(bound) for bound in self.spending.bounds()]

    def scales(self, run: bytes, plan: bytes) -> dict[str, float]:
        """Every account that a run charged under a plan, with the scale of its thresholds."""
        return dict(self._scales.get((run, plan), {}))

    def of_run(self, run: bytes, name: str) -> dict[EventKey, int]:
        """What one run was charged for an account."""
        return dict(self._runs.get(run, {}).get(name, {}))

    def attempts(self, name: str) -> Iterator[tuple[bytes, int, int, int]]:
        """(run, segment, generation, steps) of every attempt that charged the account."""
        for run, found in self._attempts.items():
            for (segment, generation), steps in found.items():
                if name in steps:
                    yield run, segment, generation, steps[name]
