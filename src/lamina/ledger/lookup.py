"""Under which keys contributions are found again, and what may be in a ledger only once.

Keys are digests, so each belongs at a random place of an index: a thousand new ones would touch a thousand pages, for
every batch. Hence the index of the store grows in large steps, sorted, and the keys of the leaves after the last step
are kept in memory by whoever needs them, from the leaves themselves. That is a bounded number, however long the ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from lamina.ledger import leaf
from lamina.ledger.records import NUMBERS, Admitted
from lamina.ledger.store.base import Head, Reader, Writer

KEY = 16  # bytes: enough that nobody finds two with the same, and a small index
STEP = 65_536  # leaves after which the index grows
_ADMITTED = NUMBERS[Admitted]
_ANCHOR = ord("a")


def descriptor_key(digest: bytes) -> bytes:
    """A contribution, by the digest of its descriptor: once, until it has expired and is pruned."""
    return b"d" + digest[: KEY - 1]


def anchor_key(digest: bytes) -> bytes:
    """A contribution, by its content anchor: any number of times."""
    return b"a" + digest[: KEY - 1]


def subject_key(tag: bytes) -> bytes:
    """A contribution, by the keyed tag of who it is about: once, for good."""
    return b"s" + tag[: KEY - 1]


def keys_of(record: Admitted) -> list[bytes]:
    """All keys of a contribution."""
    keys = [descriptor_key(record.descriptor)]
    if record.anchor is not None:
        keys.append(anchor_key(record.anchor))
    if record.subject is not None:
        keys.append(subject_key(record.subject))
    return keys


def ranges(digits: str) -> list[tuple[bytes, bytes]]:
    """First and last key of descriptors, and of anchors, whose digest begins with these hex digits."""
    width = 2 * (KEY - 1)
    first, last = (bytes.fromhex(digits[:width].ljust(width, rest)) for rest in "0f")
    return [(make(first), make(last)) for make in (descriptor_key, anchor_key)]


def lasting(key: bytes) -> bool:
    """Whether a key stays when its leaf is pruned."""
    return key[:1] == b"s"


class Tail:
    """The keys of leaves [start, stop), which are not in the store's index yet."""

    def __init__(self) -> None:
        self.start = self.stop = 0
        self._once: dict[bytes, int] = {}
        self._anchors: dict[bytes, list[int]] = {}

    def follow(self, rows: Reader, head: Head) -> None:
        """Make it the tail of what `rows` sees: read what others appended, forget what others indexed."""
        if head.indexed != self.start or head.size < self.stop:
            self.start = self.stop = head.indexed
            self._once.clear()
            self._anchors.clear()
        if self.stop < head.size:
            pairs = []
            for seq, data in rows.of_kind(_ADMITTED, self.stop, head.size):
                record = leaf.decode(data).record
                assert isinstance(record, Admitted)
                pairs += [(key, seq) for key in keys_of(record)]
            self.grow(pairs, head.size)

    def grow(self, pairs: Sequence[tuple[bytes, int]], stop: int) -> None:
        """Leaves up to `stop` are committed, with these keys."""
        anchors = [pair for pair in pairs if pair[0][0] == _ANCHOR]
        self._once.update([pair for pair in pairs if pair[0][0] != _ANCHOR] if anchors else pairs)
        for key, seq in anchors:
            self._anchors.setdefault(key, []).append(seq)
        self.stop = stop

    def find(self, rows: Reader, keys: Sequence[bytes]) -> list[tuple[bytes, int]]:
        """(key, seq) of every leaf that has one of these keys, indexed or not."""
        found = [(key, self._once[key]) for key in keys if key in self._once]
        found += [(key, seq) for key in keys if key in self._anchors for seq in self._anchors[key]]
        return [*found, *rows.find(keys)] if self.start else found

    def between(self, rows: Reader, first: bytes, last: bytes, most: int) -> list[bytes]:
        """The keys in [first, last], indexed or not, in order and each once; at most so many."""
        found = {key for keys in (self._once, self._anchors) for key in keys if first <= key <= last}
        for _ in range(most if self.start else 0):
            if not (there := rows.find_between(first, last, 1)):
                break
            found.add(there[0][0])  # an anchor may be that of any number of leaves: on from the key after it
            first = (int.from_bytes(there[0][0], "big") + 1).to_bytes(KEY, "big")
        return sorted(found)[:most]

    def index(self, rows: Writer, more: Sequence[tuple[bytes, int]]) -> None:
        """Write everything, and `more`, into the index of the store, in order."""
        anchors = [(key, seq) for key, seqs in self._anchors.items() for seq in seqs]
        rows.add_keys(sorted([*self._once.items(), *anchors, *more], key=itemgetter(0)))
