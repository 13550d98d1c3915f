"""`Segments`: the protocol of a run, from one checkpoint to the next.

    OPEN    plan, membership and data are frozen; a seed is drawn; the charge is written down and booked
    …       coins, noise, dropout come from the seed; nothing of the segment leaves the process
    save    checkpoint: temporary file, fsync, rename, fsync of the folder
    CLOSE   the seed is erased; weights, evaluations and figures may leave

Killed anywhere, the run is in one of three states, and `resume` knows which (resume.py): the checkpoint is there and
CLOSE is missing; the segment is open and is replayed, or redone and paid again; or nothing is open.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lamina.errors import RunError
from lamina.plan import StepPlan
from lamina.train.book.charge import charges
from lamina.train.corpus import Corpus
from lamina.train.resume import Action, Facts, decide
from lamina.train.run import Run
from lamina.train.settings import code_version
from lamina.train.snapshot import TrainingState
from lamina.train.store.records import Open


class Segments:
    """The segments of one run, under its lease. `end` is the step at which the run will stop."""

    def __init__(
        self,
        run: Run,
        state: TrainingState,
        *,
        plan: StepPlan,
        corpus: Corpus,
        settings: bytes,
        length: int,
        note: Callable[[str], None],
    ) -> None:
        self.run, self.state, self.plan, self.corpus = run, state, plan, corpus
        self.settings, self.length, self.note = settings, length, note
        self.end = plan.steps
        self._replay: Open | None = None
        self._checkpoint = bytes(32)
        self._written_by = bytes(16)  # the nonce of the segment that the checkpoint ended
        self._membership: tuple[int, bytes] | None = None

    # ------------------------------------------------------------------------------------ beginning

    def start(self) -> None:
        """A new run, or one that goes on."""
        if self.run.fresh or not (self.run.checkpoints.indices() or self.run.journal.opens):
            self.run.begin(self.plan)
            self._save(None)  # also after a kill before the first checkpoint: nothing was drawn then
        else:
            self._resume()

    def _resume(self) -> None:
        run, state = self.run, self.state
        self._restore()
        pending = run.journal.pending
        if run.copied:
            self.note("the run's folder was copied or restored from a copy: what follows is charged anew")
        if pending is not None:
            self._settle(pending)
        elif lost := [opened for opened in run.journal.opens if opened.segment >= state.segments]:
            self.note(
                f"the checkpoint after step {lost[-1].last} is gone: steps from {state.step} on are done again, "
                "and charged again"
            )
        if run.copied:
            run.settle_copy()
        self._charge_filters()
        self._go_on(self._replay.last if self._replay else state.step)

    def _settle(self, pending: Open) -> None:
        """A segment was open when the run stopped."""
        action, reasons = decide(pending, self._facts(), newest=self.state.segments, copied=self.run.copied)
        if action is Action.FINISH and self._written_by != pending.nonce:
            raise RunError(
                f"checkpoint {self.state.segments} is not what the journal's open segment {pending.segment} left",
                "put the run's own checkpoint and journal back together",
            )
        if action is Action.FINISH:
            self.run.close(pending, self._checkpoint)
        elif action is Action.REPLAY:
            self._replay = pending
        else:
            self.note(
                f"steps {self.state.step} to {pending.last - 1} were begun before; they are done again with fresh "
                f"noise, and charged again, because {'; '.join(reasons)}"
            )

    def _go_on(self, first: int) -> None:
        self.end = self.run.go_on(self.plan, first)
        if self.end < self.plan.steps:
            self.note(f"the bounds allow {self.end} of {self.plan.steps} steps: the run will end there")

    # ------------------------------------------------------------------------------------ one after the other

    def open(self) -> Open | None:
        """The next segment, charged; None if there is none, or no filter has room for it."""
        if self._replay is not None:
            opened, self._replay = self._replay, None
            return opened
        first, last = self.state.step, min(self.end, self.state.step + self.length)
        if first >= last:
            return None
        filters = self.state.filters
        due = [c for c in charges(self.plan, last - first) if c.cls in filters]
        for c in due:
            if not filters[c.cls].admits(c.sigma, c.q, c.steps):
                self.note(f"the filter of class '{c.cls}' does not allow steps {first} to {last - 1}")
                return None
        for c in due:
            filters[c.cls].charge(c.sigma, c.q, c.steps)
        segment = self.state.segments
        return self.run.open(segment=segment, first=first, last=last, facts=self._facts(), plan=self.plan)

    def close(self, opened: Open) -> None:
        """Everything of the segment is in `state`: make it durable, then let it out."""
        self.state.segments, self.state.step = opened.segment + 1, opened.last
        self._save(opened)
        self.run.close(opened, self._checkpoint)
        self.run.checkpoints.prune()

    def abandon(self, opened: Open) -> None:
        """Back to the checkpoint. The charge stays, and the seed is never used again."""
        self.note(
            f"a contribution was withdrawn: steps {opened.first} to {opened.last - 1} are given up, stay charged, "
            "and are done again without it"
        )
        self._restore()
        self._charge_filters()
        self._go_on(self.state.step)

    # ------------------------------------------------------------------------------------ inside

    def _charge_filters(self) -> None:
        """What was opened after the checkpoint was charged, whatever became of it."""
        for opened in self.run.journal.opens:
            for c in opened.charges:
                if opened.segment >= self.state.segments and c.cls in self.state.filters:
                    self.state.filters[c.cls].charge(c.sigma, c.q, c.steps)

    def _facts(self) -> Facts:
        revision, key = self.corpus.revision, self.run.salt
        if self._membership is None or self._membership[0] != revision:
            self._membership = revision, self.corpus.membership(key)
        return Facts(
            plan=self.plan.digest(),
            settings=self.settings,
            membership=self._membership[1],
            checkpoint=self._checkpoint,
            data=self.corpus.digest(key),
            world_size=1,
            threads=torch.get_num_threads(),
            code=code_version(),
        )

    def _save(self, opened: Open | None) -> None:
        header = {
            "run": self.run.id,
            "generation": opened.generation if opened else 0,
            "nonce": opened.nonce if opened else bytes(16),
            "settings": self.settings,
            "order": self.corpus.order(self.run.salt),
        }
        snapshot = self.state.capture(header)
        self._checkpoint = self.run.checkpoints.save(self.state.segments, snapshot)

    def _restore(self) -> None:
        indices = self.run.checkpoints.indices()
        if not indices:
            raise RunError(
                f"'{self.run.folder}' has a journal and no checkpoint",
                "restore the checkpoint; or begin in another folder (what was charged stays in the book)",
            )
        snapshot, self._checkpoint = self.run.checkpoints.load(indices[-1])
        if snapshot.state.get("run") != self.run.id:
            raise RunError(
                f"checkpoint {indices[-1]} in '{self.run.folder}' belongs to another run",
                "put the run's own checkpoint back",
            )
        if "occurrences" in snapshot.tensors and snapshot.state["order"] != self.corpus.order(self.run.salt):
            raise RunError(
                "the corpus has other contributions, or has them in another order, than when their occurrences were "
                "counted",
                "give the corpus as it was; whoever leaves is withdrawn by corpus.withdraw(id)",
            )
        self._written_by = snapshot.state["nonce"]
        if snapshot.state["settings"] != self.settings:
            self.note(
                "optimiser, scheduler, loss or options are not those of the checkpoint, whose state goes on"
            )
        self.state.restore(snapshot)
