"""`make_plan`: from layers, policy and allocation to a step plan whose ε is known before the first step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from lamina import validate
from lamina.account.accountants import calibrate, find_accountant
from lamina.account.filters import choose_order
from lamina.account.gaussian_rdp import step_rdp
from lamina.account.schedule import Event, bisect_float, event_counts
from lamina.allocate.basic import automatic, flat, lsab, pareto, proportional, quantile, uniform
from lamina.allocate.ladp import LADP, ladp
from lamina.allocate.measure.measure import Measure
from lamina.allocate.noise_kind import choose_noise_kind
from lamina.allocate.paper import paper_ladp, paper_lsab
from lamina.allocate.problem import Allocate, Allocation, AllocationProblem, Allocator, named
from lamina.errors import AccountingError, PlanError
from lamina.plan.correlation import AUTO_BANDS, best_bands, participations, turn_rate
from lamina.plan.layer_stack import LayerStack
from lamina.plan.policy import Policy
from lamina.plan.profile_reach import Reach
from lamina.plan.risk import COMPOSED, ZERO_OUT, RiskBound, calibrate_to_risk
from lamina.plan.rules import FollowBudget, FollowQuantile, NoiseKind, rescale_noise
from lamina.plan.selection import did_you_mean, known_keywords, noised_sizes
from lamina.plan.step_plan import Clipping, PlannedClass, PlannedLayer, StepPlan

_ALL: tuple[Allocator, ...] = (
    flat, uniform, proportional, pareto, lsab, ladp, LADP(mode="budget"), quantile, automatic,
    paper_lsab, paper_ladp,
)  # fmt: skip
_DECLARED: dict[str, Allocator] = {allocation.name: allocation for allocation in _ALL}
ALLOCATIONS: Mapping[str, Allocator] = MappingProxyType(_DECLARED)
"""Every allocation with its default options. The paper ones reproduce documents, and their claims do not hold."""

DEFAULT_ALLOCATION = pareto.name
"""What `make_plan` does by default. Without a measure and with one class it is `flat`, which real data
support (docs/allocations/utility.md); with several it gives each its whole budget, which `flat` does not."""


def declare_allocation(allocation: Allocator) -> None:
    """Add an allocation, a frozen dataclass, so that plans, RUN.toml and commands find it by its name."""
    if allocation.name in _DECLARED:
        problem = f"there is an allocation {allocation.name!r} already"
        raise PlanError("allocate.allocation-declared", problem, "give it another name")
    _DECLARED[allocation.name] = allocation


def find_allocation(name: str | Allocate) -> Allocate:
    """The allocation of that name; an object or function stands for itself."""
    if not isinstance(name, str):
        if isinstance(name, type) or not callable(name):
            problem = f"allocate is {name!r}"
            raise PlanError("allocate.allocation-type", problem, f"give an object, or one of {', '.join(ALLOCATIONS)}")
        return name
    if name not in ALLOCATIONS:
        problem = f"allocation {name!r} is not known{did_you_mean(name, list(ALLOCATIONS))}"
        raise PlanError("allocate.unknown-allocation", problem, f"use one of {', '.join(ALLOCATIONS)}")
    return ALLOCATIONS[name]


Besides = Mapping[str, tuple[Event, ...]]  # by class: what else is released
PerClass = float | Mapping[str, float] | None  # one figure for all private classes, or by name
_CLOSER = "bring the classes closer together, or use LADP(mode='shares')"
_LESS = "ask for less, or change the policy"
_MOST_EXCESS_NOISE = 4.0  # times the noise that a class needs


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibratedNoise:
    """sigma and target ε by class (inf: public), the accountant that says so, and its order if it has one."""

    sigma: tuple[float, ...]
    targets: tuple[float, ...]
    accountant: str
    order: float | None = None
    rho: tuple[float, ...] = ()


def calibrate_classes(
    policy: Policy, rates: Mapping[str, float], steps: int, *, chooser: Allocate,
    epsilon: PerClass = None, rho: PerClass = None, noise_multiplier: PerClass = None,
) -> CalibratedNoise:  # fmt: skip
    """sigma_k by class. `rates` names the classes that take part, with their q.

    Raw noise credits nothing to sampling: it is calibrated for as many unsampled steps as a contribution takes part in.
    """
    given = {"epsilon": epsilon, "rho": rho, "noise_multiplier": noise_multiplier}
    if len(said := [f"{name} is {value!r}" for name, value in given.items() if value is not None]) > 1:
        raise PlanError("allocate.epsilon-and-rho", " and ".join(said), "give one of them")
    side = getattr(chooser, "side_releases", lambda _: ())(steps)
    composed = policy.noise.kind == NoiseKind.LAPLACE.value or policy.noise.correlation != "none"
    limits = {ZERO_OUT: policy.noise.as_injection.raw, COMPOSED: composed}  # as `curve_marks` of the plan will state
    marks = frozenset(mark for mark, holds in limits.items() if holds)
    if policy.noise.as_injection.raw:
        if side or getattr(chooser, "follows_budget", False):
            problem = "noise is per_sample_raw, but the allocation needs credit for sampling"
            raise PlanError("allocate.raw-noise", problem, "use injection per_step or another allocation")
        rates, steps = dict.fromkeys(rates, 1.0), policy.noise.as_injection.events(0, steps)
    if (bands := policy.noise.bands or 1) > 1:
        rates = {n: q if policy.classes[n].public else turn_rate(q, bands, n) for n, q in rates.items()}
        steps = participations(steps, bands)
    besides = {name: tuple(Event(sigma=sigma, q=q, steps=calls) for sigma, calls in side) for name, q in rates.items()}
    if epsilon is None and said and getattr(chooser, "follows_budget", False):
        problem = f"{said[0]}, but this allocation sets its noise while training"
        raise PlanError("allocate.rho-follows-budget", problem, "give epsilon, or LADP(mode='shares')")
    if rho is not None or noise_multiplier is not None:
        if rho is not None:
            declared = _calibrate_to_rho(policy, rates, steps, rho, besides)
        else:
            declared = _price_noise_multiplier(policy, rates, steps, noise_multiplier, besides)
        for cls, multiplier in zip(rates, declared.sigma, strict=True):
            if (risk := policy.classes[cls].risk) is not None:
                events = event_counts((Event(sigma=multiplier, q=rates[cls], steps=steps), *besides[cls]))
                if (rate := risk.rate(events, accountant=declared.accountant, marks=marks)) > risk.tpr:
                    found = f"an attack finds up to {100 * rate:.4g} %, above the policy's bound ({risk})"
                    raise PlanError("allocate.above-policy-bound", f"class {cls!r}: {said[0]}: {found}", _LESS)
        return declared
    targets, corpus = _target_epsilons(policy, list(rates), epsilon), policy.corpus
    name, order = corpus.accountant, None

    def needed(cls: str, accountant: str) -> float:
        """Return the sigma that keeps the bounds of a class on ε and on risk, as far as it has them."""
        schedule: dict[str, Any] = {"q": rates[cls], "steps": steps, "besides": besides[cls]}
        found = []
        if cls in targets:
            found.append(calibrate(targets[cls], delta=corpus.delta, accountant=accountant, **schedule))
        if (risk := policy.classes[cls].risk) is not None:
            found.append(_calibrate_to_risk(risk, cls, accountant=accountant, marks=marks, **schedule))
            sampled = -math.expm1(steps * math.log1p(-rates[cls])) if rates[cls] < 1 else 1.0
            if cls not in targets and sampled <= risk.tpr - risk.fpr:
                problem = f"class {cls!r}: {100 * sampled:.4g} % of its contributions are ever sampled, so no noise is needed ({risk})"
                remedy = (
                    f"add epsilon to [class.{cls}]: without it, sampled contributions would be published without noise"
                )
                raise PlanError("allocate.risk-needs-no-noise", problem, remedy)
        return max(found)

    private = [cls for cls in rates if not policy.classes[cls].public]
    if getattr(chooser, "follows_budget", False):
        order = _shared_order(policy, rates, steps, private, besides, needed)
        name = f"rdp@{order:g}"
    sigma = {cls: needed(cls, name) for cls in private}
    for cls in private:
        if policy.classes[cls].risk is not None:  # may ask for more noise than ε alone
            schedule = (Event(sigma=sigma[cls], q=rates[cls], steps=steps), *besides[cls])
            spent = find_accountant(name).epsilon(schedule, corpus.delta)
            targets[cls] = min(spent, targets.get(cls, math.inf))
    return CalibratedNoise(
        sigma=tuple(sigma.get(cls, math.inf) for cls in rates),
        targets=tuple(targets.get(cls, math.inf) for cls in rates),
        accountant=name,
        order=order,
    )


def _calibrate_to_risk(risk: RiskBound, cls: str, **schedule: Any) -> float:
    """Return the sigma for a risk bound; the error names the class."""
    try:
        return calibrate_to_risk(risk, **schedule)
    except AccountingError as error:
        raise PlanError("allocate.risk-unreachable", f"class {cls!r}: {error.problem}", error.remedy) from None


def _shared_order(
    policy: Policy, rates: Mapping[str, float], steps: int, private: Sequence[str], besides: Besides,
    needed: Callable[[str, str], float],
) -> float:  # fmt: skip
    """Return one order for all classes: the best order of some class with the smallest loss for the worst-off class.

    `needed` is the sigma of a class by an accountant. Of a risk bound, fpr takes the place of δ.
    """
    if not private:
        problem = "every class is public: there is no budget"
        raise PlanError("allocate.no-private-class", problem, "use another allocation")
    best = {cls: needed(cls, "rdp") for cls in private}
    orders = set()
    for cls, sigma in best.items():
        schedule, risk = (Event(sigma=sigma, q=rates[cls], steps=steps), *besides[cls]), policy.classes[cls].risk
        for delta in (policy.corpus.delta, *(() if risk is None else (risk.fpr,))):
            orders.add(float(f"{choose_order(schedule, delta=delta):g}"))
    wanted = ", ".join(private)
    worst = {}
    for order in sorted(orders):
        try:
            worst[order] = max(needed(cls, f"rdp@{order:g}") / s for cls, s in best.items())
        except (AccountingError, PlanError):  # too small an order for the strictest class
            continue
    if not worst:
        raise PlanError("allocate.no-shared-order", f"no Rényi order serves all classes ({wanted})", _CLOSER)
    order = min(worst, key=worst.__getitem__)
    if worst[order] > _MOST_EXCESS_NOISE:
        problem = f"one Rényi order for all classes ({wanted}) costs one of them {worst[order]:.3g} times its noise"
        raise PlanError("allocate.no-shared-order", problem, _CLOSER)
    return order


def sigma_factor_range(declared: CalibratedNoise, rates: Iterable[float]) -> tuple[float, float]:
    """Factors on sigma between which a step of any class costs at most twice, and at least half, the declared price.

    At small sigma the price rises steeply: without this a run could spend its budget in a few steps.
    """
    order = declared.order
    assert order is not None

    def least_factor(sigma: float, q: float, part: float, low: float, high: float) -> float:
        """The least factor at which a step costs at most this part of the declared price, to 1e-6."""
        most = part * step_rdp(q, sigma, order)
        return bisect_float(lambda f: step_rdp(q, sigma * f, order) <= most, low, high, relative=0.0, absolute=1e-6)[1]

    owed = [(sigma, q) for sigma, q in zip(declared.sigma, rates, strict=True) if math.isfinite(sigma)]
    lows = [least_factor(sigma, q, 2.0, 0.1, 1.0) for sigma, q in owed]
    return max(lows), min(least_factor(sigma, q, 0.5, 1.0, 10.0) for sigma, q in owed)


def _calibrate_to_rho(
    policy: Policy, rates: Mapping[str, float], steps: int, rho: PerClass, besides: Besides
) -> CalibratedNoise:
    """ρ/T for every step: sigma = √(T/(2ρ)), rounded up so that T steps take at most ρ, and no less than 1e-12 of it.

    What else is released takes its ρ from the same budget.
    """
    wanted = _by_class(policy, rates, rho, "rho", "allocate.rho-not-positive")
    sigma, targets, priced = {}, {}, find_accountant("zcdp")
    for name, cap in wanted.items():
        left = cap - math.fsum(0.5 * event.steps * event.mu**2 for event in besides[name])
        if left <= 0:
            problem = f"rho of class {name!r} is {cap:g}; other releases take {cap - left:.4g}"
            raise PlanError("allocate.rho-used-up", problem, "raise it")
        sigma[name] = math.sqrt(steps / (2.0 * left))
        while steps * 0.5 * (1.0 / sigma[name]) ** 2 > left:
            sigma[name] = math.nextafter(sigma[name], math.inf)
        schedule = (Event(sigma=sigma[name], q=1.0, steps=steps), *besides[name])
        targets[name] = _within_bound(policy, name, priced.epsilon(schedule, policy.corpus.delta), f"rho is {cap:g}")
    return CalibratedNoise(
        sigma=tuple(sigma.get(name, math.inf) for name in rates),
        targets=tuple(targets.get(name, math.inf) for name in rates),
        accountant="zcdp",
        rho=tuple(wanted.get(name, math.inf) for name in rates),
    )


def _price_noise_multiplier(
    policy: Policy, rates: Mapping[str, float], steps: int, noise_multiplier: PerClass, besides: Besides
) -> CalibratedNoise:
    """sigma as given, for every step; ε is what the steps cost at it, together with whatever else is released."""
    sigma = _by_class(policy, rates, noise_multiplier, "noise_multiplier", "allocate.noise-multiplier-not-positive")
    priced, targets = find_accountant(policy.corpus.accountant), {}
    for name, z in sigma.items():
        cost = priced.epsilon((Event(sigma=z, q=rates[name], steps=steps), *besides[name]), policy.corpus.delta)
        targets[name] = _within_bound(policy, name, cost, f"noise_multiplier is {z:g}")
    return CalibratedNoise(
        sigma=tuple(sigma.get(name, math.inf) for name in rates),
        targets=tuple(targets.get(name, math.inf) for name in rates),
        accountant=priced.name,
    )


def _by_class(policy: Policy, names: Iterable[str], given: PerClass, what: str, code: str) -> dict[str, float]:
    """A figure > 0 for every private class that takes part: one for all, or by name."""
    private = [name for name in names if not policy.classes[name].public]
    wanted: Mapping[str, Any] = given if isinstance(given, Mapping) else dict.fromkeys(private, given)
    refuse_unknown_classes(policy, wanted, what)
    return {n: validate.positive(PlanError, code, **named(f"{what} of class {n!r}", wanted.get(n))) for n in private}


def _within_bound(policy: Policy, name: str, epsilon: float, why: str) -> float:
    """The ε of a class, refused above the policy's bound."""
    bound = policy.bound(name)
    if bound is not None and epsilon > bound:
        problem = f"class {name!r}: {why}: epsilon {epsilon:.4g}, above the policy's bound of {bound:.6g}"
        raise PlanError("allocate.above-policy-bound", problem, _LESS)
    return epsilon


def _clip_norms(policy: Policy, names: Iterable[str], clip_norm: PerClass) -> tuple[float, ...]:
    """c by class: the policy's, or less. What a contribution signed is a bound, so more is refused."""
    most = {name: policy.classes[name].clip_norm for name in names}
    wanted = (
        {} if clip_norm is None else _by_class(policy, most, clip_norm, "clip_norm", "allocate.clip-norm-not-positive")
    )
    for name, c in wanted.items():
        if c > most[name]:
            problem = f"clip_norm of class {name!r} is {c:g}, above the policy's {most[name]:g}"
            raise PlanError("allocate.clip-norm-above-policy", problem, f"lower it, or raise it in [class.{name}]")
    return tuple((most | wanted).values())


def _target_epsilons(policy: Policy, names: list[str], epsilon: PerClass) -> dict[str, float]:
    """Return the ε to spend of each private class, checked against the policy; none for a class with only a risk bound."""
    private = [name for name in names if not policy.classes[name].public]
    wanted: dict[str, float] = {}
    if isinstance(epsilon, Mapping):
        refuse_unknown_classes(policy, epsilon, "epsilon")
        for name in epsilon:
            if name not in private:
                problem = f"epsilon names class {name!r}, which is public or left out"
                raise PlanError("allocate.epsilon-without-class", problem, "drop it")
        wanted = dict(epsilon)
    elif epsilon is not None:
        wanted = dict.fromkeys(private, epsilon)
    targets = {}
    for name in private:
        bound, entry = policy.bound(name), policy.classes[name]
        declared = entry.epsilon or entry.noise_multiplier or entry.risk
        target = wanted.get(name, bound if declared else None)
        if target is None and entry.risk is not None:
            continue
        if target is None:
            remedy = f"add one to [class.{name}], or give epsilon={{{name!r}: 1.0}}"
            problem = f"class {name!r} has neither epsilon nor noise_multiplier nor risk"
            raise PlanError("allocate.no-budget", problem, remedy)
        target = validate.positive(
            PlanError, "allocate.epsilon-not-positive", **named(f"epsilon of class {name!r}", target)
        )
        if bound is not None and target > bound:
            problem = f"epsilon of class {name!r} is {target:g}, above the policy's bound of {bound:.6g}"
            raise PlanError("allocate.above-policy-bound", problem, _LESS)
        targets[name] = target
    return targets


def refuse_unknown_classes(policy: Policy, names: Mapping[str, float], what: str) -> None:
    """Refuse names that are no class of the policy."""
    for name in names:
        if name not in policy.classes:
            problem = f"{what} names the unknown class {name!r}"
            raise PlanError("allocate.unknown-class", problem, f"use one of {', '.join(policy.classes)}")


@known_keywords(PlanError, "plan.keyword-unknown")
def make_plan(
    stack: LayerStack,
    policy: Policy,
    *,
    batch: int | Mapping[str, int],
    steps: int | None = None,
    epochs: float | None = None,
    allocate: str | Allocate = DEFAULT_ALLOCATION,
    epsilon: PerClass = None,
    rho: PerClass = None,
    noise_multiplier: PerClass = None,
    clip_norm: PerClass = None,
    clipping: Clipping | str | None = None,
    measure: Measure | None = None,
    bands: int | str | None = None,
) -> StepPlan:
    """The plan that spends at most what the policy allows, and no less than it must.

    batch     expected contributions per step: one number, shared out in proportion to the populations, or
              one per class (0 leaves a class out). q_k = b_k/N_k; B = Σ b_k
    steps     how many steps; or epochs: steps = ⌈epochs · ΣN_k / Σb_k⌉
    allocate  how C and S are chosen: a name of `lamina.allocate.ALLOCATIONS`, one with options of its own
              (`lamina.allocate.LADP(…)`), or a function of an AllocationProblem
    epsilon   ε to spend, for all private classes or by name; at most the policy's bound, which is the default
    rho       or ρ, a zCDP budget: every step then takes ρ/T exactly, nothing is credited to sampling
    noise_multiplier  or sigma itself, the same at every step; ε is what that costs
    clip_norm  the bound on a contribution's whole gradient, for all private classes or by name; at most the policy's,
              which is the default
    clipping  "box" or "joint", instead of the form that the allocation prefers
    measure   what is known of the layers from proxy data (`lamina.measure`), for allocations that need it
    bands     correlate the noise over so many steps, instead of what the policy says (docs/decisions/correlated_noise.md);
              "auto": as `best_bands` finds, 1 if noise_multiplier is given or a class has a risk bound

    sigma_k is calibrated to ε_k and to the risk bound of the class for q_k and the steps, on the safe side, together with
    whatever else the allocation releases; then S is scaled so that every class has at least its sigma_k.
    """
    return explained_plan(
        stack, policy, batch=batch, steps=steps, epochs=epochs, allocate=allocate, epsilon=epsilon, rho=rho,
        noise_multiplier=noise_multiplier, clip_norm=clip_norm, clipping=clipping, measure=measure, bands=bands,
    )[0]  # fmt: skip


def explained_plan(
    stack: LayerStack, policy: Policy, *, bands: int | str | None = None, **options: Any
) -> tuple[StepPlan, Allocation]:
    """Return the plan of `make_plan`, and its allocation with its reasons."""
    if bands is None or (bands == AUTO_BANDS and policy.noise.bands is not None):
        return _explained_plan(stack, policy, **options)
    if not isinstance(bands, str):
        return _explained_plan(stack, policy.with_bands(bands), **options)
    validate.one_of(PlanError, "plan.bands-out-of-range", (AUTO_BANDS,), bands=bands)
    alone = _explained_plan(stack, policy, **options)
    bounded = options.get("noise_multiplier") is not None or any(entry.risk for entry in policy.classes.values())
    best = 1 if bounded else best_bands(alone[0])
    return alone if best == 1 else _explained_plan(stack, policy.with_bands(best), **options)


def _explained_plan(
    stack: LayerStack, policy: Policy, *, batch: int | Mapping[str, int], steps: int | None = None,
    epochs: float | None = None, allocate: str | Allocate = DEFAULT_ALLOCATION,
    clip_norm: PerClass = None, clipping: Clipping | str | None = None, measure: Measure | None = None,
    **budget: PerClass,
) -> tuple[StepPlan, Allocation]:  # fmt: skip
    if not isinstance(stack, LayerStack):
        raise PlanError("allocate.stack-type", f"stack is a {type(stack).__name__}", "use LayerStack.from_model(model)")
    if not isinstance(policy, Policy):
        remedy = "use Policy.load('policy.toml')"
        raise PlanError("allocate.policy-type", f"policy is a {type(policy).__name__}", remedy)
    sizes = _batch_sizes(policy, batch)
    total, population = sum(sizes.values()), sum(_population(policy, name) for name in sizes)
    count = _step_count(steps, epochs, Fraction(population) / total)
    if measure is not None:
        if not isinstance(measure, Measure):
            remedy = "give lamina.Measure.load(path)"
            raise PlanError("allocate.measure-type", f"measure is a {type(measure).__name__}", remedy)
        measure.check(stack)
        if policy.noise.kind == NoiseKind.LAPLACE.value:
            differ = "laplace noise clips L1 norms, and what was measured of the layers are L2 norms"
            raise PlanError("allocate.measure-of-other-norm", differ, "leave measure out, or use other noise")
    chooser = find_allocation(allocate)
    rates = {name: float(size / _population(policy, name)) for name, size in sizes.items()}
    declared = calibrate_classes(policy, rates, count, chooser=chooser, **budget)
    reaches = {name: _class_reach(policy, name, stack) for name in sizes}
    slices = tuple(part for name, reach in reaches.items() for part in reach.slices(name))
    numbers = noised_sizes(stack, {name: r.layers for name, r in reaches.items()}, slices, stack.shapes)
    problem = AllocationProblem(
        sizes=numbers,
        weights=tuple(map(float, numbers)),
        reach=tuple(reach.layers for reach in reaches.values()),
        clip_norm=_clip_norms(policy, sizes, clip_norm),
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
    _refuse_wider_reach(problem, chosen, list(sizes), stack)
    chosen = replace(chosen, clip=problem.clip_with_factors(chosen.clip))
    rules = tuple(chosen.rules)
    if declared.order is not None:
        pace = sigma_factor_range(declared, rates.values())
        rules = tuple(  # at the plan's order, within the factors at which a step costs half to twice the declared price
            replace(r, order=declared.order, least=max(r.least, pace[0]), most=min(r.most, pace[1]))
            if isinstance(r, FollowBudget) else r for r in rules
        )  # fmt: skip
    kind, reasons = choose_noise_kind(policy, list(sizes), chosen, declared.accountant)
    if kind is NoiseKind.LAPLACE and policy.noise.kind == "auto":  # whose clip and price are others from the start
        plan, chosen = _explained_plan(
            stack, policy.with_noise_kind(kind), batch=batch, steps=steps, epochs=epochs, allocate=allocate,
            clip_norm=clip_norm, clipping=clipping, measure=measure, **budget,
        )  # fmt: skip
        return plan, replace(chosen, why=(*chosen.why, *reasons))
    chosen = replace(chosen, why=(*chosen.why, *reasons))
    form = Clipping.ELEMENTWISE if chosen.clipping is Clipping.ELEMENTWISE else clipping or chosen.clipping
    _refuse_unsupported_profiles(reaches, chosen, form)
    plan = StepPlan(
        layers=tuple(
            PlannedLayer(
                name=layer.name, depth=layer.depth, parameters=layer.parameters, size=layer.size, spans=layer.spans
            )
            for layer in stack
        ),
        classes=tuple(_planned_class(policy, name, rates[name], reaches[name]) for name in sizes),
        clip=chosen.clip,
        noise=chosen.noise if chosen.claimed else _noise_for_sigma(chosen, declared.sigma),
        batch=1.0 if form is Clipping.ELEMENTWISE else float(total) * chosen.batch_factor,
        steps=min(count, chosen.returns_after or count),
        clipping=form,  # type: ignore[arg-type]  # the plan reads text
        accountant="gaussian" if chosen.claimed else declared.accountant,
        allocation=str(getattr(chooser, "name", None) or getattr(chooser, "__name__", "function")),
        rules=rules,
        injection=policy.noise.as_injection,
        noise_kind=kind,
        bands=policy.noise.bands or 1,
        slices=slices,
        claimed=chosen.claimed,
        blocks=len(stack.blocks),
    )
    return _scaled_to_clip_norms(plan, problem), chosen


def _scaled_to_clip_norms(plan: StepPlan, problem: AllocationProblem) -> StepPlan:
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
    noise = rescale_noise(clip, [s * factor for s in plan.noise], problem.sigma)
    return replace(plan, clip=clip, noise=noise)


def _class_reach(policy: Policy, name: str, stack: LayerStack) -> Reach:
    """What the class reaches; a refusal names the class."""
    try:
        return policy.classes[name].profile.reach(stack)
    except PlanError as error:
        raise PlanError("allocate.profile-refused", f"class {name!r}: {error.problem}", error.remedy) from None


def _refuse_unsupported_profiles(reaches: Mapping[str, Reach], chosen: Allocation, form: Clipping | str) -> None:
    """Refuse weights that clipping would not keep to, and slices in what a document does not know them in."""
    for (name, reach), row in zip(reaches.items(), chosen.clip, strict=True):
        weighed = any(factor != 1 for factor in reach.factors)
        if weighed and any(map(math.isinf, row)):
            problem = f"the profile of class {name!r} has weights, but a public class is not clipped"
            raise PlanError("allocate.weights-public-class", problem, "remove the weights")
        if weighed and form in (Clipping.JOINT, Clipping.JOINT.value):
            problem = f"the profile of class {name!r} has weights, which joint clipping cannot keep"
            raise PlanError("allocate.weights-joint-clipping", problem, "use clipping='box' (--clipping box)")
        if chosen.claimed and (weighed or reach.openings):
            problem = f"the profile of class {name!r} has weights or slices, which a paper method lacks"
            raise PlanError("allocate.weights-paper-method", problem, "use whole layers, or another allocation")


def _noise_for_sigma(chosen: Allocation, sigma: tuple[float, ...]) -> tuple[float, ...]:
    """S of the allocation's shape, so large that every class has its sigma, noised counts included."""
    counted = next((rule for rule in chosen.rules if isinstance(rule, FollowQuantile)), None)
    bits = [
        0.0 if counted is None else math.sqrt(sum(c > 0 for c in row)) / (2.0 * counted.noise) for row in chosen.clip
    ]
    return rescale_noise(chosen.clip, chosen.noise, sigma, bits)


def _planned_class(policy: Policy, name: str, rate: float, reach: Reach) -> PlannedClass:
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
        remedy = f"add population to [class.{name}], or leave it out with batch={{{name!r}: 0, …}}"
        raise PlanError("allocate.no-population", f"class {name!r} has no population", remedy)
    return population


def _batch_sizes(policy: Policy, batch: int | Mapping[str, int]) -> dict[str, Fraction]:
    """Expected contributions per step of each class that takes part, exactly."""
    if isinstance(batch, Mapping):
        refuse_unknown_classes(policy, batch, "batch")
        missing = [name for name in policy.classes if name not in batch]
        if missing:
            problem = f"batch has no size for class {missing[0]!r}"
            raise PlanError("allocate.batch-class-missing", problem, "give every class one; 0 leaves it out")
        for name, count in batch.items():
            validate.whole(
                PlanError, "allocate.batch-not-positive", least=0, **named(f"batch of class {name!r}", count)
            )
        sizes = {name: Fraction(batch[name]) for name in policy.classes if batch[name]}
        if not sizes:
            raise PlanError("allocate.batch-empty", "batch is 0 for every class", "give one class a size")
    else:
        whole = validate.whole(PlanError, "allocate.batch-not-positive", batch=batch)
        population = sum(_population(policy, name) for name in policy.classes)
        sizes = {name: Fraction(whole * _population(policy, name), population) for name in policy.classes}
    for name, size in sizes.items():
        most = _population(policy, name)
        if size > most:
            problem = f"batch of class {name!r} is {float(size):g}, above its population of {most}"
            raise PlanError("allocate.batch-above-population", problem, "lower it")
    return sizes


def _step_count(steps: int | None, epochs: float | None, epoch: Fraction) -> int:
    """The number of steps; one epoch is Σ N_k / Σ b_k of them."""
    if (steps is None) == (epochs is None):
        raise PlanError("allocate.steps-and-epochs", f"steps is {steps!r} and epochs is {epochs!r}", "give one of them")
    if steps is not None:
        return validate.whole(PlanError, "allocate.steps-not-positive", steps=steps)
    epochs = validate.positive(PlanError, "allocate.epochs-not-positive", epochs=epochs)
    return math.ceil(Fraction(epochs).limit_denominator(1_000_000) * epoch) or 1


def _refuse_wider_reach(problem: AllocationProblem, chosen: Allocation, names: list[str], stack: LayerStack) -> None:
    """An allocation may shape C and S, never widen what a class reaches."""
    shape = [len(row) for row in problem.reach]
    if [len(row) for row in chosen.clip] != shape or len(chosen.noise) != len(stack):
        remedy = f"C must be {len(shape)} × {len(stack)}"
        raise PlanError("allocate.wrong-shape", "C or S of the allocation has the wrong shape", remedy)
    for name, allowed, row in zip(names, problem.reach, chosen.clip, strict=True):
        for layer, reached, c in zip(stack, allowed, row, strict=True):
            if c != 0 and not reached:
                raise PlanError(
                    "allocate.reach-widened",
                    f"the allocation gives class {name!r} {c!r} at layer {layer.name!r}, outside its profile",
                    "use 0 where reach is False",
                )
