"""Native kernels against the torch rules: random shapes, unequal numbers of rows, what is not finite, tiny or huge."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lamina.engine import native
from lamina.engine.batch import RowLayout
from lamina.engine.execute.clip import BoxClip, ClipWeights
from lamina.engine.execute.collectors import clip_layer
from lamina.engine.execute.grads import DenseGrads, OuterProductGrads
from lamina.engine.layers import layer_forward_for
from lamina.engine.native.norm_sums import clip_dense_layer
from lamina.engine.native.products import NativeBias, NativeGrads, NativeOuterGrads, OuterLayer, OuterLayers

SPECIAL = (0.0, float("nan"), float("inf"), 1e-41, 1e-30, 1e25)


@st.composite
def layers(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    """A layer and the shape of one row of its input."""
    bias, size = draw(st.booleans()), st.integers(1, 9)
    kind = draw(st.sampled_from(["linear", "linear", "conv", "conv", "transposed"]))
    if kind == "linear":
        inputs, outputs = draw(st.integers(1, 70)), draw(st.integers(1, 40))
        positions = draw(st.sampled_from([(), (), (1,), (2,), (3, 2), (37,), (150,)]))
        return nn.Linear(inputs, outputs, bias=bias), (*positions, inputs)
    rank, groups = draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2, 3]))
    inputs, outputs = (groups * draw(st.integers(1, 12)) for _ in range(2))
    few = st.integers(1, 3)
    kernel, stride, dilation = ([draw(few) for _ in range(rank)] for _ in range(3))
    padding = [draw(st.integers(0, 2)) for _ in range(rank)]
    space = [k * d + draw(size) for k, d in zip(kernel, dilation, strict=True)]
    settings = {"padding": padding, "dilation": dilation, "groups": groups, "bias": bias}
    made: Any = getattr(nn, f"Conv{'Transpose' if kind == 'transposed' else ''}{rank}d")
    if kind == "transposed":
        space = [n + 2 * p for n, p in zip(space, padding, strict=True)]  # or nothing would be left of the output
    return made(inputs, outputs, kernel, stride, **settings), (inputs, *space)


def grads_of(layer: nn.Module, row: tuple[int, ...], layout: RowLayout, odd: list[tuple[int, float]], seed: int) -> Any:
    """Per-contribution gradients of weight and bias, as the engine asks for them, with some rows of odd values."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(layout.rows, *row, generator=generator)
    rule = (
        layer_forward_for(layer).rule
        if not isinstance(layer, nn.modules.conv._ConvTransposeNd)
        else transposed_rule(layer, x)
    )
    params = list(layer.parameters())
    y, saved = rule.run(x, [p.detach() for p in params])
    g = torch.randn(y.shape, generator=generator)
    for where, value in odd:
        (x if where % 2 else g).flatten(1)[where % len(x), where % 3 :: 7] = value
    return rule.contribution_grads(saved, g, layout, [True] * len(params))


def transposed_rule(layer: Any, x: Tensor) -> Any:
    found: list[Any] = []
    layer_forward_for(layer).forward(lambda rule, *_: found.append(rule), x)
    return found[0]


@st.composite
def layouts(draw: st.DrawFn) -> RowLayout:
    """Contributions with none, one or several rows each, in any order, and rows of padding."""
    units = draw(st.integers(1, 9))
    owner = draw(st.lists(st.integers(-1, units - 1), min_size=1, max_size=12)) if draw(st.booleans()) else range(units)
    return RowLayout(torch.tensor(list(owner)), units)


def same(a: Tensor, b: Tensor, size: float = 0.0) -> None:
    assert torch.equal(torch.isfinite(a), torch.isfinite(b))
    a, b = (torch.where(torch.isfinite(t), t, 0).double() for t in (a, b))
    assert float((a - b).abs().max()) <= 1e-5 * max(float(b.abs().max()), size) + 1e-38


def compare(case: Any, processor: int, threads: int) -> None:
    (layer, row), layout, odd, seed, bound = case
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with native.switched(True), pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "_most", processor)
            check(layer, row, layout, odd, seed, bound)
    finally:
        torch.set_num_threads(before)


def check(layer: nn.Module, row: tuple[int, ...], layout: RowLayout, odd: Any, seed: int, bound: float) -> None:
    with torch.no_grad():
        mine = grads_of(layer, row, layout, odd, seed)
        with native.switched(False):
            theirs = grads_of(layer, row, layout, odd, seed)
        one_position = not isinstance(mine[0], NativeGrads)
        assert one_position == (isinstance(layer, nn.Linear) and row[:-1] in ((), (1,)) and layout.most_rows <= 1)
        assert isinstance(mine[0], NativeOuterGrads) == one_position
        clip = BoxClip(torch.full((layout.units,), bound, dtype=torch.float64))
        outs = [[torch.ones_like(p) for p in layer.parameters()] for _ in range(4)]
        found = clip_layer(list(zip(mine, outs[0], strict=True)), clip)
        wanted = clip_layer(list(zip(theirs, outs[1], strict=True)), clip)
        same(found.factor, wanted.factor)
        assert (found.broken is None) == (wanted.broken is None)
        for a, b in zip(mine, theirs, strict=True):
            same(a.norm_sq(), b.norm_sq())
            a.add_to(outs[2][mine.index(a)], wanted)
            b.add_to(outs[3][mine.index(a)], wanted)
        size = bound * layout.units
        for a, b, c, d in zip(*outs, strict=True):
            same(a, b, size), same(c, d, size)
        if not one_position:
            same(mine[0].form().grads.flatten(1), theirs[0].dense(0, layout.units))


@given(
    kind=st.sampled_from(["layer", "rms", "group", "instance"]), layout=layouts(), seed=st.integers(0, 10**6),
    width=st.sampled_from([1, 3, 8, 20]), place=st.sampled_from([(1,), (5,), (40,), (6, 7)]),
    odd=st.lists(st.tuples(st.integers(0, 11), st.sampled_from(SPECIAL[:3])), max_size=1),
)  # fmt: skip
@settings(max_examples=60)
def test_norm_layers_as_the_torch_rules(
    kind: str, layout: RowLayout, seed: int, width: int, place: Any, odd: Any
) -> None:
    groups = 2 if width % 2 == 0 else 1
    made = {"layer": lambda: nn.LayerNorm(width), "rms": lambda: nn.RMSNorm(width)}
    made |= {"group": lambda: nn.GroupNorm(groups, width)}
    made |= {"instance": lambda: (nn.InstanceNorm1d if len(place) == 1 else nn.InstanceNorm2d)(width, affine=True)}
    row = (*place, width) if kind in ("layer", "rms") else (width, *place)
    with torch.no_grad():
        mine = grads_of(made[kind](), row, layout, odd, seed)
        with native.switched(False):
            theirs = grads_of(made[kind](), row, layout, odd, seed)
    for a, b in zip(mine, theirs, strict=True):
        same(a.grads, b.grads, size=10.0)


@given(
    widths=st.lists(st.sampled_from([1, 2, 7, 64, 65, 300]), min_size=1, max_size=2), units=st.integers(1, 40),
    odd=st.lists(st.tuples(st.integers(0, 39), st.sampled_from([*SPECIAL[:-1], 1e15])), max_size=3), seed=st.integers(0, 10**6),
    bound=st.sampled_from([0.0, 1e-22, 1e-3, 1.0, float("inf")]),
)  # fmt: skip
@settings(max_examples=120)
def test_gradients_that_are_there_are_clipped_in_one_call(
    widths: list[int], units: int, odd: Any, seed: int, bound: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(units, width, generator=generator) for width in widths]
    for where, value in odd:
        grads[where % len(grads)][where % units, :: 1 + where % 3] = value
    clip = BoxClip(torch.full((units,), bound, dtype=torch.float64))
    outs = [[torch.ones(width) for width in widths] for _ in range(2)]
    found = clip_dense_layer([(DenseGrads(g), out) for g, out in zip(grads, outs[0], strict=True)], clip)
    assert found is not None
    with native.switched(False):
        wanted = clip_layer([(DenseGrads(g), out) for g, out in zip(grads, outs[1], strict=True)], clip)
    assert (found.broken is None) == (wanted.broken is None)
    if found.broken is not None and wanted.broken is not None:
        assert torch.equal(found.broken, wanted.broken)
    same(found.factor, wanted.factor)
    for a, b in zip(*outs, strict=True):
        same(a, b, size=0.5 * min(bound, 1e6) * units)


def test_what_is_no_dense_gradient_is_left_to_the_rules() -> None:
    clip = BoxClip(torch.ones(3, dtype=torch.float64))
    measured = DenseGrads(torch.ones(3, 2), lambda: torch.full((3,), 9.0, dtype=torch.float64))
    wide, folded = DenseGrads(torch.ones(3, 2, dtype=torch.float64)), DenseGrads(torch.ones(3, 2, 2))
    for grad, out in ((measured, torch.ones(2)), (wide, torch.ones(2)), (folded, torch.ones(2, 2))):
        assert clip_dense_layer([(grad, out)], clip) is None
    three = [(DenseGrads(torch.ones(3, 2)), torch.ones(2)) for _ in range(3)]
    assert clip_dense_layer(three, clip) is None
    assert clip_dense_layer([(DenseGrads(torch.ones(3, 2)), torch.ones(2, 2)[:, 0])], clip) is None


cases = st.tuples(
    layers(), layouts(), st.lists(st.tuples(st.integers(0, 11), st.sampled_from(SPECIAL)), max_size=2),
    st.integers(0, 10**6), st.sampled_from([1e-3, 1.0, 1e6, 1e-22]),
)  # fmt: skip


@given(case=cases, processor=st.integers(0, 2), threads=st.sampled_from([1, 1, 2]))
@settings(max_examples=250)
def test_as_the_torch_rules(case: Any, processor: int, threads: int) -> None:
    compare(case, processor, threads)


@pytest.mark.slow
@given(case=cases, processor=st.integers(0, 2), threads=st.sampled_from([1, 2, 4]))
@settings(max_examples=4000)
def test_as_the_torch_rules_often(case: Any, processor: int, threads: int) -> None:
    compare(case, processor, threads)


many_layers = st.tuples(
    st.lists(st.tuples(st.integers(1, 150), st.integers(1, 600)), min_size=1, max_size=4), st.integers(1, 300),
    st.lists(st.tuples(st.integers(0, 299), st.sampled_from(SPECIAL)), max_size=3), st.integers(0, 10**6),
    st.sampled_from([1e-3, 1.0, 1e6, 1e-22]), st.integers(0, 2), st.sampled_from([1, 2, 4]),
)  # fmt: skip


@given(case=many_layers)
@settings(max_examples=60)
def test_many_linear_layers_in_one_call(case: Any) -> None:
    compare_layers(*case)


@pytest.mark.slow
@given(case=many_layers)
@settings(max_examples=2000)
def test_many_linear_layers_in_one_call_often(case: Any) -> None:
    compare_layers(*case)


def compare_layers(
    sizes: list[tuple[int, int]], units: int, odd: Any, seed: int, bound: float, processor: int, threads: int
) -> None:
    generator, results = torch.Generator().manual_seed(seed), []
    limits = torch.full((units,), bound, dtype=torch.float64)
    factors = [
        (torch.randn(units, o, generator=generator), torch.randn(units, i, generator=generator)) for o, i in sizes
    ]
    for (place, value), (g, a) in zip(odd, factors, strict=False):
        (a if place % 2 else g)[place % units, ::3] = value
    torch.set_num_threads(threads)
    try:
        with native.switched(True), pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "_most", processor)
            for joint in (False, True):
                outs = [(torch.ones(o, i), torch.ones(o)) for o, i in sizes]
                layers = OuterLayers(
                    OuterLayer(NativeOuterGrads(g, a), out, bias, True, limits)
                    for (g, a), (out, bias) in zip(factors, outs, strict=True)
                )
                if joint:
                    numbers = layers.measure()
                    numbers[3] = results[0][0][3]  # what a box found, given as factors from outside
                    layers.add(numbers)
                else:
                    numbers = layers.clip_and_add()
                results.append((numbers, outs))
    finally:
        torch.set_num_threads(1)
    assert torch.equal(results[0][0].nan_to_num(), results[1][0].nan_to_num())
    for i, (g, a) in enumerate(factors):
        grads, sums = OuterProductGrads(g, a), (torch.ones(sizes[i]), torch.ones(sizes[i][0]))
        pairs = [(grads, sums[0]), (DenseGrads(g, grads.g_norm_sq), sums[1])]
        wanted = clip_layer(pairs, BoxClip(limits))
        same(results[0][0][3, i], wanted.factor)
        for _, outs in results:
            for mine, theirs in zip(outs[i], sums, strict=True):
                same(mine, theirs, size=bound * units)


@pytest.mark.parametrize("clip", [True, False], ids=["clip and add", "add"])
def test_the_sum_is_the_same_bits_for_any_number_of_threads(clip: bool) -> None:
    layer, layout, sums = nn.Conv1d(12, 20, 5, padding=2), RowLayout(torch.arange(50) // 2, 25), []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        try:
            weight = grads_of(layer, (12, 40), layout, [], 0)[0]
            out = torch.zeros_like(layer.weight)
            bound = torch.ones(25, dtype=torch.float64)
            if clip:
                weight.clip_and_add(out, None, BoxClip(bound))
            else:
                weight.add_to(out, ClipWeights(bound, None))
        finally:
            torch.set_num_threads(1)
        sums.append(out)
    assert torch.equal(sums[0], sums[1]) and torch.equal(sums[0], sums[2])


def test_linear_layers_have_the_same_bits_for_any_number_of_threads() -> None:
    generator, sums = torch.Generator().manual_seed(0), []
    g, a = torch.randn(300, 200, generator=generator), torch.randn(300, 700, generator=generator)
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        try:
            out, bias = torch.zeros(200, 700), torch.zeros(200)
            layer = OuterLayer(NativeOuterGrads(g, a), out, bias, True, torch.ones(300, dtype=torch.float64))
            OuterLayers([layer]).clip_and_add()
        finally:
            torch.set_num_threads(1)
        sums.append(torch.cat([out.flatten(), bias]))
    assert torch.equal(sums[0], sums[1]) and torch.equal(sums[0], sums[2])


def test_large_tensors_and_other_types_keep_the_torch_rules() -> None:
    layout = RowLayout(torch.arange(2), 2)
    assert not isinstance(grads_of(nn.Linear(2048, 2049, bias=False), (2, 2048), layout, [], 0)[0], NativeGrads)
    rule = layer_forward_for(nn.Linear(3, 4)).rule
    double = rule.contribution_grads(
        [torch.zeros(2, 5, 3).double()], torch.zeros(2, 5, 4).double(), layout, [True, True]
    )
    assert not isinstance(double[0], NativeGrads) and not isinstance(double[1], NativeBias)
