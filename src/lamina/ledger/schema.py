"""Types of the fields of ledger records; amounts without floats; the time of a ledger."""

from __future__ import annotations

import math
from fractions import Fraction
from importlib.metadata import version

from lamina import validate
from lamina.codec import FieldType, fixed_bytes, integer, pattern_text
from lamina.errors import LedgerError
from lamina.sign.keys import CLOCK_SKEW, LAST_SECOND, format_utc


def program_version() -> str:
    """This program and the accountants that it prices by, as a header names them."""
    return f"lamina {version('lamina')}; dp-accounting {version('dp-accounting')}"


NANO = 1_000_000_000
UNBOUNDED = 2**64 - 1  # a spend for which no finite figure is known
MAX_EPSILON = UNBOUNDED / NANO  # no ledger states more


def nano_epsilon(epsilon: float) -> int:
    """ε in billionths, rounded up: what a ledger says is never less than what was spent.

    >>> nano_epsilon(0.5), nano_epsilon(0.1), nano_epsilon(float("inf")) == UNBOUNDED
    (500000000, 100000001, True)
    """
    epsilon = validate.number(LedgerError, "ledger.epsilon-negative", least=0, infinite=True, epsilon=epsilon)
    return UNBOUNDED if math.isinf(epsilon) else min(math.ceil(Fraction(epsilon) * NANO), UNBOUNDED)


def next_leaf_time(last: int, now: float) -> int:
    """The time of the next leaf: that of the clock, or of the last leaf if the clock is a little behind.

    A clock that is further behind is refused: what it would write could not be told from something back-dated.
    """
    if not 0 <= now <= LAST_SECOND:
        raise LedgerError("ledger.clock-invalid", f"the clock says {now!r}", "set the clock of this machine")
    if now < last - CLOCK_SKEW:
        problem = f"the clock says {format_utc(int(now))}, but the last leaf is of {format_utc(last)}"
        remedy = f"set the clock of this machine: it may be {CLOCK_SKEW} s behind"
        remedy += ". If the ledger is wrong, ask its owner"
        raise LedgerError("ledger.clock-behind", problem, remedy)
    return max(last, int(now))


def rounded_epoch_time(last: int, now: int, step: int) -> int:
    """The time of an epoch: rounded down to the header's `epoch_clock`, but never before the last leaf.

    >>> rounded_epoch_time(7000, 10_000, 3600), rounded_epoch_time(9000, 10_000, 3600)
    (7200, 9000)
    """
    return max(last, now - now % step)


DIGEST = fixed_bytes(32)
KEY_ID = fixed_bytes(32)
RUN = fixed_bytes(16)
NONCE = fixed_bytes(16)
SIGNATURE = fixed_bytes(64)
SEQ = integer(0, 2**63 - 1)
COUNT = integer(0, 2**53)
TIME = integer(0, LAST_SECOND)
MICRO = integer(0, 10**15)
SPEND = integer(0, UNBOUNDED)
BOOLEAN = FieldType("True or False", lambda value: type(value) is bool)
CLASS = pattern_text(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
DATA_CLASS = pattern_text(r"[a-z0-9-]{1,64}")
ORIGIN = pattern_text(r"[!-*,-~]{1,255}")  # names a signed note: no space, no plus
STATEMENT = pattern_text(r"[ -~]{1,255}")  # in an owner's own words
ACCOUNTANT = pattern_text(r"[a-z0-9@.+-]{1,64}")
VERSION = pattern_text(r"[A-Za-z0-9 .,;:+_/@-]{1,128}")
_MAX_PROFILE_BYTES = 1024
PROFILE = FieldType(
    f"1 to {_MAX_PROFILE_BYTES} bytes of printable text",
    lambda value: type(value) is str and value.isprintable() and 0 < len(value.encode()) <= _MAX_PROFILE_BYTES,
)


def pluralize(count: int, one: str, many: str | None = None) -> str:
    """So many of them.

    >>> pluralize(1, "leaf", "leaves"), pluralize(1_200, "leaf", "leaves"), pluralize(0, "run")
    ('1 leaf', '1,200 leaves', '0 runs')
    """
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"
