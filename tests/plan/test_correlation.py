"""Noise that is correlated over steps: the strategy's sensitivity, its price against brute force, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from plans import hand_plan
from refusals import raises_code

from lamina import LayerStack, Policy, StepPlan, make_plan
from lamina.account import Event, calibrate, find_accountant
from lamina.plan.correlation import (
    aligned_length,
    band_coefficients,
    best_bands,
    coefficients_digest,
    participations,
    prefix_error,
    prefix_error_ratio,
)
from lamina.plan.rules import FollowEnergy, Injection, NoiseKind
from lamina.plan.signed_bounds import occurrence_count, scale_for_signed_bound, signed_epsilon

POLICY = """
[corpus]
origin = "tests"
delta = 1e-5
[class.a]
population = 10000
epsilon = 1.0
[noise]
correlation = "banded"
bands = 8
"""


def strategy(steps: int, bands: int) -> np.ndarray:
    """C as a dense matrix."""
    found = np.zeros((steps, steps))
    for t in range(steps):
        for j, c in enumerate(band_coefficients(bands)[: steps - t]):
            found[t + j, t] = c
    return found


def plan_of(bands: int = 4, **changes: Any) -> StepPlan:
    return hand_plan([[1.0, 0.5], [0.0, 0.7]], [2.0, 1.5], bands=bands, **changes)


# --------------------------------------------------------------------------------------------- sensitivity


@pytest.mark.parametrize("bands", [1, 2, 3, 5, 64, 1024])
def test_columns_have_norm_one_and_never_more(bands: int) -> None:
    norm = math.fsum(c * c for c in band_coefficients(bands))
    assert 1 - 1e-12 < norm <= 1
    assert len(coefficients_digest(bands)) == 32


@pytest.mark.parametrize(("steps", "bands"), [(5, 2), (7, 3), (8, 4), (6, 6), (9, 2)])
def test_no_pattern_of_taking_turns_moves_more_than_the_counted_events(steps: int, bands: int) -> None:
    """By enumeration of every pattern that taking turns allows; the worst is every turn of the first."""
    matrix, worst = strategy(steps, bands), 0.0
    for turn in range(bands):
        turns = range(turn, steps, bands)
        for count in range(len(turns) + 1):
            for taken in itertools.combinations(turns, count):
                for signs in itertools.product((1.0, -1.0), repeat=count):
                    moved = sum((s * matrix[:, t] for s, t in zip(signs, taken, strict=True)), np.zeros(steps))
                    worst = max(worst, float(moved @ moved))
    assert worst <= participations(steps, bands)
    if steps % bands == 0:
        assert worst == pytest.approx(participations(steps, bands))


def test_steps_on_end_would_move_more() -> None:
    """Why contributions take turns: a contribution in every step moves the rows of several columns at once."""
    everybody = strategy(4, 2).sum(1)
    assert float(everybody @ everybody) > 4 * 1.3


# --------------------------------------------------------------------------------------------- price


def brute_force_delta(steps: int, bands: int, q: float, sigma: float, epsilon: float, turns: list[int]) -> float:
    """δ(ε) of adding one contribution, in one dimension, by integration over R^steps: larger of both directions."""
    grid = np.linspace(-7.0, 8.0, 141)
    axes = np.meshgrid(*[grid] * steps, indexing="ij")
    matrix = strategy(steps, bands) / sigma
    without = np.exp(-0.5 * sum(a * a for a in axes))
    present = np.zeros_like(without)
    for taken in itertools.product((0, 1), repeat=len(turns)):
        mean = sum((matrix[:, t] * bit for t, bit in zip(turns, taken, strict=True)), np.zeros(steps))
        weight = math.prod(q if bit else 1 - q for bit in taken)
        present += weight * np.exp(-0.5 * sum((a - m) ** 2 for a, m in zip(axes, mean, strict=True)))
    cell = ((grid[1] - grid[0]) / math.sqrt(2 * math.pi)) ** steps
    pairs = ((present, without), (without, present))
    return max(float(np.maximum(p - math.exp(epsilon) * r, 0).sum()) * cell for p, r in pairs)


@pytest.mark.parametrize(("steps", "bands"), [(3, 2), (2, 2), (3, 3)])
@pytest.mark.parametrize(("q", "sigma"), [(0.4, 1.0), (1.0, 1.5)])
def test_the_price_is_never_below_the_divergence_itself(steps: int, bands: int, q: float, sigma: float) -> None:
    """Every turn, both directions. The first has the whole of its columns, and reaches the price."""
    event, found = Event(sigma=sigma, q=q, steps=participations(steps, bands)), []
    for epsilon in (0.1, 0.5, 1.0):
        claimed = find_accountant("pld").delta((event,), epsilon)
        for turn in range(bands):
            true = brute_force_delta(steps, bands, q, sigma, epsilon, list(range(turn, steps, bands)))
            assert true <= claimed * (1 + 1e-3)
            found.append(true / claimed)
    assert max(found) > (0.98 if steps % bands == 0 else 0.5)


def test_without_turns_the_price_would_be_too_low() -> None:
    """Ordinary Poisson sampling of all steps under correlated noise costs more than events of its rate."""
    claimed = find_accountant("pld").delta((Event(sigma=1.0, q=0.4, steps=3),), 1.0)
    assert brute_force_delta(3, 3, 0.4, 1.0, 1.0, [0, 1, 2]) > 1.2 * claimed


def test_a_schedule_is_that_of_subsampled_steps_by_turn() -> None:
    """As dp-accounting prices ⌈T/b⌉ Poisson-sampled Gaussian events at rate b·q."""
    plan = plan_of(bands=4, steps=50)
    (event,) = plan.schedule(0)
    assert event == Event(sigma=plan.sigma(0), q=0.4, steps=13)
    other = PLDAccountant()
    other.compose(SelfComposedDpEvent(PoissonSampledDpEvent(0.4, GaussianDpEvent(event.sigma)), 13))
    assert plan.epsilon(0) == pytest.approx(other.get_epsilon(1e-5), rel=2e-3)
    exact = find_accountant("gaussian").epsilon((event,), 1e-5)
    assert plan.rho(0) == pytest.approx(13 / (2 * event.sigma**2)) and exact > plan.epsilon(0)


def test_stretches_of_whole_turns_add_up_to_the_plan() -> None:
    plan = plan_of(bands=4, steps=50)
    cuts = [0, aligned_length(9, 4), aligned_length(30, 4), 50]
    parts = [plan.schedule_between(1, a, b)[0].steps for a, b in itertools.pairwise(cuts)]
    assert cuts == [0, 12, 32, 50] and sum(parts) == plan.schedule(1)[0].steps
    assert plan.schedule_between(1, 3, 5)[0].steps == 1  # never less than one contribution may have taken part


def test_noise_is_calibrated_to_the_turns() -> None:
    stack = LayerStack.from_model(_net())
    plan = make_plan(stack, Policy.parse(POLICY), batch=100, steps=400)
    assert plan.bands == 8 and plan.epsilon("a") == pytest.approx(1.0, rel=1e-3) and plan.epsilon("a") <= 1.0
    assert plan.sigma("a") >= calibrate(1.0, delta=1e-5, q=0.08, steps=50) * (1 - 1e-9)
    assert StepPlan.from_cbor(plan.to_cbor()) == plan == StepPlan.from_json(plan.to_json())
    assert "bands" not in make_plan(stack, Policy.parse(POLICY.split("[noise]")[0]), batch=100, steps=400).to_json()
    summary = plan.to_dict()["correlation"]
    assert summary["coefficients_sha256"] == coefficients_digest(8).hex()
    assert summary["prefix_error_ratio"] == prefix_error_ratio(plan) and "correlated over 8 steps" in str(plan)


def _net() -> Any:
    from torch import nn

    return nn.Linear(3, 2)


def test_signed_bounds_count_the_turns() -> None:
    plan = plan_of(bands=4, steps=50)
    assert occurrence_count(plan, 0).count == 13 and occurrence_count(plan, 0).capped
    scale = scale_for_signed_bound(plan, 0, c=9.0, z=2.0)
    assert scale < 1 and plan.epsilon(0, scale=scale) <= signed_epsilon(plan, 0, 2.0)


# --------------------------------------------------------------------------------------------- gain


@pytest.mark.parametrize(("bands", "steps"), [(1, 7), (3, 7), (4, 12)])
def test_the_error_of_prefix_sums_is_that_of_the_matrices(bands: int, steps: int) -> None:
    summed = np.tril(np.ones((steps, steps))) @ np.linalg.inv(strategy(steps, bands))
    assert prefix_error(bands, steps) == pytest.approx(float((summed**2).sum() / steps))


def test_it_helps_where_everybody_takes_part_often_enough_and_says_where_not() -> None:
    sure = hand_plan([[1.0]], [2.0], rate=0.05, steps=2000, bands=16, accountant="gaussian")
    assert (
        prefix_error_ratio(sure) < 0.01
    )  # nothing is lost by taking turns: 16 times fewer events, less noise in the sum
    short = hand_plan([[1.0]], [20.0], rate=0.001, steps=20, bands=2)
    assert prefix_error_ratio(short) > 1 and "a loss" in str(short)


# --------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "changes",
    [
        {"rules": (FollowEnergy(),)},
        {"injection": Injection(form="per_microbatch", parts=4)},  # type: ignore[arg-type]
        {"noise_kind": "skellam", "accountant": "rdp-integer"},
        {"noise_kind": "laplace"},
    ],
)
def test_what_is_not_proven_is_refused(changes: dict[str, Any]) -> None:
    with raises_code("plan.correlated-not-proven"):
        plan_of(**changes)


def test_bands_out_of_range_are_refused() -> None:
    for bands in (0, 1025):
        with raises_code("plan.bands-out-of-range"):
            plan_of(bands=bands)
    with raises_code("plan.bands-above-rate"):
        plan_of(bands=11)
    assert plan_of(bands=10).schedule(0)[0].q == 1.0
    with raises_code("plan.bands-above-rate"):
        make_plan(LayerStack.from_model(_net()), Policy.parse(POLICY), batch=2000, steps=4)
    for line in ('correlation = "banded"\n', "bands = 8\n"):
        with raises_code("plan.policy-invalid"):
            Policy.parse(POLICY.replace(line, ""))
    with raises_code("plan.correlated-not-proven"):
        discrete = POLICY.replace("bands = 8", 'bands = 8\nkind = "discrete_gaussian"')
        discrete = discrete.replace("delta = 1e-5", 'delta = 1e-5\naccountant = "rdp-integer"')
        make_plan(LayerStack.from_model(_net()), Policy.parse(discrete), batch=100, steps=10)


def test_a_replace_one_figure_is_refused() -> None:
    with raises_code("plan.replace-one-not-proven"):
        plan_of(bands=4).epsilon(0, "replace_one")
    assert plan_of(bands=1).epsilon(0, "replace_one") > plan_of(bands=1).epsilon(0)
    with raises_code("plan.replace-one-not-proven"):
        dataclasses.replace(plan_of(bands=1), noise_kind=NoiseKind.LAPLACE).epsilon(0, "replace_one")


# ---------------------------------------------------------------------------------------------- the best number


def planned(
    *, epsilon: float = 8.0, accountant: str = "rdp", steps: int = 200, rate: float = 0.01, **options: Any
) -> StepPlan:
    corpus = {"origin": "tests", "delta": 1e-5, "accountant": accountant}
    terms = {"population": 1000, "epsilon": epsilon}
    policy = Policy.from_dict({"corpus": corpus, "class": {"a": terms}, **options.pop("tables", {})})
    stack = LayerStack.from_model(torch.nn.Linear(4, 3))
    return make_plan(
        stack, policy, batch=round(rate * 1000), steps=steps, allocate=options.pop("allocate", "flat"), **options
    )


def error_by_hand(plan: StepPlan, bands: int) -> float:
    """The plan's C⁻¹ as a dense matrix, and the noise that the calibrated multiplier has."""
    steps, rate = plan.steps, plan.classes[0].sampling_rate
    turns = -(-steps // bands)
    sigma = calibrate(plan.epsilon(0), delta=1e-5, q=bands * rate, steps=turns, accountant=plan.accountant)
    summed = np.tril(np.ones((steps, steps))) @ np.linalg.inv(strategy(steps, bands))
    return sigma**2 * float((summed**2).sum())


@pytest.mark.parametrize(("epsilon", "accountant"), [(8.0, "rdp"), (1.0, "gaussian"), (0.5, "rdp")])
def test_the_best_number_of_bands_is_that_of_dense_matrices(epsilon: float, accountant: str) -> None:
    plan = planned(epsilon=epsilon, accountant=accountant)
    errors = {b: error_by_hand(plan, b) for b in (1, 2, 4, 8, 16, 32, 64)}
    wanted = 1
    while wanted < 64 and errors[2 * wanted] <= 0.9 * errors[wanted]:
        wanted *= 2
    assert best_bands(plan) == wanted
    assert prefix_error_ratio(plan, 8) == pytest.approx(errors[8] / errors[1], rel=1e-2)
    assert best_bands(plan, 2) == min(wanted, 2)
    auto = planned(epsilon=epsilon, accountant=accountant, bands="auto")
    assert auto.bands == wanted and auto.epsilon(0) <= epsilon
    assert auto == planned(epsilon=epsilon, accountant=accountant, bands=wanted)


def test_some_gain_and_some_do_not() -> None:
    assert best_bands(planned()) > 1
    assert best_bands(planned(rate=0.2, epsilon=1.0)) == 1
    assert best_bands(planned(rate=0.5, accountant="gaussian")) == 2  # at most 1/q turns
    assert best_bands(planned(rate=1.0, accountant="gaussian")) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"tables": {"noise": {"injection": "per_microbatch", "bins": 2}}},
        {"allocate": "quantile"},
        {"noise_multiplier": 1.0},
        {
            "tables": {
                "class": {
                    "a": {"population": 1000, "epsilon": 8.0, "risk": {"of": "membership", "tpr": 0.5, "fpr": 0.1}}
                }
            }
        },
    ],
)
def test_auto_leaves_noise_independent_where_nothing_is_proven(options: dict[str, Any]) -> None:
    assert planned(bands="auto", **options).bands == 1


def test_a_plan_without_populations_and_one_with_bands_stay_as_they_are() -> None:
    plan = planned()
    unknown = tuple(dataclasses.replace(entry, population=None) for entry in plan.classes)
    assert best_bands(dataclasses.replace(plan, classes=unknown)) == 1
    assert best_bands(dataclasses.replace(plan, bands=8)) == 8


def test_bands_beside_those_of_the_policy_are_refused() -> None:
    tables = {"noise": {"correlation": "banded", "bands": 8}}
    assert planned(tables=tables).bands == planned(tables=tables, bands="auto").bands == 8
    with raises_code("plan.bands-differ"):
        planned(tables=tables, bands=4)
    for wrong in (0, "many", True):
        with raises_code("plan.bands-out-of-range"):
            planned(bands=wrong)
