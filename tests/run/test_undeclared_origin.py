"""Several runs on the same people: their joint cost is still counted if a byte of the data has changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.pld.pld_privacy_accountant import PLDAccountant
from numpy.typing import NDArray
from open_charges import has_begun
from refusals import raises_code
from torch import nn
from typer.testing import CliRunner

import lamina
from lamina.cli.app import app
from lamina.codec import schema_of
from lamina.ledger.governance_records import Header
from lamina.ledger.reader import LedgerReader
from lamina.plan.policy import Policy
from lamina.release.certificate import certify
from lamina.release.risk_statements import texts
from lamina.run.publisher import Outcome

PEOPLE, BATCH, STEPS, EPSILON, DELTA = 200, 20, 10, 1.0, 1e-5
pytestmark = pytest.mark.filterwarnings("ignore::lamina.run.private.PlannedBefore")


def data() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    draw = np.random.default_rng(0)
    return draw.normal(size=(PEOPLE, 3)).astype(np.float32), draw.integers(0, 2, PEOPLE)


def changed_value() -> tuple[Any, Any]:
    x, y = data()
    x[17, 1] += 1e-6
    return x, y


def added_row() -> tuple[Any, Any]:
    x, y = data()
    return np.concatenate([x, x[:1] + 1]), np.append(y, 0)


def permuted() -> tuple[Any, Any]:
    x, y = data()
    order = np.random.default_rng(1).permutation(PEOPLE)
    return x[order], y[order]


def removed_row() -> tuple[Any, Any]:
    x, y = data()
    return x[1:], y[1:]


CHANGES = {"value": changed_value, "row added": added_row, "rows permuted": permuted, "row removed": removed_row}


def train(folder: Path, pair: Any = None, **options: Any) -> Outcome:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    given = {"delta": DELTA, "epsilon": EPSILON, **options}
    ledger = {name: given.pop(name) for name in ("ledger",) if name in given}
    engine, corpus, plan = lamina.make_private(
        model, data() if pair is None else pair, batch=BATCH, steps=STEPS, population=2 * PEOPLE, clip_norm=1.0, **given
    )
    loss = nn.CrossEntropyLoss(reduction="none")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = lamina.Trainer(model, optimizer, loss, corpus, plan, engine=engine, folder=folder, progress=False, **ledger)
    return run.fit()


def ledgers(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.ledger.db"))


def spend_of(folder: Path) -> dict[str, Any]:
    said = CliRunner().invoke(app, ["spend", str(folder), "--json"])
    assert said.exit_code == 0, said.output
    found: dict[str, Any] = json.loads(said.stdout)
    return found


def total_of(runs: int, sigma: float) -> float:
    """Return ε of several runs together, computed by dp-accounting alone."""
    step = dp_accounting.PoissonSampledDpEvent(BATCH / (2 * PEOPLE), dp_accounting.GaussianDpEvent(sigma))
    accountant = PLDAccountant(value_discretization_interval=1e-4)
    accountant.compose(step, runs * STEPS)
    return float(accountant.get_epsilon(DELTA))


def test_the_first_run_needs_no_origin_and_the_same_data_goes_on_in_its_ledger(tmp_path: Path) -> None:
    first, second = train(tmp_path / "a"), train(tmp_path / "b")
    assert len(ledgers(tmp_path)) == 1
    assert second.total["data"] > first.total["data"]


@pytest.mark.parametrize("change", CHANGES)
def test_a_second_ledger_of_data_without_an_origin_is_refused_with_the_remedy(tmp_path: Path, change: str) -> None:
    train(tmp_path / "a")
    (ledger,) = ledgers(tmp_path)
    with LedgerReader.read_only(ledger) as view:
        origin = view.origin
    with raises_code("train.origin-not-declared") as refused:
        train(tmp_path / "b", CHANGES[change]())
    told = str(refused.value)
    for word in (str(ledger), origin, "per example", "δ = 1e-05", "1 run", "origin=", "other_people="):
        assert word in told
    assert ledgers(tmp_path) == [ledger] and not has_begun(tmp_path / "b")
    outcome = train(tmp_path / "b", CHANGES[change](), origin=origin)  # the remedy, as it is printed
    assert ledgers(tmp_path) == [ledger] and outcome.total["data"] > outcome.epsilon["data"]


def test_five_runs_under_one_origin_cost_what_an_accountant_says(tmp_path: Path) -> None:
    pairs = [data(), *(make() for make in CHANGES.values())]
    outcomes = [
        train(tmp_path / f"run{i}", pair, origin="ward", noise_multiplier=1.0, epsilon=None)
        for i, pair in enumerate(pairs)
    ]
    (ledger,) = ledgers(tmp_path)
    for runs, outcome in enumerate(outcomes, start=1):
        assert outcome.total["data"] == pytest.approx(total_of(runs, 1.0), rel=2e-3)
    with LedgerReader.read_only(ledger) as view:
        certificate = certify(tmp_path / "run4", view)
    assert certificate.classes["data"]["epsilon_total"] == pytest.approx(total_of(5, 1.0), rel=2e-3)
    assert certificate.content["ledgers_beside"] == [] and certificate.content["other_people"] is None
    assert spend_of(tmp_path)["beside_each_other"] == []


def test_another_folder_of_the_same_tree_does_not_hide_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train(Path("first/a"))
    for place in ("second/a", "first/deeper/a"):
        with raises_code("train.origin-not-declared"):
            train(Path(place), changed_value())
    with raises_code("train.origin-not-declared"):  # naming a place says nothing about people
        train(Path("third/a"), changed_value(), ledger="third/own.ledger.db")
    (tmp_path / "first" / ledgers(tmp_path / "first")[0].name).rename(tmp_path / "kept.db")
    (tmp_path / "first" / "a" / "ledger.db").unlink()
    (tmp_path / "first" / "a" / "ledger.db").symlink_to(tmp_path / "kept.db")
    with raises_code("train.origin-not-declared"):
        train(Path("first/b"), changed_value())


REASON = "ward 3, opened after the first run; nobody was in both"


def test_other_people_are_the_owners_statement(tmp_path: Path) -> None:
    train(tmp_path / "a")
    (first,) = ledgers(tmp_path)
    outcome = train(tmp_path / "b", added_row(), other_people=REASON)
    (second,) = set(ledgers(tmp_path)) - {first}
    with LedgerReader.read_only(second) as view:
        assert view.header.other_people == REASON
        certificate = certify(tmp_path / "b", view)
        listed = certificate.content["ledgers_beside"]
        assert [each["ledger"] for each in listed] == [first.name] and listed[0]["units"] == {"data": "example"}
        assert listed[0]["epsilon"]["data"] == pytest.approx(total_of(1, sigma_of(view)), rel=2e-3)
    assert certificate.content["other_people"] == REASON
    assert any(REASON in each and "owner states" in each for each in texts(certificate.content, "assumption"))
    assert any("1 other ledger" in each for each in texts(certificate.content, "not covered"))
    assert any(first.name in note and "loses the sum" in note for note in outcome.notes)
    stated = {each["ledger"]: each["other_people"] for each in spend_of(tmp_path)["beside_each_other"]}
    assert stated == {first.name: None, second.name: REASON}
    page = CliRunner().invoke(app, ["spend", str(second)]).stdout
    assert "2 ledgers lie beside each other" in page and first.name in page and REASON in page
    train(tmp_path / "c", added_row(), other_people=REASON)  # again, in the same words: it goes on
    train(tmp_path / "d", added_row())
    assert len(ledgers(tmp_path)) == 2
    with raises_code("ledger.other-people-too-late"):
        train(tmp_path / "e", other_people=REASON)
    with raises_code("train.origin-not-declared"):  # two ledgers lie there now, and the statement was about one
        train(tmp_path / "e", permuted())


def sigma_of(view: LedgerReader) -> float:
    from lamina.ledger.records import Epoch

    leaf = next(iter(view.of_kind(Epoch)))
    assert isinstance(leaf.record, Epoch)
    return leaf.record.accounts[0].charges[0].sigma


@pytest.mark.parametrize(
    ("options", "code"),
    [({"delta": 1e-6}, "ledger.delta-differs"), ({"unit": np.arange(PEOPLE) // 2}, "ledger.unit-differs")],
)
def test_another_unit_or_delta_under_one_origin_is_refused(tmp_path: Path, options: Any, code: str) -> None:
    train(tmp_path / "a", origin="ward")
    with raises_code(code) as refused:
        train(tmp_path / "b", origin="ward", **options)
    assert "ward.ledger.db" in str(refused.value)
    assert not has_begun(tmp_path / "b")


def test_another_declared_origin_is_listed_and_not_refused(tmp_path: Path) -> None:
    train(tmp_path / "a", origin="ward-1")
    outcome = train(tmp_path / "b", origin="ward-2")
    assert any("ward-1.ledger.db" in note for note in outcome.notes)


@pytest.mark.parametrize("reason", ["", "é", "a\nb", "x" * 256])
def test_a_reason_is_a_line_of_text(tmp_path: Path, reason: str) -> None:
    with raises_code("ledger.other-people-not-a-reason"):
        train(tmp_path / "a", other_people=reason)


def test_a_corpus_states_them_itself() -> None:
    corpus = lamina.Corpus(*data(), origin="ward")
    for name in ("origin", "other_people"):
        with raises_code("train.unit-beside-corpus"):
            lamina.make_private(nn.Linear(3, 2), corpus, epsilon=1.0, batch=4, steps=1, **{name: "x"})
    about = {"origin": "a", "delta": 1e-5, "other_people": "another town"}
    policy = Policy.from_dict({"corpus": about, "class": {"data": {"population": 300, "epsilon": 1.0}}})
    assert lamina.Corpus(*data(), policy=policy).other_people == "another town"
    with raises_code("corpus.other-people-beside-policy"):
        lamina.Corpus(*data(), policy=policy, other_people="x")


def test_a_header_without_the_statement_has_the_bytes_that_it_had(tmp_path: Path) -> None:
    train(tmp_path / "a")
    with LedgerReader.read_only(ledgers(tmp_path)[0]) as view:
        assert 19 not in schema_of(Header).to_cbor(view.header)


def test_plans_under_one_origin_are_added_up_before_training() -> None:
    lamina.make_private(nn.Linear(3, 2), data(), epsilon=1.0, batch=20, steps=5, origin="added-up")
    with pytest.warns(lamina.run.private.PlannedBefore, match="2 times"):
        lamina.make_private(nn.Linear(3, 2), changed_value(), epsilon=1.0, batch=20, steps=5, origin="added-up")
