"""The traced graph: every operation that depends on the input, and nothing that does not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import by_hand
import pytest
import torch
import torch.nn.functional as F
from net_builders import Net
from refusals import raises_code
from torch import Tensor, nn

from lamina.allocate.measure.trace import OperationKind, TracedGraph, export, trace
from lamina.signals.autoencoders import MLPAutoencoder, ResidualAutoencoder, ResidualClassifier, TransformerAutoencoder

Trace = Callable[[nn.Module], AbstractContextManager[None]]


class Cnn(nn.Module):
    """What torchvision builds: convolutions, BatchNorm, ReLU in place, residual sums in place, pooling, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.conv = nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.head = nn.Linear(4, 5)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.pool(self.relu(self.bn(self.stem(x))))
        out = self.conv(h)
        out += h
        out = self.relu(out)
        y: Tensor = self.head(self.drop(F.adaptive_avg_pool2d(out, 1).flatten(1)))
        return y


ZOO: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "mlp": (lambda: MLPAutoencoder((8, 6, 4)), (8,), 0),
    "residual": (lambda: ResidualAutoencoder(4, (8, 16), groups=4), (4, 16), 4),
    "transformer": (lambda: TransformerAutoencoder(6, 5, width=8, layers=2, heads=2, hidden=16, code=3), (5, 6), 4),
    "classifier": (lambda: ResidualClassifier(4, 16, 3), (4, 16), 5),
    "cnn": (Cnn, (3, 16, 16), 1),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (5, 8), 2),
}


@pytest.mark.parametrize("name", ZOO)
def test_every_parameter_of_the_zoo_is_reached_and_every_residual_sum_found(name: str, no_trace: Trace) -> None:
    make, shape, sums = ZOO[name]
    model, x = make(), torch.randn(3, *shape)
    with no_trace(model):
        graph = trace(model, x)
    reached = {p for node in graph for p in node.parameters}
    assert reached == {p for p, _ in model.named_parameters()}
    assert sum(node.kind is OperationKind.ADD and len(node.inputs) == 2 for node in graph) == sums
    assert all(node.kind is not OperationKind.OTHER for node in graph)
    assert graph.nodes[0].shape == (1, *shape)


@pytest.mark.parametrize("name", ZOO)
def test_the_program_computes_what_the_model_does(name: str) -> None:
    make, shape, _ = ZOO[name]
    model, x = make(), torch.randn(3, *shape)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    last: list[Any] = []
    export(model, x).run(model, x, lambda node, given, value: last.append(value))
    found = last[-1][0]
    model.train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    with torch.no_grad():
        expected = model(x)
    torch.testing.assert_close(found, expected[0] if isinstance(expected, tuple) else expected)


def test_modes_do_not_matter_and_the_fast_path_of_attention_neither() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    x = torch.randn(2, 5, 8)
    training, evaluating = trace(layer.train(), x), trace(layer.eval(), x)
    assert [n.operation for n in training] == [n.operation for n in evaluating]
    assert not layer.training
    assert sum(n.kind is OperationKind.ATTENTION for n in evaluating) == 1


def test_attention_that_returns_its_weights_is_a_softmax_and_two_products() -> None:
    model = Net(lambda self, x: self.mha(x, x, x)[0], mha=nn.MultiheadAttention(8, 2, batch_first=True))
    graph = trace(model, torch.randn(1, 5, 8))
    assert [n.kind for n in graph if n.kind in (OperationKind.SOFTMAX, OperationKind.PRODUCT)] == [
        OperationKind.PRODUCT,
        OperationKind.SOFTMAX,
        OperationKind.PRODUCT,
    ]


def test_a_buffer_that_forward_writes_to_is_left_alone(no_trace: Trace) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.calls.add_(1)
        y: Tensor = self.linear(x) + self.calls
        return y

    linear = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    model = Net(forward, linear=linear, calls=nn.Buffer(torch.zeros(())))
    x = torch.randn(2, 4)
    with no_trace(model):
        trace(model, x)


def test_later_readers_of_an_overwritten_tensor_read_the_result() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.linear(x)
        torch.relu_(h)
        y: Tensor = h + 1
        return y

    graph = trace(Net(forward, linear=nn.Linear(4, 4)), torch.randn(2, 4))
    assert graph["add"].inputs == ("relu_",)


def test_a_view_of_an_overwritten_tensor_is_refused() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.linear(x)
        part = h[:, :2]
        part.relu_()
        y: Tensor = h + 1
        return y

    with raises_code("sensitivity.in-place-view"):
        trace(Net(forward, linear=nn.Linear(4, 4)), torch.randn(2, 4))


def test_tied_and_derived_weights_are_known_by_their_first_names() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 4)
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
            self.head = nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            y: Tensor = self.head(self.normed(self.embed(ids)))
            return y

    graph = trace(Tied(), torch.randint(0, 10, (2, 3)))
    uses = graph.uses(("embed.weight",))
    assert [node.kind for node in uses] == [OperationKind.EMBEDDING, OperationKind.LINEAR]
    prefix = "normed.parametrizations.weight.original"
    assert set(graph["linear"].parameters) == {"normed.bias", f"{prefix}0", f"{prefix}1"}


def test_what_reads_only_a_shape_does_not_depend_on_the_input() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) + torch.randn_like(x)
        return y

    graph = trace(Net(forward, linear=nn.Linear(4, 4)), torch.randn(2, 4))
    assert [node.name for node in graph][1:] == ["linear", "add"]


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: self.linear(x).cumsum(1),
        lambda self, x: self.linear(x) * torch.randn_like(x),
        lambda self, x: F.linear(x, F.dropout(self.linear.weight)),
        lambda self, x: self.linear(x) * (x > 0).float(),
        lambda self, x: F.glu(self.linear(x)),
    ],
    ids=["cumsum", "random factor", "dropped weights", "comparison", "glu"],
)
def test_what_no_rule_knows_is_other_and_never_guessed(forward: Callable[[Any, Tensor], Tensor]) -> None:
    graph = trace(Net(forward, linear=nn.Linear(4, 4)), torch.randn(2, 4))
    assert any(node.kind is OperationKind.OTHER for node in graph)


def test_ids_may_be_looked_up_and_moved_about_but_not_computed_with() -> None:
    def kinds(forward: Callable[[Any, Tensor], Tensor]) -> list[OperationKind]:
        graph = trace(Net(forward, table=nn.Embedding(9, 4)), torch.randint(0, 9, (2, 3)))
        return [node.kind for node in graph]

    assert kinds(lambda self, x: self.table(x.flip(1))) == [
        OperationKind.INPUT,
        OperationKind.RESHAPE,
        OperationKind.EMBEDDING,
    ]
    assert OperationKind.OTHER in kinds(lambda self, x: self.table(x) * (x != 0).unsqueeze(-1))
    assert OperationKind.OTHER in kinds(lambda self, x: self.table(x) + x.float().unsqueeze(-1))


def test_what_cannot_be_traced_is_refused_with_the_remedy(no_trace: Trace) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) if x.sum() > 0 else x
        return y

    model = Net(forward, linear=nn.Linear(4, 4))
    x = torch.randn(2, 4)
    with no_trace(model), raises_code("sensitivity.model-not-traceable"):
        trace(model, x)
    for example, word in (
        (3, "sensitivity.no-tensor"),
        (torch.tensor(1.0), "sensitivity.example-count"),
        (torch.zeros(0, 4), "sensitivity.example-count"),
    ):
        with raises_code(word):
            trace(model, example)


def test_bert_with_random_weights() -> None:
    model, x, *_ = by_hand.bert()
    graph: TracedGraph = trace(model, x)
    assert {p for node in graph for p in node.parameters} == {p for p, _ in model.named_parameters()}
    assert sum(node.kind is OperationKind.ATTENTION for node in graph) == 2
    assert all(node.kind is not OperationKind.OTHER for node in graph)
