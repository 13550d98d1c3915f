"""nn.RNN, nn.LSTM, nn.GRU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from net_builders import Net
from oracle import agree, plan_of
from refusals import raises_code
from torch import Tensor, nn

from lamina import Engine

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


def test_a_bare_parameter_beside_a_recurrent_layer_is_named_as_what_makes_it_slow() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.scale = nn.LSTM(4, 3, batch_first=True), nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rnn(x * self.scale)[0]

    model = Scaled()
    with Engine(model, plan_of(model)), pytest.warns(UserWarning, match="Move 'scale' into a module"):
        model(torch.randn(3, 5, 4))
