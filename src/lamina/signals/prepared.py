"""Records of patients, prepared once and kept: windows on disk by content, parts by patient, and a corpus of each part.

A record is read, cut and written before the next one is opened, so that memory holds one record, whatever the number. The
result is a folder of plain arrays, named by a digest of all files and settings: the same files are never prepared twice, and
a changed file is never taken for the old one. Such a folder holds private data in the clear: keep it where the data is.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lamina.errors import LaminaError
from lamina.signals.signal import Float32
from lamina.validate import open_regular

if TYPE_CHECKING:
    from lamina.run.corpus import Corpus

PARTS = ("train", "validation", "test")
SHARES = (0.70, 0.15, 0.15)  # of the patients, as section 4.1.1 of the LSAB paper has it
VERSION = "1"  # of how windows are made: another one is another folder


def part_of(patient: str, *, salt: str = "") -> str:
    """Train, validation or test (70, 15, 15 %) by a hash of the patient's id: the same on every machine and in every year.

    No patient changes parts because others come or go, and all records of a patient are in one part.

    >>> [part_of(name) for name in ("p000020", "p000030", "p000052")]
    ['validation', 'train', 'test']
    """
    number = int.from_bytes(hashlib.sha256(f"lamina/part/{salt}/{patient}".encode()).digest()[:8], "big") / 2**64
    return PARTS[int(number >= SHARES[0]) + int(number >= SHARES[0] + SHARES[1])]


@dataclass(frozen=True, slots=True, kw_only=True)
class PatientRecord:
    """One recording: whose it is, in which part, its label, the files it comes from, and what makes windows of them."""

    patient: str
    part: str
    label: NDArray[Any] | None
    files: tuple[Path, ...]
    windows: Callable[[], Float32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedPart:
    """`x` (N, channels, samples), `y` (N, …) or None, `patient` (N,) as text: windows of one part, patient by patient."""

    x: Float32
    y: NDArray[Any] | None
    patient: NDArray[np.str_]

    def __len__(self) -> int:
        return len(self.patient)

    def corpus(self, *, labels: bool = True, **options: Any) -> Corpus:
        """A `lamina.Corpus` whose contributions are patients; `labels=False` for an autoencoder. Options: those of Corpus."""
        from lamina.run.corpus import Corpus

        if not len(self):
            problem = "this part holds no windows"
            raise LaminaError("data.part-empty", problem, "give more patients; parts are chosen by a hash of their id")
        return Corpus(self.x, self.y if labels else None, unit=self.patient, **({"unit_name": "patient"} | options))


def prepare(
    records: Iterable[PatientRecord], *, settings: Mapping[str, Any], cache: str | Path | None = None,
    oversample: str | None = None,
) -> dict[str, PreparedPart]:  # fmt: skip
    """The windows of all records by part; in memory, or in a folder of `cache`, from where they are read as needed.

    `settings` says how windows are made, as far as it matters: it is part of the folder's name.
    """
    if oversample is not None:
        raise LaminaError(
            "data.oversampling-mixes-patients",
            f"oversample={oversample!r}: SMOTE makes examples between those of different patients, so that one patient is in "
            "the examples of others, and clipping a contribution no longer bounds what a patient changes",
            "weight the classes instead: lamina.signals.class_weights of public counts; or simulate the rare class",
        )
    listed = list(records)
    parts: dict[str, str] = {}
    for record in listed:
        if parts.setdefault(record.patient, record.part) != record.part:
            problem = f"patient {record.patient!r} is in {parts[record.patient]} and in {record.part}"
            raise LaminaError("data.patient-in-two-parts", problem, "put all records of a patient into one part")
    if cache is None:
        return _in_memory(listed)
    folder = Path(cache) / _digest(listed, settings)
    if not (folder / "done.json").exists():
        Path(cache).mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=".building-", dir=cache))  # readable by its owner only
        try:
            _write(listed, building)
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(building, folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return {part: _load(folder, part) for part in PARTS}


def _digest(records: list[PatientRecord], settings: Mapping[str, Any]) -> str:
    """SHA-256 over settings, patients, parts, labels and the bytes of all files."""
    hasher = hashlib.sha256(f"lamina/prepared/{VERSION}/{json.dumps(settings, sort_keys=True, default=str)}".encode())
    for record in records:
        label = b"" if record.label is None else np.ascontiguousarray(record.label).tobytes()
        hasher.update(repr((record.patient, record.part, label, len(record.files))).encode())
        for path in record.files:
            with os.fdopen(open_regular(path), "rb") as file:
                hasher.update(hashlib.file_digest(file, "sha256").digest())
    return hasher.hexdigest()[:32]


def _in_memory(records: list[PatientRecord]) -> dict[str, PreparedPart]:
    with tempfile.TemporaryDirectory(prefix="lamina-") as folder:
        _write(records, Path(folder))
        return {part: _load(Path(folder), part, mapped=False) for part in PARTS}


def _write(records: list[PatientRecord], folder: Path) -> None:
    """PART.x, PART.y, PART.patients.json for each part, and at last done.json with the shapes."""
    shapes: dict[str, dict[str, Any]] = {part: {"n": 0, "x": None, "y": None} for part in PARTS}
    patients: dict[str, list[tuple[str, int]]] = {part: [] for part in PARTS}
    for record in sorted(records, key=lambda record: record.patient):
        made, shape = record.windows(), shapes[record.part]
        if not len(made):
            continue
        if shape["x"] not in (None, list(made.shape[1:])):
            problem = (
                f"a record of patient {record.patient!r} gives windows {made.shape[1:]}, others {tuple(shape['x'])}"
            )
            raise LaminaError("data.windows-differ", problem, "choose the same channels of all records")
        with (folder / f"{record.part}.x").open("ab") as file:
            file.write(made.astype("<f4").tobytes())
        if record.label is not None:
            label = np.asarray(record.label)
            with (folder / f"{record.part}.y").open("ab") as file:
                file.write(np.broadcast_to(label, (len(made), *label.shape)).tobytes())
            shape["y"] = [label.dtype.str, list(label.shape)]
        shape["n"], shape["x"] = shape["n"] + len(made), list(made.shape[1:])
        patients[record.part].append((record.patient, len(made)))
    if not any(shape["n"] for shape in shapes.values()):
        raise LaminaError("data.no-windows", "no record is long enough for a window", "give longer records")
    for part in PARTS:
        (folder / f"{part}.patients.json").write_text(json.dumps(patients[part]), encoding="utf-8")
    (folder / "done.json").write_text(json.dumps(shapes), encoding="utf-8")


def _load(folder: Path, part: str, *, mapped: bool = True) -> PreparedPart:
    shapes = json.loads((folder / "done.json").read_text(encoding="utf-8"))
    shape, n = shapes[part], shapes[part]["n"]
    known = next(other["x"] for other in shapes.values() if other["x"] is not None)

    def array(name: str, dtype: str, size: tuple[int, ...]) -> NDArray[Any]:
        if not n:
            return np.empty(size, dtype=dtype)
        found = np.memmap(folder / name, dtype=dtype, mode="r", shape=size)
        return found if mapped else np.array(found)

    labels = next((other["y"] for other in shapes.values() if other["y"] is not None), None)
    names = [name for name, count in json.loads((folder / f"{part}.patients.json").read_text()) for _ in range(count)]
    return PreparedPart(
        x=array(f"{part}.x", "<f4", (n, *(shape["x"] or known))),
        y=None if labels is None else array(f"{part}.y", labels[0], (n, *labels[1])),
        patient=np.array(names, dtype=np.str_),
    )


def class_weights(counts: Mapping[str, float]) -> dict[str, float]:
    """Weights that make classes of these sizes count alike, 1 on average over examples: total / (classes · count).

    The counts must be public: published ones (`PTBXL_COUNTS`), those of a simulator, or counts that a mechanism released
    and a budget paid for. Counts of the private data themselves are a release that no plan has in its ε.

    >>> class_weights({"ill": 1, "well": 3})
    {'ill': 2.0, 'well': 0.6666666666666666}
    """
    if not counts or min(counts.values()) <= 0:
        raise LaminaError("data.counts-not-positive", f"counts are {dict(counts)}", "give a count > 0 for every class")
    total = sum(counts.values())
    return {name: total / (len(counts) * count) for name, count in counts.items()}


def noisy_class_counts(
    labels: Iterable[tuple[str, str]], classes: Iterable[str], *, noise_multiplier: float
) -> dict[str, float]:
    """How many patients have each class, with Gaussian noise, at least 1: (patient, class) pairs may repeat.

    Every patient counts once in one class, the first that is given, so that the vector of counts moves by at most 1 when a
    patient comes or goes. It costs what one step with this noise multiplier costs without sampling,
    `lamina.account.Event(sigma=noise_multiplier, q=1.0, steps=1)`, and no ledger knows of it: add it to the schedule that
    you declare.
    """
    if not noise_multiplier > 0:
        problem = f"noise_multiplier is {noise_multiplier}, must be > 0"
        raise LaminaError("data.noise-multiplier", problem, "for example 10: ε about 0.4 at δ = 1e-5")
    first: dict[str, str] = {}
    for patient, name in labels:
        first.setdefault(patient, name)
    counts = Counter(first.values())
    noise = random.SystemRandom()
    return {name: max(1.0, counts[name] + noise.gauss(0.0, noise_multiplier)) for name in classes}
