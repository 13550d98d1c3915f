"""Layers that nobody reaches: by the plan they stay bit-identical; by the batch they still get their noise."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
import torch
from oracle import FORMS, losses_of, plan_of
from torch import Tensor, nn

from lamina import Batch, Engine, SeededNoise

X = torch.randn(6, 5, generator=torch.Generator().manual_seed(4))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))


def _nodes(losses: Tensor) -> set[str]:
    seen, stack, names = set(), [losses.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        use = getattr(node, "lamina_use", None)
        names.add(use.where if use is not None else type(node).__name__)
        stack.extend(child for child, _ in node.next_functions)
    return names


def test_the_graph_stops_above_what_no_class_reaches() -> None:
    model = mlp()
    with Engine(model, plan_of(model, [0.0, 0.0, 1.0, 1.0])):
        names = _nodes(losses_of(model, X, None))
    assert {"3", "5"} <= names
    assert not {"0", "2"} & names


@pytest.mark.parametrize("constant_time", [True, False])
def test_no_gradient_is_sent_below_what_the_batch_reaches(constant_time: bool) -> None:
    """Batch truncation skips arithmetic: the lower layers' rules are asked for nothing. In constant time they are."""
    model = mlp()
    plan = plan_of(model, [[1.0] * 4, [0.0, 0.0, 0.0, 1.0]])
    asked: list[str] = []
    with Engine(model, plan, constant_time=constant_time) as engine:
        losses = losses_of(model, X, None)
        zeros = torch.zeros(6, dtype=torch.long)
        engine.clipped_sums(losses, Batch(X, cls=zeros))  # the ownership check is past
        engine.eager.ownership.due = lambda *_: False  # type: ignore[method-assign]
        for index in (0, 2, 3, 5):
            rule = model[index].forward.layer_forward.rule
            own = rule.input_grad

            def watch(*args: Any, index: int = index, own: Any = own) -> Tensor:
                asked.append(str(index))
                return own(*args)

            rule.input_grad = watch
        engine.clipped_sums(losses_of(model, X, None), Batch(X, cls=torch.ones(6, dtype=torch.long)))
        assert set(asked) == ({"2", "3", "5"} if constant_time else set())
        engine.clipped_sums(losses_of(model, X, None), Batch(X, cls=zeros))
        assert set(asked) == {"2", "3", "5"}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cls", [[0] * 6, [1] * 6, [2] * 6, [1, 2] * 3, [0, 1, 2] * 2], ids=str)
def test_constant_time_gives_the_same(cls: list[int], form: str) -> None:
    """Bands at the top, at the bottom, and with a hole, in turn."""
    model = mlp()
    bands = [[0.1] * 4, [0.0, 0.0, 0.1, 0.1], [0.1, 0.0, 0.0, 0.1]]
    grads = []
    for constant_time in (True, False):
        plan = plan_of(model, bands, 0.5, clipping=form)
        model.zero_grad()
        with Engine(model, plan, noise=SeededNoise(2), constant_time=constant_time) as engine:
            engine.backward(losses_of(model, X, None), Batch(X, cls=torch.tensor(cls)))
        assert all(p.grad is not None and p.grad.norm() > 0 for p in model.parameters())
        grads.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("form", FORMS)
def test_every_noised_layer_gets_noise_whoever_was_sampled(form: str) -> None:
    model = mlp()
    plan = plan_of(model, [[1.0] * 4, [0.0, 0.0, 0.0, 1.0]], 2.0, clipping=form, batch=1.0)
    batch = Batch(X, cls=torch.ones(6, dtype=torch.long))
    with Engine(model, plan, noise=SeededNoise(0)) as engine:
        engine.backward(losses_of(model, X, None), batch)
        sums = engine.clipped_sums(losses_of(model, X, None), batch)
    for index in (0, 2):
        assert sums[f"{index}.weight"].norm() == 0
        assert 1.2 < float(model[index].weight.grad.std()) < 2.8


def test_a_public_layer_without_public_contributions_gets_zero() -> None:
    model = mlp()
    plan = plan_of(model, [[0.0, 0.0, 1.0, 1.0], [inf] * 4], public=(1,))
    assert plan.noise[0] == 1.0  # plan_of gives every reached layer noise; here the public ones get none
    plan = plan_of(model, [[0.0, 0.0, 1.0, 1.0], [inf] * 4], [0.0, 0.0, 1.0, 1.0], public=(1,))
    with Engine(model, plan) as engine:
        engine.backward(losses_of(model, X, None), Batch(X, cls=torch.zeros(6, dtype=torch.long)))
    assert model[0].weight.grad.norm() == 0
    assert model[2].weight.grad.norm() == 0
    assert model[5].weight.grad.norm() > 0
