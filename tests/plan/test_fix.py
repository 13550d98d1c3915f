"""fix: a model without coupling, the same in everything else, and a report of the difference."""

from __future__ import annotations

import copy

import pytest
import torch
from refusals import raises_code
from torch import nn
from torch.nn.utils import parametrizations

import lamina
from lamina.plan.coverage import FixReport, find_hazards, fix, group_count


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16)) for _ in range(2))
        self.drop = nn.Dropout(0.5)
        self.norm = nn.InstanceNorm2d(16, track_running_stats=True)
        self.head = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.drop(self.norm(x)).relu().mean((2, 3)))


def test_a_model_is_mended_everywhere_and_the_original_is_untouched() -> None:
    torch.manual_seed(0)
    model = Net().double()
    nn.init.normal_(model.stem[1].weight)
    model.stem[1].bias.requires_grad_(False)
    model.stem[1].eval()
    before = copy.deepcopy(model.state_dict())
    fixed, report = fix(model)
    assert list(find_hazards(model))
    assert not list(find_hazards(fixed))
    assert {name: v.tolist() for name, v in model.state_dict().items()} == {n: v.tolist() for n, v in before.items()}
    assert isinstance(fixed, Net)
    assert isinstance(fixed.stem[1], nn.GroupNorm)
    assert torch.equal(fixed.stem[1].weight, model.stem[1].weight)
    assert fixed.stem[1].weight.dtype == torch.float64
    assert not fixed.stem[1].bias.requires_grad
    assert not fixed.stem[1].training
    assert fixed.blocks[0][1].training
    assert fixed.drop.p == 0.5
    assert fixed.stem[2].inplace
    assert [name for name, _ in fixed.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert [change.module for change in report.changes] == ["stem.1", "blocks.0.1", "blocks.1.1", "norm"]
    assert "BatchNorm2d(16) → GroupNorm(2, 16)" in str(report)
    assert not report.left


def test_contributions_no_longer_mix() -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 3, 8, 8)
    model.drop.p = 0.0
    other = torch.cat([x[:1], torch.randn(3, 3, 8, 8)])
    assert not torch.allclose(model(x)[0], model(other)[0], atol=1e-3)
    fixed, _ = fix(model)
    assert torch.allclose(fixed(x)[0], fixed(other)[0], atol=1e-6)


def test_in_place_keeps_the_parameters_that_an_optimiser_holds() -> None:
    model = Net()
    held = {id(p) for p in model.parameters()}
    fixed, report = fix(model, inplace=True)
    assert fixed is model
    assert {id(p) for p in model.parameters()} == held
    assert len(report.changes) == 4


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_as_root(kind: type[nn.Module], affine: bool) -> None:
    fixed, report = fix(kind(24, affine=affine))
    assert isinstance(fixed, nn.GroupNorm)
    assert (fixed.num_groups, fixed.num_channels, fixed.affine) == (3, 24, affine)
    assert (fixed.weight is None) is not affine
    assert report.changes[0].module == "(root)"
    assert fixed(torch.randn(2, 24, 3)).shape == (2, 24, 3)
    assert "affine=" in repr(fixed)


def test_groups_never_flatten_a_vector() -> None:
    for channels in range(2, 200):
        groups = group_count(channels)
        assert channels % groups == 0
        assert groups <= 32
        assert groups == 1 or channels // groups >= 8
    assert group_count(256) == 32
    fixed, _ = fix(nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16)))
    assert fixed(torch.randn(5, 3)).std() > 0.5


def test_a_module_used_twice_is_replaced_by_one_module() -> None:
    norm = nn.BatchNorm1d(16)
    fixed, report = fix(nn.Sequential(norm, nn.Linear(16, 16), norm))
    assert fixed[0] is fixed[2]
    assert isinstance(fixed[2], nn.GroupNorm)
    assert len(report.changes) == 1


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_lose_what_couples_or_writes(kind: type[nn.Module]) -> None:
    fixed, report = fix(kind(5, 3, max_norm=1.0, scale_grad_by_freq=True, sparse=True))
    assert (fixed.max_norm, fixed.scale_grad_by_freq, fixed.sparse) == (None, False, False)
    assert len(report.changes) == 3


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, parametrizations.spectral_norm], ids=["old", "new"])
def test_spectral_norm_is_removed_at_its_present_value(norm: object) -> None:
    model = nn.Sequential(norm(nn.Linear(3, 3)), nn.Linear(3, 1)).eval()  # type: ignore[operator]
    x = torch.randn(2, 3)
    fixed, report = fix(model)
    assert torch.allclose(fixed(x), model(x), atol=1e-6)  # the original still works
    assert len(list(model.parameters())) == 4
    assert sorted(name for name, _ in fixed[0].named_parameters()) == ["bias", "weight"]
    assert isinstance(fixed[0].weight, nn.Parameter)
    assert fixed[0].weight.requires_grad
    assert "spectral_norm" in str(report)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_cannot_be_mended_is_named() -> None:
    class Fancy(nn.BatchNorm2d):
        pass

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("running_max", torch.zeros(1))

    model = nn.Sequential(
        Fancy(8),
        Own(),
        nn.BatchNorm1d(1),
        nn.utils.weight_norm(nn.Linear(2, 2)),
        parametrizations.weight_norm(nn.Linear(2, 2)),
    )
    with raises_code("plan.model-not-copyable"):
        fix(model)  # the old weight_norm holds a tensor that is not a leaf
    fixed, report = fix(model, inplace=True)
    assert not report.changes
    assert [change.module for change in report.left] == ["0", "1", "2", "3", "4"]
    assert isinstance(fixed[0], Fancy)
    assert "nothing to change" in str(report)
    assert "running_max" in str(report)


def test_sound_models_are_left_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Dropout(), nn.InstanceNorm1d(3), nn.ReLU(inplace=True))
    fixed, report = fix(model)
    assert repr(fixed) == repr(model)
    assert not report.changes
    assert not report.left


def test_lazy_modules_are_refused() -> None:
    with raises_code("plan.tensor-lazy"):
        fix(nn.Sequential(nn.LazyBatchNorm1d()))


class BatchNormAct2d(nn.BatchNorm2d):
    """As timm has it: followed by dropout and an activation."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.drop(super().forward(x)))


class OtherBatchNorm(nn.BatchNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_batch_norm_with_an_activation_keeps_it() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 1), BatchNormAct2d(16))
    (hazard,) = find_hazards(model)
    assert "lamina.fix" in hazard.remedy
    fixed, report = fix(model)
    assert not list(find_hazards(fixed)) and not report.left
    norm, _, act = fixed[1]
    assert isinstance(norm, nn.GroupNorm) and isinstance(act, nn.ReLU)
    assert (fixed(torch.randn(2, 3, 4, 4)) >= 0).all()


def test_a_batch_norm_that_fix_leaves_is_not_sent_back_to_fix() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 1), OtherBatchNorm(16))
    (hazard,) = find_hazards(model)
    assert "by hand" in hazard.remedy and "use `model, report" not in hazard.remedy
    assert fix(model).report.left


class FrozenBatchNorm2d(nn.Module):
    """As torchvision and DETR have it: constants in buffers that are called running."""

    def __init__(self, *, writes: bool = False) -> None:
        super().__init__()
        self.writes = writes
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.1), ("running_var", 1.2)):
            self.register_buffer(name, torch.full((3, 1, 1), value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.writes:
            self.running_mean.add_(x.detach().mean())
        return (x - self.running_mean) * self.weight * self.running_var.rsqrt() + self.bias


def test_a_frozen_batch_norm_is_left_alone_unless_it_writes_its_buffers() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 1), FrozenBatchNorm2d(), nn.Flatten(), nn.Linear(48, 2)).train()
    assert lamina.fix(model).report == FixReport() and not list(find_hazards(model))
    model[1].writes = True
    engine, _, _ = lamina.make_private(model, torch.randn(20, 2, 4, 4), epsilon=3.0, batch=5, steps=2)
    with engine, raises_code("engine.written-during-forward"):
        model(torch.randn(5, 2, 4, 4))
