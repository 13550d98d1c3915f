"""Whose rows are whose: layouts, row maps, experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from net_builders import Net, refused, tensors_close
from oracle import agree, plan_of
from refusals import raises_code
from torch import Tensor, nn

import lamina
from lamina import Batch, Engine
from lamina.engine.batch import RowLayout

N, T = 5, 4


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-1, 4), max_size=12), st.integers(5, 7))
def test_fold_collects_every_row_of_its_contribution_once(owner: list[int], units: int) -> None:
    rows = torch.arange(1.0, len(owner) + 1).unsqueeze(1).expand(-1, 2) if owner else torch.zeros(0, 2)
    folded = RowLayout(torch.tensor(owner, dtype=torch.long), units).fold(rows)
    assert folded.shape[0] == units
    for u in range(units):
        got = sorted(v for v in folded[u, :, 0].tolist() if v)
        assert got == [i + 1.0 for i, o in enumerate(owner) if o == u]


def test_fold_drops_padding_that_is_not_a_number() -> None:
    t = torch.tensor([[1.0], [float("nan")], [2.0], [float("inf")]])
    for owner in ([0, -1, 1, -1], [0, -1, 0, -1], [1, -1, 0, -1]):
        folded = RowLayout(torch.tensor(owner), 2).fold(t)
        assert torch.isfinite(folded).all()
        assert folded.sum() == 3.0


def test_through_a_row_map() -> None:
    layout = RowLayout(torch.tensor([1, 0, -1]), 2)
    assert layout.through(torch.tensor([2, 0, 1, -1, 1])).owner.tolist() == [-1, 1, 0, -1, 0]


class Flat(nn.Module):
    """Tokens are flattened before the linear maps: example by example, or token by token."""

    def __init__(self, order: str = "contiguous", declare: bool = True) -> None:
        super().__init__()
        self.order, self.declare = order, declare
        self.inner, self.out = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Tanh()), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        rows = x if self.order == "contiguous" else x.transpose(0, 1)
        owner = torch.arange(n).unsqueeze(1).expand(n, t)
        owner = (owner if self.order == "contiguous" else owner.t()).reshape(-1)
        if self.declare:
            with lamina.rows(owner):
                h = self.inner(rows.reshape(-1, d))
        else:
            h = self.inner(rows.reshape(-1, d))
        h = h.view(n, t, -1) if self.order == "contiguous" else h.view(t, n, -1).transpose(0, 1)
        return self.out(h)


@pytest.mark.parametrize("order", ["contiguous", "interleaved"])
def test_rows_declared_in_the_model(order: str) -> None:
    agree(Flat(order), torch.randn(N, T, 5))
    agree(Flat(order), torch.randn(N, T, 5), batch={"unit": torch.tensor([1, 0, 1, 1, 2])})


@pytest.mark.parametrize("order", ["contiguous", "interleaved"])
def test_rows_declared_to_the_engine(order: str) -> None:
    agree(Flat(order, declare=False), torch.randn(N, T, 5), engine={"rows": {"inner.*": order}})


def test_flattened_rows_without_a_map_or_in_another_order_are_refused() -> None:
    x = torch.randn(N, T, 5)
    refused(Flat(declare=False), x, "engine.row-owner-unknown")
    turned = Flat("interleaved", declare=False)
    refused(turned, x, "engine.contributions-coupled", rows={"inner.*": "contiguous"})


def test_maps_that_do_not_fit_are_refused() -> None:
    model = nn.Linear(5, 3)
    x = torch.randn(N, 5)
    for owner in (torch.arange(N - 1), torch.arange(1, N + 1), torch.full((N,), -2)):
        with Engine(model, plan_of(model)) as engine:
            with lamina.rows(owner):
                out = model(x)
            with raises_code("engine.row-map-wrong"):
                engine.clipped_sums(out.square().mean(1), Batch(x))
    for wrong in (torch.ones(3), torch.zeros(2, 2, dtype=torch.long), torch.ones(3, dtype=torch.bool)):
        with raises_code("engine.rows-not-integers"), lamina.rows(wrong):
            pass
    with Engine(model, plan_of(model), rows={"*": "sideways"}), raises_code("engine.rows-order-unknown"):
        model(x)
    with (
        Engine(model, plan_of(model), rows={"*": "contiguous"}),
        lamina.examples(3),
        raises_code("engine.rows-not-divisible"),
    ):
        model(x)


def experts_forward(m: nn.Module, x: Tensor, choice: Tensor) -> Tensor:
    """Every token goes to one of three experts by a fixed rule; the third may get none."""
    n, t, d = x.shape
    h, flat = m.gate(x).tanh().reshape(-1, d), choice.reshape(-1)
    owner = torch.arange(n).repeat_interleave(t)
    y = torch.zeros_like(h)
    for e, expert in enumerate(m.experts):
        mine = (flat == e).nonzero().flatten()
        with lamina.rows(owner[mine]):
            y = y.index_add(0, mine, expert(h[mine]))
    return m.out(y.view(n, t, d))


def make_experts() -> nn.Module:
    return Net(
        experts_forward,
        gate=nn.Linear(5, 5),
        out=nn.Linear(5, 2),
        experts=nn.ModuleList(nn.Linear(5, 5) for _ in range(3)),
    )


@pytest.mark.parametrize("used", [3, 2])
def test_experts_with_routed_tokens(used: int) -> None:
    choice = torch.randint(0, used, (N, T))
    choice[0] = 0  # one example never meets expert 1
    choice[1] = 1
    agree(make_experts(), (torch.randn(N, T, 5), choice))


def test_experts_with_several_examples_per_contribution() -> None:
    choice = torch.randint(0, 2, (N, T))
    batch = {"unit": torch.tensor([2, 0, 2, 1, 0]), "weight": torch.tensor([1.0, 2.0, 0.5, 1.0, 0.0])}
    agree(make_experts(), (torch.randn(N, T, 5), choice), batch=batch)


def test_rows_that_belong_to_nobody_count_for_nobody() -> None:
    model = nn.Linear(5, 3)
    x = torch.randn(N, 5)
    with Engine(model, plan_of(model, 0.05)) as engine:
        with lamina.rows(torch.tensor([0, 1, 2, 3, 4, -1])):
            y = model(torch.cat([x, torch.full((1, 5), float("nan"))]))
        got = engine.clipped_sums(y[:N].square().mean(1), Batch(x))
        want = engine.clipped_sums(model(x).square().mean(1), Batch(x))
    tensors_close(want, got, 1.3e-6, 1e-5)


# ---------------------------------------------------------------------------------------- blocks that are known by name


class LinearNorm(nn.Module):
    """As in timm's LeViT, mended: normalises every token, folded behind the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bn = nn.Linear(6, 8), nn.GroupNorm(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return self.bn(x.flatten(0, 1)).reshape_as(x)


class SwinTransformerBlock(nn.Module):
    """As in timm's Swin: windows folded behind the batch, and a bias of positions that has no batch axis."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.attn = nn.Linear(6, 6), WindowBias()

    def forward(self, x: Tensor) -> Tensor:
        windows = x.reshape(-1, 2, x.shape[-1])
        return x + self.attn(self.inner(windows)).reshape_as(x)


class WindowBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(3))

    def forward(self, windows: Tensor) -> Tensor:
        scores = windows @ windows.transpose(1, 2) + self.table[torch.tensor([[0, 1], [2, 0]])]
        return scores.softmax(-1) @ windows


@pytest.mark.parametrize("made", [LinearNorm, SwinTransformerBlock])
def test_blocks_of_known_libraries_need_no_options(made: Any) -> None:
    agree(made(), torch.randn(5, 4, 6))
    agree(
        nn.Sequential(nn.Linear(6, 6), made()), torch.randn(6, 4, 6), batch={"unit": torch.tensor([0, 1, 0, 2, 1, 1])}
    )
