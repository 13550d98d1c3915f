"""Signing folders: what is written, what is kept, what is signed again, and who is left out."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from refusals import raises_code

from lamina.admit.attestation import Attestation, Descriptor, commit, subject_tag
from lamina.admit.npz import count_examples
from lamina.admit.signing import SigningOutcome, SigningState, attest_folder, contribution_ids
from lamina.plan.policy import Policy
from lamina.sign.keys import PrivateKey

KEY = PrivateKey(Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
NOW = 1_767_225_600
POLICY = Policy.template()
STRICTER = SigningState.STRICTER.value


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(4):
        (tmp_path / f"p{number}").mkdir()
        x = np.full((number + 1, 3), number, dtype=np.float32)
        np.savez(tmp_path / f"p{number}" / "payload.npz", x=x, y=np.zeros(number + 1, dtype=np.int64))
    return tmp_path


def signed(folder: Path, cls: Any = "sensitive", **options: Any) -> dict[str, SigningOutcome]:
    return {each.id: each for each in attest_folder(folder, KEY, POLICY, cls, now=NOW, **options)}


def states(outcomes: dict[str, SigningOutcome]) -> dict[str, str]:
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
        assert claims.mismatch(described) is None
        assert described.commitment == commit(described.nonce, payload.read_bytes())
        assert described.items == number + 1
        assert (described.not_before, described.expires, claims.iat) == (NOW, NOW + 365 * 86_400, NOW)
        assert outcomes[f"p{number}"].digest == described.digest()
        nonces.add(described.nonce)
        assert sorted(os.listdir(folder / f"p{number}")) == ["attestation.cose", "descriptor.cbor", "payload.npz"]
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


def _torn(folder: Path) -> None:
    """Stopped between the two files: a new descriptor, an old attestation."""
    data = (folder / "p1" / "descriptor.cbor").read_bytes()
    (folder / "p1" / "descriptor.cbor").write_bytes(data.replace(Descriptor.decode(data).nonce, bytes(16)))


def _damaged(folder: Path) -> None:
    path = folder / "p1" / "attestation.cose"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


CHANGES: dict[str, Callable[[Path], Any]] = {
    "other payload": lambda folder: np.savez(folder / "p1" / "payload.npz", x=np.ones((2, 3), dtype=np.float32)),
    "torn": _torn,
    "no attestation": lambda folder: (folder / "p1" / "attestation.cose").unlink(),
    "no descriptor": lambda folder: (folder / "p1" / "descriptor.cbor").unlink(),
    "damaged": _damaged,
    "garbage": lambda folder: (folder / "p1" / "descriptor.cbor").write_bytes(b"\xff" * 5000),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_is_signed_again(folder: Path, change: str) -> None:
    signed(folder)
    CHANGES[change](folder)
    assert states(signed(folder)) == {"p0": "kept", "p1": "signed", "p2": "kept", "p3": "kept"}
    described, claims = read(folder / "p1")
    assert claims.signed_by(KEY.public, described.digest())
    assert claims.mismatch(described) is None
    assert described.commitment == commit(described.nonce, folder / "p1" / "payload.npz")


SUBJECTS = {"subjects": {f"p{i}": str(i) for i in range(4)}, "subject_key": bytes(32)}
ANCHORS = {"anchors": {f"p{i}": bytes([i]) * 32 for i in range(4)}}


@pytest.mark.parametrize(
    ("options", "after"),
    [
        ({"data_class": "ecg"}, "kept"),
        ({"clip_norm": 0.5}, STRICTER),
        ({"noise_multiplier": 9.0}, STRICTER),
        ({"expires": NOW + 5}, "kept"),
        ({"not_before": NOW - 5}, "kept"),
        ({"not_before": NOW + 5}, "kept"),
        (SUBJECTS, "kept"),
        (ANCHORS, "kept"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else None,
)
def test_other_terms_are_signed_anew_and_then_kept(folder: Path, options: dict[str, Any], after: str) -> None:
    signed(folder)
    assert set(states(signed(folder, **options)).values()) == {"signed"}
    before = contents(folder)
    assert set(states(signed(folder, **options)).values()) == {"kept"}
    assert set(states(signed(folder)).values()) == {after}  # not asking for it takes nothing back
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"noise_multiplier": 9.0}, {}),
        ({"noise_multiplier": 9.0}, {"noise_multiplier": 8.0}),
        ({"clip_norm": 0.25, "noise_multiplier": 9.0}, {"clip_norm": 0.5}),
        ({}, {"profile": False}),
        ({}, {"cls": "standard"}),
        ({}, {"cls": "open"}),
    ],
)
def test_what_is_stricter_is_loosened_by_force_only(folder: Path, first: dict[str, Any], then: dict[str, Any]) -> None:
    signed(folder / "p1", **first)
    before = contents(folder / "p1")
    for _ in range(2):
        found = signed(folder, **then)
        assert found["p1"].state is SigningState.STRICTER
        assert contents(folder / "p1") == before
    assert {id: each.replaced for id, each in found.items() if each.replaced} == {}
    forced = signed(folder, force=True, **then)
    assert set(states(forced).values()) == {"signed"}
    assert {id: each.replaced for id, each in forced.items() if each.replaced} == {"p1": SigningState.STRICTER}
    assert set(states(signed(folder, **then)).values()) == {"kept"}


def test_a_stricter_bound_survives_whatever_else_makes_it_be_signed_anew(folder: Path) -> None:
    kept = {"clip_norm": 0.25, "noise_multiplier": 9.0, "data_class": "ecg", **SUBJECTS}
    for change, options in (
        ("other payload", {}), ("torn", {}), ("window", {"expires": NOW + 50}), ("anchors", ANCHORS),
        ("expired", {"now": NOW + 366 * 86_400}), ("noise", {"noise_multiplier": 10.0}),
    ):  # fmt: skip
        signed(folder / "p1", force=True, **kept)
        CHANGES.get(change, lambda folder: None)(folder)
        (found,) = attest_folder(folder / "p1", KEY, POLICY, "sensitive", **{"now": NOW, **options})
        assert (found.state, found.carried) == (SigningState.SIGNED, True), change
        described, claims = read(folder / "p1")
        z = 10_000_000 if change == "noise" else 9_000_000
        assert (described.clip_norm, described.noise_multiplier) == (250_000, z)
        assert described.data_class == "ecg"
        assert (claims.tag is not None) == (change != "torn")  # a tag is believed only if it is signed
        assert claims.signed_by(KEY.public, described.digest())


def _policy(profile: str, *, epsilon: float = 1.0, floors: str = "", earlier: str = "") -> Policy:
    text = f"""
[corpus]
origin = "example.org/corpus"
delta = 1e-6
{floors}
{earlier}
[class.sensitive]
population = 100
epsilon = {epsilon}
{profile}
"""
    return Policy.model_validate(tomllib.loads(text))


def _attested(folder: Path, policy: Policy, **options: Any) -> set[str]:
    made = attest_folder(folder, KEY, policy, "sensitive", now=NOW, **options)
    return {each.state.value for each in made}


def test_what_was_signed_before_the_policy_gained_a_profile_is_kept(folder: Path) -> None:
    whole, half, quarter = (_policy(text) for text in ("", "profile = { top = 0.5 }", "profile = { top = 0.25 }"))
    assert _attested(folder, whole) == {"signed"}
    before = contents(folder)
    assert _attested(folder, half) == {"kept"}
    assert contents(folder) == before
    assert _attested(folder, half, force=True) == {"signed"}
    assert read(folder / "p0")[0].profile == "top=0.5"
    assert _attested(folder, quarter) == {"kept"}  # the class reaches less than was signed


def test_more_depth_than_was_signed_is_signed_by_force_only(folder: Path) -> None:
    half, quarter = (_policy(f"profile = {{ top = {share} }}") for share in (0.5, 0.25))
    _attested(folder, quarter)
    before = contents(folder)
    (first, *_) = attest_folder(folder, KEY, half, "sensitive", now=NOW)
    assert first.state is SigningState.REFUSED  # the gate refuses it, and signing would take something back
    assert "top=0.25" in str(first.problem)
    assert "force" in str(first.problem)
    assert contents(folder) == before
    assert {each.replaced for each in attest_folder(folder, KEY, half, "sensitive", now=NOW, force=True)} == {
        SigningState.STRICTER
    }


def test_what_the_policy_no_longer_admits_is_signed_anew(folder: Path) -> None:
    floors, old = "floors = { noise_multiplier = 0.5 }", "earlier_floors = [{}]"
    _attested(folder, _policy("", epsilon=2.0))
    assert _attested(folder, _policy("", epsilon=2.0, floors=floors, earlier=old)) == {"kept"}
    assert _attested(folder, _policy("", epsilon=2.0, floors=floors)) == {"signed"}  # other floors
    assert _attested(folder, _policy("", epsilon=1.0, floors=floors)) == {"signed"}  # a stricter class
    assert _attested(folder, _policy("", epsilon=2.0, floors=floors)) == {STRICTER}
    assert _attested(folder, POLICY) == {"signed"}  # another corpus


def test_what_has_expired_is_signed_again(folder: Path) -> None:
    signed(folder, expires=NOW + 10)
    later = [each.state for each in attest_folder(folder, KEY, POLICY, "sensitive", now=NOW + 10)]
    assert later == [SigningState.SIGNED] * 4


def test_what_another_key_signed_is_replaced_by_force_only(folder: Path) -> None:
    other = PrivateKey.generate()
    signed(folder / "p1")
    signed(folder / "p2", noise_multiplier=9.0)
    CHANGES["other payload"](folder)  # whatever is wrong with it, it is theirs to mend
    before = contents(folder / "p1") | contents(folder / "p2")

    def run(**options: Any) -> dict[str, SigningOutcome]:
        made = attest_folder(folder, other, POLICY, "sensitive", now=NOW, **options)
        return {each.id: each for each in made}

    another = SigningState.OTHER_KEY.value
    assert states(run()) == {"p0": "signed", "p1": another, "p2": another, "p3": "signed"}
    assert states(run()) == {"p0": "kept", "p1": another, "p2": another, "p3": "kept"}
    assert contents(folder).items() >= before.items()
    forced = run(force=True)
    assert set(states(forced).values()) == {"signed"}
    assert {id: each.replaced for id, each in forced.items() if each.replaced} == {
        "p1": SigningState.OTHER_KEY,
        "p2": SigningState.OTHER_KEY,
    }
    described, claims = read(folder / "p1")
    assert described.contributor == claims.kid == other.public.id


@pytest.mark.parametrize(
    ("change", "state"),
    [
        ("damaged", SigningState.OTHER_KEY),
        ("no descriptor", SigningState.OTHER_KEY),
        ("no attestation", SigningState.SIGNED),
    ],
)
def test_what_is_left_of_another_key(folder: Path, change: str, state: SigningState) -> None:
    """Without an attestation nobody signed it; with half of one it is still theirs."""
    signed(folder)
    CHANGES[change](folder)
    (found,) = attest_folder(folder / "p1", PrivateKey.generate(), POLICY, "sensitive", now=NOW)
    assert found.state is state


@pytest.mark.parametrize("force", [False, True])
def test_a_dry_run_says_the_same_and_writes_nothing(folder: Path, force: bool) -> None:
    signed(folder / "p0")
    signed(folder / "p1", clip_norm=0.5)
    list(attest_folder(folder / "p2", PrivateKey.generate(), POLICY, "sensitive", now=NOW))
    (folder / "empty").mkdir()
    before = contents(folder)
    told = signed(folder, dry_run=True, force=force)
    assert contents(folder) == before
    done = signed(folder, force=force)

    def figures(found: dict[str, SigningOutcome]) -> list[Any]:
        return [(each.id, each.state, each.problem, each.replaced, each.carried) for each in found.values()]

    assert figures(told) == figures(done)
    assert len(set(states(done).values())) == (2 if force else 5)


def test_without_a_key_only_a_dry_run(folder: Path) -> None:
    signed(folder / "p0")
    made = attest_folder(folder, None, POLICY, "sensitive", now=NOW, dry_run=True)
    assert [each.state for each in made] == [SigningState.OTHER_KEY, *[SigningState.SIGNED] * 3]
    with raises_code("admit.signing-key-missing"):
        attest_folder(folder, None, POLICY, "sensitive", now=NOW)


def test_a_window_in_the_past_is_signed_by_force_only(folder: Path) -> None:
    past = {"not_before": NOW - 100, "expires": NOW}
    with raises_code("admit.window-over"):
        signed(folder, **past)
    assert not (folder / "p0" / "descriptor.cbor").exists()
    assert set(states(signed(folder, force=True, **past)).values()) == {"signed"}


def test_classes_subjects_and_anchors_by_id(folder: Path) -> None:
    classes = {"p0": "sensitive", "p1": "standard", "p2": "open"}
    subjects = {"p0": "ann", "p1": "bob", "p2": "cid"}
    anchors = {f"p{i}": bytes([i]) * 32 for i in range(3)}
    outcomes = signed(folder, classes, subjects=subjects, subject_key=bytes(32), anchors=anchors)
    assert states(outcomes) == {"p0": "signed", "p1": "signed", "p2": "signed", "p3": "refused"}
    assert outcomes["p3"].problem == "it has no class"
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
    assert contribution_ids(".") == (folder.resolve(), ["p1"])


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
    refused = {id: each.problem for id, each in outcomes.items() if each.state is SigningState.REFUSED}
    assert refused.keys() == {"empty", "two", "link", "text", "hollow", "bell\a"}
    assert all(refused.values())
    assert sum(each.state is SigningState.SIGNED for each in outcomes.values()) == 4


def test_what_is_wrong_for_all_is_refused_before_the_first(folder: Path) -> None:
    before = contents(folder)
    for options, word in (
        ({"cls": "nobody"}, "admit.class-unknown"),
        ({"cls": {"p0": "sensitive", "p1": "nobody"}}, "admit.class-unknown"),
        ({"clip_norm": 5.0}, "admit.clip-norm-above-class"),
        ({"expires": NOW}, "admit.window-empty"),
        ({"subjects": {}}, "admit.subjects-without-key"),
        ({"subject_key": bytes(32)}, "admit.subjects-without-key"),
    ):
        with raises_code(word):
            signed(folder, **options)
    assert contents(folder) == before
    for path, word in (
        (folder / "p0" / "payload.npz", "admit.folder-unreadable"),
        (folder / "none", "admit.folder-unreadable"),
    ):
        with raises_code(word):
            signed(path)
    (folder / "new").mkdir()
    with raises_code("admit.no-contributions"):
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
    assert count_examples(path) == size
    np.savez(path, x=np.zeros(()))
    with raises_code("admit.payload-without-examples"):
        count_examples(path)
    np.savez(path, z=np.zeros(3))
    with raises_code("admit.payload-without-x"):
        count_examples(path)


def test_what_the_list_of_the_folder_holds_is_no_contribution(folder: Path) -> None:
    (folder / "contributions.csv").write_text("id,class\n", encoding="utf-8")
    (folder / ".hidden").mkdir()
    (folder / "notes.json").write_text(json.dumps({}), encoding="utf-8")
    assert contribution_ids(folder)[1] == ["p0", "p1", "p2", "p3"]
