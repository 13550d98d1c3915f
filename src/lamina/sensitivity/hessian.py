"""The Hessian of the mean proxy loss: never formed, only multiplied with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lamina.errors import PlanError
from lamina.plan import LayerStack
from lamina.sensitivity.proxy import Losses, LossesOf, take, tensors_of, untouched


class Hessian:
    """H = ∇² mean_i loss_i at the model's parameters, on proxy data; vectors are flat and float64.

    H·v by differentiating twice: ∇(∇loss · v). Memory holds the graph of `chunk` examples. A ReLU has no
    curvature away from its kink, and its kink is not seen: there H is the curvature of the pieces.
    """

    def __init__(
        self,
        model: nn.Module,
        losses_of: LossesOf,
        x: Any,
        y: Any,
        stack: LayerStack,
        *,
        chunk: int = 256,
    ) -> None:
        if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
            raise PlanError(
                "measure.chunk-whole-number",
                f"chunk is {chunk!r}, must be a whole number >= 1",
                "leave it out, or give 32",
            )
        self.model, self.losses, self.x, self.y, self.chunk = model, Losses(model, losses_of), x, y, chunk
        self.held = tensors_of(model, stack)
        self.sizes = [sum(t.numel() for t in layer.values()) for layer in self.held]
        with untouched(model):
            self.examples = self.losses.checked(x, y)

    def split(self, flat: Tensor) -> tuple[Tensor, ...]:
        """A flat vector as one piece per layer."""
        return tuple(flat.split(self.sizes))

    def gradient(self, rows: Tensor | None = None) -> Tensor:
        """∇ mean_i loss_i, over all examples or some."""
        return self._accumulated(None, rows)

    def product(self, flat: Tensor, rows: Tensor | None = None) -> Tensor:
        """H·v, over all examples or some."""
        return self._accumulated(flat, rows)

    def largest(self, *, rounds: int = 30, seed: int = 0) -> float:
        """An estimate, from below, of the largest |eigenvalue|, by power iteration."""
        v = torch.randn(sum(self.sizes), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        value = 0.0
        for _ in range(rounds):
            norm = float(v.norm())
            if not norm > 0:
                return value
            v = self.product(v / norm)
            value = float(v.norm())
        return value

    def _accumulated(self, flat: Tensor | None, rows: Tensor | None) -> Tensor:
        x, y = (self.x, self.y) if rows is None else take((self.x, self.y), rows)
        n = self.examples if rows is None else len(rows)
        total = torch.zeros(sum(self.sizes), dtype=torch.float64)
        with untouched(self.model), torch.enable_grad():
            leaves = {name: t.detach().requires_grad_() for layer in self.held for name, t in layer.items()}
            for start in range(0, n, self.chunk):
                part = take((x, y), slice(start, min(start + self.chunk, n)))
                loss = self.losses.at(leaves, *part).sum() / n
                wanted = list(leaves.values())
                found = torch.autograd.grad(
                    loss, wanted, create_graph=flat is not None, materialize_grads=True
                )
                if flat is not None:
                    found = _again(found, wanted, flat)
                total += torch.cat([piece.detach().flatten().double().cpu() for piece in found])
        if not total.isfinite().all():
            raise PlanError(
                "measure.hessian-gradient-proxy",
                "the Hessian or gradient of the proxy loss is not finite",
                "use proxy data and weights for which the loss can be differentiated twice",
            )
        return total


def _again(first: Sequence[Tensor], wanted: Sequence[Tensor], flat: Tensor) -> tuple[Tensor, ...]:
    pieces = flat.split([t.numel() for t in wanted])
    dot = sum(
        ((g * v.to(g).view_as(g)).sum() for g, v in zip(first, pieces, strict=True)),
        start=torch.zeros((), dtype=first[0].dtype, device=first[0].device),
    )
    if not dot.requires_grad:  # the gradient is constant: no curvature
        return tuple(torch.zeros_like(t) for t in wanted)
    return torch.autograd.grad(dot, wanted, materialize_grads=True)


def hessian_trace(
    model: nn.Module,
    losses_of: LossesOf,
    x: Any,
    y: Any,
    stack: LayerStack,
    *,
    draws: int = 32,
    seed: int = 0,
    chunk: int = 256,
) -> tuple[float, ...]:
    """tr H_ll of every layer by Hutchinson's estimate, E[v_l·(Hv)_l] over signs v: one product serves all layers."""
    hessian = Hessian(model, losses_of, x, y, stack, chunk=chunk)
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(len(stack), dtype=torch.float64)
    for _ in range(draws):
        v = torch.randint(0, 2, (sum(hessian.sizes),), generator=generator).double() * 2 - 1
        pieces = zip(hessian.split(v), hessian.split(hessian.product(v)), strict=True)
        total += torch.stack([torch.dot(a, b) for a, b in pieces])
    return tuple((total / draws).tolist())
