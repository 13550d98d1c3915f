"""The recursion through operations that are linear, or move entries about."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lamina.errors import NoBound
from lamina.sensitivity import gains
from lamina.sensitivity.flow import STILL, Depth, Flow, stretched
from lamina.sensitivity.graph import Node
from lamina.sensitivity.kinds import SAME_ENTRIES, Kind
from lamina.sensitivity.lipschitz import supremum
from lamina.sensitivity.printed import residual_printed


def entry(node: Node, depth: Depth) -> Flow:
    if not node.floating:
        return STILL  # token ids: the distance arises in the table they are looked up in
    delta = 2.0 * depth.profile.radius
    return Flow(tight=delta, worst=delta, printed=delta, size=depth.profile.radius)


def linear(node: Node, depth: Depth) -> Flow:
    at = depth.at(node)
    if node.kind is Kind.CONV:
        factor = gains.conv_norm(node, next(iter(at.values())).shape)
    else:
        factor = gains.linear_norm(node, at)
    printed = factor * depth.compression(node)
    return stretched(depth.into(node)[0], factor, printed=printed, rest=gains.offset(node, at))


def reshape(node: Node, depth: Depth) -> Flow:
    flow = depth.into(node)[0]
    source = depth.graph[node.inputs[0]]
    if node.base in SAME_ENTRIES or None in (node.dtype, source.dtype) or not node.floating:
        return flow
    return stretched(flow, gains.repeats(node, depth.at(node)))


def concat(node: Node, depth: Depth) -> Flow:
    flows = depth.into(node)
    rest = gains.offset(node, depth.at(node))
    return Flow(
        tight=math.hypot(*(f.tight for f in flows)),
        worst=math.hypot(*(f.worst for f in flows)),
        printed=math.hypot(*(f.printed for f in flows)),
        size=math.hypot(*(f.size for f in flows)) + rest,
        everywhere=all(f.everywhere for f in flows),
    )


def add(node: Node, depth: Depth) -> Flow:
    given = node.arguments
    at = depth.at(node)
    alpha = abs(float(given.get("alpha", 1)))
    weights = (alpha, 1.0) if node.base == "rsub" else (1.0, alpha)
    parts = [
        stretched(depth.flows[name], weight * math.sqrt(math.prod(node.shape) / math.prod(at[name].shape)))
        for name, weight in zip((given["self"], given["other"]), weights, strict=True)
        if isinstance(name, str)
    ]
    if len(parts) == 1:
        return stretched(parts[0], 1.0, rest=gains.offset(node, at))
    a, b = parts
    return Flow(
        tight=a.tight + b.tight,
        worst=a.worst + b.worst,
        printed=residual_printed(a.printed, b.printed),
        size=a.size + b.size,
        everywhere=a.everywhere and b.everywhere,
    )


def scale(node: Node, depth: Depth) -> Flow:
    given, at = node.arguments, depth.at(node)
    copies = math.sqrt(math.prod(node.shape) / math.prod(next(iter(at.values())).shape))
    if node.base in ("mul", "div"):
        moving_first = isinstance(given["self"], str)
        if (node.base == "div" and not moving_first) or given.get("rounding_mode"):
            raise NoBound(
                "measure.divides-value-depends",
                f"{node} divides by a value that depends on the input, or rounds: its slope has no bound",
                "use an operation with a bounded slope there",
            )
        other = given["other"] if moving_first else given["self"]
        sizes = torch.as_tensor(other).detach().double().abs()
        factor = float(sizes.max()) if node.base == "mul" else float(1 / sizes.min())
    else:
        factor = 1.0
    return stretched(depth.into(node)[0], factor * copies, rest=gains.offset(node, at))


def pool(node: Node, depth: Depth) -> Flow:
    at = depth.at(node)
    if "max" in node.base or "min" in node.base:
        return stretched(depth.into(node)[0], gains.pooled(node, next(iter(at.values())).shape))
    return stretched(depth.into(node)[0], gains.schur(node, at), rest=gains.offset(node, at))


def dropout(node: Node, depth: Depth) -> Flow:
    given = node.arguments
    if not given["train"] or given["p"] == 0:
        return depth.into(node)[0]
    return stretched(depth.into(node)[0], supremum("dropout", p=float(given["p"])), tight=1.0)


def embedding(node: Node, depth: Depth) -> Flow:
    """All n ids of a patient may change: √n times the distance between two rows of the table.

    tight: their root mean square distance. worst: twice the largest distance to the mean row.
    """
    table: Tensor = node.arguments["weight"].detach().double()
    around = (table - table.mean(0)).norm(dim=1)
    ids = math.sqrt(math.prod(depth.graph[node.inputs[0]].shape))
    tight = ids * math.sqrt(2.0 * float(around.square().mean()))
    return Flow(
        tight=tight,
        worst=2.0 * ids * float(around.max()),
        printed=tight,
        size=ids * float(table.norm(dim=1).max()),
    )
