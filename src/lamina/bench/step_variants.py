"""The steps that are measured: the plain step, Lamina's, and Opacus' three modes.

Each is a function that makes one whole step.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lamina.allocate.make_plan import make_plan
from lamina.bench.workloads import Workload
from lamina.engine.batch import Batch
from lamina.engine.engine import Engine
from lamina.errors import LaminaError
from lamina.plan.layer_stack import LayerStack
from lamina.plan.policy import Policy

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


def opacus_hooks(workload: Workload) -> Callable[[], None]:
    """Per-sample gradients kept by hooks, flat clipping."""
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    model = GradSampleModule(workload.model(), strict=False)
    optimizer = DPOptimizer(
        _adamw(model),
        noise_multiplier=PEER_NOISE_MULTIPLIER,
        max_grad_norm=PEER_CLIP_NORM,
        expected_batch_size=workload.batch,
    )
    return _training_step(workload, model, optimizer)


def opacus_per_layer(workload: Workload) -> Callable[[], None]:
    """Per-sample gradients kept by hooks, one threshold for each tensor."""
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPPerLayerOptimizer

    model = GradSampleModule(workload.model(), strict=False)
    tensors = sum(1 for _ in model.parameters())
    optimizer = DPPerLayerOptimizer(
        _adamw(model),
        noise_multiplier=PEER_NOISE_MULTIPLIER,
        max_grad_norm=[PEER_CLIP_NORM / tensors**0.5] * tensors,
        expected_batch_size=workload.batch,
    )
    return _training_step(workload, model, optimizer)


def opacus_ghost(workload: Workload) -> Callable[[], None]:
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


def _training_step(workload: Workload, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    criterion = _Criterion(workload)
    x, target = workload.example()

    def step() -> None:
        criterion(model(x), target).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


PEERS: dict[str, Callable[[Workload], Callable[[], None]]] = {
    "opacus_hooks": opacus_hooks,
    "opacus_per_layer": opacus_per_layer,
    "opacus_ghost": opacus_ghost,
}


# What is measured: the plain step, Lamina's steps, and the peers. Each is a function that makes one whole step.
#
# A step is: forward, loss, backward, clipping, noise, AdamW, gradients dropped. The batch is fixed and already there.

Step = Callable[[], None]
BASELINE = "plain"


def plain_step(workload: Workload) -> Step:
    """The non-private step that every ratio is relative to."""
    model = workload.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, target = workload.example()

    def step() -> None:
        workload.losses(model(x), target).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def box_step(workload: Workload) -> Step:
    """Lamina, each layer clipped at its own threshold, secure noise."""
    return _private_step(workload, _single_class_policy(_policy_class(workload)), "box")


def joint_step(workload: Workload) -> Step:
    """Lamina, one clip of the whole scaled gradient, secure noise."""
    return _private_step(workload, _single_class_policy(_policy_class(workload)), "joint")


def masked_step(workload: Workload) -> Step:
    """Lamina, box: half of the batch may reach only the top 25 % of the layers."""
    half = workload.batch // 2
    policy: dict[str, object] = {
        "class": {
            "open": _policy_class(workload, share=0.5),
            "sensitive": _policy_class(workload, share=0.5, profile={"top": 0.25}),
        }
    }
    cls = torch.zeros(workload.batch, dtype=torch.long)
    cls[half:] = 1
    return _private_step(workload, policy, "box", cls)


def restricted_step(workload: Workload) -> Step:
    """Lamina, box: the whole plan reaches only the top 25 % of the layers."""
    return _private_step(workload, _single_class_policy(_policy_class(workload, profile={"top": 0.25})), "box")


def _policy_class(workload: Workload, share: float = 1.0, **extra: object) -> dict[str, object]:
    """A class whose Poisson sampling would give this workload's batch on average."""
    return {"population": int(workload.batch * 100 * share), "clip_norm": 1.0, "noise_multiplier": 1.0, **extra}


def _single_class_policy(single: dict[str, object]) -> dict[str, object]:
    return {"class": {"everyone": single}}


def _private_step(workload: Workload, policy: dict[str, object], clipping: str, cls: Tensor | None = None) -> Step:
    model = workload.model()
    stack = LayerStack.from_model(model)
    plan = make_plan(
        stack,
        Policy.from_dict({"corpus": {"origin": "benchmark", "delta": 1e-5}, **policy}),
        batch=workload.batch,
        steps=10_000,
        clipping=clipping,
    )
    engine = Engine(model, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, target = workload.example()
    batch = Batch(x, target, cls=cls)

    def step() -> None:
        engine.backward(workload.losses(model(batch.x), batch.y), batch)
        optimizer.step()
        optimizer.zero_grad()

    return step


LAMINA: dict[str, Callable[[Workload], Step]] = {"box": box_step, "joint": joint_step}
ROUTING: dict[str, Callable[[Workload], Step]] = {"masked": masked_step, "restricted": restricted_step}
VARIANTS: dict[str, Callable[[Workload], Step]] = {BASELINE: plain_step, **LAMINA, **ROUTING, **PEERS}


def build_step(workload: Workload, variant: str) -> Step:
    """A ready step of that variant, warmed up so that what fails, fails here.

    Two steps, because the engine looks at who owns which row at the first two and then at every 128th.
    """
    if variant not in VARIANTS:
        raise LaminaError(
            "bench.variant-not-known", f"variant '{variant}' is not known", f"choose from {', '.join(VARIANTS)}"
        )
    step = VARIANTS[variant](workload)
    step()
    step()
    return step
