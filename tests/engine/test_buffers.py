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


class Centred(nn.Module):
    """Keeps a mean in a parameter that no optimiser moves."""

    def __init__(self, write: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(5, 5), write
        self.center = nn.Parameter(torch.zeros(5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.write(self, x.detach())
        return self.layer(x)


def new_parameter(m: Any, x: Tensor) -> None:
    m.center = nn.Parameter(0.9 * m.center + 0.1 * x.mean(0), requires_grad=False)


def new_data(m: Any, x: Tensor) -> None:
    m.center.data = 0.9 * m.center.data + 0.1 * x.mean(0)


def trained_row(m: Any, x: Tensor) -> None:
    m.layer.weight.data[0].copy_(x.mean(0))


def trained_replaced(m: Any, x: Tensor) -> None:
    m.layer.bias = nn.Parameter(x.mean(0), requires_grad=False)


def added(m: Any, x: Tensor) -> None:
    m.seen = nn.Parameter(x.mean(0), requires_grad=False)


PARAMETER_WRITES = {
    through_data: "engine.frozen-written",
    new_data: "engine.frozen-written",
    new_parameter: "engine.frozen-written",
    trained_row: "engine.parameter-written",
    trained_replaced: "engine.tensor-used-directly",
    added: "engine.parameter-replaced",
}


@pytest.mark.parametrize("write", PARAMETER_WRITES, ids=lambda f: f.__name__)
def test_a_step_with_a_parameter_written_past_the_optimiser_is_refused(write: Callable[[Any, Tensor], None]) -> None:
    model = Centred(write)
    with Engine(model, plan_of(model)) as engine:
        with raises_code(PARAMETER_WRITES[write]):
            engine.backward(losses_of_output(model(X)), Batch(X))
        assert engine.budget.taken == 0


def test_a_loss_that_writes_to_a_trained_parameter_is_refused() -> None:
    model = Centred(lambda m, x: None)
    with Engine(model, plan_of(model)) as engine:
        losses = losses_of_output(model(X))
        trained_row(model, X)
        with raises_code("engine.parameter-written"):
            engine.backward(losses, Batch(X))


def test_trained_parameters_may_be_written_between_steps() -> None:
    model = Centred(lambda m, x: None)
    with Engine(model, plan_of(model)) as engine:
        for _ in range(40):
            engine.backward(losses_of_output(model(X)), Batch(X))
            for p in model.layer.parameters():
                p.data.sub_(0.1 * p.grad).clamp_(-1.0, 1.0)
            model.zero_grad()
            model(X)
            model.layer.weight.data.mul_(0.99)
    assert engine.budget.taken == 40


@pytest.mark.parametrize("kind", [Model, Centred])
def test_what_was_written_late_is_found_when_the_model_is_given_back(kind: Any) -> None:
    model = kind(lambda m, x: None)
    engine = Engine(model, plan_of(model))
    for step in range(4):
        if step == 3:
            (model.enc if kind is Model else model).write = through_data
        engine.backward(losses_of_output(model(X)), Batch(X))
    with raises_code("engine.buffer-written" if kind is Model else "engine.frozen-written"):
        engine.detach()
    assert (engine.detached and kind is not Model) or not model.state_dict()["enc.center"].any()
    engine.detach()  # said once


def test_an_error_inside_the_with_block_is_the_one_that_is_seen() -> None:
    model = Model(lambda m, x: None)
    with pytest.raises(KeyError), Engine(model, plan_of(model)):
        {}[through_data(model.enc, X)]


def test_extra_state_is_refused_before_anything_is_spent() -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return torch.zeros(3)

    model = nn.Sequential(Extra(5, 2))
    with raises_code("engine.extra-state"):
        Engine(model, plan_of(model))


@pytest.mark.parametrize(("name", "write"), [case for case in CASES if case[1] is not through_data])
def test_a_buffer_written_after_many_steps_is_noticed(name: str, write: Callable[[Any, Tensor], None]) -> None:
    model = Model(lambda m, x: None)
    with Engine(model, plan_of(model)) as engine:
        for _ in range(5):
            engine.backward(losses_of_output(model(X)), Batch(X))
            model.zero_grad()
        write(model.enc, X)
        with raises_code("engine.buffer-written") as refusal:
            engine.backward(losses_of_output(model(X)), Batch(X))
        assert f"'enc.{name}'" in str(refusal.value)


def test_a_frozen_parameter_written_after_many_steps_is_noticed() -> None:
    model = nn.Sequential(nn.Linear(X.shape[1], 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    with Engine(model, plan_of(model)) as engine:
        for _ in range(3):
            engine.backward(losses_of_output(model(X)), Batch(X))
            model.zero_grad()
        with torch.no_grad():
            model[0].weight[0, 0] += 1
        with raises_code("engine.frozen-written"):
            engine.backward(losses_of_output(model(X)), Batch(X))
        with torch.no_grad():
            model[0].weight[0, 0] -= 1
