"""Which rule carries the recursion through which kind of operation, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from lamina.errors import NoBound, PlanError
from lamina.sensitivity import bent_rules as bent
from lamina.sensitivity import linear_rules as straight
from lamina.sensitivity.flow import Depth, Flow
from lamina.sensitivity.graph import Node
from lamina.sensitivity.kinds import Kind

Rule = Callable[[Node, Depth], Flow]

RULES: Mapping[Kind, Rule] = {
    Kind.INPUT: straight.entry,
    Kind.LINEAR: straight.linear,
    Kind.CONV: straight.linear,
    Kind.ACTIVATION: bent.activation,
    Kind.ATTENTION: bent.attention,
    Kind.SOFTMAX: bent.softmax,
    Kind.NORM: bent.normalisation,
    Kind.ADD: straight.add,
    Kind.SCALE: straight.scale,
    Kind.PRODUCT: bent.product,
    Kind.RESHAPE: straight.reshape,
    Kind.CONCAT: straight.concat,
    Kind.POOL: straight.pool,
    Kind.RESAMPLE: straight.pool,
    Kind.REDUCE: straight.pool,
    Kind.DROPOUT: straight.dropout,
    Kind.EMBEDDING: straight.embedding,
}

_REMEDY = (
    "use operations with a known slope (linear and convolution layers, activations, LayerNorm, GroupNorm, RMSNorm, "
    "pooling, dropout, sums, attention) between the input and the layers, or an allocation that needs no Δ"
)


def step(node: Node, depth: Depth) -> Flow:
    """The flow of a node from the flows of what it reads; a refusal names the node."""
    try:
        return RULES[node.kind](node, depth)
    except PlanError as error:
        if node.name in error.problem:
            raise
        raise NoBound("measure.step", f"{node}: {error.problem}", error.remedy) from error


def refuse_unknown(nodes: Sequence[Node]) -> None:
    """Refuse operations that no rule knows, all of them by name."""
    bad = [node for node in nodes if node.kind not in RULES]
    if bad:
        named = ", ".join(map(str, bad[:6])) + (f" and {len(bad) - 6} more" if len(bad) > 6 else "")
        raise NoBound("measure.slope-not-known", f"the slope of {named} is not known", _REMEDY)
