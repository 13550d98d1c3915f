"""Pre-training on public or simulated data: seeded, in place, and never on private data."""

from __future__ import annotations

import pytest
import torch
from refusals import raises_code
from torch import Tensor, nn

import lamina


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6))


def error(output: Tensor, x: Tensor) -> Tensor:
    return (output - x).square().mean(1)


X = torch.randn(200, 2, generator=torch.Generator().manual_seed(0)) @ torch.randn(
    2, 6, generator=torch.Generator().manual_seed(1)
)


def test_it_learns_and_gives_the_same_weights_again() -> None:
    first, second = net(), net()
    torch.manual_seed(7)
    state = torch.get_rng_state()
    losses = lamina.pretrain(first, error, X, proxy="simulated: planes", steps=200, lr=1e-2)
    assert torch.equal(state, torch.get_rng_state())
    assert sum(losses[-10:]) < 0.2 * sum(losses[:10])
    lamina.pretrain(second, error, X, proxy="simulated: planes", steps=200, lr=1e-2)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert all(p.grad is None for p in first.parameters())


def test_the_lower_band_can_be_left_as_it_was_learned() -> None:
    model = net()
    lamina.pretrain(model, error, X, proxy="public", steps=3, private_top=0.34)
    assert [p.requires_grad for p in model.parameters()] == [False] * 4 + [True] * 2
    engine, corpus, plan = lamina.make_private(model, X, epsilon=3.0, batch=20, steps=3)
    before = [p.clone() for p in model.parameters()]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for batch in corpus.batches(plan):
        engine.backward(error(model(batch.x), batch.x) if len(batch) else None, batch)
        optimizer.step()
        optimizer.zero_grad()
    moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert moved == [False] * 4 + [True] * 2
    engine.detach()


@pytest.mark.parametrize("proxy", ["private", "", "patients: of our ward"])
def test_private_data_are_refused(proxy: str) -> None:
    with raises_code("train.pretrain-not-public"):
        lamina.pretrain(net(), error, X, proxy=proxy, steps=3)
