"""Everything that is measured of a model before it sees private data, in one call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lamina.errors import NoBound, PlanError
from lamina.plan import LayerStack
from lamina.sensitivity.bounds import bounds
from lamina.sensitivity.example import arguments, first, mapped
from lamina.sensitivity.fisher import Fisher, fisher
from lamina.sensitivity.graph import trace
from lamina.sensitivity.harm import Harm, harm
from lamina.sensitivity.inputs import gaussian
from lamina.sensitivity.measurement import Measure
from lamina.sensitivity.profile import GAUSSIAN, Profile, profile
from lamina.sensitivity.program import export
from lamina.sensitivity.proxy import Losses, LossesOf, count, reconstruction, take, tensors_of, untouched

__all__ = ["Measure", "measure"]


def measure(
    model: nn.Module,
    stack: LayerStack,
    *,
    x: Any = None,
    y: Any = None,
    losses_of: LossesOf | None = None,
    example: Any = None,
    passes: int = 1000,
    radius: float | None = None,
    seed: int = 0,
    proxy: str = GAUSSIAN,
    examples: int = 256,
    draws: int = 16,
) -> Measure:
    """Profile, bounds, harm and Fisher information of a model, from made-up, public or simulated data.

      x, y       proxy data; without x, Gaussian inputs of the shape of `example`
      losses_of  (x, y) → one loss per example, model included; default: mean squared error of model(x) to x
      example    what model(...) accepts, for its shapes only; not needed with x
      passes     inputs that the profile sees (at most as many as x holds)
      radius     public L2 radius of an input, for the sensitivities Δ; harm and norms take the data as they are.
                 Default: as large as the largest proxy input
      proxy      where x comes from: 'public' or 'simulated', a remark may follow ("simulated: ECG")
      examples   at most so many for norms and Fisher information; harm takes its `draws` from them too

    The model is measured at its present weights and left as it was. Equal arguments give an equal measure. Where no Δ
    can be had (an operation whose slope is not known, a layer of zeros), the measure has none, and a note says why.
    Private data has no place here: whatever is read from it would have to be paid for.
    """
    tensors_of(model, stack)
    if isinstance(examples, bool) or not isinstance(examples, int) or examples < 2:
        raise PlanError(
            "measure.examples-whole-number",
            f"examples is {examples!r}, must be a whole number >= 2",
            "256 is usual",
        )
    if x is None and (example is None or y is not None):
        raise PlanError(
            "measure.measure-given-no",
            "measure was given no x",
            "give x, or for made-up inputs example=x and no y",
        )
    if (x is None) != (proxy.partition(":")[0].strip() == GAUSSIAN):
        raise PlanError(
            "measure.proxy-given",
            f"proxy is {proxy!r} and x is {'not ' * (x is None)}given",
            "say proxy='public' or 'simulated' for x; private data must not be measured",
        )
    data = _made_up(model, example, examples, seed) if x is None else x
    part_x, part_y = take((data, y), slice(min(examples, count(data))))
    losses = reconstruction(model) if losses_of is None else losses_of
    with untouched(model):
        Losses(model, losses).checked(*take((part_x, part_y), slice(2)))  # before the long part
    radius = _largest(part_x) if radius is None else radius
    seen = found = None
    try:
        graph = trace(model, example if x is None else x)
        seen = profile(model, example=example, inputs=x, proxy=proxy, passes=passes, radius=radius, seed=seed)
        found = bounds(graph, seen, stack)
        missing = ""
    except NoBound as error:
        missing = error.problem
    harms = harm(model, losses, part_x, part_y, stack, draws=draws, seed=seed)
    norms = fisher(model, losses, part_x, part_y, stack)
    return Measure(
        proxy=proxy,
        layers=tuple(layer.name for layer in stack),
        tight=found.tight if found else (),
        worst=found.worst if found else (),
        printed=found.printed if found else (),
        harm=harms.values,
        norms=norms.norms,
        fisher=norms.information,
        notes=_notes(seen, missing, harms, norms, part_x, radius),
    )


def _made_up(model: nn.Module, example: Any, examples: int, seed: int) -> Any:
    """Gaussian inputs (even token ids) of the example's shape; not those of the profile.

    Only token ids need a trace, which tells how many there are. A model that cannot be traced gets its numbers all
    the same.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    one = first(example, 1)
    try:
        program, graph = export(model, one), trace(model, example)
    except NoBound:
        args, kwargs = arguments(one)
        if not all(t.is_floating_point() for t in (*args, *kwargs.values()) if isinstance(t, Tensor)):
            raise

        def draw(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            made = torch.randn((examples, *value.shape[1:]), generator=generator, dtype=torch.float32)
            return made.to(device=value.device, dtype=value.dtype)

        return mapped(one, draw)
    return next(gaussian(example, program, graph, examples, examples, generator))


def _notes(
    seen: Profile | None, missing: str, harms: Harm, norms: Fisher, x: Any, radius: float
) -> tuple[str, ...]:
    """What a reader of a plan should know about these numbers."""
    notes = [f"no Δ, which lsab needs: {missing}"] if missing else []
    if seen is not None and (failed := seen.a3_failures()):
        total = len(seen.activations)
        notes.append(
            f"{len(failed)} of {total} pre-activations are not Gaussian (KS > 0.1), which the local constants assume"
        )
    if float(typical := _sizes(x).median()) > radius:
        notes.append(
            f"the radius {radius:g} clips most proxy inputs (median norm {float(typical):.3g}): the sensitivities are "
            "those of inputs that small"
        )
    if raised := [name for name, was in zip(harms.layers, harms.floored, strict=True) if was]:
        notes.append(
            f"harm was raised in {len(raised)} of {len(harms.layers)} layers, where it is negative, below its error "
            f"or below the floor: {', '.join(raised)}"
        )
    for name, part in zip(norms.layers, norms.reached, strict=True):
        if part < 1:
            notes.append(f"only {part:.0%} of the proxy examples reach layer {name!r}; its norm is theirs")
    return tuple(notes)


def _largest(x: Any) -> float:
    """The L2 norm of the largest proxy input; 1 for inputs that are only token ids or zeros."""
    return float(_sizes(x).max()) or 1.0


def _sizes(x: Any) -> Tensor:
    """The L2 norm of every input, over the tensors that are numbers; 0 where there are none."""
    found = [t.double().flatten(1).square().sum(1) for t in pytree.tree_leaves(x) if _counts(t)]
    return torch.stack(found).sum(0).sqrt() if found else torch.zeros(1)


def _counts(t: Any) -> bool:
    return isinstance(t, Tensor) and t.is_floating_point() and t.ndim > 1
