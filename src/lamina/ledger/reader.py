"""Read a ledger: leaves, evidence and proofs; find a contribution by digest or leaf number."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self

import numpy as np

from lamina.account.charges import Account
from lamina.errors import LedgerDamaged, LedgerError, NotVerified
from lamina.ledger import merkle
from lamina.ledger.checked_leaves import CheckedLeaves, contribution_digests
from lamina.ledger.contribution_columns import descriptor_key
from lamina.ledger.governance_records import Header
from lamina.ledger.key_state import GovernanceState
from lamina.ledger.merkle import Frontier, TileNodes, leaf_hash
from lamina.ledger.receipt import TlogProof, make_receipt
from lamina.ledger.records import LEAF_STARTS, ContributionRecord, KeptLeaf, Leaf, Record, decode_leaf
from lamina.ledger.signed_checkpoint import LedgerCheckpoint, TreeSignature, parse_checkpoint
from lamina.ledger.store.rows import LedgerHead, Store, StoredCheckpoint, StoredLeaf, StoreReader, head_of, tile_reader
from lamina.ledger.store.sqlite import make_store


class LedgerReader:
    """Reads what is committed, at the moment of each call. Several may be open on one store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._nodes = TileNodes(self._tile)
        with store.read() as rows:
            if (head := rows.head()) is None:
                problem = f"the ledger {store.name} is empty"
                raise LedgerError("ledger.empty", problem, "create it again: it has no header")
            first = rows.leaf(0)
            record = _decode_stored_leaf(0, first).record
            if not isinstance(record, Header):
                problem = f"the ledger {store.name} has no header"
                raise LedgerDamaged("ledger.no-header", problem, "restore it from a copy")
            self.header = record
            self.header_hash = leaf_hash(_there(0, first).leaf)  # the identity of the ledger
            self._check_head(rows, head)
        self._checked = CheckedLeaves(self.header)

    @classmethod
    def read_only(cls, where: str | os.PathLike[str]) -> LedgerReader:
        """A ledger that is there, for who must not change it; also a copy that cannot be written."""
        return cls._over(make_store(where, readonly=True))

    @staticmethod
    def _over(store: Store) -> LedgerReader:
        try:
            return LedgerReader(store)
        except BaseException:
            store.close()
            raise

    def another(self) -> LedgerReader:
        """The same ledger through a connection of its own: whoever reads for long keeps nobody waiting."""
        return self._over(self.store.another())

    def reopen(self) -> None:
        """Open the file or database at this place again; raise LedgerError if it is another ledger, or none."""
        self.store.close()  # before opening: connections of one process share SQLite's state of a file
        fresh = self.another()
        if fresh.header_hash != self.header_hash:
            fresh.close()
            problem = f"the ledger at {self.name} was replaced by another one, with origin {fresh.origin!r}"
            raise NotVerified("ledger.replaced-by-other", problem, "put the ledger back in its place")
        self.store, self._nodes = fresh.store, TileNodes(self._tile)

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

    def tree(self) -> LedgerCheckpoint:
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

    def checked(self, rows: StoreReader) -> CheckedLeaves:
        """Return all leaves of this view, checked under the newest checkpoint. Every decision is derived from them."""
        self._checked.follow(rows, head_of(rows))
        return self._checked

    def parties(self, before: int | None = None) -> GovernanceState:
        """Whose signatures count, after the leaves before that one."""
        with self.store.read() as rows:
            if before is None:
                return self._checked.follow(rows, head_of(rows))
            return self.checked(rows).governance_at(rows, before)

    # ----------------------------------------------------------------------------------- leaves

    def raw(self, seq: int) -> StoredLeaf:
        """The bytes of a leaf, and of its body unless that is pruned; LedgerError if it was never there."""
        with self.store.read() as rows:
            return self._raw(rows, seq)

    def leaf(self, seq: int) -> Leaf:
        """A leaf, read. Of a contribution whose body is pruned, its record is what the leaf itself says."""
        return _decode_stored_leaf(seq, self.raw(seq))

    def checked_leaf(self, seq: int) -> Leaf:
        """Return a leaf that the newest checkpoint covers or that was checked since; refuse any other."""
        with self.store.read() as rows:
            self._raw(rows, seq)
            return self.checked(rows).decoded(rows, [seq])[0]

    def raw_leaves(self, first: int = 0, stop: int | None = None) -> Iterator[tuple[int, StoredLeaf]]:
        """(seq, bytes) of the leaves in [first, stop), in order: one view, in bounded memory."""
        with self.store.read() as rows:
            yield from rows.leaves(first, head_of(rows).size if stop is None else stop)

    def leaves(self, first: int = 0, stop: int | None = None) -> Iterator[Leaf]:
        """The same, read."""
        for seq, data in self.raw_leaves(first, stop):
            yield _decode_stored_leaf(seq, data)

    def of_kind(self, kind: type[Record], first: int = 0, stop: int | None = None) -> Iterator[Leaf]:
        """Yield the leaves of one kind in order, as the leaves state it. Fast for every kind but contributions."""
        with self.store.read() as rows:
            last = head_of(rows).size if stop is None else stop
            if kind is not ContributionRecord:
                yield from self.checked(rows).records(rows, kind, first, last)
                return
            for seq, data in rows.beginning(LEAF_STARTS[kind], first, last):
                yield _decode_stored_leaf(seq, data)

    def unchecked(self, kind: type[Record], first: int = 0, stop: int | None = None) -> Iterator[Leaf]:
        """Yield the leaves of one kind, in order, without checking them against a checkpoint: for display only."""
        with self.store.read() as rows:
            for seq, data in rows.beginning(LEAF_STARTS[kind], first, head_of(rows).size if stop is None else stop):
                yield _decode_stored_leaf(seq, data)

    # ----------------------------------------------------------------------------------- what belongs to them

    def evidence(self, seq: int) -> bytes | None:
        """The bytes whose digest stands in the leaf alone: of a contribution its attestation."""
        with self.store.read() as rows:
            return rows.evidence(seq)

    def blob(self, digest: bytes) -> bytes | None:
        """Return the bytes of a plan or manifest; None if the store has none with this SHA-256."""
        with self.store.read() as rows:
            data = rows.blob(digest)
        return data if data is not None and hashlib.sha256(data).digest() == digest else None

    def find(self, digest: bytes) -> list[int]:
        """Return the contribution of this descriptor; if there is none, those of this content anchor or subject tag."""
        with self.store.read() as rows:
            return [leaf.seq for leaf in self.checked(rows).find_digest(rows, digest)]

    def contribution(self, descriptor: bytes) -> Leaf | None:
        """Return the contribution with this descriptor digest; None if there is none."""
        with self.store.read() as rows:
            return self.checked(rows).contribution(rows, descriptor)

    def known(self, descriptors: Sequence[bytes]) -> dict[bytes, int]:
        """Return descriptor digest → leaf of the contributions among these that were admitted."""
        keys = {descriptor_key(digest): digest for digest in descriptors}
        with self.store.read() as rows:
            return {keys[key]: seq for key, seq in self.checked(rows).find(rows, list(keys))}

    def bound_counts(self, before: int) -> dict[Account, int]:
        """By signed bound, how many contributions the first `before` leaves have."""
        found = Counter[Account]()
        with self.store.read() as rows:
            for group in self.checked(rows).contributions(rows):
                made = group.contribution if isinstance(group, KeptLeaf) else group
                if made is not None:
                    found[made.bound] += int(np.sum(np.less(group.seq, before)))
        return {bound: count for bound, count in found.items() if count}

    def withdrawn(self, seq: int) -> int | None:
        """The leaf in which a contribution was withdrawn."""
        return self.withdrawals().get(seq)

    def withdrawals(self) -> Mapping[int, int]:
        """Every contribution that was withdrawn → the leaf in which it was."""
        with self.store.read() as rows:
            return self.checked(rows).withdrawals(rows)

    # ----------------------------------------------------------------------------------- proofs

    def prove(self, seq: int, size: int | None = None) -> list[bytes]:
        """The inclusion proof of a leaf in the tree of that size; of all committed leaves without a size."""
        return merkle.inclusion_proof(self._nodes, seq, self._within(size))

    def consistent(self, old: int, new: int | None = None) -> list[bytes]:
        """The proof that the tree of `new` leaves begins with the tree of `old`."""
        return merkle.consistency_proof(self._nodes, old, self._within(new))

    def root_at(self, size: int) -> bytes:
        """The root that the tree had at a size."""
        return merkle.root_at(self._nodes, self._within(size))

    def node(self, level: int, index: int) -> bytes:
        """The hash of the complete subtree over leaves [index·2^level, (index+1)·2^level)."""
        return self._nodes.node(level, index)

    def frontier(self, size: int) -> Frontier:
        """The right edge of the tree of so many leaves, from its tiles."""
        return merkle.frontier_at(self._nodes, self._within(size))

    def receipt(self, seq: int, size: int | None = None) -> bytes:
        """Return the COSE receipt (RFC 9942) of a leaf under the checkpoint of that size; by default the newest."""
        signed, data = self._covered(seq, size)
        head, _ = parse_checkpoint(signed.text)
        seal = TreeSignature(self.origin, head.size, head.root, signed.seal[:32], signed.seal[32:])
        return make_receipt(seal, leaf_hash(data.leaf), seq, self.prove(seq, head.size))

    def proof_text(self, seq: int) -> str:
        """The same as C2SP tlog-proof text, with the cosignatures of witnesses."""
        signed, _ = self._covered(seq)
        return TlogProof(seq, tuple(self.prove(seq, signed.size)), signed.text).encode()

    # ----------------------------------------------------------------------------------- inside

    def _covered(self, seq: int, size: int | None = None) -> tuple[StoredCheckpoint, StoredLeaf]:
        with self.store.read() as rows:
            data, signed = self._raw(rows, seq), rows.checkpoint(size)
        if signed is None or signed.size <= seq:
            problem = f"no checkpoint covers leaf {seq} yet"
            raise LedgerError("ledger.not-covered", problem, "sign one: ledger.checkpoint()")
        return signed, data

    def _raw(self, rows: StoreReader, seq: int) -> StoredLeaf:
        size = head_of(rows).size
        if not 0 <= seq < size:
            raise LedgerError("ledger.leaf-unknown", f"the ledger has {size} leaves, there is no leaf {seq}")
        return _there(seq, rows.leaf(seq))

    def _within(self, size: int | None) -> int:
        now = self.size
        if size is not None and size > now:
            raise LedgerError("ledger.size-not-reached", f"the ledger has {now} leaves, not {size}")
        return now if size is None else size

    def _tile(self, level: int, index: int, width: int) -> bytes:
        with self.store.read() as rows:
            return tile_reader(rows)(level, index, width)

    def _tree(self, head: LedgerHead) -> LedgerCheckpoint:
        return LedgerCheckpoint(self.origin, head.size, Frontier.decode(head.frontier).root())

    def _check_head(self, rows: StoreReader, head: LedgerHead) -> None:
        """Head, last leaf and tiles say the same. What lies before is for `verify`."""
        frontier = Frontier.decode(head.frontier)
        nodes = TileNodes(tile_reader(rows))
        last = _decode_stored_leaf(head.size - 1, rows.leaf(head.size - 1))
        if frontier.size != head.size or merkle.frontier_at(nodes, head.size) != frontier:
            problem = f"head and tree of the ledger {self.name} differ"
            raise LedgerDamaged("ledger.head-inconsistent", problem, "restore it from a copy")
        if last.seq != head.size - 1 or last.time != head.time or rows.leaf(head.size) is not None:
            problem = f"head and leaves of the ledger {self.name} differ"
            raise LedgerDamaged("ledger.head-inconsistent", problem, "restore it from a copy")


def _there(seq: int, data: StoredLeaf | None) -> StoredLeaf:
    if data is None:
        raise LedgerDamaged("ledger.leaf-missing", f"leaf {seq} is missing", "restore the ledger from a copy")
    return data


def _decode_stored_leaf(seq: int, data: StoredLeaf | None) -> Leaf:
    return decode_leaf(_there(seq, data))


MIN_DIGITS = 8  # hex digits of a digest that are enough, if nobody else's begins with them
_HEX_DIGITS = re.compile(r"[0-9a-f]{8,64}")
_DIGEST_DIGITS = 64
_MAX_LEAF_DIGITS = 18  # digits of a leaf
_MAX_LISTED = 5  # of several that a name could be


def find_contributions(ledger: LedgerReader, name: str) -> list[Leaf]:
    """Return the contributions with a descriptor digest, content anchor or subject tag, or the contribution in a leaf.

    `name` is 64 hex digits; of a descriptor or anchor the first 8 or more, if they are those of one digest alone; or
    the number of the leaf.
    """
    number = _leaf_number(ledger, name)
    return _find_by_digits(ledger, name) if number is None else [_contribution(ledger.checked_leaf(number))]


def find_leaf(ledger: LedgerReader, name: str) -> int:
    """One leaf: of any kind by its number, a contribution as `find` does."""
    number = _leaf_number(ledger, name)
    if number is not None:
        return number
    found = _find_by_digits(ledger, name)
    if len(found) > 1:
        listed = ", ".join(str(leaf.seq) for leaf in found[:_MAX_LISTED]) + (", …" if len(found) > _MAX_LISTED else "")
        problem = f"{len(found)} contributions have the digest {name.lower()[:16]}…: leaves {listed}"
        raise LedgerError("ledger.digest-ambiguous", problem, "give the number of one leaf")
    return found[0].seq


def _leaf_number(ledger: LedgerReader, name: str) -> int | None:
    """The leaf that a name is the number of. Long numbers may be the first digits of a digest, and never mean both."""
    if not (name.isascii() and name.isdecimal() and len(name) <= _MAX_LEAF_DIGITS):
        return None
    number = int(name)
    if len(name) < MIN_DIGITS:
        return number
    if name[0] == "0" or number >= ledger.size:
        return None
    if found := _with_digits(ledger, name):
        raise _ambiguous_name(name, [f"leaf {number}", *_list_matches(found, name)])
    return number


def _find_by_digits(ledger: LedgerReader, name: str) -> list[Leaf]:
    digits = name.lower()
    if _HEX_DIGITS.fullmatch(digits) is None:
        problem = f"{name[:80]!r} is not the name of a contribution"
        enough = f"{_DIGEST_DIGITS} hex digits, or the first {MIN_DIGITS} or more"
        remedy = f"give its folder, its leaf, or its digest ({enough})"
        raise LedgerError("ledger.name-not-understood", problem, remedy)
    found = _with_digits(ledger, digits)
    if not found:
        problem = f"the ledger {ledger.name} has no contribution {digits[:16]}{'…' if len(digits) > 16 else ''}"
        remedy = "check the digest; a pruned contribution is found by that of its descriptor alone"
        raise LedgerError("ledger.contribution-unknown", problem, remedy)
    if len(listed := _list_matches(found, digits)) > 1:
        raise _ambiguous_name(digits, listed)
    return found


def _with_digits(ledger: LedgerReader, digits: str) -> list[Leaf]:
    """Return the contributions with this digest, or with a descriptor or anchor that begins with these digits."""
    with ledger.store.read() as rows:
        leaves = ledger.checked(rows)
        if len(digits) == _DIGEST_DIGITS:
            return leaves.find_digest(rows, bytes.fromhex(digits))
        return [
            each for each in leaves.find_prefix(rows, digits, _MAX_LISTED + 1) if _digests_with_prefix(each, digits)
        ]


def _digests_with_prefix(leaf: Leaf, digits: str) -> list[str]:
    """Its descriptor or anchor, if one begins so. A subject's tag is given whole: it is about a person."""
    return [each.hex() for each in contribution_digests(leaf)[:2] if each is not None and each.hex().startswith(digits)]


def _list_matches(found: list[Leaf], digits: str) -> list[str]:
    """The digests that begin so, each with a leaf."""
    known: dict[str, Leaf] = {}
    for leaf in found:
        for digest in _digests_with_prefix(leaf, digits):
            known.setdefault(digest, leaf)
    return [f"{digest} (leaf {leaf.seq})" for digest, leaf in known.items()]


def _ambiguous_name(name: str, listed: list[str]) -> LedgerError:
    more = ", …" if len(listed) > _MAX_LISTED else ""
    problem = (
        f"{name!r} could be {'more than ' if more else ''}{min(len(listed), _MAX_LISTED)} things: "
        f"{', '.join(listed[:_MAX_LISTED])}{more}"
    )
    return LedgerError("ledger.name-ambiguous", problem, "give more digits")


def _contribution(leaf: Leaf) -> Leaf:
    if leaf.kind is not ContributionRecord:
        problem = f"leaf {leaf.seq} is not a contribution"
        raise LedgerError("ledger.not-a-contribution", problem, "list them: lamina ledger show --kind contribution")
    return leaf
