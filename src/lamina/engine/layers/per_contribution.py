"""Modules without a layer rule, run once per contribution: by `vmap`, or in a loop where vmap cannot."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from lamina.engine.batch import RowLayout
from lamina.engine.distributed import is_sharded
from lamina.engine.execute.grads import DenseGrads, at_least_float32
from lamina.engine.layers.layer_rule import (
    NO_INPUT,
    ApplyRule,
    LayerForward,
    LayerRule,
    Needed,
    ParameterGrads,
    Params,
    SavedTensors,
    module_above,
)
from lamina.engine.probe import ConstantDraws, preserve_global_generators
from lamina.errors import OwnershipError, UnsupportedLayer


class _PaddingRows(TorchFunctionMode):
    """Keeps the padding row of a table out of the gradient of every example: under vmap torch does so for the first alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.embedding:
            return func(*args, **(kwargs or {}))
        return _embedding(*args, **(kwargs or {}))


def _embedding(
    ids: Tensor, weight: Tensor, padding_idx: int | None = None, *given: Any, **more: Any
) -> Tensor:  # F.embedding, whose padding row is never open to a gradient
    if padding_idx is not None:
        rows = torch.arange(weight.shape[0], device=weight.device)
        weight = torch.where((rows != padding_idx % len(rows)).unsqueeze(1), weight, weight.detach())
    return F.embedding(ids, weight, None, *given, **more)


class ExpandRule(LayerRule):
    """p ↦ (N, *p.shape), or with `along` a first axis of 1, (1, …) ↦ (N, …). No memory is copied.

    One contribution: the sum of g over the copies that its examples used.
    """

    def __init__(self, examples: int, *, along: bool = False) -> None:
        self.examples, self.along = examples, along

    def run(self, x: Tensor, params: Params) -> tuple[Tensor, SavedTensors]:
        p = cast(Tensor, params[0])
        return (p if self.along else p.unsqueeze(0)).expand(self.examples, *p.shape[1 if self.along else 0 :]), ()

    def input_grad(self, saved: SavedTensors, params: Params, g: Tensor) -> Tensor:
        raise AssertionError("an expanded tensor has no input")

    def contribution_grads(self, saved: SavedTensors, g: Tensor, layout: RowLayout, need: Needed) -> ParameterGrads:
        folded = layout.fold(at_least_float32(g))  # (P, m, …)
        return [DenseGrads(folded.sum(1, keepdim=self.along) if folded.shape[1] > 1 or not self.along else folded)]


ExampleCount = Callable[[], int | None]


class _ForwardModule(nn.Module):
    """The module's own forward, called with other tensors in place of its parameters."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.call = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


class PerContributionForward(LayerForward):
    """Every parameter below `module` is given to each example as its own copy.

    Autograd then delivers one gradient per example, whatever the module does with its parameters. Correct for all
    modules that treat examples separately; slower than a rule.
    """

    def __init__(self, name: str, module: nn.Module, forward: Callable[..., Any], examples: ExampleCount) -> None:
        self.name, self.module, self.examples = name, module, examples
        self.parameters = tuple(n for n, p in module.named_parameters() if p.requires_grad)
        self.shell = _ForwardModule(module, forward)
        self.vmap = True
        self.patterns: dict[Any, list[bool]] = {}
        self.axes: dict[
            tuple[bool, ...], int
        ] = {}  # axis along which results are joined, by their axes of length 1; otherwise 0

    def forward(self, apply: ApplyRule, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        n = self.examples() or next((t.shape[0] for t in leaves if isinstance(t, Tensor) and t.dim()), None)
        if n is None:
            raise self._no_batch()
        _refuse_caches(self.name, leaves)
        batched = self._batched(leaves, spec, n)
        copies = {name: apply(ExpandRule(n), NO_INPUT, name) for name in self.parameters}
        return self._run(copies, leaves, batched, spec, n)

    def _batched(self, leaves: Sequence[Any], spec: Any, n: int) -> list[bool]:
        """Which arguments carry the batch: decided, and checked, once per pattern of arguments.

        Later a mask whose length happens to be the batch's must not be taken for it: what an argument is would then
        depend on how many contributions were sampled.
        """
        now = [isinstance(t, Tensor) and t.dim() > 0 and t.shape[0] == n for t in leaves]
        if not any(now):
            raise self._no_batch()
        if n == 1:
            return now  # nothing to tell apart: one example alone is the batch
        pattern = (str(spec), tuple((t.dim(), t.shape[:1] == (1,)) if isinstance(t, Tensor) else None for t in leaves))
        if pattern not in self.patterns:
            if not self._check(leaves, now, spec, n):
                return now  # of some example nothing is known: checked again next time
            self.patterns[pattern] = now
        before = self.patterns[pattern]
        if any(was and not fits for was, fits in zip(before, now, strict=True)):
            raise self._no_batch()
        return before

    def _no_batch(self) -> OwnershipError:
        what = f"'{self.name}' ({type(self.module).__name__})"
        problem = f"{what} was called without a tensor whose first axis is the batch, or with another one than before"
        remedy = f"pass the batch to it, or name a module above it that takes one, such as per_contribution=[{module_above(self.name)!r}]"
        return OwnershipError("engine.no-batch-argument", problem, remedy)

    def _run(self, copies: dict[str, Tensor], leaves: Sequence[Any], batched: Sequence[bool], spec: Any, n: int) -> Any:
        if self.vmap:
            try:
                return self._vmap(copies, leaves, batched, spec)
            except (RuntimeError, ValueError, TypeError, NotImplementedError) as problem:
                self.vmap = False
                what, why = f"'{self.name}' ({type(self.module).__name__})", str(problem).splitlines()[0]
                bare = [name for name in self.parameters if "." not in name]
                inside = bool(bare) and len(bare) < len(self.parameters)
                remedy = f". Move {', '.join(map(repr, bare))} into a module of their own" if inside else ""
                warnings.warn(
                    f"{what} cannot run under vmap and runs one example at a time: {why}{remedy}", stacklevel=2
                )
        return self._loop(copies, leaves, batched, spec, n)

    def _call(self, tensors: Mapping[str, Tensor], leaves: Sequence[Any], spec: Any) -> Any:
        args, kwargs = pytree.tree_unflatten(list(leaves), spec)
        named = {f"module.{name}": t for name, t in tensors.items()}
        return functional_call(self.shell, named, args, kwargs)

    def _vmap(self, copies: dict[str, Tensor], leaves: Sequence[Any], batched: Sequence[bool], spec: Any) -> Any:
        shape: dict[str, Any] = {}

        def one(tensors: dict[str, Tensor], inputs: list[Tensor]) -> list[Tensor]:
            rest = iter(inputs)
            mine = [next(rest).unsqueeze(0) if b else leaf for leaf, b in zip(leaves, batched, strict=True)]
            shape["outputs"], shape["spec"] = pytree.tree_flatten(self._call(tensors, mine, spec))
            outputs = [o for o in shape["outputs"] if isinstance(o, Tensor)]
            shape["axes"] = [self._axis(o) for o in outputs]
            return outputs

        inputs = [leaf for leaf, b in zip(leaves, batched, strict=True) if b]
        with sdpa_kernel(SDPBackend.MATH), _PaddingRows():  # the one attention kernel that vmap can differentiate
            stacked = torch.vmap(one, randomness="different")(copies, inputs)
        tensors = (
            t.movedim(0, k).flatten(k, k + 1) if t.dim() > 1 else t for t, k in zip(stacked, shape["axes"], strict=True)
        )
        outputs = [next(tensors) if isinstance(o, Tensor) else o for o in shape["outputs"]]
        return pytree.tree_unflatten(outputs, shape["spec"])

    def _loop(
        self, copies: dict[str, Tensor], leaves: Sequence[Any], batched: Sequence[bool], spec: Any, n: int
    ) -> Any:
        results, out_spec = [], None
        for i in range(n):
            mine = [leaf[i : i + 1] if b else leaf for leaf, b in zip(leaves, batched, strict=True)]
            flat, out_spec = pytree.tree_flatten(self._call({k: v[i] for k, v in copies.items()}, mine, spec))
            results.append(flat)
        assert out_spec is not None
        if len({len(flat) for flat in results}) > 1:
            bare = ", ".join(repr(name) for name in self.parameters if "." not in name)
            problem = (
                f"'{self.name}' ({type(self.module).__name__}) runs one example at a time, and gives more results for "
                "one than for another: it drops layers at random"
            )
            freeze = f"freeze {bare}, because of which it runs so, or " if bare else ""
            remedy = f"{freeze}set model.config.layerdrop = 0"
            raise UnsupportedLayer("engine.results-differ", problem, remedy)
        outputs = zip(*results, strict=True)
        joined = [_join(group, self._axis(group[0])) if isinstance(group[0], Tensor) else group[0] for group in outputs]
        return pytree.tree_unflatten(joined, out_spec)

    def _axis(self, output: Tensor) -> int:
        """Return the axis along which this result of one example is joined with those of the others."""
        return self.axes.get(tuple(size == 1 for size in output.shape), 0)

    def _find_axes(self, whole: Sequence[Any], alone: Sequence[Any], n: int) -> None:
        """Learn the axes from the results of the batch and of one example alone; `_check` compares the values."""
        for a, b in zip(whole, alone, strict=False):
            if isinstance(a, Tensor) and isinstance(b, Tensor) and a.dim() == b.dim():
                wanted = [k for k in range(b.dim()) if a.shape == (*b.shape[:k], n * b.shape[k], *b.shape[k + 1 :])]
                self.axes.setdefault(tuple(size == 1 for size in b.shape), next(iter(wanted), 0))

    def _check(self, leaves: Sequence[Any], batched: Sequence[bool], spec: Any, n: int) -> bool:
        """One example at a time must give what the whole batch gives (random draws aside).

        Of an example so large that the order of a sum decides whether it overflows, it does not matter whether it did:
        then nothing is known of it, and False is returned. The others must not feel it.
        """
        with _evaluating(self.module):
            own = {name: self.module.get_parameter(name) for name in self.parameters}
            whole = pytree.tree_leaves(self._call(own, leaves, spec))
            first = [leaf[:1] if b else leaf for leaf, b in zip(leaves, batched, strict=True)]
            alone = pytree.tree_leaves(self._call(own, first, spec))
            self._find_axes(whole, alone, n)
            copies = {name: p.unsqueeze(0).expand(n, *p.shape) for name, p in own.items()}
            single = pytree.tree_leaves(self._run(copies, leaves, batched, spec, n))
        large, known = _near_overflow([t for t, b in zip(leaves, batched, strict=True) if b], n), True
        for a, b, one in zip(whole, single, alone, strict=True):
            if not isinstance(a, Tensor) or not a.is_floating_point():
                continue
            shape = a.shape
            if a.dim() and shape == b.shape:
                a, b = (t.movedim(self._axis(one), 0).reshape(n, -1) for t in (a, b))
            same, as_finite = _compare_examples(a, b)
            overflowed = large & ~as_finite if len(as_finite) == n else torch.zeros_like(same)
            if not bool((same | overflowed).all()):
                raise self._not_separate(shape, one.shape, n)
            known = known and not bool(overflowed.any())
        return known

    def _not_separate(self, whole: torch.Size, alone: torch.Size, n: int) -> UnsupportedLayer:
        what = f"'{self.name}' ({type(self.module).__name__})"
        remedy = (
            "make it stateless between calls (model.config.use_cache = False), or name a module above it "
            f"that takes the batch, such as per_contribution=[{module_above(self.name)!r}]"
        )
        if len(whole) != len(alone) or whole.numel() != n * alone.numel():
            problem = (
                f"{what} gives a result of shape {tuple(alone)} for one example and of {tuple(whole)} for {n}: none of its "
                "axes counts examples"
            )
            return UnsupportedLayer("engine.result-without-batch", problem, remedy)
        problem = (
            f"{what} gives another result for one example alone than in the batch: examples influence each other, or an "
            "argument has the length of the batch by chance"
        )
        return UnsupportedLayer("engine.examples-not-separate", problem, remedy)


def _join(results: tuple[Tensor, ...], axis: int) -> Tensor:
    return torch.cat(results, axis) if results[0].dim() else torch.stack(results)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients or random draws; afterwards every module's mode is what it was."""
    modes = [(m, m.training) for m in module.modules()]
    try:
        module.eval()
        with torch.no_grad(), ConstantDraws():
            yield
    finally:
        module.train(modes[0][1])  # so that a module drops what it cached in evaluation mode
        for m, mode in modes:
            m.training = mode


@contextmanager
def _opened(module: nn.Module) -> Iterator[None]:
    """Replace all-zero tensors below `module` for a while: a factor of 0 would hide other tensors from the result."""
    own = [p.data for p in module.parameters() if p.is_floating_point() and not is_sharded(p)]
    closed = [(t, t.clone()) for t in own if not bool(t.any())]
    try:
        for t, _ in closed:
            t.copy_(0.1 * torch.cos(torch.arange(t.numel(), device=t.device)).view_as(t))
        yield
    finally:
        for t, value in closed:
            t.copy_(value)


_MOVES = (0.5, 50.0)  # changes of a parameter that are tried, in multiples of its values
_LENGTHEN = -1  # a first axis of 1 becomes the batch's
_MOST_AXES = 3
Axes = dict[str, int]  # by parameter: `_LENGTHEN`, or how many axes of 1 follow the new one of the batch


class BroadcastForward(LayerForward):
    """Bare parameters that a module uses by broadcasting (scales, biases, class tokens, position tables), one per example.

    Each is lengthened to the batch, or gets an axis of the batch in front, with axes of 1 behind it as they are needed.
    The first call finds out which: another value in the copy of one example must move that example as it does when all
    have it, and nobody else. Where nothing fits, a `PerContributionForward` takes over. The module's children keep
    their rules.
    """

    def __init__(self, name: str, module: nn.Module, forward: Callable[..., Any], examples: ExampleCount) -> None:
        self.name, self.module, self.original, self.examples = name, module, forward, examples
        self.parameters = tuple(n for n, p in module.named_parameters(recurse=False) if p.requires_grad)
        self.fallback: PerContributionForward | None = None
        own = [module.get_parameter(n) for n in self.parameters]
        self.tables_only = all(p.dim() > 1 and p.shape[0] == 1 for p in own)
        self.axes: dict[tuple[int, ...], Axes] = {}  # by number of axes of each argument

    @staticmethod
    def applies_to(module: nn.Module) -> bool:
        own = [p for p in module.parameters(recurse=False) if p.requires_grad]
        return any(p.requires_grad for child in module.children() for p in child.parameters()) or all(
            p.dim() > 1 and p.shape[0] == 1 for p in own
        )

    def forward(self, apply: ApplyRule, *args: Any, **kwargs: Any) -> Any:
        if self.fallback is not None:
            return self.fallback.forward(apply, *args, **kwargs)
        leaves = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        n = self.examples() or next((t.shape[0] for t in leaves if t.dim()), 1)
        pattern = tuple(t.dim() for t in leaves)
        axes = self.axes.get(pattern) or self._find_axes(n, args, kwargs)
        if axes is not None:
            copies = {name: apply(ExpandRule(n, along=k == _LENGTHEN), NO_INPUT, name) for name, k in axes.items()}
            try:
                out = self._with({name: _spread(t, axes[name]) for name, t in copies.items()}, args, kwargs)
            except (RuntimeError, ValueError, IndexError):  # in training mode it is used in another way
                if pattern in self.axes:
                    raise
            else:
                if n > 1:  # one example alone shows nothing
                    self.axes[pattern] = axes
                return out
        self.fallback = PerContributionForward(self.name, self.module, self.original, self.examples)
        return self.fallback.forward(apply, *args, **kwargs)

    def _with(self, tensors: Mapping[str, Tensor], args: Any, kwargs: Any) -> Any:
        own = {name: self.module._parameters[name] for name in tensors}
        try:
            self.module._parameters.update(tensors)  # type: ignore[arg-type]
            return self.original(*args, **kwargs)
        finally:
            self.module._parameters.update(own)

    def _find_axes(self, n: int, args: Any, kwargs: Any) -> Axes | None:
        found: Axes = {}
        with _evaluating(self.module), _opened(self.module):
            plain = pytree.tree_leaves(self.original(*args, **kwargs))
            if not (self.tables_only or self._separate(plain, n, args, kwargs)):
                return None  # `PerContributionForward` refuses it, or finds which argument carries the batch
            unseen = self._fit(self.parameters, found, n, args, kwargs)
        if unseen:  # kept from an earlier call in evaluation mode, or used in training mode alone
            with preserve_global_generators(), torch.no_grad(), ConstantDraws(), _opened(self.module):
                plain, again = (pytree.tree_leaves(self.original(*args, **kwargs)) for _ in range(2))
                if not any(map(_moved, plain, again, [n] * len(plain))):
                    unseen = self._fit(unseen, found, n, args, kwargs)
                    if any(self._used(name, plain, args, kwargs) for name in unseen or ()):
                        return None
                for name in unseen or ():
                    if (
                        k := next(filter(partial(self._runs, name, n, args, kwargs), self._places(name)), None)
                    ) is None:
                        return None
                    found[name] = k
        return None if unseen is None else found

    def _fit(self, names: Sequence[str], found: Axes, n: int, args: Any, kwargs: Any) -> list[str] | None:
        """Add the place of each parameter to `found`. Return those that change no result; None if one fits nowhere."""
        plain, unseen = pytree.tree_leaves(self.original(*args, **kwargs)), []
        for name in names:
            p = self.module.get_parameter(name)
            wave = torch.cos(torch.arange(p.numel(), device=p.device)).view_as(p).to(p.dtype)
            for size in _MOVES:
                moved = p + size * wave * (1 + p.abs())
                whole = pytree.tree_leaves(self._with({name: moved}, args, kwargs))
                if any(map(_moved, plain, whole, [n] * len(plain))):
                    break
            else:
                unseen.append(name)
                continue
            for k in self._places(name):
                copies = (p if k == _LENGTHEN else p[None]).expand(n, *p.shape[k == _LENGTHEN :]).clone()
                copies[-1] = moved[0] if k == _LENGTHEN else moved
                try:
                    given = pytree.tree_leaves(self._with({name: _spread(copies, k)}, args, kwargs))
                except (RuntimeError, ValueError, IndexError):  # shapes that do not broadcast
                    continue
                if len(plain) == len(given) and all(map(_only_last_moved, plain, whole, given, [n] * len(plain))):
                    found[name] = k
                    break
            else:
                return None
        return unseen

    def _used(self, name: str, plain: Sequence[Any], args: Any, kwargs: Any) -> bool:
        """Return whether a result depends on a parameter that changes no result: NaN shows in it, a small change does not."""
        missing = torch.full_like(self.module.get_parameter(name), torch.nan)
        broken = pytree.tree_leaves(self._with({name: missing}, args, kwargs))
        pairs = [(a, b) for a, b in zip(plain, broken, strict=True) if isinstance(a, Tensor) and a.is_floating_point()]
        return any(bool((torch.isfinite(a) & ~torch.isfinite(b)).any()) for a, b in pairs)

    def _places(self, name: str) -> Sequence[int]:
        p = self.module.get_parameter(name)
        return (*([_LENGTHEN] if p.dim() > 1 and p.shape[0] == 1 else []), *range(_MOST_AXES + 1))

    def _runs(self, name: str, n: int, args: Any, kwargs: Any, k: int) -> bool:
        """Return whether a parameter that changes no result can be spread in this way for other numbers of examples.

        If it cannot, the axis counts something else, which has the length of the batch by chance.
        """
        p = self.module.get_parameter(name)
        for examples in (n, 1, n + 1) if n > 1 else (1,):
            rows = torch.arange(examples) % n
            given = pytree.tree_map(
                lambda t, rows=rows: t[rows.to(t.device)] if isinstance(t, Tensor) and t.dim() and len(t) == n else t,
                (args, kwargs),
            )
            copies = (p if k == _LENGTHEN else p[None]).expand(examples, *p.shape[k == _LENGTHEN :])
            try:
                self._with({name: _spread(copies, k)}, *given)
            except (RuntimeError, ValueError, IndexError):
                return False
        return True

    def _separate(self, plain: Sequence[Any], n: int, args: Any, kwargs: Any) -> bool:
        """Whether every example alone gives what it gives in the batch."""
        for i in range(n if n > 1 else 0):
            mine = pytree.tree_map(
                lambda t, i=i: t[i : i + 1] if isinstance(t, Tensor) and t.dim() and len(t) == n else t, (args, kwargs)
            )
            try:
                alone = pytree.tree_leaves(self.original(*mine[0], **mine[1]))
            except (RuntimeError, ValueError, IndexError, TypeError):
                return False
            if len(alone) != len(plain):
                return False
            for a, b in zip(plain, alone, strict=True):
                if not isinstance(a, Tensor) or not a.is_floating_point() or a.shape == (n, n):
                    continue
                if not isinstance(b, Tensor) or not a.dim() or (len(a) != 1 and len(a) % n):
                    return False
                rows = len(a) // n if len(a) != 1 else 1
                part = a if len(a) == 1 else a[i * rows : (i + 1) * rows]
                if part.shape != b.shape or not bool(_compare_examples(part, b)[0].all()):
                    return False
        return True


def _spread(copies: Tensor, axes: int) -> Tensor:
    """(N, …) with so many axes of 1 behind the first."""
    return copies if axes == _LENGTHEN else copies.view(len(copies), *[1] * axes, *copies.shape[1:])


def _moved(plain: Any, whole: Any, n: int) -> bool:
    """Return whether the result of the last of n examples changed by more than rounding."""
    if not isinstance(plain, Tensor) or not isinstance(whole, Tensor) or not plain.is_floating_point():
        return False
    if plain.shape != whole.shape or not plain.numel() or len(plain.reshape(-1)) % n:
        return True
    last, other = (t.reshape(n, -1)[-1] for t in (plain, whole))
    return bool((other - last).abs().amax() > 1e-4 * last.abs().amax())


def _only_last_moved(plain: Any, whole: Any, given: Any, n: int) -> bool:
    """Whether a result is that of another value for the last of n examples, and as it was for the others."""
    if not isinstance(plain, Tensor) or not isinstance(given, Tensor) or not plain.is_floating_point():
        return type(plain) is type(given)
    if plain.shape == (n, n) == given.shape:
        return True  # of every example with every other: it belongs to nobody, and the ownership check sees it used
    if not plain.dim() or plain.shape[1:] != given.shape[1:] or len(given) % n or len(plain) not in (1, len(given)):
        return False
    plain, whole = (t.expand_as(given).reshape(n, -1) for t in (plain, whole))
    want, given = torch.cat([plain[:-1], whole[-1:]]), given.reshape(n, -1)
    if not bool(_compare_examples(want, given)[0].all()):
        return False
    change = (whole[-1] - plain[-1]).abs().amax()  # may be smaller than the rounding of the other examples
    near = (given - want).abs().amax() <= 0.05 * change
    return bool(near | ~(change > 1e-4 * plain[-1].abs().amax()))


def _refuse_caches(name: str, leaves: Sequence[Any]) -> None:
    """An argument that the module writes to would be written once per example."""
    for leaf in leaves:
        if hasattr(leaf, "update") and not isinstance(leaf, Tensor):
            problem = f"'{name}' runs once per contribution and would write to its argument, a {type(leaf).__name__}"
            raise UnsupportedLayer("engine.cache-argument", problem, "train with model.config.use_cache = False")


def _near_overflow(arguments: Sequence[Tensor], n: int) -> Tensor:
    """(n,) the examples with numbers that are not finite, or whose products and sums may leave their type's range."""
    large = torch.zeros(n, dtype=torch.bool)
    for t in arguments:
        if t.is_floating_point() and t.numel():
            large |= ~(t.detach().reshape(n, -1).abs() < torch.finfo(t.dtype).max ** 0.4).all(1).cpu()
    return large


def _compare_examples(a: Tensor, b: Any) -> tuple[Tensor, Tensor]:
    """(n,) the examples that are equal up to rounding, and (n,) those that are finite at the same places.

    Example by example, so that one of enormous size does not hide the others. A leading 1 in `a` is broadcast.
    """
    if not isinstance(b, Tensor) or not a.dim() or a.shape[1:] != b.shape[1:] or len(a) not in (1, len(b)):
        return torch.tensor([False]), torch.tensor([True])
    if not b.numel():
        return torch.tensor([True]), torch.tensor([True])
    rounding = 1e-3 if a.is_floating_point() else 0.0
    a, b = (t.reshape(len(b), -1) for t in (a.expand_as(b), b))
    finite = torch.isfinite(a) & torch.isfinite(b)
    as_finite = (torch.isfinite(a) == torch.isfinite(b)).all(1)
    wide = torch.float64 if a.is_cpu else torch.float32  # other devices may have no float64
    a, b = (torch.where(finite, t, 0).to(wide) for t in (a, b))
    same = as_finite & ((a - b).abs().amax(1) <= rounding * a.abs().amax(1) + 1e-9)
    return same.cpu(), as_finite.cpu()


class FlattenedTokensForward(LayerForward):
    """Rows (N·T, …) of N examples in order become (N, T, …), and every example goes through the module alone.

    Every tensor among arguments and results must have a row per token: a router's logits, scores and choices.
    """

    def __init__(self, name: str, module: nn.Module, forward: Callable[..., Any], examples: ExampleCount) -> None:
        self.name, self.examples, self.original = name, examples, forward
        self.inner = PerContributionForward(name, module, self._together, examples)
        self.parameters = self.inner.parameters

    def forward(self, apply: ApplyRule, *args: Any, **kwargs: Any) -> Any:
        n = self.examples()
        args, kwargs = pytree.tree_map(
            lambda t: self._split_examples(t, n) if isinstance(t, Tensor) else t, (args, kwargs)
        )
        out = self.inner.forward(apply, *args, **kwargs)
        return pytree.tree_map(lambda t: t.flatten(0, 1) if isinstance(t, Tensor) else t, out)

    def _split_examples(self, t: Tensor, n: int | None) -> Tensor:
        if not n or not t.dim() or t.shape[0] % n:
            problem = f"'{self.name}' got a tensor of shape {tuple(t.shape)}, which {n} examples do not share evenly"
            remedy = (
                "keep as many tokens per example, or name the block above it in Engine(..., per_contribution=[...])"
            )
            raise OwnershipError("engine.tokens-uneven", problem, remedy)
        return cast(Tensor, t.unflatten(0, (n, -1)))

    def _together(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, for arguments with a batch axis in front of the tokens."""
        n = next(len(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor))
        args, kwargs = pytree.tree_map(lambda t: t.flatten(0, 1) if isinstance(t, Tensor) else t, (args, kwargs))
        out = self.original(*args, **kwargs)
        return pytree.tree_map(lambda t: t.unflatten(0, (n, -1)) if isinstance(t, Tensor) else t, out)
