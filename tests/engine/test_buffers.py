"""Private data must not leave through buffers: whatever their type, whoever writes them, however the model is called."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import losses_of_output, plan_of
from refusals import raises_code
from torch import Tensor, nn

from lamina import Batch, Engine

X = torch.randn(6, 5, generator=torch.Generator().manual_seed(1)) + 1.0


class Encoder(nn.Module):
    """Writes what it sees to a buffer, in one way or another."""

    def __init__(self, write: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(5, 4), write
        self.register_buffer("center", torch.full((5,), torch.nan))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.center[:] = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.write(self, x.detach())
        return self.layer(x)


class Model(nn.Module):
    def __init__(self, write: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.enc, self.head = Encoder(write), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.enc(x))


def reassign(m: Any, x: Tensor) -> None:
    m.center = 0.9 * m.center + 0.1 * x.mean(0)


def in_place(m: Any, x: Tensor) -> None:
    m.center.lerp_(x.mean(0), 0.1)


def count(m: Any, x: Tensor) -> None:
    m.seen += int((x > 0).sum())


def through_data(m: Any, x: Tensor) -> None:
    m.center.data.add_(x.mean(0))


def lazily(m: Any, x: Tensor) -> None:
    if "first" not in m._buffers:
        m.register_buffer("first", x.mean(0))


WRITES = {"center": (reassign, in_place, through_data), "seen": (count,), "first": (lazily,)}
CASES = [(name, write) for name, writes in WRITES.items() for write in writes]
CALLS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "whole": lambda m, x: m(x),
    "by parts": lambda m, x: m.head(m.enc(x)),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("name", "write"), CASES)
def test_a_step_with_a_written_buffer_is_refused_by_name_and_the_buffer_put_back(
    name: str, write: Callable[[Any, Tensor], None], call: str
) -> None:
    model = Model(write)
    with Engine(model, plan_of(model)) as engine:
        if call == "whole" and write is in_place:
            with raises_code("engine.written-during-forward"):
                model(X)
            return
        losses = losses_of_output(CALLS[call](model, X))
        with raises_code("engine.buffer-written") as refusal:
            engine.backward(losses, Batch(X))
        assert engine.budget.taken == 0 and f"'enc.{name}'" in str(refusal.value)
    assert all(p.grad is None for p in model.parameters())
    assert not model.enc.center.any() and not model.enc.seen


def test_a_write_that_shows_by_value_only_is_found_before_weights_are_handed_out() -> None:
    model = Model(lambda m, x: None)
    with Engine(model, plan_of(model)) as engine:
        for _ in range(3):
            engine.backward(losses_of_output(model(X)), Batch(X))
        model.enc.write = through_data
        engine.backward(losses_of_output(model(X)), Batch(X))  # neither identity nor version shows it
        with raises_code("engine.buffer-written"):
            model.state_dict()
        assert not model.state_dict()["enc.center"].any()
    assert model.state_dict()


def test_buffers_from_public_data_and_loaded_ones_are_accepted() -> None:
    model = Model(lambda m, x: None)
    saved = copy.deepcopy(model).state_dict()
    saved["enc.center"] += 3.0
    with Engine(model, plan_of(model)) as engine:
        model.enc.center.fill_(0.5)
        engine.accept_buffers()
        engine.backward(losses_of_output(model(X)), Batch(X))
        model.load_state_dict(saved)
        engine.backward(losses_of_output(model(X)), Batch(X))
        model.enc.center = model.enc.center.clone()  # the same values in another tensor
        engine.backward(losses_of_output(model(X)), Batch(X))
        twin = copy.deepcopy(model)
        twin.enc.center.fill_(7.0)  # a copy is nobody's
        twin.load_state_dict(twin.state_dict())
    assert engine.budget.taken == 3
