"""Corpora from files: tables, .npz archives, folders of payloads. Errors name the place, never the value."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import raises_code

from lamina.plan.policy import Policy
from lamina.run.corpus import Corpus
from lamina.run.table_files import read_table

ALL = np.arange(4)
TABLE = """age,dose,who,label,ward
61,0.5,ann,1,a
62,1.5,bob,0,b
63,2.5,ann,1,a
64,3.5,cleo,0,b
"""


def policy() -> Policy:
    return Policy.from_dict(
        {
            "corpus": {"origin": "x", "delta": 1e-6},
            "class": {name: {"population": 10, "epsilon": 1.0} for name in ("a", "b")},
        }
    )


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "data.csv"
    path.write_text(TABLE)
    return path


def examples(corpus: Corpus) -> list[list[int]]:
    return [corpus.layout.rows_of(np.array([row])).tolist() for row in range(len(corpus.layout))]


# ------------------------------------------------------------------------------------------ tables


def test_a_table(table: Path) -> None:
    corpus = Corpus.of_csv(table, y="label", unit="who", cls="ward", examples_per_unit=1)
    x, y = corpus.source.fetch(ALL)
    assert x.dtype == torch.float32 and x.tolist() == [[61, 0.5], [62, 1.5], [63, 2.5], [64, 3.5]]
    assert y.dtype == torch.int64 and y.tolist() == [1, 0, 1, 0]
    assert examples(corpus) == [[0, 2], [1], [3]] and corpus.examples_per_unit == 1
    assert corpus.names == ("a", "b") and corpus.members("a").tolist() == [0]
    corpus.withdraw("cleo")


def test_columns_chosen_and_ordered(table: Path) -> None:
    corpus = Corpus.of_csv(table, x=["dose", "age"], y=["label", "age"], subject="who", unit=[0, 1, 0, 2])
    x, y = corpus.source.fetch(ALL[:1])
    assert x.tolist() == [[0.5, 61]] and y.tolist() == [[1, 61]]
    assert Corpus.of_csv(table, x="age").source.fetch(ALL[:1])[0].shape == (1, 1)
    doubled = Corpus.of_csv(table, x=["dose"], dtype=torch.float64).source.fetch(ALL)[0]
    assert doubled.dtype == torch.float64
    assert Corpus.of_csv(table, x=["dose"], ids=["p", "q", "r", "s"]).members("data").tolist() == [0, 1, 2, 3]


def test_a_class_of_the_policy_is_the_class_of_all(table: Path, tmp_path: Path) -> None:
    corpus = Corpus.of_csv(table, x=["age"], cls="b", policy=policy())
    assert corpus.names == ("b",) and corpus.origin == "x"
    np.savez(tmp_path / "d.npz", x=np.zeros(2))
    assert Corpus.of_npz(tmp_path / "d.npz", y=None, cls="a", policy=policy()).names == ("a",)


def test_odd_but_right_tables(tmp_path: Path) -> None:
    path = tmp_path / "odd.csv"
    path.write_bytes("\ufeffa; b, c ;y\n".encode() + b"\n1;2;3.5\r\n -1e3 ;1e30;2\n")
    x, y = Corpus.of_csv(path, y="y", delimiter=";").source.fetch(np.arange(2))
    assert x.tolist() == [[1, 2], [-1000, np.float32(1e30)]]
    assert y.dtype == torch.float32 and y.tolist() == [3.5, 2]


def test_labels_are_whole_only_if_all_are(tmp_path: Path) -> None:
    """Also when the first fraction comes after the first few thousand lines, which are read together."""
    path = tmp_path / "long.csv"
    lines = [f"{i},{i % 3}" for i in range(5000)]
    path.write_text("a,y\n" + "\n".join(lines) + "\n")
    assert Corpus.of_csv(path, y="y").source.fetch(ALL)[1].dtype == torch.int64
    path.write_text("a,y\n" + "\n".join([*lines, "1,0.5"]) + "\n")
    x, y = Corpus.of_csv(path, y="y").source.fetch(np.arange(5001))
    assert y.dtype == torch.float32 and y[-1] == 0.5 and y[4].item() == 1.0
    assert x[:, 0].tolist() == [*range(5000), 1]


@given(
    st.lists(
        st.lists(st.floats(allow_nan=False, allow_infinity=False, width=64), min_size=2, max_size=2),
        min_size=1,
        max_size=20,
    )
)
def test_numbers_are_read_exactly(tmp_path_factory: pytest.TempPathFactory, values: list[list[float]]) -> None:
    path = tmp_path_factory.mktemp("numbers") / "t.csv"
    path.write_text("a,b\n" + "".join(f"{a!r},{b!r}\n" for a, b in values))
    assert read_table(path, dtype=np.float64).x.tolist() == values


def test_a_missing_label_is_never_filled(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a,y\n1,0\n1,\n", encoding="utf-8")
    with raises_code("corpus.value-missing") as refused:
        Corpus.of_csv(path, y="y", nan="zero")
    assert "nan" not in refused.value.remedy


TABLES: list[tuple[str, dict[str, Any], str]] = [
    ("a,b\n1,2\n3,hot\n", {}, "corpus.value-not-a-number"),
    ("a,y\n1,sick\n", {"y": "y"}, "corpus.value-not-a-number"),
    ("a,b\n1,2\n3,\n", {}, "corpus.value-missing"),
    ("a,b\nNA,2\n", {}, "corpus.value-missing"),
    ("a,b\n1,inf\n", {}, "corpus.value-missing"),
    ("a,b\n1,2\n1,-NaN\n", {}, "corpus.value-missing"),
    ("a,y\n1,0\n1,\n", {"y": "y"}, "corpus.value-missing"),
    ("a,who\n1,x\n1,  \n", {"unit": "who"}, "corpus.value-missing"),
    ("a,b\n1,2\n1\n", {}, "corpus.csv-line-width"),
    ("a,b\n1,2,3\n", {}, "corpus.csv-line-width"),
    ("1,2\n3,4\n", {}, "corpus.csv-without-header"),
    ("a;b\n1;2\n", {}, "corpus.csv-wrong-delimiter"),
    ("a,a\n1,2\n", {}, "corpus.column-repeated"),
    ("", {}, "corpus.file-empty"),
    ("a,b\n", {}, "corpus.no-examples"),
    ("a,b\n1,2\n", {"x": ["c"]}, "corpus.column-unknown"),
    ("a,b\n1,2\n", {"y": "c"}, "corpus.column-unknown"),
    ("a,b\n1,2\n", {"cls": "clinical"}, "corpus.column-unknown"),
    ("y\n1\n", {"y": "y"}, "corpus.no-inputs"),
    ('a,b\n1,"2\n', {}, "corpus.csv-malformed"),
]


@pytest.mark.parametrize(("text", "given_", "code"), TABLES)
def test_tables_refused(tmp_path: Path, text: str, given_: dict[str, Any], code: str) -> None:
    path = tmp_path / "data.csv"
    path.write_text(text)
    with raises_code(code) as refusal:
        Corpus.of_csv(path, **given_)
    assert refusal.value.remedy and not re.search("hot|sick", str(refusal.value))


def test_files_that_are_not_there_or_not_text(tmp_path: Path) -> None:
    with raises_code("corpus.file-unreadable"):
        Corpus.of_csv(tmp_path / "none.csv")
    (tmp_path / "latin.csv").write_bytes("größe\n1\n".encode("latin-1"))
    with raises_code("corpus.csv-not-utf8"):
        Corpus.of_csv(tmp_path / "latin.csv")


# ------------------------------------------------------------------------------------------ archives


def test_an_archive(tmp_path: Path) -> None:
    path = tmp_path / "d.npz"
    np.savez(path, x=np.arange(8.0).reshape(4, 2), y=np.arange(4), who=["p", "q", "p", "q"], ward=list("abab"))
    corpus = Corpus.of_npz(path, unit="who", cls="ward")
    x, y = corpus.source.fetch(ALL)
    assert x.tolist() == np.arange(8.0).reshape(4, 2).tolist() and y.tolist() == [0, 1, 2, 3]
    assert examples(corpus) == [[0, 2], [1, 3]] and corpus.names == ("a", "b")
    assert Corpus.of_npz(path, x="y", y=None, unit=[1, 1, 2, 2]).source.fetch(ALL)[1] is None


def test_archives_refused(tmp_path: Path) -> None:
    path = tmp_path / "d.npz"
    np.savez(path, x=np.zeros(3), notes=np.array([{}, {}], dtype=object))
    with raises_code("corpus.array-missing"):
        Corpus.of_npz(path)
    with raises_code("corpus.array-of-objects"):
        Corpus.of_npz(path, x="notes", y=None)
    with raises_code("corpus.file-missing"):
        Corpus.of_npz(tmp_path / "other.npz")
    (tmp_path / "torn.npz").write_bytes(path.read_bytes()[:100])
    with raises_code("corpus.npz-unreadable"):
        Corpus.of_npz(tmp_path / "torn.npz")
    spoiled = bytearray(path.read_bytes())
    spoiled[50:60] = b"\xff" * 10
    (tmp_path / "spoiled.npz").write_bytes(bytes(spoiled))
    with raises_code("corpus.npz-unreadable"):
        Corpus.of_npz(tmp_path / "spoiled.npz", y=None)
    np.save(tmp_path / "one.npy", np.zeros(3))
    with raises_code("corpus.npz-unreadable"):
        Corpus.of_npz(tmp_path / "one.npy")


# ------------------------------------------------------------------------------------------ folders


def payload(root: Path, name: str, **arrays: Any) -> None:
    (root / name).mkdir()
    np.savez(root / name / "payload.npz", **arrays)


def text_payload(root: Path, name: str, text: str) -> None:
    (root / name).mkdir()
    (root / name / "payload.csv").write_text(text)


def test_a_folder(tmp_path: Path) -> None:
    payload(tmp_path, "zoe", x=np.full((2, 2, 3), 9.0))
    payload(tmp_path, "ann", x=np.arange(18.0).reshape(3, 2, 3))
    text_payload(tmp_path, "mia", "1,2,3\n4,5,6\n")
    (tmp_path / ".cache").mkdir()
    (tmp_path / "contributions.csv").write_text("id,class,subject,y\nzoe,b,s1,2\nmia,b,s2,0\nann,a,s3,1\n")
    corpus = Corpus.of_folder(tmp_path)
    assert examples(corpus) == [[0, 1, 2], [3], [4, 5]] and list(corpus._index.ids) == ["ann", "mia", "zoe"]
    assert corpus.names == ("a", "b") and corpus.members("b").tolist() == [1, 2]
    assert corpus._index.subjects is not None and list(corpus._index.subjects) == ["s3", "s2", "s1"]
    x, y = corpus.source.fetch(np.array([5, 1, 3, 0]))
    assert x.shape == (4, 2, 3) and x.dtype == torch.float32
    assert x[0].unique().tolist() == [9.0] and x[1].flatten().tolist() == list(range(6, 12))
    assert x[2].tolist() == [[1, 2, 3], [4, 5, 6]] and x[3].flatten().tolist() == list(range(6))
    assert y.dtype == torch.int64 and y.tolist() == [2, 1, 0, 1]
    x, y = corpus.source.fetch(np.array([], dtype=np.int64))
    assert x.shape == (0, 2, 3) and x.dtype == torch.float32 and y.shape == (0,) and y.dtype == torch.int64


def test_a_folder_without_a_list(tmp_path: Path) -> None:
    payload(tmp_path, "q", x=np.zeros((2, 3), np.uint8), y=np.array([5, 6], np.int16))
    payload(tmp_path, "p", x=np.ones((1, 3), np.uint8), y=np.array([4], np.int16))
    corpus = Corpus.of_folder(tmp_path, cls="a", examples_per_unit=1, version="1")
    x, y = corpus.source.fetch(np.arange(3))
    assert x.dtype == torch.uint8 and x[:, 0].tolist() == [1, 0, 0] and y.tolist() == [4, 5, 6]
    assert corpus.names == ("a",) and y.dtype == torch.int64
    assert Corpus.of_folder(tmp_path, dtype=torch.float32).source.fetch(np.arange(1))[0].dtype == torch.float32


def test_digest_of_a_folder(tmp_path: Path) -> None:
    payload(tmp_path, "p", x=np.zeros((1, 3)))
    payload(tmp_path, "q", x=np.zeros((1, 3)))
    before = Corpus.of_folder(tmp_path).digest(b"k")
    assert Corpus.of_folder(tmp_path).digest(b"k") == before != Corpus.of_folder(tmp_path).digest(b"l")
    (tmp_path / "contributions.csv").write_text("id,y\np,0\nq,1\n")
    labelled = Corpus.of_folder(tmp_path).digest(b"k")
    np.savez(tmp_path / "q" / "payload.npz", x=np.array([[0, 0, 1e-9]]))
    changed = Corpus.of_folder(tmp_path).digest(b"k")
    (tmp_path / "q").rename(tmp_path / "r")
    (tmp_path / "contributions.csv").write_text("id,y\np,0\nr,1\n")
    assert len({before, labelled, changed, Corpus.of_folder(tmp_path).digest(b"k")}) == 4


def test_a_payload_that_changes_under_a_run_is_not_named(tmp_path: Path) -> None:
    payload(tmp_path, "secret-one", x=np.zeros((2, 3)))
    payload(tmp_path, "secret-two", x=np.zeros((2, 3)))
    corpus = Corpus.of_folder(tmp_path)
    for spoil in (
        lambda path: np.savez(path, x=np.zeros((1, 3))),
        lambda path: np.savez(path, x=np.zeros((5, 3))),
        lambda path: np.savez(path, x=np.zeros((2, 4))),
        lambda path: path.write_bytes(b"PK"),
        lambda path: path.unlink(),
    ):
        spoil(tmp_path / "secret-two" / "payload.npz")
        assert corpus.source.fetch(np.array([0, 1]))[0].shape == (2, 3)
        with raises_code("corpus.payload-changed") as refusal:
            corpus.source.fetch(np.array([3]))
        assert "secret" not in str(refusal.value) and refusal.value.__suppress_context__


def torn(root: Path) -> None:
    payload(root, "p", x=np.zeros(100))
    path = root / "p" / "payload.npz"
    path.write_bytes(path.read_bytes()[:50])


FOLDERS: dict[str, list[Callable[[Path], Any]]] = {  # by code
    "corpus.folder-missing": [lambda root: root.rmdir()],
    "corpus.no-contributions": [lambda root: None],
    "corpus.payload-missing": [
        lambda root: (root / "p").mkdir(),
        lambda root: (payload(root, "p", x=np.zeros((1, 2))), (root / "p" / "payload.csv").write_text("1")),
    ],
    "corpus.array-missing": [lambda root: payload(root, "p", y=np.zeros(2))],
    "corpus.array-of-objects": [lambda root: payload(root, "p", x=np.array([{}], object))],
    "corpus.array-without-examples-axis": [lambda root: payload(root, "p", x=np.float32(1))],
    "corpus.no-examples": [
        lambda root: payload(root, "p", x=np.zeros((0, 2))),
        lambda root: text_payload(root, "p", "a,b\n"),
    ],
    "corpus.inputs-are-text": [lambda root: payload(root, "p", x=np.array(["a"]))],
    "corpus.lengths-differ": [lambda root: payload(root, "p", x=np.zeros((2, 2)), y=np.zeros(1))],
    "corpus.formats-differ": [
        lambda root: (payload(root, "p", x=np.zeros((2, 2))), payload(root, "q", x=np.zeros((2, 3)))),
        lambda root: (payload(root, "p", x=np.zeros((2, 2))), payload(root, "q", x=np.zeros((2, 2), np.uint8))),
        lambda root: (payload(root, "p", x=np.zeros((2, 2))), payload(root, "q", x=np.zeros((2, 2)), y=np.zeros(2))),
        lambda root: (text_payload(root, "p", "a,b\n1,2\n"), text_payload(root, "q", "b,a\n1,2\n")),
        lambda root: (
            payload(root, "o", x=np.zeros((1, 1, 2))),
            text_payload(root, "p", "a,b\n1,2\n"),
            text_payload(root, "q", "b,a\n1,2\n"),
        ),
    ],
    "corpus.value-not-a-number": [lambda root: text_payload(root, "p", "a,b\n1,x\n")],
    "corpus.file-empty": [lambda root: text_payload(root, "p", "")],
    "corpus.npz-unreadable": [torn],
}


@pytest.mark.parametrize(("code", "make"), [(code, each) for code, every in FOLDERS.items() for each in every])
def test_folders_refused(tmp_path: Path, code: str, make: Callable[[Path], Any]) -> None:
    root = tmp_path / "root"
    root.mkdir()
    make(root)
    with raises_code(code) as refusal:
        Corpus.of_folder(root)
    assert refusal.value.remedy


@pytest.mark.parametrize(
    ("listing", "given_", "problem"),
    [
        ("id\np\n", {}, "corpus.folder-not-listed"),
        ("id\np\nq\nr\n", {}, "corpus.listed-without-folder"),
        ("id\np\nq\np\n", {}, "corpus.id-repeated"),
        ("name\np\nq\n", {}, "corpus.listing-columns"),
        ("class\na\nb\n", {}, "corpus.listing-columns"),
        ("id,clas\np,a\nq,a\n", {}, "corpus.listing-columns"),
        ("id,class\np,a\nq,\n", {}, "corpus.value-missing"),
        ("id\n", {}, "corpus.no-contributions"),
        ("id,class\np,a\nq,a\n", {"cls": "b"}, "corpus.column-given-twice"),
        ("id,subject\np,s\nq,t\n", {"subject": ["u", "v"]}, "corpus.column-given-twice"),
        ("id,subject\np,s\nq,s\n", {}, "corpus.subject-repeated"),
        ("id,y\np,yes\nq,no\n", {}, "corpus.value-not-a-number"),
        ("id,y\np,1\nq,\n", {}, "corpus.value-missing"),
    ],
)
def test_lists_refused(tmp_path: Path, listing: str, given_: dict[str, Any], problem: str) -> None:
    for name in ("p", "q"):
        payload(tmp_path, name, x=np.zeros((1, 2)))
    (tmp_path / "contributions.csv").write_text(listing)
    with raises_code(problem) as refusal:
        Corpus.of_folder(tmp_path, **given_)
    assert refusal.value.remedy


def test_labels_in_two_places_are_refused(tmp_path: Path) -> None:
    payload(tmp_path, "p", x=np.zeros((1, 2)), y=np.zeros(1))
    (tmp_path / "contributions.csv").write_text("id,y\np,1\n")
    with raises_code("corpus.column-given-twice"):
        Corpus.of_folder(tmp_path)
