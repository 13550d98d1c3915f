"""RUN.toml: the settings of a training run, checked before anything is read or spent; and the folders of runs."""

from __future__ import annotations

import glob
import json
import textwrap
import typing
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model, model_validator
from pydantic.fields import FieldInfo

from lamina.cli import by_name
from lamina.errors import LaminaError, PlanError, RunError
from lamina.ledger.store.sqlite import printable_location
from lamina.plan.policy import explain_validation_error
from lamina.plan.selection import did_you_mean
from lamina.run.options import OPTIONS, STRICT, Count, Text, per_class
from lamina.run.run_files import make_folder, write_atomically
from lamina.run.run_record import has_begun
from lamina.signals import presets
from lamina.validate import parse_toml, read_text_file, short_repr

if TYPE_CHECKING:
    from lamina.allocate.problem import Allocator


def check_required_keys(data: Mapping[str, Any], source: str, schema: type[BaseModel]) -> None:
    """Refuse a run file that lacks a key, perhaps because it is misspelt, or gives its length or budget twice."""
    needed = {name: field for name, field in schema.model_fields.items() if field.is_required() or name == "batch"}
    missing = [name for name in needed if name not in data and not (name == "batch" and "preset" in data)]
    if missing:
        if unknown := [name for name in data if name not in schema.model_fields]:
            known = list(schema.model_fields)
            told = ", ".join(f"{name} is not a known key{did_you_mean(name, known)}" for name in unknown)
            problem = f"{source} lacks {', '.join(missing)}: {told}"
            raise PlanError("cli.run-keys-unknown", problem, "correct the name")
        tables = [name for name, value in data.items() if isinstance(value, dict)]
        strayed = [f"[{t}]" for t in tables for name in missing if name in data[t]]
        hint = f" (a key below {strayed[0]} belongs to that table)" if strayed else ""
        problem = f"{source} lacks {', '.join(missing)}{hint}"
        shown = [(needed[name].examples or ['[data] with kind = "npz" and path = "data.npz"'])[0] for name in missing]
        raise PlanError("cli.run-keys-missing", problem, f"add {'; '.join(shown)}; keys go above the first [table]")
    if ("steps" in data) == ("epochs" in data):
        problem = f"{source}: steps is {data.get('steps', 'missing')} and epochs is {data.get('epochs', 'missing')}"
        raise PlanError("cli.steps-or-epochs", problem, "give exactly one of them: steps = 1000, or epochs = 20")
    said = [f"{name} is {data[name]}" for name in ("epsilon", "rho", "noise_multiplier") if name in data]
    if len(said) > 1:
        remedy = (
            "give one of them: epsilon for the policy's accountant, rho for zCDP, noise_multiplier for a fixed sigma"
        )
        raise PlanError("cli.epsilon-or-rho", f"{source}: {' and '.join(said)}", remedy)


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


Positive = Annotated[float, Field(gt=0)]
Arguments = dict[str, Any]


def _as_table(key: str) -> BeforeValidator:
    """`model = "nets:build"` for `model = { factory = "nets:build" }`."""

    def widen(value: Any) -> Any:
        if isinstance(value, str):
            return {key: value}
        if not isinstance(value, dict | BaseModel):
            raise ValueError(f'must be text in quotes, or a table: {{ {key} = "…" }}')
        return value

    return BeforeValidator(widen)


def _column_names(value: Any) -> Any:
    if isinstance(value, list) and value and all(isinstance(name, str) for name in value):
        return tuple(value)
    if isinstance(value, str | tuple):
        return value
    raise ValueError('must be a name, or a list of names: "x" or ["a", "b"]')


def key(default: Any, help: str, *lines: str, alias: str | None = None) -> Any:
    """Declare a key: its default (`...`: it must be given), its help, and its lines in the template."""
    return Field(default, description=help, examples=list(lines), alias=alias)


class ModelTable(BaseModel):
    """`package.module:factory` or a built-in name, and its arguments."""

    model_config = STRICT
    factory: Text
    args: Arguments = {}


class DataTable(BaseModel):
    """Where examples come from, and whose they are."""

    model_config = STRICT
    kind: Literal["npz", "csv", "folder", "factory"] = key(..., "npz, csv, folder, factory", 'kind = "npz"')
    path: Annotated[str | tuple[str, ...] | None, BeforeValidator(_column_names)] = key(
        None,
        'the file; or the folder that holds one folder per contribution; several: ["north", "south"]',
        'path = "data.npz"',
    )
    x: Annotated[str | tuple[str, ...] | None, BeforeValidator(_column_names)] = key(
        None, "arrays of the npz, columns of the csv (a list of names for several columns)", 'x = "x"'
    )
    y: Annotated[str | tuple[str, ...] | None, BeforeValidator(_column_names)] = key(
        None, "leave out for an autoencoder", 'y = "y"'
    )
    unit: Text | None = key(
        None, 'whose example it is: what ε protects; "each": every example is somebody else\'s', '# unit = "patient"'
    )
    cls: Text | None = key(
        None, "the class of each; or the name of one class for all; leave out if there is one", '# class = "class"',
        alias="class",
    )  # fmt: skip
    subject: Text | None = key(None, "refuses one person in two contributions", '# subject = "person"')
    delimiter: Text | None = key(None, "of the csv, if not a comma", '# delimiter = ";"')
    nan: Literal["zero"] | None = key(None, "missing values of x become 0; default: they are refused", '# nan = "zero"')
    examples_per_unit: Count | None = key(
        None, "at most so many examples of one contribution per step, drawn afresh", "# examples_per_unit = 8"
    )
    version: Text | None = key(None, "names the data instead of hashing all of it", '# version = "2024-03"')
    factory: Text | None = key(
        None, 'with kind = "factory": returns a lamina.Corpus, a torch Dataset, or (x, y)', '# factory = "nets:data"'
    )
    args: Arguments = key({}, "what the factory is called with", "# args = { year = 2024 }")

    @model_validator(mode="after")
    def _has_what_its_kind_takes(self) -> Self:
        taken = {
            "npz": ("path", "x", "y", "unit", "subject", "nan"),
            "csv": ("path", "x", "y", "unit", "subject", "delimiter", "nan"),
            "folder": ("path",),
            "factory": ("factory", "args", "unit"),
        }[self.kind]
        if getattr(self, taken[0]) is None:
            raise ValueError(f'kind = "{self.kind}" needs {taken[0]}')
        given = {DataTable.model_fields[name].alias or name for name in self.model_fields_set}
        for name in sorted(given - {"kind", "class", "examples_per_unit", "version", *taken}):
            why = _WHERE_INSTEAD.get(self.kind, f"it takes {', '.join(taken)}, class, examples_per_unit, version")
            raise ValueError(f'kind = "{self.kind}" takes no {name}: {why}')
        if self.kind != "folder" and isinstance(self.path, tuple):
            raise ValueError(f'kind = "{self.kind}" takes one path')
        if self.kind == "npz" and not (isinstance(self.x, str | None) and isinstance(self.y, str | None)):
            raise ValueError('x and y of kind = "npz" are one array each: name one')
        return self


_WHERE_INSTEAD = {
    "folder": "y, class and subject of each contribution stand in its contributions.csv",
    "factory": "return lamina.Corpus(x, y, unit=…, subject=…)",
}


class AdmitTable(BaseModel):
    """With kind = "folder": only signed contributions are admitted (lamina keys, lamina attest)."""

    model_config = STRICT
    keys: Text = key(..., "whose signatures count; read again at the start of every segment", 'keys = "keys.json"')
    processes: Count = key(1, "how many check signatures at once", "processes = 1")
    on_refusal: Literal["skip", "stop"] = key(
        "skip", 'or "stop": refuse to begin if a single contribution is refused', 'on_refusal = "skip"'
    )


class NamedTable(BaseModel):
    """A loss, an optimiser or a schedule: its name and its arguments."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)
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


class LayersTable(BaseModel):
    """How tensors are grouped into layers, and heads and experts that are not recognised (docs/profiles.md)."""

    model_config = STRICT
    group: Literal["module", "block"] | dict[str, list[str]] = key(
        "module", 'module, block, or layers by patterns: { encoder = ["encoder.*"] }', 'group = "block"'
    )
    heads: dict[str, int] = key({}, "heads of attention modules, by pattern; 0: none", 'heads = { "*.attn" = 8 }')
    experts: dict[str, int] = key({}, "experts of modules that hold them, by pattern", 'experts = { "*.moe" = 4 }')


class LoggersTable(BaseModel):
    """Trackers that get the plan and the public figures of every segment, with the arguments of each (docs/integrations.md)."""

    model_config = STRICT
    tensorboard: Arguments | None = key(None, "its folder", 'tensorboard = { folder = "board" }')
    wandb: Arguments | None = key(None, "what wandb.init takes", 'wandb = { project = "ecg", mode = "offline" }')
    mlflow: Arguments | None = key(None, "its address or folder", 'mlflow = { store = "mlruns" }')
    checkpoints: bool = key(
        False, "also give wandb and mlflow the weights that the run publishes at its end", "checkpoints = true"
    )


PerClass = Annotated[float | dict[str, float], per_class(float, "> 0")]


class RunFile(BaseModel):
    """The keys of a RUN.toml; those that are options of `Trainer` are declared in lamina/run/options.py.

    Paths are relative to the file.
    """

    model_config = STRICT
    policy: Text = key(
        ..., "classes, populations, ε and δ; lamina plan policy.toml shows what it costs", 'policy = "policy.toml"'
    )
    model: Annotated[ModelTable, _as_table("factory")] = key(
        ..., "package.module:factory, or built in: residual, transformer, mlp, and those of docs/signals.md: stacked-ae, "
        "conv-ae, res-ae, trans-ae, vae",
        'model = "nets:build"', '# model = { factory = "nets:build", args = { width = 64 } }',
    )  # fmt: skip
    loss: Annotated[NamedTable, _as_table("name")] = key(
        ..., "cross_entropy, bce (logits), mse, l1, huber; or package.module:function of (output, y) that returns one loss "
        "per example; without y it gets (output, x)",
        'loss = "cross_entropy"',
    )  # fmt: skip
    optimizer: Annotated[NamedTable, _as_table("name")] = key(
        NamedTable(name=presets.AUTO),
        "Adam, whose rate and schedule follow from the plan (docs/utility.md); or adam, adamw, sgd, rmsprop, … with any "
        "argument that it takes",
        'optimizer = "auto"', '# optimizer = { name = "adam", lr = 1e-3 }',
    )  # fmt: skip
    scheduler: Annotated[NamedTable, _as_table("name")] | None = key(
        None, "cosine, one_cycle, linear, step, …; stepped once per private step, or once per pass over the populations",
        '# scheduler = { name = "cosine" }', '# scheduler = { name = "step", step_size = 5, interval = "epoch" }',
    )  # fmt: skip
    preset: Text | None = key(
        None, "clip_norm, optimizer, scheduler, batch and steps for a task, chosen on simulated or public data "
        "(docs/utility.md); what the file says itself comes first",
        '\n# preset = "ecg-linear"',
    )  # fmt: skip
    batch: Annotated[int | dict[str, int], per_class(int, ">= 0")] | None = key(
        None, "contributions expected per step, all classes together; or { clinical = 200, … }", "batch = 256"
    )
    epochs: Positive | None = key(None, "passes over the declared populations; or steps = 1000", "epochs = 20")
    steps: Count | None = key(None, "instead of epochs")
    allocate: Annotated[AllocateTable, _as_table("name")] | None = key(
        None, "how clipping and noise are shared out; lamina plan policy.toml --compare shows all: flat, uniform, "
        "proportional, pareto, lsab, ladp, ladp-budget, quantile, automatic",
        '# allocate = "pareto"', '# allocate = { name = "ladp", sensitive = ["head"], every = 20 }',
    )  # fmt: skip
    measure: Text | None = key(
        None, "what is known of the layers; lamina plan … --proxy gaussian --save-measure makes it",
        '# measure = "measure.json"',
    )  # fmt: skip
    clipping: Literal["box", "joint"] | None = key(
        None, "box or joint; default: what the allocation prefers", '# clipping = "joint"'
    )
    bands: Count | Literal["auto"] | None = key(
        None, "correlate the noise over the best number of steps, or a given number; contributions need a unit",
        '# bands = "auto"',
    )  # fmt: skip
    epsilon: PerClass | None = key(None, "spend less than the policy allows", "# epsilon = { clinical = 1.0 }")
    rho: PerClass | None = key(
        None, "instead of epsilon: a zCDP budget, rho/steps for each step, no credit for sampling", "# rho = 0.1"
    )
    noise_multiplier: PerClass | None = key(
        None, "or sigma itself, the same at every step: ε is what the steps cost at it", "# noise_multiplier = 1.1"
    )
    clip_norm: PerClass | None = key(
        None, "of a contribution's whole gradient, at most the policy's; or { clinical = 0.1 }", "clip_norm = 0.1"
    )
    threads: Count | None = key(None, "torch threads; a resumed run should have as many as before", "\n# threads = 2")
    output: Text | None = key(None, "default: runs/ and the name of this file", '# output = "runs/RUN"')
    data: DataTable = key(..., "the examples")
    admit: AdmitTable | None = key(None, "")
    layers: LayersTable | None = key(None, "")
    loggers: LoggersTable | None = key(None, "")

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
        data, schema = with_preset(data), cls.schema_with_options()
        check_required_keys(data, source, schema)
        check_admit_table(data, source)
        try:
            return schema.model_validate(data)
        except ValidationError as error:
            raise explain_validation_error(error, schema, source) from None

    @classmethod
    def schema_with_options(cls) -> type[RunFile]:
        """Return the schema with a key for every option of a trainer that has one."""
        keys: Any = {
            name: (option.toml | None, key(None, option.help, f"# {name} = {option.example}"))
            for name, option in OPTIONS.items()
            if option.toml is not None
        }
        if taken := sorted(keys.keys() & cls.model_fields.keys()):
            problem = f"the option {taken[0]!r} was declared, which is another key of a RUN.toml"
            raise RunError("train.option-not-declared", problem, "choose another name")
        return create_model("RunFile", __base__=cls, **keys)

    @property
    def options(self) -> dict[str, Any]:
        """The options of a trainer that the file gives, as it gives them."""
        found = {name: getattr(self, name) for name in OPTIONS if name in self.model_fields_set}
        return {name: value for name, value in found.items() if OPTIONS[name].toml is not None and value is not None}

    def settings(self) -> dict[str, Any]:
        """The file's contents, to keep beside the run; without passwords in addresses, and without its trackers."""
        found = self.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude={"loggers"})
        ledger = self.options.get("ledger")
        return found | ({} if ledger is None else {"ledger": printable_location(ledger)})


_INTRODUCTION = """\
# A training run: lamina train RUN.toml. Copy this file, change what is yours, delete what you do not need.
# Lines that begin with "# " and a key show the default, or what could stand there.
# Paths are relative to this file; package.module:name is looked up beside it, then in the current folder.
"""
_WIDTH, _HELP_AT = 120, 35


def run_template() -> str:
    """Return an annotated RUN.toml with every key, made from their declarations."""
    fields = RunFile.schema_with_options().model_fields
    tables = {name: table for name, field in fields.items() if (table := _table_of(field)) is not None}
    lines = [_INTRODUCTION, *(line for name, field in fields.items() if name not in tables for line in _shown(field))]
    for name, table in tables.items():
        mark = "" if fields[name].is_required() else "# "
        lines += ["", f"{mark}[{name}]", *(f"# {line}" for line in textwrap.wrap(str(table.__doc__), _WIDTH - 2))]
        lines += [line for field in table.model_fields.values() for line in _shown(field, mark)]
    return "\n".join(lines) + "\n"


def _table_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the model of a key that is always written as a table."""
    kinds = (field.annotation, *typing.get_args(field.annotation))
    found = (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))
    return None if any(isinstance(each, BeforeValidator) for each in field.metadata) else next(found, None)


def _shown(field: FieldInfo, mark: str = "") -> Iterator[str]:
    """Yield the lines of a key in the template; its help begins beside the first."""
    texts = textwrap.wrap(field.description or "", _WIDTH - _HELP_AT - 2)
    for line in field.examples or ():
        *space, line = line.split("\n")
        yield from space
        first, *more = texts or [""]
        yield f"{mark + line:<{_HELP_AT}}# {first}" if first else mark + line
        yield from (f"{'':<{_HELP_AT}}# {part}" for part in more)
        texts = []


# The folders of a run file are runs/NAME, runs/NAME-2, runs/NAME-3, …: one per fresh run. A folder counts once its run
# has begun (it holds run.cbor), and if run.json says that it belongs to this output: another run file may have
# `output = "runs/NAME-2"`.

_SETTINGS_FILE = "run.json"


def newest_run_folder(output: Path) -> Path:
    """Where `lamina train` goes on: the latest run that was begun, or `output` itself."""
    begun = [folder for folder in _folders_of_output(output) if has_begun(folder)]
    return begun[-1] if begun else output


def unused_run_folder(output: Path) -> Path:
    """Where `lamina train --fresh` begins: the first folder in which nothing has begun."""
    number, folder = 1, output
    while folder.exists() and not (_belongs_to(folder, output) and not has_begun(folder)):
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
    steps = (name for name, option in OPTIONS.items() if option.steps)
    for name in ("model", "data", "loss", "optimizer", "scheduler", "augment", *steps):
        if (then := trained.get(name)) != (now := settings.get(name)):
            problem = (
                f"the run in '{folder}' has finished with {name} = {short_repr(then)}; {short_repr(now)} has no effect"
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
