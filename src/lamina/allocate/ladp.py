"""LADP: sensitive layers, shares that follow released energy, and the exponential mechanism that picks a noise shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lamina import validate
from lamina.account.gaussian_rdp import choice_noise_multiplier
from lamina.allocate.problem import (
    Allocation,
    AllocationProblem,
    ClipMatrix,
    check_clipping,
    check_number,
    check_one_of,
    clip_of_shape,
    measured_row,
    named,
    noise_by_shares,
    optimal_noise,
)
from lamina.errors import PlanError
from lamina.plan.depth_profile import DepthProfile
from lamina.plan.layer_stack import Layer
from lamina.plan.rules import (
    LEAST_MAGNITUDE,
    MEASURED,
    MOST_MAGNITUDE,
    Choose,
    ChooseAsPrinted,
    FollowBudget,
    FollowEnergy,
    FollowProxy,
    Rule,
    clip_radius,
    effective_sigma,
    rescale_noise,
)
from lamina.plan.step_plan import Clipping, StepPlan
from lamina.validate import short_repr

# The exponential mechanism that chooses among shapes of S: what each would keep, and the draw.
#
# With s_i(a) ∈ [0, 1] the part of contribution i that the clip of candidate a would keep,
#
#     joint  s_i(a) = min(1, 1/(sigma_k·‖(g_il/S_l(a))_l‖))
#     box    s_i(a) = Σ_l v_kl·min(1, C[k,l](a)/‖g_il‖),     v_kl = 1/L_k on the layers that the class reaches
#
#     u(a) = Σ_i s_i(a) − λ·noise(a),     noise(a) = Σ_l d_l S_l(a)² over the least of it among the candidates
#
# and a is drawn with p(a) ∝ exp(ε·u(a)).
#
# Claim. Adding or removing a contribution moves every u(a) by at most 1, and all in the same direction. So the
# log-ratio of p(a) lies in an interval of length ε: the draw is ε-bounded-range, hence (ε, 0)-DP and ε²/8-zCDP.
# account/gaussian_rdp.py says how a plan pays for it.
#
# The sum over contributions is exact: s is rounded down to multiples of 2^-32 first. A contribution with a norm that
# is not finite counts 0, as it does in the step; so does one of a public class, which nobody clips.

Array = NDArray[np.float64]
Matrix = Sequence[Sequence[float]]
_FRACTION_GRID = 2.0**32  # sums of 2^20 contributions are exact in float64
_TINY = float(np.finfo(np.float64).tiny)


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """C and S of one candidate: what the step uses if it is drawn."""

    name: str
    clip: tuple[tuple[float, ...], ...]
    noise: tuple[float, ...]


def plan_candidates(plan: StepPlan) -> tuple[Candidate, ...]:
    """Every candidate of the plan's `Choose`, scaled so that each class has the sigma that the plan is priced with.

    Under a joint clip S is all there is to choose, and C stays. A box does not see S; there the thresholds follow
    it, with the layers' shares of the budget kept:  C[k,l] ∝ S_l·√w_kl,  ‖C[k]‖ as in the plan.
    """
    rule = plan.rule(Choose)
    if rule is None:
        raise PlanError("allocate.no-choice", "the plan has no rule Choose", "use LADP(choose_every=…)")
    if isinstance(rule, ChooseAsPrinted):  # C and S are what the paper says, and the plan has the least of S
        return tuple(
            Candidate(name=name, clip=plan.clip, noise=row) for name, row in zip(rule.names, rule.noise, strict=True)
        )
    classes = range(len(plan.classes))
    return scaled_candidates(
        rule,
        clip=plan.clip,
        shares=[plan.share(k) for k in classes],
        sigma=[plan.sigma(k) for k in classes],
        bits=[plan.bits(k) for k in classes],
        form=plan.clipping,
    )


def scaled_candidates(
    rule: Choose, *, clip: Matrix, shares: Matrix, sigma: Sequence[float], bits: Sequence[float], form: Clipping
) -> tuple[Candidate, ...]:
    """The same from a plan's parts: C, and for every class its shares of the budget, sigma and counts."""
    found = []
    for name, shape in zip(rule.names, rule.noise, strict=True):
        rows = [
            tuple(row) if form is Clipping.JOINT else _clip_keeping_shares(row, w, shape)
            for row, w in zip(clip, shares, strict=True)
        ]
        found.append(Candidate(name=name, clip=tuple(rows), noise=rescale_noise(rows, shape, sigma, bits)))
    return tuple(found)


def _clip_keeping_shares(row: Sequence[float], shares: Sequence[float], shape: Sequence[float]) -> tuple[float, ...]:
    """The row of C that keeps a class's shares of the budget under this shape of S; a public one stays."""
    if not any(row) or not all(map(math.isfinite, row)):
        return tuple(row)
    raw = [s * math.sqrt(w) for s, w in zip(shape, shares, strict=True)]
    scale = math.hypot(*row) / math.hypot(*raw)
    return tuple(scale * r for r in raw)


def kept_fraction(offer: Candidate, norms: Array, cls: Sequence[int] | NDArray[np.int64], form: Clipping) -> Array:
    """s_i ∈ [0, 1] of every contribution: `norms` (n × L) are its ‖g_il‖, `cls` (n) the rows of its class."""
    rows = np.asarray(cls, dtype=np.int64)
    if norms.ndim != 2 or norms.shape[1] != len(offer.noise) or rows.shape != norms.shape[:1]:
        problem = f"norms are {norms.shape}, classes {rows.shape}"
        raise PlanError("allocate.norms-shape", problem, f"give (n, {len(offer.noise)}) and (n,)")
    result = np.zeros(len(norms))
    for k in np.unique(rows).tolist():
        if not 0 <= k < len(offer.clip):
            raise PlanError("allocate.unknown-class", f"class {k} is out of range", f"use 0 to {len(offer.clip) - 1}")
        c, s = np.array(offer.clip[k]), np.array(offer.noise)
        reach = (c > 0) & (s > 0)
        if not np.isfinite(c).all() or not reach.any():
            continue
        mine = np.abs(norms[rows == k][:, reach])
        finite = np.isfinite(mine).all(1)
        mine = np.where(finite[:, None], mine, 1.0)
        with np.errstate(over="ignore"):  # what overflows is cut to 1, or vanishes
            if form is Clipping.JOINT:
                largest = np.maximum(mine.max(1), _TINY)
                length = np.linalg.norm(mine / largest[:, None] / s[reach], axis=1)
                part = clip_radius(offer.clip[k], offer.noise) / np.maximum(length, _TINY) / largest
            else:
                part = np.minimum(1.0, c[reach] / np.maximum(mine, _TINY)).mean(1)
        result[rows == k] = np.where(finite, part, 0.0)
    return np.clip(result, 0.0, 1.0)


def relative_noise(found: Sequence[Candidate], sizes: Sequence[int]) -> Array:
    """Σ_l d_l S_l² of every candidate, over the least of them."""
    d = np.asarray(sizes, dtype=np.float64)
    power = np.array([float(d @ np.square(offer.noise)) for offer in found])
    return power / power.min() if power.min() > 0 else np.ones(len(power))


def utilities(
    found: Sequence[Candidate],
    norms: Array,
    cls: Sequence[int] | NDArray[np.int64],
    *,
    form: Clipping,
    sizes: Sequence[int],
    price: float,
) -> Array:
    """u(a) of every candidate for these contributions (none at all is fine: the noise alone decides)."""
    grid = [np.floor(kept_fraction(offer, norms, cls, form) * _FRACTION_GRID).sum() / _FRACTION_GRID for offer in found]
    return np.asarray(grid) - price * relative_noise(found, sizes)


def probabilities(u: Array, epsilon: float) -> Array:
    """p ∝ exp(ε·u)."""
    if not np.isfinite(u).all() or not 0 < epsilon < math.inf:
        raise PlanError(  # what the utilities are stays secret
            "allocate.utility-not-finite",
            f"the utilities of a choice at epsilon {epsilon!r} are not finite, or epsilon is not",
            "give candidates of sizes that floating point can carry, and epsilon > 0",
        )
    p = np.exp(epsilon * (u - u.max()))
    return np.asarray(p / p.sum())


def draw(u: Array, epsilon: float, uniform: float) -> int:
    """The candidate that a uniform number in [0, 1) falls on; of 53 secret bits, fresh for every call.

    A probability below 2^-53 may become 0: what that adds to δ, 2^-53 per candidate and call, is below what
    floating point is listed for as not covered.
    """
    validate.number(PlanError, "allocate.uniform-range", least=0, below=1, uniform=uniform)
    index = int(np.searchsorted(np.cumsum(probabilities(u, epsilon)), uniform, side="right"))
    return min(index, len(u) - 1)


NamedShapes = tuple[tuple[str, tuple[float, ...]], ...]
DEPTH_SLOPE = 4.0
"""How much more of the budget the first layer gets than the last one where noise is shifted along the depth."""


def default_shapes(problem: AllocationProblem, clip: ClipMatrix, parts: NDArray[np.float64]) -> NamedShapes:
    """Six shapes of S for these thresholds, named:

    flat          one S for all
    proportional  equal shares of the budget, S ∝ C
    pareto        least Σ d_l S_l²
    preset        the shares `parts` of the policy itself
    input-heavy   shares fall by 4 from input to output: less noise near the input
    output-heavy  the other way round
    """
    layers = len(problem.sizes)
    slope = DEPTH_SLOPE ** (np.arange(layers) / max(layers - 1, 1))
    rows = {
        "flat": problem.equal_noise(),
        "proportional": noise_by_shares(problem, clip, np.ones(layers)),
        "pareto": optimal_noise(problem, clip, np.asarray(problem.sizes, dtype=np.float64)),
        "preset": noise_by_shares(problem, clip, parts),
        "input-heavy": noise_by_shares(problem, clip, 1.0 / slope),
        "output-heavy": noise_by_shares(problem, clip, slope),
    }
    return tuple(rows.items())


def parse_shapes(allocation: str, given: Any) -> NamedShapes:
    """Shapes of the user's own as (name, row) pairs; refused where they are anything else."""
    remedy = "give pairs of a name and a row with one S for each layer: (('flat', (1.0, 1.0)), …)"
    if not isinstance(given, tuple | list) or not given:
        raise PlanError("allocate.candidate-type", f"candidates of {allocation} is {short_repr(given)}", remedy)
    found = []
    for pair in given:
        name, row = pair if isinstance(pair, tuple | list) and len(pair) == 2 else (None, None)
        if not isinstance(name, str) or not name or not isinstance(row, tuple | list):
            raise PlanError("allocate.candidate-type", f"a candidate of {allocation} is {short_repr(pair)}", remedy)
        for s in row:
            if not isinstance(s, int | float) or isinstance(s, bool) or not LEAST_MAGNITUDE <= s <= MOST_MAGNITUDE:
                problem = (
                    f"candidate {name!r} has S = {short_repr(s)}, outside [{LEAST_MAGNITUDE:g}, {MOST_MAGNITUDE:g}]"
                )
                raise PlanError("allocate.candidate-range", problem, "scale the row: only its shape matters")
        found.append((name, tuple(float(s) for s in row)))
    return tuple(found)


def check_shapes(problem: AllocationProblem, given: NamedShapes) -> NamedShapes:
    """Shapes of the user's own, one S > 0 for every layer; where no private class reaches they are 0."""
    noised = problem.needs_noise()
    found = []
    for name, row in given:
        if len(row) != len(noised):
            remedy = f"give one S > 0 for each of {len(noised)} layers"
            raise PlanError("allocate.candidate-length", f"candidate {name!r} is {short_repr(row)}", remedy)
        found.append((name, tuple(s if needed else 0.0 for s, needed in zip(row, noised, strict=True))))
    return tuple(found)


def refuse_unusable_candidates(
    problem: AllocationProblem, rule: Choose, clip: ClipMatrix, noise: Sequence[float], form: Clipping
) -> None:
    """Refuse a candidate that a step could not take if it were drawn: it would be paid for and have no effect."""
    owed = [k in problem.private for k in range(len(clip))]
    sigma = [effective_sigma(row, noise) if private else np.inf for row, private in zip(clip, owed, strict=True)]
    shares = [
        [(c / s * own) ** 2 if c > 0 else 0.0 for c, s in zip(row, noise, strict=True)] if private else [0.0] * len(row)
        for row, own, private in zip(clip, sigma, owed, strict=True)
    ]
    batch = problem.batch or 1.0
    for offer in scaled_candidates(
        rule, clip=clip, shares=shares, sigma=problem.sigma, bits=[0.0] * len(clip), form=form
    ):
        numbers = [*offer.noise, *(s / batch for s in offer.noise)]
        numbers += [c for row, private in zip(offer.clip, owed, strict=True) if private for c in row]
        if bad := [x for x in numbers if x != 0 and not LEAST_MAGNITUDE <= x <= MOST_MAGNITUDE]:
            raise PlanError(
                "allocate.candidate-range",
                f"candidate {offer.name!r} needs C or S of {bad[0]:.3g}, outside [{LEAST_MAGNITUDE:g}, {MOST_MAGNITUDE:g}]",
                "give rows whose numbers lie closer together",
            )


SensitiveLayers = DepthProfile | Sequence[str | int] | Callable[[Layer], bool]


def check_sensitive(allocation: str, sensitive: object) -> None:
    """Refuse what names no layers."""
    if sensitive is None or isinstance(sensitive, DepthProfile | str) or callable(sensitive):
        return
    if isinstance(sensitive, Sequence) and sensitive:
        return
    remedy = "give names or patterns of layers, a DepthProfile or a function of a Layer"
    raise PlanError("allocate.sensitive-type", f"sensitive of {allocation} is {sensitive!r}", remedy)


def sensitive_layers(
    problem: AllocationProblem, sensitive: SensitiveLayers | None, share: float, allocation: str
) -> tuple[tuple[bool, ...], str]:
    """Which layers are sensitive, and the sentence that says why.

    Without a choice of the user's: the ⌈share·L⌉ layers of most Fisher information on the proxy; without a
    measurement the top `share` of the depth (at least the last layer).
    """
    if sensitive is not None:
        picked, because = _named_by_user(problem, sensitive, allocation)
    elif problem.measure is not None:
        information = measured_row(problem, "fisher", allocation)
        count = math.ceil(share * len(information))
        top = set(np.argsort(-information, kind="stable")[:count].tolist())
        picked = tuple(i in top for i in range(len(information)))
        because = (
            f"they have the most Fisher information on the proxy ({problem.measure.proxy}), "
            f"{100 * information[sorted(top)].sum() / information.sum():.0f} % of all"
        )
    else:
        picked = _last_layers(problem, share)
        because = f"they are the top {100 * share:g} % of the depth, and nothing was measured"
    names = [name for name, is_sensitive in zip(problem.layers, picked, strict=True) if is_sensitive]
    listed = ", ".join(names) if len(names) <= 8 else f"{', '.join(names[:7])} and {len(names) - 7} more"
    return picked, f"Sensitive layers: {listed or 'none'}, because {because}."


def _named_by_user(
    problem: AllocationProblem, sensitive: SensitiveLayers, allocation: str
) -> tuple[tuple[bool, ...], str]:
    if problem.stack is None:
        remedy = "use make_plan"
        raise PlanError("allocate.no-stack", f"sensitive of {allocation} is set, but there is no stack", remedy)
    if isinstance(sensitive, DepthProfile):
        return sensitive.resolve(problem.stack), f"the profile '{sensitive}' names them"
    if callable(sensitive):
        called = getattr(sensitive, "__name__", "predicate")
        picked = tuple(_ask_predicate(sensitive, called, layer) for layer in problem.stack)
        return picked, f"the rule '{called}' picks them"
    return DepthProfile.layers(sensitive).resolve(problem.stack), "the plan names them"


def _ask_predicate(sensitive: Callable[[Layer], bool], called: str, layer: Layer) -> bool:
    remedy = "give a function that returns True or False for every Layer (its name, depth, size, …)"
    try:
        answer = sensitive(layer)
    except Exception as error:
        problem = f"{called!r} raised {type(error).__name__} at layer {layer.name!r}: {error}"
        raise PlanError("allocate.sensitive-predicate", problem, remedy) from error
    if not isinstance(answer, bool | np.bool_):
        problem = f"{called!r} gave a {type(answer).__name__} for layer {layer.name!r}"
        raise PlanError("allocate.sensitive-predicate", problem, remedy)
    return bool(answer)


def _last_layers(problem: AllocationProblem, share: float) -> tuple[bool, ...]:
    if problem.stack is not None:
        found = DepthProfile.top(share).resolve(problem.stack, allow_empty=True)
        if any(found):
            return found
    layers = len(problem.sizes)
    return tuple(i >= layers - math.ceil(share * layers) for i in range(layers))


@dataclass(frozen=True, kw_only=True, slots=True)
class LADP:
    """Layered adaptive differential privacy, sound: every class's sigma is declared first, layers trade within it.

        C_l ∝ thresholds (1.0 sensitive, 5.0 other), scaled to ‖C[k]‖ = c_k
        w_l ∝ parts      (1 sensitive, 0.5 other),   Σ_l w_l = 1 over the layers that the class reaches
        S_l = sigma_k·C_l/√w_l

    While it trains, w follows the energy of the noised gradient sum, which is already released (`FollowEnergy`).

      sensitive     names or patterns of layers, a DepthProfile, or a function of a Layer; without one the `share` of
                    layers with most proxy Fisher information, or of the depth where nothing was measured
      mode          "shares": sigma_k stays as declared. "budget": sigma_k(t) too follows what is left, between `lower`
                    and `upper` times the declared one (narrowed so that a step costs half to twice its declared
                    price), under a Rényi filter that may stop early
      choose_every  every so many steps an exponential mechanism of `choose_epsilon` picks the shape of S from
                    `candidates` (a public list; six by default) over a sample of its own. Its cost is in ε.
                    With an estimator other than "energy", its shares are one more candidate, "measured"
      price         λ, how many kept contributions a unit of relative noise is worth; by default a quarter of the batch:
                    where half is kept, the exchange that leaves signal to noise unchanged
      decay, least, every   of `FollowEnergy`
      estimator     what w follows: "energy" of what was released; or "fisher" information, or "influence" functions, of
                    `examples` of `proxy` data ("public" or "simulated") at the current weights, every `every` steps
                    (`FollowProxy`; the engine or trainer is given the data). With every = 1 these are the algorithm's lines
                    3 and 4, on data that may be read
      clipping      box; joint with choices, because a box of fixed thresholds keeps the same whatever S is
    """

    sensitive: SensitiveLayers | None = None
    share: float = 0.25
    thresholds: tuple[float, float] = (1.0, 5.0)
    parts: tuple[float, float] = (1.0, 0.5)
    mode: str = "shares"
    decay: float = 0.9
    least: float = 0.1
    every: int = 10
    estimator: str = "energy"
    proxy: str = "simulated"
    examples: int = 64
    lower: float = 0.7
    upper: float = 1.5
    choose_every: int | None = None
    choose_epsilon: float = 0.5
    candidates: NamedShapes | None = None
    price: float | None = None
    clipping: Clipping | None = None

    BASE: ClassVar[str] = "ladp"

    def __post_init__(self) -> None:
        who = self.BASE
        check_sensitive(who, self.sensitive)
        check_number(who, "share", self.share, 0.0, 1.0)
        for option in ("thresholds", "parts"):
            object.__setattr__(self, option, _number_pair(option, getattr(self, option)))
        check_one_of(who, "mode", self.mode, ("shares", "budget"))
        check_one_of(who, "estimator", self.estimator, ("energy", "fisher", "influence"))
        if self.clipping is not None:
            object.__setattr__(self, "clipping", check_clipping(who, self.clipping))
        if self.price is not None:
            check_number(who, "price", self.price, 0.0, 1e12, closed=True)
        if self.choose_every is not None:
            validate.whole(PlanError, "allocate.option-not-whole", **named("choose_every of ladp", self.choose_every))
            choice_noise_multiplier(self.choose_epsilon)
            if self.candidates is not None:
                object.__setattr__(self, "candidates", parse_shapes(who, self.candidates))
        elif self.candidates is not None:
            raise PlanError("allocate.candidates-unused", "ladp has candidates but never chooses", "give choose_every")
        self._rules()  # its numbers are checked there

    @property
    def name(self) -> str:
        """What the plan calls it."""
        return self.BASE if self.mode == "shares" else "ladp-budget"

    @property
    def follows_budget(self) -> bool:
        """Whether sigma is chosen on the way, so that the plan is priced at one Rényi order."""
        return self.mode == "budget"

    def side_releases(self, steps: int) -> tuple[tuple[float, int], ...]:
        """What the choices release beside the steps: (noise multiplier, how often)."""
        if self.choose_every is None:
            return ()
        return ((choice_noise_multiplier(self.choose_epsilon), -(-steps // self.choose_every)),)

    def __call__(self, problem: AllocationProblem) -> Allocation:
        picked, because = sensitive_layers(problem, self.sensitive, self.share, self.BASE)
        clip = clip_of_shape(problem, np.where(picked, *self.thresholds))
        parts = np.where(picked, *self.parts)
        rules, noise = self._rules() if problem.private else (), noise_by_shares(problem, clip, parts)
        clipping = self.clipping or (Clipping.JOINT if self.choose_every is not None else Clipping.BOX)
        if self.choose_every is not None and problem.private:
            choice = self._choice(problem, clip, parts, noise)
            refuse_unusable_candidates(problem, choice, problem.clip_with_factors(clip), noise, clipping)
            rules = (*rules, choice)
        return Allocation(clip=clip, noise=noise, clipping=clipping, rules=rules, why=(because, *self._why(problem)))

    def _rules(self) -> tuple[Rule, ...]:
        energy: Rule = FollowEnergy(decay=self.decay, least=self.least, every=self.every)
        if self.estimator != "energy":
            energy = FollowProxy(
                estimator=self.estimator, proxy=self.proxy, examples=self.examples, least=self.least, every=self.every
            )
        if not self.follows_budget:
            return (energy,)
        # the order is the plan's: it depends on the schedule
        return energy, FollowBudget(order=32.0, least=self.lower, most=self.upper)

    def _choice(
        self, problem: AllocationProblem, clip: ClipMatrix, parts: np.ndarray[Any, Any], noise: tuple[float, ...]
    ) -> Choose:
        assert self.choose_every is not None
        shapes = (
            default_shapes(problem, clip, parts) if self.candidates is None else check_shapes(problem, self.candidates)
        )
        if self.estimator != "energy":
            shapes = (*shapes, (MEASURED, noise))  # until the proxy is measured, before the first choice
        price = 0.25 * problem.batch if self.price is None else self.price
        return Choose(
            epsilon=self.choose_epsilon,
            every=self.choose_every,
            names=tuple(name for name, _ in shapes),
            noise=tuple(row for _, row in shapes),
            price=price,
        )

    def _followed(self) -> str:
        if self.estimator == "energy":
            return "the energy of what was released"
        return f"the {self.estimator} of {self.proxy} data at the current weights"

    def _why(self, problem: AllocationProblem) -> tuple[str, ...]:
        (c, c_other), (w, w_other) = self.thresholds, self.parts
        lines = [
            f"A sensitive layer has threshold {c:g} and {w:g} part of the budget, another {c_other:g} and {w_other:g}; "
            f"thresholds are scaled to the class's norm. Shares then follow {self._followed()}."
        ]
        if self.follows_budget:
            lines.append(
                "Noise follows the budget under a filter that may stop training early; a step costs at most twice the "
                "declared price, which at small sigma leaves it little room."
            )
        if self.choose_every is not None:
            ((_, calls),) = self.side_releases(problem.steps)
            lines.append(
                f"An exponential mechanism of ε = {self.choose_epsilon:g} chooses the shape of the noise {calls} "
                "times; ε includes it."
            )
        return tuple(lines)


def _number_pair(option: str, value: Any) -> tuple[float, float]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        problem = f"{option} of ladp is {value!r}"
        raise PlanError("allocate.option-pair", problem, "give two numbers: of sensitive layers, of others")
    for each in value:
        check_number("ladp", option, each, 0.0, 1e6)
    return float(value[0]), float(value[1])


ladp = LADP()
