"""Does row r really belong to contribution r? Asked of the graph itself, the first time it is seen."""

from __future__ import annotations

import secrets
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lamina.engine.function import Use, hidden_backward
from lamina.engine.graph import Graph
from lamina.engine.layout import Layout
from lamina.errors import CouplingError

_RHYTHM = 128

Structure = tuple[str, str, bool, int]


class OwnershipCheck:
    """The loss of one contribution must leave the rows of all others at zero; of a random half, those of the rest.

    It catches what no list of layers names: a batch-mean loss, attention across the batch, a
    (time, batch) layout whose length happens to equal the batch. It runs once per structure: the
    kinds of operations and the places of the uses, not their sizes. What it cannot see is a loss that
    is merely *scaled* by the others (divided by the tokens of the batch): `Engine.probe` sees that.
    """

    def __init__(self) -> None:
        self.passed: defaultdict[int, Counter[Structure]] = defaultdict(Counter)  # by signature of the graph
        self._asked: Counter[int] = Counter()

    def due(self, graph: Graph, units: int) -> bool:
        """At the first two steps of a computation, then at every 128th, and until it is proven.

        It comes again because a computation may couple contributions on some data and not on other.
        """
        if units < 2:
            return False
        self._asked[graph.signature] += 1
        count = self._asked[graph.signature]
        again = count <= 2 or count % _RHYTHM == 0
        return again or not Counter(map(_structure, graph.nodes.items())) <= self.passed[graph.signature]

    def run(
        self, losses: Tensor, owner: Tensor, units: int, graph: Graph, layouts: Mapping[Use, Layout]
    ) -> None:
        present = torch.unique(owner[owner >= 0])
        if len(present) < 2:
            return
        chance = torch.Generator().manual_seed(secrets.randbits(60))
        half = torch.zeros(units, dtype=torch.bool)
        half[present[torch.randperm(len(present), generator=chance)[: (len(present) + 1) // 2]]] = True
        alone = torch.zeros(units, dtype=torch.bool)
        alone[present[torch.randint(len(present), (), generator=chance)]] = True
        proven = set(graph.uses)
        for side in (alone, half, ~half):
            watch = _Watch(side, layouts)
            for use in graph.uses:
                use.desk.receiver = watch
            try:
                mine = (owner >= 0) & side[owner.clamp(min=0)]
                torch.autograd.backward(losses, mine.to(losses.dtype), retain_graph=True)
            finally:
                for use in graph.uses:
                    use.desk.receiver = None
            if side is not alone:
                proven &= watch.seen
        self.passed[graph.signature] |= Counter(
            _structure(item) for item in graph.nodes.items() if item[0] in proven
        )


def _structure(item: tuple[Use, Any]) -> Structure:
    use, node = item
    return use.where, type(use.rule).__name__, use.example_of_row is not None, node.lamina_rank


class _Watch:
    """Refuses a gradient in the rows of the other half, and notes the uses whose own rows had one.

    Where every gradient is zero (a head that starts at zero) nothing is proven, and the check comes again.
    """

    def __init__(self, side: Tensor, layouts: Mapping[Use, Layout]) -> None:
        self.side, self.layouts = side, layouts  # side: (P,) bool
        self.seen: set[Use] = set()

    def wants_input_grad(self, use: Use) -> bool:
        return True

    def receive(self, use: Use, kept: Sequence[Tensor], g: Tensor) -> None:
        layout = self.layouts.get(use)
        if layout is None:
            raise hidden_backward(use)
        mine = (layout.owner >= 0) & self.side[layout.owner.clamp(min=0)]
        g = g.nan_to_num(0.0, 0.0, 0.0)
        if bool((g[mine] != 0).any()):
            self.seen.add(use)
        if bool((g[~mine] != 0).any()):
            raise CouplingError(
                "engine.loss-contribution-gradient",
                f"the loss of one contribution has a gradient in the rows of others at '{use.where}' "
                f"(g of shape {tuple(g.shape)})",
                "contributions must not influence each other: no batch statistics, no loss over the batch, batch axis "
                "first. Rows in another order need `with lamina.rows(owner):`, or run a module above it once per "
                "contribution: Engine(..., per_contribution=['name'])",
            )
