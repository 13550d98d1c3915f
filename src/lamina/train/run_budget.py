"""What a run reserves and charges in the ledger; and repair of a ledger that lost charges.

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
from bisect import bisect_left
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from lamina.account.accountants import find_accountant
from lamina.account.gaussian_rdp import step_rdp
from lamina.account.schedule import rdp_order_of
from lamina.admit.attestation import MICRO
from lamina.errors import BudgetExceeded, RunError
from lamina.ledger.records import SegmentOutcome
from lamina.ledger.store.interface import WHOLE_BUDGET_SEGMENT
from lamina.plan.signed_bounds import signed_epsilon
from lamina.plan.step_plan import StepPlan
from lamina.spend.accounts import SignedAccount, account_bound
from lamina.spend.charge import Charge, bound_charges, follows_budget, plan_charges
from lamina.train.journal import AttemptOpened, JournalMoved
from lamina.train.run_files import write_atomically

if TYPE_CHECKING:
    from lamina.train.run import Run


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

    def price(found: Sequence[Charge], name: str) -> Fraction:
        mine = (c for c in found if c.cls == name)
        return sum((c.steps * Fraction(step_rdp(c.q, c.sigma, order)) for c in mine), Fraction())

    return all(price([*taken, *due], name) <= price(whole, name) for name in {c.cls for c in whole})


def events_due(run: Run, plan: StepPlan, first: int, last: int, name: str) -> int:
    """How many events the steps first … last-1 add to what class or bound `name` was charged under this plan."""
    cap, digest = plan.injection.occurrences, plan.digest()
    assert cap is not None
    mine = [opened for opened in run.attempts if opened.plan == digest]
    begin = min([opened.first for opened in mine], default=first)
    beside = [
        opened.last - opened.first for opened in attempts_outside(run, first, pending=True) if opened.plan == digest
    ]
    copies = [last - start for start in _steps_of_copies(run, first)]
    most = sum(min(cap, steps) for steps in (last - begin, *beside, *copies))
    return max(0, most - sum(charge.steps for opened in mine for charge in opened.charges if charge.cls == name))


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
        _reserve(run, plan, plan_charges(plan, 0, plan.steps, run.accounts))
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
    steps, rest = max(0, plan.steps - first), charges_due(run, plan, first, plan.steps)
    if not follows_budget(plan):
        for name in {charge.cls: None for charge in rest}:
            most, *besides = [charge for charge in rest if charge.cls == name]
            events = _events_within_bounds(run, plan, most, besides)
            steps = min(steps, _steps_within_events(run, plan, first, events, name) if events < most.steps else steps)
        rest = charges_due(run, plan, first, first + steps) if steps else ()
    _reserve(run, plan, rest)
    _write_plan(run, plan)
    return first + steps


def _write_plan(run: Run, plan: StepPlan) -> None:
    """Write the plan beside those that the run had before: what they cost may have to be recorded once more."""
    path, data = run.folder / "plan.cbor", plan.to_cbor()
    if path.exists() and (before := path.read_bytes()) != data:
        write_atomically(run.folder / f"plan-{hashlib.sha256(before).hexdigest()[:16]}.cbor", before)
    write_atomically(path, data)


def charges_due(run: Run, plan: StepPlan, first: int, last: int) -> tuple[Charge, ...]:
    """What the steps first … last-1 take, by class and signed bound, after all that the run has tried so far."""
    if plan.injection.occurrences is None:
        return plan_charges(plan, first, last, run.accounts)
    once = plan_charges(plan, 0, 1, run.accounts)
    due = (each.times(events_due(run, plan, first, last, each.cls)) for each in once)
    return tuple(each for each in due if each.steps)


def _steps_within_events(run: Run, plan: StepPlan, first: int, events: int, name: str) -> int:
    """How many steps from `first` on take at most so many events of a class or bound."""
    if plan.injection.occurrences is None:
        return events

    def too_many(steps: int) -> bool:
        return events_due(run, plan, first, first + steps, name) > events

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
        names, generation = {charge.cls for charge in due}, 0
        scales = {each.name: each.scale for each in accounts if each.name in names}
        while not run.spend.charge(
            run.id, segment=segment, generation=generation, nonce=nonce, charges=due, bounds=run.bounds, scales=scales,
            plan=plan.digest(), already=already,
        ):  # fmt: skip
            generation += 1


def _events_within_bounds(run: Run, plan: StepPlan, charge: Charge, besides: Sequence[Charge]) -> int:
    """How many events of the charge the bounds allow; without bounds, the ε of the whole plan."""
    if not charge.steps:
        return 0
    bound = run.bounds.get(charge.cls, math.inf)
    room = run.spend.fits(run.id, charge=charge, bound=bound, besides=besides)
    if charge.cls in run.bounds or not room:
        return room
    most, price = plan.epsilon(charge.cls), find_accountant(charge.accountant)
    spent = (*run.charged.get(charge.cls, ()), *(each.event for each in besides))

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
            problem = (
                f"the ledger '{run.spend.path}' holds another attempt at segment {opened.segment} than the journal"
            )
            raise RunError("train.ledger-disagrees", problem, "give the ledger that the run was charged in")
        run.abandon(opened, charged=False)


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
    cls, _, noise = account_bound(name)
    return SignedAccount(name=name, cls=cls, scale=scale, epsilon=signed_epsilon(plan, cls, noise / MICRO))
