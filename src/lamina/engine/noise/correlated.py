"""`NoiseWindow`: the noise of the last steps, from which correlated noise goes on (plan/correlation.py)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lamina.plan.correlation import band_coefficients
from lamina.plan.step_plan import StepPlan

_PREFIX = "noise"


class NoiseWindow:
    """W_t = (Z_t − Σ_{j=1}^{b-1} c_j W_{t-j}) / c_0, so that C·W = Z; what lies before the first step is 0.

    It holds the W of b-1 steps for every tensor. Whoever knows it can take the noise away: it is in training
    checkpoints and nowhere else. An empty one begins a new strategy, whatever was released before: C then has one more
    block on its diagonal, and no column is longer.
    """

    def __init__(self, plan: StepPlan, names: Sequence[str]) -> None:
        self.bands, self._plan, self._names = plan.bands, plan.digest(), list(names)
        self.members = b""  # a digest of whose turns it is used with: somebody with another turn would come too early
        self._coefficients = band_coefficients(plan.bands)
        self._past: deque[list[Tensor]] = deque()  # newest first

    def __len__(self) -> int:
        """How many steps it remembers."""
        return len(self._past)

    @torch.no_grad()
    def correlate_(self, fresh: list[Tensor]) -> None:
        """Turn Z of the next step, one tensor of float64 for each name, into W, and remember it."""
        if not fresh[0].is_cpu:  # a checkpoint comes to the CPU
            self._past = deque([w.to(z.device) for w, z in zip(past, fresh, strict=True)] for past in self._past)
        first, *rest = self._coefficients
        for c, noises in zip(rest, self._past, strict=False):  # always in this order: a resumed run adds up the same
            torch._foreach_add_(fresh, noises, alpha=-c)
        torch._foreach_mul_(fresh, 1.0 / first)
        kept = self._past.pop() if len(self._past) == self.bands - 1 else [torch.empty_like(each) for each in fresh]
        torch._foreach_copy_(kept, fresh)
        self._past.appendleft(kept)

    def clear(self) -> None:
        """Begin anew: the next steps are not correlated with those before."""
        self._past.clear()

    def to_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """For a checkpoint: tensors, and whose they are."""
        return {
            f"{_PREFIX}.{age}.{name}": noise
            for age, noises in enumerate(self._past)
            for name, noise in zip(self._names, noises, strict=True)
        }, {"plan": self._plan, "members": self.members}

    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any] | None) -> bool:
        """Restore what `to_state` gave, bit for bit; False, and empty, if it is of another plan or of other
        contributions."""
        self.clear()
        if state is None or (state["plan"], state.get("members")) != (self._plan, self.members):
            return False
        if state.get("scale", 1.0) != 1.0:  # of a version that kept plain noise divided by B
            return False
        while f"{_PREFIX}.{len(self)}.{self._names[0]}" in tensors:
            age = len(self)
            self._past.append([tensors[f"{_PREFIX}.{age}.{name}"].clone() for name in self._names])
        return True
