"""`Segments`: the protocol of a run, from one checkpoint to the next.

    OPEN    plan, membership and data are frozen; a seed is drawn; the charge is written down and held in the ledger
    …       coins, noise, dropout come from the seed; nothing of the segment leaves the process
    save    checkpoint: temporary file, fsync, rename, fsync of the folder
    record  the epoch becomes a leaf of the ledger, is committed, and a checkpoint over it is signed
    CLOSE   the seed is erased; weights, evaluations and figures may leave

Killed anywhere, the run is in one of three states, and `resume` knows which (resume.py): the checkpoint is there and
CLOSE, perhaps the leaf too, is missing; the segment is open and is replayed, or redone and paid again; or nothing is
open.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from lamina.corpus.corpus import Corpus
from lamina.errors import RunError
from lamina.plan.step_plan import StepPlan
from lamina.spend.charge import Charge, charges_in_declared_steps, follows_budget
from lamina.train import run_budget
from lamina.train.journal_records import AttemptClosed, AttemptOpened
from lamina.train.membership import LedgerMembership
from lamina.train.resume import ResumeAction, SegmentInputs, code_version, decide_resume
from lamina.train.run import Run
from lamina.train.run_budget import adaptive_budget_fits, repair_ledger
from lamina.train.training_checkpoint import TrainingCheckpoint
from lamina.train.training_state import TrainingState


class Segments:
    """The segments of one run, under its lease. `end` is the step at which the run will stop."""

    def __init__(
        self,
        run: Run,
        state: TrainingState,
        *,
        plan: StepPlan,
        corpus: Corpus,
        members: LedgerMembership,
        settings: bytes,
        caps: Mapping[str, int],
        length: int,
        note: Callable[[str], None],
        say: Callable[[str], None],
    ) -> None:
        self.run, self.state, self.plan, self.corpus = run, state, plan, corpus
        self.settings, self.caps, self.length, self.note = settings, dict(caps), length, note
        self.members = members
        self.say = say  # on the screen only
        self.end = plan.steps
        self._replay: AttemptOpened | None = None
        self._checkpoint = bytes(32)
        self._written_by = bytes(16)  # the nonce of the segment that the checkpoint ended
        self._after = 0  # its generation
        self._membership: tuple[int, bytes] | None = None
        self.revision = corpus.revision  # of the membership that the open segment was frozen with

    # ------------------------------------------------------------------------------------ beginning

    def start(self) -> None:
        """A new run, or one that goes on."""
        if self.run.fresh or not (self.run.checkpoints.indices() or self.run.journal.opens):
            self.run.checkpoints.room(self.state.capture(self._header(None)))  # before anything is reserved
            run_budget.reserve_plan(self.run, self.plan)
            self._save(None)  # also after a kill before the first checkpoint: nothing was drawn then
        else:
            self._resume()

    def _resume(self) -> None:
        run, state = self.run, self.state
        self._restore()
        repair_ledger(run)
        self.members.freeze()  # who withdrew meanwhile is out: what they were in is not replayed
        self._refuse_another_plan()
        pending = run.journal.pending
        if run.copied:
            self.note("the run's folder was copied or restored from a copy: what follows is charged anew")
        if pending is not None:
            self._settle(pending)
        elif lost := [opened for opened in run.attempts if opened.segment >= state.segments]:
            self.note(
                f"the checkpoint after step {lost[-1].last} is gone: steps from {state.step} on are done again, "
                "and charged again"
            )
        if run.copied:
            run.acknowledge_copy()
        self._charge_filters()
        self._reserve_rest(self._replay.last if self._replay else state.step)
        if run.journal.done is not None:
            self.say(f"the run was finished before, at step {state.step}: nothing is trained or charged now")
        else:
            again = f"; steps up to {self._replay.last - 1} are replayed at no cost" if self._replay else ""
            self.say(f"going on at step {state.step} of {self.plan.steps}{again}")

    def _settle(self, pending: AttemptOpened) -> None:
        """A segment was open when the run stopped."""
        run = self.run
        action, reasons = decide_resume(
            pending, self._facts(), newest=self.state.segments, copied=run.copied, disowned=run.disowned
        )
        if action is ResumeAction.FINISH and self._written_by != pending.nonce:
            problem = f"checkpoint {self.state.segments} is not what the journal's open segment {pending.segment} left"
            remedy = "put the run's own checkpoint and journal back together"
            raise RunError("train.checkpoint-not-journal", problem, remedy)
        if action is ResumeAction.FINISH:
            self.run.close(pending, self._checkpoint)
        elif action is ResumeAction.REPLAY:
            self._replay = pending
        else:
            self.note(
                f"steps {self.state.step} to {pending.last - 1} were begun before; they are done again with fresh "
                f"noise, and charged again, because {'; '.join(reasons)}"
            )
            self.run.give_up(pending)

    def _refuse_another_plan(self) -> None:
        """A finished run is only read; one that goes on does not go back."""
        done, attempts = self.run.journal.done, self.run.attempts
        other = bool(attempts) and attempts[-1].plan != self.plan.digest()
        if (done is not None and other) or self.state.step > self.plan.steps:
            state = "is finished" if done is not None else "has come"
            raise RunError(
                "train.run-step-plan",
                f"the run in '{self.run.folder}' {state} at step {self.state.step}, and the plan given now is another "
                f"one, of {self.plan.steps} steps",
                "give the plan that it was begun with, or another folder: what both cost is added up in the ledger",
            )

    def _reserve_rest(self, first: int) -> None:
        if self.run.journal.done is not None:  # only read: nothing is asked for
            self.run.plan, self.end = self.plan, first
            return
        self.end = run_budget.reserve_rest(self.run, self.plan, first)
        if self.end < self.plan.steps:
            self.note(f"the bounds allow {self.end} of {self.plan.steps} steps: the run will end there")

    # ------------------------------------------------------------------------------------ one after the other

    def open(self) -> AttemptOpened | None:
        """The next segment, charged; None if there is none, or no filter has room for it."""
        if self._replay is not None:
            opened, self._replay = self._replay, None
            return opened
        first, last = self.state.step, min(self.end, self.state.step + self.length)
        last, due = self._due(first, last)
        if first >= last:
            return None
        filters = self.state.filters
        for c in due:
            if c.cls in filters and not filters[c.cls].admits(c.sigma, c.q, c.steps):
                self.note(f"the filter of class '{c.cls}' does not allow steps {first} to {last - 1}")
                return None
        for c in due:
            if c.cls in filters:
                filters[c.cls].charge(c.sigma, c.q, c.steps)
        present = len(self.corpus)
        eligibility = self.members.freeze()
        if gone := present - len(self.corpus):
            self.note(f"contributions that were withdrawn, and are out from step {first} on: {gone}")
        if not self.run.attempts:
            self.members.check(self.plan)
        return self.run.open(
            segment=self.state.segments,
            first=first,
            last=last,
            facts=self._facts(),
            due=due,
            eligibility=eligibility,
            after=self._after,
            variance=self._variance(),
        )

    def _variance(self) -> list[float]:
        """S² per layer at the next step, where the plan's rules move it. What they move it by was released."""
        adaptation = self.state.adaptation
        if adaptation is None:
            return []
        factor = self.state.factor / adaptation.factor
        return [(s * factor) ** 2 for s in adaptation.applied.noise]

    def _due(self, first: int, last: int) -> tuple[int, tuple[Charge, ...]]:
        """Where the segment ends, and what it takes.

        Where noise follows the budget, it is fixed for a segment, and the segment ends where the budget does.
        """
        if not follows_budget(self.plan):
            return last, run_budget.charges_due(self.run, self.plan, first, last)
        factor = self.state.factor
        while last > first:
            due = charges_in_declared_steps(self.plan, first, last, factor)
            if adaptive_budget_fits(self.plan, self.run.attempts, due):
                return last, due
            last -= 1
        return first, ()

    def close(self, opened: AttemptOpened) -> None:
        """Everything of the segment is in `state`: make it durable, then let it out."""
        self.state.segments, self.state.step = opened.segment + 1, opened.last
        self._save(opened)
        self.run.close(opened, self._checkpoint)
        self.run.checkpoints.prune()

    def abandon(self, opened: AttemptOpened) -> None:
        """Back to the checkpoint. The charge stays, and the seed is never used again."""
        self.note(
            f"a contribution was withdrawn: steps {opened.first} to {opened.last - 1} are given up, stay charged, "
            "and are done again without it"
        )
        self.run.give_up(opened)
        self._restore()
        self._charge_filters()
        self._reserve_rest(self.state.step)

    # ------------------------------------------------------------------------------------ inside

    def _charge_filters(self) -> None:
        """What was opened after the checkpoint was charged, whatever became of it."""
        for opened in self.run.attempts:
            for c in opened.charges:
                if opened.segment >= self.state.segments and c.cls in self.state.filters:
                    self.state.filters[c.cls].charge(c.sigma, c.q, c.steps)

    def _facts(self) -> SegmentInputs:
        revision, key = self.corpus.revision, self.run.salt
        if self._membership is None or self._membership[0] != revision:
            self._membership = revision, self.corpus.membership(key)
        self.revision = revision
        return SegmentInputs(
            plan=self.plan.digest(),
            settings=self.settings,
            membership=self._membership[1],
            checkpoint=self._checkpoint,
            data=self.corpus.digest(key),
            world_size=1,
            threads=torch.get_num_threads(),
            code=code_version(),
        )

    def _header(self, opened: AttemptOpened | None) -> dict[str, Any]:
        """Whose checkpoint it is, and what may not change while the run lasts."""
        return {
            "run": self.run.id,
            "origin": self.run.origin,
            "generation": opened.generation if opened else 0,
            "nonce": opened.nonce if opened else bytes(16),
            "settings": self.settings,
            "order": self.corpus.order(self.run.salt),
            "caps": self.caps,
        }

    def _save(self, opened: AttemptOpened | None) -> None:
        snapshot = self.state.capture(self._header(opened))
        self._checkpoint = self.run.checkpoints.save(self.state.segments, snapshot)
        self._after = snapshot.state["generation"]

    def _restore(self) -> None:
        indices = self.run.checkpoints.indices()
        if not indices:
            problem = f"'{self.run.folder}' has a journal and no checkpoint"
            remedy = "restore the checkpoint; or begin in another folder (what was charged stays in the ledger)"
            raise RunError("train.journal-no-checkpoint", problem, remedy)
        pending = self.run.journal.pending
        if pending is not None and indices[-1] > pending.segment and self.run.disowned:
            self._go_back(indices)
        snapshot, self._checkpoint = self.run.checkpoints.load(indices[-1])
        self._check(snapshot, indices[-1])
        self._written_by, self._after = snapshot.state["nonce"], snapshot.state["generation"]
        self.state.restore(snapshot)
        if snapshot.state["settings"] != self.settings:
            changes = self.state.apply_given()
            self.note(f"optimiser, scheduler, loss, model or options are not those of the checkpoint: {changes}")

    def _go_back(self, indices: list[int]) -> None:
        """The newest checkpoint comes from steps that the ledger records as given up: the one before it counts."""
        if len(indices) == 1:
            problem = f"the only checkpoint in '{self.run.folder}' comes from steps that the ledger records as given up"
            remedy = "begin in another folder; what was charged stays in the ledger"
            raise RunError("train.checkpoint-comes-steps", problem, remedy)
        self.run.checkpoints.drop(indices.pop())

    def _check(self, snapshot: TrainingCheckpoint, index: int) -> None:
        """Whether a checkpoint is this run's, and the one that its journal closed."""
        header, folder = snapshot.state, self.run.folder
        if header.get("run") != self.run.id:
            problem = f"checkpoint {index} in '{folder}' belongs to another run"
            raise RunError("train.checkpoint-belongs-another", problem, "put the run's own checkpoint back")
        closes = [r for r in self.run.journal.records if isinstance(r, AttemptClosed) and r.segment == index - 1]
        pending = self.run.journal.pending
        finished = pending is not None and pending.segment == index - 1
        if index and not finished and (not closes or closes[-1].checkpoint != self._checkpoint):
            problem = f"checkpoint {index} in '{folder}' is not the one that the journal closed"
            remedy = "put journal and checkpoints of one and the same moment back together, or begin in another folder"
            raise RunError("train.checkpoint-not-journal-closed", problem, remedy)
        if header["origin"] != self.run.origin:
            raise RunError(
                "train.run-begun-under",
                f"the run was begun under origin {header['origin']!r}, and the ledger '{self.run.book.path}' is "
                f"{self.run.origin!r}'s",
                "keep origin and ledger: what the run spent is recorded there",
            )
        if header["caps"] != self.caps:
            raise RunError(
                "train.max-occurrences-run",
                f"max_occurrences was {header['caps'] or 'not given'} when the run began, and is "
                f"{self.caps or 'not given'} now",
                "keep it for the whole run: occurrences before were not counted under another cap",
            )
        named = "occurrences_of" in snapshot.tensors and self.state.names is not None
        moved = header["order"] != self.corpus.order(self.run.salt)
        if "occurrences" in snapshot.tensors and moved and not named:
            raise RunError(
                "train.corpus-contributions-them",
                "the corpus has other contributions, or has them in another order, than when their occurrences were "
                "counted",
                "give the corpus as it was; whoever leaves is withdrawn by corpus.withdraw(id)",
            )
