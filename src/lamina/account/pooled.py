"""`pooled`: what the events of several runs cost together, noise that followed its budget among them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from lamina.account import rdp
from lamina.account.accountant import accountant
from lamina.account.event import Event, grouped
from lamina.account.renyi import divergence

Kind = tuple[float, float, float]
"""sigma, q, and the Rényi order of noise that followed its budget; 0 for any other."""

Events = Mapping[Kind, int]
"""→ steps. Whole numbers of steps add exactly, so a schedule costs the same however it was cut into segments."""


def pooled(events: Events, *, delta: float, name: str) -> float:
    """ε of all events together by the accountant called `name`: one schedule, composed, not ε added to ε.

    Noise that followed its budget is proven at its own order α alone: D_α ≤ steps·RDP_α. At the smallest such order
    α* of all, D_α* ≤ D_α, so these bounds and the others' RDP at α* add up. An accountant that credits no sampling
    has no figure for it.
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
    others = rdp.total_at(grouped(fixed), least)
    return max(0.0, whole + others + rdp.order_offset(least, delta)) * (1 + 1e-12)
