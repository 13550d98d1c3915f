"""A second ledger of an origin has to be asked for by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from clinic import policy
from refusals import raises_code

from lamina.ledger.corpus_terms import CorpusTerms, open_or_create
from lamina.run.run_ledger import default_ledger_path, refuse_second_ledger

ORIGIN = "clinic.example/ecg"


def begin(place: Path, **changes: str) -> Path:
    open_or_create(place, CorpusTerms.of_policy(policy(**changes))).close()
    return place


@pytest.mark.parametrize("there", ["runs", ".", "runs/deep/.."])
@pytest.mark.parametrize("new", ["other", "runs/deep"])
def test_where_one_is_near_no_other_is_begun(tmp_path: Path, there: str, new: str) -> None:
    (tmp_path / "runs" / "deep").mkdir(parents=True)
    begin(default_ledger_path(ORIGIN, tmp_path / there))
    with raises_code("train.second-ledger"):
        refuse_second_ledger(default_ledger_path(ORIGIN, tmp_path / new), ORIGIN, tmp_path)


def test_it_is_the_one_itself_or_of_another_origin_or_no_ledger(tmp_path: Path) -> None:
    own = begin(default_ledger_path(ORIGIN, tmp_path / "runs"))
    refuse_second_ledger(own, ORIGIN, tmp_path)
    new = default_ledger_path(ORIGIN, tmp_path / "more" / "runs")
    refuse_second_ledger(new, ORIGIN, tmp_path / "more")  # not near
    begin(tmp_path / "more" / own.name, origin="clinic.example/ECG")  # the same file name
    refuse_second_ledger(new, ORIGIN, tmp_path / "more")
    (tmp_path / "more" / own.name).write_bytes(b"no ledger")
    refuse_second_ledger(new, ORIGIN, tmp_path / "more")
    (tmp_path / "more" / own.name).unlink()
