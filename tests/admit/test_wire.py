"""What goes over a line arrives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.admit.contribution_sources import Contribution
from lamina.admit.gate import decode_chunk, decode_verdicts, encode_chunk, encode_verdicts
from lamina.admit.verdicts import ROW_STRUCT, Reason

data = st.none() | st.binary(max_size=40)
ids = st.text(st.characters(), max_size=10)
offers = st.builds(
    Contribution,
    ids,
    data,
    data,
    data | st.builds(Path, st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)),
    st.none() | st.tuples(st.sampled_from(Reason), ids),
)


@settings(max_examples=200)
@given(st.lists(offers, max_size=5))
def test_what_is_sent_arrives(part: list[Contribution]) -> None:
    assert decode_chunk(encode_chunk(part)) == part


@given(st.integers(0, 2**40), st.integers(0, 2**40))
def test_places_arrive(start: int, count: int) -> None:
    part = range(start, start + count)
    assert decode_chunk(encode_chunk(part)) == part


@given(
    st.lists(
        st.tuples(st.sampled_from(Reason), ids) | st.binary(min_size=ROW_STRUCT.size, max_size=ROW_STRUCT.size),
        max_size=5,
    )
)
def test_verdicts_arrive(verdicts: list[Any]) -> None:
    assert decode_verdicts(encode_verdicts(verdicts), len(verdicts)) == verdicts
