"""Plans for audits, whose thresholds and noise differ from layer to layer; and a sound step with parts left to break."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from oracle import layers_of
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from lamina.audit.step_audit import Check
from lamina.audit.target import AuditTarget
from lamina.engine.batch import Batch
from lamina.engine.noise.source import NoiseSource
from lamina.engine.reference import route
from lamina.plan.step_plan import Clipping, PlannedClass, StepPlan

PLAIN = PlannedClass(name="plain", population=1000, sampling_rate=0.02, delta=1e-5)
TOP = PlannedClass(name="top", population=500, sampling_rate=0.05, delta=1e-5, profile="upper half")
OPEN = PlannedClass(name="open", population=None, sampling_rate=0.1, public=True)


def plan_for(model: nn.Module, clipping: str = "box", *, group: Any = "module", several: bool = False) -> StepPlan:
    """Class 0 reaches every layer; with `several`, class 1 only the upper half, and class 2 is public."""
    planned = layers_of(model, group)
    size = len(planned)
    row = tuple(0.5 * 1.3 ** (i % 5) for i in range(size))
    rows = [row]
    if several:
        rows += [tuple(0.7 * c if i >= size // 2 else 0.0 for i, c in enumerate(row)), tuple(math.inf for _ in row)]
    noise = tuple(0.9 * 1.2 ** (i % 4) for i in range(size))
    return StepPlan(
        layers=planned, classes=(PLAIN, TOP, OPEN)[: len(rows)], clip=tuple(rows), noise=noise, batch=4.0, steps=100,
        clipping=Clipping(clipping),
    )  # fmt: skip


def loss_of(out: Tensor, y: Tensor) -> Tensor:
    return torch.sin(out.flatten(1)).sum(1) * y


def target_of(model: nn.Module, plan: StepPlan | None = None, **options: Any) -> AuditTarget:
    plan = plan_for(model) if plan is None else plan
    return AuditTarget(model=model, plan=plan, **{"losses_of": lambda x, y: loss_of(model(x), y), **options})


def failed(checks: tuple[Check, ...]) -> set[str]:
    return {check.name for check in checks if not check.passed}


class Reference:
    """A step from per-example gradients, by `vmap` and `route`: sound, with `grads`, `summed` and `drawn` to break."""

    def __init__(self, model: nn.Module, plan: StepPlan, noise: NoiseSource) -> None:
        self.model, self.plan, self.noise = model, plan, noise

    def grads(self, batch: Batch) -> dict[str, Tensor]:
        params = {n: p.detach() for n, p in self.model.named_parameters()}

        def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return loss_of(functional_call(self.model, values, (x.unsqueeze(0),)), y.unsqueeze(0))[0]

        if not len(batch):
            return {n: p.new_zeros(0, *p.shape) for n, p in params.items()}
        grads = vmap(grad(loss), in_dims=(None, 0, 0))(params, batch.x, batch.y)
        here = cast(Tensor, batch.weight) > 0
        return {n: torch.where(here.view(-1, *[1] * (g.dim() - 1)), g, 0.0) for n, g in grads.items()}

    def summed(self, batch: Batch) -> dict[str, Tensor]:
        """The clipped sum."""
        return self.route(self.grads(batch), cast(Tensor, batch.cls), scale=batch.scale, ceiling=batch.ceiling)

    def route(
        self, grads: dict[str, Tensor], cls: Tensor, plan: StepPlan | None = None, **limits: Any
    ) -> dict[str, Tensor]:
        return route(grads, cls, plan or self.plan, noise=None, **limits)

    def drawn(self, batch: Batch) -> dict[str, Tensor]:
        """The noise of a step with this batch, divided by B."""
        nobody = {n: p.detach().new_zeros(0, *p.shape) for n, p in self.model.named_parameters()}
        return route(nobody, torch.zeros(0, dtype=torch.long), self.plan, noise=self.noise)

    def released(self, batch: Batch) -> dict[str, Tensor]:
        noise, sums = self.drawn(batch), self.summed(batch)
        return {name: noise[name] + sums[name] / self.plan.batch for name in noise}

    def backward(self, losses: Tensor | None, batch: Batch) -> None:
        released = self.released(batch)
        for name, p in self.model.named_parameters():
            p.grad = released[name].to(p.dtype)

    def detach(self) -> None:
        pass
