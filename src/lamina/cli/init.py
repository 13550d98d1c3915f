"""Write the files of a first run for a table: policy.toml, RUN.toml and nets.py. They run as they are if no value is missing.

Asks for what no option states. Reads only the header of the table: the population is a public statement, not a count of the rows.
Spends nothing and overwrites nothing.

Examples:

  lamina init patients.csv
  lamina init patients.csv --unit patient --y outcome --population 500 --epsilon 3 --classes 2
  lamina train RUN.toml --plan-only
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import typer

from lamina.cli import terminal
from lamina.cli.command import Answer, argument, command, misuse, option
from lamina.errors import RunError
from lamina.run.column_checks import is_id_name
from lamina.run.table_files import check_column, csv_header, csv_lines, open_csv
from lamina.sign.keys import write_new

_POLICY = """\
# What may be spent on these data: docs/plans.md explains every key.

[corpus]
origin = "{origin}"     # names the data in ledgers and certificates: ε of all runs under this name is added up
delta = {delta:g}

[class.data]
population = {population}     # at least the number of {whose}s. It is public: state a round upper limit, not a count
epsilon = {epsilon:g}
clip_norm = 0.1
unit = "{whose}"     # what ε protects
# purposes = ["research"]     # permitted uses of a released model; without this key, none
"""
_RUN = """\
# A private run: lamina train RUN.toml --plan-only checks it, lamina train RUN.toml trains. All keys: lamina train --template

policy = "policy.toml"
model = "nets:build"
loss = "{loss}"
batch = {batch}     # expected {whose}s per step
epochs = 20
clip_norm = 0.1

[data]
kind = "csv"
path = {path}
x = {x}
y = {y}
unit = {unit}
# nan = "zero"     # replaces missing values by 0; without this key, they are refused
"""
_NETS = '''\
"""The model of RUN.toml."""

from torch import nn


def build():
    """Return a small network for a table of {inputs} columns. Scale inputs by public constants, not by figures of the data."""
    return nn.Sequential(nn.Linear({inputs}, 32), nn.ReLU(), nn.Linear(32, {outputs}))
'''


@command()
def init(
    data: Path = argument("FILE.csv", "a table with a header; one row an example"),
    unit: str | None = option('column that says whose each row is; "each": every row is somebody else'),
    y: str | None = option("column of labels"),
    classes: int | None = option("number of classes, labelled 0, 1, …; 1: the labels are numbers to predict", min=1),
    population: int | None = option("a public upper limit on the number of patients", min=2),
    epsilon: float | None = option("ε that all runs together may spend"),
    folder: Path = option("where to write", default=Path()),
) -> Answer:
    with open_csv(data) as file:
        header = csv_header(data, csv_lines(data, file), ",")
    y = _asked(y, "Column of labels", header[-1], "--y")
    ids = [name for name in header if is_id_name(name) and name != y]
    unit = _asked(
        unit,
        "Column that says whose each row is (each: every row is somebody else)",
        ids[0] if ids else "each",
        "--unit",
    )
    for name in (y, *([] if unit == "each" else [unit])):
        check_column(data, name, header)
    classes = int(_asked(classes, "Number of classes (1: a number to predict)", "2", "--classes"))
    population = int(
        _asked(
            population,
            "A public upper limit on the number of patients (or of rows, if unit is each)",
            None,
            "--population",
        )
    )
    epsilon = float(_asked(epsilon, "ε that all runs together may spend", "3", "--epsilon"))
    inputs = [name for name in header if name not in (y, unit)]
    whose = "row" if unit == "each" else re.sub(r"[^a-z0-9]+", "-", unit.lower()).strip("-") or "contribution"
    given: dict[str, Any] = {
        "origin": re.sub(r"[^A-Za-z0-9.]+", "-", data.stem).strip("-") or "data", "population": population, "epsilon": epsilon,
        "delta": 10.0 ** -len(str(10 * population)), "whose": whose, "loss": "mse" if classes == 1 else "cross_entropy",
        "batch": max(2, min(256, population // 10)), "inputs": len(inputs), "outputs": classes,
        "path": _quoted(os.path.relpath(data, folder)), "x": f"[{', '.join(map(_quoted, inputs))}]",
        "y": _quoted(y), "unit": _quoted(unit),
    }  # fmt: skip
    files = {"policy.toml": _POLICY, "RUN.toml": _RUN, "nets.py": _NETS}
    if taken := [name for name in files if (folder / name).exists()]:
        problem = f"'{folder / taken[0]}' exists and is not overwritten"
        raise RunError("cli.file-exists", problem, "name an empty folder with --folder")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_new(folder / name, text.format(**given).encode(), name, mode=0o644)
    run = folder / "RUN.toml"
    facts = {"files": [str(folder / name) for name in files], "inputs": inputs, "unit": unit, "y": y}
    steps = [
        f"  lamina check {data} --unit {unit} --y {y}",
        f"  lamina train {run} --plan-only",
        f"  lamina train {run}",
    ]
    return Answer(facts, f"wrote {', '.join(facts['files'])}. Next:", *(steps[unit == "each" :]))


def _asked(given: Any, question: str, default: str | None, name: str) -> Any:
    """Return the option; if it is missing, ask on a terminal, or take the default without one."""
    if given is not None:
        return given
    if terminal.can_prompt():
        return typer.prompt(question, default=default, err=True)
    if default is None:
        raise misuse(f"not given, and there is no terminal to ask. {question}", name)
    return default


def _quoted(text: str) -> str:
    """A text of TOML."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
