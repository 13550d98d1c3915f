"""From a signed bound to a scale: nobody loses more than what was signed, and nobody is scaled for nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import hand_plan
from refusals import raises_code

from lamina.account.accountants import find_accountant
from lamina.account.schedule import Event
from lamina.errors import PlanError
from lamina.plan.rules import Choose, FollowBudget, FollowEnergy, FollowQuantile, Injection
from lamina.plan.signed_bounds import (
    occurrence_count,
    scale_for_signed_bound,
    sigma_acc,
    signed_epsilon,
    variance_ceiling,
    variance_floor,
)
from lamina.plan.step_plan import Clipping, StepPlan

TIGHT = 1e-3


def plan(q: float = 0.05, steps: int = 200, sigma: float = 1.5, **changes: Any) -> StepPlan:
    """Two layers with C = (3, 4), one S, so that ‖C‖ = 5; a class beside that reaches one layer; a public one."""
    given: dict[str, Any] = {"batch": 50.0, "steps": steps, "accountant": "rdp", **changes}
    clip = ((3.0, 4.0), (0.0, 4.0), (math.inf, math.inf))
    return hand_plan(clip, (5.0 * sigma,) * 2, names=("clinical", "top", "open"), public=(2,), rate=q, **given)


def oracle(made: StepPlan, scale: float) -> float:
    """ε of the scaled contribution, by dp-accounting itself."""
    event = dp_event.SelfComposedDpEvent(
        dp_event.PoissonSampledDpEvent(
            made.classes[0].sampling_rate, dp_event.GaussianDpEvent(made.noise[0] / (5.0 * scale))
        ),
        made.steps,
    )
    priced = RdpAccountant() if made.accountant == "rdp" else PLDAccountant(value_discretization_interval=5e-5)
    return float(priced.compose(event).get_epsilon(1e-5))


# ---------------------------------------------------------------------------------------- never more, and tight

RATES = st.floats(math.log(1e-4), 0.0).map(math.exp)
STEPS = st.integers(1, 20_000)
MULTIPLIERS = st.floats(math.log(0.2), math.log(60.0)).map(math.exp)


BOUNDS = {
    "name": st.sampled_from(["rdp", "moments", "zcdp", "gaussian"]),
    "q": RATES,
    "steps": STEPS,
    "z": MULTIPLIERS,
    "c": st.floats(0.05, 20.0),
    "sigma": st.floats(0.4, 40.0),
    "joint": st.booleans(),
}


@settings(max_examples=60)
@given(**BOUNDS)
def test_the_realised_epsilon_never_exceeds_the_signed_one_and_the_scale_is_tight(**bound: Any) -> None:
    is_kept(**bound)


@pytest.mark.slow
@settings(max_examples=1000)
@given(**BOUNDS)
def test_the_same_for_many_more(**bound: Any) -> None:
    is_kept(**bound)


@pytest.mark.slow
@settings(max_examples=40)
@given(**{**BOUNDS, "name": st.just("pld"), "steps": st.integers(1, 3000), "q": st.floats(0.001, 0.5)})
def test_the_same_by_pld(**bound: Any) -> None:
    is_kept(**bound)


def is_kept(name: str, q: float, steps: int, z: float, c: float, sigma: float, joint: bool) -> None:
    made = plan(q, steps, sigma, accountant=name, clipping=Clipping.JOINT if joint else Clipping.BOX)
    signed = signed_epsilon(made, "clinical", z)
    try:
        scale = scale_for_signed_bound(made, "clinical", c, z)
    except PlanError:  # an accountant of few orders cannot say so small an ε, however much noise there is
        least = find_accountant(name).epsilon([Event(sigma=1e6, q=q, steps=steps)], 1e-5)
        assert name in ("rdp", "moments") and least > signed
        return
    assert 0 < scale <= 1
    assert scale * made.norm("clinical") <= c * (1 + 1e-15)
    realised = made.epsilon("clinical", scale=scale)
    assert realised <= signed
    assert realised == find_accountant(name).epsilon([Event(sigma=made.sigma(0, scale), q=q, steps=steps)], 1e-5)
    if scale < min(1.0, c / made.norm("clinical")):
        assert made.epsilon("clinical", scale=scale * (1 + TIGHT)) > signed


@pytest.mark.parametrize(
    ("q", "steps", "z", "sigma"),
    [(0.0128, 7812, 5.0, 4.3), (0.2, 60, 1.5, 1.2), (0.001, 5000, 30.0, 0.7), (1.0, 1, 3.0, 2.0)],
)
def test_by_pld_too(q: float, steps: int, z: float, sigma: float) -> None:
    made = plan(q, steps, sigma, accountant="pld")
    signed, scale = signed_epsilon(made, 0, z), scale_for_signed_bound(made, 0, 1e3, z)
    assert scale < 1
    assert made.epsilon(0, scale=scale) <= signed
    assert made.epsilon(0, scale=scale * (1 + TIGHT)) > signed
    assert oracle(made, scale) == pytest.approx(signed, rel=4e-3)  # by a pessimistic grid of its own
    assert oracle(made, scale * 1.01) > signed


@pytest.mark.parametrize("z", [0.8, 2.0, 9.0])
def test_against_dp_accounting(z: float) -> None:
    made = plan(sigma=0.9)
    scale = scale_for_signed_bound(made, "clinical", 1e3, z)
    signed = signed_epsilon(made, "clinical", z)
    assert scale < 1
    assert oracle(made, scale) == pytest.approx(signed, rel=1e-3)  # its Rényi orders are others


@settings(max_examples=30)
@given(z=MULTIPLIERS, steps=st.integers(1, 5000), sigma=st.floats(0.5, 50.0), c=st.floats(0.1, 20.0))
def test_without_sampling_the_scale_is_known_in_closed_form(z: float, steps: int, sigma: float, c: float) -> None:
    """T steps at sigma' are one release with multiplier sigma'/√T, so sigma_acc = z·√T."""
    made = plan(0.3, steps, sigma, accountant="gaussian")
    assert sigma_acc(made, 0, z) == pytest.approx(z * math.sqrt(steps), rel=2e-4)
    assert scale_for_signed_bound(made, 0, c, z) == pytest.approx(
        min(1.0, c / 5.0, sigma / (z * math.sqrt(steps))), rel=TIGHT
    )


def test_dividing_by_z_instead_would_not_do() -> None:
    """The shortcut takes a figure of the whole horizon for one of a step: it loses several times what was signed."""
    made = plan(0.0128, 7812, 4.3, accountant="pld")
    z = 1.071  # ε 4 at δ = 1e-5
    assert signed_epsilon(made, 0, z) == pytest.approx(4.0, rel=0.02)
    tempting = plan(0.0128, 7812, z, accountant="pld")
    assert tempting.epsilon(0) == pytest.approx(6.2, rel=0.03)


# ---------------------------------------------------------------------------------------- what else is in a plan


def test_a_contribution_as_strict_as_its_class_is_not_scaled() -> None:
    made = plan()
    z = next(z / 100 for z in range(1, 10_000) if signed_epsilon(made, 0, z / 100) < made.epsilon(0))
    assert scale_for_signed_bound(made, 0, 5.0, z - 0.01) == 1.0
    assert scale_for_signed_bound(made, 0, 4.0, z - 0.01) == 4.0 / 5.0
    assert scale_for_signed_bound(made, 0, 5.0, z) < 1.0


def test_classes_have_their_own_norm_and_public_ones_owe_nothing() -> None:
    made = plan()
    assert scale_for_signed_bound(made, "top", 2.0, 1e-3) == 0.5
    assert scale_for_signed_bound(made, "open", 0.1, 100.0) == 1.0
    assert sigma_acc(made, "open", 100.0) == 0.0


def test_a_scale_can_only_be_found_for_what_the_contribution_moves() -> None:
    """Noised counts move by ½ for everybody: where they alone are too much, no threshold is small enough."""
    counted = plan(1.0, 1, 2.0, accountant="gaussian", rules=(FollowQuantile(noise=2.0),))
    beside = counted.bits(0)
    assert beside == pytest.approx(math.sqrt(2) / 4)
    scale = scale_for_signed_bound(counted, 0, 1e3, 2.5)
    # z^-2 = (scale·‖C/S‖)² + bits²
    assert scale == pytest.approx(math.sqrt(2.5**-2 - beside**2) * 2.0, rel=TIGHT)
    assert counted.epsilon(0, scale=scale) <= signed_epsilon(counted, 0, 2.5)
    with raises_code("plan.noised-counts-too-expensive"):
        scale_for_signed_bound(counted, 0, 1e3, 3.0)


def test_choices_take_their_part() -> None:
    rule = Choose(epsilon=0.5, every=50, names=("x", "y"), noise=((1.0, 1.0), (1.0, 2.0)))
    alone, beside = plan(), plan(rules=(rule,))
    z = 3.0
    assert sigma_acc(beside, 0, z) > sigma_acc(alone, 0, z)
    assert beside.epsilon(0, scale=scale_for_signed_bound(beside, 0, 9.0, z)) <= signed_epsilon(beside, 0, z)
    dear = plan(steps=200, rules=(Choose(epsilon=2.0, every=1, names=("x",), noise=((1.0, 1.0),)),))
    with raises_code("plan.signed-bound-unreachable"):
        scale_for_signed_bound(dear, 0, 9.0, 9.0)


def test_where_sigma_follows_the_budget_a_smaller_threshold_has_no_price_of_its_own() -> None:
    """The filter proves a price for the class; how much less a scaled contribution loses depends on the factors."""
    made = plan(accountant="rdp@16", rules=(FollowBudget(order=16.0), FollowEnergy()))
    assert not made.scales and plan().scales
    assert made.epsilon(0, scale=0.1) == made.epsilon(0)
    loose = next(z / 100 for z in range(200, 1, -1) if signed_epsilon(made, 0, z / 100) > made.epsilon(0))
    assert scale_for_signed_bound(made, 0, 2.5, loose) == 0.5
    with raises_code("plan.signed-bound-unreachable"):
        scale_for_signed_bound(made, 0, 2.5, 2.0 * loose + 2)


@settings(max_examples=30)
@given(occurring=st.integers(1, 400), z=MULTIPLIERS)
def test_raw_noise_is_held_to_its_occurrences(occurring: int, z: float) -> None:
    made = plan(
        0.05, 200, 1.5, accountant="gaussian", injection=Injection(form="per_sample_raw", occurrences=occurring)
    )
    count = min(200, occurring)
    assert scale_for_signed_bound(made, 0, 1e3, z) == pytest.approx(min(1.0, 1.5 / (z * math.sqrt(count))), rel=TIGHT)


# ---------------------------------------------------------------------------------------- variances


def test_floor_and_ceiling() -> None:
    made, c, z = plan(0.0128, 7812, 4.3, accountant="pld"), 2.0, 3.73
    assert variance_floor(made, 0, c, z) == (sigma_acc(made, 0, z) * c) ** 2
    assert math.sqrt(variance_floor(made, 0, c, z)) == pytest.approx(2 * 4.298, rel=1e-3)
    expected, capped = occurrence_count(made, 0), occurrence_count(made, 0, 100)
    assert (expected.count, expected.capped) == (0.0128 * 7812, False)
    assert (capped.count, capped.capped) == (100.0, True)
    assert occurrence_count(made, 0, 10_000).count == 7812.0
    assert variance_ceiling(made, 0, c, z, 100) == pytest.approx(100 * z**2 * c**2)
    assert math.sqrt(variance_ceiling(made, 0, c, z, 100)) == pytest.approx(2 * 37.3, rel=1e-3)
    raw = plan(injection=Injection(form="per_sample_raw"))
    assert (occurrence_count(raw, 0).count, occurrence_count(raw, 0).capped) == (200.0, True)


def test_a_capped_ceiling_is_enough_even_if_everything_is_known() -> None:
    """N occurrences at variance V_ceil = N·z²·c² are together one release with multiplier z."""
    z, c, cap = 1.7, 2.0, 31
    per_step = math.sqrt(variance_ceiling(plan(), 0, c, z, cap)) / c
    together = find_accountant("gaussian").epsilon([Event(sigma=per_step, q=1.0, steps=cap)], 1e-5)
    assert together == pytest.approx(signed_epsilon(plan(), 0, z), rel=1e-9)


@settings(max_examples=20)
@given(z=MULTIPLIERS, cap=st.integers(1, 200), q=RATES)
def test_the_floor_never_lies_above_a_capped_ceiling_without_sampling(z: float, cap: int, q: float) -> None:
    made = plan(q, cap, accountant="gaussian")
    assert variance_floor(made, 0, 1.0, z) <= variance_ceiling(made, 0, 1.0, z, cap) * (1 + 1e-3)


# ---------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf, True, "1"])
def test_bounds_that_mean_nothing(wrong: Any) -> None:
    with raises_code("plan.signed-bound-not-positive"):
        scale_for_signed_bound(plan(), 0, wrong, 1.0)
    with raises_code("plan.signed-bound-not-positive"):
        scale_for_signed_bound(plan(), 0, 1.0, wrong)


def test_a_bound_that_stands_for_nothing_at_all() -> None:
    with raises_code("plan.signed-bound-allows-nothing"):
        scale_for_signed_bound(plan(accountant="gaussian"), 0, 1.0, 1e6)
    with raises_code("plan.signed-bound-unreachable"):
        scale_for_signed_bound(plan(accountant="moments"), 0, 1.0, 1e3)


@pytest.mark.parametrize(
    ("z", "epsilon", "needed", "scale"),
    [
        (3.73, 1.0002, 4.297, 1.0),
        (5.0, 0.7255, 5.719, 0.752),
        (20.0, 0.1600, 22.66, 0.190),
        (100.0, 0.02722, 113.2, 0.0380),
    ],
)
def test_the_figures_of_the_page(z: float, epsilon: float, needed: float, scale: float) -> None:
    """docs/accounting.md, "A stricter contribution"."""
    made = plan(0.0128, 7812, 4.3, accountant="pld")
    assert signed_epsilon(made, 0, z) == pytest.approx(epsilon, rel=2e-3)
    assert sigma_acc(made, 0, z) == pytest.approx(needed, rel=1e-3)
    assert scale_for_signed_bound(made, 0, 5.0, z) == pytest.approx(scale, rel=3e-3)
