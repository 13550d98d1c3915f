"""`Account`: a signed bound that is stricter than its class, and is held to over all runs by itself."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from lamina.errors import RunError
from lamina.ledger.spend import Bound
from lamina.plan import StepPlan

MARK = "@"  # of a name: CLASS@BOUND; no class of a policy has it in its own
_MICRO = 1_000_000
_NUMBER = r"((?:0|[1-9][0-9]*)(?:\.[0-9]{0,5}[1-9])?)"
_BOUND = re.compile(f"c={_NUMBER},z={_NUMBER}", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
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
        label = self.name.removeprefix(f"{self.cls}{MARK}")
        if label == self.name or not _BOUND.fullmatch(label) or 0 in bound_of(self.name):
            raise RunError(
                "spend.account-class-not",
                f"account {self.name!r} of class {self.cls!r} does not name its class and what was signed",
                f"name it '{self.cls}{MARK}' and the bound: '{self.cls}{MARK}c=0.5,z=2.25'",
            )
        object.__setattr__(self, "scale", _number(self, "scale", 1.0))
        object.__setattr__(self, "epsilon", _number(self, "epsilon", math.inf))


def _number(account: Account, what: str, most: float) -> float:
    value = getattr(account, what)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= most or math.isinf(value):
        raise RunError(
            "spend.account-finite",
            f"{what} of account {account.name!r} is {value!r}, must be finite and in (0, {most:g}]",
            "resolve the signed bound against the plan: lamina.plan.signed.scale_for",
        )
    return float(value)


def name_of(bound: Bound) -> str:
    """What an account of the ledger is called: its class, or class and signed bound.

    >>> name_of(("clinical", 500_000, 2_250_000)), name_of(("clinical", 0, 0))
    ('clinical@c=0.5,z=2.25', 'clinical')
    """
    cls, clip, noise = bound
    return f"{cls}{MARK}c={_plain(clip)},z={_plain(noise)}" if clip or noise else cls


def bound_of(name: str) -> Bound:
    """The account of the ledger that has this name.

    >>> bound_of("clinical@c=0.5,z=2.25"), bound_of("clinical")
    (('clinical', 500000, 2250000), ('clinical', 0, 0))
    """
    cls, mark, label = name.partition(MARK)
    if not mark:
        return cls, 0, 0
    found = _BOUND.fullmatch(label)
    if found is None:
        raise RunError(
            "spend.names-no-account",
            f"{name!r} names no account",
            f"write '{cls}', or '{cls}{MARK}c=0.5,z=2.25'",
        )
    clip, noise = (int(Decimal(part) * _MICRO) for part in found.groups())
    return cls, clip, noise


def _plain(micro: int) -> str:
    whole, rest = divmod(micro, _MICRO)
    return f"{whole}.{rest:06d}".rstrip("0").rstrip(".")


def is_bound(name: str) -> bool:
    """Whether what is booked under this name is a signed bound, and not a whole class."""
    return MARK in name


def told(name: str) -> str:
    """A class or a signed bound, in words."""
    cls, mark, label = name.partition(MARK)
    return f"signed bound {label!r} of class {cls!r}" if mark else f"class {cls!r}"


def check_accounts(plan: StepPlan, accounts: Sequence[Account]) -> tuple[Account, ...]:
    """Accounts of private classes of the plan, each once."""
    private, seen = {entry.name for entry in plan.classes if not entry.public}, set()
    for each in accounts:
        if not isinstance(each, Account):
            raise RunError(
                "spend.account", f"an account is a {type(each).__name__}", "give lamina.train.book.Account(…)"
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
