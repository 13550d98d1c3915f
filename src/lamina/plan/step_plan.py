"""`StepPlan`: everything that decides what one private step costs, in one frozen object, and its checks."""

from __future__ import annotations

import enum
import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeVar

from lamina import validate
from lamina.account.accountants import find_accountant
from lamina.account.gaussian_rdp import choice_noise_multiplier
from lamina.account.schedule import INTEGER_RDP, Adjacency, Event, Schedule, check_adjacency, rdp_order_of
from lamina.errors import PlanError
from lamina.plan import codec
from lamina.plan.correlation import MAX_BANDS, participations, turn_rate
from lamina.plan.rules import (
    LEAST_MAGNITUDE,
    MEASURED,
    MOST_MAGNITUDE,
    PER_STEP_INJECTION,
    Choose,
    ChooseAsPrinted,
    FollowBudget,
    FollowEnergy,
    FollowProxy,
    FollowQuantile,
    FreeRule,
    Injection,
    NoiseKind,
    Rule,
    clip_radius,
    effective_sigma,
    rescale_noise,
)
from lamina.plan.selection import Range, Slice, block_depth, join_spans, merge_ranges, slices_by_class_and_tensor
from lamina.plan.table import plan_summary, plan_table, preformatted

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
    """A layer as the plan knows it: `parameters` are tensor names as in `model.named_parameters()`.

    `spans` are the runs of blocks [first, stop) in which it is used; none if the plan does not count blocks.
    """

    name: str
    depth: float
    parameters: tuple[str, ...]
    size: int
    spans: tuple[Range, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "depth", float(self.depth))
        object.__setattr__(self, "parameters", tuple(self.parameters))
        object.__setattr__(self, "spans", tuple((first, stop) for first, stop in self.spans))
        problem = f"layer {self.name!r} has tensors {self.parameters!r}"
        _require(bool(self.name and self.parameters), "plan.layer-empty", problem, "give it a name and tensors")
        validate.number(PlanError, "plan.depth-out-of-range", least=0, most=1, depth=self.depth)
        validate.whole(PlanError, "plan.layer-size", remedy="leave empty layers out", size=self.size)


MAX_UNIT_CHARACTERS = 64  # sentences of a certificate contain the unit; a longer or multi-line unit could forge them


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
        who = f"class {self.name!r}"
        problem = f"{who} has unit {self.unit!r}"
        _require(bool(self.name and self.unit), "plan.class-unnamed", problem, "give it a name and a unit")
        one_noun = self.unit.isprintable() and len(self.unit) <= MAX_UNIT_CHARACTERS
        problem = f"{who} has unit {validate.short_repr(self.unit)}, must be at most {MAX_UNIT_CHARACTERS} printable characters"
        _require(one_noun, "plan.unit-invalid", problem, "name what a contribution is in a word or two: patient")
        remedy = "'@' names a signed bound of a class: CLASS@BOUND"
        _require("@" not in self.name, "plan.class-name-at", f"{who} has '@' in its name", remedy)
        problem = f"{who} has sampling rate {self.sampling_rate!r}, must be in (0, 1]"
        _require(0 < self.sampling_rate <= 1, "plan.sampling-rate-out-of-range", problem, "it is batch / population")
        if self.population is not None:
            validate.whole(PlanError, "plan.population-not-positive", population=self.population)
        if self.public:
            problem = f"{who} is public with δ = {self.delta!r}"
            _require(self.delta == 0, "plan.public-delta", problem, "a public class has δ = 0")
        else:
            problem = f"{who} has δ = {self.delta!r}, must be in (0, 1)"
            _require(0 < self.delta < 1, "plan.delta-out-of-range", problem, "choose δ well below 1/population")


class _KeepsDigest:
    __slots__ = ("_digest",)

    _digest: bytes  # no field: a copy and a changed plan have none


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan(_KeepsDigest):
    """One private step, described before any data is seen. K classes, L layers.

      clip[k][l]  C, the threshold of class k at layer l: 0 where it may not reach, inf if it is public
      noise[l]    S, the standard deviation of the noise of layer l, in units of the clipped *sum*
      batch       B, the public constant that divides the noised sum
      steps       T, how often the step is taken
      blocks      how many blocks the model has, in which depth is counted; 0 if the plan was made without a model

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

    `noise_kind` says which noise. On a grid of integers (engine/noise/integer.py) a contribution is cut to whole units,
    which makes it no longer. Discrete Gaussian and Skellam: the claim holds at integer Rényi orders, accountant rdp-integer. Laplace: ‖g_l‖
    is √Σ_t ‖g_t‖₁² over the tensors t of a layer, and the claim holds for every accountant (docs/theory.md).

    `bands` > 1 correlates the noise over steps (plan/correlation.py): each contribution may be sampled in one of so many steps, T steps
    are ⌈T/bands⌉ events at rate bands·q_k, and S is that of the independent noise from which the correlated one is made.

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
    blocks: int = 0
    noise_kind: NoiseKind = NoiseKind.GAUSSIAN
    bands: int = 1

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        for name in ("layers", "classes", "rules", "slices"):
            put(name, tuple(getattr(self, name)))
        put("clip", tuple(tuple(float(c) + 0.0 for c in row) for row in self.clip))  # -0.0 becomes 0.0
        put("noise", tuple(float(s) + 0.0 for s in self.noise))
        put("batch", float(self.batch))
        put("claimed", tuple(float(e) for e in self.claimed))
        if not isinstance(self.clipping, Clipping):
            forms = [form.value for form in Clipping]
            put(
                "clipping", Clipping(validate.one_of(PlanError, "plan.clipping-unknown", forms, clipping=self.clipping))
            )
        kinds, kind = [each.value for each in NoiseKind], getattr(self.noise_kind, "value", self.noise_kind)
        put("noise_kind", NoiseKind(validate.one_of(PlanError, "plan.noise-kind-unknown", kinds, noise_kind=kind)))
        find_accountant(self.accountant)
        _check_plan(self)

    @property
    def public_classes(self) -> frozenset[str]:
        """The classes that are declared public, so that nothing bounds what they lose."""
        return frozenset(entry.name for entry in self.classes if entry.public)

    def index(self, k: str | int) -> int:
        """The row of a class, by name (or by row, checked)."""
        names = [entry.name for entry in self.classes]
        if isinstance(k, str):
            if k not in names:
                raise PlanError("plan.class-unknown", f"the plan has no class {k!r}", f"it has {', '.join(names)}")
            return names.index(k)
        return validate.whole(PlanError, "plan.class-unknown", least=0, most=len(names) - 1, row=k)

    def reaches(self, k: str | int, layer: int) -> bool:
        """Whether a contribution of class k may move this layer."""
        return self.clip[self.index(k)][layer] > 0

    def slice(self, k: str | int, tensor: str) -> Slice | None:
        """What class k may move of a tensor, if not all of it."""
        if not self.slices:
            return None
        return slices_by_class_and_tensor(self.slices).get((self.classes[self.index(k)].name, tensor))

    def open_ranges(self, tensor: str) -> tuple[int, tuple[Range, ...]] | None:
        """The axis of a tensor and the places along it that some class may move; None if that is all of it."""
        layer = next(i for i, layer in enumerate(self.layers) if tensor in layer.parameters)
        parts = [self.slice(k, tensor) for k in range(len(self.classes)) if self.clip[k][layer] > 0]
        found = [part for part in parts if part is not None]
        if len(found) < len(parts) or not found:
            return None
        ranges = merge_ranges(places for part in found for places in part.ranges)
        return None if ranges == ((0, found[0].length),) else (found[0].axis, ranges)

    def sigma(self, k: str | int, scale: float = 1.0) -> float:
        """The effective noise multiplier of class k, and of its contributions whose thresholds are scaled."""
        row = self.index(k)
        validate.number(PlanError, "plan.scale-out-of-range", above=0, most=1, scale=scale)
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
            events = [Event(sigma=sigma, q=self.step_rate(k), steps=participations(last - first, self.bands))]
        if (choose := self.rule(Choose)) is not None:
            calls = choose.calls(first, last)
            events.append(Event(sigma=choice_noise_multiplier(choose.epsilon), q=q, steps=calls))
        return tuple(event for event in events if event.steps)

    def step_rate(self, k: str | int) -> float:
        """At which a step samples those of class k who may take part in it: q, or bands·q of those whose turn it is."""
        entry = self.classes[self.index(k)]
        return entry.sampling_rate if entry.public else turn_rate(entry.sampling_rate, self.bands, entry.name)

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

    @property
    def proves_replace_one(self) -> bool:
        """Return whether a replace-one divergence is proven for its noise. Otherwise two add/remove steps bound it."""
        return self.bands == 1 and self.noise_kind is not NoiseKind.LAPLACE

    def delta(self, k: str | int) -> float:
        """The δ at which ε of class k is stated."""
        return self.classes[self.index(k)].delta

    def epsilon(self, k: str | int, adjacency: Adjacency | str = Adjacency.ADD_REMOVE, scale: float = 1.0) -> float:
        """ε of class k after all T steps, by the plan's accountant; 0 if it is public or reaches nothing.

        Of raw noise it is zero-out (`adjacency`), and replace-one costs twice the distance of it, exactly. No replace-one
        figure is proven for correlated noise, where other content can mean another turn, and for Laplace noise.
        """
        schedule, relation = self.schedule(k, scale), check_adjacency(adjacency)
        if relation is Adjacency.REPLACE_ONE and not self.proves_replace_one:
            kind = f"noise that is correlated over {self.bands} steps" if self.bands > 1 else "Laplace noise"
            remedy = "ask for add_remove; or plan with uncorrelated Gaussian noise"
            raise PlanError("plan.replace-one-not-proven", f"replace-one is not proven for {kind}", remedy)
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

    def table(self) -> str:
        """A readable table; asks the accountant for ε, so the first call may take a second."""
        return plan_table(self)

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return preformatted(self.table())

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
        """Read what `to_cbor` wrote. Other bytes of the same plan are refused: its digest is that of its bytes."""
        plan = cls(**codec.from_cbor(data))
        if plan.to_cbor() != data:
            raise PlanError("plan.not-cbor", "the plan is not written as StepPlan.to_cbor writes it", "write it again")
        return plan

    def digest(self) -> bytes:
        """SHA-256 of the CBOR: the plan's identity in ledgers and certificates. Computed once; it takes milliseconds."""
        try:
            return self._digest
        except AttributeError:
            object.__setattr__(self, "_digest", hashlib.sha256(self.to_cbor()).digest())
            return self._digest


@lru_cache(maxsize=4096)
def _cached_epsilon(name: str, schedule: Schedule, delta: float, adjacency: Adjacency) -> float:
    return find_accountant(name).epsilon(schedule, delta, adjacency)


def _require(condition: bool, code: str, problem: str, remedy: str) -> None:
    if not condition:
        raise PlanError(code, problem, remedy)


def _check_plan(plan: StepPlan) -> None:
    """Shapes, names, numbers, and no private class that moves a layer without noise."""
    _require(
        bool(plan.layers and plan.classes),
        "plan.no-layers-or-classes",
        "the plan has no layers or no classes",
        "give it both",
    )
    _check_unique("layer", (layer.name for layer in plan.layers))
    _check_unique("class", (entry.name for entry in plan.classes))
    _check_unique("tensor", (name for layer in plan.layers for name in layer.parameters))
    _check_spans(plan)
    rows, columns = len(plan.classes), len(plan.layers)
    widths = [len(row) for row in plan.clip]
    _require(widths == [columns] * rows, "plan.clip-shape", f"clip has rows of {widths}", f"make it {rows} × {columns}")
    count = len(plan.noise)
    _require(
        count == columns, "plan.noise-shape", f"noise has {count} entries for {columns} layers", "give one per layer"
    )
    validate.positive(PlanError, "plan.batch-not-positive", batch=plan.batch)
    validate.whole(PlanError, "plan.steps-not-positive", steps=plan.steps)
    for layer, s in zip(plan.layers, plan.noise, strict=True):
        fits = s == 0 or all(LEAST_MAGNITUDE <= x <= MOST_MAGNITUDE for x in (s, s / plan.batch))
        problem = (
            f"noise of layer {layer.name!r} is {s!r} ({s / plan.batch!r} after division by batch), must be 0 or in "
        )
        remedy = "float32 would lose it: scale C and S of every layer by the same factor"
        _require(fits, "plan.noise-out-of-range", f"{problem}[{LEAST_MAGNITUDE:g}, {MOST_MAGNITUDE:g}]", remedy)
    for entry, row in zip(plan.classes, plan.clip, strict=True):
        for layer, c, s in zip(plan.layers, row, plan.noise, strict=True):
            _check_clip(entry, layer, c, s)
        sigma, who = plan.sigma(entry.name), f"class {entry.name!r}"
        _require(sigma > 0, "plan.sigma-not-positive", f"{who} has sigma {sigma!r}, must be > 0", "raise S or lower C")
        lost = math.isinf(sigma) and not entry.public and any(c > 0 for c in row)
        _require(
            not lost, "plan.sigma-infinite", f"{who} reaches layers, but C/S underflows to 0", "lower S or raise C"
        )
    _check_rules(plan)
    _check_injection(plan)
    _check_noise_kind(plan)
    _check_correlation(plan)
    _check_slices(plan)


def _check_spans(plan: StepPlan) -> None:
    """Every layer lies in blocks that the model has, in order, and its depth is that of the first; or none does."""
    validate.whole(PlanError, "plan.blocks-negative", least=0, blocks=plan.blocks)
    for layer in plan.layers:
        edges = [edge for span in layer.spans for edge in span]
        ordered = layer.spans == join_spans(layer.spans, plan.blocks) and all(0 <= e <= plan.blocks for e in edges)
        if not ordered or bool(edges) != bool(plan.blocks):
            problem = f"layer {layer.name!r} has spans {layer.spans!r} in a model of {plan.blocks} blocks"
            raise PlanError("plan.spans-out-of-range", problem, "give runs [first, stop) of blocks, as LayerStack has")
        if edges and layer.depth != block_depth(edges[0], plan.blocks):
            problem = f"layer {layer.name!r} has depth {layer.depth!r}, but begins in block {edges[0]} of {plan.blocks}"
            raise PlanError("plan.depth-differs", problem, f"its depth is {block_depth(edges[0], plan.blocks)!r}")
    for before, layer in pairwise(plan.layers if plan.blocks else ()):
        if layer.spans[0][0] < before.spans[0][0]:
            problem = f"layer {layer.name!r} begins in an earlier block than {before.name!r}, which is listed before it"
            raise PlanError("plan.layers-out-of-order", problem, "list layers from input to output, as LayerStack does")


def _check_clip(entry: PlannedClass, layer: PlannedLayer, c: float, s: float) -> None:
    if (
        c == 0
        or (entry.public and c == math.inf)
        or (LEAST_MAGNITUDE <= c <= MOST_MAGNITUDE and s > 0 and not entry.public)
    ):
        return
    where = f"clip of class {entry.name!r} at layer {layer.name!r} is {c!r}"
    if entry.public:
        problem = f"{where}, but the class is public"
        raise PlanError("plan.public-clip-finite", problem, "use inf where it reaches, or 0")
    if LEAST_MAGNITUDE <= c <= MOST_MAGNITUDE:
        problem = f"{where} and the layer has no noise (S = 0): its gradient would be released as it is"
        raise PlanError("plan.layer-without-noise", problem, "give the layer S > 0, or C = 0 in every private class")
    problem = f"{where}, must be 0 or in [{LEAST_MAGNITUDE:g}, {MOST_MAGNITUDE:g}]"
    raise PlanError("plan.clip-out-of-range", problem, "only a class that is declared public has C = inf")


def _check_rules(plan: StepPlan) -> None:
    """Rules fit the plan, and nothing is done that only a paper's allocation may do."""
    kinds = {type(rule) for rule in plan.rules}
    _require(len(kinds) == len(plan.rules), "plan.rule-twice", "the plan has two rules of one kind", "keep one of them")
    form, from_paper = plan.clipping.value, plan.allocation.startswith("printed")
    printed_choice = plan.rule(ChooseAsPrinted) is not None
    if form == "elementwise" and (not from_paper or plan.batch != 1 or len(plan.rules) > printed_choice):
        problem = f"elementwise clipping under allocation {plan.allocation!r} bounds no single contribution"
        remedy = "use box or joint; allocate='printed-ladp' reproduces the paper"
        raise PlanError("plan.elementwise-clipping", problem, remedy)
    if plan.claimed and (not from_paper or len(plan.claimed) != len(plan.classes)):
        remedy = "give one ε per class, for the allocation of a paper only"
        raise PlanError("plan.claimed-misplaced", f"claimed is {plan.claimed}", remedy)
    if plan.rule(FollowQuantile) is not None and form != "box":
        problem = f"clip norms cannot follow a quantile under {form} clipping"
        raise PlanError("plan.quantile-needs-box", problem, "use clipping='box'")
    if printed_choice and form != "elementwise":
        remedy = "use the rule Choose; allocate='printed-ladp' reproduces the paper"
        raise PlanError("plan.elementwise-clipping", f"the choice of a paper does not fit {form} clipping", remedy)
    choose, budget = plan.rule(Choose), plan.rule(FollowBudget)
    unnamed = choose is not None and MEASURED not in choose.names
    if plan.rule(FollowProxy) is not None and (unnamed or plan.rule(FollowEnergy) is not None):
        problem = "shares cannot follow a proxy and also the energy of what was released, or a choice without it"
        remedy = f"keep one of the rules, or give the choice a candidate {MEASURED!r}"
        raise PlanError("plan.shares-follow-two-rules", problem, remedy)
    if plan.rule(FreeRule) is not None and len(plan.rules) > 1:
        problem = f"shares follow {type(plan.rule(FreeRule)).__name__} and another rule of the plan"
        raise PlanError("plan.shares-follow-two-rules", problem, "keep one of the rules")
    for row in choose.noise if choose is not None else ():
        if len(row) != len(plan.layers) or any((s > 0) != (t > 0) for s, t in zip(row, plan.noise, strict=True)):
            problem = "a candidate must have noise at exactly the layers where the plan has noise"
            raise PlanError("plan.candidate-noise-elsewhere", problem, "correct the candidate")
    if budget is None and rdp_order_of(plan.accountant) is not None:
        problem = f"accountant {plan.accountant!r} is only for plans with the rule FollowBudget"
        raise PlanError("plan.accountant-needs-budget-rule", problem, "use pld or rdp")
    if budget is not None and plan.accountant != budget.accountant:
        problem = f"accountant {plan.accountant!r} does not hold for noise that follows its budget"
        raise PlanError("plan.budget-rule-accountant", problem, f"use accountant {budget.accountant!r}")


def _check_injection(plan: StepPlan) -> None:
    """Where the noise enters fits what else the plan does."""
    form = plan.injection.form.value
    if (plan.claimed or plan.clipping.value == "elementwise") and form != "per_step":
        problem = f"{form} noise does not fit allocation {plan.allocation!r}: its paper adds noise once per step"
        raise PlanError("plan.injection-not-per-step", problem, "use injection per_step")
    if plan.injection.raw and plan.rules:
        raise PlanError(
            "plan.raw-noise-with-rule",
            f"{form} noise cannot be used with the rule {type(plan.rules[0]).__name__}: its size tells who was sampled",
            "use per_step, per_microbatch or per_sample; or an allocation without rules",
        )


def _check_noise_kind(plan: StepPlan) -> None:
    """Noise on integers enters once per step and hides private classes; discrete Gaussian noise has its own accountant."""
    if plan.noise_kind is NoiseKind.GAUSSIAN:
        return
    kind = plan.noise_kind.value
    if plan.noise_kind.integer_orders and plan.accountant != INTEGER_RDP:
        problem = f"accountant {plan.accountant!r} does not hold for {kind} noise"
        raise PlanError("plan.noise-kind-accountant", problem, f"use accountant {INTEGER_RDP!r} (in [corpus])")
    if plan.injection != PER_STEP_INJECTION or plan.rules or plan.claimed or plan.clipping is Clipping.ELEMENTWISE:
        problem = f"{kind} noise does not fit injection {plan.injection}, rules or the allocation {plan.allocation!r}"
        raise PlanError("plan.noise-kind-alone", problem, "use injection per_step and an allocation without rules")
    if public := [entry.name for entry in plan.classes if entry.public]:
        problem = f"class {public[0]!r} is public: what is not clipped does not fit the grid of {kind} noise"
        raise PlanError("plan.noise-kind-public-class", problem, "leave the class out (batch 0), or use gaussian noise")


def _check_correlation(plan: StepPlan) -> None:
    """Correlated noise is proven for Gaussian noise once per step, with C and S the same in every step."""
    validate.whole(PlanError, "plan.bands-out-of-range", most=MAX_BANDS, bands=plan.bands)
    if plan.bands == 1:
        return
    alone = {
        f"{plan.noise_kind.value} noise": plan.noise_kind is not NoiseKind.GAUSSIAN,
        f"injection {plan.injection}": plan.injection != PER_STEP_INJECTION,
        f"the rule {type(plan.rules[0]).__name__}" if plan.rules else "": bool(plan.rules),
        f"the allocation {plan.allocation!r}": bool(plan.claimed) or plan.clipping is Clipping.ELEMENTWISE,
    }
    if found := [what for what, there in alone.items() if there]:
        problem = f"noise that is correlated over {plan.bands} steps is not proven with {found[0]}"
        remedy = "use gaussian noise, injection per_step and an allocation that leaves C and S alone; or no correlation"
        raise PlanError("plan.correlated-not-proven", problem, remedy)
    for k in range(len(plan.classes)):
        plan.step_rate(k)


def _check_slices(plan: StepPlan) -> None:
    """Each slice narrows a tensor of a layer that its class reaches, once, along one axis for all classes."""
    layer_of = {name: i for i, layer in enumerate(plan.layers) for name in layer.parameters}
    names = {entry.name: k for k, entry in enumerate(plan.classes)}
    axes: dict[str, tuple[int, int]] = {}
    _check_unique("slice", (f"{part.cls} {part.tensor}" for part in plan.slices))
    for part in plan.slices:
        where = f"slice of {part.tensor!r} for class {part.cls!r}"
        if part.cls not in names or part.tensor not in layer_of:
            raise PlanError("plan.slice-unknown", f"{where}: the plan has no such class or tensor", "correct the name")
        if not plan.clip[names[part.cls]][layer_of[part.tensor]] > 0:
            problem = f"{where}: the class does not reach its layer"
            raise PlanError("plan.slice-unreached", problem, "leave the slice out")
        if axes.setdefault(part.tensor, (part.axis, part.length)) != (part.axis, part.length):
            problem = f"{where} has axis {part.axis}, another class's has {axes[part.tensor][0]}"
            raise PlanError("plan.slice-axes-differ", problem, "use one axis")
    for k, entry in enumerate(plan.classes):
        for i, layer in enumerate(plan.layers):
            parts = [plan.slice(k, name) for name in layer.parameters] if plan.clip[k][i] > 0 else []
            if parts and all(part is not None and not part.ranges for part in parts):
                problem = f"class {entry.name!r} reaches layer {layer.name!r}, but its slices leave nothing of it"
                raise PlanError("plan.slices-empty", problem, "set its threshold to 0 there")


def _check_unique(what: str, names: Iterable[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise PlanError("plan.name-twice", f"{what} {twice[0]!r} is in the plan more than once", "name it once")
