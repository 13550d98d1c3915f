"""`Restore`: what no class reaches comes out of an optimiser's step as it went in, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lamina.engine.places import Places
from lamina.errors import EngineError

_STARTS_OTHERWISE = {
    "step_size"
}  # Rprop's, which starts as the learning rate and stays so where the gradient is 0

Saved = tuple[list[Tensor], dict[Any, list[Tensor]]]


class Restore:
    """Saves, before a step of any torch optimiser, the places that no class reaches: of the weights, and of every
    state tensor of the same shape. Puts them back after the step; state that the step created starts as 0 there.

    Their gradient is 0, but weight decay, momentum from before or an optimiser of another kind would still move them.
    State that is a single number belongs to the whole tensor and is left to the optimiser. State of any other shape
    mixes places: refused.
    """

    def __init__(self, tensors: Mapping[str, Tensor], closed: Mapping[str, Places]) -> None:
        self.tensors = {name: tensors[name] for name in closed if name in tensors}
        self.closed = closed
        self._saved: dict[str, Saved] = {}

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._saved = {}
        for name, p in self._held(optimizer):
            state = {path: self._cut(name, t) for path, t in self._state(optimizer, name, p)}
            self._saved[name] = self._cut(name, p), state

    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        saved, self._saved = self._saved, {}
        with torch.no_grad():
            held = [(name, p) for name, p in self._held(optimizer) if name in saved]
            for name, p in held:
                self._paste(name, p, saved[name][0])
            for name, p in held:
                for path, t in self._state(optimizer, name, p):
                    if path in saved[name][1]:
                        self._paste(name, t, saved[name][1][path])
                    elif not _STARTS_OTHERWISE & {str(getattr(key, "key", "")) for key in path}:
                        self.closed[name].zero_(t)

    def _held(self, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]} if self.tensors else set()
        return ((name, p) for name, p in self.tensors.items() if id(p) in held)

    def _state(self, optimizer: Optimizer, name: str, p: Tensor) -> Iterator[tuple[Any, Tensor]]:
        """The state of a tensor that has its shape, by where it is kept."""
        leaves, _ = pytree.tree_flatten_with_path(dict(optimizer.state.get(p, {})))
        for path, leaf in leaves:
            if not isinstance(leaf, Tensor) or leaf.numel() == 1:
                continue
            if leaf.shape != p.shape:
                raise EngineError(
                    "engine.keeps-shape-shape",
                    f"{type(optimizer).__name__} keeps {pytree.keystr(path)} of shape {tuple(leaf.shape)} for "
                    f"'{name}' of shape {tuple(p.shape)}, of which no class may move some places: they cannot be "
                    "kept as they are",
                    "use an optimiser whose state has the shape of its tensor (AdamW, SGD), or a plan that reaches "
                    "all of the tensor",
                )
            yield path, leaf

    def _cut(self, name: str, t: Tensor) -> list[Tensor]:
        places = self.closed[name]
        return [t.detach().narrow(places.axis, a, b - a).clone() for a, b in places.ranges]

    def _paste(self, name: str, t: Tensor, values: list[Tensor]) -> None:
        places = self.closed[name]
        for (a, b), value in zip(places.ranges, values, strict=True):
            t.detach().narrow(places.axis, a, b - a).copy_(value)
