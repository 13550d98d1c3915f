"""`Adaptation`: clip norms and noise that change while a plan runs, and never promise less than was declared."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lamina.allocate.ladp import Candidate, draw, plan_candidates, utilities
from lamina.engine.clipping import nonempty_contributions
from lamina.engine.grads import row_norm_sq
from lamina.engine.noise import NoiseSource
from lamina.engine.safety_checks import CheckedBatch
from lamina.errors import EngineError, LaminaError, PlanError
from lamina.plan.rules import (
    LEAST_MAGNITUDE,
    MOST_MAGNITUDE,
    Choose,
    FollowBudget,
    FollowEnergy,
    FollowQuantile,
    rescale_noise,
    short_repr,
)
from lamina.plan.step_plan import StepPlan
from lamina.sensitivity.energy import EnergyEstimate


def foreign_state_error(why: str) -> EngineError:
    return EngineError(
        "engine.adaptation-state", f"the state of the adaptation {why}", "give what to_state() of the same plan said"
    )


def check_adaptation_state(state: Mapping[str, Any], mine: Mapping[str, Any], plan: StepPlan) -> None:
    """Refuse a state whose values are not of the kind, the number and the range of `mine`, a state of the same plan.

    Whether C and S keep what was declared, and what the energy is, is for the caller to ask.
    """
    if not _is_list(state["clip"], len(mine["clip"]), lambda row: _is_list(row, len(plan.layers), _is_finite)):
        raise foreign_state_error(f"has other layers or classes: clip {short_repr(state['clip'])}")
    for name in ("noise", "base", "drift"):
        if not _is_list(state[name], len(mine[name]), _is_finite):
            raise foreign_state_error(f"has other layers, or what is no number: {name} {short_repr(state[name])}")
    if any(share < 0 for share in state["base"]) or (state["base"] and not abs(sum(state["base"]) - 1.0) <= 1e-9):
        raise foreign_state_error(f"has shares {short_repr(state['base'])}, which are not those of one budget")
    if any(d <= 0 for d in state["drift"]):
        raise foreign_state_error(f"has drift {short_repr(state['drift'])}, must be > 0")
    _check_factors(state, plan.rule(FollowBudget))
    counted = 0 if plan.rule(FollowQuantile) is None else len(plan.layers)
    if state["counts"] != [] and not (counted and _is_list(state["counts"], counted, _is_number)):
        raise foreign_state_error(f"has counts {short_repr(state['counts'])}, must be none or one for each layer")
    _check_choice(state, plan)
    if "pace" in mine:
        _check_pace(state["pace"])


def _check_factors(state: Mapping[str, Any], rule: FollowBudget | None) -> None:
    least, most = (1.0, 1.0) if rule is None else (rule.least, rule.most)
    for name in ("factor", "proposed"):
        if not _is_finite(state[name]) or not least <= state[name] <= most:
            raise foreign_state_error(f"has {name} {short_repr(state[name])}, must lie in [{least:g}, {most:g}]")


def _check_choice(state: Mapping[str, Any], plan: StepPlan) -> None:
    chosen, choice, rule = state["chosen"], state["choice"], plan.rule(Choose)
    last = -1 if rule is None else plan.steps - 1
    if type(chosen) is not int or not -1 <= chosen <= last:
        raise foreign_state_error(f"has a choice before step {short_repr(chosen)}, must lie in [-1, {last}]")
    if not isinstance(choice, str) or choice not in ("", *(() if rule is None else rule.names)):
        raise foreign_state_error(f"has choice {short_repr(choice)}, which is no candidate")


def _check_pace(pace: Any) -> None:
    if not isinstance(pace, Mapping) or set(pace) != {"seen", "reference"}:
        raise foreign_state_error(f"has pace {short_repr(pace)}")
    seen, reference = pace["seen"], pace["reference"]
    if type(seen) is not int or seen < 0 or not _is_finite(reference) or reference < 0:
        raise foreign_state_error(f"has pace {short_repr(pace)}, must be a count and a number >= 0")


def _is_list(value: Any, length: int, each: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple) and len(value) == length and all(map(each, value))


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) < 2**53)


def _is_finite(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value)


FloatArray = NDArray[np.float64]
ClipRows = Sequence[Sequence[float]]


class DeclaredShares:
    """The declared plan, seen as thresholds and shares.

    The height of layer l is  h_l = max_k sigma_k·C[k,l]  over the private classes; a simplex of shares w turns it into

        S_l = κ·h_l/√w_l,      κ the least factor for which sigma_k ≥ declared for every class.

    With one class, w_l is the part of its budget that layer l takes, whatever w is. Layers that no private class
    reaches keep the S they have. `sizes` are the numbers of a layer that are noised, all of them unless said otherwise.
    """

    def __init__(self, plan: StepPlan, sizes: Sequence[int] | None = None) -> None:
        self.plan = plan
        classes = range(len(plan.classes))
        self.private = tuple(k for k in classes if not plan.classes[k].public and math.isfinite(plan.sigma(k)))
        self.sigma = tuple(plan.sigma(k) for k in classes)
        self.bits = tuple(plan.bits(k) for k in classes)
        self.noised = np.flatnonzero(self.heights(plan.clip) > 0)
        every = [layer.size for layer in plan.layers] if sizes is None else sizes
        self.sizes = tuple(every[i] for i in self.noised.tolist())

    def heights(self, clip: ClipRows) -> FloatArray:
        """h of every layer; 0 where no private class reaches."""
        rows = [np.asarray(clip[k], dtype=np.float64) * self.sigma[k] for k in self.private]
        return np.max(rows, axis=0) if rows else np.zeros(len(self.plan.layers))

    def shares(self, clip: ClipRows, noise: Sequence[float]) -> FloatArray:
        """The shares of the noised layers that this C and S stand for."""
        ratio = self.heights(clip)[self.noised] / np.asarray(noise, dtype=np.float64)[self.noised]
        ratio = ratio / ratio.max()
        return np.asarray(ratio**2 / np.sum(ratio**2))

    def stretched(self, clip: ClipRows, factors: Sequence[float]) -> tuple[tuple[float, ...], ...]:
        """C with every layer of the private classes times its factor."""
        return tuple(
            tuple(c * f for c, f in zip(row, factors, strict=True)) if k in self.private else tuple(row)
            for k, row in enumerate(clip)
        )

    def fitted(self, clip: ClipRows, shares: FloatArray, factor: float = 1.0) -> StepPlan | None:
        """The plan with this C and these shares, and sigma_k at least `factor` times the declared one, exactly.

        None if no plan can be made of them: a number that is not finite, or outside what float32 sums can carry.
        """
        with np.errstate(all="ignore"):
            ratio = self.heights(clip)[self.noised] / np.sqrt(shares)
        if not (np.isfinite(ratio).all() and (ratio > 0).all()):
            return None
        shape = np.zeros(len(self.plan.layers))
        shape[self.noised] = ratio
        wanted = [s * factor for s in self.sigma]
        try:
            noise = list(rescale_noise(clip, shape.tolist(), wanted, self.bits))
            for i in set(range(len(noise))) - set(self.noised.tolist()):
                noise[i] = self.plan.noise[i]
            made = replace(self.plan, clip=tuple(tuple(row) for row in clip), noise=tuple(noise))
        except (PlanError, OverflowError):
            return None
        return made if self.keeps(made, factor) else None

    def keeps(self, plan: StepPlan, factor: float = 1.0) -> bool:
        """Whether every class has at least `factor` times its declared sigma."""
        return all(plan.sigma(k) >= self.sigma[k] * factor for k in self.private)


def quantile_factors(
    frame: DeclaredShares, rule: FollowQuantile, applied: StepPlan, counts: Sequence[float]
) -> tuple[float, ...]:
    """exp(-rate·(b̃ - target)) of every layer, b̃ = counts/B + ½: what C of every private class is multiplied with.

    A layer whose thresholds would leave what a plan allows keeps those that it has.
    """
    found = [_quantile_factor(count / applied.batch + 0.5, rule) for count in counts]
    for layer, factor in enumerate(found):
        moved = [applied.clip[k][layer] * factor for k in frame.private if applied.clip[k][layer] > 0]
        if not all(LEAST_MAGNITUDE <= c <= MOST_MAGNITUDE for c in moved):  # also refuses NaN
            found[layer] = 1.0
    return tuple(found)


def _quantile_factor(unclipped: float, rule: FollowQuantile) -> float:
    try:
        return math.exp(-rule.rate * (unclipped - rule.target))
    except OverflowError:
        return math.inf


def released_norms_sq(plan: StepPlan, released: Mapping[str, Tensor]) -> FloatArray:
    """‖Y_l‖² of every layer, Y = B × what was released: the noised sum itself. 0 for what is not trained."""
    found = [
        sum(float(row_norm_sq(released[name].reshape(1, -1))) for name in layer.parameters if name in released)
        for layer in plan.layers
    ]
    return np.asarray(found) * plan.batch**2


class EnergyTracker:
    """The running estimate of every noised layer. Sees nothing but noised releases."""

    def __init__(self, frame: DeclaredShares, rule: FollowEnergy) -> None:
        self.frame, self.rule = frame, rule
        self.estimate = EnergyEstimate.start(len(frame.noised), decay=rule.decay)
        self.measured: tuple[bool, ...] = (False,) * len(frame.noised)

    def due(self, step: int) -> bool:
        return step % self.rule.every == 0 and len(self.frame.noised) > 0

    def observe(self, squares: FloatArray, applied: StepPlan) -> None:
        """One more release, and the S that it was noised with."""
        layers = self.frame.noised
        noise = np.asarray(applied.noise)[layers]
        self.estimate = self.estimate.observed(squares[layers], noise=noise, sizes=self.frame.sizes)

    def shares(self, base: FloatArray) -> FloatArray:
        """The measured shares, shrunk to `base` where the signal is faint."""
        shares, self.measured = self.estimate.shares(base, self.frame.sizes, self.rule.least)
        return np.asarray(shares)

    def to_state(self) -> dict[str, Any]:
        return self.estimate.to_state()

    def load_state(self, state: Mapping[str, Any], base: FloatArray) -> None:
        self.estimate = EnergyEstimate.from_state(state)
        self.shares(base)


_FACTOR_LEVELS = 32  # between the least factor and the most: few distinct sigmas, so that a filter prices each once


class SignalToNoisePace:
    """The factor on sigma that keeps the signal-to-noise ratio of the first measured window.

        f = √(E/E₀),  E = Σ_l E_l/S_l²      S as declared, E₀ the value when the first window was full

    A window is 1/(1-decay) observations. Where E cannot be told from noise the factor is 1. Steps take less noise
    (and more budget) as the gradient fades, and the filter, not this, decides how long that goes on.
    """

    def __init__(self, frame: DeclaredShares, rule: FollowBudget, decay: float) -> None:
        self.rule = rule
        self.window = math.ceil(1.0 / (1.0 - decay))
        self.weight = 1.0 / np.asarray(frame.plan.noise)[frame.noised] ** 2
        self.seen = 0
        self.reference = 0.0  # 0: not measured yet

    def observe(self, estimate: EnergyEstimate) -> float:
        """The factor that the next steps should have, after one more observation."""
        self.seen += 1
        with np.errstate(all="ignore"):
            energy = float(np.sum(estimate.energies() * self.weight))
            deviation = float(np.linalg.norm(estimate.deviations() * self.weight))
        if not (0 < energy < math.inf and energy >= deviation):
            return 1.0
        if self.reference == 0.0:
            if self.seen < self.window:
                return 1.0
            self.reference = energy
        return self.clamped(math.sqrt(energy / self.reference))

    def clamped(self, factor: float) -> float:
        """One of the levels, rounded up, within what the rule allows."""
        least, most = self.rule.least, self.rule.most
        if not least < factor < most:
            return least if factor <= least else most
        return min(
            most,
            least + math.ceil((factor - least) / (most - least) * _FACTOR_LEVELS) * (most - least) / _FACTOR_LEVELS,
        )

    def to_state(self) -> dict[str, Any]:
        return {"seen": self.seen, "reference": self.reference}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.seen, self.reference = int(state["seen"]), float(state["reference"])


CHOICE_TENSOR = (1 << 62) + 1  # its place in the noise stream of the step that it precedes
_SIX_BIT_DIGITS = 9  # of six bits each: 54 bits


class OpenChoice:
    """Σ_i s_i(a) of every candidate, over the parts of a batch; the norms themselves are never kept.

    What it holds is secret until `drawn`: one name, drawn with p(a) ∝ exp(ε·u(a)), is all that leaves.
    """

    def __init__(self, plan: StepPlan, offers: Sequence[Candidate], sizes: Sequence[int] | None = None) -> None:
        rule = plan.rule(Choose)
        assert rule is not None
        self.plan, self.rule, self.offers = plan, rule, offers
        self.sizes = tuple(layer.size for layer in plan.layers) if sizes is None else tuple(sizes)
        self._kept = np.zeros(len(self.offers))

    def add(self, part: CheckedBatch, norms: Tensor) -> None:
        """The contributions of a part, with their norms (P, L). A slot of weight 0 is nobody."""
        here = nonempty_contributions(part)
        self._kept += self._utilities(norms[here], part.classes[here], 0.0)

    def drawn(self, noise: NoiseSource, step: int) -> Candidate:
        nobody = torch.zeros(0, len(self.sizes), dtype=torch.float64)
        price = self._utilities(nobody, torch.zeros(0, dtype=torch.long), self.rule.price)
        return self.offers[draw(self._kept + price, self.rule.epsilon, uniform_draw(noise, step))]

    def _utilities(self, norms: Tensor, classes: Tensor, price: float) -> FloatArray:
        form = self.plan.clipping
        return utilities(self.offers, norms.numpy(), classes.numpy(), form=form, sizes=self.sizes, price=price)


def uniform_draw(noise: NoiseSource, step: int) -> float:
    """53 uniform bits in [0, 1) from the noise source, also where it rounds to its grid of 2^-8.

    Six bits of each normal: round(256·z) mod 64 is uniform to within 2·exp(-2π²·(256/64)²) < e^-300, the size of the
    first harmonic of a normal that is wrapped around a quarter of its standard deviation.
    """
    z = torch.empty(_SIX_BIT_DIGITS, dtype=torch.float64)
    noise.fill_(z, 1.0, step=step, tensor=CHOICE_TENSOR)
    word = 0
    for digit in torch.remainder(torch.round(z * 256.0), 64.0).tolist():
        word = 64 * word + int(digit)
    return (word >> (6 * _SIX_BIT_DIGITS - 53)) / 2.0**53


class Adaptation:
    """C and S as they are applied now, and what moves them.

    Formal guarantee. Whatever it is shown, sigma_k of `applied` is at least `factor` times the declared sigma_k for
    every class, in floating point; `factor` is 1 unless the plan follows its budget, where a filter is asked for it
    first. What it is shown was released before: noised sums, noised counts, a paid choice. So at every step C and S
    depend on the past outputs only, and the price of the declared schedule holds (docs/theory.md).

      declared         the plan
      applied          the plan with C and S of the next step
      factor           how many times the declared sigma the next step has, at least
      proposed_factor  what the budget's rule would have next
      counts           the noised counts of the last step, as they were released; None without such a rule
      measured         of the layers that are noised: whether their share was measured, or is the plan's own
    """

    def __init__(self, plan: StepPlan, sizes: Sequence[int] | None = None) -> None:
        self.declared = self.applied = plan
        self.factor = self.proposed_factor = 1.0
        self.fixed = False  # whether somebody else decides the factor
        self.counts: tuple[float, ...] | None = None
        self.chosen = -1  # the last step that a choice was made for
        self.choice = ""  # what it chose
        self._drift = (1.0,) * len(plan.layers)  # by which the counts have moved C
        self._frame = DeclaredShares(plan, sizes)
        self._base = self._frame.shares(plan.clip, plan.noise) if len(self._frame.noised) else np.zeros(0)
        budget, energy = plan.rule(FollowBudget), plan.rule(FollowEnergy)
        self._follow, self._quantile, self._choose = energy, plan.rule(FollowQuantile), plan.rule(Choose)
        if self._choose is not None:
            _check_candidates(plan)
        if budget is not None and energy is None:
            energy = FollowEnergy()
        self._energy = None if energy is None else EnergyTracker(self._frame, energy)
        self._pace = None
        if budget is not None and self._energy is not None:
            self._pace = SignalToNoisePace(self._frame, budget, self._energy.rule.decay)

    @classmethod
    def of(cls, plan: StepPlan, sizes: Sequence[int] | None = None) -> Adaptation | None:
        """None for a plan without rules, which never changes. `sizes`: how many numbers of each layer are noised."""
        return cls(plan, sizes) if plan.rules else None

    @property
    def measured(self) -> tuple[bool, ...]:
        return () if self._energy is None else self._energy.measured

    # ---------------------------------------------------------------------------------------- after a step

    def after(self, step: int, released: Mapping[str, Tensor], counts: Tensor | None) -> None:
        """Step number `step` released these gradients and counts, both noised: move C and S for the next."""
        squares = None
        if self._energy is not None and self._energy.due(step):
            squares = released_norms_sq(self.applied, released)
        self.update(squares, None if counts is None else counts.tolist())

    def update(self, squares: FloatArray | None, counts: Sequence[float] | None) -> None:
        """The same in plain numbers: ‖Y_l‖² of every layer (None: not observed at this step) and the noised counts."""
        clip, drift = self.applied.clip, self._drift
        if self._quantile is not None and counts is not None:
            self.counts = tuple(counts)
            by = quantile_factors(self._frame, self._quantile, self.applied, counts)
            clip, drift = (self._frame.stretched(clip, by), tuple(d * f for d, f in zip(drift, by, strict=True)))
        if squares is not None and self._energy is not None:
            self._energy.observe(np.asarray(squares, dtype=np.float64), self.applied)
            if self._pace is not None:
                self.proposed_factor = self._pace.observe(self._energy.estimate)
        moves = drift is not self._drift or (squares is not None and self._follow is not None)
        if moves and self._move(clip):
            self._drift = drift

    def _move(self, clip: ClipRows, factor: float | None = None) -> bool:
        """Apply this C with the shares of the moment. False, and nothing changes, if no plan can be made of it."""
        if not len(self._frame.noised):
            return True
        wanted = self.factor if factor is None else factor
        shares = self._base
        if self._follow is not None and self._energy is not None:
            shares = self._energy.shares(self._base)
        made = self._frame.fitted(clip, shares, wanted)
        if made is None:
            return False
        self.applied, self.factor = made, wanted
        return True

    # ---------------------------------------------------------------------------------------- a choice

    def due(self, step: int) -> bool:
        """Whether a choice must be made before this step."""
        return self._choose is not None and step % self._choose.every == 0 and self.chosen != step

    def offers(self) -> tuple[Candidate, ...]:
        """C and S of every candidate. A layer whose thresholds moved since has both of them moved alike."""
        frame = self._frame
        return tuple(
            replace(
                offer,
                clip=frame.stretched(offer.clip, self._drift),
                noise=tuple(s * d for s, d in zip(offer.noise, self._drift, strict=True)),
            )
            for offer in plan_candidates(self.declared)
        )

    def settle(self, offer: Candidate) -> None:
        """A choice was drawn: its C and S, and its shares where there is nothing better."""
        before = self._base
        if len(self._frame.noised):
            self._base = self._frame.shares(offer.clip, offer.noise)
        if self._move(offer.clip):
            self.choice = offer.name
        else:
            self._base = before

    # ---------------------------------------------------------------------------------------- the budget's pace

    def fix(self, factor: float | None) -> bool:
        """Somebody else keeps the filters: sigma_k is at least `factor` times the declared one from here on.

        True if the plan follows its budget, so that there are filters to keep.
        """
        rule = self.declared.rule(FollowBudget)
        if rule is None:
            if factor not in (None, 1.0):
                raise EngineError(
                    "engine.factor-not-used",
                    f"factor is {factor!r}, and the plan does not follow its budget",
                    "leave it out",
                )
            return False
        if factor is None:
            raise EngineError(
                "engine.factor-missing",
                "the plan follows its budget, and the factor on its sigma is not given",
                "ask the filters for adaptation.proposed_factor times sigma_k, and give that factor",
            )
        if not rule.least <= factor <= rule.most:
            raise EngineError(
                "engine.factor-out-of-range", f"factor is {factor!r}, must lie in [{rule.least:g}, {rule.most:g}]", "clamp it"
            )
        if not self._move(self.applied.clip, factor):
            raise EngineError(
                "engine.factor-makes-no-plan",
                f"no plan can be made with {factor:g} times the declared sigma",
                "end the run here",
            )
        self.fixed = True
        return True

    def apply_proposed_factor(self) -> None:
        """Before a step: take up the proposed factor, unless somebody fixed it."""
        if self._pace is not None and not self.fixed and self.proposed_factor != self.factor:
            self._move(self.applied.clip, self.proposed_factor)

    # ---------------------------------------------------------------------------------------- checkpoints

    def to_state(self) -> dict[str, Any]:
        """Plain numbers, exact: everything but the plan itself."""
        state: dict[str, Any] = {
            "clip": [list(self.applied.clip[k]) for k in self._frame.private],
            "noise": list(self.applied.noise),
            "base": self._base.tolist(),
            "drift": list(self._drift),
            "factor": self.factor,
            "proposed": self.proposed_factor,
            "counts": list(self.counts or ()),
            "chosen": self.chosen,
            "choice": self.choice,
        }
        if self._energy is not None:
            state["energy"] = self._energy.to_state()
        if self._pace is not None:
            state["pace"] = self._pace.to_state()
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """What `to_state` said. Refused, and nothing changes, if it is of another plan, damaged, or would give a
        class less than was declared.
        """
        mine = self.to_state()
        if not isinstance(state, Mapping) or set(state) != set(mine):
            raise foreign_state_error("has other fields")
        check_adaptation_state(state, mine, self.declared)
        rows = list(self.declared.clip)
        for k, row in zip(self._frame.private, state["clip"], strict=True):
            rows[k] = tuple(row)
        factor, base = float(state["factor"]), np.asarray(state["base"], dtype=np.float64)
        try:
            applied = replace(self.declared, clip=tuple(rows), noise=tuple(state["noise"]))
        except (LaminaError, ArithmeticError, TypeError, ValueError) as error:
            raise foreign_state_error(f"makes no plan ({error})") from error
        if [[c > 0 for c in row] for row in applied.clip] != [[c > 0 for c in row] for row in self.declared.clip]:
            raise foreign_state_error("reaches other layers")
        if not self._frame.keeps(applied, factor):
            raise foreign_state_error("gives a class a smaller sigma than its plan declares")
        if self._energy is not None:
            self._check_energy(state["energy"], base)
            self._energy.load_state(state["energy"], base)
        self._base, self._drift = base, tuple(float(d) for d in state["drift"])
        self.applied, self.factor, self.proposed_factor = applied, factor, float(state["proposed"])
        self.counts = tuple(float(count) for count in state["counts"]) or None
        self.chosen, self.choice = state["chosen"], state["choice"]
        if self._pace is not None:
            self._pace.load_state(state["pace"])

    def _check_energy(self, state: Any, base: FloatArray) -> None:
        assert self._energy is not None
        try:
            estimate = EnergyEstimate.from_state(state)
            estimate.shares(base, self._frame.sizes, self._energy.rule.least)
        except (LaminaError, ArithmeticError, TypeError, ValueError) as error:
            raise foreign_state_error(f"has an energy that makes no sense ({error})") from error
        if estimate.decay != self._energy.rule.decay:
            raise foreign_state_error(f"has an energy of decay {estimate.decay!r}, not {self._energy.rule.decay!r}")


def _check_candidates(plan: StepPlan) -> None:
    """A candidate that no step can take would be paid for and have no effect: refused before anything is."""
    for offer in plan_candidates(plan):
        try:
            replace(plan, clip=offer.clip, noise=offer.noise)
        except PlanError as error:
            raise PlanError(
                "engine.candidate-out-of-range",
                f"candidate {offer.name!r} of the plan's choice cannot be taken: {error.problem}",
                "give candidates whose numbers lie closer together",
            ) from error
