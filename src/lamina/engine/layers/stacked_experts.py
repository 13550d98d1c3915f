"""Mixtures of experts whose weights are stacked along a first axis, as Hugging Face Mixtral and others keep them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lamina.engine import batch
from lamina.engine.batch import RowLayout
from lamina.engine.execute.grads import ContributionGrads, StackedGrads
from lamina.engine.layers.layer_rule import (
    ApplyRule,
    LayerForward,
    LayerRule,
    Needed,
    ParameterGrads,
    Params,
    SavedTensors,
    cast_for_autocast,
    has_class_forward,
)
from lamina.engine.layers.linear import LinearRule
from lamina.errors import CouplingError, UnsupportedLayer


class StackedExpertsRule(LayerRule):
    """y_r = W[e] x_r + b[e], rows sorted by their expert e.

    One contribution: dW[e] = Σ g_r ⊗ x_r, db[e] = Σ g_r over its rows r at e.
    """

    def __init__(self, counts: Sequence[int], *, transposed: bool) -> None:
        self.counts, self.transposed = counts, transposed  # transposed: W[e] is (in, out)
        self.one = LinearRule(transposed=transposed)

    def _groups(self) -> Iterator[tuple[int, int, int]]:
        """(expert, first row, stop) of the experts that have rows."""
        for e, (first, stop) in enumerate(pairwise(accumulate(self.counts, initial=0))):
            if first < stop:
                yield e, first, stop

    def run(self, x: Tensor, params: Params) -> tuple[Tensor, SavedTensors]:
        x, weight, bias = cast_for_autocast(x, params)
        matrices = weight.transpose(1, 2) if self.transposed else weight  # (E, out, in)
        parts = [
            F.linear(x[first:stop], matrices[e], None if bias is None else bias[e]) for e, first, stop in self._groups()
        ]
        return torch.cat(parts) if parts else x.new_zeros(0, matrices.shape[1]), (x,)

    def input_grad(self, saved: SavedTensors, params: Params, g: Tensor) -> Tensor:
        weight = cast(Tensor, params[0]).to(g.dtype)
        matrices = weight.transpose(1, 2) if self.transposed else weight
        parts = [g[first:stop] @ matrices[e] for e, first, stop in self._groups()]
        return torch.cat(parts) if parts else torch.zeros_like(saved[0])

    def contribution_grads(self, saved: SavedTensors, g: Tensor, layout: RowLayout, need: Needed) -> ParameterGrads:
        made: list[dict[int, ContributionGrads]] = [{} for _ in need]
        for e, first, stop in self._groups():
            mine = RowLayout(layout.owner[first:stop], layout.units)
            grads = self.one.contribution_grads((saved[0][first:stop],), g[first:stop], mine, need)
            for parts, grad in zip(made, grads, strict=True):
                if grad is not None:
                    parts[e] = grad
        matrix = (g.shape[1], saved[0].shape[1])
        shapes = [matrix[::-1] if self.transposed else matrix, matrix[:1]]
        return [
            StackedGrads(parts, torch.Size((len(self.counts), *shape)), layout.units, g.device) if needed else None
            for parts, shape, needed in zip(made, shapes, need, strict=False)
        ]


class ExpertsForward(LayerForward):
    """The experts of one block, given flattened tokens and which experts each of them goes to.

    A token's experts depend on that token alone: no capacity, no choice by the expert. `rows_of` says which example
    each token belongs to.
    """

    def __init__(
        self, name: str, module: Any, forward: Callable[..., Any], rows_of: Callable[[Tensor], Tensor]
    ) -> None:
        self.name, self.module, self.original, self.rows_of = name, module, forward, rows_of
        up = "gate_up_proj" if module.has_gate else "up_proj"
        self.up = (up, f"{up}_bias") if module.has_bias else (up,)
        self.down = ("down_proj", "down_proj_bias") if module.has_bias else ("down_proj",)
        self.parameters = (*self.up, *self.down)
        self.checked = False
        if getattr(getattr(module, "config", None), "output_router_logits", False):
            problem = f"the config of '{name}' has output_router_logits=True, for a loss over the whole batch"
            remedy = "set model.config.output_router_logits = False and train without the auxiliary loss"
            raise CouplingError("engine.router-loss", problem, remedy)

    @staticmethod
    def applies_to(module: Any) -> bool:
        """Whether a module keeps the attributes by which such modules exchange their implementations."""
        wanted = ("has_gate", "has_bias", "is_transposed", "num_experts", "down_proj")
        if not all(hasattr(module, name) for name in wanted) or not has_class_forward(module):
            return False
        if not hasattr(module, "_apply_gate" if module.has_gate else "act_fn"):
            return False
        up = "gate_up_proj" if module.has_gate else "up_proj"
        names = {up, "down_proj"} | ({f"{up}_bias", "down_proj_bias"} if module.has_bias else set())
        own = {name: p for name, p in module.named_parameters() if p is not None}
        return (
            set(own) == names
            and all(p.dim() == (2 if name.endswith("_bias") else 3) for name, p in own.items())
            and not getattr(module, "has_post_expert_norm", False)
        )

    def forward(self, apply: ApplyRule, *args: Any, **kwargs: Any) -> Tensor:
        if not self.checked:
            self._check(*args, **kwargs)
        return self._call(apply, *args, **kwargs)

    def _call(self, apply: ApplyRule, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        m = self.module
        expert, order = torch.sort(top_k_index.reshape(-1), stable=True)
        counts = torch.bincount(expert, minlength=m.num_experts)[: m.num_experts].tolist()
        order = order[: sum(counts)]  # a token may be sent to an expert that is not here
        token = torch.div(order, top_k_index.shape[-1], rounding_mode="floor")
        with batch.rows(self.rows_of(hidden_states)[token.cpu()]):
            h = apply(StackedExpertsRule(counts, transposed=m.is_transposed), hidden_states[token], *self.up)
            h = m._apply_gate(h) if m.has_gate else m.act_fn(h)
            h = apply(StackedExpertsRule(counts, transposed=m.is_transposed), h, *self.down)
        h = h * top_k_weights.reshape(-1)[order].unsqueeze(1)
        return torch.zeros_like(hidden_states).index_add(0, token, h.to(hidden_states.dtype))

    def _check(self, *args: Any, **kwargs: Any) -> None:
        """Once: the module must compute what `_call` computes."""

        def without_engine(rule: LayerRule, x: Tensor, *names: str) -> Tensor:
            return rule.run(x, [self.module.get_parameter(name) for name in names])[0]

        with torch.no_grad():
            want, found = self.original(*args, **kwargs), self._call(without_engine, *args, **kwargs)
        near = 1e-3 * want.abs().amax(-1) + 1e-9
        if want.shape != found.shape or bool(((want - found).abs().amax(-1) > near).any()):
            problem = f"'{self.name}' ({type(self.module).__name__}) does not compute what stacked experts compute"
            remedy = "name the block above it in Engine(..., per_contribution=[...])"
            raise UnsupportedLayer("engine.experts-differ", problem, remedy)
        self.checked = len(want) > 0


def modules_in_expert_blocks(model: nn.Module) -> frozenset[str]:
    """Names of the modules inside the blocks that hold stacked experts: they see tokens without the batch axis."""
    blocks = [
        name.rpartition(".")[0] for name, module in model.named_modules() if name and ExpertsForward.applies_to(module)
    ]
    inside = tuple(f"{block}." if block else "" for block in blocks)
    return frozenset(name for name, _ in model.named_modules() if name and name.startswith(inside))
