"""Fisher information and gradient norms per layer, example by example, on proxy data."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.utils import _pytree as pytree

from lamina.errors import PlanError
from lamina.plan import LayerStack
from lamina.sensitivity.proxy import Losses, LossesOf, Named, count, take, tensors_of, untouched

_HELD = 1 << 24  # numbers of per-example gradients held at once
_MOST = 64


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
    held = tensors_of(model, stack)
    squares = torch.cat(
        [
            torch.stack([sum_of_squares([part[name] for name in layer]) for layer in held], dim=1)
            for part in gradients(model, losses_of, x, y, held, chunk=chunk)
        ]
    )  # (examples, layers)
    for layer, column in zip(stack, squares.T, strict=True):
        if not column.isfinite().all():
            raise PlanError(
                "measure.layer-gradients-proxy",
                f"layer {layer.name!r} has gradients on the proxy that are not finite",
                "use proxy data and weights for which the loss can be differentiated",
            )
        if not (column > 0).any():
            raise PlanError(
                "measure.layer-gradient-proxy",
                f"layer {layer.name!r} has gradient 0 on all {len(column)} proxy examples",
                "freeze it with requires_grad_(False), or measure at weights and on data that reach it "
                "(a layer behind zero weights gets no gradient)",
            )
    return Fisher(
        layers=tuple(layer.name for layer in stack),
        information=tuple(squares.mean(0).tolist()),
        norms=tuple(float(_median(column[column > 0]).sqrt()) for column in squares.T),
        reached=tuple((squares > 0).double().mean(0).tolist()),
        examples=len(squares),
    )


def gradients(
    model: nn.Module,
    losses_of: LossesOf,
    x: Any,
    y: Any,
    held: tuple[Named, ...],
    *,
    chunk: int | None = None,
) -> Iterator[Named]:
    """Gradients per example, (chunk, *shape) by name, in the order of the examples.

    `vmap(grad)`; a model that `vmap` cannot run is differentiated one example at a time.
    """
    losses, parameters = Losses(model, losses_of), {name: t for layer in held for name, t in layer.items()}
    size = sum(t.numel() for t in parameters.values())
    step = max(1, min(_MOST, _HELD // max(size, 1))) if chunk is None else chunk
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        raise PlanError(
            "measure.chunk-whole-number",
            f"chunk is {chunk!r}, must be a whole number >= 1",
            "leave it out, or give 32",
        )
    with untouched(model):
        n = losses.checked(x, y)
    form = _mapped
    for start in range(0, n, step):
        part = take((x, y), slice(start, min(start + step, n)))
        with untouched(model):  # not around the yield: what the caller does meanwhile is the caller's
            try:
                found = form(losses, parameters, *part)
            except (RuntimeError, ValueError, NotImplementedError) as error:
                if form is _looped or isinstance(error, torch.OutOfMemoryError):
                    raise
                form = _looped  # control flow on values, in-place writes, .item(): what vmap cannot run
                found = form(losses, parameters, *part)
        yield found


def sum_of_squares(parts: list[Tensor]) -> Tensor:
    """‖·‖² per example over several tensors, in float64."""
    return torch.stack([part.flatten(1).double().square().sum(1) for part in parts]).sum(0)


def _mapped(losses: Losses, parameters: Named, x: Any, y: Any) -> Named:
    def loss(given: Named, x1: Any, y1: Any) -> Tensor:
        one = pytree.tree_map(lambda t: t.unsqueeze(0) if isinstance(t, Tensor) else t, (x1, y1))
        return losses.at(given, *one).sum()

    axes = pytree.tree_map(lambda t: 0 if isinstance(t, Tensor) else None, (x, y))
    plain = {name: t.detach() for name, t in parameters.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")  # right all the same
        out: Named = vmap(grad(loss), in_dims=(None, *axes))(plain, x, y)
    return out


def _looped(losses: Losses, parameters: Named, x: Any, y: Any) -> Named:
    rows: list[tuple[Tensor, ...]] = []
    for i in range(count(x)):
        with torch.enable_grad():
            given = {name: t.detach().requires_grad_() for name, t in parameters.items()}
            loss = losses.at(given, *take((x, y), slice(i, i + 1))).sum()
            rows.append(torch.autograd.grad(loss, list(given.values()), materialize_grads=True))
    return {
        name: torch.stack(column) for name, column in zip(parameters, zip(*rows, strict=True), strict=True)
    }


def _median(values: Tensor) -> Tensor:
    """The median of squares such that its root is the median of the roots: the lower one of two, never a mean."""
    return values.sort().values[math.ceil(len(values) / 2) - 1]
