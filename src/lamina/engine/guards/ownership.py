"""`OwnershipCheck`: the loss of one contribution leaves the rows of all others at zero."""

from __future__ import annotations

import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lamina.engine.batch import RowLayout
from lamina.engine.guards.checked_batch import CheckedBatch
from lamina.engine.guards.graph import LossGraph
from lamina.engine.layers.layer_rule import RuleCall, hidden_backward_error
from lamina.errors import CouplingError

_RECHECK_EVERY = 128

CallSignature = tuple[str, str, bool, int]


class OwnershipCheck:
    """The loss of one contribution must leave the rows of all others at zero; of a random half, those of the rest.

    It catches what no list of layers names: a batch-mean loss, attention across the batch, a (time, batch) layout
    whose length happens to equal the batch. It runs once per structure: the kinds of operations and the places of the
    rule calls, not their sizes. It cannot see a loss that is merely *scaled* by the others (divided by the tokens of
    the batch): `Engine.probe` sees that.
    """

    def __init__(self) -> None:
        self.passed: defaultdict[int, Counter[CallSignature]] = defaultdict(Counter)  # by signature of the graph
        self._asked: Counter[int] = Counter()
        self._proven: dict[int, list[CallSignature]] = {}  # the calls of a graph that was proven whole

    def due(self, graph: LossGraph, units: int) -> bool:
        """At the first two steps of a computation, then at every 128th, and until it is proven.

        It comes again because a computation may couple contributions on some data and not on other.
        """
        if units < 2:
            return False
        self._asked[graph.signature] += 1
        count = self._asked[graph.signature]
        if count <= 2 or count % _RECHECK_EVERY == 0:
            return True
        calls = [_call_signature(item) for item in graph.nodes.items()]
        if self._proven.get(graph.signature) == calls:
            return False
        if Counter(calls) <= self.passed[graph.signature]:
            self._proven[graph.signature] = calls
            return False
        return True

    def run(self, part: CheckedBatch, around: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """`around`: entered for each of its backward passes."""
        owner, units, graph = part.layout.owner, part.layout.units, part.graph
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
            watch = _CouplingReceiver(side, part.layouts)
            for use in graph.uses:
                use.slot.receiver = watch
            try:
                mine = (owner >= 0) & side[owner.clamp(min=0)]
                with around():
                    torch.autograd.backward(part.losses, mine.to(part.losses), retain_graph=True)
            finally:
                for use in graph.uses:
                    use.slot.receiver = None
            if side is not alone:
                proven &= watch.seen
        self.passed[graph.signature] |= Counter(
            _call_signature(item) for item in graph.nodes.items() if item[0] in proven
        )


def _call_signature(item: tuple[RuleCall, Any]) -> CallSignature:
    use, node = item
    return use.where, type(use.rule).__name__, use.example_of_row is not None, node.lamina_rank


class _CouplingReceiver:
    """Refuses a gradient in the rows of the other half, and notes the uses whose own rows had one.

    Where every gradient is zero (a head that starts at zero) nothing is proven, and the check comes again.
    """

    def __init__(self, side: Tensor, layouts: Mapping[RuleCall, RowLayout]) -> None:
        self.side, self.layouts = side, layouts  # side: (P,) bool
        self.seen: set[RuleCall] = set()

    def wants_input_grad(self, use: RuleCall) -> bool:
        return True

    def receive(self, use: RuleCall, saved: Sequence[Tensor], g: Tensor) -> None:
        layout = self.layouts.get(use)
        if layout is None:
            raise hidden_backward_error(use)
        mine = ((layout.owner >= 0) & self.side[layout.owner.clamp(min=0)]).to(g.device)
        g = g.nan_to_num(0.0, 0.0, 0.0)
        if bool((g[mine] != 0).any()):
            self.seen.add(use)
        if bool((g[~mine] != 0).any()):
            raise CouplingError(
                "engine.contributions-coupled",
                f"at '{use.where}', the loss of one contribution has a gradient in the rows of others",
                "use no batch statistics and no loss over the batch, and keep the batch axis first; for rows in another "
                "order use `with lamina.rows(owner):` or Engine(..., per_contribution=['name'])",
            )
