"""What a private step must not do, done on purpose: each is refused by name with a remedy, or handled.

The order is that of docs/theory.md, "One step", and of the traps that peers fell into. A refusal spends
nothing: the budget, the weights and `.grad` are as before. Rules with a file of their own: ownership and
coupling (test_ownership, test_probe), the graph walk (test_graph), layouts (test_layout), truncation,
precision, non-finite values (test_batch).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from net_builders import Net, refused
from oracle import agree, losses_of, losses_of_output, plan_of
from refusals import raises_code
from torch import Tensor, nn

import lamina
from lamina import Batch, Engine, SeededNoise
from lamina.account.filters import GaussianFilter
from lamina.errors import BudgetExceeded
from lamina.plan.step_plan import PlannedClass, PlannedLayer, StepPlan

N = 6
X = torch.randn(N, 5, generator=torch.Generator().manual_seed(5))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


@contextmanager
def nothing_happens(model: nn.Module, engine: Engine | None = None) -> Iterator[None]:
    """Whatever is refused inside spends nothing and changes no weight, gradient or buffer."""
    tensors = [t.detach().clone() for t in (*model.parameters(), *model.buffers())]
    taken = engine.budget.taken if engine else 0
    yield
    assert all(torch.equal(a, b) for a, b in zip(tensors, (*model.parameters(), *model.buffers()), strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert engine is None or engine.budget.taken == taken


# ----------------------------------------------------------------------------------- what the plan refuses


@pytest.mark.parametrize(
    ("clip", "noise", "code"),
    [(1.0, 0.0, "plan.layer-without-noise"), (float("inf"), 1.0, "plan.clip-out-of-range")],
    ids=["clipping without noise", "infinite threshold"],
)
def test_a_plan_that_protects_nobody_is_refused(clip: float, noise: float, code: str) -> None:
    layer = PlannedLayer(name="l", depth=0.0, parameters=("weight", "bias"), size=18)
    private = PlannedClass(name="patients", population=100, sampling_rate=0.1, delta=1e-5)
    with raises_code(code):
        StepPlan(layers=(layer,), classes=(private,), clip=((clip,),), noise=(noise,), batch=1.0, steps=1)


def test_the_plan_is_a_public_constant() -> None:
    """S, C, q, B and T cannot be changed by anything that happens in training."""
    plan = plan_of(mlp())
    for name, value in (("noise", (2.0, 2.0)), ("batch", 5.0), ("clip", ()), ("steps", 9)):
        with pytest.raises(AttributeError):
            setattr(plan, name, value)


@pytest.mark.parametrize("contributions", [0, 1, N])
def test_noise_and_divisor_do_not_depend_on_the_batch(contributions: int) -> None:
    """The same noise and the same B whatever the realised size: grad·B − clipped sum is the same tensor.

    The noise is plain, because rounding the noised sum to its grid moves the difference by up to half a grid step.
    """
    model = mlp()
    plan = plan_of(model, 0.1, 1.5, batch=3.0)
    noise = []
    for size in (0, contributions):
        model.zero_grad()
        with Engine(model, plan, noise=SeededNoise(9, hardened=False)) as engine:
            x = X[:size]
            sums = engine.clipped_sums(losses_of(model, x, None) if size else None, Batch(x))
            engine.backward(losses_of(model, x, None) if size else None, Batch(x))
        noise.append({name: p.grad * 3.0 - sums[name] for name, p in model.named_parameters()})
    for name, value in noise[0].items():
        torch.testing.assert_close(value, noise[1][name], rtol=1e-5, atol=1e-5)


# ----------------------------------------------------------------------------------- coverage (trap 2)


def test_a_trainable_tensor_outside_the_plan_is_refused() -> None:
    model = mlp()
    plan = plan_of(model)
    model.append(nn.Linear(3, 2))
    with raises_code("plan.tensor-not-in-plan"):
        Engine(model, plan)
    model[3].requires_grad_(False)
    Engine(model, plan).detach()


def test_a_planned_tensor_that_is_frozen_or_missing_is_refused() -> None:
    model = mlp()
    plan = plan_of(model)
    model[0].weight.requires_grad_(False)
    with raises_code("plan.tensor-frozen"):
        Engine(model, plan)
    with raises_code("plan.tensor-missing"):
        Engine(nn.Sequential(nn.Linear(5, 7), nn.Tanh()), plan)


def test_a_model_of_another_size_is_refused() -> None:
    plan = plan_of(mlp())
    with raises_code("plan.layer-size-differs"):
        Engine(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)), plan)


# ----------------------------------------------------------------------------------- batch statistics (trap 4)


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(6), nn.BatchNorm1d(6, affine=False), nn.BatchNorm1d(6).requires_grad_(False)], ids=str
)
def test_batch_norm_in_training_mode_is_refused(norm: nn.Module) -> None:
    """Also a frozen one: its weights do not train, but its buffers move with private data."""
    model = nn.Sequential(nn.Linear(5, 6), norm, nn.Linear(6, 2))
    with nothing_happens(model), raises_code("plan.module-unsafe"):
        Engine(model, plan_of(model))


@pytest.mark.parametrize("place", ["before", "between"])
@pytest.mark.parametrize("frozen", [True, False])
def test_batch_norm_put_back_into_training_mode_is_refused(place: str, frozen: bool) -> None:
    """model.train() at the start of an epoch undoes an earlier .eval(): seen before the buffers move, or at the latest
    before the step."""
    norm = nn.BatchNorm1d(5 if place == "before" else 6).requires_grad_(not frozen)
    model = nn.Sequential(norm, nn.Linear(5, 2)) if place == "before" else nn.Sequential(nn.Linear(5, 6), norm)
    norm.eval()
    x = X.unsqueeze(2) if not frozen and place == "before" else X
    if x.dim() == 3:
        model = nn.Sequential(norm, nn.Flatten(), nn.Linear(5, 2))
    with Engine(model, plan_of(model)) as engine:
        engine.clipped_sums(losses_of(model, x, None), Batch(x))
        model.train()
        mean = norm.running_mean.clone()
        with raises_code("engine.hazard-called"):
            engine.backward(losses_of(model, x, None), Batch(x))
        assert engine.budget.taken == 0
        assert torch.equal(mean, norm.running_mean)
    assert all(p.grad is None for p in model.parameters())


def test_batch_norm_in_eval_mode_is_allowed() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))
    model(torch.randn(20, 5))
    model[1].eval()
    buffers = [b.clone() for b in model.buffers()]
    agree(model, X)
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))


def test_functional_batch_norm_is_refused() -> None:
    model = Net(lambda m, x: m.b(F.batch_norm(m.a(x), None, None, training=True)), a=nn.Linear(5, 6), b=nn.Linear(6, 2))
    refused(model, X, "engine.batchnorm")


def test_functional_instance_norm_is_allowed() -> None:
    """It is computed by the same kernel, over one example at a time."""
    agree(
        Net(lambda m, x: m.b(F.instance_norm(m.a(x)).tanh()), a=nn.Conv1d(3, 4, 2), b=nn.Conv1d(4, 2, 1)),
        torch.randn(N, 3, 6),
    )


def test_fix_makes_the_model_acceptable() -> None:
    model = nn.Sequential(nn.Conv1d(3, 8, 2), nn.BatchNorm1d(8), nn.Conv1d(8, 2, 1))
    model, _ = lamina.fix(model)
    x = torch.randn(N, 3, 6)
    with Engine(model, plan_of(model)) as engine:
        engine.backward(losses_of(model, x, None), Batch(x))


# ----------------------------------------------------------------------------------- losses


LOSSES: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "mean": (lambda m: losses_of(m, X, None).mean(), "engine.losses-reduced"),
    "sum": (lambda m: losses_of(m, X, None).sum(), "engine.losses-reduced"),
    "per token": (lambda m: m(X), "engine.losses-wrong-shape"),
    "of another batch": (lambda m: losses_of(m, X[:4], None), "engine.losses-wrong-length"),
    "one column": (lambda m: losses_of(m, X, None).unsqueeze(1), "engine.losses-wrong-shape"),
    "none": (lambda m: None, "engine.losses-missing"),
    "half": (lambda m: losses_of(m, X, None).half(), "engine.losses-float16"),
    "scaled": (lambda m: torch.amp.GradScaler("cpu").scale(losses_of(m, X, None)), "engine.losses-scaled"),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_losses_that_are_not_one_per_example(kind: str) -> None:
    make, code = LOSSES[kind]
    refused(mlp(), X, code, losses=make)


def test_float16_is_refused() -> None:
    half = nn.Linear(5, 2).half()
    with raises_code("engine.float16-parameter"):
        Engine(half, plan_of(half))
    model = mlp()
    with (
        Engine(model, plan_of(model)) as engine,
        nothing_happens(model, engine),
        torch.autocast("cpu", torch.float16),
        raises_code("engine.float16-autocast"),
    ):
        model(X)


# ----------------------------------------------------------------------------------- optimisers and budgets


def test_closures_are_refused() -> None:
    model = mlp()
    for make in (torch.optim.LBFGS, torch.optim.SGD, torch.optim.AdamW):
        optimizer = make(model.parameters(), lr=0.1)
        with Engine(model, plan_of(model)) as engine:

            def closure(engine: Engine = engine) -> Tensor:
                engine.backward(losses_of(model, X, None), Batch(X))
                return torch.zeros(())

            for call in (lambda c=closure, o=optimizer: o.step(c), lambda c=closure, o=optimizer: o.step(closure=c)):
                with nothing_happens(model, engine), raises_code("engine.optimizer-closure"):
                    call()


def test_steps_beyond_the_plan_are_refused() -> None:
    model = mlp()
    with Engine(model, plan_of(model, steps=2)) as engine:
        for _ in range(2):
            engine.backward(losses_of(model, X, None), Batch(X))
            model.zero_grad()
        with nothing_happens(model, engine):
            for batch in (Batch(X), Batch(X[:0])):
                losses = losses_of(model, batch.x, None) if len(batch) else None
                with raises_code("engine.no-steps-left"):
                    engine.backward(losses, batch)


def test_filters_are_asked_before_each_step() -> None:
    model = mlp()
    plan = plan_of(model, [[1.0, 1.0], [0.0, 1.0]], 2.0)
    tight = GaussianFilter(budget=2.5 / plan.sigma("c0") ** 2)
    loose = GaussianFilter(budget=100.0)
    with Engine(model, plan, filters={"c1": loose, "c0": tight}) as engine:
        for _ in range(2):
            engine.backward(losses_of(model, X, None), Batch(X, cls=torch.zeros(len(X), dtype=torch.long)))
            model.zero_grad()
        left = loose.remaining
        with nothing_happens(model, engine), raises_code("engine.budget-exhausted"):
            engine.backward(losses_of(model, X, None), Batch(X, cls=torch.zeros(len(X), dtype=torch.long)))
        assert loose.remaining == left  # refused by one is charged to none
        engine.clipped_sums(losses_of(model, X, None), Batch(X, cls=torch.zeros(len(X), dtype=torch.long)))
    assert engine.budget.taken == 2


def test_filters_of_unknown_or_public_classes_are_refused() -> None:
    model = mlp()
    with raises_code("plan.class-unknown"):
        Engine(model, plan_of(model), filters={"nobody": GaussianFilter(budget=1.0)})
    public = plan_of(model, [[float("inf")] * 2], 0.0, public=(0,))
    with raises_code("engine.filter-for-public-class"):
        Engine(model, public, filters={"c0": GaussianFilter(budget=1.0)})
    assert "forward" not in vars(model[0])


def test_every_backward_is_one_event_and_clipped_sums_none() -> None:
    model = mlp()
    spent = GaussianFilter(budget=100.0)
    plan = plan_of(model)
    with Engine(model, plan, filters={"c0": spent}) as engine:
        engine.clipped_sums(losses_of(model, X, None), Batch(X))
        engine.probe(lambda x, y: losses_of(model, x, None), X)
        assert (engine.budget.taken, spent.remaining) == (0, 100.0)
        engine.backward(losses_of(model, X, None), Batch(X))
        engine.backward(None, Batch(X[:0]))
        for piece in Batch(X).split(3):
            engine.backward(losses_of(model, piece.x, None), piece)
        assert engine.budget.taken == 3
        assert spent.remaining == pytest.approx(100.0 - 3 / plan.sigma(0) ** 2)


def test_an_error_in_the_middle_of_a_step_releases_nothing() -> None:
    """Charged means spent, but no gradient leaves."""

    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            if armed:
                raise ZeroDivisionError
            return g

    armed = False
    model = mlp()
    with Engine(model, plan_of(model)) as engine:
        engine.clipped_sums(losses_of_output(Breaks.apply(model(X))), Batch(X))
        armed = True
        with pytest.raises(ZeroDivisionError):
            engine.backward(losses_of_output(Breaks.apply(model(X))), Batch(X))
        assert all(p.grad is None for p in model.parameters())
        first, second = Batch(X).split(2)
        with pytest.raises(ZeroDivisionError):
            engine.backward(losses_of_output(Breaks.apply(model(first.x))), first)
        armed = False
        with raises_code("engine.parts-out-of-order"):  # the broken step is over: no half of it leaves
            engine.backward(losses_of_output(Breaks.apply(model(second.x))), second)
        assert all(p.grad is None for p in model.parameters())
        engine.backward(losses_of_output(Breaks.apply(model(X))), Batch(X))
        assert all(p.grad is not None for p in model.parameters())


def test_secure_noise_is_the_default_and_a_seed_is_not_private() -> None:
    """Trap 5: nothing has to be installed; a seed that somebody chose says so."""
    model = mlp()
    with Engine(model, plan_of(model)) as engine:
        assert engine.private
    grads = []
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(0)
        with Engine(model, plan_of(model)) as engine:
            engine.backward(None, Batch(X[:0]))
        grads.append(model[0].weight.grad.clone())
    assert not torch.equal(*grads)  # the global seed has no say
    with Engine(model, plan_of(model), noise=SeededNoise(0)) as engine:
        assert not engine.private


# ----------------------------------------------------------------------------------- hooks of the loss path


def test_recovering_after_a_refusal() -> None:
    model = mlp()
    with Engine(model, plan_of(model)) as engine:
        for make, code in LOSSES.values():
            with raises_code(code):
                engine.backward(make(model), Batch(X))
        engine.backward(losses_of(model, X, None), Batch(X))
        assert engine.budget.taken == 1


def test_a_batch_of_other_classes_than_the_plan_is_refused() -> None:
    """Without classes everyone would silently become class 0, with its reach and its noise."""
    model = mlp()
    with Engine(model, plan_of(model, [[1.0, 1.0], [0.0, 1.0]])) as engine:
        for batch in (Batch(X), *Batch(X).split(2), unknown := Batch(X, cls=torch.tensor([0, 1, 0, 2, 0, 0]))):
            code = "engine.class-index-unknown" if batch is unknown else "engine.classes-not-given"
            with nothing_happens(model, engine), raises_code(code):
                engine.backward(losses_of(model, batch.x, None), batch)
        engine.backward(None, Batch(X[:0]))  # nobody has no class


def test_what_is_not_a_batch_and_what_is_not_attached() -> None:
    model = mlp()
    engine = Engine(model, plan_of(model))
    with raises_code("engine.not-a-batch"):
        engine.backward(losses_of(model, X, None), (X, None))
    engine.detach()
    with raises_code("engine.detached"):
        engine.backward(losses_of(model, X, None), Batch(X))
    assert "0 of" in repr(engine)


@pytest.mark.parametrize("keep", [False, True])
def test_a_gradient_written_by_a_hook_during_backward_is_refused(keep: bool) -> None:
    """As fused gradient accumulation does."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        def write(g: Tensor) -> None:
            old = m.a.weight.grad
            m.a.weight.grad = g.t() @ x if old is None else old.add_(g.t() @ x)

        h = m.a(x)
        if m.on:
            h.register_hook(write)
        return m.b(h)

    model = Net(forward, a=nn.Linear(5, 4), b=nn.Linear(4, 3), on=False)
    with Engine(model, plan_of(model)) as engine:
        engine.backward(losses_of(model, X, None), Batch(X))
        if not keep:
            model.zero_grad()
        model.on = True
        engine.eager.ownership.due = lambda *_: False  # type: ignore[method-assign]
        with raises_code("engine.grad-written-during-backward"):
            engine.backward(losses_of(model, X, None), Batch(X))
    assert model.a.weight.grad is None


@pytest.mark.parametrize("target", ["buffer", "frozen", "l.weight"])
def test_tensors_written_in_the_forward_pass_are_refused(target: str) -> None:
    """Codebooks, centres, queues: they would leave with the state_dict, un-noised."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            (m.l.weight[0] if target == "l.weight" else getattr(m, target)).lerp_(x.mean(0), 0.1)
        return m.l(x)

    model = Net(forward, l=nn.Linear(5, 3), frozen=nn.Parameter(torch.zeros(5), requires_grad=False))
    model.register_buffer("buffer", torch.zeros(5))
    with Engine(model, plan_of(model)), raises_code("engine.written-during-forward") as refusal:
        model(X)
    assert f"'{target}'" in refusal.value.problem


def test_steps_taken_before_count() -> None:
    model = mlp()
    plan = plan_of(model, steps=3)
    with Engine(model, plan, taken=2) as engine:
        engine.backward(losses_of(model, X, None), Batch(X))
        assert engine.epsilon("c0") == plan.epsilon("c0")
        with pytest.raises(BudgetExceeded):
            engine.backward(None, Batch(X[:0]))
    with raises_code("engine.taken-out-of-range"):
        Engine(model, plan, taken=4)


def test_a_step_opened_before_a_fork_is_not_released_in_the_child() -> None:
    model = mlp()
    with Engine(model, plan_of(model)) as engine:
        first, second = Batch(X).split(2)
        engine.backward(losses_of(model, first.x, None), first)
        engine._open.process -= 1  # as the child sees it
        with raises_code("noise.forked-step"):
            engine.backward(losses_of(model, second.x, None), second)


def test_a_bias_of_enormous_gradient_stays_inside_its_bound() -> None:
    """The clip factor would be a denormal in float32, and read too large."""
    model = nn.Linear(4, 3)
    plan = plan_of(model, [[1e-3]], batch=1.0)
    for scale in (1e20, 1e30, 1e37, 1e38):
        with Engine(model, plan) as engine:
            x = torch.zeros(1, 4)
            sums = engine.clipped_sums((model(x) * scale).sum(1), Batch(x))
        norm = sum(float(t.double().square().sum()) for t in sums.values()) ** 0.5
        assert norm <= 1e-3


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_gradient_hook_on_a_covered_tensor_is_refused(kind: str) -> None:
    model = mlp()
    handle = getattr(model[0].weight, kind)(lambda _: None)
    with raises_code("engine.parameter-hook"):
        Engine(model, plan_of(model))
    handle.remove()
    Engine(model, plan_of(model)).detach()


def test_embedding_bag_with_offsets_is_refused() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return m.out(m.bag(x.flatten(), torch.arange(len(x)) * x.shape[1]))

    model = Net(forward, bag=nn.EmbeddingBag(9, 5), out=nn.Linear(5, 2))
    with Engine(model, plan_of(model)), raises_code("engine.embedding-bag-offsets"):
        model(torch.randint(0, 9, (4, 3)))


def test_wrappers_that_add_gradients_up_themselves_are_refused() -> None:
    """The ranks of DistributedDataParallel would wait for gradients that autograd never brings."""
    wrapped = nn.DataParallel(mlp())
    with raises_code("engine.ddp-wrapped"):
        Engine(wrapped, plan_of(wrapped))


@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("whole", [True, False])
def test_scripted_modules_are_refused(whole: bool) -> None:
    model = mlp()
    plan = plan_of(model)
    scripted = torch.jit.script(model) if whole else nn.Sequential(torch.jit.script(model[0]), *model[1:])
    with raises_code("engine.scripted-module"):
        Engine(scripted, plan)
