"""The stored study: benchmarks/results/study.md says what benchmarks/results/study.csv has."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from lamina.study.cells import SIZES, Cell, ResultStore
from lamina.study.runner import NAMES, cells_of
from lamina.study.tables import TABLES

ROOT = Path(__file__).parents[2]
STORED = ROOT / "benchmarks" / "results" / "study.csv"
FULL = SIZES["scratch"]  # what was stored
CELLS = list(dict.fromkeys(cell for name in NAMES for cell in cells_of(name, FULL)))


def rows() -> Iterator[tuple[Cell, dict[str, str]]]:
    with STORED.open(newline="", encoding="utf-8") as file:
        yield from zip(CELLS, csv.DictReader(file), strict=True)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ResultStore:
    """The results as they were before they became a table."""
    found = ResultStore(tmp_path_factory.mktemp("study"), FULL, "simulated")
    own = {*Cell.__dataclass_fields__, "epsilon_asked"} - {"epsilon"}
    for cell, row in rows():
        told = {name: text for name, text in row.items() if name not in own and text}
        found.put(cell, {name: text if name == "refused" else json.loads(text) for name, text in told.items()})
    return found


def test_every_row_is_its_cell_and_the_epsilon_asked_for_is_one_number() -> None:
    for cell, row in rows():
        same = ("method", "data", "architecture", "depth", "activation", "seed", "share")
        assert [row[name] for name in same] == [str(getattr(cell, name)) for name in same]
        assert row["epsilon_asked"] == ("" if cell.method == "none" else str(cell.epsilon))
        if row["epsilon"] and cell.method not in ("rdp", "printed"):  # which reach another one than was asked for
            assert float(row["epsilon"]) == pytest.approx(cell.epsilon, rel=1e-4)


def test_writing_the_results_again_gives_the_same_file(store: ResultStore, tmp_path: Path) -> None:
    store.write_csv(CELLS, tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_bytes() == STORED.read_bytes()


@pytest.mark.parametrize("name", [name for name in TABLES if TABLES[name].cells(FULL)])
def test_the_tables_of_the_page_come_from_the_csv(store: ResultStore, name: str) -> None:
    page = (ROOT / "benchmarks" / "results" / "study.md").read_text(encoding="utf-8")
    assert TABLES[name].markdown(store) in page
