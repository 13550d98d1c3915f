"""Where the noise enters: the forms that share one law have it, and raw noise is what its contributions bring."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle import plan_of
from refusals import raises_code
from scipy.stats import chi2, ks_2samp, kstest
from torch import Tensor, nn

from lamina import Batch, Engine, StepPlan, route
from lamina.engine.distributed import ALONE
from lamina.engine.noise import noise_mechanism
from lamina.engine.noise.mechanism import COUNTS
from lamina.engine.noise.source import NoiseSource, SecureNoise, SeededNoise, rounding_grid
from lamina.plan.rules import FollowQuantile, Injection
from lamina.plan.selection import Slice

RISK = 1e-6
STEP = Injection()
BINS = Injection(form="per_microbatch", parts=5)
SLOTS = Injection(form="per_sample", parts=7)
RAW = Injection(form="per_sample_raw")
SHARED = [BINS, SLOTS, Injection(form="per_microbatch", parts=1), Injection(form="per_sample", parts=64)]
ALL = [STEP, BINS, SLOTS, RAW]


def named(injection: Injection) -> str:
    return str(injection)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 20))


def planned(injection: Injection, **changes: Any) -> StepPlan:
    """A class everywhere, one at the top only, a public one; S = 0.5 and 2."""
    clip = [[0.3, 0.4], [0.0, 0.2], [math.inf, math.inf]]
    made = plan_of(net(), clip, [0.5, 2.0], public=[2])
    return replace(made, injection=injection, **changes)


def noise_of(made: StepPlan, classes: Sequence[Sequence[int]], source: NoiseSource, step: int = 0) -> dict[str, Tensor]:
    """The noise alone: the parts of a batch have contributions of these classes, whose gradients are all 0."""
    tensors = {name: p.detach() for name, p in net().named_parameters()}
    opened = noise_mechanism(made, tensors, ALONE).open(made, source, step)
    for part in classes:
        opened.saw(torch.tensor(part, dtype=torch.long))
    released = opened.release({name: torch.zeros_like(t) for name, t in tensors.items()})
    return {name: t.double() * made.batch for name, t in released.items()}


def assert_std(values: Tensor, std: float, risk: float = RISK) -> None:
    """Σz²/std² is chi-square with as many degrees of freedom as there are draws."""
    n, total = values.numel(), float(values.square().sum()) / std**2
    assert chi2.ppf(risk / 2, n) <= total <= chi2.isf(risk / 2, n), (math.sqrt(total / n), n)


def many(made: StepPlan, classes: Sequence[Sequence[int]], hardened: bool, steps: int = 12) -> dict[str, Tensor]:
    source = SeededNoise(11, hardened=hardened)
    every = [noise_of(made, classes, source, step) for step in range(steps)]
    return {name: torch.stack([one[name] for one in every]) for name in every[0]}


# ---------------------------------------------------------------------------------------- one law

BATCHES: list[list[list[int]]] = [[], [[]], [[0, 1, 2]], [[0, 0, 0, 0, 0], [1, 2], [0, 0, 0, 0]]]


@pytest.mark.parametrize("hardened", [False, True])
@pytest.mark.parametrize("classes", BATCHES, ids=len)
@pytest.mark.parametrize("injection", SHARED, ids=named)
def test_parts_add_up_to_one_noise_whoever_was_sampled(
    injection: Injection, classes: list[list[int]], hardened: bool
) -> None:
    made = planned(injection)
    found = many(made, classes, hardened)
    for i, layer in enumerate(made.layers):
        for name in layer.parameters:
            assert_std(found[name], made.noise[i])


@pytest.mark.parametrize("hardened", [False, True])
@pytest.mark.parametrize("injection", [BINS, SLOTS], ids=named)
def test_how_many_are_there_does_not_move_the_noise_at_all(injection: Injection, hardened: bool) -> None:
    """Empty, full, overfull: the same draws, in another order of addition."""
    made, source = planned(injection), SeededNoise(3, hardened=hardened)
    empty = noise_of(made, [], source)
    for classes in BATCHES[1:]:
        other = noise_of(made, classes, source)
        for name, values in empty.items():
            assert torch.allclose(values, other[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("hardened", [False, True])
def test_the_forms_cannot_be_told_apart(hardened: bool) -> None:
    """Kolmogorov and Smirnov, against the normal law and against each other under other seeds."""
    samples = {}
    for i, injection in enumerate([STEP, BINS, SLOTS]):
        made = planned(injection)
        source = SeededNoise(100 + i, hardened=hardened)
        draws = [noise_of(made, [[0, 1]], source, step) for step in range(10)]
        samples[i] = torch.cat([d["0.weight"].flatten() / 0.5 for d in draws]).numpy()
        assert kstest(samples[i], "norm").pvalue > 1e-3
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert ks_2samp(samples[i], samples[j]).pvalue > 1e-3


def test_parts_steps_and_tensors_are_independent() -> None:
    """Draws of two parts, of two steps, of two tensors: no correlation beyond chance."""
    source, size = SeededNoise(5, hardened=False), 40_000
    columns = []
    for step, part, tensor in ((0, 0, 0), (0, 1, 0), (0, 2, 0), (1, 1, 0), (0, 1, 1)):
        out = torch.zeros(size)
        source.add_many_([out], [1.0], step=step, tensors=[tensor], part=part)
        columns.append(out)
    found = torch.corrcoef(torch.stack(columns)) - torch.eye(len(columns))
    assert float(found.abs().max()) < 5 / math.sqrt(size)


# ---------------------------------------------------------------------------------------- raw


def test_raw_noise_has_the_batch_size_times_the_variance() -> None:
    """m contributions of their own noise: m times the variance of one noise per microbatch."""
    size = 9
    once, raw = planned(Injection(form="per_microbatch", parts=1)), planned(RAW)
    assert_std(many(once, [[0] * size], False)["0.weight"], 0.5)
    assert_std(many(raw, [[0] * size], False)["0.weight"], 0.5 * math.sqrt(size))


@pytest.mark.parametrize("hardened", [False, True])
def test_raw_noise_is_where_the_classes_of_the_batch_reach(hardened: bool) -> None:
    """Three everywhere, two at the top only, four public ones that owe and bring nothing."""
    found = many(planned(RAW), [[0, 1, 2, 2], [0, 2, 0, 1, 2]], hardened)
    for name in ("0.weight", "0.bias"):
        assert_std(found[name], 0.5 * math.sqrt(3))
    for name in ("2.weight", "2.bias"):
        assert_std(found[name], 2.0 * math.sqrt(5))
    only_top = many(planned(RAW), [[1, 1]], hardened, steps=2)
    assert not only_top["0.weight"].any() and bool(only_top["2.weight"].any())


@pytest.mark.parametrize("classes", [[], [[]], [[2, 2, 2]]], ids=["none", "empty", "public"])
def test_nobody_brings_no_raw_noise(classes: list[list[int]]) -> None:
    assert not any(bool(t.any()) for t in noise_of(planned(RAW), classes, SeededNoise(1)).values())


@pytest.mark.parametrize("hardened", [False, True])
def test_raw_noise_keeps_to_the_slice_of_its_class(hardened: bool) -> None:
    places = Slice(cls="c1", tensor="2.weight", axis=0, length=20, ranges=((2, 5), (10, 11)))
    nothing = Slice(cls="c1", tensor="2.bias", axis=0, length=20, ranges=())
    made = planned(RAW, slices=(places, nothing))
    found = many(made, [[1, 1, 1]], hardened, steps=40)
    assert not found["2.bias"].any() and not found["0.weight"].any()
    shut = [i for i in range(20) if i not in (2, 3, 4, 10)]
    assert not found["2.weight"][:, shut].any()
    assert_std(found["2.weight"][:, [2, 3, 4, 10]], 2.0 * math.sqrt(3))
    beside = many(made, [[1, 0]], hardened, steps=40)
    assert_std(beside["2.weight"][:, [2, 3, 4, 10]], 2.0 * math.sqrt(2))
    assert_std(beside["2.weight"][:, shut], 2.0)
    assert_std(beside["2.bias"], 2.0)


# ---------------------------------------------------------------------------------------- in a step


def batch_of(size: int = 11, seed: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    cls = torch.randint(0, 3, (size,), generator=generator)
    return Batch(torch.randn(size, 30, generator=generator), cls=cls)


def losses_of(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x).square().mean(1)
    return out


def taken(made: StepPlan, batch: Batch, source: NoiseSource, parts: int = 1) -> dict[str, Tensor]:
    """B times what `.grad` is after one step."""
    model = net()
    with Engine(model, made, noise=source) as engine:
        for part in batch.split(parts):
            engine.backward(losses_of(model, part.x) if len(part) else None, part)
        return {n: p.grad.double() * made.batch for n, p in model.named_parameters() if p.grad is not None}


def clipped(made: StepPlan, batch: Batch) -> dict[str, Tensor]:
    model = net()
    with Engine(model, made) as engine:
        return {n: t.double() for n, t in engine.clipped_sums(losses_of(model, batch.x), batch).items()}


@pytest.mark.parametrize("hardened", [False, True])
@pytest.mark.parametrize("injection", ALL, ids=named)
def test_how_a_batch_is_cut_changes_nothing_but_rounding(injection: Injection, hardened: bool) -> None:
    made, batch = planned(injection), batch_of()
    whole = taken(made, batch, SeededNoise(4, hardened=hardened))
    for parts in (2, 3, 7, 11):
        cut = taken(made, batch, SeededNoise(4, hardened=hardened), parts)
        for i, layer in enumerate(made.layers):
            near = rounding_grid(made.noise[i]) * 1.001 if hardened else 1e-5
            for name in layer.parameters:
                assert torch.allclose(whole[name], cut[name], rtol=0, atol=near)


@pytest.mark.parametrize("injection", ALL, ids=named)
def test_a_step_is_the_clipped_sum_and_its_noise(injection: Injection) -> None:
    """Two batches with the same members and other contents differ by their clipped sums, exactly."""
    made, batch = planned(injection), batch_of()
    other = replace(batch, x=batch.x * 3 + 1)
    noisy = [taken(made, b, SeededNoise(4, hardened=False)) for b in (batch, other)]
    plain = [clipped(made, b) for b in (batch, other)]
    for name in plain[0]:
        moved = noisy[0][name] - noisy[1][name]
        assert torch.allclose(moved, plain[0][name] - plain[1][name], atol=2e-5)


def test_whether_a_contribution_is_empty_does_not_show_in_raw_noise() -> None:
    made, batch = planned(RAW), batch_of(5)
    weight = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0])
    silent = replace(batch, weight=weight)
    noise = noise_of(made, [batch.cls.tolist()], SeededNoise(4, hardened=False))  # type: ignore[union-attr]
    found, rest = taken(made, silent, SeededNoise(4, hardened=False)), clipped(made, silent)
    for name in rest:
        assert torch.allclose(found[name] - noise[name], rest[name], atol=2e-5)


@pytest.mark.parametrize("injection", ALL, ids=named)
def test_an_empty_batch(injection: Injection) -> None:
    made = planned(injection)
    empty = Batch(torch.zeros(0, 30), cls=torch.zeros(0, dtype=torch.long))
    found = taken(made, empty, SeededNoise(4))
    alone = noise_of(made, [], SeededNoise(4))
    assert set(found) == set(alone)
    for name, values in alone.items():
        assert torch.allclose(found[name], values, atol=1e-6)
        assert bool(values.any()) is not made.injection.raw


@pytest.mark.parametrize("injection", ALL, ids=named)
def test_the_pure_function_gives_the_same(injection: Injection) -> None:
    made, model, batch = planned(injection), net(), batch_of(6)
    grads = {n: torch.zeros(6, *p.shape) for n, p in model.named_parameters()}
    for i in range(6):
        one = torch.autograd.grad(losses_of(model, batch.x[i : i + 1]).sum(), list(model.parameters()))
        for (name, _), value in zip(model.named_parameters(), one, strict=True):
            grads[name][i] = value
    found = route(grads, batch.cls, made, noise=SeededNoise(4, hardened=False))  # type: ignore[arg-type]
    stepped = taken(made, batch, SeededNoise(4, hardened=False))
    for name, values in stepped.items():
        assert torch.allclose(found[name].double() * made.batch, values, atol=2e-5)


@pytest.mark.parametrize("injection", [BINS, SLOTS, RAW], ids=named)
def test_hardened_parts_are_rounded_once_to_the_grid_of_the_whole(injection: Injection) -> None:
    """Exactly round(sum + noise), the noise being the float64 sum of its parts."""
    made, classes = planned(injection), [0, 1, 0]
    found = noise_of(made, [classes], SeededNoise(8, hardened=True))
    plain = SeededNoise(8, hardened=False)
    each = math.sqrt(injection.parts)
    for index, (name, p) in enumerate(net().named_parameters()):
        s = made.noise[0 if name.startswith("0") else 1]
        total = torch.zeros(p.shape, dtype=torch.float64)
        members = [k for k in classes if made.clip[k][0 if name.startswith("0") else 1] > 0]
        count = range(injection.parts) if not injection.raw else [i for i, k in enumerate(classes) if k in members]
        for part in count:
            plain.add_many_([total], [s / each], step=0, tensors=[index], part=part)
        spacing = rounding_grid(s)
        assert torch.equal(torch.round(found[name] / spacing) * spacing, found[name])
        assert float((found[name] - total).abs().max()) <= spacing / 2 * (1 + 1e-9)


@pytest.mark.parametrize("hardened", [False, True])
@pytest.mark.parametrize("injection", ALL, ids=named)
def test_secure_noise_gives_every_part_once(injection: Injection, hardened: bool) -> None:
    made, source = planned(injection), SecureNoise(hardened=hardened)
    for step in range(3):
        noise_of(made, [[0, 1], [0]], source, step)
    with raises_code("noise.drawn-twice"):
        noise_of(made, [[0, 1], [0]], source, 2)


def test_parts_of_one_place_are_told_apart_by_a_secure_source() -> None:
    source = SecureNoise()
    for part in (0, 1, 2):
        source.add_many_([torch.zeros(4)], [1.0], step=0, tensors=[3], part=part)
    with raises_code("noise.drawn-twice"):
        source.add_many_([torch.zeros(4)], [1.0], step=0, tensors=[3], part=1)
    with raises_code("noise.part-out-of-range"):
        source.add_many_([torch.zeros(4)], [1.0], step=0, tensors=[3], part=-1)
    with raises_code("noise.hardened-not-float64"):
        SecureNoise(hardened=True).add_many_([torch.zeros(4)], [1.0], step=0, rounded=False)


@pytest.mark.parametrize("hardened", [False, True])
@pytest.mark.parametrize("injection", [STEP, BINS, SLOTS], ids=named)
def test_counts_are_noised_once_in_every_form(injection: Injection, hardened: bool) -> None:
    rule = FollowQuantile(noise=3.0)
    made = planned(injection, rules=(rule,))
    tensors = {name: p.detach() for name, p in net().named_parameters()}
    found = []
    for step in range(150):
        opened = noise_mechanism(made, tensors, ALONE).open(made, SeededNoise(9, hardened=hardened), step)
        opened.saw(torch.tensor([0, 1]))
        sums = {name: torch.zeros_like(t) for name, t in tensors.items()}
        found.append(opened.release({**sums, COUNTS: torch.zeros(2, dtype=torch.float64)})[COUNTS])
    assert_std(torch.stack(found), 3.0)
