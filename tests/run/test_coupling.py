"""What the step really computes is probed: augmentation, model and loss, in the trainer and in a loop of one's own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import problem
import pytest
import torch
from refusals import raises_code
from torch import Tensor, nn
from torch.nn import functional as F

import lamina
from lamina import Batch, Corpus
from lamina.engine.probe import NotProbed


def mixup(x: Tensor) -> Tensor:
    weight = torch.distributions.Beta(0.4, 0.4).sample()
    return weight * x + (1 - weight) * x[torch.randperm(len(x))]


def per_example(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y, reduction="none")


AUGMENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "mixup": mixup,
    "standardised by the batch": lambda x: (x - x.mean(0)) / x.std(0),
    "divided by the largest": lambda x: x / x.abs().max(),
}


@pytest.mark.parametrize("kind", AUGMENTS)
def test_an_augmentation_that_mixes_examples_is_refused_before_anything_is_spent(kind: str, tmp_path: Path) -> None:
    trainer = problem.trainer(tmp_path / "a", augment=AUGMENTS[kind])
    with raises_code("engine.probe-found-coupling"):
        trainer.fit()
    assert not list(tmp_path.rglob("*.db")) and not list(tmp_path.rglob("metrics.json"))


@pytest.mark.parametrize("augment", [lambda x: x + 0.1 * torch.randn_like(x), lambda x: x.mul_(1.0 + torch.rand(()))])
def test_an_augmentation_of_each_example_by_itself_is_accepted(augment: Any, tmp_path: Path) -> None:
    problem.trainer(tmp_path / "a", augment=augment).rehearse()


def info_nce_of(output: Tensor, y: Tensor) -> Tensor:
    unit = F.normalize(output, dim=1)
    return F.cross_entropy(unit @ unit.detach().T, torch.arange(len(output)), reduction="none")


def with_baseline(output: Tensor, y: Tensor) -> Tensor:
    each = per_example(output, y)
    return each * (each - each.mean()).detach()


TRAINER_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "statistics of the batch": lambda output, y: per_example(output - output.mean(0), y),
    "statistics detached": lambda output, y: per_example(output - output.mean(0).detach(), y),
    "batch baseline": with_baseline,
    "InfoNCE": info_nce_of,
    "divided by the batch": lambda output, y: per_example(output, y) / len(y),
}


@pytest.mark.parametrize("kind", TRAINER_LOSSES)
def test_a_loss_over_the_batch_is_refused_by_the_trainer_beside_dropout(kind: str, tmp_path: Path) -> None:
    trainer = problem.trainer(tmp_path / "a", loss_fn=TRAINER_LOSSES[kind])
    with raises_code("engine.probe-found-coupling", "engine.contributions-coupled"):
        trainer.rehearse()


@pytest.mark.parametrize("probe", [True, False])
def test_a_run_that_was_not_probed_says_so_beside_its_epsilon(probe: bool, tmp_path: Path) -> None:
    outcome = problem.trainer(tmp_path / "a", steps=2, probe=probe).fit()
    assert any(note.startswith("not probed") for note in outcome.notes) is not probe


# ---------------------------------------------------------------------------------------- a loop of one's own


LOSSES: dict[str, Callable[[nn.Module, Tensor, Tensor], Tensor]] = {
    "input standardised by the batch": lambda m, x, y: per_example(m((x - x.mean(0)) / x.std(0)), y),
    "input divided by the largest": lambda m, x, y: per_example(m(x / x.abs().max()), y),
    "statistics of the batch": lambda m, x, y: per_example(m(x) - m(x).mean(0), y),
    "statistics detached": lambda m, x, y: per_example(m(x) - m(x).mean(0).detach(), y),
    "batch baseline": lambda m, x, y: with_baseline(m(x), y),
    "mixup": lambda m, x, y: per_example(m(mixup(x)), y),
    "InfoNCE": lambda m, x, y: info_nce_of(m(x), y),
    "divided by the batch": lambda m, x, y: per_example(m(x), y) / len(x),
}
Loop = tuple[lamina.Engine, Corpus, lamina.StepPlan, torch.optim.Optimizer]


def private(model: nn.Module, steps: int = 3) -> Loop:
    x, y = torch.randn(40, 6), torch.arange(40) % 3
    engine, corpus, plan = lamina.make_private(model, (x, y), epsilon=3.0, batch=8, steps=steps)
    return engine, corpus, plan, torch.optim.Adam(model.parameters(), lr=0.1)


def train(
    loop: Loop, losses: Callable[[nn.Module, Tensor, Tensor], Tensor], rates: Any = None, parts: int = 1
) -> list[Batch]:
    engine, corpus, plan, optimizer = loop
    real = []
    for batch in corpus.batches(plan):
        taken = engine.budget.taken
        for part in batch.split(parts):
            engine.backward(losses(engine.model, part.x, part.y) if len(part) else None, part)
        if engine.budget.taken > taken:
            real.append(batch)
        else:
            assert all(p.grad is None for p in engine.model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        if rates is not None:
            rates.step()
    return real


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loop_of_ones_own_is_probed_by_itself_and_coupling_refused(kind: str) -> None:
    model = problem.net()
    loop = private(model)
    before = [p.detach().clone() for p in model.parameters()]
    with raises_code("engine.probe-found-coupling", "engine.contributions-coupled"):
        train(loop, LOSSES[kind])
    assert loop[0].budget.taken == 0 and not loop[0].probed
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("parts", [1, 3])
def test_the_batches_of_a_probe_cost_nothing_and_leave_generators_and_schedules_alone(parts: int) -> None:
    loop = private(problem.net(dropout=0.3))
    engine, _, plan, optimizer = loop
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    both = torch.optim.lr_scheduler.ChainedScheduler([rates])
    real = train(loop, lambda m, x, y: per_example(m(x), y), both, parts)
    assert len(real) == engine.budget.taken == plan.steps == 3
    assert rates.last_epoch == 3 and optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**3)
    assert optimizer.state[next(engine.model.parameters())]["step"] == 3
    assert engine.probed and ", probed" not in repr(engine) and "; probed" in repr(engine)
    engine.detach()


def test_the_generators_are_as_before_when_the_first_real_batch_comes() -> None:
    engine, corpus, plan, _ = private(problem.net(dropout=0.3))
    torch.manual_seed(11)
    want = torch.get_rng_state()
    for batch in corpus.batches(plan):
        if engine.probed:
            break
        engine.backward(per_example(engine.model(batch.x), batch.y), batch)
    assert torch.equal(torch.get_rng_state(), want)
    engine.detach()


def test_batches_that_are_made_anew_from_those_of_the_probe_are_compared_too() -> None:
    """Two noisy views of every example, as one contribution each."""
    engine, corpus, plan, _ = private(problem.net())
    for batch in corpus.batches(plan):
        n = len(batch)
        x, y = torch.cat([batch.x, batch.x + 0.1 * torch.randn_like(batch.x)]), batch.y.repeat(2)
        made = Batch(x, y, unit=torch.arange(n).repeat(2))
        engine.backward(per_example(engine.model(x), y) if n else None, made)
        engine.model.zero_grad()
    assert engine.probed and engine.budget.taken == plan.steps
    engine.detach()


def test_the_probe_is_left_out_by_name_and_batches_by_hand_warn_once() -> None:
    engine, corpus, plan, _ = private(problem.net())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        count = sum(1 for batch in corpus.batches(plan, probe=False) if engine.backward(None, batch_of(0)) is None)
    assert count == plan.steps == engine.budget.taken and "not probed" in repr(engine)
    engine.detach()
    engine, corpus, plan, _ = private(problem.net())
    with pytest.warns(NotProbed):
        engine.backward(None, batch_of(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.backward(None, batch_of(0))
    engine.detach()


def batch_of(n: int) -> Batch:
    return Batch(torch.zeros(n, 6), torch.zeros(n, dtype=torch.long))
