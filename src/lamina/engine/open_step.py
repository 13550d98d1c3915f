"""A step that is being taken: its noise and its sums, until both are released together."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import Tensor

from lamina.engine.noise import NoiseSource
from lamina.errors import NoiseError
from lamina.plan.step import StepPlan


class OpenStep:
    """The running sum of a step. Nothing of it leaves before `release`.

    Unhardened, the sums *start* as noise S/B·z and clipped gradients are added times 1/B: no pass
    over the parameters is spent on zeroing, scaling or adding. Hardened, the exact sum is noised and
    rounded at the end, in float64.
    """

    def __init__(
        self,
        plan: StepPlan,
        noise: NoiseSource,
        tensors: Mapping[str, Tensor],
        layer_of: Mapping[str, int],
        step: int,
    ) -> None:
        self.plan, self.noise, self.step, self.process = plan, noise, step, os.getpid()
        self.std = [plan.noise[layer_of[name]] for name in tensors]
        if noise.hardened:
            self.sums, self.scale = zeros(tensors), 1.0
        else:
            self.sums = {
                name: torch.empty_like(p, dtype=_wide(p.dtype), memory_format=torch.contiguous_format)
                for name, p in tensors.items()
            }
            self.scale = 1.0 / plan.batch
            noise.fill_many_(list(self.sums.values()), [s * self.scale for s in self.std], step=step)

    def release(self) -> dict[str, Tensor]:
        """(clipped sum + noise) / B."""
        if os.getpid() != self.process:
            raise NoiseError(
                "a step that was opened in a parent process is released in its child: both would use one noise",
                "fork between steps, not within one",
            )
        if self.noise.hardened:
            sums = list(self.sums.values())
            self.noise.add_many_(sums, self.std, step=self.step)
            for total in sums:
                total.div_(self.plan.batch)
        return self.sums


def zeros(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(p, dtype=_wide(p.dtype), memory_format=torch.contiguous_format)
        for name, p in tensors.items()
    }


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
