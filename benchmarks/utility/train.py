"""One private run: the same initial weights and the same Poisson samples for every policy of a seed."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lamina import Batch, Engine, SeededNoise, StepPlan
from lamina.errors import BudgetExceeded

from .data import Part, Split
from .tasks import Task

MOMENTUM = 0.9


def model_of(task: Task, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return task.model()


def run(task: Task, split: Split, plan: StepPlan, *, rate: float, clip: float, seed: int) -> tuple[float, int]:
    """The task's figure on the test part after training as the plan says, and how many steps were taken."""
    taken: list[int] = []
    model = trained(task, split.train, plan, rate=rate, clip=clip, seed=seed, count=taken)
    return figure(task, model, split.test), taken[0]


def trained(
    task: Task,
    part: Part,
    plan: StepPlan,
    *,
    rate: float,
    clip: float,
    seed: int,
    steps: int | None = None,
    count: list[int] | None = None,
) -> nn.Module:
    """SGD with momentum, or Adam; the learning rate is rate/clip (of Adam: rate) and falls to 0 along a cosine over the plan's steps.

    Noise comes from a seed, so that a run can be repeated: these models are measurements, not releases. `steps` stops
    earlier than the plan; `count` is told how many were taken, which a filter may make fewer.
    """
    model = model_of(task, seed)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=rate / clip, momentum=MOMENTUM)
    if task.adam:
        optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: 0.5 * (1.0 + math.cos(math.pi * min(t, plan.steps) / plan.steps))
    )
    q = plan.classes[0].sampling_rate
    coins, choosers = (torch.Generator().manual_seed(base + seed) for base in (10_000, 20_000))
    model.train()
    with Engine(model, plan, noise=SeededNoise(seed, threads=1)) as engine:
        for _ in range(plan.steps if steps is None else steps):
            batch = sample(part, q, coins)
            try:
                if engine.choice_due:
                    asked = sample(part, q, choosers)
                    engine.choose(losses(task, model, asked), asked)
                engine.backward(losses(task, model, batch), batch)
            except BudgetExceeded:
                break
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if count is not None:
            count.append(engine.budget.taken)
    return model


def losses(task: Task, model: nn.Module, batch: Batch) -> Tensor | None:
    return task.losses(model(batch.x), batch.x, batch.y) if len(batch) else None


def sample(part: Part, rate: float, coins: torch.Generator) -> Batch:
    """Each contribution with probability `rate`, with all of its examples."""
    chosen = torch.rand(part.units, generator=coins) < rate
    rows = chosen[part.unit].nonzero().flatten()
    unit = torch.unique(part.unit[rows], return_inverse=True)[1]
    return Batch(part.x[rows], part.y[rows], unit=unit)


def figure(task: Task, model: nn.Module, part: Part) -> float:
    """The task's figure; what guessing gives, or infinity where lower is better, if the output is not finite."""
    model.eval()
    with torch.no_grad():
        output = model(part.x)
    if not bool(torch.isfinite(output).all()):
        return 0.0 if task.higher else math.inf
    return task.figure(output, part)
