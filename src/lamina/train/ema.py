"""An exponential moving average of the weights: post-processing, so it costs nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lamina.errors import RunError


class MovingAverage:
    """average <- decay · average + (1 - decay) · weights, after every step, over every trainable tensor."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        if isinstance(decay, bool) or not isinstance(decay, float) or not 0.0 < decay < 1.0:
            raise RunError(
                "train.ema-number", f"ema is {decay!r}, must be a number in (0, 1)", "for example ema=0.999"
            )
        self.decay = decay
        self._live = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.average = {name: p.detach().clone() for name, p in self._live.items()}

    @torch.no_grad()
    def update(self) -> None:
        torch._foreach_lerp_(  # one call for all tensors
            list(self.average.values()), [p.detach() for p in self._live.values()], 1.0 - self.decay
        )

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for name, average in self.average.items():
            average.copy_(tensors[name])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model holds the average inside, its own weights again afterwards."""
        with torch.no_grad():
            kept = {name: p.detach().clone() for name, p in self._live.items()}
            for name, p in self._live.items():
                p.copy_(self.average[name])
        try:
            yield
        finally:
            with torch.no_grad():
                for name, p in self._live.items():
                    p.copy_(kept[name])
