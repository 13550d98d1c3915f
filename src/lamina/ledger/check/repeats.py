"""What may be in a ledger once: a descriptor, an attestation, a subject, and a contributor's token.

Of each, the first eight bytes are kept as a column; at the end, equal ones are looked at in full. That is some thirty
bytes for a contribution, where a set of digests would take four hundred.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from lamina.ledger import leaf as leaves
from lamina.ledger.check.problem import Problem
from lamina.ledger.records import WORDS, Admitted
from lamina.ledger.store.base import Reader

if TYPE_CHECKING:
    from lamina.ledger.check.columns import Columns, Ints, Prefixes

_WORDS = {
    "descriptor": "the contribution", "attestation": "the attestation", "subject": "whoever it is about",
}  # fmt: skip


class _Column:
    """(leaf, prefix) of many leaves."""

    def __init__(self) -> None:
        self._seqs: list[Ints] = []
        self._prefixes: list[Prefixes] = []
        self._single: tuple[list[int], list[int]] = ([], [])

    def many(self, seqs: Ints, prefixes: Prefixes) -> None:
        self._seqs.append(seqs)
        self._prefixes.append(prefixes)

    def one(self, seq: int, digest: bytes) -> None:
        self._single[0].append(seq)
        self._single[1].append(int.from_bytes(digest[:8], "little"))

    def equal(self) -> list[list[int]]:
        """Groups of leaves with the same prefix, in order."""
        seqs = np.concatenate([*self._seqs, np.array(self._single[0], dtype=np.int64)])
        prefixes = np.concatenate([*self._prefixes, np.array(self._single[1], dtype=np.uint64)])
        order = np.argsort(prefixes)
        ranked = prefixes[order]
        twin = np.zeros(len(ranked) + 1, dtype=np.bool_)
        twin[1:-1] = ranked[1:] == ranked[:-1]
        starts = np.flatnonzero(~twin[:-1] & twin[1:])
        stops = np.flatnonzero(twin[:-1] & ~twin[1:]) + 1
        return [sorted(seqs[order[a:b]].tolist()) for a, b in zip(starts, stops, strict=True)]


class Repeats:
    """The columns of a ledger."""

    def __init__(self) -> None:
        self._columns = {name: _Column() for name in _WORDS}
        self._tokens: dict[bytes, int] = {}
        self._again: tuple[int, int] | None = None

    def columns(self, group: Columns) -> None:
        """Contributions of one layout."""
        self._columns["descriptor"].many(group.seq, group.descriptor)
        self._columns["attestation"].many(group.seq, group.attestation)
        if group.subject is not None:
            self._columns["subject"].many(group.seq, group.subject)

    def one(self, seq: int, record: Admitted) -> None:
        """A contribution by itself."""
        self._columns["descriptor"].one(seq, record.descriptor)
        self._columns["attestation"].one(seq, record.attestation)
        if record.subject is not None:
            self._columns["subject"].one(seq, record.subject)

    def token(self, seq: int, token: bytes) -> None:
        """(key, cti) of an attestation that was read."""
        before = self._tokens.setdefault(token, seq)
        if before != seq and self._again is None:
            self._again = (seq, before)

    def first(self, rows: Reader) -> Problem | None:
        """The first leaf that repeats another."""
        found = [
            Problem(
                seq,
                WORDS[Admitted],
                "verify.ledger-already-leaf-replayed",
                f"{_WORDS[name]} is in the ledger already, as leaf {before}: it was replayed",
            )
            for name, column in self._columns.items()
            for group in column.equal()
            for seq, before in _repeated(rows, group, name)
        ]
        if self._again is not None:
            seq, before = self._again
            found.append(
                Problem(
                    seq,
                    WORDS[Admitted],
                    "verify.attestation-token-leaf",
                    f"the attestation has the token of leaf {before}: it was replayed",
                )
            )
        return min(found, key=lambda each: each.index or 0, default=None)


def _repeated(rows: Reader, group: list[int], name: str) -> Iterator[tuple[int, int]]:
    seen: dict[bytes, int] = {}
    for seq in group:
        data = rows.leaf(seq)
        if data is None:
            continue
        value: bytes = getattr(leaves.decode(data).record, name)
        before = seen.setdefault(value, seq)
        if before != seq:
            yield seq, before


Token = Callable[[int, bytes], None]
