"""Accounts of a ledger (classes and signed bounds), what epochs recorded for them, and their totals over all runs."""

from __future__ import annotations

import functools
import math
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal

from lamina import validate
from lamina.account.schedule import EventKey
from lamina.errors import BudgetExceeded, RunError
from lamina.ledger import records
from lamina.ledger.governance_records import Header
from lamina.ledger.records import KIND_NUMBERS, Epoch
from lamina.ledger.spending import Bound, Spending, steps_by_kind
from lamina.ledger.store.interface import StoreReader
from lamina.plan.step_plan import StepPlan

BOUND_SEPARATOR = "@"  # in CLASS@BOUND; no class name contains it
_MICRO = 1_000_000
_NUMBER = r"((?:0|[1-9][0-9]*)(?:\.[0-9]{0,5}[1-9])?)"
_BOUND_TEXT = re.compile(f"c={_NUMBER},z={_NUMBER}", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class SignedAccount:
    """The account of all contributions of class `cls` that signed the same bound.

    name     CLASS@c=…,z=…, the signed bound; the same in every run
    scale    in (0, 1]: factor of the class's clip norms in this run; `plan.epsilon(cls, scale=scale)` is their loss
    epsilon  their largest loss over all runs: ε(z) at the δ of the class
    """

    name: str
    cls: str
    scale: float
    epsilon: float

    def __post_init__(self) -> None:
        label = self.name.removeprefix(f"{self.cls}{BOUND_SEPARATOR}")
        if label == self.name or not _BOUND_TEXT.fullmatch(label) or 0 in account_bound(self.name):
            raise _invalid_name(self.name, self.cls)
        remedy = "resolve the signed bound against the plan: lamina.plan.signed_bounds.scale_for"
        check = functools.partial(validate.number, RunError, "spend.account-out-of-range", above=0, remedy=remedy)
        object.__setattr__(self, "scale", check(most=1, scale=self.scale))
        object.__setattr__(self, "epsilon", check(epsilon=self.epsilon))


def _invalid_name(name: str, cls: str) -> RunError:
    remedy = f"name a class, {cls[:64]!r}, or a class and its signed bound, '{cls[:64]}{BOUND_SEPARATOR}c=0.5,z=2.25'"
    return RunError("spend.account-name-invalid", f"{name[:80]!r} is no name of an account", remedy)


def account_name(bound: Bound) -> str:
    """The name of an account: its class, or class and signed bound.

    >>> account_name(("clinical", 500_000, 2_250_000)), account_name(("clinical", 0, 0))
    ('clinical@c=0.5,z=2.25', 'clinical')
    """
    cls, clip, noise = bound
    return f"{cls}{BOUND_SEPARATOR}c={_micro_decimal(clip)},z={_micro_decimal(noise)}" if clip or noise else cls


def account_bound(name: str) -> Bound:
    """The account with this name; the inverse of `account_name`.

    >>> account_bound("clinical@c=0.5,z=2.25"), account_bound("clinical")
    (('clinical', 500000, 2250000), ('clinical', 0, 0))
    """
    cls, separator, label = name.partition(BOUND_SEPARATOR)
    if not separator:
        return cls, 0, 0
    found = _BOUND_TEXT.fullmatch(label)
    if found is None:
        raise _invalid_name(name, cls)
    clip, noise = (int(Decimal(part) * _MICRO) for part in found.groups())
    return cls, clip, noise


def _micro_decimal(micro: int) -> str:
    whole, rest = divmod(micro, _MICRO)
    return f"{whole}.{rest:06d}".rstrip("0").rstrip(".")


def is_bound(name: str) -> bool:
    """Whether the account is a signed bound, and not a whole class."""
    return BOUND_SEPARATOR in name


def describe_account(name: str) -> str:
    """The account in words, for messages."""
    cls, _, label = name.partition(BOUND_SEPARATOR)
    return f"signed bound {label!r} of class {cls!r}" if label else f"class {cls!r}"


def check_accounts(plan: StepPlan, accounts: Sequence[SignedAccount]) -> tuple[SignedAccount, ...]:
    """The accounts, if each is of a private class of the plan and given once."""
    private, seen = {entry.name for entry in plan.classes if not entry.public}, set()
    for each in accounts:
        if each.cls not in private:
            problem = f"account {each.name!r} is of class {each.cls!r}, which is public or not in the plan"
            raise RunError("spend.account-class-not-private", problem, "leave it out")
        if each.name in seen:
            raise RunError("spend.account-twice", f"account {each.name!r} is given twice", "give every bound once")
        seen.add(each.name)
    return tuple(accounts)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpend:
    """Steps that one run charged to one account, `redone` of them for repeated segments, and steps it reserved."""

    run: str
    label: str
    day: str
    steps: int
    redone: int
    reserved: int
    finished: bool

    @property
    def name(self) -> str:
        return run_name(self.run, self.label)


@dataclass(frozen=True, kw_only=True, slots=True)
class AccountTotal:
    """ε of all that was ever charged, and of that with all that is reserved; spent ≤ committed."""

    spent: float
    committed: float
    runs: tuple[RunSpend, ...]


def run_name(run: str, label: str = "") -> str:
    return f"{label!r} ({run[:8]})" if label else run[:8]


@dataclass(frozen=True, kw_only=True, slots=True)
class AccountBudget:
    """ε ≤ `bound` at `delta`, computed by `accountant`; inf is no bound."""

    bound: float
    delta: float
    accountant: str

    def within(self, other: AccountBudget) -> bool:
        """Whether whatever keeps to this budget keeps to the other."""
        return (self.delta, self.accountant) == (other.delta, other.accountant) and self.bound <= other.bound


def budget_exceeded(
    *, path: str, origin: str, account: str, budget: AccountBudget, now: AccountTotal, run: str, label: str, asked: int,
    epsilon: float,
) -> BudgetExceeded:  # fmt: skip
    """The refusal of a charge: the bound, who spent and reserved what, what was asked, and the remedies."""
    label = label or next((each.label for each in now.runs if each.run == run), "")
    problem = (
        f"{describe_account(account)} of corpus {origin!r} has a bound of ε ≤ {budget.bound:.6g} at δ = {budget.delta:g} "
        f"over all runs; ε {_epsilon_rounded_up(now.spent)} is spent, {_epsilon_rounded_up(now.committed)} with what is "
        f"reserved{_largest_holders(now.runs, run)}; run {run_name(run, label)} asks for {_steps_text(asked)}, which "
        f"would make it {_epsilon_rounded_up(epsilon)} (accountant {budget.accountant})"
    )
    remedy = "plan with a smaller epsilon or fewer steps; " + (
        "or leave out those who signed this bound, for whom it is final"
        if is_bound(account)
        else "whoever answers for the corpus may set a new bound in the policy"
    )
    if holding := [each.run[:8] for each in now.runs if each.reserved and each.run != run]:
        remedy = f"release a run that holds a reservation (lamina spend {shlex.quote(path)} --release {holding[0]}), or {remedy}"
    return BudgetExceeded("spend.budget-exceeded", problem, remedy)


def _largest_holders(runs: Sequence[RunSpend], this: str, most: int = 5) -> str:
    """The runs that spent and reserved most, for messages."""
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
    """ε with four digits, rounded up."""
    return f"{math.ceil(epsilon * 1e4) / 1e4:.4f}" if epsilon < 1e9 else f"{epsilon:.3g}"


AttemptKey = tuple[int, int]  # segment, generation


class RecordedSpend:
    """The charges that epochs record. Each leaf is read once, since leaves do not change."""

    def __init__(self, header: Header) -> None:
        self._header = header
        self._reset()

    def _reset(self) -> None:
        self._upto = self.epochs = 0
        self.spending = Spending(self._header)
        self._runs: dict[bytes, dict[str, dict[EventKey, int]]] = {}
        self._attempts: dict[bytes, dict[AttemptKey, dict[str, int]]] = {}
        self._scales: dict[tuple[bytes, bytes], dict[str, float]] = {}

    def follow(self, rows: StoreReader, size: int) -> None:
        """Read on to `size` leaves, which are committed."""
        if size < self._upto:  # the ledger was replaced by a shorter one
            self._reset()
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
        return [account_name(bound) for bound in self.spending.bounds()]

    def scales(self, run: bytes, plan: bytes) -> dict[str, float]:
        """The accounts that a run charged under a plan, each with its scale."""
        return dict(self._scales.get((run, plan), {}))

    def of_run(self, run: bytes, name: str) -> dict[EventKey, int]:
        """What one run charged to an account."""
        return dict(self._runs.get(run, {}).get(name, {}))

    def attempts(self, name: str) -> Iterator[tuple[bytes, int, int, int]]:
        """(run, segment, generation, steps) of every attempt that charged the account."""
        for run, found in self._attempts.items():
            for (segment, generation), steps in found.items():
                if name in steps:
                    yield run, segment, generation, steps[name]
