"""Parts of a model that are called by themselves, and position ids whose number is the batch's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from net_builders import Net, tensors_close
from oracle import agree, losses_of_output, plan_of
from refusals import raises_code
from torch import Tensor, nn

from lamina import Batch, Engine

V = 20


class Positions(nn.Module):
    """Tokens plus positions, whose ids have no batch axis."""

    def __init__(self, ids: str = "arange") -> None:
        super().__init__()
        self.token, self.position, self.ids = nn.Embedding(V, 8), nn.Embedding(16, 8), ids

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.arange(x.shape[1])
        return self.token(x) + self.position(ids if self.ids == "arange" else ids[None])


class Labelled(nn.Module):
    """One label per example: one-dimensional ids that are the batch's."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(V, 8), nn.Linear(8, 3)

    def forward(self, label: Tensor) -> Tensor:
        return self.out(self.table(label))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 4), nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.act, self.head = Positions(), Scaled(), nn.PReLU(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.inner(self.embed(x))))

    def by_parts(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.inner(self.embed(x))))

    def by_layers(self, x: Tensor) -> Tensor:
        hidden = self.embed.token(x) + self.embed.position(torch.arange(x.shape[1]))
        return self.head(self.act(self.inner(hidden)))


def tokens(n: int, length: int) -> Tensor:
    return torch.randint(0, V, (n, length), generator=torch.Generator().manual_seed(n))


@pytest.mark.parametrize("ids", ["arange", "with an axis of 1"])
@pytest.mark.parametrize("length", [6, 5])
def test_positions_are_understood_when_there_are_as_many_as_examples(ids: str, length: int) -> None:
    model = nn.Sequential(Positions(ids), nn.Linear(8, 3))
    agree(model, tokens(6, length))


@pytest.mark.parametrize("first", [[3, 1, 4, 1, 5], [0, 1, 2, 3, 4]])
def test_labels_are_not_taken_for_positions(first: list[int]) -> None:
    """Not even those that happen to count from 0: they are an argument of the model."""
    model = Labelled()
    agree(model, torch.tensor(first))
    with Engine(model, plan_of(model, 0.1)) as engine:
        for label in (torch.tensor(first), torch.arange(4), torch.tensor([0])):
            engine.clipped_sums(losses_of_output(model(label)), Batch(label))


@pytest.mark.parametrize("way", ["by_parts", "by_layers"])
def test_parts_that_are_called_by_themselves_after_another_batch_size(way: str) -> None:
    model = Parts()
    plan = plan_of(model, 0.05)
    with Engine(model, plan) as engine:
        for n, length in ((6, 5), (4, 5), (5, 5), (7, 3)):
            whole, x = tokens(n + 1, length), tokens(n, length)
            engine.clipped_sums(losses_of_output(model(whole)), Batch(whole))
            sums = engine.clipped_sums(losses_of_output(getattr(model, way)(x)), Batch(x))
            tensors_close(sums, engine.clipped_sums(losses_of_output(model(x)), Batch(x)))


def test_a_part_that_failed_does_not_count_as_under_way() -> None:
    model = Parts()
    with Engine(model, plan_of(model, 0.05)) as engine:
        with pytest.raises(IndexError):
            model(tokens(3, 5) + V)
        x = tokens(4, 5)
        engine.clipped_sums(losses_of_output(model.by_parts(x)), Batch(x))


class Centred(nn.Module):
    """Writes the private mean to a tensor that nobody trains, or to one that is trained."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.linear, self.trained = nn.Linear(3, 4), trained
        self.centre = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        with torch.no_grad():
            (self.linear.bias if self.trained else self.centre).add_(hidden.detach().mean(0))
        return hidden


@pytest.mark.parametrize("trained", [True, False])
def test_a_parameter_that_a_part_writes_when_it_is_called_by_itself_is_refused(trained: bool) -> None:
    model = Net(lambda m, x: m.head(m.enc(x)), enc=Centred(trained), head=nn.Linear(4, 2))
    x = torch.randn(5, 3)
    with Engine(model, plan_of(model)), raises_code("engine.written-during-forward"):
        model.head(model.enc(x))


def test_copies_and_detached_models_keep_no_hooks() -> None:
    model = Parts()

    def hooks(m: nn.Module) -> list[Any]:
        kinds = ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called")
        return [kind for part in m.modules() for kind in kinds if getattr(part, kind)]

    with Engine(model, plan_of(model)):
        twin = copy.deepcopy(model)
        twin(tokens(3, 4))
        assert not hooks(twin)
    assert not hooks(model)
