"""nn.RNN, nn.LSTM, nn.GRU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from net_builders import Net, refused
from oracle import agree, plan_of
from refusals import raises_code
from torch import Tensor, nn

from lamina import Batch, Engine

N, T = 5, 4


class Recur(nn.Module):
    """A recurrent body on batch-first input; uses the outputs and the last states."""

    def __init__(self, kind: type[nn.RNNBase], *, state: bool = False, **options: Any) -> None:
        super().__init__()
        self.body, self.state = kind(3, 4, **options), state
        width = (options.get("proj_size") or 4) * (2 if options.get("bidirectional") else 1)
        self.out = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        m = self.body
        hx: Any = None
        if self.state:
            count = m.num_layers * (2 if m.bidirectional else 1)
            first = x[:, 0, :1].t().unsqueeze(2)
            hx = first.expand(count, x.shape[0], m.proj_size or m.hidden_size).contiguous()
            if m.mode == "LSTM":
                hx = (hx, first.expand(count, x.shape[0], m.hidden_size).contiguous())
        y, last = m(x if m.batch_first else x.transpose(0, 1), hx)
        y = y if m.batch_first else y.transpose(0, 1)
        last = last if isinstance(last, tuple) else (last,)
        return torch.cat([self.out(y).flatten(1), *(t.transpose(0, 1).flatten(1) for t in last)], 1)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"bias": False},
    {"num_layers": 2},
    {"bidirectional": True},
    {"num_layers": 2, "bidirectional": True, "batch_first": True},
    {"state": True, "num_layers": 2},
    {"state": True, "bidirectional": True, "batch_first": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(f"{k}={v}" for k, v in o.items()) or "plain")
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent(kind: type[nn.RNNBase], options: dict[str, Any]) -> None:
    agree(Recur(kind, **options), torch.randn(N, T, 3))


def test_relu_cells() -> None:
    agree(Recur(nn.RNN, nonlinearity="relu", batch_first=True), torch.randn(N, T, 3))


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize(
    "options", [{}, {"bidirectional": True, "num_layers": 2}, {"bias": False, "state": True}], ids=str
)
def test_projected_lstm(options: dict[str, Any]) -> None:
    agree(Recur(nn.LSTM, proj_size=2, batch_first=True, **options), torch.randn(N, T, 3))


def test_one_weight_frozen() -> None:
    for name in ("weight_ih_l0", "weight_hh_l0", "bias_hh_l0"):
        model = Recur(nn.LSTM, batch_first=True)
        model.body.get_parameter(name).requires_grad_(False)
        agree(model, torch.randn(N, T, 3))


def test_length_equal_to_batch() -> None:
    agree(Recur(nn.GRU), torch.randn(T, T, 3))


def test_packed_sequences_are_refused() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.full((len(x),), T), batch_first=True)
        return m.body(packed)[1]

    model = Net(forward, body=nn.GRU(3, 4))
    with Engine(model, plan_of(model)), raises_code("engine.packed-sequence"):
        model(torch.randn(N, T, 3))


@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:.*cannot run under vmap")
@pytest.mark.parametrize("cell", [nn.RNNCell, nn.LSTMCell, nn.GRUCell])
def test_cells_run_per_contribution(cell: Any) -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h: Any = None
        for t in range(x.shape[1]):
            h = m.cell(x[:, t], h) if h is not None else m.cell(x[:, t])
        return h[0] if isinstance(h, tuple) else h

    agree(Net(forward, cell=cell(3, 4)), torch.randn(N, T, 3))


class BesideRecurrent(nn.Module):
    """Bare parameters on the root, before a layer that vmap cannot run."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.rnn, self.use = nn.LSTM(4, 3, batch_first=True), use
        self.scale, self.shift = nn.Parameter(torch.rand(4) + 0.5), nn.Parameter(torch.randn(4))
        self.gain, self.table = nn.Parameter(torch.tensor(1.3)), nn.Parameter(torch.randn(5, 4))
        if use == "product":
            self.scale = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        if self.use == "product":
            return self.rnn(torch.nn.functional.linear(x, self.scale))[0]
        return self.gain * self.rnn(x * self.scale + self.shift + self.table)[0]


@pytest.mark.parametrize("length", [5, 1])
def test_bare_parameters_that_are_used_elementwise_are_expanded_and_nothing_runs_one_by_one(length: int) -> None:
    """Warnings are errors: without the expansion it would say that it runs one example at a time."""
    model = BesideRecurrent("elementwise")
    model.table = nn.Parameter(torch.randn(length, 4))
    agree(model, torch.randn(3, length, 4))
    agree(model, torch.randn(6, length, 4), batch={"unit": torch.tensor([0, 1, 0, 2, 1, 1])})


def test_as_many_examples_as_positions_or_features() -> None:
    """Of a copy for each example it is clear whose it is, although every axis has the batch's length."""
    model = BesideRecurrent("elementwise")
    model.table = nn.Parameter(torch.randn(4, 4))
    agree(model, torch.randn(4, 4, 4))


def test_another_number_of_axes_finds_its_own_expansion() -> None:
    model = Net(lambda m, x: m.out(x * m.scale + m.shift), out=nn.Linear(4, 3))
    model.scale, model.shift = nn.Parameter(torch.rand(4)), nn.Parameter(torch.randn(4))
    plan = plan_of(model, 0.1)
    for shape in ((5, 4), (5, 3, 4), (5, 2, 3, 4)):
        agree(model, torch.randn(*shape))
    with Engine(model, plan) as engine:
        for shape in ((5, 4), (5, 3, 4), (1, 3, 4), (5, 3, 4)):
            x = torch.randn(*shape)
            engine.clipped_sums(model(x).flatten(1).square().mean(1), Batch(x))


def test_a_bare_parameter_beside_a_recurrent_layer_is_named_as_what_makes_it_slow() -> None:
    model = BesideRecurrent("product")
    with Engine(model, plan_of(model)), pytest.warns(UserWarning, match="Move 'scale'.* into a module"):
        model(torch.randn(3, 5, 4))


@pytest.mark.parametrize("centred", ["input", "output"])
def test_detached_statistics_beside_a_bare_parameter_are_refused_without_a_probe(centred: str) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = x - x.mean(0).detach() if centred == "input" else x
        hidden = m.out(x * m.scale)
        return hidden - hidden.mean(0).detach() if centred == "output" else hidden

    model = Net(forward, out=nn.Linear(4, 3))
    model.scale = nn.Parameter(torch.rand(4))
    refused(model, torch.randn(5, 4), "engine.examples-not-separate")
