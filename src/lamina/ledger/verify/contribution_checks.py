"""Checks of contributions (position, time, signed bound, key, attestation, no repeats) and of withdrawals."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import NoReturn

import numpy as np

from lamina.account.charges import Account
from lamina.admit.attestation import Attestation, SignedTerms, window_rules
from lamina.errors import AdmissionError, EncodingError
from lamina.ledger.contribution_columns import Contribution, ContributionColumns, Flags, Ints, Prefixes, read_columns
from lamina.ledger.governance_records import Role, Withdrawal
from lamina.ledger.key_state import GovernanceState, KeyState, PolicyInForce, Violation, contributor_key
from lamina.ledger.records import (
    KIND_NAMES,
    ContributionRecord,
    ContributionTerms,
    Epoch,
    KeptContribution,
    Leaf,
    Segment,
    SegmentOutcome,
    decode_leaf,
)
from lamina.ledger.schema import pluralize
from lamina.ledger.store.rows import LeafBlock, StoreReader
from lamina.ledger.verify.tree_checks import AggregateTallies, Finding, fail, fail_unreadable
from lamina.ledger.withdrawal_request import withdrawal_target, withdrawal_violation
from lamina.sign.key_ring import KeyRing
from lamina.sign.keys import CLOCK_SKEW, format_utc

_REPEATED = {
    "descriptor": Violation("verify.descriptor-repeated", "its descriptor is in the ledger already"),
    "attestation": Violation("verify.attestation-repeated", "its attestation is in the ledger already"),
    "subject": Violation("verify.subject-repeated", "its subject is in the ledger already"),
}
_TOKEN_REPEATED = Violation("verify.token-repeated", "its attestation has a token that is in the ledger already")


class _PrefixColumn:
    """(leaf, first 8 bytes of a digest) of many leaves."""

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
        """Groups of leaves with the same prefix."""
        seqs = np.concatenate([*self._seqs, np.array(self._single[0], dtype=np.int64)])
        prefixes = np.concatenate([*self._prefixes, np.array(self._single[1], dtype=np.uint64)])
        ranked = np.sort(prefixes)
        if not (ranked[1:] == ranked[:-1]).any():
            return []
        order = np.argsort(prefixes)
        ranked = prefixes[order]
        twin = np.zeros(len(ranked) + 1, dtype=np.bool_)
        twin[1:-1] = ranked[1:] == ranked[:-1]
        starts = np.flatnonzero(~twin[:-1] & twin[1:])
        stops = np.flatnonzero(twin[:-1] & ~twin[1:]) + 1
        return [sorted(seqs[order[a:b]].tolist()) for a, b in zip(starts, stops, strict=True)]


class RepeatChecks:
    """Finds descriptors, attestations, subjects and tokens that are in the ledger twice.

    Of each digest 8 bytes are kept, and equal ones are read in full at the end: some 30 bytes for a contribution, where
    a set of digests would take 400.
    """

    def __init__(self) -> None:
        self._columns = {name: _PrefixColumn() for name in _REPEATED}
        self.tokens: dict[bytes, int] = {}  # (key, cti) of an attestation → leaf
        self._token_twice: tuple[int, int] | None = None

    def columns(self, group: ContributionColumns) -> None:
        self._columns["descriptor"].many(group.seq, group.descriptor)
        if group.attestation is not None:
            self._columns["attestation"].many(group.seq, group.attestation)
        if group.subject is not None:
            self._columns["subject"].many(group.seq, group.subject)

    def one(self, seq: int, record: Contribution) -> None:
        self._columns["descriptor"].one(seq, record.descriptor)
        if isinstance(record, ContributionRecord):
            self._columns["attestation"].one(seq, record.attestation)
        if record.subject is not None:
            self._columns["subject"].one(seq, record.subject)

    def token(self, seq: int, token: bytes) -> None:
        """Add (key, cti) of an attestation."""
        before = self.tokens.setdefault(token, seq)
        if before != seq and self._token_twice is None:
            self._token_twice = (seq, before)

    def first(self, rows: StoreReader) -> Finding | None:
        """The first leaf that repeats another."""
        found = [
            _repeated(seq, before, _REPEATED[name])
            for name, column in self._columns.items()
            for group in column.equal()
            for seq, before in _equal_values(rows, group, name)
        ]
        if self._token_twice is not None:
            found.append(_repeated(*self._token_twice, _TOKEN_REPEATED))
        return min(found, key=lambda each: each.index or 0, default=None)


def _repeated(seq: int, before: int, what: Violation) -> Finding:
    reason = f"{what.reason}, in leaf {before}: it was replayed"
    return Finding(seq, KIND_NAMES[ContributionRecord], what.code, reason)


def _equal_values(rows: StoreReader, group: list[int], name: str) -> Iterator[tuple[int, int]]:
    seen: dict[bytes, int] = {}
    for seq in group:
        data = rows.leaf(seq)
        assert data is not None
        value: bytes = getattr(decode_leaf(data).record, name)
        before = seen.setdefault(value, seq)
        if before != seq:
            yield seq, before


class AttestationChecks:
    """Checks the signature of each contribution with the key that counted when it was admitted."""

    def __init__(self, origin: str, header_hash: bytes, keys: KeyState, ring: KeyRing | None) -> None:
        self._origin, self._header_hash, self._keys, self._ring = origin, header_hash, keys, ring
        self.checked = self.unbound = 0  # unbound: they name no ledger

    def check(self, leaf: Leaf, data: bytes | None) -> bytes:
        """The token (key, cti) of a contribution whose attestation is these bytes."""
        record, seq = leaf.record, leaf.seq
        assert isinstance(record, ContributionRecord)

        def wrong(code: str, reason: str) -> NoReturn:
            fail(seq, ContributionRecord, code, reason)

        if data is None:
            wrong("verify.attestation-missing", "its attestation is missing, though it is not pruned")
        if sha256(data).digest() != record.attestation:
            wrong("verify.attestation-swapped", "its stored attestation does not have the digest in the leaf")
        try:
            signed = Attestation.decode(data)
        except (EncodingError, AdmissionError) as error:
            wrong("verify.attestation-unreadable", f"its attestation cannot be read: {error.problem}")
        name = f"key {record.key.hex()[:16]}"
        if signed.kid != record.key:
            reason = f"key {signed.kid.hex()[:16]} made its attestation, the leaf names {name}"
            wrong("verify.attestation-of-other-key", reason)
        key = contributor_key(self._keys, self._ring, record.key, leaf.time, signed.iat)
        if isinstance(key, Violation):
            wrong(*key)
        registered = None if self._ring is None else self._ring.get(record.key)
        if registered is not None and signed.alg not in registered.algorithms:
            reason = f"it is signed with algorithm {signed.alg}, {name} is for {registered.algorithms}"
            wrong("verify.attestation-algorithm", reason)
        if signed.iat > leaf.time + CLOCK_SKEW:
            times = f"signed at {format_utc(signed.iat)}, admitted at {format_utc(leaf.time)}"
            wrong("verify.admitted-before-signed", f"{times}: the leaf was back-dated")
        if not signed.signed_by(key, record.descriptor):
            wrong("verify.attestation-signature-invalid", f"{name} did not sign its attestation over its descriptor")
        if signed.aud != self._origin:
            wrong("verify.attestation-for-other-ledger", f"its attestation is for another ledger, {signed.aud!r}")
        if not signed.may_enter(self._header_hash):
            wrong("verify.attestation-bound-elsewhere", "its attestation names another ledger of this origin")
        if (signed.nbf, signed.exp) != (record.not_before, record.expires):
            wrong("verify.attestation-window-differs", "its attestation has another validity window than the leaf")
        if signed.tag != (None if record.subject is None else record.subject.hex()):
            wrong("verify.attestation-subject-differs", "its attestation is about another subject than the leaf")
        if (differs := _terms_difference(record, signed)) is not None:
            wrong(*differs)
        self.checked += 1
        self.unbound += signed.ledger is None
        return signed.kid + signed.cti

    def notes(self) -> Iterator[str]:
        """What could not be checked."""
        if self.unbound:
            names = pluralize(self.unbound, "contribution names", "contributions name")
            yield f"{names} no ledger: another ledger of this origin may hold the same, each within its bound"


_TERM_DIFFERS = {  # field of `SignedTerms` → what a leaf that says otherwise is called
    "public": Violation("verify.attestation-public-differs", "public or private in its attestation"),
    "admissibility": Violation("verify.attestation-class-differs", "class in its attestation"),
    "data_class": Violation("verify.attestation-data-class-differs", "data class in its attestation"),
    "clip_norm": Violation("verify.attestation-clip-norm-differs", "clip norm in its attestation"),
    "noise_multiplier": Violation("verify.attestation-noise-differs", "noise multiplier in its attestation"),
    "profile": Violation("verify.attestation-depth-differs", "depth profile in its attestation"),
}
_ANCHOR_DIFFERS = Violation("verify.attestation-anchor-differs", "its attestation has another anchor than the leaf")


def recorded_terms(record: ContributionRecord) -> SignedTerms:
    """The terms of use in a leaf, as an attestation has them."""
    terms = record.terms
    bound = terms.clip_norm, terms.noise_multiplier
    return SignedTerms(terms.cls, terms.data_class, *bound, not terms.noise_multiplier, terms.profile)


def _terms_difference(record: ContributionRecord, signed: Attestation) -> Violation | None:
    """Where the leaf does not repeat what was signed. Publicness first: who hides a private contribution hides its ε."""
    if (said := recorded_terms(record)) != signed.terms:
        for name, (code, what) in _TERM_DIFFERS.items():
            if (theirs := getattr(signed.terms, name)) != (ours := getattr(said, name)):
                return Violation(code, f"{what}: {theirs!r}, in the leaf: {ours!r}")
    return None if record.anchor == signed.anchor else _ANCHOR_DIFFERS


class AdmittedMembers:
    """The leaf, expiry and key of every contribution, by the bound that it signed: who was eligible when."""

    def __init__(self, policy: PolicyInForce, keys: KeyState, withdrawn: Mapping[int, int]) -> None:
        """`withdrawn` maps a withdrawn leaf to the leaf that withdraws it."""
        self._policy, self._keys, self._withdrawn = policy, keys, withdrawn
        self._columns: dict[Account, tuple[array[int], array[int], array[int]]] = {}
        self._first: dict[Account | str, int] = {}  # the first leaf of a bound, and of a class
        self._ever: Counter[str] = Counter()  # by class, whatever became of them

    def add(self, bound: Account, seqs: Ints, expires: Ints, keys: Prefixes) -> None:
        """A key is 0 where the body that names it is pruned."""
        columns, first = self._columns.setdefault(bound, (array("q"), array("q"), array("Q"))), int(seqs.min())
        for column, values in zip(columns, (seqs, expires, keys), strict=True):
            column.frombytes(values.tobytes())
        for name in (bound, bound.cls):
            self._first[name] = min(first, self._first.get(name, first))
        self._ever[bound.cls] += len(seqs)

    def signed(self, name: Account | str, before: int) -> bool:
        """Whether somebody in the first `before` leaves signed this bound, or any of this class; also if they left."""
        return self._first.get(name, before) < before

    def bounds(self, cls: str, before: int) -> list[Account]:
        """The bounds of a class that somebody in the first `before` leaves signed."""
        return [bound for bound in self._columns if bound.cls == cls and self.signed(bound, before)]

    def count(self, bound: Account, before: int, time: int, *, sure: bool = True) -> int:
        """How many with a bound are in the first `before` leaves, and not withdrawn in them, nor expired or revoked at `time`.

        Of whom only the leaf is left, nobody knows the key. If another was revoked they do not count, unless not `sure`.
        """
        columns = self._columns.get(bound, (array("q"), array("q"), array("Q")))
        seqs, expires, keys = (np.frombuffer(column, dtype=column.typecode) for column in columns)
        gone = [target for target, seq in self._withdrawn.items() if seq < before]
        known = self._keys.histories(Role.CONTRIBUTOR)
        kids = (each.key.id for each in known if each.revoked is not None and time >= each.revoked)
        revoked = [int.from_bytes(kid[:8], "little") for kid in kids]
        unsure = [*revoked, 0] if revoked and sure else revoked  # whose key is not known may be one of them
        stand = (seqs < before) & (expires > time) & ~np.isin(seqs, gone)
        return int(np.count_nonzero(stand & ~np.isin(keys, np.array(unsure, dtype=np.uint64))))

    def eligible(self, bound: Account, before: int, time: int, *, sure: bool = True) -> bool:
        """Whether the policy admits the bound, and somebody has it; of a class as a whole, any bound of it."""
        cls, clip, noise = bound
        if cls not in self._policy.presets or (noise and self._policy.bound_violation(cls, clip, noise) is not None):
            return False
        bounds = [bound] if noise else self.bounds(cls, before)
        return any(self.count(each, before, time, sure=sure) for each in bounds)

    def of_class(self, cls: str, leaves: Sequence[int]) -> int:
        """How many of these leaves are contributions of a class."""
        seqs = (columns[0] for bound, columns in self._columns.items() if bound.cls == cls)
        return sum(int(np.isin(np.frombuffer(each, dtype=np.int64), leaves).sum()) for each in seqs)

    def exceed(self, cls: str, most: float, before: int, time: int) -> bool:
        """Whether a class had more than `most` members. They are counted only if so many were ever admitted."""
        if self._ever[cls] <= most:
            return False
        return sum(self.count(bound, before, time) for bound in self.bounds(cls, before)) > most


class ContributionChecks:
    """Checks of contributions, block by block. Only 8 bytes of each digest are kept."""

    def __init__(
        self, policy: PolicyInForce, keys: KeyState, attestations: AttestationChecks | None,
        tallies: AggregateTallies, ring: KeyRing | None, members: AdmittedMembers, latest: int,
    ) -> None:  # fmt: skip
        self._ring = ring
        self._policy, self._keys, self._attestations, self._tallies = policy, keys, attestations, tallies
        self._members = members
        self.repeats = RepeatChecks()
        self.count = self.pruned = 0
        self._latest = latest
        self._judged: tuple[int, dict[ContributionTerms, Violation | None]] = (-1, {})

    def block(self, first: int, data: LeafBlock, time: int, epoch: int, evidence: Mapping[int, bytes]) -> int:
        """Check consecutive leaves from `first` on; the time of the last one."""
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
                read[row] = decode_leaf(data[row])
            except EncodingError as error:
                self._upto(row, first, data, times, suspect, read, time, epoch)
                fail_unreadable(first + row, error)
            times[row], suspect[row] = read[row].time, True
        self._upto(len(data), first, data, times, suspect, read, time, epoch)
        if self._attestations is not None:
            for row, body in enumerate(data.bodies):
                if body is None:
                    continue
                leaf = read.get(row) or decode_leaf(data[row])
                self.repeats.token(first + row, self._attestations.check(leaf, evidence.get(first + row)))
        for group in groups:
            self._remember_group(group)
        for found in read.values():
            self._remember_one(found)
        self.count += len(data)
        return int(times[-1])

    def _upto(
        self, stop: int, first: int, data: LeafBlock, times: Ints, suspect: Flags, read: Mapping[int, Leaf],
        time: int, epoch: int,
    ) -> None:  # fmt: skip
        """Check the suspects before `stop` one by one; time must not fall anywhere."""
        before = np.concatenate(([time], times[: max(stop - 1, 0)]))
        for row in np.flatnonzero(suspect[:stop] | (times[:stop] < before)).tolist():
            found = read.get(row) or decode_leaf(data[row])
            self.check(found, first + row, int(before[row]), epoch)

    def check(self, leaf: Leaf, index: int, time: int, epoch: int) -> None:
        """Check one contribution: everything that `_suspects` checks of many, with its reason."""
        record = leaf.record
        assert isinstance(record, Contribution)
        check_position(leaf, index, time, epoch, self._latest)
        admitted = f"it was admitted at {format_utc(leaf.time)}"
        begin = record.not_before if isinstance(record, ContributionRecord) else 0  # gone with the body
        early, expired = window_rules(leaf.time, begin, record.expires)
        if early:
            reason = f"{admitted}, before it was valid, at {format_utc(begin)}"
            fail(index, ContributionRecord, "verify.admitted-before-valid", reason)
        if expired:
            reason = f"{admitted}, after it expired, at {format_utc(record.expires)}"
            fail(index, ContributionRecord, "verify.admitted-after-expiry", reason)
        if isinstance(record, ContributionRecord):
            wrong = self._terms_violation(record.terms) or self._key_violation(record.key, leaf.time)
        else:
            wrong = self._policy.bound_violation(*record.bound)
        if wrong is not None:
            fail(index, ContributionRecord, *wrong)

    def _suspects(self, group: ContributionColumns, first: int, epoch: int) -> Flags:
        """Which leaves `check` would refuse; perhaps a few others too."""
        if not len(group.rows):
            return np.zeros(0, dtype=np.bool_)
        times = int(group.time.min()), int(group.time.max())
        terms, cls = group.terms, group.bound
        wrong = self._policy.bound_violation(*cls) if terms is None else self._terms_violation(terms)
        if wrong is not None or any(self._key_violation(kid, at) is not None for kid in group.kids for at in times):
            return np.ones(len(group.rows), dtype=np.bool_)
        begin = 0 if group.not_before is None else group.not_before
        early, expired = window_rules(group.time, begin, group.expires)
        found: Flags = (group.seq != group.rows + first) | (group.epoch != epoch) | early | expired
        return found | (group.time > self._latest)

    def _key_violation(self, kid: bytes, at: int) -> Violation | None:
        """Why a contributor's key does not count at `at`, as far as that shows without the attestation."""
        found = contributor_key(self._keys, self._ring, kid, at, None)
        return found if isinstance(found, Violation) else None

    def _terms_violation(self, terms: ContributionTerms) -> Violation | None:
        if self._judged[0] != self._policy.version:
            self._judged = (self._policy.version, {})
        known = self._judged[1]
        if terms not in known:
            known[terms] = self._policy.violation(terms)
        return known[terms]

    def _remember_group(self, group: ContributionColumns) -> None:
        if not len(group.rows):
            return
        self.repeats.columns(group)
        self._remember(group.bound, group.seq, group.time, group.expires, group.key)

    def _remember_one(self, leaf: Leaf) -> None:
        record = leaf.record
        assert isinstance(record, Contribution)
        self.repeats.one(leaf.seq, record)
        seq, time, expires = (np.array([each], dtype=np.int64) for each in (leaf.seq, leaf.time, record.expires))
        kid = record.key[:8] if isinstance(record, ContributionRecord) else None
        key = None if kid is None else np.array([int.from_bytes(kid, "little")], dtype=np.uint64)
        self._remember(record.bound, seq, time, expires, key)

    def _remember(self, bound: Account, seq: Ints, time: Ints, expires: Ints, keys: Prefixes | None) -> None:
        """Count contributions as members, and for their aggregates. Those without a body, and so a key, must have one."""
        pruned = keys is None
        self._members.add(bound, seq, expires, np.zeros(len(seq), dtype=np.uint64) if keys is None else keys)
        self.pruned += pruned * len(seq)
        if (alone := self._tallies.add(bound.cls, seq, time, expires, pruned)) is not None:
            reason = "its body is missing, and no aggregate stands for it: it was deleted"
            fail(alone, ContributionRecord, "verify.body-missing", reason)


def check_position(leaf: Leaf, index: int, time: int, epoch: int, latest: int) -> None:
    """Check that a leaf states its own index, the number of epochs before it, and a time.

    That must not fall, and not be after `latest`, which is the verifier's.
    """
    if leaf.seq != index:
        reason = f"it says that it is leaf {leaf.seq}: it was moved, or other leaves were removed"
        fail(index, leaf.kind, "verify.leaf-moved", reason)
    if leaf.time < time:
        reason = f"its time {format_utc(leaf.time)} is before that of the previous leaf, {format_utc(time)}"
        fail(index, leaf.kind, "verify.time-falls", f"{reason}: it was back-dated")
    if leaf.time > latest:
        reason = f"its time {format_utc(leaf.time)} is in the future: a clock is wrong, here or where it was written"
        fail(index, leaf.kind, "verify.time-in-future", reason)
    if leaf.epoch != epoch:
        reason = f"it counts {leaf.epoch} epochs before it, there are {epoch}"
        fail(index, leaf.kind, "verify.epoch-count-wrong", reason)


class WithdrawalChecks:
    """Checks of withdrawals. `targets` maps a withdrawn leaf to the leaf that withdraws it."""

    def __init__(self, rows: StoreReader, keys: GovernanceState, ring: KeyRing | None) -> None:
        self._rows, self._keys, self._ring = rows, keys, ring
        self.unsigned = self.of_pruned = 0  # by the keeper alone; signed, of a contribution whose body is gone
        self.targets: dict[int, int] = {}
        # run → (first segment without it, leaf, target)
        self._excluded_from: dict[bytes, list[tuple[int, int, int]]] = {}

    def see(self, leaf: Leaf, contribution: bool) -> None:
        """`contribution` is whether its target is one."""
        record, seq = leaf.record, leaf.seq
        assert isinstance(record, Withdrawal)
        if not contribution:
            reason = f"it withdraws leaf {record.target}, which is no contribution before it"
            fail(seq, Withdrawal, "verify.withdrawal-of-no-contribution", reason)
        if (before := self.targets.setdefault(record.target, seq)) != seq:
            reason = f"leaf {record.target} is withdrawn already, in leaf {before}"
            fail(seq, Withdrawal, "verify.withdrawn-twice", reason)
        data = None if record.request is None else self._rows.evidence(seq)
        if data is not None and sha256(data).digest() != record.request:
            reason = "its stored request does not have the digest in the leaf"
            fail(seq, Withdrawal, "verify.withdrawal-request-swapped", reason)
        of = withdrawal_target(self._rows, record)
        if (wrong := withdrawal_violation(record, of, leaf.time, self._keys, self._ring)) is not None:
            fail(seq, Withdrawal, *wrong)
        self.unsigned += record.signed is None
        self.of_pruned += isinstance(of, KeptContribution)
        if record.run is not None and record.segment is not None:
            self._excluded_from.setdefault(record.run, []).append((record.segment, seq, record.target))

    def check_segment(self, index: int, run: bytes, segment: Segment) -> None:
        """Check that a segment which had to exclude a contribution read its members after the withdrawal."""
        if segment.outcome is SegmentOutcome.ABANDONED:
            return
        for first, seq, target in self._excluded_from.get(run, ()):
            if segment.index >= first and segment.eligibility <= seq:
                reason = (
                    f"segment {segment.index} of run {run.hex()[:8]} read its members before leaf {seq}, which "
                    f"withdraws leaf {target} from it"
                )
                fail(index, Epoch, "verify.withdrawal-ignored", reason)
