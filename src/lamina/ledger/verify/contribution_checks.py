"""Checks of contributions, many at once as columns.

Position, time, signed bound, key and attestation; that each is there once; and withdrawals.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lamina.admit.attestation import Attestation
from lamina.admit.keys import LAST_SECOND, format_utc
from lamina.errors import AdmissionError, EncodingError
from lamina.ledger import records
from lamina.ledger import records as leaves
from lamina.ledger.governance_records import Preset, Withdrawal
from lamina.ledger.records import (
    KIND_NAMES,
    KIND_NUMBERS,
    UINT_PATTERN,
    ContributionRecord,
    ContributionTerms,
    Epoch,
    Leaf,
    Segment,
    SegmentOutcome,
)
from lamina.ledger.schema import CLOCK_SKEW
from lamina.ledger.store.interface import StoreReader
from lamina.ledger.verify.replay_state import LEAF, Finding, PolicyInForce, ReplayedKeys, fail
from lamina.ledger.verify.tree_checks import AggregateTallies

# Many contributions at once: the fields of their leaves as columns, without a Python object for each.
#
# Leaves of contributions differ in a few places of known width and are the same everywhere else. So one of them is
# read by the strict reader, and the others are compared with it byte by byte where they must be the same. What is not
# the same is grouped again, or left to the strict reader: nothing is ever read here that `leaf.decode` would refuse.

Ints = NDArray[np.int64]
Prefixes = NDArray[np.uint64]  # the first 8 bytes of digests

_MOST_LAYOUTS = 32  # different layouts in one block; the rest is read one by one
_FEWEST_ROWS = 16  # fewer leaves than these are read one by one
_KIND = bytes((KIND_NUMBERS[ContributionRecord],))
_LAYOUT = re.compile(
    rb"\xa5\x01" + re.escape(_KIND) + rb"\x02" + UINT_PATTERN + rb"\x03" + UINT_PATTERN + rb"\x04" + UINT_PATTERN + rb"\x05"
    rb"[\xa6-\xa8]\x01\x58\x20(.{32})\x02\x58\x20(.{32})\x03\x58\x20(.{32})\x04" + UINT_PATTERN + rb"\x05" + UINT_PATTERN + rb"\x06",
    re.DOTALL,
).match  # fmt: skip
_SEQ, _TIME, _EPOCH, _DESCRIPTOR, _ATTESTATION, _KEY, _BEGIN, _END = range(1, 9)  # groups
_NUMBERS = (_SEQ, _TIME, _EPOCH, _BEGIN, _END)
_TAIL = 35  # bytes of an anchor or a subject: key, head, digest


@dataclass(frozen=True, slots=True)
class ContributionColumns:
    """Contributions of one layout and one set of terms. `rows` are their places in the block, in order.

    `kids` are the different keys that signed.
    """

    rows: Ints
    seq: Ints
    time: Ints
    epoch: Ints
    not_before: Ints
    expires: Ints
    terms: ContributionTerms
    descriptor: Prefixes
    attestation: Prefixes
    subject: Prefixes | None
    key: Prefixes
    kids: frozenset[bytes]


def other_kinds(data: Sequence[bytes]) -> list[int]:
    """The places of leaves that do not begin like one of a contribution."""
    start = b"\xa5\x01" + _KIND
    return [at for at, one in enumerate(data) if one[:3] != start]


def read_columns(block: Sequence[bytes]) -> Iterator[ContributionColumns | Ints]:
    """The block in groups; of what fits in none, the places of the leaves to be read one by one."""
    left: list[Ints] = []
    lengths = np.fromiter(map(len, block), np.int64, len(block))
    for length in dict.fromkeys(lengths.tolist()):
        rows = np.flatnonzero(lengths == length)
        for _ in range(_MOST_LAYOUTS):
            if len(rows) < _FEWEST_ROWS:
                break
            found = _same_layout_group(block, rows, length)
            if found is None:
                left.append(rows[:1])
                rows = rows[1:]
                continue
            made, rows = found
            yield made
        left.append(rows)
    if len(alone := np.sort(np.concatenate(left))) if left else 0:
        yield alone


def _same_layout_group(block: Sequence[bytes], rows: Ints, length: int) -> tuple[ContributionColumns, Ints] | None:
    """All leaves that are laid out like the first, and the others; None if the first is nothing to compare with."""
    model = block[int(rows[0])]
    layout = _LAYOUT(model)
    try:
        first = records.decode_leaf(model).record
    except EncodingError:
        return None
    if layout is None or not isinstance(first, ContributionRecord):
        return None
    spans = {group: layout.span(group) for group in range(1, 9)}
    anchored = length - _TAIL * (first.subject is not None)
    free = np.zeros(length, dtype=np.bool_)
    for group, (start, stop) in spans.items():
        free[start + (group in _NUMBERS and stop - start > 1) : stop] = True  # the width of a number stays
    if first.anchor is not None:
        free[anchored - 32 : anchored] = True
    if first.subject is not None:
        free[length - 32 :] = True
    table = np.frombuffer(b"".join([block[row] for row in rows.tolist()]), np.uint8).reshape(-1, length)
    same = (table[:, ~free] == table[0, ~free]).all(axis=1)
    numbers = {group: _number_column(table, *spans[group]) for group in _NUMBERS}
    for group in _NUMBERS:
        start, stop = spans[group]
        same &= numbers[group] >= _LEAST_BY_WIDTH[stop - start]
        if stop - start == 1:
            same &= numbers[group] < 24
    same &= (numbers[_TIME] <= LAST_SECOND) & (numbers[_BEGIN] < numbers[_END]) & (numbers[_END] <= LAST_SECOND)
    kept, others = rows[same], rows[~same]
    start, stop = spans[_KEY]

    def prefixes(at: int) -> Prefixes:
        return np.ascontiguousarray(table[same, at : at + 8]).view("<u8").ravel()

    return ContributionColumns(
        rows=kept,
        seq=numbers[_SEQ][same],
        time=numbers[_TIME][same],
        epoch=numbers[_EPOCH][same],
        not_before=numbers[_BEGIN][same],
        expires=numbers[_END][same],
        terms=first.terms,
        descriptor=prefixes(spans[_DESCRIPTOR][0]),
        attestation=prefixes(spans[_ATTESTATION][0]),
        subject=None if first.subject is None else prefixes(length - 32),
        key=prefixes(start),
        kids=frozenset([block[row][start:stop] for row in kept.tolist()]),
    ), others


_LEAST_BY_WIDTH = {1: 0, 2: 24, 3: 1 << 8, 5: 1 << 16, 9: 1 << 32}  # by width: smaller numbers are written shorter


def _number_column(table: NDArray[np.uint8], start: int, stop: int) -> Ints:
    """A column of CBOR numbers of one width; what is above 2^63 becomes negative, and with it out of range."""
    if stop - start == 1:
        return table[:, start].astype(np.int64)
    kind = {2: ">u1", 3: ">u2", 5: ">u4", 9: ">u8"}[stop - start]
    return np.ascontiguousarray(table[:, start + 1 : stop]).view(kind).ravel().astype(np.int64)


# What may be in a ledger once: a descriptor, an attestation, a subject, and a contributor's token.
#
# Of each, the first eight bytes are kept as a column; at the end, equal ones are looked at in full. That is some thirty
# bytes for a contribution, where a set of digests would take four hundred.

_UNIQUE_FIELDS = {
    "descriptor": "the contribution", "attestation": "the attestation", "subject": "whoever it is about",
}  # fmt: skip


class _PrefixColumn:
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


class RepeatChecks:
    """The columns of a ledger."""

    def __init__(self) -> None:
        self._columns = {name: _PrefixColumn() for name in _UNIQUE_FIELDS}
        self._tokens: dict[bytes, int] = {}
        self._again: tuple[int, int] | None = None

    def columns(self, group: ContributionColumns) -> None:
        """Contributions of one layout."""
        self._columns["descriptor"].many(group.seq, group.descriptor)
        self._columns["attestation"].many(group.seq, group.attestation)
        if group.subject is not None:
            self._columns["subject"].many(group.seq, group.subject)

    def one(self, seq: int, record: ContributionRecord) -> None:
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

    def first(self, rows: StoreReader) -> Finding | None:
        """The first leaf that repeats another."""
        found = [
            Finding(
                seq,
                KIND_NAMES[ContributionRecord],
                "verify.ledger-already-leaf-replayed",
                f"{_UNIQUE_FIELDS[name]} is in the ledger already, as leaf {before}: it was replayed",
            )
            for name, column in self._columns.items()
            for group in column.equal()
            for seq, before in _equal_values(rows, group, name)
        ]
        if self._again is not None:
            seq, before = self._again
            found.append(
                Finding(
                    seq,
                    KIND_NAMES[ContributionRecord],
                    "verify.attestation-token-leaf",
                    f"the attestation has the token of leaf {before}: it was replayed",
                )
            )
        return min(found, key=lambda each: each.index or 0, default=None)


def _equal_values(rows: StoreReader, group: list[int], name: str) -> Iterator[tuple[int, int]]:
    seen: dict[bytes, int] = {}
    for seq in group:
        data = rows.leaf(seq)
        if data is None:
            continue
        value: bytes = getattr(leaves.decode_leaf(data).record, name)
        before = seen.setdefault(value, seq)
        if before != seq:
            yield seq, before


Token = Callable[[int, bytes], None]


class AttestationChecks:
    """Checks the signature of each contribution with the key that counted when it was admitted."""

    def __init__(self, origin: str, keys: ReplayedKeys) -> None:
        self._origin, self._keys = origin, keys
        self.checked = 0

    def check(self, leaf: Leaf, data: bytes | None) -> bytes:
        """The token (key, cti) of a contribution whose attestation is these bytes."""
        record, seq = leaf.record, leaf.seq
        assert isinstance(record, ContributionRecord)
        if data is None:
            fail(
                seq,
                ContributionRecord,
                "verify.attestation-not-not",
                "its attestation is not there, and it is not pruned",
            )
        if hashlib.sha256(data).digest() != record.attestation:
            fail(
                seq,
                ContributionRecord,
                "verify.attestation-beside-another",
                "the attestation beside it is another one than it names",
            )
        try:
            signed = Attestation.decode(data)
        except (EncodingError, AdmissionError) as error:
            fail(
                seq,
                ContributionRecord,
                "verify.attestation-not-read",
                f"its attestation cannot be read: {error.problem}",
            )
        if signed.kid != record.key:
            fail(
                seq,
                ContributionRecord,
                "verify.attestation-key-not",
                f"its attestation is by key {signed.kid.hex()[:16]}, not {record.key.hex()[:16]}",
            )
        key = self._keys.contributor(record.key, leaf.time, signed.iat)
        if isinstance(key, str):
            fail(seq, ContributionRecord, "verify.check", key)
        if signed.iat > leaf.time + CLOCK_SKEW:
            fail(
                seq,
                ContributionRecord,
                "verify.signed-admitted-leaf",
                f"signed at {format_utc(signed.iat)}, admitted at {format_utc(leaf.time)}: the leaf was back-dated",
            )
        if not signed.signed_by(key, record.descriptor):
            fail(
                seq,
                ContributionRecord,
                "verify.signature-attestation-not",
                f"the signature of its attestation is not by key {record.key.hex()[:16]} over it",
            )
        if signed.aud != self._origin:
            fail(
                seq,
                ContributionRecord,
                "verify.attestation-signed-another",
                f"its attestation was signed for {signed.aud!r}, another ledger",
            )
        if (signed.nbf, signed.exp) != (record.not_before, record.expires):
            fail(
                seq,
                ContributionRecord,
                "verify.attestation-valid-another",
                "its attestation is valid in another window than the leaf says",
            )
        if signed.tag != (None if record.subject is None else record.subject.hex()):
            fail(
                seq,
                ContributionRecord,
                "verify.attestation-another-subject",
                "its attestation is about another subject than the leaf says",
            )
        self.checked += 1
        return signed.kid + signed.cti


Bound = tuple[str, int, int]


class LongestEligible(NamedTuple):
    """The contribution of a bound that stays eligible longest: as long as it does, somebody has this bound."""

    seq: int
    expires: int
    key: bytes


class ContributionChecks:
    """Contributions as they come, block by block. Nothing is kept of single ones but eight bytes of each digest."""

    def __init__(
        self,
        policy: PolicyInForce,
        keys: ReplayedKeys,
        attestations: AttestationChecks | None,
        tallies: AggregateTallies,
    ) -> None:
        self._policy, self._keys, self._attestations = policy, keys, attestations
        self._tallies = tallies
        self.repeats = RepeatChecks()
        self.longest_eligible: dict[Bound, LongestEligible] = {}
        self.count = 0
        self._judged: tuple[int, dict[ContributionTerms, str | None]] = (-1, {})

    def block(self, first: int, data: Sequence[bytes], time: int, epoch: int, evidence: Mapping[int, bytes]) -> int:
        """Leaves that follow each other, the first of them at `first`; the time of the last one."""
        times = np.empty(len(data), dtype=np.int64)
        suspect = np.zeros(len(data), dtype=np.bool_)
        groups: list[ContributionColumns] = []
        alone: Ints = np.empty(0, dtype=np.int64)
        for group in read_columns(data):
            if isinstance(group, ContributionColumns):
                groups.append(group)
                times[group.rows] = group.time
                suspect[group.rows] = self._suspects(group, first, epoch)
            else:
                alone = group
        read: dict[int, Leaf] = {}
        for row in alone.tolist():
            try:
                read[row] = leaves.decode_leaf(data[row])
            except EncodingError as error:
                self._upto(row, first, data, times, suspect, read, time, epoch)
                fail(first + row, LEAF, "verify.block", error.problem)
            times[row], suspect[row] = read[row].time, True
        self._upto(len(data), first, data, times, suspect, read, time, epoch)
        self._attested(first, data, read, evidence)
        for group in groups:
            self._remember_group(group, data)
        for row, found in read.items():
            self._remember_one(row, found)
        self.count += len(data)
        return int(times[-1])

    def _upto(
        self,
        stop: int,
        first: int,
        data: Sequence[bytes],
        times: Ints,
        suspect: np.ndarray[tuple[int], np.dtype[np.bool_]],
        read: Mapping[int, Leaf],
        time: int,
        epoch: int,
    ) -> None:
        """Look closely at the suspects before `stop`; time must not fall anywhere."""
        before = np.concatenate(([time], times[: max(stop - 1, 0)]))
        for row in np.flatnonzero(suspect[:stop] | (times[:stop] < before)).tolist():
            found = read.get(row) or leaves.decode_leaf(data[row])
            self.check(found, first + row, int(before[row]), epoch)

    def check(self, leaf: Leaf, index: int, time: int, epoch: int) -> None:
        """One contribution by itself: everything that `_suspect` asks of many, in words."""
        record = leaf.record
        assert isinstance(record, ContributionRecord)
        check_position(leaf, index, time, epoch)
        if leaf.time + CLOCK_SKEW < record.not_before:
            fail(
                index,
                ContributionRecord,
                "verify.admitted-valid",
                f"admitted at {format_utc(leaf.time)}, valid from {format_utc(record.not_before)}",
            )
        if leaf.time >= record.expires + CLOCK_SKEW:
            fail(
                index,
                ContributionRecord,
                "verify.admitted-expired",
                f"admitted at {format_utc(leaf.time)}, expired at {format_utc(record.expires)}",
            )
        if (wrong := self._terms_problem(record.terms)) is not None:
            fail(index, ContributionRecord, "verify.check-2", wrong)
        if (wrong := self._keys.contributor_problem(record.key, leaf.time)) is not None:
            fail(index, ContributionRecord, "verify.check-2", wrong)

    def _suspects(
        self, group: ContributionColumns, first: int, epoch: int
    ) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Of which leaves `check` would find something wrong; perhaps of a few others too."""
        if not len(group.rows):
            return np.zeros(0, dtype=np.bool_)
        times = int(group.time.min()), int(group.time.max())
        if self._terms_problem(group.terms) is not None or self._keys.bars(group.kids, *times):
            return np.ones(len(group.rows), dtype=np.bool_)
        found: np.ndarray[tuple[int], np.dtype[np.bool_]] = (
            (group.seq != group.rows + first)
            | (group.epoch != epoch)
            | (group.time + CLOCK_SKEW < group.not_before)
            | (group.time >= group.expires + CLOCK_SKEW)
        )
        return found

    def _terms_problem(self, terms: ContributionTerms) -> str | None:
        if self._judged[0] != self._policy.version:
            self._judged = (self._policy.version, {})
        known = self._judged[1]
        if terms not in known:
            known[terms] = self._policy.wrong(terms)
        return known[terms]

    # ----------------------------------------------------------------------------------- signatures

    def _attested(
        self, first: int, data: Sequence[bytes], read: Mapping[int, Leaf], evidence: Mapping[int, bytes]
    ) -> None:
        if self._attestations is None:
            return
        for row, one in enumerate(data):
            leaf = read.get(row) or leaves.decode_leaf(one)
            self.repeats.token(first + row, self._attestations.check(leaf, evidence.get(first + row)))

    # ----------------------------------------------------------------------------------- what is kept

    def _remember_group(self, group: ContributionColumns, data: Sequence[bytes]) -> None:
        if not len(group.rows):
            return
        self.repeats.columns(group)
        self._tallies.columns(group)
        if group.terms.noise_multiplier:
            row = int(np.argmax(group.expires))
            known = self.longest_eligible.get(group.terms.bound)
            if known is None or int(group.expires[row]) > known.expires:
                record = leaves.decode_leaf(data[int(group.rows[row])]).record
                assert isinstance(record, ContributionRecord)
                self._live(int(group.seq[row]), record)

    def _remember_one(self, row: int, leaf: Leaf) -> None:
        record = leaf.record
        assert isinstance(record, ContributionRecord)
        self.repeats.one(leaf.seq, record)
        self._tallies.one(leaf.seq, leaf.time, record)
        if record.terms.noise_multiplier:
            self._live(leaf.seq, record)

    def _live(self, seq: int, record: ContributionRecord) -> None:
        known = self.longest_eligible.get(record.bound)
        if known is None or record.expires > known.expires:
            self.longest_eligible[record.bound] = LongestEligible(seq, record.expires, record.key)

    def eligible(self, bound: Bound, before: int, time: int) -> bool:
        """Whether somebody of that class, with that bound if it is one, is surely eligible.

        Admitted before that leaf, and at that time neither expired nor signed by a revoked key nor below the policy.
        """
        cls, clip, noise = bound
        found = (
            (self.longest_eligible.get(bound),)
            if noise
            else [own for key, own in self.longest_eligible.items() if key[0] == cls]
        )
        preset = self._policy.presets.get(cls)
        if preset is None or (noise and not self._allowed(preset, clip, noise)):
            return False
        return any(
            own is not None and own.seq < before and own.expires > time and not self._keys.revoked(own.key, time)
            for own in found
        )

    def _allowed(self, preset: Preset, clip: int, noise: int) -> bool:
        floors = self._policy.floors
        least = max(floors.noise_multiplier, preset.noise_multiplier)
        return floors.clip_norm <= clip <= preset.clip_norm and noise >= least

    def gone(self, seq: int) -> None:
        """A contribution was withdrawn. Whether another with its bound is left is not remembered."""
        for bound, known in list(self.longest_eligible.items()):
            if known.seq == seq:
                del self.longest_eligible[bound]


def check_position(leaf: Leaf, index: int, time: int, epoch: int) -> None:
    """Every leaf: it says where it stands, its time does not fall, and it counts the epochs before it."""
    if leaf.seq != index:
        fail(
            index,
            leaf.kind,
            "verify.says-leaf-moved",
            f"it says that it is leaf {leaf.seq}: it was moved here, or others were taken out",
        )
    if leaf.time < time:
        fail(
            index,
            leaf.kind,
            "verify.leaf-before-back",
            f"it is of {format_utc(leaf.time)}, the leaf before it of {format_utc(time)}: it was back-dated",
        )
    if leaf.epoch != epoch:
        fail(
            index,
            leaf.kind,
            "verify.comes-after-epochs",
            f"it comes after {leaf.epoch} epochs by its own count, {epoch} are before it",
        )


class WithdrawalChecks:
    """The withdrawals that were read: target → leaf."""

    def __init__(self, rows: StoreReader) -> None:
        self._rows = rows
        self.targets: dict[int, int] = {}
        self._excluded_from: dict[bytes, list[tuple[int, int]]] = {}  # run → (first segment without it, leaf)

    def see(self, leaf: Leaf, contribution: bool) -> None:
        """`contribution` is whether its target is one."""
        record, seq = leaf.record, leaf.seq
        assert isinstance(record, Withdrawal)
        if not contribution:
            fail(
                seq,
                Withdrawal,
                "verify.withdraws-leaf-no",
                f"it withdraws leaf {record.target}, which is no contribution before it",
            )
        if (before := self.targets.setdefault(record.target, seq)) != seq:
            fail(
                seq,
                Withdrawal,
                "verify.leaf-withdrawn-already",
                f"leaf {record.target} was withdrawn already, in leaf {before}",
            )
        data = None if record.request is None else self._rows.evidence(seq)
        if data is not None and hashlib.sha256(data).digest() != record.request:
            fail(seq, Withdrawal, "verify.request-beside-another", "the request beside it is another one than it names")
        if record.run is not None and record.segment is not None:
            self._excluded_from.setdefault(record.run, []).append((record.segment, seq))

    def check_segment(self, index: int, run: bytes, segment: Segment) -> None:
        """A segment that was to be without a contribution was frozen after its withdrawal, or given up."""
        if segment.outcome is SegmentOutcome.ABANDONED:
            return
        for first, seq in self._excluded_from.get(run, ()):
            if segment.index >= first and segment.eligibility <= seq:
                fail(
                    index,
                    Epoch,
                    "verify.segment-run-without",
                    f"segment {segment.index} of run {run.hex()[:8]} was to be without leaf "
                    f"{self._target(seq)} (withdrawn in leaf {seq}), and its members were read before that",
                )

    def _target(self, seq: int) -> int:
        return next(target for target, withdrawn in self.targets.items() if withdrawn == seq)
