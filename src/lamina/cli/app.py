"""`lamina`: the program. Exit codes: 0 ok, 1 refused or not verified, 2 misuse."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer

from lamina.cli import bench, demo, plan
from lamina.cli.output import complain
from lamina.errors import LaminaError

app = typer.Typer(
    name="lamina",
    help="Layer-wise differentially private training for PyTorch, with evidence an auditor can check.",
    epilog="Start with: lamina demo. Every command takes --json and prints one object for machines.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command("demo")(demo.demo)
app.command("plan")(plan.plan)
app.command("bench")(bench.bench)


@app.callback()
def _lamina() -> None:
    """Layer-wise differentially private training for PyTorch, with evidence an auditor can check."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program. A refusal is one message without a traceback; LAMINA_DEBUG=1 shows it."""
    try:
        app(args=None if arguments is None else list(arguments), prog_name="lamina")
    except LaminaError as error:
        if os.environ.get("LAMINA_DEBUG"):
            raise
        complain(error)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
        sys.exit(130)
