"""Schedules: what is refused, what costs nothing, what is cached."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest
from refusals import raises_code

from lamina.account.accountants import ACCOUNTANTS, SpendCurve, find_accountant
from lamina.account.schedule import Adjacency, Event, grouped, prefix, total_steps

NAN = float("nan")


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"sigma": 0.0}, "account.sigma-not-positive"),
        ({"sigma": -1.0}, "account.sigma-not-positive"),
        ({"sigma": NAN}, "account.sigma-not-positive"),
        ({"q": -0.1}, "account.rate-out-of-range"),
        ({"q": 1.0000001}, "account.rate-out-of-range"),
        ({"q": NAN}, "account.rate-out-of-range"),
        ({"steps": -1}, "account.steps-negative"),
        ({"steps": 1.5}, "account.event-not-numbers"),
        ({"steps": True}, "account.steps-negative"),
        ({"sigma": None}, "account.event-not-numbers"),
        ({"q": "x"}, "account.event-not-numbers"),
    ],
)
def test_senseless_events_are_refused_by_name(fields: dict[str, Any], name: str) -> None:
    with raises_code(name):
        Event(**{"sigma": 1.0, "q": 0.5, "steps": 1, **fields})


@pytest.mark.parametrize("name", list(ACCOUNTANTS))
def test_what_costs_nothing(name: str) -> None:
    free = [Event(sigma=math.inf, q=0.5, steps=9), Event(sigma=1e-9, q=0.0, steps=9), Event(sigma=1.0, q=1.0, steps=0)]
    asked = find_accountant(name)
    assert asked.epsilon(free, 1e-5) == asked.epsilon([], 1e-5) == asked.epsilon(free, 0.0) == 0
    assert asked.delta(free, 0.0) == 0
    paid = [Event(sigma=2.0, q=0.1, steps=3)]
    assert asked.epsilon([*free, *paid], 1e-5) == asked.epsilon(paid, 1e-5) > 0
    assert asked.epsilon(paid, 0.0) == math.inf
    assert asked.delta(paid, math.inf) == 0


@pytest.mark.parametrize("name", list(ACCOUNTANTS))
def test_senseless_questions_are_refused(name: str) -> None:
    paid = [Event(sigma=2.0, q=0.1, steps=3)]
    for delta in (-1e-9, 1.0, NAN, "1e-5", None):
        with raises_code("account.delta-out-of-range"):
            find_accountant(name).epsilon(paid, delta)  # type: ignore[arg-type]
    for epsilon in (-1.0, NAN, None):
        with raises_code("account.epsilon-negative"):
            find_accountant(name).delta(paid, epsilon)  # type: ignore[arg-type]
    with raises_code("account.not-an-event"):
        find_accountant(name).epsilon([(1.0, 0.1, 3)], 1e-5)  # type: ignore[list-item]


def test_adjacency_by_name() -> None:
    paid = [Event(sigma=2.0, q=0.1, steps=3)]
    for each in Adjacency:
        assert find_accountant("pld").epsilon(paid, 1e-5, each.value) == find_accountant("pld").epsilon(
            paid, 1e-5, each
        )
    with raises_code("account.adjacency-unknown"):
        find_accountant("pld").epsilon(paid, 1e-5, "swap")


def test_unknown_accountant_is_refused() -> None:
    with raises_code("account.accountant-unknown"):
        find_accountant("renyi")
    assert {name: each.amplified for name, each in ACCOUNTANTS.items()} == {
        "pld": True,
        "rdp": True,
        "rdp-integer": True,
        "moments": True,
        "zcdp": False,
        "gaussian": False,
    }


def test_grouping_and_prefix() -> None:
    first, second = Event(sigma=2.0, q=0.1, steps=3), Event(sigma=1.0, q=0.1, steps=4)
    assert grouped([first, second, first]) == (second, Event(sigma=2.0, q=0.1, steps=6))
    assert prefix([first, second, first], 5) == (first, Event(sigma=1.0, q=0.1, steps=2))
    assert prefix([first], 99) == (first,)
    assert total_steps([first, second]) == 7
    assert Event(sigma=np.float64(2.0), q=np.float64(0.1), steps=np.int64(3)) == first
    with raises_code("account.steps-negative"):
        prefix([first], -1)


def test_asking_again_costs_nothing() -> None:
    schedule = [Event(sigma=1.5, q=0.01, steps=500), Event(sigma=1.7, q=0.01, steps=500)]
    for name, asked in ACCOUNTANTS.items():
        for adjacency in Adjacency if name not in ("rdp", "rdp-integer", "moments") else (Adjacency.ADD_REMOVE,):
            asked.epsilon(schedule, 1e-5, adjacency)
            begun = time.process_time()
            for _ in range(1000):
                asked.epsilon(schedule[::-1], 1e-5, adjacency)
            assert time.process_time() - begun < 0.5


@pytest.mark.parametrize("name", ["pld", "rdp", "gaussian"])
def test_spend_curve_is_safe_rising_and_exact_at_the_end(name: str) -> None:
    schedule = [Event(sigma=1.2, q=0.02, steps=150), Event(sigma=1.5, q=0.05, steps=50)]
    curve = SpendCurve(schedule, delta=1e-5, accountant=name, points=16)
    values = [curve.epsilon(t) for t in range(201)]
    assert values[0] == 0
    assert values == sorted(values)
    assert values[-1] == find_accountant(name).epsilon(schedule, 1e-5)
    for t in (1, 2, 17, 100, 149, 151, 199):
        true = find_accountant(name).epsilon(prefix(schedule, t), 1e-5)
        assert values[t] >= true * (1 - 1e-6)
        if t >= 17:
            assert values[t] <= true * 1.3
    with raises_code("account.step-out-of-range"):
        curve.epsilon(201)
