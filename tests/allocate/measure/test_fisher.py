"""Per-example gradients by layer against autograd, one example at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from refusals import raises_code
from torch import Tensor, nn

from lamina.allocate.measure.example_gradients import LossesOf, fisher, reconstruction_losses, take_examples
from lamina.plan.layer_stack import LayerStack
from lamina.signals.autoencoders import ResidualAutoencoder, TransformerAutoencoder


def by_hand(model: nn.Module, losses_of: LossesOf, x: Any, y: Any, stack: LayerStack) -> np.ndarray:
    """‖g_il‖ from plain autograd on the model's own parameters, (examples, layers)."""
    held = dict(model.named_parameters())
    names = [name for layer in stack for name in layer.parameters]
    rows = []
    model.eval()
    for i in range(len(y)):
        loss = losses_of(*take_examples((x, y), slice(i, i + 1))).sum()
        found = torch.autograd.grad(loss, [held[name] for name in names], materialize_grads=True)
        squares = {name: float(g.double().square().sum()) for name, g in zip(names, found, strict=True)}
        rows.append([sum(squares[name] for name in layer.parameters) ** 0.5 for layer in stack])
    model.train()
    return np.array(rows)


class Tied(nn.Module):
    """One matrix used twice, and a buffer that training would move."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(5, 5), nn.Linear(5, 5), nn.BatchNorm1d(5)
        self.b.weight = self.a.weight
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(torch.tanh(self.b(self.norm(torch.tanh(self.a(x))))))
        return out


class Branching(Tied):
    """Looks at its values, which vmap cannot follow."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum().item() > 0 else super().forward(-2 * x)


@pytest.mark.parametrize("kind", [Tied, Branching])
@pytest.mark.parametrize("chunk", [None, 1, 4])
def test_against_autograd(kind: type[nn.Module], chunk: int | None, no_trace: Any) -> None:
    model = kind()
    stack = LayerStack.from_model(model)
    x, y = torch.randn(11, 5), torch.randint(0, 3, (11,))

    def losses_of(x: Any, y: Any) -> Tensor:
        return F.cross_entropy(model(x), y, reduction="none")

    if kind is Branching:
        model.eval()
        with pytest.raises(RuntimeError, match="item"):  # the loop is really needed
            torch.func.vmap(lambda x1: model(x1[None]))(x)
        model.train()

        def losses_of(x: Any, y: Any) -> Tensor:  # branches per example
            return torch.cat(
                [F.cross_entropy(model(a[None]), b[None], reduction="none") for a, b in zip(x, y, strict=True)]
            )

    with no_trace(model):
        found = fisher(model, losses_of, x, y, stack, chunk=chunk)
    norms = by_hand(model, losses_of, x, y, stack)
    assert found.layers == tuple(layer.name for layer in stack)
    assert found.information == pytest.approx((norms**2).mean(0), rel=1e-5)
    assert found.norms == pytest.approx(np.median(norms, axis=0), rel=1e-5)
    assert found.reached == (1.0,) * len(stack)
    assert found.examples == 11


def test_a_linear_model_in_closed_form() -> None:
    """loss = ½(w·x − y)²: g_w = r·x, g_b = r."""
    model = nn.Linear(3, 1).double()
    stack = LayerStack.from_model(model)
    x, y = torch.randn(101, 3).double(), torch.randn(101, 1).double()
    found = fisher(model, lambda x, y: 0.5 * (model(x) - y).square().sum(1), x, y, stack)
    r = (model(x) - y).detach().squeeze(1)
    norms = r.abs() * (x.square().sum(1) + 1).sqrt()
    assert found.information[0] == pytest.approx(float(norms.square().mean()), rel=1e-12)
    assert found.norms[0] == pytest.approx(float(norms.median()), rel=1e-12)


def test_examples_that_do_not_reach_a_layer_have_no_say_in_its_norm() -> None:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
    x = torch.tensor([[-1.0], [-2.0], [-3.0], [-4.0], [1.0], [2.0], [3.0]]).double()
    stack = LayerStack.from_model(model)
    found = fisher(model, lambda x, y: model(x).squeeze(1), x, None, stack)
    assert found.norms == pytest.approx((2.0, 2.0))
    assert found.reached == pytest.approx((3 / 7, 3 / 7))
    assert found.information == pytest.approx((14 / 7, 14 / 7))


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: ResidualAutoencoder(3, (8, 8)), (3, 64)),
        (lambda: TransformerAutoencoder(4, 6, width=8, layers=2, heads=2, hidden=8, code=4), (6, 4)),
    ],
)
def test_the_models_of_this_library(make: Any, shape: tuple[int, ...], no_trace: Any) -> None:
    model = make()
    stack = LayerStack.from_model(model)
    x, losses_of = torch.randn(5, *shape), reconstruction_losses(model)
    with no_trace(model):
        found = fisher(model, losses_of, x, x, stack)
    norms = by_hand(model, losses_of, x, x, stack)
    assert found.norms == pytest.approx(np.median(norms, axis=0), rel=1e-3)


class Counting(nn.Linear):
    """Writes one buffer and replaces another in every forward pass."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("written", torch.zeros(1))
        self.register_buffer("replaced", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.written += 1
        self.replaced = x.mean() + self.replaced
        return super().forward(x)


def test_buffers_are_put_back(no_trace: Any) -> None:
    model, x = Counting(), torch.randn(4, 2)
    with no_trace(model):
        fisher(model, reconstruction_losses(model), x, None, LayerStack.from_model(model))
    model(torch.ones(1, 2))
    assert float(model.written) == 1.0
    assert float(model.replaced) == 1.0


def test_inputs_may_be_trees() -> None:
    model = nn.Linear(2, 1)
    stack = LayerStack.from_model(model)
    a, b, y = torch.randn(6, 2), torch.randn(6, 2), torch.randn(6, 1)
    plain = fisher(model, lambda x, y: (model(x) - y).square().sum(1), a + b, y, stack)
    tree = fisher(model, lambda x, y: (model(x["a"] + x["b"][0]) - y).square().sum(1), {"a": a, "b": (b,)}, y, stack)
    assert tree.information == pytest.approx(plain.information)


def test_refusals() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    stack, x = LayerStack.from_model(model), torch.randn(4, 2)
    with raises_code("sensitivity.losses-shape"):
        fisher(model, lambda x, y: model(x).mean(), x, None, stack)
    with raises_code("sensitivity.losses-not-finite"):
        fisher(model, lambda x, y: model(x).sum(1) / 0, x, None, stack)
    with raises_code("sensitivity.chunk-not-positive"):
        fisher(model, reconstruction_losses(model), x, None, stack, chunk=0)
    with raises_code("sensitivity.example-count"):
        fisher(model, reconstruction_losses(model), torch.zeros(0, 2), None, stack)
    with raises_code("sensitivity.stack-of-other-model"):
        fisher(nn.Linear(2, 2), lambda x, y: x.sum(1), x, None, stack)
    with raises_code("sensitivity.stack-of-other-model"):
        fisher(model, reconstruction_losses(model), x, None, LayerStack.from_model(nn.Sequential(nn.Linear(3, 3))))
    nn.init.zeros_(model[1].weight)
    with raises_code("sensitivity.no-gradient"):
        fisher(model, reconstruction_losses(model), x, None, stack)
