"""Taking per-contribution gradients as they arrive, clipping them and adding them up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lamina.engine.clip import box, clip_and_add, safe, weights_for
from lamina.engine.function import Use, hidden_backward
from lamina.engine.graph import Graph
from lamina.engine.layout import Layout
from lamina.engine.masks import ALL_OPEN, Openings
from lamina.engine.parts import Picked, total
from lamina.engine.unitgrad import Dense, Masked, UnitGrad, Weights

Parts = dict[str, UnitGrad]  # the tensors of a layer


class Collector(ABC):
    """Completes each layer when its last use has arrived, and adds it to the sums.

    A layer of one use is clipped at once, in its own backward. A tensor used several times, or a
    layer of several modules, waits for the rest (book-keeping). `openings` name the tensors of which
    some contribution may move a part only: whoever completes a layer sees 0 elsewhere.
    """

    def __init__(
        self,
        graph: Graph,
        layouts: Mapping[Use, Layout],
        reached: Sequence[bool],
        sums: Mapping[str, Tensor],
        openings: Openings = ALL_OPEN,
    ) -> None:
        self.layouts, self.reached, self.sums, self.openings = layouts, reached, sums, openings
        self._expected = Counter(layer for use in graph.uses for layer in use.layers)
        self._arrived: Counter[int] = Counter()
        self._waiting: dict[int, dict[str, list[UnitGrad]]] = {}
        short = not all(reached[layer] for layer in self._expected)
        self._passing = graph.leads_to(lambda use: self._wanted(use)) if short else None

    def _wanted(self, use: Use) -> bool:
        return any(self.reached[layer] for layer in use.layers)

    def wants_input_grad(self, use: Use) -> bool:
        return self._passing is None or use in self._passing

    def receive(self, use: Use, kept: Sequence[Tensor], g: Tensor) -> None:
        layout = self.layouts.get(use)
        if layout is None:
            raise hidden_backward(use)
        if not self._wanted(use):
            return
        need = [t is not None and self.reached[t.layer] and not self._shut(t.name) for t in use.targets]
        grads = use.rule.unit_grads(kept, g, layout, need) if any(need) else [None] * len(need)
        for target, grad, needed in zip(use.targets, grads, need, strict=True):
            if target is not None and grad is not None and needed:
                self._waiting.setdefault(target.layer, {}).setdefault(target.name, []).append(grad)
        for layer in use.layers:
            self._arrived[layer] += 1
            if self._arrived[layer] == self._expected[layer] and self.reached[layer]:
                arrived = self._waiting.pop(layer, {})
                if arrived:
                    self.complete(layer, {name: self._opened(name, uses) for name, uses in arrived.items()})

    def _shut(self, name: str) -> bool:
        return name in self.openings and self.openings[name].shut

    def _opened(self, name: str, uses: Sequence[UnitGrad]) -> UnitGrad:
        """The gradient of a tensor over all its uses, 0 where a contribution may not move it."""
        grad = total(uses)
        return self.openings[name].of(grad) if name in self.openings else grad

    @abstractmethod
    def complete(self, layer: int, parts: Parts) -> None:
        """Everything of a layer has arrived."""

    def finish(self) -> None:  # noqa: B027  (a joint clip waits for the end, a box has nothing left to do)
        """After the backward pass."""


class BoxCollector(Collector):
    """Each layer by its own threshold: clipped and forgotten as soon as it is complete.

    `counts` (L) then gains Σ (bit - ½) over the contributions that are `counted` (P, L), bit = 1 where the norm
    is within the threshold. A layer without a gradient counts as unclipped, whoever else is in the batch.
    """

    def __init__(
        self,
        *args: object,
        bounds: Tensor,
        scale: float,
        counts: Tensor | None = None,
        counted: Tensor | None = None,
        **kwargs: object,
    ) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.bounds, self.scale = safe(bounds, scale).t().contiguous(), scale  # (L, P)
        self.counts, self.counted = counts, counted
        self._factors: dict[int, Tensor] = {}

    def complete(self, layer: int, parts: Parts) -> None:
        pairs = [(grad, self.sums[name]) for name, grad in parts.items()]
        weights = clip_and_add(pairs, box(self.bounds[layer], self.scale))
        if self.counts is not None:
            self._factors[layer] = weights.factor

    def finish(self) -> None:
        if self.counts is None or self.counted is None:
            return
        self.counts += 0.5 * self.counted.sum(0)
        if self._factors:
            layers = list(self._factors)
            clipped = torch.stack([self._factors.pop(layer) for layer in layers]) < self.scale
            self.counts[layers] -= (clipped & self.counted.t()[layers]).sum(1).double()


class JointCollector(Collector):
    """All layers by one threshold: measured as they arrive, summed once the whole norm is known."""

    def __init__(
        self,
        *args: object,
        reach: Tensor,
        noise: Sequence[float],
        radius: Tensor,
        scale: float,
        **kwargs: object,
    ) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.reach, self.noise, self.radius, self.scale = reach, noise, radius, scale  # (P, L), (L,), (P,)
        self.norm_sq = torch.zeros(len(radius), dtype=torch.float64)
        self._kept: list[tuple[int, list[tuple[UnitGrad, Tensor]], Tensor | None]] = []

    def complete(self, layer: int, parts: Parts) -> None:
        settled = [(_settle(grad), self.sums[name]) for name, grad in parts.items()]
        norm_sq = torch.stack([grad.norm_sq() for grad, _ in settled]).sum(0)
        # What a contribution does not reach must not count, even where it is not finite: whether this
        # layer is looked at depends on who else is in the batch.
        reach = self.reach[:, layer]
        self.norm_sq += torch.where(reach, norm_sq / (self.noise[layer] or 1.0) ** 2, 0.0)
        unreached = ~reach & ~torch.isfinite(norm_sq)
        self._kept.append((layer, settled, unreached if bool(unreached.any()) else None))

    def finish(self) -> None:
        weights = weights_for(self.norm_sq, safe(self.radius, self.scale), self.scale)
        while self._kept:
            layer, parts, unreached = self._kept.pop()
            broken = weights.broken
            if unreached is not None:
                broken = unreached if broken is None else broken | unreached
            mine = Weights(weights.factor * self.reach[:, layer], broken)
            for grad, out in parts:
                grad.add_to(out, mine)


class NormCollector(Collector):
    """Takes the norm of every contribution at every layer, and nothing else. (P, L); 0 where nothing arrived."""

    def __init__(self, *args: object, units: int, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.norms = torch.zeros(units, len(self.reached), dtype=torch.float64)

    def complete(self, layer: int, parts: Parts) -> None:
        self.norms[:, layer] = torch.stack([grad.norm_sq() for grad in parts.values()]).sum(0).sqrt_()


def _settle(grad: UnitGrad) -> UnitGrad:
    """Form the gradient now if that takes no more memory than what it is made of."""
    if isinstance(grad, Picked):
        return Picked(_settle(grad.inner), grad.places, grad.shape)
    size = grad.units * grad.shape.numel()
    stuff = vars(grad.inner if isinstance(grad, Masked) else grad).values()
    made_of = sum(t.numel() for t in stuff if isinstance(t, Tensor))
    if not grad.formed or size > made_of:
        return grad
    return Dense(grad.dense(0, grad.units).view(grad.units, *grad.shape).clone())
