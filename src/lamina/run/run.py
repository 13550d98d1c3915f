"""`Run`: the folder of a run, its journal, its checkpoints, and what it reserves and charges in the ledger.

runs/NAME/  plan.cbor        what every step does
            journal          segments opened and closed; secret (mode 0600): it holds the seed of an open segment
            checkpoint/      the newest two; secret while occurrences are counted in them
            metrics.json     public figures
            model.safetensors, ema.safetensors, best.safetensors   what may leave, written when a segment closed
            stopped          the attempt that an error in a step ended, if it was the last one
            lease            who is working on it
            ledger.db        a link to the ledger, which all runs on a corpus share

**Adaptive budget.** Where sigma is chosen on the way, under a filter at one Rényi order, the whole price of the plan is
charged when the run begins, under a segment of its own. What the attempts take of it is written in the journal, in
declared steps; `adaptive_budget_fits` is the filter.

**Capped occurrences** (raw noise, each occurrence is paid for). The sampler counts occurrences along the weights that
the run has now. Attempts that were abandoned, lost, or made by a copy of the run used contributions beside that count.
With N the cap, one contribution has taken part at most

    min(N, steps along the weights)  +  Σ min(N, its steps) over other attempts  +  Σ min(N, steps since) over copies

times. An attempt is charged what that sum exceeds all earlier charges by: for each class and signed bound by itself,
since a bound may have come into the run later.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any

from lamina.account.accountants import find_accountant
from lamina.account.charges import Account, Charge
from lamina.account.gaussian_rdp import step_rdp
from lamina.account.schedule import Event, Schedule, grouped, rdp_order_of
from lamina.admit.attestation import MICRO
from lamina.codec import schema_of
from lamina.engine.noise.random_stream import segment_seed
from lamina.errors import BudgetExceeded, LedgerError, RunError
from lamina.ledger.attempts import NoiseByStep, OpenAttempt
from lamina.ledger.records import ContributionRecord, SegmentOutcome
from lamina.ledger.run_records import (
    DECLARED_ORIGINS,
    EVALUATION,
    FileDigest,
    OccurrenceCap,
    ProgramVersions,
    RunBegin,
    RunEnd,
    WeightsOrigin,
)
from lamina.ledger.spend_ledger import SpendLedger
from lamina.ledger.store.rows import WHOLE_BUDGET_SEGMENT
from lamina.plan.charges import SignedAccount, bound_charges, follows_budget, plan_charges
from lamina.plan.signed_bounds import signed_epsilon
from lamina.plan.step_plan import StepPlan
from lamina.run.journal import (
    AttemptAbandoned,
    AttemptClosed,
    AttemptOpened,
    Journal,
    JournalMoved,
    NoiseApplied,
    RunEnded,
    SegmentInputs,
)
from lamina.run.run_files import remove_temporary_files, write_atomically
from lamina.run.training_checkpoint import TrainingCheckpoints


class Run:
    """Opened under the run's lease, by one process at a time.

    What was charged is written down twice: in the journal, before anything is drawn, and in the ledger, where it is
    added up with other runs. Charging and recording are idempotent in (run, segment, generation, nonce), so a crash
    between the two is repaired by doing again what the journal says.
    """

    def __init__(
        self, folder: Path, *, spend: SpendLedger, bounds: Mapping[str, float], accounts: Sequence[SignedAccount] = (),
        factors: Sequence[float] = (), seed: int | None = None, declared: str | None = None,
    ) -> None:  # fmt: skip
        self.folder, self.spend, self.accounts = folder, spend, tuple(accounts)
        self.declared = declared  # about the starting weights: "untrained", "public" or the id of a run
        self.factors = tuple(factors)  # of exhausted bounds, the largest first; none: a run that exceeds one is refused
        self._chosen_seed = seed
        self.plan: StepPlan | None = None  # the one that it goes on with
        self.bounds = {**bounds, **{each.name: each.epsilon for each in accounts}}
        path = folder / "journal"
        self.fresh = not path.exists()
        if self.fresh and (folder / "checkpoint").is_dir() and any((folder / "checkpoint").iterdir()):
            problem = f"'{folder}' has checkpoints but no journal, which says what they cost"
            remedy = "restore the journal; or begin in another folder (what was charged stays in the ledger)"
            raise RunError("train.journal-missing", problem, remedy)
        if self.fresh:
            self.journal = Journal.create(path, run=secrets.token_hex(16), salt=os.urandom(32))
        else:
            self.journal = Journal.load(path)
        self.checkpoints = TrainingCheckpoints(folder / "checkpoint")
        known = {opened.nonce for opened in self.journal.opens}
        self.lost_attempts = self.spend.forgotten(self.id, self.journal.place, known)  # in the ledger alone
        self.copied = self.journal.copied or self.lost_attempts > self.journal.lost
        remove_temporary_files(folder)  # what killed writers left

    @property
    def id(self) -> str:
        return self.journal.start.run

    @property
    def origin(self) -> str:
        """The corpus that it is charged under."""
        return self.spend.origin

    @property
    def salt(self) -> bytes:
        """Keys the digests of data and membership, so that they mean nothing outside this run."""
        return self.journal.start.salt

    @property
    def attested(self) -> bool:
        """Whether the contributions are signed: the ledger has signed ones, and refuses runs on any other."""
        with self.spend.ledger.store.read() as rows:
            return self.spend.ledger.checked(rows).count(ContributionRecord) > 0

    @property
    def abandoned_in_ledger(self) -> bool:
        """Whether the ledger records the open segment as abandoned: by a copy of the run, or as lost."""
        if (pending := self.journal.pending) is None:
            return False
        found = self.spend.recorded(self.id, pending.segment, pending.generation)
        return found is not None and (found.nonce, found.outcome) == (pending.nonce, SegmentOutcome.ABANDONED)

    def acknowledge_copy(self) -> None:
        """Write down the new inode of a copied journal, or how many attempts an older state of it lacks.

        Attempts that were made here and that the journal does not know are abandoned: nobody will go on with them.
        """
        known, here = {opened.nonce for opened in self.journal.opens}, self.journal.place
        self.spend.give_up(self.id, lambda nonce, place: place == here and nonce not in known)
        self.journal.append(JournalMoved(place=here, lost=self.lost_attempts))

    # ------------------------------------------------------------------------------------ one segment

    def open(
        self, *, segment: int, first: int, last: int, facts: SegmentInputs, due: Sequence[Charge], eligibility: int,
        after: int, variance: Sequence[float] = (), factors: Mapping[str, float] | None = None,
    ) -> AttemptOpened:  # fmt: skip
        """Draw a seed, write it down with what the segment takes, and charge it. Only then may anything be drawn."""
        generation = self.generation(segment)
        while True:
            opened = AttemptOpened(
                segment=segment, generation=generation, nonce=os.urandom(16), first=first, last=last, **asdict(facts),
                charges=tuple(due), eligibility=eligibility, after=after, variance=tuple(variance),
                scales=self.scales(due, factors or {}), factors=dict(factors or {}),
                seed=segment_seed(self._chosen_seed, segment, generation),  # from the system, or from the chosen seed
            )  # fmt: skip
            self.journal.append(opened)
            try:
                if self.charge(opened):
                    return opened
            except BudgetExceeded:
                self.abandon(opened, charged=False)
                raise
            self.abandon(opened, charged=False)
            generation = max(generation + 1, self.spend.next_generation(self.id, segment))

    def charge(self, opened: AttemptOpened, *, already: bool = False) -> bool:
        """Charge an attempt in the ledger; False if a copy of the run charged this very generation first."""
        return self.spend.charge(
            self.id, segment=opened.segment, generation=opened.generation, nonce=opened.nonce,
            charges=charges_to_record(opened), bounds=self.bounds, scales=opened.scales, plan=opened.plan,
            begun=_opened_attempt(opened), place=self.journal.place, already=already, factors=opened.factors,
        )  # fmt: skip

    def exhausted(self, plan: StepPlan, first: int, last: int) -> dict[str, float]:
        """The signed bounds that earlier charges have used up for these steps, each with the factor that remains."""
        return self.spend.exhausted(plan, first, last, self.accounts, self.factors) if self.factors else {}

    @property
    def reserved_accounts(self) -> tuple[SignedAccount, ...]:
        """The signed bounds that are reserved with the plan: none where each segment finds out what is left of them."""
        return () if self.factors else self.accounts

    def scales(self, due: Sequence[Charge], factors: Mapping[str, float]) -> dict[str, float]:
        """Scales of the signed bounds among these charges; of all where occurrences are capped and may cost nothing."""
        names = {*factors, *(str(charge.account) for charge in due)}
        capped = self.plan is not None and self.plan.injection.occurrences is not None
        return {each.name: each.scale for each in self.accounts if capped or each.name in names}

    def record(self, opened: AttemptOpened, outcome: SegmentOutcome) -> None:
        """Write the leaf of an ended attempt: what it took, from whom, and what everybody has spent after it."""
        plan, scales = self.plan_of(opened.plan), {each.name: each.scale for each in self.accounts}
        # How far an abandoned attempt came is nobody's to know. The journal tells the noise of those that took all steps;
        # of the others, only the noise that they began with is told.
        begun = _opened_attempt(opened, self.journal.noise_applied(opened))
        self.spend.record(self.id, opened.key, begun, outcome, plan=plan, scales=scales)

    def plan_of(self, digest: bytes) -> StepPlan:
        """A plan of this run, by its digest: the one given now, or the one that the folder or the ledger has."""
        if self.plan is not None and self.spend.digest(self.plan) == digest:
            return self.plan
        path, earlier = self.folder / "plan.cbor", self.folder / f"plan-{digest.hex()[:16]}.cbor"
        here = [each.read_bytes() for each in (path, earlier) if each.exists()]
        for data in (*here, self.spend.ledger.blob(digest) or b""):
            if hashlib.sha256(data).digest() == digest:
                return StepPlan.from_cbor(data)
        problem = f"the plan {digest.hex()[:16]} of a segment that was charged is neither in '{path}' nor in the ledger"
        remedy = "restore plan.cbor: what the segment cost cannot be recorded without it"
        raise RunError("train.plan-missing", problem, remedy)

    def generation(self, segment: int) -> int:
        """The next unused generation of a segment, here and in the ledger."""
        mine = [opened.generation + 1 for opened in self.journal.opens if opened.segment == segment]
        return max([*mine, self.spend.next_generation(self.id, segment), 1 if self.copied else 0])

    def stop(self, opened: AttemptOpened) -> None:
        """Abandon an attempt in which a step failed: when it did may tell who was sampled. The next start looks into it."""
        self.abandon(opened)
        write_atomically(self.folder / "stopped", opened.nonce)

    @property
    def stopped(self) -> AttemptOpened | None:
        """The last attempt, if a step of it failed and `stopped` was not removed since."""
        path, over = self.folder / "stopped", self.journal.pending is None and self.journal.done is None
        last = self.attempts[-1] if over and self.attempts and path.exists() else None
        return last if last is not None and path.read_bytes() == last.nonce else None

    def abandon(self, opened: AttemptOpened, *, charged: bool = True) -> None:
        """Never finish or replay an attempt: its seed is erased. What was charged stays charged, and is recorded."""
        segment, generation, nonce = opened.key
        self.journal.append(AttemptAbandoned(segment=segment, generation=generation, nonce=nonce, charged=charged))
        if charged:
            self.record(opened, SegmentOutcome.ABANDONED)

    def write_noise(self, opened: AttemptOpened, noise: NoiseByStep) -> None:
        """Write down, before the checkpoint, from which step on which S² per layer was applied."""
        if noise:
            (segment, generation, nonce), (steps, variance) = opened.key, zip(*noise, strict=True)
            made = NoiseApplied(segment=segment, generation=generation, nonce=nonce, steps=steps, variance=variance)
            self.journal.append(made)

    def close(self, opened: AttemptOpened, checkpoint: bytes) -> None:
        """The checkpoint is durable: record the segment, close it, and erase its seed."""
        self.record(opened, SegmentOutcome.CLOSED)
        segment, generation, nonce = opened.key
        self.journal.append(AttemptClosed(segment=segment, generation=generation, nonce=nonce, checkpoint=checkpoint))
        (self.folder / "stopped").unlink(missing_ok=True)

    def start_record(self, weights: bytes, optimizer: str) -> RunBegin:
        """Return the start record of the run: from the ledger, or the one to be written.

        If a run of the ledger wrote these weights at its end, it is the parent, declared or not. Raises RunError if what is
        declared is something else.
        """
        run, ledger, wanted = bytes.fromhex(self.id), self.spend.ledger, self.declared
        begins = [leaf.record for leaf in ledger.of_kind(RunBegin) if isinstance(leaf.record, RunBegin)]
        found = next((each for each in begins if (each.run, each.weights) == (run, weights)), None)
        if found is None:
            ends = (leaf.record for leaf in ledger.of_kind(RunEnd) if isinstance(leaf.record, RunEnd))
            writers = [each.run for each in ends if weights in each.weight_files]
            parent = next((each for each in writers if each.hex() == wanted), writers[-1] if writers else None)
            origin = DECLARED_ORIGINS.get(wanted or "") if parent is None else WeightsOrigin.RUN
            found = RunBegin(run=run, weights=weights, origin=origin, parent=parent, optimizer=optimizer)
        if wanted not in (None, found.declaration):
            problem = (
                f"starting_weights is {wanted!r}, but by the ledger their origin is {found.declaration or 'unknown'}"
            )
            remedy = "leave it out, or name the run of this ledger that wrote the weights"
            raise RunError("train.starting-weights-differ", problem, remedy)
        return found

    def begin(self, weights: bytes, optimizer: str) -> None:
        """Record the starting weights, their origin and the optimiser, once. A run that already has epochs gets no such record.

        Nothing is recorded without the ledger's key, because an unsigned record could have been written by anyone.
        """
        if not self.spend.ledger.signs:
            return
        try:
            self.spend.ledger.append([self.start_record(weights, optimizer)])
        except LedgerError as error:
            if error.code != "ledger.run-begin-late":
                raise

    def end(
        self, steps: int, *, facts: Mapping[str, Any], caps: Mapping[str, int], files: Mapping[str, str],
        programs: Sequence[Mapping[int, Any]] = (), evaluation: bytes | None = None,
    ) -> RunEnd | None:  # fmt: skip
        """Record and sign the end of the run after its last closed segment.

        Return None if no segment is closed, or if the ledger was opened without its key.

        An end that is recorded already is not written again. `facts` are the fields of `RunEnd` that the trainer
        states, `files` the SHA-256 of the files that it writes, `programs` those of its state. The `evaluation` is written
        before the end is recorded, and not if the ledger records another one.
        """
        closed = [opened for opened in self.attempts if opened.last == steps and self.journal.closed(opened)]
        if not closed or not self.spend.ledger.signs:
            return None
        last, ledger = closed[-1], self.spend.ledger
        made = RunEnd(
            run=bytes.fromhex(self.id), segment=last.segment, generation=last.generation, steps=steps, plan=last.plan,
            caps=tuple(OccurrenceCap(cls=cls, most=most) for cls, most in sorted(caps.items())),
            files=tuple(FileDigest(name=name, sha256=bytes.fromhex(each)) for name, each in sorted(files.items())),
            programs=tuple(map(schema_of(ProgramVersions).from_cbor, programs)) or None, **facts,
        )  # fmt: skip
        ends = [leaf.record for leaf in ledger.of_kind(RunEnd)]
        there = next((each for each in ends if isinstance(each, RunEnd) and each.attempt == made.attempt), None)
        if evaluation is not None and (there or made).digests.get(EVALUATION) == made.digests[EVALUATION]:
            self.write(EVALUATION, evaluation)
        if there is None:
            ledger.append([made])
        elif there.weights != made.weights:
            problem = f"the run in '{self.folder}' ended with weights {there.weights[:16]}… by the ledger"
            problem += f", but has {made.weights[:16]}… now"
            raise RunError("train.end-differs", problem, "restore the checkpoint of the run")
        ledger.checkpoint()
        return there or made

    def finish(self, steps: int, reason: str) -> None:
        """No further step will be taken: what is left of the reservation goes back."""
        if (pending := self.journal.pending) is not None:
            self.abandon(pending)
        if self.journal.done is None:
            self.journal.append(RunEnded(steps=steps, reason=reason))
        self.spend.finish(self.id)

    # ------------------------------------------------------------------------------------ what it cost

    @property
    def attempts(self) -> list[AttemptOpened]:
        """Every segment that was charged, finished or not."""
        return [opened for opened in self.journal.opens if not self.journal.uncharged(opened)]

    @property
    def charged(self) -> dict[str, Schedule]:
        """Every event that this run was charged for, by class: redone segments count again.

        Without those under an adaptive budget, whose whole price is in the ledger.
        """
        events: dict[str, list[Event]] = {}
        for opened in self.attempts:
            for charge in charges_to_record(opened):
                events.setdefault(str(charge.account), []).append(charge.event)
        return {name: grouped(rows) for name, rows in events.items()}

    def write(self, name: str, data: bytes) -> None:
        """A public file of the run."""
        write_atomically(self.folder / name, data, mode=0o644)


def _opened_attempt(opened: AttemptOpened, noise: NoiseByStep = ()) -> OpenAttempt:
    variance = noise[0][1] if noise else opened.variance
    return OpenAttempt(opened.first, opened.last, opened.eligibility, opened.after, variance, noise[1:])


def adaptive_budget_nonce(plan: StepPlan, copy_id: str) -> bytes:
    """Names the charge: one for a plan in a copy of the run, so that a copy, or a state put back, pays for itself."""
    return hashlib.sha256(plan.digest() + copy_id.encode()).digest()[:16]


def adaptive_budget_charges(plan: StepPlan, accounts: Sequence[SignedAccount]) -> dict[int, tuple[Charge, ...]]:
    """What is charged together, by segment: all classes, and every signed bound by itself, since bounds come and go."""
    found = {WHOLE_BUDGET_SEGMENT: plan_charges(plan, 0, plan.steps)}
    for each in accounts:
        number = int.from_bytes(hashlib.sha256(each.name.encode()).digest()[:8], "big") >> 3
        found[WHOLE_BUDGET_SEGMENT + 1 + number] = bound_charges(plan, 0, plan.steps, [each])
    return found


def uses_adaptive_budget(opened: AttemptOpened) -> bool:
    """Whether an attempt belongs to an adaptive budget: its charges count in declared steps of it."""
    return any(rdp_order_of(charge.accountant) is not None for charge in opened.charges)


def charges_to_record(opened: AttemptOpened) -> tuple[Charge, ...]:
    """What an attempt adds to the ledger: nothing where the whole budget was charged already."""
    return () if uses_adaptive_budget(opened) else opened.charges


def adaptive_budget_fits(plan: StepPlan, attempts: Sequence[AttemptOpened], due: Sequence[Charge]) -> bool:
    """Whether the budget of `plan` has room for `due`, after all that was charged under the same plan.

    The filter itself, in exact arithmetic: at the plan's one order, prices add.
    """
    order = rdp_order_of(plan.accountant)
    assert order is not None
    whole = plan_charges(plan, 0, plan.steps)
    taken = [c for opened in attempts if opened.plan == plan.digest() for c in opened.charges]

    def price(found: Sequence[Charge], account: Account) -> Fraction:
        mine = (c.event for c in found if c.account == account)
        return sum((each.steps * Fraction(step_rdp(each.q, each.sigma, order)) for each in mine), Fraction())

    return all(price([*taken, *due], account) <= price(whole, account) for account in {c.account for c in whole})


def events_due(run: Run, plan: StepPlan, first: int, last: int, account: Account) -> int:
    """Return how many events the steps first … last-1 add to the charges of an account under this plan."""
    cap, digest = plan.injection.occurrences, plan.digest()
    assert cap is not None
    mine = [opened for opened in run.attempts if opened.plan == digest]
    begin = min([opened.first for opened in mine], default=first)
    outside = attempts_outside(run, first, pending=True)
    beside = [opened.last - opened.first for opened in outside if opened.plan == digest]
    copies = [last - start for start in _steps_of_copies(run, first)]
    most = sum(min(cap, steps) for steps in (last - begin, *beside, *copies))
    charged = sum(c.event.steps for opened in mine for c in opened.charges if c.account == account)
    return max(0, most - charged)


def attempts_outside(run: Run, step: int, *, pending: bool = False) -> list[AttemptOpened]:
    """The attempts that the weights at `step` do not come from: abandoned, lost, or done again since.

    With `pending` the open attempt counts as done, because it is going to be replayed.
    """
    found = []
    for opened in reversed(run.attempts):
        done = run.journal.closed(opened) or (pending and opened is run.journal.pending)
        if done and opened.last == step and opened.first < step:
            step = opened.first
        else:
            found.append(opened)
    return found


def _steps_of_copies(run: Run, step: int) -> list[int]:
    """Where the run went on as a copy: from there on, two of them use the same contributions."""
    starts, moved = [], 0
    for record in run.journal.records:
        if isinstance(record, JournalMoved):
            moved += 1
        elif isinstance(record, AttemptOpened):
            starts += [record.first] * moved
            moved = 0
    return starts + [step] * moved


def reserve_plan(run: Run, plan: StepPlan) -> None:
    """Reserve the whole plan in the ledger; if that is refused, the new journal is removed."""
    run.plan = plan
    try:
        _reserve(run, plan, plan_charges(plan, 0, plan.steps, run.reserved_accounts))
    except BudgetExceeded:
        (run.folder / "journal").unlink()
        raise
    _write_plan(run, plan)


def reserve_rest(run: Run, plan: StepPlan, first: int) -> int:
    """Reserve the rest of the plan, or as much of it as the bounds still allow; returns where it ends.

    After a segment was redone there may be room for fewer steps than were planned. An adaptive budget was charged as
    a whole: `adaptive_budget_fits` says how far it goes.
    """
    run.plan = plan
    steps, rest = max(0, plan.steps - first), charges_due(run, plan, first, plan.steps, run.reserved_accounts)
    if not follows_budget(plan):
        for account in {charge.account: None for charge in rest}:
            most, *besides = [charge for charge in rest if charge.account == account]
            events = _events_within_bounds(run, plan, most, besides)
            if events < most.event.steps:
                steps = min(steps, _steps_within_events(run, plan, first, events, account))
        rest = charges_due(run, plan, first, first + steps, run.reserved_accounts) if steps else ()
    _reserve(run, plan, rest)
    _write_plan(run, plan)
    return first + steps


def _write_plan(run: Run, plan: StepPlan) -> None:
    """Write the plan beside those that the run had before: what they cost may have to be recorded once more."""
    path, data = run.folder / "plan.cbor", plan.to_cbor()
    if path.exists() and (before := path.read_bytes()) != data:
        write_atomically(run.folder / f"plan-{hashlib.sha256(before).hexdigest()[:16]}.cbor", before)
    write_atomically(path, data)


def charges_due(
    run: Run, plan: StepPlan, first: int, last: int, accounts: Sequence[SignedAccount]
) -> tuple[Charge, ...]:
    """What the steps first … last-1 take, by class and signed bound, after all that the run has tried so far."""
    if plan.injection.occurrences is None:
        return plan_charges(plan, first, last, accounts)
    once = plan_charges(plan, 0, 1, accounts)
    due = (each.times(events_due(run, plan, first, last, each.account)) for each in once)
    return tuple(each for each in due if each.event.steps)


def _steps_within_events(run: Run, plan: StepPlan, first: int, events: int, account: Account) -> int:
    """Return how many steps from `first` on use at most this many events of an account."""
    if plan.injection.occurrences is None:
        return events * plan.bands

    def too_many(steps: int) -> bool:
        return events_due(run, plan, first, first + steps, account) > events

    return bisect_left(range(1, plan.steps - first + 1), True, key=too_many)


def _reserve(run: Run, plan: StepPlan, rest: Sequence[Charge]) -> None:
    """Reserve the rest of a plan; or charge the whole of one with an adaptive budget.

    A filter proves that such a run never passes its budget, not that it has cost less at a moment that it chose
    itself. So the budget is spent when the run begins, whatever becomes of it.
    """
    whole = follows_budget(plan)
    if whole and run.accounts:  # several charges: all of them fit, or none is made
        parts = adaptive_budget_charges(plan, run.accounts).items()
        rest = [c for part, due in parts for c in due if not run.spend.next_generation(run.id, part)]
    due = () if whole and not run.accounts else rest
    run.spend.reserve(run.id, charges=due, bounds=run.bounds, label=run.folder.name, plan=plan)
    if whole:
        charge_adaptive_budget(run, plan, run.accounts, adaptive_budget_nonce(plan, run.journal.copy_id))


def charge_adaptive_budget(
    run: Run, plan: StepPlan, accounts: Sequence[SignedAccount], nonce: bytes, *, already: bool = False
) -> None:
    """Charge the whole budget, once for this plan in this copy of the run."""
    for segment, due in adaptive_budget_charges(plan, accounts).items():
        names, generation = {str(charge.account) for charge in due}, 0
        scales = {each.name: each.scale for each in accounts if each.name in names}
        while not run.spend.charge(
            run.id, segment=segment, generation=generation, nonce=nonce, charges=due, bounds=run.bounds, scales=scales,
            plan=plan.digest(), already=already,
        ):  # fmt: skip
            generation += 1


def _events_within_bounds(run: Run, plan: StepPlan, charge: Charge, besides: Sequence[Charge]) -> int:
    """How many events of the charge the bounds allow; without bounds, the ε of the whole plan."""
    if not charge.event.steps:
        return 0
    name = str(charge.account)
    bound = run.bounds.get(name, math.inf)
    room = run.spend.fits(run.id, charge=charge, bound=bound, besides=besides)
    if name in run.bounds or not room:
        return room
    most, price = plan.epsilon(name), find_accountant(charge.accountant)
    spent = (*run.charged.get(name, ()), *(each.event for each in besides))

    def too_many(steps: int) -> bool:
        return price.epsilon((*spent, charge.times(steps).event), charge.delta) > most

    return bisect_left(range(1, room + 1), True, key=too_many) if too_many(room) else room


def repair_ledger(run: Run) -> None:
    """Charge and record in the ledger what the journal says and a crash, or a lost ledger, left out.

    A pending segment that the ledger does not know has drawn nothing: it is charged under the bounds, and abandoned
    if these refuse it.
    """
    pending = run.journal.pending
    _repair_adaptive_budgets(run)
    for opened in run.attempts:
        try:
            known = run.charge(opened, already=opened is not pending)
        except BudgetExceeded:
            known = False
        if known:
            if opened is not pending:
                closed = run.journal.closed(opened)
                run.record(opened, SegmentOutcome.CLOSED if closed else SegmentOutcome.ABANDONED)
            continue
        if opened is not pending:
            attempt = f"another attempt at segment {opened.segment}"
            problem = f"the ledger '{run.spend.path}' holds {attempt} than the journal"
            raise RunError("train.ledger-disagrees", problem, "give the ledger that the run was charged in")
        run.abandon(opened, charged=False)
    run.spend.ledger.restored()


def _repair_adaptive_budgets(run: Run) -> None:
    """Charge the adaptive budgets of each copy of the run again in a ledger that lost them."""
    found: dict[tuple[bytes, str], dict[str, float]] = {}
    for opened, copy_id in run.journal.attempts_by_copy():
        if uses_adaptive_budget(opened):
            found.setdefault((opened.plan, copy_id), {}).update(opened.scales)
    for (digest, copy_id), scales in found.items():
        plan = run.plan_of(digest)
        accounts = [_account_of_bound(plan, name, scale) for name, scale in scales.items()]
        charge_adaptive_budget(run, plan, accounts, adaptive_budget_nonce(plan, copy_id), already=True)


def keep_charging_bounds(run: Run, plan: StepPlan, standing: Callable[[set[str]], set[str]]) -> None:
    """Go on charging the signed bounds that this plan has charged before, though nobody in this corpus has them now.

    `standing` says which of them somebody still has, by the ledger. Who reads the ledger cannot tell that they
    stayed away from these steps; so they are charged like those who did not.
    """
    known = {each.name for each in run.accounts}
    missing = {name: scale for name, scale in run.spend.scales(run.id, plan).items() if name not in known}
    for name in sorted(standing(set(missing))) if missing else ():
        made = _account_of_bound(plan, name, missing[name])
        run.accounts = (*run.accounts, made)
        run.bounds[name] = made.epsilon


def _account_of_bound(plan: StepPlan, name: str, scale: float) -> SignedAccount:
    """The account of a signed bound that the ledger or the journal names."""
    cls, _, noise = Account.parse(name)
    return SignedAccount(name=name, cls=cls, scale=scale, epsilon=signed_epsilon(plan, cls, noise / MICRO))
