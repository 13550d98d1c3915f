"""`trace_step`: forward pass, losses, backward pass and clipping of a step as one graph.

The step of the eager executor itself is traced, over a batch whose size is a symbol: the layer rules describe the
gradients, and the thresholds of the contributions are an argument of the graph. Linears of one position and norm layers
are clipped in the graph; other layers by an operator that runs the ordinary rules, native kernels included.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils import _pytree as pytree

from lamina.engine import native
from lamina.engine.attach import Attachment
from lamina.engine.batch import Batch, RowLayout, examples
from lamina.engine.execute.clip import LEAST_FACTOR, BoxClip, ClipWeights
from lamina.engine.execute.collectors import clip_layer, form
from lamina.engine.execute.grads import ContributionGrads, DenseGrads, OuterProductGrads, SummedGrads
from lamina.engine.guards.graph import LossGraph, walk_graph
from lamina.engine.layers.layer_rule import LayerRule, RuleCall, hidden_backward_error
from lamina.engine.layers.linear import LinearRule
from lamina.engine.layers.norm import NormRule
from lamina.engine.noise.mechanism import sum_dtype

LossesOf = Callable[[Any, Any], Tensor]

_MIN_NORM, _MAX_NORM = 1e-15, 1e15  # norms between which products in float32 lose nothing
_MIN_NORM_SQ = 1e-300


class NotTraceable(Exception):
    """Why a step cannot be a graph."""


@dataclass(frozen=True)
class LayerCall:
    """The uses of one layer of the plan: rule, how many tensors it saved, and the trained tensors of this layer."""

    uses: tuple[tuple[LayerRule, int, tuple[str | None, ...]], ...]
    like: Mapping[str, Tensor]  # by name of a tensor: its shape, and the type of its sum

    def grads(self, tensors: Sequence[Tensor]) -> dict[str, ContributionGrads]:
        found: dict[str, list[ContributionGrads]] = {}
        rest, layout = iter(tensors), plain_layout(tensors[-1].shape[0])
        for rule, count, names in self.uses:
            saved, g = [next(rest) for _ in range(count)], next(rest)
            made = rule.contribution_grads(saved, g, layout, [name is not None for name in names])
            for name, grad in zip(names, made, strict=True):
                if name is not None and grad is not None:
                    found.setdefault(name, []).append(grad)
        return {name: uses[0] if len(uses) == 1 else SummedGrads(uses) for name, uses in found.items()}

    def zeros(self) -> dict[str, Tensor]:
        return {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in self.like.items()}


# Layers that the graph does not clip itself: an operator runs the ordinary rules on the tensors that it is given. It is
# told the place of the layer in the graph that runs, and the shapes of its sums, so that code which was compiled for one
# process holds in another.


class _Running(threading.local):
    calls: Sequence[LayerCall] = ()


_running = _Running()


@contextmanager
def running(calls: Sequence[LayerCall]) -> Iterator[None]:
    """Inside, the operators of a graph find its layers."""
    before, _running.calls = _running.calls, calls
    try:
        yield
    finally:
        _running.calls = before


def _label(place: int, call: LayerCall) -> str:
    return f"{place} {[(list(t.shape), str(t.dtype)) for t in call.like.values()]}"


def _called(layer: str) -> LayerCall:
    return _running.calls[int(layer.split()[0])]


_ARGUMENTS = "(str layer, Tensor[] tensors, Tensor bound)"


@torch.library.custom_op("lamina::clip_layer", mutates_args=(), schema=f"{_ARGUMENTS} -> Tensor[]")
def _clip_layer(layer: str, tensors: list[Tensor], bound: Tensor) -> list[Tensor]:
    """The clipped sums of a layer by its own bounds."""
    call = _called(layer)
    sums = call.zeros()
    pairs = [(grad, sums[name]) for name, grad in call.grads(tensors).items()]
    clip_layer(pairs, BoxClip(bound.contiguous()))
    return list(sums.values())


@torch.library.custom_op("lamina::add_layer", mutates_args=(), schema=f"{_ARGUMENTS} -> Tensor[]")
def _add_layer(layer: str, tensors: list[Tensor], bound: Tensor) -> list[Tensor]:
    """The sums of a layer, every contribution times a factor: `bound`."""
    call = _called(layer)
    sums = call.zeros()
    for name, grad in call.grads(tensors).items():
        grad.add_to(sums[name], ClipWeights(bound, None))
    return list(sums.values())


@torch.library.custom_op("lamina::layer_norm_sq", mutates_args=(), schema="(str layer, Tensor[] tensors) -> Tensor")
def _layer_norm_sq(layer: str, tensors: list[Tensor]) -> Tensor:
    return torch.stack([grad.norm_sq() for grad in _called(layer).grads(tensors).values()]).sum(0)


@torch.library.custom_op("lamina::form_layer", mutates_args=(), schema="(str layer, Tensor[] tensors) -> Tensor[]")
def _form_layer(layer: str, tensors: list[Tensor]) -> list[Tensor]:
    """Squared norms of a layer, and every gradient of it by itself: for a joint clip, where that is smaller than what it is made of."""
    formed = [form(grad) for grad in _called(layer).grads(tensors).values()]
    given = {t.untyped_storage().data_ptr() for t in tensors}
    own = [g.grads.clone() if g.grads.untyped_storage().data_ptr() in given else g.grads for g in formed]
    return [torch.stack([grad.norm_sq() for grad in formed]).sum(0), *own]


@_clip_layer.register_fake
@_add_layer.register_fake
def _fake_sums(layer: str, tensors: list[Tensor], bound: Tensor) -> list[Tensor]:
    return [tensors[-1].new_empty(t.shape, dtype=t.dtype) for t in _called(layer).like.values()]


@_form_layer.register_fake
def _fake_formed(layer: str, tensors: list[Tensor]) -> list[Tensor]:
    rows, like = tensors[-1].shape[0], _called(layer).like.values()
    return [_fake_norm_sq(layer, tensors), *(tensors[-1].new_empty((rows, *t.shape), dtype=t.dtype) for t in like)]


@_layer_norm_sq.register_fake
def _fake_norm_sq(layer: str, tensors: list[Tensor]) -> Tensor:
    return tensors[-1].new_empty(tensors[-1].shape[0], dtype=torch.float64)


def plain_layout(rows: int) -> RowLayout:
    """Every row is a contribution of its own: known, not looked up."""
    layout = RowLayout(torch.arange(rows), rows)
    vars(layout).update(plain=True, _per_unit=1, _padding=None)
    return layout


class _Forward:
    """In the engine's slot while a forward pass is traced: nothing arrives yet."""

    def wants_input_grad(self, use: RuleCall) -> bool:
        return True

    def receive(self, use: RuleCall, saved: Sequence[Tensor], g: Tensor) -> None:
        raise hidden_backward_error(use)


class TraceCollector(_Forward):
    """Takes the gradients of a backward pass that is traced, and writes clipping into the graph.

    `bounds` (L, P) are safe bounds of a box; of a joint clip they are 1/S² where a contribution reaches a layer, else 0,
    and `radius` (P,) is its bound. `calls` gains the layers that operators clip. `sound` becomes False in the graph where
    a number needs the care of the hook engine.
    """

    def __init__(
        self,
        graph: LossGraph,
        like: Mapping[str, Tensor],
        bounds: Tensor,
        radius: Tensor | None,
        calls: list[LayerCall],
    ) -> None:
        self.graph, self.like, self.bounds, self.radius, self.calls = graph, like, bounds, radius, calls
        self.sums: dict[str, Tensor] = {}
        self.sound = torch.ones((), dtype=torch.bool)
        self._expected = Counter(layer for use in graph.uses for layer in use.layers)
        self._arrived: dict[int, list[tuple[RuleCall, Sequence[Tensor], Tensor]]] = {}
        self._measured: list[tuple[int, Tensor, Callable[[Tensor], dict[str, Tensor]]]] = []

    def receive(self, use: RuleCall, saved: Sequence[Tensor], g: Tensor) -> None:
        if use not in self.graph.nodes:
            raise hidden_backward_error(use)
        for layer in use.layers:
            arrived = self._arrived.setdefault(layer, [])
            arrived.append((use, saved, g))
            if len(arrived) == self._expected[layer]:
                self._complete(layer, self._arrived.pop(layer))

    def _complete(self, layer: int, uses: Sequence[tuple[RuleCall, Sequence[Tensor], Tensor]]) -> None:
        named = [
            tuple(t.name if t is not None and t.layer == layer else None for t in use.targets) for use, _, _ in uses
        ]
        call = LayerCall(
            tuple((use.rule, len(saved), names) for (use, saved, _), names in zip(uses, named, strict=True)),
            {name: self.like[name] for names in named for name in names if name is not None},
        )
        tensors = [t for _, saved, g in uses for t in (*saved, g)]
        if len(uses) == 1 and isinstance(uses[0][0].rule, LinearRule | NormRule):
            with native.switched(False):
                grads = call.grads(tensors)
            if all(type(grad) in (DenseGrads, OuterProductGrads) for grad in grads.values()):
                self._inline(layer, grads)
                return
        place = _label(len(self.calls), call)
        self.calls.append(call)

        def add(factor: Tensor) -> dict[str, Tensor]:
            return dict(zip(call.like, _add_layer(place, tensors, factor), strict=True))

        if self.radius is None:
            made = _clip_layer(place, tensors, self.bounds[layer])
            self.sums.update(zip(call.like, made, strict=True))
        elif sum(t.numel() for t in call.like.values()) <= sum(prod(t.shape[1:]) for t in tensors):
            norm_sq, *formed = _form_layer(place, tensors)
            dense = dict(zip(call.like, map(DenseGrads, formed), strict=True))
            self._measured.append((layer, norm_sq, lambda factor: self._add(dense, factor)))
        else:
            self._measured.append((layer, _layer_norm_sq(place, tensors), add))

    def _inline(self, layer: int, grads: Mapping[str, ContributionGrads]) -> None:
        norms: dict[int, Tensor] = {}

        def norm_sq(t: Tensor) -> Tensor:
            if id(t) not in norms:
                norm = torch.linalg.vector_norm(t.flatten(1), dim=1, dtype=torch.float64)
                self._require((norm == 0) | ((norm > _MIN_NORM) & (norm < _MAX_NORM)))
                norms[id(t)] = norm.square()
            return norms[id(t)]

        whole: Any = 0.0
        for grad in grads.values():
            outer = isinstance(grad, OuterProductGrads)
            whole = whole + (norm_sq(grad.g) * norm_sq(grad.a) if outer else norm_sq(grad.grads))  # type: ignore[attr-defined]

        if self.radius is None:
            self.sums.update(self._add(grads, self._factor(whole, self.bounds[layer])))
        else:
            self._measured.append((layer, whole, lambda factor: self._add(grads, factor)))

    @staticmethod
    def _add(grads: Mapping[str, ContributionGrads], factor: Tensor) -> dict[str, Tensor]:
        """The sums of a layer, every contribution times a factor."""
        made = {}
        for name, grad in grads.items():
            if isinstance(grad, OuterProductGrads):
                made[name] = (grad.g * factor.to(grad.g.dtype).unsqueeze(1)).t() @ grad.a
            elif isinstance(grad, DenseGrads):
                flat = grad.grads.flatten(1)
                made[name] = (factor.to(flat.dtype).unsqueeze(1) * flat).sum(0).view(grad.shape)
        return made

    def _require(self, holds: Tensor) -> None:
        self.sound = self.sound & holds.all()

    def _factor(self, norm_sq: Tensor, bound: Tensor) -> Tensor:
        """As `clip_weights`, of finite norms."""
        factor = (norm_sq.clamp(min=_MIN_NORM_SQ).rsqrt() * bound).clamp(max=1.0)
        return torch.where(factor > LEAST_FACTOR, factor, 0.0)

    def finish(self) -> None:
        if self.radius is None:
            return
        norm_sq = torch.stack([mine * self.bounds[layer] for layer, mine, _ in self._measured]).sum(0)
        self._require(torch.isfinite(norm_sq))
        factor = self._factor(norm_sq, self.radius)
        for layer, _, add in self._measured:
            self.sums.update(add(torch.where(self.bounds[layer] > 0, factor, 0.0)))


@dataclass
class Trace:
    """A traced step. Called with the leaves of x and y, bounds, radius and constants; gives losses, `sound` and sums.

    constants  parameters, buffers and what the losses use besides: given anew at every call
    calls      the layers that operators clip
    names      of the tensors whose sums it gives
    draws      whether it draws at random
    """

    module: torch.fx.GraphModule
    constants: list[Tensor]
    calls: list[LayerCall]
    names: list[str]
    draws: bool
    env: ShapeEnv
    size: torch.SymInt
    fitting: dict[int, bool]

    @cached_property
    def _guards(self) -> str | None:
        return self.env.produce_guards_expression([self.size])

    def fits(self, examples_: int) -> bool:
        """Whether tracing and compiling assumed nothing of the size of the batch that does not hold for this one."""
        if examples_ not in self.fitting:
            guards = self._guards
            self.fitting[examples_] = guards is None or bool(self.env.evaluate_guards_expression(guards, [examples_]))
        return self.fitting[examples_]


def trace_step(
    losses_of: LossesOf, batch: Batch, attachment: Attachment, names: Mapping[int, str], tensors: Mapping[str, Tensor],
    layers: int, *, joint: bool, count: int,
) -> Trace:  # fmt: skip
    """Trace the step on batches like this one, of some `count` examples. Raises whatever stands in the way.

    Of the batch only shapes and types are used.
    """
    leaves, spec = pytree.tree_flatten((batch.x, batch.y))
    if not all(isinstance(t, Tensor) for t in leaves if t is not None):
        raise NotTraceable("x or y hold something that is not a tensor")
    given = [t for t in leaves if t is not None]
    taken = {size for t in given for size in t.shape[1:]} | {s for p in tensors.values() for s in p.shape} | {layers}
    n = next(size for size in itertools.count(count) if size not in taken)  # no other size is taken for it
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)

    def symbolic(t: Tensor, axis: int) -> Tensor:
        sizes = [DimDynamic.DYNAMIC if i == axis else DimDynamic.STATIC for i in range(t.dim())]
        shape = [n if i == axis else size for i, size in enumerate(t.shape)]
        return mode.from_tensor(
            torch.zeros(shape, dtype=t.dtype), symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes)
        )

    wide = torch.zeros(layers, n, dtype=torch.float64)
    inputs = [*(symbolic(t, 0) for t in given), symbolic(wide, 1), symbolic(wide[0], 0)]
    like = {name: torch.empty(p.shape, dtype=sum_dtype(p.dtype), device="meta") for name, p in tensors.items()}
    collectors: list[TraceCollector] = []
    calls: list[LayerCall] = []
    slot = attachment.slot

    def step(*args: Tensor) -> list[Tensor]:
        rest = iter(args[: len(given)])
        x, y = pytree.tree_unflatten([None if t is None else next(rest) for t in leaves], spec)
        bounds, radius = args[len(given) :]
        calls.clear()
        slot.receiver = _Forward()
        try:
            with examples(args[0].shape[0]), torch.enable_grad():
                losses = losses_of(x, y)
            graph = walk_graph(losses, names)
            for use, node in graph.nodes.items():
                if use.example_of_row is not None or node.lamina_rows != args[0].shape[0]:
                    raise NotTraceable(f"the rows of '{use.where}' are not the examples of the batch")
            collector = TraceCollector(graph, like, bounds, radius if joint else None, calls)
            collectors.append(collector)
            slot.receiver = collector
            torch.autograd.backward(losses, torch.ones_like(losses), inputs=list(tensors.values()))
            collector.finish()
        finally:
            slot.receiver = None
        return [losses.detach(), collector.sound, *collector.sums.values()]

    before = random.getstate(), repr(np.random.get_state())  # noqa: NPY002
    with mode, running(calls):
        module = make_fx(step, tracing_mode="real", _allow_non_fake_inputs=True)(*inputs)
    if before != (random.getstate(), repr(np.random.get_state())):  # noqa: NPY002
        raise NotTraceable("model or losses draw from Python's or numpy's generator")
    size = inputs[0].shape[0]
    if not isinstance(size, torch.SymInt) or size.node.expr.is_number:
        raise NotTraceable("model or losses are made for one size of the batch")
    constants, draws = _lift_constants(module, mode)
    return Trace(module, constants, calls, list(collectors[-1].sums), draws, env, size, {})


def _lift_constants(module: torch.fx.GraphModule, mode: FakeTensorMode) -> tuple[list[Tensor], bool]:
    """Make the tensors that a trace met arguments of its graph. Also: whether the graph draws at random."""
    graph, found, draws = module.graph, dict[int, tuple[Tensor, Any]](), False
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for node in list(graph.nodes):
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            draws = draws or torch.Tag.nondeterministic_seeded in node.target.tags
            for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
                written = argument.alias_info is not None and argument.alias_info.is_write
                if written and _viewed(value).op in ("placeholder", "get_attr"):
                    raise NotTraceable(f"the forward pass writes to a tensor that it is given, by {node.target}")
        if node.op != "get_attr":
            continue
        value = getattr(module, node.target)
        if id(value) not in found:
            with graph.inserting_after(last):
                last = graph.placeholder(f"constant_{len(found)}")
                last.meta["val"] = mode.from_tensor(value.detach(), static_shapes=True)
            found[id(value)] = (value, last)
        node.replace_all_uses_with(found[id(value)][1])
        graph.erase_node(node)
    graph.eliminate_dead_code()
    module.recompile()
    return [value for value, _ in found.values()], draws


def _viewed(node: Any) -> torch.fx.Node:
    """Return the node of which a node is a view, or the node itself."""
    while node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        returns = node.target._schema.returns
        if not returns or returns[0].alias_info is None or not isinstance(node.args[0], torch.fx.Node):
            break
        node = node.args[0]
    return cast(torch.fx.Node, node)
