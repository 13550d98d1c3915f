"""Whether a plan covers a model: every trainable tensor once, and nothing else that data could move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lamina.errors import CoverageError
from lamina.plan.hazards import hazards
from lamina.plan.slices import outside
from lamina.plan.step import StepPlan
from lamina.plan.table import places
from lamina.plan.tensors import Tensors
from lamina.plan.trace import call


@dataclass(frozen=True, kw_only=True, slots=True)
class Coverage:
    """What becomes of every tensor of a model under a plan.

    covered      noised at every step, and clipped in every private class that reaches it
    public_only  trained without noise, by public classes alone
    unreached    trainable, but no class reaches it: gets no gradient and stays as it is
    closed       likewise, of a tensor that is reached elsewhere: 'block.out.weight[:, 8:16]'
    frozen       not trainable
    buffers      not trained; checked for modules that write them
    """

    covered: tuple[str, ...]
    public_only: tuple[str, ...]
    unreached: tuple[str, ...]
    frozen: tuple[str, ...]
    buffers: tuple[str, ...]
    closed: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = f" and parts of {len(self.closed)}" if self.closed else ""
        return (
            f"{len(self.covered)} tensors clipped and noised, {len(self.public_only)} trained by public "
            f"classes only, {len(self.unreached)}{parts} not reached, {len(self.frozen)} frozen, "
            f"{len(self.buffers)} buffers"
        )


def check_coverage(model: nn.Module, plan: StepPlan, example: Any = None) -> Coverage:
    """Compare model and plan; refuse, naming the tensor or module, if anything would train unaccounted.

    With `example`, a public or made-up input, one forward pass also shows buffers that no list of modules
    names; model and random state are left as they were.
    """
    tensors = Tensors.of(model)
    planned = {name: i for i, layer in enumerate(plan.layers) for name in layer.parameters}
    for name in tensors.trainable:
        if name not in planned:
            raise CoverageError(
                "plan.tensor-trainable-no",
                f"tensor {name!r} is trainable and in no layer of the plan: it would train without noise",
                "freeze it with requires_grad_(False), or make stack and plan again from this model",
            )
    for name, i in planned.items():
        if name in tensors.frozen:
            raise CoverageError(
                "plan.tensor-layer-frozen",
                f"tensor {name!r} of layer {plan.layers[i].name!r} is frozen but the plan trains it",
                "make it trainable, or make stack and plan again from this model",
            )
        if name not in tensors.sizes:
            raise CoverageError(
                "plan.tensor-layer-not",
                f"tensor {name!r} of layer {plan.layers[i].name!r} is not in the model",
                "make stack and plan again from this model (a tensor tied later goes by its first name)",
            )
    for layer in plan.layers:
        size = sum(tensors.sizes[name] for name in layer.parameters)
        if size != layer.size:
            raise CoverageError(
                "plan.layer-parameters-model",
                f"layer {layer.name!r} has {size} parameters in the model and {layer.size} in the plan",
                "make stack and plan again from this model",
            )
    for part in plan.slices:
        shape = tuple(model.get_parameter(part.tensor).shape) or (1,)
        if part.axis >= len(shape) or shape[part.axis] != part.length:
            raise CoverageError(
                "plan.slice-class-along",
                f"the slice of {part.tensor!r} for class {part.cls!r} is along axis {part.axis} of {part.length}, the "
                f"tensor is {' × '.join(map(str, shape))}",
                "make stack and plan again from this model",
            )
    for hazard in hazards(model):
        raise CoverageError("plan.check-coverage", str(hazard), hazard.remedy)
    if example is not None:
        _watch_buffers(model, example)
    return _sort(model, plan, tensors)


def _watch_buffers(model: nn.Module, example: Any) -> None:
    """Refuse a buffer that a forward pass, in the modes that the modules are in, writes to."""
    before = {name: (buffer, buffer.detach().clone()) for name, buffer in model.named_buffers()}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        call(model, example)
        after = dict(model.named_buffers())
        moved = [name for name, (_, value) in before.items() if not _same(after.get(name), value)]
        for buffer, value in before.values():
            buffer.copy_(value)
    if moved:
        raise CoverageError(
            "plan.buffer-written-forward",
            f"buffer {moved[0]!r} is written in the forward pass: private data would move it without noise",
            f"hold its module in eval mode: model.get_submodule({moved[0].rpartition('.')[0]!r}).eval(), "
            "or replace it",
        )


def _same(now: torch.Tensor | None, then: torch.Tensor) -> bool:
    return now is not None and now.shape == then.shape and torch.equal(now.nan_to_num(), then.nan_to_num())


def _sort(model: nn.Module, plan: StepPlan, tensors: Tensors) -> Coverage:
    found: dict[str, list[str]] = {"covered": [], "public_only": [], "unreached": []}
    closed: list[str] = []
    for i, layer in enumerate(plan.layers):
        if plan.noise[i] > 0:
            place = "covered"
        else:
            place = "public_only" if any(row[i] > 0 for row in plan.clip) else "unreached"
        for name in layer.parameters:
            opened = plan.open_ranges(name)
            if opened is None or place == "unreached":
                found[place].append(name)
            elif not opened[1]:
                found["unreached"].append(name)
            else:
                found[place].append(name)
                axis, ranges = opened
                length = next(part.length for part in plan.slices if part.tensor == name)
                closed.append(f"{name}{places(axis, outside(ranges, length))}")
    return Coverage(
        covered=tuple(found["covered"]),
        public_only=tuple(found["public_only"]),
        unreached=tuple(found["unreached"]),
        frozen=tensors.frozen,
        buffers=tuple(name for name, _ in model.named_buffers()),
        closed=tuple(closed),
    )
