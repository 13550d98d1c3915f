"""Accounts of a ledger (classes and signed bounds), what steps of a plan charge to them, and their recorded totals."""

from __future__ import annotations

import functools
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from lamina import validate
from lamina.account.accountants import find_accountant
from lamina.account.charges import Account, invalid_account
from lamina.account.gaussian_rdp import step_rdp
from lamina.account.schedule import Event, check_delta, rdp_order_of
from lamina.errors import AccountingError, BudgetExceeded, RunError
from lamina.ledger.records import MAX_ACCOUNTS
from lamina.ledger.schema import CLASS, MICRO
from lamina.ledger.spending import Limit
from lamina.plan.rules import FollowBudget
from lamina.plan.step_plan import StepPlan
from lamina.plan.table import epsilon_text, percent_text


@dataclass(frozen=True, kw_only=True, slots=True)
class SignedAccount:
    """The account of all contributions of class `cls` that signed the same bound.

    name     CLASS@c=…,z=…, the signed bound; the same in every run
    scale    in (0, 1]: factor of the class's clip norms in this run; `plan.epsilon(cls, scale=scale)` is their loss
    epsilon  their largest loss over all runs: ε(z) at the δ of the class
    """

    name: str
    cls: str
    scale: float
    epsilon: float

    def __post_init__(self) -> None:
        account = Account.parse(self.name)
        if account.cls != self.cls or not account.clip_micro or not account.noise_micro:
            raise invalid_account(self.name)
        remedy = "resolve the signed bound against the plan: lamina.plan.signed_bounds.scale_for"
        check = functools.partial(validate.number, RunError, "spend.account-out-of-range", above=0, remedy=remedy)
        object.__setattr__(self, "scale", check(most=1, scale=self.scale))
        object.__setattr__(self, "epsilon", check(epsilon=self.epsilon))


def check_accounts(plan: StepPlan, accounts: Sequence[SignedAccount]) -> tuple[SignedAccount, ...]:
    """The accounts, if each is of a private class of the plan and given once."""
    private, seen = {entry.name for entry in plan.classes if not entry.public}, set()
    for each in accounts:
        if each.cls not in private:
            problem = f"account {each.name!r} is of class {each.cls!r}, which is public or not in the plan"
            raise RunError("spend.account-class-not-private", problem, "leave it out")
        if each.name in seen:
            raise RunError("spend.account-twice", f"account {each.name!r} is given twice", "give every bound once")
        seen.add(each.name)
    return tuple(accounts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Charge:
    """An event that is charged to one account. ε of the run is computed at `delta` by `accountant`.

    What a class is charged as a whole, its signed bounds are charged beside it.
    """

    account: Account
    event: Event
    delta: float
    accountant: str

    def times(self, steps: int) -> Charge:
        """The same charge for another number of steps."""
        return replace(self, event=replace(self.event, steps=steps))

    def row(self) -> dict[str, str | float | int]:
        """Return the fields in the form of ledger and journals; `stored_charge` reads them."""
        event = self.event
        return {
            "cls": str(self.account), "sigma": event.sigma, "q": event.q, "steps": event.steps, "delta": self.delta,
            "accountant": self.accountant,
        }  # fmt: skip


def stored_charge(cls: str, sigma: float, q: float, steps: int, delta: float, accountant: str) -> Charge:
    """Return the charge with these fields. Only noise that follows its budget is priced at one order."""
    event = Event(sigma=sigma, q=q, steps=steps, order=rdp_order_of(accountant))
    return Charge(account=Account.parse(cls), event=event, delta=delta, accountant=accountant)


def plan_charges(plan: StepPlan, first: int, last: int, accounts: Sequence[SignedAccount] = ()) -> tuple[Charge, ...]:
    """What the steps first … last-1 of a plan take from its private classes and the signed bounds among them."""
    classes = (
        _charge_of_event(plan, k, event)
        for k in range(len(plan.classes))
        for event in plan.schedule_between(k, first, last)
    )
    return (*classes, *bound_charges(plan, first, last, accounts))


def remaining_accounts(accounts: Sequence[SignedAccount], factors: Mapping[str, float]) -> tuple[SignedAccount, ...]:
    """The accounts with their scales multiplied by the factors of those that are exhausted; without who is left out."""
    pairs = [(each, factors.get(each.name, 1.0)) for each in accounts]
    return tuple(replace(each, scale=each.scale * factor) for each, factor in pairs if factor)


def bound_charges(plan: StepPlan, first: int, last: int, accounts: Sequence[SignedAccount]) -> tuple[Charge, ...]:
    """What these steps take from signed bounds, each at the sigma that follows from its scale."""
    return tuple(
        replace(_charge_of_event(plan, plan.index(each.cls), event), account=Account.parse(each.name))
        for each in accounts
        for event in plan.schedule_between(each.cls, first, last, each.scale)
    )


def follows_budget(plan: StepPlan) -> bool:
    """Whether the noise is chosen during the run."""
    return plan.rule(FollowBudget) is not None


def charges_in_declared_steps(plan: StepPlan, first: int, last: int, factor: float) -> tuple[Charge, ...]:
    """What these steps take at `factor` times the declared noise, counted in steps at the declared noise.

    At the one Rényi order of the plan, prices add: n steps at another sigma cost as much as
    ⌈n·RDP(factor·sigma)/RDP(sigma)⌉ declared ones. A run stays within its budget if these never exceed T, however
    the factors were chosen: the filter of docs/theory.md, in whole steps.
    """
    order = rdp_order_of(plan.accountant)
    assert order is not None, plan.accountant  # a plan whose noise follows its budget has one
    found = []
    for k in range(len(plan.classes)):
        steps, *choices = plan.schedule_between(k, first, last) or (None,)
        if steps is not None:
            declared = Fraction(step_rdp(steps.q, steps.sigma, order))
            units = math.ceil(steps.steps * Fraction(step_rdp(steps.q, steps.sigma * factor, order)) / declared)
            found += [_charge_of_event(plan, k, event) for event in (replace(steps, steps=units), *choices)]
    return tuple(found)


def _charge_of_event(plan: StepPlan, k: int, event: Event) -> Charge:
    entry, event = plan.classes[k], replace(event, order=rdp_order_of(plan.accountant))
    return Charge(account=Account(entry.name), event=event, delta=entry.delta, accountant=plan.accountant)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpend:
    """Steps that one run charged to one account, `redone` of them for repeated segments, and steps it reserved."""

    run: str
    label: str
    day: str
    steps: int
    redone: int
    reserved: int
    finished: bool

    @property
    def name(self) -> str:
        return run_name(self.run, self.label)


@dataclass(frozen=True, kw_only=True, slots=True)
class AccountTotal:
    """ε (or the rate of a risk bound) of all charges, and of all charges and reservations together; spent ≤ committed."""

    spent: float
    committed: float
    runs: tuple[RunSpend, ...]


def run_name(run: str, label: str = "") -> str:
    return f"{label!r} ({run[:8]})" if label else run[:8]


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
