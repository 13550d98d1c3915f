"""What the program prints and asks for.

JSON, refusals, tables, rounded guarantees, progress bars, passphrases.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lamina.admit.keys import PrivateKey, read_small
from lamina.errors import BadKey, LaminaError
from lamina.plan.table import align_columns

err = Console(stderr=True, highlight=False)
out = Console(highlight=False)


def print_json(value: dict[str, Any]) -> None:
    """One strict JSON object (no NaN, no Infinity) on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def refusal_json(error: LaminaError) -> dict[str, str]:
    """A refusal as machines read it."""
    return {"refused": error.problem, "remedy": error.remedy, "code": error.code}


def print_refusal(error: LaminaError) -> None:
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
    return "\n".join(align_columns(rows, left))


def help_text(text: str | None) -> str:
    """A docstring as help: paragraphs in one line each, for the screen to break; indented lines as they are.

    What stands in brackets is text, and no mark-up.
    """
    paragraphs = escape(inspect.cleandoc(text or "")).split("\n\n")
    return "\n\n".join(p if p.startswith("  ") else " ".join(p.split("\n")) for p in paragraphs)


@contextmanager
def progress_bar(what: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """Yields what tells it how much is done, and perhaps of how many."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err) as drawn:
        task = drawn.add_task(what, total=total)

        def tell(done: int, of: int | None = total) -> None:
            drawn.update(task, completed=done, total=of)

        yield tell


PASSPHRASE_VARIABLE = "LAMINA_PASSPHRASE"
_MAX_PASSPHRASE_FILE_BYTES = 4096

PassphraseOption = Annotated[
    Path | None,
    typer.Option(
        "--passphrase-file",
        metavar="FILE",
        help=f"the passphrase is its first line; or set {PASSPHRASE_VARIABLE}; default: ask",
    ),
]


def read_passphrase(file: Path | None, *, what: str, new: bool = False) -> bytes:
    """The passphrase, from the first place that has one; asked for twice if it is `new`."""
    if file is not None:
        found = (
            read_small(file, "the passphrase file", most=_MAX_PASSPHRASE_FILE_BYTES)
            .partition(b"\n")[0]
            .removesuffix(b"\r")
        )
    elif given := os.environ.get(PASSPHRASE_VARIABLE):
        found = given.encode("utf-8", "surrogateescape")
    elif _can_prompt():
        asked = typer.prompt(f"Passphrase of {what}", hide_input=True, confirmation_prompt=new, err=True)
        found = str(asked).encode("utf-8")
    else:
        raise BadKey(
            "key.no-passphrase-nobody",
            f"there is no passphrase for {what}, and nobody to ask",
            f"set {PASSPHRASE_VARIABLE} or give --passphrase-file" + (", or say --no-passphrase" if new else ""),
        )
    if not found:
        raise BadKey(
            "key.passphrase-empty-give",
            f"the passphrase of {what} is empty",
            "give one" + (", or say --no-passphrase" if new else ""),
        )
    return found


def open_private_key(path: Path, file: Path | None) -> PrivateKey:
    """A private key; the passphrase is asked for only if it has one."""
    sealed = PrivateKey.sealed(path)
    return PrivateKey.load(path, read_passphrase(file, what=f"'{path}'") if sealed else None)


def _can_prompt() -> bool:
    return sys.stdin.isatty()
