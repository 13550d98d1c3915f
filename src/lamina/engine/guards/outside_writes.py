"""Warnings about writes outside of the engine: gradients after a step, weights between steps, attributes in a forward pass."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lamina.engine.distributed import is_sharded
from lamina.engine.guards.guard import Guard, Moment, tensors_of_optimizer
from lamina.engine.guards.state import BITS

_EVERY_TIME_UNTIL, _THEN_EVERY = 24, 64
_GRADIENT_SAMPLE, _WEIGHT_SAMPLE, _CORNER = 64, 16, 4
_CHANGES = 3  # of an attribute before a warning: a cache may grow once or twice
_OWN_ATTRIBUTES = frozenset(vars(nn.Module()))


class WrittenOutsideEngine(UserWarning):
    """A value that a release may contain was written outside of the engine. ε covers it only if it reads no private data."""


class OutsideWrites(Guard):
    """Warns, once for each kind, about writes that may carry private data without noise.

    gradients   changed in place between `Engine.backward` and `optimizer.step`, other than by a factor for each tensor
                or by clamping (`clip_grad_norm_`, `clip_grad_value_`, a scaler)
    weights     differ at a step from what the last `optimizer.step` left. A swap that was undone (evaluation of a
                moving average) is not noticed
    attributes  plain tensors of modules that change in every forward pass. A growing cache keeps its beginning

    It compares samples of the numbers, the first 24 times and then every 64th time; weights on the CPU every time.
    """

    def __init__(self, model: nn.Module, tensors: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> None:
        self.model, self.tensors, self._held = model, tensors, held
        self.private, self.probing = True, False  # forward passes of the probe are not judged here
        self._said: set[str] = set()
        self._writes = self._steps = self._calls = 0
        self._sample_next = self._clips = False
        self._versions: dict[str, int] = {}
        self._gradients: dict[str, Tensor] = {}
        self._views: dict[str, tuple[int, Any]] = {}
        self._weights: dict[str, bytes] = {}
        self._before: tuple[dict[str, tuple[int, int]], dict[str, Tensor]] | None = None
        self._corners: dict[str, Tensor] = {}
        self._changes: Counter[str] = Counter()

    def forget(self) -> None:
        """Compare no weights until the next `optimizer.step`, because a run may have restored them."""
        self._weights.clear()

    def _say(self, kind: str, text: str, stacklevel: int = 4) -> None:
        if kind not in self._said and self.private:
            self._said.add(kind)
            warnings.warn(text, WrittenOutsideEngine, stacklevel=stacklevel)

    # gradients

    def after_write(self) -> None:
        """Sample `.grad` after the engine wrote it."""
        self._writes += 1
        sampled = self._sample_next or _is_due(self._writes)
        self._sample_next = False
        grads = {name: p.grad for name, p in self._held.items() if p.grad is not None and not is_sharded(p)}
        self._versions = {name: g._version for name, g in grads.items()}
        self._gradients = {name: _strided(g, _GRADIENT_SAMPLE).clone() for name, g in grads.items()} if sampled else {}

    def before_optimizer_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._versions:
            return
        now = {name: p.grad for name, p in tensors_of_optimizer(optimizer, self._held) if p.grad is not None}
        changed = [name for name, g in now.items() if g._version != self._versions.get(name, g._version)]
        if changed and not self._gradients:
            self._sample_next = not self._clips
        for name in changed if self._gradients else ():
            if _is_clipped(self._gradients[name], _strided(now[name], _GRADIENT_SAMPLE)):
                self._clips = True
                continue
            self._say(
                "gradients",
                f"'{name}'.grad was changed after the engine wrote it, and not by clipping or scaling. Post-processing that "
                "reads no private data is allowed; values computed from private data are not covered by ε",
            )
        for name in now:
            self._versions.pop(name, None)

    # weights

    def after_optimizer_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        mine = tensors_of_optimizer(optimizer, self.tensors)
        if not mine or any(map(is_sharded, self._held.values())):
            return
        self._steps += 1
        due = _is_due(self._steps)
        for name, p in mine:
            if p.is_cpu or due:
                self._weights[name] = self._sample(name, p)
            else:
                self._weights.pop(name, None)

    def before_step(self, moment: Moment) -> None:
        """Warn if the weights at a step differ from what the last `optimizer.step` left."""
        self.private = moment.private
        if text := self.weights_text():
            self._say("weights", text, stacklevel=5)
            self._weights.clear()

    def weights_text(self) -> str:
        """Return a note on weights that differ from what the last `optimizer.step` left; empty if none does."""
        name = next(
            (name for name, left in self._weights.items() if self._sample(name, self.tensors[name]) != left), ""
        )
        return name and (
            f"'{name}' was written outside of optimizer.step. Weights that were trained on private data in the "
            "clear, in a copy of the model for example, are not covered by ε; a projection or public weights are allowed"
        )

    def _sample(self, name: str, p: Tensor) -> bytes:
        """Return a sample of a tensor as bytes. The view is kept, because making it takes longer than reading it."""
        place, view = self._views.get(name, (0, None))
        if view is None or place != p.data_ptr():
            view = _strided(p, _WEIGHT_SAMPLE).view(BITS[p.element_size()])
            view = view.numpy() if p.is_cpu else view
            self._views[name] = p.data_ptr(), view
        sample: bytes = (view.cpu().numpy() if isinstance(view, Tensor) else view).tobytes()
        return sample

    # attributes

    def begin_call(self) -> None:
        """Note the plain tensors of the model before a forward pass with gradients."""
        if not torch.is_grad_enabled():
            return
        self._calls += 1
        wanted = _is_due(self._calls) and "attributes" not in self._said and not self.probing
        self._before = kept_tensors(self.model) if wanted else None

    def end_call(self) -> None:
        before, self._before = self._before, None
        if before is None:
            return
        after, tensors = kept_tensors(self.model)
        for name in (name for name, written in after.items() if before[0].get(name) != written):
            corner = _corner(tensors[name])
            last, self._corners[name] = self._corners.get(name), corner
            self._changes[name] += last is not None and _differ(last, corner)
            if self._changes[name] >= _CHANGES:
                self._say(
                    "attributes",
                    f"attribute '{name}' keeps a tensor that every forward pass changes; if it depends on the batch, it has no noise. "
                    "Do not save, log or read it; state_dict leaves it out, a pickle of the model does not",
                )
                self._corners.clear()
                return


def _is_due(count: int) -> bool:
    return count <= _EVERY_TIME_UNTIL or count % _THEN_EVERY == 0


def _strided(t: Tensor, most: int) -> Tensor:
    """Return a view of at most `most` numbers of a tensor, spread evenly over its memory."""
    count = min(most, t.numel())
    return t.detach().as_strided((count,), (max(1, t.numel() // most),))


def _is_clipped(before: Tensor, after: Tensor) -> bool:
    """Return whether numbers were multiplied by one factor ≥ 0 and then clamped to -v … v, or zeroed."""
    old, new = before.double().cpu(), after.double().cpu()
    near = 8 * torch.finfo(before.dtype).eps
    top = float(new.abs().max())
    if not top > 0:
        return top == 0
    zero = (old == 0) & (new == 0)  # numbers on a grid are often 0, which every factor keeps
    inside = (new.abs() < top * (1 - near)) & ~zero
    if not bool(inside.any()):
        return bool((new.sign() == old.sign()).all())
    largest = int((new.abs() * inside).argmax())
    factor = float(new[largest] / old[largest]) if float(old[largest]) else 0.0
    scaled = factor * old
    same = torch.where(inside, (new - scaled).abs() <= near * scaled.abs(), scaled * new.sign() >= top * (1 - near))
    return factor > 0 and bool((same | zero).all())


def kept_tensors(model: nn.Module) -> tuple[dict[str, tuple[int, int]], dict[str, Tensor]]:
    """Return identities with versions, and tensors, in plain attributes of modules (no parameters, no buffers)."""
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        for name, t in tensors_in_attributes(module):
            found[f"{path}.{name}".lstrip(".")] = t
    return {name: (id(t), t._version) for name, t in found.items()}, found


def tensors_in_attributes(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the tensors in plain attributes of a module, also in containers; several in one container are numbered."""
    found: list[tuple[str, Tensor]] = []
    for name, value in vars(module).items():
        if isinstance(value, Tensor):
            found.append((name, value))
        elif isinstance(value, list | tuple | dict) and name not in _OWN_ATTRIBUTES:
            found += ((f"{name}[{i}]", t) for i, t in enumerate(pytree.tree_leaves(value)) if isinstance(t, Tensor))
    ours = ((name, t) for name, t in found if not torch._C._functorch.is_functorch_wrapped_tensor(t))  # left by vmap
    return [(name, t) for name, t in ours if t.is_floating_point() or t.dim()]


def _corner(t: Tensor) -> Tensor:
    return t.detach()[tuple(slice(_CORNER) for _ in t.shape)].clone()


def _differ(a: Tensor, b: Tensor) -> bool:
    """Return whether two corners differ in the part that both have."""
    if a.dim() != b.dim() or a.dtype != b.dtype:
        return True
    both = tuple(slice(min(m, n)) for m, n in zip(a.shape, b.shape, strict=True))
    return not torch.equal(a[both].nan_to_num(), b[both].nan_to_num())
