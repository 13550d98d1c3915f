"""How commands declare their options, arguments and help.

`lamina --help` imports this module, so it imports nothing of Lamina.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

Choices = Iterable[str] | Callable[[], Iterable[str]]


def option(help: str, *names: str, panel: str | None = None, choices: Choices = (), **settings: Any) -> Any:
    """An option of a command, for Annotated; the shell completes `choices`, or what they return if they are a function."""
    if choices:
        settings["autocompletion"] = lambda: list(choices() if callable(choices) else choices)
    return typer.Option(*names, help=help, rich_help_panel=panel, **settings)


def argument(metavar: str, help: str, choices: Sequence[str] = ()) -> Any:
    """An argument of a command, for Annotated; the shell completes `choices`."""
    return typer.Argument(metavar=metavar, help=help, autocompletion=(lambda: list(choices)) if choices else None)


class _PlainFlags:
    """A flag whose help shows no type: `--json`, not `--json <bool>`."""

    def get_params(self, ctx: Any) -> Any:
        found = super().get_params(ctx)  # type: ignore[misc]
        for each in found:
            if getattr(each, "is_flag", False):
                each.metavar = ""
        return found


class PlainCommand(_PlainFlags, TyperCommand):
    """A command as all of ours are."""


class PlainGroup(_PlainFlags, TyperGroup):
    """A group of commands as all of ours are."""


LEDGER_HELP = "ledger.db, or postgresql://…/database#schema"
LedgerArgument = Annotated[str, argument("LEDGER", LEDGER_HELP)]
JsonOption = Annotated[bool, option("print one JSON object", "--json")]
KeyOption = Annotated[Path | None, option("private key that signs; asks for its passphrase", "--key", metavar="FILE")]
OutputOption = Annotated[Path | None, option("write to this file", "--output", "-o", metavar="FILE")]
PASSPHRASE_VARIABLE = "LAMINA_PASSPHRASE"
PassphraseOption = Annotated[
    Path | None,
    option(
        f"file whose first line is the passphrase; or set {PASSPHRASE_VARIABLE}; default: ask",
        "--passphrase-file",
        metavar="FILE",
    ),
]


def help_text(text: str | None) -> str:
    """A docstring as help: each paragraph on one line, indented lines as they are, brackets not as mark-up."""
    paragraphs = escape(inspect.cleandoc(text or "")).split("\n\n")
    return "\n\n".join(p if p.startswith("  ") else " ".join(p.split("\n")) for p in paragraphs)
