"""`lamina train RUN.toml`: a private run that may be killed at any instant and goes on with the same command."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import torch
import typer
from torch import nn

from lamina import presets
from lamina.account.charges import Account
from lamina.admit.verdicts import Register
from lamina.allocate.make_plan import make_plan
from lamina.cli import by_name, run_file
from lamina.cli.admit import admission_page
from lamina.cli.by_name import make_loss, make_optimizer, make_scheduler
from lamina.cli.explain import NOT_SIGNED, plan_notes, requested_epsilon, rules_in_words
from lamina.cli.open_ledger import check_policy_not_looser, read_only_register, read_spend
from lamina.cli.run_file import AdmitTable, DataTable, EvaluateTable, ProxyTable, RunFile
from lamina.cli.terminal import (
    columns,
    open_private_key,
    print_answer,
    print_line,
    print_note,
    progress_bar,
    results_only,
)
from lamina.engine.distributed import ALONE, Ranks, joined_ranks
from lamina.engine.proxy_shares import Proxy
from lamina.errors import CorpusError, LaminaError, RankLost, RunError
from lamina.ledger.corpus_terms import CorpusTerms, ledger_key_path, open_or_create
from lamina.ledger.show import describe_factor
from lamina.ledger.spend_ledger import SpendLedger
from lamina.ledger.store.sqlite import is_postgres_url, ledger_exists, printable_location
from lamina.ledger.writer import Ledger
from lamina.plan.charges import plan_charges
from lamina.plan.correlation import AUTO_BANDS
from lamina.plan.layer_stack import LayerStack
from lamina.plan.policy import Policy
from lamina.plan.step_plan import StepPlan
from lamina.plan.table import at_most, epsilon_text, finite_or_none, remaining_text
from lamina.run.admitted import AdmittedCorpus, Gate
from lamina.run.corpus import Corpus
from lamina.run.private import NOTHING_REMAINS, TUNE_ELSEWHERE
from lamina.run.publisher import Evaluation, Outcome
from lamina.run.run import default_ledger_path, neighbours_of_run, refuse_second_ledger
from lamina.run.run_output import failing_layer_and_input, user_code, user_line
from lamina.run.trainer import Trainer
from lamina.run.trainer_checks import declared_start, steps_per_interval
from lamina.sign.keys import PrivateKey

if TYPE_CHECKING:
    from lamina.allocate.measure.measure import Measure


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """What a run would do and cost: known before any data is read."""

    file: RunFile
    beside: Path
    policy: Policy
    model: nn.Module
    plan: StepPlan

    @classmethod
    def of(cls, file: RunFile, beside: Path) -> PlannedRun:
        """Read the policy, make the model, make the plan. Paths are relative to `beside`."""
        policy = Policy.load(beside / file.policy)
        model = by_name.make_model(file.model.factory, file.model.args, beside=beside)
        plan = make_plan(LayerStack.from_model(model), policy, **plan_arguments(file, beside, policy))
        return cls(file=file, beside=beside, policy=policy, model=model, plan=plan)

    def output(self, name: str) -> Path:
        """The folder of the run; `name` is that of the run file."""
        return self.beside / (self.file.output or f"runs/{name}")

    def ledger(self, output: Path) -> str:
        """The ledger of the corpus: a path, or the address of a database."""
        if (given := self.file.ledger) is not None:
            return given if is_postgres_url(given) else str(self.beside / given)
        place = default_ledger_path(self.policy.corpus.origin, output.parent)
        refuse_second_ledger(place, self.policy.corpus.origin, self.beside)
        return str(place)

    def contract(self) -> CorpusTerms:
        """What the ledger will say of the corpus."""
        return CorpusTerms.of_policy(self.policy)

    def key(self) -> PrivateKey | None:
        """The key that signs the ledger, if the file names one; else it lies beside the ledger."""
        if (given := self.file.ledger_key) is None:
            return None
        path = _existing_file(self.beside, "ledger_key", given, f"; make a key: lamina keys new {given}")
        return open_private_key(path, None)

    def corpus(self, ledger: str, *, look: bool = False) -> tuple[Corpus, Ledger | None]:
        """The contributions of the run; and the ledger that records them, if they are admitted by signature.

        With `look` nothing is recorded. Where there is no ledger yet, the trainer makes it when it begins, so that a
        refusal before leaves nothing behind.
        """
        data, table = self.file.data, self.file.admit
        if table is None:
            return read_corpus(data, self.policy, self.beside), None
        if look or not ledger_exists(ledger):
            with read_only_register(ledger, self.contract()) as register:
                return admit_corpus(data, table, self.policy, self.beside, register), None
        opened = open_or_create(ledger, self.contract(), self.key())
        try:
            return admit_corpus(data, table, self.policy, self.beside, opened), opened
        except BaseException:
            opened.close()
            raise

    def trainer(self, *, folder: Path, ledger: str, inside: bool, look: bool = False) -> Trainer:
        """Read the data and build the trainer. Spends nothing; with `look` it records no admission either.

        Of several ranks rank 0 admits, and the others look at what it recorded.
        """
        file, ranks = self.file, Ranks.current()
        loss_fn = make_loss(file.loss.name, file.loss.arguments, beside=self.beside)
        optimizer = make_optimizer(file.optimizer.name, file.optimizer.arguments, self.model)
        table = file.scheduler
        given = {} if table is None else table.arguments
        interval = given.pop("interval", "step")
        times = self.plan.steps // steps_per_interval(self.plan, interval)
        schedule = None
        if table is not None and optimizer != "auto":
            schedule = make_scheduler(table.name, given, optimizer, max(1, times))
        with ranks.first_alone():
            corpus, opened = self.corpus(ledger, look=look or not ranks.first)
        return Trainer(
            self.model, optimizer, loss_fn, corpus, self.plan,
            folder=folder, ledger=ledger if opened is None else opened,
            key=None if look or opened is not None or not ranks.first else self.key(),
            scheduler=schedule, interval=interval, microbatches=file.microbatches, ema=file.ema, log=file.log,
            augment=None if file.augment is None else by_name.import_by_name(file.augment, "augment", beside=self.beside),
            views=file.views,
            evaluate=None if file.evaluate is None else make_evaluation(file.evaluate, self.beside),
            proxy=None if file.proxy is None else read_proxy(file.proxy, loss_fn, self.beside),
            segment=file.segment, max_occurrences=self._caps(), hardened=file.hardened, inside=inside,
            seed=file.seed, starting_weights=declared_start(file.starting_weights, self.beside),
        )  # fmt: skip

    def _caps(self) -> Mapping[str, int] | None:
        """Occurrences by class; one number holds for every private class."""
        given = self.file.max_occurrences
        if isinstance(given, int):
            return {entry.name: given for entry in self.plan.classes if not entry.public}
        for name in given or ():
            self.plan.index(name)
        return given


def plan_arguments(file: RunFile, beside: Path, policy: Policy) -> dict[str, Any]:
    """What a run file says for `make_plan`, beside model and policy."""
    batch = file.batch
    if batch is None and file.preset is not None:
        batch = presets.find(file.preset).batch(sum(entry.population or 0 for entry in policy.classes.values()))
    return {
        "batch": batch, "steps": file.steps, "epochs": file.epochs, "allocate": file.allocate.policy,
        "epsilon": file.epsilon, "rho": file.rho, "noise_multiplier": file.noise_multiplier,
        "clip_norm": file.clip_norm, "clipping": file.clipping, "bands": _bands(file),
        "measure": None if file.measure is None else _load_measure(beside, file.measure),
    }  # fmt: skip


def _bands(file: RunFile) -> int | str | None:
    """Return over how many steps the noise is correlated; "auto" is 1 if ids may be unstable or several ranks share a step."""
    named = file.data.kind == "folder" or file.data.unit not in (None, "each")
    proven = named and file.max_occurrences is None and Ranks.current().alone
    return None if file.bands == AUTO_BANDS and not proven else file.bands


def _existing_file(beside: Path, key: str, name: str, hint: str = "") -> Path:
    """The file or folder that a key of the run file names."""
    if not (path := beside / name).exists():
        problem = f"{key} is '{name}', but there is no '{path}'"
        raise RunError("cli.file-missing", problem, f"paths are relative to the run file{hint}")
    return path


def _load_measure(beside: Path, name: str) -> Measure:
    from lamina.allocate.measure.measure import Measure

    hint = f"; make one: lamina plan policy.toml … --proxy gaussian --save-measure {name}"
    return Measure.load(_existing_file(beside, "measure", name, hint))


def read_corpus(data: DataTable, policy: Policy, beside: Path) -> Corpus:
    """The corpus that a [data] table describes, under the run's policy."""
    common: dict[str, Any] = {"policy": policy, "cls": data.cls, "version": data.version}
    common["examples_per_unit"] = data.examples_per_unit
    try:
        if data.factory is not None:
            return _corpus_of_factory(data.factory, data, common, beside)
        path = _existing_file(beside, "data.path", data.path or "")
        if data.kind == "folder":
            return Corpus.of_folder(path, **common)
        common |= {"unit": data.unit, "subject": data.subject, "y": data.y}
        common |= {} if data.x is None else {"x": data.x}
        if data.kind == "npz":
            return Corpus.of_npz(path, **common)
        return Corpus.of_csv(path, **common, delimiter=data.delimiter or ",")
    except CorpusError as error:
        problem = f"data: {error.problem}"
        raise CorpusError("cli.data-not-usable", problem, error.remedy.replace("cls=", "data.class =")) from None


def admit_corpus(
    data: DataTable, table: AdmitTable, policy: Policy, beside: Path, ledger: Ledger | Register | None = None
) -> Corpus:
    """The contributions of a folder that the gate admits. The key ring is read again at every segment."""
    ring = _existing_file(beside, "admit.keys", table.keys, "; lamina keys add makes a key ring")
    gate, path = Gate(policy, ring, processes=table.processes), beside / (data.path or "")
    with progress_bar("checking signatures") as tick:
        return gate.admit(
            path, ledger, on_refusal=table.on_refusal, examples_per_unit=data.examples_per_unit, progress=tick
        )


def _corpus_of_factory(name: str, data: DataTable, common: Mapping[str, Any], beside: Path) -> Corpus:
    """What the user's factory returns, as a corpus. A factory that takes `policy` gets the run's."""
    factory = by_name.import_by_name(name, "data factory", beside=beside)
    policy = {"policy": common["policy"]} if "policy" in by_name.parameter_names(factory) else {}
    made = by_name.call_factory(factory, f"data factory '{name}'", {**policy, **data.args})
    if not isinstance(made, Corpus):
        with user_code(f"data factory '{name}' returned a {type(made).__name__}", _FACTORY_RETURNS):
            parts = made if isinstance(made, tuple) and len(made) == 2 else (made,)
            return Corpus(*parts, unit=data.unit, **common)
    for key in ("examples_per_unit", "version", "cls"):
        if common[key] is not None:
            problem = (
                f"data factory '{name}' returned a Corpus, so data.{'class' if key == 'cls' else key} has no effect"
            )
            raise CorpusError("cli.data-key-with-corpus", problem, "remove it, and give it to the Corpus")
    if made.policy != common["policy"]:
        problem = f"data factory '{name}' returned a Corpus under {'no' if made.policy is None else 'another'} policy"
        remedy = "take the run's policy: def data(policy): return lamina.Corpus(x, y, unit=…, policy=policy)"
        raise CorpusError("cli.corpus-of-other-policy", problem, remedy)
    return made


_FACTORY_RETURNS = "return a lamina.Corpus, a torch Dataset, or (x, y)"


def read_proxy(table: ProxyTable, loss_fn: Callable[[Any, Any], Any], beside: Path) -> Proxy:
    """The examples of a [proxy] table, with the run's own loss."""
    name = f"proxy.function '{table.function}'"
    found = by_name.call_factory(by_name.import_by_name(table.function, "proxy.function", beside=beside), name)
    x, y = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    return Proxy(source=f"{table.on}: {table.function}", x=x, y=y, loss_fn=loss_fn)


def make_evaluation(table: EvaluateTable, beside: Path) -> Evaluation:
    """The rule of an [evaluate] table. Errors of its function are shown in full: it sees no private data."""
    function = by_name.import_by_name(table.function, "evaluate.function", beside=beside)
    failed = f"evaluate.function '{table.function}' failed"

    def figures(model: nn.Module) -> Mapping[str, float]:
        with user_code(failed, "correct the line, then go on with the same command"):
            found: Mapping[str, float] = function(model)
            return found

    return Evaluation(function=figures, on=table.on, every=table.every, best=table.best, patience=table.patience)


_MAX_BOUNDS_SHOWN = 20  # bounds in the table
_NO_RUN = "00" * 16  # a run that holds nothing yet


def print_admission(trainer: Trainer, say: Callable[[str], None]) -> tuple[str, ...]:
    """Print who was admitted and refused, and what their bounds mean under the plan; returns notes."""
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


def run_training(run: Path, *, plan_only: bool, fresh: bool, inside: bool, threads: int | None, as_json: bool) -> None:
    """`lamina train RUN.toml` (options and help: torch_commands.py). Under torchrun: as one of several ranks."""
    if plan_only:
        if int(os.environ.get("RANK", "0")) == 0:
            _run_as_rank(ALONE, run, plan_only=True, fresh=fresh, inside=inside, threads=threads, as_json=as_json)
        return
    with joined_ranks() as ranks:
        try:
            _run_as_rank(ranks, run, plan_only=False, fresh=fresh, inside=inside, threads=threads, as_json=as_json)
        except LaminaError as error:
            if ranks.first or not (isinstance(error, RankLost) or error.code == "train.rank-0-stopped"):
                raise
            raise typer.Exit(1) from None  # the rank that stopped says why


def _run_as_rank(
    ranks: Ranks, run: Path, *, plan_only: bool, fresh: bool, inside: bool, threads: int | None, as_json: bool
) -> None:
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
        if (cause := error.__cause__) is not None:
            line = user_line(cause)
            found = [failing_layer_and_input(cause, trainer.model), f"at {line}" if line else None]
            if extra := "; ".join(text for text in found if text and text not in error.problem):
                error.problem = f"{error.problem} ({extra})"
        raise error from error.__cause__  # suppresses the context, which may quote private data
