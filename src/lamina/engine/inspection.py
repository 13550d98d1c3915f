"""What a step does to single contributions, without noise: for probes, audits and tests. Nothing here is private."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lamina.engine.batch import Batch
from lamina.engine.execute.clipping import Clipper
from lamina.engine.execute.collectors import BoxCollector
from lamina.engine.execute.eager import EagerExecutor
from lamina.engine.execute.sums import Sums
from lamina.engine.guards.checked_batch import CheckedBatch
from lamina.engine.noise.grid import Grid
from lamina.engine.noise.mechanism import NO_NOISE, NoNoise
from lamina.engine.slices import NO_MASKS

Measured = dict[str, Tensor]  # the loss of one contribution, and its gradient by name of the tensor


def clipped_sums(executor: EagerExecutor, clipper: Clipper, losses: Tensor | None, batch: Batch) -> dict[str, Tensor]:
    """The routed, clipped sum without noise and without division, of this rank."""
    return sums_of_part(executor, clipper, executor.examine(losses, batch))


def sums_of_part(
    executor: EagerExecutor, clipper: Clipper, part: CheckedBatch | None, grids: Mapping[str, Grid] | None = None
) -> dict[str, Tensor]:
    """The same of an examined part; in whole units of grids, if they are given."""
    sums = Sums(executor.tensors, NO_NOISE if grids is None else NoNoise(grids))
    if part is not None:
        executor.add(part, clipper, sums)
    clipper.settle(sums)
    return sums.whole()


def gradient_of(
    executor: EagerExecutor, clipper: Clipper, losses: Tensor, batch: Batch, unit: int, *, routed: bool
) -> dict[str, Tensor]:
    """The unclipped gradient of one contribution. `routed`: 0 where its class may not move a tensor or a part of it."""
    part = executor.examine(losses, batch)
    if part is None:
        return Sums(executor.tensors).whole()
    bound = torch.where(clipper.clip[part.classes[unit]] > 0, torch.inf, 0.0) if routed else torch.inf
    return _gradient_of(executor, part, unit, bound, routed=routed)


def _gradient_of(
    executor: EagerExecutor, part: CheckedBatch, unit: int, bound: Tensor | float, *, routed: bool,
    retain_graph: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    sums = Sums(executor.tensors)
    bounds = torch.zeros(part.layout.units, len(executor.trained), dtype=torch.float64)
    bounds[unit] = bound
    masks = executor.masks(part) if routed else NO_MASKS
    collector = BoxCollector(part, executor.trained, sums, masks, bounds=bounds)
    executor.collect(part, collector, retain_graph=retain_graph)
    return sums.whole()


def measure(executor: EagerExecutor, losses: Tensor | None, batch: Batch, units: Sequence[int]) -> list[Measured]:
    """Loss and unclipped gradient of some contributions."""
    part, found = executor.examine(losses, batch), []
    assert part is not None
    for unit in units:
        mine = part.losses.detach().cpu()[part.layout.owner == unit].double()
        gradient = _gradient_of(executor, part, unit, torch.inf, routed=False, retain_graph=True)
        found.append({"loss": mine.mean(), **{name: t.cpu() for name, t in gradient.items()}})
    return found


def gradient_norms(executor: EagerExecutor, clipper: Clipper, losses: Tensor, batch: Batch) -> Tensor:
    """(P,) the norm of each contribution's whole gradient before clipping. The losses may be used again."""
    part = executor.examine(losses, batch)
    assert part is not None
    return executor.norms(part, clipper, retain_graph=True).square().sum(1).sqrt()
