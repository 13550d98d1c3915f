"""Losses on proxy data: one per example, with other parameters put in place, and without a trace on the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import UninitializedParameter
from torch.utils import _pytree as pytree

from lamina.errors import PlanError
from lamina.plan import LayerStack

LossesOf = Callable[[Any, Any], Tensor]
"""`losses_of(x, y)`: one loss per example, model included."""

Named = dict[str, Tensor]


def reconstruction(model: nn.Module) -> LossesOf:
    """Mean squared error of `model(x)` to `x`, per example: what an autoencoder is trained on."""

    def losses_of(x: Any, y: Any) -> Tensor:
        out = model(x)
        if not isinstance(x, Tensor) or not isinstance(out, Tensor) or out.shape != x.shape:
            told = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise PlanError(
                "measure.model-gives-not",
                f"the model gives {told}, so it cannot be compared with its input",
                "give losses_of(x, y), which returns one loss per example, with public or simulated x and y",
            )
        return (out - x).square().flatten(1).mean(1)

    return losses_of


def tensors_of(model: nn.Module, stack: LayerStack) -> tuple[Named, ...]:
    """The tensors of every layer by name, as the model holds them."""
    if not isinstance(stack, LayerStack) or not len(stack):
        raise PlanError("measure.stack", f"stack is {stack!r}", "use lamina.LayerStack.from_model(model)")
    held = dict(model.named_parameters())
    for layer in stack:
        for name in layer.parameters:
            if name not in held:
                raise PlanError(
                    "measure.layer-names-tensor",
                    f"layer {layer.name!r} names the tensor {name!r}, which the model does not have",
                    "read the stack from this model: lamina.LayerStack.from_model(model)",
                )
            if isinstance(held[name], UninitializedParameter):
                raise PlanError(
                    "measure.tensor-no-shape",
                    f"tensor {name!r} has no shape yet",
                    "run model(...) once before measuring",
                )
        size = sum(held[name].numel() for name in layer.parameters)
        if size != layer.size or not size:
            raise PlanError(
                "measure.layer-numbers-model",
                f"layer {layer.name!r} has {size} numbers in the model and {layer.size} in the stack",
                "leave empty layers out and read the stack from this model",
            )
    return tuple({name: held[name] for name in layer.parameters} for layer in stack)


class Losses(nn.Module):
    """`losses_of` as a function of parameters: `at(parameters, x, y)` is one loss per example.

    The model is a submodule, so `functional_call` finds the tensors to exchange wherever `losses_of` uses it; a
    tied tensor is exchanged at all its uses.
    """

    def __init__(self, model: nn.Module, losses_of: LossesOf) -> None:
        super().__init__()
        self.model, self.losses_of = model, losses_of

    def forward(self, x: Any, y: Any) -> Tensor:
        return self.losses_of(x, y)

    def at(self, parameters: Mapping[str, Tensor], x: Any, y: Any) -> Tensor:
        given = {f"model.{name}": tensor for name, tensor in parameters.items()}
        out: Tensor = functional_call(self, given, (x, y))
        return out

    def checked(self, x: Any, y: Any) -> int:
        """How many examples; refuses losses that are not one finite number for each."""
        n = count(x)
        with torch.no_grad():
            losses = self.losses_of(x, y)
        if not isinstance(losses, Tensor) or losses.shape != (n,):
            told = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise PlanError(
                "measure.losses-gave-examples",
                f"losses_of gave {told} for {n} examples, must be ({n},)",
                "return one loss per example: reduction='none', then mean over everything but the first axis",
            )
        if not losses.isfinite().all():
            bad = int((~losses.isfinite()).sum())
            raise PlanError(
                "measure.proxy-losses-not",
                f"{bad} of {n} proxy losses are not finite",
                "use proxy data that the model can take",
            )
        return n


def count(x: Any) -> int:
    """How many examples a tensor, tuple or dict of tensors holds: the common size of the first axes."""
    sizes = {t.shape[0] if t.ndim else 0 for t in pytree.tree_leaves(x) if isinstance(t, Tensor)}
    if len(sizes) != 1 or not min(sizes):
        raise PlanError(
            "measure.proxy-inputs-first",
            f"the proxy inputs have first axes {sorted(sizes)}",
            "give tensors whose first axis counts the examples",
        )
    return int(min(sizes))


def take(tree: Any, rows: slice | Tensor) -> Any:
    """Some examples of a tensor, tuple or dict of tensors."""
    return pytree.tree_map(lambda t: t[rows] if isinstance(t, Tensor) else t, tree)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode; afterwards modes, buffers and the global random state are as before.

    Attention runs in its plain form, which can be differentiated twice and per example.
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
        for module, held in buffers:
            module._buffers.update(held)
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)
