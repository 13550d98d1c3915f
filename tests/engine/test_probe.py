"""The independence probe: couplings that the graph does not show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from net_builders import Net
from oracle import losses_of, losses_of_output, plan_of
from refusals import raises_code
from torch import Tensor, nn

from lamina import Engine

N = 8
X = torch.randn(N, 5, generator=torch.Generator().manual_seed(3))
Y = torch.arange(N).float()


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


COUPLED: dict[str, Callable[[nn.Module, Tensor, Tensor], Tensor]] = {
    "divided by the tokens of the batch": lambda m, x, y: losses_of(m, x, None) * 10 / (y + 1).sum(),
    "divided by the batch": lambda m, x, y: losses_of(m, x, None) / len(x),
    "centred, statistics detached": lambda m, x, y: losses_of_output(m(x) - m(x).mean(0).detach()),
    "input standardised over the batch": lambda m, x, y: losses_of(m, (x - x.mean(0)) / x.std(0), None),
    "functional batch norm of the input": lambda m, x, y: losses_of(
        m, F.batch_norm(x, None, None, training=True), None
    ),
    "weighted by rank in the batch": lambda m, x, y: losses_of(m, x, None) * (1.0 + (x[:, :1] < x[:, 0]).sum(1)),
    "only those above the batch's mean": lambda m, x, y: losses_of(m, x, None) * (x[:, 0] > x[:, 0].mean() - 0.4),
}


@pytest.mark.parametrize("kind", COUPLED)
def test_coupling_that_the_graph_does_not_show_is_refused(kind: str) -> None:
    model = mlp()
    with Engine(model, plan_of(model)) as engine:
        with raises_code("engine.probe-found-coupling"):
            engine.probe(lambda x, y: COUPLED[kind](model, x, y), X, Y)
        assert engine.budget.taken == 0
    assert all(p.grad is None for p in model.parameters())


class Padded(nn.Module):
    """Mean over tokens that counts the padding up to the longest of the batch."""

    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.embed, self.out, self.masked = nn.Embedding(9, 5), nn.Linear(5, 3), masked

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens[:, : int((tokens > 0).sum(1).max())]  # to the longest
        h = self.embed(tokens).tanh()
        if self.masked:
            keep = (tokens > 0).unsqueeze(2)
            return self.out((h * keep).sum(1) / keep.sum(1).clamp(min=1))
        return self.out(h.mean(1))


@pytest.mark.parametrize("masked", [True, False])
def test_padding_to_the_longest(masked: bool) -> None:
    model = Padded(masked)
    tokens = torch.randint(1, 9, (N, 6))
    for i in range(N):
        tokens[i, 2 + i % 5 :] = 0
    tokens[1, :] = 1  # the longest is not in every half
    tokens[1], tokens[N - 1] = tokens[N - 1].clone(), tokens[1].clone()
    with Engine(model, plan_of(model)) as engine:
        if masked:
            engine.probe(lambda x, y: losses_of(model, x, y), tokens)
        else:
            with raises_code("engine.probe-found-coupling"):
                engine.probe(lambda x, y: losses_of(model, x, y), tokens)


def test_expert_capacity_is_refused() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        """Only the first four examples of the batch that prefer an expert are served."""
        wants = x[:, 0] > -10
        wants[0] = True
        served = wants & (wants.flip(0).cumsum(0).flip(0) <= 5)
        return m.out(torch.where(served.unsqueeze(1), m.expert(x), x))

    model = Net(forward, expert=nn.Linear(5, 5), out=nn.Linear(5, 2))
    with Engine(model, plan_of(model)) as engine, raises_code("engine.probe-found-coupling"):
        engine.probe(lambda x, y: losses_of(model, x, y), X)


SOUND: dict[str, Any] = {
    "plain": lambda m, x, y: losses_of(m, x, None),
    "weighted by its own label": lambda m, x, y: losses_of(m, x, None) * (y + 1),
    "divided by a constant": lambda m, x, y: losses_of(m, x, None) / 8,
}


@pytest.mark.parametrize("kind", SOUND)
def test_sound_losses_pass(kind: str) -> None:
    model = mlp()
    with Engine(model, plan_of(model)) as engine:
        engine.probe(lambda x, y: SOUND[kind](model, x, y), X, Y)
        assert engine.budget.taken == 0
    assert all(p.grad is None for p in model.parameters())


def test_dropout_is_off_meanwhile_and_the_random_state_is_kept() -> None:
    model = nn.Sequential(nn.Linear(5, 50), nn.Dropout(0.5), nn.Linear(50, 3))
    with Engine(model, plan_of(model)) as engine:
        state = torch.get_rng_state()
        engine.probe(lambda x, y: losses_of(model, x, y), X)
        assert torch.equal(state, torch.get_rng_state())
    assert model[1].training


def test_too_few_examples() -> None:
    model = mlp()
    with Engine(model, plan_of(model)) as engine, raises_code("engine.probe-too-few-examples"):
        engine.probe(lambda x, y: losses_of(model, x, y), X[:3])
