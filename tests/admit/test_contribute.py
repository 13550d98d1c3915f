"""Signing folders: what is written, what is kept, what is signed again, and who is left out."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from lamina.admit import Attestation, Descriptor, PrivateKey, commit, subject_tag
from lamina.admit.contribute import Outcome, State, attest_folder, ids_in
from lamina.admit.items import count_items
from lamina.errors import AdmissionError
from lamina.plan import Policy

KEY = PrivateKey(Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
NOW = 1_767_225_600
POLICY = Policy.template()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(4):
        (tmp_path / f"p{number}").mkdir()
        x = np.full((number + 1, 3), number, dtype=np.float32)
        np.savez(tmp_path / f"p{number}" / "payload.npz", x=x, y=np.zeros(number + 1, dtype=np.int64))
    return tmp_path


def signed(folder: Path, cls: Any = "sensitive", **options: Any) -> dict[str, Outcome]:
    return {each.id: each for each in attest_folder(folder, KEY, POLICY, cls, now=NOW, **options)}


def states(outcomes: dict[str, Outcome]) -> dict[str, str]:
    return {id: each.state.value for id, each in outcomes.items()}


def read(folder: Path) -> tuple[Descriptor, Attestation]:
    described = Descriptor.decode((folder / "descriptor.cbor").read_bytes())
    return described, Attestation.decode((folder / "attestation.cose").read_bytes())


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_what_is_signed_verifies_and_is_about_its_payload(folder: Path) -> None:
    before = {path: data for path, data in contents(folder).items() if path.name == "payload.npz"}
    outcomes = signed(folder)
    assert set(states(outcomes).values()) == {"signed"}
    assert list(outcomes) == ["p0", "p1", "p2", "p3"]
    nonces = set()
    for number in range(4):
        described, claims = read(folder / f"p{number}")
        payload = folder / f"p{number}" / "payload.npz"
        assert claims.signed_by(KEY.public, described.digest())
        assert claims.agrees(described) is None
        assert described.commitment == commit(described.nonce, payload.read_bytes())
        assert described.items == number + 1
        assert (described.not_before, described.expires, claims.iat) == (NOW, NOW + 365 * 86_400, NOW)
        assert outcomes[f"p{number}"].digest == described.digest()
        nonces.add(described.nonce)
        assert sorted(os.listdir(folder / f"p{number}")) == [
            "attestation.cose",
            "descriptor.cbor",
            "payload.npz",
        ]
    assert len(nonces) == 4
    assert all(path.read_bytes() == data for path, data in before.items())


def test_a_second_time_nothing_is_signed_again(folder: Path) -> None:
    signed(folder)
    before = contents(folder)
    later = {each.id: each for each in attest_folder(folder, KEY, POLICY, "sensitive", now=NOW + 1000)}
    assert set(states(later).values()) == {"kept"}
    assert contents(folder) == before
    forced = signed(folder, force=True)
    assert set(states(forced).values()) == {"signed"}
    assert all(later[id].digest != forced[id].digest for id in later)  # a new nonce each time


def test_an_interrupted_run_is_finished_by_repeating_it(folder: Path) -> None:
    outcomes = attest_folder(folder, KEY, POLICY, "sensitive", now=NOW)
    done = [next(outcomes).id, next(outcomes).id]
    before = contents(folder)
    again = states(signed(folder))
    assert again == {"p0": "kept", "p1": "kept", "p2": "signed", "p3": "signed"}
    assert done == ["p0", "p1"]
    assert contents(folder).items() >= before.items()


def _other_payload(folder: Path) -> dict[str, Any]:
    np.savez(folder / "p1" / "payload.npz", x=np.ones((2, 3), dtype=np.float32))
    return {}


def _torn(folder: Path) -> dict[str, Any]:
    """Stopped between the two files: a new descriptor, an old attestation."""
    data = (folder / "p1" / "descriptor.cbor").read_bytes()
    nonce = Descriptor.decode(data).nonce
    (folder / "p1" / "descriptor.cbor").write_bytes(data.replace(nonce, bytes(16)))
    return {}


def _no_attestation(folder: Path) -> dict[str, Any]:
    (folder / "p1" / "attestation.cose").unlink()
    return {}


def _no_descriptor(folder: Path) -> dict[str, Any]:
    (folder / "p1" / "descriptor.cbor").unlink()
    return {}


def _damaged(folder: Path) -> dict[str, Any]:
    path = folder / "p1" / "attestation.cose"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    return {}


def _garbage(folder: Path) -> dict[str, Any]:
    (folder / "p1" / "descriptor.cbor").write_bytes(b"\xff" * 5000)
    return {}


@pytest.mark.parametrize(
    "change", [_other_payload, _torn, _no_attestation, _no_descriptor, _damaged, _garbage]
)
def test_what_has_changed_is_signed_again(folder: Path, change: Callable[[Path], dict[str, Any]]) -> None:
    signed(folder)
    options = change(folder)
    assert states(signed(folder, **options)) == {"p0": "kept", "p1": "signed", "p2": "kept", "p3": "kept"}
    described, claims = read(folder / "p1")
    assert claims.signed_by(KEY.public, described.digest())
    assert claims.agrees(described) is None
    assert described.commitment == commit(described.nonce, folder / "p1" / "payload.npz")


@pytest.mark.parametrize(
    "options",
    [
        {"cls": "standard"},
        {"data_class": "ecg"},
        {"clip_norm": 0.5},
        {"noise_multiplier": 9.0},
        {"profile": False},
        {"expires": NOW + 5},
        {"not_before": NOW - 5},
        {"subjects": {f"p{i}": str(i) for i in range(4)}, "subject_key": bytes(32)},
        {"anchors": {f"p{i}": bytes([i]) * 32 for i in range(4)}},
    ],
    ids=lambda options: next(iter(options)),
)
def test_other_terms_are_signed_again_and_then_kept(folder: Path, options: dict[str, Any]) -> None:
    signed(folder)
    assert set(states(signed(folder, **options)).values()) == {"signed"}
    assert set(states(signed(folder, **options)).values()) == {"kept"}
    assert set(states(signed(folder)).values()) == (
        {"kept"} if set(options) <= {"expires", "not_before"} else {"signed"}
    )


def test_what_has_expired_is_signed_again(folder: Path) -> None:
    signed(folder, expires=NOW + 10)
    later = [each.state for each in attest_folder(folder, KEY, POLICY, "sensitive", now=NOW + 10)]
    assert later == [State.SIGNED] * 4


def test_another_key_signs_for_itself(folder: Path) -> None:
    signed(folder)
    other = PrivateKey.generate()
    assert [each.state for each in attest_folder(folder, other, POLICY, "sensitive", now=NOW)] == [
        State.SIGNED
    ] * 4
    described, claims = read(folder / "p0")
    assert described.contributor == claims.kid == other.public.id


def test_classes_subjects_and_anchors_by_id(folder: Path) -> None:
    classes = {"p0": "sensitive", "p1": "standard", "p2": "open"}
    subjects = {"p0": "ann", "p1": "bob", "p2": "cid"}
    anchors = {f"p{i}": bytes([i]) * 32 for i in range(3)}
    outcomes = signed(folder, classes, subjects=subjects, subject_key=bytes(32), anchors=anchors)
    assert states(outcomes) == {"p0": "signed", "p1": "signed", "p2": "signed", "p3": "refused"}
    assert outcomes["p3"].problem == "there is no class for it"
    for number, id in enumerate(classes):
        described, claims = read(folder / id)
        assert described.admissibility == classes[id]
        assert claims.tag == subject_tag(bytes(32), subjects[id])
        assert described.anchor == bytes([number]) * 32
    assert read(folder / "p2")[0].clip_norm == 0
    assert not (folder / "p3" / "descriptor.cbor").exists()


def test_one_contribution_by_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert states(signed(folder / "p2")) == {"p2": "signed"}
    assert not (folder / "p1" / "descriptor.cbor").exists()
    monkeypatch.chdir(folder / "p1")
    assert ids_in(".") == (folder.resolve(), ["p1"])


def test_one_that_cannot_be_signed_stops_no_other(folder: Path) -> None:
    for name in ("empty", "two", "link", "text", "hollow", "bell\a"):
        (folder / name).mkdir()
    (folder / "two" / "payload.npz").write_bytes(b"a")
    (folder / "two" / "payload.csv").write_bytes(b"b")
    (folder / "link" / "payload.csv").symlink_to(folder / "p0" / "payload.npz")
    (folder / "text" / "payload.npz").write_bytes(b"not an archive")
    np.savez(folder / "hollow" / "payload.npz", x=np.empty((0, 3)))
    (folder / "bell\a" / "payload.csv").write_bytes(b"1\n")
    outcomes = signed(folder)
    refused = {id: each.problem for id, each in outcomes.items() if each.state is State.REFUSED}
    assert refused.keys() == {"empty", "two", "link", "text", "hollow", "bell\a"}
    assert all(refused.values())
    assert sum(each.state is State.SIGNED for each in outcomes.values()) == 4


def test_what_is_wrong_for_all_is_refused_before_the_first(folder: Path) -> None:
    before = contents(folder)
    for options, word in (
        ({"cls": "nobody"}, "no class"),
        ({"cls": {"p0": "sensitive", "p1": "nobody"}}, "no class"),
        ({"clip_norm": 5.0}, "above"),
        ({"expires": NOW}, "window"),
        ({"subjects": {}}, "without a key"),
        ({"subject_key": bytes(32)}, "without subjects"),
    ):
        with pytest.raises(AdmissionError, match=word):
            signed(folder, **options)
    assert contents(folder) == before
    for path, word in (
        (folder / "p0" / "payload.npz", "cannot be listed"),
        (folder / "none", "cannot be listed"),
    ):
        with pytest.raises(AdmissionError, match=word):
            signed(path)
    (folder / "new").mkdir()
    with pytest.raises(AdmissionError, match="holds no contributions"):
        signed(folder / "new")


def test_any_single_payload_can_be_signed(folder: Path) -> None:
    for name in ("payload.csv", "payload.txt", "payload", "payload.tar.gz"):
        (folder / name.replace(".", "-")).mkdir()
        (folder / name.replace(".", "-") / name).write_bytes(b"1,2\n3,4\n")
    outcomes = signed(folder)
    assert set(states(outcomes).values()) == {"signed"}
    assert read(folder / "payload-csv")[0].items == 1


def test_files_are_as_readable_as_the_payload(folder: Path) -> None:
    os.chmod(folder / "p0" / "payload.npz", 0o600)
    signed(folder)
    for name in ("descriptor.cbor", "attestation.cose"):
        assert (folder / "p0" / name).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.parametrize("compressed", [False, True])
def test_items_are_counted_without_reading(tmp_path: Path, size: int, compressed: bool) -> None:
    path = tmp_path / "payload.npz"
    (np.savez_compressed if compressed else np.savez)(path, x=np.zeros((size, 2)), y=np.zeros(size))
    assert count_items(path) == size
    np.savez(path, x=np.zeros(()))
    with pytest.raises(AdmissionError, match="no examples"):
        count_items(path)
    np.savez(path, z=np.zeros(3))
    with pytest.raises(AdmissionError, match="no array 'x'"):
        count_items(path)


def test_what_the_list_of_the_folder_holds_is_no_contribution(folder: Path) -> None:
    (folder / "contributions.csv").write_text("id,class\n", encoding="utf-8")
    (folder / ".hidden").mkdir()
    (folder / "notes.json").write_text(json.dumps({}), encoding="utf-8")
    assert ids_in(folder)[1] == ["p0", "p1", "p2", "p3"]
