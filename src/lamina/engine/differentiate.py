"""The backward pass of one part of a batch, with its per-contribution gradients handed to a collector."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lamina.engine import workspace
from lamina.engine.collect import Collector, NormCollector
from lamina.engine.examine import Examined
from lamina.engine.function import Desk
from lamina.engine.gradients import Gradients
from lamina.engine.masks import ALL_OPEN, Openings


class Differentiator:
    """Opens the desk for one collector at a time; refuses whatever else is written meanwhile."""

    def __init__(self, gradients: Gradients, layer_of: Mapping[str, int], desk: Desk) -> None:
        self.gradients, self.layer_of, self.desk = gradients, layer_of, desk

    def run(self, part: Examined, collector: Collector) -> None:
        before = self.gradients.held()
        tensors = self.gradients.tensors.items()
        inputs = [p for name, p in tensors if collector.reached[self.layer_of[name]]]
        self.desk.receiver = collector
        try:
            with torch.autocast("cpu", enabled=False):
                torch.autograd.backward(part.losses, part.weights, inputs=inputs)
            with torch.no_grad():
                collector.finish()
        finally:
            self.desk.receiver = None
            workspace.release()
        self.gradients.unchanged(before)

    def norms(self, part: Examined, reached: list[bool], openings: Openings = ALL_OPEN) -> Tensor:
        """(P, L) norms of every contribution at every layer that is reached: secret."""
        collector = NormCollector(part.graph, part.layouts, reached, {}, openings, units=part.layout.units)
        if any(reached):
            self.run(part, collector)
        return collector.norms
