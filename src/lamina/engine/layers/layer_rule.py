"""`LayerRule`: what the engine must know about one kind of layer, and the autograd Function that runs it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lamina.engine.batch import RowLayout
from lamina.engine.grads import ContributionGrads
from lamina.errors import EngineError, OwnershipError, UnclippedGradient

NO_INPUT = torch.empty(0)  # the input of a rule that has none

SavedTensors = Sequence[Tensor]
Params = Sequence[Tensor | None]


class LayerRule(ABC):
    """The computation of a layer and the shape of its per-contribution gradient.

    A rule is a pure description: it holds the geometry of its module (strides, groups, …), never
    data. The engine's one autograd Function calls `run` forward and, backward, `input_grad` and
    `unit_grads`. The leading axis of the input, of the output and of `g` counts rows.
    """

    @abstractmethod
    def run(self, x: Tensor, params: Params) -> tuple[Tensor, SavedTensors]:
        """The output, and what the backward pass needs of the input."""

    @abstractmethod
    def input_grad(self, kept: SavedTensors, params: Params, g: Tensor) -> Tensor:
        """The gradient of the input, as without privacy."""

    @abstractmethod
    def contribution_grads(
        self, kept: SavedTensors, g: Tensor, layout: RowLayout, need: Sequence[bool]
    ) -> list[ContributionGrads | None]:
        """One `ContributionGrads` per parameter, None where it is not needed."""


class ApplyRule(Protocol):
    """Run a rule on the module's own parameters, seen by the engine."""

    def __call__(self, rule: LayerRule, x: Tensor, *names: str) -> Tensor: ...


class LayerForward(ABC):
    """What replaces the `forward` of one module while the engine is attached.

    `parameters` lists the module's own parameters, by local name, that this site covers.
    """

    parameters: tuple[str, ...]

    @abstractmethod
    def forward(self, apply: ApplyRule, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, with every covered parameter used through `apply`."""


def cast_for_autocast(*tensors: Tensor | None) -> list[Tensor | None]:
    """What autocast would do to the arguments of a matrix product, done before they are kept."""
    if not torch.is_autocast_enabled("cpu"):
        return list(tensors)
    dtype = torch.get_autocast_dtype("cpu")
    return [t.to(dtype) if t is not None and t.dtype == torch.float32 else t for t in tensors]


def check_rank(x: Tensor, least: int, what: str) -> None:
    """Refuse an input without a leading axis of rows."""
    if x.dim() < least:
        raise OwnershipError(
            "engine.no-batch-axis",
            f"{what} got an input of shape {tuple(x.shape)}, which has no leading axis of examples",
            "keep the batch axis: x.unsqueeze(0) for one example",
        )


@dataclass(frozen=True, slots=True)
class Target:
    """Where the gradient of a covered tensor goes: its name and its layer in the plan."""

    name: str
    layer: int


class BackwardReceiver(Protocol):
    """Whoever takes per-contribution gradients during a backward pass."""

    def receive(self, use: RuleCall, kept: Sequence[Tensor], g: Tensor) -> None: ...

    def wants_input_grad(self, use: RuleCall) -> bool: ...


class ReceiverSlot:
    """Where uses hand in their gradients: open only inside `Engine.backward`."""

    def __init__(self) -> None:
        self.receiver: BackwardReceiver | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RuleCall:
    """One call of one rule in one forward pass."""

    where: str  # the module, or the tensor
    rule: LayerRule
    targets: tuple[Target | None, ...]  # None: the tensor is frozen, or no class reaches it
    layers: tuple[int, ...]  # of the targets, each once
    desk: ReceiverSlot
    example_of_row: Tensor | None  # None: row r is example r
    dtype: torch.dtype  # of the input


def hidden_backward_error(use: RuleCall) -> UnclippedGradient:
    return UnclippedGradient(
        "engine.hidden-backward",
        f"'{use.where}' was reached by a backward pass that the graph of the losses does not show",
        "do not call backward inside the model or its hooks",
    )


class CoveredFunction(torch.autograd.Function):
    """Runs a rule; in backward hands the per-contribution gradient to the engine.

    The weight itself gets no gradient from autograd: what reaches `.grad` is only what the engine
    writes there after clipping and noise.
    """

    @staticmethod
    def forward(ctx: Any, use: RuleCall, x: Tensor, *params: Tensor | None) -> Tensor:
        y, kept = use.rule.run(x, params)
        ctx.lamina_use = use
        ctx.lamina_rows, ctx.lamina_rank = y.shape[0], y.dim()
        ctx.kept = len(kept)
        ctx.save_for_backward(*kept, *params)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        use: RuleCall = ctx.lamina_use
        receiver = use.desk.receiver
        if receiver is None:
            raise EngineError(
                "engine.backward-outside-engine",
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
