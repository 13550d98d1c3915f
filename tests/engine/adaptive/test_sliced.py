"""Rules that read noised releases of a plan with slices: only what is noised counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from by_hand import cut
from oracle import losses_of, plan_of
from torch import nn

from lamina import Batch, Engine, SeededNoise
from lamina.plan.rules import Choose, FollowEnergy, FollowQuantile
from lamina.plan.step_plan import StepPlan


def sliced(**options: object) -> tuple[nn.Module, StepPlan]:
    """Of the first layer 2 of 16 rows are reached, of the second all."""
    model = nn.Sequential(nn.Linear(40, 16), nn.Tanh(), nn.Linear(16, 20))
    slices = [cut("0.weight", 16, (3, 5), cls="c0"), cut("0.bias", 16, (3, 5), cls="c0")]
    plan = plan_of(model, [[1.0, 1.0]], 0.5, slices=slices)
    return model, replace(plan, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("hardened", [False, True])
def test_noise_alone_has_no_energy(hardened: bool) -> None:
    """Counting the places that no class reaches would put E at -d S², many deviations below 0."""
    model, plan = sliced(rules=(FollowEnergy(decay=0.9),))
    with Engine(model, plan, noise=SeededNoise(3, hardened=hardened)) as engine:
        for _ in range(40):
            engine.backward(None, Batch(torch.zeros(0, 40)))
            model.zero_grad()
        energy = engine.rules.adaptation._energy
        assert energy.declared.sizes == (2 * 41, 20 * 17)
        score = np.asarray(energy.estimate.energy) / np.asarray(energy.estimate.sd)
    assert np.all(np.abs(score) < 5), score


def test_thresholds_follow_what_a_class_may_move() -> None:
    """A quantile of masked norms: the gradient outside the slice is a thousand times as large."""
    model, plan = sliced(rules=(FollowQuantile(noise=1e-3, target=0.5, rate=0.3),))
    with torch.no_grad():
        model[2].weight *= 100.0
        model[2].weight[:, 3:5] *= 1e-4
    x = torch.randn(32, 40)
    with Engine(model, plan, noise=SeededNoise(1)) as engine:
        batch = Batch(x)
        part = engine.eager.examine(losses_of(model, x, None), batch)
        norms = engine.eager.norms(part, engine.rules.clipper)[:, 0]
        engine.backward(losses_of(model, x, None), batch)
        counts = engine.rules.adaptation.counts
    unclipped = int((norms <= 1.0).sum())
    assert counts[0] == pytest.approx(unclipped - 16, abs=0.1)
    assert unclipped > 0


def test_a_choice_with_slices_is_taken() -> None:
    _, plain = sliced()
    model, plan = sliced(rules=(Choose(epsilon=0.5, every=5, names=("a", "b"), noise=(plain.noise, (0.4, 0.9))),))
    x = torch.randn(6, 40)
    with Engine(model, plan, noise=SeededNoise(2)) as engine:
        engine.choose(losses_of(model, x, None), Batch(x))
        engine.backward(losses_of(model, x, None), Batch(x))
        assert engine.rules.adaptation.choice in ("a", "b")
    assert model[0].weight.grad is not None
    assert not model[0].weight.grad[:3].any()
