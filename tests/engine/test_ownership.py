"""Contributions that influence each other: found in the graph the first time it is seen, and by the probe."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from net_builders import Net, refused
from oracle import losses_of, losses_of_output, plan_of
from refusals import raises_code
from torch import Tensor, nn

from lamina import Batch, Engine
from lamina.errors import CouplingError

N = 6
X = torch.randn(N, 5, generator=torch.Generator().manual_seed(2))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def contrastive(out: Tensor) -> Tensor:
    z = F.normalize(out, dim=1)
    return F.cross_entropy(z @ z.t() / 0.1, torch.arange(len(z)).roll(1), reduction="none")


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "mean over the batch, repeated": lambda out: losses_of_output(out).mean().expand(len(out)),
    "contrastive": contrastive,
    "centred by the batch": lambda out: losses_of_output(out - out.mean(0)),
    "sorted by size": lambda out: losses_of_output(out).sort().values,
    "softmax over the batch": lambda out: losses_of_output(out).softmax(0),
    "differences of neighbours": lambda out: losses_of_output(out - out.roll(1, 0)),
    "mix-up": lambda out: losses_of_output(0.7 * out + 0.3 * out.flip(0)),
    "another order of examples": lambda out: losses_of_output(out).flip(0),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_losses_over_the_batch_are_refused(kind: str) -> None:
    refused(mlp(), X, "engine.contributions-coupled", losses=lambda m: LOSSES[kind](m(X)))


def test_examples_of_one_contribution_may_influence_each_other() -> None:
    """A patient's windows are one contribution: a loss over them is allowed, a loss over patients is not."""
    model = mlp()
    unit = torch.tensor([0, 0, 0, 1, 1, 1])

    def centred(out: Tensor) -> Tensor:
        return losses_of_output(torch.cat([part - part.mean(0) for part in out.split(3)]))

    with Engine(model, plan_of(model)) as engine:
        engine.clipped_sums(centred(model(X)), Batch(X, unit=unit))
    with Engine(model, plan_of(model)) as engine, pytest.raises(CouplingError):
        engine.clipped_sums(centred(model(X)), Batch(X, unit=torch.arange(N)))


@pytest.mark.parametrize("kind", LOSSES)
def test_another_loss_later_is_looked_at_again(kind: str) -> None:
    """A second objective, a curriculum, an auxiliary loss: passing once with one loss says nothing of another."""
    model = mlp()
    with Engine(model, plan_of(model)) as engine:
        engine.backward(losses_of(model, X, None), Batch(X))
        with raises_code("engine.contributions-coupled"):
            engine.backward(LOSSES[kind](model(X)), Batch(X))
        assert engine.budget.taken == 1


def time_first() -> nn.Module:
    """Runs its layers on (T, N, d)."""
    return Net(
        lambda m, x: m.out(m.inner(x.transpose(0, 1)).tanh().transpose(0, 1)),
        inner=nn.Linear(5, 5),
        out=nn.Linear(5, 2),
    )


@pytest.mark.parametrize(("length", "code"), [(4, "engine.row-owner-unknown"), (N, "engine.contributions-coupled")])
def test_time_first_layouts_are_refused(length: int, code: str) -> None:
    refused(time_first(), torch.randn(N, length, 5), code)


def test_a_zero_gradient_proves_nothing() -> None:
    """Below a zero head every gradient is 0, also in the rows of others: the question must be asked again."""
    model, x = time_first(), torch.randn(N, N, 5)
    nn.init.zeros_(model.out.weight)
    with Engine(model, plan_of(model)) as engine:
        engine.clipped_sums(losses_of(model, x, None), Batch(x))
        with torch.no_grad():
            model.out.weight.normal_()
        with raises_code("engine.contributions-coupled"):
            engine.backward(losses_of(model, x, None), Batch(x))
        assert engine.budget.taken == 0


def test_a_batch_of_one_proves_nothing() -> None:
    model = mlp()
    with Engine(model, plan_of(model)) as engine:
        engine.clipped_sums(contrastive(model(X[:1])), Batch(X[:1]))
        with pytest.raises(CouplingError):
            engine.clipped_sums(contrastive(model(X)), Batch(X))


def test_it_comes_again_but_rarely() -> None:
    model = mlp()
    with Engine(model, plan_of(model)) as engine:
        calls = []
        run = engine.eager.ownership.run
        engine.eager.ownership.run = lambda *a, **k: (calls.append(1), run(*a, **k))[1]  # type: ignore[method-assign]
        for _ in range(300):
            engine.clipped_sums(losses_of(model, X, None), Batch(X))
    assert len(calls) == 4  # at 1, 2, 128, 256


def test_coupling_that_some_data_do_not_show_is_found_later() -> None:
    """A hinge over the batch that is not active in the first batch."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = m.l(x)
        return h + torch.relu(h.sum() - h - 1e3)

    model = Net(forward, l=nn.Linear(5, 3))
    with Engine(model, plan_of(model)) as engine:
        engine.clipped_sums(losses_of(model, X, None), Batch(X))
        with raises_code("engine.contributions-coupled"):
            engine.clipped_sums(losses_of(model, X * 1e5, None), Batch(X * 1e5))


def test_coupling_between_the_middle_ones_is_found() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = m.l(x)
        return torch.cat([h[:1], h[1:-1] + h[1:-1].sum(0), h[-1:]])

    model = Net(forward, l=nn.Linear(5, 3))
    found = 0
    for _ in range(20):
        with Engine(model, plan_of(model)) as engine:
            try:
                engine.clipped_sums(losses_of(model, X, None), Batch(X))
            except CouplingError:
                found += 1
    assert found >= 15  # a random half and its rest share the middle almost always


def test_attention_across_the_batch_is_refused() -> None:

    model = Net(lambda m, x: (m.q(x) @ x.t()).softmax(1) @ m.v(x), q=nn.Linear(5, 5), v=nn.Linear(5, 5))
    refused(model, X, "engine.contributions-coupled")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_are_no_proof_of_coupling(bad: float) -> None:
    model, x = mlp(), X.clone()
    x[0] = bad
    with Engine(model, plan_of(model)) as engine:
        sums = engine.clipped_sums(losses_of(model, x, None), Batch(x))
    assert all(torch.isfinite(v).all() for v in sums.values())
