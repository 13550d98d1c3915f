"""What makes a step plan meaningful: checked once, where it is made."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from lamina.account import order_of
from lamina.errors import PlanError
from lamina.plan.limits import LEAST as LEAST
from lamina.plan.limits import MOST as MOST
from lamina.plan.rules import Choose, FollowBudget, FollowQuantile

if TYPE_CHECKING:
    from lamina.plan.step import PlannedClass, PlannedLayer, StepPlan


def check_layer(layer: PlannedLayer) -> None:
    """A layer has a name, a depth in [0, 1], tensors and a size."""
    if not layer.name or not layer.parameters:
        raise PlanError(
            "plan.layer-tensors",
            f"layer {layer.name!r} has tensors {layer.parameters!r}",
            "give it a name and tensors",
        )
    if not 0 <= layer.depth <= 1:
        raise PlanError(
            "plan.layer-depth",
            f"layer {layer.name!r} has depth {layer.depth!r}, must be in [0, 1]",
            "0 is the input",
        )
    if layer.size < 1:
        raise PlanError(
            "plan.layer-size",
            f"layer {layer.name!r} has size {layer.size!r}, must be >= 1",
            "leave empty layers out",
        )


def check_class(entry: PlannedClass) -> None:
    """A class has a name, a sampling rate in (0, 1] and, unless public, a δ in (0, 1)."""
    who = f"class {entry.name!r}"
    if not entry.name or not entry.unit:
        raise PlanError("plan.unit", f"{who} has unit {entry.unit!r}", "give it a name and a unit")
    if "@" in entry.name:
        raise PlanError(
            "plan.name", f"{who} has '@' in its name", "'@' names a signed bound of a class: CLASS@BOUND"
        )
    if not 0 < entry.sampling_rate <= 1:
        raise PlanError(
            "plan.sampling-rate",
            f"{who} has sampling rate {entry.sampling_rate!r}, must be in (0, 1]",
            "it is batch / population",
        )
    if entry.population is not None and entry.population < 1:
        raise PlanError(
            "plan.population", f"{who} has population {entry.population!r}, must be >= 1", "declare its size"
        )
    if entry.public and entry.delta != 0:
        raise PlanError(
            "plan.public-delta", f"{who} is public with δ = {entry.delta!r}", "a public class has δ = 0"
        )
    if not entry.public and not 0 < entry.delta < 1:
        raise PlanError(
            "plan.delta",
            f"{who} has δ = {entry.delta!r}, must be in (0, 1)",
            "choose δ well below 1/population",
        )


def check_plan(plan: StepPlan) -> None:
    """Shapes, names, numbers, and no private class that moves a layer without noise."""
    if not plan.layers or not plan.classes:
        raise PlanError(
            "plan.plan-no-layers", "the plan has no layers or no classes", "give it one of each at least"
        )
    _unique("layer", (layer.name for layer in plan.layers))
    _unique("class", (entry.name for entry in plan.classes))
    _unique("tensor", (name for layer in plan.layers for name in layer.parameters))
    shape = (len(plan.classes), len(plan.layers))
    if len(plan.clip) != shape[0] or any(len(row) != shape[1] for row in plan.clip):
        raise PlanError(
            "plan.clip-rows",
            f"clip has rows of {[len(row) for row in plan.clip]}",
            f"it must be {shape[0]} × {shape[1]}",
        )
    if len(plan.noise) != shape[1]:
        raise PlanError(
            "plan.noise-entries",
            f"noise has {len(plan.noise)} entries, must be {shape[1]}",
            "give one S per layer",
        )
    if not (math.isfinite(plan.batch) and plan.batch > 0):
        raise PlanError(
            "plan.batch-finite",
            f"batch is {plan.batch!r}, must be finite and > 0",
            "it divides the noised sum",
        )
    if isinstance(plan.steps, bool) or not isinstance(plan.steps, int) or plan.steps < 1:
        raise PlanError(
            "plan.steps-whole-number",
            f"steps is {plan.steps!r}, must be a whole number >= 1",
            "say how long it trains",
        )
    for layer, s in zip(plan.layers, plan.noise, strict=True):
        if not (math.isfinite(s) and s >= 0):
            raise PlanError(
                "plan.noise-layer-finite",
                f"noise of layer {layer.name!r} is {s!r}, must be finite and >= 0",
                "correct S",
            )
        if s > 0 and not (LEAST <= s <= MOST and LEAST <= s / plan.batch <= MOST):
            raise PlanError(
                "plan.noise-layer-divided",
                f"noise of layer {layer.name!r} is {s!r} (divided by batch: {s / plan.batch!r}), "
                f"must lie in [{LEAST}, {MOST}]: float32 would lose it",
                "scale C and S of every layer by the same factor",
            )
    for entry, row in zip(plan.classes, plan.clip, strict=True):
        for layer, c, s in zip(plan.layers, row, plan.noise, strict=True):
            _check_cell(entry, layer, c, s)
        sigma = plan.sigma(entry.name)
        if not sigma > 0:
            raise PlanError(
                "plan.class-sigma",
                f"class {entry.name!r} has sigma {sigma!r}, must be > 0",
                "raise S or lower C",
            )
        if math.isinf(sigma) and not entry.public and any(c > 0 for c in row):
            raise PlanError(
                "plan.class-reaches-layers",
                f"class {entry.name!r} reaches layers, but its sigma is infinite: C/S underflows",
                "lower S or raise C",
            )

    _check_rules(plan)
    _check_injection(plan)
    _check_slices(plan)


def _check_rules(plan: StepPlan) -> None:
    """Rules that fit the plan, and nothing that only a printed allocation may do."""
    if len({type(rule) for rule in plan.rules}) != len(plan.rules):
        raise PlanError("plan.plan-two-rules", "the plan has two rules of one kind", "keep one of them")
    form, printed = plan.clipping.value, plan.allocation.startswith("printed")
    if form == "elementwise" and (not printed or plan.batch != 1 or plan.rules):
        raise PlanError(
            "plan.elementwise-clipping-plan",
            f"elementwise clipping in a plan of allocation {plan.allocation!r}: it bounds no single contribution",
            "use box or joint; allocate='printed-ladp' reproduces the document",
        )
    if plan.claimed and (not printed or len(plan.claimed) != len(plan.classes)):
        raise PlanError(
            "plan.claimed", f"claimed is {plan.claimed}", "one ε per class, of a printed allocation only"
        )
    if plan.rule(FollowQuantile) is not None and form != "box":
        raise PlanError(
            "plan.thresholds-follow-quantile",
            f"thresholds follow a quantile under {form} clipping",
            "use clipping='box'",
        )
    choose, budget = plan.rule(Choose), plan.rule(FollowBudget)
    for row in choose.noise if choose is not None else ():
        if len(row) != len(plan.layers) or any(
            (s > 0) != (t > 0) for s, t in zip(row, plan.noise, strict=True)
        ):
            raise PlanError(
                "plan.candidate-noise-plan",
                "a candidate has noise where the plan has none, or none where it has",
                "correct it",
            )
    if budget is None and order_of(plan.accountant) is not None:
        raise PlanError(
            "plan.accountant-noise-follows",
            f"accountant {plan.accountant!r} is for noise that follows its budget, and the plan has no such rule",
            "use pld or rdp",
        )
    if budget is not None and plan.accountant != budget.accountant:
        raise PlanError(
            "plan.noise-follows-budget",
            f"noise that follows the budget is priced by {plan.accountant!r}, which does not hold for it",
            f"use accountant {budget.accountant!r}",
        )


def _check_injection(plan: StepPlan) -> None:
    """Where the noise enters fits what else the plan does."""
    form = plan.injection.form.value
    if (plan.claimed or plan.clipping.value == "elementwise") and form != "per_step":
        raise PlanError(
            "plan.noise-under-allocation",
            f"{form} noise under allocation {plan.allocation!r}, whose document adds it once per step",
            "use injection per_step",
        )
    if plan.injection.raw and plan.rules:
        raise PlanError(
            "plan.noise-plan-rule",
            f"{form} noise in a plan with the rule {type(plan.rules[0]).__name__}: its size tells who was sampled, and "
            "a rule is priced, or reads the noise, as if it did not",
            "use per_step, per_microbatch or per_sample; or an allocation without rules",
        )
    if plan.injection.raw and order_of(plan.accountant) is not None:
        raise PlanError(
            "plan.noise-priced", f"{form} noise is priced by {plan.accountant!r}", "use pld, zcdp or gaussian"
        )


def _check_slices(plan: StepPlan) -> None:
    """Each narrows a tensor of a layer that its class reaches, once, along one axis for all classes."""
    layer_of = {name: i for i, layer in enumerate(plan.layers) for name in layer.parameters}
    names = {entry.name: k for k, entry in enumerate(plan.classes)}
    axes: dict[str, tuple[int, int]] = {}
    _unique("slice", (f"{part.cls} {part.tensor}" for part in plan.slices))
    for part in plan.slices:
        where = f"slice of {part.tensor!r} for class {part.cls!r}"
        if part.cls not in names or part.tensor not in layer_of:
            raise PlanError(
                "plan.plan-no-class", f"{where}: the plan has no such class or tensor", "correct the name"
            )
        if not plan.clip[names[part.cls]][layer_of[part.tensor]] > 0:
            raise PlanError(
                "plan.class-not-reach",
                f"{where}: the class does not reach its layer",
                "leave the slice out, or let it reach",
            )
        if axes.setdefault(part.tensor, (part.axis, part.length)) != (part.axis, part.length):
            raise PlanError(
                "plan.axis-another-class",
                f"{where} has axis {part.axis}, another class's has {axes[part.tensor][0]}",
                "use one axis",
            )
    for k, entry in enumerate(plan.classes):
        for i, layer in enumerate(plan.layers):
            parts = [plan.slice(k, name) for name in layer.parameters] if plan.clip[k][i] > 0 else []
            if parts and all(part is not None and not part.ranges for part in parts):
                raise PlanError(
                    "plan.class-reaches-layer",
                    f"class {entry.name!r} reaches layer {layer.name!r}, and its slices leave nothing of it",
                    "set its threshold to 0 there",
                )


def _check_cell(entry: PlannedClass, layer: PlannedLayer, c: float, s: float) -> None:
    where = f"clip of class {entry.name!r} at layer {layer.name!r} is {c!r}"
    if entry.public:
        if c != 0 and c != math.inf:
            raise PlanError(
                "plan.class-public",
                f"{where}, but the class is public",
                "use inf where it reaches and 0 elsewhere",
            )
    elif not (math.isfinite(c) and c >= 0):
        raise PlanError(
            "plan.finite-declare",
            f"{where}, must be finite and >= 0",
            "declare the class public if it is owed no noise",
        )
    elif c > 0 and not LEAST <= c <= MOST:
        raise PlanError(
            "plan.lie",
            f"{where}, must be 0 or lie in [{LEAST}, {MOST}]",
            "float32 gradients cannot be clipped to it",
        )
    elif c > 0 and s == 0:
        raise PlanError(
            "plan.layer-no-noise",
            f"{where} and the layer has no noise (S = 0): its gradient would be released as it is",
            "give the layer S > 0, or C = 0 in every private class",
        )


def _unique(what: str, names: Iterable[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise PlanError(
            "plan.plan-once", f"{what} {twice[0]!r} is in the plan more than once", "name it once"
        )
