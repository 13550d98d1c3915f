"""`Members`: who may be learned from, as the ledger has it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from lamina.ledger.check.plans import differs
from lamina.ledger.errors import LedgerError
from lamina.ledger.ledger import Ledger
from lamina.ledger.opening import in_force
from lamina.ledger.records import Admitted, Effect, Reason, Withdrawal
from lamina.ledger.register import LedgerRegister
from lamina.ledger.store.errors import Pruned, StoreLost
from lamina.plan import StepPlan
from lamina.train.book.account import bound_of
from lamina.train.corpus import Corpus
from lamina.train.corpus.signed import AdmittedCorpus, in_words

_PAUSE = 1.0  # seconds between two looks at the ledger inside a segment


class Members:
    """The contributions of a corpus and the leaves of a ledger, held against each other.

    Whoever is in a segment is in the leaves that its `eligibility` counts, and not withdrawn in them. A corpus that was
    not admitted by signature has no leaves; who withdraws from it is remembered in the folder of the run alone.
    """

    def __init__(self, ledger: Ledger, corpus: Corpus) -> None:
        self._ledger = ledger
        self._corpus = corpus
        self._signed = corpus if isinstance(corpus, AdmittedCorpus) else None
        self._read = 0  # leaves whose withdrawals were heeded
        self._looked = -_PAUSE

    def enrol(self, note: Callable[[str], None]) -> None:
        """Before a run begins or goes on: whoever is admitted is in the ledger, and whom it refuses is out.

        Whoever asked to leave before there was a ledger to say so is withdrawn in it now.
        """
        if self._signed is None:
            self._refuse_unsigned()
            return
        lost = self._signed.admission.enter_into(LedgerRegister(self._ledger))
        if lost:
            reasons = Counter(reason for reason, _ in lost.values())
            note(f"contributions that the ledger does not let in are left out: {in_words(reasons)}")
            self._signed.leave([self._signed.ids[row] for row in lost])
        self.withdraw(self._signed.asked)

    def _refuse_unsigned(self) -> None:
        """Nobody could tell whether one of them has withdrawn, or signed for less than is charged."""
        if next(self._ledger.of_kind(Admitted), None) is not None:
            raise LedgerError(
                "train.contributions-ledger-signed",
                f"contributions to the ledger {self._ledger.name} are signed, and those of this run are not",
                "admit them: lamina.Gate(policy, keys).admit(folder, ledger), or an [admit] table in RUN.toml; data "
                "that nobody signs for belongs under another origin",
            )

    def freeze(self) -> int:
        """Heed every withdrawal so far; the number of leaves that were read."""
        size, found = self._ledger.patiently(self._news)
        self._heed(found)
        self._read = size
        return size

    def standing(self, accounts: set[str]) -> set[str]:
        """Which of these signed bounds somebody has who was admitted, and neither withdrew nor expired."""
        wanted, found, now = {bound_of(name): name for name in accounts}, set(), self._ledger.now()
        for leaf in self._ledger.of_kind(Admitted):
            record = leaf.record
            assert isinstance(record, Admitted)
            name = wanted.get(record.bound)
            if name is not None and record.expires > now and self._ledger.withdrawn(leaf.seq) is None:
                found.add(name)
                del wanted[record.bound]
            if not wanted:
                break
        return found

    def check(self, plan: StepPlan) -> None:
        """Before the first segment of a run: whether its plan is one that the policy in force allows."""
        presets = {each.cls: each for each in self._ledger.patiently(lambda: in_force(self._ledger)).presets}
        for entry in plan.classes:
            preset = presets.get(entry.name)
            wrong = "is not one of the policy" if preset is None else differs(plan, entry, preset)
            if wrong is not None:
                raise LedgerError(
                    "train.plan-not-ledger",
                    f"the plan is not one that the ledger {self._ledger.name} allows now: {wrong}",
                    "make the plan again, under the policy that is in force: lamina ledger policy shows it",
                )

    def abandons(self) -> bool:
        """Whether somebody withdrew who asks for the open segment to be given up. Looks once a second at most."""
        now = time.monotonic()
        if self._signed is None or now - self._looked < _PAUSE:
            return False
        self._looked = now
        try:
            _, found = self._news()
        except (
            StoreLost
        ):  # the server is away: it is asked again in a second, and waited for when the segment ends
            return False
        return any(record.effect is Effect.ABANDON for _, record in found)

    def withdraw(self, marks: Sequence[str]) -> None:
        """Somebody asked to leave: the ledger says so first."""
        if self._signed is None:
            return

        def asked() -> list[Withdrawal]:
            leaves = sorted(self._ledger.known([bytes.fromhex(mark) for mark in marks]).values())
            still = [seq for seq in leaves if self._ledger.withdrawn(seq) is None]
            return [Withdrawal(target=seq, reason=Reason.REQUEST, effect=Effect.FINISH) for seq in still]

        records = self._ledger.patiently(asked)
        try:
            self._ledger.append(records)
        except LedgerError:
            if any(self._ledger.withdrawn(record.target) is None for record in records):
                raise  # otherwise another process was quicker
        if records and self._ledger.signs:
            self._ledger.checkpoint()

    def _news(self) -> tuple[int, list[tuple[str, Withdrawal]]]:
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
            except Pruned:  # too old to be in any corpus
                continue
            if isinstance(target, Admitted) and self._corpus.marked(target.descriptor.hex()):
                found.append((target.descriptor.hex(), record))
        return size, found

    def _heed(self, withdrawals: Sequence[tuple[str, Withdrawal]]) -> None:
        if withdrawals:
            self._corpus.leave(self._corpus.marked(*(mark for mark, _ in withdrawals)))
