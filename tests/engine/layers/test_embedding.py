"""Embeddings: repeated ids, padding, positions without a batch axis."""

from __future__ import annotations

import pytest
import torch
from oracle import FORMS, agree, clip_by_hand, difference, example_grads, losses_of, plan_of, unit_grads
from torch import Tensor, nn

from lamina import Batch, Engine
from lamina.errors import CoverageError, LaminaError, UnsupportedLayer

N = 7


@pytest.mark.parametrize("shape", [(N,), (N, 12), (N, 2, 3)], ids=str)
@pytest.mark.parametrize("padding", [None, 0, 3, -1])
def test_repeated_ids_and_padding(padding: int | None, shape: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Embedding(9, 6, padding_idx=padding), nn.Tanh(), nn.Linear(6, 2))
    agree(model, torch.randint(0, 9, shape))


def test_padding_row_gets_nothing() -> None:
    model = nn.Sequential(nn.Embedding(9, 6, padding_idx=3), nn.Linear(6, 2))
    x = torch.full((N, 4), 3)
    x[:, 0] = 1
    with Engine(model, plan_of(model)) as engine:
        sums = engine.clipped_sums(losses_of(model, x, None), Batch(x))
    assert sums["0.weight"][3].norm() == 0
    assert sums["0.weight"][1].norm() > 0


@pytest.mark.parametrize("form", FORMS)
def test_nothing_but_padding_looked_up(form: str) -> None:
    model = nn.Sequential(nn.Embedding(9, 6, padding_idx=0), nn.Linear(6, 2))
    x = torch.zeros(N, 4, dtype=torch.long)
    with Engine(model, plan_of(model, clipping=form)) as engine:
        sums = engine.clipped_sums(losses_of(model, x, None), Batch(x))
    assert sums["0.weight"].norm() == 0
    assert sums["1.bias"].norm() > 0


class Positions(nn.Module):
    """Token and position embeddings, with position ids of shape (T,), (1, T) or (N, T)."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.token, self.position = nn.Embedding(20, 5), nn.Embedding(9, 5)
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.arange(x.shape[1])
        if self.form == "(1,T)":
            ids = ids[None]
        elif self.form == "(N,T)":
            ids = ids[None].expand(x.shape[0], -1)
        return self.out((self.token(x) + self.position(ids)).tanh())


@pytest.mark.parametrize("form", ["(T,)", "(1,T)", "(N,T)"])
def test_positions_without_batch_axis(form: str) -> None:
    agree(Positions(form), torch.randint(0, 20, (N, 6)))
    agree(Positions(form), torch.randint(0, 20, (1, 6)), must_clip=False)
    if form != "(T,)":
        agree(Positions(form), torch.randint(0, 20, (6, 6)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("before", [(), (4,), (1, 4)], ids=str)
def test_flat_positions_when_length_equals_batch_by_chance(before: tuple[int, ...], form: str) -> None:
    """Under Poisson sampling n == T happens sooner or later: it must be right. Refused only if it comes first."""
    model = Positions("(T,)")
    plan = plan_of(model, 0.01, clipping=form)
    x = torch.randint(0, 20, (6, 6))
    grads = unit_grads(example_grads(model, x), Batch(x))
    with Engine(model, plan) as engine:
        for n in before:
            engine.clipped_sums(losses_of(model, x[:n], None), Batch(x[:n]))
        try:
            sums = engine.clipped_sums(losses_of(model, x, None), Batch(x))
        except LaminaError as refused:
            assert "position" in str(refused)
            assert not before
            return
    difference(sums, clip_by_hand(grads, [0] * 6, plan))


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}], ids=str)
def test_options_that_look_at_the_batch_are_refused(option: dict[str, float]) -> None:
    model = nn.Sequential(nn.Embedding(9, 6, **option), nn.Linear(6, 2))
    plan = plan_of(model)
    with pytest.raises((CoverageError, UnsupportedLayer), match=f"'0'.*{next(iter(option))}.*Remedy"):
        Engine(model, plan)
