"""Problems that users of other libraries reported: docs/peers.md names them, and that Lamina does not have them is shown here."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch
from refusals import raises_code
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler

import lamina
from lamina.account import Event, find_accountant
from lamina.run.corpus import LoaderReplaced

ROOT = Path(__file__).parents[1]


def table(rows: int) -> Dataset[tuple[torch.Tensor, ...]]:
    return TensorDataset(torch.randn(rows, 4), torch.arange(rows) % 2)


def opacus_divisor(rows: int) -> int:
    """What Opacus divides the noised sum by."""
    opacus = pytest.importorskip("opacus", reason="opacus is not installed")
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(table(rows), batch_size=32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, made, _ = opacus.PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
        )
    return int(made.expected_batch_size)


def test_the_divisor_does_not_depend_on_the_number_of_records() -> None:
    """Opacus #571 and #819."""
    assert (opacus_divisor(64), opacus_divisor(65)) == (32, 21)
    made = {}
    for rows in (64, 65):
        x, y = torch.randn(rows, 4), torch.arange(rows) % 2
        engine, _, plan = lamina.make_private(
            nn.Linear(4, 2), (x, y), epsilon=3.0, delta=1e-5, batch=32, steps=4, population=100
        )
        engine.detach()
        made[rows] = plan.batch, plan.classes[0].sampling_rate, plan.noise
    assert made[64] == made[65]


def test_without_a_population_the_claim_says_that_the_number_is_public() -> None:
    engine, *_ = lamina.make_private(nn.Linear(4, 2), torch.randn(64, 4), epsilon=3.0, delta=1e-5, batch=32, steps=4)
    with engine:
        assert "zero-out" in repr(engine)


def test_a_shuffled_loader_becomes_a_poisson_sample() -> None:
    """Opacus #80, TensorFlow Privacy #483, private-transformers #7."""
    with pytest.warns(LoaderReplaced):
        corpus = lamina.Corpus(DataLoader(table(200), batch_size=20, shuffle=True, drop_last=True))
    engine, corpus, plan = lamina.make_private(nn.Linear(4, 2), corpus, epsilon=3.0, delta=1e-5, batch=20, steps=40)
    engine.detach()
    sizes = {len(batch) for batch in corpus.batches(plan, probe=False)}
    assert len(sizes) > 5


def test_a_loader_with_a_sampler_is_refused() -> None:
    """Opacus #813 and #600."""
    loader = DataLoader(table(200), batch_size=20, sampler=WeightedRandomSampler(torch.ones(200), 128))
    with raises_code("corpus.dataloader-not-poisson"):
        lamina.Corpus(loader)


def test_an_empty_batch_is_a_noisy_step() -> None:
    """Opacus #161, #530 and #631."""
    model = nn.Linear(4, 2)
    engine, *_ = lamina.make_private(model, torch.randn(64, 4), epsilon=3.0, delta=1e-5, batch=8, steps=4)
    with engine:
        engine.decline_probe()
        engine.backward(None, lamina.Batch(torch.zeros(0, 4)))
        assert engine.budget.taken == 1
        assert all(p.grad is not None and bool(p.grad.ne(0).all()) for p in model.parameters())


def test_no_accountant_reports_less_than_the_tightest() -> None:
    """Opacus #384: its GDP accountant does."""
    accountants = pytest.importorskip("opacus.accountants", reason="opacus is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus warns that it may report too little
        approximate = accountants.GaussianAccountant()
    approximate.history = [(0.5, 0.001, 1000)]
    schedule = [Event(sigma=0.5, q=0.001, steps=1000)]
    tight = find_accountant("pld").epsilon(schedule, 1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert approximate.get_epsilon(1e-5) < 0.9 < 3.2 < tight
    for name in ("rdp", "moments", "zcdp", "gaussian"):
        assert find_accountant(name).epsilon(schedule, 1e-5) >= tight


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def test_a_tied_weight_is_clipped_once_on_the_sum_of_its_uses() -> None:
    """Opacus #413."""
    model, x = Tied(), 100 * torch.randn(6, 4)
    engine, _, plan = lamina.make_private(model, torch.randn(64, 4), epsilon=3.0, delta=1e-5, batch=8, steps=4)
    with engine:
        sums = engine.clipped_sums(model(x).square().sum(1), lamina.Batch(x))
    (layer,) = plan.layers
    expected = torch.zeros(4, 4)
    for row in x:
        weight = model.first.weight.detach().clone().requires_grad_()
        loss = nn.functional.linear(torch.tanh(nn.functional.linear(row, weight)), weight).square().sum()
        (gradient,) = torch.autograd.grad(loss, weight)
        expected += gradient * min(1.0, plan.clip[0][0] / float(gradient.norm()))
    assert torch.allclose(sums[layer.parameters[0]], expected, rtol=1e-4, atol=1e-6)


def test_a_fixed_model_still_tells_inputs_apart() -> None:
    """Opacus #567."""
    validators = pytest.importorskip("opacus.validators", reason="opacus is not installed")
    model, x = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), torch.randn(5, 3)
    mended, _ = lamina.fix(model)
    assert validators.ModuleValidator.fix(model)(x).abs().max() < 1e-3
    assert mended(x).abs().max() > 0.5


def test_a_gradient_penalty_is_refused_by_name() -> None:
    """Opacus #31."""
    critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    engine, *_ = lamina.make_private(critic, torch.randn(64, 4), epsilon=3.0, delta=1e-5, batch=8, steps=4)
    with engine:
        engine.decline_probe()
        x = torch.randn(6, 4, requires_grad=True)
        with raises_code("engine.hidden-backward"):
            (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
            engine.backward((slope.norm(dim=1) - 1).square(), lamina.Batch(x.detach()))
        assert engine.budget.taken == 0


def test_the_page_names_tests_that_exist() -> None:
    page = (ROOT / "docs" / "peers.md").read_text(encoding="utf-8")
    issues = set(re.findall(r"github.com/[\w-]+/[\w-]+/(?:issues|pull)/\d+", page))
    assert len(issues) >= 15
    for target in re.findall(r"\]\(\.\./(tests/[^)]+)\)", page):
        assert (ROOT / target).exists(), target
