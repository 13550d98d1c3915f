"""Noise that is correlated over steps, as the engine adds it: C·W is independent again, and only drawn turns are taken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from audit_steps import failed, loss_of, plan_for, target_of
from refusals import raises_code
from torch import Tensor, nn

from lamina import Batch, Corpus, Engine, StepPlan
from lamina.account import GaussianFilter
from lamina.audit.step_audit import audit_step
from lamina.engine.batch import Draw
from lamina.engine.distributed import ALONE, Ranks, refuse_unsharded
from lamina.engine.noise.correlated import CorrelatedNoise
from lamina.engine.noise.source import NoiseSource, SecureNoise, SeededNoise
from lamina.engine.reference import route
from lamina.plan.correlation import band_coefficients
from lamina.run.sampler import Sampler

BANDS, STEPS = 3, 7


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def plan_of(model: nn.Module, bands: int = BANDS, **changes: Any) -> StepPlan:
    return replace(plan_for(model, several=True), bands=bands, **changes)


def data(n: int = 6) -> Batch:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(n, 4, generator=generator), torch.randn(n, generator=generator)
    return Batch(x, y, cls=torch.arange(n) % 3)


@pytest.fixture
def nobody() -> Batch:
    full = data()
    return Batch(full.x[:0], full.y[:0], cls=torch.zeros(0, dtype=torch.long))


@pytest.mark.parametrize("hardened", [False, True])
def test_the_strategy_applied_to_the_noise_gives_back_independent_noise(nobody: Batch, hardened: bool) -> None:
    """Exactly the stream that a plan with independent noise would have added."""
    model = net()
    noise = SeededNoise(5, hardened=hardened)
    correlated = _released(plan_of(model), noise, nobody)
    independent = _released(plan_of(model, bands=1), SeededNoise(5, hardened=hardened), nobody)
    c = band_coefficients(BANDS)
    for t in range(STEPS):
        for name, fresh in independent[t].items():
            undone = sum(c[j] * correlated[t - j][name] for j in range(min(BANDS, t + 1)))
            assert torch.allclose(undone, fresh, atol=2e-2 if hardened else 2e-6)  # type: ignore[arg-type]
    assert not torch.allclose(correlated[1]["0.weight"], independent[1]["0.weight"], atol=0.1)


def _released(plan: StepPlan, noise: NoiseSource, batch: Batch, steps: int = STEPS) -> list[dict[str, Tensor]]:
    model, found = net(), []
    with Engine(model, plan, noise=noise) as engine:
        for _ in range(steps):
            losses = loss_of(model(batch.x), batch.y) if len(batch) else None
            engine.backward(losses, batch)
            found.append({n: p.grad.double() * plan.batch for n, p in model.named_parameters() if p.grad is not None})
            model.zero_grad()
            batch = replace(batch, draw=Draw())
    return found


@pytest.mark.parametrize("hardened", [False, True])
def test_gradients_are_clipped_and_summed_as_ever(nobody: Batch, hardened: bool) -> None:
    model = net()
    plan = plan_of(model)
    with_data = _released(plan, SeededNoise(2, hardened=hardened), data())
    without = _released(plan, SeededNoise(2, hardened=hardened), nobody)
    with Engine(net(), plan, noise=SeededNoise(0)) as engine:
        sums = engine.clipped_sums(loss_of(engine.model(data().x), data().y), data())
    for t in (0, 3, 6):
        for name, total in sums.items():
            moved = with_data[t][name] - without[t][name]
            assert torch.allclose(moved, total.double(), atol=2e-2 if hardened else 1e-5)


def test_parts_of_a_batch_share_one_noise() -> None:
    model, plan, batch = net(), plan_of(net()), data()
    whole = _released(plan, SeededNoise(3), batch, steps=3)
    found = []
    with Engine(model, plan, noise=SeededNoise(3)) as engine:
        for _ in range(3):
            for part in replace(batch, draw=Draw()).split(3):
                engine.backward(loss_of(model(part.x), part.y), part)
            found.append({n: p.grad.double() * plan.batch for n, p in model.named_parameters() if p.grad is not None})
            model.zero_grad()
    for a, b in zip(whole, found, strict=True):
        assert all(torch.allclose(a[name], b[name], atol=1e-5) for name in a)


def test_a_window_goes_on_exactly_where_it_was(nobody: Batch) -> None:
    plan, tensors = plan_of(net()), {"a": torch.zeros(5), "b": torch.zeros(2, 2)}
    torch.manual_seed(0)
    fresh = [[torch.randn(5), torch.randn(2, 2)] for _ in range(8)]
    whole, first = (CorrelatedNoise(plan, tensors, ALONE) for _ in range(2))
    expected = [_correlated(whole, each) for each in fresh]
    for each in fresh[:5]:
        _correlated(first, each)
    kept, state = first.to_state()
    assert set(kept) == {f"{age}.{name}" for age in (0, 1) for name in tensors} and len(first) == BANDS - 1
    second = CorrelatedNoise(plan, tensors, ALONE)
    assert second.load(kept, state)
    for each, wanted in zip(fresh[5:], expected[5:], strict=True):
        assert all(map(torch.equal, _correlated(second, each), wanted))
    assert not second.load(kept, {**state, "plan": bytes(32)}) and len(second) == 0
    assert not second.load(kept, {**state, "members": b"others"}) and len(second) == 0
    assert not second.load({}, None)


def _correlated(window: CorrelatedNoise, fresh: list[Tensor]) -> list[Tensor]:
    made = [each.clone() for each in fresh]
    window.correlate_(made)
    return made


def test_a_new_stretch_begins_with_an_empty_window_unless_it_goes_on(nobody: Batch) -> None:
    with Engine(net(), plan_of(net()), noise=SeededNoise(0)) as engine:
        assert isinstance(engine.mechanism, CorrelatedNoise)
        engine.backward(None, nobody)
        engine.continue_at(1, SeededNoise(1), resumed=True)
        assert len(engine.mechanism) == 1
        engine.continue_at(1, SeededNoise(2))
        assert len(engine.mechanism) == 0


# --------------------------------------------------------------------------------------------- participation


def corpus(n: int = 60) -> Corpus:
    torch.manual_seed(3)
    return Corpus(
        torch.randn(n, 4).numpy(), torch.randn(n).numpy(), ids=[f"p{i}" for i in range(n)], cls="plain", unit="each"
    )


def sure_plan(bands: int = BANDS) -> StepPlan:
    """Everybody takes part when it is their turn."""
    plan = plan_for(net())
    entry = replace(plan.classes[0], population=60, sampling_rate=1 / bands)
    return replace(plan, classes=(entry,), bands=bands, steps=9)


def test_contributions_take_turns_and_a_turn_is_nobody_elses_doing() -> None:
    whole, plan = corpus(), sure_plan()
    sampler = Sampler(whole, plan, seed=bytes(range(32)))
    turns = whole.turns(BANDS)
    for step in range(plan.steps):
        batch = sampler.draw(step)
        expected = torch.from_numpy(whole.source.fetch((turns == step % BANDS).nonzero()[0])[0].numpy())
        assert torch.equal(batch.x, expected) and batch.draw.turn == (step % BANDS, BANDS)
    assert set(turns.tolist()) == {0, 1, 2}
    names = [f"p{i}" for i in range(60) if i != 17]
    rest = Corpus(torch.zeros(59, 4).numpy(), ids=names, cls="plain", unit="each")
    assert rest.turns(BANDS).tolist() == [int(t) for i, t in enumerate(turns) if i != 17]
    for unit in (None, "each"):  # called by their rows: without row 17, those after it would have other turns
        with raises_code("corpus.turns-without-ids"):
            Sampler(Corpus(torch.zeros(60, 4).numpy(), cls="plain", unit=unit), plan, seed=bytes(range(32)))


def test_public_contributions_take_part_in_every_step_as_before() -> None:
    x = torch.zeros(60, 4).numpy()
    names = ["plain"] * 30 + ["open"] * 30
    plan = plan_for(net(), several=True)
    classes = (replace(plan.classes[0], sampling_rate=0.5), replace(plan.classes[2], sampling_rate=1.0))
    plan = replace(plan, classes=classes, clip=(plan.clip[0], plan.clip[2]), bands=2)
    batch = Sampler(Corpus(x, cls=names, unit=range(60)), plan, seed=bytes(range(32))).draw(0)
    assert int((batch.cls == 1).sum()) == 30 and 0 < int((batch.cls == 0).sum()) < 30


def test_secret_noise_takes_only_batches_of_the_turn_that_is_due() -> None:
    plan, model = sure_plan(), net()
    with Engine(model, plan, noise=SecureNoise()) as engine:
        engine.decline_probe()
        made_by_hand = replace(data(), cls=torch.zeros(6, dtype=torch.long))
        with raises_code("engine.batch-of-other-turn"):
            engine.backward(loss_of(model(made_by_hand.x), made_by_hand.y), made_by_hand)
        batches = list(corpus().batches(plan, probe=False))
        with raises_code("engine.batch-of-other-turn"):
            engine.backward(loss_of(model(batches[1].x), batches[1].y), batches[1])
        engine.backward(loss_of(model(batches[0].x), batches[0].y), batches[0])
        assert engine.budget.taken == 1


def test_caps_on_occurrences_are_refused() -> None:
    with raises_code("corpus.max-occurrences-correlated"):
        Sampler(corpus(), sure_plan(), seed=bytes(range(32)), max_occurrences={"plain": 2})


def test_a_filter_is_charged_once_for_a_turn_of_everybody(nobody: Batch) -> None:
    plan = replace(plan_for(net()), bands=BANDS, steps=9)
    budget = GaussianFilter.for_schedule(plan.schedule(0))
    with Engine(net(), plan, noise=SeededNoise(0), filters={"plain": budget}) as engine:
        for _ in range(9):
            engine.backward(None, replace(nobody, draw=Draw()))
        assert not budget.admits(plan.sigma(0), 1.0)
        assert engine.epsilon(0) == plan.epsilon(0)


def test_several_ranks_are_refused() -> None:
    """Past noise of a rank is in no checkpoint but that of rank 0."""
    with raises_code("engine.plan-not-for-ranks"):
        refuse_unsharded(plan_of(net()), Ranks(0, 2))


def test_one_step_by_itself_is_refused() -> None:
    plan = plan_of(net())
    grads = {name: torch.zeros(0, *p.shape) for name, p in net().named_parameters()}
    with raises_code("engine.route-correlated"):
        route(grads, torch.zeros(0, dtype=torch.long), plan, noise=SeededNoise(0))


# --------------------------------------------------------------------------------------------- audit


def test_the_paired_seed_audit_passes_and_finds_noise_that_is_not_as_claimed() -> None:
    model = net()
    batch = Batch(data().x, data().y, cls=torch.zeros(6, dtype=torch.long))
    plan = plan_of(model)
    checks = audit_step(target_of(model, plan), batch, quick=True, tries=2)
    assert not failed(checks) and "correlation" in {check.name for check in checks}

    def independent(model: nn.Module, plan: StepPlan, noise: NoiseSource) -> Engine:
        return Engine(model, replace(plan, bands=1), noise=noise)

    broken = audit_step(target_of(model, plan, make=independent), batch, quick=True, tries=2)
    assert "correlation" in failed(broken) and "noise/plain" in failed(broken)
