"""Noise of a plan: where it enters a step, the effective noise multiplier, the rules by which a plan changes.

Needs neither numpy nor scipy.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lamina import validate
from lamina.account.schedule import CHOICE_EPSILON, RDP_ORDERS
from lamina.errors import PlanError

LEAST_MAGNITUDE, MOST_MAGNITUDE = 1e-20, 1e20
"""Thresholds and noise that float32 sums can carry."""


MAX_INJECTION_PARTS = 1 << 16


class InjectionForm(enum.Enum):
    """per step, per microbatch, per sample by shares, or per sample as the document has it."""

    STEP = "per_step"
    MICROBATCH = "per_microbatch"
    SHARES = "per_sample"
    RAW = "per_sample_raw"


@dataclass(frozen=True, kw_only=True, slots=True)
class Injection:
    """
      per_step        N(0, S²) once
      per_microbatch  `parts` fixed bins, each N(0, S²/parts), also when a bin is empty: in sum N(0, S²)
      per_sample      `parts` slots, each N(0, S²/parts), unused ones topped up; contributions beyond carry no share
      per_sample_raw  every private contribution brings N(0, S²) of its own, on what its class reaches; an empty batch
                      brings none. `occurrences` caps how often one takes part (None: in every step)

    The first three have the same law whoever was sampled, so the claim of `StepPlan` holds for them as it stands.

    Raw noise depends on who was sampled, so its size tells who was, and a contribution can rely on its own noise only.
    The claim is another: for replacing a contribution's gradient by 0 and leaving its noise (zero-out), a step in which
    it takes part is one Gaussian mechanism with multiplier sigma_k, and nothing is credited to sampling. N occurrences
    are ρ = N/(2 sigma_k²). Every price of such a plan is that (`StepPlan.stretch`).
    """

    form: InjectionForm = InjectionForm.STEP
    parts: int = 1
    occurrences: int | None = None

    def __post_init__(self) -> None:
        forms = [form.value for form in InjectionForm]
        form = self.form.value if isinstance(self.form, InjectionForm) else self.form
        object.__setattr__(
            self, "form", InjectionForm(validate.one_of(PlanError, "plan.injection-unknown", forms, injection=form))
        )
        validate.whole(PlanError, "plan.injection-parts", most=MAX_INJECTION_PARTS, parts=self.parts)
        if self.form in (InjectionForm.STEP, InjectionForm.RAW) and self.parts != 1:
            raise PlanError("plan.injection-parts", f"{form} noise has {self.parts} parts", "leave out bins and slots")
        if self.occurrences is not None:
            validate.whole(PlanError, "plan.occurrences-misplaced", occurrences=self.occurrences)
            if self.form is not InjectionForm.RAW:
                problem = f"occurrences is {self.occurrences} under {form} noise"
                raise PlanError("plan.occurrences-misplaced", problem, "only per_sample_raw noise takes occurrences")

    def events(self, first: int, last: int) -> int:
        """How often one contribution takes part, at most, in the steps first … last-1, as they count toward the cap.

        After t steps it has taken part min(N, t) times at most.
        """
        most = last if self.occurrences is None else self.occurrences
        return min(most, last) - min(most, first)

    def to_dict(self) -> dict[str, str | int | None]:
        """As a codec writes it."""
        return {"form": self.form.value, "parts": self.parts, "occurrences": self.occurrences}

    def __str__(self) -> str:
        if self.form in (InjectionForm.MICROBATCH, InjectionForm.SHARES):
            return f"{self.form.value} in {self.parts} {'bins' if self.form is InjectionForm.MICROBATCH else 'slots'}"
        cap = "" if self.occurrences is None else f", at most {self.occurrences} occurrences"
        return f"{self.form.value}{cap}"

    @property
    def raw(self) -> bool:
        """Whether a contribution is credited with its own noise only."""
        return self.form is InjectionForm.RAW


PER_STEP_INJECTION = Injection()


class NoiseKind(enum.Enum):
    """
      gaussian           N(0, S²), drawn and added in floating point
      discrete_gaussian  P(x) ∝ exp(-x²/2S²) on the whole multiples of a unit
      skellam            the difference of two Poisson draws, of variance S², on the whole multiples of a unit
      laplace            P(x) ∝ exp(-|x|/b) on the whole multiples of a unit, b = √(π/2)·S, for gradients of bounded L1 norm

    The last three are drawn exactly and added in int64 to gradients that were cut to the same grid
    (engine/noise/integer.py). S of laplace noise is that of the Gaussian which dominates it: its standard deviation is
    √2·b = √π·S.
    """

    GAUSSIAN = "gaussian"
    DISCRETE_GAUSSIAN = "discrete_gaussian"
    SKELLAM = "skellam"
    LAPLACE = "laplace"

    @property
    def integer_orders(self) -> bool:
        """Whether only integer Rényi orders price it."""
        return self in (NoiseKind.DISCRETE_GAUSSIAN, NoiseKind.SKELLAM)

    @property
    def std_ratio(self) -> float:
        """The standard deviation of the noise over S."""
        return math.sqrt(math.pi) if self is NoiseKind.LAPLACE else 1.0


Row = Sequence[float]


def clip_radius(clip: Row, noise: Row) -> float:
    """How far a contribution can move the step, in units of its noise: √Σ_l (C_l/S_l)², 0/0 counting as 0.

    Infinite if a layer with C > 0 has S = 0: then nothing hides it.
    """
    if any(c > 0 and s == 0 for c, s in zip(clip, noise, strict=True)):
        return math.inf
    return math.hypot(*(c / s for c, s in zip(clip, noise, strict=True) if c > 0))


def effective_sigma(clip: Row, noise: Row, beside: float = 0.0) -> float:
    """sigma = (Σ_l (C_l/S_l)² + beside²)^(-1/2) (docs/theory.md, "The step").

    `beside`: how far the contribution moves what else the step releases, in units of that noise.
    """
    reach = math.hypot(clip_radius(clip, noise), beside)
    if reach == 0:
        return math.inf
    return 1.0 / reach


def rescale_noise(clip: Sequence[Row], noise: Row, sigma: Row, beside: Row | None = None) -> tuple[float, ...]:
    """κ·S with κ = max_k √(Σ_l (C[k,l]/S_l)² / (sigma_k^-2 - beside_k²)): the least noise that serves every class.

    Rows with sigma = inf or with infinite thresholds are public and owed nothing. The result is on the safe
    side in floating point: `effective_sigma` of every row is at least the declared sigma, exactly.
    """
    extra = [0.0] * len(clip) if beside is None else beside
    owed = [(row, s, b) for row, s, b in zip(clip, sigma, extra, strict=True) if _is_private_row(row, s)]
    for _, s, b in owed:
        if b * s >= 1:
            problem = f"the noised counts have multiplier {1 / b:.4g}, below the {s:.4g} of the whole step"
            raise PlanError("plan.noised-counts-too-expensive", problem, "give the counts more noise")
    kappa = max((clip_radius(row, noise) / math.sqrt((1 / s - b) * (1 / s + b)) for row, s, b in owed), default=0.0)
    if kappa == 0:
        return tuple(noise)
    if not math.isfinite(kappa):
        problem = "a layer that a private class reaches has no noise"
        raise PlanError("plan.layer-without-noise", problem, "give it S > 0, or C = 0")
    step = math.ulp(kappa)
    while True:
        scaled = tuple(kappa * s for s in noise)
        if all(effective_sigma(row, scaled, b) >= s for row, s, b in owed):
            return scaled
        kappa, step = kappa + step, 2 * step  # where counts take nearly all, one ulp would move nothing


def _is_private_row(row: Row, sigma: float) -> bool:
    return math.isfinite(sigma) and sigma > 0 and all(map(math.isfinite, row))


# How a plan may change while it runs: rules of plain numbers, public and fixed before the first step.
#
# A rule moves C and S between layers on the strength of what was already noised (free), or of a release of its own that
# the plan pays for. What a rule can never do is lower a class's sigma below what the plan declares, except under a
# filter that was asked first (`FollowBudget`). docs/theory.md, "When the plan changes during training".


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowEnergy:
    """Shares of the budget follow the energy of the noised gradient sum. Post-processing: costs nothing.

    decay   of the moving average, per observation
    least   no layer's share falls below least/L
    every   observe and adapt at every so many steps
    """

    decay: float = 0.9
    least: float = 0.1
    every: int = 10

    def __post_init__(self) -> None:
        _check_between("decay", self.decay, 0, 1)
        _check_between("least", self.least, 0, 1)
        _check_step_count(every=self.every)


_WRITTEN = "write one of these"


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowProxy:
    """Shares of the budget follow what public or simulated examples say of the layers at the current weights. Free.

    estimator  "fisher": the root mean square of an example's gradient; "influence": how strongly single examples act
               on the loss of others (influence functions)
    proxy      what the data are: "public" or "simulated"
    examples   of the proxy at each measurement, drawn afresh
    least      no layer's share falls below least/L
    every      measure before steps 0, every, 2·every, …

    w_l ∝ n_l·√d_l, the optimum for layers whose typical gradient is n_l (docs/theory.md). The weights are released already
    and the data are nobody's, so this is post-processing; sigma is restored after every move.
    """

    estimator: str = "fisher"
    proxy: str = "simulated"
    examples: int = 64
    least: float = 0.1
    every: int = 10

    def __post_init__(self) -> None:
        validate.one_of(
            PlanError, "plan.rule-out-of-range", ("fisher", "influence"), remedy=_WRITTEN, estimator=self.estimator
        )
        validate.one_of(PlanError, "plan.rule-out-of-range", ("public", "simulated"), remedy=_WRITTEN, proxy=self.proxy)
        _check_between("least", self.least, 0, 1)
        _check_step_count(examples=self.examples)
        _check_step_count(every=self.every)


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowQuantile:
    """Thresholds follow a quantile of the gradient norms, read from noised counts that the plan pays for.

    At every step and layer the contributions of private classes whose gradient was not clipped are counted, as
    Σ (bit - ½), with noise of standard deviation `noise`:  b̃ = (Σ(bit - ½) + N(0, noise²))/B + ½, and
    C ← C·exp(-rate·(b̃ - target)). One contribution moves the L_k counts it takes part in by ½ each, so the step as
    a whole has  sigma_k^-2 = Σ_l (C/S)² + L_k/(4 noise²).
    """

    target: float = 0.5
    rate: float = 0.2
    noise: float

    def __post_init__(self) -> None:
        _check_between("target", self.target, 0, 1)
        _check_between("rate", self.rate, 0, 10)
        _check_between("noise", self.noise, 0, 1e12)


MEASURED = "measured"
"""The candidate of a `Choose` that stands for the shares which a `FollowProxy` last measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choose:
    """An exponential mechanism picks one of several shapes of S, at steps 0, every, 2·every, …

    epsilon  ε of one call: p ∝ exp(epsilon·u); priced as a Gaussian that dominates it (account/gaussian_rdp.py)
    names    what the candidates are called
    noise    S of each candidate, up to a common factor: 0 or within [1e-20, 1e20]
    price    λ of  u(a) = Σ_i s_i(a) − λ·noise(a): how many kept contributions a unit of relative noise is worth

    s_i(a) ∈ [0, 1] is how much of contribution i the clip of candidate a would keep, over a Poisson draw of its own.

    Beside a `FollowProxy` one candidate is called "measured": the shares that the proxy gives at the current weights, which
    are public before the draw. They are followed until the next choice if it is drawn, and not followed otherwise.
    """

    epsilon: float
    every: int
    names: tuple[str, ...]
    noise: tuple[tuple[float, ...], ...]
    price: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(self.names))
        object.__setattr__(self, "noise", tuple(tuple(float(s) for s in row) for row in self.noise))
        _check_between("epsilon", self.epsilon, *CHOICE_EPSILON, closed=True)
        _check_step_count(every=self.every)
        _check_between("price", self.price, 0, 1e12, closed=True)
        if not (0 < len(self.names) == len(self.noise) == len(set(self.names)) and all(self.names)):
            problem = f"a choice has names {validate.short_repr(self.names)} for {len(self.noise)} candidates"
            raise PlanError("plan.candidates-unnamed", problem, "give every candidate one name of its own")
        for s in (s for row in self.noise for s in row):
            if not (s == 0 or LEAST_MAGNITUDE <= s <= MOST_MAGNITUDE):
                problem = f"a candidate has noise {s!r}, must be 0 or in [{LEAST_MAGNITUDE:g}, {MOST_MAGNITUDE:g}]"
                raise PlanError("plan.candidate-noise-out-of-range", problem, "scale the row: only its shape matters")

    def calls(self, first: int, last: int) -> int:
        """How many choices fall on the steps first … last-1."""
        return -(-last // self.every) + (-first // self.every)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChooseAsPrinted(Choose):
    """The exponential mechanism of the LADP document, before every step: lines 3 and 4 of its algorithm.

        u(a) = Σ_l f_l·parts[a][l],    f_l = Σ_i ‖g_il‖² over its sum over the layers,    p ∝ exp(epsilon·u/2)

    f is the Fisher information of a sample of private contributions. One of them can move u by 1 at most, in either
    direction, so a call is epsilon-bounded-range, as for `Choose`. The document charges nothing for it.

    parts  of the budget of a step by layer and candidate: ε_l = parts[a][l]·spend
    spend  Σ_l ε_l, what line 18 subtracts after every step
    """

    parts: tuple[tuple[float, ...], ...]
    spend: float

    def __post_init__(self) -> None:
        Choose.__post_init__(self)
        object.__setattr__(self, "parts", tuple(tuple(float(part) for part in row) for row in self.parts))
        _check_between("spend", self.spend, 0, 1e12)
        shape = [len(row) for row in self.noise]
        if [len(row) for row in self.parts] != shape or not all(0 <= part <= 1 for row in self.parts for part in row):
            problem = f"the parts of a choice are {validate.short_repr(self.parts)}"
            raise PlanError("plan.rule-out-of-range", problem, "give every candidate one part in [0, 1] for each layer")
        if any(math.fsum(row) > 1 + 1e-9 for row in self.parts):
            raise PlanError("plan.rule-out-of-range", "parts of a candidate exceed 1", "divide them by their sum")


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowBudget:
    """sigma_k(t) is chosen on the way, between `least` and `most` times the declared one, under a filter.

    The filter is at one Rényi order, fixed in advance, has the price of the declared schedule as its budget, and is
    asked before the step; what it refuses is not taken, and training stops there.
    """

    order: float
    least: float = 0.7
    most: float = 1.5

    def __post_init__(self) -> None:
        if self.order not in RDP_ORDERS:  # so that budgets at several orders add up, and more of them never cost less
            nearest = min(RDP_ORDERS, key=lambda each: abs(each - self.order))
            problem = f"order of a rule is {self.order!r}, must be an order at which RDP is computed"
            raise PlanError("plan.order-not-computed", problem, f"the nearest one is {nearest:g}")
        _check_between("least", self.least, 0.1, 1, closed=True)
        _check_between("most", self.most, 1, 10, closed=True)

    @property
    def accountant(self) -> str:
        """The accountant that such a plan is priced by."""
        return f"rdp@{self.order:g}"


@dataclass(frozen=True, kw_only=True)
class FreeRule:
    """A rule of your own: shares of the budget move by what was released. Post-processing: costs nothing.

    A subclass is a frozen dataclass of plain values in a module with `from __future__ import annotations`, has the field
    `every` (observe and move at every so many steps), and is made known by `declare_rule`, also where a ledger with such
    plans is verified. It sees released gradients only, and sigma is restored after every move, whatever it answers.
    """

    every: int

    def next(
        self, seen: Sequence[float], squares: Sequence[float], noise: Sequence[float], sizes: Sequence[int]
    ) -> tuple[Sequence[float], Sequence[float]]:
        """Return the shares of the noised layers, and what the rule keeps for the next observation.

        seen     what it kept, nothing at first: plain numbers, which are in training checkpoints
        squares  ‖Y_l‖² of the noised sum that was released, by noised layer
        noise    S of these layers, and
        sizes    how many numbers of them are noised
        """
        raise NotImplementedError


_MAX_STEPS = 2**53 - 1  # whole numbers that every codec carries
Rule = FollowEnergy | FollowProxy | FollowQuantile | Choose | ChooseAsPrinted | FollowBudget | FreeRule
RULE_KINDS: dict[str, type[Rule]] = {
    "follow energy": FollowEnergy,
    "follow proxy": FollowProxy,
    "follow quantile": FollowQuantile,
    "choose": Choose,
    "choose as printed": ChooseAsPrinted,
    "follow budget": FollowBudget,
}


def declare_rule(name: str, kind: type[FreeRule]) -> None:
    """Make a rule of your own known by its name in plans."""
    if name in RULE_KINDS or not (
        isinstance(kind, type) and issubclass(kind, FreeRule) and "__dataclass_fields__" in vars(kind)
    ):
        problem = (
            f"a rule is called {name!r} already" if name in RULE_KINDS else f"{kind!r} is no dataclass of FreeRule"
        )
        raise PlanError("plan.rule-not-declared", problem, "give another name, and a dataclass that extends FreeRule")
    RULE_KINDS[name] = kind


def _check_between(name: str, value: float, low: float, high: float, *, closed: bool = False) -> None:
    limits: dict[str, Any] = {"least": low, "most": high} if closed else {"above": low, "below": high}
    limits[f"{name} of a rule"] = value
    validate.number(PlanError, "plan.rule-out-of-range", remedy="correct the rule", **limits)


def _check_step_count(**named: int) -> None:
    validate.whole(PlanError, "plan.rule-out-of-range", most=_MAX_STEPS, remedy="correct the rule", **named)
