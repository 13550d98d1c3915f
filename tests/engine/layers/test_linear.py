"""Linear maps: nn.Linear in every rank, Hugging Face's Conv1D, LoRA made of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from net_builders import Net, formed_in_chunks
from oracle import agree, losses_of, plan_of
from refusals import raises_code
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lamina import Batch, Engine
from lamina.engine.execute.grads import SequenceProductGrads

N = 7


@pytest.mark.parametrize("middle", [(), (4,), (3, 4), (1,), (2, 3, 2)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_every_rank(middle: tuple[int, ...], bias: bool) -> None:
    model = nn.Sequential(nn.Linear(5, 6, bias=bias), nn.Tanh(), nn.Linear(6, 3, bias=bias))
    agree(model, torch.randn(N, *middle, 5))


@pytest.mark.parametrize("frozen", ["0.weight", "0.bias", "2.weight", "2.bias"])
def test_one_tensor_frozen(frozen: str) -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    model.get_parameter(frozen).requires_grad_(False)
    agree(model, torch.randn(N, 5))
    agree(model, torch.randn(N, 4, 5))


def test_weight_and_bias_as_two_layers() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    by_hand = {"weights": ["*.weight"], "first bias": ["0.bias"], "last bias": ["2.bias"]}
    agree(model, torch.randn(N, 4, 5), group=by_hand)


@pytest.mark.parametrize("shape", [(5,), (4, 5)], ids=str)
def test_hugging_face_conv1d(shape: tuple[int, ...]) -> None:
    agree(nn.Sequential(Conv1D(6, 5), nn.Tanh(), Conv1D(2, 6)), torch.randn(N, *shape))


def test_wide_enough_for_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.engine.execute.grads.CHUNK_ELEMENTS", 64)
    with formed_in_chunks(SequenceProductGrads, monkeypatch):
        agree(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 8)), torch.randn(N, 3, 5))


def test_subclass_with_the_same_forward_has_the_rule() -> None:
    class Mine(nn.Linear):
        extra = "anything"

    agree(nn.Sequential(Mine(5, 6), nn.Tanh(), Mine(6, 2)), torch.randn(N, 5))


def test_subclass_with_another_forward_runs_per_contribution() -> None:
    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return F.linear(input, self.weight * 2.0, self.bias)

    agree(nn.Sequential(Scaled(5, 6), nn.Tanh(), Scaled(6, 2)), torch.randn(N, 5))


@pytest.mark.parametrize("zero", [False, True], ids=["", "zero upper factor"])
def test_lora_over_a_frozen_base(zero: bool) -> None:
    def lora(inputs: int, outputs: int) -> nn.Module:
        """A frozen map with a trained low-rank addition."""
        base = nn.Linear(inputs, outputs).requires_grad_(False)
        down, up = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)
        return Net(lambda m, x: m.base(x) + 0.5 * m.up(m.down(x)), base=base, down=down, up=up)

    model = nn.Sequential(lora(5, 6), nn.Tanh(), lora(6, 3))
    if zero:
        nn.init.zeros_(model[0].up.weight)
    agree(model, torch.randn(N, 4, 5))
    assert all(p.grad is None for p in model[0].base.parameters())


def test_an_input_without_batch_axis_is_refused() -> None:
    model = nn.Linear(4, 2)
    with Engine(model, plan_of(model)), raises_code("engine.no-batch-axis"):
        model(torch.randn(4))


def test_keyword_argument() -> None:
    model = nn.Linear(4, 2)
    x = torch.randn(N, 4)
    with Engine(model, plan_of(model)) as engine:
        sums = engine.clipped_sums(losses_of(model, {"input": x}, None), Batch(x))
        again = engine.clipped_sums(losses_of(model, x, None), Batch(x))
    assert all(torch.equal(sums[name], again[name]) for name in sums)


@pytest.mark.parametrize("middle", [(), (4,), (2, 3)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_its_output_may_be_written_in_place(middle: tuple[int, ...], bias: bool) -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = m.a(x)
        h += x
        return m.b(m.relu(h))

    parts = {"a": nn.Linear(5, 5, bias=bias), "relu": nn.ReLU(inplace=True), "b": nn.Linear(5, 2)}
    agree(Net(forward, **parts), torch.randn(5, *middle, 5))
