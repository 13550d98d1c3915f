"""`Charge`: what a stretch of steps takes from a class, before it is taken."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lamina.account import Event
from lamina.plan import StepPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class Charge:
    """`steps` Poisson-subsampled Gaussian events with multiplier `sigma` and rate `q`, owed by class `cls`.

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


def charges(plan: StepPlan, steps: int) -> tuple[Charge, ...]:
    """What `steps` steps of a plan take: one charge per class that is owed noise."""
    return tuple(
        Charge(
            cls=entry.name,
            sigma=plan.sigma(k),
            q=entry.sampling_rate,
            steps=steps,
            delta=entry.delta,
            accountant=plan.accountant,
        )
        for k, entry in enumerate(plan.classes)
        if plan.schedule(k)
    )
