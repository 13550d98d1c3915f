"""The one autograd Function: forward as usual, backward per contribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lamina.engine.rules.rule import Rule
from lamina.errors import EngineError, UnclippedGradient


@dataclass(frozen=True, slots=True)
class Target:
    """Where the gradient of a covered tensor goes: its name and its layer in the plan."""

    name: str
    layer: int


class Receiver(Protocol):
    """Whoever takes per-contribution gradients during a backward pass."""

    def receive(self, use: Use, kept: Sequence[Tensor], g: Tensor) -> None: ...

    def wants_input_grad(self, use: Use) -> bool: ...


class Desk:
    """Where uses hand in their gradients: open only inside `Engine.backward`."""

    def __init__(self) -> None:
        self.receiver: Receiver | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Use:
    """One call of one rule in one forward pass."""

    where: str  # the module, or the tensor
    rule: Rule
    targets: tuple[Target | None, ...]  # None: the tensor is frozen, or no class reaches it
    layers: tuple[int, ...]  # of the targets, each once
    desk: Desk
    example_of_row: Tensor | None  # None: row r is example r
    dtype: torch.dtype  # of the input


def hidden_backward(use: Use) -> UnclippedGradient:
    return UnclippedGradient(
        "engine.reached-backward-pass",
        f"'{use.where}' was reached by a backward pass that the graph of the losses does not show",
        "do not call backward inside the model or its hooks",
    )


class Covered(torch.autograd.Function):
    """Runs a rule; in backward hands the per-contribution gradient to the engine.

    The weight itself gets no gradient from autograd: what reaches `.grad` is only what the engine
    writes there after clipping and noise.
    """

    @staticmethod
    def forward(ctx: Any, use: Use, x: Tensor, *params: Tensor | None) -> Tensor:
        y, kept = use.rule.run(x, params)
        ctx.lamina_use = use
        ctx.lamina_rows, ctx.lamina_rank = y.shape[0], y.dim()
        ctx.kept = len(kept)
        ctx.save_for_backward(*kept, *params)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        use: Use = ctx.lamina_use
        receiver = use.desk.receiver
        if receiver is None:
            raise EngineError(
                "engine.backward-pass-reached",
                f"a backward pass reached '{use.where}' outside Engine.backward",
                "call engine.backward(losses, batch) instead of loss.backward(), or engine.detach() first",
            )
        saved = ctx.saved_tensors
        kept, params = saved[: ctx.kept], saved[ctx.kept :]
        dx = None
        if ctx.needs_input_grad[1] and receiver.wants_input_grad(use):
            dx = use.rule.input_grad(kept, params, g)
            dx = dx if dx.dtype == use.dtype else dx.to(use.dtype)
        receiver.receive(use, kept, g)
        return (None, dx, *(None for _ in params))
