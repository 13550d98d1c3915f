"""`lamina spend`: what was lost over all runs, for people and for machines, and giving back what is reserved."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from asking import Call, Result, answer, refused, succeeded
from torch import nn

import lamina
from lamina.account.accountants import find_accountant
from lamina.account.charges import Charge, stored_charge
from lamina.account.gaussian_rdp import epsilon_of_noise_multiplier
from lamina.account.schedule import Event
from lamina.ledger.attempts import Attempt
from lamina.ledger.corpus_terms import CorpusTerms, open_or_create
from lamina.ledger.spend_ledger import SpendLedger
from lamina.ledger.verify.verifier import verify
from lamina.plan.charges import plan_charges
from lamina.plan.layer_stack import LayerStack
from lamina.plan.policy import Policy

FIRST, SECOND = "3f9c21aa" * 4, "3f9c0000" * 4
CLINICAL = stored_charge(cls="clinical", sigma=1.5, q=0.01, steps=1_000, delta=1e-5, accountant="pld")
SENSITIVE = stored_charge(cls="sensitive", sigma=3.5, q=0.01, steps=1_000, delta=1e-5, accountant="pld")
POLICY = """
[corpus]
origin = "{origin}"
delta = 1e-5
[class.clinical]
population = 10_000
[class.sensitive]
population = 10_000
"""


@pytest.fixture
def run(lamina: Call) -> Call:
    return lambda *words: lamina("spend", *map(str, words))


def epsilon(charge: Charge, steps: int) -> float:
    return find_accountant(charge.accountant).epsilon([replace(charge.event, steps=steps)], charge.delta)


def made(path: Path, origin: str, policy: str = POLICY) -> SpendLedger:
    contract = CorpusTerms.of_policy(Policy.parse(policy.format(origin=origin)))
    return SpendLedger(open_or_create(path, contract))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two ledgers, side by side, as runs on two corpora leave them."""
    runs, both = tmp_path / "runs", [CLINICAL, SENSITIVE]
    runs.mkdir()
    book = made(runs / "cardiology.ledger.db", "cardiology")
    book.reserve(FIRST, charges=both, bounds={}, label="first [red]")
    for generation in range(2):
        given: dict[str, Any] = {"segment": 0, "generation": generation, "nonce": b"n" * 16, "bounds": {}}
        book.charge(FIRST, charges=[each.times(100) for each in both], **given)
    book.ledger.close()
    book = made(runs / "registry.ledger.db", "registry")
    book.reserve(SECOND, charges=[CLINICAL], bounds={}, label="second")
    book.ledger.close()
    return runs


@pytest.fixture
def path(folder: Path) -> Path:
    return folder / "cardiology.ledger.db"


def tree(result: Result) -> dict[str, Any]:
    assert result[2] == ""
    return answer(result)


def contents(folder: Path) -> dict[str, bytes]:
    """What the ledgers hold; a reader may leave an empty log and an index of it beside them."""
    return {
        path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".db-shm" and path.stat().st_size
    }


def test_the_keys_of_the_contract(folder: Path, run: Call) -> None:
    found = tree(run(folder, "--json"))
    assert found.keys() == {"ledger", "origins", "beside_each_other"}
    assert [each["ledger"] for each in found["beside_each_other"]] == ["cardiology.ledger.db", "registry.ledger.db"]
    assert found["ledger"] == str(folder)
    clinical, sensitive = (found["origins"]["cardiology"][name] for name in ("clinical", "sensitive"))
    assert (clinical["delta"], clinical["accountant"], sensitive["accountant"]) == (1e-5, "pld", "pld")
    assert clinical["epsilon"] == epsilon(CLINICAL, 200)
    assert clinical["committed"] == epsilon(CLINICAL, 1_000)
    assert sensitive["epsilon"] == epsilon(SENSITIVE, 200)
    (mine,) = clinical["runs"]
    expected = {"run": FIRST, "label": "first [red]", "steps": 200, "redone": 100, "reserved": 800, "finished": False}
    assert expected.items() <= mine.items()
    waiting = found["origins"]["registry"]["clinical"]
    assert (waiting["epsilon"], waiting["committed"]) == (0.0, epsilon(CLINICAL, 1_000))


def test_a_ledger_a_folder_and_a_link_in_a_run(folder: Path, run: Call) -> None:
    """Whichever is given; the default is the folder `runs`."""
    alone = tree(run(folder / "registry.ledger.db", "--json"))["origins"]
    assert alone.keys() == {"registry"}
    (folder / "second").mkdir()
    (folder / "second" / "ledger.db").symlink_to("../registry.ledger.db")
    for place in (folder / "second", folder / "second" / "ledger.db"):
        assert tree(run(place, "--json"))["origins"] == alone


def test_the_default_is_the_folder_of_runs(folder: Path, monkeypatch: pytest.MonkeyPatch, run: Call) -> None:
    monkeypatch.chdir(folder.parent)
    assert tree(run("--json"))["origins"].keys() == {"cardiology", "registry"}


def test_people_see_the_same_rounded_up(folder: Path, run: Call) -> None:
    before = contents(folder)
    text = succeeded(run(folder))
    for part in ("cardiology", "registry", "clinical", "sensitive", "first [red]", FIRST[:8], "open", "800"):
        assert part in text
    spent, committed = epsilon(CLINICAL, 200), epsilon(CLINICAL, 1_000)
    shown = next(line for line in text.splitlines() if line.startswith("  clinical ")).split()
    figures = [float(shown[1]), float(shown[2])]
    assert shown[3:] == ["no", "bound", "-", "1e-05", "pld"]
    assert figures == pytest.approx([spent, committed], abs=1.01e-4)
    assert figures[0] >= spent and figures[1] >= committed
    assert contents(folder) == before


def test_signed_bounds_stand_below_their_class(path: Path, run: Call) -> None:
    bound = stored_charge(**{**CLINICAL.row(), "cls": "clinical@c=0.5,z=2.25", "sigma": 3.0})
    book = made(path, "cardiology")
    book.reserve(SECOND, charges=[CLINICAL, bound], bounds={str(bound.account): 5.0})
    book.charge(
        SECOND,
        segment=0,
        generation=0,
        nonce=b"m" * 16,
        charges=[CLINICAL.times(10), bound.times(10)],
        bounds={str(bound.account): 5.0},
        scales={str(bound.account): 0.5},
    )
    book.ledger.close()
    found = tree(run(path, "--json"))["origins"]["cardiology"]
    assert set(found) == {"clinical", "sensitive"}
    (name,) = found["clinical"]["bounds"]
    assert name == str(bound.account)
    row = found["clinical"]["bounds"][name]
    assert row["epsilon"] == epsilon(bound, 10) and row["committed"] == epsilon(bound, 1_000)
    assert [each["steps"] for each in row["runs"]] == [10]
    assert "bounds" not in found["sensitive"]
    text = succeeded(run(path))
    assert "\n  clinical@c=0.5,z=2.25 " in text and "runs of clinical@c=0.5,z=2.25\n" in text


BOUNDED = POLICY.replace("[class.sensitive]", "epsilon = 6.0\n[class.sensitive]")


def test_what_remains_of_a_bound(tmp_path: Path, run: Call) -> None:
    """The stricter of what the ledger promises and what the last run was held to; the rest never more than it is."""
    signed = stored_charge(**{**CLINICAL.row(), "cls": "clinical@c=0.5,z=2.25", "sigma": 4.0})
    book = made(tmp_path / "x.ledger.db", "x", BOUNDED)
    book.reserve(FIRST, charges=[CLINICAL, SENSITIVE, signed], bounds={"clinical": 5.0})
    book.ledger.close()
    found = tree(run(tmp_path, "--json"))["origins"]["x"]
    clinical, sensitive = found["clinical"], found["sensitive"]
    assert (clinical["bound"], sensitive["bound"], sensitive["remaining"]) == (5.0, None, None)
    assert Fraction(clinical["remaining"]) <= Fraction(5.0) - Fraction(clinical["committed"])
    assert clinical["remaining"] == pytest.approx(5.0 - clinical["committed"], rel=1e-12)
    row = clinical["bounds"][str(signed.account)]
    assert 0 < row["bound"] < epsilon_of_noise_multiplier(2.25, 1e-5) + 1e-9
    assert row["remaining"] == pytest.approx(row["bound"] - epsilon(signed, 1_000), rel=1e-9)
    lines = {line.split("  ")[1]: line.split() for line in succeeded(run(tmp_path)).splitlines()[2:5]}
    assert [lines["clinical"][3], lines["sensitive"][3:6]] == ["5.0000", ["no", "bound", "-"]]
    assert 0 < 5.0 - epsilon(CLINICAL, 1_000) - float(lines["clinical"][4]) < 1e-4


def test_a_bound_that_no_run_asked_for_is_the_ledgers(tmp_path: Path, run: Call) -> None:
    book = made(tmp_path / "x.ledger.db", "x", BOUNDED)
    book.reserve(FIRST, charges=[CLINICAL], bounds={})
    book.ledger.close()
    clinical = tree(run(tmp_path, "--json"))["origins"]["x"]["clinical"]
    assert clinical["bound"] == pytest.approx(6.0, rel=1e-5)
    assert clinical["remaining"] == pytest.approx(clinical["bound"] - epsilon(CLINICAL, 1_000), rel=1e-9)


def test_a_bound_that_is_passed(tmp_path: Path, run: Call) -> None:
    """What was drawn is charged whatever the bounds say; then nothing remains, and it says so."""
    book = made(tmp_path / "x.ledger.db", "x", BOUNDED)
    much = replace(CLINICAL, event=Event(sigma=0.2, q=1.0, steps=10))
    book.charge(FIRST, segment=0, generation=0, nonce=b"n" * 16, charges=[much], bounds={}, already=True)
    book.ledger.close()
    clinical = tree(run(tmp_path, "--json"))["origins"]["x"]["clinical"]
    assert clinical["committed"] > clinical["bound"] > 5.9
    assert clinical["remaining"] == 0.0
    text = succeeded(run(tmp_path))
    assert " 0.0000  1e-05" in text
    assert "note: clinical is over its bound at δ = 1e-05" in text


def test_the_table_fits_a_narrow_screen(path: Path, run: Call) -> None:
    assert all(len(line) <= 80 for line in succeeded(run(path)).splitlines())


def test_one_corpus_alone(folder: Path, run: Call) -> None:
    assert tree(run(folder, "--origin", "registry", "--json"))["origins"].keys() == {"registry"}
    assert "'cardiology', 'registry'" in run(folder, "--origin", "nowhere")[2]
    before = contents(folder)
    assert run(folder, "--origin", "nowhere", "--release", FIRST)[0] == 1
    assert run(folder, "--origin", "registry", "--release", FIRST)[0] == 1
    assert contents(folder) == before


def test_two_ledgers_of_one_corpus_are_not_added_up(folder: Path, run: Call) -> None:
    made(folder / "second.ledger.db", "cardiology").ledger.close()
    told = run(folder)[2]
    assert "cli.corpus-in-two-ledgers" in told and "second.ledger.db" in told
    assert tree(run(folder, "--origin", "registry", "--json"))["origins"].keys() == {"registry"}


def test_several_deltas_are_several_lines(path: Path, run: Call) -> None:
    other = stored_charge(cls="clinical", sigma=2.0, q=0.01, steps=5, delta=1e-7, accountant="rdp")
    book = made(path, "cardiology")
    book.charge(SECOND, segment=0, generation=0, nonce=b"n" * 16, charges=[other], bounds={})
    book.ledger.close()
    clinical = tree(run(path, "--json"))["origins"]["cardiology"]["clinical"]
    together = [Event(sigma=1.5, q=0.01, steps=200), Event(sigma=2.0, q=0.01, steps=5)]
    lines = {(each["delta"], each["accountant"]): each["epsilon"] for each in (clinical, *clinical["also"])}
    assert lines == {
        (1e-7, "rdp"): find_accountant("rdp").epsilon(together, 1e-7),
        (1e-5, "pld"): find_accountant("pld").epsilon(together, 1e-5),
    }
    text = succeeded(run(path))
    assert "1e-07  rdp\n" in text and "1e-05  pld\n" in text
    assert text.count(f"{FIRST[:8]} ") == 2  # once per class, not per δ


@pytest.mark.parametrize("name", [FIRST, FIRST[:8], "first [red]"])
def test_a_reservation_is_given_back_and_charges_stay(folder: Path, name: str, run: Call) -> None:
    text = " ".join(succeeded(run(folder, "--release", name)).split())
    assert f"{FIRST[:8]} holds no reservation any more" in text
    assert "stays charged" in text
    found = tree(run(folder, "--json", "--release", FIRST))
    clinical = found["origins"]["cardiology"]["clinical"]
    assert found["released"] == FIRST
    assert clinical["epsilon"] == clinical["committed"] == epsilon(CLINICAL, 200)
    assert clinical["runs"][0]["finished"] is True
    assert found["origins"]["registry"]["clinical"]["committed"] == epsilon(CLINICAL, 1_000)


def test_lost_is_said_of_a_run(folder: Path, run: Call) -> None:
    before = contents(folder)
    code, _, told = run(folder, "--lost")
    assert code == 2 and "--release RUN" in " ".join(told.split())
    assert contents(folder) == before


def test_a_lost_run_is_recorded(tmp_path: Path, run: Call) -> None:
    policy = POLICY.format(origin="ward").replace("10_000", "10_000\nepsilon = 4.0")
    stack = LayerStack.from_model(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    plan = lamina.make_plan(stack, Policy.parse(policy), batch=50, steps=10)
    path = tmp_path / "ward.ledger.db"
    with open_or_create(path, CorpusTerms.of_policy(Policy.parse(policy))) as ledger:
        book = SpendLedger(ledger)
        book.reserve(FIRST, charges=plan_charges(plan, 0, 10), bounds={}, label="gone", plan=plan)
        begun = Attempt(first=0, last=5, eligibility=ledger.size)
        key: dict[str, Any] = {"segment": 0, "generation": 0, "nonce": bytes(16), "begun": begun}
        assert book.charge(FIRST, **key, charges=plan_charges(plan, 0, 5), bounds={}, plan=plan.digest())
    assert "What it had begun (1 attempt) is recorded as abandoned." in " ".join(
        succeeded(run(path, "--release", "gone", "--lost")).split()
    )
    assert verify(path).problem is None
    assert tree(run(path, "--release", "gone", "--lost", "--json"))["recorded"] == 0


@pytest.mark.parametrize(("name", "words"), [("nobody", "no run 'nobody'"), ("", "no run ''"), ("3f9c", "2 runs")])
def test_a_run_that_is_not_known_or_not_clear_is_refused(folder: Path, name: str, words: str, run: Call) -> None:
    before = contents(folder)
    code, out, told = run(folder, "--release", name)
    assert (code, out) == (1, "")
    assert words in told.replace("\n", " ")
    assert contents(folder) == before


def test_a_ledger_that_is_not_there_is_refused_and_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Call
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(run(), "cli.ledger-missing")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "runs").mkdir()
    refused(run(), "cli.ledger-missing")


def test_something_else_than_a_ledger_is_refused(tmp_path: Path, run: Call) -> None:
    (tmp_path / "x.ledger.db").write_bytes(b"something else" * 100)
    assert "x.ledger.db" in run(tmp_path)[2]


def test_a_ledger_without_charges_says_so(tmp_path: Path, run: Call) -> None:
    made(tmp_path / "new.ledger.db", "new").ledger.close()
    assert succeeded(run(tmp_path)) == "corpus new\n  nothing is spent or reserved\n"
    assert tree(run(tmp_path, "--json"))["origins"] == {"new": {}}


def test_names_reach_the_terminal_as_text_and_infinity_is_shown(tmp_path: Path, run: Call) -> None:
    book = made(tmp_path / "x.ledger.db", "[/]")
    charge = replace(CLINICAL, event=Event(sigma=1e-300, q=1.0, steps=1))
    book.reserve(FIRST, charges=[charge], bounds={}, label="[link=x]\x1b[31m")
    book.charge(FIRST, segment=0, generation=0, nonce=b"n" * 16, charges=[charge], bounds={})
    book.ledger.close()
    text = succeeded(run(tmp_path))
    assert "\x1b" not in text
    assert "[link=x]\\x1b[31m" in text and "corpus [/]" in text
    assert "∞" in text
    (figures,) = tree(run(tmp_path, "--json"))["origins"]["[/]"].values()
    assert figures["epsilon"] is None


def test_a_password_is_not_printed(run: Call) -> None:
    code, out, told = run("postgresql://me:secret@127.0.0.1:1/nowhere")
    assert code == 1 and "secret" not in out + told


def test_torch_is_not_needed(folder: Path) -> None:
    script = (
        "import sys; from lamina.cli import main\ntry: main(sys.argv[1:])\nfinally: assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", script, "spend", str(folder), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["origins"].keys() == {"cardiology", "registry"}


def test_help_teaches(run: Call) -> None:
    text = " ".join(succeeded(run("--help")).split())
    for part in (
        "spent for good",
        "--release",
        "computed jointly",
        "rounded down",
        "Remains: the bound minus the committed ε",
        "lamina ledger verify",
    ):
        assert part in text
