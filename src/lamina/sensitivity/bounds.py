"""Phase 2 of LSAB: how far exchanging one patient's input can move the output of every layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lamina.errors import NoBound
from lamina.plan import LayerStack
from lamina.sensitivity.flow import Depth
from lamina.sensitivity.graph import Graph, Node
from lamina.sensitivity.record import Profile
from lamina.sensitivity.rules import refuse_unknown, step

__all__ = ["bounds", "Bounds", "LayerBound"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerBound:
    """Δ at the output of a layer's last use, after the activation that directly follows it, if one does.

    tight       by local constants E|f'(Z)| on the profile, norms as fixed affine maps, a+b at a sum.
                NOT a sensitivity bound: an expectation is no Lipschitz constant, and inputs exist that move the
                layer further. It may shape thresholds C; clipping to C is what makes a step private
    worst       by global suprema (eq. 6): no two inputs within the radius move the output further apart
    printed     by eqs. 8, 10, 11 with γ forced into (0, 1], 13 as √(a²+b²), and 20, as the LSAB document has them;
                neither an expectation nor a bound, for comparison only
    everywhere  whether `worst`/Δ₀ is a Lipschitz constant on the whole space, or only within the radius
                (behind attention or a product of two activations, which have none on the whole space)
    node        the operation at whose output Δ is taken
    """

    name: str
    tight: float
    worst: float
    printed: float
    everywhere: bool
    node: str

    @property
    def ratio(self) -> float:
        """tight/worst, eq. 14; 0 where worst overflows."""
        return self.tight / self.worst


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Δ_l of every layer of a stack, from Δ₀ = 2·radius (token ids: from the rows of the embedding)."""

    radius: float
    proxy: str
    layers: tuple[LayerBound, ...]

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, name: str) -> LayerBound:
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise NoBound(
            "measure.no-layer-bound",
            f"no layer {name!r} has a bound",
            f"they are {', '.join(row.name for row in self.layers)}",
        )

    @property
    def tight(self) -> tuple[float, ...]:
        return tuple(layer.tight for layer in self.layers)

    @property
    def worst(self) -> tuple[float, ...]:
        return tuple(layer.worst for layer in self.layers)

    @property
    def printed(self) -> tuple[float, ...]:
        return tuple(layer.printed for layer in self.layers)

    @property
    def ratio(self) -> tuple[float, ...]:
        return tuple(layer.ratio for layer in self.layers)

    def table(self) -> str:
        """One row per layer, every number labelled."""
        rows = [["layer", "Δ tight", "Δ worst", "tight/worst", "Δ printed", "worst holds"]]
        for layer in self.layers:
            where = "everywhere" if layer.everywhere else "within the radius"
            numbers = (layer.tight, layer.worst, layer.ratio, layer.printed)
            rows.append([layer.name, *(f"{value:.4g}" for value in numbers), where])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [f"Δ per layer from Δ₀ = {2 * self.radius:g}, profiled on {self.proxy} inputs", ""]
        for row in rows:
            cells = [
                c.rjust(w) if 0 < i < 5 else c.ljust(w)
                for i, (c, w) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  ".join(cells).rstrip())
        return "\n".join(
            [
                *lines,
                "",
                "tight:   local constants on the profile; an expectation, not a sensitivity bound: it may shape C,",
                "         and clipping to C is what makes a step private",
                "worst:   global suprema; no exchange of one input moves the layer further",
                "printed: the recursion of the LSAB document as printed, for comparison only",
            ]
        )

    def __str__(self) -> str:
        return self.table()


def bounds(graph: Graph, profile: Profile, stack: LayerStack) -> Bounds:
    """Δ of every layer of `stack`, by recursion through the traced graph.

    `profile` must be of the same model; the weights are those of `graph`. An operation between the input and a layer
    whose slope is not known is refused by name, as is a layer that the input does not reach, or that is zero.
    """
    ends = {layer.name: _end(graph, layer.name, layer.parameters) for layer in stack}
    needed = _before(graph, [node.name for node in ends.values()])
    refuse_unknown(needed)
    depth = Depth(graph=graph, profile=profile, flows={})
    for node in needed:
        _same(node, profile)
        depth.flows[node.name] = step(node, depth)
    layers = []
    for name, node in ends.items():
        flow = depth.flows[node.name]
        if math.isnan(flow.worst) or not (
            0 < flow.tight < math.inf and 0 < flow.printed < math.inf and flow.worst > 0
        ):
            raise NoBound(
                "measure.layer-delta-tight",
                f"layer {name!r} has Δ tight {flow.tight:g}, worst {flow.worst:g}, printed {flow.printed:g} "
                f"at {node}; all must be > 0, and tight finite",
                "a weight or gain of zero, or a dead activation, stops every input there: initialise the layer anew, "
                "or use an allocation that needs no Δ",
            )
        layers.append(
            LayerBound(
                name=name,
                tight=flow.tight,
                worst=flow.worst,
                printed=flow.printed,
                everywhere=flow.everywhere,
                node=node.name,
            )
        )
    return Bounds(radius=profile.radius, proxy=profile.proxy, layers=tuple(layers))


def _end(graph: Graph, name: str, parameters: tuple[str, ...]) -> Node:
    uses = graph.uses(parameters)
    if not uses:
        raise NoBound(
            "measure.layer-not-used",
            f"layer {name!r} is not used between the input and the output of {graph.model}",
            "freeze it with requires_grad_(False), or trace with an example that reaches it",
        )
    return graph.output_of(uses[-1])


def _before(graph: Graph, names: list[str]) -> list[Node]:
    """The nodes on the way from the input to any of these, in order."""
    wanted = set(names)
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if node.name in wanted:
            wanted.update(node.inputs)
            kept.append(node)
    return kept[::-1]


def _same(node: Node, profile: Profile) -> None:
    if node.dtype is not None and node.floating and profile[node.name].operation != node.operation:
        raise NoBound(
            "measure.profile",
            f"{node} is {profile[node.name].operation} in the profile",
            f"the profile is of another model ({profile.model}): profile this one",
        )
