"""The cost of noise against closed forms and against the exact Hessian."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from refusals import raises_code
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from lamina.allocate.measure.example_gradients import reconstruction_losses
from lamina.allocate.measure.measure import NOISE_COST_FLOOR, noise_cost, raise_to_floor
from lamina.plan.layer_stack import LayerStack
from lamina.signals.autoencoders import TransformerAutoencoder


class Bowl(nn.Module):
    """loss_i = ½ Σ_l c_l ‖θ_l‖² + 100 Σ θ: a quadratic with a large gradient, whatever the input."""

    def __init__(self, curvature: dict[str, float], size: int = 50) -> None:
        super().__init__()
        self.curvature = curvature
        self.parts = nn.ModuleDict({name: nn.Linear(size, 1, bias=False) for name in curvature}).double()

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(len(x), dtype=torch.float64)
        for name, c in self.curvature.items():
            w = self.parts[name].weight
            total = total + 0.5 * c * w.square().sum() + 100 * w.sum()
        return total


def test_a_quadratic_in_closed_form() -> None:
    """½c‖z‖² per draw: mean ½cd, standard deviation c√(d/2); the sign pair removes the gradient exactly."""
    d, draws = 50, 400
    model = Bowl({"flat": 1e-3, "steep": 7.0}, d)
    stack = LayerStack.from_model(model)
    found = noise_cost(model, lambda x, y: model(x), torch.zeros(3, 1), None, stack, draws=draws)
    for i, c in enumerate((1e-3, 7.0)):
        error = c * math.sqrt(d / 2 / draws)
        assert found.raw[i] == pytest.approx(0.5 * c * d, abs=4 * error)
        assert found.error[i] == pytest.approx(error, rel=0.2)
        assert found.values[0] > 0
    assert found.floored == (True, False)  # 1e-3 is below a hundredth of the mean per parameter
    assert found.values[0] == pytest.approx(NOISE_COST_FLOOR * 0.5 * (found.raw[0] + found.raw[1]), rel=1e-9)


def test_least_squares_in_closed_form() -> None:
    """Mean over outputs and examples of (Wx + b − y)²: ½ tr H = mean ‖x‖² + 1."""
    model = nn.Linear(6, 4).double()
    stack, x, y = LayerStack.from_model(model), torch.randn(20, 6).double(), torch.randn(20, 4).double()

    def losses_of(x: Any, y: Any) -> Tensor:
        return (model(x) - y).square().mean(1)

    exact = float(x.square().sum(1).mean()) + 1
    found = noise_cost(model, losses_of, x, y, stack, draws=300, batch=20)
    assert found.raw[0] == pytest.approx(exact, abs=4 * found.error[0])
    assert found.error[0] < 0.05 * exact
    assert found.loss == pytest.approx(float(losses_of(x, y).detach().mean()), rel=1e-9)
    whole = noise_cost(model, losses_of, x, y, stack, draws=300, batch=3)  # other examples for every pair
    assert whole.raw[0] == pytest.approx(exact, abs=4 * whole.error[0])


def test_against_the_exact_hessian() -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 4)).double()
    stack, x = LayerStack.from_model(model), torch.randn(12, 4).double()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(given: dict[str, Tensor]) -> Tensor:
        return (functional_call(model, given, (x,)) - x).square().mean()

    hessian: Any = jacrev(jacrev(loss))(parameters)
    # small steps: here the limit is what is being tested; the error comes from the draws
    found = noise_cost(model, reconstruction_losses(model), x, None, stack, std=0.01, draws=200, batch=12)
    for i, layer in enumerate(stack):
        blocks = (hessian[name][name].reshape(parameters[name].numel(), -1) for name in layer.parameters)
        exact = sum(float(block.trace()) for block in blocks)
        assert found.raw[i] == pytest.approx(0.5 * exact, abs=4 * found.error[i])
        assert found.error[i] < 0.15 * abs(exact)


def test_negative_curvature_is_raised_and_told() -> None:
    model = Bowl({"up": 2.0, "down": -2.0})
    stack = LayerStack.from_model(model)
    found = noise_cost(model, lambda x, y: model(x), torch.zeros(2, 1), None, stack, draws=50)
    assert found.raw[1] == pytest.approx(-50.0, abs=5)
    assert found.floored == (False, True)
    assert found.values[1] == pytest.approx(max(found.error[1], NOISE_COST_FLOOR * 50 * found.raw[0] / 100))


def test_the_floor_rule() -> None:
    assert raise_to_floor([8.0, 1.0, -1.0], [0.1, 2.0, 0.0], [10, 10, 10]) == (
        (8.0, 2.0, NOISE_COST_FLOOR * 3.0),
        (False, True, True),
    )
    # nothing stands out of its error: the parameter counts
    assert raise_to_floor([1.0, -4.0], [2.0, 1.0], [30, 7]) == ((30.0, 7.0), (True, True))


def test_it_is_seeded_and_leaves_no_trace(no_trace: Any) -> None:
    model = TransformerAutoencoder(4, 6, width=8, layers=2, heads=2, hidden=8, code=4)
    stack, x = LayerStack.from_model(model), torch.randn(10, 6, 4)
    with no_trace(model):
        runs = [noise_cost(model, reconstruction_losses(model), x, None, stack, draws=2, seed=s) for s in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]


def test_a_layer_of_zeros_is_perturbed_at_the_scale_of_the_model() -> None:
    model = Bowl({"a": 2.0, "b": 2.0})
    nn.init.zeros_(model.parts["b"].weight)
    stack = LayerStack.from_model(model)
    found = noise_cost(model, lambda x, y: model(x), torch.zeros(2, 1), None, stack, std=0.1, draws=50)
    whole = float(model.parts["a"].weight.detach().square().sum() / 100) ** 0.5
    assert found.std[1] == pytest.approx(0.1 * whole)
    assert found.raw[1] == pytest.approx(50.0, abs=5)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"std": 0.0}, "sensitivity.std-not-positive"),
        ({"draws": 1}, "sensitivity.draws-too-few"),
        ({"batch": 0}, "sensitivity.batch-not-positive"),
    ],
)
def test_options_are_checked(options: dict[str, Any], named: str) -> None:
    model = nn.Linear(2, 2)
    with raises_code(named):
        noise_cost(
            model, reconstruction_losses(model), torch.randn(4, 2), None, LayerStack.from_model(model), **options
        )


def test_weights_without_a_scale_are_refused() -> None:
    model = nn.Linear(2, 2)
    stack = LayerStack.from_model(model)
    nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
    with raises_code("sensitivity.weights-zero"):
        noise_cost(model, reconstruction_losses(model), torch.randn(4, 2), None, stack)
    with torch.no_grad():
        model.bias.fill_(math.nan)
    with raises_code("sensitivity.weight-not-finite"):
        noise_cost(model, reconstruction_losses(model), torch.randn(4, 2), None, stack)
