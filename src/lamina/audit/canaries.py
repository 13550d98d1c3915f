"""Canaries: contributions made to move a step as far as they can, by named changes, at random or by gradient ascent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lamina.audit.target import AuditTarget
from lamina.engine.batch import Batch, take_rows
from lamina.engine.slices import zero_outside_slices
from lamina.plan.step_plan import Clipping, StepPlan

RowChange = Callable[[Tensor, Tensor], Tensor]  # (its rows, another contribution's rows) → new rows

_REAL_CHANGES: dict[str, RowChange] = {
    "large": lambda t, _: t * 1e4,
    "huge": lambda t, _: t * 1e17,
    "small": lambda t, _: t * 1e-6,
    "minute": lambda t, _: t * 1e-20,
    "zero": lambda t, _: torch.zeros_like(t),
    "opposite": lambda t, _: -t,
    "one hot": lambda t, _: _one_hot(t) * 1e4,
    "constant": lambda t, _: torch.full_like(t, 1e3),
    "like another": lambda t, o: _repeat_rows(o, t),
    "against another": lambda t, o: -_repeat_rows(o, t),
    "cancelling": lambda t, _: _alternating(t) * 1e4,
    "mixed sizes": lambda t, _: t * torch.logspace(-12, 12, t.numel(), dtype=t.dtype).reshape(t.shape),
    "not a number": lambda t, _: torch.full_like(t, math.nan),
    "one infinity": lambda t, _: torch.where(_one_hot(t) > 0, math.inf, t),
    "overflowing": lambda t, _: torch.full_like(t, torch.finfo(t.dtype).max),
}
_INTEGER_CHANGES: dict[str, RowChange] = {
    "like another": lambda t, o: _repeat_rows(o, t),
    "constant": lambda t, _: torch.full_like(t, int(t.flatten()[0])) if t.numel() else t,
    "reversed": lambda t, _: t.flip(-1),
}


def named_canaries(batch: Batch, unit: int) -> Iterator[tuple[str, Batch]]:
    """The batch with contribution `unit` changed, one named way after another, the unchanged one first.

    Real numbers are made large, small, aligned with another contribution, cancelling, not finite …;
    whole numbers (ids, labels) only take values that the batch holds.
    """
    yield "as given", batch
    for name in (*_REAL_CHANGES, *(n for n in _INTEGER_CHANGES if n not in _REAL_CHANGES)):
        for side in ("x", "y"):
            changed = _named_change(batch, unit, side, name)
            if changed is not None:
                yield f"{side} {name}", changed
    for name in ("large", "opposite", "huge"):
        both = _named_change(batch, unit, "x", name)
        both = both and _named_change(both, unit, "y", name)
        if both is not None:
            yield f"x and y {name}", both


def random_canaries(batch: Batch, unit: int, *, count: int, seed: int = 0) -> Iterator[tuple[str, Batch]]:
    """Normal values of random size between 1e-6 and 1e6 in place of every real number of the contribution."""
    source = torch.Generator().manual_seed(seed)

    def redraw(t: Tensor, _: Tensor) -> Tensor:
        size: float = 10.0 ** (12 * torch.rand((), generator=source).item() - 6)
        return torch.randn(t.shape, generator=source, dtype=t.dtype).mul_(size)

    for i in range(count):
        changed = change_rows(batch, unit, "x", redraw, None)
        yield (f"random {seed}.{i}", (changed and change_rows(changed, unit, "y", redraw, None)) or changed or batch)


def _named_change(batch: Batch, unit: int, side: str, name: str) -> Batch | None:
    return change_rows(batch, unit, side, _REAL_CHANGES.get(name), _INTEGER_CHANGES.get(name))


def change_rows(batch: Batch, unit: int, side: str, real: RowChange | None, whole: RowChange | None) -> Batch | None:
    """Change the contribution's rows in x or y; None if that changes nothing."""
    owner = cast(Tensor, batch.unit)
    mine, rest = owner == unit, (owner != unit).nonzero().flatten()
    touched = False

    def change(t: Any) -> Any:
        nonlocal touched
        rule = None if not isinstance(t, Tensor) else real if t.is_floating_point() else whole
        if rule is None or t.dtype == torch.bool:
            return t
        rows = t[mine]
        new = t.clone()
        new[mine] = rule(rows, t[rest] if len(rest) else rows)
        touched = touched or not torch.equal(new, t)
        return new

    tree = pytree.tree_map(change, batch.x if side == "x" else batch.y)
    if not touched:
        return None
    return replace(batch, x=tree) if side == "x" else replace(batch, y=tree)


def _one_hot(t: Tensor) -> Tensor:
    flat = torch.zeros_like(t).reshape(-1)
    if flat.numel():
        flat[flat.numel() // 2] = 1
    return flat.view(t.shape)


def _alternating(t: Tensor) -> Tensor:
    """One value, its sign changing along the second axis: gradients that nearly cancel over positions."""
    if t.dim() < 2:
        return t
    sign = torch.ones(t.shape[1], dtype=t.dtype)
    sign[1::2] = -1
    return t[:, :1].expand_as(t) * sign.view(1, -1, *[1] * (t.dim() - 2))


def _repeat_rows(other: Tensor, t: Tensor) -> Tensor:
    """As many rows of another contribution as this one has."""
    return other[torch.arange(len(t)) % len(other)]


def ascent_canary(subject: AuditTarget, batch: Batch, unit: int, *, steps: int = 40, rate: float = 0.1) -> Batch:
    """The batch with the contribution's real numbers changed until its unclipped gradient meets its bounds.

    Climbs Σ_l min(0, log(‖g_l‖ / 2C_l)) in the box form, log ‖(g_l/S_l)_l‖ in the joint form, by steps along
    the slope in the contribution's rows of x, each `rate` of their present size. It needs second derivatives,
    and no stepper may be attached; a contribution without real numbers is returned as it is.
    """
    owner, weight = cast(Tensor, batch.unit), cast(Tensor, batch.weight)
    mine = owner == unit
    share = (weight[mine] / weight[mine].sum()).double()
    x, y = take_rows((batch.x, batch.y), mine)
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
        goal = _ascent_goal(subject.plan, int(cast(Tensor, batch.cls)[unit]), dict(zip(params, grads, strict=True)))
        if not (goal.requires_grad and math.isfinite(goal.item()) and goal.item() < 0):
            break
        _ascent_step(goal, [leaves[i] for i in free], rate)
    torch.set_rng_state(state)
    found = pytree.tree_unflatten([t.detach() if isinstance(t, Tensor) else t for t in leaves], spec)
    changed = pytree.tree_map(lambda t, new: t.index_put((mine,), new) if isinstance(t, Tensor) else t, batch.x, found)
    return replace(batch, x=changed)


def _ascent_step(goal: Tensor, values: list[Tensor], rate: float) -> None:
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


def _ascent_goal(plan: StepPlan, k: int, grads: dict[str, Tensor | None]) -> Tensor:
    """Below 0 while some bound is not pressed against by a factor of two."""
    short, squares = [], []
    for layer, c, s in zip(plan.layers, plan.clip[k], plan.noise, strict=True):
        parts = [
            zero_outside_slices(plan, k, n, g.double()).square().sum()
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
