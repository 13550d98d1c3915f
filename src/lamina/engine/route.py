"""`route`: the step as a pure function of per-contribution gradients. The engine's reference."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lamina.engine.noise import NoiseSource
from lamina.engine.open_step import OpenStep
from lamina.errors import EngineError
from lamina.plan.step import Clipping, StepPlan


def route(
    per_sample_grads: Mapping[str, Tensor],
    classes: Tensor,
    plan: StepPlan,
    *,
    noise: NoiseSource | None,
    step: int = 0,
) -> dict[str, Tensor]:
    """Mask, clip, sum and perturb gradients that are given per contribution.

    `per_sample_grads[name]` is (P, *shape) for every tensor of a layer that some class reaches,
    `classes` (P,) holds class indices. With a noise source the result is (clipped sum + noise) / B,
    as `Engine.backward` writes it. With `noise=None` it is the clipped sum itself, as
    `Engine.clipped_sums` returns it: not private. Plain float64 throughout, one line per rule.
    """
    layer_of = {name: i for i, layer in enumerate(plan.layers) for name in layer.parameters}
    trained = [any(row[i] > 0 for row in plan.clip) for i in range(len(plan.layers))]
    wanted = {name for name, i in layer_of.items() if trained[i]}
    if set(per_sample_grads) != wanted:
        raise EngineError(
            f"per_sample_grads and plan disagree about {sorted(set(per_sample_grads) ^ wanted)[:5]}",
            "give exactly the tensors of the layers that the plan trains",
        )
    classes = torch.as_tensor(classes)
    bound = torch.tensor(plan.clip, dtype=torch.float64).view(len(plan.classes), len(plan.layers))[
        classes
    ]  # (P, L)
    norm_sq = torch.zeros(bound.shape, dtype=torch.float64)
    for name, grads in per_sample_grads.items():
        if len(grads) != len(classes):
            raise EngineError(
                f"'{name}' has {len(grads)} gradients for {len(classes)} classes", "give one per contribution"
            )
        norm_sq[:, layer_of[name]] += (
            grads.double().reshape(len(grads), grads.shape[1:].numel()).square().sum(1)
        )

    if plan.clipping is Clipping.BOX:
        factor = torch.where(norm_sq > 0, bound / norm_sq.sqrt(), torch.inf).clamp(max=1.0)
        factor = torch.where(torch.isfinite(norm_sq) & (bound > 0), factor, 0.0)
    else:
        spread = torch.tensor([s or 1.0 for s in plan.noise], dtype=torch.float64)
        whole = torch.where(bound > 0, norm_sq / spread**2, 0.0).sum(1)
        radius = torch.tensor([plan.joint(k) for k in range(len(plan.classes))], dtype=torch.float64)[classes]
        once = torch.where(whole > 0, radius / whole.sqrt(), torch.inf).clamp(max=1.0)
        factor = torch.where(torch.isfinite(whole).unsqueeze(1) & (bound > 0), once.unsqueeze(1), 0.0)

    sums = {}
    for name, grads in per_sample_grads.items():
        weight = factor[:, layer_of[name]].view(-1, *[1] * (grads.dim() - 1))
        sums[name] = torch.where(weight > 0, grads.double() * weight, 0.0).sum(0)
    if noise is None:
        return sums
    opened = OpenStep(plan, noise, sums, layer_of, step)
    for name, total in sums.items():
        opened.sums[name].add_(total, alpha=opened.scale)
    return opened.release()
