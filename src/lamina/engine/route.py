"""`route`: the step as a pure function of per-contribution gradients. The engine's reference."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lamina.engine.masks import closed, trained
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
    scale: Tensor | None = None,
    ceiling: Tensor | None = None,
) -> dict[str, Tensor]:
    """Mask, clip, sum and perturb gradients that are given per contribution.

    `per_sample_grads[name]` is (P, *shape) for every tensor of which some class may move something,
    `classes` (P,) holds class indices, `scale` and `ceiling` (P,) are those of `Batch`. With a noise
    source the result is (clipped sum + noise) / B, as `Engine.backward` writes it. With `noise=None` it
    is the clipped sum itself, as `Engine.clipped_sums` returns it: not private. Plain float64 throughout,
    one line per rule.
    """
    layer_of = {name: i for i, layer in enumerate(plan.layers) for name in layer.parameters}
    wanted = set(trained(plan))
    if set(per_sample_grads) != wanted:
        raise EngineError(
            "engine.per-sample-grads",
            f"per_sample_grads and plan disagree about {sorted(set(per_sample_grads) ^ wanted)[:5]}",
            "give exactly the tensors that the plan trains",
        )
    classes = torch.as_tensor(classes)
    bound = torch.tensor(plan.clip, dtype=torch.float64).view(len(plan.classes), len(plan.layers))[
        classes
    ]  # (P, L)
    strict = _stricter(plan, classes, scale, ceiling)  # (P,)
    grads_of = {name: _masked(grads, name, classes, plan) for name, grads in per_sample_grads.items()}
    norm_sq = torch.zeros(bound.shape, dtype=torch.float64)
    for name, grads in grads_of.items():
        norm_sq[:, layer_of[name]] += (
            grads.double().reshape(len(grads), grads.shape[1:].numel()).square().sum(1)
        )

    if plan.clipping is Clipping.BOX:
        bound = torch.where(bound > 0, bound * strict.unsqueeze(1), 0.0)
        factor = torch.where(norm_sq > 0, bound / norm_sq.sqrt(), torch.inf).clamp(max=1.0)
        factor = torch.where(torch.isfinite(norm_sq) & (bound > 0), factor, 0.0)
    else:
        spread = torch.tensor([s or 1.0 for s in plan.noise], dtype=torch.float64)
        whole = torch.where(bound > 0, norm_sq / spread**2, 0.0).sum(1)
        radius = torch.tensor([plan.joint(k) for k in range(len(plan.classes))], dtype=torch.float64)[classes]
        radius = radius * strict
        once = torch.where(whole > 0, radius / whole.sqrt(), torch.inf).clamp(max=1.0)
        factor = torch.where(torch.isfinite(whole).unsqueeze(1) & (bound > 0), once.unsqueeze(1), 0.0)

    sums = {}
    for name, grads in grads_of.items():
        weight = factor[:, layer_of[name]].view(-1, *[1] * (grads.dim() - 1))
        sums[name] = torch.where(weight > 0, grads.double() * weight, 0.0).sum(0)
    if noise is None:
        return sums
    opened = OpenStep(plan, noise, sums, layer_of, step)
    opened.bring(classes)
    for name, total in sums.items():
        opened.sums[name].add_(total, alpha=opened.scale)
    released = opened.release()
    for name, total in released.items():
        if (places := closed(plan, name)) is not None:
            places.zero_(total)
    return released


def _masked(grads: Tensor, name: str, classes: Tensor, plan: StepPlan) -> Tensor:
    """The gradients with 0 where a contribution's class may not move the tensor."""
    if len(grads) != len(classes):
        raise EngineError(
            "engine.gradients-classes",
            f"'{name}' has {len(grads)} gradients for {len(classes)} classes",
            "give one per contribution",
        )
    may = torch.ones(grads.shape, dtype=torch.bool)
    for u, k in enumerate(classes.tolist()):
        part = plan.slice(k, name)
        if part is not None:
            may[u] = False
            for first, stop in part.ranges if grads.dim() > 1 else ():
                may[u].narrow(part.axis, first, stop - first).fill_(True)
    return torch.where(may, grads, 0.0)


def _stricter(plan: StepPlan, classes: Tensor, scale: Tensor | None, ceiling: Tensor | None) -> Tensor:
    """min(1, scale, ceiling / the largest norm of the class), by contribution; 1 in a public class."""
    factor = torch.ones(len(classes), dtype=torch.float64)
    for u, k in enumerate(classes.tolist()):
        if not plan.classes[k].public:
            factor[u] = min(
                1.0,
                1.0 if scale is None else float(scale[u]),
                math.inf if ceiling is None or plan.norm(k) == 0 else float(ceiling[u]) / plan.norm(k),
            )
    return factor
