"""The LSAB and LADP papers' noise exactly as they print it, to be measured. Not private: never use them to train."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lamina.account.gaussian_rdp import classical_zcdp_epsilon
from lamina.allocate.ladp import SensitiveLayers, check_sensitive, sensitive_layers
from lamina.allocate.problem import (
    Allocation,
    AllocationProblem,
    ClipMatrix,
    check_number,
    check_one_of,
    measured_row,
    noise_weights,
)
from lamina.errors import EngineError, PlanError
from lamina.plan.step_plan import Clipping, StepPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperLSAB:
    """C_l = Δ_l by the printed recursion, and  S_l = Δ_l·√(L·m_l/(2·ρ_cap·Σ_j m_j))        (eq. 16)

    A step then spends  ½ Σ (C_l/S_l)² = ρ_cap·(Σm)(Σ1/m)/L = ρ_cap · L·AM(m)/HM(m):  12 times the whole budget for 12
    layers of equal m, 306 times for six of m = 1 and six of m = 100, at every one of T steps.

      per_step  puts ρ_cap/T for ρ_cap, as eq. 21 has it and eq. 16 does not: T times less, still L·AM/HM too much
      weights   m_l: "harm" (measured, the document's MSE per unit of noise) or "sizes"
      bound     which Δ: "printed"; "worst" (Table 8 without local Lipschitz constants); "tight" (sound local constants).
                Where the printed one has γ of eq. 12 the measure decides (`measure(gamma=…)`)
      pareto    False: S_l = Δ_l·√(L/(2·ρ_cap)), even shares (Table 8 without Pareto allocation)

    ρ_cap is what make_plan was given, or what eq. 4 makes of the target ε. The claim is eq. 22,
    ε = ρ_cap + 2√(ρ_cap log 1/δ). `plan.epsilon` is the true figure: exact for Gaussian noise, no credit for sampling.
    """

    name: ClassVar[str] = "printed-lsab"
    per_step: bool = False
    weights: str = "harm"
    bound: str = "printed"
    pareto: bool = True

    def __post_init__(self) -> None:
        check_one_of(self.name, "weights", self.weights, ("harm", "sizes"))
        check_one_of(self.name, "bound", self.bound, ("printed", "worst", "tight"))

    def __call__(self, problem: AllocationProblem) -> Allocation:
        _check_targets(problem, self.name)
        delta = measured_row(problem, self.bound, self.name)
        m = noise_weights(problem, self.weights, self.name) if self.pareto else np.ones(len(delta))
        cap = min(rho_cap(problem, k) for k in problem.private)
        budget = cap / problem.steps if self.per_step else cap
        noise = delta * np.sqrt(len(m) * m / (2.0 * budget * m.sum()))
        noised = np.array(problem.needs_noise())
        clip = _same_clip_for_all(problem, delta)
        over = float(m.sum() * (1 / m).sum() / len(m))
        return Allocation(
            clip=clip,
            noise=tuple(np.where(noised, noise, 0.0).tolist()),
            clipping=Clipping.BOX,
            claimed=tuple(
                classical_zcdp_epsilon(cap, problem.delta[k]) if k in problem.private else 0.0 for k in range(len(clip))
            ),
            why=(
                f"printed-lsab reproduces eq. 16 with ρ_cap = {cap:.4g}{' / T' if self.per_step else ', without T'}: "
                f"one step spends {over:.4g} times {'ρ_cap / T' if self.per_step else 'ρ_cap'}. By its own "
                "accounting the claim does not hold.",
            ),
        )


def _check_targets(problem: AllocationProblem, name: str) -> None:
    if not problem.private:
        raise PlanError("allocate.no-private-class", f"{name} needs a private class", "use another allocation")
    if not len(problem.targets) == len(problem.delta) == len(problem.sigma):
        raise PlanError("allocate.no-target", f"{name} needs ε and δ of the classes", "use make_plan")


def _same_clip_for_all(problem: AllocationProblem, row: np.ndarray) -> ClipMatrix:
    """C with these thresholds wherever a class reaches; a public class is not clipped."""
    return tuple(
        tuple(np.where(reach, math.inf if math.isinf(sigma) else row, 0.0).tolist())
        for reach, sigma in zip(problem.reach, problem.sigma, strict=True)
    )


def rho_cap(problem: AllocationProblem, k: int) -> float:
    """ρ_cap of class k: given, or eq. 4 solved for the target ε:  √ρ = √(log 1/δ + ε) − √(log 1/δ)."""
    if problem.rho:
        return problem.rho[k]
    log, target = math.log(1.0 / problem.delta[k]), problem.targets[k]
    return (target / (math.sqrt(log + target) + math.sqrt(log))) ** 2


paper_lsab = PaperLSAB()


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperLADP:
    """Every entry of the batch's mean gradient is clipped to ±c_l and gets noise of standard deviation ε_l:

        ε_l = part_l·ε/T,  Σ part = 1;      c_l = 1.0, noise ε_l        in sensitive layers
                                            c_l = 5.0, noise ε_l/2      in others

    so that ε − Σ_t Σ_l ε_l reaches 0 after T steps (lines 4, 7 to 13, 18). Nothing bounds one contribution but the box
    itself: adding or replacing it can move each of the d_l entries from one edge to the other, an L2 sensitivity of
    C_l = 2·c_l·√d_l. The noise grows with ε, so asking for more privacy gives less. `plan.epsilon` is the true figure.

      split      "even"; "fisher" or "influence": in proportion to the proxy's Fisher information or influence
      sensitive  as for `LADP`
    """

    name: ClassVar[str] = "printed-ladp"
    sensitive: SensitiveLayers | None = None
    share: float = 0.25
    split: str = "even"

    def __post_init__(self) -> None:
        check_sensitive(self.name, self.sensitive)
        check_number(self.name, "share", self.share, 0.0, 1.0)
        check_one_of(self.name, "split", self.split, ("even", "fisher", "influence"))

    def __call__(self, problem: AllocationProblem) -> Allocation:
        _check_targets(problem, self.name)
        picked, because = sensitive_layers(problem, self.sensitive, self.share, self.name)
        layers = len(problem.sizes)
        parts = np.ones(layers) if self.split == "even" else measured_row(problem, self.split, self.name)
        target = min(problem.targets[k] for k in problem.private)
        each = target / problem.steps * parts / parts.sum()
        noise = np.where(problem.needs_noise(), each * np.where(picked, 1.0, 0.5), 0.0)
        bound = 2.0 * np.where(picked, 1.0, 5.0) * np.sqrt(np.asarray(problem.sizes, dtype=np.float64))
        clip = _same_clip_for_all(problem, bound)
        return Allocation(
            clip=clip,
            noise=tuple(noise.tolist()),
            clipping=Clipping.ELEMENTWISE,
            claimed=tuple(target if k in problem.private else 0.0 for k in range(len(clip))),
            why=(
                because,
                f"printed-ladp reproduces algorithm 1: ε = {target:g} over {problem.steps:,} steps and {layers} layers "
                f"is noise of standard deviation {noise[noise > 0].min():.3g} to {noise.max():.3g} on a batch gradient "
                f"that one contribution can move by {bound.max():.4g}. Its claim does not hold.",
            ),
        )


paper_ladp = PaperLADP()


class ReproductionWarning(UserWarning):
    """A plan that reproduces a paper, whose claim does not hold."""


def warn_if_reproduction(plan: StepPlan) -> None:
    """Warn, before anything is trained, that a plan which reproduces a paper is less private than it claims."""
    private = [k for k, entry in enumerate(plan.classes) if not entry.public]
    if plan.clipping is Clipping.ELEMENTWISE and len(private) != 1:
        problem = f"elementwise clipping clamps the batch as a whole, and the plan has {len(private)} private classes"
        raise EngineError("engine.elementwise-needs-one-class", problem, "give the plan one private class")
    if not plan.claimed:
        return
    said = "; ".join(
        f"class '{plan.classes[k].name}': ε = {plan.claimed[k]:.4g} is claimed, ε = {plan.epsilon(k):.4g} is true"
        for k in private
    )
    text = f"allocation '{plan.allocation}' reproduces a paper and is less private than that claims. {said}"
    warnings.warn(text, ReproductionWarning, stacklevel=3)
