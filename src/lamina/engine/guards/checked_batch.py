"""`CheckedBatch`: losses and batch that fit the plan and each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from lamina.engine.batch import Batch, RowLayout
from lamina.engine.guards.graph import LossGraph, walk_graph
from lamina.engine.layers.layer_rule import RuleCall, module_above
from lamina.errors import CouplingError, EngineError, OwnershipError
from lamina.plan.step_plan import StepPlan


@dataclass(frozen=True, kw_only=True)
class CheckedBatch:
    """A part of a batch that may be differentiated."""

    losses: Tensor
    weights: Tensor  # (n,) of each example inside its contribution: they sum to 1 there
    classes: Tensor  # (P,)
    scale: Tensor | None  # (P,) of the thresholds, where some contribution is stricter than its class
    ceiling: Tensor | None  # (P,) of the whole clipped gradient, where one is signed
    layout: RowLayout
    layouts: Mapping[RuleCall, RowLayout]
    graph: LossGraph


def check_batch(losses: Tensor | None, batch: Batch, plan: StepPlan, names: Mapping[int, str]) -> CheckedBatch | None:
    """Check losses and batch against the plan. None for an empty batch."""
    n, classes = batch.examples, check_classes(batch, plan)
    if n == 0 or len(batch) == 0:
        if losses is not None and losses.numel():
            problem = f"{losses.numel()} losses came with an empty batch"
            raise EngineError("engine.losses-for-empty-batch", problem, "pass losses=None")
        return None
    losses = check_losses(losses, n)
    graph = walk_graph(losses, names)
    unit, weight = cast(Tensor, batch.unit), cast(Tensor, batch.weight)
    if batch.plain:
        layout, share = RowLayout.one_each(unit), weight
    else:
        layout = RowLayout(torch.where(weight > 0, unit, -1), len(batch))
        whole = torch.zeros(len(batch)).index_add_(0, unit, weight)
        share = torch.where(weight > 0, weight / whole[unit].clamp(min=torch.finfo(torch.float32).tiny), 0.0)
    layouts = {use: _layout_of_call(use, node.lamina_rows, n, layout) for use, node in graph.nodes.items()}
    return CheckedBatch(
        losses=losses, weights=share.to(losses), classes=classes, scale=batch.scale, ceiling=batch.ceiling,
        layout=layout, layouts=layouts, graph=graph,
    )  # fmt: skip


def check_classes(batch: Batch, plan: StepPlan) -> Tensor:
    """The class of every contribution, if the plan knows it."""
    if not batch.classified and len(plan.classes) > 1:
        problem = f"the batch has no classes, and the plan has {len(plan.classes)}"
        raise EngineError("engine.classes-not-given", problem, "give Batch(..., cls=…), by plan.index('name')")
    classes = cast(Tensor, batch.cls)
    if len(classes) and int(classes.max()) >= len(plan.classes):
        problem = (
            f"the batch has a contribution of class {int(classes.max())}, the plan has {len(plan.classes)} classes"
        )
        raise EngineError("engine.class-index-unknown", problem, "give cls by plan.index('name')")
    return classes


def check_losses(losses: Tensor | None, n: int) -> Tensor:
    if losses is None:
        problem = f"losses is None for a batch of {n} examples"
        raise EngineError("engine.losses-missing", problem, "pass one loss per example")
    if losses.dim() == 0:
        problem = "losses is a single number: a mean or sum over the batch mixes contributions"
        remedy = "pass one loss per example: reduction='none', then .flatten(1).mean(1)"
        raise CouplingError("engine.losses-reduced", problem, remedy)
    if losses.dim() == 1 and len(losses) != n:
        problem = f"there are {len(losses)} losses for {n} examples in the batch"
        raise EngineError("engine.losses-wrong-length", problem, "compute them from this batch's x and y")
    if losses.shape != (n,):
        problem = f"losses has shape {tuple(losses.shape)}, must be ({n},): one loss per example"
        remedy = "reduce every axis but the first: losses.flatten(1).mean(1)"
        raise EngineError("engine.losses-wrong-shape", problem, remedy)
    if losses.dtype == torch.float16:
        problem = "the losses are float16, whose sums overflow"
        raise EngineError("engine.losses-float16", problem, "use bfloat16 autocast, or float32")
    if type(losses.grad_fn).__name__ == "MulBackward0":
        factor = getattr(losses.grad_fn, "_saved_other", None)
        if isinstance(factor, Tensor) and factor.dim() == 0 and _is_loss_scale(float(factor.detach())):
            problem = f"the losses are multiplied by {float(factor):g}, as a GradScaler does"
            raise EngineError("engine.losses-scaled", problem, "drop the GradScaler: bfloat16 autocast needs none")
    return losses


def _is_loss_scale(value: float) -> bool:
    return value >= 1024 and value == 2.0 ** round(torch.log2(torch.tensor(value)).item())


def _layout_of_call(use: RuleCall, rows: int, n: int, layout: RowLayout) -> RowLayout:
    owner = use.example_of_row
    if owner is None:
        if rows == n:
            return layout
        above = module_above(use.where)
        raise OwnershipError(
            "engine.row-owner-unknown",
            f"'{use.where}' got {rows} rows for a batch of {n} examples: their owners are unknown",
            f"keep the batch axis first, name a module that takes a batch, such as per_contribution=[{above!r}], or say "
            f"which example each row belongs to: `with lamina.rows(owner):` in the model, rows={{{use.where!r}: 'contiguous'}}",
        )
    if len(owner) != rows or (rows and not (int(owner.min()) >= -1 and int(owner.max()) < n)):
        problem = f"the row map of '{use.where}' has {len(owner)} entries for {rows} rows, or one outside -1 … {n - 1}"
        raise OwnershipError("engine.row-map-wrong", problem, "give one example of this batch per row, -1 for padding")
    return layout.through(owner)
