"""`admit/contribution_sources.py`: whatever it finds in an archive, zipfile finds the same."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lamina.admit import contribution_sources
from lamina.admit.contribution_sources import TAIL_BYTES, FileTail, ZipEntry, read_zip_directory


def saved(**found: Any) -> bytes:
    held = io.BytesIO()
    np.savez(held, **found)
    return held.getvalue()


def by_zipfile(held: bytes) -> dict[bytes, ZipEntry]:
    with zipfile.ZipFile(io.BytesIO(held)) as archive:
        return {
            name.encode("cp437"): ZipEntry(
                info.flag_bits, info.compress_type, info.compress_size, info.file_size, info.header_offset
            )
            for name, info in archive.NameToInfo.items()
        }


GOOD = saved(x=np.arange(6, dtype=np.float32).reshape(2, 3), y=np.arange(2))
DIRECTORY = GOOD.index(b"PK\x01\x02")
END = len(GOOD) - 22


def answer(held: bytes) -> Any:
    try:
        return contribution_sources.read_headers(io.BytesIO(held), ["x", "y"])
    except Exception as error:
        return type(error), str(error) if isinstance(error, contribution_sources.BadArray) else None


# ------------------------------------------------------------------------------------------------ what is right


@pytest.mark.parametrize("size", [1, TAIL_BYTES // 8, 3 * TAIL_BYTES])
def test_what_numpy_writes_is_found_without_zipfile(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = np.arange(size, dtype=np.float64)[None], np.zeros(1, dtype=np.int64)
    held = saved(x=x, y=y, other=x)
    assert read_zip_directory(FileTail(io.BytesIO(held))) == by_zipfile(held)
    monkeypatch.setattr(contribution_sources, "_open_archive", None)  # nobody asks it
    found = contribution_sources.read_headers(io.BytesIO(held), ["y", "x"])
    assert {name: (each.shape, each.dtype) for name, each in found.items()} == {
        "x": (x.shape, x.dtype),
        "y": (y.shape, y.dtype),
    }


def test_a_file_is_read_where_it_is_asked_for() -> None:
    held = bytes(range(256)) * 40
    near = FileTail(io.BytesIO(held))
    assert near.end == len(held) and near.tail == held[-TAIL_BYTES:]
    for at in (0, 5, len(held) - TAIL_BYTES - 3, len(held) - TAIL_BYTES, len(held) - 7):
        assert near.read(at, 10) == held[at : at + 10]


# ------------------------------------------------------------------------------------------------ what is not


def edited(place: int, value: bytes) -> bytes:
    return GOOD[:place] + value + GOOD[place + len(value) :]


def renamed(name: bytes) -> bytes:
    return GOOD.replace(b"y.npy", name)


UNUSUAL: dict[str, bytes] = {
    "nothing": b"",
    "no archive": b"PK" * 100,
    "something before it": b"#" + GOOD,
    "something behind it": GOOD + b"\0",
    "a comment": edited(END + 20, b"\3\0") + b"abc",
    "an entry that is encrypted": edited(DIRECTORY + 8, b"\1\0"),
    "a name in UTF-8": edited(DIRECTORY + 8, b"\0\x08"),
    "a later version": edited(DIRECTORY + 6, b"\x3f"),
    "an extra field": edited(DIRECTORY + 30, b"\5\0"),
    "a comment of an entry": edited(DIRECTORY + 32, b"\5\0"),
    "another disk": edited(DIRECTORY + 34, b"\1\0"),
    "another disk of the directory": edited(END + 4, b"\1\0"),
    "a name that is cut off": renamed(b"x.npy"[:3] + b"\0y"),
    "a longer directory": edited(END + 12, struct.pack("<L", END - DIRECTORY + 1)),
    "a shorter directory": edited(END + 12, struct.pack("<L", END - DIRECTORY - 1)),
    "a name beyond the directory": edited(DIRECTORY + 51 + 28, b"\6\0"),
    "the end of half an entry": edited(DIRECTORY + 51 + 28, b"\4\0"),
    "a directory elsewhere": edited(END + 16, struct.pack("<L", DIRECTORY - 1)),
    "a directory for huge archives": edited(END - 20, b"PK\6\7"),
    "a long directory": saved(**{f"{i:0100d}": np.zeros(1) for i in range(TAIL_BYTES // 100)}),
}


@pytest.mark.parametrize("what", UNUSUAL)
def test_whatever_is_unusual_is_left_to_zipfile(what: str) -> None:
    assert read_zip_directory(FileTail(io.BytesIO(UNUSUAL[what]))) is None


SPOILED = st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), max_size=3)
OF_THE_DIRECTORY = st.lists(
    st.tuples(st.integers(DIRECTORY, len(GOOD) - 1), st.sampled_from([0, 1, 5, 8, 45, 120, 121, 255])), max_size=3
)


@given(st.one_of(SPOILED, OF_THE_DIRECTORY))
@example([(DIRECTORY + 51 + 46, ord("x"))])  # two entries of one name: the last counts
@example([(DIRECTORY + 10, 8)])  # said to be compressed, and is not
@example([(DIRECTORY + 51 + 42, 0)])  # two names for one entry
def test_what_is_found_is_what_zipfile_finds(edits: list[tuple[int, int]]) -> None:
    """And so is what follows from it: the same headers, or the same refusal."""
    spoiled = bytearray(GOOD)
    for place, value in edits:
        spoiled[place] = value
    held = bytes(spoiled)
    found = read_zip_directory(FileTail(io.BytesIO(held)))
    if found is not None:
        assert found == by_zipfile(held)
    quick = answer(held)
    with pytest.MonkeyPatch.context() as patch:
        nothing: Callable[[FileTail], None] = lambda near: None  # noqa: E731
        patch.setattr(contribution_sources, "read_zip_directory", nothing)
        assert answer(held) == quick
