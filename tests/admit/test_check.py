"""`gate.check`: one contribution by itself, by the keys and the clock of the moment."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lamina.admit import reasons
from lamina.sign.keys import PrivateKey


def test_a_check_sees_expiry_and_revocation(desk: Any) -> None:
    gate = desk.gate()
    short, given = desk.offer("short", expires=desk.NOW + 10), desk.offer("a")
    assert gate.check(short) is None and gate.check(given) is None
    desk.keys.revoke(desk.key.public.id, at=desk.NOW + 60)  # announced: the ring has another version
    assert gate.check(given) is None
    desk.now += 10
    assert gate.check(short).reason is reasons.EXPIRED  # type: ignore[union-attr]
    desk.now += 49
    assert gate.check(given) is None
    desk.now += 1  # the moment has come, and the ring is the same
    assert gate.check(given).reason is reasons.REVOKED_KEY  # type: ignore[union-attr]


def test_a_check_looks_at_every_part(desk: Any) -> None:
    gate, given = desk.gate(), desk.offer("a")
    assert gate.check(given) is None
    assert gate.check(replace(given, payload=b"x")).reason is reasons.PAYLOAD_MISMATCH  # type: ignore[union-attr]
    assert gate.check(replace(given, payload=None)).reason is reasons.NO_PAYLOAD  # type: ignore[union-attr]
    assert gate.check(replace(given, id="\n")).reason is reasons.BAD_ID  # type: ignore[union-attr]
    other = desk.offer("b")
    assert gate.check(replace(given, descriptor=other.descriptor)).reason is reasons.BAD_SIGNATURE  # type: ignore[union-attr]
    assert gate.check(given) is None


def test_the_examiner_of_a_gate_follows_its_ring(desk: Any) -> None:
    gate = desk.gate()
    key = PrivateKey.generate()
    given = desk.offer("a", key=key)
    assert gate.check(given).reason is reasons.UNKNOWN_KEY  # type: ignore[union-attr]
    desk.keys.add(key.public, label="new")
    assert gate.check(given) is None
