"""The ledger in a release: a receiver computes every figure from the folder alone, and every forgery of it has a name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import release_forger
from refusals import raises_code
from release_forger import seed_of
from trained_run import Trained

from lamina.errors import PlanError
from lamina.ledger.governance_records import WithdrawalReason
from lamina.ledger.reader import LedgerReader
from lamina.ledger.records import ContributionRecord, Epoch
from lamina.ledger.run_records import RunEnd
from lamina.ledger.verify.tree_checks import Trust
from lamina.ledger.withdrawal import withdraw
from lamina.release.comparison import HIDDEN_TOPICS
from lamina.release.enclosed_ledger import PRUNED_LIMITS, PrunedLedger, pruned_ledger
from lamina.release.gate import ReleaseGate
from lamina.release.maker import make_release
from lamina.release.manifest import read_manifest
from lamina.release.query import GatePolicy
from lamina.release.run_evidence import RunEvidence
from lamina.release.typeset import read_template
from lamina.release.verifier import verify_release
from lamina.sign.keys import PrivateKey

Change = Callable[[dict[str, Any]], object]


def make(run: Trained, key: PrivateKey, out: Path, form: Any = "pruned") -> Path:
    with run.open() as ledger:
        make_release(out, [run.folder], ledger, key, gate=GatePolicy(unstated_purposes=True), with_ledger=form)
    return out


@pytest.fixture
def pruned(ward: Trained, key: PrivateKey, tmp_path: Path) -> Path:
    """A release of a run on signed contributions, one of which was withdrawn, with its pruned ledger."""
    with ward.open() as ledger:
        withdraw(ledger, str(ward.someone("clinical")), WithdrawalReason.CONSENT)
    return make(ward, key, tmp_path / "pruned")


def codes(folder: Path, key: PrivateKey) -> set[str]:
    return {each.code for each in verify_release(folder, trust=Trust(plain=(key.public,))).problems}


def content(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "ledger.json").read_text())
    return found


def forged(folder: Path, key: PrivateKey, change: Change) -> set[str]:
    """Change ledger.json, sign the manifest over it, and verify."""
    made = content(folder)
    change(made)
    (folder / "ledger.json").write_bytes(release_forger.written(made))
    pem = folder.parent / "release.pem"
    if not pem.exists():
        key.save(pem, None)
    release_forger.forge(folder, seed_of(pem))
    return codes(folder, key)


# ------------------------------------------------------------------------------------ an honest release


@pytest.mark.parametrize("signed", [True, False])
def test_figures_are_computed_from_the_folder_alone(
    signed: bool, request: pytest.FixtureRequest, key: PrivateKey, tmp_path: Path
) -> None:
    run = request.getfixturevalue("ward" if signed else "trained")
    out = make(run, key, tmp_path / "out")
    found = verify_release(out, trust=Trust(plain=(key.public,)))
    assert found.verified and found.signed and found.compared and not found.trusted, found.problems
    assert found.verdict == "signed by a trusted key; figures agree with the pruned ledger in the release"
    assert found.limits == PRUNED_LIMITS and found.to_dict()["enclosed"] == "pruned" and not found.since
    with LedgerReader.read_only(run.ledger) as ledger:
        whole = verify_release(out, trust=Trust(plain=(key.public,)), ledger=ledger)
    assert whole.verified and whole.compared and whole.enclosed is None and not whole.limits
    assert ReleaseGate(out, key.public).manifest.digest == found.manifest.digest  # type: ignore[union-attr]


def test_sentences_about_contributions_have_topics_that_a_pruned_ledger_hides() -> None:
    for row in read_template("statements.toml")["run"]:
        if {"attested", "not attested"} & {*row.get("when", ())} or "{contributions}" in row["text"]:
            assert row["topic"] in HIDDEN_TOPICS, row


def test_it_names_no_contribution(pruned: Path, ward: Trained) -> None:
    text = (pruned / "ledger.json").read_text()
    with LedgerReader.read_only(ward.ledger) as ledger:
        records = [leaf.record for leaf in ledger.of_kind(ContributionRecord)]
        size = read_manifest(pruned, None).ledger.size
        leaves = [ledger.raw(seq).leaf.hex() for seq in range(size)]
    assert len(records) == 57
    for each in records:
        assert isinstance(each, ContributionRecord)
        assert each.descriptor.hex() not in text and each.key.hex() not in text and each.attestation.hex() not in text
    shown = [leaf in text for leaf in leaves]
    assert 7 <= sum(shown) < size - 57 + 2 and shown[0] and shown[-1]


def test_the_evidence_is_that_of_the_whole_ledger(pruned: Path, ward: Trained) -> None:
    manifest = read_manifest(pruned, None)
    inside = PrunedLedger((pruned / "ledger.json").read_bytes(), manifest.ledger)
    run = bytes.fromhex(manifest.predicate.runs[0])
    assert inside.verification.verified and inside.verification.problem is None
    with LedgerReader.read_only(ward.ledger) as ledger:
        one, two = (RunEvidence.read(each, run, manifest.ledger.checkpoint) for each in (ledger, inside))
        assert pruned_ledger(ledger, manifest.ledger.size) == (pruned / "ledger.json").read_bytes()
    assert one.epochs == two.epochs and one.end == two.end and one.begin == two.begin and one.plans == two.plans
    for bound in one.bounds():
        assert one.spending.spend(bound) == two.spending.spend(bound)
    assert one.attested and not two.attested  # contributions are hidden, so the comparison leaves this field out


def test_the_whole_ledger_may_travel_too(ward: Trained, key: PrivateKey, tmp_path: Path) -> None:
    out = make(ward, key, tmp_path / "full", "full")
    before = {path.name for path in out.iterdir()}
    found = verify_release(out, trust=Trust(plain=(key.public,)))
    assert found.verified and found.compared and found.enclosed == "full" and not found.trusted
    assert "which" not in found.verdict and len(found.limits) == 1
    assert before == {path.name for path in out.iterdir()} and "ledger.db" in before


def test_a_release_without_a_ledger_compares_nothing(release: Path, key: PrivateKey) -> None:
    found = verify_release(release, trust=Trust(plain=(key.public,)))
    assert found.verified and not found.compared and found.enclosed is None and not found.limits


# ------------------------------------------------------------------------------------ a forger with the release key


def first(made: dict[str, Any], folder: Path, kind: type[Any]) -> str:
    """The number of the first shown leaf of a kind."""
    inside = PrunedLedger((folder / "ledger.json").read_bytes(), read_manifest(folder, None).ledger)
    return str(next(inside.of_kind(kind)).seq)


def hide(made: dict[str, Any], seq: str) -> None:
    """Put a hash in the place of a leaf; hashes of siblings become the hash of their parent (RFC 9162 §2.1)."""
    digest = hashlib.sha256(b"\0" + bytes.fromhex(made["leaves"].pop(seq)["leaf"])).digest()
    level, at, nodes = 0, int(seq), made["nodes"]
    while (sibling := f"{level}/{at ^ 1}") in nodes:
        other = bytes.fromhex(nodes.pop(sibling))
        digest = hashlib.sha256(b"\1" + (other + digest if at & 1 else digest + other)).digest()
        level, at = level + 1, at // 2
    nodes[f"{level}/{at}"] = digest.hex()


def edit_body(made: dict[str, Any], seq: str) -> None:
    body = bytearray.fromhex(made["leaves"][seq]["body"])
    body[-1] ^= 1
    made["leaves"][seq]["body"] = body.hex()


def edit_leaf(made: dict[str, Any], seq: str) -> None:
    leaf = bytearray.fromhex(made["leaves"][seq]["leaf"])
    leaf[-1] ^= 1
    made["leaves"][seq]["leaf"] = leaf.hex()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda made, folder: edit_body(made, first(made, folder, Epoch)), "ledger.body-differs"),
        (lambda made, folder: edit_leaf(made, first(made, folder, Epoch)), "release.ledger-root-differs"),
        (lambda made, folder: made["leaves"].pop(first(made, folder, Epoch)), "release.enclosed-ledger-malformed"),
        (lambda made, folder: hide(made, first(made, folder, Epoch)), "release.ledger-epoch-hidden"),
        (lambda made, folder: edit_leaf(made, "0"), "release.other-ledger"),
        (lambda made, folder: hide(made, "0"), "release.ledger-end-hidden"),
        (lambda made, folder: hide(made, max(made["leaves"], key=int)), "release.ledger-end-hidden"),
        (lambda made, folder: hide(made, first(made, folder, RunEnd)), "release.run-not-ended"),
        (lambda made, folder: made.update(plans=[]), "verify.plan-missing"),
        (lambda made, folder: made.update(nodes={}), "release.enclosed-ledger-malformed"),
        (lambda made, folder: made["nodes"].update({"3/0": "00" * 32}), "release.enclosed-ledger-malformed"),
        (lambda made, folder: made.update(leaves={}), "release.enclosed-ledger-malformed"),
        (lambda made, folder: made["leaves"].update({"01": made["leaves"]["0"]}), "release.enclosed-ledger-malformed"),
        (lambda made, folder: made.update(type="other"), "release.enclosed-ledger-malformed"),
    ],
)  # fmt: skip
def test_a_forged_ledger_is_refused_by_name(
    pruned: Path, key: PrivateKey, change: Callable[[dict[str, Any], Path], object], code: str
) -> None:
    found = forged(pruned, key, lambda made: change(made, pruned))
    assert found and (code in found or (code == "verify.plan-missing" and "release.ledger-not-verified" in found)), (
        found
    )


def test_a_hash_over_shown_leaves_does_not_vouch_for_them(pruned: Path, key: PrivateKey) -> None:
    """The genuine hash of a subtree is given, and an edited epoch is shown below it."""
    manifest = read_manifest(pruned, None)
    inside = PrunedLedger((pruned / "ledger.json").read_bytes(), manifest.ledger)
    seq = next(inside.of_kind(Epoch)).seq

    def change(made: dict[str, Any]) -> None:
        edit_leaf(made, str(seq))
        made["nodes"][f"0/{seq}"] = inside.node(0, seq).hex()

    assert forged(pruned, key, change) == {"release.enclosed-ledger-malformed"}


def test_the_ledger_of_another_corpus_is_refused(
    pruned: Path, trained: Trained, key: PrivateKey, tmp_path: Path
) -> None:
    other = content(make(trained, key, tmp_path / "other"))
    found = forged(pruned, key, lambda made: (made.clear(), made.update(other)))
    assert found & {"release.other-ledger", "release.enclosed-ledger-malformed", "release.ledger-end-hidden"}


def test_forged_figures_are_found_without_the_ledger_file(pruned: Path, key: PrivateKey) -> None:
    pem = pruned.parent / "release.pem"
    key.save(pem, None)

    def less(made: dict[str, Any]) -> None:
        made["classes"]["clinical"]["epsilon"] = 0.1

    release_forger.forge(
        pruned,
        seed_of(pem),
        certificate=less,
        predicate=lambda made: made["posture"]["classes"]["clinical"].update(epsilon=0.1),
    )
    assert codes(pruned, key) >= {"release.figures-differ", "release.posture-differs"}
    with raises_code("release.not-verified"):
        ReleaseGate(pruned, key.public)


def test_a_changed_file_is_not_the_one_of_the_manifest(pruned: Path, key: PrivateKey) -> None:
    (pruned / "ledger.json").write_bytes((pruned / "ledger.json").read_bytes().replace(b"pruned", b"Pruned", 1))
    assert codes(pruned, key) == {"release.file-changed"}


def test_a_database_is_not_put_into_a_folder(trained: Trained, key: PrivateKey, tmp_path: Path) -> None:
    class Elsewhere:
        store = None  # a database

    with raises_code(PlanError, "release.ledger-not-a-file"):
        make_release(tmp_path / "out", [trained.folder], Elsewhere(), key, with_ledger="full")  # type: ignore[arg-type]
