"""Opacus' three modes on the same model, batch and optimiser, through Opacus' own objects.

What keeps the comparison fair: fixed batches of equal size and no data loader in anybody's step; noise is on and is
Opacus' default (fast, not secure); clipping is to a finite norm; ghost clipping goes through Opacus' own loss
wrapper, which makes its two backward passes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lamina.bench.workloads import Workload

CLIP = 1.0
NOISE = 1.0


def missing() -> str | None:
    """Why the peers cannot run here, or None."""
    if importlib.util.find_spec("opacus") is None:
        return "opacus is not installed (make bench, or pip install 'lamina[bench]')"
    return None


class _Criterion(nn.Module):
    """The workload's loss with the `reduction` attribute that Opacus' wrapper switches to "none" and back."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.losses = workload.losses
        self.reduction = "mean"

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        losses = self.losses(y, target)
        return losses.mean() if self.reduction == "mean" else losses


def hooks(workload: Workload) -> Callable[[], None]:
    """Per-sample gradients kept by hooks, flat clipping."""
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    model = GradSampleModule(workload.model(), strict=False)
    optimizer = DPOptimizer(
        _adamw(model),
        noise_multiplier=NOISE,
        max_grad_norm=CLIP,
        expected_batch_size=workload.batch,
    )
    return _loop(workload, model, optimizer)


def per_layer(workload: Workload) -> Callable[[], None]:
    """Per-sample gradients kept by hooks, one threshold for each tensor."""
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPPerLayerOptimizer

    model = GradSampleModule(workload.model(), strict=False)
    tensors = sum(1 for _ in model.parameters())
    optimizer = DPPerLayerOptimizer(
        _adamw(model),
        noise_multiplier=NOISE,
        max_grad_norm=[CLIP / tensors**0.5] * tensors,
        expected_batch_size=workload.batch,
    )
    return _loop(workload, model, optimizer)


def ghost(workload: Workload) -> Callable[[], None]:
    """Norms first, a second backward pass with clipped weights."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    model = GradSampleModuleFastGradientClipping(
        workload.model(), strict=False, max_grad_norm=CLIP, use_ghost_clipping=True
    )
    optimizer = DPOptimizerFastGradientClipping(
        _adamw(model),
        noise_multiplier=NOISE,
        max_grad_norm=CLIP,
        expected_batch_size=workload.batch,
    )
    criterion = DPLossFastGradientClipping(model, optimizer, _Criterion(workload))
    x, target = workload.example()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        criterion(model(x), target).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _loop(workload: Workload, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    criterion = _Criterion(workload)
    x, target = workload.example()

    def step() -> None:
        criterion(model(x), target).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


PEERS: dict[str, Callable[[Workload], Callable[[], None]]] = {
    "opacus_hooks": hooks,
    "opacus_per_layer": per_layer,
    "opacus_ghost": ghost,
}
