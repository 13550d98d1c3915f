"""The options of a run. One declaration makes an option of `Trainer`, a key of RUN.toml and its help. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, Self, TypedDict, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from lamina.errors import RunError
from lamina.ledger.store.sqlite import is_postgres_url
from lamina.plan.selection import did_you_mean
from lamina.validate import one_of, whole

if TYPE_CHECKING:
    from lamina.account.filters import PrivacyFilter
    from lamina.engine.engine import Engine
    from lamina.engine.rules.proxy import Proxy
    from lamina.ledger.writer import Ledger
    from lamina.plan.charges import SignedAccount
    from lamina.plan.step_plan import StepPlan
    from lamina.run.publisher import Evaluation
    from lamina.run.run_output import Callback, Progress
    from lamina.run.trainer import Trainer
    from lamina.sign.keys import PrivateKey
else:  # the declarations below are read without torch
    PrivacyFilter = Engine = Proxy = Ledger = SignedAccount = Evaluation = Callback = Progress = PrivateKey = Any


class RunContext(Protocol):
    """What turns the values of a RUN.toml into options: its folder, the plan and loss, and what its names import."""

    @property
    def beside(self) -> Path: ...
    @property
    def plan(self) -> StepPlan: ...
    @property
    def loss_fn(self) -> Any: ...
    def imported(self, name: str, key: str) -> Any: ...
    def called(self, name: str, key: str) -> Any: ...
    def private_key(self, name: str, key: str) -> PrivateKey: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """The declaration of one option of a run.

    help     what it does, in one or two sentences: for `Trainer`, the template of RUN.toml and docs/runs.md
    default  its value where nothing is given
    check    from its name and the value given in Python to the value that is used; refuses others
    toml     the type of its key in RUN.toml, as pydantic reads it; None: an option of Python alone
    example  the value that the template shows
    read     from the value of its key and the context of the file to the option
    apply    its conduct, called with the trainer and the value when a trainer is made; None: the trainer reads the value
    steps    whether steps depend on it: then a run that is resumed must have the same value
    """

    help: str
    default: Any = None
    check: Callable[[str, Any], Any] = lambda name, value: value
    toml: Any = None
    example: str = ""
    read: Callable[[Any, RunContext], Any] = lambda value, run: value
    apply: Callable[[Trainer, Any], None] | None = None
    steps: bool = False


# ------------------------------------------------------------------------------------------------ forms of values

STRICT = ConfigDict(strict=True, extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False)
Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]


def per_class(kind: type, least: str) -> BeforeValidator:
    """Return the check of one number for all classes, or a table with one for each."""
    word = "a whole number" if kind is int else "a number"

    def check(value: Any) -> Any:
        for item in value.values() if isinstance(value, dict) else (value,):
            fits = isinstance(item, int if kind is int else int | float) and not isinstance(item, bool)
            if not fits or not (item >= 0 if least == ">= 0" else item > 0):
                raise ValueError(f"must be {word} {least}, or a table of them: {{ class = {word} }}")
        return value

    return BeforeValidator(check)


def _not_private(value: Any) -> Any:
    if value == "private":
        problem = "no budget pays for evaluating on private data, nor for early stopping by it"
        raise ValueError(f'{problem}; use "public" or "simulated"')
    return value


OpenData = Annotated[Literal["public", "simulated"], BeforeValidator(_not_private)]


class EvaluateTable(BaseModel):
    """Evaluation between segments by a function of the model; never on private data: that would be a release."""

    model_config = STRICT
    function: Text = Field(description="model -> { auc = 0.91 }", examples=['function = "nets:evaluate"'])
    on: OpenData = Field(description='or "simulated"', examples=['on = "public"'])
    every: Count = Field(1, description="segments", examples=["every = 1"])
    best: Text | None = Field(
        None,
        description='keep the weights with the largest ("-loss": smallest) as best.safetensors',
        examples=['best = "auc"'],
    )
    patience: Count | None = Field(
        None, description="stop after so many evaluations without a new best", examples=["patience = 5"]
    )

    @model_validator(mode="after")
    def _patience_needs_a_figure(self) -> Self:
        if self.patience is not None and self.best is None:
            raise ValueError('patience needs best: the figure to watch, as in best = "auc"')
        return self


class ProxyTable(BaseModel):
    """Data that is not protected, on which the run measures layers or tries whether a restricted class helps."""

    model_config = STRICT
    function: Text = Field(description="returns x or (x, y), as tensors", examples=['function = "nets:proxy"'])
    on: OpenData = Field(
        description='or "public"; the allocation says the same with proxy = "public"', examples=['on = "simulated"']
    )


def _evaluation(table: EvaluateTable, run: RunContext) -> Evaluation:
    """Return the rule of an [evaluate] table. Errors of its function are shown in full: it sees no private data."""
    from lamina.run.publisher import Evaluation
    from lamina.run.run_output import user_code

    function = run.imported(table.function, "evaluate.function")

    def figures(model: Any) -> Mapping[str, float]:
        failed = f"evaluate.function '{table.function}' failed"
        with user_code(failed, "correct the line, then go on with the same command"):
            found: Mapping[str, float] = function(model)
            return found

    return Evaluation(function=figures, on=table.on, every=table.every, best=table.best, patience=table.patience)


def _proxy(table: ProxyTable, run: RunContext) -> Proxy:
    """Return the examples of a [proxy] table, with the run's own loss."""
    from lamina.engine.rules.proxy import Proxy

    found = run.called(table.function, "proxy.function")
    x, y = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    return Proxy(source=f"{table.on}: {table.function}", x=x, y=y, loss_fn=run.loss_fn)


def _occurrences(given: int | Mapping[str, int], run: RunContext) -> Mapping[str, int]:
    """Return occurrences by class; one number holds for every private class."""
    if isinstance(given, int):
        return {entry.name: given for entry in run.plan.classes if not entry.public}
    for name in given:
        run.plan.index(name)
    return given


def _starting_weights(given: str, run: RunContext) -> str | None:
    from lamina.run.trainer_checks import declared_start

    return declared_start(given, run.beside)


def _keep_log(trainer: Trainer, form: str | None) -> None:
    from lamina.run.run_output import LogFile

    if form is not None and trainer.writes:
        trainer.callbacks = (*trainer.callbacks, LogFile(trainer.folder, form))


def _count(name: str, value: Any, *, least: int = 1) -> int | None:
    return None if value is None else whole(RunError, "train.not-a-count", least=least, **{name: value})


def _device(name: str, value: Any) -> Any:
    """Return the device, or refuse one that this machine does not have."""
    if value is None:
        return None
    import torch

    try:
        return torch.empty(0, device=value).device
    except Exception as error:
        problem = f"device is {value!r}, which this machine cannot use ({type(error).__name__})"
        raise RunError("train.device-unknown", problem, 'give "cpu", or "cuda" if torch.cuda.is_available()') from None


def _effect(name: str, value: Any) -> Any:
    return one_of(RunError, "train.on-withdrawal-unknown", ("finish", "abandon"), on_withdrawal=value)


# ------------------------------------------------------------------------------------------------ the options


# fmt: off
class TrainOptions(TypedDict, total=False):
    """The options of `Trainer`, beside model, optimiser, loss, data and plan."""

    device: Annotated[Any, Option(
        help='where to train: "cpu", "cuda", "cuda:1", …; the model is moved there; default: where the model is',
        check=_device, toml=Text, example='"cuda"',
    )]
    segment: Annotated[int | None, Option(
        help="steps between two checkpoints; default: a tenth of the run, at most 1000",
        check=_count, toml=Count, example="100",
    )]
    microbatches: Annotated[int, Option(
        help="compute every batch in so many parts: less memory, the same result",
        default=1, check=_count, toml=Count, example="1", steps=True,
    )]
    ema: Annotated[float | None, Option(
        help="also keep averaged weights; the decay of their moving average, which is less in the first steps",
        toml=Annotated[float, Field(gt=0, lt=1)], example="0.999", steps=True,
    )]
    augment: Annotated[Callable[[Any], Any] | None, Option(
        help="x -> x at random, each example by itself, drawing from the global generators of torch, numpy and random",
        toml=Text, example='"nets:augment"', read=lambda name, run: run.imported(name, "augment"),
    )]
    views: Annotated[int, Option(
        help="so many random views of each example per step, averaged within a contribution before it is clipped: ε is "
             "the same",
        default=1, check=_count, toml=Count, example="4", steps=True,
    )]
    max_occurrences: Annotated[Mapping[str, int] | None, Option(
        help="by class: no contribution takes part in more steps than this",
        toml=Annotated[int | dict[str, int], per_class(int, "> 0")], example="{ clinical = 50 }", read=_occurrences,
    )]
    on_withdrawal: Annotated[Literal["finish", "abandon"], Option(
        help='"finish" the segment during which a contribution is withdrawn, or "abandon" it; both are charged',
        default="finish", check=_effect, toml=Literal["finish", "abandon"], example='"finish"',
    )]
    hardened: Annotated[bool | None, Option(
        help="add noise in float64 and round it to a public grid, so that its low-order bits do not show what was "
             "summed; false: plain noise, and the certificate says so; default: true, or what a resumed run began with",
        toml=bool, example="true",
    )]
    compiled: Annotated[bool, Option(
        help="compile forward pass, loss, backward pass and clipping into one graph before the first step: faster steps, "
             "after up to a minute of compiling; for models on the CPU, and contributions of one example",
        default=False, toml=bool, example="true",
    )]
    seed: Annotated[int | None, Option(
        help="draw samples, noise and dropout from this number: repeatable, and therefore NOT private; for studies on "
             "public or simulated data",
        check=partial(_count, least=0), toml=Annotated[int, Field(ge=0)], example="42", steps=True,
    )]
    starting_weights: Annotated[str | os.PathLike[str] | None, Option(
        help='"untrained", "public", or another run of the ledger (runs/NAME, or its id): your statement about the '
             "weights before the first step, which ledger and certificate repeat; weights that a run of the ledger "
             "wrote are recognised without it",
        toml=Text, example='"untrained"', read=_starting_weights,
    )]
    log: Annotated[Literal["csv", "jsonl"] | None, Option(
        help='"csv" or "jsonl": ε and evaluations after each segment, in log.csv or log.jsonl of the run\'s folder',
        toml=Literal["csv", "jsonl"], example='"csv"', apply=_keep_log,
    )]
    ledger: Annotated[Ledger | str | os.PathLike[str] | None, Option(
        help='what is admitted and spent, over all runs of the corpus: a path, or "postgresql://host/database#schema"; '
             "in Python also an open Ledger; made if there is none; default: ORIGIN.ledger.db beside the run's folder",
        toml=Text, example='"runs/NAME.ledger.db"',
        read=lambda given, run: given if is_postgres_url(given) else str(run.beside / given),
    )]
    ledger_key: Annotated[PrivateKey | None, Option(
        help="the private key that signs the ledger; default: ORIGIN.ledger.pem beside it, made together with it",
        toml=Text, example='"ledger.pem"', read=lambda name, run: run.private_key(name, "ledger_key"),
    )]
    governing_key: Annotated[PrivateKey | None, Option(
        help="authorises other policies and contributors; default: ORIGIN.ledger.governing.pem, made with the ledger",
    )]
    proxy: Annotated[Proxy | None, Option(
        help='public or simulated examples for a plan whose shares follow them (`LADP(estimator="fisher")`), or to try '
             "before training whether a class that reaches a part of the model helps it",
        toml=ProxyTable, read=_proxy,
    )]
    evaluate: Annotated[Evaluation | None, Option(
        help="an `Evaluation` on public or simulated data, asked between segments", toml=EvaluateTable, read=_evaluation,
    )]
    callbacks: Annotated[Sequence[Callback], Option(
        help="`Callback`s, told ε and evaluations between segments", default=(),
    )]
    scheduler: Annotated[Any, Option(
        help="a torch schedule that is fixed in advance; stepped once per private step",
    )]
    interval: Annotated[Literal["step", "epoch"], Option(
        help='"epoch": the scheduler is stepped once per pass over the declared populations instead',
        default="step", steps=True,
    )]
    bounds: Annotated[Mapping[str, float] | None, Option(
        help="ε that each class may spend over all runs of the ledger; default: the corpus's policy, whose promise holds "
             "in any case",
    )]
    accounts: Annotated[Sequence[SignedAccount] | None, Option(
        help="further bounds, each held to over all runs by itself, beside what the corpus was admitted with",
    )]
    filters: Annotated[Mapping[str, PrivacyFilter] | None, Option(
        help="by class: privacy filters, asked for a whole segment before it begins",
    )]
    engine: Annotated[Engine | None, Option(
        help="an engine of the same model and plan that has taken no step",
    )]
    probe: Annotated[bool | tuple[Any, Any], Option(
        help="check on simulated input, or on public examples (x, y), that examples do not influence each other",
        default=True,
    )]
    inside: Annotated[bool, Option(
        help="show the raw loss on the terminal; it is never written", default=False,
    )]
    progress: Annotated[bool | Progress, Option(
        help="show the progress of the run", default=True,
    )]
# fmt: on


def _declared(cls: Any) -> dict[str, Option]:
    hints = get_type_hints(cls, include_extras=True)
    return {name: next(each for each in hint.__metadata__ if isinstance(each, Option)) for name, hint in hints.items()}


_options = _declared(TrainOptions)
OPTIONS: Mapping[str, Option] = MappingProxyType(_options)
"""Every option by its name, in the order of RUN.toml."""


def declare(name: str, option: Option) -> None:
    """Add an option from outside: a keyword of `Trainer`, and a key of RUN.toml if it has a `toml` type."""
    if name in OPTIONS or not name.isidentifier():
        problem = f"the option {name!r} exists already" if name in OPTIONS else f"{name!r} is no name of an option"
        raise RunError("train.option-not-declared", problem, "choose another name")
    _options[name] = option


def settled(given: TrainOptions) -> TrainOptions:
    """Return the value of every option: given ones are checked, the others have their defaults."""
    for name in given:
        if name not in OPTIONS:
            problem = f"there is no option {name!r}{did_you_mean(name, list(OPTIONS))}"
            raise RunError("train.option-unknown", problem, f"the options are {', '.join(OPTIONS)}")
    made: Any = {
        name: option.check(name, given[name]) if name in given else option.default  # type: ignore[literal-required]
        for name, option in OPTIONS.items()
    }
    found: TrainOptions = made
    return found


def options_help() -> str:
    """Return every option with its help, for the docstring of `Trainer`."""
    width = max(map(len, OPTIONS)) + 2
    return "\n".join(f"    {name:<{width}}{option.help}" for name, option in OPTIONS.items())
