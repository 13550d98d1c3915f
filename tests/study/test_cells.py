"""Results on disk: a study that was stopped goes on, and figures of another size are never mixed in."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

from refusals import raises_code

from lamina.study.cells import SIZES, Cell, ResultStore

QUICK = SIZES["quick"]


def test_what_is_measured_stays_and_what_is_damaged_is_measured_again(tmp_path: Path) -> None:
    store = ResultStore(tmp_path, QUICK, "simulated")
    one, two = Cell(method="flat"), Cell(method="lsab")
    store.put(one, {"mse": 0.5})
    assert store.get(one) == {"mse": 0.5} and store.missing([one, two, two]) == [two]
    next((tmp_path / "cells").glob("*.json")).write_text("{")
    assert ResultStore(tmp_path, QUICK, "simulated").missing([one, two]) == [one, two]


def test_another_size_or_source_is_another_result(tmp_path: Path) -> None:
    cell = Cell(method="flat")
    ResultStore(tmp_path, QUICK, "simulated").put(cell, {"mse": 0.5})
    assert ResultStore(tmp_path, replace(QUICK, steps=25), "simulated").get(cell) is None
    assert ResultStore(tmp_path, QUICK, "ptb-xl").get(cell) is None


def test_all_figures_are_in_one_csv(tmp_path: Path) -> None:
    store = ResultStore(tmp_path, QUICK, "simulated")
    cells = [Cell(method="flat"), Cell(method="printed"), Cell(method="lsab")]
    store.put(cells[0], {"mse": 0.5, "auc": 0.7})
    store.put(cells[1], {"refused": "a reason, with a comma"})
    store.write_csv(cells, tmp_path / "results.csv")
    with (tmp_path / "results.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["method"], row["mse"], row["refused"]) for row in rows] == [
        ("flat", "0.5", ""),
        ("printed", "", "a reason, with a comma"),
    ]


def test_the_csv_has_the_epsilon_that_was_asked_for(tmp_path: Path) -> None:
    """What was reached differs in its last digits, so that grouping by it would split a cell."""
    store = ResultStore(tmp_path, QUICK, "simulated")
    reached = {Cell(method="flat"): 0.9999684, Cell(method="flat", seed=123): 0.9999683, Cell(method="none"): None}
    for cell, epsilon in reached.items():
        store.put(cell, {"mse": 0.5, "epsilon": epsilon})
    refused = Cell(method="global", epsilon=3.0)
    store.put(refused, {"refused": "a reason"})
    store.write_csv([*reached, refused], tmp_path / "results.csv")
    with (tmp_path / "results.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["epsilon_asked"] for row in rows] == ["1.0", "1.0", "", "3.0"]
    assert [row["epsilon"] for row in rows] == ["0.9999684", "0.9999683", "", ""]


def test_a_file_in_the_way_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "here").write_text("")
    with raises_code("study.folder-not-writable"):
        ResultStore(tmp_path / "here", QUICK, "simulated")
