"""Δ per layer: exact where it can be, never exceeded where it is called worst, and by hand where it is printed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import by_hand
import pytest
import torch
import torch.nn.functional as F
from net_builders import Net
from refusals import raises_code
from scipy.stats import norm
from torch import Tensor, nn

from lamina.allocate.measure.bounds import PropagationState, SensitivityBounds, apply_rule, bounds
from lamina.allocate.measure.gains import expected_slope
from lamina.allocate.measure.profile import ActivationProfile, profile
from lamina.allocate.measure.trace import TracedProgram, export, trace
from lamina.plan.layer_stack import LayerStack
from lamina.signals.autoencoders import MLPAutoencoder, ResidualAutoencoder, ResidualClassifier, TransformerAutoencoder
from lamina.signals.signal_autoencoders import VAE, ResAE


def measured(
    model: nn.Module, x: Tensor, radius: float = 1.0, passes: int = 40
) -> tuple[SensitivityBounds, ActivationProfile]:
    found = profile(model, example=x, passes=passes, batch=20, radius=radius)
    return bounds(trace(model, x), found, LayerStack.from_model(model)), found


# --------------------------------------------------------------------------------------------- exact where it can be


def test_a_chain_of_linear_maps_is_stretched_by_their_norms() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    found, _ = measured(model, torch.zeros(1, 5), radius=1.5)
    first, second = (float(torch.linalg.svdvals(layer.weight.detach().double())[0]) for layer in model)
    for delta in (found.tight, found.worst):
        assert delta == pytest.approx((3 * first, 3 * first * second), rel=1e-9)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(3, 4, 5, stride=2, padding=2), (3, 11)),
        (nn.Conv2d(4, 4, 3, padding="same", groups=2, dilation=2), (4, 6, 5)),
        (nn.ConvTranspose1d(3, 2, 4, stride=2, padding=1), (3, 7)),
        (nn.Conv1d(3, 3, 3, padding=1, padding_mode="circular"), (3, 8)),
        (nn.Linear(6, 4), (3, 6)),
    ],
    ids=["stride", "groups", "transposed", "circular", "tokens"],
)
def test_a_layer_has_the_norm_of_the_matrix_it_is(layer: nn.Module, shape: tuple[int, ...]) -> None:
    found, _ = measured(nn.Sequential(layer), torch.zeros(1, *shape))
    x = torch.zeros(1, *shape, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(layer.double(), x).reshape(-1, x.numel())
    exact = 2 * float(torch.linalg.matrix_norm(jacobian, 2))
    slack = 1.5 if getattr(layer, "padding_mode", "zeros") == "circular" else 1.02  # padding is a node of its own
    assert exact * (1 - 1e-9) <= found.worst[0] <= slack * exact


def test_a_residual_sum_is_the_sum_and_printed_as_a_hypotenuse() -> None:
    """y = x + x: two inputs at distance Δ₀ end up 2Δ₀ apart, which √(a²+b²) denies."""
    model = Net(lambda self, x: x + self.linear(x), linear=nn.Linear(4, 4))
    model = Net(lambda self, x: self.head(x + self.linear(x)), linear=nn.Linear(4, 4), head=nn.Linear(4, 4))
    with torch.no_grad():
        for part in (model.linear, model.head):
            part.weight.copy_(torch.eye(4))
    found, seen = measured(model, torch.zeros(1, 4))
    assert found["head"].worst == pytest.approx(4.0) and found["head"].tight == pytest.approx(4.0)
    gamma = min(1.0, seen["linear_1"].std / seen["add"].std)
    assert found["head"].printed == pytest.approx(2 * math.sqrt(2) * gamma)
    x = torch.tensor([[1.0, 0, 0, 0]])
    assert float((model(x) - model(-x)).norm().detach()) == pytest.approx(found["head"].worst)


def test_the_recursion_by_hand() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 5), nn.GELU())
    with torch.no_grad():
        model[2].weight.uniform_(0.5, 2.0)
    found, seen = measured(model, torch.zeros(1, 6), radius=2.0)
    w0, w3 = (float(torch.linalg.svdvals(model[i].weight.detach().double())[0]) for i in (0, 3))
    relu, gelu = seen["relu"].pre_activation, seen["gelu"].pre_activation
    assert relu is not None and gelu is not None
    gain = float(model[2].weight.detach().abs().max())

    fitted = [
        expected_slope(torch.relu, relu.mean, math.sqrt(relu.variance), 1.0),
        expected_slope(F.gelu, gelu.mean, math.sqrt(gelu.variance), 1.13),
    ]
    gaussian = bounds(trace(model, torch.zeros(1, 6)), seen, LayerStack.from_model(model), slopes="gaussian")
    for of, slopes in ((found, [relu.slope, gelu.slope]), (gaussian, fitted)):
        tight = [4 * w0 * slopes[0]]
        tight.append(tight[0] * gain / math.sqrt(seen["layer_norm"].divisor_variances[0] + 1e-5))
        tight.append(tight[1] * w3 * slopes[1])
        assert of.tight == pytest.approx(tight, rel=1e-6)
    assert gaussian.printed == found.printed and gaussian.worst == found.worst

    worst = [4 * w0, 4 * w0 * gain / math.sqrt(1e-5)]
    worst.append(worst[1] * w3 * 1.1289041)
    assert found.worst == pytest.approx(worst, rel=1e-6)

    def gamma(out: str, into: str) -> float:
        return min(1.0, seen[out].std / seen[into].std)

    r = math.sqrt(1 + gelu.variance)
    eq10 = norm.cdf(gelu.mean / r) + gelu.mean * norm.pdf(gelu.mean / r) / r
    name = trace(model, torch.zeros(1, 6)).nodes[0].name
    printed = [4 * w0 * norm.cdf(relu.mean / math.sqrt(relu.variance)) * gamma("relu", name)]
    printed.append(printed[0] * gamma("layer_norm", "relu"))
    printed.append(printed[1] * w3 * eq10 * gamma("gelu", "layer_norm"))
    assert found.printed == pytest.approx(printed, rel=1e-6)
    assert [row.node for row in found.layers] == ["relu", "layer_norm", "gelu"]
    literal = bounds(trace(model, torch.zeros(1, 6)), seen, LayerStack.from_model(model), gamma="epsilon")
    printed[1:] = [printed[0] * 1e-5 / math.sqrt(seen["layer_norm"].divisor_variances[0])]
    printed.append(printed[1] * w3 * eq10 * gamma("gelu", "layer_norm"))
    assert literal.printed == pytest.approx(printed, rel=1e-6)
    assert (literal.tight, literal.worst) == (found.tight, found.worst)


@pytest.mark.parametrize("norm_layer", [nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.RMSNorm(8)])
def test_a_norm_layer_stretches_small_changes_by_more_than_epsilon_over_sigma(norm_layer: nn.Module) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), norm_layer)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    x = torch.zeros(1, 4)
    found, seen = measured(model, x, radius=1.0)
    literal = bounds(trace(model, x), seen, LayerStack.from_model(model), gamma="epsilon")
    entering = model[0](torch.randn(200, 4) / 4).detach()[:, None]
    jacobians = [torch.func.jacrev(norm_layer)(z).detach().reshape(8, 8) for z in entering]
    slopes = [float(torch.linalg.matrix_norm(each, 2)) for each in jacobians]
    first, last = found.layers[0].worst, found.layers[-1].worst
    assert literal.printed[-1] / literal.printed[0] < 0.05 * min(slopes)
    assert max(slopes) <= last / first * (1 + 1e-6)


def test_attention_is_printed_with_equation_20() -> None:
    model = TransformerAutoencoder(6, 5, width=8, layers=2, heads=2, hidden=16, code=3)
    found, seen = measured(model, torch.zeros(1, 5, 6))
    attention = seen["scaled_dot_product_attention"]
    assert attention.paper_norm is not None
    out = float(torch.linalg.svdvals(model.encoder[0].out.weight.detach().double())[0])
    gamma = min(1.0, seen["linear_4"].std / seen["reshape"].std)
    expected = found["encoder.0.value"].printed * attention.paper_norm * out * gamma
    assert found["encoder.0.out"].printed == pytest.approx(expected, rel=1e-6)
    assert found["encoder.0.value"].everywhere and not found["encoder.0.out"].everywhere


# ------------------------------------------------------------------------------------- worst is never exceeded


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.conv = nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")
        self.mix = nn.Conv2d(8, 4, 1)
        self.head = nn.Linear(4 * 9, 3)
        self.last = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.max_pool2d(F.relu_(self.bn(self.stem(x))), 3, stride=2, padding=1)
        out = self.conv(h)
        out += h
        out = self.mix(torch.cat([F.leaky_relu(out, 0.3), F.avg_pool2d(h, 3, 1, 1)], 1))
        up = F.interpolate(out, scale_factor=2.0, mode="nearest")
        read = self.head(F.adaptive_max_pool2d(up, 3).flatten(1)) - 2.0 * up.mean((1, 2, 3)).unsqueeze(1)
        y: Tensor = self.last(read)
        return y


def mha(need_weights: bool) -> nn.Module:
    parts = {"mha": nn.MultiheadAttention(4, 2, batch_first=True), "head": nn.Linear(4, 2)}
    return Net(lambda self, x: self.head(self.mha(x, x, x, need_weights=need_weights)[0]), **parts)


def gated() -> nn.Module:
    parts = {"up": nn.Linear(4, 5), "gate": nn.Linear(4, 5), "down": nn.Linear(5, 3)}
    return Net(lambda self, x: self.down(self.up(x) * torch.sigmoid(self.gate(x))), **parts)


def repeated() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.a(x).unsqueeze(1).expand(-1, 5, -1) + self.b(x).unsqueeze(1))
        return y

    return Net(forward, a=nn.Linear(4, 3), b=nn.Linear(4, 3), head=nn.Linear(3, 2))


def reparameterised() -> nn.Module:
    """The draw of a variational autoencoder: mean + exp(log-variance / 2) · noise, both ranges bounded."""

    def forward(self: Any, x: Tensor) -> Tensor:
        h = torch.tanh(self.encoder(x))
        mean, log_variance = self.mean(h), (3.0 * self.log_variance(h)).clamp(-2.0, 2.0)
        y: Tensor = self.decoder(mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean).clamp(-3.0, 3.0))
        return y

    parts = {"encoder": nn.Linear(4, 6), "mean": nn.Linear(6, 3), "log_variance": nn.Linear(6, 3)}
    return Net(forward, **parts, decoder=nn.Linear(3, 4))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: MLPAutoencoder((6, 5, 4)), (6,)),
    "residual": (lambda: ResidualAutoencoder(2, (4,), groups=2), (2, 8)),
    "classifier": (lambda: ResidualClassifier(2, 8, 3, widths=(4,), groups=2, squeeze=2, hidden=4), (2, 8)),
    "cnn": (Cnn, (2, 6, 6)),
    "activations": (
        lambda: nn.Sequential(
            nn.Linear(4, 6), nn.SiLU(), nn.Linear(6, 6), nn.PReLU(6), nn.Softplus(2.0), nn.Linear(6, 4), nn.ELU()
        ),
        (4,),
    ),
    "rms": (lambda: nn.Sequential(nn.Linear(4, 6), nn.RMSNorm(6, eps=0.1), nn.Hardswish(), nn.Linear(6, 3)), (4,)),
    "instance": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 3, 3), nn.InstanceNorm1d(3, eps=0.1, affine=True), nn.Conv1d(3, 2, 2)
        ),
        (2, 8),
    ),
    "transformer": (lambda: TransformerAutoencoder(3, 4, width=4, layers=2, heads=2, hidden=6, code=2), (4, 3)),
    "attention": (lambda: mha(False), (3, 4)),
    "attention by hand": (lambda: mha(True), (3, 4)),
    "gated": (gated, (4,)),
    "dropout": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)), (4,)),
    "repeated": (repeated, (4,)),
    "reparameterised": (reparameterised, (4,)),
    "vae": (lambda: VAE(1, 6, depth=4, latent=3, width=8), (1, 6)),
    "residual signal": (lambda: ResAE(2, 8, depth=8, latent=3, width=8, kernel=3), (2, 8)),
}  # fmt: skip


def values(program: TracedProgram, model: nn.Module, x: Tensor, names: set[str]) -> dict[str, Tensor]:
    """The value of these nodes on one input; dropout draws what it drew before."""
    kept: dict[str, Tensor] = {}
    torch.manual_seed(0)

    def see(node: Any, given: Any, value: Any) -> None:
        if node.name in names and isinstance(value, Tensor):
            kept[node.name] = value.double().clone()

    program.run(model, x, see)
    return kept


def pairs(x: Tensor, radius: float, count: int) -> list[tuple[Tensor, Tensor]]:
    """Far apart, opposite and close together, all within the radius."""
    made = []
    for i in range(count):
        a, b = torch.randn_like(x), torch.randn_like(x)
        a, b = radius * a / a.norm(), radius * b / b.norm()
        made.append([(a, b), (a, -a), (a, a + 1e-2 * (b - a))][i % 3])
    return made


RADIUS = 2.0
RANDOM_OR_SEVERAL = ("dropout", "classifier", "reparameterised", "vae", "residual signal")


@cache
def prepared(name: str) -> tuple[nn.Module, Tensor, SensitivityBounds]:
    make, shape = MODELS[name]
    torch.manual_seed(1)
    model, x = make(), torch.zeros(1, *shape)
    return model, x, measured(model, x, RADIUS)[0]


@pytest.mark.parametrize("name", MODELS)
def test_no_two_inputs_within_the_radius_move_a_layer_further_than_worst(name: str) -> None:
    model, x, found = prepared(name)
    program = export(model, x)
    names = {row.node for row in found.layers}
    for a, b in pairs(x, RADIUS, 12):
        one, other = values(program, model, a, names), values(program, model, b, names)
        near = float((a - b).norm()) / (2 * RADIUS)
        for row in found.layers:
            moved = float((one[row.node] - other[row.node]).norm())
            # `worst`/Δ₀ is a slope: inputs that are closer move the layer less
            assert moved <= row.worst * near * (1 + 1e-4) + 1e-6, row.name
    for row in found.layers:
        assert 0 < row.tight <= row.worst * (1 + 1e-9)


@pytest.mark.parametrize(
    "name",
    ["residual", "cnn", "activations", "transformer", "attention by hand", "gated", "dropout", "reparameterised"],
)
def test_no_value_within_the_radius_is_larger_than_its_size(name: str) -> None:
    """What `worst` of attention and of products is made of."""
    model, x, _ = prepared(name)
    graph, program = trace(model, x), export(model, x)
    seen = profile(model, example=x, passes=20, radius=RADIUS)
    state = PropagationState(graph=graph, profile=seen, sensitivities={})
    for node in graph:
        state.sensitivities[node.name] = apply_rule(node, state)
    for a, b in pairs(x, RADIUS, 4):
        for inputs in (a, b):
            floating = {node.name for node in graph if node.floating}
            for node, value in values(program, model, inputs, floating).items():
                assert float(value.norm()) <= state.sensitivities[node].size * (1 + 1e-5) + 1e-6, node


@pytest.mark.parametrize("name", [name for name in MODELS if name not in RANDOM_OR_SEVERAL])
def test_no_jacobian_within_the_radius_is_steeper_than_worst(name: str) -> None:
    model, zero, found = prepared(name)
    model = copy.deepcopy(model).double().train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    steepest = 0.0
    for start, share in enumerate((0.0, 0.01, 0.3, 0.9, 1.0)):
        x = torch.randn(zero.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(start))
        x = RADIUS * share * x / x.norm()
        jacobian = torch.autograd.functional.jacobian(model, x).reshape(-1, x.numel())
        steepest = max(steepest, float(torch.linalg.matrix_norm(jacobian, 2)))
    assert 0 < 2 * RADIUS * steepest <= found.worst[-1] * (1 + 1e-6)


def test_attention_is_steep_where_queries_decide_between_far_values() -> None:
    """Two keys and values at ±c and a query of 0: the output moves by w·c² per unit of the query, beyond √n·Δ_V."""

    class Decide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, weight in (("query", 100.0), ("key", 1.0), ("value", 1.0), ("head", 1.0)):
                setattr(self, name, nn.Linear(1, 1, bias=False))
                nn.init.constant_(getattr(self, name).weight, weight)

        def forward(self, x: Tensor) -> Tensor:
            a, b, c = x.chunk(3, -1)
            attended = F.scaled_dot_product_attention(self.query(a), self.key(b), self.value(c), scale=1.0)
            y: Tensor = self.head(attended)
            return y

    model = Decide()
    found, _ = measured(model, torch.zeros(1, 2, 3))
    c = 0.5
    x = torch.tensor([[[0.0, c, c], [0.0, -c, -c]]])
    steepest = float(torch.linalg.matrix_norm(torch.autograd.functional.jacobian(model, x).reshape(2, 6), 2))
    assert steepest >= 100 * c**2 * 0.99
    assert math.sqrt(2) * found["value"].worst < 2 * steepest <= found["head"].worst


@pytest.mark.parametrize(
    ("operation", "factor"),
    [
        (lambda x: F.max_pool1d(x, 3, 1, 1), math.sqrt(3)),
        (lambda x: F.max_pool1d(x, 2), 1.0),
        (lambda x: F.max_pool1d(x, 3, 2, 1, 2), math.sqrt(3)),
        (lambda x: F.adaptive_max_pool1d(x, 3), math.sqrt(2)),
        (lambda x: F.avg_pool1d(x, 2), math.sqrt(0.5)),
        (lambda x: F.interpolate(x, scale_factor=3.0), math.sqrt(3)),
        (lambda x: F.pad(x, (8, 0), mode="circular"), math.sqrt(2)),
        (lambda x: x.mean(-1, keepdim=True), math.sqrt(1 / 8)),
        (lambda x: x.sum(-1, keepdim=True), math.sqrt(8)),
        (lambda x: x.amax(-1, keepdim=True), 1.0),
        (lambda x: x.repeat(1, 1, 4), 2.0),
        (lambda x: x[..., [0, 0, 0, 1]], math.sqrt(3)),
        (lambda x: torch.cat([x, 2 * x], -1), math.sqrt(5)),
        (lambda x: 3 - x / 4, 0.25),
        (lambda x: torch.sub(x, x, alpha=-2), 3.0),
        (lambda x: x * torch.arange(8.0), 7.0),
    ],
)  # fmt: skip
def test_operations_without_weights_have_their_exact_factor(operation: Any, factor: float) -> None:
    model = Net(lambda self, x: self.b(operation(self.a(x))), a=nn.Conv1d(1, 1, 1), b=nn.Conv1d(1, 1, 1))
    for layer in (model.a, model.b):
        nn.init.ones_(layer.weight)
    found, _ = measured(model, torch.zeros(1, 1, 8))
    assert found["b"].worst == pytest.approx(2 * factor, rel=1e-6)
    steepest = 0.0
    for place in range(8):  # one entry above the others is the maximum of every window it lies in
        x = torch.nn.functional.one_hot(torch.tensor(place), 8).reshape(1, 1, 8).double()
        jacobian = torch.autograd.functional.jacobian(operation, x)
        steepest = max(steepest, float(torch.linalg.matrix_norm(jacobian.reshape(-1, 8), 2)))
    assert steepest == pytest.approx(factor, rel=1e-6)


def test_positive_weights_reach_the_worst_case() -> None:
    """Rank-one positive layers and a large bias keep every ReLU open along the top direction: worst is attained."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.fill_(0.25)
            layer.bias.fill_(10.0)
    found, _ = measured(model, torch.zeros(1, 4))
    x = torch.full((1, 4), 0.5)
    assert float((model(x) - model(-x)).norm().detach()) == pytest.approx(found.worst[-1], rel=1e-5)


def test_tight_is_no_bound() -> None:
    """What the docstring says: an expectation is exceeded by inputs that exist."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False), nn.ReLU())
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.fill_(1.0)
    found, _ = measured(model, torch.zeros(1, 1), passes=400)
    one, zero = torch.ones(1, 1), torch.zeros(1, 1)
    assert found.tight[-1] < 0.95 < float((model(one) - model(zero)).norm().detach()) <= found.worst[-1]


def test_tokens_move_as_far_as_the_rows_of_the_table() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, 4)
            self.head = nn.Linear(4, 3)

        def forward(self, ids: Tensor) -> Tensor:
            y: Tensor = self.head(self.table(ids))
            return y

    model = Tokens()
    ids = torch.zeros(1, 5, dtype=torch.long)
    found = bounds(trace(model, ids), profile(model, example=ids, passes=40), LayerStack.from_model(model))
    rows = model.table.weight.detach()
    farthest = math.sqrt(5) * float(torch.cdist(rows, rows).max())
    assert farthest <= found["table"].worst <= 2 * farthest
    mean_square = math.sqrt(5 * float(torch.cdist(rows, rows).square().mean()))
    assert found["table"].tight == pytest.approx(mean_square, rel=1e-5)


def test_bert_has_bounds() -> None:
    model, example, *_ = by_hand.bert()
    seen = profile(model, example=example, passes=40, batch=20)
    stack = LayerStack.from_model(model)
    found = bounds(trace(model, example), seen, stack)
    assert [row.name for row in found.layers] == [layer.name for layer in stack]
    assert all(0 < row.tight < row.worst < math.inf for row in found.layers[4:])


# ------------------------------------------------------------------------------------- groups, tables, refusals


def test_a_layer_of_several_modules_ends_at_its_last_use() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    stack = LayerStack.from_model(model, group={"all": ["*"]})
    x = torch.zeros(1, 4)
    found = bounds(trace(model, x), profile(model, example=x, passes=20), stack)
    assert [row.node for row in found.layers] == ["tanh_1"]
    assert len(found) == 1
    with raises_code("sensitivity.unknown-layer"):
        found["none"]


def test_an_activation_counts_only_if_it_is_all_that_follows() -> None:
    model = Net(lambda self, x: self.b(torch.relu(h := self.a(x)) + h), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    found, _ = measured(model, torch.zeros(1, 4))
    assert found["a"].node == "linear"


def test_unknown_operations_are_refused_by_name_only_where_they_matter() -> None:
    def stacked(model: nn.Module, shape: tuple[int, ...]) -> SensitivityBounds:
        return measured(model, torch.zeros(1, *shape))[0]

    lstm = Net(lambda self, x: self.head(self.lstm(x)[0]), lstm=nn.LSTM(4, 3, batch_first=True), head=nn.Linear(3, 2))
    with raises_code("sensitivity.slope-unknown"):
        stacked(lstm, (5, 4))
    with raises_code("sensitivity.slope-unknown"):
        stacked(Net(lambda self, x: self.b(1 / self.a(x)), a=nn.Linear(4, 4), b=nn.Linear(4, 4)), (4,))
    with raises_code("sensitivity.division-unbounded"):
        stacked(Net(lambda self, x: self.b(torch.ones(4) / self.a(x)), a=nn.Linear(4, 4), b=nn.Linear(4, 4)), (4,))
    clamped = Net(lambda self, x: self.b(self.a(x).clamp(max=torch.ones(4))), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    with raises_code("sensitivity.clamp-to-tensors"):
        stacked(clamped, (4,))
    harmless = Net(lambda self, x: self.a(x).cumsum(1), a=nn.Linear(4, 4))
    assert len(stacked(harmless, (4,))) == 1


@pytest.mark.parametrize(
    ("between", "code"),
    [
        (lambda h: h.exp(), "sensitivity.exp-unbounded"),
        (lambda h: h.clamp(min=-4.0).exp(), "sensitivity.exp-unbounded"),
        (lambda h: (-0.5 * h.clamp(-4.0, 4.0)).exp(), "sensitivity.exp-unbounded"),
        (lambda h: (h.clamp(-4.0, 4.0) + h).exp(), "sensitivity.exp-unbounded"),
        (lambda h: (h.clamp(-4.0, 4.0) * torch.rand(1).clamp(0.1, 3.0)).exp(), "sensitivity.exp-unbounded"),
        (lambda h: h * torch.randn_like(h), "sensitivity.slope-unknown"),
        (lambda h: h * torch.randn_like(h).clamp(max=3.0), "sensitivity.slope-unknown"),
        (lambda h: h * (1.0 + torch.randn_like(h).clamp(-3.0, 3.0)), "sensitivity.slope-unknown"),
        (lambda h: h / torch.rand_like(h).clamp(0.5, 1.0), "sensitivity.slope-unknown"),
    ],
)
def test_exponentials_and_noise_without_bounds_are_refused(between: Callable[[Tensor], Tensor], code: str) -> None:
    model = Net(lambda self, x: self.b(between(self.a(x))), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    with raises_code(code):
        measured(model, torch.zeros(1, 4))


def test_the_exponential_and_the_noise_have_their_exact_factors() -> None:
    def factor(between: Callable[[Tensor], Tensor]) -> float:
        model = Net(lambda self, x: self.b(between(self.a(x))), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
        torch.manual_seed(0)
        found, _ = measured(model, torch.zeros(1, 4))
        norms = [float(torch.linalg.matrix_norm(layer.weight.detach().double(), 2)) for layer in (model.a, model.b)]
        return found["b"].worst / (2.0 * found.radius * math.prod(norms))

    assert factor(lambda h: h.clamp(-4.0, 1.5).exp()) == pytest.approx(math.exp(1.5))
    assert factor(lambda h: (0.5 * h.clamp(-4.0, 4.0)).exp()) == pytest.approx(0.5 * math.exp(2.0))
    assert factor(lambda h: h * torch.randn_like(h).clamp(-3.0, 2.0)) == pytest.approx(3.0)


def test_layers_without_effect_and_foreign_profiles_are_refused() -> None:
    x = torch.zeros(1, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    seen = profile(model, example=x, passes=20)
    with torch.no_grad():
        model[2].weight.zero_()
    with raises_code("sensitivity.delta-not-positive"):
        bounds(trace(model, x), seen, LayerStack.from_model(model))
    with torch.no_grad():
        model[2].weight.fill_(math.nan)
    with raises_code("sensitivity.operation-refused"):
        bounds(trace(model, x), seen, LayerStack.from_model(model))
    unused = Net(lambda self, x: self.a(x), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    with raises_code("sensitivity.layer-not-used"):
        measured(unused, x)
    other = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    with raises_code("sensitivity.operation-refused"):
        bounds(trace(other, x), seen, LayerStack.from_model(other))


def test_batch_norm_without_running_statistics_mixes_patients() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 2))
    x = torch.randn(8, 4)
    with raises_code("sensitivity.model-not-traceable"):
        bounds(trace(model, x), profile(model, example=x), LayerStack.from_model(model))
