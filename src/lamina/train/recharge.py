"""What a run was charged before it stopped: the ledger is told whatever it has forgotten, and charged on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lamina.admit.descriptor import MICRO
from lamina.errors import BudgetExceeded, RunError
from lamina.ledger.records import Outcome
from lamina.plan import StepPlan
from lamina.plan.signed import signed_epsilon
from lamina.train import followed
from lamina.train.book import Account
from lamina.train.book.account import bound_of
from lamina.train.promise import book_whole

if TYPE_CHECKING:
    from lamina.train.run import Run


def recharge(run: Run) -> None:
    """Nothing forgotten: a ledger that was lost, or that a crash was faster than, gets what the journal says.

    A pending segment that the ledger does not know has drawn nothing: it is charged under the bounds, and given up
    if these refuse it.
    """
    pending = run.journal.pending
    _rebook_whole(run)
    for opened in run.attempts:
        try:
            known = run.charge(opened, already=opened is not pending)
        except BudgetExceeded:
            known = False
        if known:
            if opened is not pending:
                closed = run.journal.closed(opened)
                run.record(opened, Outcome.CLOSED if closed else Outcome.ABANDONED)
            continue
        if opened is not pending:
            raise RunError(
                "train.ledger-holds-another",
                f"the ledger '{run.book.path}' holds another attempt at segment {opened.segment} of this run than "
                "the journal",
                "give the ledger that the run was charged in",
            )
        run.give_up(opened, charged=False)


def _rebook_whole(run: Run) -> None:
    """The budgets that the run was following, where it was then: a ledger that was lost does not know them."""
    found: dict[tuple[bytes, str], dict[str, float]] = {}
    for opened, life in run.journal.lives():
        if followed.belongs(opened):
            found.setdefault((opened.plan, life), {}).update(opened.scales)
    for (digest, life), scales in found.items():
        plan = run.plan_of(digest)
        accounts = [_account(plan, name, scale) for name, scale in scales.items()]
        book_whole(run, plan, accounts, followed.nonce(plan, life), already=True)


def keep(run: Run, plan: StepPlan, standing: Callable[[set[str]], set[str]]) -> None:
    """Go on charging the signed bounds that this plan has charged before, though nobody here has them now.

    `standing` says which of them somebody still has, by the ledger. Who reads the ledger cannot tell that they
    stayed away from these steps; so they are charged like those who did not.
    """
    known = {each.name for each in run.accounts}
    missing = {name: scale for name, scale in run.book.scales(run.id, plan).items() if name not in known}
    for name in sorted(standing(set(missing))) if missing else ():
        made = _account(plan, name, missing[name])
        run.accounts = (*run.accounts, made)
        run.bounds[name] = made.epsilon


def _account(plan: StepPlan, name: str, scale: float) -> Account:
    """A signed bound that the ledger or the journal knows, whoever has it now."""
    cls, _, noise = bound_of(name)
    return Account(name=name, cls=cls, scale=scale, epsilon=signed_epsilon(plan, cls, noise / MICRO))
