"""The limits of accounts: checks of charges, admission within the bounds of a ledger, and the refusal."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lamina import validate
from lamina.account.accountants import find_accountant
from lamina.account.charges import Account, Charge, invalid_account
from lamina.account.schedule import EventCounts, check_delta, rdp_order_of
from lamina.errors import AccountingError, BudgetExceeded, RunError
from lamina.ledger.attempts import AccountTotal, SpendTransaction, run_name
from lamina.ledger.records import MAX_ACCOUNTS
from lamina.ledger.schema import CLASS, MICRO, NANO, UNBOUNDED
from lamina.ledger.spending import CLASS_TOLERANCE, Limit, signed_limit, signed_spend
from lamina.ledger.store.rows import StoreReader
from lamina.ledger.writer import Ledger
from lamina.plan.table import epsilon_text, percent_text

_NONCE_BYTES = 16
_MOST_STEPS = 2**40  # of one charge, so that sums stay exact in SQLite; a run that long takes centuries


def checked_charges(charges: Sequence[Charge]) -> tuple[Charge, ...]:
    """The charges with numbers of Python, if each has a price and an account."""
    checked = tuple(map(_checked_charge, charges))
    if (count := len({each.account for each in checked})) > MAX_ACCOUNTS:
        problem = (
            f"the run has {count:,} classes and signed bounds; an epoch of the ledger holds {MAX_ACCOUNTS:,} at most"
        )
        raise RunError(
            "spend.too-many-accounts", problem, "ask for bounds on a coarser grid, or train on fewer at once"
        )
    return checked


def _checked_charge(charge: Charge) -> Charge:
    event, delta = charge.event, check_delta(charge.delta)
    if math.isinf(event.sigma):
        problem = f"a charge of {str(charge.account)!r} has sigma inf"
        raise AccountingError("spend.charge-without-cost", problem, "it costs nothing: leave it out")
    validate.whole(AccountingError, "spend.charge-too-long", least=0, most=_MOST_STEPS, steps=event.steps)
    account, accountant = _checked_account(charge.account), find_accountant(charge.accountant).name
    event = replace(event, q=event.q + 0.0, order=rdp_order_of(accountant))  # -0.0 becomes 0.0, as the file gives back
    return Charge(account=account, event=event, delta=delta + 0.0, accountant=accountant)


def checked_bounds(bounds: Mapping[str, float | None]) -> dict[Account, float]:
    """Return bounds as floats by account; None and inf mean no bound."""
    for bound in bounds.values():
        if bound is not None:
            validate.number(AccountingError, "spend.bound-negative", least=0, infinite=True, bound=bound)
    return {Account.parse(name): math.inf if bound is None else float(bound) for name, bound in bounds.items()}


def checked_run(run: str) -> str:
    """The id of a run: 16 bytes in hex."""
    if not isinstance(run, str) or not re.fullmatch("[0-9a-f]{32}", run, re.ASCII):
        raise RunError("spend.run-id-invalid", f"run is {run!r}, must be 32 hex digits", "secrets.token_hex(16)")
    return run


def _checked_account(account: Account) -> Account:
    """A class or a signed bound, as a leaf can name it: what is charged must be recorded later."""
    text = checked_text(str(account), "account")
    found = Account.parse(text)
    if not CLASS.fits(found.cls) or not MICRO.fits(max(found[1:])) or found != account:
        raise invalid_account(text)
    return found


def checked_nonce(nonce: bytes) -> bytes:
    """The nonce that tells an attempt from that of a copy of the run."""
    if not isinstance(nonce, bytes) or len(nonce) != _NONCE_BYTES:
        problem = f"the nonce of a charge must be {_NONCE_BYTES} bytes"
        raise RunError("spend.nonce-length", problem, f"secrets.token_bytes({_NONCE_BYTES})")
    return nonce


def checked_text(text: str, what: str) -> str:
    """A str of Python that UTF-8 can encode."""
    try:
        return str.__str__(text).encode().decode()
    except (TypeError, UnicodeEncodeError):
        raise RunError("spend.text-invalid", f"{what} is {text!r}, must be Unicode text", "use another name") from None


def budget_exceeded(
    *, path: str, origin: str, account: Account, limit: Limit, now: AccountTotal, run: str, label: str, asked: int,
    epsilon: float,
) -> BudgetExceeded:  # fmt: skip
    """The refusal of a charge: the bound, who spent and reserved what, what was asked, and the remedies."""
    label = label or next((each.label for each in now.runs if each.run == run), "")
    figure: Callable[[float], str] = epsilon_text if limit.risk is None else percent_text
    bound = f"the risk bound {limit.risk}"
    if limit.risk is None:
        bound = f"a bound of ε ≤ {figure(limit.epsilon)} at δ = {limit.delta:g}"
    spent = f"{'ε ' if limit.risk is None else ''}{figure(now.spent)}"
    would = "of which nothing is proven" if limit.risk and epsilon == 1 else f"which would make it {figure(epsilon)}"
    problem = (
        f"{account.describe()} of corpus {origin!r} has {bound} "
        f"over all runs; {spent} is spent, {figure(now.committed)} with what is "
        f"reserved; run {run_name(run, label)} asks for {asked:,} step{'s'[: asked != 1]}, {would} "
        f"(accountant {limit.accountant})"
    )
    remedy = "plan with a smaller epsilon or fewer steps; " + (
        "or leave out those who signed this bound, for whom it is final: exhausted = 'leave-out' or 'scale' in policy.toml"
        if account.signed
        else "whoever answers for the corpus may set a new bound in the policy"
    )
    if holding := [each.run[:8] for each in now.runs if each.reserved and each.run != run]:
        remedy = f"release a run that holds a reservation (lamina spend {shlex.quote(path)} --release {holding[0]}), or {remedy}"
    if limit.risk is not None:
        return BudgetExceeded("spend.risk-exceeded", problem, remedy)
    return BudgetExceeded("spend.budget-exceeded", problem, remedy)


class LimitExceeded(Exception):
    """An exception that ends a transaction, with the account, its limit, the requested steps, and the price with them."""


class SpendLimits:
    """Admits charges within the bounds of a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def wanted(self, rows: StoreReader, account: Account, *asked: Limit) -> list[Limit]:
        """The budgets to keep: those asked for and that of the ledger, without those that a stricter one implies."""
        cls, _, noise = account
        header, promised, found = self._ledger.header, noise, list(asked)
        terms: dict[str, Any] = {"delta": header.delta, "accountant": header.accountant}
        if not noise:
            preset = next((each for each in self._ledger.governance(rows).policy.presets if each.cls == cls), None)
            promised = 0 if preset is None else preset.noise_multiplier
            if preset is not None and preset.risk is not None:
                found.append(Limit(risk=preset.risk, **terms))
        if promised and (most := signed_spend(promised, header.delta)) < UNBOUNDED:
            bound = signed_limit(noise, header.delta) if noise else most / NANO * (1 + CLASS_TOLERANCE)
            found.append(Limit(epsilon=bound, **terms))
        return [t for t in found if not any(o is not t and o.within(t) and o != t for o in found)]

    def admit(
        self, transaction: SpendTransaction, rows: StoreReader, charges: Sequence[Charge], bounds: Mapping[Account, float],
        before: Mapping[Account, EventCounts],
    ) -> None:  # fmt: skip
        """Raise LimitExceeded unless every account is within its limits after this transaction."""
        for name, earlier in before.items():
            mine = [each for each in charges if each.account == name]
            if not any(each.event.steps for each in mine):
                continue  # nothing is asked, so nothing can be refused
            bound, after = bounds.get(name, math.inf), transaction.standing(name)
            kinds = sorted({(each.delta, each.accountant) for each in mine})
            asked = [Limit(epsilon=bound, delta=delta, accountant=accountant) for delta, accountant in kinds]
            held = transaction.terms(name)
            grown = any(steps > earlier.get(event, 0) for event, steps in after.items())
            wanted = self.wanted(rows, name, *asked)
            for terms in wanted:
                marks = (
                    transaction.marks(name.cls) if terms.risk else frozenset[str]()
                )  # another plan may limit the same events
                if math.isinf(terms.most) or (not grown and not marks and any(h.within(terms) for h in held)):
                    continue
                epsilon = terms.price(after, marks)
                if not epsilon <= terms.most:
                    raise LimitExceeded(name, terms, sum(each.event.steps for each in mine), epsilon)
            new = [w for w in wanted if grown or not any(h.within(w) for h in held)]
            if new:
                kept = () if grown else (h for h in held if not any(w.within(h) for w in new))
                transaction.set_terms(name, (*new, *kept))
