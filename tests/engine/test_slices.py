"""Slices: a class moves some heads, rows or experts of a tensor, and is clipped by what is left. Against the oracle."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
import torch
from by_hand import MODELS, QUIET, bands, cut
from hypothesis import given, settings
from hypothesis import strategies as st
from net_builders import tensors_close
from oracle import FORMS, agree, clip_by_hand, difference, example_grads, losses_of, masked_by_hand, plan_of, thresholds
from refusals import raises_code
from torch import Tensor, nn

from lamina import Batch, Engine, SeededNoise, route
from lamina.plan.selection import Slice
from lamina.plan.step_plan import StepPlan

pytestmark = QUIET
MIXED = torch.tensor([0, 1, 2, 1, 0])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cls", [MIXED.tolist(), [1] * 5], ids=["mixed", "alike"])
def test_heads(name: str, cls: list[int]) -> None:
    model, x, losses, slices = MODELS[name]()
    agree(model.train(), x, losses=losses, clip=bands(model, slices), slices=slices, batch={"cls": torch.tensor(cls)})


@pytest.mark.parametrize("name", ["gpt2", "multihead"])
def test_heads_of_patients_with_several_windows(name: str) -> None:
    model, x, losses, slices = MODELS[name]()
    batch = {
        "unit": torch.tensor([0, 1, 0, 2, 1]),
        "weight": torch.tensor([1.0, 1.0, 2.0, 1.0, 0.0]),
        "cls": torch.tensor([1, 0, 1]),
    }
    agree(model.train(), x, losses=losses, clip=bands(model, slices), slices=slices, batch=batch)


# ------------------------------------------------------------------------------- every kind of layer


class Kinds(nn.Module):
    """Every kind of tensor that can be cut: tables, convolutions, norms, cells, bare ones, one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6, padding_idx=0)
        self.conv = nn.Conv1d(6, 8, 3, padding=1)
        self.grouped = nn.Conv1d(8, 8, 3, groups=2)
        self.norm = nn.GroupNorm(2, 8)
        self.again = nn.Linear(8, 8)
        self.cell = nn.GRU(8, 4, batch_first=True)
        self.bare = nn.Parameter(torch.randn(5, 4))
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.out = nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.norm(self.grouped(torch.tanh(self.conv(self.table(ids).transpose(1, 2)))))
        h = torch.tanh(self.again(torch.tanh(self.again(h.transpose(1, 2)))))
        return self.out(self.gain * (self.cell(h)[0] + self.bare))


CUTS: dict[str, list[Slice]] = {
    "rows of a table": [cut("table.weight", 9, (1, 3), (5, 9))],
    "columns of a table": [cut("table.weight", 6, (2, 4), axis=1)],
    "channels out": [cut("conv.weight", 8, (0, 4)), cut("conv.bias", 8, (0, 4))],
    "channels in": [cut("conv.weight", 6, (1, 2), (4, 6), axis=1), cut("conv.bias", 8)],
    "taps": [cut("conv.weight", 3, (0, 1), axis=2)],
    "channels in groups": [cut("grouped.weight", 4, (1, 3), axis=1), cut("grouped.bias", 8, (0, 1))],
    "channels of a norm": [cut("norm.weight", 8, (4, 8)), cut("norm.bias", 8)],
    "a reused map": [cut("again.weight", 8, (1, 5)), cut("again.bias", 8, (1, 5))],
    "columns of a reused map": [cut("again.weight", 8, (1, 5), axis=1)],
    "gates": [cut("cell.weight_ih_l0", 12, (4, 8)), cut("cell.weight_hh_l0", 12, (4, 8)), cut("cell.bias_hh_l0", 12)],
    "a bare tensor": [cut("bare", 4, (0, 2), axis=1), cut("gain", 1)],
}  # fmt: skip


@pytest.mark.parametrize("kind", CUTS)
def test_every_kind_of_layer(kind: str) -> None:
    model, slices = Kinds(), CUTS[kind]
    ids = torch.randint(0, 9, (6, 7))
    clip = bands(model, slices)
    cls = torch.tensor([0, 1, 2, 1, 0, 1])
    agree(model, ids, clip=clip, slices=slices, batch={"cls": cls}, must_clip=False)


def test_two_classes_of_different_slices_and_a_public_one() -> None:
    model, x, losses, slices = MODELS["ours"]()
    other = [cut(part.tensor, 16, (0, 8), axis=part.axis, cls="c2") for part in slices if part.ranges]
    out = cut("decoder.0.out.bias", 16, (2, 5), cls="c3")
    rows = bands(model, slices)
    layers = [plan_layer.name for plan_layer in plan_of(model).layers]
    public = [inf if name in ("decoder.0.out", "head") else 0.0 for name in layers]
    agree(
        model, x, losses=losses, clip=[rows[0], rows[1], rows[1], public], public=(3,),
        slices=[*slices, *other, out], batch={"cls": torch.tensor([3, 1, 2, 1, 0])}, spread=(1.0, 0.5, 0.8),
    )  # fmt: skip


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    widths=st.tuples(st.integers(2, 70), st.integers(2, 70), st.integers(1, 5)),
    tokens=st.sampled_from([1, 3]),
    form=st.sampled_from(FORMS),
)
def test_random_slices(seed: int, widths: tuple[int, int, int], tokens: int, form: str) -> None:
    source = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=source))

    a, b, c = widths
    model = nn.Sequential(nn.Linear(a, b), nn.Tanh(), nn.Linear(b, c))
    slices = []
    for k in (1, 2):
        for tensor, shape in (("0.weight", (b, a)), ("0.bias", (b,)), ("2.weight", (c, b))):
            axis = 0 if tensor == "2.weight" else k * 0
            first = draw(0, shape[axis])
            stop = draw(first, shape[axis]) + 1
            slices.append(cut(tensor, shape[axis], (first, stop), axis=axis, cls=f"c{k}"))
    x = torch.randn(6, tokens, a, generator=source)
    cls = torch.randint(0, 3, (6,), generator=source)
    agree(model, x, clip=[[1.0, 1.0]] * 3, slices=slices, batch={"cls": cls}, forms=[form], must_clip=False)


# ------------------------------------------------------------------------------- what is not finite


class Spiked(nn.Module):
    """A linear map whose upper half of outputs has no finite gradient where the input says so."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(5, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.l(x[..., :5])
        size = torch.sqrt(y[..., 4:].square() * x[..., 5:])  # 0·∞ in its derivative where x[5] = 0
        return torch.cat([y[..., :4], size], -1)


@pytest.mark.parametrize("shape", [(4,), (4, 3)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_what_is_not_finite_outside_a_slice_does_not_matter(shape: tuple[int, ...], form: str) -> None:
    model = Spiked()
    x = torch.randn(*shape, 6)
    x[..., 5] = 1.0
    x[1, ..., 5] = x[2, ..., 5] = 0.0
    slices = [cut("l.weight", 8, (0, 4)), cut("l.bias", 8, (0, 4))]
    plan = plan_of(model, [[0.1], [0.1]], clipping=form, slices=slices)
    grads = example_grads(model, x)
    assert not bool(torch.isfinite(grads["l.weight"][1]).all())
    assert bool(torch.isfinite(grads["l.weight"][1, :4]).all())
    cls = torch.tensor([0, 1, 0, 1])
    ref = clip_by_hand(grads, cls.tolist(), plan)
    assert [row[0] > 0 for row in ref.factors] == [True, True, False, True]  # 2 has no slice, and is left out
    difference(route(grads, cls, plan, noise=None), ref, relative=1e-12, absolute=1e-12)
    with Engine(model, plan) as engine:
        difference(engine.clipped_sums(losses_of(model, x, None), Batch(x, cls=cls)), ref)


@pytest.mark.parametrize("name", ["gpt2", "ours"])
@pytest.mark.parametrize("form", FORMS)
def test_contributions_that_are_not_finite_leave_the_others_alone(name: str, form: str) -> None:
    model, x, losses, slices = MODELS[name]()
    plan = plan_of(model.train(), bands(model, slices), 0.5, clipping=form, slices=slices)
    weight = torch.ones(5)

    def spoilt(values: Any) -> Tensor:
        return losses(model, values, None) * weight

    with Engine(model, plan) as engine:
        for unit in range(5):
            weight.fill_(1.0)
            keep = torch.arange(5) != unit
            batch = Batch(x, cls=MIXED, weight=keep.float())
            want = engine.clipped_sums(spoilt(x), batch)
            weight[unit] = nan
            found = engine.clipped_sums(spoilt(x), Batch(x, cls=MIXED))
            tensors_close(found, want, rtol=1e-5, atol=1e-7)


# ------------------------------------------------------------------------------- how it is carried out


def sliced(form: str, **options: Any) -> tuple[nn.Module, Tensor, StepPlan]:
    model, x, _, slices = MODELS["ours"]()
    more = [cut("encoder.0.up.weight", 24, (0, 3), (8, 24)), cut("encoder.0.up.bias", 24, cls="c2")]
    rows = bands(model, [*slices, *more])
    rows[2] = [
        1.0 if layer.name == "encoder.0.up" else c for layer, c in zip(plan_of(model).layers, rows[2], strict=True)
    ]
    plan = plan_of(model, rows, 0.7, clipping=form, slices=[*slices, *more], **options)
    grads = example_grads(model, x)
    return model, x, replace(thresholds(grads, plan, classes=MIXED.tolist()), noise=plan.noise)  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cls", [MIXED.tolist(), [1] * 5, [2] * 5, [1, 2, 1, 2, 2]], ids=str)
def test_neither_constant_time_nor_parts_change_the_sum(form: str, cls: list[int]) -> None:
    model, x, plan = sliced(form)
    batch = Batch(x, cls=torch.tensor(cls))
    found = []
    for constant_time in (False, True):
        with Engine(model, plan, constant_time=constant_time) as engine:
            found.append(engine.clipped_sums(losses_of(model, x, None), batch))
    with Engine(model, plan, noise=SeededNoise(1)) as engine:
        parts = [engine.clipped_sums(losses_of(model, part.x, None), part) for part in batch.split(5)]
    found.append({name: sum(part[name] for part in parts) for name in parts[0]})  # type: ignore[misc]
    for name, want in found[0].items():
        for other in found[1:]:
            torch.testing.assert_close(other[name], want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("form", FORMS)
def test_a_step_is_the_reference_with_the_same_noise(form: str) -> None:
    model, x, plan = sliced(form)
    scale, ceiling = torch.tensor([1.0, 0.3, 1.0, 0.9, 0.5]), torch.tensor([0.2, 5.0, 1e-3, 0.1, 50.0])
    grads = example_grads(model, x)
    with Engine(model, plan, noise=SeededNoise(3, hardened=False)) as engine:
        batch = Batch(x, cls=MIXED, scale=scale, ceiling=ceiling)
        engine.backward(losses_of(model, x, None), batch)
        trained = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    given = {name: grads[name] for name in engine._tensors}
    noise = SeededNoise(3, hardened=False)
    want = route(given, MIXED, plan, noise=noise, scale=scale, ceiling=ceiling)
    assert set(trained) == set(want)
    for name, value in want.items():
        torch.testing.assert_close(trained[name].double(), value.double(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_scale_and_ceiling(form: str) -> None:
    """Thresholds of a stricter contribution, with and without slices; what is public knows neither."""
    model, x, losses, slices = MODELS["ours"]()
    rows = bands(model, slices)
    batch = {
        "cls": MIXED,
        "scale": torch.tensor([0.25, 0.5, 1.0, 1.0, 0.01]),
        "ceiling": torch.tensor([10.0, 0.01, 0.001, 1e6, 0.05]),
    }
    agree(model, x, losses=losses, clip=rows, slices=slices, batch=batch, forms=[form])
    rows[0] = [inf] * len(rows[0])
    agree(model, x, losses=losses, clip=rows, slices=slices, batch=batch, forms=[form], public=(0,), must_clip=False)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("scale", "ceiling"), [(0.3, inf), (1.0, 0.02), (0.5, 0.7)])
def test_a_stricter_contribution_moves_no_more_than_its_price_says(form: str, scale: float, ceiling: float) -> None:
    model, x, plan = sliced(form)
    for k in range(3):
        by = min(scale, ceiling / plan.norm(k))
        limits: dict[str, Any] = {"scale": torch.tensor([scale])}
        if ceiling < inf:
            limits["ceiling"] = torch.tensor([ceiling])
        with Engine(model, plan) as engine:
            sums = engine.clipped_sums(
                losses_of(model, x[:1], None) * 1e5, Batch(x[:1], cls=torch.tensor([k]), **limits)
            )
        layers = [
            torch.cat([sums[name].flatten() for name in layer.parameters if name in sums] or [torch.zeros(1)]).norm()
            for layer in plan.layers
        ]
        size = torch.stack([n / (s or 1.0) for n, s in zip(layers, plan.noise, strict=True)]).norm()
        assert 0.9 / plan.sigma(k, by) < size <= 1 / plan.sigma(k, by)
        assert torch.stack(layers).norm() <= min(ceiling, by * plan.norm(k)) * (1 + 1e-6)


def test_gradient_of_one_contribution_is_routed_unless_a_probe_asks() -> None:
    model, x, plan = sliced("box")
    grads = example_grads(model, x)
    with Engine(model, plan) as engine:
        for unit in range(5):
            batch = Batch(x, cls=MIXED)
            routed = engine.gradient_of(losses_of(model, x, None), batch, unit)
            whole = engine.gradient_of(losses_of(model, x, None), batch, unit, routed=False)
            masked = masked_by_hand({n: g[unit : unit + 1] for n, g in grads.items()}, [int(MIXED[unit])], plan)
            for i, layer in enumerate(plan.layers):
                reach = plan.clip[int(MIXED[unit])][i] > 0
                for name in set(layer.parameters) & set(routed):
                    want = masked[name][0] if reach else torch.zeros_like(masked[name][0])
                    torch.testing.assert_close(routed[name].double(), want, rtol=1e-4, atol=1e-7)
                    torch.testing.assert_close(whole[name].double(), grads[name][unit], rtol=1e-4, atol=1e-7)


def test_a_choice_measures_what_a_class_may_move() -> None:
    """Norms for an exponential mechanism are those of masked gradients."""
    model, x, plan = sliced("box")
    grads = masked_by_hand(example_grads(model, x), MIXED.tolist(), plan)
    with Engine(model, plan) as engine:
        part = engine.eager.examine(losses_of(model, x, None), Batch(x, cls=MIXED))
        norms = engine.eager.norms(part, engine.rules.clipper)
    for u, k in enumerate(MIXED.tolist()):
        for i, layer in enumerate(plan.layers):
            if plan.clip[k][i] > 0:
                want = torch.stack([grads[name][u].norm() for name in layer.parameters]).norm()
                torch.testing.assert_close(norms[u, i], want, rtol=1e-4, atol=1e-9)


# ------------------------------------------------------------------------------- noise


def test_no_noise_where_no_class_reaches_and_noise_everywhere_else() -> None:
    model, x, losses, slices = MODELS["ours"]()
    plan = plan_of(model, bands(model, slices)[1:2], 2.0, slices=[replace(s, cls="c0") for s in slices], batch=1.0)
    open_ = {s.tensor: s for s in slices}
    for batch in (Batch(x[:0]), Batch(x)):
        model.zero_grad()
        with Engine(model, plan, noise=SeededNoise(0, hardened=False)) as engine:  # no draw is 0, as on a grid
            engine.backward(losses(model, x, None) if len(batch) else None, batch)
            assert {n for n, p in model.named_parameters() if p.grad is not None} == {
                s.tensor for s in slices if s.ranges
            }
        for name, p in model.named_parameters():
            if p.grad is None:
                continue
            (first, stop), axis = open_[name].ranges[0], open_[name].axis
            inside = p.grad.narrow(axis, first, stop - first)
            assert 0 not in inside
            assert 1.0 < float(inside.std()) < 3.5
            outside = p.grad.clone()
            outside.narrow(axis, first, stop - first).zero_()
            assert not outside.any()


def test_hardened_noise_is_silenced_too() -> None:
    model = nn.Linear(4, 6)
    plan = plan_of(model, [[1.0]], 2.0, slices=[cut("weight", 6, (2, 4), cls="c0"), cut("bias", 6, (2, 4), cls="c0")])
    with Engine(model, plan, noise=SeededNoise(0, hardened=True)) as engine:
        engine.backward(None, Batch(torch.zeros(0, 4)))
    assert not model.weight.grad[[0, 1, 4, 5]].any()
    assert model.weight.grad[2:4].all()


def test_a_tensor_that_no_class_may_move_gets_no_gradient_at_all() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    shut = [cut("0.bias", 6, cls="c0"), cut("0.bias", 6, cls="c1"), cut("2.weight", 6, (0, 3), axis=1, cls="c1")]
    x = torch.randn(5, 4)
    agree(model, x, clip=[[1.0, 1.0]] * 2, slices=shut, batch={"cls": torch.tensor([0, 1, 1, 0, 1])})
    with Engine(model, plan_of(model, [[1.0, 1.0]] * 2, slices=shut)) as engine:
        engine.backward(losses_of(model, x, None), Batch(x, cls=torch.tensor([0, 1, 1, 0, 1])))
    assert model[0].bias.grad is None
    assert model[0].weight.grad is not None


@pytest.mark.parametrize("part", [cut("weight", 5, (0, 2), cls="c0"), cut("weight", 4, (0, 2), axis=2, cls="c0")])
def test_slices_of_another_model_are_refused(part: Slice) -> None:
    model = nn.Linear(4, 6)
    with raises_code("plan.slice-shape-differs"):
        Engine(model, plan_of(model, [[1.0]], slices=[part]))


def test_no_slice_costs_nothing() -> None:
    """A batch without a class that has slices takes the way it takes without them."""
    model, _, _, slices = MODELS["ours"]()
    plan = plan_of(model, bands(model, slices), slices=slices)
    with Engine(model, plan) as engine:
        assert engine._slices.masks_for(torch.tensor([0, 2, 0])) == {}
        found = engine._slices.masks_for(torch.tensor([0, 1]))
        assert set(found) == {s.tensor for s in slices}
        assert found["decoder.0.query.weight"] is found["decoder.0.query.bias"]
        assert engine._slices.masks_for(torch.tensor([1]))["decoder.0.out.bias"].all_blocked
