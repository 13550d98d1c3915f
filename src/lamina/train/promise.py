"""What a run is promised: its whole plan before it begins, and as much of the rest as there is room for later."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lamina.account import accountant
from lamina.errors import BudgetExceeded
from lamina.plan import StepPlan
from lamina.train import followed
from lamina.train.book.account import Account
from lamina.train.book.charge import Charge, charges, follows_budget
from lamina.train.occurrences import events_due
from lamina.train.store.durable import write_atomically

if TYPE_CHECKING:
    from lamina.train.run import Run


def begin(run: Run, plan: StepPlan) -> None:
    """Ask the ledger for the whole plan. Refused: everything that was made for it is taken away again."""
    run.plan = plan
    try:
        _ask(run, plan, charges(plan, 0, plan.steps, run.accounts))
    except BudgetExceeded:
        (run.folder / "journal").unlink()
        raise
    _write(run, plan)


def go_on(run: Run, plan: StepPlan, first: int) -> int:
    """Reserve the rest of the plan, or as much of it as the bounds still allow; returns where it ends.

    After a segment was redone there may be room for fewer steps than were planned. A budget that is followed was
    booked as a whole: `followed.room` says how far it goes.
    """
    run.plan = plan
    steps, rest = max(0, plan.steps - first), due(run, plan, first, plan.steps)
    if not follows_budget(plan):
        for name in {charge.cls: None for charge in rest}:
            most, *besides = [charge for charge in rest if charge.cls == name]
            events = _fitting(run, plan, most, besides)
            steps = min(steps, _taking(run, plan, first, events, name) if events < most.steps else steps)
        rest = due(run, plan, first, first + steps) if steps else ()
    _ask(run, plan, rest)
    _write(run, plan)
    return first + steps


def _write(run: Run, plan: StepPlan) -> None:
    """The plan, beside those that the run had before: what they cost may have to be recorded once more."""
    path, data = run.folder / "plan.cbor", plan.to_cbor()
    if path.exists() and (before := path.read_bytes()) != data:
        write_atomically(run.folder / f"plan-{hashlib.sha256(before).hexdigest()[:16]}.cbor", before)
    write_atomically(path, data)


def due(run: Run, plan: StepPlan, first: int, last: int) -> tuple[Charge, ...]:
    """What the steps first … last-1 take, by class and signed bound, after all that the run has tried so far."""
    if plan.injection.occurrences is None:
        return charges(plan, first, last, run.accounts)
    once = charges(plan, 0, 1, run.accounts)
    due = (each.times(events_due(run, plan, first, last, each.cls)) for each in once)
    return tuple(each for each in due if each.steps)


def _taking(run: Run, plan: StepPlan, first: int, events: int, name: str) -> int:
    """How many steps from `first` on take at most so many events of a class or bound."""
    if plan.injection.occurrences is None:
        return events
    low, high = 0, plan.steps - first + 1  # `low` steps do, `high` do not
    while high - low > 1:
        middle = (low + high) // 2
        fits = events_due(run, plan, first, first + middle, name) <= events
        low, high = (middle, high) if fits else (low, middle)
    return low


def _ask(run: Run, plan: StepPlan, rest: Sequence[Charge]) -> None:
    """Reserve the rest of a plan; or charge the whole of one whose noise follows its budget.

    A filter proves that such a run never passes its budget, not that it has cost less at a moment that it chose
    itself. So the budget is spent when the run begins, whatever becomes of it.
    """
    whole = follows_budget(plan)
    if whole and run.accounts:  # several bookings: all of them fit, or none is made
        parts = followed.parts(plan, run.accounts).items()
        rest = [c for part, due in parts for c in due if not run.book.next_generation(run.id, part)]
    run.book.reserve(
        run.id,
        charges=() if whole and not run.accounts else rest,
        bounds=run.bounds,
        label=run.folder.name,
        plan=plan,
    )
    if whole:
        book_whole(run, plan, run.accounts, followed.nonce(plan, run.journal.life))


def book_whole(
    run: Run, plan: StepPlan, accounts: Sequence[Account], nonce: bytes, *, already: bool = False
) -> None:
    """Once for this plan in this folder: a copy of the run is another run, and pays for itself."""
    for segment, due in followed.parts(plan, accounts).items():
        generation = 0
        while not run.book.charge(
            run.id,
            segment=segment,
            generation=generation,
            nonce=nonce,
            charges=due,
            bounds=run.bounds,
            scales={each.name: each.scale for each in accounts if each.name in {c.cls for c in due}},
            plan=plan.digest(),
            already=already,
        ):
            generation += 1


def _fitting(run: Run, plan: StepPlan, charge: Charge, besides: Sequence[Charge]) -> int:
    """How many events of the charge the bounds allow; where the run has none, also what the whole plan promised."""
    if not charge.steps:
        return 0
    bound = run.bounds.get(charge.cls, math.inf)
    room = run.book.fits(run.id, charge=charge, bound=bound, besides=besides)
    if charge.cls in run.bounds or not room:
        return room
    most, price = plan.epsilon(charge.cls), accountant(charge.accountant)
    spent = (*run.charged.get(charge.cls, ()), *(each.event for each in besides))

    def fits(steps: int) -> bool:
        more = (charge.times(steps).event,) if steps else ()
        return price.epsilon((*spent, *more), charge.delta) <= most

    if fits(room):
        return room
    low, high = 0, room
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
