"""`lamina spend`: what was lost over all runs, for people and for machines, and giving back what is reserved."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lamina.account import Event, accountant
from lamina.cli import main
from lamina.train.book import SpendBook
from lamina.train.book.charge import Charge

FIRST, SECOND = "3f9c21aa" * 4, "3f9c0000" * 4
CLINICAL = Charge(cls="clinical", sigma=1.5, q=0.01, steps=1_000, delta=1e-5, accountant="pld")
SENSITIVE = Charge(cls="sensitive", sigma=3.5, q=0.01, steps=1_000, delta=1e-5, accountant="rdp")


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["spend", *map(str, arguments)])
    return int(caught.value.code or 0)


def epsilon(charge: Charge, steps: int) -> float:
    return accountant(charge.accountant).epsilon(
        [Event(sigma=charge.sigma, q=charge.q, steps=steps)], charge.delta
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    book = SpendBook(tmp_path / "spend.db")
    both = [CLINICAL, SENSITIVE]
    book.reserve(FIRST, origin="cardiology", charges=both, bounds={}, label="first [red]")
    for generation in range(2):
        given: dict[str, Any] = {"segment": 0, "generation": generation, "nonce": b"n", "bounds": {}}
        book.charge(FIRST, origin="cardiology", charges=[each.times(100) for each in both], **given)
    book.reserve(SECOND, origin="registry", charges=[CLINICAL], bounds={}, label="second")
    return book.path


def tree(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    printed = capsys.readouterr()
    assert printed.err == ""
    found = json.loads(printed.out)
    assert isinstance(found, dict)
    return found


def test_the_keys_of_the_contract(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(path, "--json") == 0
    found = tree(capsys)
    assert found.keys() == {"book", "origins"}
    assert found["book"] == str(path)
    clinical, sensitive = (found["origins"]["cardiology"][name] for name in ("clinical", "sensitive"))
    assert (clinical["delta"], clinical["accountant"], sensitive["accountant"]) == (1e-5, "pld", "rdp")
    assert clinical["epsilon"] == epsilon(CLINICAL, 200)
    assert clinical["committed"] == epsilon(CLINICAL, 1_000)
    assert sensitive["epsilon"] == epsilon(SENSITIVE, 200)
    (mine,) = clinical["runs"]
    expected = {
        "run": FIRST,
        "label": "first [red]",
        "steps": 200,
        "redone": 100,
        "reserved": 800,
        "finished": False,
    }
    assert expected.items() <= mine.items()
    waiting = found["origins"]["registry"]["clinical"]
    assert (waiting["epsilon"], waiting["committed"]) == (0.0, epsilon(CLINICAL, 1_000))


def test_people_see_the_same_rounded_up(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = path.read_bytes()
    assert run(path) == 0
    text = capsys.readouterr().out
    for part in ("cardiology", "registry", "clinical", "sensitive", "first [red]", FIRST[:8], "open", "800"):
        assert part in text
    spent, committed = epsilon(CLINICAL, 200), epsilon(CLINICAL, 1_000)
    shown = next(line for line in text.splitlines() if "with what is reserved" in line).split()
    figures = [float(shown[1]), float(shown[3])]
    assert figures == pytest.approx([spent, committed], abs=1.01e-4)
    assert figures[0] >= spent and figures[1] >= committed
    assert path.read_bytes() == before


def test_signed_bounds_stand_below_their_class(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bound = replace(CLINICAL, cls="clinical@c=0.5,z=2.25", sigma=3.0)
    SpendBook(path).reserve(SECOND, origin="cardiology", charges=[CLINICAL, bound], bounds={bound.cls: 5.0})
    SpendBook(path).charge(
        SECOND,
        origin="cardiology",
        segment=0,
        generation=0,
        nonce=b"m",
        charges=[CLINICAL.times(10), bound.times(10)],
        bounds={bound.cls: 5.0},
    )
    assert run(path, "--json", "--origin", "cardiology") == 0
    found = tree(capsys)["origins"]["cardiology"]
    assert set(found) == {"clinical", "sensitive"}
    (name,) = found["clinical"]["bounds"]
    assert name == bound.cls
    row = found["clinical"]["bounds"][name]
    assert row["epsilon"] == epsilon(bound, 10) and row["committed"] == epsilon(bound, 1_000)
    assert [each["steps"] for each in row["runs"]] == [10]
    assert "bounds" not in found["sensitive"]
    assert run(path, "--origin", "cardiology") == 0
    assert "class clinical, signed bound c=0.5,z=2.25" in capsys.readouterr().out


def test_one_corpus_alone(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(path, "--origin", "registry", "--json") == 0
    assert tree(capsys)["origins"].keys() == {"registry"}
    assert run(path, "--origin", "nowhere") == 1
    assert "'cardiology', 'registry'" in capsys.readouterr().err
    before = path.read_bytes()
    assert run(path, "--origin", "nowhere", "--release", FIRST) == 1
    assert path.read_bytes() == before


def test_several_deltas_are_several_lines(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = Charge(cls="clinical", sigma=2.0, q=0.01, steps=5, delta=1e-7, accountant="rdp")
    SpendBook(path).charge(
        SECOND, origin="cardiology", segment=0, generation=0, nonce=b"n", charges=[other], bounds={}
    )
    assert run(path, "--origin", "cardiology", "--json") == 0
    clinical = tree(capsys)["origins"]["cardiology"]["clinical"]
    assert (clinical["delta"], clinical["accountant"]) == (1e-7, "rdp")
    together = [Event(sigma=1.5, q=0.01, steps=200), Event(sigma=2.0, q=0.01, steps=5)]
    assert clinical["epsilon"] == accountant("rdp").epsilon(together, 1e-7)
    (also,) = clinical["also"]
    assert (also["delta"], also["accountant"]) == (1e-5, "pld")
    assert also["epsilon"] == accountant("pld").epsilon(together, 1e-5)
    assert run(path, "--origin", "cardiology") == 0
    text = capsys.readouterr().out
    assert "δ = 1e-07, rdp" in text and "δ = 1e-05, pld" in text
    assert text.count(f"{FIRST[:8]} ") == 2  # once per class, not per δ


@pytest.mark.parametrize("name", [FIRST, FIRST[:8], "first [red]"])
def test_a_reservation_is_given_back_and_charges_stay(
    path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(path, "--release", name) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"{FIRST[:8]} holds no reservation any more" in text
    assert "stays charged" in text
    assert run(path, "--json", "--release", FIRST) == 0  # again: nothing left to give back
    found = tree(capsys)
    clinical = found["origins"]["cardiology"]["clinical"]
    assert found["released"] == FIRST
    assert clinical["epsilon"] == clinical["committed"] == epsilon(CLINICAL, 200)
    assert clinical["runs"][0]["finished"] is True
    assert found["origins"]["registry"]["clinical"]["committed"] == epsilon(CLINICAL, 1_000)


@pytest.mark.parametrize(
    ("name", "words"), [("nobody", "knows no run"), ("", "knows no run"), ("3f9c", "2 runs")]
)
def test_a_run_that_is_not_known_or_not_clear_is_refused(
    path: Path, name: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = path.read_bytes()
    assert run(path, "--release", name) == 1
    printed = capsys.readouterr()
    assert words in printed.err.replace("\n", " ")
    assert printed.out == ""
    assert path.read_bytes() == before


def test_a_book_that_is_not_there_is_refused_and_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run() == 1
    assert "runs/spend.db" in capsys.readouterr().err.replace("\n", "")
    assert list(tmp_path.iterdir()) == []


def test_a_book_without_charges_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    SpendBook(tmp_path / "spend.db")
    assert run(tmp_path / "spend.db") == 0
    assert "Nothing has been booked" in capsys.readouterr().out
    assert run(tmp_path / "spend.db", "--json") == 0
    assert tree(capsys)["origins"] == {}


def test_names_reach_the_terminal_as_text_and_infinity_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    book = SpendBook(tmp_path / "spend.db")
    charge = Charge(cls="[bold]x\x1b[31m", sigma=1e-300, q=1.0, steps=1, delta=1e-5, accountant="pld")
    book.reserve(FIRST, origin="[/]\n", charges=[charge], bounds={}, label="[link=x]")
    book.charge(FIRST, origin="[/]\n", segment=0, generation=0, nonce=b"n", charges=[charge], bounds={})
    assert run(book.path) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "[bold]x\\x1b[31m" in text and "corpus [/]\\n" in text and "[link=x]" in text
    assert "∞" in text
    assert run(book.path, "--json") == 0
    (figures,) = tree(capsys)["origins"]["[/]\n"].values()
    assert figures["epsilon"] is None


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in ("spent for good", "--release", "priced jointly", "rounded up"):
        assert part in text
