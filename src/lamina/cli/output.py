"""What the program prints. Results go to standard output, progress and complaints to standard error."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

from rich.console import Console

from lamina.errors import LaminaError

err = Console(stderr=True, highlight=False)
out = Console(highlight=False)


def print_json(value: dict[str, Any]) -> None:
    """One strict JSON object (no NaN, no Infinity) on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def complain(error: LaminaError) -> None:
    err.print(f"[bold red]refused:[/] {_plain(error.problem)}")
    if error.remedy:
        err.print(f"[bold]remedy:[/]  {_plain(error.remedy)}")


def round_up(value: float, digits: int = 4) -> str:
    """A guarantee is never printed smaller than it is.

    >>> round_up(0.99991, 3)
    '1.000'
    """
    scale = 10**digits
    return f"{math.ceil(value * scale) / scale:.{digits}f}"


def _plain(text: str) -> str:
    return text.replace("[", r"\[")
