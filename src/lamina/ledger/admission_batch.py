"""Admission into a ledger: contributors' keys, the membership index, batches of contributions, the gate's register."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice
from typing import TypeVar

import numpy as np

from lamina.admit import reasons
from lamina.admit.attestation import Attestation, Descriptor, window_rules
from lamina.admit.reasons import ContributionRefused, Reason, other_ledger
from lamina.admit.register import (
    ADMITTED_MEANWHILE,
    REASON_OF_STATUS,
    EntryContext,
    RefusedRows,
    Register,
    RegisterStatus,
    class_full,
)
from lamina.admit.rows import Admitted
from lamina.errors import LedgerError
from lamina.ledger.checked_leaves import CheckedLeaves, admission_token
from lamina.ledger.contribution_columns import ContributionColumns, Ints, descriptor_key, subject_key
from lamina.ledger.corpus_terms import CorpusTerms, adopt_policy, check_corpus_terms, open_or_create
from lamina.ledger.governance_records import MAX_KEY_EVENTS, Key, KeyChange, KeyEvent, KeyEvents, Role
from lamina.ledger.key_state import GovernanceState, KeyState, PolicyInForce
from lamina.ledger.records import ContributionRecord, ContributionTerms, Record
from lamina.ledger.store.rows import StoreReader, head_of
from lamina.ledger.writer import ConcurrentAppend, Ledger, append_if_size
from lamina.plan.policy import Policy
from lamina.sign.key_ring import KeyEntry, KeyRing
from lamina.sign.keys import PrivateKey

# The keys of contributors in a ledger: whose signatures count, as a key ring has it, so that an auditor needs none.
#
# ring           ledger
# a key          ADD, before the first contribution that it signed
# rotated        ROTATE: what the old key signed before stays good
# revoked        REVOKE, from the instant that the ring says; again only if that moves to earlier
#
# Where the ledger has an owner elsewhere, only the owner writes these: a key that is in the ring alone is refused.
# Labels of a ring are not written: they may be names of people or places.

NOT_ENROLLED = "the ledger does not name it: its owner enrols it with lamina ledger key LEDGER enrol keys.json"
_REASON_OF_KEY_PROBLEM = {
    "verify.key-wrong-role": reasons.WRONG_ROLE,
    "verify.key-revoked": reasons.REVOKED_KEY,
    "verify.key-not-yet-valid": reasons.EARLY_KEY,
    "verify.key-expired": reasons.RETIRED_KEY,
    "verify.key-replaced": reasons.RETIRED_KEY,
}


def _key_refusal(keys: KeyState, kid: bytes, at: int, issued: int, owned: bool) -> tuple[Reason, str] | None:
    """Why the ledger, which may have an owner elsewhere, does not accept at `at` what this key signed at `issued`."""
    if (known := keys.history(kid)) is None:
        return reasons.UNKNOWN_KEY, NOT_ENROLLED if owned else ""
    wrong = known.contributor_problem(at, issued)
    return None if wrong is None else (_REASON_OF_KEY_PROBLEM[wrong.code], f"in the ledger, {wrong.reason}")


def missing_key_events(known: KeyState, ring: KeyRing, kids: Iterable[bytes] = ()) -> list[KeyEvent]:
    """What the ledger does not say yet of the keys that it holds and of `kids`, in an order that it accepts.

    Nothing of keys that are no contributor's, by the ring or by the ledger.
    """
    wanted, now, found = set(kids), known.after(()), list[KeyEvent]()

    def add(event: KeyEvent) -> None:
        now.apply_event(event, 0)
        found.append(event)

    entries = (entry for entry in ring if entry.role == "contributor")
    for entry in sorted(entries, key=lambda each: each.valid_from):  # a new key comes after the one that it replaces
        if entry.id in wanted and now.get(entry.id) is None:
            add(KeyEvent(change=KeyChange.ADD, key=_record_key(entry), effective=entry.valid_from))
        own = now.history(entry.id)
        if own is None or own.key.role is not Role.CONTRIBUTOR:
            continue
        heir = None if entry.replaced_by is None else ring.get(entry.replaced_by)
        if heir is not None and own.replaced is None and now.get(heir.id) is None:
            assert entry.retired_from is not None
            add(KeyEvent(change=KeyChange.ROTATE, key=_record_key(heir), target=entry.id, effective=entry.retired_from))
        if entry.revoked_from is not None and (own.revoked is None or entry.revoked_from < own.revoked):
            add(KeyEvent(change=KeyChange.REVOKE, target=entry.id, effective=entry.revoked_from))
    return found


def append_key_ring(ledger: Ledger, ring: KeyRing, kids: Iterable[bytes] = ()) -> int:
    """Let the ledger say what the ring says of the keys that the ledger holds, and of `kids`; how many events.

    What is said already is not said again. With the ledger's key a checkpoint covers it. Nothing is written, and 0
    returned, if the governing key is not here.
    """
    wanted, written = list(kids), 0

    def missing(state: GovernanceState) -> KeyEvents | None:
        nonlocal written
        found = missing_key_events(state, ring, wanted)[:MAX_KEY_EVENTS] if ledger.governs else []
        written += len(found)
        return KeyEvents(events=tuple(found)) if found else None

    while ledger.govern_by(missing) is not None:
        pass
    return written


def _record_key(entry: KeyEntry) -> Key:
    name = f"contributor-{entry.key.name[:8]}"
    return Key(name=name, x=entry.key.x, role=Role.CONTRIBUTOR, valid_from=entry.valid_from)


T = TypeVar("T")


class ClassMembership:
    """The contributions of a ledger by class, each with its leaf and its end.

    ever  how many of each class were admitted: never less than those who stand
    """

    def __init__(self) -> None:
        self._read: Sequence[object] = ()  # the groups of contributions, of which so many were counted
        self._counted = 0
        self.ever_admitted: Counter[str] = Counter()
        self._parts: dict[str, list[tuple[Ints, Ints]]] = {}  # leaf, expires

    def follow(self, rows: StoreReader, leaves: CheckedLeaves) -> None:
        """Add the contributions of all checked leaves that were not read yet."""
        found = leaves.contributions(rows)
        if found is not self._read:  # the leaves were read again, and may be grouped otherwise
            self.__init__()  # type: ignore[misc]
        for each in islice(found, self._counted, None):
            if isinstance(each, ContributionColumns):
                self._add(each.bound.cls, each.seq, each.expires)
            elif each.contribution is not None:
                self._add(each.contribution.cls, [each.seq], [each.contribution.expires])
        self._read, self._counted = found, len(found)

    def count_members(self, cls: str, now: int, withdrawn: Collection[int]) -> int:
        """Return how many contributions of a class are neither expired at `now` nor in `withdrawn`."""
        parts = self._parts.get(cls)
        if parts is None:
            return 0
        seqs, ends = (np.concatenate(column) for column in zip(*parts, strict=True))
        self._parts[cls] = [(seqs, ends)]
        gone = np.fromiter(withdrawn, dtype=np.int64)
        return int(np.count_nonzero((ends > now) & ~np.isin(seqs, gone)))

    def _add(self, cls: str, seqs: Sequence[int] | Ints, expires: Sequence[int] | Ints) -> None:
        part = np.asarray(seqs, dtype=np.int64), np.asarray(expires, dtype=np.int64)
        self._parts.setdefault(cls, []).append(part)
        self.ever_admitted[cls] += len(part[0])


class MembershipIndex:
    """Answers inside a transaction, by the leaves that it sees. What it remembers is only how far it has read."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._members = ClassMembership()

    def look(self, rows: StoreReader, entries: Sequence[Admitted]) -> list[RegisterStatus]:
        """Return what the ledger records about each entry."""
        checked = self._ledger.checked(rows)
        names = [descriptor_key(entry.descriptor) for entry in entries]
        subjects = [None if entry.tag is None else subject_key(entry.tag) for entry in entries]
        there = dict(checked.find(rows, [*names, *(one for one in subjects if one is not None)]))
        tokens = rows.tokens([admission_token(entry.kid, entry.cti) for entry in entries])
        leaves = checked.leaves(rows, sorted({there[name] for name in names if name in there}))
        withdrawn = checked.withdrawals(rows)
        now, keys = self._ledger.reading_time(), self._ledger.governance(rows).histories(Role.CONTRIBUTOR)
        revoked = {each.public.id for each in keys if each.revoked is not None and now >= each.revoked}

        def status(entry: Admitted, name: bytes, subject: bytes | None) -> RegisterStatus:
            if entry.kid in revoked:
                return RegisterStatus.REVOKED
            seq = there.get(name)
            data = None if seq is None else leaves.get(seq)
            if data is None or entry.descriptor not in data.leaf:  # keys are parts of digests
                if seq is not None or admission_token(entry.kid, entry.cti) in tokens:
                    return RegisterStatus.REPLAYED
                return RegisterStatus.REPRESENTED if subject in there else RegisterStatus.NEW
            if seq in withdrawn:
                return RegisterStatus.WITHDRAWN
            same = data.body is not None and entry.attestation in data.body
            return RegisterStatus.SAME if same else RegisterStatus.REPLAYED

        return list(map(status, entries, names, subjects))

    def count_members(self, rows: StoreReader, cls: str, now: int) -> int:
        """Return how many contributions of a class are neither withdrawn nor expired."""
        checked = self._ledger.checked(rows)
        self._members.follow(rows, checked)
        return self._members.count_members(cls, now, checked.withdrawals(rows))

    def free_places(self, rows: StoreReader, cls: str, places: int, wanted: int, now: int) -> int:
        """Return how many of `wanted` places are free; members are counted only if the class could be full."""
        checked = self._ledger.checked(rows)
        self._members.follow(rows, checked)
        if self._members.ever_admitted[cls] + wanted <= places:
            return wanted
        return max(0, places - self._members.count_members(cls, now, checked.withdrawals(rows)))


class AdmissionBatch:
    """Decided by what the ledger says, then written if it still says so; both may be repeated.

    `refused` are the rows that may not enter, and why.
    """

    def __init__(
        self, ledger: Ledger, index: MembershipIndex, entries: Sequence[Admitted], beside: EntryContext
    ) -> None:
        self._ledger, self._index, self._entries, self._context = ledger, index, entries, beside
        self._read: dict[int, tuple[ContributionRecord, bytes]] = {}  # record and attestation by row, read once
        self._unreadable: RefusedRows = {}  # the rows that could not be read
        self._size = 0
        self._keys: list[KeyEvents] = []
        self._owned = False  # whether somebody else must enrol keys that the ledger does not name
        self._new: list[Admitted] = []
        self.refused: RefusedRows = {}

    def decide(self) -> None:
        """Who is new and may enter, by the leaves so far."""
        self.refused, self._new, self._keys = {}, [], []
        now = self._ledger.now()
        with self._ledger.store.read() as rows:
            self._size = head_of(rows).size
            state = self._ledger.governance(rows)
            new = self._new_entries(rows, state, now)
            if new:
                self._choose(rows, state, new, now)

    def _new_entries(self, rows: StoreReader, state: GovernanceState, now: int) -> list[Admitted]:
        """Those who are not in the ledger. Who is, and has a key that the ledger revoked, does not stand any more."""
        new = []
        for entry, known in zip(self._entries, self._index.look(rows, self._entries), strict=True):
            if known in REASON_OF_STATUS:
                final = known in (RegisterStatus.WITHDRAWN, RegisterStatus.REVOKED)
                detail = "" if final else ADMITTED_MEANWHILE
                self.refused[entry.row] = REASON_OF_STATUS[known], detail
            elif known is RegisterStatus.NEW:
                new.append(entry)
            elif (why := _key_refusal(state, entry.kid, now, entry.issued, owned=False)) is not None:
                self.refused[entry.row] = why
        return new

    def _choose(self, rows: StoreReader, state: GovernanceState, new: Sequence[Admitted], now: int) -> None:
        policy = PolicyInForce(self._ledger.header, state.policy)
        known = {entry.kid: state.get(entry.kid) for entry in new}
        missing = {kid for kid, key in known.items() if key is None or key.role is not Role.CONTRIBUTOR}
        events = missing_key_events(state, self._context.keys, missing) if missing else []
        self._owned = bool(missing) and not self._ledger.governs
        events = [] if self._owned else events
        keys = state.after(events)
        wanted = Counter(entry.cls for entry in new)
        free = {
            cls: self._index.free_places(rows, cls, places, count, now)
            for cls, count in wanted.items()
            if (places := self._context.places[cls]) is not None
        }
        for entry in new:
            if (why := self._refusal(entry, keys, now)) is not None:
                self.refused[entry.row] = why
            elif not free.get(entry.cls, 1):
                self.refused[entry.row] = class_full(entry.cls, self._context.places[entry.cls])
            else:
                if (wrong := policy.violation(self._read[entry.row][0].terms)) is not None:
                    problem = f"the ledger {self._ledger.name} has another policy than the gate: {wrong.reason}"
                    remedy = "update it first: lamina admit --ledger does, or lamina.ledger.corpus_terms.adopt_policy"
                    raise LedgerError("ledger.policy-differs", problem, remedy)
                self._new.append(entry)
                if entry.cls in free:
                    free[entry.cls] -= 1
        if self._new and events:
            self._keys = [self._ledger.authorise(KeyEvents(events=tuple(events)), rows)]

    def _refusal(self, entry: Admitted, keys: KeyState, now: int) -> tuple[Reason, str] | None:
        if window_rules(now, 0, entry.expires)[1]:
            return reasons.EXPIRED, ""
        if (why := _key_refusal(keys, entry.kid, now, entry.issued, self._owned)) is not None:
            return why
        if entry.row not in self._read and entry.row not in self._unreadable:
            try:
                self._read[entry.row] = _read_evidence(entry, self._context, self._ledger.header_hash)
            except ContributionRefused as error:
                self._unreadable[entry.row] = error.reason, error.detail
        return self._unreadable.get(entry.row)

    def write(self) -> None:
        """Append them, with keys that the ledger does not hold yet; ConcurrentAppend if others appended."""
        if not self._new:
            return
        signed = [self._read[entry.row] for entry in self._new]
        try:
            records: list[Record] = [*self._keys, *(record for record, _ in signed)]
            append_if_size(self._ledger, self._size, records, [attestation for _, attestation in signed])
        except LedgerError as error:
            now, refused = self._ledger.now(), error.code == "ledger.contribution-not-allowed"
            if refused and any(window_rules(now, 0, entry.expires)[1] for entry in self._new):
                raise ConcurrentAppend from error  # it expired since: decide again
            raise


def _read_evidence(entry: Admitted, beside: EntryContext, ledger: bytes) -> tuple[ContributionRecord, bytes]:
    """Return a contribution as it will stand in the ledger, and its attestation, which goes beside it."""
    descriptor, attestation = beside.evidence(entry)
    if (other := other_ledger(Attestation.decode(attestation), ledger)) is not None:
        raise ContributionRefused(reasons.OTHER_LEDGER, other)
    signed = Descriptor.decode(descriptor)
    bound = signed.clip_norm, signed.noise_multiplier
    record = ContributionRecord(
        descriptor=entry.descriptor, attestation=entry.attestation, key=entry.kid,
        not_before=signed.not_before, expires=signed.expires, anchor=signed.anchor, subject=entry.tag,
        terms=_cached_terms(signed.admissibility, signed.data_class, *bound, signed.profile),
    )  # fmt: skip
    return record, attestation


_cached_terms = lru_cache(maxsize=4096)(ContributionTerms)


ADMISSION_BATCH_SIZE = 1000  # contributions that are entered together: one transaction, one sync
_MAX_TRIES = 1000  # how often others may be quicker than one batch


class LedgerRegister:
    """A `Register` over an open ledger; of any number of gates, in any number of processes.

    Whoever is there by the same attestation stands and takes no new place; whoever was withdrawn stays out. Each batch
    is decided by what the ledger says at that moment, and appended only if nothing was appended in between: no class
    ever holds more than it declares, and nobody is in twice. A kill leaves whole batches; admitting
    again completes them.

    The policy of the gate must be in force in the ledger (`corpus_terms.adopt_policy`). With the ledger's key a checkpoint covers
    all of it in the end.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._index = MembershipIndex(ledger)

    def look(self, entries: Sequence[Admitted]) -> Sequence[RegisterStatus]:
        return self._read(lambda rows: self._index.look(rows, entries))

    def members(self, cls: str) -> int:
        return self._read(lambda rows: self._index.count_members(rows, cls, self.ledger.now()))

    def _read(self, answer: Callable[[StoreReader], T]) -> T:
        def once() -> T:
            with self.ledger.store.read() as rows:
                return answer(rows)

        return self.ledger.retry_while_lost(once)

    def enter(self, entries: Iterable[Admitted], beside: EntryContext) -> RefusedRows:
        append_key_ring(self.ledger, beside.keys)
        refused: RefusedRows = {}
        rest = iter(entries)
        while part := list(islice(rest, ADMISSION_BATCH_SIZE)):
            refused |= self._enter(part, beside)
        if self.ledger.signs and not self._read(_checkpoint_covers_all):
            self.ledger.checkpoint()
        return refused

    def _enter(self, entries: Sequence[Admitted], beside: EntryContext) -> RefusedRows:
        """One batch. What somebody else appends in between makes it begin again."""
        batch = AdmissionBatch(self.ledger, self._index, entries, beside)
        for _ in range(_MAX_TRIES):
            self.ledger.retry_while_lost(batch.decide)
            try:
                batch.write()
            except ConcurrentAppend:
                continue
            return batch.refused
        problem = f"others wrote {_MAX_TRIES} times while {len(entries)} contributions waited"
        raise LedgerError("ledger.too-many-writers", problem, "try again later")


@contextmanager
def open_register(
    ledger: Ledger | Register | str | os.PathLike[str], policy: Policy, *,
    key: PrivateKey | None = None, clock: Callable[[], float] = time.time,
) -> Iterator[Register]:  # fmt: skip
    """A register of whatever is given: a place where a ledger is or will be, an open ledger, or a register.

    A ledger follows the policy first. One that was opened here is closed in the end.
    """
    if not isinstance(ledger, Ledger | str | os.PathLike):
        yield ledger
        return
    contract = CorpusTerms.of_policy(policy)
    opened = ledger if isinstance(ledger, Ledger) else open_or_create(ledger, contract, key, clock=clock)
    try:
        check_corpus_terms(opened, contract)
        adopt_policy(opened, contract)
        yield LedgerRegister(opened)
    finally:
        if opened is not ledger:
            opened.close()


def _checkpoint_covers_all(rows: StoreReader) -> bool:
    signed = rows.checkpoint()
    return signed is not None and signed.size == head_of(rows).size
