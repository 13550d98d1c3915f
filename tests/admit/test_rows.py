"""Columns without objects: packing, dropping, finding what repeats."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.admit import reasons
from lamina.admit.reasons import REASONS
from lamina.admit.rows import ROW_STRUCT, AdmittedRows, PackedTexts, Refusal, Refusals, is_repeat
from lamina.plan.table import printable


@given(st.lists(st.text(max_size=8)), st.data())
def test_packed_texts_are_a_list(items: list[str], data: st.DataObject) -> None:
    packed = PackedTexts(items)
    assert len(packed) == len(items)
    assert [packed[i] for i in range(len(items))] == items
    assert [packed[-i - 1] for i in range(len(items))] == items[::-1]
    with pytest.raises(IndexError):
        packed[len(items)]
    mask = np.array([data.draw(st.booleans()) for _ in items], dtype=np.bool_)
    packed.keep(mask)
    assert [packed[i] for i in range(len(packed))] == [x for x, kept in zip(items, mask, strict=True) if kept]
    packed.append("more\ud800")
    assert packed[-1] == "more\ud800"
    assert packed.nbytes == sum(len(text.encode("utf-8", "surrogatepass")) + 8 for text in packed)


@pytest.mark.parametrize("looking", [False, True])
@pytest.mark.parametrize("count", [0, 5, 70_000])
def test_rows_are_dropped(count: int, looking: bool) -> None:
    """In place, unless somebody holds a view, which then shows what it showed before."""
    rows = AdmittedRows()
    packed = [os.urandom(ROW_STRUCT.size) for _ in range(min(count, 50))]
    for i in range(count):
        rows.add(2 * i, f"{i}", packed[i % 50])
    mask = np.random.default_rng(0).random(count) < 0.5
    view = rows.table if looking else None
    seen = None if view is None else view.tobytes()
    rows.keep(mask)
    assert view is None or view.tobytes() == seen
    kept = np.flatnonzero(mask)
    assert len(rows) == len(kept) == len(rows.table)
    assert rows.places.tolist() == (2 * kept).tolist()
    assert [rows.ids[i] for i in range(len(kept))] == [f"{i}" for i in kept]
    assert rows.table.tobytes() == b"".join(packed[i % 50] for i in kept)
    del view
    rows.add(0, "x", b"\1" * ROW_STRUCT.size)
    assert rows.table[-1].tobytes() == b"\1" * ROW_STRUCT.size
    assert rows.nbytes > len(rows) * ROW_STRUCT.size


@given(st.lists(st.tuples(st.integers(0, 3), st.binary(min_size=3, max_size=3).map(lambda b: b[:1] + b"\0\0"))))
def test_what_repeats_is_found(rows: list[tuple[int, bytes]]) -> None:
    """Zeros at the end count: numpy's own comparison of texts would drop them."""
    table = np.array(rows, dtype=[("a", "<u4"), ("b", "V3")])
    seen: set[tuple[int, bytes]] = set()
    expected = []
    for row in rows:
        expected.append(row in seen)
        seen.add(row)
    assert is_repeat(table).tolist() == expected


def test_refusals_come_in_the_order_of_the_source() -> None:
    refusals = Refusals()
    for place, reason in ((5, reasons.EXPIRED), (1, reasons.REPLAYED), (3, reasons.EXPIRED)):
        refusals.add(place, f"id {place}", reason, "why")
    assert [r.id for r in refusals] == ["id 1", "id 3", "id 5"]
    assert refusals[-1] == Refusal("id 5", reasons.EXPIRED, "why")
    assert refusals == [refusals[i] for i in range(3)] and refusals != []
    assert list(refusals.counts().items()) == [(reasons.EXPIRED, 2), (reasons.REPLAYED, 1)]
    assert str(refusals[0]) == "id 1: replayed (why)"
    assert refusals[0].to_dict() == {"id": "id 1", "reason": "replayed", "detail": "why"}


@given(st.text())
def test_plain_text_is_printable_and_short(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert shown == text or not text.isprintable() or len(text) > 255


def test_reasons_fit_into_a_byte_and_say_something() -> None:
    assert len(REASONS) < 255
    assert len({reason.word for reason in REASONS}) == len({reason.meaning for reason in REASONS}) == len(REASONS)
    assert all(reason.meaning and str(reason) == reason.word for reason in REASONS)
