"""The step plan: everything that decides what one private step costs, in one frozen object."""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

from lamina.account import Adjacency, Event, Schedule, accountant, choice_multiplier
from lamina.account.event import check_adjacency
from lamina.errors import PlanError
from lamina.plan import codec
from lamina.plan.injection import PER_STEP, Injection
from lamina.plan.rescale import effective_sigma, radius, rescale
from lamina.plan.rules import Choose, FollowBudget, FollowQuantile, Rule
from lamina.plan.slices import Range, Slice, by_place, joined
from lamina.plan.step_checks import check_class, check_layer, check_plan
from lamina.plan.table import summary, table

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

    Slices (plan/slices.py) narrow what a class moves within a layer: its gradient is 0 elsewhere before it is clipped,
    and what no class reaches gets no noise. `injection` (plan/injection.py) says where the noise enters: once per step,
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
    injection: Injection = PER_STEP
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
        put("clipping", _clipping(self.clipping))
        put("rules", tuple(self.rules))
        put("slices", tuple(self.slices))
        put("claimed", tuple(float(e) for e in self.claimed))
        accountant(self.accountant)
        check_plan(self)

    # ----------------------------------------------------------------------------------- who and where

    def index(self, k: str | int) -> int:
        """The row of a class, by name (or by row, checked)."""
        names = [entry.name for entry in self.classes]
        if isinstance(k, str):
            if k not in names:
                raise PlanError(
                    "plan.class-not-plan",
                    f"class {k!r} is not in the plan",
                    f"its classes are {', '.join(names)}",
                )
            return names.index(k)
        if not 0 <= k < len(names):
            raise PlanError(
                "plan.class-out-range",
                f"class {k} is out of range",
                f"the plan has classes 0 to {len(names) - 1}",
            )
        return k

    def reaches(self, k: str | int, layer: int) -> bool:
        """Whether a contribution of class k may move this layer."""
        return self.clip[self.index(k)][layer] > 0

    def slice(self, k: str | int, tensor: str) -> Slice | None:
        """What class k may move of a tensor, if not all of it."""
        return by_place(self.slices).get((self.classes[self.index(k)].name, tensor)) if self.slices else None

    def open_ranges(self, tensor: str) -> tuple[int, tuple[Range, ...]] | None:
        """The axis of a tensor and the places along it that some class may move; None if that is all of it."""
        layer = next(i for i, layer in enumerate(self.layers) if tensor in layer.parameters)
        parts = [self.slice(k, tensor) for k in range(len(self.classes)) if self.clip[k][layer] > 0]
        found = [part for part in parts if part is not None]
        if len(found) < len(parts) or not found:
            return None
        ranges = joined(places for part in found for places in part.ranges)
        return None if ranges == ((0, found[0].length),) else (found[0].axis, ranges)

    # ----------------------------------------------------------------------------------- what it costs

    def sigma(self, k: str | int, scale: float = 1.0) -> float:
        """The effective noise multiplier of class k, and of its contributions whose thresholds are scaled."""
        row = self.index(k)
        if not 0 < scale <= 1:
            raise PlanError(
                "plan.scale",
                f"scale is {scale!r}, must be in (0, 1]",
                "a stricter bound shrinks C, never grows it",
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
        return math.inf if self.classes[row].public else radius(self.clip[row], self.noise) * scale

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
        return self.stretch(k, 0, self.steps, scale)

    def stretch(self, k: str | int, first: int, last: int, scale: float = 1.0) -> Schedule:
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
            events.append(Event(sigma=choice_multiplier(choose.epsilon), q=q, steps=calls))
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

    def epsilon(
        self, k: str | int, adjacency: Adjacency | str = Adjacency.ADD_REMOVE, scale: float = 1.0
    ) -> float:
        """ε of class k after all T steps, by the plan's accountant; 0 if it is public or reaches nothing.

        Of raw noise it is zero-out (`adjacency`), and replace-one costs twice the distance of it, exactly.
        """
        schedule, relation = self.schedule(k, scale), check_adjacency(adjacency)
        if not schedule:
            return 0.0
        name = self.accountant
        if self.injection.raw and relation is Adjacency.REPLACE_ONE:
            name = "gaussian"  # nothing is sampled: exact, and every accountant's figure lies above it
        return _priced(name, schedule, self.delta(k), relation)

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
        return tuple(
            (c / s * sigma) ** 2 if c > 0 else 0.0 for c, s in zip(self.clip[row], self.noise, strict=True)
        )

    def rescaled(self, sigma: Mapping[str, float]) -> StepPlan:
        """The same plan with S scaled by the least common factor for which every sigma_k is as declared."""
        wanted = {self.index(name): value for name, value in sigma.items()}
        row = [wanted.get(k, math.inf) for k in range(len(self.classes))]
        bits = [self.bits(k) for k in range(len(self.classes))]
        return replace(self, noise=rescale(self.clip, self.noise, row, bits))

    # ----------------------------------------------------------------------------------- how it is told

    def table(self) -> str:
        """A readable table; asks the accountant for ε, so the first call may take a second."""
        return table(self)

    def __str__(self) -> str:
        return self.table()

    def to_dict(self) -> dict[str, Any]:
        """What `lamina plan --json` prints: figures per class and per layer."""
        return summary(self)

    def to_json(self) -> str:
        """Strict JSON from which `from_json` makes the same plan, bit for bit."""
        return codec.to_json(self)

    @classmethod
    def from_json(cls, text: str) -> StepPlan:
        """Read what `to_json` wrote."""
        return _build(codec.from_json(text))

    def to_cbor(self) -> bytes:
        """Deterministic CBOR: equal plans, equal bytes."""
        return codec.to_cbor(self)

    @classmethod
    def from_cbor(cls, data: bytes) -> StepPlan:
        """Read what `to_cbor` wrote."""
        return _build(codec.from_cbor(data))

    def digest(self) -> bytes:
        """SHA-256 of the CBOR: the plan's identity in ledgers and certificates."""
        return hashlib.sha256(self.to_cbor()).digest()


def _clipping(value: Clipping | str) -> Clipping:
    try:
        return Clipping(value)
    except ValueError:
        accepted = ", ".join(form.value for form in Clipping)
        raise PlanError(
            "plan.clipping-not-known", f"clipping is {value!r}, which is not known", f"accepted: {accepted}"
        ) from None


@lru_cache(maxsize=4096)
def _priced(name: str, schedule: Schedule, delta: float, adjacency: Adjacency) -> float:
    return accountant(name).epsilon(schedule, delta, adjacency)


def _build(state: Mapping[str, Any]) -> StepPlan:
    def made(kind: type[Any], rows: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
        return tuple(kind(**row) for row in rows)

    layers, classes = made(PlannedLayer, state["layers"]), made(PlannedClass, state["classes"])
    return StepPlan(
        **{
            **state,
            "layers": layers,
            "classes": classes,
            "injection": Injection(**state["injection"]),
            "slices": made(Slice, state["slices"]),
        }
    )
