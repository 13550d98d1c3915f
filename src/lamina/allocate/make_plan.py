"""From layers and policy to a step plan whose ε is known before the first step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

from lamina.account import calibrate
from lamina.allocate.problem import Allocate, Allocation, Problem
from lamina.allocate.registry import allocation
from lamina.errors import PlanError
from lamina.plan import Clipping, LayerStack, PlannedClass, PlannedLayer, Policy, StepPlan, rescale


def make_plan(
    stack: LayerStack,
    policy: Policy,
    *,
    batch: int | Mapping[str, int],
    steps: int | None = None,
    epochs: float | None = None,
    allocate: str | Allocate = "pareto",
    epsilon: float | Mapping[str, float] | None = None,
    clipping: Clipping | str | None = None,
) -> StepPlan:
    """The plan that spends at most what the policy allows, and no less than it must.

    batch     expected contributions per step: one number, shared out in proportion to the populations, or
              one per class (0 leaves a class out). q_k = b_k/N_k; B = Σ b_k
    steps     how many steps; or epochs: steps = ⌈epochs · ΣN_k / Σb_k⌉
    allocate  how C and S are chosen: "flat", "uniform", "pareto", or a function of a Problem
    epsilon   ε to spend, for all private classes or by name; at most the policy's bound, which is the default
    clipping  "box" or "joint", instead of the form that the allocation prefers

    sigma_k is calibrated to ε_k for q_k and the steps, on the safe side; then S is scaled so that every
    class has at least its sigma_k.
    """
    if not isinstance(stack, LayerStack):
        raise PlanError(f"stack is a {type(stack).__name__}", "use lamina.LayerStack.from_model(model)")
    if not isinstance(policy, Policy):
        raise PlanError(f"policy is a {type(policy).__name__}", "use lamina.Policy.load('policy.toml')")
    sizes = _batches(policy, batch)
    total, population = sum(sizes.values()), sum(_population(policy, name) for name in sizes)
    count = _steps(steps, epochs, Fraction(population) / total)
    targets = _targets(policy, list(sizes), epsilon)
    reach = tuple(policy.classes[name].profile.resolve(stack) for name in sizes)
    rates = {name: float(size / _population(policy, name)) for name, size in sizes.items()}
    corpus = policy.corpus
    sigma = tuple(
        calibrate(targets[name], delta=corpus.delta, q=rates[name], steps=count, accountant=corpus.accountant)
        if name in targets
        else math.inf
        for name in sizes
    )
    problem = Problem(
        sizes=tuple(layer.size for layer in stack),
        weights=tuple(float(layer.size) for layer in stack),
        reach=reach,
        clip_norm=tuple(policy.classes[name].clip_norm for name in sizes),
        sigma=sigma,
    )
    chosen = (allocation(allocate) if isinstance(allocate, str) else allocate)(problem)
    _respects_reach(problem, chosen, list(sizes), stack)
    return StepPlan(
        layers=tuple(
            PlannedLayer(name=layer.name, depth=layer.depth, parameters=layer.parameters, size=layer.size)
            for layer in stack
        ),
        classes=tuple(_planned(policy, name, rates[name]) for name in sizes),
        clip=chosen.clip,
        noise=rescale(chosen.clip, chosen.noise, sigma),
        batch=float(total),
        steps=count,
        clipping=chosen.clipping if clipping is None else clipping,  # type: ignore[arg-type]  # the plan reads text
        accountant=corpus.accountant,
        allocation=allocate if isinstance(allocate, str) else getattr(allocate, "__name__", "function"),
    )


def _planned(policy: Policy, name: str, rate: float) -> PlannedClass:
    entry = policy.classes[name]
    return PlannedClass(
        name=name,
        population=entry.population,
        sampling_rate=rate,
        public=entry.public,
        delta=0.0 if entry.public else policy.corpus.delta,
        unit=entry.unit,
        profile=str(entry.profile),
        purposes=entry.purposes,
    )


def _population(policy: Policy, name: str) -> int:
    population = policy.classes[name].population
    if population is None:
        raise PlanError(
            f"class {name!r} has no population, so its sampling rate is unknown",
            f"add population to [class.{name}], or leave it out with batch={{{name!r}: 0, …}}",
        )
    return population


def _batches(policy: Policy, batch: int | Mapping[str, int]) -> dict[str, Fraction]:
    """Expected contributions per step of each class that takes part, exactly."""
    if isinstance(batch, Mapping):
        _known(policy, batch, "batch")
        missing = [name for name in policy.classes if name not in batch]
        if missing:
            raise PlanError(
                f"batch names no size for class {missing[0]!r}", "give every class one; 0 leaves a class out"
            )
        given = {name: _whole(batch[name], f"batch of class {name!r}", least=0) for name in policy.classes}
        sizes = {name: Fraction(size) for name, size in given.items() if size}
        if not sizes:
            raise PlanError("batch is 0 for every class", "give one class a size at least")
    else:
        whole = _whole(batch, "batch", least=1)
        population = sum(_population(policy, name) for name in policy.classes)
        sizes = {name: Fraction(whole * _population(policy, name), population) for name in policy.classes}
    for name, size in sizes.items():
        most = _population(policy, name)
        if size > most:
            raise PlanError(
                f"batch of class {name!r} is {float(size):g}, above its population of {most}",
                "lower the batch: q = batch / population must not exceed 1",
            )
    return sizes


def _steps(steps: int | None, epochs: float | None, epoch: Fraction) -> int:
    """The number of steps; one epoch is Σ N_k / Σ b_k of them."""
    if (steps is None) == (epochs is None):
        raise PlanError(f"steps is {steps!r} and epochs is {epochs!r}", "give exactly one of them")
    if steps is not None:
        return _whole(steps, "steps", least=1)
    if isinstance(epochs, bool) or not isinstance(epochs, int | float) or not 0 < epochs < math.inf:
        raise PlanError(f"epochs is {epochs!r}, must be a finite number > 0", "say how long it trains")
    return math.ceil(Fraction(epochs).limit_denominator(1_000_000) * epoch) or 1


def _targets(
    policy: Policy, names: list[str], epsilon: float | Mapping[str, float] | None
) -> dict[str, float]:
    """The ε that each private class is to spend, checked against the policy's bound."""
    private = [name for name in names if not policy.classes[name].public]
    asked: dict[str, float] = {}
    if isinstance(epsilon, Mapping):
        _known(policy, epsilon, "epsilon")
        for name in epsilon:
            if name not in private:
                raise PlanError(
                    f"epsilon is given for class {name!r}, which is public or left out", "drop it"
                )
        asked = dict(epsilon)
    elif epsilon is not None:
        asked = dict.fromkeys(private, epsilon)
    targets = {}
    for name in private:
        bound, entry = policy.bound(name), policy.classes[name]
        target = asked.get(name, bound if entry.epsilon or entry.noise_multiplier else None)
        if target is None:
            raise PlanError(
                f"class {name!r} has neither epsilon nor noise_multiplier",
                f"add one to [class.{name}], or give make_plan(epsilon={{{name!r}: 1.0}})",
            )
        if isinstance(target, bool) or not isinstance(target, int | float) or not 0 < target < math.inf:
            raise PlanError(f"epsilon of class {name!r} is {target!r}, must be finite and > 0", "correct it")
        if bound is not None and target > bound:
            raise PlanError(
                f"epsilon of class {name!r} is {target:g}, above the policy's bound of {bound:.6g}",
                "ask for less, or change the policy",
            )
        targets[name] = float(target)
    return targets


def _respects_reach(problem: Problem, chosen: Allocation, names: list[str], stack: LayerStack) -> None:
    """An allocation may shape C and S, never widen what a class reaches."""
    shape = [len(row) for row in problem.reach]
    if [len(row) for row in chosen.clip] != shape or len(chosen.noise) != len(stack):
        raise PlanError(
            "the allocation's C or S has the wrong shape", f"C must be {len(shape)} × {len(stack)}"
        )
    for name, allowed, row in zip(names, problem.reach, chosen.clip, strict=True):
        for layer, may, c in zip(stack, allowed, row, strict=True):
            if c != 0 and not may:
                raise PlanError(
                    f"the allocation gives class {name!r} the threshold {c!r} at layer {layer.name!r}, which "
                    "its profile excludes",
                    "use 0 where Problem.reach is False",
                )


def _known(policy: Policy, names: Mapping[str, float], what: str) -> None:
    for name in names:
        if name not in policy.classes:
            raise PlanError(
                f"{what} names class {name!r}, which the policy does not have",
                f"its classes are {', '.join(policy.classes)}",
            )


def _whole(value: int, what: str, *, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise PlanError(f"{what} is {value!r}, must be a whole number >= {least}", "correct it")
    return value
