"""Allocations that need no choice while training: flat, uniform, proportional, pareto, quantile, automatic, lsab."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from lamina.allocate.problem import (
    Allocation,
    AllocationProblem,
    ClipMatrix,
    check_clipping,
    check_number,
    check_one_of,
    clip_of_shape,
    measured_row,
    noise_by_shares,
    noise_weights,
    optimal_noise,
)
from lamina.errors import PlanError
from lamina.plan.rules import FollowQuantile, rescale_noise
from lamina.plan.step_plan import Clipping


@dataclass(frozen=True, kw_only=True, slots=True)
class Flat:
    """Joint clipping with equal S: ‖g‖ ≤ c_k over the layers that the class reaches, S = sigma_k·c_k.

    The classical DP-SGD step. With several classes S serves the one that needs most.
    """

    name: ClassVar[str] = "flat"
    clipping: ClassVar[Clipping] = Clipping.JOINT
    why: ClassVar[str] = (
        "flat clips the whole gradient once and gives every layer the same noise: layers differ in what they take of "
        "the budget by their gradients alone, and nothing about them need be known."
    )

    def __call__(self, problem: AllocationProblem) -> Allocation:
        noise = problem.equal_noise()
        return Allocation(clip=problem.thresholds(), noise=noise, clipping=self.clipping, why=(self.why,))


@dataclass(frozen=True, kw_only=True, slots=True)
class Uniform(Flat):
    """Box clipping at C_l = c_k/√L_k with one S = sigma_k·c_k: what per-layer clipping usually means."""

    name: ClassVar[str] = "uniform"
    clipping: ClassVar[Clipping] = Clipping.BOX
    why: ClassVar[str] = (
        "uniform clips every layer on its own at c/√L and gives all the same noise: the noise of flat, and a box inside "
        "its ball, so it clips more. It buys one pass per step."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Proportional:
    """w_l = 1/L_k, hence S_l = sigma_k·√L_k·C[k,l]: the same signal-to-noise ratio for every layer's whole gradient.

    C follows the typical norms n_l of the measurement; without one √d_l, the norm of a gradient whose entries are
    all alike. (With even C equal shares would be `uniform`.) Box clipping unless `clipping` says joint.
    """

    name: ClassVar[str] = "proportional"
    clipping: Clipping = Clipping.BOX

    def __post_init__(self) -> None:
        object.__setattr__(self, "clipping", check_clipping(self.name, self.clipping))

    def __call__(self, problem: AllocationProblem) -> Allocation:
        if problem.measure is None:
            shape, source = np.sqrt(np.asarray(problem.sizes, dtype=np.float64)), "√d of each layer"
        else:
            shape = measured_row(problem, "norms", self.name)
            source = f"the typical norms on the proxy ({problem.measure.proxy})"
        clip = clip_of_shape(problem, shape)
        return Allocation(
            clip=clip,
            noise=noise_by_shares(problem, clip, np.ones(len(problem.sizes))),
            clipping=self.clipping,
            why=(f"proportional gives every layer the same share of the budget; C follows {source}, S follows C.",),
        )


FLAT_IS_AS_GOOD = 0.8
"""Above this ratio of noise, flat is as good: what is saved is less than what a proxy is wrong by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pareto:
    """Minimise Σ_l m_l S_l² such that Σ_l (C[k,l]/S_l)² ≤ 1/sigma_k² for every private class k.

    With one class the optimum is in closed form (docs/theory.md, "Choosing C and S"),

        S_l² = sigma² · (C_l/√m_l) · Σ_j C_j √m_j,        share of the budget  C_l√m_l / Σ_j C_j√m_j

    with several it is a small convex program. The parts of it:

      C         follows the typical norms n_l of the measurement; without one C_l ∝ √m_l: then one class gets `flat`,
                exactly, and several get equal S wherever the same classes reach, each its whole budget
      weights   m_l: "sizes" (d_l, the number of parameters) or "harm" (measured on the proxy)
      shrink    s in [0, 1]: C_l ∝ n_l^(1-s)·(√m_l)^s. At 1 C_l ∝ √m_l, all S are equal and a joint clip is exactly
                `flat`; in between it guards against a proxy that knows the norms badly
      clipping  joint by default: for the same S and ε it never clips more than the box inside it
    """

    name: ClassVar[str] = "pareto"
    weights: str = "sizes"
    shrink: float = 0.0
    clipping: Clipping = Clipping.JOINT

    def __post_init__(self) -> None:
        check_one_of(self.name, "weights", self.weights, ("sizes", "harm"))
        check_number(self.name, "shrink", self.shrink, 0.0, 1.0, closed=True)
        object.__setattr__(self, "clipping", check_clipping(self.name, self.clipping))

    def __call__(self, problem: AllocationProblem) -> Allocation:
        m = noise_weights(problem, self.weights, self.name)
        norms = np.sqrt(m) if problem.measure is None else measured_row(problem, "norms", self.name)
        shape = np.exp((1 - self.shrink) * np.log(norms) + self.shrink * 0.5 * np.log(m))
        clip = clip_of_shape(problem, shape)
        noise = optimal_noise(problem, clip, m)
        return Allocation(clip=clip, noise=noise, clipping=self.clipping, why=self._why(problem, clip, noise, m))

    def _why(
        self, problem: AllocationProblem, clip: ClipMatrix, noise: tuple[float, ...], m: NDArray[np.float64]
    ) -> tuple[str, ...]:
        if problem.measure is None:
            source = "nothing is known of the layers' norms, so C goes with the square root of their sizes, as in flat"
        else:
            source = f"C follows the typical norms n on the proxy ({problem.measure.proxy})"
        if self.shrink:
            source += f", shrunk by {self.shrink:g} toward √m"
        lines = [f"pareto: {source}; S makes Σ m·S² least, m = {_WEIGHT_MEANINGS[self.weights]}."]
        if problem.private:
            ratio = noise_relative_to_flat(problem, clip, noise, m)
            several = " (which serves the strictest class only)" if len(problem.private) > 1 else " at the same ε"
            verdict = (
                f"above {FLAT_IS_AS_GOOD:g}, so flat is as good"
                if ratio > FLAT_IS_AS_GOOD
                else "the rest is what it saves"
            )
            lines.append(f"Its weighted noise is {ratio:.3f} of what flat would add{several}: {verdict}.")
        return tuple(lines)


_WEIGHT_MEANINGS = {"sizes": "the layer's number of parameters", "harm": "the harm measured on the proxy"}


def noise_relative_to_flat(
    problem: AllocationProblem, clip: ClipMatrix, noise: tuple[float, ...], m: NDArray[np.float64]
) -> float:
    """Σ m S² of this noise over that of flat, both at the declared sigma.

    With one class that reaches all layers:  (Σ n_l √m_l)² / (Σ n_l² · Σ m_l),  n the shape of C; at most 1.
    """
    ours = rescale_noise(problem.clip_with_factors(clip), noise, problem.sigma)
    flat = rescale_noise(problem.clip_with_factors(problem.thresholds()), problem.equal_noise(), problem.sigma)
    return float(m @ np.square(ours) / (m @ np.square(flat)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantile:
    """Box clipping at thresholds that move at every step (Andrew et al. 2021, one quantile per layer):

        C_l ← C_l·exp(-rate·(b̃_l - target)),     b̃_l = (Σ_i (bit_il - ½) + N(0, σ_b²))/B + ½

    bit_il says that contribution i was not clipped at layer l. The counts are a release like the gradient, in the
    same step: a contribution moves the L_k counts of its layers by ½ each, so

        sigma_k^-2 = Σ_l (C[k,l]/S_l)² + L_k/(4σ_b²)

    and σ_b is the least noise for which the counts take at most the part `cost` of every class's budget:
    σ_b = max_k sigma_k·√L_k/(2√cost). The gradients get the rest: S grows by 1/√(1-cost).

    The start is C ∝ n_l if norms were measured, else even; S by the optimum for d_l.
    """

    name: ClassVar[str] = "quantile"
    target: float = 0.5
    rate: float = 0.2
    cost: float = 0.01

    def __post_init__(self) -> None:
        check_number(self.name, "target", self.target, 0.0, 1.0)
        check_number(self.name, "rate", self.rate, 0.0, 10.0)
        check_number(self.name, "cost", self.cost, 0.0, 1.0)

    def __call__(self, problem: AllocationProblem) -> Allocation:
        if problem.measure is None:
            clip, start = problem.thresholds(), "even thresholds"
        else:
            clip = clip_of_shape(problem, measured_row(problem, "norms", self.name))
            start = f"the typical norms on the proxy ({problem.measure.proxy})"
        noise = optimal_noise(problem, clip, np.asarray(problem.weights, dtype=np.float64))
        counts = max((problem.sigma[k] * math.sqrt(sum(problem.reach[k])) for k in problem.private), default=0.0) / (
            2.0 * math.sqrt(self.cost)
        )
        rules = (FollowQuantile(target=self.target, rate=self.rate, noise=counts),) if counts else ()
        return Allocation(
            clip=clip,
            noise=noise,
            clipping=Clipping.BOX,
            rules=rules,
            why=(
                f"quantile starts from {start} and moves each toward the {self.target:g} quantile of the norms.",
                f"The counts that tell it so get noise {counts:.4g} and take {100 * self.cost:g} % of the strictest "
                f"class's budget; the gradients get {100 / math.sqrt(1 - self.cost) - 100:.2g} % more noise for it.",
            ),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Automatic:
    """Automatic clipping (Bu et al. 2023), which scales a gradient by 1/(‖g‖ + γ), as a clip at a small threshold.

    A clip multiplies by min(1, C/‖g‖). At C = f·c_k with a small f nearly every contribution is longer than C, and
    the step releases

        f·c_k · Σ_i g_i/max(‖g_i‖, f·c_k)  +  N(0, (sigma_k·f·c_k)²),         divided by f·B:

    normalised gradients of length c_k, with the noise of `flat`. Where the paper has ‖g‖ + γ there is max(‖g‖, f·c_k):
    a contribution that is all but fitted (‖g‖ < f·c_k) fades out in both. f is common to all classes; it is

        f = gamma · min(1, min_k n_k/c_k),      n_k the typical norm of the class's whole gradient, if it was measured.

    Dividing by f·B instead of B changes no privacy, B being public; learning rates mean what they do under `flat`. A
    public class is not clipped, so it cannot take part.
    """

    name: ClassVar[str] = "automatic"
    gamma: float = 0.01

    def __post_init__(self) -> None:
        check_number(self.name, "gamma", self.gamma, 0.0, 1.0)

    def __call__(self, problem: AllocationProblem) -> Allocation:
        public = [name for name, sigma in zip(problem.classes, problem.sigma, strict=True) if math.isinf(sigma)]
        if public:
            raise PlanError(
                "allocate.automatic-public-class",
                f"automatic divides by {self.gamma:g} of the batch, and class {public[0]!r} is public, so not clipped: "
                "its gradient would count that many times over",
                f"use flat or pareto, or leave the class out with batch={{{public[0]!r}: 0, …}}",
            )
        f = self.fraction(problem)
        clip = tuple(tuple(c if math.isinf(c) else f * c for c in row) for row in problem.thresholds())
        return Allocation(
            clip=clip,
            noise=problem.equal_noise(),
            clipping=Clipping.JOINT,
            batch_factor=f,
            why=(
                f"automatic clips the whole gradient at {f:.3g} of the class's norm, so that nearly every contribution "
                "counts by its direction alone, and divides by as much less: the clip norm only scales the step.",
            ),
        )

    def fraction(self, problem: AllocationProblem) -> float:
        """f: how much smaller than the class's norm the threshold is."""
        if problem.measure is None or not problem.private:
            return self.gamma
        squares = np.square(measured_row(problem, "norms", self.name))
        typical = [math.sqrt(squares[np.asarray(problem.reach[k])].sum()) for k in problem.private]
        least = min(n / problem.clip_norm[k] for n, k in zip(typical, problem.private, strict=True))
        return self.gamma * min(1.0, least)


WIDEST_SPREAD = 1e12
"""The widest range of Δ that is still a shape: beyond, float32 carries some layers and not others."""


def refuse_wide_spread(delta: np.ndarray, bound: str) -> None:
    """PlanError if Δ of the layers spans so much that thresholds in proportion to it would stop some of them."""
    low, high = float(delta.min()), float(delta.max())
    spread = high / low if math.isfinite(high) else math.inf  # plain floats: a quotient may overflow
    if not spread <= WIDEST_SPREAD:
        raise PlanError(
            "allocate.delta-spread",
            f"Δ ({bound}) of the layers spans a factor of {spread:.1e}, above {WIDEST_SPREAD:.0e}: the lowest "
            "thresholds would stop their layers",
            "use bound='tight', a smaller or better normalised model, or allocate='pareto'",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LSAB:
    """C_l ∝ Δ_l, the layer's tight bound by recursion through depth on proxy inputs; ‖C[k]‖ = c_k.

    S minimises Σ m_l S_l² such that every class has its sigma, in closed form for one class (see `Pareto`). So a
    step takes exactly

        ρ_step = ½ Σ_l (C_l/S_l)² = 1/(2 sigma²),      and with make_plan(rho=ρ_cap)  ρ_step = ρ_cap/T.

    Δ_l is an expectation over a proxy, which bounds nobody: it is a rule for the *shape* of C. What makes the step
    private is that every contribution is clipped to C_l. A Δ that is wrong costs utility, never privacy.

      weights   m_l: "harm" (measured on the proxy, as the document means) or "sizes" (d_l)
      bound     which recursion shapes C: "tight" (local constants) or "worst" (global suprema)
      clipping  box, as the document has it, or joint
    """

    name: ClassVar[str] = "lsab"
    weights: str = "harm"
    bound: str = "tight"
    clipping: Clipping = Clipping.BOX

    def __post_init__(self) -> None:
        check_one_of(self.name, "weights", self.weights, ("harm", "sizes"))
        check_one_of(self.name, "bound", self.bound, ("tight", "worst"))
        object.__setattr__(self, "clipping", check_clipping(self.name, self.clipping))

    def __call__(self, problem: AllocationProblem) -> Allocation:
        delta = measured_row(problem, self.bound, self.name)
        refuse_wide_spread(delta, self.bound)
        clip = clip_of_shape(problem, delta)
        return Allocation(
            clip=clip,
            noise=optimal_noise(problem, clip, noise_weights(problem, self.weights, self.name)),
            clipping=self.clipping,
            why=self._why(problem, delta),
        )

    def _why(self, problem: AllocationProblem, delta: np.ndarray) -> tuple[str, ...]:
        assert problem.measure is not None
        low, high = int(np.argmin(delta)), int(np.argmax(delta))
        lines = [
            f"lsab: C follows Δ, the {self.bound} bound by recursion through depth on the proxy "
            f"({problem.measure.proxy}), from {delta[low]:.3g} at {problem.layers[low]!r} to {delta[high]:.3g} at "
            f"{problem.layers[high]!r}.",
            "Δ is a rule for the shape of C, not a sensitivity bound: clipping to C is what makes the step private.",
        ]
        for k in problem.private:
            lines.append(
                f"Every step takes ρ = {0.5 / problem.sigma[k] ** 2:.4g} at most of class {problem.classes[k]!r}; "
                f"{problem.steps:,} steps take {0.5 * problem.steps / problem.sigma[k] ** 2:.4g} without sampling."
            )
        return tuple(lines)


flat, uniform, proportional, pareto = Flat(), Uniform(), Proportional(), Pareto()
quantile, automatic, lsab = Quantile(), Automatic(), LSAB()
