"""The independence probe: couplings that the graph does not show."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from net_builders import Net
from oracle import losses_of, losses_of_output, plan_of
from refusals import raises_code
from torch import Tensor, nn

import lamina
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


def with_probability(p: float, draw: Callable[[], Any]) -> Callable[..., Tensor]:
    return lambda m, x, y: losses_of(m, x - x.mean(0) if draw() < p else x, None)


def pos_weighted(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    weight = torch.where(y == 1, (y == 0).sum() / (y == 1).sum().clamp(min=1), 1.0)
    return F.binary_cross_entropy_with_logits(m(x)[:, 0], y, reduction="none") * weight


def dropped_where_not_finite(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    losses = losses_of(m, x, None)
    return losses if bool(losses.isfinite().all()) else losses.nan_to_num(0.0) * 0


RARE: dict[str, Callable[..., Tensor]] = {
    "torch, 0.1": with_probability(0.1, lambda: torch.rand(())),
    "torch, 0.4": with_probability(0.4, lambda: torch.rand(())),
    "numpy, 0.4": with_probability(0.4, lambda: np.random.rand()),  # noqa: NPY002
    "python, 0.1": with_probability(0.1, random.random),
    "after dropout": lambda m, x, y: with_probability(0.1, lambda: torch.rand(()))(m, F.dropout(x, 0.1), y),
    "threshold": lambda m, x, y: losses_of(m, x / 255 if x.max() > 1.5 else x, None),
    "largest above 10": lambda m, x, y: losses_of(m, x / (x.abs().max() / 10).clamp(min=1), None),
    "below tolerance": lambda m, x, y: losses_of(m, x - 1e-4 * x.mean(0), None),
    "classes of float targets": pos_weighted,
    "not finite": dropped_where_not_finite,
}


@pytest.mark.parametrize("kind", RARE)
def test_coupling_on_some_draws_or_values_only_is_refused(kind: str) -> None:
    model = mlp()
    with Engine(model, plan_of(model)) as engine, raises_code("engine.probe-found-coupling"):
        engine.probe(lambda x, y: RARE[kind](model, x, y), X.sigmoid(), torch.rand(N))


def test_weights_by_the_examples_of_others_are_refused() -> None:
    model = mlp()
    engine, corpus, plan = lamina.make_private(
        model, (torch.randn(40, 5), torch.zeros(40)), epsilon=3.0, batch=8, steps=1, unit=torch.arange(40) // 2
    )
    with engine, raises_code("engine.probe-found-coupling"):
        for batch in corpus.batches(plan):
            count = torch.bincount(batch.unit)
            engine.backward(losses_of(model, batch.x, None) * (count[batch.unit] / count.max()), batch)


def test_a_model_that_refuses_large_values_is_probed_without_them() -> None:
    def losses(x: Tensor, y: Tensor) -> Tensor:
        if not bool((x.abs() < 9).all()):
            raise ValueError("values out of range")
        return losses_of(model, x, None)

    model = mlp()
    with Engine(model, plan_of(model)) as engine:
        engine.probe(losses, X, Y)
        assert engine.probed


def test_masks_drawn_at_random_that_may_be_empty_are_no_coupling() -> None:
    def losses(x: Tensor, y: Tensor) -> Tensor:
        mask = torch.bernoulli(torch.full(x.shape, 0.4)).bool()
        return (model(x.masked_fill(mask, 0.0)).square() * mask).sum(1) / mask.sum(1)

    model = nn.Linear(40, 40)
    with Engine(model, plan_of(model)) as engine:
        engine.probe(losses, torch.randn(N, 40), Y)
