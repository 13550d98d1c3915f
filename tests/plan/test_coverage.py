"""Coverage: nothing trains, and nothing is written, that the plan does not account for."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from oracle import plan_of
from refusals import raises_code
from torch import Tensor, nn

from lamina.plan.coverage import check_coverage
from lamina.plan.step_plan import PlannedClass


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))


def test_every_tensor_is_sorted() -> None:
    model = mlp()
    model[0].bias.requires_grad_(False)
    model.register_buffer("scale", torch.ones(1))
    plan = plan_of(model)
    public = PlannedClass(name="open", population=10, sampling_rate=0.5, public=True)
    plan = dataclasses.replace(
        plan, classes=(*plan.classes, public), clip=((0.0, 0.0, 1.0), (0.0, math.inf, math.inf)), noise=(0.0, 0.0, 1.0)
    )
    coverage = check_coverage(model, plan)
    assert coverage.covered == ("2.weight", "2.bias")
    assert coverage.public_only == ("1.weight", "1.bias")
    assert coverage.unreached == ("0.weight",)
    assert coverage.frozen == ("0.bias",)
    assert coverage.buffers == ("scale",)
    assert "2 tensors clipped and noised" in str(coverage)


def test_a_tensor_outside_the_plan_is_refused() -> None:
    model = mlp()
    model[1].requires_grad_(False)
    plan = plan_of(model)
    check_coverage(model, plan)
    model[1].weight.requires_grad_(True)
    with raises_code("plan.tensor-not-in-plan"):
        check_coverage(model, plan)


def test_stale_plans_are_refused() -> None:
    model = mlp()
    plan = plan_of(model)
    model[1].weight.requires_grad_(False)
    with raises_code("plan.tensor-frozen"):
        check_coverage(model, plan)
    with raises_code("plan.tensor-missing"):
        check_coverage(mlp()[:2], plan)
    with raises_code("plan.layer-size-differs"):
        check_coverage(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)), plan)
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plan = plan_of(tied)
    tied[1].weight = tied[0].weight
    with raises_code("plan.tensor-missing"):
        check_coverage(tied, plan)


def test_lazy_modules_are_refused() -> None:
    with raises_code("plan.tensor-lazy"):
        check_coverage(nn.Sequential(nn.LazyLinear(3)), plan_of(mlp()))


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(4), nn.SyncBatchNorm(4), nn.BatchNorm1d(4, affine=False)], ids=lambda m: repr(m)[:14]
)
@pytest.mark.parametrize("frozen", [False, True])
def test_batch_norm_in_training_mode_is_refused_also_when_frozen(norm: nn.Module, frozen: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 4), norm.train())
    norm.requires_grad_(not frozen)
    plan = plan_of(model)
    with raises_code("plan.module-unsafe"):
        check_coverage(model, plan)
    model[1].eval()
    assert "1.running_mean" in check_coverage(model, plan).buffers


def test_batch_norm_without_running_statistics_is_refused_in_any_mode() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False)).eval()
    with raises_code("plan.module-unsafe"):
        check_coverage(model, plan_of(model))


def test_instance_norm_is_refused_only_if_it_writes() -> None:
    model = nn.Sequential(nn.Conv1d(1, 4, 3), nn.InstanceNorm1d(4, track_running_stats=True))
    with raises_code("plan.module-unsafe"):
        check_coverage(model, plan_of(model))
    check_coverage(model.eval(), plan_of(model))
    model = nn.Sequential(nn.Conv1d(1, 4, 3), nn.InstanceNorm1d(4))
    check_coverage(model, plan_of(model))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_that_write_or_count_are_refused_also_when_frozen(kind: type[nn.Module]) -> None:
    model = nn.Sequential(kind(5, 3, max_norm=1.0).requires_grad_(False), nn.Linear(3, 1))
    with raises_code("plan.module-unsafe"):
        check_coverage(model, plan_of(model))
    model = nn.Sequential(kind(5, 3, scale_grad_by_freq=True), nn.Linear(3, 1))
    with raises_code("plan.module-unsafe"):
        check_coverage(model, plan_of(model))


class Centred(nn.Module):
    """A norm of one's own, with a buffer under a name of the caller's choice."""

    def __init__(self, buffer: str) -> None:
        super().__init__()
        self.name = buffer
        self.register_buffer(buffer, torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            getattr(self, self.name).lerp_(x.mean(0), 0.1)
        return x - getattr(self, self.name)


def test_running_buffers_of_any_module_are_refused() -> None:
    model = nn.Sequential(Centred("running_centre"), nn.Linear(3, 1))
    with raises_code("plan.module-unsafe"):
        check_coverage(model, plan_of(model))
    model[0].eval()
    check_coverage(model, plan_of(model), example=torch.ones(2, 3))


def test_example_shows_buffers_that_no_name_gives_away() -> None:
    model = nn.Sequential(Centred("centre"), nn.Dropout(0.5), nn.Linear(3, 1))
    plan, state = plan_of(model), torch.get_rng_state()
    check_coverage(model, plan)
    with raises_code("plan.buffer-written"):
        check_coverage(model, plan, example=torch.ones(2, 3))
    assert torch.equal(model[0].centre, torch.zeros(3))
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
