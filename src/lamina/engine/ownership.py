"""Does row r really belong to contribution r? Asked of the graph itself, the first time it is seen."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lamina.engine.function import Use, hidden_backward
from lamina.engine.graph import Graph
from lamina.engine.layout import Layout
from lamina.errors import CouplingError

Structure = tuple[str, str, bool, int]


class OwnershipCheck:
    """A backward pass of one contribution's loss must leave every other contribution's rows at zero.

    It catches what no list of layers names: a batch-mean loss, attention across the batch, a
    (time, batch) layout whose length happens to equal the batch. It runs once per structure: the
    kinds of operations and the places of the uses, not their sizes. What it cannot see is a loss that
    is merely *scaled* by the others (divided by the tokens of the batch): `Engine.probe` sees that.
    """

    def __init__(self) -> None:
        self.passed: defaultdict[int, Counter[Structure]] = defaultdict(Counter)  # by signature of the graph

    def due(self, graph: Graph, units: int) -> bool:
        passed = self.passed[graph.signature]
        return units > 1 and not Counter(map(_structure, graph.nodes.items())) <= passed

    def run(
        self, losses: Tensor, owner: Tensor, units: int, graph: Graph, layouts: Mapping[Use, Layout]
    ) -> None:
        present = torch.unique(owner[owner >= 0])
        if len(present) < 2:
            return
        proven: set[Use] = set()
        for unit in (int(present[0]), int(present[-1])):
            watch = _Watch(unit, layouts, proven)
            for use in graph.uses:
                use.desk.receiver = watch
            try:
                torch.autograd.backward(losses, (owner == unit).to(losses.dtype), retain_graph=True)
            finally:
                for use in graph.uses:
                    use.desk.receiver = None
        self.passed[graph.signature] |= Counter(
            _structure(item) for item in graph.nodes.items() if item[0] in proven
        )


def _structure(item: tuple[Use, Any]) -> Structure:
    use, node = item
    return use.where, type(use.rule).__name__, use.example_of_row is not None, node.lamina_rank


class _Watch:
    """Refuses a gradient in the rows of others, and notes the uses whose own rows had one.

    Where every gradient is zero (a head that starts at zero) nothing is proven, and the check comes again.
    """

    def __init__(self, unit: int, layouts: Mapping[Use, Layout], proven: set[Use]) -> None:
        self.unit, self.layouts, self.proven = unit, layouts, proven

    def wants_input_grad(self, use: Use) -> bool:
        return True

    def receive(self, use: Use, kept: Sequence[Tensor], g: Tensor) -> None:
        layout = self.layouts.get(use)
        if layout is None:
            raise hidden_backward(use)
        mine = layout.owner == self.unit
        g = g.nan_to_num(0.0, 0.0, 0.0)
        if bool((g[mine] != 0).any()):
            self.proven.add(use)
        if bool((g[~mine] != 0).any()):
            raise CouplingError(
                f"the loss of one contribution has a gradient in the rows of others at '{use.where}' "
                f"(g of shape {tuple(g.shape)})",
                "contributions must not influence each other: no batch statistics, no loss over the batch, batch axis "
                "first. Rows in another order need `with lamina.rows(owner):`, or run a module above it once per "
                "contribution: Engine(..., per_contribution=['name'])",
            )
