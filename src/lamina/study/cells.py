"""What is measured: sizes of the study, one training as a `Cell`, and the results that are kept on disk."""

from __future__ import annotations

import csv
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lamina.errors import RunError

SEEDS = (42, 123, 256, 512, 1024)  # the document's
DELTA = 1e-5
DOCUMENT_RATE = 1e-3  # of AdamW
FORMAT = 2  # of a result; a change of what a cell does raises it, and all cells are measured again


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySize:
    """How much is measured. `evidence` is whether the figures may be quoted: not those of a quick form.

    patients  of a data set, all three parts of the split together; each has `windows` windows
    width     of the widest hidden layer
    rate      of AdamW: the document's, or more where there are far fewer steps; None: by the default rule, from the signal and
              noise of each method's own plan
    passes    proxy inputs that the profile of a model sees
    pretrain  steps on simulated patients before the private ones; 0: from the first weights
    beats     ECG as median beats (12 leads, 80 samples), normal or not, instead of windows of 256 samples in five classes
    """

    name: str
    evidence: bool
    patients: int
    windows: int
    steps: int
    batch: int
    width: int
    rate: float | None
    passes: int
    seeds: tuple[int, ...]
    depths: tuple[int, ...]
    epsilons: tuple[float, ...]
    pretrain: int = 0
    beats: bool = False

    def describe(self, *, trained: bool = True) -> str:
        """One line that stands above every table; where nothing is `trained`, no data is read either."""
        windows = "a window" if self.windows == 1 else f"{self.windows} windows"
        told = (
            f"{self.patients:,} patients with {windows} each, {self.steps:,} steps of {self.batch} expected patients, "
            f"{len(self.seeds)} seeds"
        )
        told += f", {self.pretrain:,} steps on simulated patients before" if self.pretrain else ""
        if not trained:
            told = f"measured on simulated inputs, {self.passes:,} Gaussian vectors: no patient's data is read"
        return told[0].upper() + told[1:] if self.evidence else f"quick: not evidence ({told})"


SIZES = {
    size.name: size
    for size in (
        StudySize(
            name="quick", evidence=False, patients=240, windows=2, steps=24, batch=48, width=16, rate=DOCUMENT_RATE, passes=64,
            seeds=SEEDS[:2], depths=(4, 12), epsilons=(1.0, 8.0),
        ),
        StudySize(
            name="full", evidence=True, patients=4_000, windows=1, steps=200, batch=256, width=16, rate=None, passes=1_000,
            seeds=SEEDS, depths=(6, 8, 12, 16), epsilons=(0.5, 1.0, 3.0, 8.0), pretrain=1_500, beats=True,
        ),
        StudySize(
            name="scratch", evidence=True, patients=20_000, windows=1, steps=150, batch=128, width=16, rate=5e-3, passes=1_000,
            seeds=SEEDS, depths=(4, 8, 12, 16), epsilons=(0.5, 1.0, 3.0, 8.0),
        ),
        StudySize(
            name="paper", evidence=True, patients=21_799, windows=38, steps=5_960, batch=256, width=64, rate=DOCUMENT_RATE, passes=1_000,
            seeds=SEEDS, depths=(4, 8, 12, 16, 20), epsilons=(0.1, 0.5, 1.0, 2.0, 5.0, 10.0),
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One training, and everything that decides its figures. `share` is the part of the patients that is used."""

    method: str
    data: str = "ecg"
    architecture: str = "residual"
    depth: int = 12
    activation: str = "gelu"
    epsilon: float = 1.0
    seed: int = SEEDS[0]
    share: float = 1.0

    def key(self, size: StudySize, source: str) -> str:
        """Name of its result: another size, source of data or format is another result."""
        told = json.dumps([FORMAT, asdict(self), asdict(size), source], sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()[:24]


Result = dict[str, Any]  # figures of a cell by name; {"refused": …} where a method cannot be run


class ResultStore:
    """Results of cells in a folder, one JSON file each, written whole or not at all: a stopped study goes on."""

    def __init__(self, folder: Path, size: StudySize, source: str) -> None:
        self.folder, self.size, self.source = folder, size, source
        self._cells = folder / "cells"
        try:
            self._cells.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"'{folder}' cannot be a folder of results: {error.strerror}"
            raise RunError("study.folder-not-writable", problem, "name another one with --folder") from None

    def get(self, cell: Cell) -> Result | None:
        """The result of a cell, if it was measured; a damaged file is measured again."""
        try:
            held = json.loads(self._path(cell).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return held["result"] if isinstance(held, dict) and held.get("cell") == asdict(cell) else None

    def put(self, cell: Cell, result: Result) -> None:
        path = self._path(cell)
        scratch = path.with_suffix(f".{os.getpid()}.tmp")
        scratch.write_text(json.dumps({"cell": asdict(cell), "result": result}, indent=1) + "\n", encoding="utf-8")
        os.replace(scratch, path)

    def missing(self, cells: Iterable[Cell]) -> list[Cell]:
        """The cells that are not measured yet, each once."""
        return [cell for cell in dict.fromkeys(cells) if self.get(cell) is None]

    def write_csv(self, cells: Iterable[Cell], path: Path) -> None:
        """One line for each measured cell. `epsilon` is what was reached, in its last digits another for each seed;
        `epsilon_asked` is one number for all of them, and empty where no privacy was asked for."""
        rows = [
            asdict(cell) | {"epsilon_asked": None if cell.method == "none" else cell.epsilon, "epsilon": None} | result
            for cell in dict.fromkeys(cells)
            if (result := self.get(cell)) is not None
        ]
        names = [field.name for field in fields(Cell)]
        names.insert(names.index("epsilon"), "epsilon_asked")
        names += sorted({name for row in rows for name in row} - set(names))
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(rows)

    def _path(self, cell: Cell) -> Path:
        return self._cells / f"{cell.key(self.size, self.source)}.json"


def column(results: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    """One figure of many results; those without it are left out."""
    return [float(result[name]) for result in results if result.get(name) is not None]
