"""The exponential mechanism: bounded range, exactly; utilities against their formulas; offers within the budget."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from plans import policy_of
from refusals import raises_code
from torch import nn

from lamina.account.gaussian_rdp import choice_noise_multiplier, hockey_stick
from lamina.allocate.ladp import (
    LADP,
    Candidate,
    draw,
    kept_fraction,
    plan_candidates,
    probabilities,
    relative_noise,
    utilities,
)
from lamina.allocate.make_plan import make_plan
from lamina.errors import PlanError
from lamina.plan.layer_stack import LayerStack
from lamina.plan.step_plan import Clipping, StepPlan

Array = NDArray[np.float64]
FORMS = [Clipping.BOX, Clipping.JOINT]
STACK = LayerStack.from_model(nn.Sequential(*(nn.Linear(3 + i, 4 + i) for i in range(6))))
SIZES = tuple(layer.size for layer in STACK)


def plan(form: Clipping, price: float = 5.0) -> StepPlan:
    policy = policy_of(
        top={"population": 100, "epsilon": 2.0, "profile": {"top": 0.5}},
        all={"population": 100, "epsilon": 8.0, "clip_norm": 3.0},
        open={"population": 100, "public": True},
    )
    chooser = LADP(choose_every=5, clipping=form, price=price)
    return make_plan(STACK, policy, batch=30, steps=20, allocate=chooser)


PLANS = {form: plan(form) for form in FORMS}


def random_norms(seed: int, n: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    norms = rng.lognormal(0, 2, (n, 6)) * (rng.random((n, 6)) < 0.9)
    bad = rng.random((n, 6))
    norms[bad < 0.02] = np.nan
    norms[bad > 0.98] = np.inf
    return norms, rng.integers(3, size=n)


@pytest.mark.parametrize("form", FORMS)
def test_every_offer_costs_what_the_plan_is_priced_with(form: Clipping) -> None:
    """Each candidate has the plan's sigma or more in every class, and one class has exactly that."""
    held = PLANS[form]
    for offer in plan_candidates(held):
        taken = replace(held, clip=offer.clip, noise=offer.noise)
        ratios = [taken.sigma(k) / held.sigma(k) for k in (0, 1)]
        assert min(ratios) >= 1
        assert min(ratios) == pytest.approx(1, rel=1e-12)
        assert taken.epsilon("top") <= held.epsilon("top")
        assert taken.clip[2] == held.clip[2]
        for k in (0, 1):
            assert math.hypot(*offer.clip[k]) == pytest.approx(math.hypot(*held.clip[k]))
            assert [c > 0 for c in offer.clip[k]] == [c > 0 for c in held.clip[k]]
    if form is Clipping.BOX:
        assert len({offer.clip for offer in plan_candidates(held)}) > 1  # otherwise there is nothing to choose


@pytest.mark.parametrize("form", FORMS)
def test_kept_is_the_formula(form: Clipping) -> None:
    held = PLANS[form]
    norms, cls = random_norms(3, 60)
    for offer in plan_candidates(held):
        found = kept_fraction(offer, norms, cls, form)
        for i, (row, k) in enumerate(zip(norms.tolist(), cls.tolist(), strict=True)):
            reached = [j for j in range(6) if offer.clip[k][j] > 0]
            if k == 2 or not all(math.isfinite(row[j]) for j in reached):
                expected = 0.0
            elif form is Clipping.JOINT:
                length = math.hypot(*(row[j] / offer.noise[j] for j in reached))
                ball = math.hypot(*(offer.clip[k][j] / offer.noise[j] for j in reached))
                expected = min(1.0, ball / length) if length else 1.0
            else:
                parts = [min(1.0, offer.clip[k][j] / row[j]) if row[j] else 1.0 for j in reached]
                expected = sum(parts) / len(parts)
            assert found[i] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("form", FORMS)
@given(seed=st.integers(0, 2**32), n=st.integers(0, 12))
@settings(max_examples=60)
def test_a_contribution_moves_all_utilities_by_at_most_one_and_one_way(form: Clipping, seed: int, n: int) -> None:
    held = PLANS[form]
    found = plan_candidates(held)
    norms, cls = random_norms(seed, n + 1)

    def u(rows: Array, classes: Array) -> Array:
        return utilities(found, rows, classes, form=form, sizes=SIZES, price=5.0)

    moved = u(norms, cls) - u(norms[:-1], cls[:-1])
    assert moved.min() >= -1e-12
    assert moved.max() <= 1 + 1e-12
    reached = np.array(held.clip[int(cls[-1])]) > 0
    if cls[-1] == 2 or not np.isfinite(norms[-1][reached]).all():
        assert np.abs(moved).max() <= 1e-12


@pytest.mark.parametrize("form", FORMS)
def test_huge_and_tiny_norms_stay_within_bounds(form: Clipping) -> None:
    found = plan_candidates(PLANS[form])
    extreme = np.array([[1e300] * 6, [1e-300] * 6, [0.0] * 6, [1e300, 1e-300] * 3, [5e-324] * 6, [1e308] * 6])
    for offer in found:
        part = kept_fraction(offer, extreme, np.ones(6, dtype=int), form)
        assert ((part >= 0) & (part <= 1)).all()
        assert part[1] == part[2] == part[4] == 1.0
        assert part[0] < 1e-290


def test_noise_is_relative_to_the_least_and_has_its_price() -> None:
    found = plan_candidates(PLANS[Clipping.JOINT])
    power = np.array([(np.array(SIZES) * np.square(offer.noise)).sum() for offer in found])
    np.testing.assert_allclose(relative_noise(found, SIZES), power / power.min())
    nobody = np.zeros((0, 6))
    u = utilities(found, nobody, [], form=Clipping.JOINT, sizes=SIZES, price=2.0)
    np.testing.assert_allclose(u, -2.0 * power / power.min())


# --------------------------------------------------------------------------------------------------------- the draw


def test_the_draw_has_exactly_bounded_range() -> None:
    """Over every small data set and every contribution added: log-ratios lie in an interval of length ε."""
    held = PLANS[Clipping.JOINT]
    noise = plan_candidates(held)[0].noise
    extremes = [Candidate(name=str(c), clip=((c,) * 6, (c,) * 6, (math.inf,) * 6), noise=noise) for c in (1e-3, 1e6)]
    found = [*plan_candidates(held), *extremes]
    pool = np.array([[0.1] * 6, [5.0] * 6, [50.0, 0.1] * 3, [0.1, 50.0] * 3, [np.nan] * 6])

    def u(rows: Array, classes: list[int]) -> Array:
        return utilities(found, rows, classes, form=held.clipping, sizes=SIZES, price=3.0)

    widest = 0.0
    for chosen in itertools.chain.from_iterable(itertools.combinations(range(5), n) for n in range(3)):
        rows, classes = pool[list(chosen)], [i % 2 for i in chosen]
        without = u(rows, classes)
        for extra, k in itertools.product(range(5), range(3)):
            with_one = u(np.vstack([rows, pool[extra : extra + 1]]), [*classes, k])
            for epsilon in (0.1, 1.0, 4.0):
                ratio = np.log(probabilities(with_one, epsilon) / probabilities(without, epsilon))
                assert ratio.max() - ratio.min() <= epsilon * (1 + 1e-9)
                assert np.abs(ratio).max() <= epsilon * (1 + 1e-9)
                widest = max(widest, float(ratio.max() - ratio.min()) / epsilon)
    assert widest > 0.999  # one candidate keeps all of a contribution, another nothing


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 2.0])
def test_the_gaussian_that_a_plan_pays_dominates_the_worst_choice(epsilon: float) -> None:
    """Two candidates, utilities that move by (1, 0): δ(ε') of the draw is never above that of the Gaussian."""
    mu = 1.0 / choice_noise_multiplier(epsilon)
    grid = np.linspace(0.0, epsilon, 200)
    for start in np.linspace(-30, 30, 121):
        p = probabilities(np.array([start / epsilon, 0.0]), epsilon)
        q = probabilities(np.array([start / epsilon + 1.0, 0.0]), epsilon)
        for a, b in ((p, q), (q, p)):
            exact = np.maximum(a[:, None] - np.exp(grid) * b[:, None], 0.0).sum(0)
            assert (exact <= hockey_stick(grid, mu) + 1e-15).all()


def test_draws_follow_their_probabilities() -> None:
    u, epsilon = np.array([1.0, 0.0, 2.5, -400.0]), 1.3
    p = probabilities(u, epsilon)
    np.testing.assert_allclose(p[:3] / p[0], np.exp(epsilon * (u[:3] - 1.0)))
    grid = (np.arange(20_000) + 0.5) / 20_000
    counts = np.bincount([draw(u, epsilon, float(x)) for x in grid], minlength=4) / len(grid)
    np.testing.assert_allclose(counts, p, atol=1e-4)
    assert draw(u, epsilon, 0.0) == 0
    assert draw(u, epsilon, 1 - 2**-53) in (2, 3)
    assert draw(np.zeros(1), 1.0, 0.999) == 0


@pytest.mark.parametrize("uniform", [-0.1, 1.0, math.nan])
def test_what_is_no_uniform_number_is_refused(uniform: float) -> None:
    with raises_code("allocate.uniform-range"):
        draw(np.zeros(2), 1.0, uniform)


def test_misuse_is_refused() -> None:
    offer = Candidate(name="x", clip=((1.0, 1.0),), noise=(1.0, 1.0))
    with raises_code("allocate.norms-shape"):
        kept_fraction(offer, np.ones((3, 3)), [0, 0, 0], Clipping.BOX)
    with raises_code("allocate.norms-shape"):
        kept_fraction(offer, np.ones((3, 2)), [0, 0], Clipping.BOX)
    with raises_code("allocate.unknown-class"):
        kept_fraction(offer, np.ones((1, 2)), [1], Clipping.BOX)
    with raises_code("allocate.utility-not-finite"):
        probabilities(np.array([math.nan, 0.0]), 1.0)
    bare = make_plan(STACK, policy_of(a={"population": 100}), batch=10, steps=5, rho=1.0)
    with raises_code("allocate.no-choice"):
        plan_candidates(bare)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_no_utility_is_told_in_a_refusal(odd: float) -> None:
    with pytest.raises(PlanError) as refused:
        probabilities(np.array([17.25, odd]), 0.5)
    assert "17" not in str(refused.value)
    assert refused.value.remedy
