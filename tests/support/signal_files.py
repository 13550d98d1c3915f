"""Files of signals, written by hand: WFDB in all its formats, EDF, OhioT1DM."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from lamina.signals import LEADS
from lamina.signals.simulated_folders import ohio_xml


def encode(values: np.ndarray[Any, Any], form: int) -> bytes:
    """Samples (flat) in a format of WFDB, by the words of its manual."""
    v = [int(one) for one in values]
    if form == 16:
        return b"".join(one.to_bytes(2, "little", signed=True) for one in v)
    if form == 61:
        return b"".join(one.to_bytes(2, "big", signed=True) for one in v)
    if form == 24:
        return b"".join(one.to_bytes(3, "little", signed=True) for one in v)
    if form == 32:
        return b"".join(one.to_bytes(4, "little", signed=True) for one in v)
    if form == 80:
        return bytes(one + 128 for one in v)
    if form == 160:
        return b"".join((one + 32768).to_bytes(2, "little") for one in v)
    assert form == 212
    out = bytearray()
    for i in range(0, len(v), 2):
        first = v[i] & 0xFFF
        second = v[i + 1] & 0xFFF if i + 1 < len(v) else 0
        out += bytes([first & 0xFF, (first >> 8) | ((second >> 8) << 4), second & 0xFF])
    return bytes(out[: 3 * (len(v) // 2) + 2 * (len(v) % 2)])


def write_wfdb(
    path: Path, digital: np.ndarray[Any, Any], *, form: int = 16, rate: float = 100, gain: float = 1000.0, baseline: int = 0,
    channels: Sequence[str] = LEADS, unit: str = "mV",
) -> None:  # fmt: skip
    """(channels, samples) of whole numbers as PATH.hea and PATH.dat."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(f"{path.name}.dat").write_bytes(encode(digital.T.ravel(), form))
    lines = [f"{path.name} {len(digital)} {rate:g} {digital.shape[1]}"]
    for row, name in zip(digital, channels, strict=False):
        checksum = int(row.sum()) % 65536
        lines.append(f"{path.name}.dat {form} {gain:g}({baseline})/{unit} 16 0 {int(row[0])} {checksum} 0 {name}")
    path.with_name(f"{path.name}.hea").write_text("\n".join([*lines, "# a comment", ""]))


def write_ohio(
    folder: Path, glucose: np.ndarray[Any, Any], patient: str, kind: str = "training", late: float = 0.0
) -> Path:
    """Readings every 5 minutes, beginning `late` minutes after midnight."""
    folder.mkdir(parents=True, exist_ok=True)
    start = datetime(2021, 12, 7) + timedelta(minutes=late)
    events = [(start + timedelta(minutes=5 * i), float(value)) for i, value in enumerate(glucose)]
    path = folder / f"{patient}-ws-{kind}.xml"
    path.write_text(ohio_xml(patient, {"glucose_level": events, "meal": []}))
    return path


def write_edf(path: Path, x: np.ndarray[Any, Any], *, rate: int, channels: Sequence[str], seconds: int = 1) -> None:
    """(channels, samples) from -3.2768 to 3.2767 as EDF+ with an annotation channel."""
    digital = np.rint(x * 1e4).astype("<i2")
    records, count = digital.shape[1] // (rate * seconds), len(digital) + 1

    def column(values: Sequence[object], size: int) -> bytes:
        return b"".join(str(value).ljust(size)[:size].encode("latin-1") for value in values)

    names = [*channels, "EDF Annotations"]
    header = column(["0"], 8) + column(["X", "X"], 80) + column(["01.01.26", "00.00.00"], 8)
    header += (
        column([256 * (count + 1)], 8) + column(["EDF+C"], 44) + column([records, seconds], 8) + column([count], 4)
    )
    header += column(names, 16) + column([""] * count, 80) + column(["mV"] * count, 8)
    header += column([-3.2768] * count, 8) + column([3.2767] * count, 8) + column([-32768] * count, 8)
    header += column([32767] * count, 8) + column([""] * count, 80)
    header += column([rate * seconds] * len(digital) + [4], 8) + column([""] * count, 32)
    body = b""
    for r in range(records):
        body += digital[:, r * rate * seconds : (r + 1) * rate * seconds].tobytes() + b"\0" * 8
    path.write_bytes(header + body)
