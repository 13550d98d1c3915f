"""Look at a table before a run: rows per patient, missing values, ids, constant columns, scale and balance of classes.

Reads the file, writes nothing, spends nothing. What it prints is not protected: it is for the owner of the data. Do not copy figures
of the data into a model, a policy or a paper.

Exit code 1 if a run would refuse the table as it is.

Examples:

  lamina check patients.csv
  lamina check patients.csv --unit patient --y outcome
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lamina.cli.command import Answer, argument, command, option, table
from lamina.run.column_checks import (
    FILL_REMEDY,
    LABEL_MISSING_REMEDY,
    is_id_name,
    looks_like_id,
    text_remedy,
    unit_remedy,
)
from lamina.run.table_files import MISSING_VALUES, check_column, csv_header, csv_lines, open_csv

_FAR = 100.0  # a typical size above which a column should be scaled
_MAX_CLASSES = 20


@command()
def check(
    path: Path = argument("FILE.csv", "a table with a header; one row an example"),
    unit: str | None = option("column that says whose each row is"),
    y: str | None = option("column of labels"),
    delimiter: str = option("between cells", default=","),
) -> Answer:
    with open_csv(path) as file:
        lines = csv_lines(path, file, delimiter)
        header = csv_header(path, lines, delimiter)
        cells = list(zip(*(row for _, row in lines), strict=True)) or [()] * len(header)
    for name in (each for each in (unit, y) if each is not None):
        check_column(path, name, header)
    columns = {name: list(map(str.strip, values)) for name, values in zip(header, cells, strict=True)}
    inputs = {name: _column(name, values) for name, values in columns.items() if name not in (unit, y)}
    facts: dict[str, Any] = {"rows": len(cells[0]), "columns": inputs, "unit": None, "classes": None, "unlabelled": 0}
    if unit is not None:
        facts["unit"] = _per_unit(unit, columns[unit])
    if y is not None:
        counts = Counter(columns[y])
        facts["unlabelled"] = sum(each.lower() in MISSING_VALUES for each in columns[y])
        facts["classes"] = dict(counts.most_common()) if len(counts) <= _MAX_CLASSES else None
    facts["problems"] = list(_problems(facts, inputs, unit))
    return Answer(facts, *_lines(path, facts, y), ok=not facts["problems"])


def _column(name: str, values: list[str]) -> dict[str, Any]:
    """Summary of one column."""
    present = [each for each in values if each.lower() not in MISSING_VALUES]
    try:
        numbers = np.array(present, dtype=np.float64)
    except ValueError:
        return {
            "kind": "text",
            "missing": len(values) - len(present),
            "values": len(set(present)),
            "id": is_id_name(name),
        }
    finite = numbers[np.isfinite(numbers)]
    return {
        "kind": "number", "missing": len(values) - len(finite), "values": len(np.unique(finite)), "id": looks_like_id(name, finite),
        "typical": float(np.median(np.abs(finite))) if len(finite) else None,
        "largest": float(np.abs(finite).max()) if len(finite) else None,
    }  # fmt: skip


def _per_unit(unit: str, values: list[str]) -> dict[str, Any]:
    sizes = np.array(list(Counter(values).values()) or [0])
    rows = {"fewest": int(sizes.min()), "median": float(np.median(sizes)), "most": int(sizes.max())}
    return {"column": unit, "units": len(sizes), "rows_of_a_unit": rows, "missing": sum(not each for each in values)}


def _problems(facts: Mapping[str, Any], inputs: Mapping[str, Mapping[str, Any]], unit: str | None) -> Iterator[str]:
    """Return the problems for which a run would refuse the data, each with its remedy."""
    if not facts["rows"]:
        yield "the table has no rows"
    if facts["unit"] and facts["unit"]["missing"]:
        yield f"{facts['unit']['missing']:,} rows have no {unit!r}"
    if facts["unlabelled"]:
        yield f"rows without a label: {facts['unlabelled']:,} ({LABEL_MISSING_REMEDY})"
    for name, found in inputs.items():
        if found["id"] and unit is None:
            yield f"column {name!r} looks like an id: {unit_remedy(name)}"
        elif found["kind"] == "text":
            yield f"column {name!r} holds text: {text_remedy(name)}"
        elif found["missing"]:
            yield f"column {name!r} has no number in {found['missing']:,} rows: {FILL_REMEDY}"


def _lines(path: Path, facts: Mapping[str, Any], y: str | None) -> Iterator[str]:
    rows = [["column", "kind", "values", "missing", "typical size", "largest", "note"]]
    for name, found in facts["columns"].items():
        sizes = [f"{found[key]:.4g}" if found.get(key) is not None else "-" for key in ("typical", "largest")]
        note = "an id?" if found["id"] else "the same in every row" if found["values"] == 1 else ""
        if not note and (found.get("typical") or 0) > _FAR:
            note = "scale it by a public constant"
        rows.append([name, found["kind"], f"{found['values']:,}", f"{found['missing']:,}", *sizes, note])
    yield f"{path}: {facts['rows']:,} rows\n"
    yield table(rows, left=2)
    if (unit := facts["unit"]) is not None:
        of = unit["rows_of_a_unit"]
        yield f"\n{unit['units']:,} values of {unit['column']!r}: {of['fewest']:,} to {of['most']:,} rows each, median {of['median']:g}"
    if y is not None and facts["classes"] is not None:
        total = max(1, facts["rows"])
        yield f"\n{table([[y, 'rows', 'share'], *([k, f'{n:,}', f'{100 * n / total:.1f} %'] for k, n in facts['classes'].items())])}"
    yield ""
    yield from (f"problem: {each}" for each in facts["problems"])
    yield "not protected: these figures are for the owner of the data. Nothing was written"
