"""Who signs checkpoints: keys that come, take over and go; and a writer that does not write what `verify` refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from build import STRICT, begin, contribution, segment
from making import AUDITOR, GOVERNING, LEDGER, ORIGIN, OTHER, START, Clock, admitted, authorised, create, digest, key
from refusals import raises_code

from lamina.ledger.governance_records import Key, KeyChange, KeyEvent, KeyEvents, Role
from lamina.ledger.signed_checkpoint import TreeSignature
from lamina.ledger.store.rows import StoredCheckpoint as Stored
from lamina.ledger.store.rows import StoreWriter
from lamina.ledger.verify.tree_checks import Trust
from lamina.ledger.verify.verifier import verify
from lamina.ledger.writer import Ledger
from lamina.sign.keys import PrivateKey
from lamina.sign.notes import NoteKey

MINE = Trust(notes=(NoteKey(ORIGIN, LEDGER.public),), plain=(GOVERNING.public,))
THIRD = key("third")


def named(who: PrivateKey, role: Role = Role.LEDGER, name: str = ORIGIN) -> Key:
    return Key(name=name, x=who.public.x, role=role)


def add(who: PrivateKey, effective: int = START) -> KeyEvent:
    return KeyEvent(change=KeyChange.ADD, key=named(who), effective=effective)


def rotate(old: PrivateKey, new: PrivateKey, effective: int = START) -> KeyEvent:
    return KeyEvent(change=KeyChange.ROTATE, key=named(new), target=old.public.id, effective=effective)


def revoke(who: PrivateKey, effective: int = START) -> KeyEvent:
    return KeyEvent(change=KeyChange.REVOKE, target=who.public.id, effective=effective)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "ledger.db")


def opened(path: str, who: PrivateKey | None, clock: Clock | None = None) -> Ledger:
    return Ledger.open(path, who, clock=clock or Clock())


@pytest.mark.parametrize("event", [add(OTHER), rotate(LEDGER, OTHER)], ids=["add", "rotate"])
def test_a_key_signs_once_the_owner_named_it(where: str, event: KeyEvent) -> None:
    with create(where) as old, opened(where, OTHER) as new:
        with raises_code("ledger.not-authorised"):
            old.append([KeyEvents(events=(event,))])
        with raises_code("ledger.authorising-signature-invalid"):
            old.append([authorised(old, event, OTHER)])
        old.append([admitted(1)])
        with raises_code("ledger.key-may-not-sign"):
            new.checkpoint()
        old.append([authorised(old, event)])
        new.checkpoint()
        old.append([admitted(3)])
        if event.change is KeyChange.ROTATE:
            with raises_code("ledger.key-may-not-sign"):
                old.checkpoint()
        else:
            old.checkpoint()


def test_a_replaced_key_signs_one_more_checkpoint(path: str) -> None:
    with create(path) as old:
        old.append([admitted(1), authorised(old, rotate(LEDGER, OTHER)), admitted(2)])
        text = old.checkpoint()
        assert old.checkpoint() == text  # the same again is no second one
        old.append([admitted(3)])
        with raises_code("ledger.key-may-not-sign"):
            old.checkpoint()
        with raises_code("ledger.key-may-not-sign"):
            old.check_signs()


def meanwhile(ledger: Ledger, monkeypatch: pytest.MonkeyPatch, what: Callable[[], None]) -> None:
    """Let something happen between what the ledger settles and what it publishes."""
    transact, calls = ledger.transact, []

    def slow(work: Callable[[StoreWriter], Any]) -> Any:
        if len(calls) == 1:
            what()
        calls.append(work)
        return transact(work)

    monkeypatch.setattr(ledger, "transact", slow)


def test_a_checkpoint_that_came_between_is_seen(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes with the old key sign at once: only the first of them covers its replacement."""
    with create(path) as one, opened(path, LEDGER) as two:
        one.append([authorised(one, rotate(LEDGER, OTHER))])
        tree = one.tree()
        seal = TreeSignature.sign(tree, LEDGER)
        smaller = Stored(tree.size, tree.signed(LEDGER), seal.kid + seal.signature)
        one.append([admitted(1)])

        def publish() -> None:
            with two.store.write() as rows:
                rows.put_checkpoint(smaller)

        meanwhile(one, monkeypatch, publish)
        with raises_code("ledger.key-may-not-sign"):
            one.checkpoint()
        assert one.latest() == smaller.text
    with opened(path, OTHER) as new:
        new.checkpoint()


def test_checkpoints_are_published_in_order(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with create(path) as one, opened(path, LEDGER) as two:
        one.append([authorised(one, rotate(LEDGER, OTHER))])

        def further() -> None:
            two.append([admitted(1)])
            two.checkpoint()  # covers the replacement, and more

        meanwhile(one, monkeypatch, further)
        assert one.checkpoint() == two.latest()
        assert [int(text.split("\n")[1]) for text in one.checkpoints()] == [1, 3]


def test_a_key_that_was_stolen_is_replaced_at_once(path: str) -> None:
    """Its owner names another and revokes it, in one record that the thief need not sign."""
    with create(path) as old, opened(path, OTHER) as new:
        new.append([authorised(new, [add(OTHER), revoke(LEDGER)])])
        with raises_code("ledger.key-may-not-sign"):
            old.checkpoint()
        new.checkpoint()
        with raises_code("ledger.key-was-revoked"):
            new.append([authorised(new, add(LEDGER))])
    assert verify(path, signatures=False).verified


def test_what_is_asked_before_an_event_is_written(path: str) -> None:
    with create(path) as ledger:
        ledger.check_signs()
        ledger.check_signs([rotate(LEDGER, OTHER)])
        with raises_code("ledger.last-signing-key"):
            ledger.check_signs([revoke(LEDGER)])
        with raises_code("ledger.key-may-not-sign"):
            ledger.check_signs([add(OTHER), revoke(LEDGER)])
        assert ledger.size == 1
    with opened(path, THIRD) as other:
        with raises_code("ledger.key-may-not-sign"):
            other.check_signs()
        other.check_signs([add(THIRD)])
    with opened(path, None) as reader, raises_code("ledger.opened-without-key"):
        reader.check_signs()


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        ([revoke(OTHER)], "ledger.key-unknown"),
        ([rotate(OTHER, THIRD)], "ledger.key-unknown"),
        ([KeyEvent(change=KeyChange.ADD, key=named(AUDITOR), effective=START)], "ledger.key-role-changed"),
        ([add(OTHER), rotate(LEDGER, OTHER)], "ledger.rotation-to-known-key"),
        ([rotate(AUDITOR, OTHER)], "ledger.rotation-changes-role"),
        (
            [KeyEvent(change=KeyChange.ADD, key=named(OTHER, name="another.example"), effective=START)],
            "ledger.ledger-key-name",
        ),
        ([revoke(LEDGER)], "ledger.last-signing-key"),
        ([revoke(GOVERNING)], "ledger.last-governing-key"),
        ([revoke(LEDGER, START + 1000)], "ledger.last-signing-key"),
    ],
)
def test_events_that_verify_would_refuse_are_not_written(path: str, events: list[KeyEvent], problem: str) -> None:
    with create(path) as ledger:
        with raises_code(problem):
            ledger.append([authorised(ledger, events)])
        assert ledger.size == 1


def test_a_rotated_ledger_verifies_from_end_to_end(path: str) -> None:
    story = begin(path)
    story.sign()
    story.admit([*(contribution(n) for n in range(3)), contribution(3, terms=STRICT)])
    story.later(7200)
    now = int(story.clock.now)
    story.govern(rotate(LEDGER, OTHER, now), LEDGER)
    with raises_code("ledger.key-may-not-sign"):  # open charges, which every epoch changes
        story.ledger.change_open(lambda rows: None)
    story.sign()  # the old key's last
    story.ledger.close()
    story.ledger = opened(path, OTHER, story.clock)
    story.later(3600)
    story.epoch(digest("run")[:16], [segment(0, read=story.ledger.size)])
    story.epoch(digest("run")[:16], [segment(1, read=story.ledger.size)])
    story.sign()
    story.govern([revoke(LEDGER, now), add(THIRD, now)])
    story.sign()
    story.govern(rotate(OTHER, key("fourth"), now + 7200))
    story.later(3600)
    story.sign()
    story.ledger.close()
    story.ledger = opened(path, THIRD, story.clock)
    story.admit([contribution(9, at=int(story.clock.now))])
    story.sign()
    story.ledger.close()
    found = verify(path, trust=MINE, seen=story.signed)
    assert found.problem is None
    assert found.trusted
    assert found.signed == found.size
