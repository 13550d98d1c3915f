"""`private_optimizer`: optimiser, learning rate and schedule computed from a plan, without tuning."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lamina.errors import RunError
from lamina.plan.step_plan import StepPlan
from lamina.validate import one_of

AUTO = "auto"
FALLING = 0.3  # the part of the steps over which the rate falls


def signal_to_noise(plan: StepPlan) -> float:
    """Return r: the largest length of one step, divided by the length of its noise, in units of each layer's noise.

        r = Σ_k b_k/σ_k / √d

    over the private classes k with b_k expected contributions and noise multiplier σ_k, d the noised parameters. It is
    reached if all contributions are clipped and point the same way. Public data count for nothing here; without noise
    it is infinite.
    """
    noised = sum(layer.size for layer, s in zip(plan.layers, plan.noise, strict=True) if s > 0)
    if not noised:
        return math.inf
    private = [(k, entry) for k, entry in enumerate(plan.classes) if not entry.public]
    batch = [plan.batch if e.population is None else e.sampling_rate * e.population for _, e in private]
    return math.fsum(b / plan.sigma(k) for b, (k, _) in zip(batch, private, strict=True)) / math.sqrt(noised)


def private_rate(signal: float, steps: int) -> float:
    """Return Adam's learning rate:  min(0.042, 0.021·max(r, 1)^0.4) · min(1.25, √(150/T)).

    r is the signal-to-noise ratio of a step and T the number of steps. Chosen on development tasks, then measured on others
    (docs/utility.md, docs/decisions/optimizer.md).
    """
    return min(0.042, 0.021 * math.pow(max(signal, 1.0), 0.4)) * min(1.25, math.sqrt(150.0 / steps))


class HoldThenFall(LRScheduler):
    """A schedule with a constant rate and a linear decrease to zero over the last part of the steps: `falling`, 30 %."""

    def __init__(self, optimizer: Optimizer, steps: int) -> None:
        self.steps, self.falling = steps, FALLING
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """Return the rate of every group at the step `last_epoch`."""
        left = max(0.0, 1.0 - self.last_epoch / self.steps)
        return [base * min(1.0, left / self.falling) for base in self.base_lrs]


def private_optimizer(model: nn.Module, plan: StepPlan) -> tuple[Optimizer, LRScheduler]:
    """Return an optimiser of the model's trainable parameters, and its schedule (one step per private step).

    Adam, whose rate follows from the plan's signal and noise and falls to zero over the last steps of the plan. Both are
    fixed before the first step, depend on the plan alone, and cost nothing. They are for weights that are trained from
    their first values; pre-trained ones need smaller steps (`lamina.signals.presets`).
    """
    rate = private_rate(signal_to_noise(plan), plan.steps)
    optimizer = Adam([p for p in model.parameters() if p.requires_grad], lr=rate)
    return optimizer, HoldThenFall(optimizer, plan.steps)


def resolve_optimizer(model: Any, plan: Any, optimizer: Any, scheduler: Any) -> tuple[Optimizer, Any]:
    """Return the given optimiser and schedule, or those of the plan for "auto"."""
    if not isinstance(optimizer, str):
        return optimizer, scheduler
    one_of(RunError, "train.optimizer-not-an-optimizer", (AUTO,), optimizer=optimizer)
    if scheduler is not None:
        problem = 'optimizer is "auto", which has a schedule of its own, and scheduler is given'
        raise RunError("train.auto-has-a-schedule", problem, "leave scheduler out, or give an optimiser as well")
    return private_optimizer(model, plan)
