"""Per-example gradients on proxy data: losses, gradient norms, Fisher information."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.parameter import UninitializedParameter
from torch.utils import _pytree as pytree

from lamina import validate
from lamina.errors import PlanError
from lamina.plan.layer_stack import LayerStack, model_unchanged

LossesOf = Callable[[Any, Any], Tensor]
"""`losses_of(x, y)`: one loss per example, model included."""

NamedTensors = dict[str, Tensor]
_READ_STACK = "read the stack from this model: lamina.LayerStack.from_model(model)"


def reconstruction_losses(model: nn.Module) -> LossesOf:
    """Mean squared error of `model(x)` to `x`, per example: what an autoencoder is trained on."""

    def losses_of(x: Any, y: Any) -> Tensor:
        out = model(x)
        if not isinstance(x, Tensor) or not isinstance(out, Tensor) or out.shape != x.shape:
            got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            problem = f"the model gives {got}, so it cannot be compared with its input"
            remedy = "give losses_of(x, y), which returns one loss per example, with public or simulated x and y"
            raise PlanError("sensitivity.not-an-autoencoder", problem, remedy)
        return (out - x).square().flatten(1).mean(1)

    return losses_of


def layer_tensors(model: nn.Module, stack: LayerStack) -> tuple[NamedTensors, ...]:
    """The tensors of every layer by name, as the model holds them."""
    if not isinstance(stack, LayerStack) or not len(stack):
        raise PlanError("sensitivity.stack-type", f"stack is {stack!r}", "use lamina.LayerStack.from_model(model)")
    tensors = dict(model.named_parameters())
    for layer in stack:
        for name in layer.parameters:
            if name not in tensors:
                problem = f"the model has no tensor {name!r} of layer {layer.name!r}"
                raise PlanError("sensitivity.stack-of-other-model", problem, _READ_STACK)
            if isinstance(tensors[name], UninitializedParameter):
                problem = f"tensor {name!r} has no shape yet"
                raise PlanError("sensitivity.tensor-without-shape", problem, "run model(...) once")
        size = sum(tensors[name].numel() for name in layer.parameters)
        if size != layer.size or not size:
            problem = f"layer {layer.name!r} has {size} numbers, the stack says {layer.size}"
            raise PlanError("sensitivity.stack-of-other-model", problem, _READ_STACK)
    return tuple({name: tensors[name] for name in layer.parameters} for layer in stack)


class ExampleLosses(nn.Module):
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
        n = example_count(x)
        with torch.no_grad():
            losses = self.losses_of(x, y)
        if not isinstance(losses, Tensor) or losses.shape != (n,):
            got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            problem = f"losses_of gave {got} for {n} examples, must be ({n},)"
            remedy = "return one loss per example: reduction='none', then mean over everything but the first axis"
            raise PlanError("sensitivity.losses-shape", problem, remedy)
        if not losses.isfinite().all():
            bad = int((~losses.isfinite()).sum())
            problem = f"{bad} of {n} proxy losses are not finite"
            raise PlanError("sensitivity.losses-not-finite", problem, "use other proxy data")
        return n


def example_count(x: Any) -> int:
    """How many examples a tensor, tuple or dict of tensors holds: the common size of the first axes."""
    sizes = {t.shape[0] if t.ndim else 0 for t in pytree.tree_leaves(x) if isinstance(t, Tensor)}
    if len(sizes) != 1 or not min(sizes):
        problem = f"proxy inputs have first axes {sorted(sizes)}"
        raise PlanError("sensitivity.example-count", problem, "give tensors (examples, …)")
    return int(min(sizes))


def take_examples(tree: Any, rows: slice | Tensor) -> Any:
    """Some examples of a tensor, tuple or dict of tensors."""
    return pytree.tree_map(lambda t: t[rows] if isinstance(t, Tensor) else t, tree)


_MOST_GRADIENT_NUMBERS = 1 << 24  # numbers of per-example gradients held at once
_MOST_CHUNK = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Fisher:
    """With g_il the gradient of example i at layer l:

      information[l]  mean_i ‖g_il‖², the trace of the empirical Fisher information of the layer
      norms[l]        n_l, the median of ‖g_il‖ over the examples that reach the layer (g_il ≠ 0)
      reached[l]      the part of the examples that do

    The median and not the root mean square, because n_l is to be a threshold: at C_l = n_l half of those that
    reach the layer are clipped, however heavy the tail; the root mean square is √information, given as well. An
    example with g_il = 0 is not clipped at any threshold, so it has no say in one.
    """

    layers: tuple[str, ...]
    information: tuple[float, ...]
    norms: tuple[float, ...]
    reached: tuple[float, ...]
    examples: int


def fisher(
    model: nn.Module, losses_of: LossesOf, x: Any, y: Any, stack: LayerStack, *, chunk: int | None = None
) -> Fisher:
    """Read them from per-example gradients of public or simulated data, `chunk` examples at a time."""
    tensors = layer_tensors(model, stack)
    squares = torch.cat(
        [
            torch.stack([sum_of_squares([part[name] for name in layer]) for layer in tensors], dim=1)
            for part in example_gradients(model, losses_of, x, y, tensors, chunk=chunk)
        ]
    )  # (examples, layers)
    for layer, column in zip(stack, squares.T, strict=True):
        if not column.isfinite().all():
            problem = f"layer {layer.name!r} has gradients that are not finite"
            raise PlanError("sensitivity.gradient-not-finite", problem, "use other proxy data")
        if not (column > 0).any():
            problem = f"layer {layer.name!r} has gradient 0 on all {len(column)} proxy examples"
            remedy = "freeze it with requires_grad_(False), or measure at weights and on data that reach it"
            raise PlanError("sensitivity.no-gradient", problem, remedy)
    return Fisher(
        layers=tuple(layer.name for layer in stack),
        information=tuple(squares.mean(0).tolist()),
        norms=tuple(float(_lower_median(column[column > 0]).sqrt()) for column in squares.T),
        reached=tuple((squares > 0).double().mean(0).tolist()),
        examples=len(squares),
    )


def example_gradients(
    model: nn.Module,
    losses_of: LossesOf,
    x: Any,
    y: Any,
    tensors: tuple[NamedTensors, ...],
    *,
    chunk: int | None = None,
) -> Iterator[NamedTensors]:
    """Gradients per example, (chunk, *shape) by name, in the order of the examples.

    `vmap(grad)`; a model that `vmap` cannot run is differentiated one example at a time.
    """
    losses, parameters = (ExampleLosses(model, losses_of), {name: t for layer in tensors for name, t in layer.items()})
    size = sum(t.numel() for t in parameters.values())
    step = max(1, min(_MOST_CHUNK, _MOST_GRADIENT_NUMBERS // max(size, 1))) if chunk is None else chunk
    validate.whole(PlanError, "sensitivity.chunk-not-positive", chunk=step)
    with model_unchanged(model):
        n = losses.checked(x, y)
    form = _vmapped_gradients
    for start in range(0, n, step):
        part = take_examples((x, y), slice(start, min(start + step, n)))
        with model_unchanged(model):  # not around the yield: what the caller does meanwhile is the caller's
            try:
                found = form(losses, parameters, *part)
            except (RuntimeError, ValueError, NotImplementedError) as error:
                if form is _looped_gradients or isinstance(error, torch.OutOfMemoryError):
                    raise
                form = _looped_gradients  # control flow on values, in-place writes, .item(): what vmap cannot run
                found = form(losses, parameters, *part)
        yield found


def sum_of_squares(parts: list[Tensor]) -> Tensor:
    """‖·‖² per example over several tensors, in float64."""
    return torch.stack([part.flatten(1).double().square().sum(1) for part in parts]).sum(0)


def _vmapped_gradients(losses: ExampleLosses, parameters: NamedTensors, x: Any, y: Any) -> NamedTensors:
    def loss(given: NamedTensors, x1: Any, y1: Any) -> Tensor:
        one = pytree.tree_map(lambda t: t.unsqueeze(0) if isinstance(t, Tensor) else t, (x1, y1))
        return losses.at(given, *one).sum()

    axes = pytree.tree_map(lambda t: 0 if isinstance(t, Tensor) else None, (x, y))
    detached = {name: t.detach() for name, t in parameters.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")  # right all the same
        out: NamedTensors = vmap(grad(loss), in_dims=(None, *axes))(detached, x, y)
    return out


def _looped_gradients(losses: ExampleLosses, parameters: NamedTensors, x: Any, y: Any) -> NamedTensors:
    rows: list[tuple[Tensor, ...]] = []
    for i in range(example_count(x)):
        with torch.enable_grad():
            given = {name: t.detach().requires_grad_() for name, t in parameters.items()}
            loss = losses.at(given, *take_examples((x, y), slice(i, i + 1))).sum()
            rows.append(torch.autograd.grad(loss, list(given.values()), materialize_grads=True))
    return {name: torch.stack(column) for name, column in zip(parameters, zip(*rows, strict=True), strict=True)}


def _lower_median(values: Tensor) -> Tensor:
    """The median of squares such that its root is the median of the roots: the lower one of two, never a mean."""
    return values.sort().values[math.ceil(len(values) / 2) - 1]
