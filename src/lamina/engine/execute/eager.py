"""The eager executor: autograd runs the backward pass, and collectors take what arrives at each layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lamina.engine.attach import Attachment
from lamina.engine.batch import Batch
from lamina.engine.execute.clipping import Clipper
from lamina.engine.execute.collectors import Collector, NormCollector
from lamina.engine.execute.norms import release_buffers
from lamina.engine.execute.placement import Placement
from lamina.engine.execute.sums import Sums
from lamina.engine.guards.checked_batch import CheckedBatch, check_batch
from lamina.engine.guards.gradients import GradWriter
from lamina.engine.guards.guard import Guard
from lamina.engine.guards.ownership import OwnershipCheck
from lamina.engine.guards.state import StateGuard
from lamina.engine.slices import PlanSlices, TensorMasks
from lamina.errors import EngineError
from lamina.plan.step_plan import StepPlan

OWNERSHIP_PASSES = 3


class Work(NamedTuple):
    """What a part of a batch adds to a step: examined, and not added yet.

    classes  of its contributions; None where there are none
    add      clips gradients by a clipper and adds them to sums. The last argument: of the last part of a step
    """

    classes: Tensor | None
    add: Callable[[Clipper, Sums, bool], None]


class EagerExecutor:
    """Examines losses, runs backward passes, and adds clipped gradients up.

    constant_time  do not skip arithmetic where no sampled contribution reaches
    """

    def __init__(
        self, plan: StepPlan, names: Mapping[int, str], tensors: Mapping[str, Tensor], *, attachment: Attachment,
        placement: Placement, guards: Sequence[Guard], gradients: GradWriter, state: StateGuard, slices: PlanSlices,
        constant_time: bool,
    ) -> None:  # fmt: skip
        self.plan, self.names, self.tensors, self.constant_time = plan, names, tensors, constant_time
        self.attachment, self.placement, self.guards, self.slices = attachment, placement, guards, slices
        self.ownership = OwnershipCheck()
        self._gradients, self._state = gradients, state
        self.layer_of = {name: i for i, layer in enumerate(plan.layers) for name in layer.parameters}
        self.detached = False
        self.trained = [any(row[i] > 0 for row in plan.clip) for i in range(len(plan.layers))]

    @property
    def device(self) -> torch.device:
        """Where the model is: the device of its first trained tensor."""
        return next((p.device for p in self.tensors.values()), torch.device("cpu"))

    def check(self, *, stepping: bool = False) -> None:
        """Ask all guards, before a batch is examined. `stepping`: for a step, whose weights may come block by block."""
        if self.detached:
            remedy = "make a new one: lamina.Engine(model, plan)"
            raise EngineError("engine.detached", "this engine was detached from its model", remedy)
        for guard in self.guards:
            guard.check()
            if guard is self.placement and not stepping:
                self.placement.gather()

    def examine(
        self, losses: Tensor | None, batch: Batch, *, again: bool = False, stepping: bool = False
    ) -> CheckedBatch | None:
        """Everything that can be refused of losses and batch; None of an empty one. `again`: look closely, due or not."""
        self.check(stepping=stepping)
        part = check_batch(losses, batch, self.plan, self.names)
        self._state.check_trained()
        due = part is not None and (self.ownership.due(part.graph, part.layout.units) or again)
        if stepping:
            self.placement.start(batch, empty=part is None, passes=OWNERSHIP_PASSES if due else 0)
        if part is not None and due:
            for guard in self.guards:
                guard.look_closely()
            with torch.autocast(self.device.type, enabled=False):
                self.ownership.run(part, self.placement.passing)
        if stepping:
            self.placement.follow()
        return part

    def prepare(self, losses: Tensor | None, batch: Batch) -> Work:
        """Examine a part of a step."""
        part = self.examine(losses, batch, stepping=True)

        def add(clipper: Clipper, sums: Sums, last: bool) -> None:
            if part is None or not self.add(part, clipper, sums, last=last):
                self.placement.follow(1, sums)

        return Work(None if part is None else part.classes, add)

    def reached(self, classes: Tensor, clipper: Clipper) -> list[bool]:
        return self.trained if self.constant_time else clipper.reached(classes)

    def masks(self, part: CheckedBatch) -> TensorMasks:
        return self.slices.masks_for(part.classes, narrow=not self.constant_time)

    def add(self, part: CheckedBatch, clipper: Clipper, sums: Sums, *, last: bool = False) -> bool:
        """Clip and add up a part; False if it reaches nothing. `last`: of a step, so that complete sums may be given away."""
        reached = self.reached(part.classes, clipper)
        if any(reached):
            part = clipper.prepare(part, sums)
            collector = clipper.collector(part, sums, reached, self.masks(part))
            collector.deferred = last and sums.streamed
            self.collect(part, collector, sums=sums if last else None)
        return any(reached)

    def collect(
        self, part: CheckedBatch, collector: Collector, *, retain_graph: bool = False, sums: Sums | None = None
    ) -> None:
        """Run autograd for one collector; refuse gradients that anything else writes meanwhile."""
        before, slot = self._gradients.versions(), self.attachment.slot
        inputs = [p for name, p in self.tensors.items() if collector.reached[self.layer_of[name]]]
        slot.receiver = collector
        try:
            with torch.autocast(self.device.type, enabled=False), self.placement.passing(sums, collector):
                torch.autograd.backward(part.losses, part.weights, inputs=inputs, retain_graph=retain_graph)
            with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
                collector.finish()
        finally:
            slot.receiver = None
            release_buffers()
        self._gradients.check_unchanged(before)

    def norms(self, part: CheckedBatch, clipper: Clipper, *, retain_graph: bool = False) -> Tensor:
        """(P, L) norms of every contribution at every layer that is reached: secret."""
        reached = self.reached(part.classes, clipper)
        collector = NormCollector(part, reached, self.masks(part))
        if any(reached):
            self.collect(part, collector, retain_graph=retain_graph)
        return collector.norms
