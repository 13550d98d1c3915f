"""LayerNorm, RMSNorm, GroupNorm, InstanceNorm."""

from __future__ import annotations

import pytest
import torch
from oracle import agree, plan_of
from refusals import raises_code
from torch import nn

from lamina import Engine

N = 7


def shaken(model: nn.Module) -> nn.Module:
    """Gains and shifts away from 1 and 0, where mistakes hide."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    return model


def rows(norm: nn.Module) -> nn.Module:
    return shaken(nn.Sequential(nn.Linear(5, 6), norm, nn.Tanh(), nn.Linear(6, 2)))


@pytest.mark.parametrize(
    "norm",
    [
        *(nn.LayerNorm(shape, bias=bias) for shape in (6, (3, 6)) for bias in (True, False)),
        *(nn.RMSNorm(shape, eps=eps) for shape in (6, (3, 6)) for eps in (None, 1e-3)),
        nn.LayerNorm(6, elementwise_affine=False),
    ],
    ids=str,
)
def test_over_the_last_axes(norm: nn.Module) -> None:
    agree(rows(norm), torch.randn(N, 3, 5))


def test_layer_norm_on_rows_and_images() -> None:
    agree(rows(nn.LayerNorm(6)), torch.randn(N, 5))
    image = nn.Sequential(nn.Conv2d(2, 3, 2), nn.LayerNorm((3, 4, 4)), nn.Conv2d(3, 2, 1))
    agree(shaken(image), torch.randn(N, 2, 5, 5))


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("space", [(), (7,), (4, 3)], ids=str)
def test_group_norm(groups: int, space: tuple[int, ...]) -> None:
    if not space:
        groups = min(groups, 2)  # one number per group normalises to 0, two to ±1: no gradient to compare
    first = nn.Linear(5, 6) if not space else (nn.Conv1d, nn.Conv2d)[len(space) - 1](5, 6, 1)
    agree(shaken(nn.Sequential(first, nn.GroupNorm(groups, 6), nn.Tanh())), torch.randn(N, 5, *space))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_instance_norm(dimensions: int, affine: bool) -> None:
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1]
    norm = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[dimensions - 1]
    model = nn.Sequential(conv(3, 4, 2), norm(4, affine=affine), nn.Tanh(), conv(4, 2, 1))
    agree(shaken(model), torch.randn(N, 3, *(5, 4, 4)[:dimensions]))


def test_gain_frozen_shift_trained() -> None:
    model = shaken(nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Tanh(), nn.GroupNorm(2, 6)))
    model[1].weight.requires_grad_(False)
    model[3].bias.requires_grad_(False)
    agree(model, torch.randn(N, 5))


def test_instance_norm_with_running_statistics_is_refused() -> None:
    for training in (True, False):
        norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True).train(training)
        model = nn.Sequential(nn.Conv1d(3, 4, 2), norm)
        with raises_code("engine.running-stats", "plan.module-unsafe"):
            Engine(model, plan_of(model))


def test_instance_norm_without_batch_axis_is_refused() -> None:
    model = nn.InstanceNorm1d(4, affine=True)
    with Engine(model, plan_of(model)), raises_code("engine.no-batch-axis"):
        model(torch.randn(4, 9))
