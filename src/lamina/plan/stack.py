"""The layers of a model: which tensors are clipped together, and how deep they lie."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lamina.errors import PlanError
from lamina.plan.adapters import Adapter, find_adapters
from lamina.plan.blocks import Blocks, owner
from lamina.plan.experts import find_experts
from lamina.plan.grouping import Keys, keys_by_hand, keys_by_place
from lamina.plan.heads import Heads, find_heads
from lamina.plan.naming import ROOT as ROOT
from lamina.plan.parts import Part, PartKind, Unread, settled
from lamina.plan.tensors import Tensors
from lamina.plan.trace import Trace


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One layer: tensors that are clipped and noised together.

    With n blocks in the model, block b takes up [b/n, (b+1)/n] of its depth.
      block       the first block in which the layer is used
      depth       block/(n-1): 0 is the input, 1 the output (and the only block of a model that has one)
      spans       the runs of blocks [first, stop) in which it is used: several if a tensor is tied
      parameters  names of its tensors, as in `model.named_parameters()`
      aliases     other names under which the model knows some of them
      size        how many numbers they hold, d_l
      shapes      of its tensors, in their order
    """

    name: str
    depth: float
    block: int
    parameters: tuple[str, ...]
    size: int
    spans: tuple[tuple[int, int], ...]
    aliases: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerStack:
    """The trainable layers of a model from input to output; a plain value that holds no tensor.

    Every trainable tensor is in exactly one layer; `frozen` names the others; `blocks` are the units
    in which depth is counted, frozen ones included.

      parts     how tensors are shared out among attention heads and experts
      adapters  which tensors belong to which adapter, and which adapter it is
      unread    modules that look as if they had heads or experts, and do not say which
    """

    layers: tuple[Layer, ...]
    blocks: tuple[str, ...]
    frozen: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()
    adapters: tuple[Adapter, ...] = ()
    unread: tuple[Unread, ...] = ()

    @classmethod
    def from_model(
        cls,
        model: nn.Module,
        group: str | Mapping[str, Sequence[str]] = "module",
        example: Any = None,
        heads: Mapping[str, int | Heads] | None = None,
        experts: Mapping[str, int] | None = None,
    ) -> LayerStack:
        """Read the layers of `model`.

        group    "module": the tensors that a module owns directly (weight and bias) are a layer;
                 "block": all tensors of a block are a layer; {layer: [patterns]}: tensors whose name, or
                 a module's name above them, matches a pattern (`fnmatch`) are a layer, the rest by module
        example  a public or made-up input (tensor, tuple of arguments, dict of keywords); if given, layers
                 come in the order in which they first run, otherwise in the order of registration
        heads    of attention modules that are not known by themselves: {pattern: how many, or `Heads`}; 0: it has none
        experts  of modules that hold experts and are not known: {pattern: how many}

        Modules that share a tensor are one layer, used wherever any of them is.
        """
        tensors = Tensors.of(model)
        blocks = Blocks.of(model, None if example is None else Trace.run(model, example))
        if isinstance(group, str):
            keys = keys_by_place(group, tensors, blocks)
        else:
            keys = keys_by_hand(group, tensors)
        uses = {name: tensors.uses[name] for name in tensors.trainable}
        held = dict(model.named_parameters())
        shapes = {name: tuple(held[name].shape) for name in tensors.trainable}
        attention, strange = find_heads(model, heads or {})
        mixtures, unknown = find_experts(model, experts or {})
        return cls(
            layers=_layers(tensors, blocks, keys, shapes),
            blocks=tuple(name or ROOT for name in blocks.names),
            frozen=tensors.frozen,
            parts=settled([*attention, *mixtures], uses, shapes),
            adapters=find_adapters(model, uses),
            unread=(*strange, *unknown),
        )

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    @property
    def size(self) -> int:
        """How many numbers are trained."""
        return sum(layer.size for layer in self.layers)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the trainable tensors, by name."""
        return {
            name: shape
            for layer in self.layers
            for name, shape in zip(layer.parameters, layer.shapes, strict=False)
        }

    def __str__(self) -> str:
        width = max(len("layer"), *(len(layer.name) for layer in self.layers))
        lines = [f"{'layer':<{width}}  depth  block  parameters"]
        for layer in self.layers:
            shared = f"  (also {', '.join(layer.aliases)})" if layer.aliases else ""
            lines.append(
                f"{layer.name:<{width}}  {layer.depth:5.2f}  {layer.block:5d}  {layer.size:10,d}{shared}"
            )
        if self.frozen:
            lines.append(f"frozen: {len(self.frozen)} tensors")
        for kind in PartKind:
            counts = {part.group: part.count for part in self.parts if part.kind is kind}
            told = ", ".join(f"{group} {count}" for group, count in list(counts.items())[:4])
            more = f" and {len(counts) - 4} more" if len(counts) > 4 else ""
            lines += [f"{kind.value}: {told}{more}"] if counts else []
        for adapter in self.adapters:
            lines.append(
                f"adapter {adapter.name}: {adapter.kind}, config {adapter.config[:12]}, {len(adapter.tensors)} tensors"
            )
        return "\n".join(lines)


def _layers(
    tensors: Tensors, blocks: Blocks, keys: Keys, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Layer, ...]:
    """Join tensors of equal key, and keys that share a tensor, into layers in order."""
    parent = {key: key for found in keys.values() for key in found}

    def find(key: str) -> str:
        while parent[key] != key:
            parent[key] = key = parent[parent[key]]
        return key

    for found in keys.values():
        for key in found[1:]:
            parent[find(key)] = find(found[0])
    members: defaultdict[str, list[str]] = defaultdict(list)
    for name in tensors.trainable:
        members[find(keys[name][0])].append(name)

    def rank(name: str) -> int:
        return min(blocks.rank[owner(use)] for use in tensors.uses[name])

    made: list[tuple[tuple[int, int], Layer]] = []
    last = max(len(blocks.names) - 1, 1)
    for names in members.values():
        uses = [use for name in names for use in tensors.uses[name]]
        places = sorted({b for use in uses for b in blocks.uses[owner(use)]})
        depth = 1.0 if len(blocks.names) == 1 else places[0] / last
        # a layer joined from several modules is named after the first of them
        first = min(
            (blocks.rank[owner(use)], i, key) for i, (use, key) in enumerate(_named(names, tensors, keys))
        )
        layer = Layer(
            name=first[2] or ROOT,
            depth=depth,
            block=places[0],
            parameters=tuple(names),
            size=sum(tensors.sizes[name] for name in names),
            spans=_runs(places),
            aliases=tuple(use for name in names for use in tensors.uses[name][1:]),
            shapes=tuple(shapes[name] for name in names),
        )
        made.append(((places[0], min(rank(name) for name in names)), layer))
    made.sort(key=lambda item: item[0])
    counts: defaultdict[str, int] = defaultdict(int)
    for _, layer in made:
        counts[layer.name] += 1
        if counts[layer.name] > 1:
            raise PlanError(
                "plan.two-layers-named",
                f"two layers are named {layer.name!r}",
                "give the group another name than a module has",
            )
    return tuple(layer for _, layer in made)


def _named(names: Sequence[str], tensors: Tensors, keys: Keys) -> Iterator[tuple[str, str]]:
    """Every use of the tensors with the key it brings."""
    for name in names:
        found = keys[name]
        for i, use in enumerate(tensors.uses[name]):
            yield use, found[min(i, len(found) - 1)]


def _runs(places: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Sorted block numbers as runs [first, stop)."""
    runs: list[tuple[int, int]] = []
    for b in places:
        if runs and runs[-1][1] == b:
            runs[-1] = (runs[-1][0], b + 1)
        else:
            runs.append((b, b + 1))
    return tuple(runs)
