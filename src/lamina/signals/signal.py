"""`Signal`: channels over time with their rate; read from EDF, CSV and npz, cut, filtered, resampled and normalised.

What each step uses of whose data: filters, resampling and windows work on one record; the z-score takes mean and standard
deviation of one lead of one record. Nothing here is a statistic of several patients (docs/signals.md).
"""

from __future__ import annotations

import io
import math
import os
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import signal as scipy_signal

from lamina.errors import LaminaError
from lamina.run.table_files import read_matrix
from lamina.validate import open_regular

Float32 = NDArray[np.float32]
MOST_BYTES = 1 << 30  # of a file that is read whole


class DataFileError(LaminaError):
    """A file of signals that is broken, too large, or not what it says."""


def refuse_file(path: str | Path, problem: str, remedy: str = "fetch it again, or leave it out") -> DataFileError:
    return DataFileError("data.file-broken", f"'{path}' {problem}", remedy)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Signal:
    """`x` (channels, samples) in `units`, `rate` samples per second; NaN where a sample is missing."""

    x: Float32
    rate: float
    channels: tuple[str, ...]
    units: tuple[str, ...] = ()

    def pick(self, *names: str) -> Signal:
        """These channels, in this order; capital and small letters are the same."""
        known = [name.lower() for name in self.channels]
        for name in names:
            if name.lower() not in known:
                problem = f"there is no channel {name!r} among {', '.join(self.channels)}"
                raise LaminaError("data.channel-missing", problem, "choose another, or leave the record out")
        at = [known.index(name.lower()) for name in names]
        units = tuple(self.units[i] for i in at) if self.units else ()
        return replace(self, x=self.x[at], channels=names, units=units)

    def resampled(self, rate: float) -> Signal:
        """At another rate, through a filter that keeps what the lower of both rates can show (scipy's resample_poly)."""
        ratio = Fraction(rate / self.rate).limit_denominator(1000)
        if ratio == 1:
            return replace(self, rate=rate)
        x = scipy_signal.resample_poly(self.x, ratio.numerator, ratio.denominator, axis=1, padtype="line")
        return replace(self, x=x.astype(np.float32), rate=rate)

    def band_passed(self, low: float = 0.5, high: float = 40.0, order: int = 4) -> Signal:
        """Butterworth of this order between two frequencies, forwards and backwards, so that no wave is moved."""
        if not 0 < low < high < self.rate / 2:
            problem = f"band {low} to {high} Hz does not fit {self.rate} samples per second"
            raise LaminaError("data.band-not-valid", problem, f"use 0 < low < high < {self.rate / 2}")
        filters = scipy_signal.butter(order, [low, high], btype="band", fs=self.rate, output="sos")
        pad = min(3 * (2 * len(filters) + 1), self.x.shape[1] - 1)
        return replace(self, x=scipy_signal.sosfiltfilt(filters, self.x, axis=1, padlen=pad).astype(np.float32))

    def standardised(self) -> Signal:
        """Every channel with mean 0 and standard deviation 1 over this record; one that never moves becomes 0."""
        x = self.x.astype(np.float64)
        away, spread = x - x.mean(axis=1, keepdims=True), x.std(axis=1, keepdims=True)
        return replace(self, x=np.where(spread > 1e-8, away / np.maximum(spread, 1e-8), 0.0).astype(np.float32))

    def runs(self, least: int) -> Iterator[Signal]:
        """The stretches of at least so many samples in which nothing is missing or infinite."""
        whole = np.isfinite(self.x).all(axis=0)
        edges = np.flatnonzero(np.diff(np.concatenate([[False], whole, [False]]).astype(np.int8)))
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            if stop - start >= least:
                yield replace(self, x=self.x[:, start:stop])

    def windows(self, length: int = 256, overlap: float = 0.5) -> Float32:
        """(n, channels, length): windows of which each begins (1 - overlap) · length after the one before."""
        if length < 1 or not 0 <= overlap < 1:
            problem = f"windows of {length} samples with overlap {overlap}"
            raise LaminaError("data.windows-not-valid", problem, "use length >= 1 and 0 <= overlap < 1")
        step = max(1, round(length * (1 - overlap)))
        if self.x.shape[1] < length:
            return np.empty((0, len(self.x), length), dtype=np.float32)
        cut = np.lib.stride_tricks.sliding_window_view(self.x, length, axis=1)[:, ::step]
        return np.ascontiguousarray(cut.transpose(1, 0, 2))


# ------------------------------------------------------------------------------------------------------ other files


def _read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            if os.fstat(file.fileno()).st_size > most:
                raise refuse_file(path, f"has more than {most} bytes", "cut it into smaller records")
            return file.read(most)
    except OSError as error:
        raise refuse_file(path, f"cannot be read: {error}") from None


def read_edf(path: str | Path, *channels: str) -> Signal:
    """An EDF or EDF+ file (Kemp et al., "A simple format for exchange of digitized polygraphic recordings", 1992).

    Channels of one rate only; name them if the file has several rates. Annotations are left out.
    """
    path, raw = Path(path), _read_bytes(Path(path))
    try:
        count, records, seconds = int(raw[252:256]), int(raw[236:244]), float(raw[244:252])
        if not (0 < count <= 512 and 0 < seconds < 1e6 and int(raw[184:192]) == 256 * (count + 1)):
            raise ValueError(f"{count} signals, records of {seconds} s")
        starts = np.cumsum([0, 16, 80, 8, 8, 8, 8, 8, 80, 8])

        def texts(field: int, size: int) -> list[str]:
            first = 256 + count * int(starts[field])
            return [raw[first + i * size : first + (i + 1) * size].decode("latin-1").strip() for i in range(count)]

        names, units, lengths = texts(0, 16), texts(2, 8), [int(text) for text in texts(8, 8)]
        low, high, least, most = ([float(text) for text in texts(field, 8)] for field in (3, 4, 5, 6))
        if min(lengths) < 0 or sum(lengths) < 1:
            raise ValueError("records without samples")
        body = np.frombuffer(raw, dtype="<i2", offset=256 * (count + 1), count=(len(raw) - 256 * (count + 1)) // 2)
        whole = len(body) // sum(lengths)
        if records > whole:
            raise ValueError(f"it says {records} records and holds {whole}: it is cut off")
        body = body[: (records if records > 0 else whole) * sum(lengths)].reshape(-1, sum(lengths))
        wanted = [i for i, name in enumerate(names) if "Annotations" not in name]
        if channels:
            wanted = [[name.lower() for name in names].index(name.lower()) for name in channels]
        if len({lengths[i] for i in wanted}) != 1:
            raise ValueError(f"channels of several rates: name some of {', '.join(names)} that have one")
        edges = np.cumsum([0, *lengths])
        rows = []
        for i in wanted:
            scale = (high[i] - low[i]) / (most[i] - least[i])
            rows.append((body[:, edges[i] : edges[i + 1]].ravel() - least[i]) * scale + low[i])
    except (ValueError, ZeroDivisionError, OverflowError) as error:
        raise refuse_file(path, f"is no EDF file that can be read: {error}") from None
    return Signal(
        x=np.array(rows, dtype=np.float32), rate=lengths[wanted[0]] / seconds,
        channels=tuple(names[i] for i in wanted), units=tuple(units[i] for i in wanted),
    )  # fmt: skip


def read_csv_signal(path: str | Path, rate: float) -> Signal:
    """A table of numbers, one row a sample and one column a channel, with or without a header."""
    header, table = read_matrix(path, _read_bytes(Path(path)))
    names = header or tuple(f"channel {i}" for i in range(table.shape[1]))
    return Signal(x=np.ascontiguousarray(table.T), rate=rate, channels=names)


def read_npz_signal(path: str | Path) -> Signal:
    """An archive with `x` (channels, samples), `rate`, and perhaps `channels`; nothing in it is executed."""
    content = io.BytesIO(_read_bytes(Path(path)))
    try:
        with zipfile.ZipFile(content) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > MOST_BYTES:
                raise ValueError(f"unpacked it has more than {MOST_BYTES} bytes")
        with np.load(content, allow_pickle=False) as arrays:
            x, rate = np.asarray(arrays["x"], dtype=np.float32), float(arrays["rate"])
            named = [str(name) for name in arrays["channels"]] if "channels" in arrays else None
        names = named or [f"channel {i}" for i in range(len(x))]
        if x.ndim != 2 or len(names) != len(x) or not 0 < rate < math.inf:
            raise ValueError(f"x has shape {x.shape}, rate is {rate}, channels are {names}")
    except Exception as error:  # a broken header makes numpy's reader fail in many ways
        raise refuse_file(path, f"is no npz file of a signal: {error}", "give x (channels, samples) and rate") from None
    return Signal(x=x, rate=rate, channels=tuple(names))
