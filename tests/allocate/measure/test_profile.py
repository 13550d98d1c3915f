"""Profiling: against hooks and scipy, in any batches, without a trace, from proxies only."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import raises_code
from scipy import stats
from torch import Tensor, nn

from lamina.allocate.measure.gains import expected_slope
from lamina.allocate.measure.profile import (
    ActivationProfile,
    RunningMoments,
    StreamSample,
    clip_inputs,
    kolmogorov_distance,
    profile,
)
from lamina.signals.autoencoders import MLPAutoencoder, ResidualAutoencoder, TransformerAutoencoder

Trace = Callable[[nn.Module], AbstractContextManager[None]]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 3), nn.ReLU(inplace=True))


def test_moments_agree_with_hooks_on_the_clipped_inputs() -> None:
    model, x = mlp(), torch.randn(83, 6) * torch.rand(83, 1) * 2
    seen: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda m, i, o, name=name: seen.__setitem__(name, o.detach().clone()))
    found = profile(model, inputs=x, proxy="public", radius=1.5)
    model(x * (1.5 / x.norm(dim=1, keepdim=True)).clamp(max=1))
    first, last = found.activations
    assert first.pre_activation is not None and last.pre_activation is not None
    for before, z in ((first.pre_activation, seen["0"]), (last.pre_activation, seen["3"])):
        assert before.mean == pytest.approx(float(z.double().mean()), abs=1e-7)
        assert before.variance == pytest.approx(float(z.double().var(correction=0)), rel=1e-5)
    assert found["tanh"].std == pytest.approx(float(seen["1"].double().std(correction=0)), rel=1e-5)
    assert found["layer_norm"].divisor_variances[0] == pytest.approx(
        float(seen["1"].var(1, correction=0).mean()), rel=1e-5
    )
    assert found.passes == 83


def test_mean_slopes_are_those_of_the_inputs_whatever_their_distribution() -> None:
    """Definition 2: one input in 20 is positive, which a Gaussian fit turns into more than half."""
    x = torch.where(torch.arange(200)[:, None] % 20 == 0, 20.0, -0.1) * torch.ones(200, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.PReLU(4, init=0.5))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(4))
        model[0].bias.zero_()
    found = profile(model, inputs=x, proxy="simulated", radius=100.0, batch=30)
    before = found["relu"].pre_activation
    assert before is not None
    assert (before.slope, before.steepest) == (pytest.approx(0.05), 1.0)
    assert before.atom == pytest.approx(0.95, abs=0.02)  # A1 does not hold either
    assert expected_slope(torch.relu, before.mean, math.sqrt(before.variance), 1.0) > 0.55
    after = next(node.pre_activation for node in found.activations if "prelu" in node.name)
    assert after is not None and after.slope == pytest.approx(0.5 + 0.5 * 0.05)


def test_a_group_norm_has_a_variance_per_group() -> None:
    model = nn.Sequential(nn.Conv1d(2, 6, 3), nn.GroupNorm(3, 6), nn.ReLU())
    x = torch.randn(40, 2, 9)
    found = profile(model, inputs=x, proxy="simulated", radius=100.0)
    h = model[0](x).detach()
    np.testing.assert_allclose(
        found["group_norm"].divisor_variances, h.reshape(40, 3, -1).var(-1, correction=0).mean(0), rtol=1e-5
    )


@pytest.mark.parametrize("batch", [1, 8, 30, 70])
def test_how_inputs_are_cut_into_batches_does_not_matter(batch: int) -> None:
    torch.manual_seed(3)
    model, x = nn.Sequential(nn.Linear(4, 5), nn.ReLU()), torch.randn(61, 4)
    whole, part = (profile(model, inputs=x, proxy="public", batch=size) for size in (61, batch))
    assert part.passes == 61
    a, b = part["relu"].pre_activation, whole["relu"].pre_activation
    assert a is not None and b is not None
    assert (a.mean, a.variance) == pytest.approx((b.mean, b.variance), rel=1e-5, abs=1e-7)
    assert part["relu"].variance == pytest.approx(whole["relu"].variance, rel=1e-5)


@pytest.mark.parametrize(("given", "taken"), [(33, 20), (7, 7)])
def test_a_profile_takes_no_more_than_it_was_told_and_ends_with_its_inputs(given: int, taken: int) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU())
    assert profile(model, inputs=torch.randn(given, 4), proxy="simulated: noise", passes=20, batch=8).passes == taken


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.floats(-1e3, 1e3), st.integers(1, 40), st.integers(1, 40))
def test_joined_moments_are_those_of_the_whole(seed: int, shift: float, n: int, m: int) -> None:
    x = torch.randn(n + m, 3, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + shift
    joined = RunningMoments()
    joined.add(x[:n])
    joined.add(x[n:])
    assert joined.mean == pytest.approx(float(x.mean()), rel=1e-12, abs=1e-12)
    assert joined.variance == pytest.approx(float(x.var(correction=0)), rel=1e-9)


def test_kolmogorov_agrees_with_scipy() -> None:
    z = np.random.default_rng(0).exponential(size=500)
    expected = stats.kstest(z, stats.norm(1.1, 0.8).cdf).statistic
    assert kolmogorov_distance(z, 1.1, 0.64) == pytest.approx(expected, rel=1e-12)
    assert kolmogorov_distance(np.zeros(4), 0.0, 0.0) == 0.5


def test_the_sample_has_a_fixed_size_whatever_flows_through_it() -> None:
    sample = StreamSample(100, 10, torch.Generator().manual_seed(0))
    for _ in range(10):
        sample.add(torch.randn(5000))
    assert sum(map(len, sample._parts)) == 100


def test_a3_is_reported_where_it_fails() -> None:
    """Inputs of two far clusters give pre-activations of two clusters: sup distance near 0.3, no Gaussian."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(2))
        model[0].bias.zero_()
    side = torch.where(torch.arange(4000) % 2 == 0, 1.0, -1.0)[:, None]
    two = profile(model, inputs=side + 0.1 * torch.randn(4000, 2), proxy="simulated", passes=4000, radius=9.0)
    one = profile(model, inputs=torch.randn(4000, 2), proxy="simulated", passes=4000, radius=9.0)
    assert [node.name for node in two.non_gaussian()] == ["relu"] and not one.non_gaussian()
    assert two["relu"].pre_activation is not None and 0.25 < two["relu"].pre_activation.ks < 0.45
    assert one["relu"].pre_activation is not None and one["relu"].pre_activation.ks < 0.03


def test_attention_statistics_of_even_weights() -> None:
    """Queries of zero look everywhere alike: ‖J‖ = 1/n, the printed norm (1-1/n)/n, ‖A‖ = 1."""
    model = TransformerAutoencoder(6, 5, width=8, layers=2, heads=2, hidden=16, code=3)
    for block in (*model.encoder, *model.decoder):
        nn.init.zeros_(block.query.weight)
        nn.init.zeros_(block.query.bias)
    node = profile(model, example=torch.zeros(1, 5, 6), passes=20, batch=10)["scaled_dot_product_attention"]
    assert node.jacobian == pytest.approx(1 / 5, rel=1e-2)
    assert node.paper_norm == pytest.approx(4 / 25)
    assert node.norms[0] == pytest.approx(1.0) and node.norms[1] == 0.0


@pytest.mark.parametrize("causal", [False, True])
def test_attention_and_the_same_by_hand_have_the_same_statistics(causal: bool) -> None:
    class Attend(nn.Module):
        def __init__(self, by_hand: bool) -> None:
            super().__init__()
            self.qkv, self.by_hand = nn.Linear(4, 12), by_hand

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            if not self.by_hand:
                return nn.functional.scaled_dot_product_attention(q * 3, k, v, is_causal=causal)
            logits = (q * 3) @ k.transpose(1, 2) / 2
            if causal:
                logits = logits.masked_fill(torch.ones(3, 3).triu(1).bool(), -math.inf)
            return logits.softmax(-1) @ v

    built, by_hand = Attend(False), Attend(True)
    by_hand.load_state_dict(built.state_dict())
    x = torch.randn(12, 3, 4)
    a = profile(built, inputs=x, proxy="public", radius=9.0, batch=4)
    b = profile(by_hand, inputs=x, proxy="public", radius=9.0, batch=4)
    assert a["scaled_dot_product_attention"].jacobian == pytest.approx(b["softmax"].jacobian, rel=1e-5)
    assert a["scaled_dot_product_attention"].paper_norm == pytest.approx(b["softmax"].paper_norm, rel=1e-5)
    weights, *_, value = a["scaled_dot_product_attention"].norms
    assert (weights, value) == pytest.approx(b["matmul_1"].norms, rel=1e-5)


def test_equal_arguments_give_an_equal_profile_and_no_trace(no_trace: Trace) -> None:
    model = nn.Sequential(
        nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.GELU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(24, 2)
    )

    def run(seed: int) -> ActivationProfile:
        return profile(model, example=torch.zeros(1, 3, 8), passes=30, batch=10, seed=seed)

    with no_trace(model):
        a = run(0)
    torch.randn(5)  # the global generator has no say
    assert run(0) == a != run(1)


def test_a_constant_is_half_away_from_a_gaussian() -> None:
    model = MLPAutoencoder((8, 6, 4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.0)
    before = profile(model, example=torch.zeros(1, 8), passes=20, batch=5)["relu"].pre_activation
    assert before is not None and before.variance == 0.0 and before.ks == 0.5


def test_inputs_of_several_tensors_are_clipped_together() -> None:
    x, y = torch.randn(5, 3) * 10, torch.randn(5, 2, 2)
    mask = torch.ones(5, 3, dtype=torch.long)
    a, b, same = clip_inputs((x, y, mask), 2.0)
    norms = (a.square().sum(1) + b.flatten(1).square().sum(1)).sqrt()
    torch.testing.assert_close(norms, torch.full((5,), 2.0))
    torch.testing.assert_close(a / x, (b / y).reshape(5, 4)[:, :1].expand(5, 3))
    assert torch.equal(same, mask)
    small = torch.full((2, 3), 0.1)
    torch.testing.assert_close(clip_inputs({"x": small}, 2.0)["x"], small)


def test_token_ids_are_even_over_the_vocabulary() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(7, 1)
            with torch.no_grad():
                self.table.weight.copy_(torch.arange(7.0)[:, None])
            self.act = nn.ReLU()

        def forward(self, ids: Tensor) -> Tensor:
            y: Tensor = self.act(self.table(ids))
            return y

    before = profile(Tokens(), example=torch.zeros(1, 5, dtype=torch.long))["relu"].pre_activation
    assert before is not None
    assert before.mean == pytest.approx(3.0, abs=0.15) and before.variance == pytest.approx(4.0, abs=0.2)


def test_bad_input_is_refused_with_the_remedy() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(6, 4)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("sensitivity.no-example", {}),
        ("sensitivity.proxy-not-named", {"inputs": x}),
        ("sensitivity.proxy-not-named", {"inputs": x, "proxy": "private"}),
        ("sensitivity.proxy-without-inputs", {"example": x, "proxy": "public"}),
        ("sensitivity.passes-not-positive", {"example": x, "passes": 0}),
        ("sensitivity.batch-not-positive", {"example": x, "batch": 1.5}),
        ("sensitivity.radius-not-positive", {"example": x, "radius": math.inf}),
        ("sensitivity.input-not-finite", {"inputs": x * math.nan, "proxy": "public"}),
        ("sensitivity.no-tensor", {"inputs": [x], "proxy": "public"}),
        ("sensitivity.example-count", {"inputs": x[:0], "proxy": "public"}),
        ("sensitivity.example-count", {"inputs": (x, x[:2]), "proxy": "public"}),
    ]
    for code, options in cases:
        with raises_code(code):
            profile(model, **options)
    with torch.no_grad():
        model[0].weight.fill_(math.nan)
    with raises_code("sensitivity.activation-not-finite"):
        profile(model, example=x)


def test_a_model_that_runs_differently_on_one_input_is_refused() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.relu() if x.shape[0] == 1 else x.tanh()

    with raises_code("sensitivity.graph-depends-on-batch"):
        profile(Odd(), example=torch.randn(1, 3), passes=10, batch=10)


@pytest.mark.slow
def test_a_thousand_passes_through_the_residual_autoencoder_take_less_than_a_minute() -> None:
    model = ResidualAutoencoder()
    started = time.process_time()
    found = profile(model, example=torch.zeros(1, 12, 256))
    assert time.process_time() - started < 60
    assert found.passes == 1000 and len(found.activations) == 12
