"""`LayerRule`: what the engine must know about one kind of layer, and the autograd Function that runs it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from lamina.engine.batch import RowLayout
from lamina.engine.execute.grads import ContributionGrads
from lamina.errors import EngineError, OwnershipError, UnclippedGradient

NO_INPUT = torch.empty(0)  # the input of a rule that has none

SavedTensors = Sequence[Tensor]
Params = Sequence[Tensor | None]
Needed = Sequence[bool]  # by parameter
ParameterGrads = list[ContributionGrads | None]  # by parameter, None where it is not needed


class LayerRule(ABC):
    """The computation of a layer and the shape of its per-contribution gradient.

    A rule is a pure description: it holds the geometry of its module (strides, groups, …), never
    data. The engine's one autograd Function calls `run` forward and, backward, `input_grad` and
    `contribution_grads`. The leading axis of the input, of the output and of `g` counts rows.
    """

    @abstractmethod
    def run(self, x: Tensor, params: Params) -> tuple[Tensor, SavedTensors]:
        """The output, and what the backward pass needs of the input."""

    @abstractmethod
    def input_grad(self, saved: SavedTensors, params: Params, g: Tensor) -> Tensor:
        """The gradient of the input, as without privacy."""

    @abstractmethod
    def contribution_grads(self, saved: SavedTensors, g: Tensor, layout: RowLayout, need: Needed) -> ParameterGrads:
        """The gradients of the parameters that are needed."""


class ApplyRule(Protocol):
    """Run a rule on the module's own parameters, seen by the engine."""

    def __call__(self, rule: LayerRule, x: Tensor, *names: str) -> Tensor: ...


class LayerForward:
    """What replaces the `forward` of one module while the engine is attached.

    `parameters` lists the module's own parameters, by local name, that it covers.
    """

    parameters: tuple[str, ...]

    forward: Callable[..., Any]
    """forward(apply, *args): the module's forward, with every covered parameter used through `apply`."""


def made_if_needed(need: Needed, *makers: Callable[[], ContributionGrads]) -> ParameterGrads:
    return [make() if needed else None for make, needed in zip(makers, need, strict=False)]


def has_class_forward(module: nn.Module) -> bool:
    """Whether a module's forward is its class's, perhaps bound once more by a copy."""
    own = vars(module).get("forward")
    return own is None or (isinstance(own, MethodType) and own.__func__ is type(module).forward)


def module_above(name: str) -> str:
    """Return the name of the nearest module above that is not a numbered entry of a list."""
    above, _, last = name.rpartition(".")
    return module_above(above) if last.isdigit() else above


def weight_and_bias(module: nn.Module) -> tuple[str, ...]:
    return ("weight",) if getattr(module, "bias", None) is None else ("weight", "bias")


def cast_for_autocast(x: Tensor, params: Params) -> tuple[Tensor, Tensor, Tensor | None]:
    """(x, weight, bias) as autocast would cast the arguments of a matrix product, before they are saved."""
    weight, bias = cast(Tensor, params[0]), params[1] if len(params) > 1 else None
    if not torch.is_autocast_enabled(device := x.device.type):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(device)
    x, weight = (t.to(dtype) if t.dtype == torch.float32 else t for t in (x, weight))
    return x, weight, bias.to(dtype) if bias is not None and bias.dtype == torch.float32 else bias


def check_rank(x: Tensor, least: int, what: str) -> None:
    """Refuse an input without a leading axis of rows."""
    if x.dim() < least:
        problem = f"{what} got an input of shape {tuple(x.shape)}, which has no leading axis of examples"
        raise OwnershipError("engine.no-batch-axis", problem, "keep the batch axis: x.unsqueeze(0) for one example")


@dataclass(frozen=True, slots=True)
class Target:
    """Where the gradient of a covered tensor goes: its name and its layer in the plan."""

    name: str
    layer: int


class BackwardReceiver(Protocol):
    """Whoever takes per-contribution gradients during a backward pass."""

    def receive(self, use: RuleCall, saved: Sequence[Tensor], g: Tensor) -> None: ...

    def wants_input_grad(self, use: RuleCall) -> bool: ...


@dataclass(slots=True)
class ReceiverSlot:
    """Where rule calls hand in their gradients: filled only inside `Engine.backward`."""

    receiver: BackwardReceiver | None = None


@dataclass(slots=True, eq=False)  # not frozen: that would take longer to make, once per layer and step
class RuleCall:
    """One call of one rule in one forward pass."""

    where: str  # the module, or the tensor
    rule: LayerRule
    targets: tuple[Target | None, ...]  # None: the tensor is frozen, or no class reaches it
    layers: tuple[int, ...]  # of the targets, each once
    slot: ReceiverSlot
    example_of_row: Tensor | None  # None: row r is example r
    dtype: torch.dtype  # of the input


def hidden_backward_error(use: RuleCall) -> UnclippedGradient:
    problem = f"a backward pass that is not part of the losses' graph reached '{use.where}'"
    return UnclippedGradient("engine.hidden-backward", problem, "do not call backward inside the model or its hooks")


class CoveredFunction(torch.autograd.Function):
    """Runs a rule; in backward hands the per-contribution gradient to the engine.

    The weight gets no gradient from autograd: only the engine writes `.grad`, after clipping and noise.
    """

    @staticmethod
    def forward(ctx: Any, use: RuleCall, x: Tensor, *params: Tensor | None) -> Tensor:
        y, saved = use.rule.run(x, params)
        ctx.lamina_use = use
        ctx.lamina_rows, ctx.lamina_rank = y.shape[0], y.dim()
        ctx.saved = len(saved)
        ctx.save_for_backward(*saved, *params)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        use: RuleCall = ctx.lamina_use
        if torch.is_grad_enabled():  # create_graph=True, which the engine never asks for
            raise hidden_backward_error(use)
        receiver = use.slot.receiver
        if receiver is None:
            problem = f"a backward pass reached '{use.where}' outside Engine.backward"
            remedy = "call engine.backward(losses, batch) instead of loss.backward(), or engine.detach() first"
            raise EngineError("engine.backward-outside-engine", problem, remedy)
        tensors = ctx.saved_tensors  # once: under checkpointing every access unpacks them again
        saved, params = tensors[: ctx.saved], tensors[ctx.saved :]
        dx = None
        if ctx.needs_input_grad[1] and receiver.wants_input_grad(use):
            dx = use.rule.input_grad(saved, params, g)
            dx = dx if dx.dtype == use.dtype else dx.to(use.dtype)
        receiver.receive(use, saved, g)
        return (None, dx, *(None for _ in params))
