"""Cells of the study on very few patients: methods give what they promise, tables and figures are made from results."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import raises_code
from signal_files import write_wfdb

from lamina.plan.rules import NoiseKind
from lamina.plan.step_plan import StepPlan
from lamina.signals import CGMSimulator, ECGSimulator
from lamina.signals.prepared import part_of
from lamina.signals.simulated_folders import write_simulated_ptbxl
from lamina.study import training
from lamina.study.cells import SIZES, Cell, ResultStore
from lamina.study.figures import FIGURES
from lamina.study.methods import METHODS
from lamina.study.page import study_page
from lamina.study.runner import NAMES, cells_of, find_size, measure_cells, run_study
from lamina.study.tables import TABLES, shown
from lamina.study.tasks import check_source, load_task, simulated
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
    if method in ("none", "public"):
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


def test_of_p_values_the_smallest_and_the_largest_are_shown() -> None:
    assert shown([{"mia_p": p} for p in (0.0383, 0.53, 0.858)], "mia_p") == "0.0383–0.858"
    assert shown([{"mia_p": 0.4}, {"mia_p": 0.4}], "mia_p") == "0.4" and shown([], "mia_p") == "–"


NEVER_READ_DATA = ("table1", "assumptions", "table6", "figure1", "figure3", "figure4")


@pytest.mark.parametrize("name", NAMES)
def test_what_reads_no_data_says_so(tmp_path: Path, name: str) -> None:
    """Without results, so that nothing but the inputs is told."""
    page = study_page(ResultStore(tmp_path, replace(TINY, passes=32), "my-records"), [name])
    assert ("Data: my-records." in page) is (name not in NEVER_READ_DATA)
    assert ("measured on simulated inputs, 32 Gaussian vectors" in page) is (name in NEVER_READ_DATA)
    assert "quick: not evidence" in page


@pytest.mark.parametrize("names", [["table5"], ["table1"], ["all"]])
def test_data_that_cannot_be_read_is_refused_before_anything_is_measured(tmp_path: Path, names: list[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for name in ("nope", "empty", "file"):
        with raises_code("study.data-not-readable") as caught:
            run_study(names, TINY, tmp_path / "out", source=str(tmp_path / name))
        assert str(tmp_path / name) in caught.value.problem and "ptbxl_database.csv" in caught.value.remedy
    assert not (tmp_path / "out").exists()


def test_data_is_checked_for_what_needs_it(tmp_path: Path) -> None:
    write_simulated_ptbxl(tmp_path, patients=2)
    check_source(str(tmp_path), {})
    check_source(str(tmp_path), {"ecg": ["table5"]})
    with raises_code("study.data-not-readable") as caught:
        check_source(str(tmp_path), {"ecg": ["table5", "figure2"], "cgm": ["figure2"]})
    assert "OhioT1DM" in caught.value.remedy and caught.value.remedy.endswith("leave out figure2")
    next(tmp_path.rglob("00001_lr.dat")).unlink()
    with raises_code("study.data-not-readable"):
        check_source(str(tmp_path), {"ecg": ["table5"]})


def test_waves_need_all_three_streams(tmp_path: Path) -> None:
    wave = np.rint(500 * np.sin(np.arange(4000) / 20))[None].astype(np.int64)
    write_wfdb(tmp_path / "p000020-2100-01-01-00-00", wave, rate=125, channels=("II",))
    with raises_code("study.data-not-readable") as caught:
        check_source(str(tmp_path), {"waves": ["figure2"]})
    assert "no records with a window" in caught.value.problem
    write_wfdb(tmp_path / "p000020-2100-01-01-00-00", np.repeat(wave, 3, 0), rate=125, channels=("II", "ABP", "PLETH"))
    check_source(str(tmp_path), {"waves": ["figure2"]})


LEARNS = replace(TINY, pretrain=2, beats=True, rate=None, windows=1)


@pytest.fixture(scope="module")
def slices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The two files of the slices, with 60 simulated patients who have two records each."""
    folder = tmp_path_factory.mktemp("slices")
    (folder / "ptbxl_slice").mkdir()
    (folder / "cgm").mkdir()
    records = ECGSimulator(samples=1000).records(patients=120, seed=3, seconds=10)
    page = np.concatenate([records.x[:, 3 * g : 3 * g + 3, 250 * g : 250 * (g + 1)] for g in range(4)], axis=1)
    kinds = np.eye(5, dtype=np.int8)[records.label]
    kinds[7] = -1  # a record that nobody labelled
    np.savez(
        folder / "ptbxl_slice" / "ptbxl_slice.npz", x12_uV=np.rint(1000 * page).astype(np.int16), superclass=kinds,
        leadII_uV=np.rint(1000 * records.x[:, 1]).astype(np.int16), patient_id=np.arange(120) // 2,
    )  # fmt: skip
    days = CGMSimulator(days=2).draw(patients=60, seed=1)
    np.savez(folder / "cgm" / "weinstock_days.npz", x_mgdl=days.x[:, 0, :288], patient_id=np.repeat(np.arange(60), 2))
    return folder


def test_slices_have_one_window_of_each_patient_in_parts_by_patient(slices: Path) -> None:
    check_source(str(slices), {"ecg": ["table5"], "cgm": ["figure2"], "waves": ["figure2"]})
    task = load_task("ecg", LEARNS, str(slices), 42, 1.0)
    parts = {"train": task.train, "validation": task.held_out, "test": task.test}
    for name, part in parts.items():
        assert part.patients == sum(part_of(str(i)) == name for i in range(60))
        assert part.x4.shape[1:] == (1, 12, 80) and 0 < float(part.x4.abs().max()) < 1
    assert task.classes == 2 and task.proxy.x4.shape[1:] == (1, 12, 80)
    assert load_task("cgm", LEARNS, str(slices), 42, 1.0).train.x4.shape[1:] == (1, 1, 256)
    waves = load_task("waves", LEARNS, str(slices), 42, 1.0)  # simulated: no slice of them is there
    assert torch.equal(waves.train.x4[0], load_task("waves", LEARNS, "simulated", 42, 1.0).train.x4[0])
    with raises_code("study.other-channels"):
        load_task("ecg", TINY, str(slices), 42, 1.0)


def test_weights_come_from_simulated_patients_alone(slices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pre-training reads the proxy; every method starts with its weights, at a rate that follows from its own plan."""
    task, cell = load_task("ecg", LEARNS, str(slices), 42, 1.0), Cell(method="public", depth=4)
    seen: list[torch.Tensor] = []
    honest = training.pretrain

    def watched(model: torch.nn.Module, loss: Any, x: torch.Tensor, y: torch.Tensor, **more: Any) -> list[float]:
        seen.append(x)
        return honest(model, loss, x, y, **more)

    monkeypatch.setattr(training, "pretrain", watched)
    training._pretrained.cache_clear()
    model = training.build(task, cell, LEARNS, str(slices))
    assert len(seen) == 1 and torch.equal(seen[0], task.proxy.x)
    first = training.build(task, cell, replace(LEARNS, pretrain=0), str(slices))
    moved = [not torch.equal(a, b) for a, b in zip(model.parameters(), first.parameters(), strict=True)]
    assert all(moved)
    assert run_cell(cell, LEARNS, str(slices))["steps"] == 0
    rates = [training._rate(LEARNS, signal) for signal in (0.5, 1.0, 4.0)]
    assert rates[0] == rates[1] < rates[2] and rates[1] == pytest.approx(0.05 * 0.021 * 1.25)
    assert training._rate(TINY, 4.0) == TINY.rate


def test_laplace_noise_has_pure_epsilon(slices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ε by the textbook: T Poisson-sampled Laplace steps that are ε₀-DP cost T·log(1 + q(e^ε₀ − 1))."""
    plans: list[StepPlan] = []
    honest = training._train_private

    def watched(model: torch.nn.Module, plan: StepPlan, *given: Any, **more: Any) -> Any:
        plans.append(plan)
        return honest(model, plan, *given, **more)

    monkeypatch.setattr(training, "_train_private", watched)
    for epsilon in (0.5, 3.0):
        found = run_cell(Cell(method="laplace", depth=4, epsilon=epsilon), LEARNS, str(slices))
        plan = plans.pop()
        assert plan.noise_kind is NoiseKind.LAPLACE and plan.steps == found["steps"] == LEARNS.steps
        (layer,) = plan.layers  # a weight and a bias, whose L1 norms move together by √2·C
        assert [name.partition(".")[0] for name in layer.parameters] == ["classifier"] * 2
        scale, q = math.sqrt(math.pi / 2) * plan.noise[0], plan.classes[0].sampling_rate
        step = math.sqrt(2) * plan.clip[0][0] / scale
        assert plan.steps * math.log1p(q * math.expm1(step)) == pytest.approx(epsilon, rel=1e-6)
        assert found["epsilon"] == pytest.approx(epsilon, rel=1e-9) and found["rho"] is None


def test_fewer_patients_have_as_many_passes() -> None:
    for share, steps in ((1.0, 4), (0.5, 2)):
        assert (
            run_cell(Cell(method="none", share=share, **SMALL), replace(TINY, steps=4), "simulated")["steps"] == steps
        )  # type: ignore[arg-type]


def test_the_refusal_of_a_worker_arrives(tmp_path: Path) -> None:
    store = ResultStore(tmp_path, TINY, str(tmp_path / "nope"))
    with raises_code("study.cell-failed") as caught:
        measure_cells(store, [Cell(method="none", **SMALL)], workers=1, say=print)  # type: ignore[arg-type]
    assert "nope" in caught.value.problem and "ID-ws-training.xml" in caught.value.remedy


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
