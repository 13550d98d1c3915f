"""Modules that break a private step whatever the plan says: each with its reason, and its remedy.

Clipping bounds what a contribution adds to the gradient. It bounds nothing if a module mixes contributions
in its forward pass, or writes to buffers or weights by another way than the optimiser's step.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm


class Break(enum.Enum):
    """What goes wrong."""

    BATCH_STATISTICS = "normalises each contribution by the others"
    RUNNING_STATISTICS = "moves its buffers with private data"
    RENORMALISES = "rewrites its weight in the forward pass, by the rows that were looked up"
    COUNTS_BATCH = "scales gradients by how often the batch holds a row"


@dataclass(frozen=True, kw_only=True, slots=True)
class Hazard:
    """One module that breaks the step: where, what it is, why, and what to do."""

    module: str
    kind: str
    what: Break
    state: str
    remedy: str

    def __str__(self) -> str:
        return f"module {self.module!r} is {self.kind} {self.state}, which {self.what.value}"


def hazards(model: nn.Module) -> Iterator[Hazard]:
    """Everything in the model, as it stands now, that breaks a private step."""
    for path, module in model.named_modules():
        found = _hazard(module)
        if found is not None:
            what, state, remedy = found
            name, here = path or "(root)", f"model.get_submodule({path!r})"
            yield Hazard(
                module=name,
                kind=type(module).__name__,
                what=what,
                state=state,
                remedy=remedy.format(here=here),
            )


def running_buffers(module: nn.Module) -> list[str]:
    """Names of the buffers that a module keeps as running statistics."""
    return [
        name
        for name, buffer in module.named_buffers(recurse=False)
        if buffer is not None and (name == "num_batches_tracked" or name.startswith("running_"))
    ]


def _hazard(module: nn.Module) -> tuple[Break, str, str] | None:
    if isinstance(module, _BatchNorm):
        if module.training:
            return (
                Break.BATCH_STATISTICS,
                "in training mode",
                "use `model, report = lamina.fix(model)` or GroupNorm",
            )
        if module.running_mean is None:
            return (
                Break.BATCH_STATISTICS,
                "without running statistics",
                "use `model, report = lamina.fix(model)` or GroupNorm",
            )
        return None
    if isinstance(module, _InstanceNorm):
        if module.training and running_buffers(module):
            return (
                Break.RUNNING_STATISTICS,
                "that tracks running statistics in training mode",
                "use `model, report = lamina.fix(model)`, or track_running_stats=False",
            )
        return None
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        if module.max_norm is not None:
            return (
                Break.RENORMALISES,
                f"with max_norm={module.max_norm:g}",
                "use `model, report = lamina.fix(model)`, or max_norm=None",
            )
        if module.scale_grad_by_freq:
            return (
                Break.COUNTS_BATCH,
                "with scale_grad_by_freq=True",
                "use `model, report = lamina.fix(model)`, or scale_grad_by_freq=False",
            )
        return None
    if module.training and (names := running_buffers(module)):
        return (
            Break.RUNNING_STATISTICS,
            f"with buffers {', '.join(names)} in training mode",
            "replace it by a module without running statistics; if it never writes them, call {here}.eval()",
        )
    return None
