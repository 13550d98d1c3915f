"""Folders of simulated patients in the layout of PTB-XL and OhioT1DM, to try a program before the data are there."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lamina import validate
from lamina.errors import LaminaError
from lamina.signals.cgm_simulator import HIGHEST, LOWEST, STEP, CGMSimulator
from lamina.signals.ecg_simulator import CLASSES, ECGSimulator
from lamina.signals.heart_model import LEADS

STATEMENTS = dict(zip(CLASSES, ("NORM", "AMI", "NDT", "CLBBB", "LVH"), strict=True))  # one SCP code of each superclass
FIRST_DAY = datetime(2021, 12, 7)


def write_simulated_ptbxl(
    folder: str | Path, *, patients: int, records: int = 1, seed: int = 0, rate: int = 100
) -> None:
    """Simulated patients in the layout of PTB-XL, with folds 1 to 10 in turn; `records` are copies of one recording.

    They are sicker than those of `ECGSimulator()`: a model that learned from these has something left to learn.
    """
    validate.one_of(LaminaError, "data.ptbxl-rate", (100, 500), rate=rate)
    validate.whole(LaminaError, "data.records-not-a-count", records=records)
    folder = _new_folder(folder)
    drawn = ECGSimulator(rate=rate, severity=(0.6, 1.0)).records(patients=patients, seed=seed)
    rows = []
    for n in range(patients * records):
        i, number, resolution = n // records, n + 1, "lr" if rate == 100 else "hr"
        name = f"records{rate}/{number // 1000:02d}000/{number:05d}_{resolution}"
        _write_record(folder / name, np.clip(np.rint(1000 * drawn.x[i]), -32000, 32000).astype("<i2"), rate)
        codes = {"SR": 0.0, STATEMENTS[CLASSES[int(drawn.label[i])]]: 100.0}
        rows.append({
            "ecg_id": number, "patient_id": f"{1000 + i}.0", "age": "50.0", "scp_codes": repr(codes),
            "strat_fold": 1 + i % 10, "filename_lr": name if rate == 100 else "", "filename_hr": name if rate == 500 else "",
        })  # fmt: skip
    with (folder / "ptbxl_database.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)
    lines = [",description,diagnostic,form,rhythm,diagnostic_class", "SR,sinus rhythm,,,1.0,"]
    lines += [f"{code},simulated,1.0,,,{name}" for name, code in STATEMENTS.items()]
    (folder / "scp_statements.csv").write_text("\n".join([*lines, ""]), encoding="utf-8")


def _write_record(path: Path, digital: NDArray[np.int16], rate: int) -> None:
    """(leads, samples) in microvolts as PATH.hea and PATH.dat, in format 16 of WFDB."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(f"{path.name}.dat").write_bytes(digital.T.tobytes())
    lines = [f"{path.name} {len(digital)} {rate} {digital.shape[1]}"]
    for row, lead in zip(digital, LEADS, strict=True):
        lines.append(f"{path.name}.dat 16 1000(0)/mV 16 0 {row[0]} {int(row.sum(dtype=np.int64)) % 65536} 0 {lead}")
    path.with_name(f"{path.name}.hea").write_text("\n".join([*lines, ""]), encoding="ascii")


def write_simulated_ohio(
    folder: str | Path, *, patients: int, days: int = 6, seed: int = 0, factor: float = 1.0
) -> None:
    """Simulated patients in the layout of OhioT1DM, one file of glucose readings each.

    factor  times all readings: other than 1, the patients differ from those that a model learned on first
    """
    validate.positive(LaminaError, "data.factor-not-positive", factor=factor)
    folder = _new_folder(folder)
    drawn = CGMSimulator(days=days).draw(patients=patients, seed=seed).x.reshape(patients, -1)
    for number, readings in enumerate(np.clip(np.rint(factor * drawn), LOWEST, HIGHEST), 1000):
        at = [FIRST_DAY + timedelta(minutes=STEP * i) for i in range(len(readings))]
        text = ohio_xml(str(number), {"glucose_level": list(zip(at, readings, strict=True))})
        (folder / f"{number}-ws-training.xml").write_text(text, encoding="utf-8")


def ohio_xml(patient: str, series: Mapping[str, Sequence[tuple[datetime, float]]]) -> str:
    """A file of OhioT1DM: by series, when what was read."""
    parts = []
    for name, events in series.items():
        inner = "".join(f'<event ts="{at:%d-%m-%Y %H:%M:%S}" value="{value:g}"/>' for at, value in events)
        parts.append(f"<{name}>{inner}</{name}>")
    return (
        f'<?xml version="1.0"?>\n<patient id="{patient}" weight="99" insulin_type="Novalog">{"".join(parts)}</patient>'
    )


def _new_folder(folder: str | Path) -> Path:
    """Refused where files lie already: a reader would take simulated patients among real ones for real."""
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        problem = f"'{folder}' exists and is not an empty folder"
        raise LaminaError("data.folder-not-empty", problem, "name a folder that does not exist yet")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
