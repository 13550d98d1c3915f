"""flat, uniform, proportional, pareto, lsab, quantile, automatic: what each promises."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from refusals import raises_code

from lamina.allocate.basic import LSAB, Automatic, Pareto, Proportional, Quantile, flat, pareto, uniform
from lamina.allocate.make_plan import ALLOCATIONS, find_allocation
from lamina.allocate.problem import Allocation, AllocationProblem, optimal_noise
from lamina.errors import PlanError
from lamina.plan.rules import FollowQuantile, clip_radius, effective_sigma, rescale_noise
from lamina.plan.step_plan import Clipping

INF = math.inf
Make = Callable[..., Any]
SOUND = [name for name in ALLOCATIONS if not name.startswith("printed")]


def counts(given: Allocation) -> list[float]:
    """How far each class moves the noised counts, in units of their noise."""
    rule = next((rule for rule in given.rules if isinstance(rule, FollowQuantile)), None)
    return [0.0 if rule is None else math.sqrt(sum(c > 0 for c in row)) / (2 * rule.noise) for row in given.clip]


def settled(given: Allocation, asked: AllocationProblem) -> tuple[float, ...]:
    """S after scaling, as make_plan does it."""
    return rescale_noise(given.clip, given.noise, asked.sigma, counts(given))


def cost(weights: tuple[float, ...], noise: tuple[float, ...]) -> float:
    return float((np.array(weights) * np.square(noise)).sum())


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", SOUND)
def test_every_sound_policy_respects_reach_norms_and_silence(
    name: str, known: bool, problem: Make, measure: Make
) -> None:
    if (name == "lsab" and not known) or name == "automatic":
        return  # refused: below; automatic takes no public class: test_make_plan.py
    asked = problem(measure=measure() if known else None)
    given = find_allocation(name)(asked)
    assert given.clip[2] == (INF, INF, INF, INF, 0.0)
    for k in (0, 1):
        assert math.hypot(*given.clip[k]) == pytest.approx(asked.clip_norm[k] * given.batch_factor)
        assert [c > 0 for c in given.clip[k]] == list(asked.reach[k])
    assert given.noise[3:] == (0.0, 0.0)  # public only, and reached by nobody
    assert all(s > 0 for s in given.noise[:3])
    noise = settled(given, asked)
    sigma = [effective_sigma(given.clip[k], noise, counts(given)[k]) for k in (0, 1)]
    assert sigma[0] >= 3.0
    assert sigma[1] >= 5.0
    assert min(sigma[0] / 3, sigma[1] / 5) == pytest.approx(1, rel=1e-12)
    assert given.why
    assert all(line.endswith(".") for line in given.why)


def test_flat_is_joint_and_uniform_is_box_with_one_noise(alone: Make) -> None:
    asked = alone()
    for policy, clipping in ((flat, Clipping.JOINT), (uniform, Clipping.BOX)):
        given = policy(asked)
        assert given.clipping is clipping
        assert settled(given, asked) == pytest.approx((6.0,) * 5)  # S = sigma · c
        assert given.clip[0] == pytest.approx((2 / math.sqrt(5),) * 5)


@pytest.mark.parametrize("known", [True, False])
def test_proportional_gives_equal_shares(alone: Make, measure: Make, known: bool) -> None:
    asked = alone(measure=measure() if known else None)
    given = Proportional()(asked)
    shape = np.array(asked.measure.norms if known else np.sqrt(asked.sizes))
    np.testing.assert_allclose(given.clip[0], 2 * shape / np.linalg.norm(shape))
    shares = np.square(np.array(given.clip[0]) / settled(given, asked)) * 9
    np.testing.assert_allclose(shares, 0.2)
    assert given.clipping is Clipping.BOX


def test_equal_shares_of_several_classes_serve_the_one_that_asks_most(problem: Make) -> None:
    asked = problem()
    given = Proportional()(asked)
    for k in (0, 1):
        assert effective_sigma(given.clip[k], given.noise) >= asked.sigma[k] * (1 - 1e-12)
    wanted = 3.0 * np.array(given.clip[0][:2]) * math.sqrt(3)  # only class 0 is there, with a third each
    np.testing.assert_allclose(given.noise[:2], wanted)
    rows = [1, 0, 2]
    other = problem(
        reach=tuple(asked.reach[k] for k in rows),
        clip_norm=tuple(asked.clip_norm[k] for k in rows),
        sigma=tuple(asked.sigma[k] for k in rows),
    )
    assert Proportional()(other).noise == given.noise  # the order of the classes does not matter


# --------------------------------------------------------------------------------------------------------- pareto


def test_pareto_is_the_closed_form_and_beats_flat(alone: Make) -> None:
    asked = alone()
    given = pareto(asked)
    assert given.clipping is Clipping.JOINT
    c, root = np.array(given.clip[0]), np.sqrt(asked.sizes)
    np.testing.assert_allclose(np.square(given.noise), 9 * c / root * (c * root).sum(), rtol=1e-12)
    shares = np.square(c / given.noise) * 9
    np.testing.assert_allclose(shares, c * root / (c * root).sum(), rtol=1e-12)


def test_pareto_that_knows_nothing_is_flat_for_one_class(alone: Make, problem: Make) -> None:
    asked = alone()
    given = pareto(asked)
    assert settled(given, asked) == pytest.approx(settled(flat(asked), asked), rel=1e-12)
    assert given.clipping is flat(asked).clipping is Clipping.JOINT
    several = problem()  # of two private classes each gets its budget, which flat gives to one
    assert cost(several.weights, settled(pareto(several), several)) <= cost(
        several.weights, settled(flat(several), several)
    )
    spent = [effective_sigma(pareto(several).clip[k], settled(pareto(several), several)) for k in (0, 1)]
    assert spent == pytest.approx(several.sigma[:2])


@pytest.mark.parametrize("weights", ["sizes", "harm"])
def test_pareto_says_how_much_noise_it_saves(alone: Make, measure: Make, weights: str) -> None:
    asked = alone(measure=measure())
    given = Pareto(weights=weights)(asked)
    n = np.array(asked.measure.norms)
    np.testing.assert_allclose(given.clip[0], 2 * n / np.linalg.norm(n))
    m = np.array(asked.sizes if weights == "sizes" else asked.measure.harm, dtype=float)
    ratio = (n * np.sqrt(m)).sum() ** 2 / ((n**2).sum() * m.sum())
    assert cost(m, given.noise) / cost(m, settled(flat(asked), asked)) == pytest.approx(ratio, rel=1e-12)
    assert f"is {ratio:.3f} of what flat would add" in given.why[1]
    assert ("flat is as good" in given.why[1]) == (ratio > 0.8)


@pytest.mark.parametrize("known", [True, False])
def test_fully_shrunk_pareto_is_flat(alone: Make, measure: Make, known: bool) -> None:
    """Equal S and the same radius of the joint clip: the same step, whatever C says."""
    asked = alone(measure=measure() if known else None)
    given = Pareto(shrink=1.0)(asked)
    noise = settled(given, asked)
    assert noise == pytest.approx((6.0,) * 5, rel=1e-12)
    assert clip_radius(given.clip[0], noise) * noise[0] == pytest.approx(2.0, rel=1e-12)  # ‖g‖ ≤ c
    assert "is 1.000 of what flat would add" in given.why[1]
    ratios = [cost(asked.weights, settled(Pareto(shrink=s)(asked), asked)) for s in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert ratios == sorted(ratios)


# --------------------------------------------------------------------------------------------------------- lsab


def test_lsab_has_the_shape_of_delta_and_the_noise_of_the_optimum(alone: Make, measure: Make) -> None:
    asked = alone(measure=measure())
    given = LSAB()(asked)
    delta, root = np.array(asked.measure.tight), np.sqrt(asked.measure.harm)
    c = 2 * delta / np.linalg.norm(delta)
    np.testing.assert_allclose(given.clip[0], c)
    np.testing.assert_allclose(np.square(given.noise), 9 * c / root * (c * root).sum(), rtol=1e-12)
    assert 0.5 * (np.square(c / np.array(given.noise))).sum() == pytest.approx(1 / 18, rel=1e-12)
    assert given.clipping is Clipping.BOX
    assert any("not a sensitivity bound" in line for line in given.why)
    worst = LSAB(bound="worst", weights="sizes", clipping="joint")(asked)  # type: ignore[arg-type]
    assert worst.clipping is Clipping.JOINT
    np.testing.assert_allclose(np.diff(np.log(worst.clip[0])), math.log(1.3))


def test_bounds_that_explode_with_depth_are_refused(alone: Make, measure: Make) -> None:
    exploding = alone(measure=measure(worst=(1.0, 1e4, 1e8, 1e12, 1e16)))
    assert LSAB()(exploding).noise
    with raises_code("allocate.delta-spread"):
        LSAB(bound="worst")(exploding)


@pytest.mark.parametrize("policy", [LSAB(), Pareto(weights="harm"), ALLOCATIONS["printed-lsab"]])
def test_policies_that_need_a_measurement_refuse_without(policy: Any, problem: Make) -> None:
    with raises_code("allocate.needs-measure"):
        policy(problem())


def test_a_measurement_of_another_model_is_refused(problem: Make, measure: Make) -> None:
    other = measure(layers=("a", "b"))
    for name in ("lsab", "pareto", "proportional", "quantile", "ladp"):
        with raises_code("allocate.measure-length"):
            find_allocation(name)(problem(measure=other))


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, INF])
def test_measurements_that_make_no_sense_are_refused(measure: Make, value: float) -> None:
    for what in ("tight", "printed", "harm", "norms", "fisher"):
        with raises_code("sensitivity.value-not-positive"):
            measure(**{what: (1.0, value, 1.0, 1.0, 1.0)})


# --------------------------------------------------------------------------------------------------------- quantile


def test_counts_take_their_part_of_the_budget_and_no_more(problem: Make, alone: Make) -> None:
    for asked in (problem(), alone()):
        given = Quantile(cost=0.04, target=0.3)(asked)
        (rule,) = given.rules
        assert isinstance(rule, FollowQuantile)
        assert given.clipping is Clipping.BOX
        assert rule.target == 0.3
        parts = [(counts(given)[k] * asked.sigma[k]) ** 2 for k in asked.private]
        assert max(parts) == pytest.approx(0.04)
    bare = optimal_noise(alone(), given.clip, np.array(alone().weights))
    bare = rescale_noise(given.clip, bare, alone().sigma)
    assert settled(given, alone()) == pytest.approx([s / math.sqrt(0.96) for s in bare], rel=1e-12)


# --------------------------------------------------------------------------------------------------------- automatic


def test_automatic_is_a_normalised_gradient(alone: Make, measure: Make) -> None:
    """What the optimiser sees of a contribution is c·g/‖g‖/B, and the noise that flat would add."""
    for known in (True, False):
        asked = alone(measure=measure() if known else None)
        given = Automatic(gamma=0.02)(asked)
        typical = math.hypot(*asked.measure.norms) if known else 2.0
        assert given.batch_factor == pytest.approx(0.02 * min(1.0, typical / 2.0))
        noise = settled(given, asked)
        norm = 0.5  # of some gradient
        ball = clip_radius(given.clip[0], noise) * noise[0]
        assert ball == pytest.approx(2.0 * given.batch_factor)
        assert min(1.0, ball / norm) * norm / given.batch_factor == pytest.approx(2.0)
        assert noise[0] / given.batch_factor == pytest.approx(6.0)
    small = alone(measure=measure(norms=(0.01, 0.02, 0.01, 0.01, 0.01)), clip_norm=(1.0,))
    assert Automatic().fraction(small) == pytest.approx(0.01 * math.sqrt(8e-4))


# --------------------------------------------------------------------------------------------------------- edges


def test_public_alone_needs_no_noise(problem: Make, measure: Make) -> None:
    asked = problem(
        reach=((True,) * 5,), clip_norm=(1.0,), sigma=(INF,), measure=measure(), delta=(0.0,), targets=(INF,)
    )
    for name in SOUND:
        if name == "automatic":
            continue  # takes no public class
        given = find_allocation(name)(asked)
        assert given.noise == (0.0,) * 5
        assert given.rules == ()
    for name in ("printed-lsab", "printed-ladp"):
        with raises_code("allocate.no-private-class"):
            find_allocation(name)(asked)


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        (Pareto, {"weights": "fisher"}),
        (Pareto, {"shrink": 1.5}),
        (Pareto, {"shrink": math.nan}),
        (Pareto, {"shrink": "half"}),
        (Pareto, {"clipping": "elementwise"}),
        (Pareto, {"clipping": "ball"}),
        (Proportional, {"clipping": None}),
        (LSAB, {"bound": "printed"}),
        (LSAB, {"weights": 1.0}),
        (Quantile, {"cost": 0.0}),
        (Quantile, {"cost": 1.0}),
        (Quantile, {"target": 1.0}),
        (Quantile, {"rate": -0.1}),
        (Automatic, {"gamma": 0.0}),
        (Automatic, {"gamma": True}),
    ],
)
def test_wrong_options_are_refused_with_their_name(policy: Any, options: dict[str, Any]) -> None:
    ((option, _),) = options.items()
    with pytest.raises(PlanError, match=f"{option} of {policy.name} is"):
        policy(**options)


@pytest.mark.parametrize(
    "changes",
    [
        {"weights": (1.0, 1.0)},
        {"weights": (1.0, 1.0, 0.0, 1.0, 1.0)},
        {"weights": (1.0, 1.0, INF, 1.0, 1.0)},
        {"clip_norm": (1.0,)},
        {"clip_norm": (1.0, -1.0, 1.0)},
        {"sigma": (1.0, math.nan, INF)},
        {"reach": ((True,),)},
    ],
)
def test_nonsense_is_refused(changes: dict[str, object], problem: Make) -> None:
    with pytest.raises(PlanError):
        problem(**changes)


def test_a_layer_of_no_size_is_refused(problem: Make) -> None:
    with raises_code("allocate.threshold-not-positive"):
        Proportional()(problem(sizes=(1, 0, 1, 1, 1)))


def test_unknown_names_are_refused() -> None:
    with raises_code("allocate.unknown-allocation"):
        find_allocation("optimal")
    with raises_code("allocate.unknown-allocation"):
        find_allocation("paretto")
    with raises_code("allocate.allocation-type"):
        find_allocation(3)  # type: ignore[arg-type]


def test_the_registry_is_read_only_and_names_fit() -> None:
    for name, policy in ALLOCATIONS.items():
        assert policy.name == name
        assert find_allocation(name) is policy
        with pytest.raises((AttributeError, TypeError)):
            policy.clipping = None  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        ALLOCATIONS["flat"] = uniform  # type: ignore[index]
