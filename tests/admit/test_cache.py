"""What was verified counts for an epoch, and not a second longer than it should."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lamina.admit.contribution_sources import Contribution
from lamina.admit.gate import VerificationCache
from lamina.admit.verdicts import Reason
from lamina.sign.keys import PrivateKey, PublicKey


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What was verified."""
    seen: list[bytes] = []
    verify = PublicKey.verify

    def counting(self: PublicKey, message: bytes, signature: bytes) -> bool:
        seen.append(signature)
        return verify(self, message, signature)

    monkeypatch.setattr(PublicKey, "verify", counting)
    return seen


def test_a_second_check_verifies_nothing_until_the_epoch_is_over(desk: Any, verified: list[bytes]) -> None:
    gate, given = desk.gate(), desk.offer("a")
    for _ in range(3):
        assert gate.check(given) is None
    assert len(verified) == 1
    desk.now += gate.policy.corpus.epoch - 1
    assert gate.check(given) is None and len(verified) == 1  # asking does not prolong it
    desk.now += 1
    assert gate.check(given) is None and len(verified) == 2


def test_a_cached_check_sees_expiry_and_revocation(desk: Any, verified: list[bytes]) -> None:
    gate = desk.gate()
    short, given = desk.offer("short", expires=desk.NOW + 10), desk.offer("a")
    assert gate.check(short) is None and gate.check(given) is None
    desk.keys.revoke(desk.key.public.id, at=desk.NOW + 60)  # announced: the ring has another version
    assert gate.check(given) is None and len(verified) == 3
    desk.now += 10
    assert gate.check(short).reason is Reason.EXPIRED  # type: ignore[union-attr]
    desk.now += 49
    assert gate.check(given) is None and len(verified) == 4  # one for `short`, none for this
    desk.now += 1  # the moment has come, and the ring is the same
    assert gate.check(given).reason is Reason.REVOKED_KEY  # type: ignore[union-attr]


def test_a_cached_check_looks_at_the_payload(desk: Any) -> None:
    gate, given = desk.gate(), desk.offer("a")
    assert gate.check(given) is None
    assert gate.check(replace(given, payload=b"x")).reason is Reason.PAYLOAD_MISMATCH  # type: ignore[union-attr]
    assert gate.check(replace(given, payload=None)).reason is Reason.NO_PAYLOAD  # type: ignore[union-attr]
    assert gate.check(replace(given, id="\n")).reason is Reason.BAD_ID  # type: ignore[union-attr]
    other = desk.offer("b")
    assert gate.check(replace(given, descriptor=other.descriptor)).reason is Reason.BAD_SIGNATURE  # type: ignore[union-attr]
    assert gate.check(given) is None


def test_refusals_are_not_cached(desk: Any, verified: list[bytes]) -> None:
    gate = desk.gate()
    bad = replace(desk.offer("a"), attestation=desk.offer("b").attestation)
    assert gate.check(bad) is not None and gate.check(bad) is not None
    assert len(verified) == 2 and len(gate._cache) == 0


def test_the_examiner_of_a_gate_follows_its_ring(desk: Any) -> None:
    gate = desk.gate()
    key = PrivateKey.generate()
    given = desk.offer("a", key=key)
    assert gate.check(given).reason is Reason.UNKNOWN_KEY  # type: ignore[union-attr]
    desk.keys.add(key.public, label="new")
    assert gate.check(given) is None


def test_a_full_cache_forgets_the_oldest() -> None:
    cache = VerificationCache(limit=2)
    a, b, c, x = (Contribution(name, b"d", name.encode()) for name in "abcx")
    for given in (a, b, a, c):
        cache.put(given, 10, b"n", b"c", b"ring")
    assert len(cache) == 2
    assert cache.get(b, 0, b"ring") is None
    assert cache.get(a, 9, b"ring") == (b"n", b"c")
    assert cache.get(a, 10, b"ring") is None
    assert cache.get(replace(a, descriptor=b"other"), 9, b"ring") is None
    assert cache.get(a, 9, b"other ring") is None
    assert cache.get(Contribution("a"), 9, b"ring") is None
    cache.put(x, 10, b"n", b"c", b"other ring")
    assert len(cache) == 1
