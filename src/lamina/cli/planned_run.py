"""`PlannedRun`: policy, model, plan, data and trainer that a RUN.toml describes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from lamina.admit.register import Register
from lamina.allocate.make_plan import DEFAULT_ALLOCATION, make_plan
from lamina.allocate.measure.measure import Measure
from lamina.cli import by_name
from lamina.cli.by_name import make_loss, make_optimizer, make_scheduler
from lamina.cli.open_ledger import read_only_register
from lamina.cli.run_file import AdmitTable, DataTable, RunFile
from lamina.cli.terminal import open_private_key, progress_bar
from lamina.engine.distributed import Ranks
from lamina.errors import CorpusError, RunError
from lamina.integrations.loggers import LOCAL_PLACES, LOGGERS
from lamina.ledger.corpus_terms import CorpusTerms, open_or_create
from lamina.ledger.run_records import WEIGHTS
from lamina.ledger.store.sqlite import ledger_exists
from lamina.ledger.writer import Ledger
from lamina.plan.correlation import AUTO_BANDS
from lamina.plan.layer_stack import LayerStack
from lamina.plan.policy import Policy
from lamina.plan.step_plan import StepPlan
from lamina.run.admitted import Gate
from lamina.run.corpus import Corpus
from lamina.run.options import OPTIONS
from lamina.run.publisher import AVERAGE, BEST
from lamina.run.run_ledger import default_ledger_path, refuse_second_ledger
from lamina.run.run_output import user_code
from lamina.run.trainer import Trainer
from lamina.run.trainer_checks import steps_per_interval
from lamina.sign.keys import PrivateKey
from lamina.signals import presets


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """What a run would do and cost: known before any data is read."""

    file: RunFile
    beside: Path
    policy: Policy
    model: nn.Module
    plan: StepPlan

    @classmethod
    def of(cls, file: RunFile, beside: Path, *, resumed: Path | None = None) -> PlannedRun:
        """Read the policy, make the model, make the plan. Paths are relative to `beside`.

        The run in the folder `resumed` keeps the kind of noise that was chosen for it, whatever machine it goes on with.
        """
        policy = Policy.load(beside / file.policy)
        model = by_name.make_model(file.model.factory, file.model.args, beside=beside)
        before = None if resumed is None else kept_plan(resumed)
        rules = policy if before is None else policy.with_noise_kind(before.noise_kind)
        plan = make_plan(layer_stack(model, file), rules, **plan_arguments(file, beside, policy))
        return cls(file=file, beside=beside, policy=policy, model=model, plan=plan)

    @cached_property
    def loss_fn(self) -> Any:
        """The loss that the file names."""
        return make_loss(self.file.loss.name, self.file.loss.arguments, beside=self.beside)

    def imported(self, name: str, key: str) -> Any:
        """Import what a key of the file names."""
        return by_name.import_by_name(name, key, beside=self.beside)

    def called(self, name: str, key: str) -> Any:
        """Import a function that a key of the file names, and return what it returns."""
        return by_name.call_factory(self.imported(name, key), f"{key} '{name}'")

    def private_key(self, name: str, key: str) -> PrivateKey:
        """Open a private key that a key of the file names."""
        path = _existing_file(self.beside, key, name, f"; make a key: lamina keys new {name}")
        return open_private_key(path)

    def option(self, name: str) -> Any:
        """Return an option of the trainer, as the file gives it; None if it does not."""
        value = self.file.options.get(name)
        return None if value is None else OPTIONS[name].read(value, self)

    def ledger(self, output: Path) -> str:
        """The ledger of the corpus: a path, or the address of a database."""
        if (given := self.option("ledger")) is not None:
            return str(given)
        place = default_ledger_path(self.policy.corpus.origin, output.parent)
        refuse_second_ledger(place, self.policy.corpus.origin, self.beside)
        return str(place)

    def contract(self) -> CorpusTerms:
        """What the ledger will say of the corpus."""
        return CorpusTerms.of_policy(self.policy)

    @contextmanager
    def tracked(self, trainer: Trainer) -> Iterator[None]:
        """Give the public figures of the run to the trackers that the file names, and its public weights at the end."""
        wanted, made = self.file.loggers, []
        if wanted is not None and trainer.writes:
            for name in LOGGERS:
                if (given := getattr(wanted, name)) is not None:
                    options: Any = {**given, "plan": self.plan, "measure": self.measure}
                    if (key := LOCAL_PLACES.get(name)) is not None and "://" not in str(given.get(key, "")):
                        options[key] = str(self.beside / str(given.get(key, f"runs/{name}")))
                    with user_code(f"loggers.{name} failed", f"correct {name} under [loggers]"):
                        made.append(LOGGERS[name](**options))
        trainer.callbacks = (*trainer.callbacks, *made)
        try:
            yield
            for logger in made if wanted is not None and wanted.checkpoints else ():
                for path in (trainer.folder / name for name in (WEIGHTS, AVERAGE, BEST)):
                    if path.exists():
                        logger.weights(path)
        finally:
            for logger in made:
                logger.close()

    @property
    def measure(self) -> Measure | None:
        """The measure that the file names."""
        return None if self.file.measure is None else _load_measure(self.beside, self.file.measure)

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
        opened = open_or_create(ledger, self.contract(), self.option("ledger_key"))
        try:
            return admit_corpus(data, table, self.policy, self.beside, opened), opened
        except BaseException:
            opened.close()
            raise

    def trainer(
        self, *, folder: Path, ledger: str, inside: bool, take_over: bool = False, look: bool = False
    ) -> Trainer:
        """Read the data and build the trainer. Spends nothing; with `look` it records no admission either.

        Of several ranks rank 0 admits, and the others look at what it recorded.
        """
        file, ranks = self.file, Ranks.current()
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
        own = {"ledger": ledger, "scheduler": schedule, "interval": interval, "inside": inside, "take_over": take_over}
        if opened is not None:
            own["ledger"] = opened
        keyless = look or opened is not None or not ranks.first
        names = [name for name in file.options if name != "ledger" and not (keyless and name == "ledger_key")]
        options: Any = {name: self.option(name) for name in names} | own
        return Trainer(self.model, optimizer, self.loss_fn, corpus, self.plan, folder=folder, **options)


def layer_stack(model: nn.Module, file: RunFile | None) -> LayerStack:
    """The layers of a model, as the run file groups them."""
    table = None if file is None else file.layers
    return LayerStack.from_model(model) if table is None else LayerStack.from_model(model, **table.model_dump())


def kept_plan(folder: Path) -> StepPlan | None:
    """The plan of the run in a folder, if it has begun."""
    try:
        return StepPlan.from_cbor((folder / "plan.cbor").read_bytes())
    except FileNotFoundError:
        return None


def plan_arguments(file: RunFile, beside: Path, policy: Policy) -> dict[str, Any]:
    """What a run file says for `make_plan`, beside model and policy."""
    batch = file.batch
    if batch is None and file.preset is not None:
        batch = presets.find(file.preset).batch(sum(entry.population or 0 for entry in policy.classes.values()))
    return {
        "batch": batch, "steps": file.steps, "epochs": file.epochs,
        "allocate": file.allocate.policy if file.allocate else DEFAULT_ALLOCATION,
        "epsilon": file.epsilon, "rho": file.rho, "noise_multiplier": file.noise_multiplier,
        "clip_norm": file.clip_norm, "clipping": file.clipping, "bands": None if _auto_bands_obstacles(file, policy) else file.bands,
        "measure": None if file.measure is None else _load_measure(beside, file.measure),
    }  # fmt: skip


def _auto_bands_obstacles(file: RunFile, policy: Policy) -> list[str]:
    """Return the reasons why `bands = "auto"` takes one band whatever is gained."""
    if file.bands != AUTO_BANDS:
        return []
    obstacles = {
        "contributions have no stable ids (set unit in [data])": file.data.kind != "folder"
        and file.data.unit in (None, "each"),
        "max_occurrences is set": "max_occurrences" in file.options,
        "a class has no population": any(e.population is None and not e.public for e in policy.classes.values()),
        "several ranks train": not Ranks.current().alone,
    }
    return [reason for reason, holds in obstacles.items() if holds]


def auto_bands_note(file: RunFile | None, policy: Policy) -> tuple[str, ...]:
    """Return a note if `bands = "auto"` takes one band because the run does not meet its conditions."""
    reasons = [] if file is None else _auto_bands_obstacles(file, policy)
    return (f'bands = "auto" takes 1 band: {"; ".join(reasons)}',) if reasons else ()


def _existing_file(beside: Path, key: str, name: str, hint: str = "") -> Path:
    """The file or folder that a key of the run file names."""
    if not (path := beside / name).exists():
        problem = f"{key} is '{name}', but there is no '{path}'"
        raise RunError("cli.file-missing", problem, f"paths are relative to the run file{hint}")
    return path


def _load_measure(beside: Path, name: str) -> Measure:
    hint = f"; make one: lamina plan policy.toml … --proxy gaussian --save-measure {name}"
    return Measure.load(_existing_file(beside, "measure", name, hint))


def read_corpus(data: DataTable, policy: Policy, beside: Path) -> Corpus:
    """The corpus that a [data] table describes, under the run's policy."""
    common: dict[str, Any] = {"policy": policy, "cls": data.cls, "version": data.version}
    common["examples_per_unit"] = data.examples_per_unit
    try:
        if data.factory is not None:
            return _corpus_of_factory(data.factory, data, common, beside)
        paths = _data_paths(data, beside)
        if data.kind == "folder":
            return Corpus.of_folder(paths, **common)
        path = paths[0]
        common |= {"unit": data.unit, "subject": data.subject, "y": data.y, "nan": data.nan}
        common |= {} if data.x is None else {"x": data.x}
        if data.kind == "npz":
            return Corpus.of_npz(path, **common)
        return Corpus.of_csv(path, **common, delimiter=data.delimiter or ",")
    except CorpusError as error:
        problem = f"data: {error.problem}"
        raise CorpusError("cli.data-not-usable", problem, _as_keys(error.remedy)) from None


def _data_paths(data: DataTable, beside: Path) -> list[Path]:
    """The file or the folders that a [data] table names."""
    names = (data.path or "",) if isinstance(data.path, str | None) else data.path
    return [_existing_file(beside, "data.path", name) for name in names]


def _as_keys(remedy: str) -> str:
    """A remedy in the words of a RUN.toml: data.unit = "patient" for unit='patient'."""
    remedy = re.sub(r"\b(unit|nan)='([^']*)'", r'data.\1 = "\2"', remedy)
    return remedy.replace("cls=", "data.class =").replace("x=[…]", "data.x = […]")


def admit_corpus(
    data: DataTable, table: AdmitTable, policy: Policy, beside: Path, ledger: Ledger | Register | None = None
) -> Corpus:
    """The contributions of a folder that the gate admits. The key ring is read again at every segment."""
    ring = _existing_file(beside, "admit.keys", table.keys, "; lamina keys add makes a key ring")
    gate = Gate(policy, ring, processes=table.processes)
    with progress_bar("checking signatures") as tick:
        return gate.admit(
            _data_paths(data, beside),
            ledger,
            on_refusal=table.on_refusal,
            examples_per_unit=data.examples_per_unit,
            progress=tick,
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
