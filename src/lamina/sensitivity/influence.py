"""Influence functions per layer on proxy data: what an example does to the loss through each layer."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lamina.errors import PlanError
from lamina.plan import LayerStack
from lamina.sensitivity.fisher import gradients
from lamina.sensitivity.hessian import Hessian
from lamina.sensitivity.proxy import LossesOf, count, take

_RAISED = 10.0
_MARGIN = 1.25  # of the power iteration, which reads the largest eigenvalue from below


class Solver(enum.Enum):
    """How (H + damping·I) s = v is solved: conjugate gradients, or LiSSA's sum of a Neumann series."""

    CG = "cg"
    LISSA = "lissa"


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
    solver: Solver | str = Solver.CG,
    rounds: int = 100,
    tolerance: float = 1e-3,
    batch: int | None = None,
    seed: int = 0,
) -> Influence:
    """Measure it on public or simulated data.

    reference  (x, y) whose loss is asked about; by default the second half of the examples, for the first half
    damping    added to H; by default a thousandth of its largest eigenvalue, times ten for as long as H + damping·I
               proves not to be positive, as it may be away from a minimum. A given one is refused in that case
    rounds     at most so many Hessian-vector products
    batch      examples per product of LiSSA, drawn anew each time; by default all
    """
    if reference is None:
        half = count(x) // 2
        if not half:
            raise PlanError(
                "measure.proxy-example-not",
                "one proxy example cannot be its own reference",
                "give more, or reference=(x, y)",
            )
        reference, (x, y) = take((x, y), slice(half, None)), take((x, y), slice(half))
    hessian = Hessian(model, losses_of, x, y, stack)
    wanted = Hessian(model, losses_of, reference[0], reference[1], stack).gradient()
    if not float(wanted.norm()) > 0:
        raise PlanError(
            "measure.reference-loss-gradient",
            "the reference loss has gradient 0, so nothing can influence it",
            "give another reference",
        )
    s, used, residual, taken = inverse(
        hessian,
        wanted,
        damping=damping,
        solver=solver,
        rounds=rounds,
        tolerance=tolerance,
        batch=batch,
        seed=seed,
    )
    products = []
    for part in gradients(model, losses_of, x, y, hessian.held):
        rows = [
            torch.cat([part[name].flatten(1).double() for name in layer], dim=1) @ piece
            for layer, piece in zip(hessian.held, hessian.split(s), strict=True)
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


def inverse(
    hessian: Hessian,
    wanted: Tensor,
    *,
    damping: float | None = None,
    solver: Solver | str = Solver.CG,
    rounds: int = 100,
    tolerance: float = 1e-3,
    batch: int | None = None,
    seed: int = 0,
) -> tuple[Tensor, float, float, int]:
    """s = (H + damping·I)⁻¹ v, with the damping used, the relative residual and the rounds taken."""
    try:
        chosen = Solver(solver)
    except ValueError:
        raise PlanError(
            "measure.solver-not-known", f"solver is {solver!r}, which is not known", "use 'cg' or 'lissa'"
        ) from None
    if damping is not None and not 0 <= damping < math.inf:
        raise PlanError(
            "measure.damping-finite",
            f"damping is {damping!r}, must be finite and >= 0",
            "leave it out, or give 0.01",
        )
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
        raise PlanError(
            "measure.rounds-whole-number",
            f"rounds is {rounds!r}, must be a whole number >= 1",
            "100 is usual",
        )
    if not 0 < tolerance < 1:
        raise PlanError(
            "measure.tolerance", f"tolerance is {tolerance!r}, must be in (0, 1)", "0.001 is usual"
        )
    largest = hessian.largest(seed=seed) if damping is None or chosen is Solver.LISSA else 0.0
    used = damping if damping is not None else 1e-3 * largest or 1.0
    while True:
        if chosen is Solver.CG:
            s, curvature, taken = _conjugate(hessian, wanted, used, rounds, tolerance)
        else:
            s, curvature, taken = _lissa(hessian, wanted, used, rounds, tolerance, batch, largest, seed)
        if curvature > 0:
            residual = float((hessian.product(s) + used * s - wanted).norm() / wanted.norm())
            if not residual < 1:
                raise PlanError(
                    "measure.after-rounds-residual",
                    f"after {taken} rounds the residual is {residual:.3g} of the gradient, no better than nothing",
                    "take more rounds, a larger batch, more damping, or solver='cg'",
                )
            return s, used, residual, taken
        if damping is not None:
            raise PlanError(
                "measure.damping-not-positive",
                f"H + damping·I is not positive with damping {damping:g} (curvature {curvature:.3g} was met)",
                f"raise damping above {damping - curvature:.3g}, or leave it out",
            )
        used *= _RAISED


def _conjugate(
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


def _lissa(
    hessian: Hessian,
    wanted: Tensor,
    damping: float,
    rounds: int,
    tolerance: float,
    batch: int | None,
    largest: float,
    seed: int,
) -> tuple[Tensor, float, int]:
    """s ← s + (v − (H + damping)s)/scale, scale above the largest eigenvalue; H over all examples or a draw.

    With draws s keeps moving about the solution, so the mean of the second half of the rounds is given. It
    diverges if an eigenvalue is negative, which is told as curvature in the direction of s.
    """
    if batch is not None and (isinstance(batch, bool) or not isinstance(batch, int) or batch < 1):
        raise PlanError(
            "measure.batch-whole-number",
            f"batch is {batch!r}, must be a whole number >= 1",
            "leave it out to use all examples",
        )
    scale = _MARGIN * largest + damping
    generator = torch.Generator().manual_seed(seed)
    s, mean, taken, late = wanted / scale, torch.zeros_like(wanted), 0, 0
    most = 1e6 * float(wanted.norm()) / max(damping, 1e-12 * scale)
    while taken < rounds and float(s.norm()) < most:
        rows = None if batch is None else torch.randperm(hessian.examples, generator=generator)[:batch]
        move = (wanted - hessian.product(s, rows) - damping * s) / scale
        s, taken = s + move, taken + 1
        if rows is None and float(move.norm()) * scale <= tolerance * float(wanted.norm()):
            break
        if rows is not None and 2 * taken > rounds:
            late += 1
            mean += (s - mean) / late
    if late:
        s = mean
    whole = hessian.product(s) + damping * s
    return s, float(s @ whole / (s @ s)), taken
