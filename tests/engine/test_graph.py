"""The walk before each backward pass: a covered tensor is entered through the engine, or the step is refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from net_builders import Net, refused
from oracle import agree, losses_of, plan_of
from refusals import raises_code
from torch import Tensor, nn

from lamina import Batch, Engine
from lamina.engine import native
from lamina.engine.distributed import Ranks
from lamina.engine.execute import sums
from lamina.engine.execute.grads import ContributionGrads
from lamina.engine.noise.source import SeededNoise
from lamina.errors import EngineError, UnclippedGradient

N = 5
X = torch.randn(N, 4, generator=torch.Generator().manual_seed(1))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def addmm(net: nn.Module, x: Tensor) -> Tensor:
    """Reads the weights of a list of linears, as fused kernels do."""
    for m in net.maps:
        x = torch.addmm(m.bias, x, m.weight.t()).tanh()
    return x


DIRECT: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Tensor]]] = {
    "alone": (mlp, lambda m: F.linear(m[:2](X), m[2].weight).square().mean(1)),
    # the trap of engines that only replace modules: part of the gradient would be clipped, part not
    "beside its module": (mlp, lambda m: (m(X) + F.linear(m[:2](X), m[2].weight)).mean(1)),
    "a penalty": (mlp, lambda m: losses_of(m, X, None) + m[0].weight.square().sum()),
    "forward never called": (
        lambda: Net(addmm, maps=nn.ModuleList(nn.Linear(4, 4) for _ in range(2))),
        lambda m: losses_of(m, X, None),
    ),
    "input of another layer": (
        lambda: Net(lambda m, x: m.table(x) @ m.map(m.table.weight), table=nn.Linear(4, N), map=nn.Linear(4, 4)),
        lambda m: losses_of(m, X, None),
    ),
}


@pytest.mark.parametrize("way", DIRECT)
def test_a_weight_used_directly(way: str) -> None:
    make, losses = DIRECT[way]
    refused(make(), X, "engine.tensor-used-directly", losses=losses)


def test_linears_in_a_module_list_are_all_seen() -> None:
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        for m in net.maps:
            x = m(x).tanh()
        return net.named["a"](x)

    agree(
        Net(
            forward, maps=nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), named=nn.ModuleDict({"a": nn.Linear(4, 4)})
        ),
        X,
    )


def test_a_leaf_that_is_not_the_models() -> None:
    foreign = torch.randn(3, requires_grad=True)
    refused(mlp(), X, "engine.foreign-tensor", losses=lambda m: (m(X) * foreign).mean(1))
    assert foreign.grad is None


def test_an_input_that_requires_a_gradient_is_left_without_one_or_refused() -> None:
    model, x = mlp(), X.clone().requires_grad_()
    with Engine(model, plan_of(model)) as engine:
        try:
            engine.backward(losses_of(model, x, None), Batch(x.detach()))
        except UnclippedGradient as problem:
            assert "not the model's" in str(problem)
    assert x.grad is None


def test_losses_without_a_graph() -> None:
    def quiet(m: nn.Module) -> Tensor:
        with torch.no_grad():
            return losses_of(m, X, None)

    refused(mlp(), X, "engine.losses-without-graph", losses=quiet)


@pytest.mark.parametrize("detached", [False, True])
def test_plain_backward_while_attached_is_refused(detached: bool) -> None:
    model = mlp()
    engine = Engine(model, plan_of(model))
    loss = losses_of(model, X, None).mean()
    if detached:
        engine.detach()
    with raises_code("engine.backward-outside-engine"):
        loss.backward()
    engine.detach()
    assert all(p.grad is None for p in model.parameters())
    losses_of(model, X, None).mean().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_backward_inside_the_models_forward_is_refused() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        y = m.l(x)
        y.sum().backward(retain_graph=True)
        return y

    model = Net(forward, l=nn.Linear(4, 4))
    with Engine(model, plan_of(model)), raises_code("engine.backward-outside-engine"):
        model(X)
    assert model.l.weight.grad is None


@pytest.mark.parametrize("direct", [True, False])
def test_backward_inside_a_gradient_hook_is_refused(direct: bool) -> None:
    """A hook that runs another backward pass while the engine's is under way."""
    model = mlp()

    def hook(g: Tensor) -> None:
        with torch.enable_grad():
            other = F.linear(X[:, :4], model[0].weight).sum() if direct else model(X).sum()
        other.backward()

    with Engine(model, plan_of(model)) as engine:
        out = model(X)
        out.register_hook(hook)
        with raises_code("engine.gradient-not-clipped", "engine.hidden-backward"):
            engine.backward(out.square().mean(1), Batch(X))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("in_place", [True, False])
def test_a_foreign_gradient_is_refused(in_place: bool) -> None:
    """Whether it was there first, or was accumulated on top of the engine's own."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = [p.detach().clone() for p in model.parameters()]
    with Engine(model, plan_of(model)) as engine:
        if in_place:
            engine.backward(losses_of(model, X, None), Batch(X))
        charged = engine.budget.taken
        try:
            F.linear(X, model[0].weight).sum().backward()
        except UnclippedGradient as problem:
            assert "0.weight" in str(problem)
            return
        with pytest.raises(UnclippedGradient, match=r"'0\.weight'"):
            optimizer.step()
        with pytest.raises(UnclippedGradient, match=r"'0\.weight'.*zero_grad"):
            engine.backward(losses_of(model, X, None), Batch(X))
        assert engine.budget.taken == charged
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_what_a_user_does_to_the_noised_gradient_is_post_processing() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Engine(model, plan_of(model)) as engine:
        for set_to_none in (True, False, False):
            engine.backward(losses_of(model, X, None), Batch(X))
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)


def test_two_steps_before_one_optimiser_step_add_up() -> None:
    model = mlp()
    with Engine(model, plan_of(model, 1e-3, 1e-6)) as engine:
        engine.backward(losses_of(model, X, None), Batch(X))
        once = [p.grad.clone() for p in model.parameters()]
        engine.backward(losses_of(model, X, None), Batch(X))
        assert engine.budget.taken == 2
    for p, g in zip(model.parameters(), once, strict=True):
        torch.testing.assert_close(p.grad, 2 * g, rtol=1e-2, atol=1e-5)


def test_the_gradient_carries_no_graph() -> None:
    for form in ("box", "joint"):
        model = mlp()
        with Engine(model, plan_of(model, clipping=form)) as engine:
            engine.backward(losses_of(model, X, None), Batch(X))
        assert all(p.grad.grad_fn is None and not p.grad.requires_grad for p in model.parameters())


def replace_weight(model: nn.Sequential) -> None:
    model[2].weight = nn.Parameter(torch.randn(3, 6))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (replace_weight, "engine.tensor-used-directly"),
        (lambda model: model.append(nn.Linear(3, 2)), "engine.foreign-tensor"),
        (lambda model: model[0].weight.requires_grad_(False), "engine.frozen-after-attach"),
    ],
    ids=["parameter replaced", "module added", "tensor frozen"],
)
def test_a_model_changed_after_attaching_is_refused(change: Callable[[nn.Sequential], Any], code: str) -> None:
    model = mlp()
    with Engine(model, plan_of(model)) as engine:
        change(model)
        with raises_code(code):
            engine.backward(losses_of(model, X, None), Batch(X))
        assert engine.budget.taken == 0


@pytest.mark.parametrize("frozen", [("0.weight",), ("0.weight", "0.bias")], ids=str)
def test_a_tensor_unfrozen_after_attaching_does_not_train(frozen: tuple[str, ...]) -> None:
    model = mlp()
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    with Engine(model, plan_of(model)) as engine:
        for name in frozen:
            model.get_parameter(name).requires_grad_(True)
        try:
            engine.backward(losses_of(model, X, None), Batch(X))
        except (UnclippedGradient, EngineError) as problem:
            assert any(name in str(problem) for name in frozen)
    assert all(model.get_parameter(name).grad is None for name in frozen)


def test_module_hooks_of_the_user_still_run() -> None:
    model, seen = mlp(), []
    model[0].register_forward_hook(lambda m, a, y: seen.append("forward"))
    model[2].register_full_backward_hook(lambda m, a, b: seen.append("backward"))
    with Engine(model, plan_of(model)) as engine:
        engine.backward(losses_of(model, X, None), Batch(X))
    assert {"forward", "backward"} <= set(seen)


def test_double_use_of_one_forward_pass() -> None:
    """The graph is gone after a step: a second backward through it cannot happen silently."""
    model: Any = mlp()
    with Engine(model, plan_of(model)) as engine:
        losses = losses_of(model, X, None)
        engine.backward(losses, Batch(X))
        taken = engine.budget.taken
        with pytest.raises((RuntimeError, EngineError)):
            engine.backward(losses, Batch(X))
        assert engine.budget.taken >= taken


@pytest.mark.parametrize("way", ["alone", "beside its module", "a penalty"])
def test_a_graph_that_changes_after_many_steps_is_noticed(way: str) -> None:
    model, losses = mlp(), DIRECT[way][1]
    with Engine(model, plan_of(model)) as engine:
        for _ in range(5):
            engine.backward(losses_of(model, X, None), Batch(X))
            model.zero_grad()
        with raises_code("engine.tensor-used-directly"):
            engine.backward(losses(model), Batch(X))


def test_contributions_that_meet_after_many_steps_are_noticed() -> None:
    model = mlp()
    with Engine(model, plan_of(model)) as engine:
        for _ in range(5):
            engine.backward(losses_of(model, X, None), Batch(X))
            model.zero_grad()
        out = model(X)
        with raises_code("engine.contributions-coupled"):
            engine.backward((out - out.mean(0)).square().mean(1), Batch(X))


def test_memory_of_gradients_that_somebody_keeps_is_not_used_again() -> None:
    model = nn.Sequential(nn.Linear(4, 1200), nn.Tanh(), nn.Linear(1200, 40))
    with Engine(model, plan_of(model)) as engine:
        kept: dict[str, list[Any]] = {"tensor": [], "view": [], "array": []}
        for way, found in kept.items():
            for _ in range(3):
                engine.backward(losses_of(model, X, None), Batch(X))
                grad = model[2].weight.grad
                found.append({"tensor": grad, "view": grad[3:], "array": grad.numpy()}[way])
                model.zero_grad()
        arrays = [torch.as_tensor(t)[-1, -1].item() for found in kept.values() for t in found]
        assert len(set(arrays)) == 9
        places = set()
        for _ in range(4):
            engine.backward(losses_of(model, X, None), Batch(X))
            places.add(model[2].weight.grad.data_ptr())
            grad = None
            model.zero_grad()
        assert len(places) == 1


@pytest.mark.parametrize("way", ["storage", "another process"])
def test_memory_that_is_held_without_a_tensor_is_not_used_again(way: str) -> None:
    """Hardened, it would hold a sum without noise until the step is released."""
    model = nn.Sequential(nn.Linear(4, 1200), nn.Tanh(), nn.Linear(1200, 40))
    with Engine(model, plan_of(model)) as engine:
        engine.backward(losses_of(model, X, None), Batch(X))
        grad = model[2].weight.grad
        held = grad.untyped_storage() if way == "storage" else grad.share_memory_() is None
        place, grad = grad.data_ptr(), None
        model.zero_grad()
        engine.backward(losses_of(model, X, None), Batch(X))
        assert model[2].weight.grad.data_ptr() != place and held is not None


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("clipping", ["box", "joint"])
def test_a_step_leaves_nothing_for_the_garbage_collector(clipping: str, kernels: bool) -> None:
    """A cycle would keep the activations of many steps: collections are rare where most memory is torch's."""
    model = nn.Sequential(
        nn.Conv1d(2, 5, 3), nn.GELU(), nn.Flatten(2), nn.Linear(8, 70), nn.LayerNorm(70), nn.Linear(70, 3)
    )
    x = torch.randn(N, 2, 10)
    with native.switched(kernels), Engine(model, plan_of(model, clipping=clipping)) as engine:
        for _ in range(3):
            engine.backward(losses_of(model, x, None), Batch(x))
            model.zero_grad()
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            engine.backward(losses_of(model, x, None), Batch(x))
            model.zero_grad()
            gc.collect()
            held = [type(each).__name__ for each in gc.garbage if isinstance(each, (Tensor, ContributionGrads))]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert not held


@pytest.mark.parametrize("clipping", ["box", "joint"])
def test_memory_that_is_kept_changes_no_sum(clipping: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(4, 300), nn.Tanh(), nn.Linear(300, 250), nn.Linear(250, 3)), torch.randn(N, 6, 4)
    plan, made = plan_of(model, clipping=clipping), []
    for kept in (0, 1 << 30):
        monkeypatch.setattr(sums, "_MAX_KEPT_BYTES", kept)
        with Engine(model, plan, noise=SeededNoise(3)) as engine:
            for _ in range(2):
                model.zero_grad()
                engine.backward(losses_of(model, x, None), Batch(x))
            made.append([p.grad.clone() for p in model.parameters()])
            model.zero_grad()
    assert all(torch.equal(fresh, kept) for fresh, kept in zip(*made, strict=True))


def test_an_engine_that_nobody_holds_is_gone_at_once() -> None:
    """Otherwise `corpus.batches` would find it, and probe it, too."""
    model = mlp()
    gc.disable()
    try:
        engine = Engine(model, plan_of(model))
        seen = weakref.ref(engine)
        del engine
        assert seen() is None
    finally:
        gc.enable()


def test_a_model_that_is_sharded_after_its_engine_was_made_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks would wait for each other: the engine gathers nothing, and FSDP does."""
    model = mlp()
    with Engine(model, plan_of(model)) as engine:
        engine.placement.ranks = Ranks(0, 2)
        engine.placement.check()
        monkeypatch.setattr("lamina.engine.execute.placement.is_sharded_model", lambda model: True)
        with raises_code("engine.sharded-after-engine"):
            engine.placement.check()
