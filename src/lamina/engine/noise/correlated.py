"""Gaussian noise that is correlated over steps by the banded strategy of plan/correlation.py."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lamina.engine.noise.gaussian import GatheredNoise
from lamina.engine.noise.mechanism import NoiseMechanism, StepNoise
from lamina.engine.noise.source import NoiseSource
from lamina.plan.correlation import band_coefficients
from lamina.plan.step_plan import StepPlan


class CorrelatedNoise(NoiseMechanism):
    """W_t = (Z_t − Σ_{j=1}^{b-1} c_j W_{t-j}) / c_0, so that C·W = Z; what lies before the first step is 0.

    It holds the W of b-1 steps for every tensor. Whoever knows it can take the noise away: it is in training
    checkpoints and nowhere else. An empty window begins a new strategy, whatever was released before: C then has one
    more block on its diagonal, and no column is longer.
    """

    def __init__(self, plan: StepPlan, *args: Any) -> None:
        super().__init__(plan, *args)
        self._coefficients = band_coefficients(plan.bands)
        self._past: deque[list[Tensor]] = deque()  # newest first

    def __len__(self) -> int:
        """How many steps it remembers."""
        return len(self._past)

    def open(self, applied: StepPlan, source: NoiseSource, step: int) -> StepNoise:
        noise = GatheredNoise(applied, source, step, self.tensors, self.layer_of)
        stds = [noise.std[name] for name in noise.names]
        source.add_many_(noise.gathered, stds, step=step, rounded=False)
        self.correlate_(noise.gathered)
        return noise

    @torch.no_grad()
    def correlate_(self, fresh: list[Tensor]) -> None:
        """Turn Z of the next step, one tensor of float64 for each name, into W, and remember it."""
        if not fresh[0].is_cpu:  # a checkpoint comes to the CPU
            self._past = deque([w.to(z.device) for w, z in zip(past, fresh, strict=True)] for past in self._past)
        first, *rest = self._coefficients
        for c, noises in zip(rest, self._past, strict=False):  # always in this order: a resumed run adds up the same
            torch._foreach_add_(fresh, noises, alpha=-c)
        torch._foreach_mul_(fresh, 1.0 / first)
        full = len(self._past) == self.plan.bands - 1
        kept = self._past.pop() if full else [torch.empty_like(each) for each in fresh]
        torch._foreach_copy_(kept, fresh)
        self._past.appendleft(kept)

    def clear(self) -> None:
        self._past.clear()

    def to_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {
            f"{age}.{name}": noise
            for age, noises in enumerate(self._past)
            for name, noise in zip(self.tensors, noises, strict=True)
        }, {"plan": self.plan.digest(), "members": self.members}

    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any] | None) -> bool:
        self.clear()
        if not state or (state["plan"], state["members"]) != (self.plan.digest(), self.members):
            return False
        first = next(iter(self.tensors))
        while f"{len(self)}.{first}" in tensors:
            age = len(self)
            self._past.append([tensors[f"{age}.{name}"].clone() for name in self.tensors])
        return True
