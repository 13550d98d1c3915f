"""Attestation downstream: a run on unsigned data says so everywhere, and policies and queries can demand signatures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import release_forger
from refusals import raises_code
from release_forger import seed_of
from short_runs import POLICY, trainer
from trained_run import Trained

from lamina.ledger.corpus_terms import ledger_key_path
from lamina.ledger.reader import LedgerReader
from lamina.ledger.records import Epoch, EpochAccount
from lamina.ledger.verify.tree_checks import Trust
from lamina.plan.policy import Policy
from lamina.release.certificate import certify
from lamina.release.gate import DENIALS, ReleaseGate
from lamina.release.maker import make_release
from lamina.release.query import GatePolicy, Query, Rights
from lamina.release.run_evidence import RunEvidence
from lamina.release.verifier import verify_release
from lamina.report.pages import run_report
from lamina.sign.keys import PrivateKey

DIGEST = "ab" * 32


def query(attested: bool) -> Query:
    names = frozenset(("clinical", "sensitive", "open"))
    rights = Rights(classes=names, max_epsilon=9, min_noise_multiplier=0, purpose="care", attested=attested)
    return Query(rights=rights)


def released(run: Trained, key: PrivateKey, out: Path) -> Path:
    with run.open() as ledger:
        make_release(out, [run.folder], ledger, key, gate=GatePolicy(unstated_purposes=True))
    return out


@pytest.fixture(params=["signed", "unsigned"])
def either(request: pytest.FixtureRequest) -> tuple[Trained, bool]:
    signed = request.param == "signed"
    return request.getfixturevalue("ward" if signed else "trained"), signed


def test_every_paper_says_whether_the_data_was_signed(
    either: tuple[Trained, bool], key: PrivateKey, tmp_path: Path
) -> None:
    run, signed = either
    out = released(run, key, tmp_path / "out")
    word, found = f"attested: {str(signed).lower()}.", verify_release(out, trust=Trust(plain=(key.public,)))
    assert found.manifest is not None and found.manifest.posture.attested is signed
    assert json.loads((run.folder / "metrics.json").read_text())["attested"] is signed
    with LedgerReader.read_only(run.ledger) as ledger:
        certificate, page = certify(run.folder, ledger), run_report(run.folder, ledger)
    assert certificate.content["attested"] is signed and ("not attested" in str(certificate)) is not signed
    (said,) = (each for each in certificate.content["statements"] if each["topic"] == "attestation")
    assert said["text"].startswith(word) and said["source"] == "recomputed from the ledger" and said["leaves"]
    assert word in (out / "README.md").read_text() and word in page


def test_a_query_can_require_signed_contributions(
    either: tuple[Trained, bool], key: PrivateKey, tmp_path: Path
) -> None:
    run, signed = either
    gate = ReleaseGate(released(run, key, tmp_path / "out"), key.public)
    codes = {each.code for each in gate.decide(query(True)).reasons}
    assert codes == (set() if signed else {"not-attested"})
    assert gate.decide(query(False)).allowed


def test_a_forged_claim_of_attestation_is_named(trained: Trained, key: PrivateKey, release: Path) -> None:
    """By the posture against the certificate, and by both against the ledger."""
    pem = release.parent / "release.pem"
    key.save(pem, None)
    seed = seed_of(pem)

    def claim(document: dict[str, Any]) -> None:
        document["attested"] = True

    release_forger.forge(release, seed, predicate=lambda made: claim(made["posture"]))
    trust = Trust(plain=(key.public,))
    assert {each.code for each in verify_release(release, trust=trust).problems} == {"release.posture-differs"}
    release_forger.forge(release, seed, certificate=claim)
    release_forger.record_release(trained.ledger, release, seed_of(ledger_key_path(trained.ledger)))
    assert not verify_release(release, trust=trust).problems  # the signer vouches for both
    with LedgerReader.read_only(trained.ledger) as ledger:
        codes = {each.code for each in verify_release(release, trust=trust, ledger=ledger).problems}
    assert codes >= {"release.posture-differs", "release.conditions-differ"}


def test_only_bounds_that_were_signed_before_the_run_attest_it(ward: Trained) -> None:
    with LedgerReader.read_only(ward.ledger) as ledger:
        (run,) = {leaf.record.run for leaf in ledger.of_kind(Epoch) if isinstance(leaf.record, Epoch)}
        found = RunEvidence.read(ledger, run)
    assert found.attested and sum(found.admitted.values()) == 57
    (seq, last) = found.epochs[-1]
    whole = tuple(each for each in last.accounts if not each.noise_multiplier)
    assert whole and all(isinstance(each, EpochAccount) for each in whole)
    unsigned = replace(found, epochs=(*found.epochs[:-1], (seq, replace(last, accounts=whole))))
    assert not unsigned.attested
    assert (
        not replace(found, admitted={}).attested and not replace(found, signed=dict.fromkeys(found.signed, 0)).attested
    )


@pytest.mark.parametrize(
    ("corpus", "required"),
    [("", False), (f'ledger = "{DIGEST}"', True), ('attestation = "required"', True),
     (f'ledger = "{DIGEST}"\nattestation = "optional"', False)],
)  # fmt: skip
def test_a_policy_requires_signed_contributions(tmp_path: Path, corpus: str, required: bool) -> None:
    policy = POLICY.replace("[corpus]", f"[corpus]\n{corpus}")
    assert Policy.parse(policy).corpus.requires_attestation is required
    if "ledger" not in corpus and required:
        with raises_code("train.attestation-required"):
            trainer(tmp_path, policy).fit()
        assert not list((tmp_path / "runs").glob("*/metrics.json"))


def test_each_denial_has_a_row_of_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "release.md").read_text(encoding="utf-8")
    assert all(f"| `{each.code}` | {each.means} | {each.remedy} |" in page for each in DENIALS)
    assert len({each.code for each in DENIALS}) == len(DENIALS)
