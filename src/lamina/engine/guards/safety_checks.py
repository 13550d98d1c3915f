"""Everything that is refused around a backward pass: losses, batch, graph, coupling, foreign `.grad`, buffers."""

from __future__ import annotations

import secrets
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lamina.engine.batch import Batch, RowLayout
from lamina.engine.distributed import is_sharded
from lamina.engine.layers.layer_rule import CoveredFunction, RuleCall, hidden_backward_error, module_above
from lamina.errors import CouplingError, EngineError, OwnershipError, UnclippedGradient
from lamina.plan.step_plan import StepPlan


@dataclass(frozen=True)
class LossGraph:
    """What a backward pass from the losses will meet."""

    uses: tuple[RuleCall, ...]
    nodes: dict[RuleCall, Any] = field(repr=False)
    signature: int  # of the kinds of all nodes, in the order of the walk: equal computations have equal ones

    def leads_to(self, wanted: Callable[[RuleCall], bool]) -> set[RuleCall]:
        """The uses below whose input lies a wanted use, so that their input's gradient is needed."""
        memo: dict[Any, bool] = {}

        def reaches(root: Any) -> bool:
            stack = [(root, False)]
            while stack:
                node, done = stack.pop()
                children = [child for child, _ in node.next_functions if child is not None]
                if done:
                    use = getattr(node, "lamina_use", None)
                    memo[node] = (use is not None and wanted(use)) or any(memo[c] for c in children)
                elif node not in memo:
                    memo[node] = False
                    stack.append((node, True))
                    stack.extend((c, False) for c in children if c not in memo)
            return memo[root]

        found = set()
        for use, node in self.nodes.items():
            below = node.next_functions[0][0]  # the input; the parameters follow
            if below is not None and reaches(below):
                found.add(use)
        return found


def walk_graph(losses: Tensor, names: dict[int, str]) -> LossGraph:
    """Every node from the losses down. `names` maps id(parameter) to its name, for every parameter.

    Refused: a trainable tensor entered by anything but the engine's Function (an L2 penalty,
    `F.linear(x, module.weight)`), a leaf that is not the model's, a checkpoint that hides its graph.
    """
    if losses.grad_fn is None:
        problem = "the losses have no autograd graph: no tensor that the plan trains was used to compute them"
        remedy = "compute them from model(batch.x) with gradients enabled"
        raise EngineError("engine.losses-without-graph", problem, remedy)
    uses: dict[RuleCall, Any] = {}
    kinds: list[type] = []
    seen: set[Any] = {losses.grad_fn}
    stack: list[Any] = [losses.grad_fn]
    while stack:
        node = stack.pop()
        kind = type(node)
        kinds.append(kind)
        use = node.lamina_use if kind is _COVERED else None
        if use is not None:
            uses[use] = node
        elif kind not in _HARMLESS:
            _refuse_node(node)
        for place, (child, _) in enumerate(node.next_functions):
            if child is None or child in seen:
                continue
            if type(child).__name__ == "AccumulateGrad":
                if use is None or place == 0:  # place 0 is the input: a tensor used as data is not clipped
                    _refuse_leaf(child.variable, names, node)
            else:
                seen.add(child)
                stack.append(child)
    return LossGraph(tuple(uses), uses, hash(tuple(kinds)))


_COVERED: type = CoveredFunction._backward_cls
_HARMLESS: set[type] = set()  # kinds of nodes that are never refused


def _refuse_node(node: Any) -> None:
    name = type(node).__name__
    if name == "CheckpointFunctionBackward":
        problem = "a reentrant activation checkpoint hides the layers inside it"
        remedy = "use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
        raise UnclippedGradient("engine.reentrant-checkpoint", problem, remedy)
    if "BatchNorm" in name and getattr(node, "_saved_training", False) and node._saved_input.shape[0] > 1:
        problem = f"{name}: batch normalisation in training mode mixes contributions"
        remedy = "use GroupNorm, or `model, report = lamina.fix(model)`, or put the layer in eval mode"
        raise CouplingError("engine.batchnorm", problem, remedy)
    if "BatchNorm" not in name:
        _HARMLESS.add(type(node))


def _refuse_leaf(leaf: Tensor, names: dict[int, str], node: Any) -> None:
    name = names.get(id(leaf))
    if name is None:
        problem = f"the losses depend on a trainable tensor of shape {tuple(leaf.shape)} that is not the model's"
        remedy = "detach it, or make it a parameter of the model so that the plan covers it"
        raise UnclippedGradient("engine.foreign-tensor", problem, remedy)
    problem = f"{type(node).__name__} uses tensor '{name}' outside the engine: its gradient would not be clipped"
    owner = name.rpartition(".")[0]
    remedy = (
        "use the optimiser's weight decay instead of a penalty in the losses, and call the module that owns the tensor"
    )
    if owner:
        user = module_above(owner)
        remedy += f"; where module {user!r} uses it without that call, give Engine(..., per_contribution=[{user!r}])"
    raise UnclippedGradient("engine.tensor-used-directly", problem, remedy)


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


def check_batch(losses: Tensor | None, batch: Batch, plan: StepPlan, names: dict[int, str]) -> CheckedBatch | None:
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


_RECHECK_EVERY = 128

CallSignature = tuple[str, str, bool, int]


class OwnershipCheck:
    """The loss of one contribution must leave the rows of all others at zero; of a random half, those of the rest.

    It catches what no list of layers names: a batch-mean loss, attention across the batch, a (time, batch) layout
    whose length happens to equal the batch. It runs once per structure: the kinds of operations and the places of the
    rule calls, not their sizes. It cannot see a loss that is merely *scaled* by the others (divided by the tokens of
    the batch): `Engine.probe` sees that.
    """

    def __init__(self) -> None:
        self.passed: defaultdict[int, Counter[CallSignature]] = defaultdict(Counter)  # by signature of the graph
        self._asked: Counter[int] = Counter()
        self._proven: dict[int, list[CallSignature]] = {}  # the calls of a graph that was proven whole

    def due(self, graph: LossGraph, units: int) -> bool:
        """At the first two steps of a computation, then at every 128th, and until it is proven.

        It comes again because a computation may couple contributions on some data and not on other.
        """
        if units < 2:
            return False
        self._asked[graph.signature] += 1
        count = self._asked[graph.signature]
        if count <= 2 or count % _RECHECK_EVERY == 0:
            return True
        calls = [_call_signature(item) for item in graph.nodes.items()]
        if self._proven.get(graph.signature) == calls:
            return False
        if Counter(calls) <= self.passed[graph.signature]:
            self._proven[graph.signature] = calls
            return False
        return True

    def run(
        self, losses: Tensor, owner: Tensor, units: int, graph: LossGraph, layouts: Mapping[RuleCall, RowLayout],
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:  # fmt: skip
        """`around`: entered for each of its backward passes."""
        present = torch.unique(owner[owner >= 0])
        if len(present) < 2:
            return
        chance = torch.Generator().manual_seed(secrets.randbits(60))
        half = torch.zeros(units, dtype=torch.bool)
        half[present[torch.randperm(len(present), generator=chance)[: (len(present) + 1) // 2]]] = True
        alone = torch.zeros(units, dtype=torch.bool)
        alone[present[torch.randint(len(present), (), generator=chance)]] = True
        proven = set(graph.uses)
        for side in (alone, half, ~half):
            watch = _CouplingReceiver(side, layouts)
            for use in graph.uses:
                use.slot.receiver = watch
            try:
                mine = (owner >= 0) & side[owner.clamp(min=0)]
                with around():
                    torch.autograd.backward(losses, mine.to(losses), retain_graph=True)
            finally:
                for use in graph.uses:
                    use.slot.receiver = None
            if side is not alone:
                proven &= watch.seen
        self.passed[graph.signature] |= Counter(
            _call_signature(item) for item in graph.nodes.items() if item[0] in proven
        )


def _call_signature(item: tuple[RuleCall, Any]) -> CallSignature:
    use, node = item
    return use.where, type(use.rule).__name__, use.example_of_row is not None, node.lamina_rank


class _CouplingReceiver:
    """Refuses a gradient in the rows of the other half, and notes the uses whose own rows had one.

    Where every gradient is zero (a head that starts at zero) nothing is proven, and the check comes again.
    """

    def __init__(self, side: Tensor, layouts: Mapping[RuleCall, RowLayout]) -> None:
        self.side, self.layouts = side, layouts  # side: (P,) bool
        self.seen: set[RuleCall] = set()

    def wants_input_grad(self, use: RuleCall) -> bool:
        return True

    def receive(self, use: RuleCall, saved: Sequence[Tensor], g: Tensor) -> None:
        layout = self.layouts.get(use)
        if layout is None:
            raise hidden_backward_error(use)
        mine = ((layout.owner >= 0) & self.side[layout.owner.clamp(min=0)]).to(g.device)
        g = g.nan_to_num(0.0, 0.0, 0.0)
        if bool((g[mine] != 0).any()):
            self.seen.add(use)
        if bool((g[~mine] != 0).any()):
            raise CouplingError(
                "engine.contributions-coupled",
                f"at '{use.where}', the loss of one contribution has a gradient in the rows of others",
                "use no batch statistics and no loss over the batch, and keep the batch axis first; for rows in another "
                "order use `with lamina.rows(owner):` or Engine(..., per_contribution=['name'])",
            )


class GradWriter:
    """Writes released gradients to `.grad`, and refuses gradients that anything else wrote there."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self._written: dict[str, weakref.ref[Tensor]] = {}

    def write(self, grads: Mapping[str, Tensor]) -> None:
        for name, p in self.tensors.items():
            grad = grads[name].to(p.dtype)
            if p.grad is None:
                p.grad = grad
            else:  # the engine's own, from an earlier step that was not zeroed
                p.grad.add_(grad)
            self._written[name] = weakref.ref(p.grad)

    def check(self) -> None:
        """Before a step: nothing foreign, nothing frozen."""
        for name, p in self.tensors.items():
            if p.grad is not None:
                self._refuse_foreign(name, p)
            if not p.requires_grad:
                problem = f"'{name}' was frozen after the engine was attached"
                remedy = "freeze first, then make stack, plan and engine"
                raise EngineError("engine.frozen-after-attach", problem, remedy)

    def versions(self) -> list[tuple[int, int]]:
        """Which gradients the tensors have, and how often each was written."""
        grads = (p.grad for p in self.tensors.values())
        return [(id(g), g._version) if g is not None else (0, 0) for g in grads]

    def check_unchanged(self, before: list[tuple[int, int]]) -> None:
        """After a backward pass: nothing was written beside the engine."""
        after = self.versions()
        for name, was, now in zip(self.tensors, before, after, strict=True) if before != after else ():
            if was != now:
                self.tensors[name].grad = None
                problem = f"a hook or custom Function wrote to '{name}'.grad during the backward pass"
                remedy = "remove it; switch fused gradient accumulation off"
                raise UnclippedGradient("engine.grad-written-during-backward", problem, remedy)

    def before_optimizer_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Closures would take several releases for the price of one; foreign gradients were never clipped."""
        mine = tensors_of_optimizer(optimizer, self.tensors)
        if not mine:
            return
        if kwargs.get("closure") is not None or any(callable(a) and not isinstance(a, Optimizer) for a in args):
            problem = f"{type(optimizer).__name__}.step got a closure, which may ask for several gradients in one step"
            remedy = "call engine.backward once, then optimizer.step() without a closure"
            raise EngineError("engine.optimizer-closure", problem, remedy)
        for name, p in mine:
            self._refuse_foreign(name, p)

    def _refuse_foreign(self, name: str, p: Tensor) -> None:
        written = self._written.get(name)
        if p.grad is not None and (written is None or written() is not p.grad):
            problem = f"'{name}'.grad holds a gradient that the engine did not write"
            remedy = "call optimizer.zero_grad(), and engine.backward(losses, batch) instead of loss.backward()"
            raise UnclippedGradient("engine.foreign-grad", problem, remedy)


_EVERY_CALL_UNTIL, _THEN_EVERY = 24, 64


class StateGuard:
    """Refuses a step once the model holds what the optimiser did not write: it was never noised.

    Buffers and frozen parameters must stay as they are, of every type, whoever writes them. Between two looks a write
    shows by identity and version; a write through `.data` shows by value only, and values are compared at some steps
    and before the weights are handed out. A buffer that was written is put back; of a frozen parameter, which may be
    large, only a checksum is kept.

    Trained parameters must stay the same tensors, and keep their values from the beginning of a forward pass to the
    step: checksums show it, at the first calls and at every 64th. Between steps they may be written, as an optimiser
    of one's own does.

    Of a model that is divided over ranks this is about the part that a rank holds (`held`): what is gathered for a step
    is dropped after it.
    """

    def __init__(self, model: nn.Module, trained: Mapping[str, Tensor], held: Mapping[str, Any] | None = None) -> None:
        self.model, self.trained = model, trained
        self._held = {name: p for name, p in (held or {}).items() if is_sharded(p)}
        self._trained_ids = {id(p) for p in trained.values()}
        self.refused = False
        self._calls, self.pending = 0, dict[str, int]()  # checksums of a forward pass whose step is pending
        self.accept()

    def accept(self) -> None:
        """Compare with buffers and frozen parameters as they are now."""
        self._seen = {name: (b, b._version, b.detach().clone()) for name, b in self.model.named_buffers()}
        frozen = ((name, self._kept(name, p)) for name, p in self.model.named_parameters() if name not in self.trained)
        self._frozen = {name: (p, p._version, checksum(p)) for name, p in frozen}
        self._found = self._fingerprint()

    def _fingerprint(self) -> list[tuple[int, int]]:
        """Which buffers and frozen parameters the model has, and how often each was written. (`accept` keeps them alive.)"""
        trained, found = self._trained_ids, []
        seen: set[nn.Module] = set()
        left: list[nn.Module | None] = [self.model]
        for module in left:  # grows as it goes
            if module is None or module in seen:
                continue
            seen.add(module)
            for t in (*module._buffers.values(), *module._parameters.values()):
                if t is not None and id(t) not in trained:
                    found.append((id(t), t._version))
            left += module._modules.values()
        return found

    def check(self, *, values: bool) -> None:
        if not values and self._found == self._fingerprint():
            return
        self._compare(values=values)
        self._found = self._fingerprint()

    def _compare(self, *, values: bool) -> None:
        live = dict(self.model.named_buffers())
        for name in dict.fromkeys((*self._seen, *live)):
            now, (before, version, value) = live.get(name), self._seen.get(name, (None, 0, None))
            if now is not None and now is before and now._version == version and not values:
                continue
            if now is not None and value is not None and _same_values(now, value):
                self._seen[name] = (now, now._version, value)
                continue
            if before is not None and value is not None:
                self._put_back(name, before, value)
            raise CouplingError("engine.buffer-written", *self._written("buffer", name))
        parameters = dict(self.model.named_parameters()) if self._frozen else {}
        for name, (p, version, total) in self._frozen.items():
            held = self._kept(name, parameters.get(name, p))
            if held is p and p._version == version and not values:
                continue
            if checksum(held) != total:
                raise CouplingError("engine.frozen-written", *self._written("frozen parameter", name))
            self._frozen[name] = (held, held._version, total)

    def _kept(self, name: str, p: Tensor) -> Tensor:
        """What this process keeps of a parameter between steps."""
        kept: Tensor = self._held.get(name, p)
        return kept

    def check_at_end(self) -> None:
        """As `check`, of values, when the model is given back; not what was refused before."""
        said = self.refused
        try:
            self.check(values=True)
        except CouplingError:
            if not said:
                raise

    def begin_call(self) -> None:
        """A forward pass begins."""
        self._calls += 1
        due = self._calls <= _EVERY_CALL_UNTIL or self._calls % _THEN_EVERY == 0
        self.pending = {name: checksum(self._kept(name, p)) for name, p in self.trained.items()} if due else {}

    def before_optimizer_step(self, optimizer: Optimizer, *_: Any) -> None:
        """The optimiser writes the parameters now: forget their checksums."""
        if self.pending and (
            tensors_of_optimizer(optimizer, self.trained) or tensors_of_optimizer(optimizer, self._held)
        ):
            self.pending = {}

    def check_trained(self, *, again: bool = False) -> None:
        """Refuse trained parameters that were replaced, or moved since the last forward pass began.

        `again`: this will be asked again, before the step.
        """
        for name, p in self.model.named_parameters() if self.pending and not again else ():
            if p is not self.trained.get(name) and p is not self._held.get(name) and name not in self._frozen:
                problem = f"parameter '{name}' was replaced or added, and what it holds was never noised"
                remedy = "write to it by the optimiser, or make stack, plan and engine anew"
                raise CouplingError("engine.parameter-replaced", problem, remedy)
        sums, self.pending = self.pending, self.pending if again else {}
        for name, value in sums.items():
            if checksum(self._kept(name, self.trained[name])) != value:
                problem = (
                    f"'{name}' was written between forward pass and step: it would carry private data without noise"
                )
                raise CouplingError("engine.parameter-written", problem, "train it by the optimiser alone")

    def _written(self, kind: str, name: str) -> tuple[str, str]:
        """Problem and remedy."""
        self.refused = True
        problem = f"{kind} '{name}' was written since the last step: it would carry private data without noise"
        remedy = (
            "train it by the optimiser, or compute it from public data before the engine is made; if public data "
            "alone wrote it, call engine.accept_buffers() before the next forward pass"
        )
        return problem, remedy

    def _put_back(self, name: str, before: Tensor, value: Tensor) -> None:
        path, _, local = name.rpartition(".")
        with torch.no_grad():
            before.copy_(value)
        self.model.get_submodule(path)._buffers[local] = before
        self._seen[name] = (before, before._version, value)


BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(t: Tensor) -> int:
    """The sum of the bits of all values, modulo their width: what overwrites a tensor moves it."""
    bits, t = BITS[t.element_size()], t.to_local() if is_sharded(t) else t  # type: ignore[attr-defined]
    return int(t.detach().view(bits).sum(dtype=bits))


def _same_values(now: Tensor, then: Tensor) -> bool:
    if now.shape != then.shape:
        return False
    then = then.to(now.dtype)
    return bool(((now == then) | ((now != now) & (then != then))).all())


def tensors_of_optimizer(optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Those of the tensors that the optimiser updates."""
    updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [(name, p) for name, p in tensors.items() if id(p) in updated]


def refuse_float16(parameters: Mapping[str, Tensor]) -> None:
    for name, p in parameters.items():
        if p.requires_grad and p.dtype == torch.float16:
            problem = f"'{name}' is float16, whose gradients overflow"
            raise EngineError("engine.float16-parameter", problem, "use bfloat16 or float32")


# How torch multiplies float32, by the name of the setting, and where that is found without the 20 µs that reading it takes.
_PRODUCTS = {
    "torch.backends.fp32_precision": ("generic", "all"),
    "torch.backends.cuda.matmul.fp32_precision": ("cuda", "matmul"),
    "torch.backends.mkldnn.matmul.fp32_precision": ("mkldnn", "matmul"),
}


def refuse_reduced_products() -> None:
    """In TF32 or bfloat16, which a user may allow for float32, factors and gradients lose digits as they are added up."""
    for name, place in _PRODUCTS.items():
        if (kind := torch._C._get_fp32_precision_getter(*place)) not in ("none", "ieee"):
            problem = f"torch may multiply float32 matrices in {kind}, and a clipped sum could then leave its bound"
            raise EngineError("engine.reduced-products", problem, f'set {name} = "ieee"')


def refuse_elsewhere(tensors: Mapping[str, Tensor], what: str) -> None:
    """Refuse what is exact to the last bit only where float64 and whole numbers are added up on the CPU."""
    for name, p in tensors.items() if what else ():
        if not p.is_cpu:
            problem = f"{what} is made for sums on the CPU, and '{name}' is on {p.device}"
            remedy = "train on the CPU, or with Gaussian noise"
            raise EngineError("engine.exact-noise-elsewhere", problem, remedy)


def refuse_extra_state(model: nn.Module) -> None:
    """`state_dict` writes extra state, and nobody noises it."""
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            problem = f"module '{name}' ({type(module).__name__}) has get_extra_state, which is saved without noise"
            raise CouplingError("engine.extra-state", problem, "keep it outside of the model, or drop get_extra_state")
