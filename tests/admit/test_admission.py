"""What an admission knows of its contributions, and who has to leave."""

from __future__ import annotations

import gc
import hashlib
import json
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lamina.admit import reasons
from lamina.admit.attestation import Attestation, Descriptor
from lamina.admit.contribution_sources import FolderContributions
from lamina.sign.key_ring import KeyRing
from lamina.sign.keys import PrivateKey


def copy(ring: KeyRing, folder: Path) -> KeyRing:
    ring.save(folder / "ring.json")
    return KeyRing.load(folder / "ring.json")


# ------------------------------------------------------------------------------------------- columns


def test_rows_say_what_was_signed(desk: Any) -> None:
    other = PrivateKey.generate()
    desk.keys.add(other.public, label="other")
    offered = [
        desk.offer("plain"),
        desk.offer("other", "standard", key=other, tag="0f" * 32, items=7),
        desk.offer("public", "open"),
        desk.offer("strict", clip_norm=200_000, noise_multiplier=10**8, profile=None),
    ]
    admission = desk.gate().review(offered)
    assert len(admission) == len(list(admission)) == 4
    for given, found in zip(offered, admission, strict=True):
        signed, claims = Descriptor.decode(given.descriptor), Attestation.decode(given.attestation)
        assert found.id == given.id and admission.row_of(given.id) == found.row
        assert found.descriptor == hashlib.sha256(given.descriptor).digest()
        assert found.attestation == hashlib.sha256(given.attestation).digest()
        assert (found.kid, found.cti) == (claims.kid, claims.cti)
        assert (found.account.cls, found.account.clip_micro, found.account.noise_micro) == (
            signed.admissibility, signed.clip_norm, signed.noise_multiplier,
        )  # fmt: skip
        assert (found.not_before, found.expires, found.items) == (signed.not_before, signed.expires, signed.items)
        assert found.tag == (None if claims.tag is None else bytes.fromhex(claims.tag))
        assert found.profile_signed is (signed.profile is not None)
        assert admission.holds(found.row, given.payload)
        assert not admission.holds(found.row, given.payload + b"\0")
    assert admission.row_of("nobody") is None
    assert [admission.bounds[int(i)] for i in admission.bound] == [found.account for found in admission]
    assert len(admission.bounds) == 4
    with pytest.raises(IndexError):
        admission[4]


def test_a_digest_that_ends_in_zeros_keeps_them(desk: Any) -> None:
    i, digest = 0, b"\1"
    while digest[-1]:
        i += 1
        nonce = i.to_bytes(16, "big")
        digest = desk.descriptor(b"data of a", nonce=nonce).digest()
    admission = desk.gate().review([desk.offer("a", nonce=nonce)])
    assert admission[0].descriptor == digest
    assert admission.holds(0, b"data of a")


def test_columns_cannot_be_written(desk: Any) -> None:
    admission = desk.gate().review([desk.offer("a")])
    with pytest.raises(ValueError, match="read-only"):
        admission.columns["expires"][0] = 0
    with pytest.raises(ValueError, match="read-only"):
        admission.cls[0] = 1


def test_many_contributions_take_little(desk: Any) -> None:
    """A row of 231 bytes and an id; nothing of the size of an object."""
    desk.policy = desk.policy_with(clinical={"population": 400})
    offered = [desk.offer(f"contribution-{i:06d}") for i in range(600)]
    gate = desk.gate()
    gate.review(offered[:10])
    tracemalloc.start()
    admission = gate.review(iter(offered))
    gc.collect()
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(admission) == 400 and len(admission.refused) == 200  # the class has no more places
    assert held < 450 * len(offered)


def test_the_report_counts(desk: Any) -> None:
    offered = [desk.offer(f"{i}") for i in range(3)] + [desk.offer("x", "standard")]
    offered += [replace(offered[0], id=f"copy {i}") for i in range(30)]
    offered.insert(0, replace(desk.offer("unsigned"), attestation=None))
    admission = desk.gate().review(offered)
    told = json.loads(json.dumps(admission.to_dict()))
    assert told["admitted"] == 4
    assert told["classes"] == {"clinical": 3, "standard": 1, "open": 0}
    assert told["reasons"] == {"no-attestation": 1, "replayed": 30}
    assert [each["id"] for each in told["refused"]] == ["unsigned", *(f"copy {i}" for i in range(30))]
    assert told["untagged"] == admission.untagged == 4
    text = admission.table()
    assert "4 without a subject tag" in text and "lamina attest --subject-key" in text
    assert "4 admitted, 31 refused" in text
    assert "it is not signed" in text and "… and 11 more" in text
    assert admission.refused[-1].id == "copy 29" and admission.refused[1:3][0].id == "copy 0"
    assert repr(admission) == "Admission(4 admitted, 31 refused)"


def test_only_who_is_protected_needs_a_subject_tag(desk: Any) -> None:
    admission = desk.gate().review([desk.offer("a"), desk.offer("b", "open"), desk.offer("c", tag="ab" * 32)])
    assert (len(admission), admission.untagged) == (3, 1)
    public = desk.gate().review([desk.offer("d", "open")])
    assert (len(public), public.untagged) == (1, 0)
    assert "subject tag" not in public.table()
    assert desk.gate().review([]).untagged == 0


# ------------------------------------------------------------------------------------------- who has to leave


def test_within_an_epoch_windows_and_keys_are_looked_at(desk: Any, tmp_path: Path) -> None:
    stolen, old, new = (PrivateKey.generate() for _ in range(3))
    desk.keys.add(stolen.public, label="stolen")
    desk.keys.add(old.public, label="old")
    offered = [
        desk.offer("short", expires=desk.NOW + 100),
        desk.offer("stays"),
        desk.offer("stolen", key=stolen),
        desk.offer("old, early", key=old, issued_at=desk.NOW - 100),
        desk.offer("old, late", key=old, issued_at=desk.NOW - 10),
    ]
    admission = desk.gate().review(iter(offered))
    assert len(admission.recheck()) == 0
    desk.now += 99
    assert len(admission.recheck()) == 0
    desk.now += 1
    lapse = admission.recheck()
    assert list(lapse) == [(0, reasons.EXPIRED)]
    ring = copy(desk.keys, tmp_path)
    ring.revoke(stolen.public.id, at=desk.NOW + 50)
    ring.rotate(old.public.id, new.public, at=desk.NOW - 50)
    lapse = admission.recheck(keys=ring)
    assert list(lapse) == [(2, reasons.REVOKED_KEY), (4, reasons.RETIRED_KEY)]
    assert len(admission.recheck()) == 0  # told once
    assert admission.standing.tolist() == [False, True, False, True, False]
    assert [(r.id, r.reason) for r in admission.left] == [
        ("short", reasons.EXPIRED),
        ("stolen", reasons.REVOKED_KEY),
        ("old, late", reasons.RETIRED_KEY),
    ]
    assert len(admission) == 5
    assert [each["id"] for each in admission.to_dict()["left"]] == ["short", "stolen", "old, late"]
    assert "had to leave" in admission.table()


def test_nobody_comes_back(desk: Any, tmp_path: Path) -> None:
    """Not even if the key ring is exchanged for one that never heard of the revocation."""
    before = copy(desk.keys, tmp_path)
    admission = desk.gate().review([desk.offer("a")])
    desk.keys.revoke(desk.key.public.id, at=desk.NOW)
    assert admission.recheck().reasons == [reasons.REVOKED_KEY]
    assert len(admission.recheck(keys=before)) == 0
    assert not admission.standing.any()
    desk.now += desk.policy.corpus.epoch
    admission.recheck(keys=before)
    assert not admission.standing.any()


def test_a_ring_without_the_key_or_with_another_role_lets_nobody_stay(desk: Any) -> None:
    admission = desk.gate().review([desk.offer("a")])
    assert admission.recheck(keys=KeyRing()).reasons == [reasons.UNKNOWN_KEY]
    admission = desk.gate().review([desk.offer("a")])
    ring = KeyRing()
    ring.add(desk.key.public, label="x", role="ledger")
    assert admission.recheck(keys=ring).reasons == [reasons.WRONG_ROLE]
    admission = desk.gate().review([desk.offer("a")])
    ring = KeyRing()
    ring.add(desk.key.public, label="x", valid_from=desk.NOW + 1)
    assert admission.recheck(keys=ring).reasons == [reasons.EARLY_KEY]


@pytest.mark.parametrize("processes", [1, 2])
def test_after_an_epoch_everything_is_verified_again(desk: Any, tmp_path: Path, processes: int) -> None:
    offered = [desk.offer(name) for name in ("changed", "damaged", "deleted", "stays", "unsigned")]
    for given in offered:
        desk.write(tmp_path, given)
    admission = desk.gate(processes=processes).review(tmp_path)
    assert len(admission) == 5
    shutil.rmtree(tmp_path / "deleted")
    (tmp_path / "damaged" / "payload.bin").write_bytes(b"other")
    (tmp_path / "unsigned" / "attestation.cose").unlink()
    shutil.rmtree(tmp_path / "changed")
    desk.write(tmp_path, desk.offer("changed"))  # signed anew: another contribution, which must be admitted by itself
    desk.write(tmp_path, desk.offer("new"))
    assert len(admission.recheck()) == 0  # the epoch is not over
    desk.now += desk.policy.corpus.epoch
    lapse = admission.recheck()
    assert dict(zip([admission.ids[row] for row in lapse.rows], lapse.reasons, strict=True)) == {
        "changed": reasons.CHANGED,
        "damaged": reasons.PAYLOAD_MISMATCH,
        "deleted": reasons.GONE,
        "unsigned": reasons.NO_ATTESTATION,
    }
    assert len(admission) == 5 and admission.standing.sum() == 1
    (tmp_path / "stays" / "payload.bin").write_bytes(b"other")
    desk.now += desk.policy.corpus.epoch - 1
    assert len(admission.recheck()) == 0  # a new epoch began
    desk.now += 1
    assert admission.recheck().reasons == [reasons.PAYLOAD_MISMATCH]


def test_what_can_be_read_once_only_lasts_one_epoch(desk: Any) -> None:
    admission = desk.gate().review(iter([desk.offer("a"), desk.offer("b", expires=desk.NOW + 10)]))
    desk.now += desk.policy.corpus.epoch
    assert admission.recheck().reasons == [reasons.NOT_REPEATED, reasons.EXPIRED]


def test_a_duplicate_does_not_speak_for_the_one_that_was_admitted(desk: Any) -> None:
    first, second = desk.offer("same"), desk.offer("same")
    admission = desk.gate().review([first, second])
    assert len(admission) == 1
    desk.now += desk.policy.corpus.epoch
    assert len(admission.recheck()) == 0  # the second differs, the first is still there
    admission.source = [second]
    desk.now += desk.policy.corpus.epoch
    assert admission.recheck().reasons == [reasons.CHANGED]


def test_an_instant_can_be_given(desk: Any) -> None:
    admission = desk.gate().review([desk.offer("a", expires=desk.NOW + 100)])
    assert admission.recheck(desk.NOW + 100).reasons == [reasons.EXPIRED]


def test_rows_can_be_dismissed(desk: Any) -> None:
    admission = desk.gate().review([desk.offer("a"), desk.offer("b", expires=desk.NOW + 1)])
    desk.now += 1
    admission.recheck()
    admission.dismiss(np.array([0, 1]), reasons.OUT_OF_REACH)
    assert [r.reason for r in admission.left] == [reasons.OUT_OF_REACH, reasons.EXPIRED]


def test_rows_can_be_refused_before_they_are_used(desk: Any) -> None:
    """What was signed is right, and what was brought cannot be used."""
    offered = [desk.offer("0"), desk.offer("1", "standard"), desk.offer("2", expires=desk.NOW + 1), desk.offer("3")]
    offered.insert(2, replace(offered[0], id="copy"))
    admission = desk.gate().review(offered)
    assert admission.places.tolist() == [0, 1, 3, 4]
    assert len(admission.bounds) == 2 and admission.row_of("3") == 3
    view = admission.columns
    desk.now += 1
    admission.recheck()
    admission.refuse({1: (reasons.UNREADABLE, "no table")})
    assert len(view) == 4
    assert list(admission.ids) == ["0", "2", "3"] and admission.places.tolist() == [0, 3, 4]
    assert [(r.id, r.reason) for r in admission.refused] == [("1", reasons.UNREADABLE), ("copy", reasons.REPLAYED)]
    assert admission.standing.tolist() == [True, False, True]
    assert len(admission.bounds) == 1 and admission.row_of("3") == 2 and admission.row_of("1") is None
    assert admission.to_dict()["classes"] == {"clinical": 3, "standard": 0, "open": 0}


def test_a_recheck_agrees_with_a_check_of_each(desk: Any) -> None:
    """The rules for all rows at once are the rules for one."""
    keys = [PrivateKey.generate() for _ in range(4)]
    ring = desk.keys
    for number, key in enumerate(keys):
        ring.add(key.public, label=f"{number}", valid_from=desk.NOW - 1000)
    random = np.random.default_rng(3)
    offered = [
        desk.offer(
            f"{i:02d}",
            key=keys[i % 4],
            expires=desk.NOW + int(random.integers(1, 200)),
            issued_at=desk.NOW - int(random.integers(0, 200)),
        )
        for i in range(40)
    ]
    admission = desk.gate().review(offered)
    assert len(admission) == 40
    ring.revoke(keys[0].public.id, at=desk.NOW + 100)
    ring.rotate(keys[1].public.id, PrivateKey.generate().public, at=desk.NOW - 100)
    for step in (0, 60, 110, 250):
        desk.now = desk.NOW + step
        admission.recheck()
        gate = desk.gate()
        assert admission.standing.tolist() == [gate.check(given) is None for given in offered]
        reasons = {r.id: r.reason for r in admission.left}
        fresh = {given.id: refusal.reason for given in offered if (refusal := gate.check(given)) is not None}
        assert reasons.keys() == fresh.keys()


def test_the_source_is_kept(desk: Any, tmp_path: Path) -> None:
    desk.write(tmp_path, desk.offer("a"))
    admission = desk.gate().review(str(tmp_path))
    assert isinstance(admission.source, FolderContributions)
    assert admission.source.get("a").payload == tmp_path / "a" / "payload.bin"
