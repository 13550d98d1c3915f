"""`Run`: the folder of a run, its newest attempt, its checkpoints, and what it reserves and charges in the ledger.

runs/NAME/  run.cbor         id and salt of the run, and its ledger
            attempt          the newest attempt; secret (mode 0600): it holds the seed of an open one
            receipts         what the ledger recorded of the run
            plan.cbor        what every step does
            checkpoint/      the newest two; secret while occurrences are counted in them
            metrics.json     public figures
            model.safetensors, ema.safetensors, best.safetensors   what may leave, written when a segment closed
            stopped          the attempt that an error in a step ended, if it was the last one
            lease            who is working on it
            ledger.db        a link to the ledger, which all runs on a corpus share

**Adaptive budget.** Where sigma is chosen on the way, under a filter at one Rényi order, the whole price of the plan is
charged when the run begins, under a segment of its own. What the attempts take of it is in the rows of the ledger, in
declared steps; `adaptive_budget_fits` is the filter.

**Capped occurrences** (raw noise, each occurrence is paid for). The sampler counts occurrences along the weights that
the run has now. Attempts that were abandoned, lost, or made from another copy of the folder used contributions beside that
count, each of them at most as often as the cap along its own way allows (`AttemptTree`). An attempt is charged what the
most occurrences exceed all earlier charges by: for each class and signed bound by itself,
since a bound may have come into the run later.
"""

from __future__ import annotations

import hashlib
import math
import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
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
from lamina.ledger.attempts import Attempt, NoiseByStep
from lamina.ledger.occurrences import AttemptTree
from lamina.ledger.records import ContributionRecord, SegmentOutcome
from lamina.ledger.run_records import (
    DECLARED_ORIGINS,
    EVALUATION,
    FileDigest,
    OccurrenceCap,
    ProgramVersions,
    RunBegin,
    RunEnd,
    RunRecord,
    WeightsOrigin,
)
from lamina.ledger.spend_ledger import FIRST_NONCE, SpendLedger
from lamina.ledger.store.rows import WHOLE_BUDGET_SEGMENT
from lamina.plan.charges import SignedAccount, bound_charges, follows_budget, plan_charges
from lamina.plan.signed_bounds import signed_epsilon
from lamina.plan.step_plan import StepPlan
from lamina.run.run_files import remove_temporary_files, write_atomically
from lamina.run.run_record import (
    RUN_FILE,
    AttemptFile,
    AttemptOpened,
    Receipts,
    RunIdentity,
    SegmentInputs,
    has_begun,
    has_signature,
    signed_receipt,
)
from lamina.run.training_checkpoint import TrainingCheckpoints


class Run:
    """Opened under the run's lease, by one process at a time.

    The ledger alone says what was charged (`attempts`). Charging and recording are idempotent in (run, segment, generation,
    nonce), so whatever a crash interrupts is done again. docs/runs.md has the protocol.
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
        self.weights_from: tuple[int, int] | None = None  # segment and generation that the present weights come from
        self.bounds = {**bounds, **{each.name: each.epsilon for each in accounts}}
        self.fresh = not has_begun(folder)
        if self.fresh and (folder / "checkpoint").is_dir() and any((folder / "checkpoint").iterdir()):
            problem = f"'{folder}' has checkpoints but no {RUN_FILE}, which says to which run they belong"
            remedy = f"restore {RUN_FILE}; or begin in another folder (what was charged stays in the ledger)"
            raise RunError("train.run-record-missing", problem, remedy)
        header = spend.ledger.header_hash
        self.private = RunIdentity.begin(folder, spend.origin, header) if self.fresh else RunIdentity.read(folder)
        self.file, self.receipts = AttemptFile(folder), Receipts(folder)
        self._had = self.receipts.nonces_in(self._signed_receipts() if spend.ledger.signs else self.receipts.entries)
        self.checkpoints = TrainingCheckpoints(folder / "checkpoint")
        remove_temporary_files(folder)  # what killed writers left

    @property
    def id(self) -> str:
        return self.private.run

    @property
    def origin(self) -> str:
        """The corpus that it is charged under."""
        return self.spend.origin

    @property
    def salt(self) -> bytes:
        """Keys the digests of data and membership, so that they mean nothing outside this run."""
        return self.private.salt

    @property
    def ended(self) -> tuple[int, str] | None:
        """After how many steps the run ended, and why; None if it has not."""
        return self.private.ended

    @property
    def attested(self) -> bool:
        """Whether the contributions are signed: the ledger has signed ones, and refuses runs on any other."""
        with self.spend.ledger.store.read() as rows:
            return self.spend.ledger.checked(rows).count(ContributionRecord) > 0

    # ------------------------------------------------------------------------------------ folder and ledger

    def follow_ledger(self, *, take_over: bool = False, note: Callable[[str], None]) -> None:
        """Compare the newest attempt of the folder with the latest one of the ledger, and finish what a crash left.

        Raise RunError if the folder does not know the latest attempt, unless it takes over; or if the ledger lacks it.
        """
        here = f"the run in '{self.folder}'"
        if self.private.origin != self.origin:
            problem = f"the run began under origin {self.private.origin!r}; the ledger '{self.spend.path}' is another's"
            raise RunError("train.origin-changed", problem, "keep origin and ledger: they record what the run spent")
        if self.private.header != self.spend.ledger.header_hash:
            problem = f"the ledger '{self.spend.path}' has another header than the one that {here} was charged in"
            raise RunError(
                "train.ledger-differs", problem, self._complete("give the ledger that the run was charged in: ledger=…")
            )
        attempts = self.attempts
        nonces = [FIRST_NONCE, *(each.nonce for each in attempts)]
        latest, known = nonces[-1], self.file.latest
        lacked = self.receipts.nonces - {each.nonce for each in attempts if each.outcome}
        if lacked or (latest not in known and not any(nonce in nonces for nonce in known)):
            count = f"{len(lacked) or 1} attempts of {here}"
            problem = f"the ledger '{self.spend.path}' lacks {count}: it was restored from an older copy"
            raise RunError("train.ledger-behind-folder", problem, self._complete("restore the newest copy"))
        if latest not in known and self.ended is not None:
            return  # it is only read
        if latest not in known:
            if not take_over:
                problem = f"the ledger '{self.spend.path}' has later attempts than {here} knows: the folder was copied or restored"
                remedy = (
                    "continue in the folder that made them; or continue here from this folder's checkpoint, at the price of "
                    "what is done again: lamina train RUN.toml --take-over (take_over=True)"
                )
                raise RunError("train.folder-behind-ledger", problem, remedy)
            self.spend.give_up(self.id)
            self.file.erase()
            self.file.write(None if self.file.opened is None else replace(self.file.opened, seed=b""), latest)
            note("this folder took over the run: the steps after its checkpoint are done again and charged again")
        opened = self.file.opened
        if opened is not None and any(each.nonce == opened.nonce and each.outcome is not None for each in attempts):
            self._ended_in_ledger()
        self._write_receipts()

    def _complete(self, remedy: str) -> str:
        return f"{remedy}; if it is lost, enter the run into this one: lamina ledger complete LEDGER {self.folder}"

    def _ended_in_ledger(self) -> None:
        """The newest attempt is a leaf: have it signed, erase its seed, and write its receipt."""
        if self.spend.ledger.signs:
            self.spend.ledger.checkpoint()
        self.file.erase()
        self._write_receipts()

    def _write_receipts(self) -> None:
        ended = [each for each in self.attempts if each.outcome is not None and each.nonce not in self._had]
        self._add_receipts(*({"attempt": each.to_plain()} for each in ended))
        self._had |= {each.nonce for each in ended}

    def _signed_receipts(self) -> list[dict[str, Any]]:
        keys = self.spend.ledger.governance()
        return [each for each in self.receipts.entries if has_signature(each, keys, self.id)]

    def _add_receipts(self, *entries: Mapping[str, Any]) -> None:
        """Sign them, if the ledger was opened with its key: only then they are entered into a restored ledger."""
        ledger = self.spend.ledger
        if ledger.signs:
            entries = tuple(signed_receipt(each, self.origin, self.id, ledger.signing_key()) for each in entries)
        self.receipts.add(*entries)

    @property
    def pending(self) -> AttemptOpened | None:
        """The attempt that is open, or was about to be charged; its seed is b"" if it was erased."""
        opened = self.file.opened
        if opened is None or self.file.refused:
            return None
        found = next((each for each in self.attempts if each.nonce == opened.nonce), None)
        if found is None:
            return None if self.file.erased else opened
        return opened if found.outcome is None else None

    def is_charged(self, opened: Attempt) -> bool:
        """Return whether the ledger has a charge of this very attempt."""
        return any(each.nonce == opened.nonce for each in self.attempts)

    # ------------------------------------------------------------------------------------ one segment

    def open(
        self, *, segment: int, first: int, last: int, facts: SegmentInputs, due: Sequence[Charge], eligibility: int,
        after: int, variance: Sequence[float] = (), factors: Mapping[str, float] | None = None,
    ) -> AttemptOpened:  # fmt: skip
        """Draw a seed, write it down with what the segment takes, and charge it. Only then may anything be drawn."""
        charges, units = ((), tuple(due)) if follows_budget(self.plan_of(facts.plan)) else (tuple(due), ())
        prev, generation = self._latest, self.spend.next_generation(self.id, segment)
        while True:
            opened = AttemptOpened(
                segment=segment, generation=generation, nonce=os.urandom(16), first=first, last=last, **asdict(facts),
                charges=charges, units=units, scales=self.scales(due, factors or {}), factors=dict(factors or {}),
                eligibility=eligibility, after=after, variance=tuple(variance),
                seed=segment_seed(self._chosen_seed, segment, generation),  # from the system, or from the chosen seed
            )  # fmt: skip
            self.file.write(opened, prev)
            try:
                if self.charge(opened):
                    return opened
            except (BudgetExceeded, RunError):
                self.discard()
                raise
            self.discard()
            generation = max(generation + 1, self.spend.next_generation(self.id, segment))

    @property
    def _latest(self) -> bytes:
        """The nonce of the latest attempt that the folder knows."""
        return self.file.prev if self.file.refused or self.file.opened is None else self.file.opened.nonce

    def charge(self, opened: AttemptOpened) -> bool:
        """Charge an attempt in the ledger; False if another attempt has its generation."""
        return self.spend.charge(
            self.id, segment=opened.segment, generation=opened.generation, nonce=opened.nonce,
            charges=opened.charges, bounds=self.bounds, scales=opened.scales, plan=opened.plan, begun=opened,
            factors=opened.factors, units=opened.units, prev=self.file.prev,
        )  # fmt: skip

    def discard(self) -> None:
        """Erase the seed of an attempt that was never charged: nothing was drawn."""
        self.file.erase(refused=True)

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

    def record(self, opened: Attempt, outcome: SegmentOutcome, noise: NoiseByStep = ()) -> None:
        """Write and sign the leaf of an ended attempt: what it took, from whom, and what everybody has spent after it.

        `noise` is from which step on which S² per layer was applied, by an attempt that took all of its steps. How far an
        abandoned attempt came is nobody's to know: of it only the noise that it began with is told.
        """
        plan, scales = self.plan_of(opened.plan), {each.name: each.scale for each in self.accounts}
        begun = replace(opened, variance=noise[0][1] if noise else opened.variance, changes=noise[1:])
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

    def stop(self, opened: AttemptOpened) -> None:
        """Abandon an attempt in which a step failed: when it did may tell who was sampled. The next start looks into it."""
        self.abandon(opened)
        write_atomically(self.folder / "stopped", opened.nonce)

    @property
    def stopped(self) -> AttemptOpened | None:
        """The newest attempt, if a step of it failed and `stopped` was not removed since."""
        path, last = self.folder / "stopped", self.file.opened
        if last is None or self.pending is not None or self.ended is not None or not path.exists():
            return None
        return last if path.read_bytes() == last.nonce else None

    def abandon(self, opened: AttemptOpened) -> None:
        """Never finish or replay a charged attempt: its seed is erased, and it is recorded. The charge stays."""
        self.file.erase()
        self.record(opened, SegmentOutcome.ABANDONED)
        self._write_receipts()

    def close(self, opened: AttemptOpened, noise: NoiseByStep) -> None:
        """The checkpoint is durable: record and sign the segment, erase its seed, and write its receipt."""
        self.record(opened, SegmentOutcome.CLOSED, noise)
        self.file.erase()
        self._write_receipts()
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
        made = self.start_record(weights, optimizer)
        try:
            self.spend.ledger.append([made])
        except LedgerError as error:
            if error.code != "ledger.run-begin-late":
                raise
            return
        self._add_receipt("begin", made)

    def _add_receipt(self, kind: str, record: RunRecord) -> None:
        self._add_receipts({kind: schema_of(type(record)).to_cbor(record)})

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
        closed = [each for each in self.attempts if each.last == steps and each.outcome is SegmentOutcome.CLOSED]
        closed = [each for each in closed if self.weights_from in (None, (each.segment, each.generation))]
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
        self._add_receipt("end", there or made)
        return there or made

    def finish(self, steps: int, reason: str) -> None:
        """No further step will be taken: what is left of the reservation goes back."""
        if (pending := self.pending) is not None:
            if self.is_charged(pending):
                self.abandon(pending)
            else:
                self.discard()
        if self.ended is None:
            self.private = replace(self.private, ended=(steps, reason))
            self.private.write(self.folder)
        self.spend.finish(self.id)

    # ------------------------------------------------------------------------------------ what it cost

    @property
    def attempts(self) -> list[Attempt]:
        """Every attempt that was charged, as the ledger has it: the open one last."""
        return self.spend.attempts(self.id)

    @property
    def charged(self) -> dict[str, Schedule]:
        """Every event that this run was charged for, by class: redone segments count again.

        Without those under an adaptive budget, whose whole price is in the ledger.
        """
        events: dict[str, list[Event]] = {}
        for opened in self.attempts:
            for charge in opened.charges:
                events.setdefault(str(charge.account), []).append(charge.event)
        return {name: grouped(rows) for name, rows in events.items()}

    def write(self, name: str, data: bytes) -> None:
        """A public file of the run."""
        write_atomically(self.folder / name, data, mode=0o644)


def adaptive_budget_nonce(plan: StepPlan) -> bytes:
    """Return the nonce of the charge of a plan's whole budget: a run is charged once for each plan."""
    return plan.digest()[:16]


def adaptive_budget_charges(plan: StepPlan, accounts: Sequence[SignedAccount]) -> dict[int, tuple[Charge, ...]]:
    """What is charged together, by segment: all classes, and every signed bound by itself, since bounds come and go."""
    found = {WHOLE_BUDGET_SEGMENT: plan_charges(plan, 0, plan.steps)}
    for each in accounts:
        number = int.from_bytes(hashlib.sha256(each.name.encode()).digest()[:8], "big") >> 3
        found[WHOLE_BUDGET_SEGMENT + 1 + number] = bound_charges(plan, 0, plan.steps, [each])
    return found


def adaptive_budget_fits(plan: StepPlan, attempts: Sequence[Attempt], due: Sequence[Charge]) -> bool:
    """Whether the budget of `plan` has room for `due`, after all that was charged under the same plan.

    The filter itself, in exact arithmetic: at the plan's one order, prices add.
    """
    order = rdp_order_of(plan.accountant)
    assert order is not None
    whole = plan_charges(plan, 0, plan.steps)
    taken = [c for opened in attempts if opened.plan == plan.digest() for c in opened.units]

    def price(found: Sequence[Charge], account: Account) -> Fraction:
        mine = (c.event for c in found if c.account == account)
        return sum((each.steps * Fraction(step_rdp(each.q, each.sigma, order)) for each in mine), Fraction())

    return all(price([*taken, *due], account) <= price(whole, account) for account in {c.account for c in whole})


def most_occurrences(run: Run, plan: StepPlan, first: int, last: int) -> int:
    """The most occurrences of one contribution once the steps first … last-1 are taken, by the tree of all attempts."""
    cap, digest, attempts = plan.injection.occurrences, plan.digest(), run.attempts
    assert cap is not None
    tree, before = AttemptTree(cap), run.weights_from
    for each in attempts:
        replayed = each.outcome is None and each.last == first  # it is going to be: then the steps continue from it
        before = (each.segment, each.generation) if replayed else before
        outcome = SegmentOutcome.CLOSED if replayed else each.outcome or SegmentOutcome.ABANDONED
        tree.add([each.as_segment(outcome)], counts=each.plan == digest)
    if first < last:
        index, after = (before[0] + 1, before[1]) if before is not None else (0, 0)
        due = Attempt(segment=index, nonce=FIRST_NONCE, first=first, last=last, after=after)
        tree.add([due.as_segment(SegmentOutcome.ABANDONED)])
    return tree.most


def charged_events(run: Run, plan: StepPlan) -> Counter[Account]:
    """How many events each account was charged for under a plan."""
    digest, found = plan.digest(), Counter[Account]()
    for each in run.attempts:
        for charge in each.charges if each.plan == digest else ():
            found[charge.account] += charge.event.steps
    return found


def attempts_outside(run: Run, step: int) -> list[Attempt]:
    """The attempts that the weights at `step` do not come from: abandoned, lost, or done again since."""
    found, wanted = [], run.weights_from
    for each in reversed(run.attempts):
        mine = each.outcome is SegmentOutcome.CLOSED and wanted in (None, (each.segment, each.generation))
        if mine and each.last == step and each.first < step:
            step, wanted = each.first, (each.segment - 1, each.after)
        else:
            found.append(each)
    return found


def reserve_plan(run: Run, plan: StepPlan) -> None:
    """Reserve the whole plan in the ledger; if that is refused, the record of the new run is removed."""
    run.plan = plan
    try:
        _reserve(run, plan, plan_charges(plan, 0, plan.steps, run.reserved_accounts))
    except BudgetExceeded:
        (run.folder / RUN_FILE).unlink()
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
    most, charged = most_occurrences(run, plan, first, last), charged_events(run, plan)
    due = (each.times(max(0, most - charged[each.account])) for each in once)
    return tuple(each for each in due if each.event.steps)


def _steps_within_events(run: Run, plan: StepPlan, first: int, events: int, account: Account) -> int:
    """Return how many steps from `first` on use at most this many events of an account."""
    if plan.injection.occurrences is None:
        return events * plan.bands

    charged = charged_events(run, plan)[account]

    def too_many(steps: int) -> bool:
        return most_occurrences(run, plan, first, first + steps) - charged > events

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
        charge_adaptive_budget(run.spend, run.id, plan, run.accounts, run.bounds)


def charge_adaptive_budget(
    spend: SpendLedger, run: str, plan: StepPlan, accounts: Sequence[SignedAccount], bounds: Mapping[str, float], *,
    already: bool = False,
) -> None:  # fmt: skip
    """Charge the whole budget of a plan, once."""
    for segment, due in adaptive_budget_charges(plan, accounts).items():
        names, generation = {str(charge.account) for charge in due}, 0
        scales = {each.name: each.scale for each in accounts if each.name in names}
        while not spend.charge(
            run, segment=segment, generation=generation, nonce=adaptive_budget_nonce(plan), charges=due, bounds=bounds,
            scales=scales, plan=plan.digest(), already=already,
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


def keep_charging_bounds(run: Run, plan: StepPlan, standing: Callable[[set[str]], set[str]]) -> None:
    """Go on charging the signed bounds that this plan has charged before, though nobody in this corpus has them now.

    `standing` says which of them somebody still has, by the ledger. Who reads the ledger cannot tell that they
    stayed away from these steps; so they are charged like those who did not.
    """
    known = {each.name for each in run.accounts}
    missing = {name: scale for name, scale in run.spend.scales(run.id, plan).items() if name not in known}
    for name in sorted(standing(set(missing))) if missing else ():
        made = account_of_bound(plan, name, missing[name])
        run.accounts = (*run.accounts, made)
        run.bounds[name] = made.epsilon


def account_of_bound(plan: StepPlan, name: str, scale: float) -> SignedAccount:
    """The account of a signed bound that the ledger names."""
    cls, _, noise = Account.parse(name)
    return SignedAccount(name=name, cls=cls, scale=scale, epsilon=signed_epsilon(plan, cls, noise / MICRO))
