"""`CompiledExecutor`: forward pass, losses, backward pass and clipping of a step as one compiled graph.

The step of the eager executor itself is traced once, over a batch whose size is a symbol: the layer rules describe the
gradients, and the thresholds of the contributions are an argument of the graph. Linears of one position and norm layers
are clipped in the graph; other layers by an operator that runs the ordinary rules, native kernels included.
"""

from __future__ import annotations

import itertools
import random
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils import _pytree as pytree

from lamina.engine import native
from lamina.engine.attach import Attachment, CopySafeHook
from lamina.engine.batch import Batch, RowLayout, examples
from lamina.engine.execute.clip import LEAST_FACTOR, BoxClip, ClipWeights, safe_bounds
from lamina.engine.execute.clipping import Clipper
from lamina.engine.execute.collectors import clip_layer, form
from lamina.engine.execute.eager import EagerExecutor, Work
from lamina.engine.execute.grads import ContributionGrads, DenseGrads, OuterProductGrads, SummedGrads
from lamina.engine.execute.sums import Sums
from lamina.engine.guards.checked_batch import check_classes
from lamina.engine.guards.graph import LossGraph, walk_graph
from lamina.engine.guards.state import StateGuard
from lamina.engine.layers.layer_rule import LayerRule, RuleCall, hidden_backward_error
from lamina.engine.layers.linear import LinearRule
from lamina.engine.layers.norm import NormRule
from lamina.engine.noise.mechanism import sum_dtype
from lamina.plan.rules import InjectionForm, NoiseKind
from lamina.plan.step_plan import Clipping, StepPlan

LossesOf = Callable[[Any, Any], Tensor]

HOOK_STEPS_FIRST = 2  # of every computation, with all checks of the hook engine
COMPARE_EVERY = 128  # as often as the ownership check comes again
MOST_GRAPHS, MOST_COMPUTATIONS = 4, 16
MOST_CONTRIBUTIONS = 512  # as WIDE_UNITS of native/product.c: see `SUM_BLOCK` of grads.py
BACKEND = "inductor"
_TOLERANCE = 1e-4  # between the sums of the hook engine and of the graph as it was traced, of their size
_COMPILED_TOLERANCE = 5e-3  # and of the graph as it was compiled: an input of ReLU may round to the other side of 0
_MIN_NORM, _MAX_NORM = 1e-15, 1e15  # norms between which products in float32 lose nothing
_MIN_NORM_SQ = 1e-300


class NotCompiled(UserWarning):
    """`compiled=True` was asked for, and the hook engine takes the step."""


class _Unsupported(Exception):
    """Why a step cannot be a graph."""


def unsupported_plan(plan: StepPlan, *, adaptive: bool) -> str:
    """Why no step of a plan can be compiled, or ''."""
    if plan.clipping is Clipping.ELEMENTWISE:
        return "the plan clips every element by itself"
    if plan.slices:
        return "the plan has slices: classes that may move a part of a tensor"
    if adaptive:
        return "the plan has rules that move its thresholds or its noise"
    if plan.noise_kind is not NoiseKind.GAUSSIAN:
        return f"the plan has {plan.noise_kind.value} noise, whose sums are whole numbers"
    if plan.injection.form is not InjectionForm.STEP:
        return "the plan injects its noise in parts"
    return ""


# Layers that the graph does not clip itself: an operator runs the ordinary rules on the tensors that it is given.


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


_calls: dict[int, LayerCall] = {}
_handles = itertools.count()
_ARGUMENTS = "(int handle, Tensor[] tensors, Tensor bound)"


@torch.library.custom_op("lamina::clip_layer", mutates_args=(), schema=f"{_ARGUMENTS} -> Tensor[]")
def _clip_layer(handle: int, tensors: list[Tensor], bound: Tensor) -> list[Tensor]:
    """The clipped sums of a layer by its own bounds."""
    sums = _calls[handle].zeros()
    pairs = [(grad, sums[name]) for name, grad in _calls[handle].grads(tensors).items()]
    clip_layer(pairs, BoxClip(bound.contiguous()))
    return list(sums.values())


@torch.library.custom_op("lamina::add_layer", mutates_args=(), schema=f"{_ARGUMENTS} -> Tensor[]")
def _add_layer(handle: int, tensors: list[Tensor], bound: Tensor) -> list[Tensor]:
    """The sums of a layer, every contribution times a factor: `bound`."""
    sums = _calls[handle].zeros()
    for name, grad in _calls[handle].grads(tensors).items():
        grad.add_to(sums[name], ClipWeights(bound, None))
    return list(sums.values())


@torch.library.custom_op("lamina::layer_norm_sq", mutates_args=(), schema="(int handle, Tensor[] tensors) -> Tensor")
def _layer_norm_sq(handle: int, tensors: list[Tensor]) -> Tensor:
    return torch.stack([grad.norm_sq() for grad in _calls[handle].grads(tensors).values()]).sum(0)


@torch.library.custom_op("lamina::form_layer", mutates_args=(), schema="(int handle, Tensor[] tensors) -> Tensor[]")
def _form_layer(handle: int, tensors: list[Tensor]) -> list[Tensor]:
    """Squared norms of a layer, and every gradient of it by itself: for a joint clip, where that is smaller than what it is made of."""
    formed = [form(grad) for grad in _calls[handle].grads(tensors).values()]
    given = {t.untyped_storage().data_ptr() for t in tensors}
    own = [g.grads.clone() if g.grads.untyped_storage().data_ptr() in given else g.grads for g in formed]
    return [torch.stack([grad.norm_sq() for grad in formed]).sum(0), *own]


@_clip_layer.register_fake
@_add_layer.register_fake
def _fake_sums(handle: int, tensors: list[Tensor], bound: Tensor) -> list[Tensor]:
    return [tensors[-1].new_empty(t.shape, dtype=t.dtype) for t in _calls[handle].like.values()]


@_form_layer.register_fake
def _fake_formed(handle: int, tensors: list[Tensor]) -> list[Tensor]:
    rows, like = tensors[-1].shape[0], _calls[handle].like.values()
    return [_fake_norm_sq(handle, tensors), *(tensors[-1].new_empty((rows, *t.shape), dtype=t.dtype) for t in like)]


@_layer_norm_sq.register_fake
def _fake_norm_sq(handle: int, tensors: list[Tensor]) -> Tensor:
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
    and `radius` (P,) is its bound. `sound` becomes False in the graph where a number needs the care of the hook engine.
    """

    def __init__(self, graph: LossGraph, like: Mapping[str, Tensor], bounds: Tensor, radius: Tensor | None) -> None:
        self.graph, self.like, self.bounds, self.radius = graph, like, bounds, radius
        self.sums: dict[str, Tensor] = {}
        self.sound = torch.ones((), dtype=torch.bool)
        self.handles: list[int] = []
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
        handle = next(_handles)
        _calls[handle] = call
        self.handles.append(handle)

        def add(factor: Tensor) -> dict[str, Tensor]:
            return dict(zip(call.like, _add_layer(handle, tensors, factor), strict=True))

        if self.radius is None:
            made = _clip_layer(handle, tensors, self.bounds[layer])
            self.sums.update(zip(call.like, made, strict=True))
        elif sum(t.numel() for t in call.like.values()) <= sum(prod(t.shape[1:]) for t in tensors):
            norm_sq, *formed = _form_layer(handle, tensors)
            dense = dict(zip(call.like, map(DenseGrads, formed), strict=True))
            self._measured.append((layer, norm_sq, lambda factor: self._add(dense, factor)))
        else:
            self._measured.append((layer, _layer_norm_sq(handle, tensors), add))

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
class StepGraph:
    """A traced step. Called with the leaves of x and y, bounds and radius; gives losses, `sound` and sums."""

    call: Callable[..., Sequence[Tensor]]
    traced: Callable[..., Sequence[Tensor]]  # the same, not compiled: it rounds as the hook engine does
    constants: list[Tensor]  # parameters, buffers and what the losses use besides: given anew at every call
    names: list[str]
    draws: bool
    fits: Callable[[int], bool]
    steps: int = 0
    compared: int | None = None  # the step when its sums were last held to those of the hook engine

    @property
    def compare_now(self) -> bool:
        return self.compared is None or self.steps - self.compared >= COMPARE_EVERY

    def run(
        self, leaves: Sequence[Tensor], bounds: Tensor, radius: Tensor, *, traced: bool = False
    ) -> Sequence[Tensor]:
        inputs = [t.detach() for t in (*leaves, bounds, radius)]
        if traced:
            with torch.no_grad():
                return self.traced(*inputs, *(t.detach() for t in self.constants))
        first = self.steps == 0 and BACKEND != "eager"
        for t, axis in zip(inputs, (*[0] * len(leaves), 1, 0), strict=True) if first else ():
            torch._dynamo.mark_dynamic(t, axis)
        self.steps += 1
        with torch.no_grad(), warnings.catch_warnings() if first else nullcontext():
            if first:
                warnings.simplefilter("ignore")  # what the compiler says is not about the user's code
            return self.call(*inputs, *(t.detach() for t in self.constants))


def trace_step(
    losses_of: LossesOf, batch: Batch, attachment: Attachment, names: Mapping[int, str], tensors: Mapping[str, Tensor],
    layers: int, *, joint: bool,
) -> tuple[StepGraph, list[int]]:  # fmt: skip
    """The step on such batches as a graph, and the handles of its operators. Raises whatever stands in the way."""
    leaves, spec = pytree.tree_flatten((batch.x, batch.y))
    if not all(isinstance(t, Tensor) for t in leaves if t is not None):
        raise _Unsupported("x or y hold something that is not a tensor")
    given = [t for t in leaves if t is not None]
    taken = {size for t in given for size in t.shape[1:]} | {s for p in tensors.values() for s in p.shape} | {layers}
    n = next(size for size in itertools.count(batch.examples) if size not in taken)  # no other size is taken for it
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
    slot = attachment.slot

    def step(*args: Tensor) -> list[Tensor]:
        rest = iter(args[: len(given)])
        x, y = pytree.tree_unflatten([None if t is None else next(rest) for t in leaves], spec)
        bounds, radius = args[len(given) :]
        slot.receiver = _Forward()
        try:
            with examples(args[0].shape[0]), torch.enable_grad():
                losses = losses_of(x, y)
            graph = walk_graph(losses, names)
            for use, node in graph.nodes.items():
                if use.example_of_row is not None or node.lamina_rows != args[0].shape[0]:
                    raise _Unsupported(f"the rows of '{use.where}' are not the examples of the batch")
            collector = TraceCollector(graph, like, bounds, radius if joint else None)
            collectors.append(collector)
            slot.receiver = collector
            torch.autograd.backward(losses, torch.ones_like(losses), inputs=list(tensors.values()))
            collector.finish()
        finally:
            slot.receiver = None
        return [losses.detach(), collector.sound, *collector.sums.values()]

    before = random.getstate(), repr(np.random.get_state())  # noqa: NPY002
    with mode:
        module = make_fx(step, tracing_mode="real", _allow_non_fake_inputs=True)(*inputs)
    if before != (random.getstate(), repr(np.random.get_state())):  # noqa: NPY002
        raise _Unsupported("model or losses draw from Python's or numpy's generator")
    size = inputs[0].shape[0]
    if not isinstance(size, torch.SymInt) or size.node.expr.is_number:
        raise _Unsupported("model or losses are made for one size of the batch")
    guards = env.produce_guards_expression([size])
    constants, draws = _lift_constants(module)
    call: Any = module
    if BACKEND != "eager":
        call = torch.compile(module, fullgraph=True, options={"fallback_random": True})

    @cache
    def fits(examples_: int) -> bool:
        return guards is None or bool(env.evaluate_guards_expression(guards, [examples_]))

    return StepGraph(call, module, constants, list(collectors[-1].sums), draws, fits), collectors[-1].handles


def _lift_constants(module: torch.fx.GraphModule) -> tuple[list[Tensor], bool]:
    """Make the tensors that a trace met arguments of its graph. Also: whether the graph draws at random."""
    graph, found, draws = module.graph, dict[int, tuple[Tensor, Any]](), False
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for node in list(graph.nodes):
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            draws = draws or torch.Tag.nondeterministic_seeded in node.target.tags
            for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
                written = argument.alias_info is not None and argument.alias_info.is_write
                if written and _viewed(value).op in ("placeholder", "get_attr"):
                    raise _Unsupported(f"the forward pass writes to a tensor that it is given, by {node.target}")
        if node.op != "get_attr":
            continue
        value = getattr(module, node.target)
        if id(value) not in found:
            with graph.inserting_after(last):
                last = graph.placeholder(f"constant_{len(found)}")
            found[id(value)] = (value, last)
        node.replace_all_uses_with(found[id(value)][1])
        graph.erase_node(node)
    graph.eliminate_dead_code()
    module.recompile()
    return [value for value, _ in found.values()], draws


def _viewed(node: Any) -> torch.fx.Node:
    """What a node is a view of, or itself."""
    while node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        returns = node.target._schema.returns
        if not returns or returns[0].alias_info is None or not isinstance(node.args[0], torch.fx.Node):
            break
        node = node.args[0]
    return cast(torch.fx.Node, node)


class CompiledExecutor:
    """Which steps of an engine are a graph, and why others are not.

    The eager executor takes the first steps of every computation with all its checks, and every 128th, when the graph's
    sums are held to its own. `reason` says why there is no graph, or was none for the last batch; '' if there was one.
    """

    def __init__(
        self, model: nn.Module, plan: StepPlan, eager: EagerExecutor, state: StateGuard, *, adaptive: bool
    ) -> None:
        self.model, self.plan, self.eager, self.state = model, plan, eager, state
        self.tensors = eager.tensors
        self.steps = 0  # taken by a graph
        self.graphs: list[tuple[Any, StepGraph]] = []
        self.reason, self._off, self._said = "", False, set[str]()
        self._hook_steps: Counter[Any] = Counter()
        self._handles: list[int] = []
        weakref.finalize(self, _forget, self._handles)
        if problem := unsupported_plan(plan, adaptive=adaptive):
            self.give_up(problem)
        elif not all(p.is_cpu for p in self.tensors.values()):
            self.give_up("the model is not on the CPU")

    def prepare(self, losses_of: LossesOf, batch: Batch, clipper: Clipper) -> tuple[Work, Tensor] | None:
        """What a part of a batch adds to a step, and its losses; None where the eager executor must compute them."""
        if len(batch) == 0:
            return None
        eager, classes = self.eager, check_classes(batch, self.plan)
        reached = clipper.reached(classes) == eager.trained or eager.constant_time
        bounds, radius = clipper.limits(batch)
        graph = self.graph_for(losses_of, batch, all_reached=reached)
        if graph is None:
            return None
        eager.check()
        self.state.begin_call()
        ready = self.sums(graph, batch, bounds, radius)
        self.state.check_trained()
        if ready is None:
            return None
        made, losses = ready
        if graph.compare_now:
            losses = losses_of(batch.x, batch.y)
            part, own = eager.examine(losses, batch, again=True), Sums(self.tensors)
            assert part is not None
            eager.add(part, clipper, own)
            self.compare(graph, made, own.whole())
            made = own
        return Work(classes, lambda _, sums, last: sums.adopt(_with_own_storage(made, self.tensors))), losses.detach()

    def give_up(self, reason: str) -> None:
        """No step will be compiled from here on."""
        self._off = True
        self.graphs.clear()
        self._say(reason)

    def _say(self, reason: str) -> None:
        self.reason = reason
        if reason not in self._said:
            self._said.add(reason)
            warnings.warn(f"the hook engine takes this step, it is not compiled: {reason}", NotCompiled, stacklevel=4)

    def graph_for(self, losses_of: LossesOf, batch: Batch, *, all_reached: bool) -> StepGraph | None:
        """The graph of a step on this batch, traced if need be; None where the hook engine takes it."""
        if self._off:
            return None
        key = self._key(losses_of, batch)
        self._hook_steps[key] += 1
        if len(self._hook_steps) > MOST_COMPUTATIONS:
            self.give_up(f"{MOST_COMPUTATIONS} kinds of batch or losses came: give step the same function and shapes")
            return None
        if self._hook_steps[key] <= HOOK_STEPS_FIRST or batch.examples < 2:
            return None
        problem = self._unsupported_batch(batch, [m for m, _ in key[3]], all_reached=all_reached)
        if problem:
            self._say(problem)
            return None
        made = [graph for known, graph in self.graphs if known == key and graph.fits(batch.examples)]
        graph = made[0] if made else self._trace(key, losses_of, batch)
        self.reason = "" if graph is not None else self.reason
        return graph

    def _trace(self, key: Any, losses_of: LossesOf, batch: Batch) -> StepGraph | None:
        if len(self.graphs) >= MOST_GRAPHS:
            self.give_up(f"{MOST_GRAPHS} graphs were made already: give step the same function and shapes")
            return None
        try:
            joint = self.plan.clipping is Clipping.JOINT
            with torch.random.fork_rng(devices=[]):
                graph, handles = trace_step(
                    losses_of,
                    batch,
                    self.eager.attachment,
                    self.eager.names,
                    self.tensors,
                    len(self.plan.layers),
                    joint=joint,
                )
        except Exception as error:  # whatever a trace cannot follow
            self.give_up(_why(error))
            return None
        self._handles += handles
        self.graphs.append((key, graph))
        return graph

    def _key(self, losses_of: LossesOf, batch: Batch) -> Any:
        """What a graph holds fixed. Functions and modules are kept, so that none is taken for another."""
        leaves, spec = pytree.tree_flatten((batch.x, batch.y))
        shapes = tuple((t.shape[1:], t.dtype) if isinstance(t, Tensor) else None for t in leaves)
        modules = tuple((m, m.training) for m in _modules_of(self.model))
        return losses_of, spec, shapes, modules, torch.get_default_dtype()

    def _unsupported_batch(self, batch: Batch, modules: Sequence[nn.Module], *, all_reached: bool) -> str:
        assert batch.unit is not None and batch.weight is not None
        if len(batch) != batch.examples or not torch.equal(batch.unit, torch.arange(len(batch))):
            return "a contribution has several examples"
        if not bool((batch.weight > 0).all()):
            return "the batch has padding"
        if len(batch) > MOST_CONTRIBUTIONS:
            return f"more than {MOST_CONTRIBUTIONS} contributions are added up in float64"
        if not all_reached:
            return "nobody in the batch reaches some layer, so that the backward pass is cut short"
        if torch.is_autocast_enabled("cpu"):
            return "autocast is on"
        for module in modules:
            hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
            if not all(isinstance(hook, CopySafeHook) for hook in hooks):
                name = next(name for name, found in self.model.named_modules() if found is module)
                return f"module '{name}' has a hook of its own"
        return ""

    def sums(
        self, graph: StepGraph, batch: Batch, bounds: Tensor, radius: Tensor
    ) -> tuple[dict[str, Tensor], Tensor] | None:
        """Clipped sums and the losses; None where the hook engine must look at the numbers, or cannot.

        What is to be compared is held to the graph as it was traced here, and to the hook engine by `compare`.
        """
        leaves = [t for t in pytree.tree_leaves((batch.x, batch.y)) if t is not None]
        if self.plan.clipping is Clipping.JOINT:
            noise = torch.tensor([s or 1.0 for s in self.plan.noise], dtype=torch.float64)
            bounds = torch.where(bounds > 0, noise.square().reciprocal(), 0.0).t().contiguous()
            radius = safe_bounds(radius)
        else:
            bounds = safe_bounds(bounds).t().contiguous()
        state = torch.get_rng_state() if graph.draws else None
        given = leaves, bounds, radius
        try:
            losses, sound, *sums = graph.run(*given)
            if graph.compare_now and bool(sound) and graph.traced is not graph.call:
                if state is not None:
                    torch.set_rng_state(state)
                made, (losses, sound, *sums) = sums, graph.run(*given, traced=True)
                self._hold(graph.names, made, sums, _COMPILED_TOLERANCE, "the compiler made something else of it")
        except Exception as error:  # what the compiler cannot do shows at the first call
            self.give_up(_why(error))
            sound = torch.zeros((), dtype=torch.bool)
        if state is not None and (graph.compare_now or not bool(sound)):
            torch.set_rng_state(state)  # the hook engine draws the same
        if not bool(sound):
            return None
        self.steps += not graph.compare_now
        found = dict(zip(graph.names, sums, strict=True))
        return {name: found[name] for name in self.tensors if name in found}, losses

    def __repr__(self) -> str:
        return f"{self.steps} steps compiled{f', the last not: {self.reason}' if self.reason else ''}"

    def compare(self, graph: StepGraph, made: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
        """Give up if the graph's sums are not those of the hook engine."""
        graph.compared = graph.steps
        here = [made.get(name, torch.zeros_like(t)) for name, t in own.items()]
        self._hold([*own], here, [*own.values()], _TOLERANCE, "model or losses are not what was traced")

    def _hold(self, names: Sequence[str], made: Sequence[Tensor], own: Sequence[Tensor], most: float, why: str) -> None:
        """Give up if sums are not what they should be."""
        whole = sum(float(t.double().square().sum()) for t in own) ** 0.5
        for name, here, t in zip(names, made, own, strict=True):
            off = float((t.double() - here.double()).norm())
            if not off <= most * (float(t.double().norm()) + 0.01 * whole):
                self.give_up(f"the graph's sum of '{name}' is {off:.2g} off: {why}")
                return


def _modules_of(model: nn.Module) -> list[nn.Module]:
    """As `model.modules()`, which takes ten times as long; in another order."""
    found, waiting = dict[int, nn.Module](), [model]
    while waiting:
        module = waiting.pop()
        if id(module) not in found:
            found[id(module)] = module
            waiting += [m for m in module._modules.values() if m is not None]
    return list(found.values())


def _forget(handles: list[int]) -> None:
    for handle in handles:
        _calls.pop(handle, None)


def _why(error: Exception) -> str:
    """The first line of what stood in the way."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return first if isinstance(error, _Unsupported) else f"{type(error).__name__}: {first}"[:300]


def _with_own_storage(sums: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each sum in its own type, in memory that nothing else uses: noise is added to it in place."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, t in sums.items():
        own = t.is_contiguous() and t.untyped_storage().nbytes() == t.nbytes and t.data_ptr() not in seen
        kept = t if own else t.clone(memory_format=torch.contiguous_format)
        found[name] = kept.to(sum_dtype(tensors[name].dtype))
        seen.add(t.data_ptr())
    return found
