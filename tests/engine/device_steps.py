"""Steps of a model on another device: the same numbers as on the CPU, and nothing that assumes the CPU on the way.

Run by test_device.py, in a process of their own.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import adaptive_plans
import pytest
import torch
from oracle import FORMS, plan_of
from pretend_device import PretendTensor, pretend_device, without_float64
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lamina
from lamina import Batch, Engine, SeededNoise
from lamina.engine import native
from lamina.engine.execute.compiled import NotCompiled
from lamina.engine.noise.source import PLAIN_NOTE, PlainNoise
from lamina.errors import CouplingError, EngineError
from lamina.plan.rules import Choose, FollowEnergy, FollowQuantile, Injection, NoiseKind
from lamina.plan.selection import Slice

pretend_device()  # before the first backward pass
N = 6


@pytest.fixture(autouse=True)
def torch_rules() -> Iterator[None]:
    """The device runs the torch rules: the CPU is to run the same."""
    torch.manual_seed(3)
    with native.switched(False):
        yield


class Ids(nn.Module):
    """A table of tokens and one of positions, which have no batch axis."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places, self.out = nn.Embedding(9, 5, padding_idx=0), nn.Embedding(4, 5), nn.Linear(5, 3)

    def forward(self, ids: Tensor) -> Tensor:
        there = torch.arange(ids.shape[1], device=ids.device)
        out: Tensor = self.out(self.tokens(ids) + self.places(there))
        return out


class Twice(nn.Module):
    """A tensor used twice, and one that belongs to no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gain = nn.Linear(5, 5), nn.Parameter(torch.ones(1, 5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(torch.tanh(self.inner(x)))) * self.gain


class Recomputes(nn.Module):
    """Activation checkpointing: a part of the forward pass runs again on the thread of the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5)), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(checkpoint(self.inner, x, use_reentrant=False))
        return out


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.recurrent = nn.MultiheadAttention(6, 2, batch_first=True), nn.GRU(6, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        hidden[:, -1] = True
        y, _ = self.attention(x, x, x, key_padding_mask=hidden, need_weights=False)
        out: Tensor = self.recurrent(y)[0]
        return out


MODELS: dict[str, tuple[Any, Any]] = {
    "rows": (lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3, bias=False)), lambda: torch.randn(N, 5)),
    "positions": (
        lambda: nn.Sequential(nn.Linear(5, 40), nn.LayerNorm(40), nn.Linear(40, 3), nn.RMSNorm(3)),
        lambda: torch.randn(N, 4, 5),
    ),
    "signals": (
        lambda: nn.Sequential(
            nn.Conv1d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Tanh(), nn.ConvTranspose1d(8, 2, 3, stride=2)
        ),
        lambda: torch.randn(N, 3, 16),
    ),
    "tokens": (Ids, lambda: torch.randint(0, 9, (N, 4))),
    "twice": (Twice, lambda: torch.randn(N, 5)),
    "sequence": (Attends, lambda: torch.randn(N, 4, 6)),
    "recomputed": (Recomputes, lambda: torch.randn(N, 5)),
    "vmap": (lambda: nn.Sequential(nn.Linear(5, 6), nn.PReLU(6), nn.Linear(6, 3)), lambda: torch.randn(N, 5)),
}


def losses_of(model: nn.Module, x: Tensor) -> Tensor:
    flat = model(x).flatten(1)
    wave = torch.cos(torch.arange(flat.shape[1], device=flat.device))
    return (flat * wave).mean(1) + 0.5 * flat.square().mean(1)


def step_of(model: nn.Module, plan: Any, x: Tensor, **who: Any) -> dict[str, Tensor]:
    """The gradients of one step, on the CPU."""
    with Engine(model, plan, noise=SeededNoise(7, hardened=False)) as engine:
        batch = Batch(x, **who)
        engine.backward(losses_of(model, x) if len(batch) else None, batch)
    given = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert all(grad.device == p.device for grad, p in zip(given.values(), model.parameters(), strict=False))
    return {name: grad.cpu() for name, grad in given.items()}


def same_on_device(model: nn.Module, plan: Any, x: Tensor, **who: Any) -> None:
    device, here = pretend_device(), copy.deepcopy(model)
    want = step_of(here, plan, x, **who)
    found = step_of(model.to(device), plan, x.to(device), **who)
    assert want.keys() == found.keys()
    for name, grad in want.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


def test_the_device_refuses_what_an_accelerator_refuses() -> None:
    here, there = torch.randn(3, 3), torch.randn(3, 3, device=pretend_device())
    for mix in (lambda: here + there, lambda: there @ here, lambda: there.numpy(), lambda: here.add_(there)):
        with pytest.raises((RuntimeError, TypeError)):
            mix()
    assert isinstance(there + 1.0, PretendTensor) and not there.is_cpu
    torch.testing.assert_close((there * torch.tensor(2.0)).cpu(), there.cpu() * 2)
    with without_float64(), pytest.raises(TypeError):
        there.double()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", list(MODELS))
def test_a_step_is_that_of_the_cpu(kind: str, form: str) -> None:
    make, draw = MODELS[kind]
    model = make()
    same_on_device(model, plan_of(model, 0.05, 0.1, clipping=form), draw())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["rows", "positions", "signals", "tokens", "sequence"])
def test_without_float64(kind: str, form: str) -> None:
    """As on MPS."""
    make, draw = MODELS[kind]
    model = make()
    plan, x = plan_of(model, 0.05, 0.1, clipping=form), draw()
    with without_float64():
        same_on_device(model, plan, x)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("kind", "where"), [*((kind, "cpu") for kind in MODELS), ("rows", "device")])
def test_patients_and_classes(kind: str, form: str, where: str) -> None:
    """Units of unequal size, padding, a class that may not move the first layer, and limits of their own."""
    make, draw = MODELS[kind]
    model = make()
    layers = len(plan_of(model).layers)
    plan = plan_of(model, [[0.05] * layers, [0.0] + [0.02] * (layers - 1)], 0.1, clipping=form)
    place = pretend_device() if where == "device" else torch.device("cpu")
    who = {"unit": [0, 0, 1, 2, 1, 2], "cls": [0, 1, 0], "weight": [1.0, 2.0, 1.0, 0.0, 1.0, 3.0]}
    given = {name: torch.tensor(value).to(place) for name, value in who.items()}
    same_on_device(model, plan, draw(), **given, scale=torch.tensor([1.0, 0.5, 1.0]), ceiling=torch.tensor([1.0] * 3))


@pytest.mark.parametrize("form", FORMS)
def test_values_that_are_not_finite_are_left_out(form: str) -> None:
    for kind in ("rows", "positions", "signals"):
        make, draw = MODELS[kind]
        model, x = make(), draw()
        x[1], x[4] = torch.nan, torch.inf
        same_on_device(model, plan_of(model, 0.05, 0.1, clipping=form), x)


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e12, 1e25])
def test_tiny_and_enormous_gradients_keep_their_bound(size: float) -> None:
    """The product of a tiny gradient and an enormous input is measured as what it is."""
    model = nn.Sequential(nn.Linear(5, 6, bias=False), nn.Linear(6, 3, bias=False))
    x, plan = torch.randn(1, 5) * size, plan_of(model, 0.05, 0.1)
    for there in (False, True):
        if there:
            model, x = model.to(pretend_device()), x.to(pretend_device())
        with Engine(model, plan) as engine, without_float64() if there else nullcontext():
            sums = engine.clipped_sums(model(x).mean(1) / size, Batch(x))
        norms = [float(total.cpu().double().norm()) for total in sums.values()]
        assert all(norm <= 0.05 for norm in norms) and max(norms) > 0.0499


def test_autocast_is_that_of_the_device() -> None:
    device, found = pretend_device(), []
    model, x = nn.Linear(5, 3), torch.randn(N, 5)
    plan = plan_of(model, 0.05, 0.1)
    for where in (torch.device("cpu"), device):
        model.to(where)
        with Engine(model, plan) as engine, torch.autocast(where.type, dtype=torch.bfloat16):
            out = model(x.to(where))
            assert out.dtype == torch.bfloat16
            found.append(engine.clipped_sums(out.float().square().mean(1), Batch(x))["weight"].cpu())
    torch.testing.assert_close(*found)
    with Engine(model, plan), torch.autocast(device.type, dtype=torch.float16), pytest.raises(EngineError) as refused:
        model(x.to(device))
    assert refused.value.code == "engine.float16-autocast"


def test_slices() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    some = {"cls": "c0", "axis": 0, "length": 8, "ranges": ((0, 2), (5, 7))}
    rows = [Slice(tensor=name, **some) for name in ("0.weight", "0.bias")]
    plan = plan_of(model, [[0.05, 0.05], [0.05, 0.05]], 0.1, slices=rows)
    for x in (torch.randn(N, 5), torch.randn(N, 4, 5)):
        same_on_device(copy.deepcopy(model), plan, x, cls=torch.tensor([0, 1, 0, 0, 1, 0]))
        same_on_device(copy.deepcopy(model), plan, x, cls=torch.zeros(N, dtype=torch.long))


EVEN, DEEP = (1.0, 1.0, 1.0), (0.5, 1.0, 2.0)
KINDS: dict[str, dict[str, Any]] = {
    "energy": {"rules": (FollowEnergy(every=1),)},
    "quantile": {"rules": (FollowQuantile(target=0.6, rate=0.5, noise=3.0),)},
    "choice": {"rules": (Choose(epsilon=0.8, every=2, names=("even", "deep"), noise=(EVEN, DEEP), price=0.1),)},
    "correlated": {"bands": 3},
    "bins": {"injection": Injection(form="per_microbatch", parts=5)},
    "raw": {"injection": Injection(form="per_sample_raw")},
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_noise_and_rules_of_every_kind(kind: str) -> None:
    """Four steps, each of which moves the weights and what the plan's rules know."""
    found = []
    for where in ("cpu", pretend_device()):
        torch.manual_seed(0)
        model = adaptive_plans.Small()
        plan = replace(adaptive_plans.plan_of(model), **KINDS[kind])
        optimizer = torch.optim.SGD(model.to(where).parameters(), lr=0.1)
        with Engine(model, plan, noise=SeededNoise(7)) as engine:
            for step in range(4):
                if engine.choice_due:
                    drawn = adaptive_plans.batch_of(seed=50 + step).to(where)
                    engine.choose(adaptive_plans.losses_of(model, drawn), drawn)
                for part in adaptive_plans.batch_of(seed=step).to(where).split(2):
                    engine.backward(adaptive_plans.losses_of(model, part), part)
                optimizer.step()
                optimizer.zero_grad()
            found.append([*(p.detach().cpu() for p in model.parameters()), torch.tensor(engine.applied.noise)])
    for here, there in zip(*found, strict=True):
        torch.testing.assert_close(there, here, rtol=1e-4, atol=1e-5)


def test_an_empty_batch_is_noise() -> None:
    model = nn.Linear(5, 3)
    same_on_device(model, plan_of(model), torch.zeros(0, 5))
    assert float(model.weight.grad.abs().min()) > 0


def test_parts_of_a_batch_and_rows_of_another_order() -> None:
    model, device = nn.Linear(5, 3), pretend_device()
    plan, x, found = plan_of(model, 0.05, 0.1), torch.randn(N, 5), {}
    for where in (torch.device("cpu"), device):
        model.to(where)
        model.zero_grad()
        with Engine(model, plan, noise=SeededNoise(7)) as engine:
            for part in Batch(x).to(where).split(3):
                with lamina.rows(torch.arange(len(part), device=where).flip(0)):
                    losses = losses_of(model, part.x.flip(0)).flip(0)
                engine.backward(losses, part)
        found[where] = model.weight.grad.cpu()
    torch.testing.assert_close(found[device], found[torch.device("cpu")])


def test_batches_keep_what_they_are() -> None:
    given = Batch(torch.randn(4, 2), torch.randn(4), unit=torch.tensor([0, 0, 1, 1]), cls=torch.tensor([0, 1]))
    there = given.to(pretend_device())
    assert isinstance(there.x, PretendTensor) and isinstance(there.y, PretendTensor) and there.draw is given.draw
    assert torch.equal(there.unit, given.unit) and torch.equal(there.cls, given.cls) and there.plain is given.plain
    assert Batch(torch.randn(4, 2)).to(pretend_device()).plain and not Batch(torch.randn(4, 2)).to("cpu").classified


def test_the_state_of_the_model_is_watched() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(5, 5), nn.Linear(5, 3).requires_grad_(False)
            self.register_buffer("kept", torch.zeros(5))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.two(self.one(x))
            return out

    device = pretend_device()
    model, x = Keeps().to(device), torch.randn(N, 5, device=device)
    with Engine(model, plan_of(model), noise=SeededNoise(7)) as engine:
        engine.backward(losses_of(model, x), Batch(x))
        for tensor, kind in ((model.kept, "buffer"), (model.two.weight, "frozen"), (model.one.weight, "parameter")):
            model.zero_grad()
            losses, before = losses_of(model, x), tensor.detach().clone()
            with torch.no_grad():
                tensor.add_(1.0)
            with pytest.raises(CouplingError) as refused:
                engine.backward(losses, Batch(x))
            assert refused.value.code == f"engine.{kind}-written" and engine.budget.taken == 1
            tensor.data.copy_(before)


def test_a_coupled_model_is_refused() -> None:
    device = pretend_device()
    model, x = nn.Linear(5, 3).to(device), torch.randn(N, 5, device=device)
    with Engine(model, plan_of(model), noise=SeededNoise(7)) as engine:
        with pytest.raises(CouplingError) as refused:
            engine.backward(losses_of(model, x - x.mean(0)) * model(x).mean(), Batch(x))
        assert refused.value.code == "engine.contributions-coupled" and engine.budget.taken == 0
        with pytest.raises(CouplingError) as refused:
            engine.probe(lambda x, y: losses_of(model, x) / x.square().mean(), x)
        assert refused.value.code == "engine.probe-found-coupling"
        engine.probe(lambda x, y: losses_of(nn.Sequential(nn.Dropout(0.5), model), x), x)


def test_integer_noise_is_refused_before_anything_is_spent() -> None:
    model = nn.Linear(5, 3).to(pretend_device())
    plan = replace(plan_of(model), noise_kind=NoiseKind.DISCRETE_GAUSSIAN, accountant="rdp-integer")
    with pytest.raises(EngineError) as refused:
        Engine(model, plan, noise=SeededNoise(7))
    assert refused.value.code == "engine.exact-noise-elsewhere"


@pytest.mark.filterwarnings("error")
def test_noise_is_hardened_by_default() -> None:
    """Added and rounded in float64 on the device: multiples of 2^-8·S, B times."""
    device = pretend_device()
    model, x = nn.Linear(5, 3).to(device), torch.randn(N, 5, device=device)
    plan = plan_of(model)
    with Engine(model, plan, noise=SeededNoise(7)) as engine:
        engine.backward(losses_of(model, x), Batch(x))
        assert engine.noise.hardened and not engine.plain_noise_note
    steps = model.weight.grad.cpu().double() * plan.batch * 2.0**8
    assert torch.equal(steps, steps.round()) and math.frexp(plan.noise[0])[0] == 0.5


def test_noise_is_plain_and_announced_where_there_is_no_float64() -> None:
    device = pretend_device()
    model, x = nn.Linear(5, 3).to(device), torch.randn(N, 5, device=device)
    with without_float64():
        with pytest.warns(PlainNoise, match="pretend has no float64"):
            engine = Engine(model, plan_of(model), noise=SeededNoise(7))
        with engine:
            assert not engine.noise.hardened and PLAIN_NOTE in engine.plain_noise_note
            engine.backward(losses_of(model, x), Batch(x))
            engine.continue_at(1, SeededNoise(8))
            assert not engine.noise.hardened
            engine.backward(losses_of(model, x), Batch(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_that_of_the_cpu_bit_by_bit(dtype: torch.dtype) -> None:
    shapes = [(3, 5), (), (70, 70)]
    for fill in (True, False):
        found = []
        for device in (torch.device("cpu"), pretend_device()):
            totals = [torch.ones(shape, dtype=dtype).to(device) for shape in shapes]
            draw = SeededNoise(7).fill_many_ if fill else SeededNoise(7).add_many_
            draw(totals, [0.5, 0.0, 2.0], step=3)
            found.append([total.cpu() for total in totals])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_compiled_steps_are_taken_by_the_hook_engine() -> None:
    device = pretend_device()
    model = nn.Linear(5, 3).to(device)
    with pytest.warns(NotCompiled, match="not on the CPU"):
        Engine(model, plan_of(model), compiled=True).detach()
