"""Make the folders of contributions, which lamina attest signs: one for each patient of a table.

Spends nothing. Existing folders are never overwritten.

Examples:

  lamina contributions from-csv patients.csv --unit patient --y outcome
  lamina contributions from-csv visits.csv --unit mrn --y outcome --x age --x bmi --output data
  lamina attest policy.toml contributions --key hospital.key
"""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np

from lamina.cli.command import Answer, argument, command, group, option
from lamina.errors import CorpusError
from lamina.run.column_checks import check_columns
from lamina.run.table_files import LISTING, read_table
from lamina.sign.keys import replace_file


@command("from-csv")
def from_csv(
    path: Path = argument("FILE.csv", "a table with a header; one row an example"),
    unit: str = option("column that says whose each row is: one folder for each of its values", default=...),
    y: str | None = option("column of labels"),
    x: list[str] = option("a column of x; repeatable; default: all others"),
    cls: str | None = option("column of classes of the policy; written to contributions.csv", "--class"),
    subject: str | None = option("column that names the person; written to contributions.csv"),
    delimiter: str = option("between cells", default=","),
    output: Path = option("the folder to make", "--output", "-o", metavar="DIR", default=Path("contributions")),
) -> Answer:
    """Write DIR/ID/payload.npz for each value of a column: x with one row an example, and y.

    Examples:

      lamina contributions from-csv patients.csv --unit patient --y outcome
    """
    columns = {"class": cls, "subject": subject}
    listed = {name: column for name, column in columns.items() if column is not None}
    table = read_table(path, x=x or None, y=y, names=[unit, *listed.values()], delimiter=delimiter)
    check_columns(dict(zip(table.features, table.x.T, strict=True)), unit_given=True)
    if output.exists():
        problem = f"'{output}' exists and is not overwritten"
        raise CorpusError("cli.folder-exists", problem, "name another with --output, or move it away")
    rows: dict[str, list[int]] = {}
    for row, id in enumerate(table.names[unit]):
        rows.setdefault(id, []).append(row)
    if wrong := next(
        (id for id in rows if not id.isprintable() or id.startswith(".") or set(id) & set('/\\:*?"<>|')), None
    ):
        problem = f"{wrong!r} in column {unit!r} cannot be the name of a folder"
        raise CorpusError("cli.id-not-a-name", problem, "number the units, and keep the list that says which is whose")
    lines = [["id", *listed]]
    for id, own in sorted(rows.items()):
        values = [sorted({table.names[column][row] for row in own}) for column in listed.values()]
        if several := next((name for name, found in zip(listed, values, strict=True) if len(found) > 1), None):
            problem = f"{id!r} has several values of {several}"
            raise CorpusError("corpus.column-contradicts-itself", problem, f"a contribution has one {several}")
        lines.append([id, *(found[0] for found in values)])
    for id, own in rows.items():
        (output / id).mkdir(parents=True)
        arrays: dict[str, Any] = {"x": table.x[own]} if table.y is None else {"x": table.x[own], "y": table.y[own]}
        data = io.BytesIO()
        np.savez(data, **arrays)
        replace_file(output / id / "payload.npz", data.getvalue(), "the payload", mode=0o600, durable=False)
    if listed:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(lines)
        replace_file(output / LISTING, text.getvalue().encode(), LISTING, mode=0o600)
    facts = {"folder": str(output), "contributions": len(rows), "examples": len(table.x), "features": table.features}
    return Answer(
        facts, f"{output}: {len(rows):,} contributions with {len(table.x):,} examples of {len(table.features)} features"
    )


app = group(__doc__, from_csv)
