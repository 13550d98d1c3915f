"""Files of signals: round trips through every format, and refusals of what is broken, hostile or too large."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import raises_code
from signal_files import encode, write_edf, write_wfdb

from lamina.errors import LaminaError
from lamina.signals import read_csv_signal, read_edf, read_npz_signal, read_wfdb, segments
from lamina.signals.wfdb import read_header

LIMITS = {16: 32767, 24: 1 << 22, 32: 1 << 30, 61: 32767, 80: 127, 160: 32767, 212: 2047}


@pytest.mark.parametrize("form", LIMITS)
@pytest.mark.parametrize("channels", [1, 3])
def test_every_format_comes_back_as_it_was_written(tmp_path: Path, form: int, channels: int) -> None:
    most = LIMITS[form]
    digital = np.random.default_rng(0).integers(-most, most + 1, (channels, 333))
    digital[0, :2] = -most, most
    write_wfdb(
        tmp_path / "r1", digital, form=form, gain=200.0, baseline=-5, rate=125.5, channels=("II", "ABP", "PLETH")
    )
    found = read_wfdb(tmp_path / "r1")
    assert (found.rate, found.channels) == (125.5, ("II", "ABP", "PLETH")[:channels])
    np.testing.assert_allclose(found.x, (digital + 5) / 200.0, rtol=1e-6)
    assert found.x.dtype == np.float32


def test_missing_samples_are_nan(tmp_path: Path) -> None:
    for form, missing in ((16, -32768), (80, -128), (212, -2048), (32, -(1 << 31))):
        digital = np.array([[1, missing, 3, 4]])
        write_wfdb(tmp_path / "r", digital, form=form)
        assert np.isnan(read_wfdb(tmp_path / "r").x).tolist() == [[False, True, False, False]]


def test_frames_skew_offsets_and_several_files(tmp_path: Path) -> None:
    fast = np.array([[0, 2], [4, 6], [8, 10]])  # two samples in a frame
    slow = np.array([100, 200, 300])
    frames = np.concatenate([fast, slow[:, None]], axis=1).ravel()
    (tmp_path / "r.dat").write_bytes(b"skip" + encode(frames, 16))
    (tmp_path / "r.xyz").write_bytes(encode(np.array([7, 8, 9]), 80))
    (tmp_path / "r.hea").write_text(
        "r 3 100/1(0) 3\nr.dat 16x2+4 10 16 0 0 30 0 a b\nr.dat 16:1+4 10/mmHg\nr.xyz 80 1\n"
    )
    found = read_wfdb(tmp_path / "r.hea")
    assert found.channels == ("a b", "signal 1", "signal 2") and found.units == ("mV", "mmHg", "mV")
    np.testing.assert_allclose(found.x, [[0.1, 0.5, 0.9], [20, 30, np.nan], [7, 8, 9]], rtol=1e-6)


def test_segments_gaps_and_layouts(tmp_path: Path) -> None:
    one, two = np.arange(8).reshape(2, 4), np.arange(10, 13).reshape(1, 3)
    write_wfdb(tmp_path / "s1", one, gain=1, channels=("II", "ABP"))
    write_wfdb(tmp_path / "s2", two, gain=1, channels=("ABP",))
    (tmp_path / "m_layout.hea").write_text("m_layout 2 100 0\n~ 0 1/mV 0 0 0 0 0 II\n~ 0 1/mmHg 0 0 0 0 0 ABP\n")
    (tmp_path / "m.hea").write_text("m/4 2 100 9\nm_layout 0\ns1 4\n~ 2\ns2 3\n")
    whole = read_wfdb(tmp_path / "m")
    nan = np.nan
    np.testing.assert_array_equal(whole.x, [[0, 1, 2, 3, nan, nan, nan, nan, nan], [4, 5, 6, 7, nan, nan, 10, 11, 12]])
    assert whole.channels == ("II", "ABP")
    assert [part.x.shape for part in segments(tmp_path / "m")] == [(2, 4), (1, 3)]
    with raises_code("data.file-broken"):
        read_wfdb(tmp_path / "m", most=10)
    (tmp_path / "m.hea").write_text("m/2 2 100 4\nm 4\ns1 4\n")  # a record that holds itself
    with raises_code("data.file-broken"):
        read_wfdb(tmp_path / "m")


HEADERS = {
    "empty": "",
    "only a comment": "# nothing\n",
    "no signals": "r\n",
    "fewer signals than said": "r 2 100 4\nr.dat 16 200\n",
    "a negative length": "r 1 100 -4\nr.dat 16 200\n",
    "an absurd length": "r 1 100 999999999999999\nr.dat 16 200\n",
    "a long length": "r 1 100 4000000000\nr.dat 16 200\n",
    "many signals": "r 100000 100 4\n",
    "an unknown format": "r 1 100 4\nr.dat 310 200\n",
    "a file elsewhere": "r 1 100 4\n../r.dat 16 200\n",
    "an absolute file": "r 1 100 4\n/etc/passwd 16 200\n",
    "no rate": "r 1 0 4\nr.dat 16 200\n",
    "a rate that is no number": "r 1 nan 4\nr.dat 16 200\n",
    "an infinite gain": "r 1 100 4\nr.dat 16 inf\n",
    "a large frame": "r 1 100 4\nr.dat 16x99999999 200\n",
    "more samples than the file": "r 1 100 5\nr.dat 16 200\n",
    "another checksum": "r 1 100 4\nr.dat 16 200 16 0 1 11\n",
    "two formats in a file": "r 2 100 2\nr.dat 16 200\nr.dat 80 200\n",
    "samples without a file": "r 1 100 100000000\n~ 16 200\n",
    "a missing file": "r 1 100 4\nq.dat 16 200\n",
    "segments that are missing": "r/3 1 100 4\ns1 4\n",
    "a segment that is not there": "r/1 1 100 4\nnowhere 4\n",
}


@pytest.mark.parametrize("what", HEADERS)
def test_broken_records_are_refused_by_name(tmp_path: Path, what: str) -> None:
    (tmp_path / "r.dat").write_bytes(encode(np.array([1, 2, 3, 4]), 16))
    (tmp_path / "r.hea").write_text(HEADERS[what])
    with raises_code("data.file-broken") as caught:
        read_wfdb(tmp_path / "r")
    assert str(tmp_path) in caught.value.problem


@settings(max_examples=150, deadline=None)
@given(text=st.text(alphabet="r1 24608/x:+().dat~\n#m", max_size=60))
def test_no_header_makes_anything_but_a_header_or_a_refusal(
    text: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.hea"
    path.write_text(text)
    try:
        read_header(path)
    except LaminaError as error:
        assert error.code == "data.file-broken"


def test_edf_comes_back(tmp_path: Path) -> None:
    x = np.random.default_rng(0).uniform(-3, 3, (2, 250))
    write_edf(tmp_path / "a.edf", x, rate=50, channels=("ECG", "Resp"))
    found = read_edf(tmp_path / "a.edf")
    assert (found.channels, found.units, found.rate) == (("ECG", "Resp"), ("mV", "mV"), 50.0)
    np.testing.assert_allclose(found.x, x, atol=1e-4)
    np.testing.assert_allclose(read_edf(tmp_path / "a.edf", "resp").x, x[1:], atol=1e-4)
    whole = (tmp_path / "a.edf").read_bytes()
    broken: dict[str, bytes] = {
        "cut": whole[:-100],
        "empty": b"",
        "header": whole[:300],
        "count": whole[:252] + b"99  " + whole[256:],
        "records": whole[:236] + b"99999999" + whole[244:],
    }
    for content in broken.values():
        (tmp_path / "b.edf").write_bytes(content)
        with raises_code("data.file-broken"):
            read_edf(tmp_path / "b.edf")
    with raises_code("data.file-broken"):
        read_edf(tmp_path / "a.edf", "EEG")


def test_tables_and_archives(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("II,ABP\n1,2\n3,4\n5,6\n")
    found = read_csv_signal(tmp_path / "a.csv", rate=10)
    assert found.channels == ("II", "ABP") and found.x.tolist() == [[1, 3, 5], [2, 4, 6]]
    np.savez(tmp_path / "a.npz", x=found.x, rate=10.0, channels=np.array(["II", "ABP"]))
    again = read_npz_signal(tmp_path / "a.npz")
    assert again.channels == found.channels and np.array_equal(again.x, found.x)
    wrong: list[dict[str, Any]] = [
        {"x": found.x}, {"x": found.x[0], "rate": 1.0}, {"x": found.x, "rate": 0.0},
        {"x": np.array([None]), "rate": 1.0}, {"x": found.x, "rate": 1.0, "channels": np.array(["II"])},
    ]  # fmt: skip
    for arrays in wrong:
        np.savez(tmp_path / "b.npz", **arrays)
        with raises_code("data.file-broken"):
            read_npz_signal(tmp_path / "b.npz")
    (tmp_path / "b.npz").write_bytes(b"PK\x03\x04 nothing")
    with raises_code("data.file-broken"):
        read_npz_signal(tmp_path / "b.npz")
    with raises_code("data.file-broken"):
        read_npz_signal(tmp_path / "missing.npz")


def test_an_archive_that_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.signals.signal.MOST_BYTES", 10_000)
    content = io.BytesIO()
    np.save(content, np.zeros((1, 100_000), dtype=np.float32))
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", content.getvalue())
    assert (tmp_path / "bomb.npz").stat().st_size < 10_000
    with raises_code("data.file-broken"):
        read_npz_signal(tmp_path / "bomb.npz")
