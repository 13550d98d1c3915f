"""Bounds on the success of attacks, and the trade-off curves of plans against which they are checked."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from lamina.account.accountants import find_accountant, solve_sigma
from lamina.account.schedule import Adjacency, Event, EventCounts, Schedule, event_counts
from lamina.account.tradeoff import TradeOffCurve, trade_off
from lamina.errors import AccountingError
from lamina.plan.step_plan import Clipping, StepPlan

RiskOf = Literal["membership", "content"]
STATED_RATES = (0.001, 0.01, 0.05)
"""False-positive rates at which manifests and certificates state true-positive rates."""

_MARGIN = 1e-6  # relative: by which a plan stays below its bound, so that rounding does not refuse its last step
_Rate = Annotated[float, Field(gt=0, lt=1)]


class RiskBound(BaseModel):
    """A bound on attacks: the best attack has at most the true-positive rate `tpr` at the false-positive rate `fpr`.

    of  "membership": which contributions took part, by the add/remove curve; "content": what a contribution that is
        known to have taken part holds, by the replace-one curve
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)
    of: RiskOf
    fpr: _Rate
    tpr: _Rate

    @model_validator(mode="after")
    def _exceeds_guessing(self) -> Self:
        if self.tpr <= self.fpr:
            raise ValueError(f"tpr is {self.tpr:g}, must be above fpr ({self.fpr:g}): guessing alone reaches fpr")
        return self

    def __str__(self) -> str:
        return f"{self.of}: at most {100 * self.tpr:.6g} % found at {100 * self.fpr:.6g} % false accusations"

    def implies(self, other: RiskBound) -> bool:
        """Return whether this bound implies the other, because a curve does not decrease."""
        return self.of == other.of and self.fpr >= other.fpr and self.tpr <= other.tpr

    def rate(self, events: EventCounts, *, accountant: str, marks: frozenset[str] = frozenset()) -> float:
        """Return the largest true-positive rate at `fpr` for all events together; 1 if no bound is proven."""
        curve = risk_curve(events, accountant=accountant, of=self.of, marks=marks)
        return 1.0 if curve is None else curve.tpr(self.fpr)


ZERO_OUT, COMPOSED, UNPROVEN = "zero-out", "composed", "unproven"


def curve_marks(plan: StepPlan) -> frozenset[str]:
    """Return the limits of the curves of a plan that its events do not show.

    zero-out  its claim does not cover membership
    composed  no replace-one curve is proven: other content may have another turn, or Laplace noise was sampled
    unproven  its clipping bounds no single contribution
    """
    found = {
        ZERO_OUT: plan.injection.raw,
        COMPOSED: not plan.proves_replace_one,
        UNPROVEN: plan.clipping is Clipping.ELEMENTWISE,
    }
    return frozenset(mark for mark, holds in found.items() if holds)


def risk_curve(
    events: EventCounts, *, accountant: str, of: RiskOf, marks: frozenset[str] = frozenset()
) -> TradeOffCurve | None:
    """Return the trade-off curve of all events together; None if none is proven. `marks`: of the plans that made them."""
    followed = any(order for _, _, order in events)
    if marks - {ZERO_OUT, COMPOSED} or (followed and not find_accountant(accountant).amplified):
        return None
    if of == "membership":
        return None if ZERO_OUT in marks else trade_off(events, accountant=accountant)
    if COMPOSED in marks:
        return trade_off(events, accountant=accountant).twice()
    return trade_off(events, accountant=accountant, adjacency=Adjacency.REPLACE_ONE)


def stated_rates(
    events: EventCounts, *, accountant: str, of: RiskOf, marks: frozenset[str] = frozenset()
) -> dict[str, float] | None:
    """Return the largest true-positive rates at the stated false-positive rates, in steps of 1e-9 rounded up."""
    curve = risk_curve(events, accountant=accountant, of=of, marks=marks)
    if curve is None:
        return None
    return {f"{rate:g}": min(1.0, math.ceil(curve.tpr(rate) * 1e9) / 1e9) for rate in STATED_RATES}


def plan_curve(plan: StepPlan, k: str | int, of: RiskOf) -> TradeOffCurve | None:
    """Return the trade-off curve of a class after all steps of a plan; None if none is proven."""
    return risk_curve(event_counts(plan.schedule(k)), accountant=plan.accountant, of=of, marks=curve_marks(plan))


@lru_cache(maxsize=1024)
def calibrate_to_risk(
    bound: RiskBound, *, q: float, steps: int, accountant: str, marks: frozenset[str] = frozenset(),
    besides: Schedule = (),
) -> float:  # fmt: skip
    """Return the smallest sigma, to 1e-4 relative, at which `steps` at rate `q`, with `besides`, keep the bound."""
    from scipy.special import ndtri

    target = bound.tpr - _MARGIN * (bound.tpr - bound.fpr)

    def rate(*events: Event) -> float:
        return bound.rate(event_counts(events), accountant=accountant, marks=marks)

    if risk_curve({}, accountant=accountant, of=bound.of, marks=marks) is None:
        problem = f"no curve of {bound.of} is proven for noise whose claim is {', '.join(sorted(marks))}"
        raise AccountingError("account.risk-not-proven", problem, "use epsilon, or noise that enters once per step")
    if (floor := rate(*besides)) > target:
        problem = f"the other releases alone let an attack find {100 * floor:.4g} %, above {bound}"
        raise AccountingError("account.other-releases-too-expensive", problem, "make them rarer or noisier")

    def excess(sigma: float) -> float:
        found = rate(*besides, Event(sigma=sigma, q=q, steps=steps))
        ratio = math.log((found - bound.fpr) / (target - bound.fpr)) if found > bound.fpr else -50.0
        return max(ratio, 1e-15) if found > target else min(ratio, 0.0)

    # one Gaussian release with this μ has exactly this curve
    mu = (float(ndtri(target)) - float(ndtri(bound.fpr))) * (1.0 if bound.of == "membership" else 0.5)
    unreachable = AccountingError(
        "account.target-unreachable",
        f"no noise brings accountant '{accountant}' to {bound}",
        "raise tpr or fpr, take fewer steps, or use 'pld'",
    )
    return solve_sigma(excess, mu, q if find_accountant(accountant).amplified else 1.0, steps, unreachable)


def gaussian_noise_multiplier(bound: RiskBound) -> float:
    """Return z of the one Gaussian release that reaches the bound exactly."""
    from scipy.special import ndtri

    return (1.0 if bound.of == "membership" else 2.0) / float(ndtri(bound.tpr) - ndtri(bound.fpr))
