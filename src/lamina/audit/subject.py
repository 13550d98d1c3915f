"""`Subject`: a step that can be taken again and again from the same state."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lamina.engine import Batch, Engine, NoiseSource, SeededNoise
from lamina.engine.printed import ReproductionWarning
from lamina.plan.rules import Choose, FollowBudget, FollowQuantile, Rule
from lamina.plan.step import StepPlan

COUNTS = "counts/unclipped"  # no tensor of a model has such a name
Losses = Callable[[Any, Any], Tensor]


class Stepper(Protocol):
    """Whatever claims to carry out a plan: `Engine`, or something else that is to be audited."""

    def backward(self, losses: Tensor | None, batch: Batch) -> None: ...

    def detach(self) -> None: ...


Make = Callable[[nn.Module, StepPlan, NoiseSource], Stepper]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is audited: model, plan, loss, and how the step is taken.

    losses_of  (x, y) → one loss per example, model included, as for `Engine.probe`
    make       makes a fresh stepper; by default `Engine(model, plan, noise=…, **options)`
    parts      microbatches that a batch is cut into
    hardened   whether the noise is rounded to its public grid

    Every release is made by a fresh stepper, so that two of them draw the same noise, from the same state
    of torch's generator, so that they drop the same units. Buffers, gradients and generator are put back.
    """

    model: nn.Module
    plan: StepPlan
    losses_of: Losses
    make: Make | None = None
    parts: int = 1
    hardened: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def release(
        self, batch: Batch, *, seed: int = 0, noise: float = 1.0, clip: float = 1.0
    ) -> dict[str, Tensor]:
        """B times what the step writes to `.grad`, in float64: the clipped sum plus noise.

        `noise` and `clip` scale S and C. A factor that is a power of two changes no bit of what is
        clipped, so that a step with little noise shows the same clipped sum, without the rounding.
        Tensors without a gradient are left out. Noised counts that the step released are under `COUNTS`.
        """
        plan = replace(
            self.plan,
            noise=tuple(s * noise for s in self.plan.noise),
            clip=tuple(tuple(c * clip for c in row) for row in self.plan.clip),
            rules=tuple(_within_a_step(self.plan.rules, noise)),
            accountant="rdp",  # a step is taken here, not priced
        )
        source = SeededNoise(seed, hardened=self.hardened)
        with _as_it_was(self.model):
            stepper = self._stepper(plan, source)
            try:
                for part in batch.split(self.parts):
                    with torch.enable_grad():
                        losses = self.losses_of(part.x, part.y) if part.examples else None
                    stepper.backward(losses, part)
            finally:
                stepper.detach()
            grads = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
            seen = {name: grad.detach().double() * plan.batch for name, grad in grads.items()}
            counts = getattr(getattr(stepper, "adaptation", None), "counts", None)
            return seen if counts is None else {**seen, COUNTS: torch.tensor(counts, dtype=torch.float64)}

    def _stepper(self, plan: StepPlan, source: NoiseSource) -> Stepper:
        if self.make is not None:
            return self.make(self.model, plan, source)
        with warnings.catch_warnings():  # an audit is where a printed plan belongs
            warnings.simplefilter("ignore", ReproductionWarning)
            return Engine(self.model, plan, noise=source, **self.options)

    def fixed(self, batch: Batch) -> bool:
        """Whether the step gives the same twice from different states of torch's generator (no dropout)."""
        state = torch.get_rng_state()
        try:
            first = self.release(batch, noise=2.0**-20)
            torch.manual_seed(int(state.sum()) + 1)
            second = self.release(batch, noise=2.0**-20)
        finally:
            torch.set_rng_state(state)
        return all(torch.equal(first[name].nan_to_num(), second[name].nan_to_num()) for name in first)


def _within_a_step(rules: tuple[Rule, ...], noise: float) -> Iterator[Rule]:
    """The rules that have a part in one step. A choice is a release of its own; a filter is asked between steps."""
    for rule in rules:
        if isinstance(rule, FollowQuantile):
            yield replace(rule, noise=rule.noise * noise)
        elif not isinstance(rule, Choose | FollowBudget):
            yield rule


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Gradients out of the way, and afterwards everything that a step may touch put back."""
    state = torch.get_rng_state()
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    grads = [(p, p.grad) for p in model.parameters()]
    for p, _ in grads:
        p.grad = None
    try:
        yield
    finally:
        torch.set_rng_state(state)
        for buffer, value in buffers:
            buffer.detach().copy_(value)
        for p, grad in grads:
            p.grad = grad
