"""`Segments`: the protocol of a run, from one checkpoint to the next.

    begin   before the first segment: the digest of the starting weights becomes a leaf of the ledger
    open    plan, membership and data are frozen; a seed is drawn and written down; the charge is durable in the ledger
    …       coins, noise, dropout come from the seed; nothing of the segment leaves the process
    save    checkpoint: temporary file, fsync, rename, fsync of the folder
    close   the epoch becomes a leaf of the ledger, is committed and signed; the seed is erased; weights, evaluations and
            figures may leave
    end     after the last segment: the facts of the run and the digests of its files become a leaf of the ledger

Killed anywhere, the run is in one of three states, and `decide_resume` knows which: the checkpoint is there and the
segment is not closed; the segment is open and is replayed, or redone and charged again; or nothing is open. docs/runs.md
has the protocol.

Reusing noise on a different batch reveals the difference of the two sums; fresh noise on the same step is a second
release. So a segment
that never reached its checkpoint is *replayed*, seed and all, if nothing that its outcome depends on has changed: it is
then the same random variable, charged once. Otherwise it is *redone* as a new generation with a fresh seed, and charged
again; the old charge stays.
"""

from __future__ import annotations

import enum
import hashlib
import platform
import secrets
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import lamina
from lamina.account.charges import Account, Charge
from lamina.codec import schema_of
from lamina.engine import native
from lamina.engine.batch import model_device
from lamina.engine.noise.source import noise_version
from lamina.errors import BudgetExceeded, RunError
from lamina.ledger.attempts import NoiseByStep
from lamina.ledger.records import MAX_NOISE_VALUES, SegmentOutcome
from lamina.ledger.run_records import MAX_RUN_PROGRAMS, ProgramVersions
from lamina.plan.charges import charges_in_declared_steps, follows_budget, remaining_accounts
from lamina.plan.correlation import aligned_length
from lamina.plan.rules import FollowBudget, FollowQuantile
from lamina.plan.step_plan import StepPlan
from lamina.run.code_fingerprint import SettingsFingerprint
from lamina.run.corpus import Corpus
from lamina.run.membership import LedgerMembership
from lamina.run.run import Run, adaptive_budget_fits, charges_due, reserve_plan, reserve_rest
from lamina.run.run_record import RUN_FILE, AttemptOpened, SegmentInputs
from lamina.run.training_checkpoint import TrainingCheckpoint, TrainingState

OPTIONS_DIFFER = "options differ from those of"  # in the notes of a run that was resumed with others


EAGER = "not compiled"
_CHARGED_AGAIN = "if the run is killed, its open segment is charged again instead of replayed"


class ResumeAction(enum.Enum):
    """What resuming a pending segment means."""

    FINISH = "its checkpoint is there: close it"
    REPLAY = "everything matches: the same seed again, nothing is charged"
    REDO = "something changed: a fresh seed, charged again"


_MISMATCH_TEXTS = {
    "plan": "the plan changed",
    "settings": "optimiser, scheduler, loss, model or options changed",
    "membership": "contributions were added or withdrawn",
    "checkpoint": "the segment began at another checkpoint",
    "data": "the data changed",
    "world_size": "the number of ranks changed",
    "threads": "the number of threads changed",
    "code": "the version of the program, what draws its noise, its kernels, its compiler (or whether it compiles steps) or "
    "the kind of processor changed, or the model is on a device whose sums are not the same again",
}


def replay_mismatches(pending: AttemptOpened, facts: SegmentInputs) -> tuple[str, ...]:
    """Why a pending segment cannot be replayed. Empty if it can."""
    found = [_MISMATCH_TEXTS[f.name] for f in fields(facts) if getattr(pending, f.name) != getattr(facts, f.name)]
    return (*found, *(() if pending.seed else ("their seed was erased",)))


def decide_resume(pending: AttemptOpened, facts: SegmentInputs, *, newest: int) -> tuple[ResumeAction, tuple[str, ...]]:
    """What to do about a pending segment, and why; `newest` counts the closed segments of the newest checkpoint."""
    if newest > pending.segment:
        return ResumeAction.FINISH, ()
    reasons = replay_mismatches(pending, facts)
    return (ResumeAction.REDO, reasons) if reasons else (ResumeAction.REPLAY, ())


def most_steps(plan: StepPlan) -> int:
    """The longest segment whose epoch can list every S² per layer that the plan's rules may apply in it."""
    moves = [
        1 if isinstance(rule, FollowQuantile) else rule.every
        for rule in plan.rules
        if not isinstance(rule, FollowBudget)
    ]
    changes = max(1, MAX_NOISE_VALUES // len(plan.layers))
    return max(1, int(changes / sum(1 / every for every in moves))) if moves else plan.steps


class Segments:
    """The segments of one run, under its lease. `end` is the step at which the run will stop."""

    def __init__(
        self, run: Run, state: TrainingState, *, plan: StepPlan, corpus: Corpus, members: LedgerMembership,
        settings: Callable[[], SettingsFingerprint], caps: Mapping[str, int], length: int, note: Callable[[str], None],
        say: Callable[[str], None], world_size: int = 1, executor: str = EAGER, take_over: bool = False,
    ) -> None:  # fmt: skip
        self.run, self.state, self.plan, self.corpus = run, state, plan, corpus
        self._fingerprint, self.caps, self.length, self.note = settings, dict(caps), length, note
        self.settings, self._unknown = settings()
        self.members, self.end, self.world_size = members, plan.steps, world_size
        self.say, self._take_over = say, take_over  # `say`: on the screen only
        self._replay: AttemptOpened | None = None
        # Only on the CPU are sums the same again, bit for bit: elsewhere nobody takes a segment for one to be repeated.
        device = model_device(state.model).type
        self._code = f"{code_version()}; steps {executor}"
        if device != "cpu":
            self._code += f"; {device} {secrets.token_hex(8)}"
        self._checkpoint = bytes(32)
        self._written_by = bytes(16)  # the nonce of the segment that the checkpoint ended
        self._after = 0  # its generation
        self._noise: NoiseByStep = ()  # that it applied
        self._start: bytes | None = None  # SHA-256 of the weights before the first step; None in runs of older versions
        self._program = schema_of(ProgramVersions).to_cbor(program_versions())
        self._membership: tuple[int, bytes] | None = None
        self.revision = corpus.revision  # of the membership that the open segment was frozen with

    def start(self) -> None:
        """Begin a new run, or resume one."""
        if self._unknown:
            more = f" and {len(self._unknown) - 3} more" if len(self._unknown) > 3 else ""
            self.note(
                f"cannot be compared with another process: {', '.join(self._unknown[:3])}{more}; {_CHARGED_AGAIN}"
            )
        if self.run.fresh or not (self.run.checkpoints.indices() or self.run.file.opened):
            self.run.follow_ledger(take_over=self._take_over, note=self.note)
            self.members.check(self.plan)
            snapshot = self.state.capture(self._header(None))
            self.run.checkpoints.room(snapshot)  # before anything is reserved
            self._start = hashlib.sha256(snapshot.weights_file()).digest()
            self.run.start_record(
                self._start, self.state.optimizer_text
            )  # refused if what is declared about it contradicts the ledger
            self._refuse_exhausted()
            reserve_plan(self.run, self.plan)
            self._save(None)  # also after a kill before the first checkpoint: nothing was drawn then
        else:
            self._resume()

    def _refuse_exhausted(self) -> None:
        """Refuse to begin a run in which everybody would be left out."""
        factors = self.run.exhausted(self.plan, 0, self._end_of_segment(0))
        if factors and not any(map(len, self.corpus.members_of(self.plan, factors))):
            (self.run.folder / RUN_FILE).unlink()
            problem = f"the signed bounds of all contributions of corpus {self.run.origin!r} are exhausted"
            raise BudgetExceeded("train.everybody-exhausted", problem, "admit contributions that signed another bound")

    def _end_of_segment(self, first: int) -> int:
        length = aligned_length(min(self.length, most_steps(self.plan)), self.plan.bands)
        return min(self.end, first + length)

    def _resume(self) -> None:
        run, state = self.run, self.state
        run.follow_ledger(take_over=self._take_over, note=self.note)
        self._restore()
        if self._start is not None and (run.attempts or run.pending):
            run.begin(self._start, state.optimizer_text)  # where the ledger's key was not there at the beginning
        self.members.freeze()  # a segment with somebody who withdrew meanwhile is not replayed
        self._refuse_another_plan()
        if (pending := run.pending) is not None:
            self._settle(pending)
        elif lost := [each for each in run.attempts if each.segment >= state.segments]:
            closed = lost[-1].outcome is SegmentOutcome.CLOSED
            why = (
                f"the checkpoint after step {lost[-1].last} is missing"
                if closed
                else "the ledger records them as abandoned"
            )
            self.note(f"steps from {state.step} on are done again and charged again: {why}")
        self._charge_filters()
        self._reserve_rest(self._replay.last if self._replay else state.step)
        if run.ended is not None:
            self.say(f"the run finished before, at step {state.step}: nothing is trained or charged now")
        else:
            replay = f"; steps up to {self._replay.last - 1} are replayed at no cost" if self._replay else ""
            self.say(f"resuming at step {state.step} of {self.plan.steps}{replay}")

    def _settle(self, pending: AttemptOpened) -> None:
        """Finish, replay, discard or abandon the segment that was open when the run stopped."""
        run, newest, charged = self.run, self.state.segments, self.run.is_charged(pending)
        action, reasons = decide_resume(pending, self._facts(), newest=newest)
        if action is ResumeAction.FINISH and not (charged and self._written_by == pending.nonce):
            problem = f"checkpoint {newest} was not written by segment {pending.segment}, which is open"
            remedy = "put back the folder as it was at one moment, or begin in another folder"
            raise RunError("train.checkpoint-not-of-run", problem, remedy)
        if action is ResumeAction.FINISH:
            run.close(pending, self._noise)
        elif action is ResumeAction.REPLAY and (charged or self._charged_now(pending)):
            self._replay = pending
        elif not charged:
            run.discard()
        else:
            steps = f"steps {self.state.step} to {pending.last - 1}"
            self.note(f"{steps} are done again with fresh noise and charged again, because {'; '.join(reasons)}")
            run.abandon(pending)

    def _charged_now(self, pending: AttemptOpened) -> bool:
        """Charge an attempt that drew nothing because the run was killed before its charge; whether it was."""
        try:
            return self.run.charge(pending)
        except BudgetExceeded:
            return False

    def _refuse_another_plan(self) -> None:
        """Refuse a finished run without its last checkpoint or under another plan, and a plan that ends too early."""
        ended, attempts = self.run.ended, self.run.attempts
        if ended is not None and ended[0] != self.state.step:
            here = f"the newest checkpoint in '{self.run.folder}' is of step {self.state.step}"
            problem = f"{here}, but the run finished at step {ended[0]}"
            raise RunError("train.last-checkpoint-missing", problem, "restore the last checkpoint of the run")
        other = bool(attempts) and attempts[-1].plan != self.plan.digest()
        if (ended is not None and other) or self.state.step > self.plan.steps:
            problem = (
                f"the run in '{self.run.folder}' is at step {self.state.step}, under another plan than the one given"
            )
            remedy = "give the plan that it was begun with, or another folder: the ledger adds up what both cost"
            raise RunError("train.plan-changed", problem, remedy)

    def _reserve_rest(self, first: int) -> None:
        if self.run.ended is not None:  # only read: nothing is reserved
            self.run.plan, self.end = self.plan, first
            return
        self.end = reserve_rest(self.run, self.plan, first)
        if self.end < self.plan.steps:
            self.note(f"the bounds allow {self.end} of {self.plan.steps} steps: the run will end there")

    def open(self) -> AttemptOpened | None:
        """The next segment, charged; None if there is none, or no filter has room for it."""
        if self._replay is not None:
            opened, self._replay = self._replay, None
            return opened
        first, last = self.state.step, self._end_of_segment(self.state.step)
        factors = self.run.exhausted(self.plan, first, last)
        last, due = self._due(first, last, factors)
        if first >= last:
            return None
        if factors and not any(map(len, self.corpus.members_of(self.plan, factors))):
            self.note(f"the signed bounds of all contributions are exhausted for steps {first} to {last - 1}")
            return None
        filters = self.state.filters
        for c in due:
            if (cls := str(c.account)) in filters and not filters[cls].admits(c.event.sigma, c.event.q, c.event.steps):
                self.note(f"the filter of class '{cls}' does not allow steps {first} to {last - 1}")
                return None
        for c in due:
            if (cls := str(c.account)) in filters:
                filters[cls].charge(c.event.sigma, c.event.q, c.event.steps)
        if self._start is not None and not self.state.segments:
            self.run.begin(self._start, self.state.optimizer_text)
        present = len(self.corpus)
        eligibility = self.members.freeze()
        if gone := present - len(self.corpus):
            self.note(f"{gone} contributions withdrew and are not used from step {first} on")
        if not self.run.attempts:
            self.members.check(self.plan)
        self._tell_exhausted(first, factors)
        return self.run.open(
            segment=self.state.segments, first=first, last=last, facts=self._facts(), due=due, eligibility=eligibility,
            after=self._after, variance=self._variance(), factors=factors,
        )  # fmt: skip

    def _tell_exhausted(self, first: int, factors: Mapping[str, float]) -> None:
        """On the screen and in the notes, by signed bound: how many are left out or scaled from here on."""
        before = self.run.attempts[-1].factors if self.run.attempts else {}
        for name in sorted({*factors, *before}):
            if (factor := factors.get(name, 1.0)) != before.get(name, 1.0):
                done = f"is exhausted by earlier charges: {f'scaled by {factor:g}' if factor else 'left out'}"
                done = done if factor < 1 else "covers the next steps: not scaled"
                who = f"{Account.parse(name).describe()} (contributions: {self.corpus.count_signed(name)})"
                self.note(f"{who} {done} from step {first} on")

    def _variance(self) -> list[float]:
        """S² per layer at the next step, where the plan's rules move it. What they move it by was released."""
        return [] if self.state.adaptation is None else [s**2 for s in self.state.noise(self.plan)]

    def refuse_same_error(self, stopped: AttemptOpened) -> None:
        """Refuse to charge steps again that failed, if nothing has changed that they depend on."""
        facts, folder = self._facts(), self.run.folder
        if any(getattr(stopped, f.name) != getattr(facts, f.name) for f in fields(facts)):
            return
        steps = f"steps {stopped.first} to {stopped.last - 1}"
        problem = f"an error stopped {steps} of the run in '{folder}', and neither code, data nor members have changed"
        remedy = (
            f"correct model, loss or data; if it was the machine (memory, a file server), remove '{folder / 'stopped'}' "
            "and go on. Both charge these steps again"
        )
        raise RunError("train.stopped-before", problem, remedy)

    def _due(self, first: int, last: int, factors: Mapping[str, float]) -> tuple[int, tuple[Charge, ...]]:
        """Where the segment ends, and what it takes.

        An adaptive budget fixes the noise for a segment, and the segment ends where the budget does.
        """
        if not follows_budget(self.plan):
            return last, charges_due(self.run, self.plan, first, last, remaining_accounts(self.run.accounts, factors))
        factor = self.state.factor
        while last > first:
            due = charges_in_declared_steps(self.plan, first, last, factor)
            if adaptive_budget_fits(self.plan, self.run.attempts, due):
                return last, due
            last -= 1
        return first, ()

    def close(self, opened: AttemptOpened, noise: NoiseByStep) -> None:
        """Everything of the segment is in `state`: make it durable, then record and close the segment.

        `noise` is from which step on which S² per layer was applied, where the plan's rules move it.
        """
        self._noise = noise
        self.state.segments, self.state.step = opened.segment + 1, opened.last
        if self._program not in self.state.programs:
            self.state.programs = [*self.state.programs, self._program][-MAX_RUN_PROGRAMS:]
        self._save(opened)
        self.run.close(opened, noise)
        self.run.checkpoints.prune()

    def abandon(self, opened: AttemptOpened) -> None:
        """Go back to the checkpoint. The charge stays, and the seed is never used again."""
        steps = f"steps {opened.first} to {opened.last - 1}"
        self.note(f"a contribution withdrew: {steps} are abandoned, stay charged, and are done again without it")
        self.run.abandon(opened)
        self._restore()
        self._charge_filters()
        self._reserve_rest(self.state.step)

    def _charge_filters(self) -> None:
        """Charge the filters for every segment that was opened after the checkpoint, whatever became of it."""
        for opened in self.run.attempts:
            for c in opened.taken:
                if opened.segment >= self.state.segments and (cls := str(c.account)) in self.state.filters:
                    self.state.filters[cls].charge(c.event.sigma, c.event.q, c.event.steps)

    def _facts(self) -> SegmentInputs:
        revision, key = self.corpus.revision, self.run.salt
        if self._membership is None or self._membership[0] != revision:
            self._membership = revision, self.corpus.membership(key)
        self.revision = revision
        settings, unknown = self._fingerprint()  # again, because earlier steps may have changed values
        return SegmentInputs(
            plan=self.plan.digest(), settings=secrets.token_bytes(32) if unknown else settings, membership=self._membership[1],
            checkpoint=self._checkpoint, data=self.corpus.digest(key), world_size=self.world_size,
            threads=torch.get_num_threads(), code=self._code,
        )  # fmt: skip

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
            "start": self._start,
            "declared": self.run.declared,
            "applied": [[step, list(variance)] for step, variance in self._noise],
        }

    def _save(self, opened: AttemptOpened | None) -> None:
        if self.state.mechanism is not None and self.state.step == self.plan.steps:
            self.state.mechanism.clear()  # no noise follows from it any more
        snapshot = self.state.capture(self._header(opened))
        self._checkpoint = self.run.checkpoints.save(self.state.segments, snapshot)
        self._after = snapshot.state["generation"]
        self.run.weights_from = (self.state.segments - 1, self._after)

    def _restore(self) -> None:
        indices = self.run.checkpoints.indices()
        if not indices:
            problem = f"'{self.run.folder}' has attempts but no checkpoint"
            remedy = "restore the checkpoint; or begin in another folder (what was charged stays in the ledger)"
            raise RunError("train.checkpoint-missing", problem, remedy)
        snapshot, self._checkpoint = self.run.checkpoints.load(indices[-1])
        abandoned = {each.nonce for each in self.run.attempts if each.outcome is SegmentOutcome.ABANDONED}
        if snapshot.state.get("nonce") in abandoned:  # it comes from steps that never ended: the one before counts
            if len(indices) == 1:
                problem = (
                    f"the only checkpoint in '{self.run.folder}' comes from steps that the ledger records as abandoned"
                )
                remedy = "begin in another folder; what was charged stays in the ledger"
                raise RunError("train.checkpoint-abandoned", problem, remedy)
            self.run.checkpoints.remove(indices.pop())
            snapshot, self._checkpoint = self.run.checkpoints.load(indices[-1])
        self._check(snapshot, indices[-1])
        self._written_by, self._after = snapshot.state["nonce"], snapshot.state["generation"]
        self._noise = tuple((step, tuple(variance)) for step, variance in snapshot.state.get("applied", ()))
        self.run.weights_from = (indices[-1] - 1, self._after) if indices[-1] else None
        self._start, declared = snapshot.state.get("start"), snapshot.state.get("declared")
        self.run.declared = self.run.declared or declared
        self.state.restore(snapshot)
        if snapshot.state["settings"] != self.settings and self.state.step == self.plan.steps:
            self.note(f"optimiser, loss, model or {OPTIONS_DIFFER} this run, which has finished: no effect")
        elif snapshot.state["settings"] != self.settings:
            changes = self.state.apply_given()
            self.note(f"optimiser, scheduler, loss, model or {OPTIONS_DIFFER} the checkpoint: {changes}")

    def _check(self, snapshot: TrainingCheckpoint, index: int) -> None:
        """Refuse a checkpoint that is not this run's, or that no attempt of it wrote."""
        header, folder = snapshot.state, self.run.folder
        if header.get("run") != self.run.id:
            problem = f"checkpoint {index} in '{folder}' belongs to another run"
            raise RunError("train.checkpoint-of-other-run", problem, "put the run's own checkpoint back")
        pending = self.run.pending
        known = {(each.segment, each.nonce) for each in (*self.run.attempts, *(() if pending is None else (pending,)))}
        if index and (index - 1, header["nonce"]) not in known:
            problem = f"checkpoint {index} in '{folder}' was written by no attempt of the run in the ledger"
            remedy = "put back the folder as it was at one moment, or begin in another folder"
            raise RunError("train.checkpoint-not-of-run", problem, remedy)
        if header["caps"] != self.caps:
            now, before = self.caps or "not given", header["caps"] or "not given"
            problem = f"max_occurrences is {now}, and was {before} when the run began"
            remedy = "keep it for the whole run: the counts belong to it"
            raise RunError("train.max-occurrences-changed", problem, remedy)
        named = "occurrences_of" in snapshot.tensors and self.state.names is not None
        moved = header["order"] != self.corpus.order(self.run.salt)
        if "occurrences" in snapshot.tensors and moved and not named:
            problem = "the corpus has other contributions, or another order, than when their occurrences were counted"
            remedy = "give the corpus as it was; withdraw contributions with corpus.withdraw(id)"
            raise RunError("train.corpus-order-changed", problem, remedy)


@cache
def source_digest() -> bytes:
    """Return the SHA-256 of the list of Lamina's sources with their digests, as printed by sha256sum (docs/certificate.md)."""
    root = Path(__file__).parents[1]
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.suffix in (".py", ".c", ".h")}
    listed = (f"{hashlib.sha256(files[name].read_bytes()).hexdigest()}  {name}\n" for name in sorted(files))
    return hashlib.sha256("".join(listed).encode()).digest()


def program_versions() -> ProgramVersions:
    """Return the versions and digests of the program in this process."""
    return ProgramVersions(
        lamina=lamina.__version__, sources=source_digest(), torch=str(torch.__version__),
        python=platform.python_version(), kernels=native.library_digest(),
    )  # fmt: skip


def code_version() -> str:
    """Versions, noise, kernels and processor: sums of floats are the same again only where all of these are."""
    processor = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    sources = source_digest().hex()[:16]
    versions = f"lamina {lamina.__version__} {sources}; torch {torch.__version__}; numpy {np.__version__}"
    return f"{versions}; noise {noise_version()}; kernels {native.kind()}; {processor}"
