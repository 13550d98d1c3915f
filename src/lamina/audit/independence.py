"""Whether a contribution changes what *others* contribute: the coupling that no clipping can bound."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lamina.audit.paired import QUIET, alone, emptied, removed
from lamina.audit.subject import Subject
from lamina.engine import Batch

_OPEN = 2.0**40


def moved_others(subject: Subject, batch: Batch, unit: int, *, absent: bool = False) -> float:
    """How far the others' clipped sum moves when contribution `unit` appears, relative to both sums.

    The step is taken four times, with all, without the canary, with the canary alone, and with nobody:

        slot     ‖ (all − without) − (alone − nobody) ‖       0 if parts are simply added
        absent   ‖ (without − nobody) − (rows taken away − nobody) ‖     0 if others do not see the row

    once at the plan's thresholds and once with thresholds 2^40 times as large, because clipping hides
    changes of length. 0 up to rounding in a sound step.
    """
    return max(_moved(subject, batch, unit, absent, clip) for clip in (1.0, _OPEN))


def _moved(subject: Subject, batch: Batch, unit: int, absent: bool, clip: float) -> float:
    def take(b: Batch) -> dict[str, Tensor]:
        return subject.release(b, noise=QUIET, clip=clip)

    nobody = take(emptied(alone(batch, unit), unit))
    without = _minus(take(emptied(batch, unit)), nobody)
    if absent:
        gone = removed(batch, unit)
        return _relative(without, _minus(take(gone), nobody), without)
    single = _minus(take(alone(batch, unit)), nobody)
    both = _minus(take(batch), nobody)
    return _relative(_minus(both, without), single, without)


def _minus(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: a[name] - b[name] for name in a}


def _relative(a: Mapping[str, Tensor], b: Mapping[str, Tensor], scale: Mapping[str, Tensor]) -> float:
    """The largest ‖a − b‖ of a tensor over the size of what was added; infinite if it is not finite."""
    worst = 0.0
    for name in a:
        gap = float((a[name] - b[name]).norm())
        size = float(torch.stack([b[name].norm(), scale[name].norm(), a[name].norm()]).sum())
        if gap > 0:
            worst = max(worst, gap / size if size < float("inf") else float("inf"))
        elif gap != gap:
            return float("inf")
    return worst
