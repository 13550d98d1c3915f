"""What is measured: the plain step, Lamina's steps, and the peers. Each is a function that makes one whole step.

A step is: forward, loss, backward, clipping, noise, AdamW, gradients dropped. The batch is fixed and already there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lamina.allocate import make_plan
from lamina.bench import peers
from lamina.bench.workloads import Workload
from lamina.engine import Batch, Engine
from lamina.errors import LaminaError
from lamina.plan import LayerStack, Policy

Step = Callable[[], None]
BASELINE = "plain"


def plain(workload: Workload) -> Step:
    """The non-private step that every ratio is relative to."""
    model = workload.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, target = workload.example()

    def step() -> None:
        workload.losses(model(x), target).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def box(workload: Workload) -> Step:
    """Lamina, each layer clipped at its own threshold, secure noise."""
    return _private(workload, _policy(_class(workload)), "box")


def joint(workload: Workload) -> Step:
    """Lamina, one clip of the whole scaled gradient, secure noise."""
    return _private(workload, _policy(_class(workload)), "joint")


def masked(workload: Workload) -> Step:
    """Lamina, box: half of the batch may reach only the top 25 % of the layers."""
    half = workload.batch // 2
    policy: dict[str, object] = {
        "class": {
            "open": _class(workload, share=0.5),
            "sensitive": _class(workload, share=0.5, profile={"top": 0.25}),
        }
    }
    cls = torch.zeros(workload.batch, dtype=torch.long)
    cls[half:] = 1
    return _private(workload, policy, "box", cls)


def restricted(workload: Workload) -> Step:
    """Lamina, box: the whole plan reaches only the top 25 % of the layers."""
    return _private(workload, _policy(_class(workload, profile={"top": 0.25})), "box")


def _class(workload: Workload, share: float = 1.0, **extra: object) -> dict[str, object]:
    """A class whose Poisson sampling would give this workload's batch on average."""
    return {
        "population": int(workload.batch * 100 * share),
        "clip_norm": 1.0,
        "noise_multiplier": 1.0,
        **extra,
    }


def _policy(single: dict[str, object]) -> dict[str, object]:
    return {"class": {"everyone": single}}


def _private(workload: Workload, policy: dict[str, object], clipping: str, cls: Tensor | None = None) -> Step:
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


LAMINA: dict[str, Callable[[Workload], Step]] = {"box": box, "joint": joint}
ROUTING: dict[str, Callable[[Workload], Step]] = {"masked": masked, "restricted": restricted}
VARIANTS: dict[str, Callable[[Workload], Step]] = {BASELINE: plain, **LAMINA, **ROUTING, **peers.PEERS}


def build(workload: Workload, variant: str) -> Step:
    """A ready step of that variant, warmed up so that what fails, fails here.

    Two steps, because the engine looks at who owns which row at the first two and then at every 128th.
    """
    if variant not in VARIANTS:
        raise LaminaError(
            "bench.variant-not-known",
            f"variant '{variant}' is not known",
            f"choose from {', '.join(VARIANTS)}",
        )
    step = VARIANTS[variant](workload)
    step()
    step()
    return step
