"""What the tests of policies share: a problem with several classes, and a measurement of its layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from lamina.allocate.measure.measure import Measure
from lamina.allocate.problem import AllocationProblem

SIZES = (100, 400, 900, 50, 7)


def _measure(layers: tuple[str, ...] | None = None, **rows: Any) -> Measure:
    names = layers or tuple(f"layer {i}" for i in range(len(SIZES)))
    count = len(names)
    fields: dict[str, Any] = {
        "proxy": "made up",
        "layers": names,
        "tight": tuple(2.0 * 0.7**i for i in range(count)),
        "worst": tuple(2.0 * 1.3**i for i in range(count)),
        "printed": tuple(2.0 * 0.4**i for i in range(count)),
        "harm": tuple(float(1 + (7 * i) % 5) for i in range(count)),
        "norms": tuple(1.0 + 0.5 * ((3 * i) % 4) for i in range(count)),
        "fisher": tuple(1.0 + (5 * i) % 7 for i in range(count)),
    }
    return Measure(**{**fields, **rows})


def _problem(**changes: Any) -> AllocationProblem:
    fields: dict[str, Any] = {
        "sizes": SIZES,
        "weights": tuple(map(float, SIZES)),
        "reach": (
            (True, True, True, False, False),
            (False, False, True, False, False),
            (True, True, True, True, False),
        ),
        "clip_norm": (1.0, 2.0, 1.0),
        "sigma": (3.0, 5.0, math.inf),
        "steps": 100,
        "delta": (1e-5, 1e-5, 0.0),
        "targets": (1.0, 0.5, math.inf),
        "batch": 64.0,
    }
    return AllocationProblem(**{**fields, **changes})


@pytest.fixture
def measure() -> Callable[..., Measure]:
    """measure(layers=None, **rows): a measurement, of the problem's five layers unless others are named."""
    return _measure


@pytest.fixture
def problem() -> Callable[..., AllocationProblem]:
    """problem(**changes): two private classes with overlapping reach and a public one, five layers."""
    return _problem


@pytest.fixture
def alone() -> Callable[..., AllocationProblem]:
    """alone(**changes): one private class that reaches all five layers, c = 2, sigma = 3."""

    def made(**changes: Any) -> AllocationProblem:
        one = {
            "reach": ((True,) * 5,), "clip_norm": (2.0,), "sigma": (3.0,), "delta": (1e-5,), "targets": (1.0,)
        }  # fmt: skip
        return _problem(**{**one, **changes})

    return made
