"""What an attacker can learn about one member of a class: figures of the trade-off curve, and sentences that state them.

    membership  whether one unit (such as a patient) took part: add/remove
    content     which data a unit that is known to have taken part contributed: replace-one

Figures are rounded up to 1e-9, so the same charges give the same bytes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

from lamina.account.accountants import find_accountant
from lamina.account.schedule import Adjacency, EventCounts, EventKey
from lamina.account.tradeoff import BY_RENYI, trade_off
from lamina.ledger.schema import NANO, nano_epsilon, pluralize

Risk = Mapping[str, Any]  # as `risk_figures` returns it

FALSE_POSITIVE_RATES = (0.001, 0.01, 0.05)
BASELINES = (0.01, 0.1, 0.5)  # of attribute inference and reconstruction
LEAST_RATE = 0.001  # both error rates lie above it where μ holds; without such a limit no finite μ exists
TWO_STEPS = "replace-one, as two add/remove steps"
ADJACENCIES = ("add-remove", "replace-one", TWO_STEPS)


def risk_figures(
    events: EventCounts, *, accountant: str, of: Literal["membership", "content"], correlated: bool = False
) -> dict[str, Any] | None:
    """Return what an attacker can learn from all events together; None if nothing is proven.

    `events` are charges as the ledger records them. No cap on occurrences is credited, because the ledger does not prove
    one. Where no replace-one curve is proven (Rényi divergences, noise that is `correlated` over steps), the content is
    bounded by the add/remove curve composed with itself. Not for the membership of zero-out claims, which do not protect it.
    """
    found = _figures(tuple(sorted(events.items())), accountant, of == "content", correlated)
    return copy.deepcopy(found)


@lru_cache(maxsize=4096)
def _figures(
    events: tuple[tuple[EventKey, int], ...], accountant: str, content: bool, correlated: bool
) -> dict[str, Any] | None:
    if any(order for (_, _, order), _ in events) and not find_accountant(accountant).amplified:
        return None  # as for ε: noise that followed its budget has no figure without amplification
    if content and correlated:
        curve, adjacency = trade_off(dict(events), accountant=accountant).twice(), TWO_STEPS
    else:
        relation = Adjacency.REPLACE_ONE if content else Adjacency.ADD_REMOVE
        curve = trade_off(dict(events), accountant=accountant, adjacency=relation)
        adjacency = "add-remove" if not content else TWO_STEPS if curve.bound == BY_RENYI else "replace-one"
    mu, advantage = curve.mu(LEAST_RATE), _rounded_up(curve.advantage())
    found = {
        "adjacency": adjacency,
        "bound": curve.bound,
        "tpr": {f"{fpr:g}": _rounded_up(curve.tpr(fpr)) for fpr in FALSE_POSITIVE_RATES},
        "accuracy": _rounded_up(0.5 + 0.5 * advantage),
        "advantage": advantage,
        "mu": _rounded_up(mu) if math.isfinite(mu) else None,
        "mu_least_rate": LEAST_RATE,
    }
    if content:
        found["success"] = {f"{base:g}": _rounded_up(curve.success(base)) for base in BASELINES}
    return found


def _rounded_up(value: float) -> float:
    return nano_epsilon(value) / NANO


_PEOPLE = ("patient", "person", "participant", "donor", "user", "client", "customer", "student", "employee", "subject")


def membership_sentence(unit: str, risk: Risk) -> str:
    """Return what the best attacker learns about who took part, in natural frequencies."""
    return (
        f"Of {pluralize(100, unit)} {_who(unit)} took part, the best attacker names at most {per_hundred(risk['tpr']['0.01'])} "
        "while wrongly naming 1 of 100 others; guessing names 1. If a fair coin decides whether one "
        f"{unit} takes part, the attacker is right in at most {per_hundred(risk['accuracy'])} of 100 cases; guessing is right in 50."
    )


def content_sentence(unit: str, risk: Risk) -> str:
    """Return what the best attacker learns about the content of a known participant, in natural frequencies."""
    return (
        f"An attacker guesses the content of one {unit} {_who(unit)} is known to have taken part. A guess that is right for 1 of "
        f"{pluralize(100, unit)} whose data was not used is right for at most {per_hundred(risk['success']['0.01'])} of 100 whose data "
        f"was used; one that is right for 10, for at most {per_hundred(risk['success']['0.1'])}; one that is right for 50, for at most "
        f"{per_hundred(risk['success']['0.5'])}. If a fair coin decides which of two records was used, the attacker is right in at "
        f"most {per_hundred(risk['accuracy'])} of 100 cases."
    )


def _who(unit: str) -> str:
    return "who" if unit.rpartition(" ")[2] in _PEOPLE else "that"


def per_hundred(rate: float) -> str:
    """Return a rate as so many of 100, rounded up to one decimal.

    >>> per_hundred(0.05281), per_hundred(0.5), per_hundred(1.0)
    ('5.3', '50', '100')
    """
    return f"{min(100.0, math.ceil(1000 * rate - 1e-6) / 10):g}"
