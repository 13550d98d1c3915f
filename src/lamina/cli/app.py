"""`lamina`: the program and its list of commands. Exit codes: 0 ok, 1 refused or not verified, 2 misuse."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from lamina import __version__
from lamina.cli.command import PlainGroup, alone, help_text
from lamina.cli.terminal import out, print_json, print_refusal, refusal_json, stderr_is_terminal
from lamina.errors import LaminaError, needs_torch

# In the order of use. A command is the function NAME, or the group `app`, in lamina.cli.NAME.
COMMANDS = (
    "demo", "check", "init", "contributions", "keys", "attest", "admit", "plan", "train", "audit", "spend", "status", "ledger",
    "certify", "report", "release", "serve", "study", "bench", "doctor",
)  # fmt: skip


def summary(name: str) -> str:
    """Return the first paragraph of a command's help, which its file begins with, without importing it."""
    spec = find_spec(f"lamina.cli.{name}")
    source = spec.loader.get_source(spec.name) if spec and spec.loader else ""  # type: ignore[attr-defined]
    return inspect.cleandoc(source.split('"""')[1]).split("\n\n")[0].replace("\n", " ")


class _LazyCommands(PlainGroup):
    """Imports a command when it is used, so that making a key or checking a ledger does not wait for the rest."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.commands = dict.fromkeys(COMMANDS)  # type: ignore[assignment]  # names to suggest; `get_command` makes them
        self._listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        return TyperCommand(cmd_name, help=summary(cmd_name)) if self._listing else _command(cmd_name)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        with self._only_listed():
            super().format_help(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        with self._only_listed():
            return super().shell_complete(ctx, incomplete)

    @contextmanager
    def _only_listed(self) -> Iterator[None]:
        """A list of all commands needs none of them."""
        self._listing = True
        try:
            yield
        finally:
            self._listing = False


@cache
def _command(name: str) -> Any:
    home = import_module(f"lamina.cli.{name}")
    command = typer.main.get_command(home.app if hasattr(home, "app") else alone(getattr(home, name)))
    command.name = name
    return command


_HELP = """Layer-wise differentially private training for PyTorch, with evidence an auditor can check.

First time here:

  lamina demo                             a private training on simulated ECG

With your own data:

  lamina check data.csv --unit patient    what a run would refuse; writes nothing
  lamina init data.csv                    policy.toml, RUN.toml, nets.py that run
  lamina plan --template > policy.toml    classes of data, and their ε; all keys
  lamina keys new alice.key               a key for a contributor
  lamina attest policy.toml data/ …       sign contributions
  lamina admit policy.toml data/          check who is admitted
  lamina plan policy.toml --epochs 20     what it costs; spends nothing
  lamina train --template > RUN.toml      model, data, loss, …; edit it
  lamina train RUN.toml                   the private run; again to go on
  lamina spend                            ε spent, over all runs
  lamina status                           ledgers and runs below this folder
  lamina ledger verify runs/….ledger.db   check the record of it
  lamina certify runs/NAME                what the model guarantees, signed
  lamina release make runs/NAME -o DIR    the model with its evidence
  lamina serve DIR --trust KEY.pub        the model behind its gate
"""

app = typer.Typer(
    name="lamina",
    cls=_LazyCommands,
    epilog="Every command has --help, and --json to print one JSON object. "
    "Exit codes: 0 done, 1 refused, 2 misuse. Tab completion: lamina --install-completion",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _version(wanted: bool) -> None:
    if wanted:
        out.print(f"lamina {__version__}")
        raise typer.Exit()


@app.callback(help=help_text(_HELP))
def _lamina(
    version: Annotated[
        bool, typer.Option("--version", help="show the version and exit", callback=_version, is_eager=True)
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="show tracebacks; also after the command, or LAMINA_DEBUG=1")
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program. A refusal is one message without a traceback; --debug or LAMINA_DEBUG=1 shows it."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words or os.environ.get("LAMINA_DEBUG", "0") not in ("", "0")
    try:
        with needs_torch(f"lamina {words[0]}" if words else "lamina"):
            app(args=[word for word in words if word != "--debug"], prog_name="lamina")
    except LaminaError as error:
        _exit_with(error, error, as_json="--json" in words, debug=debug)
    except Exception as error:
        own = None
        with suppress(ModuleNotFoundError):  # without torch there is no model of the user's
            from lamina.run.run_output import user_line

            own = user_line(error)
        where = f" (at {own})" if own else ""
        remedy = "if no line of yours is named, it is a bug in Lamina: --debug shows the traceback to report"
        told = LaminaError("cli.unexpected-error", f"{type(error).__name__}: {error}{where}", remedy)
        _exit_with(told, error, as_json="--json" in words, debug=debug)


def _exit_with(told: LaminaError, error: Exception, *, as_json: bool, debug: bool) -> None:
    print_refusal(told)
    if as_json:
        print_json(refusal_json(told))
    if not debug:
        sys.exit(1)
    original = getattr(error, "original", None)  # of an error whose text was withheld
    if isinstance(original, BaseException) and stderr_is_terminal():
        raise error from original
    raise error
