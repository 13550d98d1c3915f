"""The state of an adaptation, read back: every number in it is one that the plan's own rules could have left."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from lamina.errors import EngineError
from lamina.plan.limits import shown
from lamina.plan.rules import Choose, FollowBudget, FollowQuantile
from lamina.plan.step import StepPlan


def not_mine(why: str) -> EngineError:
    return EngineError(
        "engine.state-adaptation",
        f"the state of the adaptation {why}",
        "give what to_state() of the same plan said",
    )


def check_state(state: Mapping[str, Any], mine: Mapping[str, Any], plan: StepPlan) -> None:
    """Refuse a state whose values are not of the kind, the number and the range of `mine`, a state of the same plan.

    Whether C and S keep what was declared, and what the energy is, is for the caller to ask.
    """
    if not _is_list(state["clip"], len(mine["clip"]), lambda row: _is_list(row, len(plan.layers), _finite)):
        raise not_mine(f"has other layers or classes: clip {shown(state['clip'])}")
    for name in ("noise", "base", "drift"):
        if not _is_list(state[name], len(mine[name]), _finite):
            raise not_mine(f"has other layers, or what is no number: {name} {shown(state[name])}")
    if any(share < 0 for share in state["base"]) or (
        state["base"] and not abs(sum(state["base"]) - 1.0) <= 1e-9
    ):
        raise not_mine(f"has shares {shown(state['base'])}, which are not those of one budget")
    if any(d <= 0 for d in state["drift"]):
        raise not_mine(f"has drift {shown(state['drift'])}, must be > 0")
    _check_factors(state, plan.rule(FollowBudget))
    counted = 0 if plan.rule(FollowQuantile) is None else len(plan.layers)
    if state["counts"] != [] and not (counted and _is_list(state["counts"], counted, _number)):
        raise not_mine(f"has counts {shown(state['counts'])}, must be none or one for each layer")
    _check_choice(state, plan)
    if "pace" in mine:
        _check_pace(state["pace"])


def _check_factors(state: Mapping[str, Any], rule: FollowBudget | None) -> None:
    least, most = (1.0, 1.0) if rule is None else (rule.least, rule.most)
    for name in ("factor", "proposed"):
        if not _finite(state[name]) or not least <= state[name] <= most:
            raise not_mine(f"has {name} {shown(state[name])}, must lie in [{least:g}, {most:g}]")


def _check_choice(state: Mapping[str, Any], plan: StepPlan) -> None:
    chosen, choice, rule = state["chosen"], state["choice"], plan.rule(Choose)
    last = -1 if rule is None else plan.steps - 1
    if type(chosen) is not int or not -1 <= chosen <= last:
        raise not_mine(f"has a choice before step {shown(chosen)}, must lie in [-1, {last}]")
    if not isinstance(choice, str) or choice not in ("", *(() if rule is None else rule.names)):
        raise not_mine(f"has choice {shown(choice)}, which is no candidate")


def _check_pace(pace: Any) -> None:
    if not isinstance(pace, Mapping) or set(pace) != {"seen", "reference"}:
        raise not_mine(f"has pace {shown(pace)}")
    seen, reference = pace["seen"], pace["reference"]
    if type(seen) is not int or seen < 0 or not _finite(reference) or reference < 0:
        raise not_mine(f"has pace {shown(pace)}, must be a count and a number >= 0")


def _is_list(value: Any, length: int, each: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple) and len(value) == length and all(map(each, value))


def _number(value: Any) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) < 2**53)


def _finite(value: Any) -> bool:
    return _number(value) and math.isfinite(value)
