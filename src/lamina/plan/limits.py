"""What the numbers of a plan may be at all."""

from __future__ import annotations

LEAST, MOST = 1e-20, 1e20
"""Thresholds and noise that float32 sums can carry."""


def shown(value: object, width: int = 80) -> str:
    """A value for a message: cut where it is long, and named by its type where it cannot be written at all."""
    try:
        text = repr(value)
    except Exception:  # a whole number of thousands of digits, or an object of somebody else's
        return f"a {type(value).__name__} that cannot be written"
    return text if len(text) <= width else f"{text[: width - 1]}…"
