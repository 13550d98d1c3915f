"""`Guard`: one thing that is refused, or warned of, around a step. An engine has a list of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lamina.engine.batch import Batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """Where an engine is when a part of a batch comes.

    step        the number of the step that the part belongs to
    under_way   whether earlier parts of this step or choice are in
    private     whether the noise is secret
    """

    step: int
    under_way: bool
    private: bool


class Guard:
    """One thing that must not happen around a step.

    The engine calls the methods of all guards in the order in which they stand here. Each may refuse or warn; none
    changes what a step computes.
    """

    def begin_call(self) -> None:
        """A forward pass of the model, or of a part of it, begins."""

    def end_call(self) -> None:
        """It is over."""

    def before_step(self, moment: Moment) -> None:
        """A part of a step comes, and nothing of it was looked at."""

    def check(self) -> None:
        """Before a batch is examined."""

    def look_closely(self) -> None:
        """At the first steps of a computation and every 128th: what takes long."""

    def before_charge(self, batch: Batch, moment: Moment) -> None:
        """The batch fits the model and the plan, and nothing was charged for it."""

    def after_charge(self, batch: Batch) -> None:
        """A step or choice that begins with this batch was charged."""

    def after_write(self) -> None:
        """The engine wrote `.grad`."""

    def before_optimizer_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Some optimiser, perhaps of another model, is about to take a step."""

    def after_optimizer_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """It took its step."""

    def at_end(self) -> None:
        """The model is given back."""


def tensors_of_optimizer(optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Those of the tensors that the optimiser updates."""
    updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [(name, p) for name, p in tensors.items() if id(p) in updated]
