"""Writes outside of the engine in a custom loop: hooks are probed again, unusual writes give a note, usual ones do not."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import plan_of
from refusals import raises_code
from torch import Tensor, nn

import lamina
from lamina import Batch, Engine
from lamina.engine.guards.outside_writes import WrittenOutsideEngine

X, Y = torch.randn(64, 6, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 3
Act = Callable[[nn.Module, Engine], None]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def nothing(model: nn.Module, engine: Engine) -> None:
    pass


def notes(
    model: nn.Module, *, before: Act = nothing, between: Act = nothing, after: Act = nothing, steps: int = 6
) -> list[str]:
    """Return the notes of a loop that acts before the forward pass, or before or after `optimizer.step`."""
    engine, corpus, plan = lamina.make_private(model, (X, Y), epsilon=3.0, batch=16, steps=steps)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught, engine:
        warnings.simplefilter("always")
        for batch in corpus.batches(plan):
            before(model, engine)
            losses = F.cross_entropy(model(batch.x), batch.y, reduction="none") if len(batch) else None
            engine.backward(losses, batch)
            if engine.budget.taken:
                between(model, engine)
            optimizer.step()
            optimizer.zero_grad()
            after(model, engine)
        assert engine.probed and engine.budget.taken == steps
    return [str(w.message) for w in caught if w.category is WrittenOutsideEngine]


# ------------------------------------------------------------------------------------------------ gradients


@pytest.mark.parametrize("from_step", [1, 40])
def test_a_gradient_that_was_added_to_is_noted_once_by_name(from_step: int) -> None:
    def add(model: Any, engine: Engine) -> None:
        if engine.budget.taken >= from_step:
            model[0].weight.grad.add_(X.mean(0))

    (note,) = notes(net(), between=add, steps=from_step + 3)
    assert "'0.weight'.grad" in note


CLIPS: dict[str, Act] = {
    "norm": lambda m, e: nn.utils.clip_grad_norm_(m.parameters(), 0.01),  # type: ignore[dict-item, return-value]
    "norm, not reached": lambda m, e: nn.utils.clip_grad_norm_(m.parameters(), 1e6),  # type: ignore[dict-item, return-value]
    "norm of each": lambda m, e: [nn.utils.clip_grad_norm_([p], 0.01) for p in m.parameters()],  # type: ignore[dict-item, return-value]
    "value": lambda m, e: nn.utils.clip_grad_value_(m.parameters(), 0.02),
    "value of all": lambda m, e: nn.utils.clip_grad_value_(m.parameters(), 1e-4),
    "scaler": lambda m, e: [p.grad.mul_(1 / 1024) for p in m.parameters() if p.grad is not None],  # type: ignore[dict-item, return-value]
    "zero": lambda m, e: [p.grad.zero_() for p in m.parameters() if p.grad is not None],  # type: ignore[dict-item, return-value]
    "nothing": nothing,
}


@pytest.mark.parametrize("how", CLIPS)
def test_clipping_and_scaling_a_gradient_are_not_noted(how: str) -> None:
    assert notes(net(), between=CLIPS[how], steps=30) == []


def test_the_norm_and_then_the_values_are_clipped() -> None:
    def both(model: nn.Module, engine: Engine) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        nn.utils.clip_grad_value_(model.parameters(), 0.02)

    assert notes(net(), between=both) == []


# ------------------------------------------------------------------------------------------------ weights


@pytest.mark.parametrize("by_data", [False, True])
@pytest.mark.parametrize("at", [2, 40])
def test_weights_that_were_trained_in_the_clear_and_loaded_back_are_noted(at: int, by_data: bool) -> None:
    def train_a_copy(model: nn.Module, engine: Engine) -> None:
        if engine.budget.taken != at:
            return
        twin = copy.deepcopy(model)
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(twin(X), Y).backward()
            optimizer.step()
        if by_data:
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                p.data.copy_(q.data)
        else:
            model.load_state_dict(twin.state_dict())

    (note,) = notes(net(), after=train_a_copy, steps=at + 2)
    assert "'0.weight'" in note and "optimizer.step" in note


def test_a_moving_average_that_is_evaluated_and_taken_back_is_not_noted() -> None:
    average: dict[str, Tensor] = {}

    def evaluate(model: nn.Module, engine: Engine) -> None:
        own = {name: t.clone() for name, t in model.state_dict().items()}
        for name, t in own.items():
            average[name] = 0.9 * average.get(name, t) + 0.1 * t
        model.load_state_dict(average)
        with torch.no_grad():
            model.eval()(X)
        model.load_state_dict(own)
        model.train()

    assert notes(net(), after=evaluate) == []


# ------------------------------------------------------------------------------------------------ hooks


def add_mean(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output + output.mean(0).detach()


def shift_gradient(module: nn.Module, given: Any, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(g + g.mean(0) for g in given)


HOOKS: dict[str, Callable[[Any], Any]] = {
    "forward": lambda m: m[0].register_forward_hook(add_mean),
    "forward, of the model": lambda m: m.register_forward_hook(add_mean),
    "input": lambda m: m[2].register_forward_pre_hook(lambda module, args: (args[0] + args[0].mean(0).detach(),)),
    "gradient": lambda m: m[1].register_full_backward_hook(shift_gradient),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_that_was_registered_after_the_probe_is_probed_before_anything_is_spent(kind: str) -> None:
    taken = []

    def register(model: nn.Module, engine: Engine) -> None:
        if engine.budget.taken == 3 and not taken:
            taken.append(engine.budget)
            HOOKS[kind](model)

    with raises_code(
        "engine.probe-found-coupling" if kind != "gradient" else "engine.contributions-coupled"
    ) as refusal:
        notes(net(), before=register)
    assert "hook" in refusal.value.problem and taken[0].taken == 3


def test_a_hook_that_keeps_examples_apart_is_probed_and_the_loop_goes_on() -> None:
    calls = []

    def register(model: Any, engine: Engine) -> None:
        if engine.budget.taken == 3 and not calls:
            model[0].register_forward_hook(lambda module, args, output: calls.append(len(output)) or output * 2)

    assert notes(net(), before=register) == []
    assert len(calls) > 3 + 10  # the steps, and the probe


def test_a_hook_on_a_model_that_takes_no_simulated_input_is_refused_until_it_is_probed() -> None:
    class Fussy(nn.Sequential):
        def forward(self, x: Tensor) -> Any:
            if bool((x < 0).any()):
                raise ValueError("negative")
            return super().forward(x)

    model, x = Fussy(nn.Linear(4, 2)), torch.rand(8, 4)

    def losses_of(x: Tensor, y: Any) -> Tensor:
        return model(x).square().mean(1)

    with Engine(model, plan_of(model)) as engine:
        engine.probe(losses_of, x)
        engine.backward(losses_of(x, None), Batch(x))
        model.zero_grad()
        model.register_forward_hook(lambda module, args, output: output + 1)
        with raises_code("engine.hook-not-probed"):
            engine.backward(losses_of(x, None), Batch(x))
        assert engine.budget.taken == 1
        engine.probe(losses_of, x)
        engine.backward(losses_of(x, None), Batch(x))
        assert engine.budget.taken == 2


# ------------------------------------------------------------------------------------------------ attributes


class Keeps(nn.Module):
    def __init__(self, what: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.below, self.what, self.calls = nn.Linear(6, 3), what, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.what(self, x)
        out: Tensor = self.below(x)
        return out


def set_to(name: str, make: Callable[[Any, Tensor], Any]) -> Callable[[Any, Tensor], None]:
    return lambda module, x: setattr(module, name, make(module, x))


@pytest.mark.parametrize(
    "keep",
    [
        set_to("kept", lambda m, x: x.mean().detach()),
        set_to("kept", lambda m, x: x.detach()),
        set_to("kept", lambda m, x: {"of": [x.mean(0).detach()]}),
        set_to("_kept", lambda m, x: x.mean(0).detach()),
    ],
)
def test_an_attribute_that_keeps_the_last_batch_is_noted_once_by_name(keep: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 6), Keeps(keep))
    (note,) = notes(model)
    assert "'1.kept" in note or "'1._kept" in note


@pytest.mark.parametrize(
    "keep",
    [
        set_to("cos", lambda m, x: torch.cos(torch.arange(m.calls)[:, None] * torch.arange(6))),  # longer each time
        set_to("mask", lambda m, x: torch.ones(4 + m.calls % 5, 4 + m.calls % 5).tril()),
        set_to("count", lambda m, x: torch.tensor(m.calls)),
        set_to("calls", lambda m, x: m.calls),
    ],
)
def test_caches_and_counters_are_not_noted(keep: Any) -> None:
    assert notes(nn.Sequential(nn.Linear(6, 6), Keeps(keep))) == []


def test_a_moving_average_in_an_attribute_is_not_noted() -> None:
    def average(model: Any, engine: Engine) -> None:
        model.average = [0.9 * a + 0.1 * p.detach() for a, p in zip(model.average, model.parameters(), strict=True)]

    model: Any = net()
    model.average = [p.detach().clone() for p in model.parameters()]
    assert notes(model, after=average, steps=10) == []
