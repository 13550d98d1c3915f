"""Per-example gradients on proxy data: losses, Fisher information, Hessian products, influence functions."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import UninitializedParameter
from torch.utils import _pytree as pytree

from lamina import validate
from lamina.errors import PlanError
from lamina.plan.layer_stack import LayerStack

LossesOf = Callable[[Any, Any], Tensor]
"""`losses_of(x, y)`: one loss per example, model included."""

NamedTensors = dict[str, Tensor]
_READ_STACK = "read the stack from this model: lamina.LayerStack.from_model(model)"


def reconstruction_losses(model: nn.Module) -> LossesOf:
    """Mean squared error of `model(x)` to `x`, per example: what an autoencoder is trained on."""

    def losses_of(x: Any, y: Any) -> Tensor:
        out = model(x)
        if not isinstance(x, Tensor) or not isinstance(out, Tensor) or out.shape != x.shape:
            got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise PlanError(
                "sensitivity.not-an-autoencoder",
                f"the model gives {got}, so it cannot be compared with its input",
                "give losses_of(x, y), which returns one loss per example, with public or simulated x and y",
            )
        return (out - x).square().flatten(1).mean(1)

    return losses_of


def layer_tensors(model: nn.Module, stack: LayerStack) -> tuple[NamedTensors, ...]:
    """The tensors of every layer by name, as the model holds them."""
    if not isinstance(stack, LayerStack) or not len(stack):
        raise PlanError("sensitivity.stack-type", f"stack is {stack!r}", "use lamina.LayerStack.from_model(model)")
    tensors = dict(model.named_parameters())
    for layer in stack:
        for name in layer.parameters:
            if name not in tensors:
                raise PlanError(
                    "sensitivity.stack-of-other-model",
                    f"the model has no tensor {name!r} of layer {layer.name!r}",
                    _READ_STACK,
                )
            if isinstance(tensors[name], UninitializedParameter):
                raise PlanError(
                    "sensitivity.tensor-without-shape", f"tensor {name!r} has no shape yet", "run model(...) once"
                )
        size = sum(tensors[name].numel() for name in layer.parameters)
        if size != layer.size or not size:
            raise PlanError(
                "sensitivity.stack-of-other-model",
                f"layer {layer.name!r} has {size} numbers, the stack says {layer.size}",
                _READ_STACK,
            )
    return tuple({name: tensors[name] for name in layer.parameters} for layer in stack)


class ExampleLosses(nn.Module):
    """`losses_of` as a function of parameters: `at(parameters, x, y)` is one loss per example.

    The model is a submodule, so `functional_call` finds the tensors to exchange wherever `losses_of` uses it; a
    tied tensor is exchanged at all its uses.
    """

    def __init__(self, model: nn.Module, losses_of: LossesOf) -> None:
        super().__init__()
        self.model, self.losses_of = model, losses_of

    def forward(self, x: Any, y: Any) -> Tensor:
        return self.losses_of(x, y)

    def at(self, parameters: Mapping[str, Tensor], x: Any, y: Any) -> Tensor:
        given = {f"model.{name}": tensor for name, tensor in parameters.items()}
        out: Tensor = functional_call(self, given, (x, y))
        return out

    def checked(self, x: Any, y: Any) -> int:
        """How many examples; refuses losses that are not one finite number for each."""
        n = example_count(x)
        with torch.no_grad():
            losses = self.losses_of(x, y)
        if not isinstance(losses, Tensor) or losses.shape != (n,):
            got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise PlanError(
                "sensitivity.losses-shape",
                f"losses_of gave {got} for {n} examples, must be ({n},)",
                "return one loss per example: reduction='none', then mean over everything but the first axis",
            )
        if not losses.isfinite().all():
            bad = int((~losses.isfinite()).sum())
            raise PlanError(
                "sensitivity.losses-not-finite", f"{bad} of {n} proxy losses are not finite", "use other proxy data"
            )
        return n


def example_count(x: Any) -> int:
    """How many examples a tensor, tuple or dict of tensors holds: the common size of the first axes."""
    sizes = {t.shape[0] if t.ndim else 0 for t in pytree.tree_leaves(x) if isinstance(t, Tensor)}
    if len(sizes) != 1 or not min(sizes):
        raise PlanError(
            "sensitivity.example-count", f"proxy inputs have first axes {sorted(sizes)}", "give tensors (examples, …)"
        )
    return int(min(sizes))


def take_examples(tree: Any, rows: slice | Tensor) -> Any:
    """Some examples of a tensor, tuple or dict of tensors."""
    return pytree.tree_map(lambda t: t[rows] if isinstance(t, Tensor) else t, tree)


@contextmanager
def model_unchanged(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode; afterwards modes, buffers and the global random state are as before.

    Attention runs in its unfused form, which can be differentiated twice and per example.
    """
    modes = {module: module.training for module in model.modules()}
    buffers = [(module, dict(module._buffers)) for module in modes]  # a forward may write or replace them
    values = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        model.eval()
        with torch.random.fork_rng(devices=[]), sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for module, tensors in buffers:
            module._buffers.update(tensors)
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)


_MOST_GRADIENT_NUMBERS = 1 << 24  # numbers of per-example gradients held at once
_MOST_CHUNK = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Fisher:
    """With g_il the gradient of example i at layer l:

      information[l]  mean_i ‖g_il‖², the trace of the empirical Fisher information of the layer
      norms[l]        n_l, the median of ‖g_il‖ over the examples that reach the layer (g_il ≠ 0)
      reached[l]      the part of the examples that do

    The median and not the root mean square, because n_l is to be a threshold: at C_l = n_l half of those that
    reach the layer are clipped, however heavy the tail; the root mean square is √information, given as well. An
    example with g_il = 0 is not clipped at any threshold, so it has no say in one.
    """

    layers: tuple[str, ...]
    information: tuple[float, ...]
    norms: tuple[float, ...]
    reached: tuple[float, ...]
    examples: int


def fisher(
    model: nn.Module, losses_of: LossesOf, x: Any, y: Any, stack: LayerStack, *, chunk: int | None = None
) -> Fisher:
    """Read them from per-example gradients of public or simulated data, `chunk` examples at a time."""
    tensors = layer_tensors(model, stack)
    squares = torch.cat(
        [
            torch.stack([sum_of_squares([part[name] for name in layer]) for layer in tensors], dim=1)
            for part in example_gradients(model, losses_of, x, y, tensors, chunk=chunk)
        ]
    )  # (examples, layers)
    for layer, column in zip(stack, squares.T, strict=True):
        if not column.isfinite().all():
            raise PlanError(
                "sensitivity.gradient-not-finite",
                f"layer {layer.name!r} has gradients that are not finite",
                "use other proxy data",
            )
        if not (column > 0).any():
            raise PlanError(
                "sensitivity.no-gradient",
                f"layer {layer.name!r} has gradient 0 on all {len(column)} proxy examples",
                "freeze it with requires_grad_(False), or measure at weights and on data that reach it",
            )
    return Fisher(
        layers=tuple(layer.name for layer in stack),
        information=tuple(squares.mean(0).tolist()),
        norms=tuple(float(_lower_median(column[column > 0]).sqrt()) for column in squares.T),
        reached=tuple((squares > 0).double().mean(0).tolist()),
        examples=len(squares),
    )


def example_gradients(
    model: nn.Module,
    losses_of: LossesOf,
    x: Any,
    y: Any,
    tensors: tuple[NamedTensors, ...],
    *,
    chunk: int | None = None,
) -> Iterator[NamedTensors]:
    """Gradients per example, (chunk, *shape) by name, in the order of the examples.

    `vmap(grad)`; a model that `vmap` cannot run is differentiated one example at a time.
    """
    losses, parameters = (ExampleLosses(model, losses_of), {name: t for layer in tensors for name, t in layer.items()})
    size = sum(t.numel() for t in parameters.values())
    step = max(1, min(_MOST_CHUNK, _MOST_GRADIENT_NUMBERS // max(size, 1))) if chunk is None else chunk
    validate.whole(PlanError, "sensitivity.chunk-not-positive", chunk=step)
    with model_unchanged(model):
        n = losses.checked(x, y)
    form = _vmapped_gradients
    for start in range(0, n, step):
        part = take_examples((x, y), slice(start, min(start + step, n)))
        with model_unchanged(model):  # not around the yield: what the caller does meanwhile is the caller's
            try:
                found = form(losses, parameters, *part)
            except (RuntimeError, ValueError, NotImplementedError) as error:
                if form is _looped_gradients or isinstance(error, torch.OutOfMemoryError):
                    raise
                form = _looped_gradients  # control flow on values, in-place writes, .item(): what vmap cannot run
                found = form(losses, parameters, *part)
        yield found


def sum_of_squares(parts: list[Tensor]) -> Tensor:
    """‖·‖² per example over several tensors, in float64."""
    return torch.stack([part.flatten(1).double().square().sum(1) for part in parts]).sum(0)


def _vmapped_gradients(losses: ExampleLosses, parameters: NamedTensors, x: Any, y: Any) -> NamedTensors:
    def loss(given: NamedTensors, x1: Any, y1: Any) -> Tensor:
        one = pytree.tree_map(lambda t: t.unsqueeze(0) if isinstance(t, Tensor) else t, (x1, y1))
        return losses.at(given, *one).sum()

    axes = pytree.tree_map(lambda t: 0 if isinstance(t, Tensor) else None, (x, y))
    detached = {name: t.detach() for name, t in parameters.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")  # right all the same
        out: NamedTensors = vmap(grad(loss), in_dims=(None, *axes))(detached, x, y)
    return out


def _looped_gradients(losses: ExampleLosses, parameters: NamedTensors, x: Any, y: Any) -> NamedTensors:
    rows: list[tuple[Tensor, ...]] = []
    for i in range(example_count(x)):
        with torch.enable_grad():
            given = {name: t.detach().requires_grad_() for name, t in parameters.items()}
            loss = losses.at(given, *take_examples((x, y), slice(i, i + 1))).sum()
            rows.append(torch.autograd.grad(loss, list(given.values()), materialize_grads=True))
    return {name: torch.stack(column) for name, column in zip(parameters, zip(*rows, strict=True), strict=True)}


def _lower_median(values: Tensor) -> Tensor:
    """The median of squares such that its root is the median of the roots: the lower one of two, never a mean."""
    return values.sort().values[math.ceil(len(values) / 2) - 1]


class Hessian:
    """H = ∇² mean_i loss_i at the model's parameters, on proxy data; vectors are flat and float64.

    H·v by differentiating twice: ∇(∇loss · v). Memory holds the graph of `chunk` examples. A ReLU has no
    curvature away from its kink, and its kink is not seen: there H is the curvature of the pieces.
    """

    def __init__(
        self, model: nn.Module, losses_of: LossesOf, x: Any, y: Any, stack: LayerStack, *, chunk: int = 256
    ) -> None:
        validate.whole(PlanError, "sensitivity.chunk-not-positive", chunk=chunk)
        self.model, self.losses, self.x, self.y, self.chunk = (model, ExampleLosses(model, losses_of), x, y, chunk)
        self.tensors = layer_tensors(model, stack)
        self.sizes = [sum(t.numel() for t in layer.values()) for layer in self.tensors]
        with model_unchanged(model):
            self.examples = self.losses.checked(x, y)

    def split(self, flat: Tensor) -> tuple[Tensor, ...]:
        """A flat vector as one piece per layer."""
        return tuple(flat.split(self.sizes))

    def gradient(self, rows: Tensor | None = None) -> Tensor:
        """∇ mean_i loss_i, over all examples or some."""
        return self._accumulated(None, rows)

    def product(self, flat: Tensor, rows: Tensor | None = None) -> Tensor:
        """H·v, over all examples or some."""
        return self._accumulated(flat, rows)

    def largest(self, *, rounds: int = 30, seed: int = 0) -> float:
        """An estimate, from below, of the largest |eigenvalue|, by power iteration."""
        v = torch.randn(sum(self.sizes), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        value = 0.0
        for _ in range(rounds):
            norm = float(v.norm())
            if not norm > 0:
                return value
            v = self.product(v / norm)
            value = float(v.norm())
        return value

    def _accumulated(self, flat: Tensor | None, rows: Tensor | None) -> Tensor:
        x, y = (self.x, self.y) if rows is None else take_examples((self.x, self.y), rows)
        n = self.examples if rows is None else len(rows)
        total = torch.zeros(sum(self.sizes), dtype=torch.float64)
        with model_unchanged(self.model), torch.enable_grad():
            leaves = {name: t.detach().requires_grad_() for layer in self.tensors for name, t in layer.items()}
            for start in range(0, n, self.chunk):
                part = take_examples((x, y), slice(start, min(start + self.chunk, n)))
                loss = self.losses.at(leaves, *part).sum() / n
                wanted = list(leaves.values())
                found = torch.autograd.grad(loss, wanted, create_graph=flat is not None, materialize_grads=True)
                if flat is not None:
                    found = _second_gradients(found, wanted, flat)
                total += torch.cat([piece.detach().flatten().double().cpu() for piece in found])
        if not total.isfinite().all():
            raise PlanError(
                "sensitivity.gradient-not-finite",
                "the gradient or Hessian is not finite",
                "use other proxy data or weights",
            )
        return total


def _second_gradients(first: Sequence[Tensor], wanted: Sequence[Tensor], flat: Tensor) -> tuple[Tensor, ...]:
    pieces = flat.split([t.numel() for t in wanted])
    dot = sum(
        ((g * v.to(g).view_as(g)).sum() for g, v in zip(first, pieces, strict=True)),
        start=torch.zeros((), dtype=first[0].dtype, device=first[0].device),
    )
    if not dot.requires_grad:  # the gradient is constant: no curvature
        return tuple(torch.zeros_like(t) for t in wanted)
    return torch.autograd.grad(dot, wanted, materialize_grads=True)


def hessian_trace(
    model: nn.Module,
    losses_of: LossesOf,
    x: Any,
    y: Any,
    stack: LayerStack,
    *,
    draws: int = 32,
    seed: int = 0,
    chunk: int = 256,
) -> tuple[float, ...]:
    """tr H_ll of every layer by Hutchinson's estimate, E[v_l·(Hv)_l] over signs v: one product serves all layers."""
    hessian = Hessian(model, losses_of, x, y, stack, chunk=chunk)
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(len(stack), dtype=torch.float64)
    for _ in range(draws):
        v = torch.randint(0, 2, (sum(hessian.sizes),), generator=generator).double() * 2 - 1
        pieces = zip(hessian.split(v), hessian.split(hessian.product(v)), strict=True)
        total += torch.stack([torch.dot(a, b) for a, b in pieces])
    return tuple((total / draws).tolist())


_DAMPING_GROWTH = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Influence:
    """To first order, leaving example i out of n moves the reference loss by s·g_i/n, where

        s = (H + damping·I)⁻¹ ∇ reference loss,       s·g_i = Σ_l s_l·g_il.

    values[l] = root mean square over the examples of s_l·g_il: how strongly single examples act through layer l.
    `residual` is ‖(H + damping·I)s − ∇‖/‖∇‖ after `rounds`.
    """

    layers: tuple[str, ...]
    values: tuple[float, ...]
    total: float
    damping: float
    residual: float
    rounds: int
    examples: int


def influence(
    model: nn.Module,
    losses_of: LossesOf,
    x: Any,
    y: Any,
    stack: LayerStack,
    *,
    reference: tuple[Any, Any] | None = None,
    damping: float | None = None,
    rounds: int = 100,
    tolerance: float = 1e-3,
    seed: int = 0,
) -> Influence:
    """Measure it on public or simulated data.

    reference  (x, y) whose loss counts; by default the second half of the examples, for the first half
    damping    added to H; by default a thousandth of its largest eigenvalue, times ten for as long as H + damping·I
               proves not to be positive, as it may be away from a minimum. A given one is refused in that case
    rounds     at most so many Hessian-vector products
    """
    if reference is None:
        half = example_count(x) // 2
        if not half:
            raise PlanError(
                "sensitivity.no-reference", "one example cannot be its own reference", "give more, or reference=(x, y)"
            )
        reference, (x, y) = take_examples((x, y), slice(half, None)), take_examples((x, y), slice(half))
    hessian = Hessian(model, losses_of, x, y, stack)
    wanted = Hessian(model, losses_of, reference[0], reference[1], stack).gradient()
    if not float(wanted.norm()) > 0:
        raise PlanError(
            "sensitivity.reference-without-gradient", "the reference loss has gradient 0", "give another reference"
        )
    s, used, residual, taken = damped_inverse_product(
        hessian, wanted, damping=damping, rounds=rounds, tolerance=tolerance, seed=seed
    )
    products = []
    for part in example_gradients(model, losses_of, x, y, hessian.tensors):
        rows = [
            torch.cat([part[name].flatten(1).double() for name in layer], dim=1) @ piece
            for layer, piece in zip(hessian.tensors, hessian.split(s), strict=True)
        ]
        products.append(torch.stack(rows, dim=1))
    acts = torch.cat(products)  # (examples, layers): s_l·g_il
    return Influence(
        layers=tuple(layer.name for layer in stack),
        values=tuple(acts.square().mean(0).sqrt().tolist()),
        total=float(acts.sum(1).square().mean().sqrt()),
        damping=used,
        residual=residual,
        rounds=taken,
        examples=len(acts),
    )


def damped_inverse_product(
    hessian: Hessian,
    wanted: Tensor,
    *,
    damping: float | None = None,
    rounds: int = 100,
    tolerance: float = 1e-3,
    seed: int = 0,
) -> tuple[Tensor, float, float, int]:
    """s = (H + damping·I)⁻¹ v, with the damping used, the relative residual and the rounds taken."""
    if damping is not None:
        validate.number(PlanError, "sensitivity.damping-negative", least=0, damping=damping)
    validate.whole(PlanError, "sensitivity.rounds-not-positive", rounds=rounds)
    validate.number(PlanError, "sensitivity.tolerance-range", above=0, below=1, tolerance=tolerance)
    used = damping if damping is not None else 1e-3 * hessian.largest(seed=seed) or 1.0
    while True:
        s, curvature, taken = _conjugate_gradients(hessian, wanted, used, rounds, tolerance)
        if curvature > 0:
            residual = float((hessian.product(s) + used * s - wanted).norm() / wanted.norm())
            if not residual < 1:
                raise PlanError(
                    "sensitivity.solver-no-progress",
                    f"after {taken} rounds the residual is {residual:.3g} times the gradient: nothing was gained",
                    "take more rounds or more damping",
                )
            return s, used, residual, taken
        if damping is not None:
            raise PlanError(
                "sensitivity.damping-too-small",
                f"H + damping·I is not positive with damping {damping:g} (it met curvature {curvature:.3g})",
                f"raise damping above {damping - curvature:.3g}, or leave it out",
            )
        used *= _DAMPING_GROWTH


def _conjugate_gradients(
    hessian: Hessian, wanted: Tensor, damping: float, rounds: int, tolerance: float
) -> tuple[Tensor, float, int]:
    """Conjugate gradients; ends at a direction in which the curvature is not positive, and tells it."""
    s, residual = torch.zeros_like(wanted), wanted.clone()
    direction, size = residual.clone(), float(wanted @ wanted)
    goal, least, taken = tolerance**2 * size, math.inf, 0
    while taken < rounds and size > goal:
        product = hessian.product(direction) + damping * direction
        bent, taken = float(direction @ product), taken + 1
        least = min(least, bent / float(direction @ direction))
        if not least > 0:
            break
        s += (size / bent) * direction
        residual -= (size / bent) * product
        before, size = size, float(residual @ residual)
        direction = residual + (size / before) * direction
    return s, least, taken
