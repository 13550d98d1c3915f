"""The exponential mechanism that chooses among shapes of S: what each would keep, and the draw.

With s_i(a) ∈ [0, 1] the part of contribution i that the clip of candidate a would keep,

    joint  s_i(a) = min(1, 1/(sigma_k·‖(g_il/S_l(a))_l‖))
    box    s_i(a) = Σ_l v_kl·min(1, C[k,l](a)/‖g_il‖),     v_kl = 1/L_k on the layers that the class reaches

    u(a) = Σ_i s_i(a) − λ·noise(a),     noise(a) = Σ_l d_l S_l(a)² over the least of it among the candidates

and a is drawn with p(a) ∝ exp(ε·u(a)).

Claim. Adding or removing a contribution moves every u(a) by at most 1, and all in the same direction. So the
log-ratio of p(a) lies in an interval of length ε: the draw is ε-bounded-range, hence (ε, 0)-DP and ε²/8-zCDP.
account/choice.py says how a plan pays for it.

The sum over contributions is exact: s is rounded down to multiples of 2^-32 first. A contribution with a norm that
is not finite counts 0, as it does in the step; so does one of a public class, which nobody clips.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lamina.errors import PlanError
from lamina.plan import Choose, Clipping, StepPlan, radius, rescale

Array = NDArray[np.float64]
Rows = Sequence[Sequence[float]]
_GRID = 2.0**32  # sums of 2^20 contributions are exact in float64
_TINY = float(np.finfo(np.float64).tiny)


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """C and S of one candidate: what the step uses if it is drawn."""

    name: str
    clip: tuple[tuple[float, ...], ...]
    noise: tuple[float, ...]


def offers(plan: StepPlan) -> tuple[Offer, ...]:
    """Every candidate of the plan's `Choose`, scaled so that each class has the sigma that the plan is priced with.

    Under a joint clip S is all there is to choose, and C stays. A box does not see S; there the thresholds follow
    it, with the layers' shares of the budget kept:  C[k,l] ∝ S_l·√w_kl,  ‖C[k]‖ as in the plan.
    """
    rule = plan.rule(Choose)
    if rule is None:
        raise PlanError(
            "allocate.plan-chooses-nothing",
            "the plan chooses nothing: it has no rule Choose",
            "use LADP(choose_every=…)",
        )
    classes = range(len(plan.classes))
    return offered(
        rule,
        clip=plan.clip,
        shares=[plan.share(k) for k in classes],
        sigma=[plan.sigma(k) for k in classes],
        bits=[plan.bits(k) for k in classes],
        form=plan.clipping,
    )


def offered(
    rule: Choose, *, clip: Rows, shares: Rows, sigma: Sequence[float], bits: Sequence[float], form: Clipping
) -> tuple[Offer, ...]:
    """The same from a plan's parts: C, and for every class its shares of the budget, sigma and counts."""
    found = []
    for name, shape in zip(rule.names, rule.noise, strict=True):
        rows = [
            tuple(row) if form is Clipping.JOINT else _follow(row, w, shape)
            for row, w in zip(clip, shares, strict=True)
        ]
        found.append(Offer(name=name, clip=tuple(rows), noise=rescale(rows, shape, sigma, bits)))
    return tuple(found)


def _follow(row: Sequence[float], shares: Sequence[float], shape: Sequence[float]) -> tuple[float, ...]:
    """The row of C that keeps a class's shares of the budget under this shape of S; a public one stays."""
    if not any(row) or not all(map(math.isfinite, row)):
        return tuple(row)
    raw = [s * math.sqrt(w) for s, w in zip(shape, shares, strict=True)]
    scale = math.hypot(*row) / math.hypot(*raw)
    return tuple(scale * r for r in raw)


def kept(offer: Offer, norms: Array, cls: Sequence[int] | NDArray[np.int64], form: Clipping) -> Array:
    """s_i ∈ [0, 1] of every contribution: `norms` (n × L) are its ‖g_il‖, `cls` (n) the rows of its class."""
    rows = np.asarray(cls, dtype=np.int64)
    if norms.ndim != 2 or norms.shape[1] != len(offer.noise) or rows.shape != norms.shape[:1]:
        raise PlanError(
            "allocate.norms-classes",
            f"norms are {norms.shape} and classes {rows.shape}",
            f"give n × {len(offer.noise)} norms and n classes",
        )
    result = np.zeros(len(norms))
    for k in np.unique(rows).tolist():
        if not 0 <= k < len(offer.clip):
            raise PlanError(
                "allocate.class-out-range",
                f"class {k} is out of range",
                f"there are {len(offer.clip)} of them",
            )
        c, s = np.array(offer.clip[k]), np.array(offer.noise)
        reach = (c > 0) & (s > 0)
        if not np.isfinite(c).all() or not reach.any():
            continue
        mine = np.abs(norms[rows == k][:, reach])
        finite = np.isfinite(mine).all(1)
        mine = np.where(finite[:, None], mine, 1.0)
        with np.errstate(over="ignore"):  # what overflows is cut to 1, or vanishes
            if form is Clipping.JOINT:
                largest = np.maximum(mine.max(1), _TINY)
                length = np.linalg.norm(mine / largest[:, None] / s[reach], axis=1)
                part = radius(offer.clip[k], offer.noise) / np.maximum(length, _TINY) / largest
            else:
                part = np.minimum(1.0, c[reach] / np.maximum(mine, _TINY)).mean(1)
        result[rows == k] = np.where(finite, part, 0.0)
    return np.clip(result, 0.0, 1.0)


def relative_noise(found: Sequence[Offer], sizes: Sequence[int]) -> Array:
    """Σ_l d_l S_l² of every candidate, over the least of them."""
    d = np.asarray(sizes, dtype=np.float64)
    power = np.array([float(d @ np.square(offer.noise)) for offer in found])
    return power / power.min() if power.min() > 0 else np.ones(len(power))


def utilities(
    found: Sequence[Offer],
    norms: Array,
    cls: Sequence[int] | NDArray[np.int64],
    *,
    form: Clipping,
    sizes: Sequence[int],
    price: float,
) -> Array:
    """u(a) of every candidate for these contributions (none at all is fine: the noise alone decides)."""
    grid = [np.floor(kept(offer, norms, cls, form) * _GRID).sum() / _GRID for offer in found]
    return np.asarray(grid) - price * relative_noise(found, sizes)


def probabilities(u: Array, epsilon: float) -> Array:
    """p ∝ exp(ε·u)."""
    if not np.isfinite(u).all() or not 0 < epsilon < math.inf:
        raise PlanError(  # what the utilities are stays secret
            "allocate.utilities-choice-epsilon",
            f"the utilities of a choice at epsilon {epsilon!r} are not finite, or epsilon is not",
            "give candidates of sizes that floating point can carry, and epsilon > 0",
        )
    p = np.exp(epsilon * (u - u.max()))
    return np.asarray(p / p.sum())


def draw(u: Array, epsilon: float, uniform: float) -> int:
    """The candidate that a uniform number in [0, 1) falls on; of 53 secret bits, fresh for every call.

    A probability below 2^-53 may become 0: what that adds to δ, 2^-53 per candidate and call, is below what
    floating point is listed for as not covered.
    """
    if not 0 <= uniform < 1:
        raise PlanError(
            "allocate.uniform-lie",
            f"uniform is {uniform!r}, must lie in [0, 1)",
            "draw 53 bits and divide by 2^53",
        )
    place = int(np.searchsorted(np.cumsum(probabilities(u, epsilon)), uniform, side="right"))
    return min(place, len(u) - 1)
