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
from lamina.account.filters import RenyiFilter
from lamina.account.schedule import Event
from lamina.engine.budget import Budget
from lamina.engine.noise.grid import LEAST_BITS
from lamina.engine.noise.secure_sums import GridSums, PartyMessage, SecureSum, skellam_reach
from lamina.engine.noise.source import NoiseSource

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
        budget = engine.budget
        exact = engine.grid_sums(None, Batch(torch.zeros(0, 5), torch.zeros(0, dtype=torch.long)), how.grids)
    assert all(int(total.abs().sum()) == 0 for total in exact.values())
    assert any(bool((total < 0).any()) for total in plain.values())
    found = how.total(messages, budget=budget)
    assert all(torch.equal(found[name], total) for name, total in plain.items()) and budget.taken == 1
    masked: list[PartyMessage] = []
    mask = {name: torch.randint(1 << 40, total.shape, generator=generator) for name, total in plain.items()}
    for party, message in enumerate(messages):
        sign = 1 if party == 0 else -1 if party == parties - 1 else 0
        hidden = {name: how._reduced(name, t + sign * mask[name]) for name, t in message.sums.items()}
        masked.append(replace(message, sums=hidden))
    if parties > 1:
        opened = how.total([how.combined(masked)], budget=Budget(plan, {}))
        assert all(torch.equal(opened[name], total) for name, total in plain.items())
        assert not torch.equal(masked[0].sums["0.weight"], messages[0].sums["0.weight"])


def test_the_released_step_is_that_of_one_process_up_to_the_unit() -> None:
    model, plan = net(), plan_of()
    how, whole = SecureSum.of(plan, parties=2), batch_of(8, 3)
    assert whole.cls is not None
    halves = [Batch(whole.x[at], whole.y[at], cls=whole.cls[at]) for at in (slice(0, 4), slice(4, 8))]
    with Engine(model, plan, noise=SeededNoise(0)) as engine:
        messages = [how.message(engine.grid_sums(losses(model, part), part, how.grids), Silent(p), party=p, step=0)
                    for p, part in enumerate(halves)]  # fmt: skip
        expected = engine.clipped_sums(losses(model, whole), whole)
    released = how.released(how.total(messages, budget=engine.budget))
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
    messages = []
    for party in range(parties):
        nothing = GridSums({"l0.w": torch.zeros(200_000 // parties, dtype=torch.int64)}, how.grids, how.plan.digest())
        messages.append(how.message(nothing, SeededNoise(50 + party), party=party, step=0))
    totals = how.total(messages, budget=Budget(how.plan, {}))["l0.w"].numpy()
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


def nothing_on(how: SecureSum) -> GridSums:
    nothing = {name: torch.zeros(1, dtype=torch.int64) for name in how.plan.layers[0].parameters}
    return GridSums(nothing, how.grids, how.plan.digest())


def messages_of(how: SecureSum, step: int = 0) -> list[PartyMessage]:
    return [how.message(nothing_on(how), SeededNoise(9 * step + p), party=p, step=step) for p in range(how.parties)]


def test_each_opened_sum_is_asked_of_the_filter_and_charged_once() -> None:
    plan = plan_of()
    how = SecureSum.of(plan, parties=3)
    one = Event(sigma=plan.sigma("a"), q=plan.classes[0].sampling_rate, steps=2)
    filter_ = RenyiFilter.for_schedule((one,), order=32)
    budget = Budget(plan, {"a": filter_})
    for step in range(2):
        before = int(filter_.to_state()["spent"])
        how.total(messages_of(how, step), budget=budget)
        assert int(filter_.to_state()["spent"]) > before and budget.taken == step + 1
    with raises_code("engine.budget-exhausted"):
        how.total(messages_of(how, 2), budget=budget)
    assert budget.taken == 2
    for other in (budget, Budget(plan, {}, taken=5), Budget(replace(plan, steps=9), {})):  # behind, ahead, another plan
        with raises_code("noise.sum-of-other-budget"):
            how.total(messages_of(how, 1), budget=other)


def test_parties_that_differ_are_refused() -> None:
    """Another grid of one party would scale its part by a power of two, without a trace in the sum."""
    plan = plan_of()
    how = SecureSum.of(plan, parties=2)
    first, second = messages_of(how)
    finer = replace(how, grids=tuple(grid._replace(bits=grid.bits + 1, unit=grid.unit / 2) for grid in how.grids))
    wider = SecureSum.of(plan, parties=2, modulus_bits=max(how.modulus_bits) + 1)
    more = SecureSum.of(replace(plan, steps=9), parties=2)
    for other in (finer, wider, more):
        with raises_code("noise.parties-differ"):
            how.total([first, messages_of(other)[1]], budget=Budget(plan, {}))
    apart = replace(second, sums={"another": torch.zeros(1, dtype=torch.int64)})
    for wrong in (messages_of(how, 1)[1], apart):
        with raises_code("noise.parties-differ"):
            how.total([first, wrong], budget=Budget(plan, {}))
    for sums in (dict(nothing_on(how)), nothing_on(finer)):
        with raises_code("noise.sums-on-other-grids"):
            how.message(sums, SeededNoise(1), party=0, step=0)  # type: ignore[arg-type]


def test_sums_that_another_plan_clipped_are_refused() -> None:
    """The same noise, so the same grids; but clip norms that are three times as large."""
    plan = plan_of()
    how, batch, model = SecureSum.of(plan, parties=1), batch_of(6, 1), net()
    wider = replace(plan, clip=tuple(tuple(3 * c for c in row) for row in plan.clip))
    with Engine(model, wider, noise=SeededNoise(0)) as engine:
        sums = engine.grid_sums(losses(model, batch), batch, how.grids)
    with raises_code("noise.sums-of-other-plan"):
        how.message(sums, SeededNoise(1), party=0, step=0)


def test_a_draw_is_summed_whole_and_once() -> None:
    """Each step is priced as a draw of its own: a draw that is opened at every step would cost more."""
    plan, batch, model = plan_of(), batch_of(6, 1), net()
    grids = SecureSum.of(plan, parties=1).grids
    with Engine(model, plan, noise=SeededNoise(0)) as engine:
        for part in batch_of(6, 2).split(2):
            with raises_code("engine.grid-sum-of-part"):
                engine.grid_sums(losses(model, part), part, grids)
        sums = engine.grid_sums(losses(model, batch), batch, grids)
        with raises_code("engine.batch-used-again"):
            engine.grid_sums(losses(model, batch), batch, grids)
        with raises_code("engine.batch-used-again"):
            engine.backward(losses(model, batch), batch)
    two = SecureSum.of(plan, parties=2)
    sums = GridSums(sums, two.grids, plan.digest())
    two.message(sums, SeededNoise(1), party=0, step=0)
    for party, step in ((0, 1), (1, 0)):  # in a second step, or as another party's
        with raises_code("noise.sums-sent-before"):
            two.message(sums, SeededNoise(2), party=party, step=step)


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
    three = SecureSum.of(plan, parties=3)
    messages = [three.message(nothing_on(three), SeededNoise(party), party=party, step=0) for party in range(3)]
    for some in ([], messages[:2], [*messages, messages[0]]):
        with raises_code("noise.shares-missing"):
            three.total(some, budget=Budget(plan, {}))
    for step in (-1, plan.steps):
        with raises_code("noise.step-not-priced"):
            three.message(nothing_on(three), SeededNoise(9), party=0, step=step)
    for bits in (0, 63, 40.5):
        with raises_code("noise.modulus-out-of-range"):
            SecureSum.of(plan, parties=2, modulus_bits=bits)  # type: ignore[arg-type]
    with raises_code("noise.wrap-out-of-range"):
        SecureSum.of(plan, parties=2, wrap=0.0)


def test_epsilon_is_the_plans_and_a_stream_is_used_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrapping and adding are post-processing: nothing is charged beside the steps of the plan."""
    claimed: list[int] = []
    monkeypatch.setattr(NoiseSource, "_claim", lambda _self, step, _indices: claimed.append(step))
    plan = big_plan()
    how = SecureSum.of(plan, parties=5)
    how.message(
        GridSums({"l0.w": torch.zeros(8, dtype=torch.int64)}, how.grids, how.plan.digest()),
        SeededNoise(1),
        party=0,
        step=4,
    )
    assert claimed == [4] and how.plan.epsilon(0) == plan.epsilon(0)
