"""`Account`: a signed bound that is stricter than its class, and is held to over all runs by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lamina.errors import RunError
from lamina.plan import StepPlan

MARK = "@"  # of a name: CLASS@BOUND; no class of a policy has it in its own


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """Contributions of class `cls` that signed one and the same bound.

    name     CLASS@BOUND, the same in every run: "clinical@c=0.5,z=2.25"; the book adds up under it
    scale    in (0, 1]: of the class's thresholds, in this run; `plan.epsilon(cls, scale=scale)` is what they lose
    epsilon  the most that they may lose over all runs: ε(z) at the δ of the class
    """

    name: str
    cls: str
    scale: float
    epsilon: float

    def __post_init__(self) -> None:
        label = self.name.removeprefix(f"{self.cls}{MARK}")
        if label == self.name or not label:
            raise RunError(
                f"account {self.name!r} of class {self.cls!r} is not named after it",
                f"name it '{self.cls}{MARK}' and the bound: '{self.cls}{MARK}c=0.5,z=2.25'",
            )
        object.__setattr__(self, "scale", _number(self, "scale", 1.0))
        object.__setattr__(self, "epsilon", _number(self, "epsilon", math.inf))


def _number(account: Account, what: str, most: float) -> float:
    value = getattr(account, what)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= most or math.isinf(value):
        raise RunError(
            f"{what} of account {account.name!r} is {value!r}, must be finite and in (0, {most:g}]",
            "resolve the signed bound against the plan: lamina.plan.signed.scale_for",
        )
    return float(value)


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
            raise RunError(f"an account is a {type(each).__name__}", "give lamina.train.book.Account(…)")
        if each.cls not in private:
            raise RunError(
                f"account {each.name!r} is of class {each.cls!r}, which is public or not in the plan",
                "leave it out",
            )
        if each.name in seen or each.name in {entry.name for entry in plan.classes}:
            raise RunError(f"account {each.name!r} is given twice, or is a class", "give every bound once")
        seen.add(each.name)
    return tuple(accounts)
