"""What the engine asks of noise: `NoiseMechanism`, with what steps share, and `StepNoise`, the noise of one step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from lamina.engine.distributed import Ranks
from lamina.engine.noise.grid import Grid
from lamina.engine.noise.source import NoiseSource
from lamina.plan.step_plan import StepPlan

COUNTS = "counts of the step"  # their name among the tensors of a step; no module has a parameter of such a name


class StepNoise(ABC):
    """The noise of one step. Nothing of the step leaves before `release`, or before `finish` on every rank.

    One process calls `release`. Several ranks call `share`, add up what it returns, and call `finish`; a rank may do so
    for some tensors before others.

    grids  by tensor, the grid of whole units that gradients are cut to and added up on; empty for sums of real numbers
    """

    grids: Mapping[str, Grid] = MappingProxyType({})

    def saw(self, classes: Tensor) -> None:  # noqa: B027  (most noise does not depend on who comes)
        """Contributions of these classes are added next."""

    @abstractmethod
    def release(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """(sum + noise) / B of every tensor; the sums are overwritten."""

    @abstractmethod
    def share(self, names: Sequence[str], totals: Sequence[Tensor]) -> list[Tensor]:
        """Sums of this rank with its share of the noise, as ranks add them up."""

    @abstractmethod
    def finish(self, names: Sequence[str], totals: Sequence[Tensor]) -> list[Tensor]:
        """(total) / B of totals, or parts of them, that hold the noise of all ranks: rounded once."""


class NoNoise(StepNoise):
    """Of sums that are not released: of probes, audits and parties."""

    def __init__(self, grids: Mapping[str, Grid] = MappingProxyType({})) -> None:
        self.grids = grids

    def release(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        raise AssertionError("sums without noise are not released")

    share = finish = release  # type: ignore[assignment]


NO_NOISE = NoNoise()


class NoiseMechanism(ABC):
    """The noise of a plan's steps, and what one step keeps for the next."""

    def __init__(self, plan: StepPlan, tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
        self.plan, self.tensors, self.ranks = plan, tensors, ranks
        self.layer_of = {name: i for i, layer in enumerate(plan.layers) for name in layer.parameters}

    members = b""  # a digest of whose turns it is used with: somebody with another turn would come too early

    @abstractmethod
    def open(self, applied: StepPlan, source: NoiseSource, step: int) -> StepNoise:
        """The noise of a step with the C and S of `applied`, drawn from `source`."""

    def clear(self) -> None:  # noqa: B027  (most noise keeps nothing)
        """Begin anew: the next step follows from none before."""

    def to_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """For a checkpoint: secret tensors, and plain values that say whose they are."""
        return {}, {}

    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any] | None) -> bool:
        """Restore what `to_state` gave, bit for bit; False, and begun anew, if it is of another plan or other members."""
        return True


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the sum of a tensor: float32 or better."""
    return torch.float64 if dtype == torch.float64 else torch.float32
