"""What every class is owed: its sigma, from ε by an accountant or from a zCDP budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from lamina.account import Event, accountant, calibrate, choose_order
from lamina.account.renyi import divergence
from lamina.allocate.problem import Allocate
from lamina.errors import AccountingError, PlanError
from lamina.plan import Policy

_POOR = 4.0  # times the noise that a class needs


@dataclass(frozen=True, kw_only=True, slots=True)
class Declared:
    """sigma and target ε by class (inf: public), the accountant that says so, and its order if it has one."""

    sigma: tuple[float, ...]
    targets: tuple[float, ...]
    accountant: str
    order: float | None = None
    rho: tuple[float, ...] = ()


def declare(
    policy: Policy,
    rates: Mapping[str, float],
    steps: int,
    *,
    epsilon: float | Mapping[str, float] | None,
    rho: float | Mapping[str, float] | None,
    chooser: Allocate,
) -> Declared:
    """sigma_k by class. `rates` names the classes that take part, with their q.

    Raw noise credits nothing to sampling: it is calibrated for as many unsampled steps as a contribution takes part in.
    """
    if epsilon is not None and rho is not None:
        raise PlanError(
            "allocate.epsilon-rho", f"epsilon is {epsilon!r} and rho is {rho!r}", "give one of them"
        )
    side = getattr(chooser, "side", lambda _: ())(steps)
    if policy.noise.enters.raw:
        if side or getattr(chooser, "follows_budget", False):
            raise PlanError(
                "allocate.noise-enters-per",
                "noise enters per_sample_raw, and the allocation releases or follows something that is priced with "
                "sampling",
                "use injection per_step, or an allocation that is fixed before the first step",
            )
        rates, steps = dict.fromkeys(rates, 1.0), policy.noise.enters.events(0, steps)
    besides = {
        name: tuple(Event(sigma=sigma, q=q, steps=calls) for sigma, calls in side)
        for name, q in rates.items()
    }
    if rho is not None and getattr(chooser, "follows_budget", False):
        raise PlanError(
            "allocate.rho-allocation-chooses",
            f"rho is {rho!r}, and the allocation chooses its noise on the way, which is priced at one Rényi order",
            "give epsilon, or an allocation whose noise is fixed: LADP(mode='shares')",
        )
    if rho is not None:
        return _by_rho(policy, rates, steps, rho, besides)
    targets, corpus = _targets(policy, list(rates), epsilon), policy.corpus
    name, order = corpus.accountant, None
    if getattr(chooser, "follows_budget", False):
        order = _order(policy, rates, steps, targets, besides)
        name = f"rdp@{order:g}"
    sigma = {
        cls: calibrate(
            target, delta=corpus.delta, q=rates[cls], steps=steps, accountant=name, besides=besides[cls]
        )
        for cls, target in targets.items()
    }
    return Declared(
        sigma=tuple(sigma.get(cls, math.inf) for cls in rates),
        targets=tuple(targets.get(cls, math.inf) for cls in rates),
        accountant=name,
        order=order,
    )


def _order(
    policy: Policy,
    rates: Mapping[str, float],
    steps: int,
    targets: Mapping[str, float],
    besides: Mapping[str, tuple[Event, ...]],
) -> float:
    """One order for all classes: of those that suit one class best, the one that costs the worst-off class least."""
    if not targets:
        raise PlanError(
            "allocate.every-class-public",
            "every class is public: there is no budget to follow",
            "use another allocation",
        )
    delta = policy.corpus.delta

    def needed(cls: str, name: str) -> float:
        return calibrate(
            targets[cls], delta=delta, q=rates[cls], steps=steps, accountant=name, besides=besides[cls]
        )

    best = {cls: needed(cls, "rdp") for cls in targets}
    orders = {
        float(f"{choose_order((Event(sigma=s, q=rates[cls], steps=steps), *besides[cls]), delta=delta):g}")
        for cls, s in best.items()
    }
    worst = {}
    for order in sorted(orders):
        try:
            worst[order] = max(needed(cls, f"rdp@{order:g}") / s for cls, s in best.items())
        except AccountingError:  # too small an order for the strictest class
            continue
    if not worst:
        raise PlanError(
            "allocate.no-nyi-order",
            f"no one Rényi order serves classes with epsilon {', '.join(f'{e:g}' for e in targets.values())}",
            "bring them closer together, or use LADP(mode='shares')",
        )
    order = min(worst, key=worst.__getitem__)
    if worst[order] > _POOR:
        raise PlanError(
            "allocate.classes-epsilon-share",
            f"classes with epsilon {', '.join(f'{e:g}' for e in targets.values())} share one Rényi order so badly that "
            f"one of them would get {worst[order]:.3g} times the noise that it needs",
            "bring them closer together, or use LADP(mode='shares'), which needs no such order",
        )
    return order


def paces(declared: Declared, rates: Iterable[float]) -> tuple[float, float]:
    """Factors on sigma between which a step of any class costs at most twice, and at least half, the declared price.

    At small sigma the price rises steeply: without this a run could spend its budget in a few steps.
    """
    order = declared.order
    assert order is not None
    lows, highs = [], []
    for sigma, q in zip(declared.sigma, rates, strict=True):
        if math.isfinite(sigma):
            at = divergence(q, sigma, order)
            lows.append(_solve(partial(_within, q, sigma, order, 2 * at), 0.1, 1.0))
            highs.append(_solve(partial(_within, q, sigma, order, at / 2), 1.0, 10.0))
    return max(lows), min(highs)


def _within(q: float, sigma: float, order: float, price: float, factor: float) -> bool:
    return divergence(q, sigma * factor, order) <= price


def _solve(cheap: Callable[[float], bool], low: float, high: float) -> float:
    """The smallest factor in [low, high] that is cheap, to 1e-6; `high` counts as cheap."""
    while high - low > 1e-6:
        middle = 0.5 * (low + high)
        low, high = (low, middle) if cheap(middle) else (middle, high)
    return high


def _by_rho(
    policy: Policy,
    rates: Mapping[str, float],
    steps: int,
    rho: float | Mapping[str, float],
    besides: Mapping[str, tuple[Event, ...]],
) -> Declared:
    """ρ/T for every step: sigma = √(T/(2ρ)), rounded up so that T steps take at most ρ, and no less than 1e-12 of it.

    What else is released takes its ρ from the same budget.
    """
    private = [name for name in rates if not policy.classes[name].public]
    asked = rho if isinstance(rho, Mapping) else dict.fromkeys(private, rho)
    known(policy, asked, "rho")
    sigma, targets, priced = {}, {}, accountant("zcdp")
    for name in private:
        cap = asked.get(name)
        if isinstance(cap, bool) or not isinstance(cap, int | float) or not 0 < cap < math.inf:
            raise PlanError(
                "allocate.rho-class-finite",
                f"rho of class {name!r} is {cap!r}, must be finite and > 0",
                "give every class one",
            )
        left = cap - math.fsum(0.5 * event.steps * event.mu**2 for event in besides[name])
        if left <= 0:
            raise PlanError(
                "allocate.rho-class-releases",
                f"rho of class {name!r} is {cap:g}, and the other releases alone take {cap - left:.4g}",
                "raise it, or make them rarer",
            )
        sigma[name] = math.sqrt(steps / (2.0 * left))
        while steps * 0.5 * (1.0 / sigma[name]) ** 2 > left:
            sigma[name] = math.nextafter(sigma[name], math.inf)
        schedule = (Event(sigma=sigma[name], q=1.0, steps=steps), *besides[name])
        targets[name] = priced.epsilon(schedule, policy.corpus.delta)
        bound = policy.bound(name)
        if bound is not None and targets[name] > bound:
            raise PlanError(
                "allocate.rho-class-epsilon",
                f"rho of class {name!r} is {cap:g}, which is ε = {targets[name]:.4g} at δ = {policy.corpus.delta:g}, "
                f"above the policy's bound of {bound:.6g}",
                "ask for less, or change the policy",
            )
    return Declared(
        sigma=tuple(sigma.get(name, math.inf) for name in rates),
        targets=tuple(targets.get(name, math.inf) for name in rates),
        accountant="zcdp",
        rho=tuple(asked.get(name, math.inf) for name in rates),
    )


def _targets(
    policy: Policy, names: list[str], epsilon: float | Mapping[str, float] | None
) -> dict[str, float]:
    """The ε that each private class is to spend, checked against the policy's bound."""
    private = [name for name in names if not policy.classes[name].public]
    asked: dict[str, float] = {}
    if isinstance(epsilon, Mapping):
        known(policy, epsilon, "epsilon")
        for name in epsilon:
            if name not in private:
                raise PlanError(
                    "allocate.epsilon-given-class",
                    f"epsilon is given for class {name!r}, which is public or left out",
                    "drop it",
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
                "allocate.class-neither-epsilon",
                f"class {name!r} has neither epsilon nor noise_multiplier",
                f"add one to [class.{name}], or give make_plan(epsilon={{{name!r}: 1.0}})",
            )
        if isinstance(target, bool) or not isinstance(target, int | float) or not 0 < target < math.inf:
            raise PlanError(
                "allocate.epsilon-class-finite",
                f"epsilon of class {name!r} is {target!r}, must be finite and > 0",
                "correct it",
            )
        if bound is not None and target > bound:
            raise PlanError(
                "allocate.epsilon-class-above",
                f"epsilon of class {name!r} is {target:g}, above the policy's bound of {bound:.6g}",
                "ask for less, or change the policy",
            )
        targets[name] = float(target)
    return targets


def known(policy: Policy, names: Mapping[str, float], what: str) -> None:
    """Refuse names that are no class of the policy."""
    for name in names:
        if name not in policy.classes:
            raise PlanError(
                "allocate.names-class-policy",
                f"{what} names class {name!r}, which the policy does not have",
                f"its classes are {', '.join(policy.classes)}",
            )
