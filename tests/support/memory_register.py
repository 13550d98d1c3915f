"""A register in memory, for tests of the gate: the ledger's is tested against the same calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from lamina.admit.register import (
    ADMITTED_MEANWHILE,
    REASON_OF_STATUS,
    EntryContext,
    RefusedRows,
    RegisterStatus,
    class_full,
)
from lamina.admit.rows import Admitted


class MemoryRegister:
    """A register that lives as long as its process, 500 bytes an entry. It knows of no withdrawals."""

    def __init__(self) -> None:
        self._tokens: set[bytes] = set()
        self._descriptors: dict[bytes, bytes] = {}  # → attestation
        self._tags: set[bytes] = set()
        self._members: Counter[str] = Counter()

    def look(self, entries: Sequence[Admitted]) -> Sequence[RegisterStatus]:
        return [self._known(entry) for entry in entries]

    def members(self, cls: str) -> int:
        return self._members[cls]

    def enter(self, entries: Iterable[Admitted], beside: EntryContext) -> RefusedRows:
        lost: RefusedRows = {}
        for entry in entries:
            known = self._known(entry)
            if known in REASON_OF_STATUS:
                lost[entry.row] = REASON_OF_STATUS[known], ADMITTED_MEANWHILE
            elif known is RegisterStatus.NEW:
                places = beside.places[entry.cls]
                if places is not None and self._members[entry.cls] >= places:
                    lost[entry.row] = class_full(entry.cls, places)
                else:
                    self._add(entry)
        return lost

    def _known(self, entry: Admitted) -> RegisterStatus:
        if (by := self._descriptors.get(entry.descriptor)) is not None:
            return RegisterStatus.SAME if by == entry.attestation else RegisterStatus.REPLAYED
        if entry.kid + entry.cti in self._tokens:
            return RegisterStatus.REPLAYED
        return RegisterStatus.REPRESENTED if entry.tag is not None and entry.tag in self._tags else RegisterStatus.NEW

    def _add(self, entry: Admitted) -> None:
        self._tokens.add(entry.kid + entry.cti)
        self._descriptors[entry.descriptor] = entry.attestation
        if entry.tag is not None:
            self._tags.add(entry.tag)
        self._members[entry.cls] += 1
