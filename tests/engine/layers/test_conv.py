"""Convolutions of one to three dimensions with every option, and transposed ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from net_builders import Net, formed_in_chunks
from oracle import agree, plan_of
from refusals import raises_code
from torch import nn

from lamina import Engine
from lamina.engine.layers.conv import ConvolutionGrads

N = 5
CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
SPACE = {1: (11,), 2: (7, 8), 3: (5, 6, 5)}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"bias": False},
    {"stride": 2, "padding": 1},
    {"dilation": 2, "padding": 2},
    {"groups": 2},
    {"groups": 4},
    {"groups": 2, "stride": 2, "dilation": 2, "padding": 3},
    {"padding": "same"},
    {"padding": "same", "dilation": 2},
    {"padding": "valid", "stride": 3},
    {"padding": 1, "padding_mode": "reflect"},
    {"padding": 2, "padding_mode": "replicate", "stride": 2},
    {"padding": 1, "padding_mode": "circular", "groups": 2},
    {"padding": "same", "padding_mode": "circular"},
]


def body(conv: nn.Module, out: int, dimensions: int) -> nn.Module:
    return nn.Sequential(conv, nn.Tanh(), CONV[dimensions](out, 2, 1))


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(f"{k}={v}" for k, v in o.items()) or "plain")
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_convolution(dimensions: int, options: dict[str, Any]) -> None:
    conv = CONV[dimensions](4, 8, 3, **options)
    agree(body(conv, 8, dimensions), torch.randn(N, 4, *SPACE[dimensions]))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("kernel", [2, 4])
def test_even_kernel_with_same_padding_is_asymmetric(kernel: int, mode: str) -> None:
    agree(body(nn.Conv1d(4, 6, kernel, padding="same", padding_mode=mode), 6, 1), torch.randn(N, 4, 9))
    agree(body(nn.Conv2d(4, 6, (kernel, 3), padding="same", padding_mode=mode), 6, 2), torch.randn(N, 4, 6, 7))


ODD: list[tuple[nn.Module, tuple[int, ...]]] = [
    (nn.Conv2d(4, 6, (3, 2), stride=(1, 2), padding=(2, 1), dilation=(2, 1), groups=2), (7, 8)),
    (nn.Conv3d(4, 6, (3, 2, 1), padding=(1, 0, 2), stride=(2, 1, 1)), (5, 4, 3)),
    *((CONV[d](4, 4, 3, groups=4, padding=1), SPACE[d]) for d in (1, 2, 3)),  # depthwise
    (nn.Conv1d(4, 6, 1, padding=2), (5,)),  # pointwise
    (nn.Conv2d(4, 6, 1, stride=2, groups=2), (5, 6)),
    (nn.Conv2d(4, 6, 2, stride=3), (7, 7)),  # no window reaches the last rows
]


@pytest.mark.parametrize(("conv", "space"), ODD, ids=str)
def test_odd_geometries(conv: nn.Module, space: tuple[int, ...]) -> None:
    agree(body(conv, conv.out_channels, len(space)), torch.randn(N, 4, *space))


def test_channels_last_and_other_strides() -> None:
    x = torch.randn(N, 7, 8, 4).permute(0, 3, 1, 2)
    last = x.contiguous(memory_format=torch.channels_last)
    agree(body(nn.Conv2d(4, 6, 3, padding=1), 6, 2), x)
    agree(body(nn.Conv2d(4, 6, 3), 6, 2), last)
    agree(body(nn.Conv2d(4, 6, 3, padding=1), 6, 2).to(memory_format=torch.channels_last), last)


TRANSPOSED_OPTIONS: list[dict[str, Any]] = [
    {},
    {"bias": False, "stride": 2},
    {"stride": 2, "padding": 1, "output_padding": 1},
    {"groups": 2, "dilation": 2},
    {"stride": 3, "output_padding": 2, "groups": 4, "padding": 1},
]


@pytest.mark.parametrize("options", TRANSPOSED_OPTIONS, ids=lambda o: ",".join(f"{k}={v}" for k, v in o.items()))
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_transposed(dimensions: int, options: dict[str, Any]) -> None:
    conv = TRANSPOSED[dimensions](4, 8, 3, **options)
    agree(body(conv, 8, dimensions), torch.randn(N, 4, *[s // 2 for s in SPACE[dimensions]]))


@pytest.mark.parametrize("size", [[7, 7], [8, 7], [8, 8]], ids=str)
def test_transposed_to_an_output_size(size: list[int]) -> None:
    up = nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1)
    agree(Net(lambda m, x: m.up(x, output_size=size), up=up), torch.randn(N, 4, 4, 4))


def test_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.engine.layers.conv.CHUNK_ELEMENTS", 400)
    with formed_in_chunks(ConvolutionGrads, monkeypatch):
        agree(body(nn.Conv2d(4, 6, 3, padding=1), 6, 2), torch.randn(N, 4, 5, 5))


def test_an_input_without_batch_axis_is_refused() -> None:
    model = nn.Conv1d(4, 2, 3)
    with Engine(model, plan_of(model)), raises_code("engine.no-batch-axis"):
        model(torch.randn(4, 9))
