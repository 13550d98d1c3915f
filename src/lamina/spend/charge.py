"""`Charge`: what steps of a plan take from a class or a signed bound, and the checks of what may be charged."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from lamina.account.accountants import find_accountant, rdp_order_of
from lamina.account.gaussian_rdp import step_rdp
from lamina.account.schedule import Event, check_delta
from lamina.errors import AccountingError, RunError
from lamina.ledger.records import MAX_ACCOUNTS
from lamina.ledger.schema import CLASS, MICRO
from lamina.plan.rules import FollowBudget
from lamina.plan.step_plan import StepPlan
from lamina.spend.accounts import SignedAccount, account_bound, account_name


@dataclass(frozen=True, kw_only=True, slots=True)
class Charge:
    """`steps` Poisson-subsampled Gaussian events with multiplier `sigma` and rate `q`, owed by class `cls`.

    `cls` may also name a signed bound (account.py), which is booked beside its class.

    `delta` and `accountant` say at which δ, and by whom, the run that it belongs to is priced.
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

    def times(self, steps: int) -> Charge:
        """The same for another number of steps."""
        return replace(self, steps=steps)


def plan_charges(plan: StepPlan, first: int, last: int, accounts: Sequence[SignedAccount] = ()) -> tuple[Charge, ...]:
    """What the steps first … last-1 of a plan take: per class that is owed noise, the steps, and any choices.

    And from the signed bounds among them.
    """
    classes = [
        _charge_of_event(plan, k, event)
        for k in range(len(plan.classes))
        for event in plan.schedule_between(k, first, last)
    ]
    return (*classes, *bound_charges(plan, first, last, accounts))


def bound_charges(plan: StepPlan, first: int, last: int, accounts: Sequence[SignedAccount]) -> tuple[Charge, ...]:
    """What they take from signed bounds, each at the sigma that its scale gives it."""
    return tuple(
        replace(_charge_of_event(plan, plan.index(each.cls), event), cls=each.name)
        for each in accounts
        for event in plan.schedule_between(each.cls, first, last, each.scale)
    )


def follows_budget(plan: StepPlan) -> bool:
    """Whether sigma is chosen on the way."""
    return plan.rule(FollowBudget) is not None


def charges_in_declared_steps(plan: StepPlan, first: int, last: int, factor: float) -> tuple[Charge, ...]:
    """What these steps take at `factor` times the declared noise, counted in steps as they were declared.

    At the one Rényi order of the plan, prices add: n steps at another sigma cost as much as
    ⌈n·RDP(factor·sigma)/RDP(sigma)⌉ declared ones. A run stays within its budget if these never exceed T, however
    the factors were chosen on the way: the filter of docs/theory.md, in whole steps.
    """
    order = rdp_order_of(plan.accountant)
    if order is None:
        raise RunError(
            "spend.accountant-no-order",
            f"accountant '{plan.accountant}' has no order",
            "noise that follows the budget needs one",
        )
    found = []
    for k in range(len(plan.classes)):
        steps, *choices = plan.schedule_between(k, first, last) or (None,)
        if steps is not None:
            declared = Fraction(step_rdp(steps.q, steps.sigma, order))
            units = math.ceil(steps.steps * Fraction(step_rdp(steps.q, steps.sigma * factor, order)) / declared)
            found += [
                _charge_of_event(plan, k, replace(steps, steps=units)),
                *(_charge_of_event(plan, k, e) for e in choices),
            ]
    return tuple(found)


def _charge_of_event(plan: StepPlan, k: int, event: Event) -> Charge:
    return Charge(
        cls=plan.classes[k].name,
        sigma=event.sigma,
        q=event.q,
        steps=event.steps,
        delta=plan.classes[k].delta,
        accountant=plan.accountant,
    )


_NONCE_BYTES = 16
MOST_STEPS = 2**40  # of one charge, so that sums stay exact in SQLite; a run that long takes centuries


def checked_charges(charges: Sequence[Charge]) -> tuple[Charge, ...]:
    """The charges with plain numbers, or the reason why one makes no sense."""
    plain = tuple(map(_checked_charge, charges))
    if (count := len({each.cls for each in plain})) > MAX_ACCOUNTS:
        raise RunError(
            "spend.run-classes-signed",
            f"a run of {count:,} classes and signed bounds; an epoch of the ledger holds {MAX_ACCOUNTS:,} at most",
            "ask for bounds on a coarser grid, or train on fewer at once",
        )
    return plain


def _checked_charge(charge: Charge) -> Charge:
    event, delta = charge.event, check_delta(charge.delta)
    name = find_accountant(charge.accountant).name
    if math.isinf(event.sigma):
        raise AccountingError(
            "spend.charge-class-sigma",
            f"a charge of class '{charge.cls}' has sigma inf",
            "it costs nothing: leave it out",
        )
    if event.steps > MOST_STEPS:
        raise AccountingError(
            "spend.charge-class-steps",
            f"a charge of class '{charge.cls}' has {event.steps:,} steps, more than {MOST_STEPS:,}",
            "charge shorter segments",
        )
    return Charge(
        cls=checked_account(charge.cls),
        sigma=event.sigma,
        q=event.q + 0.0,  # -0.0 becomes 0.0, which is what the file gives back
        steps=event.steps,
        delta=delta + 0.0,
        accountant=name,
    )


def checked_bounds(bounds: Mapping[str, float | None]) -> dict[str, float]:
    """Bounds as floats; None and inf are no bound."""
    for cls, bound in bounds.items():
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int | float) or not bound >= 0):
            raise AccountingError(
                "spend.bound-class", f"the bound of class '{cls}' is {bound!r}, must be >= 0", "e.g. 1.0"
            )
    return {cls: math.inf if bound is None else float(bound) for cls, bound in bounds.items()}


def checked_run(run: str) -> str:
    """A run, by its id: 16 bytes in hex."""
    if not isinstance(run, str) or not re.fullmatch("[0-9a-f]{32}", run, re.ASCII):
        raise RunError("spend.run-hex-digits", f"run is {run!r}, must be 32 hex digits", "secrets.token_hex(16)")
    return run


def checked_account(name: str) -> str:
    """A class or a signed bound, as a leaf can name it: what is charged is to be recorded."""
    text = checked_text(name, "account", empty=True)
    found = account_bound(text)
    wrong = CLASS.wrong(found[0]) or MICRO.wrong(max(found[1:]))
    if wrong is not None or account_name(found) != text:
        raise RunError(
            "spend.ledger-no-account",
            f"a ledger has no account {text[:80]!r}",
            "name a class (letters, digits, '_', '.', '-'), or 'CLASS@c=0.5,z=2.25'",
        )
    return text


def checked_nonce(nonce: bytes) -> bytes:
    """What tells an attempt from that of a copy of the run."""
    if not isinstance(nonce, bytes) or len(nonce) != _NONCE_BYTES:
        raise RunError(
            "spend.nonce-charge-not", f"the nonce of a charge is not {_NONCE_BYTES} bytes", "draw them from the system"
        )
    return nonce


def checked_count(value: int, what: str) -> int:
    found = operator.index(value)
    if not 0 <= found < 2**63:
        raise RunError("spend.whole-number", f"{what} is {value!r}, must be a whole number >= 0", "count from 0")
    return found


def checked_text(text: str, what: str, *, empty: bool = False) -> str:
    """Any text will do that can be written down; a plain str, whatever kind of str was given."""
    if not isinstance(text, str) or (not text and not empty):
        raise RunError("spend.text", f"{what} is {text!r}, must be a text", "name it")
    try:
        return text.encode().decode()
    except UnicodeEncodeError:
        raise RunError(
            "spend.no-encoding-write", f"{what} is {text!r}, which no encoding can write", "use Unicode text"
        ) from None
