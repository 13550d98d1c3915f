"""Canaries: contributions made to move a step as far as they can."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lamina.engine import Batch

Change = Callable[[Tensor, Tensor], Tensor]  # (its rows, another contribution's rows) → new rows

_FLOATS: dict[str, Change] = {
    "large": lambda t, _: t * 1e4,
    "huge": lambda t, _: t * 1e17,
    "small": lambda t, _: t * 1e-6,
    "minute": lambda t, _: t * 1e-20,
    "zero": lambda t, _: torch.zeros_like(t),
    "opposite": lambda t, _: -t,
    "one hot": lambda t, _: _one_hot(t) * 1e4,
    "constant": lambda t, _: torch.full_like(t, 1e3),
    "like another": lambda t, o: _fit(o, t),
    "against another": lambda t, o: -_fit(o, t),
    "cancelling": lambda t, _: _alternating(t) * 1e4,
    "mixed sizes": lambda t, _: t * torch.logspace(-12, 12, t.numel(), dtype=t.dtype).reshape(t.shape),
    "not a number": lambda t, _: torch.full_like(t, math.nan),
    "one infinity": lambda t, _: torch.where(_one_hot(t) > 0, math.inf, t),
    "overflowing": lambda t, _: torch.full_like(t, torch.finfo(t.dtype).max),
}
_WHOLE: dict[str, Change] = {
    "like another": lambda t, o: _fit(o, t),
    "constant": lambda t, _: torch.full_like(t, int(t.flatten()[0])) if t.numel() else t,
    "reversed": lambda t, _: t.flip(-1),
}


def variants(batch: Batch, unit: int) -> Iterator[tuple[str, Batch]]:
    """The batch with contribution `unit` changed, one named way after another, the unchanged one first.

    Real numbers are made large, small, aligned with another contribution, cancelling, not finite …;
    whole numbers (ids, labels) only take values that the batch holds.
    """
    yield "as given", batch
    for name in (*_FLOATS, *(n for n in _WHOLE if n not in _FLOATS)):
        for side in ("x", "y"):
            changed = _changed(batch, unit, side, name)
            if changed is not None:
                yield f"{side} {name}", changed
    for name in ("large", "opposite", "huge"):
        both = _changed(batch, unit, "x", name)
        both = both and _changed(both, unit, "y", name)
        if both is not None:
            yield f"x and y {name}", both


def random_canaries(batch: Batch, unit: int, *, count: int, seed: int = 0) -> Iterator[tuple[str, Batch]]:
    """Normal values of random size between 1e-6 and 1e6 in place of every real number of the contribution."""
    source = torch.Generator().manual_seed(seed)

    def redraw(t: Tensor, _: Tensor) -> Tensor:
        size: float = 10.0 ** (12 * torch.rand((), generator=source).item() - 6)
        return torch.randn(t.shape, generator=source, dtype=t.dtype).mul_(size)

    for i in range(count):
        changed = apply(batch, unit, "x", redraw, None)
        yield f"random {seed}.{i}", (changed and apply(changed, unit, "y", redraw, None)) or changed or batch


def _changed(batch: Batch, unit: int, side: str, name: str) -> Batch | None:
    return apply(batch, unit, side, _FLOATS.get(name), _WHOLE.get(name))


def apply(batch: Batch, unit: int, side: str, real: Change | None, whole: Change | None) -> Batch | None:
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


def _fit(other: Tensor, t: Tensor) -> Tensor:
    """As many rows of another contribution as this one has."""
    return other[torch.arange(len(t)) % len(other)]
