"""From layers and policy to a step plan whose ε is known before the first step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

from lamina.allocate.declare import declare, known, paces
from lamina.allocate.problem import Allocate, Allocation, Problem
from lamina.allocate.registry import DEFAULT, allocation
from lamina.errors import PlanError
from lamina.plan import (
    Clipping,
    FollowBudget,
    FollowQuantile,
    LayerStack,
    PlannedClass,
    PlannedLayer,
    Policy,
    StepPlan,
    rescale,
)
from lamina.plan.opened import opened_sizes
from lamina.plan.reach import Reach
from lamina.sensitivity.measurement import Measure


def make_plan(
    stack: LayerStack,
    policy: Policy,
    *,
    batch: int | Mapping[str, int],
    steps: int | None = None,
    epochs: float | None = None,
    allocate: str | Allocate = DEFAULT,
    epsilon: float | Mapping[str, float] | None = None,
    rho: float | Mapping[str, float] | None = None,
    clipping: Clipping | str | None = None,
    measure: Measure | None = None,
) -> StepPlan:
    """The plan that spends at most what the policy allows, and no less than it must.

    batch     expected contributions per step: one number, shared out in proportion to the populations, or
              one per class (0 leaves a class out). q_k = b_k/N_k; B = Σ b_k
    steps     how many steps; or epochs: steps = ⌈epochs · ΣN_k / Σb_k⌉
    allocate  how C and S are chosen: a name of `lamina.allocate.ALLOCATIONS`, a policy with options of its own
              (`lamina.allocate.LADP(…)`), or a function of a Problem
    epsilon   ε to spend, for all private classes or by name; at most the policy's bound, which is the default
    rho       or ρ, a zCDP budget: every step then takes ρ/T exactly, nothing is credited to sampling
    clipping  "box" or "joint", instead of the form that the allocation prefers
    measure   what is known of the layers from proxy data (`lamina.measure`), for policies that need it

    sigma_k is calibrated to ε_k for q_k and the steps, on the safe side, together with whatever else the allocation
    releases; then S is scaled so that every class has at least its sigma_k.
    """
    return explained_plan(
        stack,
        policy,
        batch=batch,
        steps=steps,
        epochs=epochs,
        allocate=allocate,
        epsilon=epsilon,
        rho=rho,
        clipping=clipping,
        measure=measure,
    )[0]


def explained_plan(
    stack: LayerStack,
    policy: Policy,
    *,
    batch: int | Mapping[str, int],
    steps: int | None = None,
    epochs: float | None = None,
    allocate: str | Allocate = DEFAULT,
    epsilon: float | Mapping[str, float] | None = None,
    rho: float | Mapping[str, float] | None = None,
    clipping: Clipping | str | None = None,
    measure: Measure | None = None,
) -> tuple[StepPlan, Allocation]:
    """`make_plan`, and the allocation behind it with its reasons."""
    if not isinstance(stack, LayerStack):
        raise PlanError(
            "allocate.stack", f"stack is a {type(stack).__name__}", "use lamina.LayerStack.from_model(model)"
        )
    if not isinstance(policy, Policy):
        raise PlanError(
            "allocate.policy", f"policy is a {type(policy).__name__}", "use lamina.Policy.load('policy.toml')"
        )
    sizes = _batches(policy, batch)
    total, population = sum(sizes.values()), sum(_population(policy, name) for name in sizes)
    count = _steps(steps, epochs, Fraction(population) / total)
    if measure is not None:
        if not isinstance(measure, Measure):
            raise PlanError(
                "allocate.measure",
                f"measure is a {type(measure).__name__}",
                "give lamina.Measure.load(path) or lamina.measure(model, …)",
            )
        measure.check(stack)
    chooser = allocation(allocate)
    rates = {name: float(size / _population(policy, name)) for name, size in sizes.items()}
    declared = declare(policy, rates, count, epsilon=epsilon, rho=rho, chooser=chooser)
    reaches = {name: _reach(policy, name, stack) for name in sizes}
    slices = tuple(part for name, reach in reaches.items() for part in reach.slices(name))
    numbers = opened_sizes(stack, {name: r.layers for name, r in reaches.items()}, slices, stack.shapes)
    problem = Problem(
        sizes=numbers,
        weights=tuple(map(float, numbers)),
        reach=tuple(reach.layers for reach in reaches.values()),
        clip_norm=tuple(policy.classes[name].clip_norm for name in sizes),
        sigma=declared.sigma,
        layers=tuple(layer.name for layer in stack),
        classes=tuple(sizes),
        stack=stack,
        measure=measure,
        steps=count,
        rates=tuple(rates.values()),
        delta=tuple(0.0 if policy.classes[name].public else policy.corpus.delta for name in sizes),
        targets=declared.targets,
        batch=float(total),
        rho=declared.rho,
        factors=tuple(reach.factors for reach in reaches.values()),
    )
    chosen = chooser(problem)
    _respects_reach(problem, chosen, list(sizes), stack)
    chosen = replace(chosen, clip=problem.weighed(chosen.clip))
    rules = tuple(chosen.rules)
    if declared.order is not None:
        pace = paces(declared, rates.values())
        rules = tuple(_paced(r, declared.order, pace) if isinstance(r, FollowBudget) else r for r in rules)
    form = Clipping.ELEMENTWISE if chosen.clipping is Clipping.ELEMENTWISE else clipping or chosen.clipping
    _fits_profiles(reaches, chosen, form)
    plan = StepPlan(
        layers=tuple(
            PlannedLayer(name=layer.name, depth=layer.depth, parameters=layer.parameters, size=layer.size)
            for layer in stack
        ),
        classes=tuple(_planned(policy, name, rates[name], reaches[name]) for name in sizes),
        clip=chosen.clip,
        noise=chosen.noise if chosen.claimed else _owed(chosen, declared.sigma),
        batch=1.0 if form is Clipping.ELEMENTWISE else float(total) * chosen.divide,
        steps=count,
        clipping=form,  # type: ignore[arg-type]  # the plan reads text
        accountant="gaussian" if chosen.claimed else declared.accountant,
        allocation=str(getattr(chooser, "name", None) or getattr(chooser, "__name__", "function")),
        rules=rules,
        injection=policy.noise.enters,
        slices=slices,
        claimed=chosen.claimed,
    )
    return _within_norms(plan, problem), chosen


def _within_norms(plan: StepPlan, problem: Problem) -> StepPlan:
    """C and S times the factor for which no clipped gradient is longer than its class's clip norm; sigma stays.

    A joint clip bounds (g_l/S_l)_l: where S differs between layers, all of it may fall on the layer with the largest S,
    which is more than ‖C[k]‖. Whoever signed the clip norm of the class would be scaled for it, under the same noise.
    With rules S moves, and the engine holds every contribution to its own ceiling.
    """
    if plan.clipping is not Clipping.JOINT or plan.claimed or plan.rules:
        return plan
    factor = min((problem.clip_norm[k] / plan.norm(k) for k in problem.private), default=1.0)
    if factor >= 1 - 1e-9:
        return plan
    clip = tuple(tuple(c * factor for c in row) for row in plan.clip)
    noise = rescale(clip, [s * factor for s in plan.noise], problem.sigma)
    return replace(plan, clip=clip, noise=noise)


def _reach(policy: Policy, name: str, stack: LayerStack) -> Reach:
    """What the class reaches; a refusal names the class."""
    try:
        return policy.classes[name].profile.reach(stack)
    except PlanError as error:
        raise PlanError("allocate.class", f"class {name!r}: {error.problem}", error.remedy) from error


def _fits_profiles(reaches: Mapping[str, Reach], chosen: Allocation, form: Clipping | str) -> None:
    """Refuse weights that clipping would not keep to, and slices in what a document does not know them in."""
    for (name, reach), row in zip(reaches.items(), chosen.clip, strict=True):
        weighed = any(factor != 1 for factor in reach.factors)
        if weighed and any(map(math.isinf, row)):
            raise PlanError(
                "allocate.profile-class-weighs",
                f"the profile of class {name!r} weighs its layers, and the class is public, so not clipped",
                "leave the weights out, or the layers",
            )
        if weighed and form in (Clipping.JOINT, Clipping.JOINT.value):
            raise PlanError(
                "allocate.profile-class-weighs-layers",
                f"the profile of class {name!r} weighs its layers, and joint clipping bounds them together: a layer "
                "could take what another leaves",
                "use clipping='box' (--clipping box)",
            )
        if chosen.claimed and (weighed or reach.openings):
            raise PlanError(
                "allocate.profile-class-weights",
                f"the profile of class {name!r} has weights, or parts of layers, which a printed method does not know",
                "use whole layers, or another allocation",
            )


def _paced(rule: FollowBudget, order: float, pace: tuple[float, float]) -> FollowBudget:
    """The rule at the plan's order, within the factors at which a step costs half to twice the declared price."""
    return replace(rule, order=order, least=max(rule.least, pace[0]), most=min(rule.most, pace[1]))


def _owed(chosen: Allocation, sigma: tuple[float, ...]) -> tuple[float, ...]:
    """S of the allocation's shape, so large that every class has its sigma, noised counts included."""
    counted = next((rule for rule in chosen.rules if isinstance(rule, FollowQuantile)), None)
    bits = [
        0.0 if counted is None else math.sqrt(sum(c > 0 for c in row)) / (2.0 * counted.noise)
        for row in chosen.clip
    ]
    return rescale(chosen.clip, chosen.noise, sigma, bits)


def _planned(policy: Policy, name: str, rate: float, reach: Reach) -> PlannedClass:
    entry = policy.classes[name]
    return PlannedClass(
        name=name,
        population=entry.population,
        sampling_rate=rate,
        public=entry.public,
        delta=0.0 if entry.public else policy.corpus.delta,
        unit=entry.unit,
        profile=reach.words,
        purposes=entry.purposes,
    )


def _population(policy: Policy, name: str) -> int:
    population = policy.classes[name].population
    if population is None:
        raise PlanError(
            "allocate.class-no-population",
            f"class {name!r} has no population, so its sampling rate is unknown",
            f"add population to [class.{name}], or leave it out with batch={{{name!r}: 0, …}}",
        )
    return population


def _batches(policy: Policy, batch: int | Mapping[str, int]) -> dict[str, Fraction]:
    """Expected contributions per step of each class that takes part, exactly."""
    if isinstance(batch, Mapping):
        known(policy, batch, "batch")
        missing = [name for name in policy.classes if name not in batch]
        if missing:
            raise PlanError(
                "allocate.batch-names-no",
                f"batch names no size for class {missing[0]!r}",
                "give every class one; 0 leaves a class out",
            )
        given = {name: _whole(batch[name], f"batch of class {name!r}", least=0) for name in policy.classes}
        sizes = {name: Fraction(size) for name, size in given.items() if size}
        if not sizes:
            raise PlanError(
                "allocate.batch-every-class", "batch is 0 for every class", "give one class a size at least"
            )
    else:
        whole = _whole(batch, "batch", least=1)
        population = sum(_population(policy, name) for name in policy.classes)
        sizes = {name: Fraction(whole * _population(policy, name), population) for name in policy.classes}
    for name, size in sizes.items():
        most = _population(policy, name)
        if size > most:
            raise PlanError(
                "allocate.batch-class-above",
                f"batch of class {name!r} is {float(size):g}, above its population of {most}",
                "lower the batch: q = batch / population must not exceed 1",
            )
    return sizes


def _steps(steps: int | None, epochs: float | None, epoch: Fraction) -> int:
    """The number of steps; one epoch is Σ N_k / Σ b_k of them."""
    if (steps is None) == (epochs is None):
        raise PlanError(
            "allocate.steps-epochs",
            f"steps is {steps!r} and epochs is {epochs!r}",
            "give exactly one of them",
        )
    if steps is not None:
        return _whole(steps, "steps", least=1)
    if isinstance(epochs, bool) or not isinstance(epochs, int | float) or not 0 < epochs < math.inf:
        raise PlanError(
            "allocate.epochs-finite-number",
            f"epochs is {epochs!r}, must be a finite number > 0",
            "say how long it trains",
        )
    return math.ceil(Fraction(epochs).limit_denominator(1_000_000) * epoch) or 1


def _respects_reach(problem: Problem, chosen: Allocation, names: list[str], stack: LayerStack) -> None:
    """An allocation may shape C and S, never widen what a class reaches."""
    shape = [len(row) for row in problem.reach]
    if [len(row) for row in chosen.clip] != shape or len(chosen.noise) != len(stack):
        raise PlanError(
            "allocate.allocation-wrong-shape",
            "the allocation's C or S has the wrong shape",
            f"C must be {len(shape)} × {len(stack)}",
        )
    for name, allowed, row in zip(names, problem.reach, chosen.clip, strict=True):
        for layer, may, c in zip(stack, allowed, row, strict=True):
            if c != 0 and not may:
                raise PlanError(
                    "allocate.allocation-gives-class",
                    f"the allocation gives class {name!r} the threshold {c!r} at layer {layer.name!r}, which "
                    "its profile excludes",
                    "use 0 where Problem.reach is False",
                )


def _whole(value: int, what: str, *, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise PlanError(
            "allocate.whole-number", f"{what} is {value!r}, must be a whole number >= {least}", "correct it"
        )
    return value
