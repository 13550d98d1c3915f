"""Influence functions against the exact inverse, and against really leaving an example out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from refusals import raises_code
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from lamina.allocate.measure.influence import HessianProduct, _damped_inverse_product, influence
from lamina.plan.layer_stack import LayerStack

N, D, RIDGE = 40, 5, 0.05


def data(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(N, D, generator=g).double()
    y = (x @ torch.arange(1.0, D + 1).double() + torch.randn(N, generator=g) > 0).double()
    x_ref = torch.randn(10, D, generator=g).double()
    return x, y, x_ref, (x_ref[:, 0] > 0).double()


class Logistic(nn.Module):
    """Weight and bias as two layers; the ridge is part of every example's loss, so the optimum is unique."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Linear(D, 1, bias=False).double(), nn.Linear(1, 1, bias=False).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w(x) + self.b(torch.ones(len(x), 1).double())
        return out.squeeze(1)

    def losses(self, x: Any, y: Any) -> Tensor:
        ridge = 0.5 * RIDGE * (self.w.weight.square().sum() + self.b.weight.square().sum())
        return F.binary_cross_entropy_with_logits(self(x), y, reduction="none") + ridge


def fit(model: Logistic, x: Tensor, y: Tensor) -> None:
    """Newton's method to the optimum."""
    for _ in range(30):
        h, g = exact(model, x, y)
        step = torch.linalg.solve(h, g)
        with torch.no_grad():
            model.w.weight -= step[:D].view(1, D)
            model.b.weight -= step[D:].view(1, 1)


def exact(model: Logistic, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """H and gradient of the mean loss, dense."""

    def loss(flat: Tensor) -> Tensor:
        given = {"w.weight": flat[:D].view(1, D), "b.weight": flat[D:].view(1, 1)}
        out = functional_call(model, given, (x,))
        ridge = 0.5 * RIDGE * flat.square().sum()
        return F.binary_cross_entropy_with_logits(out, y) + ridge

    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    h: Any = jacrev(jacrev(loss))(flat)
    return h, torch.func.grad(loss)(flat)


@pytest.fixture
def fitted() -> Logistic:
    model, (x, y, _, _) = Logistic(), data()
    fit(model, x, y)
    return model


@pytest.mark.parametrize("damping", [0.0, 0.3])
def test_against_the_exact_inverse(fitted: Logistic, damping: float, no_trace: Any) -> None:
    x, y, x_ref, y_ref = data()
    stack = LayerStack.from_model(fitted)
    with no_trace(fitted):
        found = influence(
            fitted, fitted.losses, x, y, stack, reference=(x_ref, y_ref),
            damping=damping, rounds=2000, tolerance=1e-10,
        )  # fmt: skip
    h, _ = exact(fitted, x, y)
    _, v = exact(fitted, x_ref, y_ref)
    s = torch.linalg.solve(h + damping * torch.eye(D + 1).double(), v)
    g = torch.stack([exact(fitted, x[i : i + 1], y[i : i + 1])[1] for i in range(N)])
    acts = torch.stack([g[:, :D] @ s[:D], g[:, D:] @ s[D:]], dim=1)
    assert found.values == pytest.approx(acts.square().mean(0).sqrt().tolist(), rel=1e-6)
    assert found.total == pytest.approx(float(acts.sum(1).square().mean().sqrt()), rel=1e-6)
    assert found.residual < 1e-8
    assert found.damping == damping
    assert found.examples == N


def test_it_predicts_what_leaving_an_example_out_does(fitted: Logistic) -> None:
    x, y, x_ref, y_ref = data()
    stack = LayerStack.from_model(fitted)
    wanted = HessianProduct(fitted, fitted.losses, x_ref, y_ref, stack).gradient()
    s, *_ = _damped_inverse_product(HessianProduct(fitted, fitted.losses, x, y, stack), wanted, 0.0, 100, 1e-9)
    before = float(fitted.losses(x_ref, y_ref).detach().mean())
    predicted, true = [], []
    for i in range(0, N, 5):
        again, rest = Logistic(), torch.arange(N) != i
        fit(again, x[rest], y[rest])
        true.append(float(again.losses(x_ref, y_ref).detach().mean()) - before)
        predicted.append(float(s @ exact(fitted, x[i : i + 1], y[i : i + 1])[1]) / N)
    assert np.corrcoef(predicted, true)[0, 1] > 0.99
    assert np.polyfit(predicted, true, 1)[0] == pytest.approx(1.0, abs=0.15)


def test_products_against_the_dense_hessian(fitted: Logistic) -> None:
    x, y, _, _ = data()
    h, g = exact(fitted, x, y)
    mine, v = HessianProduct(fitted, fitted.losses, x, y, LayerStack.from_model(fitted)), torch.randn(D + 1).double()
    assert torch.allclose(mine(v), h @ v, rtol=1e-10, atol=1e-12)
    assert torch.allclose(mine.gradient(), g, rtol=1e-10, atol=1e-12)
    largest = float(torch.linalg.eigvalsh(h).abs().max())
    assert largest * 0.97 < mine.largest() < largest * (1 + 1e-9)


def test_away_from_a_minimum_the_damping_grows_or_is_refused() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    stack, x, y = LayerStack.from_model(model), torch.randn(30, 3).double(), 10 * torch.randn(30).double()

    def losses_of(x: Any, y: Any) -> Tensor:
        return (model(x).squeeze(1) - y).square()

    found = influence(model, losses_of, x, y, stack, rounds=300)
    assert found.residual < 2e-3
    assert found.examples == 15  # the first half; the second is the reference
    assert all(value > 0 for value in found.values)
    with raises_code("sensitivity.damping-too-small"):
        influence(model, losses_of, x, y, stack, damping=1e-9, rounds=300)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"damping": -1.0}, "sensitivity.damping-negative"),
        ({"rounds": 0}, "sensitivity.rounds-not-positive"),
        ({"tolerance": 1.0}, "sensitivity.tolerance-range"),
    ],
)
def test_options_are_checked(fitted: Logistic, options: dict[str, Any], named: str) -> None:
    x, y, x_ref, y_ref = data()
    with raises_code(named):
        influence(fitted, fitted.losses, x, y, LayerStack.from_model(fitted), reference=(x_ref, y_ref), **options)


def test_what_nothing_influences_is_refused(fitted: Logistic) -> None:
    x, y, _, _ = data()
    stack = LayerStack.from_model(fitted)
    with raises_code("sensitivity.reference-without-gradient"):
        influence(fitted, lambda x, y: 0 * fitted(x), x, y, stack)
    with raises_code("sensitivity.no-reference"):
        influence(fitted, fitted.losses, x[:1], y[:1], stack)
