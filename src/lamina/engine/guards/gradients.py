"""`GradWriter`: the only writer of `.grad`."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lamina.engine.guards.guard import Guard, tensors_of_optimizer
from lamina.errors import EngineError, UnclippedGradient


class GradWriter(Guard):
    """Writes released gradients to `.grad`, and refuses gradients that anything else wrote there."""

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
            if p.grad is not None:
                self._refuse_foreign(name, p)
            if not p.requires_grad:
                problem = f"'{name}' was frozen after the engine was attached"
                remedy = "freeze first, then make stack, plan and engine"
                raise EngineError("engine.frozen-after-attach", problem, remedy)

    def versions(self) -> list[tuple[int, int]]:
        """Which gradients the tensors have, and how often each was written."""
        grads = (p.grad for p in self.tensors.values())
        return [(id(g), g._version) if g is not None else (0, 0) for g in grads]

    def check_unchanged(self, before: list[tuple[int, int]]) -> None:
        """After a backward pass: nothing was written beside the engine."""
        after = self.versions()
        for name, was, now in zip(self.tensors, before, after, strict=True) if before != after else ():
            if was != now:
                self.tensors[name].grad = None
                problem = f"a hook or custom Function wrote to '{name}'.grad during the backward pass"
                remedy = "remove it; switch fused gradient accumulation off"
                raise UnclippedGradient("engine.grad-written-during-backward", problem, remedy)

    def before_optimizer_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Closures would take several releases for the price of one; foreign gradients were never clipped."""
        mine = tensors_of_optimizer(optimizer, self.tensors)
        if not mine:
            return
        if kwargs.get("closure") is not None or any(callable(a) and not isinstance(a, Optimizer) for a in args):
            problem = f"{type(optimizer).__name__}.step got a closure, which may ask for several gradients in one step"
            remedy = "call engine.backward once, then optimizer.step() without a closure"
            raise EngineError("engine.optimizer-closure", problem, remedy)
        for name, p in mine:
            self._refuse_foreign(name, p)

    def _refuse_foreign(self, name: str, p: Tensor) -> None:
        written = self._written.get(name)
        if p.grad is not None and (written is None or written() is not p.grad):
            problem = f"'{name}'.grad holds a gradient that the engine did not write"
            remedy = "call optimizer.zero_grad(), and engine.backward(losses, batch) instead of loss.backward()"
            raise UnclippedGradient("engine.foreign-grad", problem, remedy)
