"""What flows through depth: distances between the values of two inputs, from node to node."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.sensitivity import gains
from lamina.sensitivity.graph import Graph, Node
from lamina.sensitivity.printed import clamped_compression
from lamina.sensitivity.record import Profile


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """What is known of a node's value when one patient's input is exchanged for another.

    tight       Δ with local constants: an expectation, no bound
    worst       Δ that is not exceeded
    printed     Δ as the LSAB document prints its recursion
    size        norm that the value of one patient does not exceed
    everywhere  whether `worst` is a Lipschitz constant times Δ₀ on the whole space; if not, it holds for inputs
                within the radius: attention, and every product of two values, has no constant on the whole space
    """

    tight: float
    worst: float
    printed: float
    size: float
    everywhere: bool = True


STILL = Flow(tight=0.0, worst=0.0, printed=0.0, size=0.0)


@dataclass(frozen=True, kw_only=True)
class Depth:
    """The recursion as far as it has come."""

    graph: Graph
    profile: Profile
    flows: dict[str, Flow]

    def into(self, node: Node) -> list[Flow]:
        return [self.flows[name] for name in node.inputs]

    def of(self, argument: object) -> Flow:
        """The flow of an argument: a node's, or that of a tensor that does not move."""
        if isinstance(argument, str):
            return self.flows[argument]
        return Flow(tight=0.0, worst=0.0, printed=0.0, size=gains.norm(argument))

    def shape(self, argument: str | Tensor) -> tuple[int, ...]:
        """The shape of an argument, moving or not."""
        return self.graph[argument].shape if isinstance(argument, str) else tuple(argument.shape)

    def at(self, node: Node) -> dict[str, Tensor]:
        """A zero for every input of a node."""
        sources = [self.graph[name] for name in node.inputs]
        return {source.name: torch.zeros(source.shape, dtype=source.dtype) for source in sources}

    def compression(self, node: Node) -> float:
        """γ of eq. 12 for a layer, its activation included, forced into (0, 1]."""
        before = self.profile[node.inputs[0]].std
        after = self.profile[self.graph.output_of(node).name].std
        if before == 0:
            return 1.0
        return max(clamped_compression(after, before), self.profile.epsilon_n)


def times(a: float, b: float) -> float:
    """a·b with 0·∞ = 0: what does not move is not stretched."""
    return 0.0 if a == 0 or b == 0 else a * b


def stretched(
    flow: Flow, worst: float, *, tight: float | None = None, printed: float | None = None, rest: float = 0.0
) -> Flow:
    """Distances multiplied by a factor (one for all unless said otherwise); `rest` is ‖f(0)‖."""
    tight = worst if tight is None else tight
    return Flow(
        tight=times(tight, flow.tight),
        worst=times(worst, flow.worst),
        printed=times(tight if printed is None else printed, flow.printed),
        size=times(worst, flow.size) + rest,
        everywhere=flow.everywhere,
    )
