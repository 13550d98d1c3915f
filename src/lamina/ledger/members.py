"""`Members`: how many contributions of each class stand. Read once from the leaves, then only what is new."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from lamina.ledger import leaf
from lamina.ledger.check.columns import Columns, columns
from lamina.ledger.records import NUMBERS, Admitted
from lamina.ledger.store.base import Reader

_AT_ONCE = 4096

Ints = NDArray[np.int64]


class Members:
    """The contributions of the first `size` leaves: leaf and end of each, by class.

    ever  how many of each class were admitted: never less than those who stand
    """

    def __init__(self) -> None:
        self.size = 0
        self.ever: Counter[str] = Counter()
        self._parts: dict[str, list[tuple[Ints, Ints]]] = {}  # leaf, expires

    def follow(self, rows: Reader, size: int) -> None:
        """Go on to the first `size` leaves of what `rows` sees."""
        for block in _blocks(rows.of_kind(NUMBERS[Admitted], self.size, size)):
            for group in columns(block):
                if isinstance(group, Columns):
                    self._add(group.terms.cls, group.seq, group.expires)
                    continue
                for at in group.tolist():
                    found = leaf.decode(block[at])
                    assert isinstance(found.record, Admitted)
                    self._add(found.record.terms.cls, [found.seq], [found.record.expires])
        self.size = size

    def standing(self, cls: str, now: int, withdrawn: Ints) -> int:
        """Those of a class who are neither expired at `now` nor among the leaves that were `withdrawn`."""
        parts = self._parts.get(cls)
        if parts is None:
            return 0
        seqs, ends = (np.concatenate(column) for column in zip(*parts, strict=True))
        self._parts[cls] = [(seqs, ends)]
        return int(np.count_nonzero((ends > now) & ~np.isin(seqs, withdrawn)))

    def _add(self, cls: str, seqs: Sequence[int] | Ints, expires: Sequence[int] | Ints) -> None:
        part = np.asarray(seqs, dtype=np.int64), np.asarray(expires, dtype=np.int64)
        self._parts.setdefault(cls, []).append(part)
        self.ever[cls] += len(part[0])


def _blocks(rows: Iterator[tuple[int, bytes]]) -> Iterator[list[bytes]]:
    while block := [data for _, data in islice(rows, _AT_ONCE)]:
        yield block
