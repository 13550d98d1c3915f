"""`route`: one step as a function of gradients that are given per contribution. The engine is tested against it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lamina.engine.distributed import ALONE
from lamina.engine.noise import noise_mechanism
from lamina.engine.noise.grid import row_taxicab_sq
from lamina.engine.noise.source import NoiseSource
from lamina.engine.slices import trained_tensors, unreached_ranges, zero_outside_slices
from lamina.errors import EngineError
from lamina.plan.rules import NoiseKind
from lamina.plan.step_plan import Clipping, StepPlan


def route(
    per_sample_grads: Mapping[str, Tensor], classes: Tensor, plan: StepPlan, *, noise: NoiseSource | None,
    step: int = 0, scale: Tensor | None = None, ceiling: Tensor | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Mask, clip, sum and perturb gradients that are given per contribution.

    `per_sample_grads[name]` is (P, *shape) for every tensor of which some class may move something, `classes` (P,)
    holds class indices, `scale` and `ceiling` (P,) are those of `Batch`. With a noise source the result is
    (clipped sum + noise) / B, as `Engine.backward` writes it. With `noise=None` it is the clipped sum itself, as
    `Engine.clipped_sums` returns it: not private. Plain float64 throughout, one line per rule, on purpose without the
    code that `Engine` clips with: it is the reference that tests hold `Engine` to.
    """
    layer_of = {name: i for i, layer in enumerate(plan.layers) for name in layer.parameters}
    wanted = set(trained_tensors(plan))
    if set(per_sample_grads) != wanted:
        problem = f"per_sample_grads and plan disagree about {sorted(set(per_sample_grads) ^ wanted)[:5]}"
        raise EngineError("engine.route-wrong-tensors", problem, "give exactly the tensors that the plan trains")
    classes = torch.as_tensor(classes)
    bound = torch.tensor(plan.clip, dtype=torch.float64).view(len(plan.classes), len(plan.layers))[classes]  # (P, L)
    members = list(enumerate(classes.tolist()))
    limits = [[None if t is None else float(t[u]) for t in (scale, ceiling)] for u, _ in members]
    strict = torch.tensor([clip_norm_factor(plan, k, *limits[u]) for u, k in members], dtype=torch.float64)  # (P,)
    grads_of = {}
    for name, grads in per_sample_grads.items():
        if len(grads) != len(classes):
            problem = f"'{name}' has {len(grads)} gradients for {len(classes)} classes"
            remedy = "give one gradient and one class per contribution"
            raise EngineError("engine.gradients-wrong-length", problem, remedy)
        routed = [zero_outside_slices(plan, k, name, grads[u]) for u, k in members]
        grads_of[name] = torch.stack(routed) if routed else grads
    norm_sq = torch.zeros(bound.shape, dtype=torch.float64)
    for name, grads in grads_of.items():
        rows = grads.double().reshape(len(grads), grads.shape[1:].numel())
        taxicab = plan.noise_kind is NoiseKind.LAPLACE
        norm_sq[:, layer_of[name]] += row_taxicab_sq(rows) if taxicab else rows.square().sum(1)

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

    clipped = {}
    for name, grads in grads_of.items():
        weight = factor[:, layer_of[name]].view(-1, *[1] * (grads.dim() - 1))
        clipped[name] = torch.where(weight > 0, grads.double() * weight, 0.0)
    sums = {name: each.sum(0) for name, each in clipped.items()}
    if noise is None:
        return sums
    if plan.bands > 1:
        problem = f"the plan correlates its noise over {plan.bands} steps, and this is one step by itself"
        remedy = "use lamina.Engine, which keeps the noise of earlier steps"
        raise EngineError("engine.route-correlated", problem, remedy)
    opened = noise_mechanism(plan, sums, ALONE).open(plan, noise, step)
    opened.saw(classes)
    for name, grid in opened.grids.items():
        sums[name] = (clipped[name] / grid.unit).trunc().to(torch.int64).sum(0)
    released = opened.release(sums)
    for name, total in released.items():
        if (places := unreached_ranges(plan, name)) is not None:
            places.zero_(total)
    return released


def clip_norm_factor(plan: StepPlan, k: int, scale: float | None, ceiling: float | None) -> float:
    """min(1, scale, ceiling / the largest norm of the class): what its clip norms are multiplied by; 1 if public."""
    if plan.classes[k].public:
        return 1.0
    limits = [1.0 if scale is None else scale, 1.0]
    if ceiling is not None and plan.norm(k) > 0:
        limits.append(ceiling / plan.norm(k))
    return min(limits)
