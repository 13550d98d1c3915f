"""flat, uniform, pareto: what each promises."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lamina.allocate import ALLOCATIONS, Problem, allocation, flat, pareto, uniform
from lamina.errors import PlanError
from lamina.plan import Clipping, effective_sigma, rescale

INF = math.inf


def problem(**changes: object) -> Problem:
    fields: dict[str, object] = {
        "sizes": (100, 400, 900, 50, 7),
        "weights": (100.0, 400.0, 900.0, 50.0, 7.0),
        "reach": (
            (True, True, True, False, False),
            (False, False, True, False, False),
            (True, True, True, True, False),
        ),
        "clip_norm": (1.0, 2.0, 1.0),
        "sigma": (3.0, 5.0, INF),
    }
    return Problem(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(ALLOCATIONS))
def test_every_allocation_respects_reach_norms_and_silence(name: str) -> None:
    asked = problem()
    given = allocation(name)(asked)
    assert given.clip[2] == (INF, INF, INF, INF, 0.0)
    for k in (0, 1):
        assert math.hypot(*given.clip[k]) == pytest.approx(asked.clip_norm[k])
        assert [c > 0 for c in given.clip[k]] == list(asked.reach[k])
    assert given.noise[3:] == (0.0, 0.0)  # public only, and reached by nobody
    assert all(s > 0 for s in given.noise[:3])
    noise = rescale(given.clip, given.noise, asked.sigma)
    sigma = [effective_sigma(given.clip[k], noise) for k in (0, 1)]
    assert sigma[0] >= 3.0
    assert sigma[1] >= 5.0
    assert min(sigma[0] / 3, sigma[1] / 5) == pytest.approx(1, rel=1e-12)


def test_flat_is_joint_and_uniform_is_box_with_one_noise() -> None:
    asked = problem(reach=((True,) * 5,), clip_norm=(2.0,), sigma=(3.0,))
    for policy, clipping in ((flat, Clipping.JOINT), (uniform, Clipping.BOX)):
        given = policy(asked)
        assert given.clipping is clipping
        noise = rescale(given.clip, given.noise, asked.sigma)
        assert noise == pytest.approx((6.0,) * 5)  # S = sigma · c
        assert given.clip[0] == pytest.approx((2 / math.sqrt(5),) * 5)


def test_pareto_is_the_closed_form_and_beats_flat() -> None:
    asked = problem(reach=((True,) * 5,), clip_norm=(2.0,), sigma=(3.0,))
    given = pareto(asked)
    assert given.clipping is Clipping.JOINT
    c, root = np.array(given.clip[0]), np.sqrt(asked.sizes)
    np.testing.assert_allclose(np.square(given.noise), 9 * c / root * (c * root).sum(), rtol=1e-12)
    shares = np.square(c / given.noise) * 9
    np.testing.assert_allclose(shares, root / root.sum(), rtol=1e-12)

    def cost(noise: tuple[float, ...]) -> float:
        return float((np.array(asked.weights) * np.square(noise)).sum())

    assert cost(given.noise) < cost(rescale(given.clip, flat(asked).noise, asked.sigma))


def test_public_alone_needs_no_noise() -> None:
    asked = problem(reach=((True,) * 5,), clip_norm=(1.0,), sigma=(INF,))
    for name in ALLOCATIONS:
        assert allocation(name)(asked).noise == (0.0,) * 5


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
def test_nonsense_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(PlanError):
        problem(**changes)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(PlanError, match=r"'optimal' is not known.*flat, uniform, pareto"):
        allocation("optimal")
