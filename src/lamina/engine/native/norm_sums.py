"""Gradients of the gain and shift of norm layers, row by row, by a native kernel."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from lamina.engine import native


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
    if library is None or any(t.dtype != f32 for t in (g, x, rstd)) or not g.numel():
        return None
    g, x, rstd = g.contiguous(), x.contiguous(), rstd.contiguous()
    rows, positions = g.shape[0], g.shape[1:].numel() // width
    statistics = rows * (groups or positions)
    fits = positions * width == g.shape[1:].numel() and (not groups or (width % groups == 0 and mean is not None))
    if not fits:
        raise AssertionError(f"a kernel got {tuple(g.shape)} for {width} channels in {groups} groups")
    gain, shift = torch.empty(rows, width), torch.empty(rows, width)
    job = _Norms(rows=rows, parts=min(rows, 64), positions=positions, width=width, groups=groups)
    job.g, job.x = native.pointer(g, f32, *g.shape), native.pointer(x, f32, *g.shape)
    job.rstd = native.pointer(rstd.view(-1), f32, statistics)
    if mean is not None:
        mean = mean.contiguous().view(-1)
        job.mean = native.pointer(mean, f32, statistics)
    job.gain, job.shift = gain.data_ptr(), shift.data_ptr()
    library.lamina_norms(ctypes.byref(job), torch.get_num_threads())
    return gain, shift
