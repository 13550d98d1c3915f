"""Modules without a rule: per contribution by vmap, in a loop, or by broadcasting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import agree, losses_of, plan_of
from refusals import raises_code
from torch import Tensor, nn

import lamina
from lamina import Batch, Engine
from lamina.errors import CouplingError, LaminaError

N = 6


class Bare(nn.Module):
    """y = l(x + p)·g with bare p and g."""

    def __init__(self, shape: tuple[int, ...], gain: tuple[int, ...] | None = (5,)) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(shape))
        self.g = nn.Parameter(torch.randn(gain)) if gain is not None else None
        self.l = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.l(x + self.p).tanh()
        return y if self.g is None else y * self.g


@pytest.mark.parametrize("shape", [(4, 5), (5,), (), (1, 4, 5), (1, 1, 5)], ids=str)
@pytest.mark.parametrize("gain", [None, (5,), (1, 5), ()], ids=str)
def test_bare_parameters(shape: tuple[int, ...], gain: tuple[int, ...] | None) -> None:
    agree(Bare(shape, gain), torch.randn(N, 4, 5))


def test_bare_parameter_whose_first_axis_is_the_batch_size() -> None:
    agree(Bare((4, 5)), torch.randn(4, 4, 5))
    agree(Bare((1, 4, 5), None), torch.randn(4, 4, 5))


class Tokens(nn.Module):
    """A class token and a position table on the root, blocks below with rules of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 6))
        self.position = nn.Parameter(torch.randn(1, 5, 6))
        self.embed, self.norm, self.head = nn.Linear(3, 6), nn.LayerNorm(6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.token.expand(x.shape[0], -1, -1), self.embed(x)], 1) + self.position
        return self.head(self.norm(h).tanh())


def test_class_token_and_position_table() -> None:
    agree(Tokens(), torch.randn(N, 4, 3))
    agree(Tokens(), torch.randn(5, 4, 3))


def test_class_token_with_several_examples_per_contribution() -> None:
    agree(Tokens(), torch.randn(N, 4, 3), batch={"unit": torch.tensor([0, 1, 0, 2, 2, 0])})


def test_children_of_a_broadcasting_module_keep_their_rules() -> None:
    model = Tokens()
    x = torch.randn(N, 4, 3)
    with Engine(model, plan_of(model)) as engine:
        losses = losses_of(model, x, None)
        engine.clipped_sums(losses, Batch(x))
        kinds = {type(module.forward).__name__ for module in (model, model.embed, model.norm)}
        assert kinds == {"PatchedForward"}
        assert model.forward.layer_forward.fallback is None


class Narrow(nn.Module):
    """A hand-made linear map with one output: lengthening its weight would give N outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(1, 5))
        self.l = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.l(x).tanh(), self.w)


@pytest.mark.parametrize("shape", [(N, 5), (N, 4, 5)], ids=str)
def test_hand_over_where_broadcasting_changes_the_result(shape: tuple[int, ...]) -> None:
    agree(Narrow(), torch.randn(shape))


def test_a_first_batch_of_one_proves_nothing() -> None:
    """With one example, lengthening (1, d) to the batch changes nothing: the check must come again."""
    for model in (Narrow(), Bare((1, 4, 5), (1, 5)), Bare((4, 5))):
        x = torch.randn(N, 5) if isinstance(model, Narrow) else torch.randn(N, 4, 5)
        with torch.no_grad():
            want = model(x)
        with Engine(model, plan_of(model)):
            model(x[:1])
            torch.testing.assert_close(model(x).detach(), want)


class Reduced(nn.Module):
    """Uses of a (1, d) parameter that look the same when lengthened, but mix the copies."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(1, 5))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        p = self.p[0] if self.how == "first" else self.p.mean(0)
        return (x * p).tanh()


@pytest.mark.parametrize("how", ["first", "mean"])
def test_copies_that_are_mixed_are_right_or_refused(how: str) -> None:
    try:
        agree(Reduced(how), torch.randn(N, 5))
    except CouplingError as refused:
        assert "per_contribution" in str(refused)
    agree(Reduced(how), torch.randn(N, 5), engine={"per_contribution": [""]})


class Branch(nn.Module):
    """Control flow on data, which vmap cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.l = nn.Parameter(torch.randn(5)), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.l(row * self.scale if row.sum().item() > 0 else row).unsqueeze(0) for row in x])


@pytest.mark.filterwarnings("ignore:.*cannot run under vmap")
def test_loop_where_vmap_cannot_run() -> None:
    agree(nn.Sequential(Branch(), nn.Tanh(), nn.Linear(4, 2)), torch.randn(N, 5))


def test_the_loop_says_so_once() -> None:
    model = nn.Sequential(Branch(), nn.Linear(4, 2))
    x = torch.randn(N, 5)
    with Engine(model, plan_of(model)):
        with pytest.warns(UserWarning, match=r"'0' \(Branch\) cannot run under vmap and runs one example"):
            model(x)
        model(x)


@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:.*cannot run under vmap")
@pytest.mark.parametrize(
    ("module", "x"),
    [
        (nn.PReLU(5), torch.randn(N, 5)),
        (nn.PReLU(), torch.randn(N, 3, 5)),
        (nn.EmbeddingBag(9, 5, mode="sum"), torch.randint(0, 9, (N, 4))),
        (nn.utils.parametrizations.weight_norm(nn.Linear(5, 5)), torch.randn(N, 3, 5)),
        (nn.utils.parametrizations.orthogonal(nn.Linear(5, 5), use_trivialization=False), torch.randn(N, 5)),
        (nn.utils.parametrizations.weight_norm(nn.Conv1d(5, 4, 3)), torch.randn(N, 5, 6)),
    ],
    ids=["prelu per channel", "prelu", "embedding bag", "weight norm", "orthogonal", "weight norm of a convolution"],
)
def test_modules_without_a_rule(module: nn.Module, x: Tensor) -> None:
    width = module(x).shape[-1]
    agree(nn.Sequential(module, nn.Tanh(), nn.Linear(width, 2)), x)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated", "ignore:There is a performance drop")
def test_the_older_weight_norm_is_refused_or_run_per_contribution() -> None:
    """It makes the weight in a hook, before the module's own forward."""
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(5, 5)), nn.Tanh(), nn.Linear(5, 2))
    x = torch.randn(N, 5)
    with Engine(model, plan_of(model)) as engine, raises_code("engine.tensor-used-directly"):
        engine.clipped_sums(losses_of(model, x, None), Batch(x))
    agree(model, x, engine={"per_contribution": [""]})


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_bilinear_with_two_inputs() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.mix = nn.Linear(5, 3), nn.Linear(5, 4), nn.Bilinear(3, 4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.mix(self.a(x), self.b(x))

    agree(Pair(), torch.randn(N, 5))


def test_per_contribution_by_name() -> None:
    """A model that is time first inside is right once the module that turns it runs per contribution."""

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.l(x.transpose(0, 1)).tanh().transpose(0, 1)

    for length in (3, N):
        model = nn.Sequential(Turned(), nn.Linear(4, 2))
        agree(model, torch.randn(N, length, 5), engine={"per_contribution": ["0"]})


def test_per_contribution_of_a_name_that_is_not_there() -> None:
    model = nn.Sequential(nn.Linear(5, 2))
    with raises_code("engine.per-contribution-unknown"):
        Engine(model, plan_of(model), per_contribution=["nothere"])
    assert "forward" not in vars(model[0])


class Mask(nn.Module):
    """A bare parameter beside an argument (T, T) without batch axis."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return torch.einsum("ts,nsd->ntd", mask, x) * self.p


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = Mask(), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        t = x.shape[1]
        mask = (torch.ones(t, t).tril() * torch.arange(1, t + 1)).to(x.dtype)
        return self.out(self.inner(x, mask).tanh())


def test_an_argument_without_batch_axis() -> None:
    agree(Masked(), torch.randn(4, N, 5))


@pytest.mark.parametrize("before", [(), (4,), (1, 4)], ids=str)
def test_an_argument_that_is_as_long_as_the_batch_by_chance(before: tuple[int, ...]) -> None:
    model = Masked()
    x = torch.randn(N, N, 5)
    with torch.no_grad():
        want = model(x)
    with Engine(model, plan_of(model)):
        for n in before:
            model(x[:n])
        try:
            got = model(x)
        except LaminaError as refused:
            assert "'inner'" in str(refused)
            return
    torch.testing.assert_close(got.detach(), want)


def test_examples_that_mix_in_a_module_without_a_rule_are_refused() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.g = nn.Parameter(torch.randn(5))

        def forward(self, x: Tensor) -> Tensor:
            return (x - x.mean(0)) * self.g

    model = nn.Sequential(nn.Linear(5, 5), Centred())
    with Engine(model, plan_of(model)) as engine:
        with raises_code("engine.examples-not-separate"):
            model(torch.randn(N, 5))
        assert engine.budget.taken == 0


def test_a_module_called_without_the_batch_is_refused() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.t = nn.Parameter(torch.randn(3, 5))

        def forward(self, ids: Any = None) -> Tensor:
            return self.t

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.l = Table(), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.l(x + self.table())

    model = Uses()
    with Engine(model, plan_of(model)), raises_code("engine.no-batch-argument"):
        model(torch.randn(N, 3, 5))
    agree(model, torch.randn(N, 3, 5), engine={"per_contribution": [""]})


def test_examples_said_where_the_first_argument_does_not_show_them() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position, self.l = nn.Embedding(7, 5), nn.Linear(5, 2)

        def forward(self, times: Tensor, x: Tensor) -> Tensor:
            return self.l((x + self.position(times)).tanh())

    model, x, times = Late(), torch.randn(N, 4, 5), torch.arange(4)
    plan = plan_of(model, 0.1)
    with Engine(model, plan) as engine:
        with lamina.examples(N):
            out = model(times, x)
        sums = engine.clipped_sums(out.square().flatten(1).mean(1), Batch(x))
        usual = model.position(times.expand(N, -1))
        again = model.l((x + usual).tanh()).square().flatten(1).mean(1)
        want = engine.clipped_sums(again, Batch(x))
    for name, value in sums.items():
        torch.testing.assert_close(value, want[name])


def test_a_cache_is_refused() -> None:
    class Cache:
        def update(self) -> None: ...

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.g = nn.Parameter(torch.randn(5))

        def forward(self, x: Tensor, cache: Any) -> Tensor:
            return x * self.g

    model = Cached()
    with Engine(model, plan_of(model)), raises_code("engine.cache-argument"):
        model(torch.randn(N, 5), Cache())


def test_dropout_differs_between_examples() -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.g = nn.Parameter(torch.ones(200))

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x * self.g, 0.5, self.training)

    model = Dropped()
    with Engine(model, plan_of(model)):
        out = model(torch.ones(2, 200))
    assert not torch.equal(out[0], out[1])
