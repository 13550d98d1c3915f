"""nn.Embedding, also where its ids carry no batch axis (position ids)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from lamina.engine.layout import Layout
from lamina.engine.parts import Scatter
from lamina.engine.rules.rule import Apply, Kept, Params, Rule, Site
from lamina.engine.unitgrad import UnitGrad
from lamina.errors import UnsupportedLayer


class Embedding(Rule):
    """y = W[ids]. One contribution: dW[id] = Σ of g over the positions where it looked id up."""

    def __init__(self, rows: int, padding_idx: int | None) -> None:
        self.table_rows, self.padding_idx = rows, padding_idx

    def run(self, x: Tensor, params: Params) -> tuple[Tensor, Kept]:
        return F.embedding(x, cast(Tensor, params[0])), (x,)

    def input_grad(self, kept: Kept, params: Params, g: Tensor) -> Tensor:
        raise AssertionError("ids have no gradient")

    def unit_grads(
        self, kept: Kept, g: Tensor, layout: Layout, need: Sequence[bool]
    ) -> list[UnitGrad | None]:
        ids, g = layout.fold(kept[0]), layout.fold(g)
        units = g.shape[0]
        return [
            Scatter(
                ids.reshape(units, -1), g.reshape(units, -1, g.shape[-1]), self.table_rows, self.padding_idx
            )
        ]


class EmbeddingSite(Site):
    def __init__(self, module: nn.Embedding) -> None:
        for name, value in (
            ("max_norm", module.max_norm),
            ("scale_grad_by_freq", module.scale_grad_by_freq),
            ("sparse", module.sparse),
        ):
            if value:
                raise UnsupportedLayer(
                    "engine.nn-embedding-writes",
                    f"nn.Embedding with {name}={value} "
                    + (
                        "writes to its weights by who is in the batch"
                        if name == "max_norm"
                        else "is not supported"
                    ),
                    f"use {name}={'None' if name == 'max_norm' else 'False'}, or `model, report = lamina.fix(model)`",
                )
        self.parameters = ("weight",)
        self.rule = Embedding(module.num_embeddings, module.padding_idx)

    def forward(self, apply: Apply, *args: Any, **kwargs: Any) -> Tensor:
        return self._call(apply, *args, **kwargs)

    def _call(self, apply: Apply, input: Tensor) -> Tensor:
        return apply(self.rule, input, "weight")
