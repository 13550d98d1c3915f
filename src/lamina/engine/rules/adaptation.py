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

from lamina import validate
from lamina.allocate.ladp import Candidate, draw, plan_candidates, utilities
from lamina.allocate.measure.energy import EnergyEstimate
from lamina.engine.execute.clipping import nonempty_contributions
from lamina.engine.execute.norms import row_norm_sq
from lamina.engine.guards.checked_batch import CheckedBatch
from lamina.engine.noise.source import NoiseSource
from lamina.engine.rules.proxy import ProxyShares
from lamina.errors import EngineError, LaminaError, PlanError
from lamina.plan.rules import (
    LEAST_MAGNITUDE,
    MEASURED,
    MOST_MAGNITUDE,
    Choose,
    ChooseAsPrinted,
    FollowBudget,
    FollowEnergy,
    FollowProxy,
    FollowQuantile,
    FreeRule,
    rescale_noise,
)
from lamina.plan.step_plan import StepPlan
from lamina.validate import short_repr


def _state_error(why: str) -> EngineError:
    return EngineError("engine.adaptation-state", f"the adaptation state {why}", "load a to_state() of the same plan")


def _check_state(state: Mapping[str, Any], mine: Mapping[str, Any], plan: StepPlan) -> None:
    """Refuse values of another kind, number or range than a state of this plan has; `mine` is one.

    Whether C and S keep what was declared, and whether the energies make sense, the caller checks.
    """
    follow, choose = plan.rule(FollowBudget), plan.rule(Choose)
    least, most = (1.0, 1.0) if follow is None else (follow.least, follow.most)
    last, names = (-1, ()) if choose is None else (plan.steps - 1, choose.names)
    counted = 0 if plan.rule(FollowQuantile) is None else len(plan.layers)
    fits: dict[str, Callable[[Any], bool]] = {
        "clip": lambda v: _is_list(v, len(mine["clip"]), lambda row: _is_list(row, len(plan.layers), _is_finite)),
        "noise": lambda v: _is_list(v, len(mine["noise"]), _is_finite),
        "base": lambda v: _is_list(v, len(mine["base"]), _is_finite)
        and all(share >= 0 for share in v) and (not v or abs(sum(v) - 1.0) <= 1e-9),
        "drift": lambda v: _is_list(v, len(mine["drift"]), _is_finite) and all(d > 0 for d in v),
        "factor": lambda v: _is_finite(v) and least <= v <= most,
        "proposed": lambda v: _is_finite(v) and least <= v <= most,
        "counts": lambda v: v == [] or (counted > 0 and _is_list(v, counted, _is_number)),
        "chosen": lambda v: type(v) is int and -1 <= v <= last,
        "choice": lambda v: isinstance(v, str) and v in ("", *names),
        "proxy": lambda v: v == [] or (_is_list(v, len(mine["base"]), _is_finite)
        and all(share > 0 for share in v) and abs(sum(v) - 1.0) <= 1e-9),
        "free": lambda v: isinstance(v, Mapping) and set(v) == {"seen", "shares"} and _is_list(v["seen"], len(v["seen"]), _is_finite)
        and (v["shares"] == [] or _are_shares(v["shares"], len(mine["base"]))),
        "pace": lambda v: isinstance(v, Mapping) and set(v) == {"seen", "reference"} and type(v["seen"]) is int
        and v["seen"] >= 0 and _is_finite(v["reference"]) and v["reference"] >= 0,
    }  # fmt: skip
    for name, fit in fits.items():
        if name in mine and not fit(state[name]):
            raise _state_error(f"has {name} = {short_repr(state[name])}, which this plan cannot have")


def _are_shares(value: Any, length: int) -> bool:
    return _is_list(value, length, _is_finite) and all(w > 0 for w in value) and abs(sum(value) - 1.0) <= 1e-9


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

    def scaled_clip(self, clip: ClipRows, factors: Sequence[float]) -> tuple[tuple[float, ...], ...]:
        """C with every layer of the private classes times its factor."""
        return tuple(
            tuple(c * f for c, f in zip(row, factors, strict=True)) if k in self.private else tuple(row)
            for k, row in enumerate(clip)
        )

    def plan_with(self, clip: ClipRows, shares: FloatArray, factor: float = 1.0) -> StepPlan | None:
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
        return made if self.meets_declared(made, factor) else None

    def meets_declared(self, plan: StepPlan, factor: float = 1.0) -> bool:
        """Whether every class has at least `factor` times its declared sigma."""
        return all(plan.sigma(k) >= self.sigma[k] * factor for k in self.private)


def quantile_factors(
    declared: DeclaredShares, rule: FollowQuantile, applied: StepPlan, counts: Sequence[float]
) -> tuple[float, ...]:
    """exp(-rate·(b̃ - target)) of every layer, b̃ = counts/B + ½: what C of every private class is multiplied with.

    A layer whose thresholds would leave what a plan allows keeps those that it has.
    """
    found = [_quantile_factor(count / applied.batch + 0.5, rule) for count in counts]
    for layer, factor in enumerate(found):
        moved = [applied.clip[k][layer] * factor for k in declared.private if applied.clip[k][layer] > 0]
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

    def __init__(self, declared: DeclaredShares, rule: FollowEnergy) -> None:
        self.declared, self.rule = declared, rule
        self.estimate = EnergyEstimate.start(len(declared.noised), decay=rule.decay)
        self.measured: tuple[bool, ...] = (False,) * len(declared.noised)

    def due(self, step: int) -> bool:
        return step % self.rule.every == 0 and len(self.declared.noised) > 0

    def observe(self, squares: FloatArray, applied: StepPlan) -> None:
        """One more release, and the S that it was noised with."""
        layers = self.declared.noised
        noise = np.asarray(applied.noise)[layers]
        self.estimate = self.estimate.observed(squares[layers], noise=noise, sizes=self.declared.sizes)

    def shares(self, base: FloatArray) -> FloatArray:
        """The measured shares, shrunk to `base` where the signal is faint."""
        shares, self.measured = self.estimate.shares(base, self.declared.sizes, self.rule.least)
        return np.asarray(shares)


_FACTOR_LEVELS = 32  # between the least factor and the most: few distinct sigmas, so that a filter prices each once


class SignalToNoisePace:
    """The factor on sigma that keeps the signal-to-noise ratio of the first measured window.

        f = √(E/E₀),  E = Σ_l E_l/S_l²      S as declared, E₀ the value when the first window was full

    A window is 1/(1-decay) observations. Where E cannot be told from noise the factor is 1. Steps take less noise
    (and more budget) as the gradient fades, and the filter, not this, decides how long that goes on.
    """

    def __init__(self, declared: DeclaredShares, rule: FollowBudget, decay: float) -> None:
        self.rule = rule
        self.window = math.ceil(1.0 / (1.0 - decay))
        self.weight = 1.0 / np.asarray(declared.plan.noise)[declared.noised] ** 2
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
        level = math.ceil((factor - least) / (most - least) * _FACTOR_LEVELS)
        return min(most, least + level * (most - least) / _FACTOR_LEVELS)


CHOICE_TENSOR = (1 << 62) + 1  # its place in the noise stream of the step that it precedes
_SIX_BIT_DIGITS = 9  # of six bits each: 54 bits


class OpenChoice:
    """Σ_i s_i(a) of every candidate, over the parts of a batch; the norms themselves are never kept.

    What it holds is secret until `drawn`: one name, drawn with p(a) ∝ exp(ε·u(a)), is all that leaves.
    """

    def __init__(self, plan: StepPlan, candidates: Sequence[Candidate], sizes: Sequence[int] | None = None) -> None:
        rule = plan.rule(Choose)
        assert rule is not None
        self.plan, self.rule, self.candidates = plan, rule, candidates
        self.sizes = tuple(layer.size for layer in plan.layers) if sizes is None else tuple(sizes)
        self._sums = np.zeros(len(candidates))

    def add(self, part: CheckedBatch, norms: Tensor) -> None:
        """Add the contributions of a part, with their norms (P, L). A contribution of weight 0 does not count."""
        present = nonempty_contributions(part)
        self._sums += self._utilities(norms[present], part.classes[present], 0.0)

    def drawn(self, noise: NoiseSource, step: int) -> Candidate:
        nobody = torch.zeros(0, len(self.sizes), dtype=torch.float64)
        price = self._utilities(nobody, torch.zeros(0, dtype=torch.long), self.rule.price)
        return self.candidates[draw(self._sums + price, self.rule.epsilon, uniform_draw(noise, step))]

    @staticmethod
    def of(plan: StepPlan, candidates: Sequence[Candidate], sizes: Sequence[int] | None = None) -> OpenChoice:
        """The choice that the plan's rule asks for."""
        printed = plan.rule(ChooseAsPrinted) is not None
        return (OpenPrintedChoice if printed else OpenChoice)(plan, candidates, sizes)

    def _utilities(self, norms: Tensor, classes: Tensor, price: float) -> FloatArray:
        form = self.plan.clipping
        return utilities(self.candidates, norms.numpy(), classes.numpy(), form=form, sizes=self.sizes, price=price)


class OpenPrintedChoice(OpenChoice):
    """Fisher information of the layers over the parts of a batch, for `ChooseAsPrinted`."""

    def __init__(self, plan: StepPlan, candidates: Sequence[Candidate], sizes: Sequence[int] | None = None) -> None:
        super().__init__(plan, candidates, sizes)
        self._sums = np.zeros(len(plan.layers))

    def add(self, part: CheckedBatch, norms: Tensor) -> None:
        """Add the squared norms of a part; a contribution with a norm that is not finite counts 0."""
        squares = norms[nonempty_contributions(part)].double().square().numpy()
        self._sums += squares[np.isfinite(squares).all(1)].sum(0)

    def drawn(self, noise: NoiseSource, step: int) -> Candidate:
        assert isinstance(self.rule, ChooseAsPrinted)
        total = float(self._sums.sum())
        fisher = self._sums / total if 0 < total < math.inf else np.zeros(len(self._sums))
        u = 0.5 * np.clip(np.asarray(self.rule.parts) @ fisher, 0.0, 1.0)
        return self.candidates[draw(u, self.rule.epsilon, uniform_draw(noise, step))]


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
        self.fixed = False  # whether the caller decides the factor
        self.counts: tuple[float, ...] | None = None
        self.chosen = -1  # the last step that a choice was made for
        self.choice = ""  # what it chose
        self._drift = (1.0,) * len(plan.layers)  # by which the counts have moved C
        self._shares = DeclaredShares(plan, sizes)
        self._base = self._shares.shares(plan.clip, plan.noise) if len(self._shares.noised) else np.zeros(0)
        budget, energy = plan.rule(FollowBudget), plan.rule(FollowEnergy)
        self._follow, self._quantile, self._choose = energy, plan.rule(FollowQuantile), plan.rule(Choose)
        self.follows_proxy = plan.rule(FollowProxy) is not None
        self._proxy_shares: FloatArray | None = None  # None: not measured yet
        if self._choose is not None:
            _check_candidates(plan)
        if budget is not None and energy is None:
            energy = FollowEnergy()
        self._free = plan.rule(FreeRule)
        self._free_seen: tuple[float, ...] = ()
        self._free_shares: FloatArray | None = None  # None: it has said nothing yet
        self._energy = None if energy is None else EnergyTracker(self._shares, energy)
        self._pace = None
        if budget is not None and self._energy is not None:
            self._pace = SignalToNoisePace(self._shares, budget, self._energy.rule.decay)

    @classmethod
    def of(cls, plan: StepPlan, sizes: Sequence[int] | None = None) -> Adaptation | None:
        """None for a plan without rules, which never changes. `sizes`: how many numbers of each layer are noised."""
        return cls(plan, sizes) if plan.rules else None

    @property
    def measured(self) -> tuple[bool, ...]:
        return () if self._energy is None else self._energy.measured

    def after(self, step: int, released: Mapping[str, Tensor], counts: Tensor | None) -> None:
        """Step number `step` released these gradients and counts, both noised: move C and S for the next."""
        squares = None
        due = self._free is not None and step % self._free.every == 0 and len(self._shares.noised) > 0
        if due or (self._energy is not None and self._energy.due(step)):
            squares = released_norms_sq(self.applied, released)
        self.update(squares, None if counts is None else counts.tolist())

    def update(self, squares: FloatArray | None, counts: Sequence[float] | None) -> None:
        """The same in plain numbers: ‖Y_l‖² of every layer (None: not observed at this step) and the noised counts."""
        clip, drift = self.applied.clip, self._drift
        if self._quantile is not None and counts is not None:
            self.counts = tuple(counts)
            by = quantile_factors(self._shares, self._quantile, self.applied, counts)
            clip, drift = self._shares.scaled_clip(clip, by), tuple(d * f for d, f in zip(drift, by, strict=True))
        if squares is not None and self._energy is not None:
            self._energy.observe(np.asarray(squares, dtype=np.float64), self.applied)
            if self._pace is not None:
                self.proposed_factor = self._pace.observe(self._energy.estimate)
        moves = drift is not self._drift or (squares is not None and self._follow is not None)
        if squares is not None and self._free is not None:
            moves = self._ask_free_rule(self._free, np.asarray(squares, dtype=np.float64))
        if moves and self._move(clip):
            self._drift = drift

    def _ask_free_rule(self, rule: FreeRule, squares: FloatArray) -> bool:
        """Take up the shares that a rule from outside says; False, and nothing changes, if they are no shares."""
        layers = self._shares.noised
        noise = np.asarray(self.applied.noise)[layers]
        shares, seen = rule.next(self._free_seen, squares[layers].tolist(), noise.tolist(), self._shares.sizes)
        shares, seen = [float(w) for w in shares], tuple(float(v) for v in seen)
        fit = _are_shares(shares, len(layers)) and all(map(math.isfinite, seen))
        if fit:
            self._free_seen, self._free_shares = seen, np.asarray(shares)
        return fit

    def _move(self, clip: ClipRows, factor: float | None = None) -> bool:
        """Apply this C with the shares of the moment. False, and nothing changes, if no plan can be made of it."""
        if not len(self._shares.noised):
            return True
        wanted = self.factor if factor is None else factor
        shares = self._base
        if self._follow is not None and self._energy is not None:
            shares = self._energy.shares(self._base)
        if self._proxy_shares is not None and (self._choose is None or self.choice in ("", MEASURED)):
            shares = self._proxy_shares
        if self._free_shares is not None:
            shares = self._free_shares
        made = self._shares.plan_with(clip, shares, wanted)
        if made is None:
            return False
        self.applied, self.factor = made, wanted
        return True

    def follow_proxy(self, proxy: ProxyShares, step: int) -> None:
        """Before a step: apply the shares that the proxy says; where it says none, or no plan can be made, nothing moves."""
        if not len(self._shares.noised):
            return
        before = self._proxy_shares
        found = proxy.shares(step, self._shares.noised, np.asarray(self._shares.sizes, dtype=np.float64))
        if found is not None:
            self._proxy_shares = found
            if not self._move(self.applied.clip):
                self._proxy_shares = before

    def due(self, step: int) -> bool:
        """Whether a choice must be made before this step."""
        return self._choose is not None and step % self._choose.every == 0 and self.chosen != step

    def candidates(self) -> tuple[Candidate, ...]:
        """C and S of every candidate. A layer whose thresholds moved since has both of them moved alike."""
        made = []
        for c in plan_candidates(self.declared):
            noise = tuple(s * d for s, d in zip(c.noise, self._drift, strict=True))
            made.append(replace(c, clip=self._shares.scaled_clip(c.clip, self._drift), noise=noise))
            if c.name == MEASURED and self._proxy_shares is not None:
                plan = self._shares.plan_with(self.declared.clip, self._proxy_shares)
                made[-1] = made[-1] if plan is None else replace(c, clip=plan.clip, noise=plan.noise)
        return tuple(made)

    def apply_choice(self, candidate: Candidate) -> None:
        """A choice was drawn: apply its C and S, and its shares where no better ones were measured."""
        if (
            self.declared.rule(ChooseAsPrinted) is not None
        ):  # S as it is printed; the plan is priced with the least of it
            self.applied, self.choice = replace(self.declared, noise=candidate.noise), candidate.name
            return
        before = self._base, self.choice
        if len(self._shares.noised):
            self._base = self._shares.shares(candidate.clip, candidate.noise)
        self.choice = candidate.name
        if not self._move(candidate.clip):
            self._base, self.choice = before

    def fix(self, factor: float | None) -> bool:
        """The caller asks the filters: sigma_k is at least `factor` times the declared one from here on.

        Returns whether the plan follows its budget, so that there are filters to ask.
        """
        rule = self.declared.rule(FollowBudget)
        if rule is None:
            refuse_factor(factor)
            return False
        if factor is None:
            remedy = "ask the filters for adaptation.proposed_factor times sigma_k, and pass that factor"
            raise EngineError("engine.factor-missing", "the plan follows its budget and no factor is given", remedy)
        validate.number(EngineError, "engine.factor-out-of-range", least=rule.least, most=rule.most, factor=factor)
        if not self._move(self.applied.clip, factor):
            problem = f"no valid plan has {factor:g} times the declared sigma"
            raise EngineError("engine.factor-makes-no-plan", problem, "end the run here")
        self.fixed = True
        return True

    def apply_proposed_factor(self) -> None:
        """Before a step: take up the proposed factor, unless the caller fixed it."""
        if self._pace is not None and not self.fixed and self.proposed_factor != self.factor:
            self._move(self.applied.clip, self.proposed_factor)

    def to_state(self) -> dict[str, Any]:
        """Plain numbers, exact: everything but the plan itself."""
        state: dict[str, Any] = {
            "clip": [list(self.applied.clip[k]) for k in self._shares.private],
            "noise": list(self.applied.noise),
            "base": self._base.tolist(),
            "drift": list(self._drift),
            "factor": self.factor,
            "proposed": self.proposed_factor,
            "counts": list(self.counts or ()),
            "chosen": self.chosen,
            "choice": self.choice,
        }
        if self._free is not None:
            shares = [] if self._free_shares is None else self._free_shares.tolist()
            state["free"] = {"seen": list(self._free_seen), "shares": shares}
        if self.follows_proxy:
            state["proxy"] = [] if self._proxy_shares is None else self._proxy_shares.tolist()
        if self._energy is not None:
            state["energy"] = self._energy.estimate.to_state()
        if self._pace is not None:
            state["pace"] = {"seen": self._pace.seen, "reference": self._pace.reference}
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `to_state` returned.

        Refused, and nothing changes, if it is of another plan, damaged, or would give a class less than was declared.
        """
        mine = self.to_state()
        if not isinstance(state, Mapping) or set(state) != set(mine):
            raise _state_error("has other fields than this plan's")
        _check_state(state, mine, self.declared)
        rows = list(self.declared.clip)
        for k, row in zip(self._shares.private, state["clip"], strict=True):
            rows[k] = tuple(row)
        factor, base = float(state["factor"]), np.asarray(state["base"], dtype=np.float64)
        try:
            applied = replace(self.declared, clip=tuple(rows), noise=tuple(state["noise"]))
        except (LaminaError, ArithmeticError, TypeError, ValueError) as error:
            raise _state_error(f"makes no valid plan ({error})") from None
        if [[c > 0 for c in row] for row in applied.clip] != [[c > 0 for c in row] for row in self.declared.clip]:
            raise _state_error("reaches other layers than the plan")
        if not self._shares.meets_declared(applied, factor):
            raise _state_error("gives a class a smaller sigma than the plan declares")
        if self._energy is not None:
            self._load_energy(self._energy, state["energy"], base)
        self._base, self._drift = base, tuple(float(d) for d in state["drift"])
        self._proxy_shares = np.asarray(state["proxy"], dtype=np.float64) if state.get("proxy") else None
        if self._free is not None:
            self._free_seen = tuple(float(v) for v in state["free"]["seen"])
            self._free_shares = (
                np.asarray(state["free"]["shares"], dtype=np.float64) if state["free"]["shares"] else None
            )
        self.applied, self.factor, self.proposed_factor = applied, factor, float(state["proposed"])
        self.counts = tuple(float(count) for count in state["counts"]) or None
        self.chosen, self.choice = state["chosen"], state["choice"]
        if self._pace is not None:
            self._pace.seen, self._pace.reference = state["pace"]["seen"], float(state["pace"]["reference"])

    def _load_energy(self, tracker: EnergyTracker, state: Any, base: FloatArray) -> None:
        try:
            estimate = EnergyEstimate.from_state(state)
            _, measured = estimate.shares(base, self._shares.sizes, tracker.rule.least)
        except (LaminaError, ArithmeticError, TypeError, ValueError) as error:
            raise _state_error(f"has impossible energies ({error})") from None
        if estimate.decay != tracker.rule.decay:
            raise _state_error(f"has energies of decay {estimate.decay!r}, the plan has {tracker.rule.decay!r}")
        tracker.estimate, tracker.measured = estimate, measured


def refuse_factor(factor: float | None) -> None:
    """Only a plan that follows its budget takes another factor on sigma than 1."""
    if factor not in (None, 1.0):
        problem = f"factor is {factor!r}, but the plan does not follow its budget"
        raise EngineError("engine.factor-not-used", problem, "leave factor out")


def _check_candidates(plan: StepPlan) -> None:
    """Refuse a candidate that no step can take: it would be paid for and have no effect."""
    for candidate in plan_candidates(plan):
        try:
            replace(plan, clip=candidate.clip, noise=candidate.noise)
        except PlanError as error:
            problem = f"candidate {candidate.name!r} of the plan's choice makes no valid plan: {error.problem}"
            remedy = "use candidates whose numbers lie closer together"
            raise PlanError("engine.candidate-out-of-range", problem, remedy) from None
