"""`Run`: the lasting side of a training run. Its folder, its journal, its checkpoints, its account in the book.

runs/NAME/  plan.cbor        what every step does
            journal          segments opened and closed; secret (mode 0600): it holds the seed of an open segment
            checkpoint/      the newest two; secret while occurrences are counted in them
            metrics.json     public figures
            model.safetensors, ema.safetensors, best.safetensors   what may leave, written when a segment closed
            lease            who is working on it
runs/spend.db                the book, shared by all runs beside it
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from lamina.account import Event, Schedule, accountant, grouped
from lamina.engine.stream import SEED_BYTES
from lamina.errors import BudgetExceeded, RunError
from lamina.plan import StepPlan
from lamina.train import followed
from lamina.train.book import Account, SpendBook
from lamina.train.book.charge import Charge, charges, follows_budget
from lamina.train.occurrences import events_due
from lamina.train.resume import Facts
from lamina.train.store.checkpoint import Checkpoints
from lamina.train.store.durable import sweep, write_atomically
from lamina.train.store.journal import Journal
from lamina.train.store.records import Close, Done, GivenUp, Moved, Open


class Run:
    """Opened under the run's lease, by one process at a time.

    What was charged is written down twice: in the journal, before anything is drawn, and in the book, where it is
    added up with other runs. Charging is idempotent in (run, segment, generation, nonce), so a crash between the
    two is repaired by charging again what the journal says.
    """

    def __init__(
        self,
        folder: Path,
        *,
        book: SpendBook,
        origin: str,
        bounds: Mapping[str, float],
        accounts: Sequence[Account] = (),
    ) -> None:
        self.folder, self.book, self.origin, self.accounts = folder, book, origin, tuple(accounts)
        self.bounds = {**bounds, **{each.name: each.epsilon for each in accounts}}
        path = folder / "journal"
        self.fresh = not path.exists()
        if self.fresh and (folder / "checkpoint").is_dir() and any((folder / "checkpoint").iterdir()):
            raise RunError(
                f"'{folder}' has checkpoints and no journal, so what they cost is not known",
                "restore the journal; or begin in another folder (what was charged stays in the book)",
            )
        if self.fresh:
            self.journal = Journal.create(path, run=secrets.token_hex(16), salt=os.urandom(32))
        else:
            self.journal = Journal.load(path)
        self.checkpoints = Checkpoints(folder / "checkpoint")
        self.copied = self.journal.copied
        sweep(folder)  # what killed writers left

    @property
    def id(self) -> str:
        return self.journal.start.run

    @property
    def salt(self) -> bytes:
        """Keys the digests of data and membership, so that they mean nothing outside this run."""
        return self.journal.start.salt

    # ------------------------------------------------------------------------------------ the whole plan

    def begin(self, plan: StepPlan) -> None:
        """Ask the book for the whole plan. Refused: everything that was made for it is taken away again."""
        try:
            self._ask(plan, charges(plan, 0, plan.steps, self.accounts))
        except BudgetExceeded:
            (self.folder / "journal").unlink()
            raise
        write_atomically(self.folder / "plan.cbor", plan.to_cbor())

    def go_on(self, plan: StepPlan, first: int) -> int:
        """Reserve the rest of the plan, or as much of it as the bounds still allow; returns where it ends.

        After a segment was redone there may be room for fewer steps than were planned. A budget that is followed was
        booked as a whole: `followed.room` says how far it goes.
        """
        steps, rest = max(0, plan.steps - first), self.due(plan, first, plan.steps)
        if not follows_budget(plan):
            for name in {charge.cls: None for charge in rest}:
                most, *besides = [charge for charge in rest if charge.cls == name]
                events = self._fitting(plan, most, besides)
                steps = min(steps, self._taking(plan, first, events, name) if events < most.steps else steps)
            rest = self.due(plan, first, first + steps) if steps else ()
        self._ask(plan, rest)
        write_atomically(self.folder / "plan.cbor", plan.to_cbor())
        return first + steps

    def due(self, plan: StepPlan, first: int, last: int) -> tuple[Charge, ...]:
        """What the steps first … last-1 take, by class and signed bound, after all that the run has tried so far."""
        if plan.injection.occurrences is None:
            return charges(plan, first, last, self.accounts)
        once = charges(plan, 0, 1, self.accounts)
        due = (each.times(events_due(self, plan, first, last, each.cls)) for each in once)
        return tuple(each for each in due if each.steps)

    def _taking(self, plan: StepPlan, first: int, events: int, name: str) -> int:
        """How many steps from `first` on take at most so many events of a class or bound."""
        if plan.injection.occurrences is None:
            return events
        low, high = 0, plan.steps - first + 1  # `low` steps do, `high` do not
        while high - low > 1:
            middle = (low + high) // 2
            fits = events_due(self, plan, first, first + middle, name) <= events
            low, high = (middle, high) if fits else (low, middle)
        return low

    def _ask(self, plan: StepPlan, rest: Sequence[Charge]) -> None:
        """Reserve the rest of a plan; or book the whole of one whose noise follows its budget.

        A filter proves that such a run never passes its budget, not that it has cost less at a moment that it chose
        itself. So the budget is spent when the run begins, whatever becomes of it.
        """
        whole = follows_budget(plan)
        if whole and self.accounts:  # several bookings: all of them fit, or none is made
            parts = followed.parts(plan, self.accounts).items()
            rest = [c for part, due in parts for c in due if not self.book.next_generation(self.id, part)]
        self.book.reserve(
            self.id,
            origin=self.origin,
            charges=() if whole and not self.accounts else rest,
            bounds=self.bounds,
            label=self.folder.name,
        )
        if whole:
            self._book_whole(plan, self.bounds)

    def _book_whole(self, plan: StepPlan, bounds: Mapping[str, float]) -> None:
        """Once for this plan in this folder: a copy of the run is another run, and pays for itself."""
        nonce = followed.nonce(plan, os.stat(self.folder / "journal").st_ino)
        for segment, due in followed.parts(plan, self.accounts).items():
            generation = 0
            while not self.book.charge(
                self.id,
                origin=self.origin,
                segment=segment,
                generation=generation,
                nonce=nonce,
                charges=due,
                bounds=bounds,
            ):
                generation += 1

    def _fitting(self, plan: StepPlan, charge: Charge, besides: Sequence[Charge]) -> int:
        """How many events of the charge the bound of the class allows; without one, what the whole plan promised."""
        if not charge.steps:
            return 0
        if charge.cls in self.bounds:
            bound = self.bounds[charge.cls]
            return self.book.fits(self.id, origin=self.origin, charge=charge, bound=bound, besides=besides)
        most, price = plan.epsilon(charge.cls), accountant(charge.accountant)
        spent = (*self.charged.get(charge.cls, ()), *(each.event for each in besides))

        def fits(steps: int) -> bool:
            more = (charge.times(steps).event,) if steps else ()
            return price.epsilon((*spent, *more), charge.delta) <= most

        if fits(charge.steps):
            return charge.steps
        low, high = 0, charge.steps
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def settle_copy(self) -> None:
        """Remember the new place of a folder that was copied."""
        self.journal.append(Moved(place=os.stat(self.folder / "journal").st_ino))

    # ------------------------------------------------------------------------------------ one segment

    def open(self, *, segment: int, first: int, last: int, facts: Facts, due: Sequence[Charge]) -> Open:
        """Draw a seed, write it down with what the segment takes, and charge it. Only then may a coin be tossed."""
        generation = self.generation(segment)
        while True:
            opened = Open(
                segment=segment,
                generation=generation,
                nonce=os.urandom(16),
                first=first,
                last=last,
                **asdict(facts),
                charges=tuple(due),
                seed=self._seed(),
            )
            self.journal.append(opened)
            try:
                booked = self.charge(opened)
            except BudgetExceeded:
                self.give_up(opened, charged=False)
                raise
            if booked:
                return opened
            self.give_up(opened, charged=False)
            generation = max(generation + 1, self.book.next_generation(self.id, segment))

    def _seed(self) -> bytes:
        """Thirty-two bytes from the system: coins, noise and dropout of a segment."""
        return os.urandom(SEED_BYTES)

    def charge(self, opened: Open) -> bool:
        """False if another process charged this very generation: the run was copied, and the copy was faster."""
        return self.book.charge(
            self.id,
            origin=self.origin,
            segment=opened.segment,
            generation=opened.generation,
            nonce=opened.nonce,
            charges=followed.booked(opened),
            bounds=self.bounds,
        )

    def generation(self, segment: int) -> int:
        """The next unused generation of a segment, here and in the book."""
        mine = [opened.generation + 1 for opened in self.journal.opens if opened.segment == segment]
        return max([*mine, self.book.next_generation(self.id, segment), 1 if self.copied else 0])

    def give_up(self, opened: Open, *, charged: bool = True) -> None:
        """Never finish or replay it: the seed is erased. What was charged stays charged."""
        segment, generation, nonce = opened.key
        self.journal.append(GivenUp(segment=segment, generation=generation, nonce=nonce, charged=charged))

    def close(self, opened: Open, checkpoint: bytes) -> None:
        """The checkpoint is durable: say so, and forget the seed."""
        self.journal.append(
            Close(
                segment=opened.segment,
                generation=opened.generation,
                nonce=opened.nonce,
                checkpoint=checkpoint,
            )
        )

    def finish(self, steps: int, reason: str) -> None:
        """No further step will be taken: what is left of the reservation goes back."""
        if (pending := self.journal.pending) is not None:
            self.give_up(pending)
        if self.journal.done is None:
            self.journal.append(Done(steps=steps, reason=reason))
        self.book.finish(self.id)

    # ------------------------------------------------------------------------------------ what it cost

    @property
    def attempts(self) -> list[Open]:
        """Every segment that was charged, finished or not."""
        return [opened for opened in self.journal.opens if not self.journal.void(opened)]

    @property
    def charged(self) -> dict[str, Schedule]:
        """Every event that this run was charged for, by class: redone segments count again.

        Without those under a budget that was followed: what these cost together is in the book.
        """
        events: dict[str, list[Event]] = {}
        for opened in self.attempts:
            for charge in followed.booked(opened):
                events.setdefault(charge.cls, []).append(charge.event)
        return {name: grouped(rows) for name, rows in events.items()}

    def wasted(self, step: int) -> list[Open]:
        """The attempts that the weights at `step` do not come from: given up, lost, or done again since."""
        found, need = [], step
        for opened in reversed(self.attempts):
            if self.journal.closed(opened) and opened.last == need and opened.first < need:
                need = opened.first
            else:
                found.append(opened)
        return found

    def recharge(self) -> None:
        """Nothing forgotten: a book that was lost, or that a crash was faster than, gets what the journal says.

        A pending segment that the book does not know has drawn nothing: it is booked under the bounds, and given up if
        these refuse it.
        """
        pending = self.journal.pending
        self._rebook_whole()
        for opened in self.attempts:
            try:
                known = self.book.charge(
                    self.id,
                    origin=self.origin,
                    segment=opened.segment,
                    generation=opened.generation,
                    nonce=opened.nonce,
                    charges=followed.booked(opened),
                    bounds=self.bounds if opened is pending else {},
                )
            except BudgetExceeded:
                known = False
            if known:
                continue
            if opened is not pending:
                raise RunError(
                    f"the book '{self.book.path}' holds another attempt at segment {opened.segment} of this run than "
                    "the journal",
                    "give the book that the run was booked in",
                )
            self.give_up(opened, charged=False)

    def _rebook_whole(self) -> None:
        """The budget that the run was following when it stopped, if a lost book does not know it."""
        path = self.folder / "plan.cbor"
        if any(followed.belongs(opened) for opened in self.attempts) and path.exists():
            plan = StepPlan.from_cbor(path.read_bytes())
            if follows_budget(plan) and not self.copied:
                self._book_whole(plan, {})

    def write(self, name: str, data: bytes) -> None:
        """A public file of the run."""
        write_atomically(self.folder / name, data, mode=0o644)
