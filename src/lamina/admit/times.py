"""Instants: whole seconds since 1970 in what is signed, UTC in what people read."""

from __future__ import annotations

from datetime import UTC, datetime

from lamina.errors import AdmissionError

LAST = 253_402_300_799  # the end of the year 9999: what a calendar can still show

_FORM = "%Y-%m-%dT%H:%M:%SZ"


def shown(seconds: int) -> str:
    """UTC, to the second.

    >>> shown(1_767_225_600)
    '2026-01-01T00:00:00Z'
    """
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ").rjust(20, "0")


def instant(text: str) -> int:
    """What `shown` wrote, and only that: strict, because key rings are compared byte by byte."""
    try:
        seconds = int(datetime.strptime(text, _FORM).replace(tzinfo=UTC).timestamp())
    except ValueError:
        seconds = -1
    if not 0 <= seconds <= LAST or shown(seconds) != text:
        raise AdmissionError(
            "admit.time-not-form",
            f"the time {text!r} is not of the form 2026-01-31T12:00:00Z",
            "give UTC, to the second",
        )
    return seconds


def when(text: str) -> int:
    """A time as people write it: a day, or a day and an hour with or without offset; UTC where none is given.

    >>> when("2026-01-01") == when("2026-01-01T02:00+02:00") == when("1767225600")
    True
    """
    try:
        if text.isascii() and text.strip().isdecimal():
            seconds = int(text)
        else:
            moment = datetime.fromisoformat(text.strip())
            seconds = int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())
    except (ValueError, OverflowError):
        seconds = -1
    if not 0 <= seconds <= LAST:
        raise AdmissionError(
            "admit.not-time-between",
            f"{text!r} is not a time between 1970 and 9999",
            "write 2026-01-31 or 2026-01-31T12:00Z",
        )
    return seconds
