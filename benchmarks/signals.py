"""Reads the genuine records in LAMINA_DATA, and puts simulated figures beside real ones.

    LAMINA_DATA=… python benchmarks/signals.py [--json]

Every record must have the shape that its provider states; checksums of WFDB are compared while reading. Then: what the
simulators take per patient (processor time), and statistics of simulated and real glucose and ECG.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamina.signals import (
    CGMSimulator,
    ECGSimulator,
    PulseSimulator,
    ecg_windows,
    ohio_records,
    ohio_signal,
    prepare,
    read_ohio,
    read_wfdb,
)

SHAPES = {  # as PROVENANCE.txt of the samples states them
    "wfdb_samples/100": (2, 650_000, 360.0),
    "wfdb_samples/s0010_re": (15, 38_400, 1000.0),
    "wfdb_samples/03700181": (3, 75_000, 125.0),
    "wfdb_samples/v102s": (4, 75_000, 250.0),
    "wfdb_samples/3000003_0003": (2, 1_028, 125.0),
    "ptbxl_slice/full_length_example/00001_lr": (12, 1_000, 100.0),
}


def read_records(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (channels, samples, rate) in SHAPES.items():
        record = read_wfdb(folder / name)
        assert record.x.shape == (channels, samples) and record.rate == rate, name
        found[name] = {"channels": record.channels, "missing": int(np.isnan(record.x).sum())}
    lead = read_wfdb(folder / "ptbxl_slice/full_length_example/00001_lr")
    off = np.abs(lead.x[0] + lead.x[2] - lead.x[1]).max()
    assert off < 0.005, "I + III = II"
    found["PTB-XL example, windows"] = ecg_windows(lead).shape
    example = read_ohio(folder / "ohio_format" / "documented_example.xml")
    found["Ohio example"] = {"patient": example.patient, "events": {k: len(v) for k, v in example.events.items()}}
    patients = folder / "ohio_format" / "d1namo_as_ohio_xml"
    for path in sorted(patients.glob("*.xml")):
        signal = ohio_signal(read_ohio(path), "glucose_level")
        found[path.name] = {"readings": signal.x.shape[1], "missing": float(np.isnan(signal.x).mean())}
    parts = prepare(ohio_records(patients, length=64), settings={})
    found["D1NAMO windows of 64"] = {name: [len(part), len(set(part.patient))] for name, part in parts.items()}
    return found


def time_simulators() -> dict[str, float]:
    """Milliseconds of processor time per patient."""
    draws: dict[str, Callable[[], Any]] = {
        "ECG, three beats": lambda: ECGSimulator().draw(patients=640, seed=1),
        "ECG, 10 s": lambda: ECGSimulator().records(patients=640, seed=1),
        "ECG, ABP, PPG, 30 s": lambda: PulseSimulator().records(patients=640, seed=1),
        "glucose, 3 days": lambda: CGMSimulator().draw(patients=640, seed=1),
    }
    found = {}
    for name, draw in draws.items():
        start = time.process_time()
        draw()
        found[name] = 1e3 * (time.process_time() - start) / 640
    return found


def glucose_figures(x: NDArray[Any]) -> dict[str, float]:
    """Of days of 288 readings in mg/dL."""
    x = x.astype(np.float64)
    away = x - x.mean(1, keepdims=True)
    return {
        "mean": x.mean(),
        "variation within a day": (x.std(1) / x.mean(1)).mean(),
        "70 to 180": ((x >= 70) & (x <= 180)).mean(),
        "below 70": (x < 70).mean(),
        "above 250": (x > 250).mean(),
        "change in 5 minutes": np.abs(np.diff(x, axis=1)).mean(),
        "correlation after an hour": (away[:, 12:] * away[:, :-12]).mean() / np.square(away).mean(),
    }


def compare(folder: Path) -> dict[str, Any]:
    with np.load(folder / "cgm" / "weinstock_days.npz", allow_pickle=False) as arrays:
        real = arrays["x_mgdl"]
    simulated = CGMSimulator().draw(patients=300, seed=1).x[:, 0]
    with np.load(folder / "ptbxl_slice" / "ptbxl_slice.npz", allow_pickle=False) as arrays:
        strips, normal = arrays["leadII_uV"] / 1e3, arrays["superclass"][:, 0] == 1
    ours = ECGSimulator().records(patients=500, seed=1)

    def lead_figures(x: NDArray[Any]) -> dict[str, float]:
        level = x - np.median(x, axis=1, keepdims=True)
        return {
            "99 % of a record, mV": float(np.median(np.quantile(level, 0.99, axis=1))),
            "deviation": float(level.std()),
        }

    return {
        "glucose, Weinstock 2016": glucose_figures(real),
        "glucose, simulated": glucose_figures(simulated),
        "lead II of NORM, PTB-XL slice": lead_figures(strips[normal]),
        "lead II of NORM, simulated": lead_figures(ours.x[ours.label == 0, 1]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if "LAMINA_DATA" not in os.environ:
        raise SystemExit(
            "LAMINA_DATA is not set: name the folder that holds wfdb_samples/, ptbxl_slice/, ohio_format/, cgm/"
        )
    folder = Path(os.environ["LAMINA_DATA"])
    result = {"records": read_records(folder), "ms per patient": time_simulators(), "figures": compare(folder)}
    if options.json:
        print(json.dumps(result, indent=1, default=float))
        return
    for title, table in result.items():
        print(f"\n{title}")
        for name, value in table.items():
            shown = {k: round(float(v), 3) for k, v in value.items()} if title == "figures" else value
            print(f"  {name}: {shown:.3f}" if isinstance(shown, float) else f"  {name}: {shown}")


if __name__ == "__main__":
    main()
