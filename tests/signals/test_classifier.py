"""The autoencoder with a classifier: what it returns, what its top quarter is, and that the engine is exact on it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from oracle import agree
from refusals import raises_code
from torch import Tensor, nn

from lamina import Batch, DepthProfile, Engine, LayerStack, Policy, make_plan
from lamina.signals.autoencoders import ClassifierLoss, ResidualClassifier

LOSS = ClassifierLoss(weight=2.0)


def small() -> ResidualClassifier:
    return ResidualClassifier(3, 16, 4, widths=(4, 8), kernel=3, groups=2, squeeze=2, hidden=5)


def losses(model: nn.Module, x: Any, y: Any) -> Tensor:
    return LOSS(model(x), y)


def test_residual_and_logits() -> None:
    model, x = small(), torch.randn(5, 3, 16)
    residual, logits = model(x)
    assert residual.shape == x.shape
    assert logits.shape == (5, 4)
    torch.testing.assert_close(x - residual, model.autoencoder(x))


def test_an_example_does_not_see_the_others() -> None:
    model, x = small(), torch.randn(4, 3, 16)
    other = torch.cat([x[:1], 10 * torch.randn(3, 3, 16)])
    for mine, theirs in zip(model(x), model(other), strict=True):
        torch.testing.assert_close(mine[0], theirs[0], rtol=1e-5, atol=1e-5)


def test_the_loss_is_entropy_and_squared_residual_of_each_example() -> None:
    residual = torch.tensor([[[1.0, 3.0]], [[0.0, 2.0]]])
    logits = torch.tensor([[0.0, 0.0], [math.log(3.0), 0.0]])
    found = LOSS((residual, logits), torch.tensor([0, 1]))
    assert found.tolist() == pytest.approx([math.log(2) + 2 * 5.0, math.log(4) + 2 * 2.0])


def test_the_top_quarter_is_the_classifier() -> None:
    stack = LayerStack.from_model(ResidualClassifier())
    reached = DepthProfile.top(0.25).resolve(stack)
    names = [layer.name for layer, may in zip(stack, reached, strict=True) if may]
    assert names == ["classifier.0", "classifier.3", "classifier.5"]


@pytest.mark.parametrize("restricted", [False, True])
def test_the_engine_forms_the_clipped_sums_of_the_oracle(restricted: bool) -> None:
    """A public class in every layer, and a private one: everywhere, or in the classifier only."""
    torch.manual_seed(1)
    model = small()
    stack = list(LayerStack.from_model(model))
    row = [0.0 if restricted and not layer.name.startswith("classifier") else 1.0 for layer in stack]
    x, y = torch.randn(9, 3, 16), torch.randint(0, 4, (9,))
    x *= torch.linspace(0.3, 3.0, 9)[:, None, None]
    unit = torch.tensor([0, 0, 1, 1, 2, 2, 3, 4, 5])
    cls = torch.tensor([0, 1, 1, 0, 1, 1])
    agree(model, x, y, losses=losses, clip=[[math.inf] * len(stack), row], public=[0], batch={"unit": unit, "cls": cls})


def test_a_restricted_class_leaves_the_autoencoder_alone() -> None:
    """A batch of sensitive contributions alone: no gradient and no noise below the classifier."""
    text = """
    [corpus]
    origin = "test"
    delta = 1e-5
    [class.open]
    public = true
    population = 10
    [class.sensitive]
    population = 100
    epsilon = 3.0
    profile = { top = 0.25 }
    """
    model = small()
    plan = make_plan(LayerStack.from_model(model), Policy.parse(text), batch={"open": 5, "sensitive": 20}, steps=10)
    x, y = torch.randn(6, 3, 16), torch.randint(0, 4, (6,))
    with Engine(model, plan) as engine:
        engine.backward(losses(model, x, y), Batch(x, y, cls=torch.ones(6, dtype=torch.long)))
    for name, p in model.named_parameters():
        assert p.grad is not None
        assert bool(p.grad.any()) == name.startswith("classifier"), name


def test_lengths_that_cannot_be_halved_are_refused() -> None:
    with raises_code("models.samples-not-divisible") as caught:
        ResidualClassifier(samples=98)
    assert "96" in caught.value.remedy
    with raises_code("models.samples-not-divisible"):
        ResidualClassifier(samples=2)
