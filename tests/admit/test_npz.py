"""What is said of an array before it is read holds when it is read; what is found in an archive, zipfile finds too."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from refusals import raises_code

from lamina.admit import npz
from lamina.admit.npz import MAX_ARRAY, MAX_HEADER, BadArray, count_examples, read_arrays, read_headers


def packed(how: int = zipfile.ZIP_STORED, **entries: bytes) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", how) as archive:
        for name, data in entries.items():
            archive.writestr(f"{name}.npy", data)
    return held.getvalue()


def npy(shape: str, data: bytes = b"", *, descr: str = "'<f4'", order: str = "False", pad: int = 0) -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}{' ' * pad}\n".encode()
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", len(text)) + text + data


def saved(compressed: bool, **found: Any) -> bytes:
    held = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(held, **found)
    return held.getvalue()


# ------------------------------------------------------------------------------------------------ what is right


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("dtype", ["<f4", ">f8", "<f2", "|u1", "|b1", "<i8", "<c8", "<f16", "<U3"])
def test_the_same_as_numpy_reads(compressed: bool, dtype: str) -> None:
    x = np.random.default_rng(0).integers(0, 2, (3, 4, 5)).astype(dtype)
    held = saved(compressed, x=x, y=np.asfortranarray(x), z=x[0, 0, 0])
    with np.load(io.BytesIO(held)) as there:
        for crc in (True, False):
            found = read_arrays(io.BytesIO(held), ["x", "y", "z"], crc=crc)
            for name, array in found.items():
                assert array.dtype == there[name].dtype and array.shape == there[name].shape
                assert np.array_equal(array, there[name])
    said = read_headers(io.BytesIO(held), ["y", "nobody", "x"])
    assert said.keys() == {"x", "y"}
    for each in said.values():
        assert (each.shape, each.dtype, each.nbytes) == (x.shape, x.dtype, x.nbytes)


def test_of_two_entries_of_one_name_the_same_is_looked_at_and_read() -> None:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        archive.writestr("x", npy("(9, 9)", bytes(4 * 81)))  # numpy would take this for x
        archive.writestr("x.npy", npy("(1,)", bytes(4)))
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("x.npy", npy("(2, 3)", bytes(24)))
    assert read_headers(held, ["x"])["x"].shape == read_arrays(held, ["x"])["x"].shape == (2, 3)


# ------------------------------------------------------------------------------------------------ what is wrong


GOOD = {how: saved(how, x=np.arange(6, dtype=np.float32).reshape(2, 3), y=np.arange(2)) for how in (False, True)}


@given(
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 800), st.integers(0, 255)), max_size=4),
    st.one_of(st.none(), st.integers(0, 800)),
)
@example(False, [(150, 255)], None)  # data that no longer has its checksum
def test_what_passes_can_be_read(compressed: bool, edits: list[tuple[int, int]], cut: int | None) -> None:
    """Whatever is done to an archive: it is refused at once, or it can be read and is what it said."""
    spoiled = bytearray(GOOD[compressed])
    for place, value in edits:
        spoiled[place % len(spoiled)] = value
    raw = io.BytesIO(bytes(spoiled[:cut]))
    try:
        said = read_headers(raw, ["x", "y"])
    except Exception:
        return
    if any(each.dtype.hasobject or not each.nbytes for each in said.values()):
        return  # the caller refuses these by what they say
    found = read_arrays(raw, ["x", "y"], crc=False)
    assert {name: (array.shape, array.dtype) for name, array in found.items()} == {
        name: (each.shape, each.dtype) for name, each in said.items()
    }


LIES: dict[str, tuple[bytes, str]] = {
    "too few numbers": (npy("(2, 3)", bytes(20)), "more or fewer numbers"),
    "too many numbers": (npy("(2, 3)", bytes(28)), "more or fewer numbers"),
    "no numbers": (npy(f"(1, {2**62}, 8)"), "more or fewer numbers"),
    "many axes": (npy("(1," + "1," * 32 + ")", bytes(4)), "33 axes"),
    "less than none": (npy("(2, -3)"), "an invalid shape"),
    "less than none twice": (npy("(-2, -3)", bytes(24)), "an invalid shape"),
    "truth for a number": (npy("(True, 6)", bytes(24)), "an invalid shape"),
    "a list for a shape": (npy("[2, 3]", bytes(24)), "numpy refuses"),
    "elements with axes": (npy("(1,)", bytes(24), descr="('<f4', (6,))"), "arrays as elements"),
    "a number for truth": (npy("(2, 3)", bytes(24), order="1"), "numpy refuses"),
    "a long header": (npy("(2, 3)", bytes(24), pad=MAX_HEADER), "the most is 10000"),
    "no header": (b"PK", "not in .npy format"),
    "a later format": (npy("(2, 3)", bytes(24)).replace(b"\x02\x00", b"\x04\x00", 1), "not in .npy format"),
}


@pytest.mark.parametrize("how", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("what", LIES)
def test_arrays_that_are_not_what_they_say(what: str, how: int, tmp_path: Path) -> None:
    data, problem = LIES[what]
    held = packed(how, x=data)
    with pytest.raises(BadArray, match=problem):
        read_headers(io.BytesIO(held), ["x"])
    path = tmp_path / "payload.npz"
    path.write_bytes(held)
    with raises_code("admit.npz-unreadable"):
        count_examples(path)


@pytest.mark.parametrize(
    "what", ["-" * 9000 + "1", "(" * 9000, "(1,1" * 2000, "{'shape': (1L,)}", "\0", "", "1" * 9000]
)
def test_headers_that_python_cannot_read_are_one_refusal(what: str, tmp_path: Path) -> None:
    path = tmp_path / "payload.npz"
    path.write_bytes(packed(x=b"\x93NUMPY\x01\x00" + struct.pack("<H", len(what)) + what.encode()))
    with raises_code("admit.npz-unreadable"):
        count_examples(path)


def test_a_checksum_counts_where_nothing_else_does() -> None:
    held = packed(x=npy("(2, 3)", b"\x01" * 24))
    spoiled = held.replace(b"\x01" * 24, b"\x02" * 24)
    assert read_arrays(io.BytesIO(spoiled), ["x"], crc=False)["x"].shape == (2, 3)
    with pytest.raises(zipfile.BadZipFile, match="CRC"):
        read_arrays(io.BytesIO(spoiled), ["x"])


def test_an_entry_that_reaches_beyond_the_file() -> None:
    """By its directory it is all there."""
    held = bytearray(packed(x=npy("(100, 100)", bytes(40_000))))
    del held[1000:39_000]
    place = held.index(b"PK\x01\x02")
    end = held.index(b"PK\x05\x06")
    held[end + 16 : end + 20] = struct.pack("<I", place)
    with pytest.raises(BadArray, match="cut off"):
        read_headers(io.BytesIO(bytes(held)), ["x"])


# ------------------------------------------------------------------------------------------------ what it costs


def peak(held: bytes, problem: str) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(BadArray, match=problem):
            read_headers(io.BytesIO(held), ["x"])
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_header_that_says_it_is_long_is_not_read() -> None:
    long = 100 << 20
    bomb = packed(zipfile.ZIP_DEFLATED, x=b"\x93NUMPY\x02\x00" + struct.pack("<I", long) + b" " * long)
    assert len(bomb) < 200_000
    assert peak(bomb, "header of 104857600 bytes") < 4 << 20


def test_an_array_larger_than_any_is_not_unpacked() -> None:
    held = bytearray(packed(zipfile.ZIP_DEFLATED, x=npy(f"({1 << 28}, 4)", bytes(1 << 20))))
    place = held.index(b"PK\x01\x02")
    held[place + 24 : place + 28] = struct.pack("<I", MAX_ARRAY + 1)
    assert peak(bytes(held), "the most is 1073741824") < 4 << 20


def test_an_array_is_unpacked_piece_by_piece() -> None:
    size = 64 << 20
    held = packed(zipfile.ZIP_DEFLATED, x=npy(f"({size // 4},)", bytes(size)))
    tracemalloc.start()
    try:
        assert read_headers(io.BytesIO(held), ["x"])["x"].nbytes == size
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_long_directory_is_not_read() -> None:
    held = packed(**{f"{i:0200d}": b"" for i in range(5000)})
    assert peak(held, "directory has more than") < 4 << 20


def test_only_short_headers_are_remembered() -> None:
    npz._parse_header.cache_clear()
    for pad in (0, 600):
        for _ in range(3):
            assert read_headers(io.BytesIO(packed(x=npy("(2, 3)", bytes(24), pad=pad))), ["x"])["x"].shape == (2, 3)
    assert (npz._parse_header.cache_info().currsize, npz._parse_header.cache_info().hits) == (1, 2)
    for _ in range(2):
        with pytest.raises(BadArray, match="an invalid shape"):
            read_headers(io.BytesIO(packed(x=npy("(2, -3)"))), ["x"])
    assert npz._parse_header.cache_info().currsize == 1


# ------------------------------------------------------------------------------------------------ the directory of an archive


PLAIN = saved(False, x=np.arange(6, dtype=np.float32).reshape(2, 3), y=np.arange(2))
DIRECTORY = PLAIN.index(b"PK\x01\x02")
END = len(PLAIN) - 22


def edited(place: int, value: bytes) -> bytes:
    return PLAIN[:place] + value + PLAIN[place + len(value) :]


def renamed(name: bytes) -> bytes:
    return PLAIN.replace(b"y.npy", name)


UNUSUAL: dict[str, bytes] = {
    "nothing": b"",
    "no archive": b"PK" * 100,
    "something before it": b"#" + PLAIN,
    "something behind it": PLAIN + b"\0",
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
    "a long directory": saved(False, **{f"{i:0100d}": np.zeros(1) for i in range(40)}),
}


def check_against_zipfile(held: bytes) -> bool:
    """Whether the headers are accepted; if so, they are those of the entries that zipfile and numpy find."""
    try:
        said = read_headers(io.BytesIO(held), ["x", "y"])
    except Exception:
        return False
    with zipfile.ZipFile(io.BytesIO(held)) as archive:
        assert {f"{name}.npy" for name in said} == {"x.npy", "y.npy"} & set(archive.namelist())
        for name, each in said.items():
            try:
                data = archive.read(f"{name}.npy")
            except zipfile.BadZipFile:  # the checksum, which is not asked for here
                continue
            if not each.dtype.hasobject:
                array = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
                assert (array.shape, array.dtype, len(data)) == (each.shape, each.dtype, each.start + each.nbytes)
    return True


READABLE = {
    "something before it", "something behind it", "a comment", "a name in UTF-8", "a later version", "another disk",
    "another disk of the directory", "a name that is cut off", "a name beyond the directory", "a long directory",
}  # fmt: skip


@pytest.mark.parametrize("what", UNUSUAL)
def test_unusual_archives_are_refused_or_read_as_zipfile_reads_them(what: str) -> None:
    assert check_against_zipfile(UNUSUAL[what]) is (what in READABLE)


SPOILED = st.lists(st.tuples(st.integers(0, len(PLAIN) - 1), st.integers(0, 255)), max_size=3)
OF_THE_DIRECTORY = st.lists(
    st.tuples(st.integers(DIRECTORY, len(PLAIN) - 1), st.sampled_from([0, 1, 5, 8, 45, 120, 121, 255])), max_size=3
)


@given(st.one_of(SPOILED, OF_THE_DIRECTORY))
@example([(DIRECTORY + 51 + 46, ord("x"))])  # two entries of one name: the last counts
@example([(DIRECTORY + 10, 8)])  # said to be compressed, and is not
@example([(DIRECTORY + 51 + 42, 0)])  # two names for one entry
def test_what_is_found_is_what_zipfile_finds(edits: list[tuple[int, int]]) -> None:
    spoiled = bytearray(PLAIN)
    for place, value in edits:
        spoiled[place] = value
    check_against_zipfile(bytes(spoiled))


# ------------------------------------------------------------------------------------------------ nothing but NaN


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("dtype", ["<f2", "<f4", ">f8"])
@pytest.mark.parametrize("size", [1, 7, 300_001])  # of one piece and of several
def test_an_array_of_nan_alone_is_refused(compressed: bool, dtype: str, size: int) -> None:
    x = np.full((size, 1), np.nan, dtype=dtype)
    with pytest.raises(BadArray, match="NaN"):
        read_headers(io.BytesIO(saved(compressed, x=x)), ["x"])
    x[-1] = 1  # one number is enough
    assert read_headers(io.BytesIO(saved(compressed, x=x)), ["x"])["x"].shape == x.shape


def test_nan_alone_behind_a_header_of_any_length() -> None:
    data = np.full(200_000, np.nan, dtype="<f4").tobytes()
    for pad in (0, 1, 2, 3, 3000):
        with pytest.raises(BadArray, match="NaN"):
            read_headers(io.BytesIO(packed(x=npy("(200000,)", data, pad=pad))), ["x"])


def test_whole_numbers_labels_and_empty_arrays_are_not_asked() -> None:
    held = saved(False, x=np.zeros((2, 0), "f4"), y=np.full(2, np.nan))
    assert read_headers(io.BytesIO(held), ["x", "y"])["y"].shape == (2,)
