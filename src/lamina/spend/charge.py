"""`Charge`: what steps of a plan take from a class or a signed bound, and the checks of what may be charged."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from lamina import validate
from lamina.account.accountants import find_accountant
from lamina.account.gaussian_rdp import step_rdp
from lamina.account.schedule import Event, EventKey, check_delta, rdp_order_of
from lamina.errors import AccountingError, RunError
from lamina.ledger.records import MAX_ACCOUNTS, EpochCharge
from lamina.ledger.schema import CLASS, MICRO
from lamina.plan.rules import FollowBudget
from lamina.plan.step_plan import StepPlan
from lamina.spend.accounts import SignedAccount, account_bound, account_name


@dataclass(frozen=True, kw_only=True, slots=True)
class Charge:
    """`steps` Poisson-subsampled Gaussian events with noise multiplier `sigma` and rate `q`, taken from one account.

    `cls` names the account: a class, or a signed bound, which is charged beside its class. The run is priced at `delta`
    by `accountant`.
    """

    cls: str
    sigma: float
    q: float
    steps: int
    delta: float
    accountant: str

    @property
    def event(self) -> Event:
        return Event(sigma=self.sigma, q=self.q, steps=self.steps)

    @property
    def key(self) -> EventKey:
        """What its price depends on. Only noise that follows its budget is priced at one order."""
        return (self.sigma, self.q, rdp_order_of(self.accountant) or 0.0)

    def times(self, steps: int) -> Charge:
        """The same charge for another number of steps."""
        return replace(self, steps=steps)

    def recorded(self) -> EpochCharge:
        """The charge as an epoch records it."""
        return EpochCharge(sigma=self.sigma, rate=self.q, steps=self.steps, order=rdp_order_of(self.accountant))


def plan_charges(plan: StepPlan, first: int, last: int, accounts: Sequence[SignedAccount] = ()) -> tuple[Charge, ...]:
    """What the steps first … last-1 of a plan take from its private classes and the signed bounds among them."""
    classes = (
        _charge_of_event(plan, k, event)
        for k in range(len(plan.classes))
        for event in plan.schedule_between(k, first, last)
    )
    return (*classes, *bound_charges(plan, first, last, accounts))


def bound_charges(plan: StepPlan, first: int, last: int, accounts: Sequence[SignedAccount]) -> tuple[Charge, ...]:
    """What these steps take from signed bounds, each at the sigma that follows from its scale."""
    return tuple(
        replace(_charge_of_event(plan, plan.index(each.cls), event), cls=each.name)
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
    name, delta = plan.classes[k].name, plan.classes[k].delta
    return Charge(cls=name, sigma=event.sigma, q=event.q, steps=event.steps, delta=delta, accountant=plan.accountant)


_NONCE_BYTES = 16
_MOST_STEPS = 2**40  # of one charge, so that sums stay exact in SQLite; a run that long takes centuries


def checked_charges(charges: Sequence[Charge]) -> tuple[Charge, ...]:
    """The charges with numbers of Python, if each has a price and an account."""
    checked = tuple(map(_checked_charge, charges))
    if (count := len({each.cls for each in checked})) > MAX_ACCOUNTS:
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
        problem = f"a charge of {charge.cls!r} has sigma inf"
        raise AccountingError("spend.charge-without-cost", problem, "it costs nothing: leave it out")
    validate.whole(AccountingError, "spend.charge-too-long", least=0, most=_MOST_STEPS, steps=event.steps)
    return Charge(
        cls=_checked_account(charge.cls), sigma=event.sigma, q=event.q + 0.0, steps=event.steps, delta=delta + 0.0,
        accountant=find_accountant(charge.accountant).name,
    )  # fmt: skip  # -0.0 becomes 0.0, which is what the file gives back


def checked_bounds(bounds: Mapping[str, float | None]) -> dict[str, float]:
    """Bounds as floats; None and inf are no bound."""
    for bound in bounds.values():
        if bound is not None:
            validate.number(AccountingError, "spend.bound-negative", least=0, infinite=True, bound=bound)
    return {cls: math.inf if bound is None else float(bound) for cls, bound in bounds.items()}


def checked_run(run: str) -> str:
    """The id of a run: 16 bytes in hex."""
    if not isinstance(run, str) or not re.fullmatch("[0-9a-f]{32}", run, re.ASCII):
        raise RunError("spend.run-id-invalid", f"run is {run!r}, must be 32 hex digits", "secrets.token_hex(16)")
    return run


def _checked_account(name: str) -> str:
    """A class or a signed bound, as a leaf can name it: what is charged must be recorded later."""
    text = checked_text(name, "account")
    found = account_bound(text)
    if not CLASS.fits(found[0]) or not MICRO.fits(max(found[1:])) or account_name(found) != text:
        remedy = "name a class (letters, digits, '_', '.', '-'), or 'CLASS@c=0.5,z=2.25'"
        raise RunError("spend.account-name-invalid", f"{text[:80]!r} is no name of an account", remedy)
    return text


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
