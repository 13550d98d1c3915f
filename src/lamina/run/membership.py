"""Who takes part in a run: membership in the ledger, revalidation before each segment, withdrawals.

The folder of the run keeps two files, CBOR, mode 0600, so that a restart lets nobody in again:

    withdrawn   who withdrew from the run
    admitted    who was ever admitted to it: stable id and id

Both are written before the journal of the run, empty at first, so that a run notices if one of them is deleted.

A stable id is the id of a contribution, or the digest of its signed descriptor: whoever renames its folder finds its
occurrences and its withdrawal where they were.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamina import cbor
from lamina.account.charges import Account
from lamina.admit import reasons
from lamina.admit.admission import Admission
from lamina.admit.rows import PackedTexts
from lamina.errors import AdmissionError, EncodingError, LedgerError, StorageError, StoreLost
from lamina.ledger.admission_batch import LedgerRegister
from lamina.ledger.contribution_columns import ContributionColumns
from lamina.ledger.corpus_terms import policy_in_force
from lamina.ledger.governance_records import Withdrawal, WithdrawalEffect, WithdrawalReason
from lamina.ledger.records import ContributionRecord, decode_kept
from lamina.ledger.verify.plan_checks import accountant_violation, difference_from_policy, sampling_violation
from lamina.ledger.writer import Ledger
from lamina.plan.step_plan import StepPlan
from lamina.run.admitted import AdmittedCorpus
from lamina.run.corpus import Corpus
from lamina.run.payload_admission import reasons_text
from lamina.run.run_files import write_atomically

MAX_MEMBERSHIP_BYTES = 1 << 28


@contextmanager
def remember_withdrawals(corpus: Corpus, path: Path) -> Iterator[None]:
    """Withdraw who withdrew before; write down who withdraws inside, before `corpus.withdraw` returns."""
    _begin(path, [])
    known = dict.fromkeys(read_withdrawn(path))
    if known and (present := corpus.ids_of(*known)):
        corpus.withdraw(*present)

    def write(stable_ids: Sequence[str]) -> None:
        known.update(dict.fromkeys(stable_ids))
        write_atomically(path, cbor.encode(list(known), max_size=MAX_MEMBERSHIP_BYTES))

    before, corpus.on_exclusion = corpus.on_exclusion, write
    try:
        yield
    finally:
        corpus.on_exclusion = before


def _begin(path: Path, empty: list[str] | dict[str, str]) -> None:
    """Write an empty file before a run has a journal; refuse a run that has a journal and lost the file."""
    if path.exists():
        return
    if path.with_name("journal").exists():
        remedy = "restore it from a backup, or begin in another folder, without whoever withdrew or was refused later"
        raise StorageError("train.membership-file-missing", f"the run has a journal, but '{path}' is missing", remedy)
    write_atomically(path, cbor.encode(empty))


def read_withdrawn(path: Path) -> list[str]:
    """Return the stable ids of those who withdrew."""
    return list(_read_texts(path, list))


def _read_texts(path: Path, kind: type[Any]) -> Any:
    """Return a list of texts, or a map from text to text."""
    try:
        found = cbor.decode(path.read_bytes(), max_size=MAX_MEMBERSHIP_BYTES)
    except (OSError, EncodingError) as error:
        raise _unreadable(path, str(error)) from None
    texts = (*found, *getattr(found, "values", tuple)()) if isinstance(found, kind) else (None,)
    if not all(isinstance(one, str) for one in texts):
        raise _unreadable(path, "it is not a list of ids")
    return found


def _unreadable(path: Path, why: str) -> StorageError:
    remedy = "restore it from a backup: it says who is in the run, or withdrew and must not be used again"
    return StorageError("train.membership-file-unreadable", f"cannot read '{path}': {why}", remedy)


_POLL_SECONDS = 1.0  # seconds between two looks at the ledger inside a segment


class LedgerMembership:
    """Keeps the contributions of a corpus in line with the leaves of a ledger.

    Whoever is in a segment is in the leaves that its `eligibility` counts, and not withdrawn in them. A corpus that was
    not admitted by signature has no leaves; who withdraws from it is remembered in the folder of the run alone.
    """

    def __init__(self, ledger: Ledger, corpus: Corpus) -> None:
        self._ledger, self._corpus = ledger, corpus
        self._signed = corpus if isinstance(corpus, AdmittedCorpus) else None
        self._read = 0  # leaves whose withdrawals were applied
        self._polled = -_POLL_SECONDS

    def enter_ledger(self, note: Callable[[str], None]) -> None:
        """Before a run begins or goes on: whoever is admitted is in the ledger, and whom it refuses is out.

        Whoever asked to leave before there was a ledger to say so is withdrawn in it now.
        """
        if self._signed is None:
            policy = self._corpus.policy
            if policy is not None and policy.corpus.requires_attestation:
                problem = (
                    f"the policy of {self._corpus.origin!r} requires attestation, but the contributions are not signed"
                )
                remedy = "sign and admit them: lamina attest, lamina.Gate(policy, keys).admit(folder, ledger)"
                remedy += '; or set attestation = "optional" under [corpus]'
                raise LedgerError("train.attestation-required", problem, remedy)
            with self._ledger.store.read() as rows:
                signed = self._ledger.checked(rows).count(ContributionRecord)
            if signed:
                # nobody could tell whether one of them has withdrawn, or signed for less than is charged
                problem = f"the ledger {self._ledger.name} holds signed contributions, those of this run are not signed"
                remedy = "admit them: lamina.Gate(policy, keys).admit(folder, ledger); or use another origin for them"
                raise LedgerError("train.contributions-not-signed", problem, remedy)
            return
        lost = self._signed.admission.enter_into(LedgerRegister(self._ledger))
        if lost:
            why = Counter(reason for reason, _ in lost.values())
            note(f"contributions that the ledger refuses are left out: {reasons_text(why)}")
            self._signed.exclude([self._signed.ids[row] for row in lost])
        self.withdraw(self._signed.withdrawal_requests)

    def freeze(self) -> int:
        """Exclude whoever withdrew so far, or signed with a key that the ledger revoked; how many leaves were read."""
        size, found = self._ledger.retry_while_lost(self._new_withdrawals)
        if found:
            self._corpus.exclude(self._corpus.ids_of(*(stable_id for stable_id, _ in found)))
        if self._signed is not None and len(rows := self._revoked_rows(self._signed.admission)):
            self._corpus.exclude([self._signed.ids[row] for row in rows.tolist()])
        self._read = size
        return size

    def _revoked_rows(self, admission: Admission) -> NDArray[np.int64]:
        """The rows whose key the ledger revoked, whatever an older key ring says of it."""
        keys, now = self._ledger.retry_while_lost(self._ledger.governance), self._ledger.now()
        known = [keys.history(kid) for kid in admission.kids]
        gone = [each is not None and each.revoked is not None and each.revoked <= now for each in known]
        return np.flatnonzero(np.array(gone, dtype=np.bool_)[admission.columns["key"]] & admission.standing)

    def standing(self, accounts: set[str]) -> set[str]:
        """Which of these signed bounds somebody has who was admitted, and neither withdrew nor expired."""
        wanted, found, now = {Account.parse(name): name for name in accounts}, set[str](), self._ledger.now()
        with self._ledger.store.read() as rows:
            leaves = self._ledger.checked(rows)
            withdrawn = leaves.withdrawals(rows)
            for each in leaves.contributions(rows):
                if isinstance(each, ContributionColumns):
                    bound, stay = each.bound, each.seq[each.expires > now].tolist()
                elif each.contribution is not None:
                    bound, stay = each.contribution.bound, [each.seq] * (each.contribution.expires > now)
                name = wanted.get(bound)
                if name is not None and any(seq not in withdrawn for seq in stay):
                    found.add(name)
                    del wanted[bound]
                if not wanted:
                    break
        return found

    def check(self, plan: StepPlan) -> None:
        """Refuse, before the first segment of a run, a plan that the policy in force does not allow."""
        policy = self._ledger.retry_while_lost(lambda: policy_in_force(self._ledger))
        presets, delta = {each.cls: each for each in policy.presets}, self._ledger.header.delta
        contradiction = sampling_violation(plan) or accountant_violation(plan, self._ledger.header.accountant)
        for entry in plan.classes:
            preset = presets.get(entry.name)
            found = contradiction or (preset and difference_from_policy(plan, entry, preset, delta))
            wrong = found.reason if found else None if preset else f"class {entry.name!r} is not in the policy"
            if wrong is not None:
                problem = f"the policy in force in the ledger {self._ledger.name} does not allow the plan: {wrong}"
                remedy = "make the plan again under that policy: lamina ledger policy shows it"
                raise LedgerError("train.plan-outside-policy", problem, remedy)

    def abandon_requested(self) -> bool:
        """Whether somebody withdrew who wants the open segment abandoned. Reads the ledger once a second at most."""
        now = time.monotonic()
        if self._signed is None or now - self._polled < _POLL_SECONDS:
            return False
        self._polled = now
        try:
            _, found = self._new_withdrawals()
        except StoreLost:  # ask again in a second; the end of the segment waits for the server
            return False
        return any(record.effect is WithdrawalEffect.ABANDON for _, record in found)

    def withdraw(self, stable_ids: Sequence[str]) -> None:
        """Record in the ledger that these contributions withdrew."""
        if self._signed is None:
            return

        def due() -> list[Withdrawal]:
            leaves = sorted(self._ledger.known([bytes.fromhex(each) for each in stable_ids]).values())
            reason, effect = WithdrawalReason.REQUEST, WithdrawalEffect.FINISH
            present = (seq for seq in leaves if self._ledger.withdrawn(seq) is None)
            return [Withdrawal(target=seq, reason=reason, effect=effect) for seq in present]

        records = self._ledger.retry_while_lost(due)
        try:
            self._ledger.append(records)
        except LedgerError:
            if any(self._ledger.withdrawn(record.target) is None for record in records):
                raise  # otherwise another process was quicker
        if records and self._ledger.signs:
            self._ledger.checkpoint()

    def _new_withdrawals(self) -> tuple[int, list[tuple[str, Withdrawal]]]:
        """The leaves so far, and (stable id, withdrawal) of each of this corpus since the last `freeze`."""
        found = []
        with self._ledger.store.read() as rows:
            leaves = self._ledger.checked(rows)
            if self._signed is None:
                return leaves.size, []
            for leaf in leaves.records(rows, Withdrawal, self._read):
                record = leaf.record
                assert isinstance(record, Withdrawal)
                target = decode_kept(leaves.leaf(rows, record.target).leaf).contribution
                if target is not None and self._corpus.ids_of(target.descriptor.hex()):
                    found.append((target.descriptor.hex(), record))
            return leaves.size, found


NoteFunction = Callable[[str], None]


class AdmissionRenewal:
    """Excludes whoever may no longer be used. A corpus that was not admitted by signature is left alone.

    Whoever took part before and is refused now is withdrawn, for this run for good; so is whoever expires or loses
    their key while it runs. It happens between segments: the next one is frozen without them, and one that was open
    when the run was killed is not replayed but redone, because its membership has changed.
    """

    def __init__(self, corpus: Corpus, plan: StepPlan, path: Path) -> None:
        self._corpus = corpus if isinstance(corpus, AdmittedCorpus) else None
        self._plan, self._path = plan, path
        self._before: dict[str, str] = {}  # stable id: id

    @property
    def names(self) -> PackedTexts | None:
        """The stable id of each row: after another admission the rows may be others."""
        return None if self._corpus is None else self._corpus.digests

    def start(self, note: NoteFunction) -> None:
        """Before a run begins or goes on: withdraw whoever was admitted before and is not now."""
        if self._corpus is None:
            return
        _begin(self._path, {})
        self._before = _read_texts(self._path, dict)
        here = set(self._corpus.digests)
        if gone := {stable_id: one for stable_id, one in self._before.items() if stable_id not in here}:
            self._withdraw(gone, note)
        if out := self._corpus.count_unsampled(self._plan):
            why = "no scale keeps the bound that they signed under this plan"
            note(f"{out} admitted contributions are not sampled: {why}")
        self.revalidate(note)

    def write_members(self) -> None:
        """Once the run is there, and before anything is drawn: write down who is in it."""
        if self._corpus is None:
            return
        ever = {**dict(zip(self._corpus.digests, self._corpus.ids, strict=True)), **self._before}
        if len(ever) > len(self._before):
            write_atomically(self._path, cbor.encode(ever, max_size=MAX_MEMBERSHIP_BYTES))

    def revalidate(self, note: NoteFunction, step: int | None = None) -> None:
        """Before a segment is opened: check windows, keys, and signatures once an epoch is over."""
        if self._corpus is None or not (why := self._corpus.revalidate()):
            return
        when = "" if step is None else f" before step {step}"
        note(f"contributions that are no longer valid were withdrawn{when}: {reasons_text(why)}")
        if not len(self._corpus):
            remedy = "the weights so far are kept; let contributors sign again, and begin a run in another folder"
            raise AdmissionError("train.nobody-left", f"every contribution was withdrawn{when}", remedy)

    def _withdraw(self, gone: Mapping[str, str], note: NoteFunction) -> None:
        """Withdraw those who are refused now, or not offered any more."""
        assert self._corpus is not None and self._corpus.admission is not None
        known = set(read_withdrawn(self._path.with_name("withdrawn")))
        if not (new := {stable_id: one for stable_id, one in gone.items() if stable_id not in known}):
            return
        refused = {each.id: each.reason for each in self._corpus.admission.refused}
        why = Counter(refused.get(one, reasons.GONE) for one in new.values())
        if self._corpus.on_exclusion is not None:
            self._corpus.on_exclusion(list(new))  # on disk, so that they stay out
        note(f"contributions that took part before are not admitted now and were withdrawn: {reasons_text(why)}")
