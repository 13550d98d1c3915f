"""Gain and shift of norm layers, by native kernels: their gradients row by row, and how these are clipped and added."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from lamina.engine import native
from lamina.engine.execute.clip import LEAST_FACTOR, BoxClip, ClipWeights
from lamina.engine.execute.grads import ContributionGrads, DenseGrads


class _Norms(ctypes.Structure):
    """`struct norms` of norms.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "parts", "positions", "width", "groups")),
        *((name, ctypes.c_void_p) for name in ("x", "g", "mean", "rstd", "gain", "shift")),
    ]


def norm_sums(
    g: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor, *, width: int, groups: int
) -> tuple[Tensor, Tensor] | None:
    """(R, width) each: Σ g·(x - mean)·rstd and Σ g. None where torch must do it.

    `groups` 0: statistics belong to positions, and the last axes have `width` numbers. Otherwise the second axis
    counts `width` channels in `groups` groups.
    """
    library, f32 = native.library(), torch.float32
    if library is None or any(t.dtype != f32 for t in (g, x, rstd)) or not g.is_cpu or not g.numel():
        return None
    g, x, rstd = g.contiguous(), x.contiguous(), rstd.contiguous()
    rows, positions = g.shape[0], g.shape[1:].numel() // width
    statistics = rows * (groups or positions)
    fits = positions * width == g.shape[1:].numel() and (not groups or (width % groups == 0 and mean is not None))
    if not fits:
        raise AssertionError(f"a kernel got {tuple(g.shape)} for {width} channels in {groups} groups")
    gain, shift = (torch.empty(rows, width, dtype=torch.float32) for _ in range(2))
    job = _Norms(rows=rows, parts=min(rows, 64), positions=positions, width=width, groups=groups)
    job.g, job.x = native.pointer(g, f32, *g.shape), native.pointer(x, f32, *g.shape)
    job.rstd = native.pointer(rstd.view(-1), f32, statistics)
    if mean is not None:
        mean = mean.contiguous().view(-1)
        job.mean = native.pointer(mean, f32, statistics)
    job.gain, job.shift = gain.data_ptr(), shift.data_ptr()
    library.lamina_norms(ctypes.byref(job), torch.get_num_threads())
    return gain, shift


class _Dense(ctypes.Structure):
    """`struct dense` of norms.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("units", "count")),
        ("width", ctypes.c_int64 * 2),
        *((name, ctypes.c_double) for name in ("scale", "least")),
        *((name, ctypes.c_void_p) for name in ("bound", "norm_sq", "factor")),
        *((name, ctypes.c_void_p * 2) for name in ("x", "out")),
    ]


def clip_dense_layer(parts: Sequence[tuple[ContributionGrads, Tensor]], clip: BoxClip) -> ClipWeights | None:
    """`clip_layer` of one or two tensors whose gradients are there as (P, n) of float32; None where they are not."""
    library, f32, f64 = native.library(), torch.float32, torch.float64
    if library is None or len(parts) > 2 or not all(_is_dense(grad, out) for grad, out in parts):
        return None
    units = parts[0][0].units
    norm_sq, factor = (torch.empty(units, dtype=f64) for _ in range(2))
    job = _Dense(units=units, count=len(parts), scale=1.0, least=LEAST_FACTOR)
    job.bound = native.pointer(clip.bound, f64, units)
    job.norm_sq, job.factor = norm_sq.data_ptr(), factor.data_ptr()
    for k, (grad, out) in enumerate(parts):
        assert isinstance(grad, DenseGrads)
        job.width[k] = width = grad.shape.numel()
        job.x[k], job.out[k] = native.pointer(grad.grads, f32, units, width), native.pointer(out, f32, width)
    broken = library.lamina_dense(ctypes.byref(job))
    return ClipWeights(factor, ~torch.isfinite(norm_sq) if broken else None)


def _is_dense(grad: ContributionGrads, out: Tensor) -> bool:
    """Whether the kernel takes it: exactly `DenseGrads`, whose norms nothing else knows."""
    if type(grad) is not DenseGrads or grad.measure is not None:
        return False
    dense = (grad.grads, out)
    return grad.grads.dim() == 2 and all(t.dtype == torch.float32 and t.is_contiguous() and t.is_cpu for t in dense)
