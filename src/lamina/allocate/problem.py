"""What an allocation is asked, and what it answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from lamina.errors import PlanError
from lamina.plan import Clipping, LayerStack, Rule

if TYPE_CHECKING:
    from lamina.sensitivity.measure import Measure

Rows = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Choose C (K × L) and S (L), given what the classes may reach and what each is owed.

    sizes[l]      d_l, numbers in layer l that some class reaches
    weights[l]    m_l, loss increase per unit of noise variance in layer l; d_l where nothing better is known
    reach[k][l]   whether class k may reach layer l, or a part of it
    clip_norm[k]  c_k, the bound on a contribution's whole gradient
    sigma[k]      the declared noise multiplier; inf marks a public class, which is owed nothing
    layers[l], classes[k]   what they are called, for messages
    stack         the layers themselves, for policies that look at names and depths
    measure       what is known of the layers from proxy data, for policies that need it
    steps, rates[k], delta[k], targets[k]   T, q_k, δ_k and the ε_k that sigma was calibrated to
    batch         Σ b_k, the contributions that a step expects
    rho[k]        ρ_k, if the plan was asked for by zCDP budgets
    factors[k][l] by what the class's profile weighs its threshold there: `make_plan` multiplies C by it, so an
                  allocation answers with C as if there were none. What it takes S from is `weighed(C)`
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    reach: tuple[tuple[bool, ...], ...]
    clip_norm: tuple[float, ...]
    sigma: tuple[float, ...]
    layers: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    stack: LayerStack | None = None
    measure: Measure | None = None
    steps: int = 1
    rates: tuple[float, ...] = ()
    delta: tuple[float, ...] = ()
    targets: tuple[float, ...] = ()
    batch: float = 0.0
    rho: tuple[float, ...] = ()
    factors: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        layers, classes = len(self.sizes), len(self.reach)
        if not self.layers:
            object.__setattr__(self, "layers", tuple(f"layer {i}" for i in range(layers)))
        if not self.classes:
            object.__setattr__(self, "classes", tuple(f"class {k}" for k in range(classes)))
        if len(self.weights) != layers or any(len(row) != layers for row in self.reach):
            raise PlanError(
                "allocate.weights-reach-entry",
                f"weights and reach must have one entry for each of {layers} layers",
                "check shapes",
            )
        if self.factors and [len(row) for row in self.factors] != [layers] * classes:
            raise PlanError(
                "allocate.factors",
                f"factors must be {classes} × {layers}",
                "leave them out, or check their shape",
            )
        if len(self.clip_norm) != classes or len(self.sigma) != classes:
            raise PlanError(
                "allocate.clip-norm-sigma",
                f"clip_norm and sigma must have one entry for each of {classes} classes",
                "check them",
            )
        for what, values in (("weights", self.weights), ("clip_norm", self.clip_norm), ("sigma", self.sigma)):
            for i, value in enumerate(values):
                if not value > 0 or (what == "weights" and math.isinf(value)):
                    raise PlanError(
                        "allocate.correct", f"{what}[{i}] is {value!r}, must be > 0", "correct it"
                    )

    @property
    def private(self) -> tuple[int, ...]:
        """The classes that are owed noise and reach something."""
        return tuple(k for k, s in enumerate(self.sigma) if math.isfinite(s) and any(self.reach[k]))

    @property
    def opened(self) -> tuple[float, ...]:
        """The part of each layer's numbers that some class reaches."""
        if self.stack is None:
            return (1.0,) * len(self.sizes)
        return tuple(size / layer.size for size, layer in zip(self.sizes, self.stack, strict=True))

    def weighed(self, clip: Rows) -> Rows:
        """C times the factors of the profiles: what a step is clipped to."""
        if not self.factors:
            return clip
        return tuple(
            tuple(c * f if c else c for c, f in zip(row, factors, strict=True))
            for row, factors in zip(clip, self.factors, strict=True)
        )

    def thresholds(self) -> tuple[tuple[float, ...], ...]:
        """C with each class's norm spread evenly over the L_k layers it reaches: c_k/√L_k; ‖C[k]‖ = c_k."""
        rows = []
        for row, c, sigma in zip(self.reach, self.clip_norm, self.sigma, strict=True):
            each = math.inf if math.isinf(sigma) else c / math.sqrt(max(sum(row), 1))
            rows.append(tuple(each if reached else 0.0 for reached in row))
        return tuple(rows)

    def noised(self) -> tuple[bool, ...]:
        """The layers that some private class reaches; the others have S = 0."""
        return tuple(any(self.reach[k][i] for k in self.private) for i in range(len(self.sizes)))

    def same_noise(self) -> tuple[float, ...]:
        """One S for all layers that need noise, up to the common factor that `rescale` finds."""
        return tuple(1.0 if needed else 0.0 for needed in self.noised())


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """C, S and the form of clipping they are meant for. S counts up to a common factor.

    rules    how C and S may change while training (plan/rules.py)
    claimed  of a printed allocation: the ε that the document claims, by class. Then S is taken as it is
    divide   what B is multiplied by: B only sets the scale of what the optimiser sees
    why      sentences that explain the choice: `lamina plan --explain` prints them
    """

    clip: tuple[tuple[float, ...], ...]
    noise: tuple[float, ...]
    clipping: Clipping
    rules: tuple[Rule, ...] = ()
    claimed: tuple[float, ...] = ()
    divide: float = 1.0
    why: tuple[str, ...] = ()


Allocate = Callable[[Problem], Allocation]


class Policy(Protocol):
    """An allocation with a name and options of its own: a frozen dataclass."""

    @property
    def name(self) -> str: ...

    def __call__(self, problem: Problem) -> Allocation: ...


class Demanding(Policy, Protocol):
    """A policy that takes something from the budget beside the steps, or prices them in its own way.

    side(steps)     (noise multiplier, how often) of its other releases
    follows_budget  whether sigma is chosen on the way: then the plan is priced at one Rényi order
    """

    def side(self, steps: int) -> tuple[tuple[float, int], ...]: ...

    @property
    def follows_budget(self) -> bool: ...
