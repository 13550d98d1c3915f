"""The layers of a model: which tensors are clipped together, in which block they lie, and how deep."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.nn.utils import parametrize

from lamina.errors import PlanError
from lamina.plan.adapters import Adapter, find_adapters
from lamina.plan.heads_experts import Heads, find_experts, find_heads
from lamina.plan.selection import (
    ROOT,
    PartKind,
    Range,
    TensorPart,
    UnreadModule,
    block_depth,
    common_path,
    did_you_mean,
    join_spans,
    matches_pattern,
    name_prefixes,
    resolve_tied_parts,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One layer: tensors that are clipped and noised together.

    With n blocks in the model, block b takes up [b/n, (b+1)/n] of its depth.
      block       the first block in which the layer is used; n: it comes after the last
      depth       block/(n-1): 0 is the input, 1 the output (and the only block of a model that has one)
      spans       the runs of blocks [first, stop) in which it is used: several if a tensor is tied; (0, 0) comes before
                  the first block, (n, n) after the last
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
    in which depth is counted, frozen ones included; of towers, those that lie side by side have one entry.

      parts     how tensors are shared out among attention heads and experts
      adapters  which tensors belong to which adapter, and which adapter it is
      unread    modules that look as if they had heads or experts, and do not say which
    """

    layers: tuple[Layer, ...]
    blocks: tuple[str, ...]
    frozen: tuple[str, ...] = ()
    parts: tuple[TensorPart, ...] = ()
    adapters: tuple[Adapter, ...] = ()
    unread: tuple[UnreadModule, ...] = ()

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
        tensors = ModelTensors.of(model)
        blocks = ModelBlocks.of(model, None if example is None else ExecutionTrace.run(model, example))
        if isinstance(group, str):
            keys = layer_keys_by_module(group, tensors, blocks)
        else:
            keys = layer_keys_by_pattern(group, tensors)
        uses = {name: tensors.uses[name] for name in tensors.trainable}
        shapes = {name: tuple(model.get_parameter(name).shape) for name in tensors.trainable}
        attention, unread_attention = find_heads(model, heads or {})
        mixtures, unread_mixtures = find_experts(model, experts or {})
        return cls(
            layers=_join_layers(tensors, blocks, keys, shapes),
            blocks=blocks.counted,
            frozen=tensors.frozen,
            parts=resolve_tied_parts([*attention, *mixtures], uses, shapes),
            adapters=find_adapters(model, uses),
            unread=(*unread_attention, *unread_mixtures),
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
            name: shape for layer in self.layers for name, shape in zip(layer.parameters, layer.shapes, strict=False)
        }

    def __str__(self) -> str:
        width = max(len("layer"), *(len(layer.name) for layer in self.layers))
        lines = [f"{'layer':<{width}}  depth  block  parameters"]
        for layer in self.layers:
            shared = f"  (also {', '.join(layer.aliases)})" if layer.aliases else ""
            lines.append(f"{layer.name:<{width}}  {layer.depth:5.2f}  {layer.block:5d}  {layer.size:10,d}{shared}")
        if self.frozen:
            lines.append(f"frozen: {len(self.frozen)} tensors")
        for kind in PartKind:
            counts = {part.group: part.count for part in self.parts if part.kind is kind}
            known = ", ".join(f"{group} {count}" for group, count in list(counts.items())[:4])
            more = f" and {len(counts) - 4} more" if len(counts) > 4 else ""
            lines += [f"{kind.value}: {known}{more}"] if counts else []
        for adapter in self.adapters:
            lines.append(
                f"adapter {adapter.name}: {adapter.kind}, config {adapter.config[:12]}, {len(adapter.tensors)} tensors"
            )
        return "\n".join(lines)


def _join_layers(
    tensors: ModelTensors, blocks: ModelBlocks, keys: LayerKeys, shapes: Mapping[str, tuple[int, ...]]
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
        return min(blocks.rank[owning_module(use)] for use in tensors.uses[name])

    made: list[tuple[tuple[int, int, int], Layer]] = []
    for names in members.values():
        uses = [use for name in names for use in tensors.uses[name]]
        used_blocks = sorted({b for use in uses for b in blocks.uses[owning_module(use)]})
        # a layer joined from several modules is named after the first of them
        first = min(
            (blocks.rank[owning_module(use)], i, key)
            for i, (use, key) in enumerate(_uses_with_keys(names, tensors, keys))
        )
        spans = join_spans((blocks.spans[b] for b in used_blocks), len(blocks.counted))
        layer = Layer(
            name=first[2] or ROOT,
            depth=block_depth(spans[0][0], len(blocks.counted)),
            block=spans[0][0],
            parameters=tuple(names),
            size=sum(tensors.sizes[name] for name in names),
            spans=spans,
            aliases=tuple(use for name in names for use in tensors.uses[name][1:]),
            shapes=tuple(shapes[name] for name in names),
        )
        made.append(((spans[0][0], used_blocks[0], min(rank(name) for name in names)), layer))
    made.sort(key=lambda item: item[0])
    names_seen: set[str] = set()
    for _, layer in made:
        if layer.name in names_seen:
            problem = f"two layers are named {layer.name!r}"
            raise PlanError("plan.name-twice", problem, "give the group another name than a module has")
        names_seen.add(layer.name)
    return tuple(layer for _, layer in made)


def _uses_with_keys(names: Sequence[str], tensors: ModelTensors, keys: LayerKeys) -> Iterator[tuple[str, str]]:
    """Every use of the tensors with the key it brings."""
    for name in names:
        found = keys[name]
        for i, use in enumerate(tensors.uses[name]):
            yield use, found[min(i, len(found) - 1)]


LayerKeys = Mapping[str, tuple[str, ...]]
"""Tensor name -> names of the layers it would join; more than one where it is shared."""


def layer_keys_by_module(group: str, tensors: ModelTensors, blocks: ModelBlocks) -> LayerKeys:
    """Each tensor by the module that owns it, or by that module's block."""
    if group not in ("module", "block"):
        problem = f"group is {group!r}, must be 'module', 'block' or a mapping"
        raise PlanError("plan.group-unknown", problem, "e.g. group={'head': ['decoder.*', 'out']}")

    def key(use: str) -> str:
        path = owning_module(use)
        return path if group == "module" else blocks.names[blocks.uses[path][0]]

    return {name: tuple(key(use) for use in tensors.uses[name]) for name in tensors.trainable}


def layer_keys_by_pattern(groups: Mapping[str, Sequence[str]], tensors: ModelTensors) -> LayerKeys:
    """Tensors that match a pattern by that group's name, the rest by module."""
    assigned: dict[str, str] = {}
    for group, patterns in groups.items():
        if not group or isinstance(patterns, str) or not patterns:
            problem = f"group {group!r} has patterns {patterns!r}"
            raise PlanError("plan.group-patterns", problem, "give a list: group={'head': ['decoder.*', 'out']}")
        for pattern in patterns:
            found = [name for name in tensors.trainable if _any_use_matches(pattern, tensors.uses[name])]
            if not found:
                problem = _no_match_message(group, pattern, tensors)
                raise PlanError("plan.group-pattern-unmatched", problem, "correct the pattern or leave it out")
            for name in found:
                if assigned.setdefault(name, group) != group:
                    problem = f"tensor {name!r} matches two groups, {assigned[name]!r} and {group!r}"
                    raise PlanError("plan.groups-overlap", problem, "make the patterns disjoint")
    keys = {
        name: (assigned[name],) if name in assigned else tuple(owning_module(use) for use in tensors.uses[name])
        for name in tensors.trainable
    }
    for name, found_keys in keys.items():
        if name not in assigned and (clash := set(found_keys) & set(groups)):
            problem = f"group {sorted(clash)[0]!r} has the name of the module of {name!r}, but leaves it out"
            raise PlanError("plan.group-named-like-module", problem, "rename the group, or add the tensor")
    return keys


def _any_use_matches(pattern: str, uses: Sequence[str]) -> bool:
    return any(matches_pattern(pattern, use) for use in uses)


def _no_match_message(group: str, pattern: str, tensors: ModelTensors) -> str:
    frozen = [name for name in tensors.frozen if _any_use_matches(pattern, tensors.uses[name])]
    if frozen:
        return f"pattern {pattern!r} of group {group!r} matches only frozen tensors ({', '.join(frozen[:3])})"
    known = sorted({part for name in tensors.trainable for part in name_prefixes(name)})
    return f"pattern {pattern!r} of group {group!r} matches no trainable tensor{did_you_mean(pattern, known)}"


# Where a model's tensors lie: its blocks in order, and the block of every module that owns tensors.
#
# A block is what people call "a layer" when they count depth: a Linear in an MLP, a whole residual or
# transformer block in a stack of them.
#     1. Containers (Sequential, ModuleList, ModuleDict) are looked through.
#     2. A composite child of a container is one block, with everything inside it.
#     3. A nested Sequential with at most one matrix-like weight (convolution, norm, activation) is one block.
#     4. Every other module that owns tensors is a block of its own.
# Blocks without tensors (activations, dropout) do not count. Frozen blocks do: freezing moves no one's depth.
#
# Where blocks are repeated (neighbours of one class in a Sequential or ModuleList, each with modules inside), depth counts
# those alone. What comes before the first is at depth 0, what comes after the last at depth 1, and what lies between
# belongs to the block before it. Repeated blocks of modules side by side (a vision and a language tower) have depths of
# their own, in units that all of them share; an encoder and its decoder are one depth.

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_LISTS = (nn.Sequential, nn.ModuleList)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelBlocks:
    """The blocks of a model in order, and where each module that owns tensors lies among them.

    `names[b]` is block b's module path. `uses[path]` holds the blocks at which the module at `path` is
    used: its own, and with a trace also those after which it was called again. `rank[path]` orders
    modules within and across blocks. `counted` are the blocks in which depth is counted, and `spans[b]`
    is where block b lies among them.
    """

    names: tuple[str, ...]
    uses: dict[str, tuple[int, ...]]
    rank: dict[str, int]
    counted: tuple[str, ...]
    spans: tuple[Range, ...]

    @classmethod
    def of(cls, model: nn.Module, trace: ExecutionTrace | None = None) -> ModelBlocks:
        """Find the blocks, in order of registration, or of first execution if `trace` is given."""
        block_of = dict(_walk_blocks(model, "", contained=False))  # module path -> block path, as registered
        names = list(dict.fromkeys(block_of.values()))
        paths = list(block_of)
        if trace is None:
            index = {name: b for b, name in enumerate(names)}
            uses: dict[str, tuple[int, ...]] = {path: (index[block_of[path]],) for path in paths}
        else:
            names.sort(key=trace.first)  # stable: registration order breaks ties
            paths.sort(key=lambda path: (trace.first(block_of[path]), trace.first(path)))
            index = {name: b for b, name in enumerate(names)}
            starts = [trace.first(name) for name in names]
            uses = {}
            for path in paths:
                own = index[block_of[path]]
                later = (bisect_right(starts, tick) - 1 for tick in trace.calls(path)[1:])
                uses[path] = tuple(sorted({own, *(max(own, b) for b in later)}))
        counted, spans = _count_depth(model, names)
        rank = {path: i for i, path in enumerate(paths)}
        return cls(names=tuple(names), uses=uses, rank=rank, counted=counted, spans=spans)


def _count_depth(model: nn.Module, names: Sequence[str]) -> tuple[tuple[str, ...], tuple[Range, ...]]:
    """The blocks in which depth is counted, and where each block lies among them."""
    towers: list[tuple[list[list[str]], list[int]]] = []  # paths of the modules that hold the blocks; their places
    for b, name in enumerate(names):
        if (home := _home_of_repeated(model, name)) is not None:
            joined = [tower for tower in towers if any(_same_tower(home, other) for other in tower[0])]
            towers = [tower for tower in towers if tower not in joined]
            homes, places = [home, *(h for t in joined for h in t[0])], [b, *(p for t in joined for p in t[1])]
            towers.append((homes, sorted(places)))
    if not towers:
        return tuple(name or ROOT for name in names), tuple((b, b + 1) for b in range(len(names)))
    units = math.lcm(*(len(places) for _, places in towers))
    spans = []
    for b, name in enumerate(names):
        shared = [max(len(common_path(home, name.split("."))) for home in homes) for homes, _ in towers]
        near = [places for (_, places), n in zip(towers, shared, strict=True) if n == max(shared)]
        found = {_span_among(b, places, units) for places in near}
        spans.append(found.pop() if len(found) == 1 else (0, units))  # between towers: at no depth in particular
    side_by_side = [
        [names[places[u * len(places) // units]] for places in sorted(t[1] for t in towers)] for u in range(units)
    ]
    return tuple(", ".join(found) for found in side_by_side), tuple(spans)


def _home_of_repeated(model: nn.Module, path: str) -> list[str] | None:
    """The path of the module that holds the list in which this block is repeated; None if it is not."""
    above, _, own = path.rpartition(".")
    holder, module = model.get_submodule(above), model.get_submodule(path)
    if not path or not isinstance(holder, _LISTS) or isinstance(module, _CONTAINERS) or not any(module.children()):
        return None
    row, i = list(holder._modules.values()), list(holder._modules).index(own)
    if type(module) not in (type(near) for near in (*row[max(0, i - 1) : i], *row[i + 1 : i + 2])):
        return None
    while above and isinstance(model.get_submodule(above), _CONTAINERS):
        above = above.rpartition(".")[0]
    return above.split(".") if above else []


def _same_tower(one: list[str], other: list[str]) -> bool:
    """Whether repeated blocks of two modules follow each other: one holds the other, or they are encoder and decoder."""
    common = len(common_path(one, other))
    if common in (len(one), len(other)):
        return True
    a, b = one[common], other[common]
    return ("encoder" in a and "decoder" in b) or ("decoder" in a and "encoder" in b)


def _span_among(b: int, places: Sequence[int], units: int) -> Range:
    """Where block b lies among the repeated blocks of its tower, in shared units."""
    at, width = bisect_right(places, b), units // len(places)
    if at == 0:
        return 0, 0
    if at == len(places) and b != places[-1]:
        return units, units
    return (at - 1) * width, at * width


def owning_module(parameter: str) -> str:
    """The path of the module that a tensor belongs to; of a parametrised tensor, the one it serves."""
    path, _, _ = parameter.rpartition(".")
    head, marker, _ = f".{path}.".partition(".parametrizations.")
    return head[1:] if marker else path


def _walk_blocks(module: nn.Module, path: str, *, contained: bool) -> Iterator[tuple[str, str]]:
    """Yield (path of a module that owns tensors, path of its block), in order of registration."""
    container = isinstance(module, _CONTAINERS)
    if isinstance(module, nn.Sequential):
        whole = path != "" and _count_matrices(module) <= 1
    else:
        whole = not container and contained and any(True for _ in module.children())
    if whole or parametrize.is_parametrized(module):
        for name, _ in module.named_parameters(prefix=path, remove_duplicate=False):
            yield owning_module(name), path
        return
    if any(tensor is not None for tensor in module._parameters.values()):
        yield path, path
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk_blocks(child, f"{path}.{name}" if path else name, contained=container)


def _count_matrices(module: nn.Module) -> int:
    """How many submodules own a weight of two or more dimensions."""
    return sum(any(p.ndim >= 2 for p in m.parameters(recurse=False)) for m in module.modules())


def refuse_lazy_tensors(model: nn.Module) -> None:
    """Refuse a model with tensors whose shape is not known yet."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            remedy = "run model(...) once on a public or made-up input first"
            raise PlanError("plan.tensor-lazy", f"tensor {name!r} is lazy and has no shape yet", remedy)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelTensors:
    """Names of a model's parameters, each tensor once, under its name in `model.named_parameters()`.

    `uses[name]` are all names under which the model holds that tensor, its own first.
    """

    trainable: tuple[str, ...]
    frozen: tuple[str, ...]
    uses: dict[str, tuple[str, ...]]
    sizes: dict[str, int]

    @classmethod
    def of(cls, model: nn.Module) -> ModelTensors:
        """Read them; refuse what cannot be clipped: nothing to train, no shape, complex, shared memory."""
        refuse_lazy_tensors(model)
        canonical: dict[int, str] = {}
        uses: dict[str, list[str]] = {}
        for name, tensor in model.named_parameters(remove_duplicate=False):
            uses.setdefault(canonical.setdefault(id(tensor), name), []).append(name)
        tensors = {name: model.get_parameter(name) for name in uses}
        memory: dict[int, str] = {}
        for name, tensor in tensors.items():
            if tensor.requires_grad and not tensor.is_floating_point():
                problem = f"tensor {name!r} is {tensor.dtype}; only real tensors can be clipped and noised"
                raise PlanError("plan.tensor-not-real", problem, "split it into two real tensors, or freeze it")
            divided = hasattr(tensor, "full_tensor")  # over ranks, by fully_shard: no memory of its own
            if tensor.device.type == "meta" or not tensor.numel() or divided:
                continue
            other = memory.setdefault(tensor.data_ptr(), name)
            if other != name:
                problem = f"tensors {other!r} and {name!r} share memory but are two parameters"
                remedy = "assign one Parameter to both modules, or copy one"
                raise PlanError("plan.tensors-share-memory", problem, remedy)
        trainable = tuple(name for name, tensor in tensors.items() if tensor.requires_grad)
        if not trainable:
            problem = "the model has no trainable tensor"
            raise PlanError("plan.nothing-trainable", problem, "call requires_grad_(True) on what should train")
        return cls(
            trainable=trainable,
            frozen=tuple(name for name, tensor in tensors.items() if not tensor.requires_grad),
            uses={name: tuple(found) for name, found in uses.items()},
            sizes={name: tensor.numel() for name, tensor in tensors.items()},
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionTrace:
    """`ticks[path]` are the times at which the module at `path` was entered, counted from 0 at the root."""

    ticks: dict[str, tuple[int, ...]]

    @classmethod
    def run(cls, model: nn.Module, example: Any) -> ExecutionTrace:
        """Run `model` once on `example` (a tensor, a tuple of arguments, or a dict of keyword arguments).

        Nothing of it stays: no gradient, evaluation mode, and modes, buffers, hooks and random state are
        put back. `example` should be public or made up.
        """
        paths: defaultdict[nn.Module, list[str]] = defaultdict(list)
        for path, module in model.named_modules(remove_duplicate=False):
            paths[module].append(path)
        entered: defaultdict[nn.Module, list[int]] = defaultdict(list)
        clock = iter(range(1 << 62))
        hooks = [
            module.register_forward_pre_hook(lambda module, _: entered[module].append(next(clock))) for module in paths
        ]
        args, kwargs = call_arguments(example)
        try:
            with model_unchanged(model), torch.no_grad():
                model(*args, **kwargs)
        except Exception as error:
            problem = f"the forward pass on the example failed: {type(error).__name__}: {error}"
            remedy = "give a tensor, a tuple of arguments or a dict that model(...) accepts"
            raise PlanError("plan.example-failed", problem, remedy) from error
        finally:
            for hook in hooks:
                hook.remove()
        return cls(ticks=dict(_assign_calls_to_paths(paths, entered)))

    def calls(self, path: str) -> tuple[int, ...]:
        """When the module at `path` was entered; one never entered itself runs with its nearest ancestor."""
        while path not in self.ticks:
            path = path.rpartition(".")[0]
        return self.ticks[path]

    def first(self, path: str) -> int:
        """When the module at `path` was first entered."""
        return self.calls(path)[0]


@contextmanager
def model_unchanged(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode; afterwards restore modes, buffers and the global random state.

    Attention runs in its unfused form, which can be differentiated per example.
    """
    modes = {module: module.training for module in model.modules()}
    buffers = [(module, dict(module._buffers)) for module in modes]  # a forward may write or replace them
    values = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        model.eval()
        with torch.random.fork_rng(devices=[]), sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for module, tensors in buffers:
            module._buffers.update(tensors)
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)


def call_arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A tensor, a tuple of arguments or a dict of keyword arguments, as (args, kwargs)."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example), {}) if isinstance(example, tuple) else ((example,), {})


def _assign_calls_to_paths(
    paths: Mapping[nn.Module, list[str]], entered: Mapping[nn.Module, list[int]]
) -> dict[str, tuple[int, ...]]:
    """Give a module registered under several paths its calls in turn, the surplus to the last path."""
    ticks: dict[str, tuple[int, ...]] = {}
    for module, names in paths.items():
        times = entered.get(module, [])
        for i, name in enumerate(names):
            mine = times[i:] if i == len(names) - 1 else times[i : i + 1]
            if mine:
                ticks[name] = tuple(mine)
    return ticks
