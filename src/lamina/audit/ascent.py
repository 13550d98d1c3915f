"""Gradient ascent: a canary that presses against every threshold of its class at once."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lamina.audit.regions import within
from lamina.audit.subject import Subject
from lamina.engine import Batch
from lamina.plan.step import Clipping, StepPlan


def ascend(subject: Subject, batch: Batch, unit: int, *, steps: int = 40, rate: float = 0.1) -> Batch:
    """The batch with the contribution's real numbers changed until its unclipped gradient meets its bounds.

    Climbs Σ_l min(0, log(‖g_l‖ / 2C_l)) in the box form, log ‖(g_l/S_l)_l‖ in the joint form, by steps along
    the slope in the contribution's rows of x, each `rate` of their present size. It needs second derivatives,
    and no stepper may be attached; a contribution without real numbers is returned as it is.
    """
    owner, weight = cast(Tensor, batch.unit), cast(Tensor, batch.weight)
    mine = owner == unit
    share = (weight[mine] / weight[mine].sum()).double()
    x, y = pytree.tree_map(lambda t: t[mine] if isinstance(t, Tensor) else t, (batch.x, batch.y))
    leaves, spec = pytree.tree_flatten(x)
    free = [i for i, t in enumerate(leaves) if isinstance(t, Tensor) and t.is_floating_point()]
    for i in free:
        leaves[i] = leaves[i].detach().clone().requires_grad_()
    params = {n: p for n, p in subject.model.named_parameters() if p.requires_grad}
    state = torch.get_rng_state()
    for _ in range(steps if free else 0):
        torch.set_rng_state(state)
        losses = subject.losses_of(pytree.tree_unflatten(leaves, spec), y)
        whole = (losses * share).sum()
        grads = torch.autograd.grad(whole, list(params.values()), create_graph=True, allow_unused=True)
        goal = _goal(subject.plan, int(cast(Tensor, batch.cls)[unit]), dict(zip(params, grads, strict=True)))
        if not (goal.requires_grad and math.isfinite(goal.item()) and goal.item() < 0):
            break
        _climb(goal, [leaves[i] for i in free], rate)
    torch.set_rng_state(state)
    found = pytree.tree_unflatten([t.detach() if isinstance(t, Tensor) else t for t in leaves], spec)
    changed = pytree.tree_map(
        lambda t, new: t.index_put((mine,), new) if isinstance(t, Tensor) else t, batch.x, found
    )
    return replace(batch, x=changed)


def _climb(goal: Tensor, values: list[Tensor], rate: float) -> None:
    slopes = torch.autograd.grad(goal, values, allow_unused=True)
    with torch.no_grad():
        for value, slope in zip(values, slopes, strict=True):
            if slope is None:
                continue
            slope = slope.nan_to_num(0.0, 0.0, 0.0)
            length = float(slope.norm())
            size = float(value.abs().max()) or 1.0
            if length > 0:
                value += rate * size * math.sqrt(value.numel()) / length * slope


def _goal(plan: StepPlan, k: int, grads: dict[str, Tensor | None]) -> Tensor:
    """Below 0 while some bound is not pressed against by a factor of two."""
    short, squares = [], []
    for layer, c, s in zip(plan.layers, plan.clip[k], plan.noise, strict=True):
        parts = [
            within(plan, k, n, g.double()).square().sum()
            for n in layer.parameters
            if (g := grads.get(n)) is not None
        ]
        if c > 0 and parts:
            norm_sq = torch.stack(parts).sum()
            short.append((0.5 * torch.log(norm_sq + 1e-60) - torch.log(torch.tensor(2 * c))).clamp(max=0.0))
            squares.append(norm_sq / (s or 1.0) ** 2)
    if not short:
        return torch.zeros(())
    if plan.clipping is Clipping.BOX:
        return torch.stack(short).sum()
    return 0.5 * torch.log(torch.stack(squares).sum() + 1e-60) - torch.log(torch.tensor(2 * plan.joint(k)))
