"""A tensor given to every contribution as its own copy, so that its gradient arrives unsummed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor

from lamina.engine.layout import Layout
from lamina.engine.rules.rule import Kept, Params, Rule
from lamina.engine.unitgrad import Dense, UnitGrad


class Expand(Rule):
    """p ↦ (N, *p.shape), or with `along` a first axis of 1, (1, …) ↦ (N, …). No memory is copied.

    One contribution: the sum of g over the copies that its examples used.
    """

    def __init__(self, examples: int, *, along: bool = False) -> None:
        self.examples, self.along = examples, along

    def run(self, x: Tensor, params: Params) -> tuple[Tensor, Kept]:
        p = cast(Tensor, params[0])
        return (p if self.along else p.unsqueeze(0)).expand(
            self.examples, *p.shape[1 if self.along else 0 :]
        ), ()

    def input_grad(self, kept: Kept, params: Params, g: Tensor) -> Tensor:
        raise AssertionError("an expanded tensor has no input")

    def unit_grads(
        self, kept: Kept, g: Tensor, layout: Layout, need: Sequence[bool]
    ) -> list[UnitGrad | None]:
        wide = g.float() if g.element_size() < 4 else g
        folded = layout.fold(wide)  # (P, m, …)
        return [Dense(folded.sum(1, keepdim=self.along) if folded.shape[1] > 1 or not self.along else folded)]
