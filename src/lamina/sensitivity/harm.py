"""m_l: how much the loss grows per unit of noise variance in a layer, found by perturbing it on proxy data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lamina.errors import PlanError
from lamina.plan import LayerStack
from lamina.sensitivity.hessian import hessian_trace
from lamina.sensitivity.proxy import Losses, LossesOf, Named, take, tensors_of, untouched

__all__ = ["FLOOR", "Harm", "harm", "hessian_trace"]

FLOOR = 0.01
"""The least harm per parameter, as a part of the mean harm per parameter of the whole model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Harm:
    """With L the mean proxy loss and z ~ N(0, I) over the numbers of layer l,

        raw[l] = ( E[½L(θ + s_l z) + ½L(θ − s_l z)] − L(θ) ) / s_l²   →   ½ tr H_ll   as s_l → 0

    which contains the parameter count d_l. The pair ± cancels the gradient exactly, which is far larger than the
    curvature. `error[l]` is the standard error over the draws. Curvature that sits in the kinks of a ReLU is seen
    here, though not by H.

    Away from a minimum the trace may be negative, but an allocation needs m_l > 0. So

        values[l] = max( raw[l], error[l], FLOOR · d_l · mean ),       mean = Σ_j raw[j]₊ / Σ_j d_j

    A harm below its own error cannot be told from it, so the error takes its place: rather too much care for a
    layer than a share that the draws decide. Where no layer stands out of its error, values[l] = d_l, the choice
    without a measurement. `floored` says which layers the rule raised.
    """

    layers: tuple[str, ...]
    values: tuple[float, ...]
    raw: tuple[float, ...]
    error: tuple[float, ...]
    floored: tuple[bool, ...]
    std: tuple[float, ...]
    loss: float

    def report(self) -> str:
        """A table, with the floor where it was applied."""
        width = max(5, *(len(name) for name in self.layers))
        lines = [f"{'layer':<{width}}  {'m':>10}  {'measured':>10}  {'± error':>9}  {'std':>8}"]
        rows = zip(self.layers, self.values, self.raw, self.error, self.std, self.floored, strict=True)
        for name, value, raw, error, std, floored in rows:
            mark = "  raised (see Harm)" if floored else ""
            lines.append(f"{name:<{width}}  {value:10.4g}  {raw:10.4g}  {error:9.2g}  {std:8.2g}{mark}")
        return "\n".join(lines)


def harm(
    model: nn.Module,
    losses_of: LossesOf,
    x: Any,
    y: Any,
    stack: LayerStack,
    *,
    std: float = 0.1,
    draws: int = 16,
    batch: int = 8,
    seed: int = 0,
) -> Harm:
    """Measure m_l on public or simulated data.

    std    s_l as a part of the root mean square of the layer's own weights (of all weights where these are 0):
           small enough for the curvature to count alone, large enough to stand out of rounding and of kinks
    draws  antithetic pairs per layer
    batch  examples that a pair sees, drawn anew for each pair: cost and error depend on draws · batch
    """
    if not 0 < std < math.inf:
        raise PlanError(
            "measure.std-finite",
            f"std is {std!r}, must be finite and > 0",
            "0.1 perturbs each layer by a tenth of its weights",
        )
    for what, value, least in (("draws", draws, 2), ("batch", batch, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise PlanError(
                "measure.whole-number",
                f"{what} is {value!r}, must be a whole number >= {least}",
                "leave it out",
            )
    held, losses = tensors_of(model, stack), Losses(model, losses_of)
    scales = _scales(held, stack)
    generator = torch.Generator().manual_seed(seed)
    found = torch.zeros(draws, len(stack), dtype=torch.float64)
    with untouched(model), torch.no_grad():
        n = losses.checked(x, y)
        base = torch.zeros(draws, dtype=torch.float64)
        for draw in range(draws):
            rows = torch.randperm(n, generator=generator)[:batch]
            part = take((x, y), rows)
            here = losses.at({}, *part).double()
            base[draw] = here.mean()
            for i, layer in enumerate(held):
                s = std * scales[i]
                shift = {name: _normal(t, generator) * s for name, t in layer.items()}
                pair = [losses.at(_moved(layer, shift, sign), *part).double() for sign in (1, -1)]
                found[draw, i] = (0.5 * (pair[0] + pair[1]) - here).mean() / s**2
    raw, error = found.mean(0), found.std(0) / math.sqrt(draws)
    for layer_, value in zip(stack, raw, strict=True):
        if not value.isfinite():
            raise PlanError(
                "measure.layer-harm",
                f"layer {layer_.name!r} has a harm of {float(value)!r}",
                f"lower std, which is {std:g}",
            )
    values, floored = positive(raw.tolist(), error.tolist(), [layer.size for layer in stack])
    return Harm(
        layers=tuple(layer.name for layer in stack),
        values=values,
        raw=tuple(raw.tolist()),
        error=tuple(error.tolist()),
        floored=floored,
        std=tuple(std * scale for scale in scales),
        loss=float(base.mean()),
    )


def positive(
    raw: Sequence[float], error: Sequence[float], sizes: Sequence[int]
) -> tuple[tuple[float, ...], tuple[bool, ...]]:
    """The floor rule of `Harm`: positive values, and which of them it raised."""
    if not any(value > spread for value, spread in zip(raw, error, strict=True)):
        return tuple(float(d) for d in sizes), (True,) * len(sizes)
    mean = math.fsum(max(value, 0.0) for value in raw) / sum(sizes)
    least = [max(spread, FLOOR * d * mean) for spread, d in zip(error, sizes, strict=True)]
    return (
        tuple(max(value, low) for value, low in zip(raw, least, strict=True)),
        tuple(value < low for value, low in zip(raw, least, strict=True)),
    )


def _scales(held: Sequence[Named], stack: LayerStack) -> list[float]:
    """The root mean square of each layer's weights."""
    squares = [sum(float(t.detach().double().square().sum()) for t in layer.values()) for layer in held]
    for layer, value in zip(stack, squares, strict=True):
        if not math.isfinite(value):
            raise PlanError(
                "measure.layer-weights-not",
                f"layer {layer.name!r} has weights that are not finite",
                "initialise the model again",
            )
    whole = math.sqrt(sum(squares) / stack.size)
    if not whole > 0:
        raise PlanError(
            "measure.weights-model",
            "all weights of the model are 0",
            "initialise the model before measuring it",
        )
    return [math.sqrt(v / layer.size) or whole for v, layer in zip(squares, stack, strict=True)]


def _normal(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=torch.float32).to(like)


def _moved(layer: Named, shift: Named, sign: int) -> Named:
    return {name: t + sign * shift[name] for name, t in layer.items()}
