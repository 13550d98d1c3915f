"""Collectors: they clip per-contribution gradients as they arrive in a backward pass, and add them up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lamina.engine.execute.clip import BoxClip, ClipWeights, clip_weights, safe_bounds
from lamina.engine.execute.grads import AxisSliceGrads, ContributionGrads, DenseGrads, MaskedGrads, SummedGrads
from lamina.engine.execute.sums import Sums
from lamina.engine.guards.checked_batch import CheckedBatch
from lamina.engine.layers.layer_rule import RuleCall, hidden_backward_error
from lamina.engine.native.norm_sums import clip_dense_layer
from lamina.engine.native.products import NativeBias, NativeGrads, OuterLayer, OuterLayers, is_plain
from lamina.engine.noise.grid import GridGrads
from lamina.engine.slices import NO_MASKS, TensorMasks

_MAX_HELD_ELEMENTS = 1 << 17  # of layers that wait to be clipped together
_MAX_TOGETHER_ELEMENTS = 1 << 19  # of sums that are added to together


def clip_layer(parts: Sequence[tuple[ContributionGrads, Tensor]], clip: BoxClip) -> ClipWeights:
    """Clip a layer made of several tensors by its whole norm, and add it to their sums. Returns the factors.

    What can be measured cheaply is measured first; of what must be formed to be measured, the largest is measured and
    summed in one pass.
    """
    if (together := clip_dense_layer(parts, clip)) is not None:
        return together
    if len(parts) > 1:
        parts = sorted(parts, key=lambda part: (part[0].formed, part[0].shape.numel()))
    *rest, (last, out) = parts
    others: Tensor | None = None
    left = []
    for grad, target in rest:
        if isinstance(grad, NativeBias) and grad.weight is last and is_plain(out) and is_plain(target):
            grad.weight.bias_sum = target  # measured and added on the way
            continue
        others = grad.norm_sq() if others is None else others + grad.norm_sq()
        left.append((grad, target))
    weights = last.clip_and_add(out, others, clip)
    for grad, target in left:
        grad.add_to(target, weights)
    return weights


LayerGrads = dict[str, ContributionGrads]  # the tensors of a layer


class Collector(ABC):
    """Completes each layer when its last use has arrived, and adds it to the sums.

    A layer of one use is clipped at once, in its own backward. A tensor used several times, or a layer of several
    modules, waits for the rest (book-keeping). `masks` has the tensors of which some contribution may move a slice
    only: `complete` sees 0 elsewhere.
    """

    deferred = False  # whether the sums ask for their layers one by one when the backward pass is over

    def __init__(self, part: CheckedBatch, reached: Sequence[bool], sums: Sums, masks: TensorMasks = NO_MASKS) -> None:
        self.layouts, self.reached, self.sums, self.masks = part.layouts, reached, sums, masks
        self._expected = Counter(layer for use in part.graph.uses for layer in use.layers)
        self._arrived: Counter[int] = Counter()
        self._waiting: dict[int, dict[str, list[ContributionGrads]]] = {}
        short = not all(reached[layer] for layer in self._expected)
        self._input_grad_uses = part.graph.leads_to(self._wanted) if short else None

    def _wanted(self, use: RuleCall) -> bool:
        return any(self.reached[layer] for layer in use.layers)

    def wants_input_grad(self, use: RuleCall) -> bool:
        return self._input_grad_uses is None or use in self._input_grad_uses

    def receive(self, use: RuleCall, saved: Sequence[Tensor], g: Tensor) -> None:
        layout = self.layouts.get(use)
        if layout is None:
            raise hidden_backward_error(use)
        reached = self.reached
        need = [t is not None and reached[t.layer] and not self._all_blocked(t.name) for t in use.targets]
        grads = use.rule.contribution_grads(saved, g, layout, need) if any(need) else [None] * len(need)
        for layer in use.layers:
            arrived = self._waiting.pop(layer, {}) if self._expected[layer] > 1 else {}
            for target, grad, needed in zip(use.targets, grads, need, strict=True):
                if target is not None and target.layer == layer and grad is not None and needed:
                    arrived.setdefault(target.name, []).append(grad)
            self._arrived[layer] += 1
            if self._arrived[layer] < self._expected[layer]:
                self._waiting[layer] = arrived
            elif arrived:
                self.complete(layer, {name: self._masked(name, uses) for name, uses in arrived.items()})

    def _all_blocked(self, name: str) -> bool:
        return name in self.masks and self.masks[name].all_blocked

    def _masked(self, name: str, uses: Sequence[ContributionGrads]) -> ContributionGrads:
        """The gradient of a tensor over all its uses, 0 where a contribution may not move it."""
        grad = uses[0] if len(uses) == 1 else SummedGrads(uses)
        grad = self.masks[name].of(grad) if name in self.masks else grad
        return GridGrads(grad, self.sums.grids[name]) if name in self.sums.grids else grad

    @abstractmethod
    def complete(self, layer: int, parts: LayerGrads) -> None:
        """Everything of a layer has arrived."""

    def is_complete(self, layer: int) -> bool:
        """Whether nothing more can come to a layer."""
        return not self.reached[layer] or self._arrived[layer] >= self._expected[layer]

    def flush(self) -> None:  # noqa: B027
        """Add what is complete, if it waits to be added together with others."""

    def finish(self) -> None:  # noqa: B027  (a joint clip waits for the end, a box has nothing left to do)
        """After the backward pass."""


class BoxCollector(Collector):
    """Each layer by its own threshold: clipped and forgotten as soon as it is complete.

    The counts of the sums (L) gain Σ (bit - ½) over the contributions that are `counted` (P, L), bit = 1 where the
    norm is within the threshold. A layer without a gradient counts as unclipped, whoever else is in the batch.
    """

    def __init__(self, *args: Any, bounds: Tensor, counted: Tensor | None = None) -> None:
        super().__init__(*args)
        self.bounds = safe_bounds(bounds.double()).t().contiguous()  # (L, P)
        self.counts, self.counted = self.sums.counts, counted
        self._factors: dict[int, Tensor] = {}
        self._outers, self._outer_layers, self._held = OuterLayers(), list[int](), 0

    def complete(self, layer: int, parts: LayerGrads) -> None:
        pairs, bound = [(grad, self.sums[name]) for name, grad in parts.items()], self.bounds[layer]
        outer = OuterLayer.of([*parts.values()], bound)
        outer = None if outer is None else outer.adding_to([out for _, out in pairs])
        if outer is None:
            weights = clip_layer(pairs, BoxClip(bound))
            if self.counts is not None:
                self._factors[layer] = weights.factor
            return
        self._outers.append(outer)
        self._outer_layers.append(layer)
        self._held += outer.grad.g.numel() + outer.grad.a.numel()
        if self._held > _MAX_HELD_ELEMENTS:
            self.flush()

    def flush(self) -> None:
        if self._outers:
            numbers = self._outers.clip_and_add()
            if self.counts is not None:
                self._factors.update(zip(self._outer_layers, numbers[3], strict=True))
            self._outers, self._outer_layers, self._held = OuterLayers(), [], 0

    def finish(self) -> None:
        self.flush()
        if self.counts is None or self.counted is None:
            return
        self.counts += 0.5 * self.counted.sum(0)
        if self._factors:
            layers = list(self._factors)
            clipped = torch.stack([self._factors.pop(layer) for layer in layers]) < 1.0
            self.counts[layers] -= (clipped & self.counted.t()[layers]).sum(1).double()


class JointCollector(Collector):
    """All layers by one threshold: measured as they arrive, summed once the whole norm is known."""

    def __init__(self, *args: Any, reach: Tensor, noise: Sequence[float], radius: Tensor) -> None:
        super().__init__(*args)
        inputs = {use: node.next_functions[0] for use, node in args[0].graph.nodes.items()}  # edges of the graph
        often = Counter(inputs.values())
        self._inputs_shared = {use for use, edge in inputs.items() if edge[0] is not None and often[edge] > 1}
        self._shared = False  # whether the input of the use that arrives is that of another one
        self.reach, self.noise, self.radius = reach, noise, radius  # (P, L), (L,), (P,)
        self.norm_sq = torch.zeros(len(radius), dtype=torch.float64)
        self._kept: dict[int, tuple[LayerGrads, Tensor | None]] = {}
        self._weights: ClipWeights | None = None
        self._outers, self._outer_layers, self._outer_parts = OuterLayers(), list[int](), list[LayerGrads]()

    def receive(self, use: RuleCall, saved: Sequence[Tensor], g: Tensor) -> None:
        self._shared = use in self._inputs_shared
        super().receive(use, saved, g)

    def complete(self, layer: int, parts: LayerGrads) -> None:
        late = self.sums.streamed and any(grad.shape.numel() > _MAX_HELD_ELEMENTS for grad in parts.values())
        outer = None if late else OuterLayer.of([*parts.values()])
        if outer is not None:  # measured at the end, all together
            self._outers.append(outer)
            self._outer_layers.append(layer)
            self._outer_parts.append(parts)
            return
        settled = {name: _form_if_smaller(grad, shared=self._shared) for name, grad in parts.items()}
        norm_sq = torch.stack([grad.norm_sq() for grad in settled.values()]).sum(0)
        # What a contribution does not reach must not count, even where it is not finite: whether this
        # layer is looked at depends on who else is in the batch.
        reach = self.reach[:, layer]
        self.norm_sq += torch.where(reach, norm_sq / (self.noise[layer] or 1.0) ** 2, 0.0)
        unreached = ~reach & ~torch.isfinite(norm_sq)
        self._kept[layer] = settled, unreached if bool(unreached.any()) else None

    def measure(self) -> None:
        """After the backward pass: the whole norm is known. What was kept is not added yet."""
        reach = self.reach.t()[self._outer_layers]
        if self._outers:
            numbers = self._outers.measure()
            noise = torch.tensor([self.noise[layer] or 1.0 for layer in self._outer_layers], dtype=torch.float64)
            self.norm_sq += torch.where(reach, numbers[2] / noise.square().unsqueeze(1), 0.0).sum(0)
        self._weights = clip_weights(self.norm_sq, safe_bounds(self.radius))
        if self._outers:
            numbers[3] = torch.where(reach, self._weights.factor, 0.0)
            self._add_outers(numbers)

    def _add_outers(self, numbers: Tensor) -> None:
        """Add what was measured together, a few layers at a time: each frees what it was made of."""
        together, places, held = OuterLayers(), list[int](), 0
        while self._outers:
            outer, parts, i = self._outers.pop(), self._outer_parts.pop(), len(self._outers)
            outs = [self.sums[name] for name in parts]
            adding = outer.adding_to(outs)
            if adding is None:
                weights = ClipWeights(numbers[3, i], ~torch.isfinite(numbers[2, i]))
                for grad, out in zip(parts.values(), outs, strict=True):
                    grad.add_to(out, weights)
                continue
            together.append(adding)
            places.append(i)
            held += outs[0].numel()
            if held > _MAX_TOGETHER_ELEMENTS:
                together.add(numbers[:, places])
                together, places, held = OuterLayers(), [], 0
        if together:
            together.add(numbers[:, places])

    def add(self, layer: int) -> None:
        """Add one layer to its sums, if it was kept."""
        assert self._weights is not None
        parts, unreached = self._kept.pop(layer, ({}, None))
        broken = self._weights.broken
        if unreached is not None:
            broken = unreached if broken is None else broken | unreached
        mine = ClipWeights(self._weights.factor * self.reach[:, layer], broken)
        for name, grad in parts.items():
            grad.add_to(self.sums[name], mine)

    def finish(self) -> None:
        self.measure()
        if self.deferred:
            self.sums.later = self
            return
        for layer in reversed(list(self._kept)):
            self.add(layer)


class NormCollector(Collector):
    """Takes the norm of every contribution at every layer, and nothing else. (P, L); 0 where nothing arrived."""

    def __init__(self, part: CheckedBatch, reached: Sequence[bool], masks: TensorMasks = NO_MASKS) -> None:
        super().__init__(part, reached, Sums({}), masks)
        self.norms = torch.zeros(part.layout.units, len(reached), dtype=torch.float64)

    def complete(self, layer: int, parts: LayerGrads) -> None:
        self.norms[:, layer] = torch.stack([grad.norm_sq() for grad in parts.values()]).sum(0).sqrt_()


def _form_if_smaller(grad: ContributionGrads, *, shared: bool) -> ContributionGrads:
    """Form the gradient now if that takes no more memory than what it is made of; its input counts unless it is `shared`."""
    if isinstance(grad, AxisSliceGrads):
        return AxisSliceGrads(_form_if_smaller(grad.inner, shared=shared), grad.span, grad.shape)
    if isinstance(grad, NativeBias) and grad.sums is not None:
        return grad.grads  # which does not hold on to what the weight was formed from
    size = grad.units * grad.shape.numel()
    stuff = vars(grad.inner if isinstance(grad, MaskedGrads) else grad).values()
    made_of = sum(t.numel() for t in stuff if isinstance(t, Tensor))
    if shared and isinstance(grad, NativeGrads):
        made_of = grad.v.numel()
    return grad if not grad.formed or size > made_of else form(grad)


def form(grad: ContributionGrads) -> DenseGrads:
    """Every gradient by itself. Of a weight and its bias, the weight comes first: a kernel finds both."""
    if isinstance(grad, NativeGrads):
        return grad.form()
    if isinstance(grad, NativeBias):
        return grad.grads
    return DenseGrads(grad.dense(0, grad.units).view(grad.units, *grad.shape).clone())
