"""What the program prints. Results go to standard output, progress and complaints to standard error."""

from __future__ import annotations

import inspect
import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

from rich.console import Console
from rich.markup import escape

from lamina.errors import LaminaError
from lamina.plan.table import aligned

err = Console(stderr=True, highlight=False)
out = Console(highlight=False)


def print_json(value: dict[str, Any]) -> None:
    """One strict JSON object (no NaN, no Infinity) on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def refusal(error: LaminaError) -> dict[str, str]:
    """A refusal as machines read it."""
    return {"refused": error.problem, "remedy": error.remedy, "code": error.code}


def complain(error: LaminaError) -> None:
    """A refusal as people read it. Lines are not broken, so that a path in them stays whole."""
    err.print(f"[bold red]refused:[/] {escape(error.problem)}", soft_wrap=True)
    if error.remedy:
        err.print(f"[bold]remedy:[/]  {escape(error.remedy)}", soft_wrap=True)
    err.print(f"[dim]code:    {error.code}[/]", soft_wrap=True)


@contextmanager
def results_only() -> Iterator[None]:
    """While the user's code runs, what it prints goes to standard error: standard output carries results."""
    with redirect_stdout(sys.stderr):
        yield


def round_up(value: float, digits: int = 4) -> str:
    """A guarantee is never printed smaller than it is.

    >>> round_up(0.99991, 3)
    '1.000'
    """
    scale = 10**digits
    return f"{math.ceil(value * scale) / scale:.{digits}f}"


def columns(rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Rows with columns of equal width, the first `left` flush left, whatever the width of the screen.

    >>> print(columns([["class", "ε"], ["clinical", "1.5"]]))
    class       ε
    clinical  1.5
    """
    return "\n".join(aligned(rows, left))


def folded(text: str | None) -> str:
    """A docstring as help: paragraphs in one line each, for the screen to break; indented lines as they are.

    What stands in brackets is text, and no mark-up.
    """
    paragraphs = escape(inspect.cleandoc(text or "")).split("\n\n")
    return "\n\n".join(p if p.startswith("  ") else " ".join(p.split("\n")) for p in paragraphs)
