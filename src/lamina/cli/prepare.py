"""From a RUN.toml to the parts of a run: policy, plan, model, data, loss, optimiser."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from lamina.admit.key import PrivateKey
from lamina.admit.register import Register
from lamina.allocate import make_plan
from lamina.cli import named
from lamina.cli.bars import bar
from lamina.cli.ledgers import is_there, is_url, onlooking
from lamina.cli.losses import loss
from lamina.cli.optimizers import optimizer, scheduler
from lamina.cli.passphrase import open_key
from lamina.cli.run_file import Admit, Data, Evaluate, RunFile
from lamina.errors import AdmissionError, CorpusError, PlanError, RunError
from lamina.ledger.ledger import Ledger
from lamina.ledger.opening import Contract, open_or_create
from lamina.plan import LayerStack, Policy, StepPlan
from lamina.train import Corpus, Evaluation, Gate, Trainer
from lamina.train.blame import user_code
from lamina.train.opening import default_place

if TYPE_CHECKING:
    from lamina.sensitivity import Measure


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What a run would do and cost: known before any data is read."""

    file: RunFile
    beside: Path
    policy: Policy
    model: nn.Module
    plan: StepPlan

    @classmethod
    def of(cls, file: RunFile, beside: Path) -> Planned:
        """Read the policy, make the model, make the plan. Paths are relative to `beside`."""
        policy = Policy.load(beside / file.policy)
        model = named.model(file.model.factory, file.model.args, beside=beside)
        plan = make_plan(
            LayerStack.from_model(model),
            policy,
            batch=file.batch,
            steps=file.steps,
            epochs=file.epochs,
            allocate=file.allocate.policy,
            epsilon=file.epsilon,
            rho=file.rho,
            clipping=file.clipping,
            measure=None if file.measure is None else _measured(beside / file.measure, file.measure),
        )
        return cls(file=file, beside=beside, policy=policy, model=model, plan=plan)

    def output(self, name: str) -> Path:
        """The folder of the run; `name` is that of the run file."""
        return self.beside / (self.file.output or f"runs/{name}")

    def ledger(self, output: Path) -> str:
        """The ledger of the corpus: a path, or the address of a database."""
        if (given := self.file.ledger) is not None:
            return given if is_url(given) else str(self.beside / given)
        return str(default_place(self.policy.corpus.origin, output.parent))

    def contract(self) -> Contract:
        """What the ledger will say of the corpus."""
        return Contract.of_policy(self.policy)

    def key(self) -> PrivateKey | None:
        """The key that signs the ledger, if the file names one; else it lies beside the ledger."""
        if (given := self.file.ledger_key) is None:
            return None
        if not (self.beside / given).exists():
            raise RunError(
                "cli.ledger-key-no",
                f"ledger_key is '{given}', and there is no '{self.beside / given}'",
                f"paths are relative to the run file; make one: lamina keys new {given}",
            )
        return open_key(self.beside / given, None)

    def corpus(self, ledger: str, *, look: bool = False) -> tuple[Corpus, Ledger | None]:
        """The contributions of the run; and the ledger that they were entered in, if they are admitted by signature.

        With `look` nobody is entered. Where there is no ledger yet, the trainer makes it and enters them when it
        begins: what is refused before leaves nothing behind.
        """
        data, table = self.file.data, self.file.admit
        if table is None:
            return read(data, self.policy, self.beside), None
        if look or not is_there(ledger):
            with onlooking(ledger, self.contract()) as register:
                return admitted(data, table, self.policy, self.beside, register), None
        opened = open_or_create(ledger, self.contract(), self.key())
        try:
            return admitted(data, table, self.policy, self.beside, opened), opened
        except BaseException:
            opened.close()
            raise

    def trainer(self, *, folder: Path, ledger: str, inside: bool, look: bool = False) -> Trainer:
        """Read the data and put everything together. Checks much, and spends nothing.

        Who is admitted by signature is entered into a ledger that is there, unless this is only a `look`.
        """
        file = self.file
        loss_fn = loss(file.loss.name, file.loss.arguments, beside=self.beside)
        tool = optimizer(file.optimizer.name, file.optimizer.arguments, self.model)
        schedule = file.scheduler and scheduler(
            file.scheduler.name, file.scheduler.arguments, tool, self.plan.steps
        )
        corpus, opened = self.corpus(ledger, look=look)
        return Trainer(
            self.model,
            tool,
            loss_fn,
            corpus,
            self.plan,
            folder=folder,
            ledger=ledger if opened is None else opened,
            key=None if look or opened is not None else self.key(),
            scheduler=schedule,
            microbatches=file.microbatches,
            ema=file.ema,
            evaluate=None if file.evaluate is None else evaluation(file.evaluate, self.beside),
            segment=file.segment,
            max_occurrences=self._caps(),
            hardened=file.hardened,
            inside=inside,
        )

    def _caps(self) -> Mapping[str, int] | None:
        """Occurrences by class; one number holds for every private class."""
        given = self.file.max_occurrences
        if isinstance(given, int):
            return {entry.name: given for entry in self.plan.classes if not entry.public}
        for name in given or ():
            self.plan.index(name)
        return given


def _measured(path: Path, name: str) -> Measure:
    from lamina.sensitivity import Measure

    if not path.exists():
        raise PlanError(
            "cli.measure-no",
            f"measure is '{name}', and there is no '{path}'",
            "paths are relative to the run file; make one: lamina plan policy.toml --model … --epochs … "
            f"--proxy gaussian --save-measure {name}",
        )
    return Measure.load(path)


def read(data: Data, policy: Policy, beside: Path) -> Corpus:
    """The corpus that a [data] table describes, under the run's policy."""
    common: dict[str, Any] = {"policy": policy, "cls": data.cls, "version": data.version}
    common["examples_per_unit"] = data.examples_per_unit
    try:
        if data.factory is not None:
            return _made(data.factory, data, common, beside)
        path = beside / (data.path or "")
        if not path.exists():
            raise CorpusError(
                "cli.path-no",
                f"path is '{data.path}', and there is no '{path}'",
                "paths are relative to the run file",
            )
        if data.kind == "folder":
            return Corpus.of_folder(path, **common)
        common |= {"unit": data.unit, "subject": data.subject, "y": data.y}
        common |= {} if data.x is None else {"x": data.x}
        if data.kind == "npz":
            return Corpus.of_npz(path, **common)
        return Corpus.of_csv(path, **common, delimiter=data.delimiter or ",")
    except CorpusError as error:
        raise CorpusError(
            "cli.data", f"data: {error.problem}", error.remedy.replace("cls=", "data.class =")
        ) from error


def admitted(
    data: Data, table: Admit, policy: Policy, beside: Path, ledger: Ledger | Register | None = None
) -> Corpus:
    """What the gate lets in of a folder. A key ring that is revoked from later on is read again at every segment."""
    path = beside / (data.path or "")
    if not (beside / table.keys).exists():
        raise AdmissionError(
            "cli.admit-keys-no",
            f"admit.keys is '{table.keys}', and there is no '{beside / table.keys}'",
            "paths are relative to the run file; lamina keys add makes a ring",
        )
    gate = Gate(policy, beside / table.keys, processes=table.processes)
    with bar("checking signatures") as tick:
        return gate.admit(
            path,
            ledger,
            on_refusal=table.on_refusal,
            examples_per_unit=data.examples_per_unit,
            progress=tick,
        )


def _made(name: str, data: Data, common: Mapping[str, Any], beside: Path) -> Corpus:
    """What the user's factory returns, as a corpus. A factory that takes `policy` gets the run's."""
    factory = named.find(name, "data factory", beside=beside)
    policy = {"policy": common["policy"]} if "policy" in named.parameters(factory) else {}
    made = named.call(factory, f"data factory '{name}'", {**policy, **data.args})
    if not isinstance(made, Corpus):
        with user_code(f"data factory '{name}' returned a {type(made).__name__}", _RETURN):
            return (
                Corpus(*made, unit=data.unit, **common)
                if isinstance(made, tuple) and len(made) == 2
                else Corpus(made, unit=data.unit, **common)
            )
    for key in ("examples_per_unit", "version", "cls"):
        if common[key] is not None:
            raise CorpusError(
                "cli.factory-returned-corpus-given",
                f"factory '{name}' returned a Corpus, and {'class' if key == 'cls' else key} is given beside it",
                "give it to the Corpus",
            )
    if made.policy != common["policy"]:
        raise CorpusError(
            "cli.factory-returned-corpus",
            f"factory '{name}' returned a Corpus under {'no' if made.policy is None else 'another'} policy: what it "
            "spends would be booked elsewhere",
            "let the factory take it: def data(policy): return lamina.Corpus(x, y, unit=…, policy=policy)",
        )
    return made


_RETURN = "return a lamina.Corpus, a torch Dataset, or (x, y)"


def evaluation(table: Evaluate, beside: Path) -> Evaluation:
    """The rule of an [evaluate] table. What its function raises is told in full: it sees no private data."""
    function: Callable[[nn.Module], Mapping[str, float]] = named.find(
        table.function, "evaluate.function", beside=beside
    )

    def figures(model: nn.Module) -> Mapping[str, float]:
        with user_code(
            f"evaluate.function '{table.function}' failed",
            "correct the line, then go on with the same command",
        ):
            return function(model)

    return Evaluation(
        function=figures, on=table.on, every=table.every, best=table.best, patience=table.patience
    )
