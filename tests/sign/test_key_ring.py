"""The ring: who counts from when to when, and a file that says nothing else."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st
from refusals import raises_code

from lamina.sign.key_ring import KeyRing, KeyStatus
from lamina.sign.keys import LAST_SECOND, PrivateKey, PublicKey, format_utc, parse_time, parse_utc

KEYS = [PrivateKey(Ed25519PrivateKey.from_private_bytes(bytes([i]) * 32)).public for i in range(6)]
A, B, C = KEYS[:3]


def ring_of(*keys: PublicKey) -> KeyRing:
    ring = KeyRing()
    for number, key in enumerate(keys):
        ring.add(key, label=f"key {number}")
    return ring


# ------------------------------------------------------------------------------ time


def test_a_key_counts_from_its_first_instant() -> None:
    ring = KeyRing()
    ring.add(A, label="a", valid_from=1000)
    assert not ring.usable(A.id, 999)
    assert ring.usable(A.id, 1000)
    assert not ring.usable(A.id, 2000, issued_at=999)  # signed before it was valid
    assert not ring.usable(B.id, 1000)
    assert ring.get(B.id) is None


def test_rotation_keeps_what_was_signed_before() -> None:
    ring = ring_of(A)
    added = ring.rotate(A.id, B, at=1000)
    old = ring.get(A.id)
    assert old is not None
    assert (old.replaced_by, old.retired_from, added.valid_from, added.label) == (B.id, 1000, 1000, "key 0")
    assert ring.usable(A.id, 5000, issued_at=999)
    assert not ring.usable(A.id, 5000, issued_at=1000)
    assert ring.usable(A.id, 999)
    assert not ring.usable(A.id, 1000)  # signing now
    assert not ring.usable(B.id, 999)
    assert ring.usable(B.id, 1000)
    assert old.standing(5000) is KeyStatus.RETIRED


def test_a_revoked_key_is_worth_nothing_whatever_date_it_writes() -> None:
    ring = ring_of(A, B)
    ring.revoke(A.id, at=1000)
    assert ring.usable(A.id, 999)
    for issued in (0, 500, 999, 1000, None):
        assert not ring.usable(A.id, 1000, issued_at=issued)
        assert not ring.usable(A.id, LAST_SECOND, issued_at=issued)
    assert ring.usable(B.id, 2000)
    entry = ring.get(A.id)
    assert entry is not None
    assert entry.standing(1000, 10) is KeyStatus.REVOKED


def test_a_revocation_moves_to_earlier_only() -> None:
    ring = ring_of(A)
    ring.revoke(A.id, at=1000)
    ring.revoke(A.id, at=500)
    assert not ring.usable(A.id, 700)
    with raises_code("key.revocation-moved-later"):
        ring.revoke(A.id, at=501)


def test_a_retired_key_can_be_revoked_too() -> None:
    ring = ring_of(A)
    ring.rotate(A.id, B, at=1000)
    ring.revoke(A.id, at=3000)
    assert ring.usable(A.id, 2999, issued_at=10)
    assert not ring.usable(A.id, 3000, issued_at=10)


@given(
    st.integers(0, 50),
    st.one_of(st.none(), st.integers(1, 50)),
    st.one_of(st.none(), st.integers(0, 50)),
    st.integers(0, 60),
    st.integers(0, 60),
)
def test_standing_as_written_down(begin: int, retired: int | None, revoked: int | None, at: int, issued: int) -> None:
    """The rule once more, in one line of logic."""
    ring = KeyRing()
    ring.add(A, label="a", valid_from=begin)
    if retired is not None and retired > begin:
        ring.rotate(A.id, B, at=retired)
    else:
        retired = None
    if revoked is not None:
        ring.revoke(A.id, at=revoked)
    expected = (
        begin <= at and begin <= issued and (revoked is None or at < revoked) and (retired is None or issued < retired)
    )
    assert ring.usable(A.id, at, issued_at=issued) is expected


# ------------------------------------------------------------------------------ events that are refused


@pytest.mark.parametrize(
    ("code", "event"),
    [
        ("key.already-in-ring", lambda ring: ring.add(A, label="again")),
        ("key.already-in-ring", lambda ring: ring.add(A, label="a", role="ledger")),
        ("key.already-in-ring", lambda ring: ring.rotate(A.id, B, at=10)),
        ("key.not-in-ring", lambda ring: ring.rotate(C.id, KEYS[4], at=10)),
        ("key.not-in-ring", lambda ring: ring.revoke(C.id, at=10)),
        ("key.retires-before-valid", lambda ring: ring.rotate(A.id, C, at=0)),
        ("key.role-unknown", lambda ring: ring.add(C, label="c", role="root")),
        ("key.label-invalid", lambda ring: ring.add(C, label="c\x1b[2J")),
        ("key.label-invalid", lambda ring: ring.add(C, label="c" * 129)),
        ("key.time-out-of-range", lambda ring: ring.add(C, label="c", valid_from=-1)),
        ("key.time-out-of-range", lambda ring: ring.revoke(A.id, at=True)),
        ("key.algorithm-unknown", lambda ring: ring.add(C, label="c", algorithms=(-7,))),
        ("key.not-public-key", lambda ring: ring.add(C.x, label="c")),
    ],
)
def test_events_that_make_no_sense_change_nothing(code: str, event: Callable[[KeyRing], Any]) -> None:
    ring = ring_of(A, B)
    before = ring.version, list(ring)
    with raises_code(code):
        event(ring)
    assert (ring.version, list(ring)) == before


def test_a_retired_or_revoked_key_is_not_rotated() -> None:
    ring = ring_of(A, B)
    ring.rotate(A.id, C, at=10)
    ring.revoke(B.id, at=10)
    for key in (A, B):
        with raises_code("key.already-replaced"):
            ring.rotate(key.id, KEYS[4], at=20)


def test_find() -> None:
    ring = ring_of(A, B)
    assert ring.find("key 1").key == B
    assert ring.find(A.name).key == ring.find(A.name[:8].upper()).key == A
    for name in ("", "nobody", A.name[:3]):
        with raises_code("key.name-not-unique"):
            ring.find(name)
    ring.rotate(A.id, C, at=5)
    with raises_code("key.name-not-unique"):
        ring.find("key 0")


# ------------------------------------------------------------------------------ version and file


def test_every_event_changes_the_version() -> None:
    ring = ring_of(A)
    versions = {ring.version}
    for event in (
        lambda: ring.add(B, label="b"),
        lambda: ring.rotate(A.id, C, at=100),
        lambda: ring.revoke(B.id, at=200),
        lambda: ring.revoke(B.id, at=100),
    ):
        event()
        versions.add(ring.version)
    assert len(versions) == 5


def test_the_version_does_not_depend_on_the_order() -> None:
    one, two = KeyRing(), KeyRing()
    for key in KEYS:
        one.add(key, label=key.name)
    for key in reversed(KEYS):
        two.add(key, label=key.name)
    assert one.version == two.version


def full_ring() -> KeyRing:
    ring = KeyRing()
    ring.add(A, label="Ålice “the first”", valid_from=1_767_225_600)
    ring.add(B, label="ledger", role="ledger", algorithms=(-19,))
    ring.rotate(A.id, C, at=1_780_000_000)
    ring.revoke(A.id, at=1_790_000_000)
    return ring


def test_a_file_gives_the_same_ring_back(tmp_path: Path) -> None:
    ring, path = full_ring(), tmp_path / "keys.json"
    ring.save(path)
    loaded = KeyRing.load(path)
    assert list(loaded) == list(ring)
    assert loaded.version == ring.version
    text = path.read_text(encoding="utf-8")
    loaded.save(path)
    assert path.read_text(encoding="utf-8") == text
    assert "2026-01-01T00:00:00Z" in text
    assert list(tmp_path.iterdir()) == [path]


def _damage(content: Any, path: list[Any], value: Any) -> str:
    spot = content
    for step in path[:-1]:
        spot = spot[step]
    if value is ...:
        del spot[path[-1]]
    else:
        spot[path[-1]] = value
    return json.dumps(content)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["schema"], 2), (["schema"], True), (["schema"], ...), (["more"], 1), (["keys"], {}), (["keys", 0], "key"),
        (["keys", 0, "id"], B.name), (["keys", 0, "id"], 3), (["keys", 0, "x"], ...), (["keys", 0, "x"], "00" * 32),
        (["keys", 0, "x"], A.x.hex().upper()), (["keys", 0, "x"], A.x.hex()[:-2]), (["keys", 0, "x"], "zz" * 32),
        (["keys", 0, "role"], "root"), (["keys", 0, "label"], ""), (["keys", 0, "label"], None),
        (["keys", 0, "valid_from"], "2026-01-01"), (["keys", 0, "valid_from"], 5), (["keys", 0, "valid_from"], ...),
        (["keys", 0, "valid_from"], "2026-13-01T00:00:00Z"), (["keys", 0, "valid_from"], "2026-01-01T00:00:00+00:00"),
        (["keys", 0, "valid_from"], "26-01-01T00:00:00Z"), (["keys", 0, "revoked_from"], None),
        (["keys", 0, "revoked_from"], "1969-12-31T23:59:59Z"), (["keys", 0, "replaced_by"], "12"),
        (["keys", 0, "algorithms"], []), (["keys", 0, "algorithms"], [-7]), (["keys", 0, "algorithms"], [True]),
        (["keys", 0, "algorithms"], "-8"), (["keys", 0, "trusted"], True),
    ],
)  # fmt: skip
def test_a_file_that_says_something_else_is_refused(path: list[Any], value: Any, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    full_ring().save(file)
    file.write_text(_damage(json.loads(file.read_text(encoding="utf-8")), path, value), encoding="utf-8")
    with raises_code("key.ring-invalid"):
        KeyRing.load(file)


NO_RINGS = ["", "[]", "{", "nul", '{"schema": 1, "keys": [], "keys": []}', "[" * 100_000, '{"schema": NaN, "keys": []}']


@pytest.mark.parametrize("text", [*NO_RINGS, "\udcff"])
def test_a_file_that_is_no_ring_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with raises_code("key.ring-not-json", "key.ring-invalid"):
        KeyRing.load(file)


def test_one_key_twice_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    full_ring().save(file)
    content = json.loads(file.read_text(encoding="utf-8"))
    content["keys"].append(content["keys"][1])
    file.write_text(json.dumps(content), encoding="utf-8")
    with raises_code("key.ring-invalid"):
        KeyRing.load(file)


def test_editing_is_one_after_the_other(tmp_path: Path) -> None:
    """Six editors at once: no addition is lost."""
    path = tmp_path / "keys.json"

    def edit(key: PublicKey) -> None:
        with KeyRing.editing(path, create=True) as ring:
            ring.add(key, label=key.name[:8])

    editors = [threading.Thread(target=edit, args=(key,)) for key in KEYS]
    for editor in editors:
        editor.start()
    for editor in editors:
        editor.join()
    assert {entry.key for entry in KeyRing.load(path)} == set(KEYS)


def test_an_edit_that_fails_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    ring_of(A).save(path)
    before = path.read_bytes()

    def edit() -> None:
        with KeyRing.editing(path) as ring:
            ring.add(B, label="b")
            ring.add(A, label="twice")

    with raises_code("key.already-in-ring"):
        edit()
    assert path.read_bytes() == before
    with raises_code("key.ring-missing"), KeyRing.editing(tmp_path / "none.json"):
        pass


# ------------------------------------------------------------------------------ instants


@given(st.integers(0, LAST_SECOND))
def test_instants_round_trip(seconds: int) -> None:
    assert parse_utc(format_utc(seconds)) == seconds
    assert parse_time(format_utc(seconds)) == seconds


@pytest.mark.parametrize(
    "text", ["", "yesterday", "1960-01-01", "-5", "10000-01-01", "2026-02-30", "٣", str(LAST_SECOND + 1)]
)
def test_times_that_are_none(text: str) -> None:
    with raises_code("admit.time-invalid"):
        parse_time(text)


def test_a_ring_that_is_not_there(tmp_path: Path) -> None:
    with raises_code("key.ring-missing"):
        KeyRing.load(tmp_path / "keys.json")
