"""Looking at losses and batch before a step: everything that can be refused is refused here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from lamina.engine.batch import Batch
from lamina.engine.function import Use
from lamina.engine.graph import Graph, walk
from lamina.engine.layout import Layout
from lamina.errors import CouplingError, EngineError, OwnershipError
from lamina.plan.step import StepPlan


@dataclass(frozen=True, kw_only=True)
class Examined:
    """A part of a batch that may be differentiated."""

    losses: Tensor
    weights: Tensor  # (n,) of each example inside its contribution: they sum to 1 there
    classes: Tensor  # (P,)
    scale: Tensor | None  # (P,) of the thresholds, where some contribution is stricter than its class
    ceiling: Tensor | None  # (P,) of the whole clipped gradient, where one is signed
    layout: Layout
    layouts: Mapping[Use, Layout]
    graph: Graph


def examine(losses: Tensor | None, batch: Batch, plan: StepPlan, names: dict[int, str]) -> Examined | None:
    """None for an empty batch."""
    if not batch.classified and len(plan.classes) > 1:
        raise EngineError(
            "engine.batch-not-say",
            f"the batch does not say which of the plan's {len(plan.classes)} classes its contributions have",
            "give Batch(..., cls=…): indices into plan.classes, plan.index('name')",
        )
    n = batch.examples
    classes = cast(Tensor, batch.cls)
    if len(classes) and int(classes.max()) >= len(plan.classes):
        raise EngineError(
            "engine.batch-contribution-class",
            f"the batch has a contribution of class {int(classes.max())}, the plan has {len(plan.classes)} classes",
            "cls holds indices into plan.classes: plan.index('name')",
        )
    if n == 0 or len(batch) == 0:
        if losses is not None and losses.numel():
            raise EngineError(
                "engine.losses-came-empty",
                f"{losses.numel()} losses came with an empty batch",
                "pass losses=None",
            )
        return None
    losses = check_losses(losses, n)
    graph = walk(losses, names)
    unit, weight = cast(Tensor, batch.unit), cast(Tensor, batch.weight)
    layout = Layout(torch.where(weight > 0, unit, -1), len(batch))
    whole = torch.zeros(len(batch)).index_add_(0, unit, weight)
    share = torch.where(weight > 0, weight / whole[unit].clamp(min=torch.finfo(torch.float32).tiny), 0.0)
    return Examined(
        losses=losses,
        weights=share.to(losses.dtype),
        classes=classes,
        scale=batch.scale,
        ceiling=batch.ceiling,
        layout=layout,
        layouts={use: _layout(use, node.lamina_rows, n, layout) for use, node in graph.nodes.items()},
        graph=graph,
    )


def check_losses(losses: Tensor | None, n: int) -> Tensor:
    if losses is None:
        raise EngineError(
            "engine.losses-none-batch",
            f"losses is None for a batch of {n} examples",
            "pass one loss per example",
        )
    if losses.dim() == 0:
        raise CouplingError(
            "engine.losses-single-number",
            "losses is a single number: a mean or sum over the batch mixes contributions",
            "pass one loss per example: reduction='none', then .flatten(1).mean(1)",
        )
    if losses.dim() == 1 and len(losses) != n:
        raise EngineError(
            "engine.losses-examples-batch",
            f"there are {len(losses)} losses for {n} examples in the batch",
            "compute them from this batch's x and y",
        )
    if losses.shape != (n,):
        raise EngineError(
            "engine.losses-shape-expected",
            f"losses has shape {tuple(losses.shape)}, expected ({n},): one loss per example",
            "reduce every axis but the first: losses.flatten(1).mean(1)",
        )
    root = losses.grad_fn
    if losses.dtype == torch.float16:
        raise EngineError(
            "engine.losses-float16-whose",
            "losses are float16, whose sums overflow",
            "use bfloat16 autocast, or float32",
        )
    if type(root).__name__ == "MulBackward0":
        factor = getattr(root, "_saved_other", None)
        if isinstance(factor, Tensor) and factor.dim() == 0 and _is_loss_scale(float(factor)):
            raise EngineError(
                "engine.losses-multiplied-gradscaler",
                f"the losses are multiplied by {float(factor):g}, as a GradScaler does",
                "drop the GradScaler: bfloat16 autocast needs none",
            )
    return losses


def _is_loss_scale(value: float) -> bool:
    return value >= 1024 and value == 2.0 ** round(torch.log2(torch.tensor(value)).item())


def _layout(use: Use, rows: int, n: int, layout: Layout) -> Layout:
    owner = use.example_of_row
    if owner is None:
        if rows == n:
            return layout
        raise OwnershipError(
            "engine.worked-rows-batch",
            f"'{use.where}' worked on {rows} rows for a batch of {n} examples: whose rows are they?",
            "keep the batch axis first; or say whose rows they are with `with lamina.rows(owner):` in the model or "
            f"Engine(..., rows={{{use.where!r}: 'contiguous'}}); or run a module above it once per contribution: "
            "Engine(..., per_contribution=['name'])",
        )
    if len(owner) != rows or (rows and not (int(owner.min()) >= -1 and int(owner.max()) < n)):
        raise OwnershipError(
            "engine.row-map-entries",
            f"the row map of '{use.where}' has {len(owner)} entries for {rows} rows, or names an example "
            f"outside 0 … {n - 1}",
            "give one example of this batch per row, -1 for nobody",
        )
    return layout.through(owner)
