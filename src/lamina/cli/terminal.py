"""What commands print and ask for: lines, JSON, refusals, progress bars, passphrases, ledgers.

`lamina --help` imports this module, so it imports nothing of Lamina but errors and validate; the rest is imported where it is used.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape

from lamina.cli.command import PASSPHRASE_VARIABLE, as_json, misuse, passphrase_file
from lamina.errors import BadKey, LaminaError
from lamina.validate import INVISIBLE, visible

if TYPE_CHECKING:
    from lamina.sign.keys import PrivateKey

err = Console(stderr=True, highlight=False)
out = Console(highlight=False)


def print_line(text: str) -> None:
    """Print text as it is: not wrapped, no mark-up."""
    out.print(visible(text), markup=False, soft_wrap=True)


def print_note(text: str) -> None:
    """Print text to standard error, as it is."""
    err.print(visible(text), markup=False, soft_wrap=True)


def say(text: str) -> None:
    """Print a line before the answer: to standard error where --json keeps standard output for one object."""
    (print_note if as_json.get() else print_line)(text)


def print_json(value: Mapping[str, Any]) -> None:
    """One strict JSON object (no NaN, no Infinity) on standard output."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    sys.stdout.write(INVISIBLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n")


def refusal_json(error: LaminaError) -> dict[str, str]:
    """A refusal as machines read it."""
    return {"refused": error.problem, "remedy": error.remedy, "code": error.code, "family": error.family}


def print_finding(verdict: str, text: str) -> None:
    """Print a negative verdict and its reason."""
    err.print(f"[bold red]{verdict}[/] {_below(text)}", soft_wrap=True)


def _below(text: str) -> str:
    """Indent all lines after the first, so that a line break in a name cannot start a line of its own."""
    return escape(visible(text).replace("\n", "\n         "))


def print_refusal(error: LaminaError) -> None:
    """A refusal as people read it. Lines are not broken, so that a path in them stays whole."""
    print_finding("refused:", error.problem)
    if error.remedy:
        err.print(f"[bold]remedy:[/]  {_below(error.remedy)}", soft_wrap=True)
    err.print(f"[dim]code:    {error.code}[/]", soft_wrap=True)


@contextmanager
def results_only() -> Iterator[None]:
    """While the user's code runs, what it prints goes to standard error: standard output carries results."""
    with redirect_stdout(sys.stderr):
        yield


@contextmanager
def progress_bar(what: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """Yields a function of (done, total) that moves the bar."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    shown = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*shown, console=err) as bar:
        task = bar.add_task(what, total=total)

        def update(done: int, total: int | None = total) -> None:
            bar.update(task, completed=done, total=total)

        yield update


def read_passphrase(what: str, *, new: bool = False) -> bytes:
    """The passphrase from --passphrase-file, else from the environment, else asked for (twice if it is `new`)."""
    or_none = ", or --no-passphrase" if new else ""
    if (file := passphrase_file.get()) is not None:
        from lamina.sign.keys import read_small

        found = read_small(file, "the passphrase file", most=4096, pipe=True).partition(b"\n")[0].removesuffix(b"\r")
    elif given := os.environ.get(PASSPHRASE_VARIABLE):
        found = given.encode("utf-8", "surrogateescape")
    elif can_prompt():
        typed = typer.prompt(f"Passphrase of {what}", hide_input=True, confirmation_prompt=new, err=True)
        found = str(typed).encode("utf-8")
    else:
        remedy = f"set {PASSPHRASE_VARIABLE} or give --passphrase-file{or_none}"
        raise BadKey("key.passphrase-missing", f"{what} needs a passphrase, and there is no terminal to ask", remedy)
    if not found:
        raise BadKey("key.passphrase-empty", f"the passphrase of {what} is empty", f"give one{or_none}")
    return found


def open_private_key(path: Path) -> PrivateKey:
    """Load a private key; asks for the passphrase only if the file is encrypted."""
    from lamina.sign.keys import PrivateKey

    return PrivateKey.load(path, passphrase_if_sealed(path))


def passphrase_if_sealed(path: Path) -> bytes | None:
    """The passphrase of a private key; None if it has none."""
    from lamina.sign.keys import PrivateKey

    return read_passphrase(f"'{path}'") if PrivateKey.sealed(path) else None


def existing_ledger(where: str) -> str:
    """The path of a ledger with links resolved, or its address; misuse of the command if there is none."""
    from lamina.ledger.store.sqlite import is_postgres_url

    if is_postgres_url(where):
        return where
    if not Path(where).is_file():
        raise misuse(f"there is no ledger '{where}'", "LEDGER")
    return os.path.realpath(where)


def can_prompt() -> bool:
    return sys.stdin.isatty()


def stderr_is_terminal() -> bool:
    return sys.stderr.isatty()
