"""`NativeGrads`: per-contribution gradients of linear maps and convolutions, formed, clipped and added by native kernels."""

from __future__ import annotations

import ctypes
import math
import struct
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from lamina.engine import native
from lamina.engine.batch import RowLayout
from lamina.engine.execute.clip import LEAST_FACTOR, BoxClip, ClipWeights
from lamina.engine.execute.grads import ContributionGrads, DenseGrads, OuterProductGrads
from lamina.engine.execute.norms import take_memory
from lamina.engine.execute.slice_masks import AxisRanges, SliceMask

MAX_ELEMENTS = 1 << 22  # of a larger tensor torch's own product uses all cores, and accumulators would be large
_ACCUMULATOR_ELEMENTS = 1 << 20
_MAX_THREADS = 64
_PART_UNITS, _MAX_PARTS = 256, 64  # contributions that one accumulator of float32 takes, while there are not too many
_MIN_SHARED_ELEMENTS = 1 << 14  # below, a second thread takes longer to wake than to help


class _Mode(IntEnum):
    """In the order of product.c."""

    NORM = 0
    CLIP = 1
    ADD = 2
    FORM = 3


_THREE = ctypes.c_int64 * 3


class _Product(ctypes.Structure):
    """`struct product` of product.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("mode", "threads", "parts", "units", "convolution", "joined")),
        *((name, ctypes.c_int64) for name in ("outputs", "inputs", "taps", "groups", "positions", "space_size")),
        *((name, _THREE) for name in ("space", "places", "kernel", "stride", "padding", "dilation")),
        *((name, ctypes.c_void_p) for name in ("u", "v", "rows", "start", "bound", "others")),
        *((name, ctypes.c_double) for name in ("scale", "least")),
        *(
            (name, ctypes.c_void_p)
            for name in ("norm_sq", "factor", "out", "sums", "bias", "workspace", "accumulators")
        ),
        *((name, ctypes.c_int64) for name in ("grad_size", "padded_size", "line_size", "left_size", "right_size")),
        ("used", ctypes.c_void_p),
    ]


@dataclass(frozen=True, kw_only=True)
class Windows:
    """How a convolution looks at its input: one to three numbers each, and the groups of channels."""

    kernel: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int


def _three(values: Sequence[int], fill: int) -> tuple[int, ...]:
    return (*[fill] * (3 - len(values)), *values)


class NativeGrads(ContributionGrads):
    """G[p] = Σ over rows of p and their positions of v ⊗ u, or of v ⊗ windows of u.

    `u` is (R, T, inputs) and `v` (R, T, outputs); with `windows` they are (R, channels, *space) and (R, channels,
    *places). Rows belong to contributions as `layout` says, as many as there are: nothing is padded. `rules` makes
    the same of torch operations, for what kernels do not do: slices, and gradients that are wanted as they are.
    `sums` also gives Σ v, the gradient of a bias.
    """

    def __init__(
        self, u: Tensor, v: Tensor, layout: RowLayout, shape: torch.Size, rules: Callable[[], ContributionGrads],
        windows: Windows | None = None,
    ) -> None:  # fmt: skip
        self.u, self.v, self.layout, self.shape, self.windows = u, v, layout, shape, windows
        self.units, self._make = layout.units, rules
        self._rules: ContributionGrads | None = None
        self._bias: weakref.ref[NativeBias] | None = None  # weak: a cycle would keep activations until it is collected
        self.bias_sum: Tensor | None = None  # where `clip_and_add` adds the bias, then measured with the weight

    @property
    def bias(self) -> NativeBias | None:
        """The bias beside it, as long as somebody wants its gradient."""
        return None if self._bias is None else self._bias()

    @staticmethod
    def can(u: Tensor, v: Tensor, shape: torch.Size) -> bool:
        """Whether the kernels are there and made for such tensors."""
        return (
            native.library() is not None
            and u.dtype == v.dtype == torch.float32
            and u.is_cpu
            and 0 < shape.numel() <= MAX_ELEMENTS
            and u.numel() > 0
            and v.numel() > 0
        )

    @property
    def rules(self) -> ContributionGrads:
        if self._rules is None:
            self._rules = self._make()
        return self._rules

    @property
    def formed(self) -> bool:
        return True

    def norm_sq(self) -> Tensor:
        norm_sq = torch.empty(self.units, dtype=torch.float64)
        self._run(_Mode.NORM, norm_sq=norm_sq)
        return norm_sq

    def add_to(self, out: Tensor, weights: ClipWeights) -> None:
        if is_plain(out):
            self._run(_Mode.ADD, factor=weights.factor.contiguous(), out=out)
        else:
            self.rules.add_to(out, weights)

    def clip_and_add(self, out: Tensor, others: Tensor | None, clip: BoxClip) -> ClipWeights:
        bias_sum, self.bias_sum = self.bias_sum, None
        if not is_plain(out):
            return self.rules.clip_and_add(out, others, clip)
        norm_sq, factor = (torch.empty(self.units, dtype=torch.float64) for _ in range(2))
        given = {"norm_sq": norm_sq, "factor": factor, "out": out, "others": others, "bias_sum": bias_sum}
        broken = self._run(_Mode.CLIP, clip=clip, **given)
        return ClipWeights(factor, ~torch.isfinite(norm_sq) if broken else None)

    def form(self) -> DenseGrads:
        """Every gradient by itself, as (P, *shape)."""
        grads = torch.empty(self.units, *self.shape, dtype=torch.float32)
        norm_sq = torch.empty(self.units, dtype=torch.float64)
        self._run(_Mode.FORM, norm_sq=norm_sq, out=grads)
        return DenseGrads(grads, lambda: norm_sq)

    def dense(self, low: int, high: int) -> Tensor:
        return self.rules.dense(low, high)

    def where(self, axis: int, mask: SliceMask) -> ContributionGrads:
        return self.rules.where(axis, mask)

    def pick(self, span: AxisRanges) -> ContributionGrads | None:
        return self.rules.pick(span)

    def _run(
        self, mode: _Mode, *, norm_sq: Tensor | None = None, factor: Tensor | None = None, out: Tensor | None = None,
        others: Tensor | None = None, clip: BoxClip | None = None, bias_sum: Tensor | None = None,
    ) -> int:  # fmt: skip
        """Runs the kernel. Returns how many squared norms are not finite, where norms were measured."""
        library = native.library()
        assert library is not None
        rows, start = self.layout.segments
        job, units, f64, f32 = _Product(), self.units, torch.float64, torch.float32
        job.mode, job.units, job.joined = mode, units, bias_sum is not None
        self._describe(job)
        job.u, job.v = native.pointer(self.u, f32, *self.u.shape), native.pointer(self.v, f32, *self.v.shape)
        job.rows = native.pointer(rows, torch.int64, len(rows))
        job.start = native.pointer(start, torch.int64, units + 1)
        if norm_sq is not None:
            job.norm_sq = native.pointer(norm_sq, f64, units)
        if factor is not None:
            job.factor = native.pointer(factor, f64, units)
        if others is not None:
            job.others = native.pointer(others, f64, units)
        if clip is not None:
            job.bound, job.scale, job.least = native.pointer(clip.bound, f64, units), 1.0, LEAST_FACTOR
        if out is not None:
            shape = (units, *self.shape) if mode is _Mode.FORM else self.shape
            job.out = native.pointer(out, f32, *shape)
        bias = self.bias
        assert bias_sum is None or bias is not None  # the kernel would read its sums
        if bias is not None and mode is not _Mode.ADD:
            bias.sums = torch.empty(units, job.groups * job.outputs, dtype=f32)
            job.sums = bias.sums.data_ptr()
            if bias_sum is not None:
                job.bias = native.pointer(bias_sum, f32, job.groups * job.outputs)
        job.threads = min(torch.get_num_threads(), _MAX_THREADS)
        share = 64
        if mode in (
            _Mode.CLIP,
            _Mode.ADD,
        ):  # an accumulator each: not many for few contributions, or for a large tensor
            share = max(4, min(16, units // 16, _ACCUMULATOR_ELEMENTS // self.shape.numel()), -(-units // _PART_UNITS))
        job.parts = max(1, min(units, share, _MAX_PARTS))
        job.threads = min(job.threads, max(job.parts, 8))
        processor = native.processor()
        size = library.lamina_product_memory(ctypes.byref(job), processor)
        workspace = take_memory("native", size, f32)
        job.workspace = workspace.data_ptr()
        return int(library.lamina_product(ctypes.byref(job), processor))

    def _describe(self, job: _Product) -> None:
        """Shapes, and that they fit together."""
        geo, rows = self.windows, self.layout.rows
        fits = self.u.shape[0] == self.v.shape[0] == rows
        if geo is None:
            positions, inputs = prod(self.u.shape[1:-1]), self.u.shape[-1]
            outputs, groups, taps = self.v.shape[-1], 1, 1
            fits = fits and prod(self.v.shape[1:-1]) == positions and self.shape == (outputs, inputs)
            job.space_size = positions
        else:
            space, places, groups, taps = self.u.shape[2:], self.v.shape[2:], geo.groups, prod(geo.kernel)
            inputs, outputs, positions = self.u.shape[1] // groups, self.v.shape[1] // groups, prod(places)
            fits = fits and self.u.shape[1] % groups == 0 == self.v.shape[1] % groups
            fits = fits and self.shape == (outputs * groups, inputs, *geo.kernel) and len(space) == len(geo.kernel) <= 3
            for n, m, k, s, p, d in zip(space, places, geo.kernel, geo.stride, geo.padding, geo.dilation, strict=True):
                fits = (
                    fits and (m - 1) * s + (k - 1) * d < n + 2 * p and min(m, k, s, d) > 0 <= p
                )  # no window leaves it
            job.convolution, job.space_size = 1, prod(space)
            job.space, job.places = _THREE(*_three(space, 1)), _THREE(*_three(places, 1))
            job.kernel, job.stride = _THREE(*_three(geo.kernel, 1)), _THREE(*_three(geo.stride, 1))
            job.padding, job.dilation = _THREE(*_three(geo.padding, 0)), _THREE(*_three(geo.dilation, 1))
        if not fits:
            given = tuple(self.u.shape), tuple(self.v.shape), tuple(self.shape), rows
            raise AssertionError(f"a kernel got tensors that do not fit together: {given}, {geo}")
        job.outputs, job.inputs, job.taps, job.groups, job.positions = outputs, inputs, taps, groups, positions


_OUTER = struct.Struct("@13q")  # `struct outer` of product.c


class _Outers(ctypes.Structure):
    """`struct outers` of product.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("mode", "count", "units")),
        *((name, ctypes.c_double) for name in ("scale", "least")),
        ("layers", ctypes.c_void_p),
    ]


class NativeOuterGrads(OuterProductGrads):
    """`OuterProductGrads` of float32. Many layers of them are measured, clipped and added in one call: `OuterLayers`."""

    bias_sum: Tensor | None = None  # as of `NativeGrads`; the gradient of the bias is g

    @staticmethod
    def can(g: Tensor, a: Tensor) -> bool:
        fits = g.dtype == a.dtype == torch.float32 and g.is_cpu and g.numel() * a.numel() > 0
        return fits and native.library() is not None

    def clip_and_add(self, out: Tensor, others: Tensor | None, clip: BoxClip) -> ClipWeights:
        bias_sum, self.bias_sum = self.bias_sum, None
        if not is_plain(out):
            return super().clip_and_add(out, others, clip)
        layers = OuterLayers()
        layers.append(OuterLayer(self, out, bias_sum, bias_sum is not None, clip.bound, others))
        _, _, norm_sq, factor = layers.clip_and_add()[:, 0]
        return ClipWeights(factor, _not_finite(norm_sq))


class OuterLayer(NamedTuple):
    """A linear layer of one position per contribution: where its gradients come from and go, and by what they are clipped."""

    grad: NativeOuterGrads
    out: Tensor | None  # None: it is only measured
    bias: Tensor | None = None
    joined: bool = False  # whether the norm of g counts, for a bias
    bound: Tensor | None = None
    others: Tensor | None = None

    @classmethod
    def of(cls, grads: Sequence[ContributionGrads], bound: Tensor | None = None) -> OuterLayer | None:
        """The layer of these tensors, to be measured, if it is one weight, with its bias or without."""
        grad = grads[0]
        if not isinstance(grad, NativeOuterGrads) or len(grads) > 2:
            return None
        if len(grads) == 2 and not (isinstance(grads[1], NativeBias) and grads[1].weight is grad):
            return None
        return cls(grad, None, joined=len(grads) == 2, bound=bound)

    def adding_to(self, outs: Sequence[Tensor]) -> OuterLayer | None:
        """The same, to be added to these sums, if kernels can."""
        return self._replace(out=outs[0], bias=(*outs, None)[1]) if all(map(is_plain, outs)) else None


class OuterLayers(list[OuterLayer]):
    """Layers of the same contributions. `numbers` is (4, layers, P): norms of g, of a, squared norms, clip factors."""

    def clip_and_add(self) -> Tensor:
        return self._run(_Mode.CLIP, self._empty())

    def measure(self) -> Tensor:
        return self._run(_Mode.NORM, self._empty())

    def add(self, numbers: Tensor) -> None:
        """With factors, and the norms that `measure` gave."""
        self._run(_Mode.ADD, numbers)

    def _empty(self) -> Tensor:
        return torch.empty(4, len(self), self[0].grad.units, dtype=torch.float64)

    def _run(self, mode: _Mode, numbers: Tensor) -> Tensor:
        library, units, f32, f64 = native.library(), self[0].grad.units, torch.float32, torch.float64
        assert library is not None
        first, row = native.pointer(numbers, f64, 4, len(self), units), 8 * units
        table, work, kept = ctypes.create_string_buffer(_OUTER.size * len(self)), 0, []
        for i, (grad, out, bias, joined, bound, others) in enumerate(self):
            g, a, (outputs, inputs) = grad.g.contiguous(), grad.a.contiguous(), grad.shape
            kept += [g, a]
            _OUTER.pack_into(
                table, i * _OUTER.size, outputs, inputs, joined,
                native.pointer(g, f32, units, outputs), native.pointer(a, f32, units, inputs),
                0 if out is None else native.pointer(out, f32, outputs, inputs),
                0 if bias is None else native.pointer(bias, f32, outputs),
                0 if bound is None else native.pointer(bound, f64, units),
                0 if others is None else native.pointer(others, f64, units),
                *(first + (kind * len(self) + i) * row for kind in range(4)),
            )  # fmt: skip
            assert (mode is not _Mode.CLIP or bound is not None) and (mode is _Mode.NORM or out is not None)
            work += g.numel() + a.numel()
        job = _Outers(mode, len(self), units, 1.0, LEAST_FACTOR, ctypes.addressof(table))
        threads = torch.get_num_threads() if work > _MIN_SHARED_ELEMENTS else 1
        library.lamina_outers(ctypes.byref(job), threads, native.processor())
        return numbers


def _not_finite(norm_sq: Tensor) -> Tensor | None:
    """(P,) the contributions that must be left out of a product; None if there is none."""
    if math.isfinite(norm_sq.sum().item()):
        return None
    finite = torch.isfinite(norm_sq)
    return None if bool(finite.all()) else ~finite


def is_plain(out: Tensor) -> bool:
    """Whether kernels can add to it."""
    return out.dtype == torch.float32 and out.is_contiguous()


class NativeBias(ContributionGrads):
    """The bias beside a weight: Σ v, which the kernel finds on its way. `make` sums by torch where none ran."""

    def __init__(self, weight: NativeGrads | NativeOuterGrads, outputs: int, make: Callable[[], Tensor]) -> None:
        self.weight, self._make = weight, make
        self.units, self.shape = weight.units, torch.Size((outputs,))
        self.sums: Tensor | None = None
        if isinstance(weight, NativeGrads):
            weight._bias = weakref.ref(self)

    @property
    def grads(self) -> DenseGrads:
        if self.sums is None:
            self.sums = self._make()
        return DenseGrads(self.sums)

    def norm_sq(self) -> Tensor:
        return self.weight.g_norm_sq() if isinstance(self.weight, NativeOuterGrads) else self.grads.norm_sq()

    def add_to(self, out: Tensor, weights: ClipWeights) -> None:
        self.grads.add_to(out, weights)

    def dense(self, low: int, high: int) -> Tensor:
        return self.grads.dense(low, high)

    def where(self, axis: int, mask: SliceMask) -> ContributionGrads:
        return self.grads.where(axis, mask)
