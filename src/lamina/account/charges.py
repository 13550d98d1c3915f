"""`Account`, which pays for noisy steps: a class, or its contributions with one signed bound; and `Charge`.

Needs neither numpy nor scipy.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import NamedTuple

from lamina.account.schedule import Event, rdp_order_of
from lamina.errors import RunError

_MICRO = 1_000_000
_NUMBER = r"((?:0|[1-9][0-9]*)(?:\.[0-9]{0,5}[1-9])?)"
_BOUND_TEXT = re.compile(f"c={_NUMBER},z={_NUMBER}", re.ASCII)


class Account(NamedTuple):
    """A class, or its contributions with the signed clip norm c and noise multiplier z.

    The signed bound says: "over all my occurrences, no worse than one Gaussian release of norm c with multiplier z."
    Both numbers are in 1e-6, and 0 for a class as a whole and in a public class, where nothing is bounded.
    """

    cls: str
    clip_micro: int = 0
    noise_micro: int = 0

    def __str__(self) -> str:
        """Return the canonical text: CLASS, or CLASS@c=0.5,z=2.25. Names of classes do not contain "@".

        >>> str(Account("clinical", 500_000, 2_250_000)), str(Account("clinical"))
        ('clinical@c=0.5,z=2.25', 'clinical')
        """
        return f"{self.cls}@{self._bound}" if self.signed else self.cls

    @classmethod
    def parse(cls, text: str) -> Account:
        """Return the account with this canonical text.

        >>> tuple(Account.parse("clinical@c=0.5,z=2.25")), tuple(Account.parse("clinical"))
        (('clinical', 500000, 2250000), ('clinical', 0, 0))
        """
        name, separator, label = text.partition("@")
        if not separator:
            return cls(name)
        found = _BOUND_TEXT.fullmatch(label)
        account = cls(name, *(int(Decimal(part) * _MICRO) for part in found.groups())) if found else cls(name)
        if not (account.clip_micro and account.noise_micro):
            raise invalid_account(text)
        return account

    @property
    def signed(self) -> bool:
        """Return whether the account is a signed bound and not a whole class."""
        return bool(self.clip_micro or self.noise_micro)

    @property
    def c(self) -> float:
        """Return the clip norm in plain units."""
        return self.clip_micro / _MICRO

    @property
    def z(self) -> float:
        """Return the noise multiplier in plain units."""
        return self.noise_micro / _MICRO

    def epsilon(self, delta: float) -> float:
        """Return the signed ε at that δ: exact, μ = 1/z. It is infinite if no bound was signed."""
        from lamina.account.gaussian_rdp import epsilon_of_noise_multiplier  # needs numpy

        return epsilon_of_noise_multiplier(self.z, delta) if self.noise_micro else math.inf

    def describe(self) -> str:
        """Return the account in words, for messages.

        >>> Account("clinical", 500_000, 2_250_000).describe(), Account("clinical").describe()
        ("signed bound 'c=0.5,z=2.25' of class 'clinical'", "class 'clinical'")
        """
        return f"signed bound {self._bound!r} of class {self.cls!r}" if self.signed else f"class {self.cls!r}"

    @property
    def _bound(self) -> str:
        return f"c={_decimal(self.clip_micro)},z={_decimal(self.noise_micro)}"


def invalid_account(text: str) -> RunError:
    """Return the error for a text that is not an account."""
    remedy = "name a class (letters, digits, '_', '.', '-'), or a class and its signed bound, 'CLASS@c=0.5,z=2.25'"
    return RunError("spend.account-name-invalid", f"{text[:80]!r} is no name of an account", remedy)


@dataclass(frozen=True, kw_only=True, slots=True)
class Charge:
    """An event that is charged to one account. ε of the run is computed at `delta` by `accountant`.

    What a class is charged as a whole, its signed bounds are charged beside it.
    """

    account: Account
    event: Event
    delta: float
    accountant: str

    def times(self, steps: int) -> Charge:
        """The same charge for another number of steps."""
        return replace(self, event=replace(self.event, steps=steps))

    def row(self) -> dict[str, str | float | int]:
        """Return the fields in the form of ledger and run folders; `stored_charge` reads them."""
        event = self.event
        return {
            "cls": str(self.account), "sigma": event.sigma, "q": event.q, "steps": event.steps, "delta": self.delta,
            "accountant": self.accountant,
        }  # fmt: skip


def stored_charge(cls: str, sigma: float, q: float, steps: int, delta: float, accountant: str) -> Charge:
    """Return the charge with these fields. Only noise that follows its budget is priced at one order."""
    event = Event(sigma=sigma, q=q, steps=steps, order=rdp_order_of(accountant))
    return Charge(account=Account.parse(cls), event=event, delta=delta, accountant=accountant)


def _decimal(micro: int) -> str:
    whole, rest = divmod(micro, _MICRO)
    return f"{whole}.{rest:06d}".rstrip("0").rstrip(".")
