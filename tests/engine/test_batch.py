"""Batches: classes, bands, contributions of several examples, padding, microbatches, nothing at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch
from net_builders import Net, sums_of, tensors_close
from oracle import FORMS, agree, clip_by_hand, difference, example_grads, losses_of, plan_of, unit_grads
from refusals import raises_code
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lamina import Batch, Engine, SeededNoise, route
from lamina.engine.batch import Draw

NAN = float("nan")


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3))


def seq() -> nn.Module:
    return nn.Sequential(nn.Embedding(11, 6), nn.LayerNorm(6), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))


CLASSES = torch.tensor([0, 1, 2, 0, 1, 2, 1, 0, 2])
BANDS = [[1.0, 1.0, 1.0], [0.0, 0.0, 1.0], [1.0, 0.0, 1.0]]


# ----------------------------------------------------------------------------------- classes and bands


@pytest.mark.parametrize("shape", [(9, 5), (9, 4, 5)], ids=str)
def test_classes_with_their_own_thresholds_and_bands(shape: tuple[int, ...]) -> None:
    agree(mlp(), torch.randn(shape), clip=BANDS, spread=(0.5, 1.0, 2.0), batch={"cls": CLASSES})


@pytest.mark.parametrize("present", [[0], [1], [2], [1, 2]], ids=str)
@pytest.mark.parametrize("constant_time", [True, False])
def test_whichever_classes_the_batch_holds(present: list[int], constant_time: bool) -> None:
    cls = torch.tensor([present[i % len(present)] for i in range(6)])
    for bands in (BANDS, [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]):
        agree(mlp(), torch.randn(6, 5), clip=bands, batch={"cls": cls}, engine={"constant_time": constant_time})


def test_public_classes_are_not_clipped() -> None:
    bands = [[0.0, 1.0, 1.0], [inf, inf, inf], [inf, 0.0, inf]]
    agree(mlp(), torch.randn(9, 5), clip=bands, public=(1, 2), batch={"cls": CLASSES})
    agree(mlp(), torch.randn(6, 5), clip=[[inf, 0.0, inf]], public=(0,), must_clip=False)


def test_layers_of_several_modules() -> None:
    for group in ("block", {"ends": ["0", "4"], "middle": ["2"]}, {"all": ["*"]}):
        agree(mlp(), torch.randn(7, 5), group=group)
        agree(mlp(), torch.randn(7, 4, 5), group=group)


def test_layers_of_several_modules_in_a_residual_network() -> None:

    def block() -> nn.Module:
        residual = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        return Net(lambda m, x: x + m.inner(x), inner=residual)

    blocks = nn.Sequential(*(block() for _ in range(3)))
    model = Net(lambda m, x: m.head(m.blocks(x)), blocks=blocks, head=nn.Linear(6, 2))
    bands = [[1.0] * 4, [0.0, 0.0, 1.0, 1.0]]
    agree(model, torch.randn(7, 3, 6), group="block", clip=bands, batch={"cls": torch.tensor([0, 1, 0, 1, 1, 0, 0])})


# ----------------------------------------------------------------------------------- tied and reused tensors


def tied() -> nn.Module:
    """Embedding and head share their weight; one linear map is called three times."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = m.embed(x)
        for _ in range(3):
            h = h + m.map(h).tanh()
        return m.head(h)

    model = Net(forward, embed=nn.Embedding(11, 5), map=nn.Linear(5, 5), head=nn.Linear(5, 11))
    model.head.weight = model.embed.weight
    return model


def test_tied_and_reused_weights() -> None:
    agree(tied(), torch.randint(0, 11, (6, 4)))
    agree(tied(), torch.randint(0, 11, (6,)))
    agree(tied(), torch.randint(0, 11, (6, 4)), batch={"unit": torch.tensor([0, 1, 1, 0, 2, 2])})


@pytest.mark.parametrize("rule", [True, False], ids=["its transpose", "a module that has no rule"])
def test_a_weight_shared_with(rule: bool) -> None:
    decode = Conv1D(6, 4) if rule else Net(lambda m, h: h @ m.weight)
    model = Net(lambda m, x: m.decode(m.encode(x).tanh()), encode=nn.Linear(6, 4), decode=decode)
    decode.weight = model.encode.weight
    agree(model, torch.randn(6, 6))
    agree(model, torch.randn(6, 3, 6))
    agree(model, torch.randn(6, 3, 6), batch={"unit": torch.tensor([0, 1, 1, 0, 2, 2])})


def test_operations_in_place_after_a_layer() -> None:
    model = nn.Sequential(
        nn.Conv1d(3, 6, 3), nn.ReLU(inplace=True), nn.GroupNorm(2, 6), nn.Dropout(0.0, inplace=True), nn.Flatten(),
        nn.Linear(30, 5), nn.LeakyReLU(inplace=True), nn.LayerNorm(5), nn.Hardtanh(inplace=True), nn.Linear(5, 2),
    )  # fmt: skip
    agree(model, torch.randn(6, 3, 7))


def test_sensitivity_of_a_reused_weight_is_one_threshold_not_three() -> None:
    model = nn.Linear(4, 4, bias=False)
    x = torch.randn(1, 4) * 100
    for form in FORMS:
        with Engine(model, plan_of(model, 0.3, 2.0, clipping=form)) as engine:
            losses = model(model(model(x))).square().sum(1)
            size = float(engine.clipped_sums(losses, Batch(x))["weight"].double().norm())
        assert 0.299 < size <= 0.3


# ----------------------------------------------------------------------------------- contributions of several examples

UNITS: dict[str, dict[str, Any]] = {
    "regular": {"unit": torch.arange(4).repeat_interleave(3)},
    "interleaved": {"unit": torch.arange(4).repeat(3)},
    "ragged": {"unit": torch.tensor([0, 1, 1, 1, 1, 2, 2, 3, 3, 3, 3, 3])},
    "shuffled": {"unit": torch.tensor([3, 0, 2, 1, 1, 3, 0, 0, 2, 2, 3, 1])},
    "weighted": {"unit": torch.arange(4).repeat_interleave(3), "weight": torch.rand(12) * 3 + 0.1},
    "padded": {
        "unit": torch.arange(4).repeat_interleave(3),
        "weight": torch.tensor([1, 1, 1, 1, 1, 0, 1, 0, 0, 1, 1, 1.0]),
    },
    "ragged and padded": {
        "unit": torch.tensor([0, 1, 1, 1, 1, 2, 2, 3, 3, 3, 3, 0]),
        "weight": torch.tensor([0.5, 0, 1, 2, 1, 0, 1, 0, 1, 1, 0, 3.0]),
    },
    "only padding in one": {
        "unit": torch.arange(4).repeat_interleave(3),
        "weight": torch.tensor([1, 1, 1, 0, 0, 0, 1, 0, 0, 1, 1, 1.0]),
    },
}


@pytest.mark.parametrize("kind", UNITS)
def test_contributions_of_several_examples(kind: str) -> None:
    agree(mlp(), torch.randn(12, 5), batch=UNITS[kind])
    agree(seq(), torch.randint(0, 11, (12, 4)), batch=UNITS[kind])
    agree(nn.Sequential(nn.Conv1d(3, 4, 3), nn.GroupNorm(2, 4), nn.Tanh()), torch.randn(12, 3, 7), batch=UNITS[kind])


@pytest.mark.parametrize("bad", [NAN, inf])
@pytest.mark.parametrize("kind", ["padded", "ragged and padded", "only padding in one"])
def test_padding_may_hold_anything(kind: str, bad: float) -> None:
    """Rubbish in padding leaves the sums as they are, bit for bit."""
    model = nn.Sequential(nn.Conv1d(3, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(20, 3))
    x = torch.randn(12, 3, 7)
    spoiled = x.clone()
    spoiled[UNITS[kind]["weight"] == 0] = bad
    for form in FORMS:
        plan = plan_of(model, 0.1, clipping=form)
        got, want = (sums_of(model, plan, data, **UNITS[kind]) for data in (spoiled, x))
        assert all(torch.isfinite(value).all() for value in got.values())
        tensors_close(got, want, 0.0, 0.0)


def test_the_size_of_weights_does_not_matter_only_their_ratio() -> None:
    model, x = mlp(), torch.randn(12, 5)
    weight = torch.rand(12) + 0.1
    unit = UNITS["ragged"]["unit"]
    small, large = (sums_of(model, plan_of(model, 0.05), x, unit=unit, weight=weight * s) for s in (1.0, 256.0))
    tensors_close(small, large)


# ----------------------------------------------------------------------------------- microbatches


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("parts", [1, 2, 3, 5, 7, 100])
def test_microbatches_change_nothing(parts: int, form: str) -> None:
    model = mlp()
    x = torch.randn(12, 5)
    cls = torch.tensor([0, 1, 0, 1])
    plan = plan_of(model, [[0.05, 0.05, 0.05], [0.0, 0.02, 0.04]], 0.01, clipping=form)
    whole = Batch(x, **UNITS["shuffled"], cls=cls)
    grads = []
    for pieces in ([whole], list(whole.split(parts))):
        assert sum(len(piece) for piece in pieces) == len(whole)
        assert [piece.first for piece in pieces] == [True] + [False] * (len(pieces) - 1)
        assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        with Engine(model, plan, noise=SeededNoise(3)) as engine:
            for piece in pieces:
                assert all(p.grad is None for p in model.parameters()), "nothing leaves before the last part"
                engine.backward(losses_of(model, piece.x, None), piece)
            assert engine.budget.taken == 1
        grads.append({name: p.grad for name, p in model.named_parameters()})
        model.zero_grad()
    tensors_close(grads[1], grads[0], 1e-5, 1e-8)


def test_split_never_cuts_a_contribution() -> None:
    batch = Batch(torch.arange(12.0), torch.arange(12), unit=UNITS["shuffled"]["unit"])
    for parts in range(1, 7):
        seen: list[float] = []
        for piece in batch.split(parts):
            seen += piece.x.tolist()
            for u in range(len(piece)):
                assert int((piece.unit == u).sum()) == 3
            assert torch.equal(piece.x.long(), piece.y)
        assert sorted(seen) == list(range(12))
    with raises_code("engine.split-parts"):
        list(batch.split(0))


def test_a_later_part_without_its_first_is_refused() -> None:
    model, x = mlp(), torch.randn(4, 5)
    with Engine(model, plan_of(model)) as engine:
        _, second = Batch(x).split(2)
        with raises_code("engine.parts-out-of-order"):
            engine.backward(losses_of(model, second.x, None), second)
        assert engine.budget.taken == 0


@pytest.mark.parametrize("again", [False, True], ids=["second part", "first part of the next step"])
def test_a_refused_part_gives_the_step_up(again: bool) -> None:
    """Otherwise the parts of two steps could come to share one noise."""
    model, x = mlp(), torch.randn(4, 5)
    with Engine(model, plan_of(model), noise=SeededNoise(0)) as engine:
        first, second = Batch(x).split(2)
        engine.backward(losses_of(model, first.x, None), first)
        bad = first if again else second
        with raises_code("engine.losses-reduced"):
            engine.backward(losses_of(model, bad.x, None).sum(), bad)
        with raises_code("engine.parts-out-of-order"):
            engine.backward(losses_of(model, second.x, None), second)
        assert engine.budget.taken == 1
        assert all(p.grad is None for p in model.parameters())
        for part in Batch(x).split(2):
            engine.backward(losses_of(model, part.x, None), part)
        assert engine.budget.taken == 2


def test_a_contribution_counts_once_in_a_step() -> None:
    """Parts of two draws, one part twice, or parts that overlap: the sum of a step would move by several times C."""
    model, x = mlp(), torch.randn(4, 5)
    ways: list[Callable[[Batch, list[Batch]], Batch]] = [
        lambda batch, parts: replace(parts[1], draw=Draw()),
        lambda batch, parts: parts[1],
        lambda batch, parts: parts[1].to("cpu"),
        lambda batch, parts: parts[1].views(2),
        lambda batch, parts: list(batch.split(3))[1],
        lambda batch, parts: list(batch.split(4))[1],
    ]
    with Engine(model, plan_of(model)) as engine:
        for again in ways:
            batch = Batch(x)
            parts = list(batch.split(3))
            for part in parts[:2]:
                engine.backward(losses_of(model, part.x, None), part)
            with raises_code("engine.part-counted-twice"):
                part = again(batch, parts)
                engine.backward(losses_of(model, part.x, None), part)
            with raises_code("engine.parts-out-of-order"):  # the step was given up
                engine.backward(losses_of(model, parts[2].x, None), parts[2])
        assert engine.budget.taken == len(ways) and all(p.grad is None for p in model.parameters())


def test_parts_are_divided_and_no_part_is_divided_again() -> None:
    """A shard keeps the places of its contributions; a shard of a shard would be taken for a new draw."""
    model, x = mlp(), torch.randn(4, 5)
    with Engine(model, plan_of(model)) as engine:
        for part in Batch(x).split(2):
            mine = part.shard(0, 1)
            engine.backward(losses_of(model, mine.x, None), mine)
        assert engine.budget.taken == 1
    with raises_code("engine.batch-divided-already"):
        Batch(x).shard(0, 2).shard(0, 2)


def test_a_batch_is_charged_once() -> None:
    model, x = mlp(), torch.randn(4, 5)
    batch = Batch(x)
    with Engine(model, plan_of(model)) as engine:
        with raises_code("engine.losses-reduced"):
            engine.backward(losses_of(model, x, None).sum(), batch)
        for part in batch.split(2):  # a refused call has charged nothing
            engine.backward(losses_of(model, part.x, None), part)
        for again in (batch, next(batch.split(2)), replace(batch, x=x + 1), batch.shard(0, 1)):
            with raises_code("engine.batch-used-again"):
                engine.backward(losses_of(model, again.x, None), again)
        assert engine.budget.taken == 1
        engine.backward(losses_of(model, x, None), Batch(x))
    with Engine(model, plan_of(model, rate=1.0)) as engine:  # everybody is in every draw
        for _ in range(2):
            model.zero_grad()
            engine.backward(losses_of(model, x, None), batch)


# ----------------------------------------------------------------------------------- nothing, and noise


EMPTY = Batch(torch.zeros(0, 5))


def test_an_empty_batch_is_a_step_of_noise() -> None:
    model = mlp()
    plan = plan_of(model, [[0.0, 1.0, 1.0], [inf, inf, 0.0]], [0.0, 2.0, 3.0], public=(1,), batch=8.0)
    for losses in (None, torch.zeros(0)):
        model.zero_grad()
        with Engine(model, plan, noise=SeededNoise(1)) as engine:
            engine.backward(losses, EMPTY)
            assert engine.budget.taken == 1
        assert model[0].weight.grad.norm() == 0  # public only: no noise is owed
        std = float(model[2].weight.grad.std()) * 8.0
        assert 1.3 < std < 2.7
        assert 2.0 < float(model[4].weight.grad.std()) * 8.0 < 4.0
        assert all(p.grad is not None for p in model.parameters())


def test_an_empty_batch_gives_zero_sums() -> None:
    model = mlp()
    with Engine(model, plan_of(model)) as engine:
        sums = engine.clipped_sums(None, EMPTY)
        assert set(sums) == {name for name, _ in model.named_parameters()}
        assert all(v.norm() == 0 for v in sums.values())
        with raises_code("engine.losses-for-empty-batch"):
            engine.backward(torch.randn(3), EMPTY)
        assert engine.budget.taken == 0


def test_a_batch_of_padding_only_is_noise() -> None:
    model, x = mlp(), torch.randn(3, 5)
    sums = sums_of(model, plan_of(model), x, weight=torch.zeros(3))
    assert all(v.norm() == 0 for v in sums.values())


def test_one_example() -> None:
    agree(mlp(), torch.randn(1, 5), must_clip=False, spread=(0.5,))
    agree(seq(), torch.randint(0, 11, (1, 4)), must_clip=False, spread=(0.5,))


@pytest.mark.parametrize("hardened", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_backward_is_route_with_the_same_noise(form: str, hardened: bool) -> None:
    model, x = mlp(), torch.randn(6, 5)
    plan = plan_of(model, 0.05, 0.5, clipping=form, batch=7.0)
    grads = unit_grads(example_grads(model, x), Batch(x))
    with Engine(model, plan, noise=SeededNoise(5, hardened=hardened)) as engine:
        assert not engine.private
        for step in range(2):
            model.zero_grad()
            engine.backward(losses_of(model, x, None), Batch(x))
            want = route(
                grads, torch.zeros(6, dtype=torch.long), plan, noise=SeededNoise(5, hardened=hardened), step=step
            )
            for name, p in model.named_parameters():
                torch.testing.assert_close(p.grad, want[name].float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_noise_is_added_once_with_its_own_spread_and_divided_by_b(form: str) -> None:
    model = nn.Sequential(nn.Linear(60, 60), nn.Linear(60, 60))
    plan = plan_of(model, 1.0, [3.0, 0.5], clipping=form, batch=10.0)
    x = torch.randn(4, 60)
    with Engine(model, plan) as engine:
        assert engine.private
        sums = engine.clipped_sums(losses_of(model, x, None), Batch(x))
        engine.backward(losses_of(model, x, None), Batch(x))
    for i, s in ((0, 3.0), (1, 0.5)):
        noise = model[i].weight.grad * 10.0 - sums[f"{i}.weight"]
        assert abs(float(noise.std()) / s - 1) < 0.06
        assert abs(float(noise.mean())) < s * 5 / 60


# ----------------------------------------------------------------------------------- what is not finite


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [NAN, inf, -inf, 1e38])
def test_a_contribution_that_is_not_finite_counts_as_nothing(bad: float, form: str) -> None:
    """The others are as if it were not there, and training goes on."""
    model = nn.Sequential(nn.Conv1d(3, 4, 3), nn.Tanh(), nn.LayerNorm(5), nn.Flatten(), nn.Linear(20, 3))
    x = torch.randn(6, 3, 7)
    x[2] = bad
    others = torch.tensor([0, 1, 3, 4, 5])
    plan = plan_of(model, 0.1, clipping=form)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Engine(model, plan) as engine:
        sums = engine.clipped_sums(losses_of(model, x, None), Batch(x))
        want = engine.clipped_sums(losses_of(model, x[others], None), Batch(x[others]))
        if bad != 1e38:
            tensors_close(sums, want, 1e-6, 1e-8)
        assert all(torch.isfinite(v).all() for v in sums.values())
        for _ in range(3):
            engine.backward(losses_of(model, x, None), Batch(x))
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("form", FORMS)
def test_one_bad_example_spoils_its_contribution_only(form: str) -> None:
    model = mlp()
    x = torch.randn(6, 5)
    unit = torch.tensor([0, 0, 1, 1, 2, 2])
    plan = plan_of(model, 0.05, clipping=form)
    clean = x[[0, 1, 4, 5]]
    x[3, 0] = NAN
    sums, want = sums_of(model, plan, x, unit=unit), sums_of(model, plan, clean, unit=torch.tensor([0, 0, 1, 1]))
    tensors_close(sums, want, 1e-6, 1e-8)


class Spoils(torch.autograd.Function):
    """Identity whose gradient is NaN for examples that are marked."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, marked: Tensor) -> Tensor:
        ctx.save_for_backward(marked)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return torch.where(ctx.saved_tensors[0].unsqueeze(1), torch.full_like(g, NAN), g), None


@pytest.mark.parametrize("constant_time", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_not_finite_below_its_band_still_counts_in_its_band(form: str, constant_time: bool) -> None:
    """Whether the lower layers are looked at depends on who else was sampled: it must not change the answer."""

    model = Net(
        lambda m, x, marked: m.high(Spoils.apply(m.low(x).tanh(), marked)), low=nn.Linear(5, 6), high=nn.Linear(6, 3)
    )
    plan = plan_of(model, [[0.3, 0.1], [0.0, 0.1]], clipping=form)
    x = torch.randn(4, 5)
    marked = torch.tensor([True, False, False, False])

    def sums(rows: list[int], cls: list[int]) -> dict[str, Tensor]:
        data = (x[rows], marked[rows])
        return engine.clipped_sums(losses_of(model, data, None), Batch(data, cls=torch.tensor(cls)))

    with Engine(model, plan, constant_time=constant_time) as engine:
        alone, together, without = sums([0], [1]), sums([0, 1, 2], [1, 0, 0]), sums([1, 2], [0, 0])
    assert alone["high.weight"].norm() > 0
    tensors_close(together, {name: without[name] + alone[name] for name in together})


# ----------------------------------------------------------------------------------- the batch itself


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"x": torch.zeros(3, 2), "y": torch.zeros(4)}, "engine.first-axes-differ"),
        ({"x": torch.tensor(1.0)}, "engine.first-axes-differ"),
        ({"x": torch.zeros(3), "unit": torch.zeros(2, dtype=torch.long)}, "engine.indices-wrong-shape"),
        ({"x": torch.zeros(3), "unit": torch.zeros(3)}, "engine.indices-wrong-shape"),
        ({"x": torch.zeros(3), "unit": torch.tensor([0, -1, 1])}, "engine.index-negative"),
        ({"x": torch.zeros(3), "cls": torch.tensor([0, 1])}, "engine.cls-wrong-length"),
        (
            {"x": torch.zeros(4), "unit": torch.tensor([0, 0, 1, 1]), "cls": torch.tensor([0, 0, 1, 1])},
            "engine.cls-wrong-length",
        ),
        ({"x": torch.zeros(3), "unit": torch.tensor([7, 900, 7])}, "engine.unit-has-gaps"),
        ({"x": torch.zeros(2), "cls": ["a", "b"]}, "engine.indices-not-integers"),
        ({"x": [1.0, 2.0]}, "engine.batch-without-tensors"),
        ({"x": torch.zeros(2), "cls": torch.tensor([0, -1])}, "engine.index-negative"),
        ({"x": torch.zeros(2), "weight": torch.tensor([1.0, -1.0])}, "engine.weight-out-of-range"),
        ({"x": torch.zeros(2), "weight": torch.tensor([1.0, NAN])}, "engine.weight-out-of-range"),
        ({"x": torch.zeros(2), "weight": torch.ones(3)}, "engine.weight-out-of-range"),
        ({"x": torch.zeros(2), "scale": torch.tensor([1.0, 1.1])}, "engine.limit-out-of-range"),
        ({"x": torch.zeros(2), "ceiling": torch.tensor([1.0, 0.0])}, "engine.limit-out-of-range"),
        ({"x": torch.zeros(2), "ceiling": torch.tensor([1.0])}, "engine.limit-out-of-range"),
    ],
)
def test_a_batch_that_makes_no_sense_is_refused(fields: dict[str, Any], message: str) -> None:
    with raises_code(message):
        Batch(**fields)


def test_trees_of_tensors() -> None:
    batch = Batch({"a": torch.arange(4), "b": (torch.arange(4.0), "text")}, [torch.arange(4)])
    assert batch.examples == len(batch) == 4
    second = list(batch.split(2))[1]
    assert second.x["a"].tolist() == [2, 3]
    assert second.x["b"][1] == "text"


def test_route_by_hand() -> None:
    """The pure function against numbers that can be checked on paper."""
    model = nn.Linear(2, 1, bias=False)
    grads = {"weight": torch.tensor([[[3.0, 4.0]], [[0.3, 0.4]], [[NAN, 0.0]], [[0.0, 0.0]]])}
    plan = plan_of(model, [[1.0], [2.5]], 1.0)
    out = route(grads, torch.tensor([0, 0, 0, 0]), plan, noise=None)["weight"]
    torch.testing.assert_close(out, torch.tensor([[0.9, 1.2]], dtype=torch.float64))
    out = route(grads, torch.tensor([1, 0, 0, 0]), plan, noise=None)["weight"]
    torch.testing.assert_close(out, torch.tensor([[1.8, 2.4]], dtype=torch.float64))
    with raises_code("engine.route-wrong-tensors"):
        route({"other": torch.zeros(1, 2)}, torch.tensor([0]), plan, noise=None)
    with raises_code("engine.gradients-wrong-length"):
        route(grads, torch.tensor([0, 0, 0]), plan, noise=None)


def test_hand_clip_is_the_documented_formula() -> None:
    """The oracle's own clip, on numbers that can be checked on paper: joint, two layers."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    plan = plan_of(model, [3.0, 4.0], [1.0, 2.0], clipping="joint")  # radius √(9 + 4)
    grads = {"0.weight": torch.full((1, 1, 1), 6.0).double(), "1.weight": torch.full((1, 1, 1), 8.0).double()}
    ref = clip_by_hand(grads, [0], plan)
    assert float(ref.sums["0.weight"]) == pytest.approx(3.0)
    assert float(ref.sums["1.weight"]) == pytest.approx(4.0)
    difference({k: v.float() for k, v in ref.sums.items()}, ref)


def test_route_of_nobody() -> None:
    model = nn.Sequential(nn.Linear(5, 2), nn.PReLU())
    grads = {name: torch.zeros(0, *p.shape) for name, p in model.named_parameters()}
    for form in FORMS:
        plan = plan_of(model, 1.0, 2.0, clipping=form)
        none = torch.zeros(0, dtype=torch.long)
        assert all(v.norm() == 0 for v in route(grads, none, plan, noise=None).values())
        assert all(v.norm() > 0 for v in route(grads, none, plan, noise=SeededNoise(0)).values())
