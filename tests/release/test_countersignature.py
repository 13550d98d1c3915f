"""Countersignatures: what they contain, which key may sign, and what `release verify` says about forged or expired ones."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cbor2
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from refusals import raises_code
from release_forger import cose, forge, point, seed_of
from trained_run import Trained

from lamina.ledger.corpus_terms import governing_key_path, ledger_key_path
from lamina.ledger.reader import LedgerReader
from lamina.ledger.verify.tree_checks import Trust
from lamina.release.certificate import certify
from lamina.release.countersignature import Countersignature, countersign
from lamina.release.gate import ReleaseGate
from lamina.release.maker import make_release
from lamina.release.verifier import verify_release
from lamina.sign.key_ring import KeyRing
from lamina.sign.keys import PrivateKey, format_utc

NOW, YEAR = 1_800_000_000, 365 * 86_400
LATER = 4_000_000_000
TEXTS = {"name": "A. Lovelace", "role": "privacy officer", "recipient": "example.org", "purpose": "research"}
TYPE = "application/lamina-countersignature+json"


@pytest.fixture
def officer() -> PrivateKey:
    return PrivateKey.generate()


@pytest.fixture
def approved(trained: Trained, key: PrivateKey, officer: PrivateKey, tmp_path: Path) -> Path:
    """A release with a countersignature."""
    return released(trained, key, signed_by(trained, key, officer), tmp_path / "approved")


def signed_by(trained: Trained, key: PrivateKey, officer: PrivateKey, *, until: int = LATER, now: int = 0) -> bytes:
    with LedgerReader.read_only(trained.ledger) as ledger:
        certificate = certify(trained.folder, ledger).signed(key)
    return countersign(certificate, officer, TEXTS, now=now, valid_until=until)


def released(trained: Trained, key: PrivateKey, countersignature: bytes, out: Path, **options: Any) -> Path:
    with trained.open() as ledger:
        make_release(out, [trained.folder], ledger, key, countersignatures=[countersignature], **options)
    return out


def trusting(key: PrivateKey, officer: PrivateKey, role: str = "officer") -> Trust:
    ring = KeyRing()
    ring.add(key.public, label="releases", role="release")
    ring.add(officer.public, label="A. Lovelace", role=role)
    return Trust(ring=ring)


def codes(folder: Path, trust: Trust | None, **options: Any) -> set[str]:
    return {each.code for each in verify_release(folder, trust=trust, **options).problems}


def test_a_stranger_reads_and_verifies_it(trained: Trained, key: PrivateKey, officer: PrivateKey) -> None:
    """With cbor2 and cryptography, by RFC 9052, and none of our code."""
    with LedgerReader.read_only(trained.ledger) as ledger:
        certificate = certify(trained.folder, ledger).signed(key)
    data = countersign(certificate, officer, TEXTS, now=NOW, valid_until=NOW + YEAR)
    assert data == countersign(certificate, officer, TEXTS, now=NOW, valid_until=NOW + YEAR)  # the same bytes each time
    protected, unprotected, payload, signature = cbor2.loads(data).value
    Ed25519PublicKey.from_public_bytes(officer.public.x).verify(
        signature, cbor2.dumps(["Signature1", protected, b"", payload])
    )
    assert cbor2.loads(protected)[16] == TYPE and unprotected == {}
    stated = json.loads(payload)
    assert stated["certificate"] == hashlib.sha256(certificate).hexdigest()
    assert (stated["name"], stated["recipient"], stated["legal_basis"]) == ("A. Lovelace", "example.org", None)
    assert stated["signed"] == "2027-01-15T08:00:00Z" and stated["valid_until"] == "2028-01-15T08:00:00Z"


@pytest.mark.parametrize("change", [{"name": None}, {"role": ""}, {"purpose": "a\nb"}, {"method": "x" * 513}])
def test_fields_are_short_texts_and_two_are_required(officer: PrivateKey, change: dict[str, Any]) -> None:
    with raises_code("release.countersignature-field"):
        countersign(b"certificate", officer, TEXTS | change, now=NOW, valid_until=NOW + YEAR)


def test_it_ends_after_it_begins(officer: PrivateKey) -> None:
    with raises_code("release.countersignature-expired"):
        countersign(b"certificate", officer, TEXTS, now=NOW, valid_until=NOW)


def test_a_release_has_it_under_its_manifest(
    approved: Path, trained: Trained, key: PrivateKey, officer: PrivateKey
) -> None:
    with LedgerReader.read_only(trained.ledger) as ledger:
        found = verify_release(approved, trust=trusting(key, officer), ledger=ledger)
    assert found.verified and found.signed and found.compared and not found.problems
    assert found.to_dict()["countersignatures"][0]["name"] == "A. Lovelace"
    assert "countersignature.cose" in found.to_dict()["files"]
    assert codes(approved, None) == set()  # self-consistent
    path = approved / "countersignature.cose"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert codes(approved, trusting(key, officer)) >= {"release.file-changed", "release.countersignature-wrong"}


def test_a_release_without_one_has_none(release: Path, key: PrivateKey, officer: PrivateKey) -> None:
    found = verify_release(release, trust=trusting(key, officer))
    assert found.verified and found.countersignatures == ()


def test_only_a_trusted_officer_counts(approved: Path, trained: Trained, key: PrivateKey, officer: PrivateKey) -> None:
    unknown, other_role = {"release.officer-key-not-trusted"}, {"release.officer-key-in-other-role"}
    assert codes(approved, trusting(key, PrivateKey.generate())) == unknown
    assert codes(approved, Trust(plain=(key.public,))) == unknown
    with raises_code("release.not-verified"):
        ReleaseGate(approved, key.public)
    assert ReleaseGate(approved, trusting(key, officer)).manifest.signer.id == key.public.id
    assert codes(approved, Trust(plain=(key.public, officer.public))) == unknown  # a plain key has no role
    assert codes(approved, trusting(key, officer, role="auditor")) == other_role
    trust = trusting(key, officer)
    assert trust.ring is not None
    tomorrow = int(time.time()) + 86_400
    trust.ring.revoke(officer.public.id, at=tomorrow)
    assert codes(approved, trust) == set() and codes(approved, trust, now=tomorrow) == {"release.officer-key-retired"}


def test_a_ring_of_officers_beside_the_release_key(approved: Path, key: PrivateKey, officer: PrivateKey) -> None:
    ring = KeyRing()
    ring.add(officer.public, label="A. Lovelace", role="officer")
    assert codes(approved, Trust(ring=ring, plain=(key.public,))) == set()


@pytest.mark.parametrize("whose", [governing_key_path, ledger_key_path])
def test_a_key_of_the_ledger_or_the_release_is_refused(
    trained: Trained, key: PrivateKey, tmp_path: Path, whose: Callable[[Path], Path]
) -> None:
    for mine in (PrivateKey.load(whose(trained.ledger), None), key):
        with raises_code("release.officer-key-in-other-role"):
            released(trained, key, signed_by(trained, key, mine), tmp_path / "out")


def test_it_is_about_one_certificate(trained: Trained, key: PrivateKey, officer: PrivateKey, tmp_path: Path) -> None:
    for data in (
        countersign(b"another", officer, TEXTS, now=0, valid_until=LATER),
        signed_by(trained, PrivateKey.generate(), officer),
    ):
        with raises_code("release.countersignature-other-certificate"):
            released(trained, key, data, tmp_path / "out")
    twice = signed_by(trained, key, officer)
    with trained.open() as ledger, raises_code("release.countersignature-other-certificate"):
        make_release(tmp_path / "out", [trained.folder], ledger, key, countersignatures=[twice, twice])


def test_its_date_bounds_the_release(trained: Trained, key: PrivateKey, officer: PrivateKey, tmp_path: Path) -> None:
    with raises_code("release.countersignature-expired"):
        released(trained, key, signed_by(trained, key, officer, until=1_000_000_000), tmp_path / "out")
    soon = int(time.time()) + 86_400
    data = signed_by(trained, key, officer, until=soon)
    with raises_code("release.countersignature-ends-earlier"):
        released(trained, key, data, tmp_path / "out", not_after=soon + 1)
    out = released(trained, key, data, tmp_path / "out")
    found = verify_release(out).manifest
    assert found is not None and found.not_after == soon
    with raises_code("release.countersignature-other-certificate"):  # the ledger has grown by a release record
        released(trained, key, data, tmp_path / "second")


def forged(folder: Path, seed: bytes, key: PrivateKey, tmp_path: Path, **change: Any) -> set[str]:
    """Codes after somebody with both keys has put another countersignature into the release."""
    path = folder / "countersignature.cose"
    content = json.loads(cbor2.loads(path.read_bytes()).value[2]) | {"signer": point(seed).hex()} | change
    content["certificate"] = change.get(
        "certificate", hashlib.sha256((folder / "certificate.cose").read_bytes()).hexdigest()
    )
    path.write_bytes(cose((json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode(), seed, TYPE))
    key.save(tmp_path / "release-seed.pem", None)
    forge(folder, seed_of(tmp_path / "release-seed.pem"))
    (tmp_path / "release-seed.pem").unlink()
    ring = KeyRing()
    ring.add(key.public, label="releases", role="release")
    signer = Countersignature.read(path.read_bytes()).signer if not {"name", "version"} & change.keys() else None
    if signer is not None and signer.id != key.public.id:
        ring.add(signer, label="officer", role="officer")
    return codes(folder, Trust(ring=ring))


def test_forged_countersignatures_are_named(
    approved: Path, trained: Trained, key: PrivateKey, officer: PrivateKey, tmp_path: Path
) -> None:
    officer.save(tmp_path / "officer.pem", None)
    key.save(tmp_path / "key.pem", None)
    seed, own = seed_of(tmp_path / "officer.pem"), seed_of(tmp_path / "key.pem")
    ledger = seed_of(ledger_key_path(trained.ledger))

    def found(seed: bytes, **change: Any) -> set[str]:
        return forged(approved, seed, key, tmp_path, **change)

    assert found(seed) == set()
    assert found(seed, certificate="00" * 32) == {"release.countersignature-other-certificate"}
    assert found(seed, valid_until="2026-01-01T00:00:00Z") == {"release.countersignature-expired"}
    tomorrow = format_utc(int(time.time()) + 86_400)
    assert found(seed, valid_until=tomorrow) == {"release.countersignature-ends-earlier"}
    assert found(seed, valid_until="2096-01-01T00:00:00Z", signed="2095-01-01T00:00:00Z") == {
        "release.countersignature-from-the-future"
    }
    assert found(seed, signed="2020-01-01T00:00:00Z") == set()
    assert found(own) == {"release.officer-key-in-other-role"}
    assert found(ledger) == {"release.officer-key-in-other-role"}
    assert found(seed, name=7) == {"release.countersignature-malformed"}
    assert found(seed, name="A", version=2) == {"release.countersignature-malformed"}
    assert found(seed, name="A", approval="yes") == {"release.countersignature-malformed"}


def test_every_byte_counts(trained: Trained, key: PrivateKey, officer: PrivateKey) -> None:
    data = signed_by(trained, key, officer)
    for at in range(0, len(data), 7):
        changed = bytearray(data)
        changed[at] ^= 1
        with pytest.raises(Exception, match=r"\[(release|cbor|key)\."):
            Countersignature.read(bytes(changed))
