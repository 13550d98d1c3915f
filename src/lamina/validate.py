"""Range checks of arguments, made once at the public boundary. Each returns the checked value.

>>> positive(PlanError, "plan.clip-norm", clip_norm=-1.0)
Traceback (most recent call last):
lamina.errors.PlanError: clip_norm is -1.0, must be a number > 0 [plan.clip-norm]
"""

from __future__ import annotations

import errno
import math
import numbers
import os
import re
import stat
import tomllib
from collections.abc import Collection
from importlib import resources
from pathlib import Path
from typing import Any

from lamina.errors import LaminaError, PlanError
from lamina.files import READ

__all__ = [
    "INVISIBLE",
    "PlanError",
    "distinct_fields",
    "number",
    "one_of",
    "open_regular",
    "packaged_text",
    "parse_toml",
    "positive",
    "read_text_file",
    "short_repr",
    "visible",
    "whole",
]


def short_repr(value: object, width: int = 80) -> str:
    """A value for a message: cut where it is long, and named by its type where it cannot be written at all."""
    try:
        text = repr(value)
    except Exception:  # a whole number of thousands of digits, or an object of somebody else's
        return f"a {type(value).__name__} that cannot be written"
    return text if len(text) <= width else f"{text[: width - 1]}…"


# Control characters except line feed and tab, marks that change the writing direction, and lone surrogates (from file names).
INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    r"""Escape characters that control a terminal, so that a file name or a foreign release cannot rewrite the screen.

    >>> visible("a\x1b[2Kb")
    'a\\x1b[2Kb'
    """
    return INVISIBLE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def open_regular(path: str | Path) -> int:
    """Open a file for reading. OSError at once for a pipe, a device or a socket, which might never end."""
    file = os.open(path, READ)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return file


def read_text_file(path: str | Path, most: int = 1 << 24) -> str:
    """The text of a file of settings. OSError or UnicodeDecodeError if it is none."""
    with os.fdopen(open_regular(path), "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes")
    return data.decode("utf-8")


def packaged_text(package: str, name: str) -> str:
    """Return a text file that is installed with a package."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


_MAX_TOML = 1 << 20  # characters
_MAX_TOML_DEPTH = 32  # levels of nested tables and arrays
_MAX_INTEGER_BITS = 64
_KEY_PART = r"""(?:[A-Za-z0-9_-]++|"[^"\n]*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"(?<![A-Za-z0-9_-]){_KEY_PART}(?:[ \t]*+\.[ \t]*+{_KEY_PART}){{{_MAX_TOML_DEPTH}}}")

_MAX_DIGITS = 1000
_LONG_NUMBER = re.compile(rf"(?<![A-Za-z0-9_])[0-9][0-9A-Fa-fxob_]{{{_MAX_DIGITS}}}")


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of a TOML text; raise ValueError if it is malformed, nested too deeply or has too large numbers.

    These limits are needed because the time of tomllib grows with the square of the parts of a dotted key, and because it
    keeps a state for every digit and recurses into arrays.
    """
    if len(text) > _MAX_TOML:
        raise ValueError(f"it has {len(text)} characters; the limit is {_MAX_TOML}")
    too_long = {
        _LONG_KEY: f"a key has more than {_MAX_TOML_DEPTH} parts",
        _LONG_NUMBER: f"a number has more than {_MAX_DIGITS} digits",
    }
    for pattern, problem in too_long.items():
        if (match := pattern.search(text)) is not None:
            line = text.count("\n", 0, match.start()) + 1
            raise ValueError(f"{problem} (at line {line})")
    try:
        found = tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"it nests deeper than {_MAX_TOML_DEPTH} tables and arrays") from None
    level: list[Any] = [found]
    for _ in range(_MAX_TOML_DEPTH + 1):
        level = [part for value in level for part in (value.values() if isinstance(value, dict) else value)]
        if any(type(part) is int and part.bit_length() > _MAX_INTEGER_BITS for part in level):
            raise ValueError(f"a whole number has more than {_MAX_INTEGER_BITS} bits")
        level = [part for part in level if isinstance(part, dict | list)]
    if level:
        raise ValueError(f"it nests deeper than {_MAX_TOML_DEPTH} tables and arrays")
    return found


def distinct_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `json.loads(object_pairs_hook=…)`: ValueError if a field occurs twice, where readers may differ."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a field occurs twice")
    return found


def whole(
    error: type[LaminaError], code: str, *, least: int = 1, most: int | None = None, remedy: str = "", **named: Any
) -> int:
    """A whole number in [least, most]. Numbers of numpy are whole numbers; True and 3.0 are not.

    >>> whole(PlanError, "plan.steps", steps=3)
    3
    """
    ((name, value),) = named.items()
    fits = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not fits or value < least or (most is not None and value > most):
        limit = f">= {least}" if most is None else f"in [{least}, {most}]"
        raise error(code, f"{name} is {short_repr(value)}, must be a whole number {limit}", remedy)
    return int(value)


def number(
    error: type[LaminaError], code: str, *, above: float = -math.inf, least: float = -math.inf,
    below: float = math.inf, most: float = math.inf, infinite: bool = False, remedy: str = "", **named: Any,
) -> float:  # fmt: skip
    """A number with above < it < below and least <= it <= most; finite, unless `infinite`. NaN never is one.

    >>> number(PlanError, "plan.delta-out-of-range", above=0, below=1, delta=1e-5)
    1e-05
    """
    ((name, value),) = named.items()
    fits = isinstance(value, numbers.Real) and not isinstance(value, bool)
    fits = fits and not (isinstance(value, int) and value.bit_length() > 1023)  # no float is that large
    if not fits or not (infinite or -math.inf < value < math.inf) or not (least <= value <= most) or value != value \
            or (above > -math.inf and value <= above) or (below < math.inf and value >= below):  # fmt: skip
        limits = [f"> {above:g}"] * (above > -math.inf) + [f">= {least:g}"] * (least > -math.inf)
        limits += [f"< {below:g}"] * (below < math.inf) + [f"<= {most:g}"] * (most < math.inf)
        raise error(
            code, f"{name} is {short_repr(value)}, must be a number {' and '.join(limits) or 'that is finite'}", remedy
        )
    return float(value)


def positive(error: type[LaminaError], code: str, *, remedy: str = "", **named: Any) -> float:
    """A finite number > 0."""
    return number(error, code, above=0, remedy=remedy, **named)


def one_of(error: type[LaminaError], code: str, choices: Collection[Any], *, remedy: str = "", **named: Any) -> Any:
    """One of the choices."""
    ((name, value),) = named.items()
    if value not in choices:
        raise error(code, f"{name} is {short_repr(value)}, must be one of {', '.join(map(str, choices))}", remedy)
    return value


def is_short_text(value: object) -> bool:
    """Return whether the value is a text of 1 to 512 printable characters."""
    return type(value) is str and 0 < len(value) <= 512 and value.isprintable()
