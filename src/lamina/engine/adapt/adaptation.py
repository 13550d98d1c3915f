"""`Adaptation`: a plan that changes while it runs, and never promises less than it declared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from lamina.allocate.choice import Offer, offers
from lamina.engine.adapt.energy import Energy, released_squares
from lamina.engine.adapt.frame import Array, Frame, Rows
from lamina.engine.adapt.pace import Pace
from lamina.engine.adapt.quantile import factors
from lamina.engine.adapt.state import check_state, not_mine
from lamina.errors import EngineError, LaminaError, PlanError
from lamina.plan.rules import Choose, FollowBudget, FollowEnergy, FollowQuantile
from lamina.plan.step import StepPlan
from lamina.sensitivity.energy import EnergyEstimate


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
        self._frame = Frame(plan, sizes)
        self._base = self._frame.shares(plan.clip, plan.noise) if len(self._frame.noised) else np.zeros(0)
        budget, energy = plan.rule(FollowBudget), plan.rule(FollowEnergy)
        self._follow, self._quantile, self._choose = energy, plan.rule(FollowQuantile), plan.rule(Choose)
        if self._choose is not None:
            _check_offers(plan)
        if budget is not None and energy is None:
            energy = FollowEnergy()
        self._energy = None if energy is None else Energy(self._frame, energy)
        self._pace = None
        if budget is not None and self._energy is not None:
            self._pace = Pace(self._frame, budget, self._energy.rule.decay)

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
            squares = released_squares(self.applied, released)
        self.update(squares, None if counts is None else counts.tolist())

    def update(self, squares: Array | None, counts: Sequence[float] | None) -> None:
        """The same in plain numbers: ‖Y_l‖² of every layer (None: not observed at this step) and the noised counts."""
        clip, drift = self.applied.clip, self._drift
        if self._quantile is not None and counts is not None:
            self.counts = tuple(counts)
            by = factors(self._frame, self._quantile, self.applied, counts)
            clip, drift = (
                self._frame.stretched(clip, by),
                tuple(d * f for d, f in zip(drift, by, strict=True)),
            )
        if squares is not None and self._energy is not None:
            self._energy.observe(np.asarray(squares, dtype=np.float64), self.applied)
            if self._pace is not None:
                self.proposed_factor = self._pace.observe(self._energy.estimate)
        moves = drift is not self._drift or (squares is not None and self._follow is not None)
        if moves and self._move(clip):
            self._drift = drift

    def _move(self, clip: Rows, factor: float | None = None) -> bool:
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

    def offers(self) -> tuple[Offer, ...]:
        """C and S of every candidate. A layer whose thresholds moved since has both of them moved alike."""
        frame = self._frame
        return tuple(
            replace(
                offer,
                clip=frame.stretched(offer.clip, self._drift),
                noise=tuple(s * d for s, d in zip(offer.noise, self._drift, strict=True)),
            )
            for offer in offers(self.declared)
        )

    def settle(self, offer: Offer) -> None:
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
                    "engine.factor-plan-not",
                    f"factor is {factor!r}, and the plan does not follow its budget",
                    "leave it out",
                )
            return False
        if factor is None:
            raise EngineError(
                "engine.plan-follows-budget",
                "the plan follows its budget, and the factor on its sigma is not given",
                "ask the filters for adaptation.proposed_factor times sigma_k, and give that factor",
            )
        if not rule.least <= factor <= rule.most:
            raise EngineError(
                "engine.factor-lie",
                f"factor is {factor!r}, must lie in [{rule.least:g}, {rule.most:g}]",
                "clamp it",
            )
        if not self._move(self.applied.clip, factor):
            raise EngineError(
                "engine.no-plan-made",
                f"no plan can be made with {factor:g} times the declared sigma",
                "end the run here",
            )
        self.fixed = True
        return True

    def keep_pace(self) -> None:
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
            raise not_mine("has other fields")
        check_state(state, mine, self.declared)
        rows = list(self.declared.clip)
        for k, row in zip(self._frame.private, state["clip"], strict=True):
            rows[k] = tuple(row)
        factor, base = float(state["factor"]), np.asarray(state["base"], dtype=np.float64)
        try:
            applied = replace(self.declared, clip=tuple(rows), noise=tuple(state["noise"]))
        except (LaminaError, ArithmeticError, TypeError, ValueError) as error:
            raise not_mine(f"makes no plan ({error})") from error
        if [[c > 0 for c in row] for row in applied.clip] != [
            [c > 0 for c in row] for row in self.declared.clip
        ]:
            raise not_mine("reaches other layers")
        if not self._frame.keeps(applied, factor):
            raise not_mine("gives a class a smaller sigma than its plan declares")
        if self._energy is not None:
            self._check_energy(state["energy"], base)
            self._energy.load_state(state["energy"], base)
        self._base, self._drift = base, tuple(float(d) for d in state["drift"])
        self.applied, self.factor, self.proposed_factor = applied, factor, float(state["proposed"])
        self.counts = tuple(float(count) for count in state["counts"]) or None
        self.chosen, self.choice = state["chosen"], state["choice"]
        if self._pace is not None:
            self._pace.load_state(state["pace"])

    def _check_energy(self, state: Any, base: Array) -> None:
        assert self._energy is not None
        try:
            estimate = EnergyEstimate.from_state(state)
            estimate.shares(base, self._frame.sizes, self._energy.rule.least)
        except (LaminaError, ArithmeticError, TypeError, ValueError) as error:
            raise not_mine(f"has an energy that makes no sense ({error})") from error
        if estimate.decay != self._energy.rule.decay:
            raise not_mine(f"has an energy of decay {estimate.decay!r}, not {self._energy.rule.decay!r}")


def _check_offers(plan: StepPlan) -> None:
    """A candidate that no step can take would be paid for and have no effect: refused before anything is."""
    for offer in offers(plan):
        try:
            replace(plan, clip=offer.clip, noise=offer.noise)
        except PlanError as error:
            raise PlanError(
                "engine.candidate-plan-choice",
                f"candidate {offer.name!r} of the plan's choice cannot be taken: {error.problem}",
                "give candidates whose numbers lie closer together",
            ) from error
