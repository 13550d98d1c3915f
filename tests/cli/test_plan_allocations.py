"""Allocations as people write them: names, options, lists of them, and what is said about mistakes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import raises_code

from lamina.allocate.basic import Pareto, flat
from lamina.allocate.ladp import LADP
from lamina.allocate.make_plan import ALLOCATIONS
from lamina.cli.by_name import allocation_with_options, parse_allocation, split_allocations
from lamina.cli.explain import WHEN_TO_USE
from lamina.errors import LaminaError
from lamina.plan.depth_profile import DepthProfile
from lamina.plan.step_plan import Clipping


@pytest.mark.parametrize("name", ALLOCATIONS)
def test_every_allocation_stands_for_itself(name: str) -> None:
    assert parse_allocation(name) == ALLOCATIONS[name]
    assert WHEN_TO_USE[name]  # the comparison says when to use it


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ladp:mode=budget,least=0.2", LADP(mode="budget", least=0.2)),
        ("ladp-budget:least=0.2", LADP(mode="budget", least=0.2)),
        ("ladp:sensitive=head", LADP(sensitive=("head",))),
        ("ladp:sensitive=[head, encoder.*],every=3", LADP(sensitive=("head", "encoder.*"), every=3)),
        ("ladp:sensitive=['0',-1]", LADP(sensitive=("0", -1))),
        ("ladp:sensitive=-1", LADP(sensitive=(-1,))),
        ("ladp:sensitive={top=0.5}", LADP(sensitive=DepthProfile.top(0.5))),
        ("ladp:thresholds=[1,4],parts=[2, 1]", LADP(thresholds=(1.0, 4.0), parts=(2.0, 1.0))),
        (
            "ladp:choose_every=5,candidates={one=[1.0,2.0],two=[2,1]}",
            LADP(choose_every=5, candidates=(("one", (1.0, 2.0)), ("two", (2.0, 1.0)))),
        ),
        ("pareto:clipping=box,shrink=1", Pareto(clipping=Clipping.BOX, shrink=1.0)),
        ("pareto:weights='harm'", Pareto(weights="harm")),
        (" flat ", flat),
    ],
)
def test_options_are_fields(text: str, expected: object) -> None:
    assert parse_allocation(text) == expected


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("lapd", "allocate.unknown-allocation"),
        ("", "allocate.unknown-allocation"),
        ("ladp:mod=budget", "cli.allocation-option-not-known"),
        ("ladp:budget", "cli.allocation-option-malformed"),
        ("ladp:", "cli.allocation-option-malformed"),
        ("ladp:mode=", "cli.allocation-option-malformed"),
        ("ladp:mode=fast", "allocate.option-unknown"),
        ("ladp:every=2.5", "cli.allocation-option-type"),
        ("ladp:every=true", "cli.allocation-option-type"),
        ("ladp:least=little", "cli.allocation-option-type"),
        ("ladp:least=2", "plan.rule-out-of-range"),
        ("ladp:thresholds=[1,2,3]", "allocate.option-pair"),
        ("ladp:sensitive={topp=0.2}", "plan.profile-unknown"),
        ("ladp:least=0.1,least=0.2", "cli.allocation-option-repeated"),
        ("flat:every=3", "cli.allocation-option-not-known"),
        ("printed-lsab:per_step=1", "cli.allocation-option-type"),
    ],
)
def test_mistakes_are_refused(text: str, code: str) -> None:
    with raises_code(code):
        parse_allocation(text)


def test_several() -> None:
    text = "flat, ladp:mode=budget,sensitive=[a,b],least=0.2 ,uniform,pareto:shrink=0.5"
    assert split_allocations(text) == (
        "flat",
        "ladp:mode=budget,sensitive=[a,b],least=0.2",
        "uniform",
        "pareto:shrink=0.5",
    )
    for each in split_allocations(text):
        parse_allocation(each)


@given(st.text(max_size=30))
def test_no_text_is_a_crash(text: str) -> None:
    """Whatever is written is an allocation or a refusal with a remedy."""
    for words in (text, f"ladp:{text}", f"ladp:sensitive={text}", f"pareto:shrink={text}"):
        try:
            parse_allocation(words)
        except LaminaError as error:
            assert error.remedy


@given(
    st.floats(0.01, 0.99),
    st.integers(1, 10_000),
    st.sampled_from(["shares", "budget"]),
    st.lists(st.from_regex(r"[a-z][a-z0-9.*]{0,8}", fullmatch=True), min_size=1, max_size=3),
)
def test_what_is_written_is_what_is_meant(least: float, every: int, mode: str, layers: list[str]) -> None:
    if any(name in ("true", "false", "inf", "nan") for name in layers):
        return  # TOML has its own idea of these words
    text = f"ladp:least={least!r},every={every},mode={mode},sensitive=[{','.join(layers)}]"
    assert parse_allocation(text) == LADP(least=least, every=every, mode=mode, sensitive=tuple(layers))
    table = {"least": least, "every": every, "mode": mode, "sensitive": layers}
    assert allocation_with_options("ladp", table) == parse_allocation(text)
