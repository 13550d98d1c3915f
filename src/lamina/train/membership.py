"""Who may be learned from: ledger membership, revalidation before each segment.

And withdrawals kept in the run's folder.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lamina import cbor
from lamina.admit.verdicts import Reason
from lamina.corpus.admitted import AdmittedCorpus, reasons_text
from lamina.corpus.contribution_index import PackedTexts
from lamina.corpus.corpus import Corpus
from lamina.errors import AdmissionError, EncodingError, LeafPruned, LedgerError, StorageError, StoreLost
from lamina.ledger.admission_batch import LedgerRegister
from lamina.ledger.corpus_terms import policy_in_force
from lamina.ledger.governance_records import Withdrawal, WithdrawalEffect, WithdrawalReason
from lamina.ledger.records import ContributionRecord
from lamina.ledger.verify.epoch_checks import difference_from_policy
from lamina.ledger.writer import Ledger
from lamina.plan.step_plan import StepPlan
from lamina.spend.accounts import account_bound
from lamina.train.run_files import write_atomically

# Who withdrew while a run was under way: kept in its folder, so that a restart does not let them in again.
#
# runs/NAME/withdrawn      marks, CBOR, mode 0600: ids, or digests of descriptors where contributions are signed

MAX_MEMBERSHIP_BYTES = 1 << 28


@contextmanager
def remember_withdrawals(corpus: Corpus, path: Path) -> Iterator[None]:
    """Withdraw who withdrew before; write down who withdraws inside, before `corpus.withdraw` returns."""
    known = dict.fromkeys(read_withdrawn(path))
    if known and (present := corpus.marked(*known)):
        corpus.withdraw(*present)

    def write(marks: Sequence[str]) -> None:
        known.update(dict.fromkeys(marks))
        write_atomically(path, cbor.encode(list(known), max_size=MAX_MEMBERSHIP_BYTES))

    before, corpus.on_exclusion = corpus.on_exclusion, write
    try:
        yield
    finally:
        corpus.on_exclusion = before


def read_withdrawn(path: Path) -> list[str]:
    """The marks that a file of the run lists; none if it is not there."""
    marks = read_membership_file(path, [])
    if not isinstance(marks, list):
        raise StorageError("train.not-list-texts", f"'{path}' is not a list of texts", "restore it")
    return marks


def read_membership_file(path: Path, default: Any) -> Any:
    """A list of texts, or a map from text to text."""
    if not path.exists():
        return default
    try:
        read = cbor.decode(path.read_bytes(), max_size=MAX_MEMBERSHIP_BYTES)
    except (OSError, EncodingError) as error:
        remedy = "restore it: it says who is in the run, or withdrew and must not be used again"
        raise StorageError("train.not-read", f"'{path}' cannot be read: {error}", remedy) from error
    texts = [*read, *read.values()] if isinstance(read, dict) else read
    if not isinstance(texts, list) or not all(isinstance(one, str) for one in texts):
        raise StorageError("train.not-hold-texts", f"'{path}' does not hold texts", "restore it")
    return read


_POLL_SECONDS = 1.0  # seconds between two looks at the ledger inside a segment


class LedgerMembership:
    """The contributions of a corpus and the leaves of a ledger, held against each other.

    Whoever is in a segment is in the leaves that its `eligibility` counts, and not withdrawn in them. A corpus that was
    not admitted by signature has no leaves; who withdraws from it is remembered in the folder of the run alone.
    """

    def __init__(self, ledger: Ledger, corpus: Corpus) -> None:
        self._ledger = ledger
        self._corpus = corpus
        self._signed = corpus if isinstance(corpus, AdmittedCorpus) else None
        self._read = 0  # leaves whose withdrawals were heeded
        self._looked = -_POLL_SECONDS

    def enter_ledger(self, note: Callable[[str], None]) -> None:
        """Before a run begins or goes on: whoever is admitted is in the ledger, and whom it refuses is out.

        Whoever asked to leave before there was a ledger to say so is withdrawn in it now.
        """
        if self._signed is None:
            self._refuse_unsigned()
            return
        lost = self._signed.admission.enter_into(LedgerRegister(self._ledger))
        if lost:
            reasons = Counter(reason for reason, _ in lost.values())
            note(f"contributions that the ledger does not let in are left out: {reasons_text(reasons)}")
            self._signed.leave([self._signed.ids[row] for row in lost])
        self.withdraw(self._signed.asked)

    def _refuse_unsigned(self) -> None:
        """Nobody could tell whether one of them has withdrawn, or signed for less than is charged."""
        if next(self._ledger.of_kind(ContributionRecord), None) is not None:
            raise LedgerError(
                "train.contributions-ledger-signed",
                f"contributions to the ledger {self._ledger.name} are signed, and those of this run are not",
                "admit them: lamina.Gate(policy, keys).admit(folder, ledger), or an [admit] table in RUN.toml; data "
                "that nobody signs for belongs under another origin",
            )

    def freeze(self) -> int:
        """Heed every withdrawal so far; the number of leaves that were read."""
        size, found = self._ledger.retry_while_lost(self._new_withdrawals)
        self._exclude_withdrawn(found)
        self._read = size
        return size

    def standing(self, accounts: set[str]) -> set[str]:
        """Which of these signed bounds somebody has who was admitted, and neither withdrew nor expired."""
        wanted, found, now = {account_bound(name): name for name in accounts}, set(), self._ledger.now()
        for leaf in self._ledger.of_kind(ContributionRecord):
            record = leaf.record
            assert isinstance(record, ContributionRecord)
            name = wanted.get(record.bound)
            if name is not None and record.expires > now and self._ledger.withdrawn(leaf.seq) is None:
                found.add(name)
                del wanted[record.bound]
            if not wanted:
                break
        return found

    def check(self, plan: StepPlan) -> None:
        """Before the first segment of a run: whether its plan is one that the policy in force allows."""
        presets = {
            each.cls: each for each in self._ledger.retry_while_lost(lambda: policy_in_force(self._ledger)).presets
        }
        for entry in plan.classes:
            preset = presets.get(entry.name)
            found = None if preset is None else difference_from_policy(plan, entry, preset)
            wrong = f"class {entry.name!r} is not in the policy" if preset is None else found and found.reason
            if wrong is not None:
                problem = f"the plan is not one that the ledger {self._ledger.name} allows now: {wrong}"
                remedy = "make the plan again, under the policy that is in force: lamina ledger policy shows it"
                raise LedgerError("train.plan-not-ledger", problem, remedy)

    def abandon_requested(self) -> bool:
        """Whether somebody withdrew who asks for the open segment to be given up. Looks once a second at most."""
        now = time.monotonic()
        if self._signed is None or now - self._looked < _POLL_SECONDS:
            return False
        self._looked = now
        try:
            _, found = self._new_withdrawals()
        except StoreLost:  # the server is away: it is asked again in a second, and waited for when the segment ends
            return False
        return any(record.effect is WithdrawalEffect.ABANDON for _, record in found)

    def withdraw(self, marks: Sequence[str]) -> None:
        """Somebody asked to leave: the ledger says so first."""
        if self._signed is None:
            return

        def asked() -> list[Withdrawal]:
            leaves = sorted(self._ledger.known([bytes.fromhex(mark) for mark in marks]).values())
            still = [seq for seq in leaves if self._ledger.withdrawn(seq) is None]
            return [
                Withdrawal(target=seq, reason=WithdrawalReason.REQUEST, effect=WithdrawalEffect.FINISH) for seq in still
            ]

        records = self._ledger.retry_while_lost(asked)
        try:
            self._ledger.append(records)
        except LedgerError:
            if any(self._ledger.withdrawn(record.target) is None for record in records):
                raise  # otherwise another process was quicker
        if records and self._ledger.signs:
            self._ledger.checkpoint()

    def _new_withdrawals(self) -> tuple[int, list[tuple[str, Withdrawal]]]:
        """The leaves so far, and (descriptor, withdrawal) of each of this corpus that was not heeded yet."""
        size = self._ledger.size
        if self._signed is None:
            return size, []
        found = []
        for leaf in self._ledger.of_kind(Withdrawal, self._read, size):
            record = leaf.record
            assert isinstance(record, Withdrawal)
            try:
                target = self._ledger.leaf(record.target).record
            except LeafPruned:  # too old to be in any corpus
                continue
            if isinstance(target, ContributionRecord) and self._corpus.marked(target.descriptor.hex()):
                found.append((target.descriptor.hex(), record))
        return size, found

    def _exclude_withdrawn(self, withdrawals: Sequence[tuple[str, Withdrawal]]) -> None:
        if withdrawals:
            self._corpus.leave(self._corpus.marked(*(mark for mark, _ in withdrawals)))


# Whether those who were admitted may still be learned from: asked when a run begins or goes on, and at each segment.
#
# runs/NAME/admitted      digest of the descriptor of each who was ever admitted to the run, and its id; CBOR, mode 0600
#
# A contribution is known by the digest of its descriptor: whoever gives its folder another name finds its occurrences
# and its withdrawal where they were.

NoteFunction = Callable[[str], None]


class AdmissionRenewal:
    """Takes out who is out. A corpus that was not admitted by signature is left alone.

    Whoever took part before and is refused now is withdrawn, for this run for good; so is whoever expires or loses
    their key while it runs. It happens between segments: the next one is frozen without them, and one that was open
    when the run was killed is not replayed but redone, because its membership has changed.
    """

    def __init__(self, corpus: Corpus, plan: StepPlan, path: Path) -> None:
        self._corpus = corpus if isinstance(corpus, AdmittedCorpus) else None
        self._plan, self._path = plan, path
        self._before: dict[str, str] = {}  # mark: id

    @property
    def names(self) -> PackedTexts | None:
        """Who is which row: after another admission the rows may be others."""
        return None if self._corpus is None else self._corpus.digests

    def begin(self, note: NoteFunction) -> None:
        """Before a run begins or goes on: hold who is admitted now against who was before."""
        if self._corpus is None:
            return
        self._before = read_membership_file(self._path, {}) if self._path.with_name("journal").exists() else {}
        if not isinstance(self._before, dict):
            raise StorageError("train.not-say-admitted", f"'{self._path}' does not say who was admitted", "restore it")
        here = set(self._corpus.digests)
        if gone := {mark: one for mark, one in self._before.items() if mark not in here}:
            self._leave(gone, note)
        if out := self._corpus.count_unsampled(self._plan):
            note(
                f"{out} admitted contributions signed a bound that no scale keeps under this plan: they are not sampled"
            )
        self.again(note)

    def begun(self) -> None:
        """The run is there, and nothing of it is drawn yet: write down who is in it."""
        if self._corpus is None:
            return
        ever = {**dict(zip(self._corpus.digests, self._corpus.ids, strict=True)), **self._before}
        if len(ever) > len(self._before):
            write_atomically(self._path, cbor.encode(ever, max_size=MAX_MEMBERSHIP_BYTES))

    def again(self, note: NoteFunction, step: int | None = None) -> None:
        """Before a segment is opened: windows, keys, and signatures once an epoch is over."""
        if self._corpus is None or not (reasons := self._corpus.revalidate()):
            return
        when = "" if step is None else f" before step {step}"
        note(
            f"contributions that may no longer be used were withdrawn{when}: {reasons_text(reasons)}; what was learned "
            "from them earlier stays"
        )
        if not len(self._corpus):
            remedy = "the weights so far are kept; let contributors sign again, and begin a run in another folder"
            raise AdmissionError("train.nobody-left-learned", f"nobody is left who may be learned from{when}", remedy)

    def _leave(self, gone: Mapping[str, str], note: NoteFunction) -> None:
        """Refused now, or not offered any more."""
        assert self._corpus is not None and self._corpus.admission is not None
        known = set(read_withdrawn(self._path.with_name("withdrawn")))
        if not (new := {mark: one for mark, one in gone.items() if mark not in known}):
            return
        refused = {each.id: each.reason for each in self._corpus.admission.refused}
        reasons = Counter(refused.get(one, Reason.GONE) for one in new.values())
        if self._corpus.on_exclusion is not None:
            self._corpus.on_exclusion(list(new))  # on disk, so that they stay out
        note(f"contributions that took part before are not admitted now, and are withdrawn: {reasons_text(reasons)}")
