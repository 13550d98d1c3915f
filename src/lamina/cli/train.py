"""Train a model privately, as a RUN.toml says. Run the same command again to go on after a stop or a crash.

Spends: the ε of the plan, charged in the corpus's ledger before each segment. A run that exceeds what the policy allows over all
runs is refused before it begins.

Writes: runs/NAME with the weights (model.safetensors), public figures (metrics.json), plan, newest attempt and checkpoints; and
beside it the signed ledger of what was admitted and spent (lamina ledger verify).

Admits: with an [admit] table, only signed contributions (lamina keys, lamina attest), each under the bound that it signed.
Validity, keys and withdrawals are checked again at every segment.

Shows: ε so far, never the loss: a loss without noise would reveal private data that no budget paid for. Evaluate on public or
simulated data instead.

Examples:

  lamina train --template > RUN.toml     a run file to edit
  lamina train --presets                 settings by task, and the data sets of the LSAB paper
  lamina train --preset paper-ptbxl > RUN.toml
  lamina train RUN.toml --plan-only      every check, nothing spent
  lamina train RUN.toml                  train; again to go on
  lamina train RUN.toml --fresh          another run, charged anew
  torchrun --standalone --nproc-per-node 2 -m lamina train RUN.toml
                                         with two processes: docs/distributed.md
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import typer

from lamina.account.charges import Account
from lamina.cli import run_file
from lamina.cli.admit import admission_page
from lamina.cli.command import Answer, argument, command, misuse, option, table
from lamina.cli.explain import NOT_SIGNED, plan_notes, requested_epsilon, rules_in_words
from lamina.cli.open_ledger import check_policy_not_looser, read_spend
from lamina.cli.run_file import RunFile
from lamina.cli.terminal import print_note, results_only, say, stderr_is_terminal
from lamina.errors import LaminaError, RankLost, RunError
from lamina.ledger.corpus_terms import ledger_key_path
from lamina.ledger.show import describe_factor
from lamina.ledger.spend_ledger import SpendLedger
from lamina.ledger.store.sqlite import is_postgres_url, ledger_exists, printable_location
from lamina.plan.charges import plan_charges
from lamina.plan.table import at_most, epsilon_text, finite_or_none, remaining_text
from lamina.run.run_record import has_begun
from lamina.signals import presets as named_settings

if TYPE_CHECKING:
    from lamina.cli.planned_run import PlannedRun
    from lamina.engine.distributed import Ranks
    from lamina.run.corpus import Corpus
    from lamina.run.publisher import Outcome
    from lamina.run.trainer import Trainer

_MAX_BOUNDS_SHOWN = 20  # bounds in the table
_NO_RUN = "00" * 16  # a run that holds nothing yet


@command()
def train(
    run: Path | None = argument("RUN.toml", "the run: policy, model, data, loss, optimiser, length", default=None),
    plan_only: bool = option("check all, show plan and ledger; spends and writes nothing"),
    fresh: bool = option("a new run in a new folder NAME-2, NAME-3, …; charged anew"),
    take_over: bool = option("go on in a copied or restored folder; what is done again is charged again"),
    inside: bool = option("show the raw private loss in this terminal; never written"),
    threads: int | None = option("torch threads; to go on with a run, give the same", min=1),
    template: bool = option("print an annotated RUN.toml to start from, and exit"),
    preset: str | None = option("print the RUN.toml of a data set of the LSAB paper, and exit", default=None),
    presets: bool = option("list settings by task and the data sets of the LSAB paper, and exit"),
) -> Answer | None:
    if presets:
        rows = named_settings.listed()
        used = 'paper-…: lamina train --preset NAME > RUN.toml; others: preset = "NAME" in RUN.toml'
        return Answer({"presets": dict(rows)}, table([["preset", "for"], *map(list, rows)], left=2), used)
    if preset is not None:
        text = named_settings.run_file(preset)
        return Answer({"preset": text}, text, raw=True)
    if template:
        text = run_file.run_template()
        return Answer({"template": text}, text, raw=True)
    if run is None:
        raise misuse("give the run file, or --template to get one", "RUN.toml")
    if inside and not stderr_is_terminal():
        problem = (
            "--inside shows the raw private loss, but standard error is not a terminal: the loss would be written down"
        )
        remedy = "run it in a terminal; or leave --inside out and evaluate on public data"
        raise RunError("cli.inside-needs-terminal", problem, remedy)
    from lamina.engine.distributed import ALONE, joined_ranks

    asked: dict[str, Any] = {
        "plan_only": plan_only, "fresh": fresh, "take_over": take_over, "inside": inside, "threads": threads,
    }  # fmt: skip
    if plan_only:
        return _as_rank(ALONE, run, **asked) if int(os.environ.get("RANK", "0")) == 0 else None
    with joined_ranks() as ranks:
        try:
            return _as_rank(ranks, run, **asked)
        except LaminaError as error:
            if ranks.first or not (isinstance(error, RankLost) or error.code == "train.rank-0-stopped"):
                raise
            raise typer.Exit(1) from None  # the rank that stopped says why


def _as_rank(
    ranks: Ranks, run: Path, *, plan_only: bool, fresh: bool, take_over: bool, inside: bool, threads: int | None
) -> Answer | None:
    import torch

    from lamina.cli.planned_run import PlannedRun, auto_bands_note

    with results_only(), ranks.first_alone():
        file = RunFile.load(run)
        if threads or file.threads:
            torch.set_num_threads(threads or file.threads or 1)
        beside = run.resolve().parent
        output = beside / (file.output or f"runs/{run.stem}")
        folder = run_file.unused_run_folder(output) if fresh else run_file.newest_run_folder(output)
        planned = PlannedRun.of(file, beside, resumed=folder)
        ledger = planned.ledger(output)
    wanted = requested_epsilon(file.epsilon, file.rho, planned.policy.corpus.delta)
    notes = () if file.noise_multiplier else plan_notes(planned.plan, planned.policy, wanted)
    notes += auto_bands_note(file, planned.policy)
    if ranks.first:
        rules = [f"rule: {rule}" for rule in rules_in_words(planned.plan)]
        say("\n".join([str(planned.plan), *rules, *(f"note: {note}" for note in notes), ""]))
    folder = folder.with_name(ranks.broadcast(folder.name.encode() if ranks.first else None).decode())
    if plan_only:
        with results_only():
            trainer = planned.trainer(folder=folder, ledger=ledger, inside=False, look=True)
            with _located(trainer):
                trainer.rehearse()
        return _plan_only(planned, trainer, folder, ledger, (*notes, *trainer.restricted, *_say_admission(trainer)))
    before = run_file.read_run_figures(folder)
    if ranks.first and before.get("steps") == planned.plan.steps:
        run_file.check_settings_of_finished_run(folder, file.settings())
    with results_only():
        trainer = planned.trainer(folder=folder, ledger=ledger, inside=inside, take_over=take_over)
    if ranks.first:
        notes = (*notes, *_say_admission(trainer))
    with results_only():
        if ranks.first:
            run_file.write_run_settings(folder, output, file.settings())
        try:
            with _located(trainer), planned.tracked(trainer):
                outcome = trainer.fit()
        except KeyboardInterrupt:
            again = f"lamina train {run}" + (f" --threads {threads}" if threads else "")
            if ranks.first:
                print_note(f"\nstopped. Nothing is lost: what was begun is replayed at no cost. Go on with  {again}")
            raise typer.Exit(130) from None
        if not ranks.first:
            return None
        trainer.ledger.close()
    if before and before.get("steps") == outcome.steps:
        notes = (*notes, "the run had already finished: nothing was trained or charged now; --fresh begins another run")
    facts = _outcome_json(replace(outcome, notes=(*outcome.notes, *notes)), planned, trainer.corpus, ledger)
    return Answer(facts, *_outcome_lines(facts))


def _say_admission(trainer: Trainer) -> tuple[str, ...]:
    """Say who was admitted and refused, and what their bounds mean under the plan; returns notes."""
    from lamina.run.admitted import AdmittedCorpus

    corpus = trainer.corpus
    if isinstance(corpus, AdmittedCorpus):
        say(f"{admission_page(corpus.admission, corpus.resolution(trainer.plan, trainer.max_occurrences))}\n")
    return () if corpus.admission is not None else (NOT_SIGNED,)


def _outcome_json(outcome: Outcome, planned: PlannedRun, corpus: Corpus, ledger: str) -> dict[str, Any]:
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
        "ledger": printable_location(ledger),
    }


def _outcome_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """The same for people."""
    folder, ledger, steps = Path(facts["folder"]), facts["ledger"], f"{facts['steps']:,}"
    rows = [["class", "unit", "δ", "ε of this run", "ε over all runs", "steps"]]
    for name, row in facts["classes"].items():
        figures = ["–", "not protected", "not protected"]
        if row["delta"] is not None:
            figures = [f"{row['delta']:g}", _epsilon(row["epsilon"]), _epsilon(row["total"])]
        rows.append([name, row["unit"], *figures, steps])
    yield f"{table(rows, left=2)}\n"
    yield from _bound_lines(facts["bounds"])
    if (admission := facts["admission"]) is not None:
        left = f"; had to leave: {len(admission['left']):,}" if "left" in admission else ""
        yield f"admitted by signature: {admission['admitted']:,}; refused: {len(admission['refused']):,}{left}"
    if not facts["private"]:
        yield "NOT PRIVATE: this run has no guarantee; the notes say why"
    yield from (f"rule: {rule}" for rule in facts["rules"])
    yield from (f"{name}: {value:.4g}" for name, value in facts["metrics"].items())
    yield from (f"note: {note}" for note in facts["notes"])
    yield f"model:   {facts['model']}"
    yield f"figures: {folder / 'metrics.json'}"
    yield f"ledger:  {ledger}"
    yield f"         lamina spend {quote(ledger)} reads it, lamina ledger verify {quote(ledger)} checks it"
    if not is_postgres_url(ledger) and (key := ledger_key_path(ledger)).exists():
        yield f"key:     {key}  (secret: whoever has it can sign another history)"
    yield f"seed:    {folder / 'attempt'}  (secret, like checkpoint/: keep both on this machine)"


def _epsilon(value: float | None) -> str:
    return "∞" if value is None else epsilon_text(value)


def _bound_lines(bounds: Mapping[str, Any]) -> Iterator[str]:
    """What was signed, and what was spent on it."""
    if not bounds:
        return
    rows = [["signed bound", "δ", "ε signed", "ε of this run", "ε over all runs", "scale"]]
    for name, row in list(bounds.items())[:_MAX_BOUNDS_SHOWN]:
        signed, scale = row.get("signed"), row.get("scale")
        figures = [
            "–" if signed is None else epsilon_text(signed),
            *(epsilon_text(row[key]) for key in ("epsilon", "total")),
        ]
        rows.append([name, f"{row['delta']:g}", *figures, "–" if scale is None else at_most(scale)])
    yield table(rows)
    if len(bounds) > _MAX_BOUNDS_SHOWN:
        yield f"… and {len(bounds) - _MAX_BOUNDS_SHOWN} more, in metrics.json"
    for key, how in {"steps_left_out": "left out of", "steps_scaled": "scaled in"}.items():
        yield from (f"{name} was exhausted: {how} {row[key]} steps" for name, row in bounds.items() if row.get(key))
    yield ""


def _plan_only(planned: PlannedRun, trainer: Trainer, folder: Path, where: str, notes: tuple[str, ...]) -> Answer:
    """Which folder the run would use, and what the ledger says of each class; not ok if the run would be refused."""
    from lamina.run.run_ledger import neighbours_of_run

    begun = run_file.read_run_figures(folder).get("steps") if has_begun(folder) else None
    with read_spend(where) if (there := ledger_exists(where)) else nullcontext() as spends:
        if spends is not None:
            check_policy_not_looser(spends.ledger, planned.contract())
        standing = _standing(planned, spends, begun=begun is not None)
        refused = [] if begun is not None or spends is None else _over_budget(planned, trainer, spends)
        exhausted: dict[str, float] = {}
        if spends is not None and begun is None and trainer.factors:
            first = min(trainer.segment, planned.plan.steps)
            exhausted = spends.exhausted(planned.plan, 0, first, trainer.accounts, trainer.factors)
    place, beside = printable_location(where), neighbours_of_run(where, folder)
    facts = {
        "folder": str(folder), "begun": begun, "ledger": place, "standing": standing, "refused": refused,
        "exhausted": exhausted, "notes": list(notes), "ledgers_beside": [each.to_dict() for each in beside],
        "admission": None if trainer.corpus.admission is None else trainer.corpus.admission.to_dict(),
    }  # fmt: skip
    rows = [["class", "ε planned", "ε spent by all runs", "with what is reserved", "bound", "remains after"]]
    for name, row in standing.items():
        bound = ["none", "–"]
        if row["bound"] is not None:
            bound = [epsilon_text(row["bound"]), remaining_text(row["remaining"])]
        rows.append([name, *(_epsilon(row[key]) for key in ("planned", "spent", "committed")), *bound])
    state = f"would go on at step {begun} of {planned.plan.steps}" if begun is not None else "would begin"
    if refused:
        lacking = ", ".join(Account.parse(name).describe() for name in refused)
        state = f"would be refused: the ledger has too little ε left for {lacking}"
    lines = [f"{table(rows)}\n", f"{folder}: {state}", f"ledger: {place}{'' if there else ' (not there yet)'}"]
    lines += [] if refused else _after_run(standing)
    for name, factor in exhausted.items():
        count, done = trainer.corpus.count_signed(name), describe_factor(factor)
        lines.append(f"{Account.parse(name).describe()}, {count} contributions, in the first segment{done}")
    lines += [each.note(planned.policy.corpus.origin) for each in beside]
    return Answer({**planned.plan.to_dict(), **facts}, *lines, "nothing was spent or written", ok=not refused)


def _after_run(standing: Mapping[str, Any]) -> list[str]:
    """What remains of each bound after the run, and where to try things out at no cost."""
    from lamina.run.private import NOTHING_REMAINS, TUNE_ELSEWHERE

    bounded = {name: row for name, row in standing.items() if row["bound"] is not None}
    gone = [name for name, row in bounded.items() if row["remaining"] < NOTHING_REMAINS * row["bound"]]
    left = [f"ε {remaining_text(row['remaining'])} for {name}" for name, row in bounded.items() if name not in gone]
    told = [f"after this run nothing remains for {', '.join(gone)}"] if gone else []
    told += [f"after this run there remains {', '.join(left)}"] if left else []
    return [*told, TUNE_ELSEWHERE] if told else []


def _standing(planned: PlannedRun, spends: SpendLedger | None, *, begun: bool) -> dict[str, Any]:
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
