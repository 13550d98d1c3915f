"""What the engine must compute, computed another way: per-contribution gradients by `vmap(grad)`, clipped by hand.

Nothing here uses the engine, its rules or `lamina.route`. The oracle works on a float64 copy of the model, one
example at a time, so that a difference is the engine's.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils import _pytree as pytree

from lamina import Batch, Engine, LayerStack, route
from lamina.plan.selection import Slice
from lamina.plan.step_plan import Clipping, PlannedClass, PlannedLayer, StepPlan

FORMS = ("box", "joint")
RELATIVE = 1e-5
ABSOLUTE = 1e-6  # of the summed sizes of the clipped gradients of the tensor's layer
WORST: dict[str, float] = defaultdict(float)

LossOf = Callable[[nn.Module, Any, Any], Tensor]
Grads = dict[str, Tensor]


def losses_of_output(out: Tensor) -> Tensor:
    """One loss per example that no normalisation makes constant."""
    flat = out.flatten(1)
    wave = torch.cos(torch.arange(flat.shape[1], dtype=torch.float64)).to(flat.dtype)
    return (flat * wave).mean(1) + 0.5 * flat.square().mean(1)


def losses_of(model: nn.Module, x: Any, y: Any) -> Tensor:
    """Tensors and tuples are positional arguments, dicts are keywords."""
    if isinstance(x, dict):
        out = model(**x)
    elif isinstance(x, tuple):
        out = model(*x)
    else:
        out = model(x)
    return losses_of_output(out)


# ----------------------------------------------------------------------------------- plans


def layers_of(model: nn.Module, group: Any = "module") -> tuple[PlannedLayer, ...]:
    return tuple(
        PlannedLayer(name=x.name, depth=x.depth, parameters=x.parameters, size=x.size)
        for x in LayerStack.from_model(model, group=group)
    )


def plan_of(
    model: nn.Module,
    clip: Any = 1.0,
    noise: Any = 1.0,
    *,
    clipping: str = "box",
    public: Sequence[int] = (),
    group: Any = "module",
    steps: int = 100,
    batch: float = 4.0,
    rate: float = 0.01,
    slices: Sequence[Slice] = (),
) -> StepPlan:
    """A plan by hand. `clip` is a number, a row, or a matrix; `noise` a number or a row."""
    layers = layers_of(model, group)
    if isinstance(clip, int | float):
        clip = [[float(clip)] * len(layers)]
    elif isinstance(clip[0], int | float):
        clip = [clip]
    if isinstance(noise, int | float):
        noise = [float(noise) if any(row[i] for row in clip) else 0.0 for i in range(len(layers))]
    classes = [
        PlannedClass(name=f"c{k}", population=None, sampling_rate=rate, public=True)
        if k in public
        else PlannedClass(name=f"c{k}", population=1000, sampling_rate=rate, delta=1e-5)
        for k in range(len(clip))
    ]
    return StepPlan(
        layers=layers,
        classes=tuple(classes),
        clip=tuple(map(tuple, clip)),
        noise=tuple(noise),
        batch=batch,
        steps=steps,
        clipping=Clipping(clipping),
        slices=tuple(slices),
    )


# ----------------------------------------------------------------------------------- gradients


def wide(tree: Any) -> Any:
    return pytree.tree_map(lambda t: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t, tree)


def rows_of(tree: Any, i: Any) -> Any:
    return pytree.tree_map(lambda t: t[i] if isinstance(t, Tensor) else t, tree)


def example_grads(model: nn.Module, x: Any, y: Any = None, losses: LossOf = losses_of) -> Grads:
    """(n, *shape) float64 gradients of each example alone, for every trainable tensor."""
    twin = wide_copy(model)
    params = {name: p.detach() for name, p in twin.named_parameters() if p.requires_grad}
    x, y = wide(x), wide(y)

    def one(tensors: Grads, xi: Any, yi: Any) -> Tensor:
        class Call(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.twin = twin

            def forward(self) -> Tensor:
                return losses(self.twin, xi, yi).sum()

        return functional_call(Call(), {f"twin.{k}": v for k, v in tensors.items()}, ())

    leaves, spec = pytree.tree_flatten((x, y))
    batched = [isinstance(t, Tensor) for t in leaves]

    def lifted(tensors: Grads, inputs: list[Tensor]) -> Tensor:
        rest = iter(inputs)
        mine = [next(rest).unsqueeze(0) if b else leaf for leaf, b in zip(leaves, batched, strict=True)]
        return one(tensors, *pytree.tree_unflatten(mine, spec))

    inputs = [leaf for leaf, b in zip(leaves, batched, strict=True) if b]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return vmap(grad(lifted), in_dims=(None, 0), randomness="error")(params, inputs)
    except Exception:  # whatever vmap cannot do, a loop can
        each = [_grad(one, params, *rows_of((x, y), slice(i, i + 1))) for i in range(len(inputs[0]))]
        return {name: torch.stack([g[name] for g in each]) for name in params}


def _grad(one: Callable[..., Tensor], params: Grads, *given: Any) -> Grads:
    try:
        return grad(one)(params, *given)
    except RuntimeError as problem:  # a Function of the older form, which only autograd itself runs
        if "setup_context" not in str(problem):
            raise
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    found = torch.autograd.grad(one(leaves, *given), list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


def wide_copy(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if "weight_g" in module._parameters:  # the older weight_norm hangs a product there that cannot be copied
            vars(module).pop("weight", None)
    return copy.deepcopy(model).double()


def unit_grads(examples: Grads, batch: Batch) -> Grads:
    """Weighted means over the examples of each contribution; padding is never looked at."""
    out = {}
    for name, grads in examples.items():
        rows = []
        for u in range(len(batch)):
            mine = [i for i in range(batch.examples) if int(batch.unit[i]) == u and float(batch.weight[i]) > 0]
            whole = sum(float(batch.weight[i]) for i in mine)
            total = torch.zeros(grads.shape[1:], dtype=torch.float64)
            for i in mine:
                total = total + grads[i] * (float(batch.weight[i]) / whole)
            rows.append(total)
        out[name] = torch.stack(rows) if rows else torch.zeros(0, *grads.shape[1:], dtype=torch.float64)
    return out


# ----------------------------------------------------------------------------------- clipping by hand


def masked_by_hand(grads: Mapping[str, Tensor], classes: Sequence[int], plan: StepPlan) -> Grads:
    """Every contribution's gradients with 0 at the places that the slices of its class leave out, one by one."""
    out = {name: g.clone() for name, g in grads.items()}
    for part in plan.slices:
        k = [entry.name for entry in plan.classes].index(part.cls)
        open_ = [i for first, stop in part.ranges for i in range(first, stop)]
        shut = [i for i in range(part.length) if i not in open_]
        for u, cls in enumerate(classes):
            if int(cls) == k and part.tensor in out:
                mine = out[part.tensor][u]
                (mine if mine.dim() else mine.view(1))[(slice(None),) * part.axis + (shut,)] = 0.0
    return out


@dataclass(frozen=True)
class Reference:
    """The clipped sums, the size of what was summed per tensor's layer, and each contribution's factors."""

    sums: Grads
    sizes: dict[str, float]
    factors: list[list[float]]  # contribution × layer


def clip_by_hand(
    grads: Mapping[str, Tensor],
    classes: Sequence[int],
    plan: StepPlan,
    scale: Sequence[float] | None = None,
    ceiling: Sequence[float] | None = None,
) -> Reference:
    """One contribution and one layer at a time, in float64. A tensor that no class may move at all is left out."""
    trained = [any(row[i] > 0 for row in plan.clip) for i in range(len(plan.layers))]
    names = [
        name
        for i, (layer, used) in enumerate(zip(plan.layers, trained, strict=True))
        if used
        for name in layer.parameters
        if not _closed(plan, i, name)
    ]
    grads = masked_by_hand(grads, classes, plan)
    sums = {name: torch.zeros_like(grads[name][0] if len(classes) else grads[name].sum(0)) for name in names}
    sizes: dict[str, float] = dict.fromkeys(names, 0.0)
    factors: list[list[float]] = []
    for u, k in enumerate(classes):
        norms = [
            sqrt(sum(float(grads[name][u].square().sum()) for name in layer.parameters)) if used else 0.0
            for layer, used in zip(plan.layers, trained, strict=True)
        ]
        by = 1.0 if scale is None else float(scale[u])
        factors.append(_factors(norms, int(k), plan, by, inf if ceiling is None else float(ceiling[u])))
        for layer, norm, factor in zip(plan.layers, norms, factors[-1], strict=True):
            if factor == 0.0:
                continue
            for name in set(layer.parameters) & set(names):
                sums[name] = sums[name] + grads[name][u] * factor
                sizes[name] += norm * factor
    return Reference(sums, sizes, factors)


def _closed(plan: StepPlan, layer: int, name: str) -> bool:
    """Whether every class that reaches the layer has an empty slice of the tensor."""
    reach = {entry.name for entry, row in zip(plan.classes, plan.clip, strict=True) if row[layer] > 0}
    return reach <= {part.cls for part in plan.slices if part.tensor == name and not part.ranges}


def _factors(norms: Sequence[float], k: int, plan: StepPlan, scale: float = 1.0, ceiling: float = inf) -> list[float]:
    row = plan.clip[k]
    if plan.classes[k].public:
        scale, ceiling = 1.0, inf
    if plan.clipping is Clipping.BOX:
        scale = min(scale, ceiling / sqrt(sum(c * c for c in row))) if ceiling < inf else scale
        row = tuple(c * scale for c in row)
        return [
            0.0 if c == 0 or not norm < inf else 1.0 if norm <= c else c / norm
            for c, norm in zip(row, norms, strict=True)
        ]
    reached = [i for i, c in enumerate(row) if c > 0]
    if plan.classes[k].public:
        whole, radius = sum(norms[i] for i in reached), inf
    else:
        whole = sqrt(sum((norms[i] / plan.noise[i]) ** 2 for i in reached))
        radius = sqrt(sum((row[i] / plan.noise[i]) ** 2 for i in reached))
        largest = radius * max(plan.noise[i] for i in reached)
        radius *= min(scale, ceiling / largest)
    factor = 0.0 if not whole < inf else 1.0 if whole <= radius else radius / whole
    return [factor if i in reached else 0.0 for i in range(len(row))]


# ----------------------------------------------------------------------------------- comparing


def difference(
    got: Mapping[str, Tensor], ref: Reference, relative: float = RELATIVE, absolute: float = ABSOLUTE
) -> float:
    """Refuse a tensor that is further off than allowed; the worst relative error where the gradient is not ~0."""
    assert set(got) == set(ref.sums), set(got) ^ set(ref.sums)
    worst = 0.0
    for name, want in ref.sums.items():
        assert not got[name].requires_grad, f"the sum of '{name}' carries a graph"
        error, size = float((got[name].double() - want).norm()), float(want.norm())
        allowed = relative * size + absolute * ref.sizes[name]
        assert error <= allowed, f"'{name}': off by {error:.3g} of {size:.3g} (allowed {allowed:.3g})"
        if size > 0.1 * ref.sizes[name]:  # otherwise the contributions cancel, and so do their digits
            worst = max(worst, error / size if size else 0.0)
    family = os.environ.get("PYTEST_CURRENT_TEST", "?").split("::")[0].rpartition("/")[2]
    WORST[family] = max(WORST[family], worst)
    return worst


def thresholds(
    grads: Mapping[str, Tensor], plan: StepPlan, spread: Sequence[float] = (1.0,), classes: Sequence[int] | None = None
) -> StepPlan:
    """The plan with C at the median norm of each layer, so that some contributions are clipped and some are not."""
    middle: list[float | None] = []  # of the contributions that reach the layer with a gradient
    grads = grads if classes is None else masked_by_hand(grads, classes, plan)
    for layer in plan.layers:
        norms = sum(grads[name].reshape(len(grads[name]), -1).square().sum(1) for name in layer.parameters).sqrt()
        norms = norms[torch.isfinite(norms) & (norms > 1e-12)]
        middle.append(float(norms.median()) if len(norms) else None)
    clip = [
        tuple(c if c in (0, inf) else (m or 1e-3) * spread[k % len(spread)] for c, m in zip(row, middle, strict=True))
        for k, row in enumerate(plan.clip)
    ]
    noise = []
    for i, s in enumerate(plan.noise):
        private = [row[i] for row in clip if 0 < row[i] < inf]
        noise.append(s if not private else 1.0 if middle[i] is None else max(private) * (0.5 + 0.4 * (i % 3)))
    return replace(plan, clip=tuple(clip), noise=tuple(noise))


def agree(
    model: nn.Module,
    x: Any,
    y: Any = None,
    *,
    losses: LossOf = losses_of,
    forms: Sequence[str] = FORMS,
    clip: Any = 1.0,
    public: Sequence[int] = (),
    group: Any = "module",
    spread: Sequence[float] = (1.0,),
    must_clip: bool = True,
    batch: Mapping[str, Any] | None = None,
    engine: Mapping[str, Any] | None = None,
    relative: float = RELATIVE,
    slices: Sequence[Slice] = (),
) -> None:
    """Engine, `lamina.route` and the oracle give the same clipped sums; the attached forward is the model's own."""
    made = Batch(x, y, **(batch or {}))
    grads = unit_grads(example_grads(model, x, y, losses), made)
    with torch.no_grad():
        plain = losses(model, x, y)
    for form in forms:
        plan = plan_of(model, clip, clipping=form, public=public, group=group, slices=slices)
        plan = thresholds(grads, plan, spread, made.cls.tolist())
        limits = {"scale": made.scale, "ceiling": made.ceiling}
        ref = clip_by_hand(grads, made.cls.tolist(), plan, **limits)
        if must_clip:
            assert any(0 < f < 1 for row in ref.factors for f in row), "the thresholds clip nothing"
            whole = form == "joint" or any(f == 1 for row in ref.factors for f in row)
            assert whole, "the thresholds clip everything"
        mine = {name: grads[name] for name in ref.sums}
        difference(route(mine, made.cls, plan, noise=None, **limits), ref, relative=1e-12, absolute=1e-12)
        with Engine(model, plan, **(engine or {})) as attached:
            attached_losses = losses(model, x, y)
            torch.testing.assert_close(attached_losses.detach(), plain, rtol=1e-4, atol=1e-5, equal_nan=True)
            difference(attached.clipped_sums(attached_losses, made), ref, relative=relative)
            assert attached.budget.taken == 0
        assert all(p.grad is None for p in model.parameters())


def trace_of(model: nn.Module) -> Any:
    """Everything about a model that attaching must not change, by identity where identity matters."""
    return {
        name: (
            type(module),
            module.training,
            {k: id(v) for k, v in vars(module).items() if not k.startswith("_")},
            {
                k: (id(v) if not isinstance(v, dict) else {a: id(b) for a, b in v.items()})
                for k, v in vars(module).items()
            },
            {
                k: (id(p), p.requires_grad, len(p._backward_hooks or {}))
                for k, p in module.named_parameters(recurse=False)
            },
        )
        for name, module in model.named_modules()
    }
