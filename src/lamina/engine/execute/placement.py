"""`Placement`: where the weights and sums of a step are, and how the noise of several ranks comes together."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lamina.engine.batch import Batch
from lamina.engine.distributed import Ranks, is_sharded_model
from lamina.engine.execute.clipping import Clipper
from lamina.engine.execute.collectors import Collector
from lamina.engine.execute.sums import SumMemory, Sums
from lamina.engine.guards.guard import Guard
from lamina.engine.noise.mechanism import COUNTS, StepNoise
from lamina.errors import EngineError, NoiseError
from lamina.plan.rules import FollowQuantile
from lamina.plan.step_plan import StepPlan


@dataclass(kw_only=True, slots=True)
class OpenStep:
    """A step that was charged and is not released.

    number   of the step
    drawn    the number of its sample, which must be the same on all ranks
    clipper  of the plan as it is applied in this step
    """

    number: int
    drawn: int
    clipper: Clipper
    sums: Sums
    process: int = field(default_factory=os.getpid)

    def refuse_fork(self) -> None:
        """Refuse to release a step of the parent process: both would use the same noise."""
        if os.getpid() != self.process:
            problem = "a child process releases a step of its parent: both would use the same noise"
            raise NoiseError("noise.forked-step", problem, "fork between steps, not within one")


class Placement(Guard):
    """The whole model, and all of a step, in this process.

    held  the parameters that the optimiser updates, by name
    """

    sharded = False
    held: Mapping[str, Any]

    def __init__(self, model: nn.Module, plan: StepPlan, ranks: Ranks) -> None:
        self.model, self.plan, self.ranks = model, plan, ranks
        self.held = dict(model.named_parameters())
        self._memory: SumMemory | None = None

    def check(self) -> None:
        """Refuse a model that came under `fully_shard` after this engine was made: ranks would wait for each other."""
        if not self.ranks.alone and not self.sharded and is_sharded_model(self.model):
            problem = "fully_shard was called on the model after the engine was made"
            remedy = "call fully_shard first, then make_private, Engine or Trainer, then the optimizer"
            raise EngineError("engine.sharded-after-engine", problem, remedy)

    def gather(self) -> None:
        """Make a divided model whole until the end of the next step; every rank does so."""

    def divide(self) -> None:
        """Take `gather` back; every rank does so."""

    def start(self, batch: Batch, *, empty: bool, passes: int) -> None:
        """The backward passes of a step begin: `passes` of them, and then the one that adds up."""

    @contextmanager
    def passing(self, sums: Sums | None = None, collector: Collector | None = None) -> Iterator[None]:
        """Around one backward pass. `sums`: those that are complete when it is over, clipped by `collector`."""
        yield

    def follow(self, passes: int | None = None, sums: Sums | None = None) -> None:
        """Take part in backward passes of other ranks in which this one computes nothing."""

    def sums(self, tensors: Mapping[str, Tensor], noise: StepNoise) -> Sums:
        """The sums of a step that begins."""
        if self._memory is None:
            self._memory = SumMemory(tensors)
        sums = Sums(tensors, noise, self._memory)
        if self.plan.rule(FollowQuantile) is not None:
            sums[COUNTS] = torch.zeros(len(self.plan.layers), dtype=torch.float64)
        return sums

    def release(self, opened: OpenStep) -> dict[str, Tensor]:
        """(clipped sum + noise) / B of every tensor, and the noised counts of the step if there are any."""
        return opened.sums.noise.release(opened.sums)

    def divided(self, grads: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What the optimiser of this rank needs of released gradients."""
        return grads

    def whole(self, grads: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The opposite; every rank asks for it."""
        return grads

    def give_up(self) -> None:
        """The step failed here."""

    def detach(self) -> None:
        """The engine is taken away."""

    def attach(self, run_often: Sequence[nn.Module]) -> None:
        """Forward passes begin. `run_often`: modules that are run once per contribution."""

    def begin_forward(self) -> None:
        """A forward pass begins somewhere in the model."""


class RankedPlacement(Placement):
    """The whole model in every process. Each adds its share of the noise to its sums; all add up in float64."""

    def release(self, opened: OpenStep) -> dict[str, Tensor]:
        self.ranks.agree(opened.number, drawn=opened.drawn)
        found = self._add_up(opened.sums, list(opened.sums.tensors))
        return found | (self._add_up(opened.sums, [COUNTS]) if COUNTS in opened.sums else {})

    def _add_up(self, sums: Sums, names: Sequence[str]) -> dict[str, Tensor]:
        totals = sums.noise.share(names, [sums.take(name) for name in names])
        self.ranks.add_up(totals)
        return dict(zip(names, sums.noise.finish(names, totals), strict=True))
