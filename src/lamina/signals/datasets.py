"""PTB-XL, OhioT1DM, MIMIC-III waveforms and folders of other recordings: from files to corpora of patients."""

from __future__ import annotations

import ast
import csv
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.parsers import expat

import numpy as np
from numpy.typing import NDArray

from lamina.errors import LaminaError
from lamina.signals.ecg_simulator import CLASSES
from lamina.signals.prepared import PARTS, PatientRecord, PreparedPart, part_of, prepare
from lamina.signals.signal import Float32, Signal, read_csv_signal, read_edf, read_npz_signal, refuse_file
from lamina.signals.wfdb import read_wfdb, segments, wfdb_files
from lamina.validate import open_regular

if TYPE_CHECKING:
    from lamina.plan.policy import Policy
    from lamina.run.corpus import Corpus

WINDOW, OVERLAP = 256, 0.5
MOST_TABLE, MOST_XML = 1 << 28, 1 << 28  # bytes
PTBXL_COUNTS = {"NORM": 9514.0, "MI": 5469.0, "STTC": 5235.0, "CD": 4898.0, "HYP": 2649.0}
"""Records of each superclass in PTB-XL as published (Wagner et al. 2020, version 1.0.3): public, for `class_weights`."""


def _folder(path: str | Path, needs: str) -> Path:
    folder = Path(path)
    if not folder.is_dir():
        raise LaminaError("data.folder-missing", f"'{folder}' is not a folder", f"give the folder that holds {needs}")
    return folder


def _corpus(parts: dict[str, PreparedPart], part: str, **options: Any) -> Corpus:
    if part not in PARTS:
        raise LaminaError("data.part-not-known", f"part is {part!r}", f"choose from {', '.join(PARTS)}")
    return parts[part].corpus(**options)


# ---------------------------------------------------------------------------------------------------------- PTB-XL


def _table(path: Path) -> Iterator[dict[str, str]]:
    try:
        with os.fdopen(open_regular(path), "r", encoding="utf-8", newline="") as file:
            if os.fstat(file.fileno()).st_size > MOST_TABLE:
                raise refuse_file(path, f"has more than {MOST_TABLE} bytes")
            yield from csv.DictReader(file, strict=True)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise refuse_file(path, f"is no table: {error}") from None


def ptbxl_records(
    folder: str | Path, *, rate: int = 100, length: int = WINDOW, overlap: float = OVERLAP, split: str = "folds"
) -> list[PatientRecord]:
    """The records of PTB-XL by ptbxl_database.csv, with one 0 or 1 per superclass (NORM, MI, STTC, CD, HYP).

    split  "folds", the official ones: 1 to 8 train, 9 validation, 10 test, and a patient is in one fold; or "patients":
           70, 15 and 15 % of the patients by a hash of their id, as section 4.1.1 of the LSAB paper has it

    Records without a diagnostic statement have all zeros. A superclass counts whatever its likelihood, as in the example
    that PTB-XL comes with.
    """
    if split not in ("folds", "patients"):
        raise LaminaError("data.split-not-known", f"split is {split!r}", "choose folds or patients")
    folder = _folder(folder, "ptbxl_database.csv")
    if rate not in (100, 500):
        raise LaminaError("data.ptbxl-rate", f"rate is {rate}", "PTB-XL has rate=100 and rate=500")
    kinds = {
        row[""]: row["diagnostic_class"]
        for row in _table(folder / "scp_statements.csv")
        if row.get("", "") and row.get("diagnostic", "") in ("1", "1.0") and row.get("diagnostic_class") in CLASSES
    }
    found, column, table = [], "filename_lr" if rate == 100 else "filename_hr", folder / "ptbxl_database.csv"
    for number, row in enumerate(_table(table), 2):
        try:
            if len(row["scp_codes"]) > 10_000:
                raise ValueError("scp_codes are too long")
            codes, fold = ast.literal_eval(row["scp_codes"]), int(float(row["strat_fold"]))
            patient, name = str(int(float(row["patient_id"]))), row[column]
            if not isinstance(codes, dict) or not 1 <= fold <= 10 or not re.fullmatch(r"[A-Za-z0-9_/-]+", name):
                raise ValueError(f"scp_codes, strat_fold or {column}")
        except (KeyError, ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
            raise refuse_file(table, f"line {number} cannot be read: {error}") from None
        label = np.array([float(any(kinds.get(code) == kind for code in codes)) for kind in CLASSES], dtype=np.float32)
        path = folder / name
        found.append(PatientRecord(
            patient=patient, part=PARTS[max(0, fold - 8)] if split == "folds" else part_of(patient), label=label,
            files=tuple(wfdb_files(path)),
            windows=lambda path=path: ecg_windows(read_wfdb(path), length, overlap),  # type: ignore[misc]
        ))  # fmt: skip
    return found


def ecg_windows(record: Signal, length: int = WINDOW, overlap: float = OVERLAP) -> Float32:
    """Section 4.1.1: band-pass 0.5 to 40 Hz, every lead with mean 0 and deviation 1 over the record, windows."""
    cut = [run.band_passed().standardised().windows(length, overlap) for run in record.runs(length)]
    return np.concatenate([np.empty((0, len(record.x), length), dtype=np.float32), *cut])


def ptbxl_corpus(
    folder: str, policy: Policy | None = None, *, part: str = "train", rate: int = 100, split: str = "folds",
    labels: bool = True, cache: str | None = None, oversample: str | None = None, **options: Any,
) -> Corpus:  # fmt: skip
    """Windows of PTB-XL, patients as contributions; options are those of `lamina.Corpus`.

    In RUN.toml: kind = "factory", factory = "lamina.signals:ptbxl_corpus", and all of these in args.
    """
    settings = {"data": "ptbxl", "rate": rate, "length": WINDOW, "overlap": OVERLAP}
    records = ptbxl_records(folder, rate=rate, split=split)
    made = prepare(records, settings=settings, cache=cache, oversample=oversample)
    return _corpus(made, part, policy=policy, labels=labels, **options)


# -------------------------------------------------------------------------------------------------------- OhioT1DM

# Channels with the public range that becomes [0, 1]: what a sensor shows, never what patients had. The first cohort (2018)
# wore a Basis Peak, which reports every 5 minutes, the second (2020) an Empatica Embrace, which reports every minute:
# Marling and Bunescu, "The OhioT1DM dataset for blood glucose level prediction: update 2020" (CEUR 2675). Temperatures
# are in °F, skin response in µS, acceleration in g.
OHIO_RANGES = {
    "glucose_level": (40.0, 400.0), "basis_heart_rate": (40.0, 200.0), "basis_gsr": (0.0, 20.0),
    "basis_skin_temperature": (70.0, 105.0), "basis_air_temperature": (50.0, 110.0), "basis_steps": (0.0, 600.0),
    "acceleration": (0.0, 4.0),
}  # fmt: skip
GRID_MINUTES, LARGEST_GAP = 5, 30
_OHIO_TIME = "%d-%m-%Y %H:%M:%S"


@dataclass(frozen=True, slots=True, kw_only=True)
class OhioFile:
    """A patient's XML file: id, and the attributes of every event by the element that holds it, in order."""

    patient: str
    events: dict[str, list[dict[str, str]]]

    def series(self, name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(minutes since 1970, values) of a channel, by time; of two readings at one time the last."""
        found: dict[float, float] = {}
        for event in self.events.get(name, ()):
            at = datetime.strptime(event["ts"], _OHIO_TIME)
            value = float(event["value"])
            if np.isfinite(value):
                found[(at - datetime(1970, 1, 1)).total_seconds() / 60.0] = value
        times = np.array(sorted(found))
        return times, np.array([found[t] for t in times])


def read_ohio(path: str | Path) -> OhioFile:
    """An OhioT1DM file. Document types and entities are refused: they can make a small file fill the memory."""
    path = Path(path)
    patient: list[str] = []
    events: dict[str, list[dict[str, str]]] = {}
    inside: list[str] = []

    def start(tag: str, attributes: dict[str, str]) -> None:
        inside.append(tag)
        if len(inside) > 3 or (len(inside) == 1 and tag != "patient"):
            raise ValueError(f"element <{tag}> does not belong there")
        if len(inside) == 1:
            patient.append(attributes["id"])
        elif len(inside) == 2:
            events.setdefault(tag, [])
        else:
            events[inside[1]].append(attributes)

    def no_document_type(*given: Any) -> None:
        raise ValueError("it declares a document type or entities")

    parser = expat.ParserCreate()
    parser.StartElementHandler, parser.EndElementHandler = start, lambda tag: inside.pop()
    parser.StartDoctypeDeclHandler = parser.EntityDeclHandler = no_document_type
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            if os.fstat(file.fileno()).st_size > MOST_XML:
                raise ValueError(f"it has more than {MOST_XML} bytes")
            parser.ParseFile(file)
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", patient[0]):
            raise ValueError(f"patient id {patient[0]!r}")
    except (OSError, ValueError, KeyError, IndexError, expat.ExpatError) as error:
        raise refuse_file(path, f"is no OhioT1DM file: {error}") from None
    return OhioFile(patient=patient[0], events=events)


def ohio_signal(file: OhioFile, *channels: str) -> Signal:
    """The channels every 5 minutes, each in its public range as [0, 1]; NaN in gaps of more than half an hour.

    Glucose is interpolated between readings, what a wristband shows is averaged over 5 minutes.
    """
    try:
        series = {name: file.series(name) for name in channels}
        glucose = file.series("glucose_level")
    except (KeyError, ValueError) as error:
        raise refuse_file(f"patient {file.patient}", f"has an event without time or value: {error}") from None
    if not len(glucose[0]):
        return Signal(x=np.empty((len(channels), 0), dtype=np.float32), rate=1 / 300, channels=channels)
    if np.median(glucose[1]) < 35:
        problem = f"has a median glucose of {np.median(glucose[1]):.1f}, which is mmol/L"
        raise refuse_file(f"patient {file.patient}", problem, "multiply by 18.016: OhioT1DM is in mg/dL")
    grid = np.arange(np.ceil(glucose[0][0] / GRID_MINUTES), np.floor(glucose[0][-1] / GRID_MINUTES) + 1) * GRID_MINUTES
    if len(grid) > 1 << 22:
        raise refuse_file(f"patient {file.patient}", f"spans {len(grid)} readings, more than 40 years")
    rows = []
    for name in channels:
        low, high = OHIO_RANGES[name]
        made = (_interpolated if name == "glucose_level" else _averaged)(grid, *series[name])
        rows.append(np.clip((made - low) / (high - low), 0.0, 1.0))
    return Signal(x=np.array(rows, dtype=np.float32), rate=1 / (60 * GRID_MINUTES), channels=channels)


def _interpolated(
    grid: NDArray[np.float64], times: NDArray[np.float64], values: NDArray[np.float64]
) -> NDArray[np.float64]:
    made = np.interp(grid, times, values)
    after = (
        np.clip(np.searchsorted(times, grid), 1, len(times) - 1) if len(times) > 1 else np.zeros(len(grid), dtype=int)
    )
    gap = times[after] - times[after - 1]
    made[(gap > LARGEST_GAP) & ~np.isin(grid, times)] = np.nan
    return made


def _averaged(
    grid: NDArray[np.float64], times: NDArray[np.float64], values: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The mean of the readings from each point of the grid to the next; gaps of up to half an hour keep the last one."""
    made = np.full(len(grid), np.nan)
    if not len(grid) or not len(times):
        return made
    at = np.floor((times - grid[0]) / GRID_MINUTES).astype(np.int64)
    inside = (at >= 0) & (at < len(grid))
    total, count = (np.bincount(at[inside], w, len(grid)) for w in (values[inside], None))
    with np.errstate(invalid="ignore"):
        made = np.where(count > 0, total / count, np.nan)
    last = np.maximum.accumulate(np.where(count > 0, np.arange(len(grid)), -1))
    kept = (last >= 0) & (np.arange(len(grid)) - last <= LARGEST_GAP // GRID_MINUTES)
    return np.where(kept, made[last], np.nan)


def ohio_records(
    folder: str | Path, *, channels: tuple[str, ...] = ("glucose_level",), length: int = WINDOW,
    overlap: float = OVERLAP,
) -> list[PatientRecord]:  # fmt: skip
    """Files ID-ws-training.xml and ID-ws-testing.xml of both cohorts, anywhere below the folder.

    The official testing files are the last days of the same patients: all files of a patient are in one part, by its id,
    since a patient whose days are both trained on and tested on tests nothing about other patients.
    """
    unknown = [name for name in channels if name not in OHIO_RANGES]
    if unknown or not channels:
        problem = f"channels {unknown or '()'} are not known"
        raise LaminaError("data.ohio-channels", problem, f"choose from {', '.join(OHIO_RANGES)}")
    found = []
    for path in sorted(_folder(folder, "ID-ws-training.xml").rglob("*-ws-*.xml")):
        patient = path.name.split("-ws-")[0]

        def windows(path: Path = path, patient: str = patient) -> Float32:
            file = read_ohio(path)
            if file.patient != patient:
                raise refuse_file(path, f"holds patient {file.patient!r}, and is named after another")
            cut = [run.windows(length, overlap) for run in ohio_signal(file, *channels).runs(length)]
            return np.concatenate(cut) if cut else np.empty((0, len(channels), length), dtype=np.float32)

        found.append(PatientRecord(patient=patient, part=part_of(patient), label=None, files=(path,), windows=windows))
    if not found:
        raise LaminaError("data.no-records", f"'{folder}' holds no *-ws-*.xml", "give the folder of OhioT1DM")
    return found


def ohio_corpus(
    folder: str, policy: Policy | None = None, *, part: str = "train", channels: list[str] | None = None,
    cache: str | None = None, length: int = WINDOW, **options: Any,
) -> Corpus:  # fmt: skip
    """Windows of 5-minute readings in [0, 1], patients as contributions: for autoencoders, there are no labels."""
    names = tuple(channels or ("glucose_level",))
    settings = {"data": "ohio", "channels": names, "length": length, "overlap": OVERLAP}
    made = prepare(ohio_records(folder, channels=names, length=length), settings=settings, cache=cache)
    return _corpus(made, part, policy=policy, labels=False, **options)


# ----------------------------------------------------------------------------------------------- MIMIC-III waveforms

STREAMS: dict[str, tuple[tuple[str, ...], float]] = {  # channels that will do, best first; samples per second
    "ECG": (("II", "I", "III", "V", "MCL1", "aVF", "aVR", "aVL"), 125.0),
    "ABP": (("ABP", "ART", "AOBP"), 62.5),
    "PPG": (("PLETH", "PPG"), 62.5),
}
_MIMIC_PATIENT = re.compile(r"(p\d{6})-\d{4}-\d\d-\d\d-\d\d-\d\d\.hea")


def mimic_records(
    folder: str | Path, *, stream: str = "ECG", missing: str = "skip", length: int = WINDOW, overlap: float = OVERLAP,
    most: int = 500,
) -> list[PatientRecord]:  # fmt: skip
    """Records pNNNNNN-YYYY-MM-DD-hh-mm.hea of the MIMIC-III Waveform Database Matched Subset, anywhere below the folder.

    stream   one stream, or several that are cut together: "ECG+ABP+PPG". Of each the first of its channels that a segment
             has, all at the rate of the fastest stream, so that a window holds the same moments of all
    missing  what becomes of a segment in which a stream is missing: "skip" it, or "zero", the mean of every scaled stream

    Every stretch without gaps in any stream is resampled, each stream gets mean 0 and deviation 1, and it is cut; of a record
    at most the first `most` windows, since records last for days.
    """
    streams = stream.split("+")
    if unknown := [name for name in streams if name not in STREAMS]:
        problem = f"stream is {stream!r}, and {unknown[0]!r} is not known"
        raise LaminaError("data.stream-not-known", problem, f"choose from {', '.join(STREAMS)}, or join them: ECG+ABP")
    if missing not in ("skip", "zero"):
        raise LaminaError("data.missing-not-known", f"missing is {missing!r}", "choose skip or zero")
    rate = max(STREAMS[name][1] for name in streams)

    def cut(path: Path) -> Iterator[Float32]:
        for segment in segments(path):
            # a channel that is listed and never recorded is missing
            there = {c.lower() for c, row in zip(segment.channels, segment.x, strict=True) if np.isfinite(row).any()}
            chosen = [next((c for c in STREAMS[name][0] if c.lower() in there), None) for name in streams]
            found = [channel for channel in chosen if channel is not None]
            if not found or (missing == "skip" and len(found) < len(streams)):
                continue
            rows = [i for i, channel in enumerate(chosen) if channel is not None]
            for run in segment.pick(*found).runs(int(np.ceil(length * segment.rate / rate))):
                part = run.resampled(rate).standardised().windows(length, overlap)
                whole = np.zeros((len(part), len(streams), length), dtype=np.float32)
                whole[:, rows] = part
                yield whole

    def windows(path: Path) -> Float32:
        made, total = [np.empty((0, len(streams), length), dtype=np.float32)], 0
        for part in cut(path):
            made.append(part[: most - total])
            total += len(made[-1])
            if total >= most:
                break
        return np.concatenate(made)

    found = []
    for path in sorted(_folder(folder, "records pNNNNNN-YYYY-MM-DD-hh-mm.hea").rglob("p*.hea")):
        if matched := _MIMIC_PATIENT.fullmatch(path.name):
            patient = matched[1]
            found.append(PatientRecord(
                patient=patient, part=part_of(patient), label=None, files=tuple(wfdb_files(path)),
                windows=lambda path=path: windows(path),  # type: ignore[misc]
            ))  # fmt: skip
    if not found:
        problem = f"'{folder}' holds no records pNNNNNN-YYYY-MM-DD-hh-mm.hea"
        raise LaminaError("data.no-records", problem, "give a folder of the MIMIC-III Waveform Database Matched Subset")
    return found


def mimic_corpus(
    folder: str, policy: Policy | None = None, *, part: str = "train", stream: str = "ECG", missing: str = "skip",
    cache: str | None = None, most: int = 500, **options: Any,
) -> Corpus:  # fmt: skip
    """Windows of one stream (ECG, ABP or PPG) or of several together, patients as contributions; no labels."""
    settings = {
        "data": "mimic",
        "stream": stream,
        "missing": missing,
        "length": WINDOW,
        "overlap": OVERLAP,
        "most": most,
    }
    made = prepare(mimic_records(folder, stream=stream, missing=missing, most=most), settings=settings, cache=cache)
    return _corpus(made, part, policy=policy, labels=False, **options)


# ----------------------------------------------------------------------------------------------------- other folders

_READERS: dict[str, Callable[[Path, float], Signal]] = {
    ".hea": lambda path, rate: read_wfdb(path),
    ".edf": lambda path, rate: read_edf(path),
    ".csv": read_csv_signal,
    ".npz": lambda path, rate: read_npz_signal(path),
}


def signal_records(
    folder: str | Path, *, rate: float, channels: tuple[str, ...] = (), band: tuple[float, float] | None = None,
    length: int = WINDOW, overlap: float = OVERLAP,
) -> list[PatientRecord]:  # fmt: skip
    """Files PATIENT/….hea, .edf, .csv or .npz: the folder of a file is its patient. No labels.

    rate      of the windows, samples per second; a CSV has no rate of its own and is taken to have this one
    channels  by name, the same of every file; default: all
    band      lowest and highest frequency that are kept, in Hz; default: all
    """
    found = []
    for path in sorted(_folder(folder, "one folder per patient").glob("*/*")):
        reader = _READERS.get(path.suffix.lower())
        if reader is None:
            continue

        def windows(path: Path = path, reader: Callable[[Path, float], Signal] = reader) -> Float32:
            record = reader(path, rate)
            record = record.pick(*channels) if channels else record
            cut = [np.empty((0, len(record.x), length), dtype=np.float32)]
            for run in record.runs(max(1, int(np.ceil(length * record.rate / rate)))):
                run = run.band_passed(*band) if band else run
                cut.append(run.resampled(rate).standardised().windows(length, overlap))
            return np.concatenate(cut)

        files = tuple(wfdb_files(path)) if path.suffix.lower() == ".hea" else (path,)
        patient = path.parent.name
        found.append(PatientRecord(patient=patient, part=part_of(patient), label=None, files=files, windows=windows))
    if not found:
        problem = f"'{folder}' holds no PATIENT/*.hea, .edf, .csv or .npz"
        raise LaminaError("data.no-records", problem, "put the files of each patient into a folder of their own")
    return found


def signal_corpus(
    folder: str, policy: Policy | None = None, *, rate: float, part: str = "train", channels: list[str] | None = None,
    band: list[float] | None = None, length: int = WINDOW, cache: str | None = None, **options: Any,
) -> Corpus:  # fmt: skip
    """Windows of any recordings, one folder per patient, patients as contributions; no labels."""
    names, limits = tuple(channels or ()), (band[0], band[1]) if band else None
    settings = {"data": "signals", "rate": rate, "channels": names, "band": limits, "length": length}
    settings["overlap"] = OVERLAP
    records = signal_records(folder, rate=rate, channels=names, band=limits, length=length)
    made = prepare(records, settings=settings, cache=cache)
    return _corpus(made, part, policy=policy, labels=False, **options)
