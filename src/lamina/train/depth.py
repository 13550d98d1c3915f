"""Whether a plan keeps to the depth profiles of the policy of its corpus: by what it does, not by its words."""

from __future__ import annotations

from torch import nn

from lamina.errors import PlanError, RunError
from lamina.plan import LayerStack, Policy, StepPlan
from lamina.plan.reach import Reach
from lamina.plan.slices import outside

NOT_COMPARED = (
    "the plan's layers were read with options of their own (an order, groups, heads), so that their depth could not be "
    "held against the policy again"
)


def check_depth(model: nn.Module, policy: Policy | None, plan: StepPlan) -> str | None:
    """Refuse a plan in which a class moves what its profile excludes.

    Returns a note where that cannot be seen from model and policy alone.
    """
    if policy is None:
        return None
    stack = LayerStack.from_model(model)
    layer_of = {name: i for i, layer in enumerate(stack) for name in layer.parameters}
    same = {layer.parameters: layer.depth for layer in stack}
    compared = all(same.get(layer.parameters, layer.depth) == layer.depth for layer in plan.layers)
    for k, entry in enumerate(plan.classes):
        profile = policy.classes[entry.name].profile if entry.name in policy.classes else None
        if profile is None or profile.whole:
            continue
        try:
            reach = profile.reach(stack)
        except PlanError:
            compared = False
            continue
        if compared:
            _check_class(plan, k, reach, layer_of)
    return None if compared else NOT_COMPARED


def _check_class(plan: StepPlan, k: int, reach: Reach, layer_of: dict[str, int]) -> None:
    open_places = {part.tensor: part for part in reach.openings}
    for i, layer in enumerate(plan.layers):
        for name in layer.parameters if plan.clip[k][i] > 0 else ():
            mine, allowed = plan.slice(k, name), open_places.get(name)
            if not reach.layers[layer_of[name]]:
                free = mine is not None and not mine.ranges
            elif allowed is None:
                free = True
            else:
                closed = outside(allowed.ranges, allowed.length)
                free = mine is not None and not any(
                    first < b and a < stop for first, stop in mine.ranges for a, b in closed
                )
            if not free:
                raise RunError(
                    "train.class-moves-plan",
                    f"class {plan.classes[k].name!r} moves {name!r} in the plan, outside of its profile in the policy "
                    f"({reach.words})",
                    "make the plan under the policy that the data was admitted under",
                )
