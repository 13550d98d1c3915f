"""Attaching and detaching leave no trace; meanwhile the model is what it was."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from oracle import losses_of, plan_of, trace_of
from refusals import raises_code
from torch import Tensor, nn
from torch.optim import optimizer as optimizers

from lamina import Batch, Engine, LayerStack

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


class Everything(nn.Module):
    """A module of every kind that the engine touches differently."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.embed = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.recur = nn.GRU(8, 8, batch_first=True)
        self.prelu = nn.PReLU(8)
        self.weighted = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.drop = nn.Dropout(0.0)
        self.head = nn.Linear(8, 11)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.zeros(1))

    def forward(self, ids: Tensor) -> Tensor:
        h = torch.cat([self.token.expand(len(ids), -1, -1), self.embed(ids)], 1)
        h = self.norm(h + self.attention(h, h, h, need_weights=False)[0])
        h = self.weighted(self.prelu(self.recur(h)[0].transpose(1, 2)).transpose(1, 2))
        return self.head(self.drop(self.frozen(h).tanh()))

    def method_of_the_user(self) -> str:
        return "still here"


IDS = torch.randint(0, 11, (5, 4), generator=torch.Generator().manual_seed(0))


def everything() -> Everything:
    model = Everything()
    model.frozen.eval()
    return model


def global_state() -> tuple[int, int]:
    return len(optimizers._global_optimizer_pre_hooks), len(optimizers._global_optimizer_post_hooks)


def test_attach_and_detach_leave_no_trace() -> None:
    model = everything()
    before, keys, hooks = trace_of(model), list(model.state_dict()), global_state()
    engine = Engine(model, plan_of(model, 0.1))
    for _ in range(2):
        engine.backward(losses_of(model, IDS, None), Batch(IDS))
    model.zero_grad()
    engine.detach()
    assert trace_of(model) == before
    assert list(model.state_dict()) == keys
    assert global_state() == hooks
    engine.detach()  # twice is once
    assert trace_of(model) == before


def test_what_the_user_sees_while_attached() -> None:
    model = everything()
    keys = list(model.state_dict())
    kinds = [type(m) for m in model.modules()]
    names = [name for name, _ in model.named_parameters()]
    identity = [id(p) for p in model.parameters()]
    with Engine(model, plan_of(model, 0.1)):
        assert type(model) is Everything
        assert model.method_of_the_user() == "still here"
        assert list(model.state_dict()) == keys
        assert [type(m) for m in model.modules()] == kinds
        assert [name for name, _ in model.named_parameters()] == names
        assert [id(p) for p in model.parameters()] == identity
        model.load_state_dict(model.state_dict())
        LayerStack.from_model(model)


@pytest.mark.parametrize("training", [True, False])
def test_the_forward_pass_is_the_models_own(training: bool) -> None:
    model = everything().train(training)
    with torch.no_grad():
        want = model(IDS)
    with Engine(model, plan_of(model, 0.1)):
        torch.testing.assert_close(model(IDS).detach(), want, rtol=1e-5, atol=1e-6)
        with torch.no_grad():
            assert torch.equal(model(IDS), want)
        with torch.inference_mode():
            assert torch.equal(model(IDS), want)
        assert all(m.training == (training and m is not model.frozen) or m is model.frozen for m in model.modules())


def test_training_in_eval_mode_works() -> None:
    model = everything().eval()
    with Engine(model, plan_of(model, 0.1)) as engine:
        engine.backward(losses_of(model, IDS, None), Batch(IDS))
    assert not any(m.training for m in model.modules())


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),  # noqa: S301
    "torch.save": lambda model: _saved(model),
}


def _saved(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 6), nn.LayerNorm(6)
        self.prelu, self.head = nn.PReLU(), nn.Linear(6, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.prelu(self.norm(self.embed(ids))))


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_of_an_attached_model_is_a_plain_model(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "Small", Small)
    import sys

    sys.modules.setdefault(Small.__module__, sys.modules[__name__])
    model = Small()
    plain = copy.deepcopy(model)
    with Engine(model, plan_of(model, 0.1)) as engine:
        model(IDS)
        made = COPIES[way](model)
        assert torch.equal(made(IDS), plain(IDS))
        made(IDS).sum().backward()  # a plain backward: not the engine's
        assert all(p.grad is not None for p in made.parameters())
        for (name, a), b in zip(made.named_modules(), plain.modules(), strict=True):
            assert set(vars(a)) - {"forward"} == set(vars(b)), name
            if "forward" in vars(
                a
            ):  # a copy of the instance's dictionary keeps the entry: the class's, bound to the copy
                assert a.forward.__func__ is type(b).forward, name
                assert a.forward.__self__ is a, name
        engine.backward(losses_of(model, IDS, None), Batch(IDS))  # the original is still attached
        made.zero_grad()
        with Engine(made, plan_of(made, 0.1)) as other:
            other.backward(losses_of(made, IDS, None), Batch(IDS))
            kinds = [type(m.forward.layer_forward).__name__ for m in (made.embed, made.norm, made.head)]
            assert kinds == ["EmbeddingForward", "NormForward", "LinearForward"]  # rules, as for the original
    assert made.head.weight.grad is not model.head.weight.grad


def test_attaching_twice_is_refused() -> None:
    model = everything()
    with Engine(model, plan_of(model, 0.1)) as engine:
        before, hooks = trace_of(model), global_state()
        with raises_code("engine.already-attached"):
            Engine(model, plan_of(model, 0.1))
        with raises_code("engine.already-attached"):
            Engine(model.recur, plan_of(model.recur, 0.1))
        assert trace_of(model) == before
        assert global_state() == hooks
        engine.backward(losses_of(model, IDS, None), Batch(IDS))
    with Engine(model, plan_of(model, 0.1)) as engine:
        model.zero_grad()
        engine.backward(losses_of(model, IDS, None), Batch(IDS))


def test_an_exception_while_attaching_leaves_no_trace() -> None:
    model = everything()
    model.bad = nn.Embedding(4, 4, sparse=True)
    before, hooks = trace_of(model), global_state()
    with raises_code("engine.embedding-option"):
        Engine(model, plan_of(model, 0.1))
    assert trace_of(model) == before
    assert global_state() == hooks


def test_leaving_the_block_by_an_exception_detaches() -> None:
    model = everything()
    before = trace_of(model)
    with pytest.raises(ZeroDivisionError), Engine(model, plan_of(model, 0.1)):
        1 / 0  # noqa: B018
    assert trace_of(model) == before


def test_a_forward_of_the_users_own_is_put_back() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    own = model[0].forward

    def logged(x: Tensor) -> Tensor:
        return own(x) * 2

    model[0].forward = logged
    x = torch.randn(3, 4)
    with torch.no_grad():
        want = model(x)
    with Engine(model, plan_of(model, 0.1)) as engine:
        losses = losses_of(model, x, None)
        torch.testing.assert_close(model(x).detach(), want)
        engine.clipped_sums(losses, Batch(x))
    assert model[0].forward is logged


def test_spectral_norm_is_refused_by_name() -> None:
    old = nn.utils.spectral_norm(nn.Linear(4, 4))
    new = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    for module in (old, new):
        model = nn.Sequential(nn.Linear(4, 4), module)
        before = trace_of(model)
        with raises_code("engine.spectral-norm"):
            Engine(model, plan_of(model, 0.1))
        assert trace_of(model) == before


def test_schedulers_and_any_optimiser_work() -> None:
    model = everything()
    for make in (torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad):
        optimizer = make(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        with Engine(model, plan_of(model, 0.1)) as engine:
            for _ in range(2):
                engine.backward(losses_of(model, IDS, None), Batch(IDS))
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()


def test_other_models_and_their_optimisers_are_left_alone() -> None:
    model, other = everything(), nn.Linear(3, 2)
    optimizer = torch.optim.LBFGS(other.parameters())
    with Engine(model, plan_of(model, 0.1)):

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = other(torch.ones(1, 3)).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
