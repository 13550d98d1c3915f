"""The allocation problem and its answer; options of allocations, thresholds of a shape, the least-noise program."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lamina import validate
from lamina.errors import PlanError
from lamina.plan.layer_stack import LayerStack
from lamina.plan.rules import Rule
from lamina.plan.step_plan import Clipping

if TYPE_CHECKING:
    from lamina.allocate.measure.measure import Measure


ClipMatrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocationProblem:
    """Choose C (K × L) and S (L), given what the classes may reach and what each is owed.

    sizes[l]      d_l, numbers in layer l that some class reaches
    weights[l]    m_l, loss increase per unit of noise variance in layer l; d_l where nothing better is known
    reach[k][l]   whether class k may reach layer l, or a part of it
    clip_norm[k]  c_k, the bound on a contribution's whole gradient
    sigma[k]      the declared noise multiplier; inf marks a public class, which is owed nothing
    layers[l], classes[k]   what they are called, for messages
    stack         the layers themselves, for allocations that look at names and depths
    measure       what is known of the layers from proxy data, for allocations that need it
    steps, rates[k], delta[k], targets[k]   T, q_k, δ_k and the ε_k that sigma was calibrated to
    batch         Σ b_k, the contributions that a step expects
    rho[k]        ρ_k, if the plan was made from zCDP budgets
    factors[k][l] by what the class's profile weighs its threshold there: `make_plan` multiplies C by it, so an
                  allocation answers with C as if there were none. It takes S from `clip_with_factors(C)`
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    reach: tuple[tuple[bool, ...], ...]
    clip_norm: tuple[float, ...]
    sigma: tuple[float, ...]
    layers: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    stack: LayerStack | None = None
    measure: Measure | None = None
    steps: int = 1
    rates: tuple[float, ...] = ()
    delta: tuple[float, ...] = ()
    targets: tuple[float, ...] = ()
    batch: float = 0.0
    rho: tuple[float, ...] = ()
    factors: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        layers, classes = len(self.sizes), len(self.reach)
        if not self.layers:
            object.__setattr__(self, "layers", tuple(f"layer {i}" for i in range(layers)))
        if not self.classes:
            object.__setattr__(self, "classes", tuple(f"class {k}" for k in range(classes)))
        if len(self.weights) != layers or any(len(row) != layers for row in self.reach):
            problem = f"weights and reach must have {layers} entries"
            raise PlanError("allocate.problem-shape", problem, "give one per layer")
        if self.factors and [len(row) for row in self.factors] != [layers] * classes:
            problem = f"factors must be {classes} × {layers}"
            raise PlanError("allocate.problem-shape", problem, "correct them, or leave them out")
        if len(self.clip_norm) != classes or len(self.sigma) != classes:
            problem = f"clip_norm and sigma must have {classes} entries"
            raise PlanError("allocate.problem-shape", problem, "give one per class")
        for what, values in (("weights", self.weights), ("clip_norm", self.clip_norm), ("sigma", self.sigma)):
            for i, value in enumerate(values):
                if not value > 0 or (what == "weights" and math.isinf(value)):
                    problem = f"{what}[{i}] is {value!r}, must be > 0"
                    raise PlanError("allocate.problem-not-positive", problem, "correct it")

    @property
    def private(self) -> tuple[int, ...]:
        """The classes that are owed noise and reach something."""
        return tuple(k for k, s in enumerate(self.sigma) if math.isfinite(s) and any(self.reach[k]))

    @property
    def reached_share(self) -> tuple[float, ...]:
        """The part of each layer's numbers that some class reaches."""
        if self.stack is None:
            return (1.0,) * len(self.sizes)
        return tuple(size / layer.size for size, layer in zip(self.sizes, self.stack, strict=True))

    def clip_with_factors(self, clip: ClipMatrix) -> ClipMatrix:
        """C times the factors of the profiles: what a step is clipped to."""
        if not self.factors:
            return clip
        return tuple(
            tuple(c * f if c else c for c, f in zip(row, factors, strict=True))
            for row, factors in zip(clip, self.factors, strict=True)
        )

    def thresholds(self) -> tuple[tuple[float, ...], ...]:
        """C with each class's norm spread evenly over the L_k layers it reaches: c_k/√L_k; ‖C[k]‖ = c_k."""
        rows = []
        for row, c, sigma in zip(self.reach, self.clip_norm, self.sigma, strict=True):
            each = math.inf if math.isinf(sigma) else c / math.sqrt(max(sum(row), 1))
            rows.append(tuple(each if reached else 0.0 for reached in row))
        return tuple(rows)

    def needs_noise(self) -> tuple[bool, ...]:
        """The layers that some private class reaches; the others have S = 0."""
        return tuple(any(self.reach[k][i] for k in self.private) for i in range(len(self.sizes)))

    def equal_noise(self) -> tuple[float, ...]:
        """One S for all layers that need noise, up to the common factor that `rescale` finds."""
        return tuple(1.0 if needed else 0.0 for needed in self.needs_noise())


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """C, S and the form of clipping they are meant for. S counts up to a common factor.

    rules    how C and S may change while training (plan/rules.py)
    claimed  of a printed allocation: the ε that the document claims, by class. Then S is taken as it is
    batch_factor  what B is multiplied by: B only sets the scale of what the optimiser sees
    why      sentences that explain the choice: `lamina plan --explain` prints them
    returns_after  steps after which a printed algorithm returns the model, if that is before the last one
    """

    clip: tuple[tuple[float, ...], ...]
    noise: tuple[float, ...]
    clipping: Clipping
    rules: tuple[Rule, ...] = ()
    claimed: tuple[float, ...] = ()
    batch_factor: float = 1.0
    why: tuple[str, ...] = ()
    returns_after: int | None = None


Allocate = Callable[[AllocationProblem], Allocation]


class Allocator(Protocol):
    """An allocation with a name and options of its own: a frozen dataclass."""

    @property
    def name(self) -> str: ...

    def __call__(self, problem: AllocationProblem) -> Allocation: ...


Array = NDArray[np.float64]
_SLICE_EXPONENTS = {"norms": 0.5, "harm": 1.0, "fisher": 1.0}


CLIP_PART = 0.4
"""The clip norm that needs no tuning, as a part of the typical gradient norm on a proxy (docs/allocations/utility.md)."""

FAR_ABOVE = 2.0
"""A clip norm of more than so many times the typical gradient norm clips nobody and scales the noise up."""


def untuned_clip_norm(typical: float) -> float:
    """The clip norm for contributions whose gradients typically have this norm, rounded to two digits."""
    return float(f"{CLIP_PART * typical:.2g}")


def named(name: str, value: Any) -> dict[str, Any]:
    """A value under a name that is no identifier, for `lamina.validate`."""
    return {name: value}


def check_number(allocation: str, option: str, value: float, low: float, high: float, *, closed: bool = False) -> None:
    """Refuse an option outside (low, high), or [low, high] if closed."""
    limits: dict[str, Any] = {"least": low, "most": high} if closed else {"above": low, "below": high}
    validate.number(PlanError, "allocate.option-range", **limits, **named(f"{option} of {allocation}", value))


def check_one_of(allocation: str, option: str, value: str, accepted: tuple[str, ...]) -> None:
    """Refuse an option that is none of these words."""
    validate.one_of(PlanError, "allocate.option-unknown", accepted, **named(f"{option} of {allocation}", value))


def check_clipping(allocation: str, value: Clipping | str) -> Clipping:
    """The form of clipping that is meant: box or joint."""
    word = value.value if isinstance(value, Clipping) else value
    check_one_of(allocation, "clipping", word, (Clipping.BOX.value, Clipping.JOINT.value))
    return Clipping(word)


def measured_row(problem: AllocationProblem, what: str, allocation: str) -> Array:
    """A row of the measurement, one number > 0 per layer; refused if there is none, or one of another model.

    It was measured on whole layers: where slices leave a part of one out, norms shrink with its root, harm and Fisher
    information with it, as if all of its numbers were alike.
    """
    if problem.measure is None:
        raise PlanError(
            "allocate.needs-measure",
            f"{allocation} needs a measure of the layers, and the plan has none",
            "make one with `lamina plan --proxy gaussian --save-measure measure.json`, then give it as --measure FILE, "
            "as `measure` in RUN.toml or as make_plan(measure=…)",
        )
    row = np.asarray(getattr(problem.measure, what), dtype=np.float64)
    if not row.size and what == "influence":
        raise PlanError(
            "allocate.measure-without-influence",
            f"{allocation} needs influence functions, which the measure lacks",
            "measure with `lamina plan --influence`, or measure(…, influences=True)",
        )
    if not row.size:
        why = next((note for note in problem.measure.notes if note.startswith("no Δ")), "it was measured without")
        raise PlanError(
            "allocate.measure-without-delta",
            f"{allocation} needs `{what}`, which the measure lacks: {why}",
            "use an allocation that needs no Δ: pareto, proportional",
        )
    if row.shape != (len(problem.sizes),):
        raise PlanError(
            "allocate.measure-length",
            f"the measure has {what} for {row.size} of {len(problem.sizes)} layers",
            "measure this model",
        )
    return row * np.asarray(problem.reached_share) ** _SLICE_EXPONENTS.get(what, 0.0)


def noise_weights(problem: AllocationProblem, kind: str, allocation: str) -> Array:
    """m_l, the loss that a unit of noise variance costs: measured ("harm"), or the number of parameters ("sizes")."""
    if kind == "harm":
        return measured_row(problem, "harm", allocation)
    return np.asarray(problem.weights, dtype=np.float64)


# The convex program behind `pareto`, solved through its dual with a certificate.
#
#     primal   min_x Σ_l m_l/x_l   subject to  Σ_l A[k,l] x_l ≤ 1 for every class k;   x = 1/S², A = (C sigma)²
#     dual     max_λ≥0  2 Σ_l √(m_l a_l) − Σ_k λ_k,   a = Aᵀλ,   attained at  x_l = √(m_l/a_l)
#
# The dual has one variable per class, however many layers there are. Its gradient in λ is the slack A x − 1, so
# the conditions of optimality are  s = 1 − A x ≥ 0,  λ ≥ 0,  λ s = 0. Newton's method solves them for λ s = μ,
# μ → 0. Any λ bounds the primal from below, and x divided by max_k (A x)_k is feasible: the gap between the two
# says how far from the optimum the answer is.

TOLERANCE = 1e-10
_MOST_NEWTON_STEPS = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class LeastNoise:
    """S per layer, the price λ of each class, and the relative duality gap."""

    noise: Array
    price: Array
    gap: float


def least_noise(clip: Array, weights: Array, sigma: Array) -> LeastNoise:
    """The S (L) that minimises Σ m S² such that every row of C (K × L) has sigma at least as declared."""
    a = np.square(clip * sigma[:, None])
    scale_a, scale_m = (a.max(), weights.max())  # units: x counts in 1/scale_a, the objective in scale_a·scale_m
    a, m = a / scale_a, weights / scale_m
    price = (
        np.array([np.sqrt(m * a[0]).sum() ** 2]) if len(a) == 1 else _interior_point(a, m)
    )  # one class: √λ = Σ √(m a)
    x, gap = _feasible_point(a, m, price)
    if not gap <= TOLERANCE:
        problem = f"the allocation did not converge: relative gap {gap:.1e}, must be <= {TOLERANCE:.0e}"
        remedy = "move clip norms and weights closer to one scale, or use allocate='flat'"
        raise PlanError("allocate.not-converged", problem, remedy)
    return LeastNoise(noise=np.sqrt(scale_a / x), price=price * scale_a * scale_m, gap=gap)


def _feasible_point(a: Array, m: Array, price: Array) -> tuple[Array, float]:
    """The feasible x of these prices, and its relative distance from the dual bound.

    Scaling λ is free in the dual; at the best scale its value is (Σ_l √(m_l a_l))²/Σ_k λ_k.
    """
    pull = a.T @ price
    x = np.sqrt(m / pull)
    x /= (a @ x).max()
    above, below = (m / x).sum(), np.sqrt(m * pull).sum() ** 2 / price.sum()
    return x, float((above - below) / above)


def _interior_point(a: Array, m: Array) -> Array:
    """Primal-dual interior point on  1 − A x(λ) = s,  λ s = μ."""
    classes = len(a)
    direction = np.full(classes, 1.0 / classes)
    price = direction * np.sqrt(m * (a.T @ direction)).sum() ** 2
    slack = np.full(classes, 1.0)
    best, best_gap = price, np.inf
    for _ in range(_MOST_NEWTON_STEPS):
        pull = a.T @ price
        x = np.sqrt(m / pull)
        gap = _feasible_point(a, m, price)[1]
        if gap < best_gap:
            best, best_gap = price, gap
        mu = float(price @ slack) / classes
        residual = 1.0 - a @ x - slack
        if mu <= 1e-17 * price.sum() and np.abs(residual).max() <= 1e-14:
            break
        target = 0.1 * mu
        hessian = (a * (0.5 * x / pull)) @ a.T
        # eliminate the slack: (H + diag(s/λ)) dλ = −residual + μ'/λ − s
        try:
            step = np.linalg.solve(hessian + np.diag(slack / price), target / price - slack - residual)
        except np.linalg.LinAlgError:  # classes that are all but equal: the certificate decides
            break
        slack_step = (target - slack * step) / price - slack
        length = min(_step_to_boundary(price, step), _step_to_boundary(slack, slack_step))
        price, slack = price + length * step, slack + length * slack_step
    return np.asarray(best)


def _step_to_boundary(value: Array, step: Array) -> float:
    """The longest part of the step, at most 1, that keeps every entry well above 0."""
    falling = step < 0
    return float(min(1.0, 0.99 * np.min(-value[falling] / step[falling], initial=np.inf)))


def clip_of_shape(problem: AllocationProblem, shape: Array) -> ClipMatrix:
    """C[k,l] = c_k·r_l/√Σ_j r_j² over the layers that class k reaches: the shape r, and ‖C[k]‖ = c_k."""
    for name, r in zip(problem.layers, shape.tolist(), strict=True):
        if not 0 < r < math.inf:
            raise PlanError(
                "allocate.threshold-not-positive",
                f"layer {name!r} has threshold {r!r}, must be > 0",
                "freeze the layer",
            )
    rows = []
    for reach, c, sigma in zip(problem.reach, problem.clip_norm, problem.sigma, strict=True):
        if math.isinf(sigma):
            rows.append(tuple(math.inf if reached else 0.0 for reached in reach))
            continue
        r = np.where(reach, shape, 0.0)
        r = r / max(r.max(), np.finfo(float).tiny)  # squares that neither overflow nor vanish
        rows.append(tuple((c * r / max(float(np.linalg.norm(r)), np.finfo(float).tiny)).tolist()))
    return tuple(rows)


def noise_by_shares(problem: AllocationProblem, clip: ClipMatrix, parts: Array) -> tuple[float, ...]:
    """S such that layer l takes the part w_l of a class's budget:  S_l = sigma·C_l/√w_l,  Σ_l w_l = 1.

    With several classes each has its own w, `parts` over what it reaches, and S_l is the largest that any asks for:
    no class is served worse than declared.
    """
    noise, clip = np.zeros(len(problem.sizes)), problem.clip_with_factors(clip)
    for k in problem.private:
        reach = np.asarray(problem.reach[k])
        w = parts[reach] / parts[reach].sum()
        needed = problem.sigma[k] * np.asarray(clip[k])[reach] / np.sqrt(w)
        noise[reach] = np.maximum(noise[reach], needed)
    return tuple(noise.tolist())


def optimal_noise(problem: AllocationProblem, clip: ClipMatrix, weights: Array) -> tuple[float, ...]:
    """S that minimises Σ m_l S_l² such that every private class has its sigma (allocate/problem.py)."""
    private, noised, clip = problem.private, np.array(problem.needs_noise()), problem.clip_with_factors(clip)
    noise = np.zeros(len(problem.sizes))
    if private:
        thresholds = np.array([clip[k] for k in private])[:, noised]
        sigma = np.array([problem.sigma[k] for k in private])
        noise[noised] = least_noise(thresholds, weights[noised], sigma).noise
    return tuple(noise.tolist())
