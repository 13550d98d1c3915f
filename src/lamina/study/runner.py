"""Running cells: in parallel, resumable, with progress; and the files of the study."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from datetime import timedelta
from pathlib import Path

import torch

from lamina.errors import LaminaError, RunError
from lamina.study.cells import SIZES, Cell, Result, ResultStore, StudySize
from lamina.study.figures import FIGURES
from lamina.study.page import study_page
from lamina.study.tables import TABLES
from lamina.study.tasks import check_source
from lamina.study.training import run_cell

ALL = "all"
NAMES = (*TABLES, *FIGURES)
Say = Callable[[str], None]


def run_study(
    names: Sequence[str], size: StudySize, folder: Path, *, source: str = "simulated", workers: int = 2,
    say: Say = print,
) -> list[Path]:  # fmt: skip
    """Measure what the named tables and figures need, then write them; returns the files that were written."""
    wanted = [name for name in NAMES if name in names or ALL in names]
    if unknown := sorted(set(names) - {*NAMES, ALL}):
        problem = f"{', '.join(unknown)} is no table or figure of the study"
        raise RunError("study.unknown-name", problem, f"choose from {ALL}, {', '.join(NAMES)}")
    needed: dict[str, list[str]] = {}
    for name in wanted:
        for data in dict.fromkeys(cell.data for cell in cells_of(name, size)):
            needed.setdefault(data, []).append(name)
    check_source(source, needed)
    store = ResultStore(folder, size, source)
    cells = [cell for name in wanted for cell in cells_of(name, size)]
    measure_cells(store, cells, workers=workers, say=say)
    written = [folder / "results.csv"]
    store.write_csv(cells, written[0])
    for name in wanted:
        if name in FIGURES:
            written += FIGURES[name].draw(store, folder)
    page = folder / "study.md"
    page.write_text(study_page(store, wanted), encoding="utf-8")
    return [page, *written]


def cells_of(name: str, size: StudySize) -> list[Cell]:
    """What has to be measured for a table or figure."""
    return TABLES[name].cells(size) if name in TABLES else FIGURES[name].cells(size)


def measure_cells(store: ResultStore, cells: Iterable[Cell], *, workers: int, say: Say) -> None:
    """Measure the cells that are missing. What is measured stays, if this is interrupted."""
    missing = store.missing(cells)
    if not missing:
        return
    missing.sort(
        key=lambda cell: (cell.data, cell.seed, cell.architecture, cell.depth)
    )  # a worker reuses data and measure
    began, done = time.monotonic(), 0
    spawn = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    with ProcessPoolExecutor(max_workers=workers, mp_context=spawn, initializer=_one_thread) as pool:
        waiting = {pool.submit(_measured, cell, store.size, store.source): cell for cell in missing}
        try:
            while waiting:
                ready, _ = wait(waiting, return_when=FIRST_COMPLETED)
                for future in ready:
                    cell = waiting.pop(future)
                    store.put(cell, future.result())
                    done += 1
                    left = (time.monotonic() - began) / done * (len(missing) - done)
                    say(f"{done} of {len(missing)}, {timedelta(seconds=round(left))} left: {_told(cell)}")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in multiprocessing.active_children():  # in the middle of a training, which is measured again
                worker.terminate()
            raise


def _one_thread() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this worker ends it
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"


def _measured(cell: Cell, size: StudySize, source: str) -> Result:
    try:
        return run_cell(cell, size, source)
    except LaminaError as error:
        raise RunError("study.cell-failed", f"{_told(cell)}: {error.problem}", error.remedy) from None


def _told(cell: Cell) -> str:
    return f"{cell.data}, {cell.architecture} of {cell.depth}, {cell.method}, ε = {cell.epsilon:g}, seed {cell.seed}"


def find_size(name: str) -> StudySize:
    """A size by its name."""
    if name not in SIZES:
        raise RunError("study.unknown-size", f"size {name!r} is not known", f"choose from {', '.join(SIZES)}")
    return SIZES[name]
