"""From a contribution to its events, its models and its spend, and back from a content anchor."""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from c2pa_file import signed_sound
from refusals import raises_code
from trained_run import Trained

from lamina.ledger.governance_records import WithdrawalReason
from lamina.ledger.merkle import leaf_hash
from lamina.ledger.reader import LedgerReader, find_contributions
from lamina.ledger.receipt import Receipt
from lamina.ledger.withdrawal import withdraw
from lamina.release.reconciliation import anchor_file, anchor_record, c2pa_content_hash, read_anchor, reconcile
from lamina.report.pages import reconciliation_page


def test_a_deletion_request_is_reconciled(ward: Trained, served: Path) -> None:
    seq = ward.someone("sensitive")
    with ward.open() as ledger:
        withdraw(ledger, str(seq), WithdrawalReason.CONSENT)
        found = reconcile(ledger, ledger.leaf(seq))
    assert found["withdrawn"]["by"] == "keeper" and "by the keeper alone" in reconciliation_page(found)
    assert found["withdrawn"]["reason"] == "consent" and found["contribution"]["index"] == seq
    assert [each["name"] for each in found["releases"]] == ["model"] and served.is_dir()
    assert found["runs"][0]["steps"] == 12 and found["runs"][0]["epsilon"] == found["epsilon"] > 0
    assert sum(each["steps"] for each in found["events"]) == 12
    assert "1 released model may have learned from it" in found["statement"]
    page = reconciliation_page(found)
    HTMLParser().feed(page)
    assert (
        found["contribution"]["descriptor"] in page
        and "what they learned from it stays in them" in page
        and "hidden by" not in page
    )


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


def test_content_with_a_c2pa_manifest_is_anchored_by_its_hash(tmp_path: Path) -> None:
    """The hash is computed here anew: SHA-256 of the file without the place where the manifest is."""
    path = tmp_path / "scan.wav"
    path.write_bytes(signed_sound(b"\1\2" * 500))
    told = anchor_file(path)
    store = json.loads(told)
    (left_out,) = store["manifests"][store["active_manifest"]]["assertion_store"]["c2pa.hash.data"]["exclusions"]
    data = path.read_bytes()
    kept = data[: left_out["start"]] + data[left_out["start"] + left_out["length"] :]
    assert read_anchor(told) == hashlib.sha256(kept).hexdigest() == c2pa_content_hash(store).hex()
    path.write_bytes(data.replace(b"\1\2" * 500, b"\1\3" * 500))
    with raises_code("release.c2pa-not-bound"):
        read_anchor(anchor_file(path))


def test_a_contribution_embedded_in_a_c2pa_manifest(tmp_path: Path) -> None:
    path = tmp_path / "scan.wav"
    path.write_bytes(signed_sound(b"\1\2", {"label": "lamina.contribution", "data": {"descriptor": "ab" * 32}}))
    assert read_anchor(anchor_file(path)) == "ab" * 32
    (tmp_path / "scan.json").write_bytes(anchor_file(path))
    assert read_anchor(anchor_file(tmp_path / "scan.json")) == "ab" * 32
    path.write_bytes(b"RIFF")
    with raises_code("release.c2pa-not-read"):
        anchor_file(path)


def test_without_the_reader_of_c2pa_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "c2pa", None)
    with raises_code("release.c2pa-not-installed"):
        anchor_file(tmp_path / "scan.wav")


@pytest.mark.parametrize(
    "bound",
    [
        {}, {"c2pa.hash.bmff.v3": {"hash": "AAAA"}}, {"c2pa.hash.data": {"hash": "AAAA", "alg": "sha256"}},
        {"c2pa.hash.data": {"hash": base64.b64encode(bytes(32)).decode(), "alg": "sha512"}}, [], None,
    ],
)  # fmt: skip
def test_a_c2pa_manifest_that_binds_in_another_way_is_refused(bound: Any) -> None:
    store = {"active_manifest": "urn:x", "manifests": {"urn:x": {"assertion_store": bound}}}
    with raises_code("release.c2pa-not-bound"):
        read_anchor(json.dumps(store).encode())
