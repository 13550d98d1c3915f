"""How a command declares its options, and how its answer is printed: as text, or with --json as one object.

    @command()
    def count(path: Path = argument("FILE", "what to count"), words: bool = option("count words")) -> Answer:
        return Answer({"count": 3}, "3 lines")

A flag, a file and a repeatable option are known by their types. `lamina --help` imports this module, so it imports nothing of Lamina.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

Suggestions = Iterable[str] | Callable[[], Iterable[str]]

as_json: ContextVar[bool] = ContextVar("as_json", default=False)
"""Whether the command that runs was called with --json."""

passphrase_file: ContextVar[Path | None] = ContextVar("passphrase_file", default=None)
"""What --passphrase-file names."""


class Answer:
    """What a command answers: facts for --json, and lines for people. Exit code 1 unless it is `ok`.

    A line may be several, or None, which is left out. With `raw`, the text goes out as it is, for files and pipes.
    """

    def __init__(self, facts: Mapping[str, Any], *lines: str | None, ok: bool = True, raw: bool = False) -> None:
        self.facts, self.ok, self.raw = facts, ok, raw
        self.text = "\n".join(line for line in lines if line is not None)


@dataclass(frozen=True, slots=True)
class Parameter:
    """The declaration of an option or an argument: the default of a parameter whose annotation is its type."""

    kind: Callable[..., Any]  # typer.Option or typer.Argument
    default: Any  # `...`: it must be given
    names: tuple[str, ...]
    choices: tuple[str, ...]
    settings: Mapping[str, Any]

    def made(self, name: str, hint: Any) -> inspect.Parameter:
        """Return what typer reads. A flag has one name and is off, a file is a FILE, a word is one of the choices."""
        default, names, settings = self.default, self.names, dict(self.settings)
        if load := settings.pop("load", None):
            settings["parser"] = lambda text: load(Path(text))
        if hint is bool:
            default, names = False if default is None else default, names or (f"--{name.replace('_', '-')}",)
        if Path in (hint, *get_args(hint)) and settings.get("metavar") is None:
            settings["metavar"] = "FILE"
        if self.choices and get_origin(hint) is list:
            settings |= {
                "parser": self._chosen,
                "metavar": "|".join(self.choices),
                "autocompletion": lambda: list(self.choices),
            }
        elif self.choices:
            words: Any = Literal.__getitem__(self.choices)
            hint = words if hint is str else words | None
        given = {} if default is ... else {"default": default}
        annotation = Annotated[hint, self.kind(*names, **settings)]
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, **given)

    def _chosen(self, word: str) -> str:
        if word not in self.choices:
            raise misuse(f"{word!r} is not one of {', '.join(self.choices)}")
        return word


def option(
    help: str, *names: str, default: Any = None, panel: str | None = None, choices: Iterable[str] = (), suggest: Suggestions = (),
    **settings: Any,
) -> Any:  # fmt: skip
    """An option of a command; `...` as default: it must be given.

    Only `choices` are accepted. The shell completes `suggest`, or what it returns if it is a function. `load` makes the
    value of the file that is named; further settings are those of typer.
    """
    if suggest:
        settings["autocompletion"] = lambda: list(suggest() if callable(suggest) else suggest)
    settings |= {"help": help, "rich_help_panel": panel}
    return Parameter(typer.Option, default, names, tuple(choices), settings)


def argument(metavar: str, help: str, *, default: Any = ..., choices: Iterable[str] = (), **settings: Any) -> Any:
    """An argument of a command; without a default it must be given. Only `choices` are accepted."""
    return Parameter(typer.Argument, default, (), tuple(choices), {"metavar": metavar, "help": help, **settings})


def time_option(help: str, *names: str, **settings: Any) -> Any:
    """An option that takes a time, as seconds since 1970: 2026-03-01, or 2026-03-01T12:00Z."""
    return option(help, *names, metavar="TIME", parser=_seconds, **settings)


def _seconds(text: str) -> int:
    from lamina.sign.keys import parse_time

    return parse_time(text)


LEDGER_HELP = "ledger.db, or postgresql://…/database#schema"
LEDGER = argument("LEDGER", LEDGER_HELP)
KEY = option("private key that signs; asks for its passphrase", "--key")
OUTPUT = option("write to this file", "--output", "-o")
PASSPHRASE_VARIABLE = "LAMINA_PASSPHRASE"
_PASSPHRASE = option(
    f"file whose first line is the passphrase; or set {PASSPHRASE_VARIABLE}; default: ask", "--passphrase-file"
)
_JSON = option("print one JSON object", "--json", default=False)


def misuse(problem: str, hint: str | None = None) -> typer.BadParameter:
    """Return the error of a wrong call: exit code 2. `hint` names the option or argument."""
    return typer.BadParameter(problem, param_hint=hint)


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


def command(name: str | None = None, *, keys: bool = False) -> Callable[[Any], Any]:
    """Make a function a command; its docstring, or that of its file, is the help.

    The command also has --json, and --passphrase-file if it opens private `keys`. It prints the `Answer` that the function
    returns.
    """

    def declared(function: Callable[..., Answer | None]) -> Callable[..., None]:
        hints = get_type_hints(function)
        defaults = {each.name: each.default for each in inspect.signature(function).parameters.values()}
        taken = [(each, hints[each], default) for each, default in defaults.items()]
        taken += [("passphrase_file", Path | None, _PASSPHRASE)] if keys else []
        made = [default.made(each, hint) for each, hint, default in (*taken, ("as_json", bool, _JSON))]

        @wraps(function)
        def run(**given: Any) -> None:
            with _set(as_json, given.pop("as_json")), _set(passphrase_file, given.pop("passphrase_file", None)):
                lists = {each: given[each] or [] for each in given if get_origin(hints[each]) is list}
                answer = function(**given | lists)
                if answer is not None:
                    print_answer(answer)

        run.__name__, run.__doc__ = (
            name or function.__name__,
            function.__doc__ or sys.modules[function.__module__].__doc__,
        )
        run.__signature__ = inspect.Signature(made)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in made}
        return run

    return declared


def group(help: str | None, *commands: Callable[..., None]) -> typer.Typer:
    """Return a group of commands with this help, in this order."""
    made = typer.Typer(cls=PlainGroup, no_args_is_help=True, add_completion=False, help=help_text(help))
    for each in commands:
        made.command(each.__name__, cls=PlainCommand, help=help_text(each.__doc__))(each)
    if len(commands) == 1:  # typer would take it for a command that belongs to no group
        made.callback(help=help_text(help))(lambda: None)
    return made


def alone(only: Callable[..., None]) -> typer.Typer:
    """Return a command that belongs to no group."""
    made = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
    made.command(only.__name__, cls=PlainCommand, help=help_text(only.__doc__))(only)
    return made


@contextmanager
def _set(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def print_answer(answer: Answer) -> None:
    """Print an answer as JSON or as text, and exit with 1 unless it is ok."""
    from lamina.cli.terminal import print_json, print_line

    if as_json.get():
        print_json(answer.facts)
    elif answer.raw:
        sys.stdout.write(answer.text)
    elif answer.text:
        print_line(answer.text)
    if not answer.ok:
        raise typer.Exit(1)


def table(rows: Sequence[Sequence[str]], *, left: int = 1, indent: int = 0) -> str:
    """Return rows in columns of equal width, the heads first; the first `left` columns are flush left, the others right.

    >>> print(table([["class", "ε"], ["clinical", "1.5"]]))
    class       ε
    clinical  1.5
    """
    from lamina.plan.table import align_columns

    return "\n".join(f"{'':{indent}}{line}" for line in align_columns(rows, left))


def help_text(text: str | None) -> str:
    """A docstring as help: each paragraph on one line, indented lines as they are, brackets not as mark-up."""
    paragraphs = escape(inspect.cleandoc(text or "")).split("\n\n")
    return "\n\n".join(p if p.startswith("  ") else " ".join(p.split("\n")) for p in paragraphs)
