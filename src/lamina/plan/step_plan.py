"""`StepPlan`: everything that decides what one private step costs, in one frozen object, and its checks."""

from __future__ import annotations

import enum
import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

from lamina.account.accountants import find_accountant
from lamina.account.gaussian_rdp import choice_noise_multiplier
from lamina.account.schedule import Adjacency, Event, Schedule, check_adjacency, rdp_order_of
from lamina.errors import PlanError
from lamina.plan import codec
from lamina.plan.rules import (
    LEAST_MAGNITUDE,
    MOST_MAGNITUDE,
    PER_STEP_INJECTION,
    Choose,
    FollowBudget,
    FollowQuantile,
    Injection,
    Rule,
    clip_radius,
    effective_sigma,
    rescale_noise,
)
from lamina.plan.selection import Range, Slice, merge_ranges, slices_by_class_and_tensor
from lamina.plan.table import plan_summary, plan_table

R = TypeVar("R", bound=Rule)


class Clipping(enum.Enum):
    """How a contribution is bounded: each layer at its own threshold, or all of its layers at once.

    ELEMENTWISE bounds the mean gradient of the batch entry by entry, as one document prints it: it exists to be
    measured, in plans whose allocation is a printed one.
    """

    BOX = "box"
    JOINT = "joint"
    ELEMENTWISE = "elementwise"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedLayer:
    """A layer as the plan knows it: `parameters` are tensor names as in `model.named_parameters()`."""

    name: str
    depth: float
    parameters: tuple[str, ...]
    size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "depth", float(self.depth))
        object.__setattr__(self, "parameters", tuple(self.parameters))
        check_layer(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedClass:
    """A class as the plan knows it: Poisson sampling at `sampling_rate` = b/N, N the declared population.

    `delta` is the δ at which its ε is stated, `unit` what a contribution is, `profile` the depth profile in
    words. A public class is owed no noise; its δ is 0.
    """

    name: str
    population: int | None
    sampling_rate: float
    public: bool = False
    delta: float = 0.0
    unit: str = "contribution"
    profile: str = "all layers"
    purposes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "sampling_rate", float(self.sampling_rate))
        object.__setattr__(self, "delta", float(self.delta))
        object.__setattr__(self, "purposes", tuple(self.purposes))
        check_class(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """One private step, described before any data is seen. K classes, L layers.

      clip[k][l]  C, the threshold of class k at layer l: 0 where it may not reach, inf if it is public
      noise[l]    S, the standard deviation of the noise of layer l, in units of the clipped *sum*
      batch       B, the public constant that divides the noised sum
      steps       T, how often the step is taken

    Each contribution of class k is sampled with rate q_k and its gradient g clipped:
      box    ‖g_l‖ ≤ C[k,l] for every layer l
      joint  ‖(g_l/S_l)_l‖ ≤ 1/sigma_k over the layers with C[k,l] > 0 and S_l > 0
    The clipped gradients are summed, N(0, S_l² I) is added to each layer, the result is divided by B.

    Claim. For adding or removing one contribution of class k, the step is one Poisson-subsampled Gaussian
    mechanism with rate q_k and noise multiplier

        sigma_k = ( Σ_l (C[k,l]/S_l)² )^(-1/2),       0/0 counting as 0.

    S is public, so dividing layer l by S_l loses nothing; the noise becomes a unit Gaussian, and the
    contribution shifts it by a vector no longer than 1/sigma_k. Both forms of clipping have the same
    bound, hence the same sigma_k. T steps are T such events: what they cost is `epsilon(k)`.

    Rules (plan/rules.py) say how C and S may move while it runs. A rule that reads noised counts adds them to the
    step: sigma_k^-2 = Σ_l (C[k,l]/S_l)² + L_k/(4σ_b²), L_k the layers that the class reaches. One that chooses by an
    exponential mechanism adds events to the schedule.

    Slices (plan/selection.py) narrow what a class moves within a layer: its gradient is 0 elsewhere before it is clipped,
    and what no class reaches gets no noise. `injection` (plan/rules.py) says where the noise enters: once per step,
    as above, or in parts of the same sum at the same price; or per contribution, raw, which is another claim.

    It holds only if C > 0 never meets S = 0 in a private class (refused here), if C, S, q, B, T do not depend
    on private data, and if every layer with S > 0 is noised at every step, whoever was sampled.
    """

    layers: tuple[PlannedLayer, ...]
    classes: tuple[PlannedClass, ...]
    clip: tuple[tuple[float, ...], ...]
    noise: tuple[float, ...]
    batch: float
    steps: int
    clipping: Clipping = Clipping.BOX
    accountant: str = "pld"
    allocation: str = "hand"
    rules: tuple[Rule, ...] = ()
    injection: Injection = PER_STEP_INJECTION
    slices: tuple[Slice, ...] = ()
    claimed: tuple[float, ...] = ()  # of a printed allocation: the ε that its document claims, by class

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("layers", tuple(self.layers))
        put("classes", tuple(self.classes))
        put("clip", tuple(tuple(float(c) + 0.0 for c in row) for row in self.clip))  # -0.0 becomes 0.0
        put("noise", tuple(float(s) + 0.0 for s in self.noise))
        put("batch", float(self.batch))
        put("clipping", _parse_clipping(self.clipping))
        put("rules", tuple(self.rules))
        put("slices", tuple(self.slices))
        put("claimed", tuple(float(e) for e in self.claimed))
        find_accountant(self.accountant)
        check_plan(self)

    # ----------------------------------------------------------------------------------- who and where

    def index(self, k: str | int) -> int:
        """The row of a class, by name (or by row, checked)."""
        names = [entry.name for entry in self.classes]
        if isinstance(k, str):
            if k not in names:
                raise PlanError(
                    "plan.class-not-plan", f"class {k!r} is not in the plan", f"its classes are {', '.join(names)}"
                )
            return names.index(k)
        if not 0 <= k < len(names):
            raise PlanError(
                "plan.class-out-range", f"class {k} is out of range", f"the plan has classes 0 to {len(names) - 1}"
            )
        return k

    def reaches(self, k: str | int, layer: int) -> bool:
        """Whether a contribution of class k may move this layer."""
        return self.clip[self.index(k)][layer] > 0

    def slice(self, k: str | int, tensor: str) -> Slice | None:
        """What class k may move of a tensor, if not all of it."""
        return (
            slices_by_class_and_tensor(self.slices).get((self.classes[self.index(k)].name, tensor))
            if self.slices
            else None
        )

    def open_ranges(self, tensor: str) -> tuple[int, tuple[Range, ...]] | None:
        """The axis of a tensor and the places along it that some class may move; None if that is all of it."""
        layer = next(i for i, layer in enumerate(self.layers) if tensor in layer.parameters)
        parts = [self.slice(k, tensor) for k in range(len(self.classes)) if self.clip[k][layer] > 0]
        found = [part for part in parts if part is not None]
        if len(found) < len(parts) or not found:
            return None
        ranges = merge_ranges(places for part in found for places in part.ranges)
        return None if ranges == ((0, found[0].length),) else (found[0].axis, ranges)

    # ----------------------------------------------------------------------------------- what it costs

    def sigma(self, k: str | int, scale: float = 1.0) -> float:
        """The effective noise multiplier of class k, and of its contributions whose thresholds are scaled."""
        row = self.index(k)
        if not 0 < scale <= 1:
            raise PlanError(
                "plan.scale", f"scale is {scale!r}, must be in (0, 1]", "a stricter bound shrinks C, never grows it"
            )
        if self.classes[row].public:
            return math.inf
        return effective_sigma([c * scale for c in self.clip[row]], self.noise, self.bits(row))

    def rule(self, kind: type[R]) -> R | None:
        """The plan's rule of that kind, if it has one."""
        return next((rule for rule in self.rules if isinstance(rule, kind)), None)

    def bits(self, k: str | int) -> float:
        """How far the noised counts of class k move, in units of their noise: √L_k/(2σ_b); 0 without counts."""
        counted = self.rule(FollowQuantile)
        if counted is None:
            return 0.0
        return math.sqrt(sum(c > 0 for c in self.clip[self.index(k)])) / (2.0 * counted.noise)

    def joint(self, k: str | int, scale: float = 1.0) -> float:
        """The radius 1/sigma_k of the joint clip; infinite for a public class."""
        row = self.index(k)
        return math.inf if self.classes[row].public else clip_radius(self.clip[row], self.noise) * scale

    def norm(self, k: str | int) -> float:
        """The largest norm that a clipped contribution of class k can have: what a signed clip norm is held against.

        box: ‖C[k]‖.  joint: the radius 1/sigma_k, all of it spent on the layer with the largest S.
        """
        row = self.index(k)
        if self.classes[row].public:
            return math.inf
        if self.clipping is Clipping.JOINT:
            reached = (s for c, s in zip(self.clip[row], self.noise, strict=True) if c > 0)
            return self.joint(row) * max(reached, default=0.0)
        return math.sqrt(math.fsum(c * c for c in self.clip[row]))

    def schedule(self, k: str | int, scale: float = 1.0) -> Schedule:
        """What an accountant is asked about class k; empty if the class is owed nothing."""
        return self.schedule_between(k, 0, self.steps, scale)

    def schedule_between(self, k: str | int, first: int, last: int, scale: float = 1.0) -> Schedule:
        """The part of the schedule that the steps first … last-1 take: the steps, and the choices among them.

        Raw noise hides its own contribution alone, whoever was sampled: one unsampled event per occurrence.
        """
        sigma, q = self.sigma(k, scale), self.classes[self.index(k)].sampling_rate
        if math.isinf(sigma):
            return ()
        sigma = sigma if self.scales else self.sigma(k)
        if self.injection.raw:
            events = [Event(sigma=sigma, q=1.0, steps=self.injection.events(first, last))]
        else:
            events = [Event(sigma=sigma, q=q, steps=last - first)]
        if (choose := self.rule(Choose)) is not None:
            calls = choose.calls(first, last)
            events.append(Event(sigma=choice_noise_multiplier(choose.epsilon), q=q, steps=calls))
        return tuple(event for event in events if event.steps)

    @property
    def scales(self) -> bool:
        """Whether a contribution with smaller thresholds has a smaller price of its own.

        Not where sigma follows the budget: the filter proves a price for the class, and its contributions share it. Not
        under the printed clamp, which bounds nobody.
        """
        return self.rule(FollowBudget) is None and self.clipping is not Clipping.ELEMENTWISE

    @property
    def adjacency(self) -> str:
        """What ε compares, in words: a contribution there or not; of raw noise, its content or zero in its place."""
        return "zero-out, no amplification" if self.injection.raw else "add/remove"

    def delta(self, k: str | int) -> float:
        """The δ at which ε of class k is stated."""
        return self.classes[self.index(k)].delta

    def epsilon(self, k: str | int, adjacency: Adjacency | str = Adjacency.ADD_REMOVE, scale: float = 1.0) -> float:
        """ε of class k after all T steps, by the plan's accountant; 0 if it is public or reaches nothing.

        Of raw noise it is zero-out (`adjacency`), and replace-one costs twice the distance of it, exactly.
        """
        schedule, relation = self.schedule(k, scale), check_adjacency(adjacency)
        if not schedule:
            return 0.0
        name = self.accountant
        if self.injection.raw and relation is Adjacency.REPLACE_ONE:
            name = "gaussian"  # nothing is sampled: exact, and every accountant's figure lies above it
        return _cached_epsilon(name, schedule, self.delta(k), relation)

    def rho(self, k: str | int, scale: float = 1.0) -> float:
        """ρ of class k after all T steps without amplification: T/(2 sigma_k²), and the choices.

        Of raw noise with a cap N on occurrences: N/(2 sigma_k²).
        """
        return math.fsum(0.5 * event.steps * event.mu**2 for event in self.schedule(k, scale))

    def share(self, k: str | int) -> tuple[float, ...]:
        """The part of class k's budget that each layer takes: (C[k,l]/S_l)² sigma_k², which sums to 1 (with counts)."""
        row = self.index(k)
        sigma = self.sigma(row)
        if math.isinf(sigma):
            return (0.0,) * len(self.layers)
        return tuple((c / s * sigma) ** 2 if c > 0 else 0.0 for c, s in zip(self.clip[row], self.noise, strict=True))

    def rescaled(self, sigma: Mapping[str, float]) -> StepPlan:
        """The same plan with S scaled by the least common factor for which every sigma_k is as declared."""
        wanted = {self.index(name): value for name, value in sigma.items()}
        row = [wanted.get(k, math.inf) for k in range(len(self.classes))]
        bits = [self.bits(k) for k in range(len(self.classes))]
        return replace(self, noise=rescale_noise(self.clip, self.noise, row, bits))

    # ----------------------------------------------------------------------------------- how it is told

    def table(self) -> str:
        """A readable table; asks the accountant for ε, so the first call may take a second."""
        return plan_table(self)

    def __str__(self) -> str:
        return self.table()

    def to_dict(self) -> dict[str, Any]:
        """What `lamina plan --json` prints: figures per class and per layer."""
        return plan_summary(self)

    def to_json(self) -> str:
        """Strict JSON from which `from_json` makes the same plan, bit for bit."""
        return codec.to_json(self)

    @classmethod
    def from_json(cls, text: str) -> StepPlan:
        """Read what `to_json` wrote."""
        return cls(**codec.from_json(text))

    def to_cbor(self) -> bytes:
        """Deterministic CBOR: equal plans, equal bytes."""
        return codec.to_cbor(self)

    @classmethod
    def from_cbor(cls, data: bytes) -> StepPlan:
        """Read what `to_cbor` wrote."""
        return cls(**codec.from_cbor(data))

    def digest(self) -> bytes:
        """SHA-256 of the CBOR: the plan's identity in ledgers and certificates."""
        return hashlib.sha256(self.to_cbor()).digest()


def _parse_clipping(value: Clipping | str) -> Clipping:
    try:
        return Clipping(value)
    except ValueError:
        accepted = ", ".join(form.value for form in Clipping)
        raise PlanError(
            "plan.clipping-not-known", f"clipping is {value!r}, which is not known", f"accepted: {accepted}"
        ) from None


@lru_cache(maxsize=4096)
def _cached_epsilon(name: str, schedule: Schedule, delta: float, adjacency: Adjacency) -> float:
    return find_accountant(name).epsilon(schedule, delta, adjacency)


def check_layer(layer: PlannedLayer) -> None:
    """A layer has a name, a depth in [0, 1], tensors and a size."""
    if not layer.name or not layer.parameters:
        raise PlanError(
            "plan.layer-tensors", f"layer {layer.name!r} has tensors {layer.parameters!r}", "give it a name and tensors"
        )
    if not 0 <= layer.depth <= 1:
        raise PlanError(
            "plan.layer-depth", f"layer {layer.name!r} has depth {layer.depth!r}, must be in [0, 1]", "0 is the input"
        )
    if layer.size < 1:
        raise PlanError(
            "plan.layer-size", f"layer {layer.name!r} has size {layer.size!r}, must be >= 1", "leave empty layers out"
        )


def check_class(entry: PlannedClass) -> None:
    """A class has a name, a sampling rate in (0, 1] and, unless public, a δ in (0, 1)."""
    who = f"class {entry.name!r}"
    if not entry.name or not entry.unit:
        raise PlanError("plan.unit", f"{who} has unit {entry.unit!r}", "give it a name and a unit")
    if "@" in entry.name:
        raise PlanError("plan.name", f"{who} has '@' in its name", "'@' names a signed bound of a class: CLASS@BOUND")
    if not 0 < entry.sampling_rate <= 1:
        raise PlanError(
            "plan.sampling-rate",
            f"{who} has sampling rate {entry.sampling_rate!r}, must be in (0, 1]",
            "it is batch / population",
        )
    if entry.population is not None and entry.population < 1:
        raise PlanError(
            "plan.population", f"{who} has population {entry.population!r}, must be >= 1", "declare its size"
        )
    if entry.public and entry.delta != 0:
        raise PlanError("plan.public-delta", f"{who} is public with δ = {entry.delta!r}", "a public class has δ = 0")
    if not entry.public and not 0 < entry.delta < 1:
        raise PlanError(
            "plan.delta", f"{who} has δ = {entry.delta!r}, must be in (0, 1)", "choose δ well below 1/population"
        )


def check_plan(plan: StepPlan) -> None:
    """Shapes, names, numbers, and no private class that moves a layer without noise."""
    if not plan.layers or not plan.classes:
        raise PlanError("plan.plan-no-layers", "the plan has no layers or no classes", "give it one of each at least")
    _check_unique("layer", (layer.name for layer in plan.layers))
    _check_unique("class", (entry.name for entry in plan.classes))
    _check_unique("tensor", (name for layer in plan.layers for name in layer.parameters))
    shape = (len(plan.classes), len(plan.layers))
    if len(plan.clip) != shape[0] or any(len(row) != shape[1] for row in plan.clip):
        raise PlanError(
            "plan.clip-rows",
            f"clip has rows of {[len(row) for row in plan.clip]}",
            f"it must be {shape[0]} × {shape[1]}",
        )
    if len(plan.noise) != shape[1]:
        raise PlanError(
            "plan.noise-entries", f"noise has {len(plan.noise)} entries, must be {shape[1]}", "give one S per layer"
        )
    if not (math.isfinite(plan.batch) and plan.batch > 0):
        raise PlanError(
            "plan.batch-finite", f"batch is {plan.batch!r}, must be finite and > 0", "it divides the noised sum"
        )
    if isinstance(plan.steps, bool) or not isinstance(plan.steps, int) or plan.steps < 1:
        raise PlanError(
            "plan.steps-whole-number", f"steps is {plan.steps!r}, must be a whole number >= 1", "say how long it trains"
        )
    for layer, s in zip(plan.layers, plan.noise, strict=True):
        if not (math.isfinite(s) and s >= 0):
            raise PlanError(
                "plan.noise-layer-finite",
                f"noise of layer {layer.name!r} is {s!r}, must be finite and >= 0",
                "correct S",
            )
        if s > 0 and not (
            LEAST_MAGNITUDE <= s <= MOST_MAGNITUDE and LEAST_MAGNITUDE <= s / plan.batch <= MOST_MAGNITUDE
        ):
            raise PlanError(
                "plan.noise-layer-divided",
                f"noise of layer {layer.name!r} is {s!r} (divided by batch: {s / plan.batch!r}), "
                f"must lie in [{LEAST_MAGNITUDE}, {MOST_MAGNITUDE}]: float32 would lose it",
                "scale C and S of every layer by the same factor",
            )
    for entry, row in zip(plan.classes, plan.clip, strict=True):
        for layer, c, s in zip(plan.layers, row, plan.noise, strict=True):
            _check_cell(entry, layer, c, s)
        sigma = plan.sigma(entry.name)
        if not sigma > 0:
            raise PlanError(
                "plan.class-sigma", f"class {entry.name!r} has sigma {sigma!r}, must be > 0", "raise S or lower C"
            )
        if math.isinf(sigma) and not entry.public and any(c > 0 for c in row):
            raise PlanError(
                "plan.class-reaches-layers",
                f"class {entry.name!r} reaches layers, but its sigma is infinite: C/S underflows",
                "lower S or raise C",
            )

    _check_rules(plan)
    _check_injection(plan)
    _check_slices(plan)


def _check_rules(plan: StepPlan) -> None:
    """Rules that fit the plan, and nothing that only a printed allocation may do."""
    if len({type(rule) for rule in plan.rules}) != len(plan.rules):
        raise PlanError("plan.plan-two-rules", "the plan has two rules of one kind", "keep one of them")
    form, printed = plan.clipping.value, plan.allocation.startswith("printed")
    if form == "elementwise" and (not printed or plan.batch != 1 or plan.rules):
        raise PlanError(
            "plan.elementwise-clipping-plan",
            f"elementwise clipping in a plan of allocation {plan.allocation!r}: it bounds no single contribution",
            "use box or joint; allocate='printed-ladp' reproduces the document",
        )
    if plan.claimed and (not printed or len(plan.claimed) != len(plan.classes)):
        raise PlanError("plan.claimed", f"claimed is {plan.claimed}", "one ε per class, of a printed allocation only")
    if plan.rule(FollowQuantile) is not None and form != "box":
        raise PlanError(
            "plan.thresholds-follow-quantile",
            f"thresholds follow a quantile under {form} clipping",
            "use clipping='box'",
        )
    choose, budget = plan.rule(Choose), plan.rule(FollowBudget)
    for row in choose.noise if choose is not None else ():
        if len(row) != len(plan.layers) or any((s > 0) != (t > 0) for s, t in zip(row, plan.noise, strict=True)):
            raise PlanError(
                "plan.candidate-noise-plan",
                "a candidate has noise where the plan has none, or none where it has",
                "correct it",
            )
    if budget is None and rdp_order_of(plan.accountant) is not None:
        raise PlanError(
            "plan.accountant-noise-follows",
            f"accountant {plan.accountant!r} is for noise that follows its budget, and the plan has no such rule",
            "use pld or rdp",
        )
    if budget is not None and plan.accountant != budget.accountant:
        raise PlanError(
            "plan.noise-follows-budget",
            f"noise that follows the budget is priced by {plan.accountant!r}, which does not hold for it",
            f"use accountant {budget.accountant!r}",
        )


def _check_injection(plan: StepPlan) -> None:
    """Where the noise enters fits what else the plan does."""
    form = plan.injection.form.value
    if (plan.claimed or plan.clipping.value == "elementwise") and form != "per_step":
        raise PlanError(
            "plan.noise-under-allocation",
            f"{form} noise under allocation {plan.allocation!r}, whose document adds it once per step",
            "use injection per_step",
        )
    if plan.injection.raw and plan.rules:
        raise PlanError(
            "plan.noise-plan-rule",
            f"{form} noise in a plan with the rule {type(plan.rules[0]).__name__}: its size tells who was sampled, and "
            "a rule is priced, or reads the noise, as if it did not",
            "use per_step, per_microbatch or per_sample; or an allocation without rules",
        )
    if plan.injection.raw and rdp_order_of(plan.accountant) is not None:
        raise PlanError(
            "plan.noise-priced", f"{form} noise is priced by {plan.accountant!r}", "use pld, zcdp or gaussian"
        )


def _check_slices(plan: StepPlan) -> None:
    """Each narrows a tensor of a layer that its class reaches, once, along one axis for all classes."""
    layer_of = {name: i for i, layer in enumerate(plan.layers) for name in layer.parameters}
    names = {entry.name: k for k, entry in enumerate(plan.classes)}
    axes: dict[str, tuple[int, int]] = {}
    _check_unique("slice", (f"{part.cls} {part.tensor}" for part in plan.slices))
    for part in plan.slices:
        where = f"slice of {part.tensor!r} for class {part.cls!r}"
        if part.cls not in names or part.tensor not in layer_of:
            raise PlanError("plan.plan-no-class", f"{where}: the plan has no such class or tensor", "correct the name")
        if not plan.clip[names[part.cls]][layer_of[part.tensor]] > 0:
            raise PlanError(
                "plan.class-not-reach",
                f"{where}: the class does not reach its layer",
                "leave the slice out, or let it reach",
            )
        if axes.setdefault(part.tensor, (part.axis, part.length)) != (part.axis, part.length):
            raise PlanError(
                "plan.axis-another-class",
                f"{where} has axis {part.axis}, another class's has {axes[part.tensor][0]}",
                "use one axis",
            )
    for k, entry in enumerate(plan.classes):
        for i, layer in enumerate(plan.layers):
            parts = [plan.slice(k, name) for name in layer.parameters] if plan.clip[k][i] > 0 else []
            if parts and all(part is not None and not part.ranges for part in parts):
                raise PlanError(
                    "plan.class-reaches-layer",
                    f"class {entry.name!r} reaches layer {layer.name!r}, and its slices leave nothing of it",
                    "set its threshold to 0 there",
                )


def _check_cell(entry: PlannedClass, layer: PlannedLayer, c: float, s: float) -> None:
    where = f"clip of class {entry.name!r} at layer {layer.name!r} is {c!r}"
    if entry.public:
        if c != 0 and c != math.inf:
            raise PlanError(
                "plan.class-public", f"{where}, but the class is public", "use inf where it reaches and 0 elsewhere"
            )
    elif not (math.isfinite(c) and c >= 0):
        raise PlanError(
            "plan.finite-declare",
            f"{where}, must be finite and >= 0",
            "declare the class public if it is owed no noise",
        )
    elif c > 0 and not LEAST_MAGNITUDE <= c <= MOST_MAGNITUDE:
        raise PlanError(
            "plan.lie",
            f"{where}, must be 0 or lie in [{LEAST_MAGNITUDE}, {MOST_MAGNITUDE}]",
            "float32 gradients cannot be clipped to it",
        )
    elif c > 0 and s == 0:
        raise PlanError(
            "plan.layer-no-noise",
            f"{where} and the layer has no noise (S = 0): its gradient would be released as it is",
            "give the layer S > 0, or C = 0 in every private class",
        )


def _check_unique(what: str, names: Iterable[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise PlanError("plan.plan-once", f"{what} {twice[0]!r} is in the plan more than once", "name it once")
