"""Noise on a grid of integers: discrete Gaussian, Skellam and Laplace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from lamina.engine.distributed import ALONE, Ranks
from lamina.engine.noise.grid import layer_grids
from lamina.engine.noise.mechanism import NoiseMechanism, StepNoise, sum_dtype
from lamina.engine.noise.source import NoiseSource
from lamina.plan.step_plan import StepPlan


class IntegerNoise(NoiseMechanism):
    """Whole numbers are added to clipped sums that are whole numbers of each layer's own unit."""

    def open(self, applied: StepPlan, source: NoiseSource, step: int) -> StepNoise:
        return IntegerStep(applied, source, step, self.tensors, self.layer_of, self.ranks)


class IntegerStep(StepNoise):
    """Noise of rank 0 alone: shares of a discrete Gaussian do not add up to one."""

    def __init__(
        self, plan: StepPlan, source: NoiseSource, step: int, tensors: Mapping[str, Tensor],
        layer_of: Mapping[str, int], ranks: Ranks = ALONE,
    ) -> None:  # fmt: skip
        self.plan, self.source, self.step, self.tensors, self.ranks = plan, source, step, tensors, ranks
        grids = layer_grids(plan)
        self.grids = {name: grids[layer_of[name]] for name in tensors}

    def release(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        names = list(self.tensors)
        found = self.finish(names, self.share(names, [sums[name] for name in names]))
        return dict(zip(names, found, strict=True))

    def share(self, names: Sequence[str], totals: Sequence[Tensor]) -> list[Tensor]:
        assert list(names) == list(self.tensors)  # draws are numbered by their place in the call
        if self.ranks.first:
            bits = [self.grids[name].bits for name in names]
            self.source.add_integers_(totals, bits, step=self.step, kind=self.plan.noise_kind)
        return list(totals)

    def finish(self, names: Sequence[str], totals: Sequence[Tensor]) -> list[Tensor]:
        """(total) / B: whole numbers until here."""
        made = [t.double() * (self.grids[n].unit / self.plan.batch) for n, t in zip(names, totals, strict=True)]
        return [t.to(sum_dtype(self.tensors[n].dtype)) for n, t in zip(names, made, strict=True)]
