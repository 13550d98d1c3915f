"""What no class reaches, layers and slices, comes out of training bit for bit: weights and optimiser state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from by_hand import cut
from oracle import layers_of, losses_of, plan_of
from refusals import raises_code
from torch import Tensor, nn
from torch.optim import Optimizer

from lamina import Batch, Engine, SeededNoise
from lamina.plan.selection import Range
from lamina.plan.step_plan import StepPlan
from lamina.signals.autoencoders import TransformerAutoencoder

STEPS, TOKENS = 50, 5
Make = Callable[[Any], Optimizer]


def bits(t: Tensor) -> Tensor:
    """The tensor as whole numbers: -0.0 is not 0.0, and a NaN is itself."""
    return t.detach().contiguous().view({4: torch.int32, 8: torch.int64, 2: torch.int16}[t.element_size()]).clone()


def transformer() -> TransformerAutoencoder:
    return TransformerAutoencoder(4, TOKENS, width=8, layers=4, heads=2, hidden=12, code=4)


def three_classes(model: nn.Module, form: str) -> tuple[StepPlan, dict[str, tuple[int, list[Range]]]]:
    """c0: head 1 of two attention blocks. c1: the upper band. c2: a sparse set of layers, one of them in part.

    And by hand, for every tensor, what of it somebody reaches: (axis, ranges); nothing where nobody does.
    """
    layers = layers_of(model)
    heads = {
        f"{block}.{name}": (0 if name != "out" else 1)
        for block in ("encoder.0", "encoder.1")
        for name in ("query", "key", "value", "out")
    }
    band = {layer.name for layer in layers if layer.name.startswith(("decoder.1", "norm", "head"))}
    sparse = {"embed", "encoder.1.up", "decoder.0.norm2"}
    slices = [cut(f"{name}.weight", 8, (4, 8), axis=axis, cls="c0") for name, axis in heads.items()]
    slices += [cut(f"{name}.bias", 8, *([(4, 8)] if axis == 0 else []), cls="c0") for name, axis in heads.items()]
    slices.append(cut("encoder.1.up.weight", 12, (2, 3), (7, 12), cls="c2"))
    rows = [[0.3 if layer.name in names else 0.0 for layer in layers] for names in (heads, band, sparse)]
    open_: dict[str, tuple[int, list[Range]]] = {
        name: (0, [(0, max(1, p.shape[0] if p.dim() else 1))])
        for name, p in model.named_parameters()
        if name.rpartition(".")[0] in band | sparse
    }
    open_["encoder.1.up.weight"] = (0, [(2, 3), (7, 12)])
    for name, axis in heads.items():
        open_[f"{name}.weight"] = (axis, [(4, 8)])
        if axis == 0:
            open_[f"{name}.bias"] = (0, [(4, 8)])
    return plan_of(model, rows, 0.5, clipping=form, slices=slices, steps=200), open_


def parts(t: Tensor, open_: tuple[int, list[Range]] | None) -> tuple[Tensor, Tensor]:
    """What somebody reaches of a tensor, and what nobody does, as bits."""
    mask = torch.zeros(t.shape, dtype=torch.bool)
    for first, stop in open_[1] if open_ is not None else []:
        mask.narrow(open_[0], first, stop - first).fill_(True)  # type: ignore[index]
    return bits(t)[mask], bits(t)[~mask]


def state_of(optimizer: Optimizer, p: Tensor) -> dict[str, Tensor]:
    return {k: v for k, v in optimizer.state.get(p, {}).items() if isinstance(v, Tensor) and v.shape == p.shape}


def train(model: nn.Module, plan: StepPlan, optimizer: Optimizer, steps: int) -> None:
    source = torch.Generator().manual_seed(9)
    with Engine(model, plan, noise=SeededNoise(5)) as engine:
        for step in range(steps):
            n = 0 if step == 7 else int(torch.randint(1, 7, (), generator=source))
            x = torch.randn(n, TOKENS, 4, generator=source)
            batch = Batch(x, cls=torch.randint(0, 3, (n,), generator=source))
            engine.backward(losses_of(model, x, None) if n else None, batch)
            optimizer.step()
            optimizer.zero_grad()


def warm(model: nn.Module, optimizer: Optimizer) -> None:
    """Two ordinary steps on everything: the optimiser then has momentum where later nobody reaches."""
    for _ in range(2):
        losses_of(model, torch.randn(4, TOKENS, 4), None).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def check(make: Make, steps: int, form: str, warmed: bool) -> None:
    model = transformer()
    optimizer = make(model.parameters())
    if warmed:
        warm(model, optimizer)
    plan, open_ = three_classes(model, form)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = {name: copy.deepcopy(state_of(optimizer, p)) for name, p in model.named_parameters()}
    train(model, plan, optimizer, steps)
    for name, p in model.named_parameters():
        reached, rest = parts(p, open_.get(name))
        before, kept = parts(weights[name], open_.get(name))
        assert torch.equal(rest, kept), name
        assert bool((reached != before).all()), name
        if name not in open_:
            assert p.grad is None
            assert set(state_of(optimizer, p)) == set(state[name])
        for key, value in state_of(optimizer, p).items():
            was = state[name].get(key, torch.zeros_like(value))
            assert torch.equal(parts(value, open_.get(name))[1], parts(was, open_.get(name))[1]), (name, key)


@pytest.mark.parametrize("form", ["box", pytest.param("joint", marks=pytest.mark.slow)])
@pytest.mark.parametrize("warmed", [False, True], ids=["fresh", "trained before"])
@pytest.mark.parametrize(
    "make",
    [lambda ps: torch.optim.AdamW(ps, 0.01, weight_decay=0.1), lambda ps: torch.optim.SGD(ps, 0.01, momentum=0.9)],
    ids=["adamw", "sgd"],
)
def test_three_classes_for_fifty_steps(make: Make, form: str, warmed: bool) -> None:
    check(make, STEPS, form, warmed)


OPTIMISERS: dict[str, Make] = {
    "adamw foreach": lambda ps: torch.optim.AdamW(ps, 0.01, weight_decay=0.1, foreach=True),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, 0.01, weight_decay=0.1, fused=True),
    "adamw amsgrad": lambda ps: torch.optim.AdamW(ps, 0.01, weight_decay=0.1, amsgrad=True),
    "adam with decay": lambda ps: torch.optim.Adam(ps, 0.01, weight_decay=0.1),
    "sgd nesterov": lambda ps: torch.optim.SGD(ps, 0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd dampening": lambda ps: torch.optim.SGD(ps, 0.01, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "sgd foreach": lambda ps: torch.optim.SGD(ps, 0.01, momentum=0.9, weight_decay=0.1, foreach=True),
    "sgd fused": lambda ps: torch.optim.SGD(ps, 0.01, momentum=0.9, weight_decay=0.1, fused=True),
    "sgd plain": lambda ps: torch.optim.SGD(ps, 0.01, weight_decay=0.1),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, 0.01, momentum=0.9, centered=True, weight_decay=0.1),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, 0.01, weight_decay=0.1),
    "adadelta": lambda ps: torch.optim.Adadelta(ps, 0.1, weight_decay=0.1),
    "adamax": lambda ps: torch.optim.Adamax(ps, 0.01, weight_decay=0.1),
    "nadam": lambda ps: torch.optim.NAdam(ps, 0.01, weight_decay=0.1),
    "radam": lambda ps: torch.optim.RAdam(ps, 0.01, weight_decay=0.1),
    "asgd": lambda ps: torch.optim.ASGD(ps, 0.01, weight_decay=0.1),
}


@pytest.mark.parametrize("warmed", [False, True], ids=["fresh", "trained before"])
@pytest.mark.parametrize("name", OPTIMISERS)
def test_every_optimiser_whose_state_has_the_shape_of_its_tensor(name: str, warmed: bool) -> None:
    check(OPTIMISERS[name], 3, "joint" if "sgd" in name else "box", warmed)


def linear() -> tuple[nn.Linear, StepPlan]:
    model = nn.Linear(3, 4)
    slices = [cut("weight", 4, (0, 2), cls="c0"), cut("bias", 4, (0, 2), cls="c0")]
    return model, plan_of(model, [[1.0]], 0.5, slices=slices)


def steps(model: nn.Module, plan: StepPlan, optimizer: Optimizer, count: int = 2) -> Iterator[Engine]:
    with Engine(model, plan, noise=SeededNoise(1)) as engine:
        for _ in range(count):
            x = torch.randn(3, 3)
            engine.backward(losses_of(model, x, None), Batch(x))
            optimizer.step()
            optimizer.zero_grad()
            yield engine


def test_state_that_does_not_start_at_zero_starts_as_it_does() -> None:
    """Rprop keeps a step size of its own in every place, which starts as the learning rate."""
    model, plan = linear()
    optimizer = torch.optim.Rprop(model.parameters(), lr=0.03)
    before = model.weight.detach().clone()
    list(steps(model, plan, optimizer))
    assert torch.equal(model.weight[2:], before[2:])
    state = optimizer.state[model.weight]
    assert torch.equal(state["step_size"][2:], torch.full((2, 3), 0.03))
    assert not state["prev"][2:].any()


def test_state_that_mixes_places_is_refused_and_the_weights_are_kept() -> None:
    model, plan = linear()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.1, weight_decay=0.1)
    before = model.weight.detach().clone()
    with raises_code("engine.optimizer-state-shape"):
        list(steps(model, plan, optimizer))
    assert torch.equal(model.weight[2:], before[2:])
    optimizer.zero_grad()
    with raises_code("engine.optimizer-state-shape"):  # the state is there now: refused before the step
        list(steps(model, plan, optimizer))


def test_state_that_mixes_places_is_none_of_our_business_where_all_is_reached() -> None:
    model = nn.Linear(3, 4)
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.1)
    assert len(list(steps(model, plan_of(model), optimizer))) == 2


def test_only_tensors_of_this_model_and_only_while_attached() -> None:
    model, plan = linear()
    other = nn.Linear(3, 4)
    with Engine(model, plan):
        optimizer = torch.optim.SGD(other.parameters(), 0.1, weight_decay=0.5)
        losses_of(other, torch.randn(3, 3), None).mean().backward()
        before = other.weight.detach().clone()
        optimizer.step()
        assert bool((other.weight != before).all())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.5)
    losses_of(model, torch.randn(3, 3), None).mean().backward()
    before = model.weight.detach().clone()
    optimizer.step()
    assert bool((model.weight != before).all())


def test_averaged_weights_and_a_checkpoint_between_steps() -> None:
    """An average of weights that stay is those weights; state that was loaded is kept as it was loaded."""
    model, plan = linear()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.3)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    before = model.weight.detach().clone()
    for _ in steps(model, plan, optimizer, 4):
        average.update_parameters(model)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(average.module.weight[2:], before[2:])
    assert not torch.equal(average.module.weight[:2], before[:2])
    assert not optimizer.state[model.weight]["exp_avg"][2:].any()
    assert optimizer.state[model.weight]["exp_avg"][:2].all()


def test_slices_hold_without_a_gradient_and_with_accumulated_ones() -> None:
    model, plan = linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.5)
    before = model.weight.detach().clone()
    with Engine(model, plan, noise=SeededNoise(1)) as engine:
        optimizer.step()
        for _ in range(2):  # the second adds to the first
            x = torch.randn(3, 3)
            engine.backward(losses_of(model, x, None), Batch(x))
        optimizer.step()
    assert torch.equal(model.weight[2:], before[2:])
    assert bool((model.weight[:2] != before[:2]).all())
