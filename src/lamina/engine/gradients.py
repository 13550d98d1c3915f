"""`Gradients`: the `.grad` of covered tensors, which nobody but the engine may write."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lamina.errors import EngineError, UnclippedGradient


class Gradients:
    """Writes what was released, knows its own writing again, and refuses anybody else's."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self._written: dict[str, weakref.ref[Tensor]] = {}

    def write(self, grads: Mapping[str, Tensor]) -> None:
        for name, p in self.tensors.items():
            grad = grads[name].to(p.dtype)
            if p.grad is None:
                p.grad = grad
            else:  # the engine's own, from an earlier step that was not zeroed
                p.grad.add_(grad)
            self._written[name] = weakref.ref(p.grad)

    def check(self) -> None:
        """Before a step: nothing foreign, nothing frozen."""
        for name, p in self.tensors.items():
            if self._foreign(name, p):
                raise UnclippedGradient(
                    "engine.grad-holds-gradient",
                    f"'{name}'.grad holds a gradient that the engine did not write",
                    "call optimizer.zero_grad() first, and never loss.backward() on a covered tensor",
                )
            if not p.requires_grad:
                raise EngineError(
                    "engine.frozen-after-engine",
                    f"'{name}' was frozen after the engine was attached",
                    "freeze first, then make stack, plan and engine",
                )

    def held(self) -> list[tuple[int, int]]:
        """Which gradients the tensors hold, and how often each was written."""
        grads = (p.grad for p in self.tensors.values())
        return [(id(g), g._version) if g is not None else (0, 0) for g in grads]

    def unchanged(self, before: list[tuple[int, int]]) -> None:
        """After a backward pass: nothing was written beside the engine."""
        for name, was, now in zip(self.tensors, before, self.held(), strict=True):
            if was != now:
                self.tensors[name].grad = None
                raise UnclippedGradient(
                    "engine.something-wrote-grad",
                    f"something wrote to '{name}'.grad during the backward pass",
                    "no hook or custom Function may write gradients itself: fused gradient accumulation must be off",
                )

    def before_optimizer_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Closures would take several releases for the price of one; foreign gradients were never clipped."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        mine = [(name, p) for name, p in self.tensors.items() if id(p) in held]
        if not mine:
            return
        if kwargs.get("closure") is not None or any(
            callable(a) and not isinstance(a, Optimizer) for a in args
        ):
            raise EngineError(
                "engine.step-given-closure",
                f"{type(optimizer).__name__}.step was given a closure, which may ask for several gradients in one step",
                "call engine.backward once, then optimizer.step() without a closure",
            )
        for name, p in mine:
            if self._foreign(name, p):
                raise UnclippedGradient(
                    "engine.grad-holds-gradient",
                    f"'{name}'.grad holds a gradient that the engine did not write",
                    "use engine.backward(losses, batch) for every gradient of a covered tensor",
                )

    def _foreign(self, name: str, p: Tensor) -> bool:
        """Whether a tensor holds a gradient that somebody else put there."""
        if p.grad is None:
            return False
        written = self._written.get(name)
        return written is None or written() is not p.grad


def refuse_half(parameters: Mapping[str, Tensor]) -> None:
    for name, p in parameters.items():
        if p.requires_grad and p.dtype == torch.float16:
            raise EngineError(
                "engine.float16-whose-gradients",
                f"'{name}' is float16, whose gradients overflow",
                "use bfloat16 or float32",
            )
