"""`run/payloads.py`: the same is found by one process and by several, and by whoever looks later."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import raises_code

from lamina.run import payloads as shares
from lamina.run.example_sources import PayloadSource, keyed_hasher
from lamina.run.payload_admission import GivenPayloads
from lamina.run.payloads import FolderPayloads, InspectedPayloads, PayloadHeaders, PayloadInspector, survey_and_refuse
from lamina.run.table_files import model_dtype


def npz(**arrays: Any) -> bytes:
    held = io.BytesIO()
    np.savez(held, **arrays)
    return held.getvalue()


def usual(count: int, kind: Any = np.float32) -> bytes:
    return npz(x=np.zeros((count, 3), dtype=kind), y=np.zeros(count, dtype=np.int64))


def ward(root: Path, **bad: bytes | None) -> FolderPayloads:
    """Twelve payloads of one to three examples, and what else is given."""
    held: dict[str, bytes | None] = {f"p{i:02d}": usual(1 + i % 3) for i in range(12)}
    held |= bad
    for name, data in held.items():
        (root / name).mkdir()
        if data is not None:
            (root / name / "payload.npz").write_bytes(data)
    return FolderPayloads(root, sorted(held))


def surveyed(payloads: FolderPayloads | GivenPayloads, processes: int = 1, labels: Any = None) -> Any:
    """(row of each that fits, its size, the form), and why the others do not."""
    refused: dict[int, str] = {}
    survey, rows = survey_and_refuse(payloads, PayloadInspector(labels, None), refused.__setitem__, processes)
    return survey and (rows.tolist(), survey.sizes.tolist(), survey.format.text()), refused


BAD: dict[str, bytes | None] = {
    "a": None,
    "p03a": b"no archive",
    "p05a": npz(x=np.zeros((2, 4), dtype=np.float32), y=np.zeros(2, dtype=np.int64)),
    "p05b": npz(x=np.array([["text"] * 3]), y=np.zeros(1, dtype=np.int64)),
    "p07a": npz(x=np.zeros((2, 3)), y=np.zeros(3)),
    "p08a": usual(2, np.float64),  # of the same form, once it is float32
    "z": npz(x=np.array([["text"] * 3]), y=np.zeros(1, dtype=np.int64)),
}


def test_what_fits_and_what_does_not(tmp_path: Path) -> None:
    payloads = ward(tmp_path, **BAD)
    ids = list(payloads.ids)
    (rows, sizes, form), refused = surveyed(payloads)
    assert [ids[row] for row in rows] == sorted([f"p{i:02d}" for i in range(12)] + ["p08a"])
    assert sizes == [1, 2, 3, 1, 2, 3, 1, 2, 3, 2, 1, 2, 3]
    assert form == "x (3,) torch.float32, y () torch.int64"
    assert {ids[row]: why.replace(str(tmp_path), "") for row, why in refused.items()} == {
        "a": "'/a' has no payload",
        "p03a": "'/p03a/payload.npz' cannot be read as .npz (BadZipFile)",
        "p05a": "it has x (4,) torch.float32, y () torch.int64; the others have x (3,) torch.float32, y () torch.int64",
        "p05b": "x holds text, and a model needs numbers",
        "p07a": "'/p07a/payload.npz' has 2 examples in x and y of shape (3,)",
        "z": "x holds text, and a model needs numbers",
    }


@pytest.mark.parametrize("processes", [2, 3, 20, 100])
def test_the_number_of_processes_changes_nothing(
    tmp_path: Path, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    payloads = ward(tmp_path, **BAD)
    alone = surveyed(payloads)
    monkeypatch.setattr(shares, "MIN_PAYLOADS_PER_PROCESS", 1)
    assert surveyed(payloads, processes) == alone
    assert not multiprocessing.active_children()


def test_nothing_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "MIN_PAYLOADS_PER_PROCESS", 1)
    payloads = GivenPayloads(["a", "b"], [b"PK", b"PK"])
    for processes in (1, 2):
        found, refused = surveyed(payloads, processes)
        assert found is None and refused.keys() == {0, 1}


def test_as_many_of_two_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is first is named first, whoever looked at it."""
    other = npz(x=np.zeros((1, 4), dtype=np.float32))
    payloads = GivenPayloads(["a", "b", "c", "d"], [usual(1), other, other, usual(1)])
    monkeypatch.setattr(shares, "MIN_PAYLOADS_PER_PROCESS", 1)
    for processes in (1, 2, 4):
        with raises_code("corpus.formats-tied"):
            surveyed(payloads, processes)


class Deadly(GivenPayloads):
    """Ends the process that looks at its last payload, if it is not ours."""

    ours = os.getpid()

    def peek(self, row: int) -> bytes | None:
        if row == len(self) - 1 and os.getpid() != self.ours:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().peek(row)


def test_a_process_that_is_killed_is_told_and_nothing_is_taken_for_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    payloads = Deadly(["a", "b", "c"], [usual(1)] * 3)
    monkeypatch.setattr(Deadly, "ours", os.getpid())
    monkeypatch.setattr(shares, "MIN_PAYLOADS_PER_PROCESS", 1)
    assert surveyed(payloads)[1] == {}
    with raises_code("admit.worker-ended"):
        surveyed(payloads, 3)
    assert not multiprocessing.active_children()


def test_few_payloads_are_looked_at_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "WorkerProcess", None)
    assert surveyed(GivenPayloads(["a"] * 9, [usual(1)] * 9), 2)[1] == {}


def test_a_form_is_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def counted(*given: Any, **options: Any) -> Any:
        asked.append(options)
        return model_dtype(*given, **options)

    monkeypatch.setattr(shares, "model_dtype", counted)
    payloads = GivenPayloads([f"{i}" for i in range(40)], [usual(1 + i % 7) for i in range(40)])
    assert surveyed(payloads)[1] == {}
    assert len(asked) == 2  # x and y


def test_labels_from_elsewhere(tmp_path: Path) -> None:
    only_x = npz(x=np.zeros((2, 3), dtype=np.float32))
    payloads = GivenPayloads(["a", "b", "c"], [only_x, usual(2), only_x])
    (rows, _, form), refused = surveyed(payloads, labels=np.array([1.0, 2.0, 3.0]))
    assert (rows, form) == ([0, 2], "x (3,) torch.float32, y () torch.float32")
    assert "has y, and so has contributions.csv" in refused[1]


# ------------------------------------------------------------------------------------------------ names


@pytest.mark.parametrize("root", [".", "people", "./people/", "/people"])
def test_a_name_is_the_path_as_text(root: str) -> None:
    payloads = FolderPayloads(Path(root), ["a", "b c", "é"], np.array([0, 1, 0], dtype=np.uint8))
    names = ["a/payload.npz", "b c/payload.csv", "é/payload.npz"]
    for row, name in enumerate(names):
        assert payloads.path(row) == str(Path(root) / name)


def test_one_payload_in_each_folder(tmp_path: Path) -> None:
    for name, kinds in {"none": (), "two": ("npz", "csv"), "link": ("npz",)}.items():
        (tmp_path / name).mkdir()
        for kind in kinds:
            (tmp_path / name / f"payload.{kind}").write_bytes(usual(1))
    (tmp_path / "folder" / "payload.npz").mkdir(parents=True)
    (tmp_path / "other").symlink_to(tmp_path / "link")
    payloads = FolderPayloads(tmp_path, ["none", "two", "folder", "absent", "link", "other"])
    for row, what in enumerate(["no payload", "two payloads", "no payload", "no payload"]):
        with raises_code("corpus.payload-missing") as refusal:
            payloads.path(row)
        assert what in refusal.value.problem
    assert surveyed(payloads)[0][0] == [4, 5]


def test_what_was_taken_for_an_archive_is_read_as_one(tmp_path: Path) -> None:
    path = tmp_path / "payload.NPZ"
    path.write_bytes(npz(x=np.arange(6, dtype=np.float32).reshape(2, 3)))
    x, y = PayloadSource(GivenPayloads(["a"], [path]), None).fetch(np.array([1]))
    assert torch.equal(x, torch.tensor([[3.0, 4.0, 5.0]])) and y is None


def test_what_was_handed_over_is_fed_by_id_and_content(tmp_path: Path) -> None:
    def digest(ids: str, *payloads: bytes | Path) -> bytes:
        hasher = keyed_hasher(bytes(32), "test")
        GivenPayloads(ids, payloads).feed(hasher)
        return hasher.digest()

    (tmp_path / "a.npz").write_bytes(b"PK one")
    found = digest("ab", b"PK one", b"two")
    assert digest("ab", tmp_path / "a.npz", b"two") == found
    others = [
        digest("ac", b"PK one", b"two"), digest("ab", b"PK one", b"tw0"), digest("ab", b"PK onet", b"wo"),
        digest("ba", b"two", b"PK one"),
    ]  # fmt: skip
    assert len({found, *others}) == 5


def test_inspections_arrive() -> None:
    two = np.dtype(np.float32), np.dtype("<U7")
    headers = [PayloadHeaders(((3, 4), two[0]), ((), two[1])), PayloadHeaders(((2,), two[0]), None, ("a", "\udc80"))]
    headers.append(PayloadHeaders(((), two[0]), None, ()))
    sent = InspectedPayloads(np.array([2, 0, 5]), np.array([0, -1, 1]), headers, {1: "no \udcff array"})
    got = InspectedPayloads.from_bytes(sent.to_bytes())
    assert got.sizes.tolist() == [2, 0, 5]
    assert got.which.tolist() == [0, -1, 1]
    assert (got.headers, got.wrong) == (sent.headers, sent.wrong)
