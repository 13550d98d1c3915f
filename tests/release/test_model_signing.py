"""The model-signing bundle of a release: OpenSSF's own tool verifies it, and so do we; every change of it is found."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from model_signing import signing, verifying
from refusals import raises_code
from trained_run import Trained

from lamina.ledger.verify.tree_checks import Trust
from lamina.release.maker import make_release
from lamina.release.verifier import verify_release
from lamina.sign.keys import P256Key, PrivateKey


@pytest.fixture(scope="module")
def bundle_key() -> P256Key:
    return P256Key.generate()


@pytest.fixture
def public(bundle_key: P256Key, tmp_path: Path) -> Path:
    (tmp_path / "bundle.pub").write_bytes(bundle_key.public_pem)
    return tmp_path / "bundle.pub"


@pytest.fixture
def signed(trained: Trained, key: PrivateKey, bundle_key: P256Key, tmp_path: Path) -> Path:
    with trained.open() as ledger:
        make_release(tmp_path / "signed", [trained.folder], ledger, key, bundle_key=bundle_key)
    return tmp_path / "signed"


def problems(folder: Path, key: PrivateKey) -> set[tuple[str, str | None]]:
    found = verify_release(folder, trust=Trust(plain=(key.public,)))
    assert found.signed == (not found.problems)
    return {(each.code, each.file) for each in found.problems}


def peer_refuses(folder: Path, public: Path) -> bool:
    try:
        verifying.Config().use_elliptic_key_verifier(public_key=public).verify(folder, folder / "model.sig")
    except Exception:
        return True
    return False


def test_the_tool_of_openssf_verifies_it(signed: Path, key: PrivateKey, public: Path, tmp_path: Path) -> None:
    assert problems(signed, key) == set()
    moved = signed.rename(tmp_path / "elsewhere")  # the name of the folder does not matter
    where = [str(moved), "--signature", str(moved / "model.sig"), "--public_key", str(public)]
    done = subprocess.run(
        [sys.executable, "-m", "model_signing", "verify", "key", *where], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (moved / "README.md").write_text("changed")
    assert peer_refuses(moved, public)


def test_both_refuse_the_same_changes(signed: Path, key: PrivateKey, public: Path, tmp_path: Path) -> None:
    assert not peer_refuses(signed, public)
    for name in ("manifest.json", "model.safetensors", "checkpoint.txt"):
        data = (signed / name).read_bytes()
        (signed / name).write_bytes(data + b" ")
        assert peer_refuses(signed, public) and problems(signed, key), name
        (signed / name).write_bytes(data)
    (signed / "notes.txt").write_text("x")
    assert peer_refuses(signed, public) and problems(signed, key) == {("release.extra-file", "notes.txt")}
    (signed / "notes.txt").unlink()
    other = tmp_path / "other.pub"
    other.write_bytes(P256Key.generate().public_pem)
    assert peer_refuses(signed, other)


def test_a_missing_bundle_and_one_that_nobody_announced(
    signed: Path, release: Path, key: PrivateKey, tmp_path: Path
) -> None:
    bundle = tmp_path / "model.sig"
    (signed / "model.sig").rename(bundle)
    assert problems(signed, key) == {("release.file-missing", "model.sig")}
    (signed / "model.sig").symlink_to(bundle)
    assert ("release.link", "model.sig") in problems(signed, key)
    shutil.copy(bundle, release / "model.sig")
    assert problems(release, key) == {("release.extra-file", "model.sig")}


def _signature(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    def changed(data: bytes) -> bytes:
        made = json.loads(data)
        change(made)
        return (json.dumps(made, indent=2, ensure_ascii=False) + "\n").encode()

    return changed


TAMPERED: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "no JSON": lambda data: data[:-9],
    "no object": lambda data: b"[]\n",
    "white space": lambda data: data + b" ",
    "media type": _signature(lambda b: b.update(mediaType="application/vnd.dev.sigstore.bundle.v0.2+json")),
    "hint": _signature(lambda b: b["verificationMaterial"]["publicKey"].update(hint="0" * 64)),
    "extra field": _signature(lambda b: b.update(more=1)),
    "no signature": _signature(lambda b: b["dsseEnvelope"]["signatures"].clear()),
    "two signatures": _signature(lambda b: b["dsseEnvelope"]["signatures"].append({"sig": "", "keyid": ""})),
    "signature": _signature(lambda b: b["dsseEnvelope"]["signatures"][0].update(sig=b64encode(b"x" * 70).decode())),
    "payload": _signature(
        lambda b: b["dsseEnvelope"].update(
            payload=b64encode(b64decode(b["dsseEnvelope"]["payload"]).replace(b"README", b"README2")).decode()
        )
    ),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_a_bundle_that_was_changed_is_named(signed: Path, key: PrivateKey, name: str) -> None:
    path = signed / "model.sig"
    assert _signature(lambda bundle: None)(path.read_bytes()) == path.read_bytes()
    path.write_bytes(TAMPERED[name](path.read_bytes()))
    assert problems(signed, key) == {("release.model-signature-wrong", "model.sig")}


def test_every_byte_of_the_bundle_counts(signed: Path, key: PrivateKey) -> None:
    path = signed / "model.sig"
    data = path.read_bytes()
    for at in range(0, len(data), len(data) // 16):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert problems(signed, key) == {("release.model-signature-wrong", "model.sig")}, at


def test_a_bundle_by_another_key_is_refused(signed: Path, key: PrivateKey, tmp_path: Path) -> None:
    """Also one that the tool itself made, over the same files."""
    other = P256Key.generate()
    other.save(tmp_path / "other.key", None)
    (signed / "model.sig").unlink()
    signing.Config().use_elliptic_key_signer(private_key=tmp_path / "other.key").sign(signed, signed / "model.sig")
    assert problems(signed, key) == {("release.model-signature-wrong", "model.sig")}


def test_the_same_release_has_the_same_bundle(
    trained: Trained, key: PrivateKey, bundle_key: P256Key, tmp_path: Path
) -> None:
    made = []
    for number in (1, 2):
        copy = Trained(tmp_path / f"runs{number}" / "first", trained.outcome)
        shutil.copytree(trained.folder.parent, copy.folder.parent, symlinks=True)
        with copy.open() as ledger:
            make_release(tmp_path / f"out{number}", [copy.folder], ledger, key, bundle_key=bundle_key)
        made.append({path.name: path.read_bytes() for path in (tmp_path / f"out{number}").iterdir()})
    assert made[0] == made[1] and "model.sig" in made[0]


def test_p256_keys_on_disk(tmp_path: Path) -> None:
    key = P256Key.generate()
    key.save(tmp_path / "sealed.key", b"secret")
    assert P256Key.load(tmp_path / "sealed.key", b"secret").public_pem == key.public_pem
    with raises_code("key.private-not-opened"):
        P256Key.load(tmp_path / "sealed.key", b"guess")
    PrivateKey.generate().save(tmp_path / "ed25519.key", None)
    with raises_code("key.not-p256"):
        P256Key.load(tmp_path / "ed25519.key", None)
    key.save(tmp_path / "plain.key", None)
    with raises_code("key.not-ed25519"):
        PrivateKey.load(tmp_path / "plain.key", None)
    (tmp_path / "plain.key").chmod(0o644)
    with raises_code("key.private-file-open-to-others"):
        P256Key.load(tmp_path / "plain.key", None)
