"""Sums of several parties modulo a power of two: the integers of one process, and exactly the planned Skellam noise."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from plans import hand_plan
from refusals import raises_code
from scipy import stats
from torch import Tensor, nn

from lamina import Batch, Engine, LayerStack, Policy, SeededNoise, StepPlan, make_plan
from lamina.engine.integer_noise import LEAST_BITS
from lamina.engine.noise import NoiseSource
from lamina.engine.secure_sums import SecureSum, skellam_reach

POLICY = """
[corpus]
origin = "tests"
delta = 1e-5
accountant = "rdp-integer"
[class.a]
population = 300
epsilon = 4.0
[class.b]
population = 120
epsilon = 2.0
profile = { top = 0.5 }
[noise]
kind = "skellam"
"""


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def plan_of() -> StepPlan:
    return make_plan(LayerStack.from_model(net()), Policy.parse(POLICY), batch=42, steps=10)


def batch_of(n: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(n, 5, generator=generator), torch.randint(3, (n,), generator=generator)
    return Batch(x, y, cls=torch.arange(n) % 2)


def losses(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch.x), batch.y, reduction="none")


class Silent(SeededNoise):
    """Adds nothing: what is left is the sum itself."""

    def add_integers_(self, *_: Any, **__: Any) -> None: ...


@pytest.mark.parametrize("parties", [1, 2, 3, 5, 16])
def test_messages_of_parties_give_the_plain_sum_of_integers(parties: int) -> None:
    """Also through masks that cancel, which is what a server sees."""
    model, plan = net(), plan_of()
    how = SecureSum.of(plan, parties=parties)
    parts = [batch_of(n, n) for n in range(3, 3 + parties)]
    generator, messages, plain = torch.Generator().manual_seed(1), [], {}
    with Engine(model, plan, noise=SeededNoise(0)) as engine:
        for party, part in enumerate(parts):
            sums = engine.grid_sums(losses(model, part), part, how.grids)
            plain = {name: plain.get(name, 0) + total for name, total in sums.items()}
            messages.append(how.message(sums, Silent(party), party=party, step=0))
        exact = engine.grid_sums(None, Batch(torch.zeros(0, 5), torch.zeros(0, dtype=torch.long)), how.grids)
    assert all(int(total.abs().sum()) == 0 for total in exact.values())
    assert any(bool((total < 0).any()) for total in plain.values())
    found = how.total(messages)
    assert all(torch.equal(found[name], total) for name, total in plain.items())
    masked = []
    mask = {name: torch.randint(1 << 40, total.shape, generator=generator) for name, total in plain.items()}
    for party, message in enumerate(messages):
        sign = 1 if party == 0 else -1 if party == parties - 1 else 0
        masked.append({name: how._reduced(name, t + sign * mask[name]) for name, t in message.items()})
    if parties > 1:
        assert all(torch.equal(how.total(masked)[name], total) for name, total in plain.items())
        assert not torch.equal(masked[0]["0.weight"], messages[0]["0.weight"])


def test_the_released_step_is_that_of_one_process_up_to_the_unit() -> None:
    model, plan = net(), plan_of()
    how, whole = SecureSum.of(plan, parties=2), batch_of(8, 3)
    halves = [replace(whole, x=whole.x[at], y=whole.y[at], cls=whole.cls[at], unit=torch.arange(4), weight=torch.ones(4))  # type: ignore[index]
              for at in (slice(0, 4), slice(4, 8))]  # fmt: skip
    with Engine(model, plan, noise=SeededNoise(0)) as engine:
        messages = [how.message(engine.grid_sums(losses(model, part), part, how.grids), Silent(p), party=p, step=0)
                    for p, part in enumerate(halves)]  # fmt: skip
        expected = engine.clipped_sums(losses(model, whole), whole)
    released = how.released(how.total(messages))
    places = {name: i for i, layer in enumerate(plan.layers) for name in layer.parameters}
    for name, total in expected.items():
        unit = how.grids[places[name]].unit
        assert torch.allclose(released[name] * plan.batch, total.double(), atol=8 * unit + 1e-5)


def big_plan() -> StepPlan:
    return hand_plan([[1.0]], [2.0], noise_kind="skellam", accountant="rdp-integer", steps=10)


@pytest.mark.parametrize("parties", [1, 3, 4, 7])
def test_shares_add_up_to_the_planned_law(parties: int) -> None:
    """All draws of 4^j are there: the sum is Skellam of variance 4^b exactly. Moments and Kolmogorov–Smirnov at 2e5 draws."""
    how = SecureSum.of(big_plan(), parties=parties)
    (grid,) = how.grids
    count = 4 ** math.ceil(math.log(parties, 4) - 1e-9)
    assert sum(how.draws(party) for party in range(parties)) == count and how.draws(parties - 1) >= 1
    assert grid.bits >= LEAST_BITS + round(math.log(count, 4))
    nothing = {"l0.w": torch.zeros(200_000 // parties, dtype=torch.int64)}
    totals = how.total(
        [how.message(nothing, SeededNoise(50 + party), party=party, step=0) for party in range(parties)]
    )["l0.w"].numpy()
    scaled = totals / 2.0**grid.bits
    assert stats.kstest(scaled, "norm").pvalue > 1e-4
    assert np.var(scaled) == pytest.approx(1.0, abs=5 * math.sqrt(2 / scaled.size))
    assert big_plan().noise[0] == pytest.approx(grid.unit * 2.0**grid.bits, rel=1e-6)


def test_the_stated_chance_of_a_wrap_is_above_the_true_one() -> None:
    for bits, risk in ((2, 1e-3), (3, 1e-6), (12, 1e-9)):
        x = skellam_reach(bits, risk)
        v = 4.0**bits / 2
        assert 2 * stats.skellam.sf(x, v, v) <= risk if bits < 12 else 2 * stats.norm.sf(x / 2.0**bits) <= risk
    assert skellam_reach(20, 2.0**-60) < 12 * 2**20


def test_a_modulus_that_is_too_small_is_refused() -> None:
    plan = plan_of()
    bits = max(SecureSum.of(plan, parties=3).modulus_bits)
    assert set(SecureSum.of(plan, parties=3, modulus_bits=bits + 2).modulus_bits) == {bits + 2}
    with raises_code("noise.modulus-too-small"):
        SecureSum.of(plan, parties=3, modulus_bits=bits - 1)
    far = replace(plan, classes=tuple(replace(entry, population=10**15) for entry in plan.classes))
    with raises_code("noise.modulus-too-small"):
        SecureSum.of(far, parties=3)


def test_what_has_no_shares_or_no_bound_is_refused() -> None:
    plan = plan_of()
    with raises_code("noise.shares-need-skellam"):
        SecureSum.of(replace(plan, noise_kind="discrete_gaussian"), parties=2)  # type: ignore[arg-type]
    with raises_code("noise.sum-without-population"):
        SecureSum.of(replace(plan, classes=tuple(replace(e, population=None) for e in plan.classes)), parties=2)
    for parties in (0, 4**13 + 1):
        with raises_code("noise.parties-out-of-range"):
            SecureSum.of(plan, parties=parties)
    with raises_code("noise.party-unknown"):
        SecureSum.of(plan, parties=2).draws(2)
    nothing = {name: torch.zeros(1, dtype=torch.int64) for name in plan.layers[0].parameters}
    three = SecureSum.of(plan, parties=3)
    messages = [three.message(nothing, SeededNoise(party), party=party, step=0) for party in range(3)]
    for some in ([], messages[:2], [*messages, messages[0]]):
        with raises_code("noise.shares-missing"):
            three.total(some)
    for step in (-1, plan.steps):
        with raises_code("noise.step-not-priced"):
            three.message(nothing, SeededNoise(9), party=0, step=step)
    for bits in (0, 63, 40.5):
        with raises_code("noise.modulus-out-of-range"):
            SecureSum.of(plan, parties=2, modulus_bits=bits)  # type: ignore[arg-type]
    with raises_code("noise.wrap-out-of-range"):
        SecureSum.of(plan, parties=2, wrap=0.0)


def test_epsilon_is_the_plans_and_a_stream_is_used_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrapping and adding are post-processing: nothing is charged beside the plan."""
    claimed: list[int] = []
    monkeypatch.setattr(NoiseSource, "_claim", lambda _self, step, _indices: claimed.append(step))
    plan = big_plan()
    how = SecureSum.of(plan, parties=5)
    how.message({"l0.w": torch.zeros(8, dtype=torch.int64)}, SeededNoise(1), party=0, step=4)
    assert claimed == [4] and how.plan.epsilon(0) == plan.epsilon(0)
