"""Every kind of per-contribution gradient, masked and narrowed, is what its dense form is when masked by hand."""

from __future__ import annotations

from collections.abc import Callable
from math import nan

import pytest
import torch
from torch import Tensor

from lamina.engine.execute.clip import ClipWeights
from lamina.engine.execute.grads import (
    AxisSliceGrads,
    ContributionGrads,
    DenseGrads,
    MaskedGrads,
    OuterProductGrads,
    ScatterGrads,
    SequenceProductGrads,
    StackedGrads,
    SummedGrads,
)
from lamina.engine.execute.slice_masks import AxisRanges, SliceMask
from lamina.engine.layers.conv import ConvGeometry, ConvolutionGrads
from lamina.engine.slices import TensorMask

P = 4


def product(rows: int = 64, columns: int = 128) -> SequenceProductGrads:
    return SequenceProductGrads(torch.randn(P, 5, rows), torch.randn(P, 5, columns))


def correlation(groups: int = 1) -> ConvolutionGrads:
    geometry = ConvGeometry(kernel=(3,), stride=(1,), padding=(1,), dilation=(1,), groups=groups)
    return ConvolutionGrads(torch.randn(P, 2, 8, 9), torch.randn(P, 2, 4, 9), geometry, torch.Size((4, 8 // groups, 3)))


KINDS: dict[str, Callable[[], ContributionGrads]] = {
    "dense": lambda: DenseGrads(torch.randn(P, 6, 8)),
    "dense 3": lambda: DenseGrads(torch.randn(P, 6, 8, 2)),
    "outer": lambda: OuterProductGrads(torch.randn(P, 6), torch.randn(P, 8)),
    "outer of odd sizes": lambda: OuterProductGrads(torch.randn(P, 6) * 1e-16, torch.randn(P, 8) * 1e16),
    "product": lambda: SequenceProductGrads(torch.randn(P, 3, 6), torch.randn(P, 3, 8)),
    "wide product": product,
    "bfloat16": lambda: SequenceProductGrads(torch.randn(P, 3, 6).bfloat16(), torch.randn(P, 3, 8).bfloat16()),
    "lookup": lambda: ScatterGrads(torch.randint(0, 6, (P, 9)), torch.randn(P, 9, 8), 6, 2),
    "band": lambda: AxisSliceGrads(
        SequenceProductGrads(torch.randn(P, 3, 4), torch.randn(P, 3, 8)), AxisRanges(0, [(1, 5)]), torch.Size((6, 8))
    ),
    "total": lambda: SummedGrads([product(), product()]),
    "mixed total": lambda: SummedGrads(
        [
            SequenceProductGrads(torch.randn(P, 3, 6), torch.randn(P, 3, 8)),
            ScatterGrads(torch.randint(0, 6, (P, 9)), torch.randn(P, 9, 8), 6, None),
        ]
    ),
    "stacked": lambda: StackedGrads({0: product(), 2: product()}, torch.Size((3, 64, 128)), P),
    "stacked, nothing used": lambda: StackedGrads({}, torch.Size((3, 6, 8)), P),
    "convolution": correlation,
    "convolution in groups": lambda: correlation(2),
}


def by_hand(grad: ContributionGrads, axis: int, may: Tensor) -> Tensor:
    dense = grad.dense(0, P).clone().view(P, *grad.shape).double()
    for p in range(P):
        for place in range(grad.shape[axis]):
            if not may[p, place]:
                dense[p].select(axis, place).zero_()
    return dense


def same(found: ContributionGrads, want: Tensor) -> None:
    assert (found.units, found.shape) == (P, want.shape[1:])
    flat = want.reshape(P, -1)
    torch.testing.assert_close(found.dense(0, P).double(), flat, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.dense(1, 3).double(), flat[1:3], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.norm_sq(), flat.square().sum(1), rtol=1e-5, atol=1e-8)
    factor = torch.tensor([0.5, 0.0, 2.0, 1.0], dtype=torch.float64)
    out = torch.ones(want.shape[1:])
    found.add_to(out, ClipWeights(factor, None))
    torch.testing.assert_close(out.double(), 1 + torch.einsum("p,p...->...", factor, want), rtol=1e-5, atol=1e-4)
    out = torch.ones(want.shape[1:])
    weights = found.clip_and_add(
        out, torch.ones(P, dtype=torch.float64), lambda n, low, high: ClipWeights(1 / (1 + n), None)
    )
    factor = 1 / (2 + flat.square().sum(1))
    torch.testing.assert_close(weights.factor, factor, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(out.double(), 1 + torch.einsum("p,p...->...", factor, want), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("alike", [False, True], ids=["each its own", "alike"])
def test_masked(kind: str, axis: int, alike: bool) -> None:
    grad = KINDS[kind]()
    if axis >= len(grad.shape):
        axis = 0
    length = grad.shape[axis]
    may = (torch.rand(P, length) < 0.5) if not alike else torch.zeros(P, length, dtype=torch.bool)
    may[0 if not alike else slice(None), : length // 2] = True
    if not alike:
        may[3] = False
    want = by_hand(grad, axis, may)
    ranges = ((0, length // 2),) if alike else ((0, length),)
    union = AxisRanges(axis, ranges) if alike else None
    same(TensorMask(axis, SliceMask(may), union, alike).of(grad), want)


@pytest.mark.parametrize(
    ("axis", "ranges"), [(0, ((0, 32),)), (0, ((0, 8), (16, 20))), (1, ((64, 128),)), (1, ((0, 64),))], ids=str
)
@pytest.mark.parametrize("kind", ["wide product", "total"])
def test_only_what_somebody_may_move_is_formed(kind: str, axis: int, ranges: tuple[tuple[int, int], ...]) -> None:
    grad = KINDS[kind]()
    places = AxisRanges(axis, ranges)
    may = torch.zeros(P, grad.shape[axis], dtype=torch.bool)
    may[:, places.index] = True
    want = by_hand(grad, axis, may)
    found = TensorMask(axis, SliceMask(may), places, True).of(grad)
    assert isinstance(found, AxisSliceGrads)
    assert found.inner.shape.numel() < grad.shape.numel()
    same(found, want)
    may[1, places.index[0]] = False
    same(TensorMask(axis, SliceMask(may), places, False).of(grad), by_hand(grad, axis, may))


def test_narrowing_never_changes_how_anybody_is_measured() -> None:
    """Not by a rounding of float32: a norm must not depend on who else is in the batch."""
    seen = 0
    for rows, columns, axis, ranges in (
        (64, 128, 0, ((0, 16),)), (48, 80, 0, ((0, 16), (32, 40))), (128, 192, 1, ((64, 128),)), (6, 100, 0, ((0, 3),)),
        (30, 7, 1, ((0, 3),)), (96, 96, 1, ((32, 64),)), (96, 40, 0, ((8, 24),)),
    ):  # fmt: skip
        grad = product(rows, columns)
        places = AxisRanges(axis, ranges)
        may = torch.zeros(P, grad.shape[axis], dtype=torch.bool)
        may[:, places.index] = True
        narrowed = TensorMask(axis, SliceMask(may), places, True).of(grad)
        masked = grad.where(axis, SliceMask(may))
        dense = masked.dense(0, P).clone().view(P, rows, columns).index_select(axis + 1, places.index)
        if isinstance(narrowed, AxisSliceGrads) and torch.equal(dense.flatten(1), narrowed.inner.dense(0, P)):
            torch.testing.assert_close(narrowed.norm_sq(), masked.norm_sq(), rtol=1e-14, atol=0)
            seen += 1
    assert seen >= 4


def _first(g: Tensor, axis: int) -> Tensor:
    """Nothing but the first position is spoilt, where rows are masked."""
    if axis == 0:
        g[:, 1] = 1.0
    return g


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("kind", ["outer", "product", "dense", "convolution", "lookup", "total", "stacked"])
def test_what_is_not_finite_outside_does_not_matter(kind: str, axis: int) -> None:
    def spoilt(t: Tensor) -> Tensor:
        t[1, ..., 0] = nan
        return t

    def pair(*shape: int) -> tuple[Tensor, Tensor]:
        """Two factors, the one that is masked spoilt at its first place."""
        g, a = torch.randn(P, *shape, 6), torch.randn(P, *shape, 8)
        return (spoilt(g), a) if axis == 0 else (g, spoilt(a))

    def stacked() -> StackedGrads:
        broken = SequenceProductGrads(torch.full((P, 1, 6), nan), torch.randn(P, 1, 8))
        parts: dict[int, ContributionGrads] = {
            1: SequenceProductGrads(torch.randn(P, 3, 6), torch.randn(P, 3, 8)),
            0: broken,
        }
        if axis == 1:
            parts = {1: SequenceProductGrads(spoilt(torch.randn(P, 3, 6)), torch.randn(P, 3, 8))}
        return StackedGrads(parts, torch.Size((3, 6, 8)), P)

    rows, columns = spoilt(torch.randn(P, 8, 6)).transpose(1, 2), spoilt(torch.randn(P, 6, 8))
    looked_up = _first(spoilt(torch.randn(P, 2, 8)), axis)
    made: dict[str, Callable[[], ContributionGrads]] = {
        "outer": lambda: OuterProductGrads(*pair()),
        "product": lambda: SequenceProductGrads(*pair(3)),
        "dense": lambda: DenseGrads(rows if axis == 0 else columns),
        "lookup": lambda: ScatterGrads(torch.arange(2).expand(P, 2), looked_up, 6, None),
        "total": lambda: SummedGrads(
            [SequenceProductGrads(*pair(3)), SequenceProductGrads(torch.randn(P, 3, 6), torch.randn(P, 3, 8))]
        ),
        "stacked": stacked,
    }
    if kind == "convolution":
        base = correlation()
        (base.v if axis == 0 else base.u)[1, :, 0] = nan
        grad: ContributionGrads = base
    else:
        grad = made[kind]()
    may = torch.ones(P, grad.shape[axis], dtype=torch.bool)
    may[:, 0] = False
    masked = grad.where(axis, SliceMask(may))
    assert bool(torch.isfinite(masked.norm_sq()).all())
    out = torch.zeros(grad.shape)
    masked.add_to(out, ClipWeights(torch.ones(P, dtype=torch.float64), None))
    assert bool(torch.isfinite(out).all())
    assert float(out.norm()) > 0


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("kind", [OuterProductGrads, SequenceProductGrads])
def test_nothing_open_is_nothing_at_all_whatever_the_numbers(kind: type[ContributionGrads], axis: int) -> None:
    shape = (P,) if kind is OuterProductGrads else (P, 3)
    g, a = torch.randn(*shape, 6), torch.randn(*shape, 8)
    (a if axis == 0 else g)[2] = nan  # in the factor that is not masked
    may = torch.ones(P, 6 if axis == 0 else 8, dtype=torch.bool)
    may[2] = False
    masked = kind(g, a).where(axis, SliceMask(may))  # type: ignore[call-arg]
    assert masked.norm_sq()[2] == 0
    assert bool(torch.isfinite(masked.norm_sq()).all())


@pytest.mark.parametrize("axis", [0, 1])
def test_a_product_is_masked_before_or_after_it_is_formed(axis: int) -> None:
    """Whichever is less: its factors where it has few positions, else what was formed. The numbers are the same."""
    may = torch.rand(P, 64) < 0.5
    for positions, after in ((2, False), (30, True)):
        grad = SequenceProductGrads(torch.randn(P, positions, 64), torch.randn(P, positions, 64))
        masked = grad.where(axis, SliceMask(may))
        assert isinstance(masked, MaskedGrads) == after
        same(masked, by_hand(grad, axis, may))


def test_runs_of_blocked_indices() -> None:
    table = torch.tensor([[1, 0, 0, 1, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [1, 0, 0, 1, 0]], dtype=torch.bool)
    found = {tuple(who.tolist()): ranges for who, ranges in SliceMask(table).blocked}
    assert found == {(0, 3): ((1, 3), (4, 5)), (2,): ((0, 5),)}
    assert SliceMask(table).blocked_units is not None
    assert SliceMask(table[:2]).blocked_units is None
