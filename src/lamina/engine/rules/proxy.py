"""`Proxy` and `ProxyShares`: layers measured on public or simulated data at the weights of the moment, while a plan runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lamina.allocate.measure.energy import raise_shares_to_floor
from lamina.allocate.measure.example_gradients import example_count, fisher, take_examples
from lamina.allocate.measure.influence import influence
from lamina.engine.batch import model_device
from lamina.engine.distributed import ALONE, Ranks
from lamina.errors import EngineError, LaminaError
from lamina.plan.layer_stack import LayerStack, call_arguments
from lamina.plan.rules import FollowProxy
from lamina.plan.step_plan import StepPlan

_STREAM = 0x4C61_6D69_6E61  # the generator that draws proxy examples: the data are public, so it may be known


@dataclass(frozen=True, kw_only=True, eq=False)
class Proxy:
    """Public or simulated examples on which a plan's rule measures the layers.

    source   where x comes from: 'public' or 'simulated', a remark may follow ("simulated: ECG")
    x, y     examples on the first axis; y is None where the model is trained to give x back
    loss_fn  (output, y), or (output, x) without y: one loss per example
    """

    source: str
    x: Any
    y: Any = None
    loss_fn: Callable[[Any, Any], Tensor]

    def __post_init__(self) -> None:
        if self.source.partition(":")[0].strip() not in ("public", "simulated"):
            problem = f"the proxy is called {self.source!r}"
            remedy = "give public or simulated data and say so, as in 'simulated: ECG'; private data would have to be paid for"
            raise EngineError("engine.proxy-not-public", problem, remedy)


class ProxyShares:
    """Shares by Fisher information or influence, on examples drawn by a stream of its own, in a twin of the model.

    Formal guarantee. What it computes is a function of the current weights, which are released, of public data and of
    the number of the step: post-processing, so it costs nothing (docs/theory.md). The user's model is read, never run.

    Of several ranks rank 0 measures, and all take its shares: another processor may round in another way.
    """

    def __init__(self, model: nn.Module, plan: StepPlan, rule: FollowProxy, proxy: Proxy, ranks: Ranks = ALONE) -> None:
        if (said := proxy.source.partition(":")[0].strip()) != rule.proxy:
            problem = f"the plan measures {rule.proxy} data, the proxy is {said}"
            raise EngineError("engine.proxy-of-other-kind", problem, f"give {rule.proxy} data, or plan for {said}")
        self.rule, self.proxy, self._from, self._ranks = rule, proxy, model, ranks
        self._twin = copy.deepcopy(model)
        layers = {layer.name: layer for layer in LayerStack.from_model(self._twin)}
        if tuple(layers) != tuple(layer.name for layer in plan.layers):
            problem = "the plan groups layers in another way than the model's own, and a proxy is measured by those"
            raise EngineError("engine.proxy-of-other-layers", problem, "plan with LayerStack.from_model(model)")
        self._stack = LayerStack.from_model(self._twin)
        self.measured(0)  # a proxy that cannot be measured is refused here, before anything is spent

    def due(self, step: int) -> bool:
        return step % self.rule.every == 0

    def shares(self, step: int, layers: NDArray[np.int64], sizes: NDArray[np.float64]) -> NDArray[np.float64] | None:
        """w ∝ n·√d over these layers, Σw = 1, w ≥ least/L, n the measured size; None where nothing can be measured."""
        found = self._shares(step, layers, sizes) if self._ranks.first else None
        if self._ranks.alone:
            return found
        self._ranks.agree(step)  # an error of rank 0 stops all
        sent = self._ranks.broadcast(b"" if found is None else found.astype("<f8").tobytes())
        return np.frombuffer(sent, dtype="<f8").astype(np.float64) if sent else None

    def _shares(self, step: int, layers: NDArray[np.int64], sizes: NDArray[np.float64]) -> NDArray[np.float64] | None:
        try:
            found = self.measured(step)[layers]
        except LaminaError:  # at these weights, on these examples: the shares stay as they are
            return None
        with np.errstate(all="ignore"):
            target = found / found.max() * np.sqrt(sizes)
        if not (np.isfinite(target).all() and target.sum() > 0):
            return None
        return raise_shares_to_floor(target / target.sum(), self.rule.least / len(layers))

    def measured(self, step: int) -> NDArray[np.float64]:
        """Root mean square gradient of an example, or its influence, at every layer of the plan."""
        self._copy_weights()
        count = example_count(self.proxy.x)
        generator = torch.Generator().manual_seed(_STREAM + step)
        rows = torch.randperm(count, generator=generator)[: self.rule.examples]
        x, y = take_examples((self.proxy.x, self.proxy.y), rows)
        with torch.autocast(model_device(self._from).type, enabled=False), torch.enable_grad():
            if self.rule.estimator == "fisher":
                return np.asarray(np.sqrt(fisher(self._twin, self._losses, x, y, self._stack).information))
            return np.array(influence(self._twin, self._losses, x, y, self._stack, rounds=20).values)

    def _losses(self, x: Any, y: Any) -> Tensor:
        args, named = call_arguments(x)
        return self.proxy.loss_fn(self._twin(*args, **named), x if y is None else y)

    def _copy_weights(self) -> None:
        here: Mapping[str, Tensor] = dict(self._from.named_parameters())
        with torch.no_grad():
            for name, tensor in self._twin.named_parameters():
                tensor.copy_(here[name])
            for mine, theirs in zip(self._twin.buffers(), self._from.buffers(), strict=True):
                mine.copy_(theirs)
