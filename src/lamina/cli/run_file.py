"""RUN.toml: everything that decides a training run, in one file that is checked before anything is read or spent."""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from lamina.allocate.problem import Policy
from lamina.allocate.registry import DEFAULT
from lamina.cli import allocations
from lamina.cli.ledgers import shown
from lamina.cli.run_checks import admits_a_folder, has_the_least, names_a_ledger
from lamina.errors import LaminaError, PlanError
from lamina.plan.schema_errors import explain

_STRICT = ConfigDict(strict=True, extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False)
_OPEN = ConfigDict(strict=True, extra="allow", frozen=True)


def _as_table(key: str) -> BeforeValidator:
    """`model = "nets:build"` for `model = { factory = "nets:build" }`."""

    def widen(value: Any) -> Any:
        if isinstance(value, str):
            return {key: value}
        if not isinstance(value, dict | BaseModel):
            raise ValueError(f'must be text in quotes, or a table: {{ {key} = "…" }}')
        return value

    return BeforeValidator(widen)


def _per_class(kind: type, least: str) -> BeforeValidator:
    """One number for all classes, or a table with one for each."""
    word = "a whole number" if kind is int else "a number"

    def check(value: Any) -> Any:
        for item in value.values() if isinstance(value, dict) else (value,):
            fits = isinstance(item, int if kind is int else int | float) and not isinstance(item, bool)
            if not fits or not (item >= 0 if least == ">= 0" else item > 0):
                raise ValueError(f"must be {word} {least}, or a table of them: {{ class = {word} }}")
        return value

    return BeforeValidator(check)


def _public_figures(value: Any) -> Any:
    if value == "private":
        raise ValueError(
            "a figure on private data, and early stopping or a best checkpoint by it, is a release that no budget "
            'paid for; accepted: "public" or "simulated"'
        )
    return value


def _columns(value: Any) -> Any:
    if isinstance(value, list) and value and all(isinstance(name, str) for name in value):
        return tuple(value)
    if isinstance(value, str | tuple):
        return value
    raise ValueError('must be a name, or a list of names: "x" or ["a", "b"]')


Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
Arguments = dict[str, Any]


class Model(BaseModel):
    """`package.module:factory` or a built-in name, and what it is called with."""

    model_config = _STRICT
    factory: Text
    args: Arguments = {}


class Data(BaseModel):
    """Where examples come from, and whose they are.

    npz, csv   `path`; x, y, unit, class and subject name arrays or columns
    folder     `path`: one folder per contribution, and perhaps a contributions.csv
    factory    `package.module:factory` that returns a lamina.Corpus, a torch Dataset, or (x, y)

    `class` may also be the name of one class of the policy, for all.
    """

    model_config = _STRICT
    kind: Literal["npz", "csv", "folder", "factory"]
    path: Text | None = None
    factory: Text | None = None
    args: Arguments = {}
    x: Annotated[str | tuple[str, ...] | None, BeforeValidator(_columns)] = None
    y: Annotated[str | tuple[str, ...] | None, BeforeValidator(_columns)] = None
    unit: Text | None = None
    cls: Annotated[Text | None, Field(alias="class")] = None
    subject: Text | None = None
    delimiter: Text | None = None
    examples_per_unit: Count | None = None
    version: Text | None = None

    @model_validator(mode="after")
    def _has_what_its_kind_takes(self) -> Self:
        taken = {
            "npz": ("path", "x", "y", "unit", "subject"),
            "csv": ("path", "x", "y", "unit", "subject", "delimiter"),
            "folder": ("path",),
            "factory": ("factory", "args", "unit"),
        }[self.kind]
        if getattr(self, taken[0]) is None:
            raise ValueError(f'kind = "{self.kind}" needs {taken[0]}')
        given = {Data.model_fields[name].alias or name for name in self.model_fields_set}
        for name in sorted(given - {"kind", "class", "examples_per_unit", "version", *taken}):
            why = _ELSEWHERE.get(self.kind, f"it takes {', '.join(taken)}, class, examples_per_unit, version")
            raise ValueError(f'kind = "{self.kind}" takes no {name}: {why}')
        if self.kind == "npz" and not (isinstance(self.x, str | None) and isinstance(self.y, str | None)):
            raise ValueError('x and y of kind = "npz" are one array each: name one')
        return self


_ELSEWHERE = {
    "folder": "y, class and subject of each contribution stand in its contributions.csv",
    "factory": "return lamina.Corpus(x, y, unit=…, subject=…)",
}


class Admit(BaseModel):
    """Only what was signed gets in: `lamina.Gate` stands before the folder of contributions.

    keys        the key ring: whose signatures count
    processes   how many check signatures at once
    on_refusal  "skip" whoever is refused, or "stop" before anything is spent
    """

    model_config = _STRICT
    keys: Text
    processes: Count = 1
    on_refusal: Literal["skip", "stop"] = "skip"


class Tool(BaseModel):
    """A loss, an optimiser or a schedule: its name, and any further argument that it takes."""

    model_config = _OPEN
    name: Text

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Allocate(Tool):
    """How clipping and noise are shared out: the name of a policy, and its options."""

    @model_validator(mode="after")
    def _is_known(self) -> Self:
        try:
            _ = self.policy
        except LaminaError as error:
            raise ValueError(f"{error.problem}; {error.remedy}") from error
        return self

    @property
    def policy(self) -> Policy:
        """The policy with these options."""
        return allocations.allocation_of(self.name, self.arguments)


class Evaluate(BaseModel):
    """A function of the model alone, asked between segments, on data that is not protected."""

    model_config = _STRICT
    function: Text
    on: Annotated[Literal["public", "simulated"], BeforeValidator(_public_figures)]
    every: Count = 1
    best: Text | None = None
    patience: Count | None = None

    @model_validator(mode="after")
    def _patience_needs_a_figure(self) -> Self:
        if self.patience is not None and self.best is None:
            raise ValueError('patience needs best: the figure to watch, as in best = "auc"')
        return self


class RunFile(BaseModel):
    """The tables and keys of a RUN.toml; run_template.toml explains each. Paths are relative to the file."""

    model_config = _STRICT
    policy: Text
    model: Annotated[Model, _as_table("factory")]
    data: Data
    admit: Admit | None = None
    loss: Annotated[Tool, _as_table("name")]
    optimizer: Annotated[Tool, _as_table("name")]
    scheduler: Annotated[Tool, _as_table("name")] | None = None
    batch: Annotated[int | dict[str, int], _per_class(int, ">= 0")]
    steps: Count | None = None
    epochs: Positive | None = None
    allocate: Annotated[Allocate, _as_table("name")] = Allocate(name=DEFAULT)
    measure: Text | None = None
    clipping: Literal["box", "joint"] | None = None
    epsilon: Annotated[float | dict[str, float], _per_class(float, "> 0")] | None = None
    rho: Annotated[float | dict[str, float], _per_class(float, "> 0")] | None = None
    segment: Count | None = None
    microbatches: Count = 1
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    threads: Count | None = None
    max_occurrences: Annotated[int | dict[str, int], _per_class(int, "> 0")] | None = None
    hardened: bool = False
    evaluate: Evaluate | None = None
    output: Text | None = None
    ledger: Text | None = None
    ledger_key: Text | None = None

    @classmethod
    def load(cls, path: Path) -> RunFile:
        """Read a RUN.toml."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(
                "cli.run-file-not",
                f"run file '{path}' cannot be read: {error}",
                "make one: lamina train --template > RUN.toml",
            ) from error
        return cls.parse(text, source=str(path))

    @classmethod
    def parse(cls, text: str, source: str = "RUN.toml") -> RunFile:
        """Read a run file from its text; `source` names it in errors."""
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise PlanError(
                "cli.not-toml", f"{source} is not TOML: {error}", "correct the line that it names"
            ) from error
        has_the_least(data, source)
        names_a_ledger(data, source)
        admits_a_folder(data, source)
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise explain(error, cls, source) from error

    def asked(self) -> dict[str, Any]:
        """What was written, to be kept beside the run: passwords in addresses are left out."""
        found = self.model_dump(mode="json", by_alias=True, exclude_unset=True)
        return found | ({} if self.ledger is None else {"ledger": shown(self.ledger)})

    @staticmethod
    def template_text() -> str:
        """An annotated run file to copy and change."""
        return resources.files("lamina.cli").joinpath("run_template.toml").read_text(encoding="utf-8")
