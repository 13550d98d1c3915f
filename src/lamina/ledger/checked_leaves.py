"""Leaves that this process hashed or wrote itself, the facts derived from them, and how many of them may be signed."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, islice
from operator import attrgetter, itemgetter
from threading import RLock
from typing import Any, NamedTuple

from lamina.admit.attestation import Attestation, window_rules
from lamina.errors import AdmissionError, EncodingError, LedgerDamaged, LedgerError
from lamina.ledger.append_rules import Place, check_record
from lamina.ledger.contribution_columns import (
    ContributionColumns,
    ContributionKeys,
    anchor_key,
    descriptor_key,
    index_key_ranges,
    kept_contributions,
    read_columns,
    subject_key,
)
from lamina.ledger.governance_records import (
    GOVERNING_KINDS,
    Aggregate,
    GoverningRecord,
    Header,
    KeyEvents,
    LeafSpan,
    PolicyChange,
    Role,
    Withdrawal,
)
from lamina.ledger.key_state import GovernanceState, KeyState, PolicyInForce, Violation, checkpoint_roots, leaf_bytes
from lamina.ledger.merkle import (
    HASH_SIZE,
    TILE_WIDTH,
    Frontier,
    TileNodes,
    consistency_proof,
    grow_tiles,
    leaf_hash,
    leaf_hashes,
    verify_consistency,
)
from lamina.ledger.open_rows import OpenHead
from lamina.ledger.records import (
    CONTRIBUTION_STARTS,
    KIND_NAMES,
    KIND_NUMBERS,
    LAST_SEQ,
    ContributionRecord,
    ContributionTerms,
    Epoch,
    KeptContribution,
    KeptLeaf,
    Leaf,
    Record,
    decode_kept,
    decode_leaf,
    kind_name,
)
from lamina.ledger.signed_checkpoint import parse_checkpoint
from lamina.ledger.store.rows import (
    LeafBlock,
    LeafRow,
    LedgerHead,
    Store,
    StoredCheckpoint,
    StoredLeaf,
    StoreReader,
    StoreWriter,
    head_of,
    tile_reader,
)
from lamina.sign.keys import PrivateKey, format_utc
from lamina.sign.notes import NoteKey

_LEAVES_AT_ONCE = 4096
_NOT_BEFORE, _EXPIRES = attrgetter("not_before"), attrgetter("expires")


class WriterMark(NamedTuple):
    """Who has a key of the ledger wrote, or verified, all of its first `size` leaves. Beside the leaves, and signed.

    It is written with the leaves, before they are committed, and so is no checkpoint: nobody may rely on it but who
    signs the next one, and must tell what a trainer left that was killed from what somebody slipped into the store.
    """

    size: int
    kid: bytes
    signature: bytes

    @classmethod
    def sign(cls, origin: str, frontier: Frontier, key: PrivateKey) -> WriterMark:
        return cls(frontier.size, key.public.id, key.sign(_mark_text(origin, frontier.size, frontier.root())))

    @classmethod
    def read(cls, rows: StoreReader) -> WriterMark | None:
        found = rows.meta(_MARK)
        if found is None or len(found) != 104:
            return None
        return cls(int.from_bytes(found[:8], "big"), found[8:40], found[40:])

    def write(self, rows: StoreWriter) -> None:
        rows.put_meta(_MARK, self.size.to_bytes(8, "big") + self.kid + self.signature)

    def holds(self, keys: KeyState, root: bytes, time: int) -> bool:
        """Whether a key that may sign at that time made it, for a tree with this root."""
        known = keys.history(self.kid)
        return (
            known is not None
            and keys.why_not_signing(self.kid, time) is None
            and known.public.verify(_mark_text(keys.origin, self.size, root), self.signature)
        )


_MARK = "written"


def _mark_text(origin: str, size: int, root: bytes) -> bytes:
    return f"lamina/written/1\n{origin}\n{size}\n".encode() + root


_TOKEN_BYTES = 16


def admission_token(kid: bytes, cti: bytes) -> bytes:
    """What stands for (kid, cti) in the store: an attestation that was admitted, also after it is pruned."""
    return hashlib.sha256(kid + cti).digest()[:_TOKEN_BYTES]


def tokens_of(attestation: bytes, ledger: bytes | None = None) -> list[bytes]:
    """The token of an attestation; none if it cannot be read. LedgerError if it is for another than the `ledger`."""
    try:
        signed = Attestation.decode(attestation)
    except (EncodingError, AdmissionError):
        return []  # an admission has read it before; verification names it
    if ledger is not None and not signed.may_enter(ledger):
        problem = f"an attestation of the batch names another ledger than this one, {ledger.hex()[:16]}"
        raise LedgerError("ledger.attestation-of-other-ledger", problem, "admit it into the ledger that it names")
    return [admission_token(signed.kid, signed.cti)]


class AdmissionRules:
    """Whether a contribution may be the next leaf, by keys and policy after some leaves and by its own window."""

    def __init__(self, header: Header, state: GovernanceState, policy: Header | PolicyChange | None = None) -> None:
        self._keys, self._policy = state, PolicyInForce(header, policy or state.policy)
        self._judged: dict[tuple[bytes, int, int], tuple[ContributionTerms, str | None]] = {}

    def problem(self, record: ContributionRecord, time: int) -> str | None:
        """Why it may not be a leaf of that time; None if it may."""
        if any(window_rules(time, record.not_before, record.expires)):
            return f"it is not valid at {format_utc(time)}"
        name = record.key, id(record.terms), time  # the same for many; kept terms keep their number
        if name not in self._judged:
            known, wrong = self._keys.history(record.key), self._policy.violation(record.terms)
            if wrong is None and known is None:
                wrong = Violation("", f"key {record.key.hex()[:16]} is not in the ledger")
            elif wrong is None and known is not None:
                wrong = known.contributor_problem(time)
            self._judged[name] = record.terms, None if wrong is None else wrong.reason
        return self._judged[name][1]


AttemptName = tuple[bytes, int, int]  # run, segment, generation
_HASH_PART = 16  # bytes of each leaf hash kept in memory; a second leaf with the same bytes cannot be found


class CheckedLeaves:
    """Facts of a ledger, derived from its leaves alone. Every decision uses these facts.

    It hashes the kept bytes of every leaf. The leaves under the newest checkpoint must have the root that a key of the
    ledger signed. The signer checked the rules of these leaves, so only their governing records are replayed. Every
    later leaf is read and checked, unless this process wrote it itself. What the store lists beside the leaves
    (attempts, head, tiles) is compared with them and decides nothing.

    It remembers the hash of each leaf, so it notices a changed leaf when the leaf is read again.

    vouched  the number of first leaves that a holder of a ledger key wrote or verified: they may be signed
    """

    def __init__(self, header: Header) -> None:
        self._header = header
        self._turn = RLock()  # taken inside a transaction, never around one
        self._recent: dict[int, bytes] = {}  # size → frontier, of the last heads that this process saw
        self._reset()

    def _reset(self) -> None:
        self._frontier, self._time, self._epoch = Frontier(), 0, 0
        self.vouched = self._signed = 0
        self._state: GovernanceState | None = None
        self._hashes = bytearray()  # the first _HASH_PART bytes of each leaf hash
        self._others: dict[int, list[int]] = {}  # kind → leaves, of all kinds but contributions
        self._withdrawals: tuple[int, dict[int, int]] = 0, {}  # leaves read, target → leaf
        self._contributions: list[ContributionColumns | KeptLeaf] = []
        self._columns = 0  # leaves whose contributions are in `_contributions`
        self._attempts: tuple[int, dict[AttemptName, int]] = 0, {}  # leaves read, attempt → leaf
        self._keys, self._anchors = ContributionKeys(b"ds"), ContributionKeys(b"a")
        self._summed: tuple[int, LeafSet] = 0, LeafSet(())  # leaves read, and those that a vouched aggregate stands for

    def follow(self, rows: StoreReader, head: LedgerHead) -> GovernanceState:
        """Who governs after all leaves; LedgerError if one of them may not stand where it does."""
        with self._turn:
            return self._follow(rows, head)

    def _follow(self, rows: StoreReader, head: LedgerHead) -> GovernanceState:
        last, known = rows.checkpoint(), self._state
        self._state = None  # what stops here begins anew the next time
        if self._recent.get(head.size, head.frontier) != head.frontier:
            raise self._tree_differs()
        if head.size < (most := max(self._recent, default=0)) and head.size not in self._recent:
            problem = f"the ledger {self._header.origin!r} has {head.size} leaves, which neither continue nor begin "
            problem += f"the {most} leaves that this process read before"
            raise LedgerDamaged("ledger.rolled-back", problem, "restore the newer copy, and restart the process")
        if known is None or head.size < self._frontier.size:  # a smaller head is the older view of another thread
            known = self._begin(rows, last)
        mark = WriterMark.read(rows)
        if mark is not None and max(self._frontier.size, self.vouched + 1) <= mark.size <= head.size:
            self._read_on(known, rows, mark.size)
            if mark.holds(known, self._frontier.root(), self._time):
                self.vouched = mark.size
        self._read_on(known, rows, head.size)
        if self._frontier.encode() != head.frontier:
            raise self._tree_differs()
        known.size, self._state = head.size, known
        known.covered(0 if last is None else last.size)
        self._remember(head)
        return known

    def wrote(
        self,
        head: LedgerHead,
        after: LedgerHead,
        frontier: Frontier,
        hashes: Sequence[bytes],
        others: Sequence[LeafRow],
        keys: Mapping[bytes, int],
    ) -> None:
        """Adopt the leaves that this process appended from `head` to `after`.

        `others` are the leaves that are not contributions; `keys` are the new keys of descriptors and subjects.
        """
        with self._turn:
            if self._state is None or self._frontier.encode() != head.frontier:
                return
            for seq, leaf, body in others:
                self._others.setdefault(kind := leaf[2], []).append(seq)
                if kind in GOVERNING_KINDS:
                    record = decode_leaf(StoredLeaf(leaf, body)).record
                    assert isinstance(record, GoverningRecord)
                    self._state.apply(record, seq, leaf)
            if self._keys.size == head.size:
                self._keys.grow(keys, after.size)
            self._hashes += b"".join([each[:_HASH_PART] for each in hashes])
            self._frontier, self._time, self._epoch = frontier, after.time, after.epoch
            self.vouched = after.size if self.vouched == head.size else self.vouched
            self._state.size = after.size
            self._remember(after)

    def keep(self, rows: StoreReader) -> int:
        """How many leaves are signed, or written by who has a key of the ledger."""
        state, mark = self._begin(rows, rows.checkpoint()), WriterMark.read(rows)
        size = self.vouched
        if mark is not None and mark.size > size:
            with suppress(LedgerError, EncodingError):
                self._read_on(state, rows, mark.size)
                size = mark.size if mark.holds(state, self._frontier.root(), self._time) else size
        return size

    # ----------------------------------------------------------------------------------- facts derived from the leaves

    @property
    def size(self) -> int:
        """The number of leaves that were checked."""
        return self._frontier.size

    def extends(self, rows: StoreReader, size: int, root: bytes) -> bool:
        """Return whether the first `size` leaves have this root."""
        if size == self.size:
            return root == self._frontier.root()
        if not 0 < size < self.size:
            return False
        try:
            proof = consistency_proof(TileNodes(tile_reader(rows)), size, self.size)
        except (LedgerError, EncodingError):  # tiles that are not of these leaves prove nothing
            return False
        return verify_consistency(size, self.size, proof, root, self._frontier.root())

    def root(self) -> bytes:
        """Return the root over all checked leaves."""
        return self._frontier.root()

    def count(self, kind: type[Record], before: int = LAST_SEQ) -> int:
        """Return how many leaves of a kind come before leaf `before`."""
        if kind is ContributionRecord:
            return min(self.size, before) - sum(bisect_left(seqs, before) for seqs in self._others.values())
        return bisect_left(self._others.get(KIND_NUMBERS[kind], []), before)

    def last(self, kind: type[Record]) -> int:
        """Return the last leaf of a kind other than contributions; -1 if there is none."""
        return max(self._others.get(KIND_NUMBERS[kind], ()), default=-1)

    def leaf(self, rows: StoreReader, seq: int) -> StoredLeaf:
        """Return a leaf with its body; raise LedgerDamaged if it is not the leaf that was hashed."""
        return next(self._genuine(rows, [seq]))[1]

    def leaves(self, rows: StoreReader, seqs: Sequence[int]) -> dict[int, StoredLeaf]:
        """Return several leaves with their bodies, checked as in `leaf`."""
        return dict(self._genuine(rows, seqs))

    def decoded(self, rows: StoreReader, seqs: Iterable[int]) -> list[Leaf]:
        """Return several leaves with their records, checked as in `leaf`, in order."""
        return [_decoded(seq, data) for seq, data in self._genuine(rows, sorted(set(seqs)))]

    def records(self, rows: StoreReader, kind: type[Record], first: int = 0, stop: int = LAST_SEQ) -> Iterator[Leaf]:
        """Yield the leaves of one kind, other than contributions, in [first, stop), in order."""
        seqs = self._others.get(KIND_NUMBERS[kind], [])
        wanted = seqs[bisect_left(seqs, first) : bisect_left(seqs, min(stop, self.size))]
        for seq, data in self._genuine(rows, wanted):
            yield _decoded(seq, data)

    def kept(self, rows: StoreReader, first: int, stop: int) -> Iterator[list[bytes]]:
        """Yield blocks of the kept bytes of the leaves in [first, stop), without bodies, in order."""
        for at, leaves in rows.kept_blocks(first, min(stop, self.size)):
            self._check_block(rows, at, leaves)
            yield leaves

    def governance_at(self, rows: StoreReader, size: int) -> GovernanceState:
        """Return keys, policy and terms after the first `size` leaves."""
        found = GovernanceState(self._header, self.leaf(rows, 0).leaf)
        seqs = sorted(seq for kind in GOVERNING_KINDS for seq in self._others.get(kind, ()) if seq < size)
        for seq, data in self._genuine(rows, seqs):
            self._govern(found, _decoded(seq, data), data.leaf, rows)
        last = rows.checkpoint()
        found.size = max(size, found.size)
        found.covered(0 if last is None else min(size, last.size))
        return found

    def contributions(self, rows: StoreReader) -> list[ContributionColumns | KeptLeaf]:
        """Return all contributions in groups, with leaf, expiry and bound. Later calls only append groups."""
        with self._turn:
            self._contributions += kept_contributions(self.kept(rows, self._columns, self.size))
            self._columns = self.size
            return self._contributions

    def find(self, rows: StoreReader, keys: Sequence[bytes]) -> list[tuple[bytes, int]]:
        """Return (key, leaf) of every contribution with one of these keys of a descriptor or subject."""
        with self._turn:
            return self._known_keys(rows).find(keys)

    def contribution(self, rows: StoreReader, descriptor: bytes) -> Leaf | None:
        """Return the contribution with this descriptor; None if there is none."""
        found = self.decoded(rows, (seq for _, seq in self.find(rows, [descriptor_key(descriptor)])))
        return next((leaf for leaf in found if contribution_digests(leaf)[0] == descriptor), None)

    def find_digest(self, rows: StoreReader, digest: bytes) -> list[Leaf]:
        """Return the contribution with this descriptor; if there is none, all with this subject tag or content anchor.

        Nobody can choose the digest of a descriptor, but a tag or an anchor may equal any digest. The first search for
        an anchor reads all bodies.
        """
        with self._turn:
            if (found := self.contribution(rows, digest)) is not None:
                return [found]
            there = [*self.find(rows, [subject_key(digest)]), *self._known_anchors(rows).find([anchor_key(digest)])]
            return [
                leaf for leaf in self.decoded(rows, (seq for _, seq in there)) if digest in contribution_digests(leaf)
            ]

    def find_prefix(self, rows: StoreReader, digits: str, most: int) -> list[Leaf]:
        """Return the contributions whose descriptor or content anchor begins with these hex digits.

        Of descriptors and of anchors, those of the first `most` digests.
        """
        with self._turn:
            known = zip((self._known_keys(rows), self._known_anchors(rows)), index_key_ranges(digits), strict=True)
            return self.decoded(rows, [seq for keys, pair in known for seq in keys.between(*pair, most)])

    def summed_up(self, rows: StoreReader) -> LeafSet:
        """Return the leaves that aggregates cover. Only aggregates by a holder of a ledger key are accepted."""
        with self._turn:
            read, found = self._summed
            new = (each.record for each in self.records(rows, Aggregate, read, self.vouched))
            if spans := [span for each in new if isinstance(each, Aggregate) for span in each.spans]:
                found = LeafSet([*found.spans, *spans])
            self._summed = max(read, self.vouched), found
            return found

    def withdrawals(self, rows: StoreReader) -> Mapping[int, int]:
        """Return withdrawn contribution → leaf of its withdrawal."""
        with self._turn:
            read, found = self._withdrawals
            for leaf in self.records(rows, Withdrawal, read):
                assert isinstance(leaf.record, Withdrawal)
                found.setdefault(leaf.record.target, leaf.seq)
            self._withdrawals = self.size, found
            return found

    def attempts(self, rows: StoreReader) -> Mapping[AttemptName, int]:
        """Return attempt → leaf of the epoch that records it."""
        with self._turn:
            read, found = self._attempts
            for leaf in self.records(rows, Epoch, read):
                assert isinstance(leaf.record, Epoch)
                for attempt in leaf.record.attempts:
                    found.setdefault(attempt, leaf.seq)
            if not read:
                listed = {tuple(each[:3]): each.seq for each in rows.attempts() if each.seq < self._signed}
                claim = "records segment {0[1]}, generation {0[2]}"
                if (problem := self._index_differs(listed, found, claim)) is not None:
                    raise LedgerDamaged("ledger.attempt-index-differs", problem, _CACHE_CHANGED)
            self._attempts = self.size, found
            return found

    def generations(self, rows: StoreReader, run: bytes, segment: int) -> int:
        """Return the next free generation of a segment, after all that are held or recorded."""
        recorded = [name[2] for name in self.attempts(rows) if name[:2] == (run, segment)]
        return max([-1, *recorded, *(each.generation for each in rows.kept(run) if each.segment == segment)]) + 1

    # ----------------------------------------------------------------------------------- inside

    def _known_keys(self, rows: StoreReader) -> ContributionKeys:
        known = self._keys
        if not known.size:
            known.add(found := self.contributions(rows), self.size)
            found[:] = [replace(each, keys=()) if isinstance(each, ContributionColumns) else each for each in found]
        elif known.size < self.size:
            known.add(kept_contributions(self.kept(rows, known.size, self.size)), self.size)
        return known

    def _known_anchors(self, rows: StoreReader) -> ContributionKeys:
        """Return all content anchors. They are in bodies only, so each body is read once."""
        known = self._anchors
        for seqs, block in rows.blocks(known.size, self.size):
            self._check_block(rows, known.size, block.leaves)
            places = [at for at, leaf in enumerate(block.leaves) if leaf[:3] in CONTRIBUTION_STARTS]
            for at in places:
                if block.bodies[at] is None:
                    self._check_summed(rows, seqs[at])
            known.add(_contributions([seqs[at] for at in places], block.pick(places)), known.size + len(block))
        if known.size < self.size:
            raise _leaf_missing(known.size)
        return known

    def _check_block(self, rows: StoreReader, first: int, leaves: Sequence[bytes]) -> None:
        """Raise LedgerDamaged unless these are the hashed leaves from `first` on."""
        found = b"".join([each[:_HASH_PART] for each in leaf_hashes(leaves)])
        if found != self._hashes[first * _HASH_PART : (first + len(leaves)) * _HASH_PART]:
            for seq in range(first, first + len(leaves)):
                self.leaf(rows, seq)  # raises an error that names the changed leaf
            raise _leaf_missing(first)

    def _check_summed(self, rows: StoreReader, seq: int) -> None:
        """Raise LedgerDamaged if the body of a contribution is missing and no aggregate covers it."""
        if seq in self.summed_up(rows):
            return
        if (last := rows.checkpoint()) is not None and last.size > self.vouched:
            self._state = None  # another process pruned it under a newer checkpoint
            self._follow(rows, head_of(rows))
        if seq not in self.summed_up(rows):
            raise leaf_not_allowed(seq, "contribution", "its body is missing, and no signed aggregate stands for it")

    def _remember(self, head: LedgerHead) -> None:
        self._recent[head.size] = head.frontier
        if len(self._recent) > _HEADS_REMEMBERED:
            del self._recent[min(self._recent)]

    def _genuine(self, rows: StoreReader, seqs: Sequence[int]) -> Iterator[tuple[int, StoredLeaf]]:
        """Yield these leaves in order; raise LedgerDamaged if one is missing or is not the leaf that was hashed."""
        expected = iter(seqs)
        for seq, data in rows.pick(seqs):
            if seq != (wanted := next(expected)):
                raise _leaf_missing(wanted)
            if leaf_hash(data.leaf)[:_HASH_PART] != self._hashes[seq * _HASH_PART : (seq + 1) * _HASH_PART]:
                why = "it is not the leaf that this process read before"
                raise leaf_not_allowed(seq, kind_name(data.leaf) or "leaf", why)
            if data.body is None and data.leaf[:3] in CONTRIBUTION_STARTS:
                self._check_summed(rows, seq)
            yield seq, data
        for wanted in expected:
            raise _leaf_missing(wanted)

    def _index_differs(self, listed: Mapping[Any, int], real: Mapping[Any, int], claim: str) -> str | None:
        """Return how the list of the store differs from the signed leaves, or None if it does not."""
        signed = {name: seq for name, seq in real.items() if seq < self._signed}
        if listed == signed:
            return None
        name = min(each for each in listed.keys() | signed.keys() if listed.get(each) != signed.get(each))
        says, seq = ("does not list", signed[name]) if name in signed else ("lists", listed[name])
        return f"the store {says} that leaf {seq} {claim.format(name)}, which contradicts the leaves"

    def _begin(self, rows: StoreReader, last: StoredCheckpoint | None) -> GovernanceState:
        """Start again: hash all leaves under the newest checkpoint, or none if there is no checkpoint."""
        self._reset()
        state = GovernanceState(self._header, leaf_bytes(rows, 0))
        self.vouched = 1  # its owners signed the header
        if last is None:
            return state
        tree, note = parse_checkpoint(last.text)
        for _, leaves in rows.kept_blocks(0, last.size):
            self._contributions += kept_contributions([leaves])
            self._take(leaves)
            self._columns = self.size
        if (tree.size, tree.root) != (last.size, self._frontier.root()):
            raise self._not_signed(rows)
        self._signed = self.vouched = last.size
        governing = sorted(seq for kind in GOVERNING_KINDS for seq in self._others.get(kind, ()))
        for seq, data in self._genuine(rows, governing):
            self._govern(state, _decoded(seq, data), data.leaf, rows)
        newest = decode_kept(self.leaf(rows, last.size - 1).leaf)
        self._time, self._epoch = newest.time, newest.epoch + (newest.kind is Epoch)
        state.covered(max((each.size for each in rows.checkpoints() if each.size < last.size), default=0))
        signed = any(
            (line.name, line.key_id) == (key.name, key.id) and key.holds(note.text, line.value)
            for known in state.histories(Role.LEDGER)
            if state.why_not_signing(known.public.id, newest.time) is None
            for key in (NoteKey(self._header.origin, known.public),)
            for line in note.signatures
        )
        if not signed or tree.origin != self._header.origin:
            raise self._checkpoint_differs()
        return state

    def _take(self, leaves: Sequence[bytes]) -> None:
        """Hash the next leaves, and note the kind of each leaf that is not a contribution."""
        hashes = leaf_hashes(leaves)
        if not CONTRIBUTION_STARTS.issuperset(map(itemgetter(slice(3)), leaves)):  # most blocks hold contributions only
            for seq, leaf in enumerate(leaves, start=self.size):
                if leaf[:3] not in CONTRIBUTION_STARTS:
                    try:
                        kept = decode_kept(leaf)
                    except EncodingError as error:
                        raise leaf_not_allowed(seq, "leaf", error.problem) from None
                    self._others.setdefault(KIND_NUMBERS[kept.kind], []).append(seq)
        self._frontier.extend(hashes)
        self._hashes += b"".join([each[:_HASH_PART] for each in hashes])

    def _not_signed(self, rows: StoreReader) -> LedgerError:
        """Return the error for leaves other than the signed ones. It names the first leaf that differs from its tile."""
        for at in range(0, self.size, TILE_WIDTH):
            tile = rows.tile(0, at // TILE_WIDTH) or b""
            for seq in range(at, min(at + TILE_WIDTH, self.size)):
                stored = tile[(seq - at) * HASH_SIZE :][:_HASH_PART]
                if stored != self._hashes[seq * _HASH_PART : (seq + 1) * _HASH_PART]:
                    kind = kind_name(leaf_bytes(rows, seq)) or "leaf"
                    return leaf_not_allowed(seq, kind, "it is not the leaf that was signed")
        return self._checkpoint_differs()

    def _tree_differs(self) -> LedgerDamaged:
        problem = f"the tree of the ledger {self._header.origin!r} does not match its leaves"
        return LedgerDamaged("ledger.tree-differs", problem, _SOMEBODY_WROTE)

    def _checkpoint_differs(self) -> LedgerDamaged:
        problem = f"the newest checkpoint of the ledger {self._header.origin!r} does not match its tree and keys"
        return LedgerDamaged("ledger.checkpoint-not-of-ledger", problem, _SOMEBODY_WROTE)

    def check_next(self, batch: Sequence[Record], at: Sequence[int], state: GovernanceState, time: int) -> None:
        """LedgerError if one of these contributions of a batch may not come next. Only its first record may govern."""
        first = batch[0]
        policy = first if isinstance(first, PolicyChange) else None
        keys = state.after(first.events) if isinstance(first, KeyEvents) else state
        rules = AdmissionRules(self._header, keys, policy)
        asked = [one for each in at if type(one := batch[each]) is ContributionRecord]
        if asked and not any(window_rules(time, max(map(_NOT_BEFORE, asked)), min(map(_EXPIRES, asked)))):
            by_key, by_terms = {one.key: one for one in asked}, {id(one.terms): one for one in asked}
            asked = [*by_key.values(), *by_terms.values()]  # in time they all are: the rest is the same for many
        for record in asked:
            if (wrong := rules.problem(record, time)) is not None:
                place = next(each for each in at if batch[each] is record)
                problem = f"record {place} of the batch, a contribution, may not be appended: {wrong}"
                remedy = "leave it out; lamina admit names every contribution that may not be admitted, and why"
                raise LedgerError("ledger.contribution-not-allowed", problem, remedy)

    def _read_on(self, state: GovernanceState, rows: StoreReader, stop: int) -> None:
        source = rows.leaves(self._frontier.size, stop)
        while block := list(islice(source, _LEAVES_AT_ONCE)):
            self._read(state, block, rows)

    def _read(self, state: GovernanceState, block: Sequence[tuple[int, StoredLeaf]], rows: StoreReader) -> None:
        """Check leaves that somebody else wrote, or that were written before this process began."""
        rules = AdmissionRules(self._header, state)
        for at, (seq, data) in enumerate(block, start=self.size):
            leaf = _decoded(at, data)
            if (seq, leaf.seq, leaf.epoch) != (at, at, self._epoch) or leaf.time < self._time:
                reason = "its place, time or epoch is not that of the next leaf"
                raise leaf_not_allowed(at, KIND_NAMES[leaf.kind], reason)
            record = leaf.record
            if isinstance(record, ContributionRecord):
                if (wrong := rules.problem(record, leaf.time)) is not None:
                    raise leaf_not_allowed(at, KIND_NAMES[leaf.kind], wrong)
            elif isinstance(record, KeptContribution):
                reason = "its body is missing, and no checkpoint covers it yet"
                raise leaf_not_allowed(at, KIND_NAMES[leaf.kind], reason)
            else:
                self._check_record(state, leaf, rows)
                if isinstance(record, GoverningRecord):
                    state.apply(record, at, data.leaf)
                    rules = AdmissionRules(self._header, state)
            self._time, self._epoch = leaf.time, self._epoch + (leaf.kind is Epoch)
        self._take([data.leaf for _, data in block])

    def _govern(self, state: GovernanceState, leaf: Leaf, data: bytes, rows: StoreReader) -> None:
        """Check and apply a governing record."""
        assert isinstance(leaf.record, GoverningRecord)
        self._check_record(state, leaf, rows)
        state.apply(leaf.record, leaf.seq, data)

    def _check_record(self, state: GovernanceState, leaf: Leaf, rows: StoreReader) -> None:
        """Raise LedgerDamaged if a record that is no contribution breaks its append rule."""
        place = Place(
            rows=rows, header=self._header, seq=leaf.seq, time=leaf.time, governance=lambda: state,
            root_of=checkpoint_roots(rows),
        )  # fmt: skip
        try:
            check_record(leaf.record, place)
        except (LedgerError, EncodingError) as error:
            raise leaf_not_allowed(leaf.seq, KIND_NAMES[leaf.kind], f"{error.problem} [{error.code}]") from None


def _contributions(seqs: Sequence[int], block: LeafBlock) -> Iterator[ContributionColumns | Leaf]:
    for group in read_columns(block):
        if isinstance(group, ContributionColumns):
            yield group
        else:
            yield from (_decoded(seqs[at], block[at]) for at in group.tolist())


class LeafSet:
    """Leaves in spans."""

    def __init__(self, spans: Iterable[LeafSpan]) -> None:
        self.spans = sorted(spans, key=attrgetter("first"))
        self._firsts = [span.first for span in self.spans]
        self._stops = list(accumulate((span.stop for span in self.spans), max))

    def __contains__(self, seq: int) -> bool:
        at = bisect_right(self._firsts, seq)
        return at > 0 and seq < self._stops[at - 1]


def contribution_digests(leaf: Leaf) -> tuple[bytes | None, ...]:
    """Return descriptor, content anchor and subject tag of a contribution."""
    match leaf.record:
        case ContributionRecord() as record:
            return (record.descriptor, record.anchor, record.subject)
        case KeptContribution() as record:
            return (record.descriptor, None, record.subject)
    return ()


def cut_unsigned(store: Store) -> list[tuple[int, str]]:
    """Take away the leaves that no checkpoint covers and no keeper wrote, with their rows; number and kind of each.

    The way out where somebody wrote into the store past the rules. Signed leaves stay, whatever they say.
    """
    with store.write() as rows:
        header = decode_leaf(StoredLeaf(*(rows.leaf(0) or (b"", None)))).record
        assert isinstance(header, Header)
        checked = CheckedLeaves(header)
        size = checked.keep(rows)
        cut = list(rows.leaves(size, LAST_SEQ))
        tokens = [token for _, data in rows.evidences(size, LAST_SEQ) for token in tokens_of(data)]
        rows.cut(size, tokens)
        OpenHead.remove(rows)  # the operator reviews the open rows before they are signed again
        last, frontier = decode_kept(leaf_bytes(rows, size - 1)), Frontier()
        for _, block in rows.blocks(0, size):
            rows.put_tiles(grow_tiles(frontier, leaf_hashes(block.leaves), tile_reader(rows)))
        rows.put_head(LedgerHead(size, last.time, last.epoch + (last.kind is Epoch), frontier.encode()))
    return [(seq, kind_name(data.leaf) or "unreadable") for seq, data in cut]


_SOMEBODY_WROTE = (
    "the store was changed outside of Lamina; find out by whom, and continue with a copy that holds only leaves which were "
    "signed: lamina ledger copy LEDGER NEW --signed"
)
_CACHE_CHANGED = "the store was changed outside of Lamina; restore the ledger from a copy"
_HEADS_REMEMBERED = 256


def _decoded(seq: int, data: StoredLeaf) -> Leaf:
    try:
        return decode_leaf(data)
    except EncodingError as error:
        raise leaf_not_allowed(seq, kind_name(data.leaf) or "leaf", error.problem) from None


def _leaf_missing(seq: int) -> LedgerDamaged:
    return LedgerDamaged("ledger.leaf-missing", f"leaf {seq} is missing", _SOMEBODY_WROTE)


def leaf_not_allowed(seq: int, kind: str, why: str) -> LedgerDamaged:
    problem = f"leaf {seq} ({kind}) may not stand in the ledger: {why}"
    return LedgerDamaged("ledger.leaf-not-allowed", problem, _SOMEBODY_WROTE)
