"""What may be booked: numbers that mean something, and texts that can be written down."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence

from lamina.account import accountant as find_accountant
from lamina.account.event import check_delta
from lamina.errors import AccountingError, RunError
from lamina.ledger.records.epoch import MOST_ACCOUNTS
from lamina.ledger.records.fields import CLASS, MICRO
from lamina.train.book.account import bound_of, name_of
from lamina.train.book.charge import Charge

_NONCE = 16
MOST_STEPS = 2**40  # of one charge, so that sums stay exact in SQLite; a run that long takes centuries


def checked_charges(charges: Sequence[Charge]) -> tuple[Charge, ...]:
    """The charges with plain numbers, or the reason why one makes no sense."""
    plain = tuple(map(_plain, charges))
    if (count := len({each.cls for each in plain})) > MOST_ACCOUNTS:
        raise RunError(
            "spend.run-classes-signed",
            f"a run of {count:,} classes and signed bounds; an epoch of the ledger holds {MOST_ACCOUNTS:,} at most",
            "ask for bounds on a coarser grid, or train on fewer at once",
        )
    return plain


def _plain(charge: Charge) -> Charge:
    event, delta = charge.event, check_delta(charge.delta)
    name = find_accountant(charge.accountant).name
    if math.isinf(event.sigma):
        raise AccountingError(
            "spend.charge-class-sigma",
            f"a charge of class '{charge.cls}' has sigma inf",
            "it costs nothing: leave it out",
        )
    if event.steps > MOST_STEPS:
        raise AccountingError(
            "spend.charge-class-steps",
            f"a charge of class '{charge.cls}' has {event.steps:,} steps, more than {MOST_STEPS:,}",
            "charge shorter segments",
        )
    return Charge(
        cls=checked_account(charge.cls),
        sigma=event.sigma,
        q=event.q + 0.0,  # -0.0 becomes 0.0, which is what the file gives back
        steps=event.steps,
        delta=delta + 0.0,
        accountant=name,
    )


def checked_bounds(bounds: Mapping[str, float | None]) -> dict[str, float]:
    """Bounds as floats; None and inf are no bound."""
    for cls, bound in bounds.items():
        if bound is not None and (
            isinstance(bound, bool) or not isinstance(bound, int | float) or not bound >= 0
        ):
            raise AccountingError(
                "spend.bound-class", f"the bound of class '{cls}' is {bound!r}, must be >= 0", "e.g. 1.0"
            )
    return {cls: math.inf if bound is None else float(bound) for cls, bound in bounds.items()}


def checked_run(run: str) -> str:
    """A run, by its id: 16 bytes in hex."""
    if not isinstance(run, str) or not re.fullmatch("[0-9a-f]{32}", run, re.ASCII):
        raise RunError(
            "spend.run-hex-digits", f"run is {run!r}, must be 32 hex digits", "secrets.token_hex(16)"
        )
    return run


def checked_account(name: str) -> str:
    """A class or a signed bound, as a leaf can name it: what is charged is to be recorded."""
    text = checked_text(name, "account", empty=True)
    found = bound_of(text)
    wrong = CLASS.wrong(found[0]) or MICRO.wrong(max(found[1:]))
    if wrong is not None or name_of(found) != text:
        raise RunError(
            "spend.ledger-no-account",
            f"a ledger has no account {text[:80]!r}",
            "name a class (letters, digits, '_', '.', '-'), or 'CLASS@c=0.5,z=2.25'",
        )
    return text


def checked_nonce(nonce: bytes) -> bytes:
    """What tells an attempt from that of a copy of the run."""
    if not isinstance(nonce, bytes) or len(nonce) != _NONCE:
        raise RunError(
            "spend.nonce-charge-not",
            f"the nonce of a charge is not {_NONCE} bytes",
            "draw them from the system",
        )
    return nonce


def checked_count(value: int, what: str) -> int:
    found = operator.index(value)
    if not 0 <= found < 2**63:
        raise RunError(
            "spend.whole-number", f"{what} is {value!r}, must be a whole number >= 0", "count from 0"
        )
    return found


def checked_text(text: str, what: str, *, empty: bool = False) -> str:
    """Any text will do that can be written down; a plain str, whatever kind of str was given."""
    if not isinstance(text, str) or (not text and not empty):
        raise RunError("spend.text", f"{what} is {text!r}, must be a text", "name it")
    try:
        return text.encode().decode()
    except UnicodeEncodeError:
        raise RunError(
            "spend.no-encoding-write", f"{what} is {text!r}, which no encoding can write", "use Unicode text"
        ) from None
