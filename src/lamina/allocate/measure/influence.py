"""Influence functions on proxy data: how strongly single examples act on a reference loss through each layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lamina import validate
from lamina.allocate.measure.example_gradients import (
    ExampleLosses,
    LossesOf,
    example_count,
    example_gradients,
    layer_tensors,
    take_examples,
)
from lamina.errors import PlanError
from lamina.plan.layer_stack import LayerStack, model_unchanged

_DAMPING_GROWTH = 10.0
_POWER_STEPS = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Influence:
    """To first order, leaving example i out of n moves the reference loss by s·g_i/n, where

        s = (H + damping·I)⁻¹ ∇ reference loss,       s·g_i = Σ_l s_l·g_il.

    values[l] = root mean square over the examples of s_l·g_il: how strongly single examples act through layer l.
    `residual` is ‖(H + damping·I)s − ∇‖/‖∇‖ after `rounds`.
    """

    layers: tuple[str, ...]
    values: tuple[float, ...]
    total: float
    damping: float
    residual: float
    rounds: int
    examples: int


def influence(
    model: nn.Module, losses_of: LossesOf, x: Any, y: Any, stack: LayerStack, *,
    reference: tuple[Any, Any] | None = None, damping: float | None = None, rounds: int = 100, tolerance: float = 1e-3,
) -> Influence:  # fmt: skip
    """Measure it on public or simulated data.

    reference  (x, y) whose loss counts; by default the second half of the examples, for the first half
    damping    added to H; by default a thousandth of its largest eigenvalue, times ten for as long as H + damping·I
               proves not to be positive, as it may be away from a minimum. A given one is refused in that case
    rounds     at most so many Hessian-vector products
    """
    if damping is not None:
        validate.number(PlanError, "sensitivity.damping-negative", least=0, damping=damping)
    validate.whole(PlanError, "sensitivity.rounds-not-positive", rounds=rounds)
    validate.number(PlanError, "sensitivity.tolerance-range", above=0, below=1, tolerance=tolerance)
    if reference is None:
        half = example_count(x) // 2
        if not half:
            problem = "one example cannot be its own reference"
            raise PlanError("sensitivity.no-reference", problem, "give more, or reference=(x, y)")
        reference, (x, y) = take_examples((x, y), slice(half, None)), take_examples((x, y), slice(half))
    hessian = HessianProduct(model, losses_of, x, y, stack)
    wanted = HessianProduct(model, losses_of, reference[0], reference[1], stack).gradient()
    if not float(wanted.norm()) > 0:
        problem = "the reference loss has gradient 0"
        raise PlanError("sensitivity.reference-without-gradient", problem, "give another reference")
    s, used, residual, taken = _damped_inverse_product(hessian, wanted, damping, rounds, tolerance)
    pieces, products = s.split(hessian.sizes), []
    for part in example_gradients(model, losses_of, x, y, hessian.tensors):
        rows = [
            torch.cat([part[name].flatten(1).double() for name in layer], dim=1) @ piece
            for layer, piece in zip(hessian.tensors, pieces, strict=True)
        ]
        products.append(torch.stack(rows, dim=1))
    acts = torch.cat(products)  # (examples, layers): s_l·g_il
    return Influence(
        layers=tuple(layer.name for layer in stack),
        values=tuple(acts.square().mean(0).sqrt().tolist()),
        total=float(acts.sum(1).square().mean().sqrt()),
        damping=used,
        residual=residual,
        rounds=taken,
        examples=len(acts),
    )


class HessianProduct:
    """v → H·v with H = ∇² mean_i loss_i at the model's parameters, by differentiating twice; vectors are flat, float64.

    A ReLU has no curvature away from its kink, and its kink is not seen: there H is the curvature of the pieces.
    """

    def __init__(self, model: nn.Module, losses_of: LossesOf, x: Any, y: Any, stack: LayerStack) -> None:
        self._model, self._losses, self._data = model, ExampleLosses(model, losses_of), (x, y)
        self.tensors = layer_tensors(model, stack)
        self.sizes = [sum(t.numel() for t in layer.values()) for layer in self.tensors]
        with model_unchanged(model):
            self._losses.checked(x, y)

    def gradient(self) -> Tensor:
        """∇ mean_i loss_i."""
        return self._differentiate(None)

    def __call__(self, v: Tensor) -> Tensor:
        return self._differentiate(v)

    def largest(self) -> float:
        """An estimate, from below, of the largest |eigenvalue|, by power iteration."""
        v = torch.randn(sum(self.sizes), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        for _ in range(_POWER_STEPS):
            v = self(v / v.norm()) if v.norm() > 0 else v
        return float(v.norm())

    def _differentiate(self, v: Tensor | None) -> Tensor:
        with model_unchanged(self._model), torch.enable_grad():
            leaves = {name: t.detach().requires_grad_() for layer in self.tensors for name, t in layer.items()}
            wanted = list(leaves.values())
            loss = self._losses.at(leaves, *self._data).mean()
            found = torch.autograd.grad(loss, wanted, create_graph=v is not None, materialize_grads=True)
            if v is not None:
                pieces = v.split([t.numel() for t in wanted])
                dots = [(g * piece.to(g).view_as(g)).sum() for g, piece in zip(found, pieces, strict=True)]
                dot = torch.stack(dots).sum()
                if dot.requires_grad:
                    found = torch.autograd.grad(dot, wanted, materialize_grads=True)
                else:  # the gradient is constant: no curvature
                    found = tuple(torch.zeros_like(t) for t in wanted)
        flat = torch.cat([piece.detach().flatten().double().cpu() for piece in found])
        if not flat.isfinite().all():
            problem = "the gradient or the Hessian is not finite"
            raise PlanError("sensitivity.gradient-not-finite", problem, "use other proxy data or weights")
        return flat


def _damped_inverse_product(
    hessian: HessianProduct, wanted: Tensor, damping: float | None, rounds: int, tolerance: float
) -> tuple[Tensor, float, float, int]:
    """s = (H + damping·I)⁻¹ v, with the damping used, the relative residual and the rounds taken."""
    used = damping if damping is not None else 1e-3 * hessian.largest() or 1.0
    while True:
        s, curvature, taken = _conjugate_gradients(hessian, wanted, used, rounds, tolerance)
        if curvature > 0:
            residual = float((hessian(s) + used * s - wanted).norm() / wanted.norm())
            if residual < 1:
                return s, used, residual, taken
            problem = f"after {taken} rounds the residual is {residual:.3g} times the gradient"
            raise PlanError("sensitivity.solver-no-progress", problem, "take more rounds or more damping")
        if damping is not None:
            problem = f"H + damping·I is not positive with damping {damping:g} (it met curvature {curvature:.3g})"
            remedy = f"raise damping above {damping - curvature:.3g}, or leave it out"
            raise PlanError("sensitivity.damping-too-small", problem, remedy)
        used *= _DAMPING_GROWTH


def _conjugate_gradients(
    hessian: HessianProduct, wanted: Tensor, damping: float, rounds: int, tolerance: float
) -> tuple[Tensor, float, int]:
    """Conjugate gradients; ends at a direction in which the curvature is not positive, and tells it."""
    s, residual = torch.zeros_like(wanted), wanted.clone()
    direction, size = residual.clone(), float(wanted @ wanted)
    goal, least, taken = tolerance**2 * size, math.inf, 0
    while taken < rounds and size > goal:
        product = hessian(direction) + damping * direction
        bent, taken = float(direction @ product), taken + 1
        least = min(least, bent / float(direction @ direction))
        if not least > 0:
            break
        s += (size / bent) * direction
        residual -= (size / bent) * product
        before, size = size, float(residual @ residual)
        direction = residual + (size / before) * direction
    return s, least, taken
