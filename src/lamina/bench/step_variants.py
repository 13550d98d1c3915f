"""The steps that are measured: the plain step, Lamina's, and Opacus' three modes.

Each is a function that makes one whole step.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lamina.allocate.make_plan import make_plan
from lamina.bench.workloads import Workload
from lamina.engine import native
from lamina.engine.batch import Batch
from lamina.engine.engine import Engine
from lamina.errors import LaminaError
from lamina.plan.layer_stack import LayerStack
from lamina.plan.policy import Policy

# A step is: forward, loss, backward, clipping, noise, AdamW, gradients dropped. The batch is fixed and already there.

Step = Callable[[], None]

# Opacus' three modes on the same model, batch and optimiser, through Opacus' own objects.
#
# What keeps the comparison fair: fixed batches of equal size and no data loader in anybody's step; noise is on and is
# Opacus' default (fast, not secure); clipping is to a finite norm; ghost clipping goes through Opacus' own loss
# wrapper, which makes its two backward passes.

PEER_CLIP_NORM = 1.0
PEER_NOISE_MULTIPLIER = 1.0


def opacus_missing() -> str | None:
    """Why the peers cannot run here, or None."""
    if importlib.util.find_spec("opacus") is None:
        return "opacus is not installed (make bench, or pip install 'lamina[bench]')"
    return None


class _Criterion(nn.Module):
    """The workload's loss with the `reduction` attribute that Opacus' wrapper switches to "none" and back."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.losses = workload.losses
        self.reduction = "mean"

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        losses = self.losses(y, target)
        return losses.mean() if self.reduction == "mean" else losses


def opacus_hooks(workload: Workload) -> Step:
    """Per-sample gradients kept by hooks, flat clipping."""
    from opacus.optimizers import DPOptimizer

    return _hooked_step(workload, DPOptimizer, lambda tensors: PEER_CLIP_NORM)


def opacus_per_layer(workload: Workload) -> Step:
    """Per-sample gradients kept by hooks, one threshold for each tensor."""
    from opacus.optimizers import DPPerLayerOptimizer

    return _hooked_step(workload, DPPerLayerOptimizer, lambda tensors: [PEER_CLIP_NORM / tensors**0.5] * tensors)


def _hooked_step(workload: Workload, kind: Callable[..., Any], clip_norm: Callable[[int], Any]) -> Step:
    from opacus.grad_sample import GradSampleModule

    model = GradSampleModule(workload.model(), strict=False)
    optimizer = kind(
        _adamw(model),
        noise_multiplier=PEER_NOISE_MULTIPLIER,
        max_grad_norm=clip_norm(sum(1 for _ in model.parameters())),
        expected_batch_size=workload.batch,
    )
    criterion = _Criterion(workload)
    x, target = workload.example()

    def step() -> None:
        criterion(model(x), target).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def opacus_ghost(workload: Workload) -> Step:
    """Norms first, a second backward pass with clipped weights."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    model = GradSampleModuleFastGradientClipping(
        workload.model(), strict=False, max_grad_norm=PEER_CLIP_NORM, use_ghost_clipping=True
    )
    optimizer = DPOptimizerFastGradientClipping(
        _adamw(model),
        noise_multiplier=PEER_NOISE_MULTIPLIER,
        max_grad_norm=PEER_CLIP_NORM,
        expected_batch_size=workload.batch,
    )
    criterion = DPLossFastGradientClipping(model, optimizer, _Criterion(workload))
    x, target = workload.example()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        criterion(model(x), target).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


PEERS: dict[str, Callable[[Workload], Step]] = {
    "opacus_hooks": opacus_hooks,
    "opacus_per_layer": opacus_per_layer,
    "opacus_ghost": opacus_ghost,
}


BASELINE = "plain"


def plain_step(workload: Workload) -> Step:
    """The non-private step that every ratio is relative to."""
    model = workload.model()
    optimizer = _adamw(model)
    x, target = workload.example()

    def step() -> None:
        workload.losses(model(x), target).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def masked_step(workload: Workload) -> Step:
    """Lamina, box: half of the batch may reach only the top 25 % of the layers."""
    cls = torch.zeros(workload.batch, dtype=torch.long)
    cls[workload.batch // 2 :] = 1
    return _private_step(workload, "box", {"open": {}, "sensitive": {"profile": {"top": 0.25}}}, cls)


def patients_step(workload: Workload) -> Step:
    """Lamina, box: the same examples, but one to six of them are a patient's, clipped together."""
    records = torch.arange(workload.batch) % 6 + 1
    unit = torch.arange(workload.batch).repeat_interleave(records)[: workload.batch]
    return _private_step(workload, "box", {"everyone": {}}, unit=unit)


def _with_torch_rules(make: Callable[[Workload], Step], workload: Workload) -> Step:
    """The same without native kernels: what runs where nothing could be built."""
    with native.switched(False):
        step = make(workload)

    def slower() -> None:
        with native.switched(False):
            step()

    return slower


def _private_step(
    workload: Workload, clipping: str, classes: dict[str, dict[str, Any]], cls: Tensor | None = None,
    unit: Tensor | None = None, compiled: bool = False,
) -> Step:  # fmt: skip
    """Classes of equal size, whose Poisson sampling would give this workload's batch on average."""
    model = workload.model()
    common = {"population": workload.batch * 100 // len(classes), "clip_norm": 1.0, "noise_multiplier": 1.0}
    table = {name: common | extra for name, extra in classes.items()}
    policy = Policy.from_dict({"corpus": {"origin": "benchmark", "delta": 1e-5}, "class": table})
    plan = make_plan(LayerStack.from_model(model), policy, batch=workload.batch, steps=10_000, clipping=clipping)
    engine = Engine(model, plan, compiled=compiled)
    engine.decline_probe()
    optimizer = _adamw(model)
    x, target = workload.example()

    def losses_of(x: Tensor, y: Tensor) -> Tensor:
        return workload.losses(model(x), y)

    def step() -> None:
        engine.step(losses_of, Batch(x, target, cls=cls, unit=unit))  # each step is a draw of its own
        optimizer.step()
        optimizer.zero_grad()

    if compiled:
        _compile(engine, step)
    return step


def _compile(engine: Engine, step: Step) -> None:
    """Take steps until the graph is there; LaminaError, with the reason, if the hook engine takes them all."""
    assert engine.compiled is not None
    for _ in range(4):
        step()
    if engine.compiled.steps == 0:
        problem = f"the step is no compiled graph: {engine.compiled.reason}"
        raise LaminaError("bench.not-compiled", problem, "docs/engine.md says what can be compiled")


LAMINA: dict[str, Callable[[Workload], Step]] = {
    clipping: partial(_private_step, clipping=clipping, classes={"everyone": {}}) for clipping in ("box", "joint")
}  # each layer clipped at its own threshold, or the whole scaled gradient at once; secure noise
TORCH_RULES: dict[str, Callable[[Workload], Step]] = {
    f"{name}_torch": partial(_with_torch_rules, make) for name, make in LAMINA.items()
}
COMPILED: dict[str, Callable[[Workload], Step]] = {
    f"{clipping}_compiled": partial(_private_step, clipping=clipping, classes={"everyone": {}}, compiled=True)
    for clipping in ("box", "joint")
}
UNITS: dict[str, Callable[[Workload], Step]] = {"patients": patients_step}
ROUTING: dict[str, Callable[[Workload], Step]] = {
    "masked": masked_step,
    "restricted": partial(_private_step, clipping="box", classes={"everyone": {"profile": {"top": 0.25}}}),
}  # restricted: the whole plan reaches only the top 25 % of the layers
VARIANTS: dict[str, Callable[[Workload], Step]] = {
    BASELINE: plain_step, **LAMINA, **TORCH_RULES, **COMPILED, **UNITS, **ROUTING, **PEERS,
}  # fmt: skip


def build_step(workload: Workload, variant: str) -> Step:
    """A ready step of that variant, warmed up so that what fails, fails here.

    Two steps, because the engine looks at who owns which row at the first two and then at every 128th.
    """
    if variant not in VARIANTS:
        problem = f"variant '{variant}' is not known"
        raise LaminaError("bench.variant-not-known", problem, f"choose from {', '.join(VARIANTS)}")
    step = VARIANTS[variant](workload)
    step()
    step()
    return step
