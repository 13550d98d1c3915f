"""From a contribution to its events, its models and its spend, and back from a content anchor."""

from __future__ import annotations

import base64
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from refusals import raises_code
from trained_run import Trained

from lamina.ledger.governance_records import WithdrawalReason
from lamina.ledger.merkle import leaf_hash
from lamina.ledger.reader import LedgerReader, find_contributions
from lamina.ledger.receipt import Receipt
from lamina.ledger.withdrawal import withdraw
from lamina.release.reconciliation import anchor_record, read_anchor, reconcile
from lamina.report.pages import reconciliation_page


def test_a_deletion_request_is_reconciled(ward: Trained, served: Path) -> None:
    seq = ward.someone("sensitive")
    with ward.open() as ledger:
        withdraw(ledger, str(seq), WithdrawalReason.CONSENT)
        found = reconcile(ledger, ledger.leaf(seq))
    assert found["withdrawn"]["reason"] == "consent" and found["contribution"]["index"] == seq
    assert [each["name"] for each in found["releases"]] == ["model"] and served.is_dir()
    assert found["runs"][0]["steps"] == 12 and found["runs"][0]["epsilon"] == found["epsilon"] > 0
    assert sum(each["steps"] for each in found["events"]) == 12
    assert "1 released model stands on it" in found["statement"]
    page = reconciliation_page(found)
    HTMLParser().feed(page)
    assert found["contribution"]["descriptor"] in page and "does not unlearn" in page


def test_an_anchor_leads_back_from_outside(ward: Trained) -> None:
    with LedgerReader.read_only(ward.ledger) as ledger:
        leaf = ledger.leaf(ward.someone("clinical"))
        anchor = anchor_record(ledger, leaf)
        (again,) = find_contributions(ledger, read_anchor(json.dumps(anchor).encode()))
        assert again.seq == leaf.seq
        receipt = Receipt.decode(base64.b64decode(anchor["receipt"]))
        assert receipt.index == leaf.seq and anchor["ledger"]["header"] == leaf_hash(ledger.raw(0).leaf).hex()
    c2pa = {
        "manifests": {"urn:x": {"assertions": [{"label": "lamina.contribution", "data": anchor}, {"label": "other"}]}}
    }
    assert read_anchor(json.dumps(c2pa).encode()) == anchor["descriptor"]


DEEP: Any = {"type": "urn:lamina:content-anchor:v1", "descriptor": "0" * 64}
for _ in range(40):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    "plain",
    [
        {}, [], {"type": "urn:lamina:content-anchor:v1", "descriptor": "xyz"}, DEEP,
        [{"label": "lamina.contribution", "data": {"descriptor": c * 64}} for c in "ab"],
    ],
    ids=["nothing", "list", "no digest", "deep", "two"],
)  # fmt: skip
def test_a_file_that_names_no_contribution_is_refused(plain: Any) -> None:
    with raises_code("release.anchor-malformed"):
        read_anchor(json.dumps(plain).encode())
