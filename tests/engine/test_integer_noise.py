"""Noise on integers: the samplers against their laws, the grid, the step against the reference, refusals, the audit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import raises_code
from scipy import special, stats
from torch import Tensor, nn
from torch.nn import functional as F

from lamina import Batch, Engine, LayerStack, Policy, SecureNoise, SeededNoise, StepPlan, make_plan, route
from lamina.account.filters import GaussianFilter, RenyiFilter
from lamina.allocate.make_plan import explained_plan
from lamina.allocate.noise_kind import NoiseHardware
from lamina.audit.step_audit import Verdict, audit_step
from lamina.audit.target import AuditTarget
from lamina.engine import native
from lamina.engine.execute.clip import ClipWeights, clip_weights, safe_bounds
from lamina.engine.execute.grads import DenseGrads
from lamina.engine.noise.grid import LEAST_BITS, MOST_BITS, Grid, GridGrads, layer_grids
from lamina.engine.noise.integer_draws import (
    WordSource,
    _kept_exactly,
    _some_poisson,
    bernoulli_exp,
    discrete_gaussian,
    discrete_laplace,
    discrete_skellam,
)  # fmt: skip
from lamina.errors import PlanError
from lamina.plan.rules import Injection, InjectionForm, NoiseKind

POLICY = """
[corpus]
origin = "tests"
delta = 1e-5
accountant = "rdp-integer"
[class.clinical]
population = 300
epsilon = 4.0
[class.sensitive]
population = 120
epsilon = 2.0
profile = { top = 0.5 }
[noise]
kind = "discrete_gaussian"
"""


def words(seed: int = 1) -> WordSource:
    return WordSource(seed.to_bytes(16, "big"), 0)


# ----------------------------------------------------------------------------------------------- samplers


def chi_square(draws: np.ndarray, log_mass: np.ndarray, reach: int) -> float:
    """p-value of the counts of -reach … reach against the law, everything beyond in one cell."""
    mass = np.exp(log_mass - log_mass.max())
    mass /= mass.sum()
    middle = mass.size // 2
    inside = mass[middle - reach : middle + reach + 1]
    seen = np.array([np.count_nonzero(draws == x) for x in range(-reach, reach + 1)])
    expected = np.append(inside, 1 - inside.sum()) * draws.size
    return float(stats.chisquare(np.append(seen, draws.size - seen.sum()), expected).pvalue)


LAWS = {
    "gaussian": (discrete_gaussian, lambda x, s: -(x**2) / (2 * s * s), lambda s: s * s),
    "skellam": (discrete_skellam, lambda x, s: np.log(special.ive(x, s * s)), lambda s: s * s),
    "laplace": (discrete_laplace, lambda x, s: -np.abs(x) / s, lambda s: 2 * s * s),
}


@pytest.mark.parametrize("count", [200_000, pytest.param(10_000_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("bits", [0, 1, 3])
@pytest.mark.parametrize("law", ["gaussian", "laplace"])
def test_draws_have_the_discrete_law(law: str, bits: int, count: int) -> None:
    draw, log_mass, _ = LAWS[law]
    x = np.arange(-3000, 3001).astype(np.float64)
    found = draw(words(bits + 1), count, bits)
    assert chi_square(found, log_mass(x, 2.0**bits), 3 * 2**bits) > 1e-3
    assert found.dtype == np.int64


@pytest.mark.parametrize("count", [300_000, pytest.param(10_000_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("bits", [LEAST_BITS, MOST_BITS])
@pytest.mark.parametrize("law", LAWS)
def test_moments_and_shape_at_the_scales_in_use(law: str, bits: int, count: int) -> None:
    draw, _, variance = LAWS[law]
    z = draw(words(7), count, bits) / 2.0**bits
    root = math.sqrt(variance(1.0))
    kurtosis = 6 if law == "laplace" else 3
    assert abs(z.mean()) < 4 * root / math.sqrt(count)
    assert abs((z**2).mean() / root**2 - 1) < 4 * math.sqrt((kurtosis - 1) / count)
    assert abs((z**3).mean()) < 4 * math.sqrt((720 if law == "laplace" else 15) / count)
    within = (np.random.default_rng(0).random(count) - 0.5) / 2.0**bits
    assert stats.kstest(z + within, stats.laplace.cdf if law == "laplace" else stats.norm.cdf).pvalue > 1e-3


@pytest.mark.parametrize(("numerator", "bits"), [(0, 5), (32, 5), (7, 5), (1, 0), (1 << 50, 51), (3, 2)])
def test_bernoulli_of_an_exponential(numerator: int, bits: int) -> None:
    n = 200_000
    held = int(bernoulli_exp(words(3), np.full(n, numerator, dtype=np.int64), bits).sum())
    assert stats.binomtest(held, n, math.exp(-numerator / 2**bits)).pvalue > 1e-3


@pytest.mark.parametrize("bits", [LEAST_BITS, MOST_BITS])
def test_poisson_draws_are_kept_as_exact_arithmetic_says(bits: int) -> None:
    """float64 and 60 digits decide alike, and what is kept is below 1, against the logarithm of the gamma function."""
    mean, scale = 1 << (2 * bits - 1), 1 << bits
    with mpmath.workdps(60):
        for k in (0, 1, -1, scale // 2, -scale // 2, 3 * scale + 7, -4 * scale - 3, 5 * scale, -5 * scale):
            n = mpmath.mpf(mean + k)
            loss = mpmath.loggamma(n + 1) - mpmath.loggamma(mpmath.mpf(mean) + 1) - k * mpmath.log(mean)
            keep = mpmath.exp(mpmath.mpf(abs(k)) / scale - loss - mpmath.mpf("0.251"))
            assert keep < 1
            whole = int(mpmath.floor(keep * mpmath.mpf(2) ** 64))
            for word, kept in ((whole - 2**20, True), (whole + 2**20, False)):
                assert _kept_exactly(k, bits, word, 5) is kept
                source = words()
                source.take = lambda count, word=word: np.full(count, word, dtype=np.uint64)  # type: ignore[method-assign]
                with mock.patch("lamina.engine.noise.integer_draws._some_laplace", lambda *_, k=k: np.array([k])):
                    assert (_some_poisson(source, 1, bits).size == 1) is kept


@pytest.mark.parametrize("count", [200_000, pytest.param(10_000_000, marks=pytest.mark.slow)])
def test_skellam_draws_have_their_law(count: int) -> None:
    """At the smallest scale in use, in cells of a quarter of the standard deviation."""
    draws, scale = discrete_skellam(words(5), count, LEAST_BITS), 1 << LEAST_BITS
    edges = np.arange(-5 * scale, 5 * scale + 1, scale // 4)
    x = np.arange(edges[0] - 1, edges[-1] + 1)
    mass = special.ive(np.abs(x).astype(np.float64), float(scale) ** 2)
    expected = np.array([mass[(x > a) & (x <= b)].sum() for a, b in itertools.pairwise(edges)])
    seen = np.histogram(draws, bins=edges + 0.5)[0]
    wide = expected * count > 5  # everything else, and what lies beyond the edges, is one cell
    cells = np.append(expected[wide], 1 - expected[wide].sum()) * count
    assert stats.chisquare(np.append(seen[wide], count - seen[wide].sum()), cells).pvalue > 1e-3


def test_one_in_k_is_exact_at_the_end_of_the_words() -> None:
    """A word above the largest multiple of k is drawn again."""
    source = words()
    given_words = [np.array([2**64 - 1, 3], dtype=np.uint64), np.array([9], dtype=np.uint64)]
    source.take = lambda count: given_words.pop(0)  # type: ignore[method-assign]
    assert source.one_in(2, 3).tolist() == [True, True] and not given_words


def test_words_come_in_the_order_of_the_stream() -> None:
    whole = words().take(200_000)
    other = words()
    assert np.array_equal(whole, np.concatenate([other.take(n) for n in (1, 65_535, 70_000, 64_464)]))


def test_integer_noise_is_replayed_and_never_drawn_twice() -> None:
    def noise(source: SecureNoise | SeededNoise, step: int = 0) -> list[Tensor]:
        totals = [torch.zeros(50, dtype=torch.int64), torch.zeros(3, 7, dtype=torch.int64), torch.zeros(4).long()]
        source.add_integers_(totals, [12, 14, 0], step=step)
        return totals

    first, again, later = noise(SeededNoise(1)), noise(SeededNoise(1)), noise(SeededNoise(1), 1)
    assert all(map(torch.equal, first, again)) and not torch.equal(first[0], later[0])
    assert not first[2].any() and first[1].unique().numel() > 15
    source = SecureNoise()
    noise(source)
    with raises_code("noise.drawn-twice"):
        noise(source)
    assert not torch.equal(noise(SecureNoise())[0], noise(SecureNoise())[0])


# --------------------------------------------------------------------------------------------------- grid


@pytest.mark.parametrize("taxicab", [False, True], ids=["L2", "L1"])
@settings(max_examples=40, deadline=None)
@given(data=st.data(), rows=st.integers(1, 5), width=st.integers(1, 40), bound=st.floats(1e-3, 1e3))
def test_no_contribution_is_longer_than_its_threshold_in_exact_arithmetic(
    taxicab: bool, data: st.DataObject, rows: int, width: int, bound: float
) -> None:
    numbers = st.floats(-1e6, 1e6, width=32) | st.sampled_from([0.0, math.nan, math.inf, 1e30, -1e-30])
    values = data.draw(st.lists(numbers, min_size=rows * width, max_size=rows * width))
    grads, unit = torch.tensor(values).view(rows, width), data.draw(st.floats(1e-2, 1e2)) * bound / 2**14
    for row in range(rows):
        total = torch.zeros(width, dtype=torch.int64)
        limit = safe_bounds(torch.full((1,), bound, dtype=torch.float64))
        GridGrads(DenseGrads(grads[row : row + 1]), Grid(14, unit, taxicab)).clip_and_add(
            total, None, lambda norm_sq, low, high, limit=limit: clip_weights(norm_sq, limit)
        )
        length = sum(map(abs, total.tolist())) ** 2 if taxicab else sum(y * y for y in total.tolist())
        assert length * Fraction(unit) ** 2 <= Fraction(bound) ** 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kernel_and_torch_cut_to_the_same_integers(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    grads = torch.randn(7, 9001, generator=generator, dtype=dtype) * 1e3
    grads[2, 5], grads[3, 7] = math.nan, math.inf
    factor = torch.tensor([1.0, 0.3, 0.0, 0.0, 7.7, 1e-6, 1e8], dtype=torch.float64)
    found = []
    for on in (True, False):
        with native.switched(on):
            out = torch.zeros(9001, dtype=torch.int64)
            GridGrads(DenseGrads(grads), Grid(14, 1.0, False)).add_to(out, ClipWeights(factor, factor == 0))
            found.append(out)
    assert torch.equal(*found) and bool(found[0].any())


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))


def plan_of(model: nn.Module, kind: str = "discrete_gaussian", **options: object) -> StepPlan:
    policy = POLICY.replace('kind = "discrete_gaussian"', f'kind = "{kind}"')
    if kind == "laplace":
        policy = policy.replace("rdp-integer", "pld")
    return make_plan(LayerStack.from_model(model), Policy.parse(policy), batch=30, steps=10, **options)  # type: ignore[arg-type]


KINDS = pytest.mark.parametrize("kind", ["discrete_gaussian", "skellam", "laplace"])


def test_the_grid_is_fine_and_depends_on_the_plan_alone() -> None:
    for kind in ("discrete_gaussian", "skellam", "laplace"):
        plan = plan_of(net(), kind)
        for i, (layer, grid) in enumerate(zip(plan.layers, layer_grids(plan), strict=True)):
            least = min(row[i] for row in plan.clip if row[i] > 0)
            assert LEAST_BITS <= grid.bits <= MOST_BITS
            assert least / grid.unit >= 2**8 * (layer.size if kind == "laplace" else math.sqrt(layer.size))
            scale = math.sqrt(math.pi / 2) if kind == "laplace" else 1.0
            assert grid.unit * 2**grid.bits == pytest.approx(
                scale * plan.noise[i], rel=1e-15 if kind != "skellam" else 1e-6
            )
            assert grid.unit * 2**grid.bits >= scale * plan.noise[i]
        wide = replace(plan, noise=tuple(1e6 * s for s in plan.noise))
        assert {grid.bits for grid in layer_grids(wide)} == {MOST_BITS}


# --------------------------------------------------------------------------------------------------- step


def batch_of(count: int = 20) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(count, 6, generator=generator), torch.randint(0, 3, (count,), generator=generator)
    return x, y, torch.arange(count) % 2


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return 30 * F.cross_entropy(model(x), y, reduction="none")


def grads_of(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    rows = [
        torch.autograd.grad(losses(model, x[i : i + 1], y[i : i + 1]).sum(), list(model.parameters()))
        for i in range(len(x))
    ]
    return {
        name: torch.stack(each)
        for (name, _), each in zip(model.named_parameters(), zip(*rows, strict=True), strict=True)
    }


@KINDS
@pytest.mark.parametrize("clipping", ["box", "joint"])
def test_the_step_is_that_of_the_reference_in_whole_units(clipping: str, kind: str) -> None:
    model = net()
    plan, (x, y, cls) = plan_of(model, kind, clipping=clipping), batch_of()
    expected = route(grads_of(model, x, y), cls, plan, noise=SeededNoise(3))
    found = {}
    for parts in (1, 3):
        with Engine(model, plan, noise=SeededNoise(3)) as engine:
            for part in Batch(x, y, cls=cls).split(parts):
                engine.backward(losses(model, part.x, part.y), part)
            found[parts] = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
    for layer, grid in zip(plan.layers, layer_grids(plan), strict=True):
        unit = grid.unit / plan.batch
        for name in layer.parameters:
            assert torch.equal(found[1][name], found[3][name])  # whole numbers add up the same in any order
            whole = found[1][name].double() / unit
            assert torch.allclose(whole, whole.round(), rtol=2.0**-23, atol=1e-2)  # float32 holds 24 bits
            assert float((found[1][name].double() - expected[name].double()).abs().max()) <= unit * (
                3 + 2**-22 * float(whole.abs().max())
            )


@KINDS
def test_an_empty_batch_gets_noise_of_the_planned_size(kind: str) -> None:
    model = net()
    plan = plan_of(model, kind)
    squares: dict[int, float] = {}
    for seed in range(40):
        with Engine(model, plan, noise=SeededNoise(seed)) as engine:
            engine.backward(None, Batch(torch.zeros(0, 6), torch.zeros(0, dtype=torch.long), cls=torch.zeros(0).long()))
            for i, layer in enumerate(plan.layers):
                grads = [model.get_parameter(name).grad for name in layer.parameters]
                squares[i] = squares.get(i, 0.0) + sum(float(g.double().square().sum()) for g in grads if g is not None)
        model.zero_grad()
    for i, layer in enumerate(plan.layers):
        n = 40 * layer.size
        std = plan.noise[i] * plan.noise_kind.std_ratio
        assert squares[i] * plan.batch**2 / (n * std**2) == pytest.approx(1, abs=5 * math.sqrt(5 / n))


@KINDS
@pytest.mark.parametrize("clipping", ["box", "joint"])
def test_paired_steps_find_no_more_than_was_claimed(clipping: str, kind: str) -> None:
    model = net()
    x, y, cls = batch_of(6)
    plan = plan_of(model, kind, clipping=clipping)
    subject = AuditTarget(model=model, plan=plan, losses_of=lambda x, y: losses(model, x, y))
    checks = audit_step(subject, Batch(x, y, cls=cls), quick=True)
    assert [check.name for check in checks if check.verdict is not Verdict.PASSED] == []


# ----------------------------------------------------------------------------------------------- the plan


def test_plans_are_written_and_read_and_those_of_gaussian_noise_stay_as_they_were() -> None:
    plan = plan_of(net())
    assert plan.noise_kind is NoiseKind.DISCRETE_GAUSSIAN and "discrete_gaussian noise" in str(plan)
    assert StepPlan.from_cbor(plan.to_cbor()) == plan == StepPlan.from_json(plan.to_json())
    plain = replace(plan, noise_kind=NoiseKind.GAUSSIAN)
    assert "noise_kind" not in plain.to_json() and plain.digest() != plan.digest()
    assert plan.epsilon("clinical") == pytest.approx(4.0, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"accountant": "pld"}, "plan.noise-kind-accountant"),
        ({"accountant": "zcdp"}, "plan.noise-kind-accountant"),
        ({"injection": Injection(form=InjectionForm.MICROBATCH, parts=4)}, "plan.noise-kind-alone"),
        ({"injection": Injection(form=InjectionForm.RAW)}, "plan.noise-kind-alone"),
        ({"noise_kind": "cauchy"}, "plan.noise-kind-unknown"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, object], code: str) -> None:
    plan = plan_of(net())
    with raises_code(code):
        replace(plan, **changes)  # type: ignore[arg-type]


def test_rules_and_public_classes_are_refused() -> None:
    with raises_code("plan.noise-kind-alone"):
        plan_of(net(), allocate="quantile")
    public = Policy.parse(POLICY.replace("epsilon = 2.0\n", "public = true\n"))
    with raises_code("plan.noise-kind-public-class"):
        make_plan(LayerStack.from_model(net()), public, batch=30, steps=10)
    with raises_code("plan.noise-kind-alone"):
        plan_of(net(), "laplace", allocate="quantile")


FAST, SLOW = NoiseHardware(aes=True, entropy=True), NoiseHardware(aes=False, entropy=True)
AUTO = POLICY.replace('"discrete_gaussian"', '"auto"')


def chosen(policy: str, **options: Any) -> tuple[StepPlan, str]:
    stack = LayerStack.from_model(net())
    plan, allocation = explained_plan(stack, Policy.parse(policy), batch=30, steps=10, **options)
    return plan, " ".join(allocation.why)


@pytest.fixture
def hardware(monkeypatch: pytest.MonkeyPatch) -> Callable[[NoiseHardware], None]:
    return lambda found: monkeypatch.setattr(NoiseHardware, "here", classmethod(lambda cls: found))


def test_auto_looks_at_the_machine() -> None:
    found = NoiseHardware.here()
    assert found.entropy  # keys were drawn in this process
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists() and "flags" in (text := cpuinfo.read_text()):
        assert found.aes == (" aes " in text)


@pytest.mark.parametrize(
    ("policy", "machine", "kind", "reason"),
    [
        (AUTO, FAST, NoiseKind.DISCRETE_GAUSSIAN, "skellam: a number takes 28 random words"),
        (AUTO, SLOW, NoiseKind.GAUSSIAN, "discrete_gaussian: the processor has no AES instructions"),
        (AUTO.replace("rdp-integer", "pld"), FAST, NoiseKind.GAUSSIAN, "accountant pld does not price"),
        (AUTO.replace("epsilon = 2.0\n", "public = true\n"), FAST, NoiseKind.GAUSSIAN, "a public class"),
        (AUTO + 'injection = "per_microbatch"\nbins = 3\n', FAST, NoiseKind.GAUSSIAN, "once per step"),
        (AUTO + 'device = "integer"\n', SLOW, NoiseKind.DISCRETE_GAUSSIAN, "gaussian: the device has no floating-point"),
        (AUTO.replace("rdp-integer", "pld") + 'device = "integer"\n', FAST, NoiseKind.LAPLACE, "accountant pld does not"),
        (AUTO + 'device = "parties"\n', FAST, NoiseKind.SKELLAM, "discrete_gaussian: a sum of shares has another law"),
    ],
)  # fmt: skip
def test_auto_takes_the_first_kind_that_nothing_stands_against(
    policy: str, machine: NoiseHardware, kind: NoiseKind, reason: str, hardware: Callable[[NoiseHardware], None]
) -> None:
    hardware(machine)
    plan, why = chosen(policy)
    assert plan.noise_kind is kind and f"The noise is {kind.value}" in why and reason in why
    named = (
        policy.replace('"auto"', f'"{kind.value}"')
        .replace('device = "integer"\n', "")
        .replace('device = "parties"\n', "")
    )
    assert chosen(named)[0] == plan  # C, S and ε are those of the kind by name


def test_auto_refuses_what_no_kind_fits(hardware: Callable[[NoiseHardware], None]) -> None:
    hardware(FAST)
    assert "moves C or S" in chosen(AUTO, allocate="quantile")[1]
    with raises_code("allocate.no-noise-kind"):
        chosen(AUTO + 'device = "integer"\n', allocate="quantile")
    with raises_code("allocate.no-noise-kind"):
        chosen(AUTO.replace("rdp-integer", "pld") + 'device = "parties"\n')
    with pytest.raises(PlanError, match="device belongs to kind 'auto'"):
        Policy.parse(POLICY + 'device = "integer"\n')
    hardware(NoiseHardware(aes=True, entropy=False))
    with raises_code("allocate.no-entropy"):
        chosen(AUTO)


def test_filters_must_count_at_an_integer_order() -> None:
    model = net()
    plan = plan_of(model)
    fits = RenyiFilter.for_schedule(plan.schedule("clinical"), order=16.0)
    Engine(model, plan, filters={"clinical": fits}).detach()
    gaussian = GaussianFilter.for_target(400.0, delta=1e-5)
    Engine(model, plan_of(model, "laplace"), filters={"clinical": gaussian}).detach()
    for wrong in (
        GaussianFilter.for_target(4.0, delta=1e-5),
        RenyiFilter.for_schedule(plan.schedule("clinical"), order=16.5),
    ):
        with raises_code("engine.filter-for-other-noise"):
            Engine(model, plan, filters={"clinical": wrong})
