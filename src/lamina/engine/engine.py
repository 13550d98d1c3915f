"""`Engine`: carries out the step that a plan describes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lamina.account import Filter, SpendCurve
from lamina.engine import workspace
from lamina.engine.attach import Attachment
from lamina.engine.batch import Batch
from lamina.engine.budget import Budget
from lamina.engine.collect import BoxCollector, Collector, JointCollector
from lamina.engine.examine import Examined, examine
from lamina.engine.function import Target
from lamina.engine.noise import NoiseSource, SecureNoise
from lamina.engine.open_step import OpenStep, zeros
from lamina.engine.ownership import OwnershipCheck
from lamina.engine.probe import probe
from lamina.errors import CouplingError, EngineError, UnclippedGradient
from lamina.plan.coverage import check_coverage
from lamina.plan.hazards import hazards
from lamina.plan.step import Clipping, StepPlan


class Engine:
    """Route, clip, sum, noise: one call of `backward` is one private step.

    Formal guarantee. If the batches are drawn as the plan says (Poisson, rate q_k from the declared
    population), contributions do not influence each other in `model` and loss, and `noise` is
    secure, then after T calls the tensors that the engine wrote are (ε_k, δ_k)-differentially
    private for every class k of the plan, with ε_k = plan.epsilon(k): docs/theory.md.

    Attaching changes nothing that a user of the model can see; `detach` (or leaving a `with` block)
    takes every trace away.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: StepPlan,
        *,
        noise: NoiseSource | None = None,
        filters: Mapping[str, Filter] | None = None,
        rows: Mapping[str, str] | None = None,
        per_contribution: Sequence[str] = (),
        constant_time: bool = False,
        taken: int = 0,
    ) -> None:
        """
        noise             where the noise comes from: a secure stream unless a test says otherwise
        filters           by class name: asked before each step, and charged for it
        rows              by pattern of module name: 'contiguous' or 'interleaved' rows per example
        per_contribution  names of modules to run once per contribution
        constant_time     do not skip arithmetic where no sampled contribution reaches
        taken             steps of this plan that an earlier engine took on the same data: ε counts from there
        """
        self.options: dict[str, Any] = {
            "rows": dict(rows or {}),
            "per_contribution": list(per_contribution),
            "constant_time": constant_time,
        }
        self.coverage = check_coverage(model, plan)
        self.model, self.plan, self.constant_time = model, plan, constant_time
        self.noise = SecureNoise() if noise is None else noise
        self.budget = Budget(plan, filters or {}, taken)
        self._trained = [any(row[i] > 0 for row in plan.clip) for i in range(len(plan.layers))]
        layer_of = {name: i for i, layer in enumerate(plan.layers) for name in layer.parameters}
        parameters = dict(model.named_parameters())
        self._tensors = {name: parameters[name] for name, i in layer_of.items() if self._trained[i]}
        self._layer_of = layer_of
        self._names = {id(p): name for name, p in parameters.items()}
        _refuse_half(parameters)
        self._clip = torch.tensor(plan.clip, dtype=torch.float64).view(len(plan.classes), len(plan.layers))
        self._radius = torch.tensor([plan.joint(k) for k in range(len(plan.classes))], dtype=torch.float64)
        self._ownership = OwnershipCheck()
        self._detached = False
        self.probed = False
        self._open: OpenStep | None = None
        self._written: dict[str, weakref.ref[Tensor]] = {}
        self._curves: dict[int, SpendCurve] = {}
        targets = {name: Target(name, i) if self._trained[i] else None for name, i in layer_of.items()}
        self._attachment = Attachment(model, targets, rows=rows, per_contribution=per_contribution)
        self._hook = register_optimizer_step_pre_hook(self._before_optimizer_step)

    # ---------------------------------------------------------------------------------------- the step

    def backward(self, losses: Tensor | None, batch: Batch) -> None:
        """One charged event: `.grad` of every trained tensor becomes (clipped sum + noise) / B.

        `losses` holds one loss per example, or is None for an empty batch, which still gets its
        noise. With `batch.split`, call it once per part: noise and `.grad` come with the last.
        """
        if not isinstance(batch, Batch):
            raise EngineError(f"the batch is a {type(batch).__name__}", "pass a lamina.Batch(x, y, cls=…)")
        if batch.first:
            self._open = None  # an earlier step that was not finished is given up; its charge stays
        try:
            self._take(losses, batch)
        except BaseException:
            self._open = None
            raise

    def _take(self, losses: Tensor | None, batch: Batch) -> None:
        part = self._examine(losses, batch)
        if batch.first:
            self._open = OpenStep(self.plan, self.noise, self._tensors, self._layer_of, self.budget.charge())
        if self._open is None:
            raise EngineError(
                "a later part of a split batch came without its first part",
                "pass the parts of batch.split(k) in order, and begin again after an error",
            )
        if part is not None:
            self._accumulate(part, self._open.sums, self._open.scale)
        if batch.last:
            step, self._open = self._open, None
            self._write(step.release())

    def gradient_of(self, losses: Tensor, batch: Batch, unit: int) -> dict[str, Tensor]:
        """The unclipped gradient of one contribution: for probes on proxy data only."""
        part = self._examine(losses, batch)
        sums = zeros(self._tensors)
        if part is not None:
            bounds = torch.zeros(part.layout.units, len(self.plan.layers), dtype=torch.float64)
            bounds[unit] = torch.inf
            self._run(
                part, BoxCollector(part.graph, part.layouts, self._trained, sums, bounds=bounds, scale=1.0)
            )
        return sums

    def clipped_sums(self, losses: Tensor | None, batch: Batch) -> dict[str, Tensor]:
        """The routed, clipped sum without noise and without division: for tests and audits only."""
        part = self._examine(losses, batch)
        sums = zeros(self._tensors)
        if part is not None:
            self._accumulate(part, sums, 1.0)
        return sums

    def _write(self, grads: Mapping[str, Tensor]) -> None:
        for name, p in self._tensors.items():
            grad = grads[name].to(p.dtype)
            if p.grad is None:
                p.grad = grad
            else:  # the engine's own, from an earlier step that was not zeroed
                p.grad.add_(grad)
            self._written[name] = weakref.ref(p.grad)

    def _examine(self, losses: Tensor | None, batch: Batch) -> Examined | None:
        """Everything that can be refused, before anything is spent."""
        if self._detached:
            raise EngineError(
                "this engine was detached from its model", "make a new one: lamina.Engine(model, plan)"
            )
        for name, p in self._tensors.items():
            if self._foreign(name, p):
                raise UnclippedGradient(
                    f"'{name}'.grad holds a gradient that the engine did not write",
                    "call optimizer.zero_grad() first, and never loss.backward() on a covered tensor",
                )
            if not p.requires_grad:
                raise EngineError(
                    f"'{name}' was frozen after the engine was attached",
                    "freeze first, then make stack, plan and engine",
                )
        part = examine(losses, batch, self.plan, self._names)
        if part is not None and self._ownership.due(part.graph, part.layout.units):
            for hazard in hazards(self.model):
                raise CouplingError(str(hazard), hazard.remedy)
            with torch.autocast("cpu", enabled=False):
                self._ownership.run(
                    part.losses, part.layout.owner, part.layout.units, part.graph, part.layouts
                )
        return part

    def _accumulate(self, part: Examined, sums: dict[str, Tensor], scale: float) -> None:
        bounds = self._clip[part.classes]  # (P, L)
        reached = [bool(r) for r in (bounds > 0).any(0)]
        if self.constant_time:
            reached = self._trained
        if any(reached):
            self._run(part, self._collector(part, bounds, reached, sums, scale))

    def _run(self, part: Examined, collector: Collector) -> None:
        before = self._held()
        inputs = [p for name, p in self._tensors.items() if collector.reached[self._layer_of[name]]]
        desk = self._attachment.desk
        desk.receiver = collector
        try:
            with torch.autocast("cpu", enabled=False):
                torch.autograd.backward(part.losses, part.weights, inputs=inputs)
            with torch.no_grad():
                collector.finish()
        finally:
            desk.receiver = None
            workspace.release()
        for name, was, now in zip(self._tensors, before, self._held(), strict=True):
            if was != now:
                self._tensors[name].grad = None
                raise UnclippedGradient(
                    f"something wrote to '{name}'.grad during the backward pass",
                    "no hook or custom Function may write gradients itself: fused gradient accumulation must be off",
                )

    def _held(self) -> list[tuple[int, int]]:
        """Which gradients the tensors hold, and how often each was written."""
        grads = (p.grad for p in self._tensors.values())
        return [(id(g), g._version) if g is not None else (0, 0) for g in grads]

    def _collector(
        self, part: Examined, bounds: Tensor, reached: Sequence[bool], sums: dict[str, Tensor], scale: float
    ) -> Collector:
        if self.plan.clipping is Clipping.BOX:
            return BoxCollector(part.graph, part.layouts, reached, sums, bounds=bounds, scale=scale)
        return JointCollector(
            part.graph,
            part.layouts,
            reached,
            sums,
            reach=bounds > 0,
            noise=self.plan.noise,
            radius=self._radius[part.classes],
            scale=scale,
        )

    # ---------------------------------------------------------------------------------------- around it

    @property
    def private(self) -> bool:
        """False where the noise came from a seed that somebody chose."""
        return self.noise.private

    def epsilon(self, k: str | int) -> float:
        """An ε that holds for class k after the steps taken so far: cheap enough for a progress bar."""
        row = self.plan.index(k)
        schedule = self.plan.schedule(row)
        if not schedule:
            return 0.0
        if row not in self._curves:
            self._curves[row] = SpendCurve(
                schedule, delta=self.plan.delta(row), accountant=self.plan.accountant
            )
        return self._curves[row].epsilon(self.budget.taken)

    def continue_at(self, step: int, noise: NoiseSource) -> None:
        """The next step is number `step` of the plan, with noise from `noise`.

        For a run that is cut into segments with a stream each: what is counted here is where the run is, what was
        charged stands in its journal and its book.
        """
        if not 0 <= step <= self.plan.steps:
            raise EngineError(f"step {step} lies outside the plan's 0 … {self.plan.steps}", "check the run")
        self._open = None
        self.noise = noise
        self.budget.taken = step

    def probe(self, losses_of: Callable[[Any, Any], Tensor], x: Any, y: Any = None) -> None:
        """Refuse a model or loss in which examples influence each other, on proxy data: see `probe`.

        `losses_of(x, y)` computes one loss per example, model included.
        """
        probe(self, losses_of, x, y)
        self.probed = True

    @property
    def detached(self) -> bool:
        return self._detached

    def detach(self) -> None:
        """Give the model back as it was."""
        self._hook.remove()
        self._attachment.detach()
        self._open = None
        self._detached = True

    def __repr__(self) -> str:
        taken, steps = self.budget.taken, self.plan.steps
        probed = "probed" if self.probed else "not probed"
        return f"Engine({self.coverage}; {taken} of {steps} steps taken; {probed}; {self.noise!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    def _foreign(self, name: str, p: Tensor) -> bool:
        """Whether a tensor holds a gradient that somebody else put there."""
        if p.grad is None:
            return False
        written = self._written.get(name)
        return written is None or written() is not p.grad

    def _before_optimizer_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Closures would take several releases for the price of one; foreign gradients were never clipped."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        mine = [(name, p) for name, p in self._tensors.items() if id(p) in held]
        if not mine:
            return
        if kwargs.get("closure") is not None or any(
            callable(a) and not isinstance(a, Optimizer) for a in args
        ):
            raise EngineError(
                f"{type(optimizer).__name__}.step was given a closure, which may ask for several gradients in one step",
                "call engine.backward once, then optimizer.step() without a closure",
            )
        for name, p in mine:
            if self._foreign(name, p):
                raise UnclippedGradient(
                    f"'{name}'.grad holds a gradient that the engine did not write",
                    "use engine.backward(losses, batch) for every gradient of a covered tensor",
                )


def _refuse_half(parameters: Mapping[str, Tensor]) -> None:
    for name, p in parameters.items():
        if p.requires_grad and p.dtype == torch.float16:
            raise EngineError(f"'{name}' is float16, whose gradients overflow", "use bfloat16 or float32")
