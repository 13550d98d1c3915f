"""How the runs of a history are trained: plans of every form of noise, at a price of which many fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import problem
import torch

from lamina import LayerStack, Policy, StepPlan, make_plan
from lamina.account.filters import GaussianFilter, PrivacyFilter
from lamina.allocate.basic import Quantile
from lamina.allocate.ladp import LADP
from lamina.plan.rules import FollowEnergy

WIDE = problem.POLICY.replace("epsilon = 4.0", "epsilon = 60.0").replace("epsilon = 2.0", "epsilon = 60.0")
NOISE = {
    "exact": "",
    "bins": 'injection = "per_microbatch"\nbins = 4',
    "slots": 'injection = "per_sample"\nslots = 12',
    "raw": 'injection = "per_sample_raw"',
    "capped": 'injection = "per_sample_raw"\noccurrences = 2',
}
RULES: dict[str, Any] = {
    "shares": LADP(),
    "budget": LADP(mode="budget"),
    "choices": LADP(choose_every=5, choose_epsilon=0.4),
    "quantile": Quantile(),
}
FORMS = (*NOISE, *RULES)
BOUND = 400.0  # where there is no policy
torch.optim.SGD(problem.net().parameters(), lr=0.1)  # the first of a process imports half of torch, which none may cut


@lru_cache(maxsize=256)
def plan_of(form: str, steps: int, promised: float | None) -> StepPlan:
    """A plan of each kind, at a price of which many fit."""
    rule: dict[str, Any] = {"allocate": RULES[form]} if form in RULES else {}
    stack, policy = LayerStack.from_model(problem.net()), Policy.parse(policy_of(form, promised))
    made = make_plan(stack, policy, batch=48, steps=steps, epsilon=2.0, **rule)
    quick = (replace(rule, every=2) if isinstance(rule, FollowEnergy) else rule for rule in made.rules)
    return replace(made, rules=tuple(quick))


def policy_of(form: str, promised: float | None) -> str:
    text = WIDE if promised is None else WIDE.replace("epsilon = 60.0", f"epsilon = {promised}")
    return text + (f"\n[noise]\n{NOISE[form]}\n" if NOISE.get(form) else "")


def more(x: torch.Tensor) -> torch.Tensor:
    return x + 0.0


@dataclass(frozen=True)
class Spec:
    """How a folder is trained."""

    form: str = "exact"
    steps: int = 8
    segment: int = 3
    signed: tuple[str, ...] = ()
    augment: bool = False
    filtered: bool = False
    withdrawn: tuple[str, ...] = ()

    @property
    def filters(self) -> dict[str, PrivacyFilter] | None:
        return {"clinical": GaussianFilter.for_target(60.0, delta=1e-5)} if self.filtered else None
