"""`View`: a ledger as it is read: leaves, what belongs to them, and proofs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from threading import RLock
from types import TracebackType
from typing import Self

from lamina.ledger import leaf as leaves
from lamina.ledger import tree
from lamina.ledger.appending import reader
from lamina.ledger.checkpoint import Checkpoint, parse
from lamina.ledger.errors import LedgerError
from lamina.ledger.frontier import Frontier
from lamina.ledger.hashing import leaf_hash
from lamina.ledger.leaf import Leaf
from lamina.ledger.lookup import Tail, anchor_key, descriptor_key, ranges, subject_key
from lamina.ledger.parties import Parties
from lamina.ledger.proof_text import ProofText
from lamina.ledger.receipt import Seal
from lamina.ledger.records import NUMBERS, Header, KeyEvent, Record
from lamina.ledger.store import make_store
from lamina.ledger.store.base import Head, Reader, Signed, Store
from lamina.ledger.store.errors import Damaged, Pruned
from lamina.ledger.tiles import TileNodes, path

_KEYS = (descriptor_key, anchor_key, subject_key)


class View:
    """Reads what is committed, at the moment of each call. Several may be open on one store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._nodes = TileNodes(self._tile)
        self._tail, self._turn = Tail(), RLock()
        with store.read() as rows:
            if (head := rows.head()) is None:
                raise LedgerError(
                    "ledger.ledger-empty",
                    f"the ledger {store.name} is empty",
                    "create it: it has not even a header",
                )
            record = _decoded(0, rows.leaf(0)).record
            if not isinstance(record, Header):
                raise Damaged(
                    "ledger.ledger-not-begin",
                    f"the ledger {store.name} does not begin with a header",
                    "restore it from a copy",
                )
            self.header = record
            self._agree(rows, head)

    @classmethod
    def read_only(cls, where: str | os.PathLike[str]) -> View:
        """A ledger that is there, for who must not change it; also a copy that cannot be written."""
        store = make_store(where, readonly=True)
        try:
            return View(store)
        except BaseException:
            store.close()
            raise

    def close(self) -> None:
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def origin(self) -> str:
        return self.header.origin

    @property
    def name(self) -> str:
        """Where it is kept, for messages."""
        return self.store.name

    # ----------------------------------------------------------------------------------- where it stands

    @property
    def size(self) -> int:
        """Committed leaves."""
        with self.store.read() as rows:
            return head_of(rows).size

    @property
    def root(self) -> bytes:
        """The root over them."""
        return self.tree().root

    def tree(self) -> Checkpoint:
        """Size and root of what is committed, together."""
        with self.store.read() as rows:
            return self._tree(head_of(rows))

    def checkpoints(self) -> Iterator[str]:
        """Every checkpoint that was signed, by size, with its signatures."""
        with self.store.read() as rows:
            yield from (signed.text for signed in rows.checkpoints())

    def latest(self) -> str | None:
        """The newest checkpoint."""
        with self.store.read() as rows:
            signed = rows.checkpoint()
        return None if signed is None else signed.text

    def parties(self, before: int | None = None) -> Parties:
        """Whose signatures count, after the leaves before that one."""
        with self.store.read() as rows:
            return self._parties(rows, head_of(rows).size if before is None else before)

    # ----------------------------------------------------------------------------------- leaves

    def raw(self, seq: int) -> bytes:
        """The bytes of a leaf; Pruned if it was summed up, LedgerError if it was never there."""
        with self.store.read() as rows:
            return self._raw(rows, seq)

    def leaf(self, seq: int) -> Leaf:
        """A leaf, read."""
        return _decoded(seq, self.raw(seq))

    def raws(self, first: int = 0, stop: int | None = None) -> Iterator[tuple[int, bytes]]:
        """(seq, bytes) of the leaves in [first, stop) that are there, in order: one view, in bounded memory."""
        with self.store.read() as rows:
            yield from rows.leaves(first, head_of(rows).size if stop is None else stop)

    def leaves(self, first: int = 0, stop: int | None = None) -> Iterator[Leaf]:
        """The same, read."""
        for seq, data in self.raws(first, stop):
            yield _decoded(seq, data)

    def of_kind(self, kind: type[Record], first: int = 0, stop: int | None = None) -> Iterator[Leaf]:
        """Leaves of one kind, in order. Quick for every kind but contributions."""
        with self.store.read() as rows:
            last = head_of(rows).size if stop is None else stop
            for seq, data in rows.of_kind(NUMBERS[kind], first, last):
                yield _decoded(seq, data)

    # ----------------------------------------------------------------------------------- what belongs to them

    def evidence(self, seq: int) -> bytes | None:
        """The bytes whose digest stands in the leaf alone: of a contribution its attestation."""
        with self.store.read() as rows:
            return rows.evidence(seq)

    def evidences(self, first: int = 0, stop: int | None = None) -> Iterator[tuple[int, bytes]]:
        """(seq, bytes) of those in [first, stop) that are there, in order."""
        with self.store.read() as rows:
            yield from rows.evidences(first, head_of(rows).size if stop is None else stop)

    def blob(self, digest: bytes) -> bytes | None:
        """The bytes of a plan or manifest."""
        with self.store.read() as rows:
            return rows.blob(digest)

    def find(self, digest: bytes) -> list[int]:
        """Contributions by the digest of their descriptor, their content anchor, or their subject's tag."""
        return sorted({seq for _, seq in self._find([make(digest) for make in _KEYS])})

    def beginning(self, digits: str, most: int) -> list[int]:
        """Contributions whose descriptor digest or content anchor begins with these hex digits.

        All of them, if they have at most `most` digests; otherwise those of so many.
        """
        with self._turn, self.store.read() as rows:
            self._tail.follow(rows, head_of(rows))
            keys = [key for pair in ranges(digits) for key in self._tail.between(rows, *pair, most)]
            return sorted({seq for _, seq in self._tail.find(rows, keys[:most])})

    def known(self, descriptors: Sequence[bytes]) -> dict[bytes, int]:
        """Descriptor digest → leaf, of those that were admitted before."""
        keys = {descriptor_key(digest): digest for digest in descriptors}
        return {keys[key]: seq for key, seq in self._find(list(keys))}

    def seqs(self, keys: Sequence[bytes]) -> list[tuple[bytes, int]]:
        """(key, leaf) of every contribution that has one of these keys (lookup.py)."""
        return self._find(keys)

    def attempt(self, run: bytes, segment: int, generation: int) -> int | None:
        """The leaf of the epoch that closed an attempt."""
        with self.store.read() as rows:
            return rows.attempt(run, segment, generation)

    def withdrawn(self, seq: int) -> int | None:
        """The leaf in which a contribution was withdrawn."""
        with self.store.read() as rows:
            return rows.withdrawn(seq)

    def withdrawals(self) -> dict[int, int]:
        """Every contribution that was withdrawn → the leaf in which it was."""
        with self.store.read() as rows:
            return dict(rows.withdrawals())

    # ----------------------------------------------------------------------------------- proofs

    def prove(self, seq: int, size: int | None = None) -> list[bytes]:
        """The inclusion proof of a leaf in the tree of that size; of all committed leaves without a size."""
        return tree.inclusion(self._nodes, seq, self._within(size))

    def consistent(self, old: int, new: int | None = None) -> list[bytes]:
        """The proof that the tree of `new` leaves begins with the tree of `old`."""
        return tree.consistency(self._nodes, old, self._within(new))

    def root_at(self, size: int) -> bytes:
        """The root that the tree had at a size."""
        return tree.root_at(self._nodes, self._within(size))

    def receipt(self, seq: int) -> bytes:
        """The COSE receipt (RFC 9942) of a leaf under the newest checkpoint."""
        signed, data = self._covered(seq)
        head, _ = parse(signed.text)
        seal = Seal(self.origin, head.size, head.root, signed.seal[:32], signed.seal[32:])
        return seal.receipt(leaf_hash(data), seq, self.prove(seq, head.size))

    def proof_text(self, seq: int) -> str:
        """The same as C2SP tlog-proof text, with the cosignatures of witnesses."""
        signed, _ = self._covered(seq)
        return ProofText(seq, tuple(self.prove(seq, signed.size)), signed.text).encode()

    # ----------------------------------------------------------------------------------- inside

    def _find(self, keys: Sequence[bytes]) -> list[tuple[bytes, int]]:
        with self._turn, self.store.read() as rows:
            self._tail.follow(rows, head_of(rows))
            return self._tail.find(rows, keys)

    def _covered(self, seq: int) -> tuple[Signed, bytes]:
        with self.store.read() as rows:
            data, signed = self._raw(rows, seq), rows.checkpoint()
        if signed is None or signed.size <= seq:
            raise LedgerError(
                "ledger.no-checkpoint-covers",
                f"no checkpoint covers leaf {seq} yet",
                "sign one: ledger.checkpoint()",
            )
        return signed, data

    def _raw(self, rows: Reader, seq: int) -> bytes:
        data = rows.leaf(seq) if 0 <= seq < 2**63 else None
        if data is None:
            size = head_of(rows).size
            if 0 <= seq < size:
                raise Pruned(
                    "ledger.leaf-summed-up",
                    f"leaf {seq} was summed up in an aggregate",
                    "whoever kept a receipt can still prove it",
                )
            raise LedgerError(
                "ledger.no-leaf-ledger",
                f"there is no leaf {seq} in a ledger of {size}",
                "give an index below the size",
            )
        return data

    def _within(self, size: int | None) -> int:
        now = self.size
        if size is not None and size > now:
            raise LedgerError(
                "ledger.ledger-leaves-not",
                f"the ledger has {now} leaves, not {size}",
                "give a size that it has reached",
            )
        return now if size is None else size

    def _tile(self, level: int, index: int, width: int) -> bytes:
        with self.store.read() as rows:
            data = rows.tile(level, index)
        if data is None:
            raise Pruned(
                "ledger.went-leaves-under",
                f"{path(level, index, width)} went with the leaves under it",
                "ask for a checkpoint's size, or for a leaf that is still there",
            )
        return data

    def _tree(self, head: Head) -> Checkpoint:
        return Checkpoint(self.origin, head.size, Frontier.decode(head.frontier).root())

    def _parties(self, rows: Reader, before: int) -> Parties:
        found = Parties(self.header)
        for seq, data in rows.of_kind(NUMBERS[KeyEvent], 0, before):
            record = _decoded(seq, data).record
            assert isinstance(record, KeyEvent)
            found.apply(record)
        return found

    def _agree(self, rows: Reader, head: Head) -> None:
        """Head, last leaf and tiles say the same. What lies before is for `verify`."""
        frontier = Frontier.decode(head.frontier)
        nodes = TileNodes(reader(rows))
        last = _decoded(head.size - 1, rows.leaf(head.size - 1))
        if frontier.size != head.size or tree.frontier_at(nodes, head.size) != frontier:
            raise Damaged(
                "ledger.head-tree-ledger",
                f"head and tree of the ledger {self.name} differ",
                "restore it from a copy",
            )
        if last.seq != head.size - 1 or last.time != head.time or rows.leaf(head.size) is not None:
            raise Damaged(
                "ledger.head-leaves-ledger",
                f"head and leaves of the ledger {self.name} differ",
                "restore it from a copy",
            )


def head_of(rows: Reader) -> Head:
    """The head of a ledger that has one."""
    head = rows.head()
    if head is None:
        raise Damaged("ledger.ledger-lost-head", "the ledger has lost its head", "restore it from a copy")
    return head


def _decoded(seq: int, data: bytes | None) -> Leaf:
    if data is None:
        raise Damaged("ledger.leaf-not", f"leaf {seq} is not there", "restore the ledger from a copy")
    return leaves.decode(data)
