"""`lamina train RUN.toml`: a private run that may be killed at any instant and goes on with the same command."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from lamina.cli import run_folder
from lamina.cli.explain.words import asked, rules_in_words
from lamina.cli.ledgers import shown
from lamina.cli.notes import plan_notes
from lamina.cli.output import err, out, print_json, results_only
from lamina.cli.prepare import Planned
from lamina.cli.run_file import RunFile
from lamina.cli.train_report import result, tell, tell_admission, tell_plan
from lamina.errors import LaminaError, RunError
from lamina.train import Outcome, Trainer
from lamina.train.blame import layer_and_input, place


def train(
    run: Annotated[
        Path | None,
        typer.Argument(metavar="RUN.toml", help="the run: policy, model, data, loss, optimiser, length"),
    ] = None,
    plan_only: Annotated[
        bool,
        typer.Option("--plan-only", help="check everything, show plan and ledger, spend and write nothing"),
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="a new run in a new folder NAME-2, NAME-3, …; charged anew")
    ] = False,
    inside: Annotated[
        bool, typer.Option("--inside", help="show the raw private loss in this terminal; it is never written")
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="torch threads, instead of the file's; a resumed run needs the same"),
    ] = None,
    template: Annotated[
        bool, typer.Option("--template", help="print an annotated RUN.toml to start from, and exit")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Train a model privately, as a RUN.toml says. Run the same command again to go on after a stop or a crash.

    Spends: the ε of the plan, charged in the corpus's ledger before each stretch of steps. A run that does not fit into
    what the policy allows over all runs is refused before it begins.

    Writes: runs/NAME with the weights (model.safetensors), public figures (metrics.json), plan, journal and
    checkpoints; and the ledger beside it, whatever was admitted and spent, signed (lamina ledger verify).

    Admits: with an [admit] table only contributions that were signed (lamina keys, lamina attest), each under the bound
    that it signed. Windows, keys and withdrawals are looked at again at every segment.

    Shows: ε so far, never the loss. An un-noised loss is a release that nobody paid for: evaluate on public or
    simulated data instead.

    Examples:

      lamina train --template > RUN.toml     a run file to edit
      lamina train RUN.toml --plan-only      every check, nothing spent
      lamina train RUN.toml                  train; again to go on
      lamina train RUN.toml --fresh          another run, charged anew
    """
    if template:
        text = RunFile.template_text()
        print_json({"template": text}) if as_json else sys.stdout.write(text)
        return
    if run is None:
        raise typer.BadParameter("give the run file, or --template to get one", param_hint="RUN.toml")
    if inside and not _is_terminal():
        raise RunError(
            "cli.inside-shows-raw",
            "--inside shows the raw private loss, and standard error is not a terminal: it would be written down",
            "run it in a terminal, or leave --inside out and evaluate on public data",
        )
    file = RunFile.load(run)
    if threads or file.threads:
        torch.set_num_threads(threads or file.threads or 1)
    with results_only():
        planned = Planned.of(file, run.resolve().parent)
    output = planned.output(run.stem)
    ledger = planned.ledger(output)
    wanted = asked(file.epsilon, file.rho, planned.policy.corpus.delta)
    notes = plan_notes(planned.plan, planned.policy, wanted)
    screen = err if as_json else out
    rules = [f"rule: {rule}" for rule in rules_in_words(planned.plan)]
    for line in (str(planned.plan), *rules, *(f"note: {note}" for note in notes), ""):
        screen.print(line, markup=False, soft_wrap=True)
    folder = run_folder.unused(output) if fresh else run_folder.newest(output)
    if plan_only:
        with results_only():
            trainer = planned.trainer(folder=folder, ledger=ledger, inside=False, look=True)
            _rehearse(trainer)
        notes = (*notes, *tell_admission(trainer, screen))
        if not tell_plan(planned, trainer, folder, ledger, notes, as_json=as_json):
            raise typer.Exit(1)
        return
    before = run_folder.figures(folder)
    with results_only():
        trainer = planned.trainer(folder=folder, ledger=ledger, inside=inside)
    notes = (*notes, *tell_admission(trainer, screen))
    with results_only():
        run_folder.sign(folder, output, file.asked())
        outcome = _fit(trainer, again=_command(run, threads))
        trainer.ledger.close()
    outcome = replace(outcome, notes=(*outcome.notes, *notes))
    if before and before.get("steps") == outcome.steps:
        outcome = replace(outcome, notes=(*outcome.notes, _FINISHED))
    if as_json:
        print_json(result(outcome, planned, trainer.corpus, shown(ledger)))
    else:
        tell(outcome, planned, trainer.corpus, shown(ledger))


_FINISHED = (
    "the run was finished before: nothing was trained or charged now; --fresh trains anew and is charged anew"
)


def _fit(trainer: Trainer, *, again: str) -> Outcome:
    try:
        return trainer.fit()
    except KeyboardInterrupt:
        err.print(
            "\nstopped. Nothing is lost, and what was begun is replayed at no cost, unless something changes. "
            f"Go on with  {again}",
            markup=False,
            soft_wrap=True,
        )
        raise typer.Exit(130) from None
    except LaminaError as error:
        raise _located(error, trainer) from error.__cause__


def _located(error: LaminaError, trainer: Trainer) -> LaminaError:
    """A refusal of the rehearsal, with the layer and the line of the user's code that it comes from."""
    cause = error.__cause__
    if cause is None:
        return error
    where = place(cause)
    found = [layer_and_input(cause, trainer.model), f"at {where}" if where else None]
    extra = "; ".join(text for text in found if text and text not in error.problem)
    if extra:
        error.problem = f"{error.problem} ({extra})"
    return error


def _rehearse(trainer: Trainer) -> None:
    """Every check that a run makes before it spends."""
    try:
        trainer.rehearse()
    except LaminaError as error:
        raise _located(error, trainer) from error.__cause__


def _command(run: Path, threads: int | None) -> str:
    """Without --fresh: that would begin another run."""
    return f"lamina train {run}" + (f" --threads {threads}" if threads else "")


def _is_terminal() -> bool:
    return sys.stderr.isatty()
