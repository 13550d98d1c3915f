"""`lamina certify, report, release`: what they write, print and return."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from asking import Call, succeeded
from model_signing import verifying
from release_forger import forge, record_release, seed_of
from trained_run import Trained, copied_run

from lamina.ledger.corpus_terms import governing_key_path, ledger_key_path
from lamina.sign.keys import PrivateKey


@pytest.fixture
def trained(tmp_path: Path) -> Trained:
    return copied_run(tmp_path)


def asked(path: Path, **rights: object) -> str:
    common = {"classes": ["clinical", "open"], "max_epsilon": 3, "min_noise_multiplier": 0, "purpose": "research"}
    path.write_text(json.dumps({"draws_on": {"layers": ["0", "2"]}, "rights": common | rights}))
    return str(path)


def test_from_a_run_to_a_query(trained: Trained, tmp_path: Path, lamina: Call) -> None:
    run, out = str(trained.folder), str(tmp_path / "release")
    found = json.loads(succeeded(lamina("certify", run, "--json")))
    assert found["private"] and set(found["files"]) == {"json", "cose", "pdf"}
    assert found["classes"]["clinical"].keys() >= {
        "epsilon", "epsilon_replace_one", "delta", "rho", "epsilon_unamplified", "unit", "bounds",
    }  # fmt: skip
    page = json.loads(succeeded(lamina("report", run, "--json")))["report"]
    assert Path(page).read_text().startswith("<!doctype html>")
    made = json.loads(succeeded(lamina("release", "make", run, "-o", out, "--name", "ecg", "--json")))
    assert made["verified"] and made["signed"] and made["compared"] and not made["trusted"]
    key = str(trained.ledger).replace(".db", ".release.pub")
    told = json.loads(succeeded(lamina("release", "verify", out, "--trust", key, "--json")))
    assert (told["verified"], told["signed"], told["compared"], told["trusted"]) == (True, True, False, False)
    assert told["problems"] == [] and told["verdict"] == "signed by a trusted key; figures not compared with a ledger"
    owner = str(tmp_path / "owner.pub")
    Path(owner).write_bytes(PrivateKey.load(governing_key_path(trained.ledger), None).public.pem())
    both = ("--trust", key, "--trust", owner, "--ledger", str(trained.ledger))
    told = json.loads(succeeded(lamina("release", "verify", out, *both, "--json")))
    assert (told["compared"], told["trusted"], told["verdict"], told["problems"]) == (True, True, "trusted", [])
    alone = succeeded(lamina("release", "verify", out, "--trust", key))
    assert "ledger  example.org/ecg, " in alone and "give --ledger" in alone and "give --trust" not in alone
    compared = succeeded(lamina("release", "verify", out, "--trust", key, "--ledger", str(trained.ledger)))
    assert "public key of its owner" in compared and "give --ledger" not in compared
    assert "note" not in succeeded(lamina("release", "verify", out, *both))
    query = asked(tmp_path / "query.json")
    assert succeeded(lamina("release", "ask", out, query, "--trust", key)) == "allowed\n"
    code, text, _ = lamina(
        "release",
        "ask",
        out,
        asked(tmp_path / "query.json", purpose="ads"),
        "--trust",
        key,
        "--ledger",
        str(trained.ledger),
    )
    assert code == 1 and text.startswith("denied\n") and "[purpose-not-allowed]" in text
    forge(
        Path(out),
        seed_of(Path(key).with_suffix(".pem")),
        certificate=lambda c: c["classes"]["clinical"].update(rho=0.1),
    )
    record_release(trained.ledger, Path(out), seed_of(ledger_key_path(trained.ledger)))
    code, text, _ = lamina("release", "verify", out, *both)
    assert code == 1 and "classes.clinical.rho is 0.1 in the certificate" in text and "[release.figures-differ]" in text
    code, _, err = lamina("release", "ask", out, query, *both)
    assert code == 1 and "release.not-verified" in err
    Path(out, "README.md").write_text("changed")
    code, text, _ = lamina("release", "verify", out, "--trust", key)
    assert code == 1 and "[release.file-changed]" in text


def test_without_a_release_key_nothing_is_written(trained: Trained, lamina: Call) -> None:
    governing_key_path(trained.ledger).unlink()  # as in a ledger whose owner is elsewhere
    code, _, error = lamina("certify", str(trained.folder))
    assert code == 1 and "cli.release-key-missing" in error
    assert not list(trained.folder.glob("certificate*"))


def test_a_run_that_is_not_private_has_no_signature(trained: Trained, lamina: Call) -> None:
    succeeded(lamina("certify", str(trained.folder)))
    path = trained.folder / "metrics.json"
    path.write_text(path.read_text().replace('"probed": true', '"probed": false'))
    code, text, _ = lamina("certify", str(trained.folder), "--json")
    found = json.loads(text)
    assert code == 1 and found["private"] is False and "cose" not in found["files"]
    assert not (trained.folder / "certificate.cose").exists()


def test_no_page_of_an_earlier_certificate_stays(
    trained: Trained, lamina: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without typst there is no new PDF, and the old one says that the run is private."""
    succeeded(lamina("certify", str(trained.folder)))
    assert (trained.folder / "certificate.pdf").exists()
    path = trained.folder / "metrics.json"
    path.write_text(path.read_text().replace('"probed": true', '"probed": false'))
    monkeypatch.setattr("lamina.cli.certify.can_typeset", lambda: False)
    assert lamina("certify", str(trained.folder))[0] == 1
    assert not (trained.folder / "certificate.pdf").exists()


def test_generation_classes_are_read(trained: Trained, tmp_path: Path, lamina: Call) -> None:
    code, _, err = lamina(
        "release", "make", str(trained.folder), "-o", str(tmp_path / "r"), "--generation-class", "x=y:z"
    )
    assert code == 1 and "cli.generation-class" in err
    options = ("--generation-class", "head=layers:4", "--generation-class", "top=depth:0.5,1", "--any-purpose")
    succeeded(lamina("release", "make", str(trained.folder), "-o", str(tmp_path / "r"), *options))


def test_a_bundle_for_model_signing(trained: Trained, tmp_path: Path, lamina: Call) -> None:
    run = str(trained.folder)
    assert "lamina keys new bundle.key --type p256" in succeeded(lamina("release", "make", run, "-o", "without"))
    made = json.loads(succeeded(lamina("keys", "new", "bundle.key", "--type", "p256", "--no-passphrase", "--json")))
    assert made["public"] == "bundle.pub" and "PRIVATE" not in Path("bundle.pub").read_text()
    told = succeeded(lamina("release", "make", run, "-o", "with", "--bundle-key", "bundle.key"))
    assert "model_signing verify key with --signature with/model.sig --public_key bundle.pub" in told
    config = verifying.Config().use_elliptic_key_verifier(public_key="bundle.pub")
    config.verify(tmp_path / "with", tmp_path / "with" / "model.sig")
    assert json.loads(succeeded(lamina("release", "verify", "with", "--json")))["verified"]
    code, _, err = lamina("release", "make", run, "-o", "third", "--bundle-key", "bundle.pub")
    assert code == 1 and "key.public-given-for-private" in err
    assert lamina("keys", "new", "other.key", "--type", "rsa", "--no-passphrase")[0] == 2


def test_an_officer_countersigns_and_the_release_has_it(trained: Trained, tmp_path: Path, lamina: Call) -> None:
    run, release = str(trained.folder), str(trained.ledger).replace(".db", ".release.pub")
    found = json.loads(succeeded(lamina("certify", run, "--decision", "decision.pdf", "--json")))
    assert found["files"]["decision"] == "decision.pdf" and Path("decision.pdf").read_bytes().startswith(b"%PDF-")
    certificate = str(trained.folder / "certificate.cose")
    succeeded(lamina("keys", "new", "officer.key", "--no-passphrase"))
    sign = (
        "certify",
        "--countersign",
        certificate,
        "--key",
        "officer.key",
        "--name",
        "A. Lovelace",
        "--role",
        "officer",
    )
    until = ("--valid-until", "2098-12-31")
    assert "cli.countersign-incomplete" in lamina(*sign, "--trust", release)[2]
    assert "cli.countersign-incomplete" in lamina(*sign, *until)[2]
    assert "release.certificate-not-by-key" in lamina(*sign, *until, "--trust", "officer.pub")[2]
    assert "release.countersignature-field" in lamina(*sign[:-2], *until, "--trust", release)[2]
    with_ledger_key = [str(ledger_key_path(trained.ledger)) if each == "officer.key" else each for each in sign]
    options = (*until, "--trust", release, "--ledger", str(trained.ledger))
    assert "release.officer-key-in-other-role" in lamina(*with_ledger_key, *options)[2]
    assert not (trained.folder / "countersignature.cose").exists()
    told = json.loads(succeeded(lamina(*sign, *options, "--recipient", "example.org", "--json")))
    assert (told["name"], told["recipient"], told["purpose"]) == ("A. Lovelace", "example.org", None)
    profile = ("certify", run, "--profile", "hipaa-expert-determination")
    assert "      name: A. Lovelace (stated by the holder of key" in succeeded(lamina(*profile))
    with_it = ("--countersignature", told["file"])
    made = json.loads(succeeded(lamina("release", "make", run, "-o", "approved", *with_it, "--json")))
    assert made["verified"] and {"countersignature.cose", "decision.pdf"} <= made["files"].keys()
    _, text, note = lamina(*profile)  # the ledger has grown, so it is about an earlier certificate
    assert "A. Lovelace" not in text and "about another certificate" in note
    assert "release.officer-key-not-trusted" in lamina("release", "verify", "approved", "--trust", release)[1]
    succeeded(
        lamina("keys", "add", "officer.pub", "--label", "A. Lovelace", "--role", "officer", "--keys", "trusted.json")
    )
    text = succeeded(lamina("release", "verify", "approved", "--trust", release, "--trust", "trusted.json"))
    assert "officer A. Lovelace, officer, valid until 2098-12-31" in text


def test_a_receiver_computes_every_figure_from_the_folder(trained: Trained, tmp_path: Path, lamina: Call) -> None:
    run, key = str(trained.folder), str(trained.ledger).replace(".db", ".release.pub")
    for form, file in (("pruned", "ledger.json"), ("full", "ledger.db")):
        made = json.loads(succeeded(lamina("release", "make", run, "-o", form, "--with-ledger", form, "--json")))
        assert made["verified"] and file in made["files"] and bool(made["warnings"]) is (form == "full")
        text = succeeded(lamina("release", "verify", form, "--trust", key))
        assert f"signed by a trusted key; figures agree with the {form} ledger in the release" in text
        assert "does not show that the ledger records this release" in text and "give --ledger" not in text
        assert ("does not show contributions" in text) is (form == "pruned")
    assert lamina("release", "make", run, "-o", "other", "--with-ledger", "some")[0] == 2


def test_the_profile_writes_nothing_and_claims_nothing(trained: Trained, lamina: Call) -> None:
    text = succeeded(lamina("certify", str(trained.folder), "--profile", "nist-800-226"))
    assert "does not claim compliance" in text.splitlines()[0] and "not stated" in text and "24  §5" in text
    found = json.loads(succeeded(lamina("certify", str(trained.folder), "--profile", "nist-800-226", "--json")))
    assert len(found["rows"]) == 24 and found["rows"][22]["evidence"][0]["text"].endswith(": secure")
    assert not list(trained.folder.glob("certificate*"))
    assert lamina("certify", str(trained.folder), "--profile", "iso")[0] == 2
    assert lamina("certify")[0] == 2
    assert lamina("certify", str(trained.folder), "--countersign", "x.cose")[0] == 2
