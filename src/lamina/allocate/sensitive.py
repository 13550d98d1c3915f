"""Which layers LADP calls sensitive: named, by depth, by a predicate, or by proxy Fisher information."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from lamina.allocate.options import measured
from lamina.allocate.problem import Problem
from lamina.errors import PlanError
from lamina.plan import DepthProfile, Layer

Sensitive = DepthProfile | Sequence[str | int] | Callable[[Layer], bool]


def check_sensitive(policy: str, sensitive: object) -> None:
    """Refuse what names no layers."""
    if sensitive is None or isinstance(sensitive, DepthProfile | str) or callable(sensitive):
        return
    if isinstance(sensitive, Sequence) and sensitive:
        return
    raise PlanError(
        "allocate.sensitive",
        f"sensitive of {policy} is {sensitive!r}",
        "give names or patterns of layers, a DepthProfile, a function of a Layer, or leave it out",
    )


def sensitive_layers(
    problem: Problem, sensitive: Sensitive | None, share: float, policy: str
) -> tuple[tuple[bool, ...], str]:
    """Which layers are sensitive, and the sentence that says why.

    Without a choice of the user's: the ⌈share·L⌉ layers of most Fisher information on the proxy; without a
    measurement the top `share` of the depth (at least the last layer).
    """
    if sensitive is not None:
        picked, because = _chosen(problem, sensitive, policy)
    elif problem.measure is not None:
        information = measured(problem, "fisher", policy)
        count = math.ceil(share * len(information))
        top = set(np.argsort(-information, kind="stable")[:count].tolist())
        picked = tuple(i in top for i in range(len(information)))
        because = (
            f"they have the most Fisher information on the proxy ({problem.measure.proxy}), "
            f"{100 * information[sorted(top)].sum() / information.sum():.0f} % of all"
        )
    else:
        picked = _deepest(problem, share)
        because = f"they are the top {100 * share:g} % of the depth, and nothing was measured"
    names = [name for name, is_sensitive in zip(problem.layers, picked, strict=True) if is_sensitive]
    listed = ", ".join(names) if len(names) <= 8 else f"{', '.join(names[:7])} and {len(names) - 7} more"
    return picked, f"Sensitive layers: {listed or 'none'}, because {because}."


def _chosen(problem: Problem, sensitive: Sensitive, policy: str) -> tuple[tuple[bool, ...], str]:
    if problem.stack is None:
        raise PlanError(
            "allocate.told-layers-sensitive",
            f"{policy} is told which layers are sensitive, but knows no stack",
            "use make_plan",
        )
    if isinstance(sensitive, DepthProfile):
        return sensitive.resolve(problem.stack), f"the profile '{sensitive}' names them"
    if callable(sensitive):
        called = getattr(sensitive, "__name__", "predicate")
        picked = tuple(_asked(sensitive, called, layer, policy) for layer in problem.stack)
        return picked, f"the rule '{called}' picks them"
    return DepthProfile.layers(sensitive).resolve(problem.stack), "the plan names them"


def _asked(sensitive: Callable[[Layer], bool], called: str, layer: Layer, policy: str) -> bool:
    remedy = "give a function that returns True or False for every Layer (its name, depth, size, …)"
    try:
        answer = sensitive(layer)
    except Exception as error:
        raise PlanError(
            "allocate.sensitive-raised-layer",
            f"sensitive of {policy} ('{called}') raised {type(error).__name__} at layer {layer.name!r}: {error}",
            remedy,
        ) from error
    if not isinstance(answer, bool | np.bool_):
        raise PlanError(
            "allocate.sensitive-layer",
            f"sensitive of {policy} ('{called}') is a {type(answer).__name__} at layer {layer.name!r}",
            remedy,
        )
    return bool(answer)


def _deepest(problem: Problem, share: float) -> tuple[bool, ...]:
    if problem.stack is not None:
        found = DepthProfile.top(share).resolve(problem.stack, allow_empty=True)
        if any(found):
            return found
    layers = len(problem.sizes)
    return tuple(i >= layers - math.ceil(share * layers) for i in range(layers))
