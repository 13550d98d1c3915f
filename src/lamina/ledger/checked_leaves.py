"""The leaves that a writer wrote or read itself and found right: what it may sign over, and who governs after them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from operator import attrgetter
from threading import RLock
from typing import NamedTuple

from lamina.admit.attestation import Attestation, window_rules
from lamina.admit.keys import PrivateKey, format_utc
from lamina.errors import AdmissionError, EncodingError, LedgerDamaged, LedgerError
from lamina.ledger.governance_records import (
    GOVERNING_KINDS,
    Aggregate,
    GoverningRecord,
    Header,
    KeyEvents,
    PolicyChange,
    Role,
)
from lamina.ledger.key_state import GovernanceState, KeyState, PolicyInForce, Violation, checkpoint_roots, leaf_bytes
from lamina.ledger.merkle import (
    Frontier,
    TileNodes,
    frontier_at,
    grow_tiles,
    inclusion_proof,
    leaf_hash,
    leaf_hashes,
    verify_inclusion,
)
from lamina.ledger.records import (
    CONTRIBUTION_STARTS,
    KIND_NAMES,
    KIND_NUMBERS,
    LAST_SEQ,
    ContributionRecord,
    ContributionTerms,
    Epoch,
    KeptContribution,
    Leaf,
    Record,
    SegmentOutcome,
    decode_kept,
    decode_leaf,
    kind_name,
)
from lamina.ledger.signed_checkpoint import NoteKey, parse_checkpoint
from lamina.ledger.store.rows import (
    LedgerHead,
    Store,
    StoredCheckpoint,
    StoredLeaf,
    StoreReader,
    StoreWriter,
    head_of,
    tile_reader,
)

_LEAVES_AT_ONCE = 4096
_NOT_BEFORE, _EXPIRES = attrgetter("not_before"), attrgetter("expires")


def check_epoch_follows(record: Epoch, header: Header, size: int) -> None:
    """LedgerError if an epoch closes more segments than allowed, or read members from leaves that are not there."""
    closed = sum(each.outcome is SegmentOutcome.CLOSED for each in record.segments)
    if closed > header.granularity:
        problem = f"the epoch closes {closed} segments, the header allows {header.granularity}"
        raise LedgerError("ledger.epoch-too-many-segments", problem, "split it")
    for each in record.segments:
        if each.eligibility > size:
            problem = f"segment {each.index} was opened after {each.eligibility} leaves, the ledger has {size}"
            raise LedgerError("ledger.segment-from-future", problem, "give the size when its membership was frozen")


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
        name = (
            record.key,
            id(record.terms),
            time,
        )  # the same for many; terms are kept here, so that the number stays theirs
        if name not in self._judged:
            known, wrong = self._keys.history(record.key), self._policy.violation(record.terms)
            if wrong is None and known is None:
                wrong = Violation("", f"key {record.key.hex()[:16]} is not in the ledger")
            elif wrong is None and known is not None:
                wrong = known.contributor_problem(time)
            self._judged[name] = record.terms, None if wrong is None else wrong.reason
        return self._judged[name][1]


class CheckedLeaves:
    """Follows a ledger leaf by leaf. Everything else in the store (head, tiles, lists by kind) is compared with that.

    What the newest checkpoint covers when it begins was checked by whoever signed that: of those leaves the governing
    records are replayed, found among all leaves and proven under that checkpoint. Every later leaf is read, unless this
    process wrote it itself.

    vouched  the first so many leaves were written by who has a key of the ledger, or verified: they may be signed over
    """

    def __init__(self, header: Header) -> None:
        self._header = header
        self._frontier, self._time, self._epoch = Frontier(), 0, 0
        self.vouched = 0
        self._state: GovernanceState | None = None
        self._turn = RLock()  # taken inside a transaction, never around one

    def follow(self, rows: StoreReader, head: LedgerHead) -> GovernanceState:
        """Who governs after all leaves; LedgerError if one of them may not stand where it does."""
        with self._turn:
            return self._follow(rows, head)

    def _follow(self, rows: StoreReader, head: LedgerHead) -> GovernanceState:
        last, known = rows.checkpoint(), self._state
        self._state = None  # what stops here begins anew the next time
        if known is None or head.size < self._frontier.size:
            known = self._begin(rows, last)
        mark = WriterMark.read(rows)
        if mark is not None and max(self._frontier.size, self.vouched + 1) <= mark.size <= head.size:
            self._read_on(known, rows, mark.size)
            if mark.holds(known, self._frontier.root(), self._time):
                self.vouched = mark.size
        self._read_on(known, rows, head.size)
        if self._frontier.encode() != head.frontier:
            problem = f"the tree of the ledger {self._header.origin!r} is not that of its leaves"
            raise LedgerDamaged("ledger.tree-differs", problem, _SOMEBODY_WROTE)
        known.size, self._state = head.size, known
        known.covered(0 if last is None else last.size)
        return known

    def wrote(
        self, head: LedgerHead, after: LedgerHead, frontier: Frontier, governing: Sequence[tuple[int, StoredLeaf]]
    ) -> None:
        """This process appended from `head` to `after`, by the rules, with these governing leaves among it."""
        with self._turn:
            if self._state is None or self._frontier.encode() != head.frontier:
                return
            for seq, data in governing:
                record = decode_leaf(data).record
                assert isinstance(record, GoverningRecord)
                self._state.apply(record, seq, data.leaf)
            self._frontier, self._time, self._epoch = frontier, after.time, after.epoch
            self.vouched = after.size if self.vouched == head.size else self.vouched
            self._state.size = after.size

    def keep(self, rows: StoreReader) -> int:
        """How many leaves are signed, or written by who has a key of the ledger."""
        state, mark = self._begin(rows, rows.checkpoint()), WriterMark.read(rows)
        size = self.vouched
        if mark is not None and mark.size > size:
            with suppress(LedgerError, EncodingError):
                self._read_on(state, rows, mark.size)
                size = mark.size if mark.holds(state, self._frontier.root(), self._time) else size
        return size

    # ----------------------------------------------------------------------------------- inside

    def _begin(self, rows: StoreReader, last: StoredCheckpoint | None) -> GovernanceState:
        """Begin anew at the newest checkpoint, or before the first leaf."""
        state = GovernanceState(self._header, leaf_bytes(rows, 0))
        self._frontier, self._time, self._epoch, self.vouched = Frontier(), 0, 0, 1  # the header is its owners' word
        if last is not None:
            self.vouched = last.size
            tree, note = parse_checkpoint(last.text)
            nodes = TileNodes(tile_reader(rows))
            self._frontier = frontier_at(nodes, last.size)
            for seq, data in _leaves_that_govern(rows, last.size):
                leaf = decode_leaf(data)
                proof = inclusion_proof(nodes, seq, last.size)
                if leaf.seq != seq or not verify_inclusion(leaf_hash(data.leaf), seq, last.size, proof, tree.root):
                    raise leaf_not_allowed(seq, KIND_NAMES[leaf.kind], "it is not the leaf that was signed")
                if seq:
                    self._govern(state, leaf, data.leaf, rows)
            newest = decode_kept(leaf_bytes(rows, last.size - 1))
            self._time, self._epoch = newest.time, newest.epoch + (newest.kind is Epoch)
            state.covered(max((each.size for each in rows.checkpoints() if each.size < last.size), default=0))
            signed = any(
                (line.name, line.key_id) == (key.name, key.id) and key.holds(note.text, line.value)
                for known in state.histories(Role.LEDGER)
                if state.why_not_signing(known.public.id, newest.time) is None
                for key in (NoteKey(self._header.origin, known.public),)
                for line in note.signatures
            )
            if not signed or self._frontier.root() != tree.root:
                problem = f"the newest checkpoint of the ledger {self._header.origin!r} is not of its tree and keys"
                raise LedgerDamaged("ledger.checkpoint-not-of-ledger", problem, _SOMEBODY_WROTE)
        return state

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
        frontier = self._frontier
        rules = AdmissionRules(self._header, state)
        for at, (seq, data) in enumerate(block, start=frontier.size):
            try:
                leaf = decode_leaf(data)
            except EncodingError as error:
                raise leaf_not_allowed(at, "leaf", error.problem) from None
            if (seq, leaf.seq, leaf.epoch) != (at, at, self._epoch) or leaf.time < self._time:
                raise leaf_not_allowed(
                    at, KIND_NAMES[leaf.kind], "its place, time or epoch is not that of the next leaf"
                )
            record = leaf.record
            if isinstance(record, ContributionRecord):
                if (wrong := rules.problem(record, leaf.time)) is not None:
                    raise leaf_not_allowed(at, KIND_NAMES[leaf.kind], wrong)
            elif isinstance(record, GoverningRecord):
                self._govern(state, leaf, data.leaf, rows)
                rules = AdmissionRules(self._header, state)
            elif isinstance(record, Epoch):
                check_epoch_follows(record, self._header, at)
            elif isinstance(record, Header) and at:
                raise leaf_not_allowed(at, KIND_NAMES[leaf.kind], "a header may only be leaf 0")
            elif isinstance(record, Aggregate) and record.horizon + state.retention > leaf.time:
                raise leaf_not_allowed(at, KIND_NAMES[leaf.kind], f"contributions are kept for {state.retention} s")
            elif isinstance(record, KeptContribution):
                raise leaf_not_allowed(
                    at, KIND_NAMES[leaf.kind], "its body is missing, and no checkpoint covers it yet"
                )
            self._time, self._epoch = leaf.time, self._epoch + (leaf.kind is Epoch)
        frontier.extend(leaf_hashes([data.leaf for _, data in block]))

    def _govern(self, state: GovernanceState, leaf: Leaf, data: bytes, rows: StoreReader) -> None:
        assert isinstance(leaf.record, GoverningRecord)
        try:
            state.see(leaf.record, leaf.seq, leaf.time, data, checkpoint_roots(rows))
        except LedgerError as error:
            raise leaf_not_allowed(leaf.seq, KIND_NAMES[leaf.kind], f"{error.problem} [{error.code}]") from None


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
        last, frontier = decode_kept(leaf_bytes(rows, size - 1)), Frontier()
        for _, block in rows.blocks(0, size):
            rows.put_tiles(grow_tiles(frontier, leaf_hashes(block.leaves), tile_reader(rows)))
        indexed, epoch = min(head_of(rows).indexed, size), last.epoch + (last.kind is Epoch)
        rows.put_head(LedgerHead(size, last.time, epoch, indexed, frontier.encode()))
    return [(seq, kind_name(data.leaf) or "unreadable") for seq, data in cut]


_SOMEBODY_WROTE = (
    "find out who wrote into the store past its rules; go on with a copy without what nobody signed: "
    "lamina ledger copy LEDGER NEW --signed"
)
_GOVERNING_NUMBERS = {*GOVERNING_KINDS, KIND_NUMBERS[Header]}


def _leaves_that_govern(rows: StoreReader, size: int) -> Iterator[tuple[int, StoredLeaf]]:
    """Header and governing records by what the leaves say; the lists of the store may hide one."""
    there = 0
    for seq, data in rows.leaves(0, size):
        there += 1
        if data.leaf[:3] not in CONTRIBUTION_STARTS and KIND_NUMBERS[decode_kept(data.leaf).kind] in _GOVERNING_NUMBERS:
            yield seq, data
    if there != size:
        raise LedgerDamaged("ledger.leaf-missing", f"{there} of {size} signed leaves are there", _SOMEBODY_WROTE)


def leaf_not_allowed(seq: int, kind: str, why: str) -> LedgerError:
    problem = f"leaf {seq} ({kind}) may not stand in the ledger: {why}"
    return LedgerError("ledger.leaf-not-allowed", problem, _SOMEBODY_WROTE)
