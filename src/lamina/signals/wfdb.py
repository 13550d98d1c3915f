"""Reads WFDB records (PhysioNet): headers, signal formats 16, 24, 32, 61, 80, 160 and 212, several files and segments.

Format: the manual pages header(5) and signal(5) of the WFDB library. Every length comes from the header and is held
against the file before anything is read; checksums are compared. What is not known is refused by name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lamina.signals.signal import Signal, refuse_file
from lamina.validate import open_regular, read_text_file

MOST_VALUES = 1 << 28  # channels · samples that are read at once: 1 GiB in float32
MOST_SIGNALS, MOST_SEGMENTS = 256, 1 << 20
INVALID = {16: -(1 << 15), 24: -(1 << 23), 32: -(1 << 31), 61: -(1 << 15), 80: -128, 160: -(1 << 15), 212: -2048}
BYTES = {16: 2.0, 24: 3.0, 32: 4.0, 61: 2.0, 80: 1.0, 160: 2.0, 212: 1.5}  # of a sample
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_FORMAT = re.compile(r"(\d+)(?:x(\d+))?(?::(\d+))?(?:\+(\d+))?")
_GAIN = re.compile(r"([-+0-9.eE]+)(?:\(([-+]?\d+)\))?(?:/(\S+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalLine:
    """One signal of a header."""

    file: str
    form: int
    per_frame: int
    skew: int
    offset: int
    gain: float
    baseline: int
    unit: str
    checksum: int | None
    channel: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WFDBHeader:
    """A header; `samples` is 0 where it does not say. `segments` are (name, samples), of a record of several."""

    path: Path
    rate: float
    samples: int
    signals: tuple[SignalLine, ...]
    segments: tuple[tuple[str, int], ...]

    @property
    def channels(self) -> tuple[str, ...]:
        return tuple(line.channel for line in self.signals)


def read_header(path: str | Path) -> WFDBHeader:
    """The header NAME.hea; the suffix may be left out."""
    path = Path(path) if str(path).endswith(".hea") else Path(f"{path}.hea")
    try:
        text = read_text_file(path)
        lines = [line.split() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
        name, signals, *rest = lines[0]
        record, _, segments = name.partition("/")
        rate = float(rest[0].split("/")[0].split("(")[0]) if rest else 250.0
        samples = int(rest[1]) if len(rest) > 1 else 0
        count, several = int(signals), int(segments) if segments else 0
        if not (_NAME.fullmatch(record) and 0 <= count <= MOST_SIGNALS and 0 <= several <= MOST_SEGMENTS):
            raise ValueError(f"record {record!r} with {count} signals and {several} segments")
        if not (0 < rate < 1e6 and 0 <= samples < 1 << 40):
            raise ValueError(f"{samples} samples, {rate} a second")
        if several:
            found = tuple((words[0], int(words[1])) for words in lines[1 : 1 + several])
            if len(found) != several or any(n < 0 or not (s == "~" or _NAME.fullmatch(s)) for s, n in found):
                raise ValueError("its segments are not those that it counts")
            return WFDBHeader(path=path, rate=rate, samples=samples, signals=(), segments=found)
        made = tuple(_signal_line(words, i) for i, words in enumerate(lines[1 : 1 + count]))
        if len(made) != count:
            raise ValueError(f"it counts {count} signals and has {len(made)}")
        return WFDBHeader(path=path, rate=rate, samples=samples, signals=made, segments=())
    except FileNotFoundError:
        raise refuse_file(path, "is not there: a record has a header (.hea) beside its data") from None
    except (OSError, UnicodeDecodeError, ValueError, IndexError, OverflowError) as error:
        raise refuse_file(path, f"is no WFDB header: {error}") from None


def _signal_line(words: list[str], number: int) -> SignalLine:
    form = _FORMAT.fullmatch(words[1])
    gain = _GAIN.fullmatch(words[2]) if len(words) > 2 else None
    if form is None or (len(words) > 2 and gain is None) or not (words[0] == "~" or _NAME.fullmatch(words[0])):
        raise ValueError(f"signal {number} is {' '.join(words[:3])!r}")
    numbers = [int(word) for word in words[3:8]]
    zero = numbers[1] if len(numbers) > 1 else 0
    slope = float(gain[1]) if gain else 200.0
    if not 1 <= int(form[2] or 1) <= 1024 or not abs(slope) < 1e12:
        raise ValueError(f"signal {number} has {form[2]} samples in a frame and gain {slope}")
    return SignalLine(
        file=words[0], form=int(form[1]), per_frame=int(form[2] or 1), skew=int(form[3] or 0), offset=int(form[4] or 0),
        gain=slope or 200.0, baseline=int(gain[2]) if gain and gain[2] else zero, unit=(gain and gain[3]) or "mV",
        checksum=numbers[3] if len(numbers) > 3 else None, channel=" ".join(words[8:]) or f"signal {number}",
    )  # fmt: skip


def read_wfdb(path: str | Path, *, most: int = MOST_VALUES) -> Signal:
    """A record in physical units, (channels, samples); missing samples and gaps between segments are NaN."""
    header = read_header(path)
    if not header.segments:
        return _read_single(header, most)
    channels: dict[str, str] = {}
    parts: list[tuple[int, Signal | None]] = []
    total = sum(n for _, n in header.segments)
    for name, samples in header.segments:
        segment = None if name == "~" else read_header(header.path.with_name(name))
        if segment is not None:
            channels |= dict(zip(segment.channels, (line.unit for line in segment.signals), strict=True))
            if segment.rate != header.rate or (samples and segment.samples not in (0, samples)):
                raise refuse_file(header.path, f"segment {name!r} has another rate or length than it says")
        if total * max(1, len(channels)) > most:
            raise refuse_file(header.path, f"has more than {most} values; read it by `segments`")
        parts.append((samples, None if segment is None or not samples else _read_single(segment, most)))
    x = np.full((len(channels), total), np.nan, dtype=np.float32)
    names, start = list(channels), 0
    for samples, part in parts:
        if part is not None:
            x[[names.index(name) for name in part.channels], start : start + samples] = part.x
        start += samples
    return Signal(x=x, rate=header.rate, channels=tuple(names), units=tuple(channels.values()))


def segments(path: str | Path, *, most: int = MOST_VALUES) -> Iterator[Signal]:
    """The segments of a record one after the other, those without signals left out: for records of days."""
    header = read_header(path)
    for name, samples in header.segments:
        if name != "~" and samples:
            yield _read_single(read_header(header.path.with_name(name)), most)
    if not header.segments:
        yield _read_single(header, most)


def wfdb_files(path: str | Path) -> list[Path]:
    """The files that a record is read from, headers first."""
    header = read_header(path)
    found = [
        header.path,
        *dict.fromkeys(header.path.with_name(line.file) for line in header.signals if line.file != "~"),
    ]
    for name, _ in header.segments:
        if name != "~":
            found += wfdb_files(header.path.with_name(name))
    return found


def _read_single(header: WFDBHeader, most: int) -> Signal:
    if header.segments:
        raise refuse_file(header.path, "is a segment and has segments itself")
    samples = header.samples or _samples_by_size(header)
    if samples * max(1, sum(line.per_frame for line in header.signals)) > most:
        problem = f"has {samples} samples of {len(header.signals)} signals: more than {most} values"
        raise refuse_file(header.path, problem)
    if samples and header.signals and all(line.file == "~" for line in header.signals):
        raise refuse_file(header.path, f"has {samples} samples and no file that holds them")
    rows: dict[int, NDArray[np.float32]] = {}
    for file in dict.fromkeys(line.file for line in header.signals if line.file != "~"):
        own = {i: line for i, line in enumerate(header.signals) if line.file == file}
        first = next(iter(own.values()))
        if len({(line.form, line.offset) for line in own.values()}) > 1 or first.form not in BYTES:
            known = ", ".join(map(str, BYTES))
            raise refuse_file(header.path, f"has signals of format {first.form} in {file!r}; known: {known}")
        frame, at = sum(line.per_frame for line in own.values()), 0
        frames = _decode(header.path.with_name(file), first.form, first.offset, samples * frame).reshape(samples, frame)
        for i, line in own.items():
            rows[i] = _physical(header.path, frames[:, at : at + line.per_frame], line)
            at += line.per_frame
    x = np.full((len(header.signals), samples), np.nan, dtype=np.float32)
    for i, row in rows.items():
        x[i] = row
    return Signal(x=x, rate=header.rate, channels=header.channels, units=tuple(line.unit for line in header.signals))


def _samples_by_size(header: WFDBHeader) -> int:
    """How many samples the first file holds, for a header that does not say."""
    lines = [line for line in header.signals if line.file == header.signals[0].file and line.file != "~"]
    if not lines or lines[0].form not in BYTES:
        raise refuse_file(header.path, "does not say how many samples it has")
    try:
        size = header.path.with_name(lines[0].file).stat().st_size - lines[0].offset
    except OSError as error:
        raise refuse_file(header.path.with_name(lines[0].file), f"cannot be read: {error}") from None
    return int(max(0, size) / BYTES[lines[0].form]) // sum(line.per_frame for line in lines)


def _physical(path: Path, own: NDArray[np.int32], line: SignalLine) -> NDArray[np.float32]:
    """(frames, per_frame) -> (frames,): checked, missing samples NaN, the mean of a frame, in physical units."""
    if line.checksum is not None and (int(own.sum(dtype=np.int64)) - line.checksum) % (1 << 16):
        problem = f"signal {line.channel!r} has not the checksum {line.checksum} that it says: it is damaged"
        raise refuse_file(path, problem)
    value = own.astype(np.float64)
    value[own == INVALID[line.form]] = np.nan
    mean: NDArray[np.float64] = (value.mean(axis=1) - line.baseline) / line.gain
    if line.skew:  # this signal was written `skew` frames late
        mean = np.concatenate([mean[line.skew :], np.full(min(line.skew, len(mean)), np.nan)])
    return mean.astype(np.float32)


def _decode(path: Path, form: int, offset: int, count: int) -> NDArray[np.int32]:
    """`count` samples of a file, which must hold them."""
    wanted = 3 * (count // 2) + 2 * (count % 2) if form == 212 else int(BYTES[form]) * count
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            there = max(0, os.fstat(file.fileno()).st_size - offset)
            file.seek(offset)
            raw = np.frombuffer(file.read(min(wanted, there)), dtype=np.uint8)
    except OSError as error:
        raise refuse_file(path, f"cannot be read: {error}") from None
    if len(raw) < wanted:
        problem = f"has {len(raw)} bytes after byte {offset}, and its header needs {wanted}: it is cut off"
        raise refuse_file(path, problem)
    if form == 212:
        three = np.concatenate([raw, np.zeros(-len(raw) % 3, dtype=np.uint8)]).astype(np.int32).reshape(-1, 3)
        first, second = three[:, 0] | (three[:, 1] & 15) << 8, three[:, 2] | (three[:, 1] & 240) << 4
        return _signed(np.stack([first, second], axis=1).ravel()[:count], 12)
    if form == 24:
        three = raw.astype(np.int32).reshape(-1, 3)
        return _signed(three[:, 0] | three[:, 1] << 8 | three[:, 2] << 16, 24)
    if form in (80, 160):
        return raw.view("<u2" if form == 160 else "u1").astype(np.int32) - (32768 if form == 160 else 128)
    return raw.view({16: "<i2", 32: "<i4", 61: ">i2"}[form]).astype(np.int32)


def _signed(value: NDArray[np.int32], bits: int) -> NDArray[np.int32]:
    """Numbers of so many bits in two's complement."""
    return np.where(value >> (bits - 1), value - (1 << bits), value).astype(np.int32)
