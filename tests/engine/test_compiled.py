"""`Engine(..., compiled=True)`: the same numbers as the hook engine, the same refusals, and a reason where it falls back."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from oracle import FORMS, clip_by_hand, example_grads, losses_of, plan_of
from refusals import raises_code
from torch import Tensor, nn

from lamina import Batch, Engine, SeededNoise
from lamina.engine.execute import compiled
from lamina.engine.execute.compiled import NotCompiled
from lamina.plan.selection import Slice
from lamina.plan.step_plan import StepPlan


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x + torch.relu(self.inner(self.norm(x))))


class Tied(nn.Module):
    """One Linear used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.out = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.twice(torch.tanh(self.twice(x)))))


def models() -> dict[str, tuple[nn.Module, Tensor]]:
    """Models and 13 examples of their input."""
    torch.manual_seed(3)
    block = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    return {
        "mlp": (nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.GELU(), nn.Linear(7, 3)), torch.randn(13, 5)),
        "no bias": (nn.Sequential(nn.Linear(5, 6, bias=False), nn.SiLU(), nn.Linear(6, 3)), torch.randn(13, 5)),
        "residual": (Residual(), torch.randn(13, 6)),
        "sequence": (nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 3)), torch.randn(13, 4, 5)),
        "images": (nn.Sequential(nn.Conv2d(2, 4, 3, stride=2), nn.GroupNorm(2, 4), nn.Conv2d(4, 2, 1)), torch.randn(13, 2, 7, 7)),
        "signals": (nn.Sequential(nn.Conv1d(3, 4, 3, padding=1, groups=1), nn.ReLU(), nn.ConvTranspose1d(4, 2, 2)), torch.randn(13, 3, 9)),
        "tokens": (nn.Sequential(nn.Embedding(9, 5), nn.RMSNorm(5), nn.Linear(5, 3)), torch.randint(0, 9, (13, 6))),
        "transformer": (nn.Sequential(block, nn.Flatten(), nn.Linear(32, 3)), torch.randn(13, 4, 8)),
        "tied": (Tied(), torch.randn(13, 6)),
        "frozen": (nn.Sequential(nn.Linear(5, 6).requires_grad_(False), nn.Tanh(), nn.Linear(6, 4), nn.Linear(4, 3)), torch.randn(13, 5)),
    }  # fmt: skip


needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler is installed"
)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the traced graph as it is, without the compiler, whose seconds buy nothing here."""
    monkeypatch.setattr(compiled, "BACKEND", "eager")


def two_classes(model: nn.Module, form: str = "box", **options: Any) -> StepPlan:
    """The second class may not move the first layer, and has smaller thresholds."""
    layers = len(plan_of(model).layers)
    clip = [[0.05] * layers, [0.0] + [0.02] * (layers - 1)]
    return plan_of(model, clip, 0.5, clipping=form, **options)


def batches_of(x: Tensor, sizes: Sequence[int] = (9, 5, 13, 6, 2, 11)) -> list[Batch]:
    return [Batch(x[:n].clone(), cls=(torch.arange(n) + i) % 2) for i, n in enumerate(sizes)]


def gradients(model: nn.Module, plan: StepPlan, batches: Sequence[Batch], *, use: bool) -> tuple[list[Any], Engine]:
    """The gradients of every step, by `step` of a compiled engine or of an ordinary one."""
    found = []
    with Engine(model, plan, noise=SeededNoise(7, hardened=False), compiled=use) as engine:

        def losses(x: Any, y: Any) -> Tensor:
            return losses_of(model, x, y)

        for batch in batches:
            engine.step(losses, batch)
            found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
            model.zero_grad()
    return found, engine


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert set(a) == set(b)
        for name in a:
            torch.testing.assert_close(a[name], b[name], rtol=1e-5, atol=1e-6, msg=name)


_JOINT_IS_SLOW = ("no bias", "residual", "images", "signals", "frozen")
_CASES = [
    pytest.param(kind, form, marks=[pytest.mark.slow] if form == "joint" and kind in _JOINT_IS_SLOW else [])
    for kind in models()
    for form in FORMS
]


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(("kind", "form"), _CASES)
def test_the_graph_gives_the_numbers_of_the_hook_engine_and_of_the_oracle(kind: str, form: str) -> None:
    model, x = models()[kind]
    plan = two_classes(model, form)
    batches = batches_of(x)
    ours, engine = gradients(model, plan, batches, use=True)
    assert engine.compiled is not None
    assert (engine.compiled.reason, engine.compiled.steps) == ("", len(batches) - 3)  # two before, one compared
    assert len(engine.compiled.graphs) == 1
    theirs, _ = gradients(model, plan, batches, use=False)
    assert_same(ours, theirs)
    zero = [Batch(b.x[:0], cls=b.cls[:0]) for b in batches if b.cls is not None]
    noise, _ = gradients(model, plan, zero, use=False)
    expected = clip_by_hand(example_grads(model, batches[-1].x), batches[-1].cls.tolist(), plan)  # type: ignore[union-attr]
    for name, total in expected.sums.items():
        made = (ours[-1][name] - noise[-1][name]).double() * plan.batch
        assert float((made - total).abs().max()) <= 1e-5 * expected.sizes[name] + 1e-6


@needs_compiler
def test_one_compiled_graph_serves_all_sizes_and_classes() -> None:
    model, x = models()["residual"]
    plan, batches = two_classes(model), batches_of(x)
    ours, engine = gradients(model, plan, batches, use=True)
    assert engine.compiled is not None
    assert (engine.compiled.reason, engine.compiled.steps) == ("", len(batches) - 3)
    assert_same(ours, gradients(model, plan, batches, use=False)[0])


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", list(models()))
def test_compiled_models_give_the_numbers_of_the_hook_engine(kind: str, form: str) -> None:
    model, x = models()[kind]
    plan, batches = two_classes(model, form), batches_of(x)
    ours, engine = gradients(model, plan, batches, use=True)
    assert engine.compiled is not None
    assert (engine.compiled.reason, engine.compiled.steps) == ("", len(batches) - 3)
    assert_same(ours, gradients(model, plan, batches, use=False)[0])


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(("kind", "form"), [("residual", "box"), ("residual", "joint"), ("sequence", "joint")])
def test_a_broken_row_is_left_out_as_the_hook_engine_does(kind: str, form: str) -> None:
    model, x = models()[kind]
    plan, batches = two_classes(model, form), batches_of(x, (9, 9, 9, 5, 6, 7, 8))
    for batch, value in zip(batches[3:], (float("nan"), float("inf"), 1e30, 1e-30), strict=True):
        batch.x[1] = value
    assert_same(gradients(model, plan, batches, use=True)[0], gradients(model, plan, batches, use=False)[0])


@pytest.mark.usefixtures("traced")
def test_dropout_draws_what_the_hook_engine_draws() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    plan, batches, found = two_classes(model), batches_of(torch.randn(13, 5)), []
    for use in (True, False):
        torch.manual_seed(1)
        found.append(gradients(model, plan, batches, use=use)[0])
    assert_same(*found)


@pytest.mark.usefixtures("traced")
def test_stricter_contributions() -> None:
    model, x = models()["mlp"]
    for form in FORMS:
        plan = two_classes(model, form)
        batches = [
            Batch(b.x, cls=b.cls, scale=torch.linspace(0.1, 1, len(b)), ceiling=torch.linspace(1, 0.01, len(b)))
            for b in batches_of(x)
        ]
        ours, engine = gradients(model, plan, batches, use=True)
        assert engine.compiled is not None and engine.compiled.steps == len(batches) - 3
        assert_same(ours, gradients(model, plan, batches, use=False)[0])


class WritesInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x[:, 0].mul_(1.0)
        return self.a(x)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.a(x)
        return y * 2 if bool((y > 1e9).any()) else y


def with_hook() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    model[0].register_forward_hook(lambda module, args, out: out * 1.0)
    return model


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("model", "says"),
    [(Branching(), "DataDependent"), (WritesInput(), "writes to a tensor"), (with_hook(), "'0' has a hook of its own")],
)
def test_what_cannot_be_traced_falls_back_and_says_why_once(model: nn.Module, says: str) -> None:
    plan, batches = plan_of(model, [[0.05] * len(plan_of(model).layers)] * 2), batches_of(torch.randn(13, 5))
    with pytest.warns(NotCompiled, match=says) as said:
        ours, engine = gradients(model, plan, batches, use=True)
    assert len(said) == 1
    assert engine.compiled is not None and engine.compiled.steps == 0
    assert says in engine.compiled.reason and says in repr(engine)
    assert_same(ours, gradients(model, plan, batches, use=False)[0])


@pytest.mark.usefixtures("traced")
def test_plans_with_slices_fall_back_by_name() -> None:
    model = nn.Linear(5, 4)
    plan = plan_of(model, [[0.1], [0.1]], slices=[Slice(cls="c0", tensor="weight", axis=0, length=4, ranges=((0, 2),))])
    batches = batches_of(torch.randn(13, 5))
    with pytest.warns(NotCompiled, match="slices"):
        ours, _ = gradients(model, plan, batches, use=True)
    assert_same(ours, gradients(model, plan, batches, use=False)[0])


@pytest.mark.usefixtures("traced")
def test_a_batch_that_the_graph_is_not_made_for_goes_to_the_hook_engine() -> None:
    model, x = models()["mlp"]
    plan, batches = two_classes(model), batches_of(x)
    batches[3] = Batch(x[:6], unit=torch.tensor([0, 0, 1, 2, 2, 3]), cls=torch.tensor([0, 1, 0, 1]))
    batches[4] = Batch(x[:4], cls=torch.ones(4, dtype=torch.long))  # nobody reaches the first layer
    batches.append(Batch(x[:1], cls=torch.zeros(1, dtype=torch.long)))
    batches.append(Batch(x[:0], cls=torch.zeros(0, dtype=torch.long)))
    with pytest.warns(NotCompiled) as said:
        ours, engine = gradients(model, plan, batches, use=True)
    assert len(said) == 2
    assert engine.compiled is not None and engine.compiled.steps == 1
    assert_same(ours, gradients(model, plan, batches, use=False)[0])


@pytest.mark.usefixtures("traced")
def test_a_number_that_changes_in_python_is_found_when_graph_and_hook_engine_are_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiled, "COMPARE_EVERY", 4)
    model, x = models()["mlp"]
    plan = plan_of(model, [[1e6] * 3, [1e6] * 3])
    factor = [1.0]
    with Engine(model, plan, noise=SeededNoise(0), compiled=True) as engine:

        def losses(x: Any, y: Any) -> Tensor:
            return losses_of(model, x, y) * factor[0]

        for i, batch in enumerate(batches_of(x, [9] * 12)):
            if i < 6:
                engine.step(losses, batch)
            elif i == 6:
                factor[0] = 3.0
                with pytest.warns(NotCompiled, match="not what was traced"):
                    engine.step(losses, batch)
                expected = engine.clipped_sums(losses(batch.x, None), batch)
                made = {name: p.grad for name, p in model.named_parameters()}
                assert all((made[n] * plan.batch - expected[n]).abs().max() < 10 for n in expected)
            else:
                engine.step(losses, batch)
            model.zero_grad()
        assert engine.compiled is not None and engine.compiled.steps == 3


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["mlp", "images", "transformer"])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
def test_taking_one_contribution_away_moves_a_compiled_step_by_no_more_than_its_bound(
    kind: str, form: str, size: float
) -> None:
    """The paired-seed audit: the same noise twice, and the difference of what is released."""
    model, x = models()[kind]
    plan, released = plan_of(model, 0.05, 0.5, clipping=form), []
    x[2] *= size
    for rows in (torch.arange(9), torch.tensor([0, 1, 3, 4, 5, 6, 7, 8])):
        batches = [*(Batch(x[:9].clone()) for _ in range(4)), Batch(x[rows])]
        ours, engine = gradients(model, plan, batches, use=True)
        assert engine.compiled is not None and engine.compiled.steps == 2  # the last one among them
        released.append(ours[-1])
    moved = {name: (released[0][name] - released[1][name]).double() * plan.batch for name in released[0]}
    norms = [sum(float(moved[name].square().sum()) for name in layer.parameters) ** 0.5 for layer in plan.layers]
    assert sum((n / s) ** 2 for n, s in zip(norms, plan.noise, strict=True)) ** 0.5 <= 1 / plan.sigma(0) + 1e-4
    if form == "box":
        assert all(n <= c + 1e-5 for n, c in zip(norms, plan.clip[0], strict=True))
    assert max(norms) > 1e-6


def test_what_a_compiler_makes_of_the_graph_is_held_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum that is 1 % off ends it; one that is off by what a few inputs of ReLU on the other side of 0 make does not."""
    model, x = models()["mlp"]
    plan, batches = two_classes(model), batches_of(x, [9] * 8)
    for off, steps in ((1.01, 0), (1.002, 5)):

        def compile_badly(trace: Any, folder: Any, off: float = off) -> Any:
            return lambda *args: [t * off if t.is_floating_point() else t for t in trace.module(*args)]

        monkeypatch.setattr(compiled, "compile_trace", compile_badly)
        with pytest.warns(NotCompiled, match="something else") if not steps else nullcontext():
            ours, engine = gradients(model, plan, batches, use=True)
        assert engine.compiled is not None and engine.compiled.steps == steps
        theirs = gradients(model, plan, batches, use=False)[0]
        assert_same(
            ours[:3] if steps else ours, theirs[:3] if steps else theirs
        )  # what is compared is the hook engine's


def test_noise_goes_only_into_sums_that_share_nothing() -> None:
    tensors = {"a": torch.zeros(3), "b": torch.zeros(3, dtype=torch.bfloat16)}
    a, b = torch.ones(3), torch.ones(3)
    found = compiled._with_own_storage({"a": a, "b": b}, tensors)
    assert found["a"] is a and found["b"] is b
    for other in (a, b.bfloat16(), torch.ones(6)[:3], torch.ones(6)[::2], torch.ones(1).expand(3)):
        found = compiled._with_own_storage({"a": a, "b": other}, tensors)
        assert found["b"].data_ptr() not in (a.data_ptr(), other.data_ptr()) and found["b"].dtype == torch.float32
        assert found["b"].untyped_storage().nbytes() == 12 and torch.equal(found["b"], torch.ones(3))


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 3)
        self.register_buffer("kept", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.kept


@pytest.mark.usefixtures("traced")
def test_refusals_hold_while_steps_are_compiled() -> None:
    model = Keeps()
    plan, batches = plan_of(model, [[0.1], [0.2]]), batches_of(torch.randn(13, 5), [9] * 12)

    def losses(x: Any, y: Any) -> Tensor:
        return losses_of(model, x, y)

    engine = Engine(model, plan, noise=SeededNoise(0), compiled=True)
    for batch in batches[:4]:
        engine.step(losses, batch)
        model.zero_grad()
    assert engine.compiled is not None and engine.compiled.steps == 1
    taken = engine.budget.taken
    with raises_code("engine.batch-used-again"):
        engine.step(losses, batches[3])
    with raises_code("engine.class-index-unknown"):
        engine.step(losses, Batch(torch.randn(3, 5), cls=torch.tensor([0, 1, 2])))
    model.a.weight.grad = torch.ones(3, 5)
    with raises_code("engine.foreign-grad"):
        engine.step(losses, batches[4])
    model.zero_grad()
    model.kept += 1.0
    with raises_code("engine.buffer-written"):
        engine.step(losses, batches[4])
    model.a.weight = nn.Parameter(model.a.weight.detach().clone())
    with raises_code("engine.parameter-replaced"):
        engine.step(losses, batches[5])
    assert engine.budget.taken == taken
    engine.detach()
    with raises_code("engine.detached"):
        engine.step(losses, batches[6])


@pytest.mark.usefixtures("traced")
def test_buffers_that_were_accepted_are_used_as_they_are() -> None:
    found = []
    for use in (True, False):
        torch.manual_seed(0)
        model = Keeps()
        with Engine(
            model, plan_of(model, [[0.1], [0.2]]), noise=SeededNoise(0, hardened=False), compiled=use
        ) as engine:

            def losses(x: Any, y: Any, model: nn.Module = model) -> Tensor:
                return losses_of(model, x, y)

            for i, batch in enumerate(batches_of(torch.linspace(-1, 1, 65).view(13, 5), [9] * 6)):
                if i == 4:
                    model.kept += 5.0
                    engine.accept_buffers()
                model.zero_grad()
                engine.step(losses, batch)
            found.append([{name: p.grad for name, p in model.named_parameters()}])
    assert_same(*found)


@pytest.mark.usefixtures("traced")
def test_coupling_is_refused_before_anything_is_compiled() -> None:
    model = nn.Linear(5, 3)
    with Engine(model, plan_of(model), noise=SeededNoise(0), compiled=True) as engine:
        with raises_code("engine.contributions-coupled"):
            engine.step(lambda x, y: (model(x) - model(x).mean(0)).square().mean(1), Batch(torch.randn(6, 5)))
        assert engine.budget.taken == 0


@pytest.mark.usefixtures("traced")
def test_training_mode_and_weights_are_those_of_the_step() -> None:
    """The graph reads weights as they are, and another mode is another computation."""
    model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.9), nn.Linear(8, 3)).eval()
    twin = copy.deepcopy(model)
    plan, found = plan_of(model, [[1.0, 1.0]] * 2), []
    for mine, use in ((model, True), (twin, False)):
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
        torch.manual_seed(5)
        with Engine(mine, plan, noise=SeededNoise(2, hardened=False), compiled=use) as engine:

            def losses(x: Any, y: Any, mine: nn.Module = mine) -> Tensor:
                return losses_of(mine, x, y)

            torch.manual_seed(6)
            for i, batch in enumerate(batches_of(torch.linspace(-1, 1, 65).view(13, 5), [9] * 10)):
                mine.train(i >= 5)
                engine.step(losses, batch)
                optimizer.step()
                optimizer.zero_grad()
        found.append([dict(mine.state_dict())])
    assert_same(*found)
