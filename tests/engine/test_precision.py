"""Number formats: bfloat16 activations with float32 sums and float64 norms; float64; extremes."""

from __future__ import annotations

from math import sqrt

import pytest
import torch
from oracle import (
    FORMS,
    clip_by_hand,
    difference,
    example_grads,
    losses_of,
    losses_of_output,
    plan_of,
    thresholds,
    unit_grads,
)
from refusals import raises_code
from torch import Tensor, nn

from lamina import Batch, Engine
from lamina.engine.execute.norms import NORM_SAFETY, row_norm_sq

N = 6


def transformerish() -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm = nn.Embedding(11, 16), nn.LayerNorm(16)
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
            self.recur, self.rms, self.head = (nn.GRU(16, 16, batch_first=True), nn.RMSNorm(16), nn.Linear(16, 4))

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(self.embed(x))
            h = h + self.attention(h, h, h, need_weights=False)[0]
            return self.head(self.rms(h + self.recur(h)[0]))

    return Net()


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Tanh(), nn.ConvTranspose1d(8, 4, 2, stride=2),
        nn.InstanceNorm1d(4, affine=True), nn.Flatten(), nn.Linear(64, 3),
    )  # fmt: skip


CASES = {
    "transformer": (transformerish, lambda: torch.randint(0, 11, (N, 5))),
    "convolutional": (convolutional, lambda: torch.randn(N, 3, 8)),
    "mlp": (lambda: nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 3)), lambda: torch.randn(N, 5)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_bfloat16_autocast(case: str, form: str) -> None:
    """Close to the float32 gradients as far as bfloat16 goes; sums float32; the bound holds exactly."""
    model, x = CASES[case][0](), CASES[case][1]()
    grads = unit_grads(example_grads(model, x), Batch(x))
    plan = thresholds(grads, plan_of(model, clipping=form))
    ref = clip_by_hand(grads, [0] * N, plan)
    with Engine(model, plan) as engine:
        with torch.autocast("cpu", torch.bfloat16):
            losses = losses_of_output(model(x).float())
        sums = engine.clipped_sums(losses, Batch(x))
        assert all(v.dtype == torch.float32 for v in sums.values())
        difference(sums, ref, relative=0.06, absolute=0.06)
        for i in range(N):
            with torch.autocast("cpu", torch.bfloat16):
                losses = losses_of_output(model(x[i : i + 1]).float()) * 1e4
            one = engine.clipped_sums(losses, Batch(x[i : i + 1]))
            size = sqrt(
                sum((float(one[n].double().norm()) / s) ** 2 for layer, s in zip(plan.layers, plan.noise, strict=True)
                    for n in layer.parameters)
            )  # fmt: skip
            assert size <= 1 / plan.sigma(0)
        with torch.autocast("cpu", torch.bfloat16):
            losses = losses_of_output(model(x).float())
        engine.backward(losses, Batch(x))
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def test_bfloat16_sums_of_many_small_gradients_are_not_lost() -> None:
    """256 equal contributions: in bfloat16 the sum would stop growing."""
    model = nn.Linear(4, 1, bias=False)
    x = torch.ones(1000, 4)
    with Engine(model, plan_of(model, 10.0)) as engine:
        with torch.autocast("cpu", torch.bfloat16):
            losses = model(x).float().sum(1)
        sums = engine.clipped_sums(losses, Batch(x))
    assert torch.equal(sums["weight"], torch.full((1, 4), 1000.0))


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_parameters(form: str) -> None:
    model = nn.Sequential(nn.Linear(5, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 3)).bfloat16()
    x = torch.randn(N, 4, 5).bfloat16()
    grads = unit_grads(example_grads(model, x), Batch(x))
    plan = thresholds(grads, plan_of(model, clipping=form))
    with Engine(model, plan) as engine:
        sums = engine.clipped_sums(losses_of(model, x, None), Batch(x))
        assert all(v.dtype == torch.float32 for v in sums.values())
        difference(sums, clip_by_hand(grads, [0] * N, plan), relative=0.1, absolute=0.1)
        engine.backward(losses_of(model, x, None), Batch(x))
    assert all(p.grad.dtype == torch.bfloat16 for p in model.parameters())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_float64_models_are_exact(case: str, form: str) -> None:
    model, x = CASES[case][0]().double(), CASES[case][1]()
    x = x.double() if x.is_floating_point() else x
    grads = unit_grads(example_grads(model, x), Batch(x))
    plan = thresholds(grads, plan_of(model, clipping=form))
    with Engine(model, plan) as engine:
        sums = engine.clipped_sums(losses_of(model, x, None), Batch(x))
        assert all(v.dtype == torch.float64 for v in sums.values())
        difference(sums, clip_by_hand(grads, [0] * N, plan), relative=5e-6, absolute=1e-6)  # SAFETY shrinks by 4e-6
        engine.backward(losses_of(model, x, None), Batch(x))
    assert all(p.grad.dtype == torch.float64 for p in model.parameters())


@pytest.mark.parametrize("width", [1, 7, 512, 513, 700, 1023, 1024, 1025, 4096, 100_000])
def test_norms_do_not_read_low(width: int) -> None:
    """Not by more than the safety margin, also for the shapes that float32 sums get most wrong."""
    for head in (1, 8, 16, 64):
        for tail in (2.0**-12 * 0.999, 2.0**-12 * 1.4, 1e-3, 1.0):
            t = torch.full((2, width), tail)
            t[:, :head] = 1.3
            ratio = (row_norm_sq(t) / t.double().square().sum(1)).sqrt()
            assert float(ratio.min()) * 1.0 >= NORM_SAFETY
            assert float(ratio.max()) <= 1 + 1e-5


def test_norm_of_ten_million_elements() -> None:
    t = torch.randn(1, 10_000_000)
    assert abs(float(row_norm_sq(t)) / float(t.double().square().sum()) - 1) < 1e-6


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1e-30, 1e-23, 1e-20, 1e-10, 1e10, 1e17, 1e18, 1e19])
@pytest.mark.parametrize("slope", [1e-25, 2e-23, 1e-15, 1.0, 1e15, 1e18])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_numbers_never_pass_the_bound(size: float, slope: float, dtype: torch.dtype, form: str) -> None:
    """Norms that under- or overflow on the way, and clip factors that are denormal."""
    for model, x in (
        (nn.Linear(64, 32, bias=False), torch.full((1, 64), size)),
        (nn.Linear(64, 32, bias=False), torch.full((1, 3, 64), size)),
        (nn.LayerNorm(64), torch.randn(1, 64) * size),
    ):
        model, x = model.to(dtype), x.to(dtype)
        nn.init.constant_(model.weight, 0.01)
        plan = plan_of(model, 1e-3, 2.0, clipping=form)
        with Engine(model, plan) as engine:
            losses = (model(x) * slope).flatten(1).sum(1)
            sums = engine.clipped_sums(losses, Batch(x))
        total = sqrt(sum(float(v.double().square().sum()) for v in sums.values()))
        assert total <= 1e-3, (type(model).__name__, x.shape)


def test_total_of_cancelling_uses_is_measured_after_adding() -> None:
    """Two uses that cancel: the norm is that of the sum, not a Gram product's difference."""
    model = nn.Linear(50, 50, bias=False)
    x = torch.randn(3, 50) * 1e3
    with Engine(model, plan_of(model, 1e9)) as engine:
        sums = engine.clipped_sums((model(x) - model(x * (1 - 1e-4))).sum(1), Batch(x))
    want = (x.double() * 1e-4).sum(0).expand(50, 50)
    torch.testing.assert_close(sums["weight"].double(), want, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("allow", ["high", "medium"])
def test_products_of_fewer_digits_are_refused(allow: str) -> None:
    """A clipped sum in TF32 or bfloat16 could leave its bound by a thousandth."""
    model, x = nn.Linear(5, 3), torch.randn(4, 5)
    with Engine(model, plan_of(model)) as engine:
        try:
            torch.set_float32_matmul_precision(allow)
            with raises_code("engine.reduced-products"):
                engine.backward(losses_of(model, x, None), Batch(x))
            torch.set_float32_matmul_precision("highest")
            torch.backends.fp32_precision = "tf32"
            with raises_code("engine.reduced-products"):
                engine.backward(losses_of(model, x, None), Batch(x))
            torch.backends.fp32_precision = "ieee"  # as the message says
            engine.clipped_sums(losses_of(model, x, None), Batch(x))
        finally:
            torch.backends.fp32_precision = "none"
            torch.set_float32_matmul_precision("highest")
        assert engine.budget.taken == 0
        engine.backward(losses_of(model, x, None), Batch(x))


@pytest.mark.parametrize("form", FORMS)
def test_another_default_dtype_changes_no_sum(form: str) -> None:
    """Kernels write float32, whatever torch makes by default."""
    model = nn.Sequential(nn.Conv1d(2, 6, 3), nn.GroupNorm(2, 6), nn.Flatten(), nn.Linear(36, 3))
    x = torch.randn(5, 2, 8)
    found = []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            with Engine(model, plan_of(model, 0.1, clipping=form)) as engine:
                found.append(engine.clipped_sums(losses_of(model, x, None), Batch(x)))
        finally:
            torch.set_default_dtype(torch.float32)
    for name, total in found[0].items():
        torch.testing.assert_close(found[1][name].float(), total, rtol=1e-5, atol=1e-6)
