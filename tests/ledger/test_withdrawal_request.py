"""Signed requests to withdraw: only the key that signed a contribution withdraws it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hospital import Hospital, usual
from refusals import raises_code

from lamina.ledger.merkle import leaf_hash
from lamina.ledger.reader import LedgerReader
from lamina.ledger.records import ContributionRecord
from lamina.ledger.withdrawal import WithdrawalInbox, check_withdrawal, drop_withdrawal, withdrawal_state
from lamina.ledger.withdrawal_request import REQUEST_TYPE, sign_withdrawal
from lamina.ledger.writer import Ledger
from lamina.sign.keys import PrivateKey
from lamina.sign.signed_json import read_cose, sign_json


@pytest.fixture
def hospital(tmp_path: Path) -> Hospital:
    made = usual(tmp_path, real=True)
    made.admit(ledger=tmp_path / "corpus.db")
    return made


@pytest.fixture
def ledger(hospital: Hospital, tmp_path: Path) -> Any:
    with LedgerReader.read_only(tmp_path / "corpus.db") as found:
        yield found


def first_of(ledger: LedgerReader) -> ContributionRecord:
    record = next(ledger.of_kind(ContributionRecord)).record
    assert isinstance(record, ContributionRecord)
    return record


def header_of(ledger: LedgerReader) -> bytes:
    return leaf_hash(ledger.raw(0).leaf)


def test_a_signed_request_becomes_a_record(hospital: Hospital, ledger: LedgerReader, tmp_path: Path) -> None:
    record, inbox = first_of(ledger), tmp_path / "withdrawals"
    inbox.mkdir()
    data = sign_withdrawal(record.descriptor, "consent", hospital.key, ledger=header_of(ledger))
    request = check_withdrawal(data, ledger)
    assert withdrawal_state(inbox, request.name) is None
    assert [drop_withdrawal(inbox, data, request) for _ in range(2)] == ["pending", "pending"]
    with Ledger.open(tmp_path / "corpus.db") as book:
        (taken,) = WithdrawalInbox(book, inbox).take()
    assert taken.withdrawn[0].leaf.record.request is not None  # type: ignore[union-attr]
    assert taken.withdrawn[0].leaf.record.request == request.digest  # type: ignore[union-attr]
    assert drop_withdrawal(inbox, data, request) == withdrawal_state(inbox, request.name) == "done"


def test_what_is_not_the_contributors_is_refused(hospital: Hospital, ledger: LedgerReader) -> None:
    record, header = first_of(ledger), header_of(ledger)
    stranger = PrivateKey.generate()
    with raises_code("ledger.request-not-signed"):
        check_withdrawal(sign_withdrawal(record.descriptor, "consent", stranger, ledger=header), ledger)
    with raises_code("ledger.request-not-signed"):
        check_withdrawal(sign_withdrawal(b"\0" * 32, "consent", hospital.key, ledger=header), ledger)
    with raises_code("ledger.request-other-ledger"):
        check_withdrawal(sign_withdrawal(record.descriptor, "consent", hospital.key, ledger=b"\0" * 32), ledger)
    late = int(time.time()) + 3600
    with raises_code("ledger.request-from-the-future"):
        check_withdrawal(sign_withdrawal(record.descriptor, "consent", hospital.key, ledger=header, time=late), ledger)
    data = sign_withdrawal(record.descriptor, "consent", hospital.key, ledger=header)
    with raises_code("ledger.request-not-signed"):
        check_withdrawal(data[:-1] + bytes([data[-1] ^ 1]), ledger)
    with raises_code("release.cose-malformed"):
        check_withdrawal(sign_json({}, hospital.key, "application/json"), ledger)


@pytest.mark.parametrize(
    "change",
    [{"reason": "because"}, {"effect": "none"}, {"withdraw": "zz"}, {"time": "now"}, {"more": "x"}, {"reason": 3}],
)
def test_what_is_no_request_is_refused(hospital: Hospital, ledger: LedgerReader, change: dict[str, Any]) -> None:
    data = sign_withdrawal(first_of(ledger).descriptor, "consent", hospital.key, ledger=header_of(ledger))
    plain = json.loads(read_cose(data, REQUEST_TYPE).payload)
    with raises_code("ledger.request-malformed"):
        check_withdrawal(sign_json(plain | change, hospital.key, REQUEST_TYPE), ledger)
    with raises_code("ledger.request-malformed"):
        check_withdrawal(b"\0" * 5000, ledger)
