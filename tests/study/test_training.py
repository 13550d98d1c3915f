"""Cells of the study on very few patients: methods give what they promise, tables and figures are made from results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from refusals import raises_code

from lamina.study.cells import SIZES, Cell, ResultStore
from lamina.study.figures import FIGURES
from lamina.study.methods import METHODS
from lamina.study.page import study_page
from lamina.study.runner import NAMES, cells_of, find_size, measure_cells, run_study
from lamina.study.tables import TABLES
from lamina.study.tasks import load_task, simulated
from lamina.study.training import run_cell

TINY = replace(SIZES["quick"], patients=60, steps=2, batch=20, width=8, passes=16, seeds=(42,), depths=(4,))
SMALL = {"architecture": "stacked", "depth": 4, "activation": "relu", "data": "cgm"}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_the_same_true_epsilon(method: str) -> None:
    found = run_cell(Cell(method=method, **SMALL), TINY, "simulated")  # type: ignore[arg-type]
    if method in ("global", "lsab-global"):  # global constants of a deep network span too much for thresholds
        assert found.keys() == {"refused"} or found["epsilon"] <= 1.0
        return
    assert "refused" not in found, found
    assert found["mse"] > 0 and 0 <= found["auc"] <= 1 and 0 <= found["mia"] <= 1
    if method == "none":
        assert found["epsilon"] is None
    elif method == "printed":
        assert found["claimed"] == pytest.approx(1.0) and found["epsilon"] > 5
    elif method == "rdp":
        assert 0.5 < found["epsilon"] < 0.999  # a looser accountant: more noise than ε = 1 needs
    else:
        assert 0.98 < found["epsilon"] <= 1.0 + 1e-9


def test_a_cell_can_be_repeated() -> None:
    cell = Cell(method="lsab", **SMALL)  # type: ignore[arg-type]
    once, again = (run_cell(cell, TINY, "simulated") for _ in range(2))
    timed = {"train_seconds", "profile_seconds"}
    assert {k: v for k, v in once.items() if k not in timed} == {k: v for k, v in again.items() if k not in timed}
    other = run_cell(replace(cell, seed=123), TINY, "simulated")
    assert other["mse"] != once["mse"]


@pytest.mark.parametrize("data", ["ecg", "cgm", "waves"])
def test_patients_are_in_one_part_and_windows_are_of_one_record(data: str) -> None:
    task = load_task(data, TINY, "simulated", 42, 1.0)
    parts = [task.train, task.held_out, task.test]
    assert [part.patients for part in parts] == [42, 9, 9]
    assert all(part.x4.shape[1] == TINY.windows and part.x4.shape[3] == 256 for part in parts)
    batch = task.train.batch(torch.tensor([3, 5]))
    assert len(batch) == 2 and torch.equal(batch.x, task.train.x4[[3, 5]].flatten(0, 1))
    assert not torch.equal(task.proxy.x4[0], task.train.x4[0])
    assert torch.equal(simulated(data, 5, 2, 7).x4, simulated(data, 9, 2, 7).x4[:5])


@pytest.mark.parametrize(
    "names", [("table5", "table7", "table8", "table9", "figure2"), pytest.param(NAMES, marks=pytest.mark.slow)]
)
def test_tables_and_figures_of_made_up_results(tmp_path: Path, names: tuple[str, ...]) -> None:
    """From results that are there already: nothing is measured, everything is written."""
    size = replace(TINY, passes=32)
    store = ResultStore(tmp_path, size, "simulated")
    for i, cell in enumerate(dict.fromkeys(c for name in NAMES for c in cells_of(name, size))):
        if cell.method == "global":
            store.put(cell, {"refused": "Δ spans too much [allocate.delta-spread]"})
            continue
        store.put(cell, {
            "mse": 0.5 + 0.001 * i, "auc": 0.6, "mia": 0.51, "mia_p": 0.4, "epsilon": 1.0, "rho": 0.4, "delta_tight": 2.0,
            "delta_worst": 8.0, "delta_printed": 0.5, "noise_power": 3.0, "train_seconds": 1.0, "profile_seconds": 0.1,
        })  # fmt: skip
    written = run_study(names, size, tmp_path, say=lambda text: pytest.fail(f"measured {text}"))
    assert {path.name for path in written} >= {"study.md", "results.csv", "figure2.png", "figure2.pdf"}
    page = (tmp_path / "study.md").read_text(encoding="utf-8")
    assert "quick: not evidence" in page and "refused: Δ spans too much" in page
    assert all(TABLES[name].title in page for name in names if name in TABLES)
    assert all(f"({name}.png)" in page for name in names if name in FIGURES)
    assert "0.0625" in page
    assert page == study_page(store, names)


def test_a_stopped_study_goes_on(tmp_path: Path) -> None:
    store = ResultStore(tmp_path, TINY, "simulated")
    cells = [Cell(method=method, **SMALL) for method in ("none", "flat")]  # type: ignore[arg-type]
    store.put(cells[0], {"mse": 1.0})
    told: list[str] = []
    measure_cells(store, cells, workers=1, say=told.append)
    assert len(told) == 1 and "flat" in told[0]
    assert store.get(cells[0]) == {"mse": 1.0} and store.get(cells[1]) is not None


def test_names_that_are_not_known(tmp_path: Path) -> None:
    with raises_code("study.unknown-name"):
        run_study(["table4"], TINY, tmp_path)
    with raises_code("study.unknown-size"):
        find_size("huge")
    with raises_code("study.unknown-data"):
        simulated("eeg", 3, 2, 0)
