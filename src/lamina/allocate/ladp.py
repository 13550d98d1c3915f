"""`ladp`: presets for sensitive and other layers, shares that follow what was released, choices that are paid for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from lamina.account import choice_multiplier
from lamina.allocate.candidates import candidates, check_candidates, check_offers, named_rows
from lamina.allocate.options import form, number, one_of, whole
from lamina.allocate.problem import Allocation, Problem
from lamina.allocate.sensitive import Sensitive, check_sensitive, sensitive_layers
from lamina.allocate.shares import Rows, by_shares, shaped
from lamina.errors import PlanError
from lamina.plan import Choose, Clipping, FollowBudget, FollowEnergy, Rule

Shapes = tuple[tuple[str, tuple[float, ...]], ...]


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
                    price), under a Rényi filter that is asked first and may stop early
      choose_every  every so many steps an exponential mechanism of `choose_epsilon` picks the shape of S from
                    `candidates` (a public list; six by default) over a sample of its own. Its cost is in ε
      price         λ, how many kept contributions a unit of relative noise is worth; by default a quarter of the batch:
                    where half is kept, the exchange that leaves signal to noise unchanged
      decay, least, every   of `FollowEnergy`
      clipping      box; joint with choices, because a box of fixed thresholds keeps the same whatever S is
    """

    sensitive: Sensitive | None = None
    share: float = 0.25
    thresholds: tuple[float, float] = (1.0, 5.0)
    parts: tuple[float, float] = (1.0, 0.5)
    mode: str = "shares"
    decay: float = 0.9
    least: float = 0.1
    every: int = 10
    lower: float = 0.7
    upper: float = 1.5
    choose_every: int | None = None
    choose_epsilon: float = 0.5
    candidates: Shapes | None = None
    price: float | None = None
    clipping: Clipping | None = None

    BASE: ClassVar[str] = "ladp"

    def __post_init__(self) -> None:
        who = self.BASE
        check_sensitive(who, self.sensitive)
        number(who, "share", self.share, 0.0, 1.0)
        for option in ("thresholds", "parts"):
            object.__setattr__(self, option, _pair(option, getattr(self, option)))
        one_of(who, "mode", self.mode, ("shares", "budget"))
        if self.clipping is not None:
            object.__setattr__(self, "clipping", form(who, self.clipping))
        if self.price is not None:
            number(who, "price", self.price, 0.0, 1e12, closed=True)
        if self.choose_every is not None:
            whole(who, "choose_every", self.choose_every)
            choice_multiplier(self.choose_epsilon)
            if self.candidates is not None:
                object.__setattr__(self, "candidates", named_rows(who, self.candidates))
        elif self.candidates is not None:
            raise PlanError(
                "allocate.ladp-candidates-never",
                "ladp has candidates but never chooses",
                "give choose_every, e.g. once per epoch",
            )
        self._rules()  # its numbers are checked there

    @property
    def name(self) -> str:
        """What the plan calls it."""
        return self.BASE if self.mode == "shares" else "ladp-budget"

    @property
    def follows_budget(self) -> bool:
        """Whether sigma is chosen on the way, so that the plan is priced at one Rényi order."""
        return self.mode == "budget"

    def side(self, steps: int) -> tuple[tuple[float, int], ...]:
        """What the choices release beside the steps: (noise multiplier, how often)."""
        if self.choose_every is None:
            return ()
        return ((choice_multiplier(self.choose_epsilon), -(-steps // self.choose_every)),)

    def __call__(self, problem: Problem) -> Allocation:
        picked, because = sensitive_layers(problem, self.sensitive, self.share, self.BASE)
        clip = shaped(problem, np.where(picked, *self.thresholds))
        parts = np.where(picked, *self.parts)
        rules, noise = self._rules() if problem.private else (), by_shares(problem, clip, parts)
        clipping = self.clipping or (Clipping.JOINT if self.choose_every is not None else Clipping.BOX)
        if self.choose_every is not None and problem.private:
            choice = self._choice(problem, clip, parts)
            check_offers(problem, choice, problem.weighed(clip), noise, clipping)
            rules = (*rules, choice)
        return Allocation(
            clip=clip,
            noise=noise,
            clipping=clipping,
            rules=rules,
            why=(because, *self._why(problem)),
        )

    def _rules(self) -> tuple[Rule, ...]:
        energy = FollowEnergy(decay=self.decay, least=self.least, every=self.every)
        if not self.follows_budget:
            return (energy,)
        # the order is the plan's: it depends on the schedule
        return energy, FollowBudget(order=32.0, least=self.lower, most=self.upper)

    def _choice(self, problem: Problem, clip: Rows, parts: np.ndarray[Any, Any]) -> Choose:
        assert self.choose_every is not None
        shapes = (
            candidates(problem, clip, parts)
            if self.candidates is None
            else check_candidates(problem, self.candidates)
        )
        price = 0.25 * problem.batch if self.price is None else self.price
        return Choose(
            epsilon=self.choose_epsilon,
            every=self.choose_every,
            names=tuple(name for name, _ in shapes),
            noise=tuple(row for _, row in shapes),
            price=price,
        )

    def _why(self, problem: Problem) -> tuple[str, ...]:
        (c, c_other), (w, w_other) = self.thresholds, self.parts
        lines = [
            f"A sensitive layer has threshold {c:g} and {w:g} part of the budget, another {c_other:g} and {w_other:g}; "
            "thresholds are scaled to the class's norm. Shares then follow the energy of what was released.",
        ]
        if self.follows_budget:
            lines.append(
                "Noise follows the budget under a filter that may stop training early; a step costs at most twice the "
                "declared price, which at small sigma leaves it little room."
            )
        if self.choose_every is not None:
            ((_, calls),) = self.side(problem.steps)
            lines.append(
                f"An exponential mechanism of ε = {self.choose_epsilon:g} chooses the shape of the noise {calls} "
                "times; ε includes it."
            )
        return tuple(lines)


def _pair(option: str, value: Any) -> tuple[float, float]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise PlanError(
            "allocate.ladp",
            f"{option} of ladp is {value!r}",
            "give two numbers: of sensitive layers, of others",
        )
    for each in value:
        number("ladp", option, each, 0.0, 1e6)
    return float(value[0]), float(value[1])


ladp = LADP()
