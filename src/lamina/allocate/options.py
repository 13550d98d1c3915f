"""Options of a policy, checked where it is made; what a policy needs from a measurement, checked where it is used."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from lamina.allocate.problem import Problem
from lamina.errors import PlanError
from lamina.plan import Clipping

Array = NDArray[np.float64]
_SHRINKS = {"norms": 0.5, "harm": 1.0, "fisher": 1.0}


def number(policy: str, option: str, value: float, low: float, high: float, *, closed: bool = False) -> None:
    """Refuse an option outside (low, high), or [low, high] if closed."""
    fits = isinstance(value, int | float) and not isinstance(value, bool)
    if not (fits and (low <= value <= high if closed else low < value < high)):
        interval = f"[{low:g}, {high:g}]" if closed else f"({low:g}, {high:g})"
        raise PlanError(
            "allocate.lie", f"{option} of {policy} is {value!r}, must lie in {interval}", "correct it"
        )


def whole(policy: str, option: str, value: int, least: int = 1) -> None:
    """Refuse an option that is not a whole number >= least."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise PlanError(
            "allocate.whole-number-correct",
            f"{option} of {policy} is {value!r}, must be a whole number >= {least}",
            "correct it",
        )


def one_of(policy: str, option: str, value: str, accepted: Iterable[str]) -> None:
    """Refuse an option that is none of these words."""
    words = list(accepted)
    if not isinstance(value, str) or value not in words:
        raise PlanError(
            "allocate.not-known",
            f"{option} of {policy} is {value!r}, which is not known",
            f"use {' or '.join(words)}",
        )


def form(policy: str, value: Clipping | str) -> Clipping:
    """The form of clipping that is meant: box or joint."""
    word = value.value if isinstance(value, Clipping) else value
    one_of(policy, "clipping", word, (Clipping.BOX.value, Clipping.JOINT.value))
    return Clipping(word)


def measured(problem: Problem, what: str, policy: str) -> Array:
    """A row of the measurement, one number > 0 per layer; refused if there is none, or one of another model.

    It was measured on whole layers: where slices leave a part of one out, norms shrink with its root, harm and Fisher
    information with it, as if all of its numbers were alike.
    """
    if problem.measure is None:
        raise PlanError(
            "allocate.needs-measure-layers",
            f"{policy} needs a measure of the layers (its `{what}`), and the plan has none",
            "`lamina plan --proxy gaussian --save-measure measure.json` makes one; give it as --measure FILE, as "
            "`measure` in a RUN.toml, or as make_plan(measure=lamina.measure(model, stack, …))",
        )
    row = np.asarray(getattr(problem.measure, what), dtype=np.float64)
    if not row.size:
        why = next(
            (note for note in problem.measure.notes if note.startswith("no Δ")), "it was measured without"
        )
        raise PlanError(
            "allocate.needs-layers-measure",
            f"{policy} needs `{what}` of the layers, and the measure has none: {why}",
            "use a policy that needs no Δ (pareto, proportional), or a model that can be followed to its last layer",
        )
    if row.shape != (len(problem.sizes),):
        raise PlanError(
            "allocate.measurement-layers-plan",
            f"the measurement has {what} for {row.size} layers, the plan has {len(problem.sizes)}",
            "measure the model that the plan is for",
        )
    return row * np.asarray(problem.opened) ** _SHRINKS.get(what, 0.0)


def harm(problem: Problem, kind: str, policy: str) -> Array:
    """m_l, the loss that a unit of noise variance costs: measured ("harm"), or the number of parameters ("sizes")."""
    if kind == "harm":
        return measured(problem, "harm", policy)
    return np.asarray(problem.weights, dtype=np.float64)
