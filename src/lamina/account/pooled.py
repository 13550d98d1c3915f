"""`pooled`: what the events of several runs cost together, noise that followed its budget among them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from lamina.account import rdp
from lamina.account.accountant import accountant
from lamina.account.event import Event, grouped
from lamina.account.renyi import ORDERS, divergence

Kind = tuple[float, float, float]
"""sigma, q, and the Rényi order of noise that followed its budget; 0 for any other."""

Events = Mapping[Kind, int]
"""→ steps. Whole numbers of steps add exactly, so a schedule costs the same however it was cut into segments."""


def pooled(events: Events, *, delta: float, name: str) -> float:
    """ε of all events together by the accountant called `name`: one schedule, composed, not ε added to ε.

    Noise that followed its budget is proven at its own order α alone: D_α ≤ steps·RDP_α. At every order β up to the
    smallest such one, D_β ≤ D_α, so these bounds and the others' RDP at β add up, and the best β is taken. More events
    never cost less: every sum grows, and there are fewer β. An accountant without amplification has no figure for it.
    """
    fixed = [Event(sigma=sigma, q=q, steps=n) for (sigma, q, order), n in events.items() if not order]
    followed = {kind: n for kind, n in events.items() if kind[2] and n}
    asked = accountant(name)
    if not followed:
        return asked.epsilon(fixed, delta)
    if not asked.amplified or delta == 0:
        return math.inf
    least = min(order for _, _, order in followed)
    whole = math.fsum(n * divergence(q, sigma, order) for (sigma, q, order), n in followed.items())
    schedule = grouped(fixed)
    orders = (least, *(order for order in ORDERS if order < least))
    best = min(rdp.total_at(schedule, order) + rdp.order_offset(order, delta) for order in orders)
    return max(0.0, whole + best) * (1 + 1e-12)
