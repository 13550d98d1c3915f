"""Where a model's tensors lie: its blocks in order, and the block of every module that owns tensors.

A block is what people call "a layer" when they count depth: a Linear in an MLP, a whole residual or
transformer block in a stack of them.
    1. Containers (Sequential, ModuleList, ModuleDict) are looked through.
    2. A composite child of a container is one block, with everything inside it.
    3. A nested Sequential with at most one matrix-like weight (convolution, norm, activation) is one block.
    4. Every other module that owns tensors is a block of its own.
Blocks without tensors (activations, dropout) do not count. Frozen blocks do: freezing moves no one's depth.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.utils import parametrize

from lamina.plan.trace import Trace

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """The blocks of a model in order, and where each module that owns tensors lies among them.

    `names[b]` is block b's module path. `uses[path]` holds the blocks at which the module at `path` is
    used: its own, and with a trace also those after which it was called again. `rank[path]` orders
    modules within and across blocks.
    """

    names: tuple[str, ...]
    uses: dict[str, tuple[int, ...]]
    rank: dict[str, int]

    @classmethod
    def of(cls, model: nn.Module, trace: Trace | None = None) -> Blocks:
        """Find the blocks, in order of registration, or of first execution if `trace` is given."""
        block_of = dict(_walk(model, "", contained=False))  # module path -> block path, as registered
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
        return cls(names=tuple(names), uses=uses, rank={path: i for i, path in enumerate(paths)})


def owner(parameter: str) -> str:
    """The path of the module that a tensor belongs to; of a parametrised tensor, the one it serves."""
    path, _, _ = parameter.rpartition(".")
    head, marker, _ = f".{path}.".partition(".parametrizations.")
    return head[1:] if marker else path


def _walk(module: nn.Module, path: str, *, contained: bool) -> Iterator[tuple[str, str]]:
    """Yield (path of a module that owns tensors, path of its block), in order of registration."""
    container = isinstance(module, _CONTAINERS)
    if isinstance(module, nn.Sequential):
        whole = path != "" and _matrices(module) <= 1
    else:
        whole = not container and contained and any(True for _ in module.children())
    if whole or parametrize.is_parametrized(module):
        for name, _ in module.named_parameters(prefix=path, remove_duplicate=False):
            yield owner(name), path
        return
    if any(tensor is not None for tensor in module._parameters.values()):
        yield path, path
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, f"{path}.{name}" if path else name, contained=container)


def _matrices(module: nn.Module) -> int:
    """How many submodules own a weight of two or more dimensions."""
    return sum(any(p.ndim >= 2 for p in m.parameters(recurse=False)) for m in module.modules())
