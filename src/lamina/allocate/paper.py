"""The LSAB and LADP papers' noise exactly as they print it, to be measured. Not private: never use them to train."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lamina.account.gaussian_rdp import choice_noise_multiplier, classical_zcdp_epsilon
from lamina.allocate.ladp import DEPTH_SLOPE, SensitiveLayers, check_sensitive, sensitive_layers
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
from lamina.plan.rules import ChooseAsPrinted, effective_sigma
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
    """Algorithm 1, all of it. Before every step (lines 3 and 4) the Fisher information of the layers is taken from a
    private sample, and an exponential mechanism picks which part of the step's budget every layer gets. Every entry of
    the batch's mean gradient is clipped to ±c_l and gets noise of standard deviation ε_l (lines 7 to 17):

        ε_l = part_l·pace·ε/T,  Σ part = 1;      c_l = 1.0, noise ε_l        in sensitive layers
                                                 c_l = 5.0, noise ε_l/2      in others

    Then ε ← ε − Σ_l ε_l, and the model is returned once ε ≤ 0 (lines 18 to 21). All candidates have the same Σ_l ε_l, so
    that happens after ⌈T/pace⌉ steps, which are the steps of the plan.

    Nothing bounds one contribution but the clipping itself: adding or replacing it can move each of the d_l entries from
    one edge to the other, an L2 sensitivity of C_l = 2·c_l·√d_l. The noise grows with ε, so asking for more privacy gives
    less. `plan.epsilon` is the true figure: of the candidate with the least noise in every step, and of every choice.

      sensitive       as for `LADP`
      pace            how many times faster than ε/T a step spends
      choose_epsilon  ε of one exponential mechanism, for which the document charges nothing
      split           one more candidate, in proportion to what a measure says: "fisher" or "influence"
    """

    name: ClassVar[str] = "printed-ladp"
    sensitive: SensitiveLayers | None = None
    share: float = 0.25
    pace: float = 1.0
    choose_epsilon: float = 0.5
    split: str | None = None

    def __post_init__(self) -> None:
        check_sensitive(self.name, self.sensitive)
        if self.split is not None:
            check_one_of(self.name, "split", self.split, ("fisher", "influence"))
        check_number(self.name, "share", self.share, 0.0, 1.0)
        check_number(self.name, "pace", self.pace, 0.0, 1e6)
        choice_noise_multiplier(self.choose_epsilon)

    def __call__(self, problem: AllocationProblem) -> Allocation:
        _check_targets(problem, self.name)
        picked, because = sensitive_layers(problem, self.sensitive, self.share, self.name)
        noised, layers = np.array(problem.needs_noise()), len(problem.sizes)
        target = min(problem.targets[k] for k in problem.private)
        spend = self.pace * target / problem.steps
        slope = DEPTH_SLOPE ** (np.arange(layers) / max(layers - 1, 1))
        shapes = {
            "even": np.ones(layers),
            "sensitive": np.where(picked, 2.0, 1.0),
            "input-heavy": 1.0 / slope,
            "output-heavy": slope,
            "sizes": np.asarray(problem.sizes, dtype=np.float64),
        }
        if self.split is not None:
            shapes[self.split] = measured_row(problem, self.split, self.name)
        parts = [np.where(noised, shape, 0.0) / shape[noised].sum() for shape in shapes.values()]
        noise = [spend * part * np.where(picked, 1.0, 0.5) for part in parts]
        bound = 2.0 * np.where(picked, 1.0, 5.0) * np.sqrt(np.asarray(problem.sizes, dtype=np.float64))
        clip = _same_clip_for_all(problem, bound)
        least = min(noise, key=lambda row: min(effective_sigma(clip[k], row.tolist()) for k in problem.private))
        returns = min(problem.steps, math.ceil(problem.steps / self.pace))
        choice = ChooseAsPrinted(
            epsilon=self.choose_epsilon, every=1, names=tuple(shapes), noise=tuple(tuple(row.tolist()) for row in noise),
            parts=tuple(tuple(part.tolist()) for part in parts), spend=spend,
        )  # fmt: skip
        return Allocation(
            clip=clip,
            noise=tuple(least.tolist()),
            clipping=Clipping.ELEMENTWISE,
            rules=(choice,),
            claimed=tuple(target if k in problem.private else 0.0 for k in range(len(clip))),
            why=(
                because,
                f"printed-ladp reproduces algorithm 1: ε = {target:g} less {spend:.3g} in every step, so it returns after "
                f"{returns:,} of {problem.steps:,} steps. Noise of standard deviation {least[noised].min():.3g} to "
                f"{least.max():.3g} is added to a batch gradient that one contribution can move by {bound.max():.4g}. Its "
                "claim does not hold.",
            ),
            returns_after=returns,
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
