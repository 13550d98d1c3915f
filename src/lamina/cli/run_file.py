"""RUN.toml: the settings of a training run, checked before anything is read or spent; and the folders of runs."""

from __future__ import annotations

import glob
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from lamina.cli import by_name
from lamina.errors import LaminaError, PlanError, RunError
from lamina.ledger.store.sqlite import printable_location
from lamina.plan.policy import explain_validation_error
from lamina.plan.selection import did_you_mean
from lamina.run.run_files import make_folder, write_atomically
from lamina.signals import presets
from lamina.validate import parse_toml, read_text_file, short_repr

if TYPE_CHECKING:
    from lamina.allocate.problem import Allocator

_REQUIRED_KEYS = {
    "policy": 'policy = "policy.toml"',
    "model": 'model = "package.module:factory"',
    "data": '[data] with kind = "npz" and path = "data.npz"',
    "loss": 'loss = "cross_entropy"',
    "batch": "batch = 256",
}


def check_required_keys(data: Mapping[str, Any], source: str) -> None:
    """Refuse a run file that lacks a key, perhaps because it is misspelt, or gives its length or budget twice."""
    missing = [key for key in _REQUIRED_KEYS if key not in data and not (key == "batch" and "preset" in data)]
    if missing:
        if unknown := [key for key in data if key not in RunFile.model_fields]:
            told = ", ".join(
                f"{key} is not a known key{did_you_mean(key, list(RunFile.model_fields))}" for key in unknown
            )
            problem = f"{source} lacks {', '.join(missing)}: {told}"
            raise PlanError("cli.run-keys-unknown", problem, "correct the name")
        tables = [key for key, value in data.items() if isinstance(value, dict)]
        strayed = [f"[{t}]" for t in tables for key in missing if key in data[t]]
        hint = f" (a key below {strayed[0]} belongs to that table)" if strayed else ""
        problem = f"{source} lacks {', '.join(missing)}{hint}"
        remedy = "add " + "; ".join(_REQUIRED_KEYS[key] for key in missing) + "; keys go above the first [table]"
        raise PlanError("cli.run-keys-missing", problem, remedy)
    if ("steps" in data) == ("epochs" in data):
        problem = f"{source}: steps is {data.get('steps', 'missing')} and epochs is {data.get('epochs', 'missing')}"
        raise PlanError("cli.steps-or-epochs", problem, "give exactly one of them: steps = 1000, or epochs = 20")
    said = [f"{key} is {data[key]}" for key in ("epsilon", "rho", "noise_multiplier") if key in data]
    if len(said) > 1:
        problem = f"{source}: {' and '.join(said)}"
        remedy = (
            "give one of them: epsilon for the policy's accountant, rho for zCDP, noise_multiplier for a fixed sigma"
        )
        raise PlanError("cli.epsilon-or-rho", problem, remedy)


def with_preset(data: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the preset that the file names, under those of the file itself."""
    if not isinstance(name := data.get("preset"), str):
        return dict(data)
    keys = presets.find(name).run_keys()
    if "epochs" in data:
        del keys["steps"]
    if data.get("optimizer") == presets.AUTO:
        keys.pop("scheduler", None)
    return {**keys, **data}


def check_admit_table(data: Mapping[str, Any], source: str) -> None:
    """Refuse [admit] with data that has no signatures, and keys that the signatures already decide."""
    table = data["data"]
    if "admit" not in data or not isinstance(table, dict):
        return
    if (kind := table.get("kind")) != "folder":
        problem = f"{source}: [admit] needs a signature beside each payload, but data.kind is {kind!r}"
        remedy = 'use kind = "folder" with ID/payload.npz, signed by lamina attest; or remove [admit]'
        raise PlanError("cli.admit-needs-folder", problem, remedy)
    for key, why in (
        ("class", "each contribution has the class that it signed"),
        ("version", "signed commitments identify the data"),
    ):
        if key in table:
            problem = f"{source}: data.{key} is {table[key]!r}, but with [admit] {why}"
            raise PlanError("cli.data-key-with-admit", problem, f"remove data.{key}")


_STRICT = ConfigDict(strict=True, extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False)
_EXTRA_ALLOWED = ConfigDict(strict=True, extra="allow", frozen=True)


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


def _not_private(value: Any) -> Any:
    if value == "private":
        raise ValueError(
            'no budget pays for evaluating on private data, nor for early stopping by it; use "public" or "simulated"'
        )
    return value


def _column_names(value: Any) -> Any:
    if isinstance(value, list) and value and all(isinstance(name, str) for name in value):
        return tuple(value)
    if isinstance(value, str | tuple):
        return value
    raise ValueError('must be a name, or a list of names: "x" or ["a", "b"]')


Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
Arguments = dict[str, Any]


class ModelTable(BaseModel):
    """`package.module:factory` or a built-in name, and its arguments."""

    model_config = _STRICT
    factory: Text
    args: Arguments = {}


class DataTable(BaseModel):
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
    x: Annotated[str | tuple[str, ...] | None, BeforeValidator(_column_names)] = None
    y: Annotated[str | tuple[str, ...] | None, BeforeValidator(_column_names)] = None
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
        given = {DataTable.model_fields[name].alias or name for name in self.model_fields_set}
        for name in sorted(given - {"kind", "class", "examples_per_unit", "version", *taken}):
            why = _WHERE_INSTEAD.get(self.kind, f"it takes {', '.join(taken)}, class, examples_per_unit, version")
            raise ValueError(f'kind = "{self.kind}" takes no {name}: {why}')
        if self.kind == "npz" and not (isinstance(self.x, str | None) and isinstance(self.y, str | None)):
            raise ValueError('x and y of kind = "npz" are one array each: name one')
        return self


_WHERE_INSTEAD = {
    "folder": "y, class and subject of each contribution stand in its contributions.csv",
    "factory": "return lamina.Corpus(x, y, unit=…, subject=…)",
}


class AdmitTable(BaseModel):
    """Admit only signed contributions, by `lamina.Gate`.

    keys        the key ring of trusted keys
    processes   processes that check signatures
    on_refusal  "skip" refused contributions, or "stop" before anything is spent
    """

    model_config = _STRICT
    keys: Text
    processes: Count = 1
    on_refusal: Literal["skip", "stop"] = "skip"


class NamedTable(BaseModel):
    """A loss, an optimiser or a schedule: its name and its arguments."""

    model_config = _EXTRA_ALLOWED
    name: Text

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class AllocateTable(NamedTable):
    """How clipping and noise are shared out: the name of an allocation, and its options."""

    @model_validator(mode="after")
    def _is_known(self) -> Self:
        try:
            _ = self.policy
        except LaminaError as error:
            raise ValueError(f"{error.problem}; {error.remedy}") from error
        return self

    @property
    def policy(self) -> Allocator:
        """The allocation with these options."""
        return by_name.allocation_with_options(self.name, self.arguments)


class EvaluateTable(BaseModel):
    """A function of the model alone, called between segments, on data that is not protected."""

    model_config = _STRICT
    function: Text
    on: Annotated[Literal["public", "simulated"], BeforeValidator(_not_private)]
    every: Count = 1
    best: Text | None = None
    patience: Count | None = None

    @model_validator(mode="after")
    def _patience_needs_a_figure(self) -> Self:
        if self.patience is not None and self.best is None:
            raise ValueError('patience needs best: the figure to watch, as in best = "auc"')
        return self


class ProxyTable(BaseModel):
    """Data that is not protected, on which `allocate = { name = "ladp", estimator = "fisher" }` measures the layers."""

    model_config = _STRICT
    function: Text
    on: Annotated[Literal["public", "simulated"], BeforeValidator(_not_private)]


class RunFile(BaseModel):
    """The tables and keys of a RUN.toml; run_template.toml explains each. Paths are relative to the file."""

    model_config = _STRICT
    policy: Text
    model: Annotated[ModelTable, _as_table("factory")]
    data: DataTable
    admit: AdmitTable | None = None
    loss: Annotated[NamedTable, _as_table("name")]
    optimizer: Annotated[NamedTable, _as_table("name")] = NamedTable(name=presets.AUTO)
    scheduler: Annotated[NamedTable, _as_table("name")] | None = None
    preset: Text | None = None
    batch: Annotated[int | dict[str, int], _per_class(int, ">= 0")] | None = None
    steps: Count | None = None
    epochs: Positive | None = None
    allocate: Annotated[AllocateTable, _as_table("name")] | None = None
    measure: Text | None = None
    clipping: Literal["box", "joint"] | None = None
    bands: Count | Literal["auto"] | None = None
    epsilon: Annotated[float | dict[str, float], _per_class(float, "> 0")] | None = None
    rho: Annotated[float | dict[str, float], _per_class(float, "> 0")] | None = None
    noise_multiplier: Annotated[float | dict[str, float], _per_class(float, "> 0")] | None = None
    clip_norm: Annotated[float | dict[str, float], _per_class(float, "> 0")] | None = None
    segment: Count | None = None
    microbatches: Count = 1
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    augment: Text | None = None
    views: Count = 1
    threads: Count | None = None
    max_occurrences: Annotated[int | dict[str, int], _per_class(int, "> 0")] | None = None
    hardened: bool | None = None
    seed: Annotated[int, Field(ge=0)] | None = None
    starting_weights: Text | None = None
    evaluate: EvaluateTable | None = None
    proxy: ProxyTable | None = None
    log: Literal["csv", "jsonl"] | None = None
    output: Text | None = None
    ledger: Text | None = None
    ledger_key: Text | None = None

    @model_validator(mode="after")
    def _auto_has_a_schedule(self) -> Self:
        if self.optimizer.name == presets.AUTO and self.scheduler is not None:
            raise ValueError('optimizer = "auto" includes a schedule: remove scheduler, or name another optimizer')
        return self

    @classmethod
    def load(cls, path: Path) -> RunFile:
        """Read a RUN.toml."""
        try:
            text = read_text_file(path)
        except (OSError, UnicodeDecodeError) as error:
            problem = f"run file '{path}' cannot be read: {error}"
            remedy = "make one: lamina train --template > RUN.toml"
            raise PlanError("cli.run-file-unreadable", problem, remedy) from None
        return cls.parse(text, source=str(path))

    @classmethod
    def parse(cls, text: str, source: str = "RUN.toml") -> RunFile:
        """Read a run file from its text; `source` names it in errors."""
        try:
            data = parse_toml(text)
        except ValueError as error:
            raise PlanError("cli.run-file-not-toml", f"{source} is not TOML: {error}", "correct that line") from None
        data = with_preset(data)
        check_required_keys(data, source)
        check_admit_table(data, source)
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise explain_validation_error(error, cls, source) from None

    def settings(self) -> dict[str, Any]:
        """The file's contents, to keep beside the run; without passwords in addresses."""
        found = self.model_dump(mode="json", by_alias=True, exclude_unset=True)
        return found | ({} if self.ledger is None else {"ledger": printable_location(self.ledger)})


# The folders of a run file are runs/NAME, runs/NAME-2, runs/NAME-3, …: one per fresh run. A folder counts once its run
# has begun (it holds a journal), and if run.json says that it belongs to this output: another run file may have
# `output = "runs/NAME-2"`.

_SETTINGS_FILE = "run.json"


def newest_run_folder(output: Path) -> Path:
    """Where `lamina train` goes on: the latest run that was begun, or `output` itself."""
    begun = [folder for folder in _folders_of_output(output) if (folder / "journal").exists()]
    return begun[-1] if begun else output


def unused_run_folder(output: Path) -> Path:
    """Where `lamina train --fresh` begins: the first folder in which nothing has begun."""
    number, folder = 1, output
    while folder.exists() and not (_belongs_to(folder, output) and not (folder / "journal").exists()):
        number += 1
        folder = output.with_name(f"{output.name}-{number}")
    return folder


def write_run_settings(folder: Path, output: Path, settings: dict[str, Any]) -> None:
    """Write the run's settings, and the output that it belongs to. Public facts only."""
    text = json.dumps({"output": output.name, "settings": settings}, indent=2, ensure_ascii=False)
    make_folder(folder)
    write_atomically(folder / _SETTINGS_FILE, f"{text}\n".encode(), mode=0o644)


def check_settings_of_finished_run(folder: Path, settings: Mapping[str, Any]) -> None:
    """Refuse other settings than those that a finished run was trained with: they would have no effect."""
    try:
        trained = json.loads((folder / _SETTINGS_FILE).read_text(encoding="utf-8"))["settings"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    for key in ("model", "data", "loss", "optimizer", "scheduler", "ema", "microbatches", "augment", "views"):
        if (then := trained.get(key)) != (now := settings.get(key)):
            problem = (
                f"the run in '{folder}' has finished with {key} = {short_repr(then)}; {short_repr(now)} has no effect"
            )
            remedy = "--fresh begins another run with it, charged anew; or put it back"
            raise RunError("cli.finished-run-settings", problem, remedy)


def read_run_figures(folder: Path) -> dict[str, Any]:
    """The run's public figures, if it has any yet."""
    with suppress(OSError, ValueError):
        found = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return {}


def _folders_of_output(output: Path) -> list[Path]:
    """`output` and the fresh runs of it, in the order of their numbers; a deleted one leaves a gap."""
    found = {1: output}
    for folder in output.parent.glob(f"{glob.escape(output.name)}-*"):
        number = folder.name.removeprefix(output.name + "-")
        if number.isdecimal() and str(int(number)) == number and int(number) > 1 and _belongs_to(folder, output):
            found[int(number)] = folder
    return [found[number] for number in sorted(found)]


def _belongs_to(folder: Path, output: Path) -> bool:
    if folder == output:
        return True
    with suppress(OSError, ValueError):
        found = json.loads((folder / _SETTINGS_FILE).read_text(encoding="utf-8"))
        return isinstance(found, dict) and found.get("output") == output.name
    return False
