"""A run that goes on with the next ledger key, in both stores, and what the replaced key still may."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import problem
import pytest
from keyless import edit
from making import GOVERNING
from open_charges import DELETE_OPEN, open_charges, sign_open_rows
from refusals import raises_code
from stopping import LOOSE, During, Killed, die

from lamina.ledger.governance_records import Key, KeyChange, KeyEvent, KeyEvents, Role
from lamina.ledger.verify.verifier import verify
from lamina.ledger.writer import Ledger
from lamina.sign.keys import PrivateKey


@pytest.fixture(params=["sqlite", "postgres"])
def options(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Options of trainers whose ledger key is in a file of its own."""
    where = str(tmp_path / "ward.ledger.db")
    if request.param == "postgres":
        where = f"{request.getfixturevalue('server').database(f'rotated_{os.getpid()}')}#ward"
    return {"ledger": where, "ledger_key": key(tmp_path / "first.pem"), "governing_key": GOVERNING, "bounds": LOOSE}


def key(path: Path) -> PrivateKey:
    PrivateKey.generate().save(path, None)
    return PrivateKey.load(path, None)


def rotate(options: dict[str, Any], new: PrivateKey) -> None:
    with Ledger.open(options["ledger"], options["ledger_key"], governing=GOVERNING) as ledger:
        now = ledger.now()
        named = Key(name=ledger.origin, x=new.public.x, role=Role.LEDGER, valid_from=now)
        event = KeyEvent(change=KeyChange.ROTATE, key=named, target=options["ledger_key"].public.id, effective=now)
        ledger.govern(KeyEvents(events=(event,)))


@pytest.mark.parametrize("step", [5, 8])  # between two segments, and inside the second
def test_a_run_goes_on_with_the_next_ledger_key(tmp_path: Path, options: dict[str, Any], step: int) -> None:
    with pytest.raises(Killed):
        problem.trainer(tmp_path / "a", progress=During({step: die}), **options).fit()
    new = key(tmp_path / "second.pem")
    rotate(options, new)
    with raises_code("ledger.key-may-not-sign"):
        problem.trainer(tmp_path / "a", **options).fit()
    outcome = problem.trainer(tmp_path / "a", **{**options, "ledger_key": new}).fit()
    assert outcome.steps == 24
    problem.trainer(tmp_path / "b", **{**options, "ledger_key": new}).fit()
    found = verify(options["ledger"], signatures=False)
    assert found.verified and found.counts["run-end"] == 2 and not found.held
    assert not any(note.startswith("not checked: open charges") for note in found.notes)


def test_the_replaced_key_hides_no_open_charge(tmp_path: Path, options: dict[str, Any]) -> None:
    problem.trainer(tmp_path / "a", **options).fit()
    new = key(tmp_path / "second.pem")
    rotate(options, new)
    with pytest.raises(Killed):
        problem.trainer(tmp_path / "b", progress=During({3: die}), **{**options, "ledger_key": new}).fit()
    for kept in tmp_path.glob("*.seen"):
        kept.unlink()
    with Ledger.open(options["ledger"]) as ledger:
        assert open_charges(ledger)
        edit(options["ledger"], DELETE_OPEN)
        sign_open_rows(options["ledger"], ledger.origin, options["ledger_key"], 999, ledger.size, ledger.root)
    with raises_code("ledger.open-rows-differ"):
        problem.trainer(tmp_path / "c", **{**options, "ledger_key": new}).fit()
    found = verify(options["ledger"], signatures=False).problem
    assert found is not None and found.code == "verify.open-rows-differ"
    with Ledger.open(options["ledger"], new) as ledger:
        ledger.accept()
