"""How a plan may change while it runs: rules of plain numbers, public and fixed before the first step.

A rule moves C and S between layers on the strength of what was already noised (free), or of a release of its own that
the plan pays for. What a rule can never do is lower a class's sigma below what the plan declares, except under a
filter that was asked first (`FollowBudget`). docs/theory.md, "When the plan changes during training".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lamina.account import choice_multiplier
from lamina.account.renyi import ORDERS
from lamina.errors import AccountingError, PlanError
from lamina.plan.limits import LEAST, MOST, shown


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
    noise    S of each candidate, up to a common factor: 0 or within [1e-20, 1e20]
    price    λ of  u(a) = Σ_i s_i(a) − λ·noise(a): how many kept contributions a unit of relative noise is worth

    s_i(a) ∈ [0, 1] is how much of contribution i the clip of candidate a would keep, over a Poisson draw of its own.
    """

    epsilon: float
    every: int
    names: tuple[str, ...]
    noise: tuple[tuple[float, ...], ...]
    price: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", _names(self.names))
        object.__setattr__(self, "noise", _rows(self.noise))
        try:
            choice_multiplier(self.epsilon)
        except AccountingError as error:
            raise PlanError("plan.post-init", error.problem, error.remedy) from error
        _count("every", self.every)
        _between("price", self.price, 0.0, 1e12, closed=True)
        if len(self.names) != len(self.noise) or len(set(self.names)) != len(self.names) or not self.names:
            raise PlanError(
                "plan.choice-names-candidates",
                f"a choice has {len(self.names)} names for {len(self.noise)} candidates",
                "give every candidate one name of its own",
            )

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
        if (
            self.order not in ORDERS
        ):  # so that budgets at several orders add up, and more of them never cost less
            nearest = min(ORDERS, key=lambda each: abs(each - self.order))
            raise PlanError(
                "plan.order-rule-those",
                f"order of a rule is {self.order!r}, must be one of those that RDP is computed at",
                f"the nearest one is {nearest:g}",
            )
        _between("least", self.least, 0.1, 1.0, closed=True)
        _between("most", self.most, 1.0, 10.0, closed=True)

    @property
    def accountant(self) -> str:
        """The accountant that such a plan is priced by."""
        return f"rdp@{self.order:g}"


_MOST_STEPS = 2**53 - 1  # whole numbers that every codec carries
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
    kind = state.get("kind") if isinstance(state, Mapping) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise PlanError(
            "plan.rule-plan",
            f"a rule of the plan is {shown(state)}",
            f"its kind must be one of {', '.join(KINDS)}",
        )
    made = KINDS[kind]
    fields = {field.name: field.type for field in dataclasses.fields(made)}
    given = {name: value for name, value in state.items() if name != "kind"}
    if set(given) != set(fields):
        raise PlanError(
            "plan.rule-fields",
            f"rule '{kind}' has fields {shown(sorted(map(shown, given)))}",
            f"it must have {sorted(fields)}",
        )
    for name, value in given.items():
        word, fits = _PLAIN[str(fields[name])]
        if not fits(value):
            raise PlanError(
                "plan.rule",
                f"{name} of rule '{kind}' is {shown(value)}, must be {word}",
                "the plan is damaged: make it again",
            )
    return made(**given)


def _is_list_of(value: Any, each: Callable[[Any], bool]) -> bool:
    return type(value) is list and all(map(each, value))


_PLAIN: dict[str, tuple[str, Callable[[Any], bool]]] = {  # by a field's type: what it is read from
    "int": ("a whole number", lambda value: type(value) is int),
    "float": ("a floating-point number", lambda value: type(value) is float),
    "tuple[str, ...]": (
        "a list of texts",
        lambda value: _is_list_of(value, lambda name: type(name) is str),
    ),
    "tuple[tuple[float, ...], ...]": (
        "a list of lists of floating-point numbers",
        lambda value: _is_list_of(value, lambda row: _is_list_of(row, lambda s: type(s) is float)),
    ),
}


def _lists(value: Any) -> Any:
    return [_lists(each) for each in value] if isinstance(value, tuple) else value


def _names(given: Any) -> tuple[str, ...]:
    if not isinstance(given, tuple | list) or any(not isinstance(name, str) or not name for name in given):
        raise PlanError(
            "plan.names-choice",
            f"names of a choice are {shown(given)}",
            "give every candidate a name, not empty",
        )
    return tuple(given)


def _rows(given: Any) -> tuple[tuple[float, ...], ...]:
    if not isinstance(given, tuple | list) or not all(isinstance(row, tuple | list) for row in given):
        raise PlanError(
            "plan.noise-choice",
            f"noise of a choice is {shown(given)}",
            "give a row of numbers for every candidate",
        )
    for s in (s for row in given for s in row):
        number = isinstance(s, int | float) and not isinstance(s, bool)
        if not number or not (s == 0 or LEAST <= s <= MOST):
            raise PlanError(
                "plan.candidate-choice-noise",
                f"a candidate of a choice has noise {shown(s)}, must be 0 or lie in [{LEAST:g}, {MOST:g}]",
                "scale the row: only its shape matters",
            )
    return tuple(tuple(float(s) for s in row) for row in given)


def _between(name: str, value: float, low: float, high: float, *, closed: bool = False) -> None:
    inside = isinstance(value, int | float) and not isinstance(value, bool)
    inside = inside and (low <= value <= high if closed else low < value < high)
    if not inside:
        edge = f"[{low:g}, {high:g}]" if closed else f"({low:g}, {high:g})"
        raise PlanError(
            "plan.rule-lie", f"{name} of a rule is {shown(value)}, must lie in {edge}", "correct it"
        )


def _count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST_STEPS:
        raise PlanError(
            "plan.rule-whole-number",
            f"{name} of a rule is {shown(value)}, must be a whole number >= 1 (and below 2^53)",
            "correct it",
        )
