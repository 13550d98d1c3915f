"""Many contributions at once: the fields of their leaves as columns, without a Python object for each.

Leaves of contributions differ in a few places of known width and are the same everywhere else. So one of them is read
by the strict reader, and the others are compared with it byte by byte where they must be the same. What is not the same
is grouped again, or left to the strict reader: nothing is ever read here that `leaf.decode` would refuse.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lamina.admit.times import LAST
from lamina.errors import EncodingError
from lamina.ledger import leaf
from lamina.ledger.records import NUMBERS, Admitted, Terms
from lamina.ledger.records.admitted import UINT

Ints = NDArray[np.int64]
Prefixes = NDArray[np.uint64]  # the first 8 bytes of digests

_ROUNDS = 32  # different layouts in one block; the rest is read one by one
_FEWEST = 16  # fewer leaves than these are read one by one
_KIND = bytes((NUMBERS[Admitted],))
_LAYOUT = re.compile(
    rb"\xa5\x01" + re.escape(_KIND) + rb"\x02" + UINT + rb"\x03" + UINT + rb"\x04" + UINT + rb"\x05"
    rb"[\xa6-\xa8]\x01\x58\x20(.{32})\x02\x58\x20(.{32})\x03\x58\x20(.{32})\x04" + UINT + rb"\x05" + UINT + rb"\x06",
    re.DOTALL,
).match  # fmt: skip
_SEQ, _TIME, _EPOCH, _DESCRIPTOR, _ATTESTATION, _KEY, _BEGIN, _END = range(1, 9)  # groups
_NUMBERS = (_SEQ, _TIME, _EPOCH, _BEGIN, _END)
_TAIL = 35  # bytes of an anchor or a subject: key, head, digest


@dataclass(frozen=True, slots=True)
class Columns:
    """Contributions of one layout and one set of terms. `rows` are their places in the block, in order.

    `kids` are the different keys that signed.
    """

    rows: Ints
    seq: Ints
    time: Ints
    epoch: Ints
    not_before: Ints
    expires: Ints
    terms: Terms
    descriptor: Prefixes
    attestation: Prefixes
    subject: Prefixes | None
    key: Prefixes
    kids: frozenset[bytes]


def other_kinds(data: Sequence[bytes]) -> list[int]:
    """The places of leaves that do not begin like one of a contribution."""
    start = b"\xa5\x01" + _KIND
    return [at for at, one in enumerate(data) if one[:3] != start]


def columns(block: Sequence[bytes]) -> Iterator[Columns | Ints]:
    """The block in groups; of what fits in none, the places of the leaves to be read one by one."""
    left: list[Ints] = []
    lengths = np.fromiter(map(len, block), np.int64, len(block))
    for length in dict.fromkeys(lengths.tolist()):
        rows = np.flatnonzero(lengths == length)
        for _ in range(_ROUNDS):
            if len(rows) < _FEWEST:
                break
            found = _group(block, rows, length)
            if found is None:
                left.append(rows[:1])
                rows = rows[1:]
                continue
            made, rows = found
            yield made
        left.append(rows)
    if len(alone := np.sort(np.concatenate(left))) if left else 0:
        yield alone


def _group(block: Sequence[bytes], rows: Ints, length: int) -> tuple[Columns, Ints] | None:
    """All leaves that are laid out like the first, and the others; None if the first is nothing to compare with."""
    model = block[int(rows[0])]
    layout = _LAYOUT(model)
    try:
        first = leaf.decode(model).record
    except EncodingError:
        return None
    if layout is None or not isinstance(first, Admitted):
        return None
    spans = {group: layout.span(group) for group in range(1, 9)}
    anchored = length - _TAIL * (first.subject is not None)
    free = np.zeros(length, dtype=np.bool_)
    for group, (start, stop) in spans.items():
        free[start + (group in _NUMBERS and stop - start > 1) : stop] = True  # the width of a number stays
    if first.anchor is not None:
        free[anchored - 32 : anchored] = True
    if first.subject is not None:
        free[length - 32 :] = True
    table = np.frombuffer(b"".join([block[row] for row in rows.tolist()]), np.uint8).reshape(-1, length)
    same = (table[:, ~free] == table[0, ~free]).all(axis=1)
    numbers = {group: _number(table, *spans[group]) for group in _NUMBERS}
    for group in _NUMBERS:
        start, stop = spans[group]
        same &= numbers[group] >= _LEAST[stop - start]
        if stop - start == 1:
            same &= numbers[group] < 24
    same &= (numbers[_TIME] <= LAST) & (numbers[_BEGIN] < numbers[_END]) & (numbers[_END] <= LAST)
    kept, others = rows[same], rows[~same]
    start, stop = spans[_KEY]

    def prefixes(at: int) -> Prefixes:
        return np.ascontiguousarray(table[same, at : at + 8]).view("<u8").ravel()

    return Columns(
        rows=kept,
        seq=numbers[_SEQ][same],
        time=numbers[_TIME][same],
        epoch=numbers[_EPOCH][same],
        not_before=numbers[_BEGIN][same],
        expires=numbers[_END][same],
        terms=first.terms,
        descriptor=prefixes(spans[_DESCRIPTOR][0]),
        attestation=prefixes(spans[_ATTESTATION][0]),
        subject=None if first.subject is None else prefixes(length - 32),
        key=prefixes(start),
        kids=frozenset([block[row][start:stop] for row in kept.tolist()]),
    ), others


_LEAST = {1: 0, 2: 24, 3: 1 << 8, 5: 1 << 16, 9: 1 << 32}  # by width: smaller numbers are written shorter


def _number(table: NDArray[np.uint8], start: int, stop: int) -> Ints:
    """A column of CBOR numbers of one width; what is above 2^63 becomes negative, and with it out of range."""
    if stop - start == 1:
        return table[:, start].astype(np.int64)
    kind = {2: ">u1", 3: ">u2", 5: ">u4", 9: ">u8"}[stop - start]
    return np.ascontiguousarray(table[:, start + 1 : stop]).view(kind).ravel().astype(np.int64)
