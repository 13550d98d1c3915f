"""The Merkle tree built again from the leaves, pruned ones included, and every checkpoint of it.

Stored, trusted and known.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from lamina.admit.keys import PublicKey
from lamina.errors import EncodingError, LedgerError
from lamina.ledger import signed_checkpoint as notes
from lamina.ledger.governance_records import Aggregate, Header, KeyChange, KeyEvent, LeafSpan, Role
from lamina.ledger.merkle import HASH_SIZE, TILE_HEIGHT, TILE_WIDTH, Frontier, node_hash, tile_path
from lamina.ledger.receipt import TreeSignature
from lamina.ledger.records import ContributionRecord, Leaf
from lamina.ledger.schema import CLOCK_SKEW
from lamina.ledger.signed_checkpoint import LedgerCheckpoint, Note, NoteKey, NoteVerifier, WitnessKey, WitnessQuorum
from lamina.ledger.store.interface import StoredCheckpoint, StoreReader
from lamina.ledger.verify.replay_state import (
    CHECKPOINT,
    KNOWN_CHECKPOINT,
    TILE,
    Finding,
    KnownCheckpoint,
    ReplayedKeys,
    VerificationStopped,
    fail,
)

if TYPE_CHECKING:
    from lamina.ledger.verify.contribution_checks import ContributionColumns, Ints


@dataclass(slots=True)
class AggregateTally:
    """Of one aggregate: leaves of it that were there, by class, their latest times, and the digest over all hashes."""

    aggregate: Aggregate
    counts: Counter[str] = field(default_factory=Counter)
    latest: int = -1
    expires: int = -1
    earliest: int = -1  # of leaves that are gone: they are not older than this
    hashed: int = 0
    whole: bool = True
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)

    @property
    def present(self) -> int:
        return self.counts.total()

    @property
    def sealed(self) -> bytes | None:
        """The digest, if every hash was there."""
        return self.digest.digest() if self.whole and self.hashed == self.aggregate.count else None


class AggregateTallies:
    """The tallies of all aggregates of a ledger, by the leaf of each. Their spans are known before they are reached."""

    def __init__(self, aggregates: Mapping[int, Aggregate]) -> None:
        self._tallies = {seq: AggregateTally(aggregate) for seq, aggregate in aggregates.items()}
        spans = [(span.first, span.stop, seq) for seq, each in aggregates.items() for span in each.spans]
        self._spans = sorted(spans)
        self._first: Ints = np.array([first for first, _, _ in self._spans], dtype=np.int64)

    def of(self, seq: int) -> AggregateTally | None:
        """The tally of the aggregate in that leaf."""
        return self._tallies.get(seq)

    def covering(self, seq: int) -> tuple[LeafSpan, AggregateTally] | None:
        """The span that has a leaf in it."""
        at = int(np.searchsorted(self._first, seq, side="right")) - 1
        if at < 0 or not seq < self._spans[at][1]:
            return None
        first, stop, owner = self._spans[at]
        return LeafSpan(first=first, stop=stop), self._tallies[owner]

    def within(self, one: int, two: int) -> bool:
        """Whether one span has both leaves."""
        first, second = self.covering(one), self.covering(two)
        return first is not None and second is not None and first[0] == second[0]

    def columns(self, group: ContributionColumns) -> None:
        """Contributions that are there."""
        if not self._spans:
            return
        at = np.searchsorted(self._first, group.seq, side="right") - 1
        for place in np.unique(at[at >= 0]).tolist():
            first, stop, owner = self._spans[place]
            inside = (group.seq >= first) & (group.seq < stop)
            if inside.any():
                tally = self._tallies[owner]
                tally.counts[group.terms.cls] += int(inside.sum())
                tally.latest = max(tally.latest, int(group.time[inside].max()))
                tally.expires = max(tally.expires, int(group.expires[inside].max()))

    def one(self, seq: int, time: int, record: ContributionRecord) -> None:
        """A contribution that is there."""
        if self._spans and (found := self.covering(seq)) is not None:
            tally = found[1]
            tally.counts[record.terms.cls] += 1
            tally.latest, tally.expires = max(tally.latest, time), max(tally.expires, record.expires)

    def hashes(self, first: int, hashes: Sequence[bytes]) -> None:
        """Leaf hashes, in order, of leaves that are there or in a tile."""
        at, stop = first, first + len(hashes)
        while self._spans and at < stop:
            found = self.covering(at)
            if found is None:
                later = self._first[self._first > at]
                at = min(stop, int(later[0])) if len(later) else stop
                continue
            span, tally = found
            end = min(stop, span.stop)
            tally.digest.update(b"".join(hashes[at - first : end - first]))
            tally.hashed += end - at
            at = end

    def gone(self, first: int, stop: int, time: int) -> None:
        """Leaves [first, stop) of one span are not there; the leaf before them is of `time`."""
        found = self.covering(first)
        assert found is not None and stop <= found[0].stop
        found[1].earliest = max(found[1].earliest, time)

    def unknown(self, seq: int) -> None:
        """Not even the hash of this leaf is there."""
        found = self.covering(seq)
        assert found is not None
        found[1].whole = False


class ReplayedTree:
    """Grows by leaves that are there and, where they were summed up, by the hashes that were kept of them.

    Tiles are not evidence: every root that they lead to is compared with what was signed. But where a leaf and its tile
    differ, they say which leaf it is.
    """

    def __init__(self, rows: StoreReader, tallies: AggregateTallies) -> None:
        self._rows, self._tallies = rows, tallies
        self.frontier = Frontier()
        self._tile: tuple[int, bytes | None] = (-1, None)  # the last tile of level 0 that was read

    @property
    def size(self) -> int:
        return self.frontier.size

    def root(self) -> bytes:
        return self.frontier.root()

    def differs(self, hashes: Sequence[bytes]) -> int | None:
        """The place in `hashes`, of the leaves that come next, of the first that is not in its tile."""
        at, first = 0, self.size
        while at < len(hashes):
            index, inside = divmod(first + at, TILE_WIDTH)
            part = hashes[at : at + TILE_WIDTH - inside]
            tile = self._level0(index)
            if tile is None:
                fail(
                    first + at,
                    TILE,
                    "verify.not-leaves-under",
                    f"{tile_path(0, index)} is not there, and the leaves under it are",
                )
            found, made = tile[inside * HASH_SIZE : (inside + len(part)) * HASH_SIZE], b"".join(part)
            if found != made:
                same = (found[HASH_SIZE * k : HASH_SIZE * (k + 1)] == one for k, one in enumerate(part))
                return at + list(same).index(False)
            at += len(part)
        return None

    def extend(self, hashes: Sequence[bytes]) -> None:
        """Go on by leaves."""
        self._tallies.hashes(self.size, hashes)
        self.frontier.extend(hashes, self._check)

    def skip(self, stop: int) -> None:
        """Go on to `stop` by leaves that are gone, by what tiles have kept of them."""
        while self.size < stop:
            index, inside = divmod(self.size, TILE_WIDTH)
            tile = self._level0(index)
            if tile is not None:
                last = min(stop - index * TILE_WIDTH, TILE_WIDTH)
                part = [tile[HASH_SIZE * k : HASH_SIZE * (k + 1)] for k in range(inside, last)]
                if len(tile) < HASH_SIZE * last:
                    fail(
                        self.size,
                        TILE,
                        "verify.too-short-hashes",
                        f"{tile_path(0, index)} is too short: {len(tile) // HASH_SIZE} hashes of {last}",
                    )
                self.extend(part)
            elif inside or stop - self.size < TILE_WIDTH:
                fail(
                    self.size,
                    TILE,
                    "verify.not-tree-not-built",
                    f"{tile_path(0, index)} is not there, and the tree cannot be built without it",
                )
            else:
                self._add_block(index)

    def _add_block(self, index: int) -> None:
        """256 leaves of which only their common hash is left, in the tile above."""
        above, inside = divmod(index, TILE_WIDTH)
        tile = self._rows.tile(1, above) or b""
        hash = tile[HASH_SIZE * inside : HASH_SIZE * (inside + 1)]
        if len(hash) < HASH_SIZE:
            fail(
                self.size,
                TILE,
                "verify.not-tree-not",
                f"{tile_path(1, above)} is not there, and the tree cannot be built without it",
            )
        self._tallies.unknown(self.size)
        hashes, blocks, level = list(self.frontier.hashes), self.size // TILE_WIDTH, TILE_HEIGHT
        while True:
            if level % TILE_HEIGHT == 0:
                self._check(level, index >> level - TILE_HEIGHT, hash)
            if not blocks & 1:
                break
            hash, blocks, level = node_hash(hashes.pop(), hash), blocks >> 1, level + 1
        self.frontier = Frontier(self.size + TILE_WIDTH, [*hashes, hash])

    def _check(self, level: int, first: int, row: bytes) -> None:
        """Hashes of complete subtrees that were made, against the tile that holds them."""
        if level == 0 or level % TILE_HEIGHT:
            return
        for at in range(0, len(row), HASH_SIZE):
            index, inside = divmod(first + at // HASH_SIZE, TILE_WIDTH)
            tile = self._rows.tile(level // TILE_HEIGHT, index) or b""
            if tile[HASH_SIZE * inside : HASH_SIZE * (inside + 1)] != row[at : at + HASH_SIZE]:
                leaf = (first + at // HASH_SIZE) << level
                fail(
                    leaf,
                    TILE,
                    "verify.another-hash-leaves",
                    f"{tile_path(level // TILE_HEIGHT, index)} has another hash of leaves [{leaf}, {leaf + (1 << level)})",
                )

    def _level0(self, index: int) -> bytes | None:
        if self._tile[0] != index:
            self._tile = (index, self._rows.tile(0, index))
        return self._tile[1]


# Checkpoints: every one is of the tree that the leaves make, and signed by a key that was the ledger's.
#
# A key of the ledger counts if the header names it, or if a checkpoint that such a key signed covers the leaf that
# names it: otherwise whoever can write could make a key the ledger's own. The same of a key that was replaced or
# revoked and is named again. A key that was replaced signs up to the checkpoint that covers its replacement, and none
# after.


@dataclass(slots=True)
class _CheckpointSigner:
    """A key of the ledger, from the leaf that names it to the leaf that replaces or revokes it."""

    public: PublicKey
    named: int
    replaced: int | None = None
    revoked: bool = False
    counts: bool = False  # whether a key that counted has vouched for it

    @property
    def stays(self) -> bool:
        """Whether it needs nobody to vouch for it when it is named again: what had ended begins anew."""
        return self.counts and self.replaced is None and not self.revoked


class CheckpointChecks:
    """All checkpoints of a store, checked one after the other as the tree reaches them."""

    def __init__(self, header: Header, stored: Sequence[StoredCheckpoint], trusted: Sequence[PublicKey] | None) -> None:
        self._header, self._origin = header, header.origin
        self._stored = sorted(stored, key=lambda each: each.size)
        self._next = 0
        self.signed_size = 0  # size up to which everything is vouched for
        self.digests: dict[bytes, int] = {}  # of the checkpoints that were reached → size
        mine = {key.id: key.public for key in header.keys if key.role is Role.LEDGER}
        self._signers = {kid: _CheckpointSigner(public, 0, counts=True) for kid, public in mine.items()}
        self._trusted: dict[bytes, PublicKey] | None = None if trusted is None else {key.id: key for key in trusted}
        self.trusted = 0  # size up to which a trusted key vouches
        self.count = 0

    def sizes(self) -> list[int]:
        """Where the tree is to be looked at."""
        return [each.size for each in self._stored]

    def see(self, leaf: Leaf) -> None:
        """A key event may name, replace or revoke a key of the ledger."""
        event = leaf.record
        assert isinstance(event, KeyEvent)
        if event.key is not None and event.key.role is Role.LEDGER:
            known = self._signers.get(event.key.id)
            self._signers[event.key.id] = _CheckpointSigner(
                event.key.public, leaf.seq, counts=known is not None and known.stays
            )
        if event.target in self._signers:
            signer = self._signers[event.target]
            if event.change is KeyChange.REVOKE:
                signer.revoked = True
            elif signer.replaced is None:
                signer.replaced = leaf.seq

    def reached(self, tree_size: int, root: bytes, time: int, keys: ReplayedKeys) -> None:
        """The tree has so many leaves: check the checkpoints of that size. `time` is that of the last leaf."""
        while self._next < len(self._stored) and self._stored[self._next].size == tree_size:
            stored = self._stored[self._next]
            self._check(stored, root, time, keys)
            self._next += 1

    def _check(self, stored: StoredCheckpoint, root: bytes, time: int, keys: ReplayedKeys) -> None:
        try:
            head, note = notes.parse_checkpoint(stored.text)
        except EncodingError as error:
            fail(
                self.signed_size,
                CHECKPOINT,
                "verify.checkpoint-leaves-not",
                f"the checkpoint of {stored.size} leaves cannot be read: {error.problem}",
            )
        if head.origin != self._origin:
            fail(
                self.signed_size,
                CHECKPOINT,
                "verify.checkpoint-leaves-another",
                f"the checkpoint of {stored.size} leaves is of another ledger, {head.origin!r}",
            )
        if head.size != stored.size or head.extensions:
            fail(
                self.signed_size,
                CHECKPOINT,
                "verify.checkpoint-kept-leaves",
                f"the checkpoint that is kept for {stored.size} leaves is of {head.size}",
            )
        if head.root != root:
            fail(
                self.signed_size,
                CHECKPOINT,
                "verify.tree-leaves-another",
                f"the tree of {head.size} leaves has another root than was signed: one of the leaves "
                f"[{self.signed_size}, {head.size}) is not what it was",
            )
        self._seal(head, stored.seal, self._signature(head, note, time, keys))
        self._witnesses(head, note, time, keys)
        for other in self._signers.values():
            other.counts = other.counts or other.named < head.size
        self._trust(head, note)
        self.signed_size, self.count = head.size, self.count + 1
        self.digests[hashlib.sha256(note.text.encode()).digest()] = head.size

    def _signature(self, head: LedgerCheckpoint, note: Note, time: int, keys: ReplayedKeys) -> set[bytes]:
        """A key signed it that was the ledger's then; all that did."""
        states, why = keys.of_ledger(), "by no key of the ledger"
        found: set[bytes] = set()
        for kid, signer in self._signers.items():
            signed = note_signed_by(note, NoteKey(self._origin, signer.public))
            if signed is False:
                fail(
                    self.signed_size,
                    CHECKPOINT,
                    "verify.signature-checkpoint-leaves",
                    f"the signature of the checkpoint of {head.size} leaves by key "
                    f"{kid.hex()[:16]} is not one of its text",
                )
            if not signed:
                continue
            # What was replaced still signs the checkpoint that covers its replacement.
            last = signer.replaced is not None and self.signed_size <= signer.replaced
            wrong = states[kid].wrong(Role.LEDGER, time, states[kid].key.valid_from if last else time)
            if not signer.counts:
                why = f"by key {kid.hex()[:16]}, which no checkpoint of an earlier key vouches for"
            elif wrong is not None:
                why = f"by key {kid.hex()[:16]}, which {wrong}"
            else:
                found.add(kid)
        if not found:
            fail(
                self.signed_size,
                CHECKPOINT,
                "verify.checkpoint-leaves-signed",
                f"the checkpoint of {head.size} leaves is signed {why}",
            )
        return found

    def _seal(self, head: LedgerCheckpoint, seal: bytes, signers: set[bytes]) -> None:
        """The second signature, from which receipts are made: by one of those who signed the first."""
        made = TreeSignature(head.origin, head.size, head.root, seal[:32], seal[32:])
        if seal[:32] not in signers or not made.holds(self._signers[seal[:32]].public):
            fail(
                self.signed_size,
                CHECKPOINT,
                "verify.seal-checkpoint-leaves",
                f"the seal of the checkpoint of {head.size} leaves is not by a key of the ledger",
            )

    def _witnesses(self, head: LedgerCheckpoint, note: Note, time: int, keys: ReplayedKeys) -> None:
        """Cosignatures that are there must hold, and be of a time when its leaves were written."""
        known = [WitnessKey(key.name, key.public) for key in keys.witnesses()]
        try:
            times = WitnessQuorum(0, tuple(known)).cosigned(note)
        except LedgerError as error:
            fail(
                self.signed_size,
                CHECKPOINT,
                "verify.checkpoint-leaves",
                f"checkpoint of {head.size} leaves: {error.problem}",
            )
        early = [name for name, at in times.items() if at + CLOCK_SKEW < time]
        if early:
            fail(
                self.signed_size,
                CHECKPOINT,
                "verify.witness-saw-checkpoint",
                f"witness {early[0]!r} saw the checkpoint of {head.size} leaves before its last leaf by its own time "
                "was written",
            )
        if head.size == self._stored[-1].size and len(times) < self._header.witnesses:
            fail(
                self.signed_size,
                CHECKPOINT,
                "verify.witnesses-cosigned-checkpoint",
                f"{len(times)} witnesses cosigned the checkpoint of {head.size} leaves, the header asks for "
                f"{self._header.witnesses}",
            )

    def _trust(self, head: LedgerCheckpoint, note: Note) -> None:
        if self._trusted is None:
            return
        if any(note_signed_by(note, NoteKey(self._origin, key)) for key in self._trusted.values()):
            self.trusted = head.size
            for kid, other in self._signers.items():  # whom a trusted key vouches for
                if other.named and other.named < head.size:
                    self._trusted.setdefault(kid, other.public)

    # ----------------------------------------------------------------------------------- at the end

    def finish(self, size: int) -> None:
        """All leaves were read: a checkpoint that was not reached is of a longer ledger."""
        if self._next < len(self._stored):
            beyond = self._stored[self._next].size
            fail(
                size,
                CHECKPOINT,
                "verify.checkpoint-leaves-signed-rest",
                f"a checkpoint of {beyond} leaves was signed, {size} are there: the rest was cut off",
            )

    def accepted(self) -> Mapping[bytes, PublicKey]:
        """The keys under which a checkpoint that was seen elsewhere counts: all that counted.

        With trusted keys only these, unless one of them signed the tree: then it vouches for all that is in it, and the
        keys before it are.
        """
        if self._trusted is not None and not self.trusted:
            return self._trusted
        found = {kid: signer.public for kid, signer in self._signers.items() if signer.counts}
        return {**found, **(self._trusted or {})}


def note_signed_by(note: Note, key: NoteVerifier) -> bool | None:
    """Whether a key signed the note; None if it says nothing, False if what it says is wrong."""
    lines = [each.value for each in note.signatures if (each.name, each.key_id) == (key.name, key.id)]
    return all(key.holds(note.text, value) for value in lines) if lines else None


SIGNED_ANEW = "the ledger was signed anew, or this is another"


class KnownCheckpointChecks:
    """Compares the tree with what was seen, as it comes to those sizes."""

    def __init__(self, seen: Sequence[KnownCheckpoint], origin: str) -> None:
        self._seen, self._origin = list(seen), origin
        self._sizes: set[int] = set()
        self._agreed = 0  # leaves up to which the ledger is what was seen
        self._forked: Finding | None = None

    def __bool__(self) -> bool:
        return bool(self._seen)

    def sizes(self, signed: Collection[int], tallies: AggregateTallies, size: int) -> set[int]:
        """Where the tree is to be looked at. Amid leaves that are gone it can be known only where it was signed."""
        asked = {each.head.size for each in self._seen}
        hidden = {each for each in asked.difference(signed) if each and tallies.within(each - 1, each)}
        self._sizes = {each for each in asked - hidden if each <= size}
        return self._sizes

    def reached(self, size: int, root: bytes) -> None:
        """The tree has this root at this size."""
        for each in self._seen:
            if each.head.size != size or self._forked is not None:
                continue
            if each.head.root == root:
                self._agreed = size
            else:
                self._forked = Finding(
                    self._agreed,
                    KNOWN_CHECKPOINT,
                    "verify.another-root-ledger",
                    f"{_known_checkpoint_text(size)} has another root: the ledger was forked",
                )

    def finish(self, size: int, keys: Iterable[PublicKey]) -> None:
        """All leaves were read. `keys` are those whose signatures count."""
        accepted = [NoteKey(self._origin, key) for key in keys]
        for each in self._seen:
            seen = each.head.size
            if each.head.origin != self._origin:
                fail(
                    None,
                    KNOWN_CHECKPOINT,
                    "verify.another-ledger",
                    f"{_known_checkpoint_text(seen)} is of another ledger, {each.head.origin!r}",
                )
            if not any(note_signed_by(each.note, key) for key in accepted):
                fail(
                    None,
                    KNOWN_CHECKPOINT,
                    "verify.signed-no-key",
                    f"{_known_checkpoint_text(seen)} is signed by no key of this ledger: {SIGNED_ANEW}",
                )
            if seen > size:
                fail(
                    size,
                    KNOWN_CHECKPOINT,
                    "verify.leaves-seen-ledger",
                    f"{seen} leaves were seen, {size} are there: the ledger was rolled back",
                )
        if self._forked is not None:
            raise VerificationStopped(self._forked)
        for each in self._seen:
            if each.head.size not in self._sizes:
                fail(
                    self._agreed,
                    KNOWN_CHECKPOINT,
                    "verify.never-signed-ledger",
                    f"{_known_checkpoint_text(each.head.size)} was never signed here: the ledger was forked",
                )


def _known_checkpoint_text(size: int) -> str:
    return f"the checkpoint of {size} leaves that was seen"
