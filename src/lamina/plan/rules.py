"""How a plan may change while it runs: rules of plain numbers, public and fixed before the first step.

A rule moves C and S between layers on the strength of what was already noised (free), or of a release of its own that
the plan pays for. What a rule can never do is lower a class's sigma below what the plan declares, except under a
filter that was asked first (`FollowBudget`). docs/theory.md, "When the plan changes during training".
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lamina.account import choice_multiplier
from lamina.errors import PlanError


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowEnergy:
    """Shares of the budget follow the energy of the noised gradient sum. Post-processing: costs nothing.

    decay   of the moving average, per observation
    least   no layer's share falls below least/L
    every   observe and adapt at every so many steps
    """

    decay: float = 0.9
    least: float = 0.1
    every: int = 10

    def __post_init__(self) -> None:
        _between("decay", self.decay, 0.0, 1.0)
        _between("least", self.least, 0.0, 1.0)
        _count("every", self.every)


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowQuantile:
    """Thresholds follow a quantile of the gradient norms, read from noised counts that the plan pays for.

    At every step and layer the contributions of private classes whose gradient was not clipped are counted, as
    Σ (bit - ½), with noise of standard deviation `noise`:  b̃ = (Σ(bit - ½) + N(0, noise²))/B + ½, and
    C ← C·exp(-rate·(b̃ - target)). One contribution moves the L_k counts it takes part in by ½ each, so the step as
    a whole has  sigma_k^-2 = Σ_l (C/S)² + L_k/(4 noise²).
    """

    target: float = 0.5
    rate: float = 0.2
    noise: float

    def __post_init__(self) -> None:
        _between("target", self.target, 0.0, 1.0)
        _between("rate", self.rate, 0.0, 10.0)
        _between("noise", self.noise, 0.0, 1e12)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choose:
    """An exponential mechanism picks one of several shapes of S, at steps 0, every, 2·every, …

    epsilon  ε of one call: p ∝ exp(epsilon·u); priced as a Gaussian that dominates it (account/choice.py)
    names    what the candidates are called
    noise    S of each candidate, up to a common factor
    price    λ of  u(a) = Σ_i s_i(a) − λ·noise(a): how many kept contributions a unit of relative noise is worth

    s_i(a) ∈ [0, 1] is how much of contribution i the clip of candidate a would keep, over a Poisson draw of its own.
    """

    epsilon: float
    every: int
    names: tuple[str, ...]
    noise: tuple[tuple[float, ...], ...]
    price: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(self.names))
        object.__setattr__(self, "noise", tuple(tuple(float(s) for s in row) for row in self.noise))
        choice_multiplier(self.epsilon)
        _count("every", self.every)
        _between("price", self.price, 0.0, 1e12, closed=True)
        if len(self.names) != len(self.noise) or len(set(self.names)) != len(self.names) or not self.names:
            raise PlanError(
                f"a choice has {len(self.names)} names for {len(self.noise)} candidates",
                "give every candidate one name of its own",
            )
        if any(not math.isfinite(s) or s < 0 for row in self.noise for s in row):
            raise PlanError("a candidate of a choice has noise that is negative or not finite", "correct it")

    def calls(self, first: int, last: int) -> int:
        """How many choices fall on the steps first … last-1."""
        return -(-last // self.every) + (-first // self.every)


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowBudget:
    """sigma_k(t) is chosen on the way, between `least` and `most` times the declared one, under a filter.

    The filter is at one Rényi order, fixed in advance, has the price of the declared schedule as its budget, and is
    asked before the step; what it refuses is not taken, and training stops there.
    """

    order: float
    least: float = 0.7
    most: float = 1.5

    def __post_init__(self) -> None:
        _between("order", self.order, 1.01, 1e6)
        _between("least", self.least, 0.1, 1.0, closed=True)
        _between("most", self.most, 1.0, 10.0, closed=True)

    @property
    def accountant(self) -> str:
        """The accountant that such a plan is priced by."""
        return f"rdp@{self.order:g}"


Rule = FollowEnergy | FollowQuantile | Choose | FollowBudget
KINDS: dict[str, type[Rule]] = {
    "follow energy": FollowEnergy,
    "follow quantile": FollowQuantile,
    "choose": Choose,
    "follow budget": FollowBudget,
}


def to_plain(rule: Rule) -> dict[str, Any]:
    """The rule as plain values, for a codec."""
    kind = next(name for name, made in KINDS.items() if type(rule) is made)
    state = {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule)}
    floats = {field.name for field in dataclasses.fields(rule) if field.type == "float"}
    return {"kind": kind, **{name: float(v) if name in floats else _lists(v) for name, v in state.items()}}


def from_plain(state: Any) -> Rule:
    """The rule that `to_plain` described; anything else is refused."""
    if not isinstance(state, Mapping) or state.get("kind") not in KINDS:
        raise PlanError(f"a rule of the plan is {state!r}", f"its kind must be one of {', '.join(KINDS)}")
    made = KINDS[state["kind"]]
    fields = {field.name: field.type for field in dataclasses.fields(made)}
    given = {name: value for name, value in state.items() if name != "kind"}
    if set(given) != set(fields):
        raise PlanError(
            f"rule '{state['kind']}' has fields {sorted(given)}", f"it must have {sorted(fields)}"
        )
    for name, value in given.items():
        kind = {"int": int, "float": float}.get(str(fields[name]), list)
        if type(value) is not kind:
            raise PlanError(f"{name} of rule '{state['kind']}' is {value!r}", "the plan is damaged")
    return made(**given)


def _lists(value: Any) -> Any:
    return [_lists(each) for each in value] if isinstance(value, tuple) else value


def _between(name: str, value: float, low: float, high: float, *, closed: bool = False) -> None:
    inside = isinstance(value, int | float) and not isinstance(value, bool)
    inside = inside and (low <= value <= high if closed else low < value < high)
    if not inside:
        edge = f"[{low:g}, {high:g}]" if closed else f"({low:g}, {high:g})"
        raise PlanError(f"{name} of a rule is {value!r}, must lie in {edge}", "correct it")


def _count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(f"{name} of a rule is {value!r}, must be a whole number >= 1", "correct it")
