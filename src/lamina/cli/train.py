"""`lamina train RUN.toml`: a private run that may be killed at any instant and goes on with the same command."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lamina.account.charges import Account
from lamina.cli import run_file
from lamina.cli.admit import admission_page
from lamina.cli.explain import NOT_SIGNED, plan_notes, requested_epsilon, rules_in_words
from lamina.cli.open_ledger import check_policy_not_looser, read_spend
from lamina.cli.options import JsonOption, argument, option
from lamina.cli.run_file import RunFile
from lamina.cli.terminal import (
    columns,
    print_answer,
    print_line,
    print_note,
    print_template,
    results_only,
    stderr_is_terminal,
)
from lamina.errors import LaminaError, RankLost, RunError
from lamina.ledger.corpus_terms import ledger_key_path
from lamina.ledger.show import describe_factor
from lamina.ledger.spend_ledger import SpendLedger
from lamina.ledger.store.sqlite import is_postgres_url, ledger_exists, printable_location
from lamina.plan.charges import plan_charges
from lamina.plan.table import at_most, epsilon_text, finite_or_none, remaining_text

if TYPE_CHECKING:
    from lamina.cli.planned_run import PlannedRun
    from lamina.engine.distributed import Ranks
    from lamina.run.corpus import Corpus
    from lamina.run.publisher import Outcome
    from lamina.run.trainer import Trainer

_MAX_BOUNDS_SHOWN = 20  # bounds in the table
_NO_RUN = "00" * 16  # a run that holds nothing yet


def print_admission(trainer: Trainer, say: Callable[[str], None]) -> tuple[str, ...]:
    """Print who was admitted and refused, and what their bounds mean under the plan; returns notes."""
    from lamina.run.admitted import AdmittedCorpus

    corpus = trainer.corpus
    if isinstance(corpus, AdmittedCorpus):
        found = admission_page(corpus.admission, corpus.resolution(trainer.plan, trainer.max_occurrences))
        say(f"{found}\n")
    return () if corpus.admission is not None else (NOT_SIGNED,)


def outcome_json(outcome: Outcome, planned: PlannedRun, corpus: Corpus, ledger: str) -> dict[str, Any]:
    """Keys that machines read."""
    admission = corpus.admission
    return {
        "run": outcome.run,
        "folder": str(outcome.folder),
        "steps": outcome.steps,
        "planned_steps": planned.plan.steps,
        "private": outcome.private,
        "classes": {
            entry.name: {
                "epsilon": None if entry.public else finite_or_none(outcome.epsilon.get(entry.name, 0.0)),
                "total": None if entry.public else finite_or_none(outcome.total.get(entry.name, 0.0)),
                "delta": None if entry.public else entry.delta,
                "unit": entry.unit,
            }
            for entry in planned.plan.classes
        },
        "allocation": planned.plan.allocation,
        "rules": list(rules_in_words(planned.plan)),
        "admission": None if admission is None else admission.to_dict(),
        "bounds": run_file.read_run_figures(outcome.folder).get("bounds", {}),
        "metrics": dict(outcome.metrics),
        "notes": list(outcome.notes),
        "model": str(outcome.folder / "model.safetensors"),
        "ledger": ledger,
    }


def outcome_page(outcome: Outcome, planned: PlannedRun, corpus: Corpus, ledger: str) -> str:
    """For people."""
    rows = [["class", "unit", "δ", "ε of this run", "ε over all runs", "steps"]]
    for entry in planned.plan.classes:
        name = entry.name
        if entry.public:
            rows.append([name, entry.unit, "–", "not protected", "not protected", f"{outcome.steps:,}"])
            continue
        spent = [epsilon_text(found.get(name, 0.0)) for found in (outcome.epsilon, outcome.total)]
        rows.append([name, entry.unit, f"{entry.delta:g}", *spent, f"{outcome.steps:,}"])
    lines = [columns(rows, left=2), "", *_bound_lines(outcome)]
    if (admission := corpus.admission) is not None:
        left = f"; had to leave: {len(admission.left):,}" if admission.left else ""
        lines.append(f"admitted by signature: {len(admission):,}; refused: {len(admission.refused):,}{left}")
    if not outcome.private:
        lines.append("NOT PRIVATE: this run has no guarantee; the notes say why")
    lines += [f"rule: {rule}" for rule in rules_in_words(planned.plan)]
    lines += [f"{name}: {value:.4g}" for name, value in outcome.metrics.items()]
    lines += [f"note: {note}" for note in outcome.notes]
    folder = outcome.folder
    lines += [
        f"model:   {folder / 'model.safetensors'}",
        f"figures: {folder / 'metrics.json'}",
        f"ledger:  {ledger}",
        f"         lamina spend {quote(ledger)} reads it, lamina ledger verify {quote(ledger)} checks it",
    ]
    if not is_postgres_url(ledger) and (key := ledger_key_path(ledger)).exists():
        lines.append(f"key:     {key}  (secret: whoever has it can sign another history)")
    secret = "secret, like checkpoint/: keep both on this machine"
    return "\n".join([*lines, f"journal: {folder / 'journal'}  ({secret})"])


def _bound_lines(outcome: Outcome) -> list[str]:
    """What was signed, and what was spent on it."""
    bounds = run_file.read_run_figures(outcome.folder).get("bounds", {})
    if not bounds:
        return []
    rows = [["signed bound", "δ", "ε signed", "ε of this run", "ε over all runs", "scale"]]
    for name, row in list(bounds.items())[:_MAX_BOUNDS_SHOWN]:
        signed, scale = row.get("signed"), row.get("scale")
        figures = [epsilon_text(row[key]) for key in ("epsilon", "total")]
        promised = "–" if signed is None else epsilon_text(signed)
        rows.append([name, f"{row['delta']:g}", promised, *figures, "–" if scale is None else at_most(scale)])
    more = [f"… and {len(bounds) - _MAX_BOUNDS_SHOWN} more, in metrics.json"] if len(bounds) > _MAX_BOUNDS_SHOWN else []
    kinds = {"steps_left_out": "left out of", "steps_scaled": "scaled in"}
    left = [(name, how, row.get(key)) for name, row in bounds.items() for key, how in kinds.items()]
    more += [f"{name} was exhausted: {how} {steps} steps" for name, how, steps in left if steps]
    return [columns(rows), *more, ""]


def print_plan_only(
    planned: PlannedRun, trainer: Trainer, folder: Path, where: str, notes: tuple[str, ...], *, as_json: bool
) -> bool:
    """Print which folder the run would use, and what the ledger says of each class. False if it would be refused."""
    from lamina.run.run_ledger import neighbours_of_run

    begun = run_file.read_run_figures(folder).get("steps") if (folder / "journal").exists() else None
    with read_spend(where) if (there := ledger_exists(where)) else nullcontext() as spends:
        if spends is not None:
            check_policy_not_looser(spends.ledger, planned.contract())
        standing = _spend_by_class(planned, spends, begun=begun is not None)
        refused = [] if begun is not None or spends is None else _over_budget(planned, trainer, spends)
        exhausted: dict[str, float] = {}
        if spends is not None and begun is None and trainer.factors:
            first = min(trainer.segment, planned.plan.steps)
            exhausted = spends.exhausted(planned.plan, 0, first, trainer.accounts, trainer.factors)
    admission = None if trainer.corpus.admission is None else trainer.corpus.admission.to_dict()
    facts = {"folder": str(folder), "begun": begun, "ledger": printable_location(where), "standing": standing}
    beside = neighbours_of_run(where, folder)
    facts |= {"refused": refused, "exhausted": exhausted, "admission": admission, "notes": list(notes)}
    facts["ledgers_beside"] = [each.to_dict() for each in beside]
    rows = [["class", "ε planned", "ε spent by all runs", "with what is reserved", "bound", "remains after"]]
    for name, row in standing.items():
        unbounded, figures = row["bound"] is None, (row[key] for key in ("planned", "spent", "committed"))
        bound = ["none", "–"] if unbounded else [epsilon_text(row["bound"]), remaining_text(row["remaining"])]
        rows.append([name, *("∞" if each is None else epsilon_text(each) for each in figures), *bound])
    state = f"would go on at step {begun} of {planned.plan.steps}" if begun is not None else "would begin"
    if refused:
        state = f"would be refused: the ledger has too little ε left for {', '.join(Account.parse(name).describe() for name in refused)}"
    place = f"ledger: {printable_location(where)}{'' if there else ' (not there yet)'}"
    lines = [columns(rows), "", f"{folder}: {state}", place, *([] if refused else after_run(standing))]
    for name, factor in exhausted.items():
        count, done = trainer.corpus.count_signed(name), describe_factor(factor)
        lines.append(f"{Account.parse(name).describe()}, {count} contributions, in the first segment{done}")
    lines += [f"another ledger lies beside it, and a person in both loses the sum: {each}" for each in beside]
    lines.append("nothing was spent or written")
    print_answer({**planned.plan.to_dict(), **facts}, "\n".join(lines), as_json)
    return not refused


def after_run(standing: Mapping[str, Any]) -> list[str]:
    """What remains of each bound after the run, and where to try things out at no cost."""
    from lamina.run.private import NOTHING_REMAINS, TUNE_ELSEWHERE

    bounded = {name: row for name, row in standing.items() if row["bound"] is not None}
    gone = [name for name, row in bounded.items() if row["remaining"] < NOTHING_REMAINS * row["bound"]]
    left = [f"ε {remaining_text(row['remaining'])} for {name}" for name, row in bounded.items() if name not in gone]
    told = [f"after this run nothing remains for {', '.join(gone)}"] if gone else []
    told += [f"after this run there remains {', '.join(left)}"] if left else []
    return [*told, TUNE_ELSEWHERE] if told else []


def _spend_by_class(planned: PlannedRun, spends: SpendLedger | None, *, begun: bool) -> dict[str, Any]:
    """What is planned, spent and allowed, by class, and what remains after the run; one that has begun holds its part."""
    found: dict[str, Any] = {}
    plan = planned.plan
    due = () if begun else plan_charges(plan, 0, plan.steps)
    for entry in plan.classes:
        if not entry.public:
            terms: dict[str, Any] = {"delta": entry.delta, "accountant": plan.accountant}
            total = spends and spends.total(entry.name, **terms)
            mine = [charge for charge in due if charge.account == Account(entry.name)]
            after = spends.total(entry.name, **terms, besides=mine).committed if spends else 0.0
            bound, most = planned.policy.bound(entry.name), max(after, plan.epsilon(entry.name))
            found[entry.name] = {
                "planned": plan.epsilon(entry.name),
                "spent": finite_or_none(total.spent if total else 0.0),
                "committed": finite_or_none(total.committed if total else 0.0),
                "bound": bound,
                "remaining": None if bound is None else max(0.0, bound - most),
            }
    return found


def _over_budget(planned: PlannedRun, trainer: Trainer, spends: SpendLedger) -> list[str]:
    """Classes and signed bounds that have too little left for a new run of this plan."""
    plan, found = planned.plan, []
    bounds = {entry.name: planned.policy.bound(entry.name) for entry in plan.classes}
    accounts = () if trainer.factors else trainer.accounts  # exhausted bounds do not stop it
    bounds |= {each.name: each.epsilon for each in accounts}
    every = plan_charges(plan, 0, plan.steps, accounts)
    for name, bound in bounds.items():
        due = [c for c in every if str(c.account) == name]
        risk = None if Account.parse(name).signed else planned.policy.classes[name].risk
        if due and (bound is not None or risk is not None):
            bound, (most, *besides) = float("inf") if bound is None else bound, due
            fit = spends.fits(_NO_RUN, charge=most, bound=bound, besides=besides)
            whole = plan.epsilon(name) if not Account.parse(name).signed else 0.0
            if fit < most.event.steps or whole > bound:
                found.append(name)
    return found


def train(
    run: Annotated[Path | None, argument("RUN.toml", "the run: policy, model, data, loss, optimiser, length")] = None,
    plan_only: Annotated[
        bool, option("check all, show plan and ledger; spends and writes nothing", "--plan-only")
    ] = False,
    fresh: Annotated[bool, option("a new run in a new folder NAME-2, NAME-3, …; charged anew", "--fresh")] = False,
    inside: Annotated[bool, option("show the raw private loss in this terminal; never written", "--inside")] = False,
    threads: Annotated[int | None, option("torch threads; to go on with a run, give the same", min=1)] = None,
    template: Annotated[bool, option("print an annotated RUN.toml to start from, and exit", "--template")] = False,
    as_json: JsonOption = False,
) -> None:
    """Train a model privately, as a RUN.toml says. Run the same command again to go on after a stop or a crash.

    Spends: the ε of the plan, charged in the corpus's ledger before each segment. A run that exceeds what the policy
    allows over all runs is refused before it begins.

    Writes: runs/NAME with the weights (model.safetensors), public figures (metrics.json), plan, journal and
    checkpoints; and beside it the signed ledger of what was admitted and spent (lamina ledger verify).

    Admits: with an [admit] table, only signed contributions (lamina keys, lamina attest), each under the bound that it
    signed. Validity, keys and withdrawals are checked again at every segment.

    Shows: ε so far, never the loss: a loss without noise would reveal private data that no budget paid for. Evaluate on
    public or simulated data instead.

    Examples:

      lamina train --template > RUN.toml     a run file to edit
      lamina train RUN.toml --plan-only      every check, nothing spent
      lamina train RUN.toml                  train; again to go on
      lamina train RUN.toml --fresh          another run, charged anew
      torchrun --standalone --nproc-per-node 2 -m lamina train RUN.toml
                                             with two processes: docs/distributed.md
    """
    if template:
        print_template(run_file.run_template(), as_json)
        return
    if run is None:
        raise typer.BadParameter("give the run file, or --template to get one", param_hint="RUN.toml")
    if inside and not stderr_is_terminal():
        problem = (
            "--inside shows the raw private loss, but standard error is not a terminal: the loss would be written down"
        )
        remedy = "run it in a terminal; or leave --inside out and evaluate on public data"
        raise RunError("cli.inside-needs-terminal", problem, remedy)
    from lamina.engine.distributed import ALONE, joined_ranks

    asked: dict[str, Any] = {"plan_only": plan_only, "fresh": fresh, "inside": inside, "threads": threads}
    if plan_only:
        if int(os.environ.get("RANK", "0")) == 0:
            _run_as_rank(ALONE, run, as_json=as_json, **asked)
        return
    with joined_ranks() as ranks:
        try:
            _run_as_rank(ranks, run, as_json=as_json, **asked)
        except LaminaError as error:
            if ranks.first or not (isinstance(error, RankLost) or error.code == "train.rank-0-stopped"):
                raise
            raise typer.Exit(1) from None  # the rank that stopped says why


def _run_as_rank(
    ranks: Ranks, run: Path, *, plan_only: bool, fresh: bool, inside: bool, threads: int | None, as_json: bool
) -> None:
    import torch

    from lamina.cli.planned_run import PlannedRun

    with results_only(), ranks.first_alone():
        file = RunFile.load(run)
        if threads or file.threads:
            torch.set_num_threads(threads or file.threads or 1)
        planned = PlannedRun.of(file, run.resolve().parent)
        output = planned.output(run.stem)
        ledger = planned.ledger(output)
    wanted = requested_epsilon(file.epsilon, file.rho, planned.policy.corpus.delta)
    notes = () if file.noise_multiplier else plan_notes(planned.plan, planned.policy, wanted)
    say: Callable[[str], None] = (print_note if as_json else print_line) if ranks.first else lambda _: None
    rules = [f"rule: {rule}" for rule in rules_in_words(planned.plan)]
    say("\n".join([str(planned.plan), *rules, *(f"note: {note}" for note in notes), ""]))
    folder = run_file.unused_run_folder(output) if fresh else run_file.newest_run_folder(output)
    folder = folder.with_name(ranks.broadcast(folder.name.encode() if ranks.first else None).decode())
    if plan_only:
        with results_only():
            trainer = planned.trainer(folder=folder, ledger=ledger, inside=False, look=True)
            with _located(trainer):
                trainer.rehearse()
        notes = (*notes, *trainer.restricted, *print_admission(trainer, say))
        if not print_plan_only(planned, trainer, folder, ledger, notes, as_json=as_json):
            raise typer.Exit(1)
        return
    before = run_file.read_run_figures(folder)
    if ranks.first and before.get("steps") == planned.plan.steps:
        run_file.check_settings_of_finished_run(folder, file.settings())
    with results_only():
        trainer = planned.trainer(folder=folder, ledger=ledger, inside=inside)
    notes = (*notes, *print_admission(trainer, say))
    with results_only():
        if ranks.first:
            run_file.write_run_settings(folder, output, file.settings())
        try:
            with _located(trainer):
                outcome = trainer.fit()
        except KeyboardInterrupt:
            again = f"lamina train {run}" + (f" --threads {threads}" if threads else "")
            if ranks.first:
                print_note(f"\nstopped. Nothing is lost: what was begun is replayed at no cost. Go on with  {again}")
            raise typer.Exit(130) from None
        if not ranks.first:
            return
        trainer.ledger.close()
    if before and before.get("steps") == outcome.steps:
        notes = (*notes, "the run had already finished: nothing was trained or charged now; --fresh begins another run")
    outcome = replace(outcome, notes=(*outcome.notes, *notes))
    given = (outcome, planned, trainer.corpus, printable_location(ledger))
    print_answer(outcome_json(*given), outcome_page(*given), as_json)


@contextmanager
def _located(trainer: Trainer) -> Iterator[None]:
    """Adds to a refusal the layer, and the line of the user's code, that it comes from."""
    try:
        yield
    except LaminaError as error:
        from lamina.run.run_output import failing_layer_and_input, user_line

        if (cause := error.__cause__) is not None:
            line = user_line(cause)
            found = [failing_layer_and_input(cause, trainer.model), f"at {line}" if line else None]
            if extra := "; ".join(text for text in found if text and text not in error.problem):
                error.problem = f"{error.problem} ({extra})"
        raise error from error.__cause__  # suppresses the context, which may quote private data
