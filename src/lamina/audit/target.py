"""What is audited: a step that can be taken again from the same state, and the regions that each class may move."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lamina.account.schedule import INTEGER_RDP
from lamina.allocate.paper import ReproductionWarning
from lamina.engine.batch import Batch
from lamina.engine.distributed import Ranks, whole_tensor
from lamina.engine.engine import Engine
from lamina.engine.noise.source import NoiseSource, SeededNoise
from lamina.engine.slices import zero_outside_slices
from lamina.plan.rules import Choose, FollowBudget, FollowQuantile, Rule
from lamina.plan.step_plan import StepPlan


@dataclass(frozen=True, kw_only=True)
class Region:
    """Tensors of one layer, whole or (`span`: axis, first, stop) in part, and the classes that may move them."""

    layer: int
    name: str
    tensors: tuple[str, ...]
    size: int
    classes: frozenset[int]
    span: tuple[int, int, int] | None = None

    def square(self, seen: Mapping[str, Tensor]) -> float:
        """Σ of the squares of what was released there."""
        return sum(float(self._cut(seen[name]).square().sum()) for name in self.tensors if name in seen)

    def moved(self, seen: Mapping[str, Tensor]) -> bool:
        return any(bool((self._cut(seen[name]) != 0).any()) for name in self.tensors if name in seen)

    def _cut(self, t: Tensor) -> Tensor:
        if self.span is None:
            return t
        axis, first, stop = self.span
        return t.narrow(axis, first, stop - first) if t.dim() else t


def plan_regions(plan: StepPlan, tensors: Mapping[str, Tensor]) -> tuple[Region, ...]:
    """Every number of the plan's layers in exactly one region. A layer that nobody cuts is one region."""
    found: list[Region] = []
    for i, layer in enumerate(plan.layers):
        reach = frozenset(k for k, row in enumerate(plan.clip) if row[i] > 0)
        cut = [name for name in layer.parameters if any(plan.slice(k, name) is not None for k in reach)]
        rest = tuple(name for name in layer.parameters if name not in cut)
        if rest:
            size = sum(tensors[name].numel() for name in rest)
            found.append(Region(layer=i, name=layer.name, tensors=rest, size=size, classes=reach))
        for name in cut:
            found += _slice_regions(plan, i, name, tensors[name].shape, reach)
    return tuple(found)


def _slice_regions(plan: StepPlan, layer: int, name: str, shape: torch.Size, reach: frozenset[int]) -> list[Region]:
    parts = {k: plan.slice(k, name) for k in reach}
    one = next(part for part in parts.values() if part is not None)
    open_ = {k: ((0, one.length),) if part is None else part.ranges for k, part in parts.items()}
    edges = sorted({0, one.length, *(edge for ranges in open_.values() for both in ranges for edge in both)})
    found = []
    for first, stop in pairwise(edges):
        classes = frozenset(k for k, ranges in open_.items() if any(a <= first < b for a, b in ranges))
        where, size = f"{name}[{first}:{stop}, axis {one.axis}]", shape.numel() // one.length * (stop - first)
        span = (one.axis, first, stop)
        found.append(Region(layer=layer, name=where, tensors=(name,), size=size, classes=classes, span=span))
    return found


def moved_outside_slices(plan: StepPlan, k: int, moved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of what moved, the part that class k may not move although it reaches the layer."""
    return {
        name: moved[name] - zero_outside_slices(plan, k, name, moved[name])
        for i, layer in enumerate(plan.layers)
        if plan.clip[k][i] > 0
        for name in layer.parameters
        if name in moved and plan.slice(k, name) is not None
    }


COUNTS_KEY = "counts/unclipped"  # no tensor of a model has such a name
PerExampleLosses = Callable[[Any, Any], Tensor]


class Stepper(Protocol):
    """Whatever claims to carry out a plan: `Engine`, or something else that is to be audited."""

    def backward(self, losses: Tensor | None, batch: Batch) -> None: ...

    def detach(self) -> None: ...


MakeStepper = Callable[[nn.Module, StepPlan, NoiseSource], Stepper]


@dataclass(frozen=True, kw_only=True)
class AuditTarget:
    """What is audited: model, plan, loss, and how the step is taken.

    losses_of  (x, y) → one loss per example, model included, as for `Engine.probe`
    make       makes a fresh stepper; by default `Engine(model, plan, noise=…, **options)`
    parts      microbatches that a batch is cut into
    hardened   whether the noise is rounded to its public grid, as it is by default

    Under torch.distributed every rank audits the same batches at once: each takes its part of them, so that contribution u
    is on rank u modulo the number of ranks.

    Every release is made by a fresh stepper, so that two of them draw the same noise, from the same state
    of torch's generator, so that they drop the same units. Buffers, gradients and generator are put back.
    """

    model: nn.Module
    plan: StepPlan
    losses_of: PerExampleLosses
    make: MakeStepper | None = None
    parts: int = 1
    hardened: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)

    def release(self, batch: Batch, *, seed: int = 0, noise: float = 1.0, clip: float = 1.0) -> dict[str, Tensor]:
        """B times what the step writes to `.grad`, in float64: the clipped sum plus noise.

        `noise` and `clip` scale S and C. A factor that is a power of two changes no bit of what is
        clipped, so that a step with little noise shows the same clipped sum, without the rounding.
        Tensors without a gradient are left out. Noised counts that the step released are under `COUNTS_KEY`.
        """
        return self.releases([batch], seed=seed, noise=noise, clip=clip)[0]

    def releases(
        self, batches: Sequence[Batch], *, seed: int = 0, noise: float = 1.0, clip: float = 1.0
    ) -> list[dict[str, Tensor]]:
        """The same for steps that one stepper takes one after the other; the model stays as it is."""
        plan = replace(
            self.plan,
            noise=tuple(s * noise for s in self.plan.noise),
            clip=tuple(tuple(c * clip for c in row) for row in self.plan.clip),
            rules=tuple(_rules_within_a_step(self.plan.rules, noise)),
            steps=max(self.plan.steps, len(batches)),
            # A step is taken here, not priced.
            accountant=INTEGER_RDP if self.plan.noise_kind.integer_orders else "rdp",
        )
        source = SeededNoise(seed, hardened=self.hardened, rank=Ranks.current().rank)
        with _state_restored(self.model):
            stepper = self._stepper(plan, source)
            try:
                return [self._step(stepper, batch, plan.batch) for batch in batches]
            finally:
                stepper.detach()

    def _step(self, stepper: Stepper, batch: Batch, divisor: float) -> dict[str, Tensor]:
        for p in self.model.parameters():
            p.grad = None
        ranks = Ranks.current()
        for part in (batch if ranks.alone else batch.shard(ranks.rank, ranks.size)).split(self.parts):
            with torch.enable_grad():
                losses = self.losses_of(part.x, part.y) if part.examples else None
            stepper.backward(losses, part)
        grads = {name: whole_tensor(p.grad) for name, p in self.model.named_parameters() if p.grad is not None}
        seen = {name: grad.detach().double() * divisor for name, grad in grads.items()}
        rules = stepper.rules if isinstance(stepper, Engine) else None  # what a tester plants has none
        counts = None if rules is None or rules.adaptation is None else rules.adaptation.counts
        return seen if counts is None else {**seen, COUNTS_KEY: torch.tensor(counts, dtype=torch.float64)}

    def _stepper(self, plan: StepPlan, source: NoiseSource) -> Stepper:
        if self.make is not None:
            return self.make(self.model, plan, source)
        with warnings.catch_warnings():  # an audit is where a paper's plan belongs
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


def _rules_within_a_step(rules: tuple[Rule, ...], noise: float) -> Iterator[Rule]:
    """The rules that have a part in one step. A choice is a release of its own; a filter is asked between steps."""
    for rule in rules:
        if isinstance(rule, FollowQuantile):
            yield replace(rule, noise=rule.noise * noise)
        elif not isinstance(rule, Choose | FollowBudget):
            yield rule


@contextmanager
def _state_restored(model: nn.Module) -> Iterator[None]:
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
