"""Findings, and the checks of the tree: its hashes, its checkpoints, and the aggregates that stand for pruned bodies.

Checkpoints are held against the keys of the ledger, against keys that an auditor trusts, and against checkpoints that
were kept before.
"""

from __future__ import annotations

import hashlib
import os
import time as system
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from lamina.errors import BadKey, EncodingError, LaminaError, LedgerError, NotVerified
from lamina.ledger import signed_checkpoint as notes
from lamina.ledger.governance_records import Aggregate, Header, LeafSpan, Role
from lamina.ledger.key_state import GovernanceState, KeyState, Violation
from lamina.ledger.merkle import HASH_SIZE, TILE_HEIGHT, TILE_WIDTH, Frontier, tile_path
from lamina.ledger.records import KIND_NAMES, Leaf, Record
from lamina.ledger.signed_checkpoint import LedgerCheckpoint, TreeSignature
from lamina.ledger.store.rows import StoredCheckpoint, StoreReader
from lamina.sign.key_ring import KeyEntry, KeyRing, KeyStatus
from lamina.sign.keys import PublicKey, format_utc, read_small
from lamina.sign.notes import NamedKey, Note, NoteKey, WitnessKey, WitnessQuorum

if TYPE_CHECKING:
    from lamina.ledger.contribution_columns import Ints

# Kinds of findings that are not about a record of a known kind
LEAF = "leaf"
CHECKPOINT = "checkpoint"
TILE = "tile"
STORE = "store"
KNOWN_CHECKPOINT = "seen"
TRUSTED_KEYS = "trust"


@dataclass(frozen=True, slots=True)
class Finding:
    """The first thing that is wrong. `index` is a leaf; for a checkpoint, the first leaf that it fails to cover."""

    index: int | None
    kind: str
    code: str
    reason: str

    def __str__(self) -> str:
        leaf = "" if self.index is None else f"leaf {self.index} "
        return f"{leaf}({self.kind}): {self.reason} [{self.code}]"


class VerificationStopped(Exception):
    """Ends a replay with its first finding. Never leaves this folder."""

    def __init__(self, problem: Finding) -> None:
        super().__init__(str(problem))
        self.problem = problem


def fail(index: int | None, kind: str | type[Record], code: str, reason: str) -> NoReturn:
    """Stop the replay with this finding."""
    raise VerificationStopped(Finding(index, kind if isinstance(kind, str) else KIND_NAMES[kind], code, reason))


_UNREADABLE_CODES = {"ledger.body-missing": "verify.body-missing", "ledger.body-differs": "verify.body-edited"}


def fail_unreadable(index: int, error: EncodingError) -> NoReturn:
    """Stop the replay because a leaf or its body cannot be read."""
    fail(index, LEAF, _UNREADABLE_CODES.get(error.code, "verify.leaf-unreadable"), error.problem)


_MOST_CHECKPOINT_BYTES = 1 << 20


_OF_LEDGER = (Role.GOVERNING, Role.LEDGER)


@dataclass(frozen=True, slots=True)
class Trust:
    """Keys that an auditor trusts: a key ring, verifier keys of signed notes, or one public key.

    They come from whoever answers for the ledger, by another way than the ledger itself. A ledger is trusted if one of
    them governs it, which a ring says, or the header of a single public key. Ledger keys, contributors and witnesses of
    a ring, where it has any, are the only ones that count; what it does not say is the word of who governs.
    """

    ring: KeyRing | None = None
    notes: tuple[NoteKey, ...] = ()
    plain: tuple[PublicKey, ...] = ()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trust:
        """Read a key ring (JSON), a public key (PEM), or a text of verifier keys, `name+id+key`, one a line."""
        path = Path(path)
        data = read_small(path, "the trusted keys", most=_MOST_CHECKPOINT_BYTES * 64)
        if data.lstrip().startswith(b"{"):
            return cls(ring=KeyRing.load(path))
        if data.lstrip().startswith(b"-----BEGIN"):
            return cls(plain=(PublicKey.load(path),))
        try:
            lines = [line.strip() for line in data.decode("utf-8").splitlines() if not line.startswith("#")]
            keys = tuple(NoteKey.parse(line) for line in lines if line)
        except (UnicodeDecodeError, EncodingError) as error:
            why = error.problem if isinstance(error, LaminaError) else "not UTF-8 text"
            raise _no_keys(path, f": {why}") from None
        if not keys:
            raise _no_keys(path)
        return cls(notes=keys)

    @classmethod
    def load_all(cls, paths: Iterable[str | os.PathLike[str]]) -> Trust:
        """Read several key files together. At most one of them may be a key ring."""
        found = [cls.load(path) for path in paths]
        rings = [each.ring for each in found if each.ring is not None]
        if len(rings) > 1:
            problem = "two key rings are given, which may name one key in two roles"
            raise BadKey("key.several-rings", problem, "give one key ring, and public keys beside it")
        return cls(
            ring=rings[0] if rings else None,
            notes=tuple(note for each in found for note in each.notes),
            plain=tuple(key for each in found for key in each.plain),
        )

    def for_ledger(self, parties: KeyState) -> Trust | None:
        """Return the part that concerns a ledger with these keys, or None. Release keys concern no ledger."""
        plain = tuple(key for key in self.plain if (known := parties.get(key.id)) and known.role in _OF_LEDGER)
        named = any(map(self.names, _OF_LEDGER))
        made = Trust(ring=self.ring if named else None, notes=self.notes, plain=plain)
        return made if named or self.notes or plain else None

    def keys(self, origin: str, now: int | None = None) -> list[PublicKey]:
        """The trusted ledger keys for the ledger with that origin."""
        mine = [*self.plain, *(each.key for each in self.notes if each.name == origin)]
        return [*mine, *(each.key for each in self._of_role(Role.LEDGER, now))]

    def governing(self, header: Header, now: int | None = None) -> set[bytes]:
        """The governing keys of the header that are trusted; stops with a finding if others were expected."""
        known = {each.id for each in header.keys if each.role is Role.GOVERNING}
        named = self._of_role(Role.GOVERNING, now)
        found = known & {*(key.id for key in self.plain), *(each.id for each in named)}
        if named and not found:
            reason = f"no trusted governing key signed the header: {SIGNED_ANEW}"
            fail(0, TRUSTED_KEYS, "verify.header-not-by-trusted-key", reason)
        return found

    def check_witnesses(self, note: Note, time: int, now: int | None = None) -> tuple[int, int]:
        """Return how many witnesses of the key ring cosigned, and how many are required: its quorum, or all.

        NotVerified if fewer did. `time` is that of the last leaf. A key that took over from another is the same witness.
        """
        at = int(system.time()) if now is None else now
        quorum = None if self.ring is None else self.ring.quorum
        wanted = len({self._last_key(each) for each in self._of_role(Role.WITNESS, now)}) if quorum is None else quorum
        counted = self.cosigned(note, time, at, refuse_later=True)
        if len(counted) < wanted:
            why = 'all that the key ring has, as it states no "quorum"' if quorum is None else "the key ring's quorum"
            problem = f"{len(counted)} trusted witnesses cosigned it, {wanted} must: {why}"
            remedy = "ask the witnesses, or get a copy with cosignatures"
            raise NotVerified("ledger.quorum-not-reached", problem, remedy)
        return len(counted), wanted

    def cosigned(self, note: Note, time: int, now: int, *, refuse_later: bool = False) -> dict[bytes, int]:
        """Return the witnesses of the key ring that cosigned a checkpoint, each with its newest time of signing.

        `time` is that of the last leaf. Raises NotVerified if a cosignature is wrong or older than the last leaf, and
        with `refuse_later` also if it is later than `now`.
        """
        found: dict[bytes, int] = {}
        for each in self._of_role(Role.WITNESS, now):
            named = WitnessQuorum(0, (WitnessKey(each.label, each.key),))
            for signed in named.cosigned(note, now=now if refuse_later else None, since=time).values():
                if each.standing(now, signed) is KeyStatus.USABLE:
                    found[self._last_key(each)] = max(signed, found.get(self._last_key(each), 0))
        return found

    def names(self, role: Role) -> bool:
        """Return whether the key ring has keys of this role. If so, only those count."""
        return self.ring is not None and any(each.role == role.name.lower() for each in self.ring)

    def _last_key(self, entry: KeyEntry) -> bytes:
        """The key that signs today for whom this one signed."""
        for _ in self.ring or ():  # a ring that was written by hand may go in circles
            entry = (self.ring.get(entry.replaced_by) if self.ring and entry.replaced_by else None) or entry
        return entry.id

    def contributors(self) -> KeyRing | None:
        """The ring, if it has keys of contributors: then no others count."""
        return self.ring if self.names(Role.CONTRIBUTOR) else None

    def _of_role(self, role: Role, now: int | None) -> list[KeyEntry]:
        at = int(system.time()) if now is None else now
        mine = () if self.ring is None else (each for each in self.ring if each.role == role.name.lower())
        return [each for each in mine if each.standing(at, each.valid_from) is KeyStatus.USABLE]


def _no_keys(path: Path, why: str = "") -> LedgerError:
    remedy = "give a key ring (JSON), a public key (PEM), or verifier keys of the ledger, one a line"
    return LedgerError("verify.no-trusted-keys", f"'{path}' holds no keys to trust{why}", remedy)


@dataclass(frozen=True, slots=True)
class KnownCheckpoint:
    """A checkpoint of the same ledger that was kept earlier, or by somebody else."""

    head: LedgerCheckpoint
    note: Note

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> KnownCheckpoint:
        """Read a file with a signed checkpoint."""
        return cls.parse(read_small(Path(path), "the checkpoint", most=_MOST_CHECKPOINT_BYTES))

    @classmethod
    def parse(cls, data: str | bytes) -> KnownCheckpoint:
        return cls(*notes.parse_checkpoint(data))


def known_checkpoints(given: Iterable[str | bytes | KnownCheckpoint]) -> list[KnownCheckpoint]:
    """The checkpoints, sorted by size."""
    made = [each if isinstance(each, KnownCheckpoint) else KnownCheckpoint.parse(each) for each in given]
    return sorted(made, key=lambda each: each.head.size)


@dataclass(slots=True)
class AggregateTally:
    """Sums over the leaves of one aggregate: contributions by class, their latest times, and the digest of all hashes."""

    aggregate: Aggregate
    counts: Counter[str] = field(default_factory=Counter)
    pruned: int = 0  # of these, without a body
    latest: int = -1
    expires: int = -1
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)


class AggregateTallies:
    """The tallies of all aggregates, by the leaf of each. Their spans are known before the replay reaches them."""

    def __init__(self, aggregates: Mapping[int, Aggregate]) -> None:
        self._tallies = {seq: AggregateTally(aggregate) for seq, aggregate in aggregates.items()}
        self._spans: list[tuple[int, int, int]] = []
        for span in sorted((span.first, span.stop, seq) for seq, each in aggregates.items() for span in each.spans):
            if not self._spans or span[0] >= self._spans[-1][1]:
                self._spans.append(span)
            elif span[2] < self._spans[-1][2]:  # the later of two that overlap is refused when it is reached
                self._spans[-1] = span
        self._first: Ints = np.array([first for first, _, _ in self._spans], dtype=np.int64)

    def of(self, seq: int) -> AggregateTally | None:
        """The tally of the aggregate in that leaf."""
        return self._tallies.get(seq)

    def add(self, cls: str, seq: Ints, time: Ints, expires: Ints, pruned: bool) -> int | None:
        """Count contributions of a class, with or without bodies; the first without one that no aggregate covers."""
        if not self._spans:
            return int(seq.min()) if pruned else None
        at = np.searchsorted(self._first, seq, side="right") - 1
        left = np.full(len(seq), pruned)
        for place in np.unique(at[at >= 0]).tolist():
            first, stop, owner = self._spans[place]
            inside = (seq >= first) & (seq < stop)
            if inside.any():
                tally, count = self._tallies[owner], int(inside.sum())
                tally.counts[cls] += count
                tally.pruned += pruned * count
                tally.latest = max(tally.latest, int(time[inside].max()))
                tally.expires = max(tally.expires, int(expires[inside].max()))
                left[inside] = False
        return int(seq[left].min()) if left.any() else None

    def hashes(self, first: int, hashes: Sequence[bytes]) -> None:
        """Digest leaf hashes, in order."""
        stop = first + len(hashes)
        start = max(int(np.searchsorted(self._first, first, side="right")) - 1, 0)
        for begin, end, owner in islice(self._spans, start, None):
            if begin >= stop:
                break
            self._tallies[owner].digest.update(b"".join(hashes[max(begin - first, 0) : max(end - first, 0)]))


class AggregateChecks:
    """Checks of aggregates, which stand for pruned bodies."""

    def __init__(self, header: Header, keys: GovernanceState, tallies: AggregateTallies) -> None:
        self._header, self._keys, self._tallies = header, keys, tallies
        self._spans: list[LeafSpan] = []
        self.not_countersigned = 0

    def see(
        self, leaf: Leaf, withdrawn: Mapping[int, int], spent: Mapping[str, int],
        of_class: Callable[[str, Sequence[int]], int],
    ) -> None:  # fmt: skip
        """`withdrawn` are the targets of withdrawals before it, `spent` is the largest spend of each class.

        `of_class` counts those among leaves that are of a class.
        """
        record, seq = leaf.record, leaf.seq
        assert isinstance(record, Aggregate)

        def wrong(code: str, reason: str) -> NoReturn:
            fail(seq, Aggregate, code, reason)

        if record.horizon + self._keys.retention > leaf.time:
            reason = (
                f"at {format_utc(leaf.time)} it prunes contributions until {format_utc(record.horizon)}, the ledger keeps "
                f"them for {self._keys.retention} s"
            )
            wrong("verify.pruned-before-retention", reason)
        if record.spans[-1].stop > seq:
            reason = f"it stands for leaves until {record.spans[-1].stop}, after itself"
            wrong("verify.aggregate-of-later-leaves", reason)
        self._spans = sorted([*self._spans, *record.spans], key=lambda span: span.first)
        for one, two in pairwise(self._spans):
            if two.first < one.stop:
                wrong("verify.aggregates-overlap", f"an earlier aggregate stands for leaf {two.first} already")
        tally = self._tallies.of(seq)
        if tally is None or tally.aggregate != record:
            wrong("verify.aggregate-index-differs", "the store lists another aggregate here than the leaf")
        if tally.latest >= record.horizon:
            horizon = f"its horizon is {format_utc(record.horizon)}"
            reason = f"a contribution admitted at {format_utc(tally.latest)}, {horizon}"
            wrong("verify.pruned-beyond-horizon", f"it prunes {reason}")
        if tally.expires > leaf.time:
            reason = f"it prunes a contribution that expires later, at {format_utc(tally.expires)}"
            wrong("verify.pruned-before-expiry", reason)
        if tally.digest.digest() != record.digest:
            wrong("verify.aggregate-digest-differs", "its digest does not match its leaves")
        stated = {each.cls: each.count for each in record.classes}
        for cls in sorted(stated.keys() | tally.counts.keys()):
            if stated.get(cls, 0) != tally.counts[cls]:
                reason = f"it counts {stated.get(cls, 0)} contributions of class {cls!r}, {tally.counts[cls]} are there"
                wrong("verify.aggregate-count-differs", reason)
        starts = [span.first for span in record.spans]  # in order
        gone = [seq for seq in withdrawn if (at := bisect_right(starts, seq)) and seq < record.spans[at - 1].stop]
        for each in record.classes:
            if each.withdrawn != (there := of_class(each.cls, gone)):
                reason = f"it counts {each.withdrawn} withdrawn contributions of class {each.cls!r}, there are {there}"
                wrong("verify.aggregate-withdrawn-differs", reason)
            if each.spend != (found := spent.get(each.cls, 0)):
                reason = f"class {each.cls!r} has spend {each.spend} (1e-9), {found} by the epochs"
                wrong("verify.aggregate-spend-differs", reason)
        message = record.message(self._header.origin)
        signers, broken = self._keys.signers(message, record.signatures, (Role.AUDITOR,), leaf.time)
        if broken is not None:
            wrong(broken.code, f"a countersignature does not count: {broken.reason}")
        self.not_countersigned += not signers


class ReplayedTree:
    """The tree over the leaves.

    Tiles are not evidence: every root is compared with what was signed. But where a leaf and its tile differ, the tile
    tells which leaf was edited.
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
        """Position in `hashes` (of the next leaves) of the first hash that differs from its tile."""
        at, first = 0, self.size
        while at < len(hashes):
            index, inside = divmod(first + at, TILE_WIDTH)
            part = hashes[at : at + TILE_WIDTH - inside]
            if self._tile[0] != index:
                self._tile = (index, self._rows.tile(0, index))
            if (tile := self._tile[1]) is None:
                reason = f"{tile_path(0, index)} is missing"
                fail(first + at, TILE, "verify.tile-missing", reason)
            found, made = tile[inside * HASH_SIZE : (inside + len(part)) * HASH_SIZE], b"".join(part)
            if found != made:
                same = (found[HASH_SIZE * k : HASH_SIZE * (k + 1)] == one for k, one in enumerate(part))
                return at + list(same).index(False)
            at += len(part)
        return None

    def extend(self, hashes: Sequence[bytes]) -> None:
        self._tallies.hashes(self.size, hashes)
        self.frontier.extend(hashes, self._check)

    def _check(self, level: int, first: int, row: bytes) -> None:
        """Compare computed hashes of complete subtrees with the tile that holds them."""
        if level == 0 or level % TILE_HEIGHT:
            return
        for at in range(0, len(row), HASH_SIZE):
            index, inside = divmod(first + at // HASH_SIZE, TILE_WIDTH)
            tile = self._rows.tile(level // TILE_HEIGHT, index) or b""
            if tile[HASH_SIZE * inside : HASH_SIZE * (inside + 1)] != row[at : at + HASH_SIZE]:
                leaf = (first + at // HASH_SIZE) << level
                name = tile_path(level // TILE_HEIGHT, index)
                reason = f"{name} has another hash for leaves [{leaf}, {leaf + (1 << level)})"
                fail(leaf, TILE, "verify.tile-hash-differs", reason)


class CheckpointChecks:
    """Checks of the stored checkpoints, made as the tree reaches the size of each.

    Each must be of the tree over the leaves, signed by a key of the ledger that may sign then (`GovernanceState`).
    """

    def __init__(
        self, header: Header, stored: Sequence[StoredCheckpoint], trusted: Sequence[PublicKey] | None,
        trust: Trust | None = None, now: int | None = None, *, cosigned: bool = True,
    ) -> None:  # fmt: skip
        """`trusted` are the only ledger keys that count, with those that take over from them; `trust` has witnesses."""
        self._header, self._origin, self._trust_file, self._now = header, header.origin, trust, now
        self._last = max((each.size for each in stored), default=0) if cosigned else -1  # which witnesses must cosign
        self._stored = sorted(stored, key=lambda each: each.size)
        self._next = 0
        self.signed_size = 0  # leaves that checkpoints cover
        self.digests: dict[bytes, int] = {}  # checkpoint reached → size
        self.roots: dict[int, bytes] = {}  # of checkpoints reached, by size
        self._trusted: dict[bytes, PublicKey] | None = None if trusted is None else {key.id: key for key in trusted}
        self.trusted = 0  # leaves that checkpoints by trusted keys cover
        self.count = 0

    def sizes(self) -> list[int]:
        """Tree sizes to stop at."""
        return [each.size for each in self._stored]

    def reached(self, tree_size: int, root: bytes, time: int, keys: GovernanceState) -> None:
        """Check the checkpoints of this tree size. `time` is that of the last leaf."""
        while self._next < len(self._stored) and self._stored[self._next].size == tree_size:
            self._check(self._stored[self._next], root, time, keys)
            self._next += 1

    def _fail(self, code: str, reason: str) -> NoReturn:
        fail(self.signed_size, CHECKPOINT, code, reason)

    def _check(self, stored: StoredCheckpoint, root: bytes, time: int, keys: GovernanceState) -> None:
        name = f"the checkpoint of {stored.size} leaves"
        try:
            head, note = notes.parse_checkpoint(stored.text)
        except EncodingError as error:
            self._fail("verify.checkpoint-unreadable", f"{name} cannot be read: {error.problem}")
        if head.origin != self._origin:
            self._fail("verify.checkpoint-of-other-ledger", f"{name} is of another ledger, {head.origin!r}")
        if head.size != stored.size or head.extensions:
            self._fail("verify.checkpoint-wrong-size", f"{name} says {head.size} leaves")
        if head.root != root:
            leaves = f"[{self.signed_size}, {head.size})"
            reason = f"{name} has another root: one of the leaves {leaves} was changed"
            self._fail("verify.checkpoint-root-differs", reason)
        self._seal(head, stored.seal, self._signature(head, note, time, keys))
        self._witnesses(head, note, time, keys)
        keys.covered(head.size)
        self.roots[head.size] = head.root
        self._trust(head, note, keys)
        self.signed_size, self.count = head.size, self.count + 1
        self.digests[hashlib.sha256(note.text.encode()).digest()] = head.size

    def _signature(
        self, head: LedgerCheckpoint, note: Note, time: int, keys: GovernanceState
    ) -> dict[bytes, PublicKey]:
        """The keys of the ledger that signed it and may; at least one must."""
        name = f"the checkpoint of {head.size} leaves"
        violation = Violation("verify.checkpoint-unsigned", "no key of the ledger signed it")
        found: dict[bytes, PublicKey] = {}
        for known in keys.histories(Role.LEDGER):
            kid = known.public.id
            signed = note_signed_by(note, NoteKey(self._origin, known.public))
            if signed is False:
                reason = f"key {kid.hex()[:16]} did not sign the text of {name}"
                self._fail("verify.checkpoint-signature-invalid", reason)
            if signed and (wrong := keys.why_not_signing(kid, time)) is not None:
                violation = Violation(wrong.code, f"key {kid.hex()[:16]} {wrong.reason}")
            elif signed:
                found[kid] = known.public
        if not found:
            self._fail(violation.code, f"{name} is not signed by a valid key of the ledger: {violation.reason}")
        return found

    def _seal(self, head: LedgerCheckpoint, seal: bytes, signers: Mapping[bytes, PublicKey]) -> None:
        """Check the second signature, from which receipts are made: one of the signers of the first made it."""
        made = TreeSignature(head.origin, head.size, head.root, seal[:32], seal[32:])
        if seal[:32] not in signers or not made.holds(signers[seal[:32]]):
            reason = f"the receipt signature of the checkpoint of {head.size} leaves is not by a key that signed it"
            self._fail("verify.receipt-signature-invalid", reason)

    def _witnesses(self, head: LedgerCheckpoint, note: Note, time: int, keys: GovernanceState) -> None:
        """Check that cosignatures are valid and not older than the last leaf."""
        name = f"the checkpoint of {head.size} leaves"
        try:
            count = len(keys.cosigned(note, time, self._now))
            keys.cosigned(note, time, self._now, Role.LEDGER)  # heartbeats, which count towards no quorum
        except LedgerError as error:
            early = error.code == "ledger.cosignature-too-old"
            code = "verify.cosigned-before-last-leaf" if early else "verify.cosignature-invalid"
            self._fail(code, f"{name}: {error.problem}")
        if head.size != self._last:
            return
        if count < keys.witnesses:
            reason = f"{count} witnesses cosigned {name}, the ledger asks for {keys.witnesses}"
            self._fail("verify.too-few-cosignatures", reason)
        if self._trust_file is not None:
            try:
                self._trust_file.check_witnesses(note, time, self._now)
            except LedgerError as error:
                fail(self.signed_size, TRUSTED_KEYS, "verify.too-few-trusted-cosignatures", f"{name}: {error.problem}")

    def _trust(self, head: LedgerCheckpoint, note: Note, keys: GovernanceState) -> None:
        if self._trusted is None:
            return
        if any(note_signed_by(note, NoteKey(self._origin, key)) for key in self._trusted.values()):
            self.trusted = head.size
            first = {key.id for key in self._header.keys}
            for known in keys.histories(Role.LEDGER):  # keys named in leaves that a trusted key signed
                if known.public.id not in first:
                    self._trusted.setdefault(known.public.id, known.public)

    def finish(self, size: int) -> None:
        """After the last leaf, no checkpoint of a longer tree may be left."""
        if self._next < len(self._stored):
            reason = f"{self._stored[self._next].size} leaves were signed, {size} are there: the ledger was truncated"
            fail(size, CHECKPOINT, "verify.ledger-truncated", reason)

    def accepted(self, keys: GovernanceState) -> Mapping[bytes, PublicKey]:
        """The keys whose signatures of known checkpoints count: all keys that counted.

        With trusted keys only these, unless one of them signed the tree: then it vouches for the keys named in it.
        """
        if self._trusted is not None and not self.trusted:
            return self._trusted
        found = [each.public for each in keys.histories(Role.LEDGER)]
        return {**{public.id: public for public in found}, **(self._trusted or {})}


def note_signed_by(note: Note, key: NamedKey) -> bool | None:
    """Whether a key signed the note; None if it says nothing, False if what it says is wrong."""
    lines = [each.value for each in note.signatures if (each.name, each.key_id) == (key.name, key.id)]
    return all(key.holds(note.text, value) for value in lines) if lines else None


SIGNED_ANEW = "the ledger was signed anew, this is another ledger, or the trusted keys are not those of its owner"


class KnownCheckpointChecks:
    """Compare the tree with checkpoints that the auditor kept, as it reaches their sizes."""

    def __init__(self, seen: Sequence[KnownCheckpoint], origin: str) -> None:
        self._seen, self._origin = list(seen), origin
        self._agreed = 0  # leaves up to which the ledger agrees
        self._forked: Finding | None = None

    def __bool__(self) -> bool:
        return bool(self._seen)

    def sizes(self, size: int) -> set[int]:
        """Tree sizes to stop at."""
        return {each.head.size for each in self._seen if each.head.size <= size}

    def reached(self, size: int, root: bytes) -> None:
        for each in self._seen:
            if each.head.size != size or self._forked is not None:
                continue
            if each.head.root == root:
                self._agreed = size
            else:
                reason = f"{_known_checkpoint_text(size)} has another root: the ledger was forked"
                self._forked = Finding(self._agreed, KNOWN_CHECKPOINT, "verify.ledger-forked", reason)

    def finish(self, size: int, keys: Iterable[PublicKey]) -> None:
        """After the last leaf. `keys` are those whose signatures count."""
        accepted = [NoteKey(self._origin, key) for key in keys]
        for each in self._seen:
            seen, name = each.head.size, _known_checkpoint_text(each.head.size)
            if each.head.origin != self._origin:
                reason = f"{name} is of another ledger, {each.head.origin!r}"
                fail(None, KNOWN_CHECKPOINT, "verify.known-checkpoint-of-other-ledger", reason)
            if not any(note_signed_by(each.note, key) for key in accepted):
                reason = f"{name} is signed by no key of this ledger"
                reason += ": the ledger was signed anew, or this is another ledger"
                fail(None, KNOWN_CHECKPOINT, "verify.known-checkpoint-of-other-key", reason)
            if seen > size:
                reason = f"{name} is longer than the ledger, which has {size}: the ledger was rolled back"
                fail(size, KNOWN_CHECKPOINT, "verify.ledger-rolled-back", reason)
        if self._forked is not None:
            raise VerificationStopped(self._forked)


def _known_checkpoint_text(size: int) -> str:
    return f"the known checkpoint of {size} leaves"
