"""Who signs checkpoints: keys that come, take over and go; and a writer that does not write what `verify` refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from build import begin, contribution, segment, signed_by
from making import AUDITOR, LEDGER, ORIGIN, OTHER, START, Clock, admitted, create, digest, header, key
from refusals import raises_code

from lamina.admit.keys import PrivateKey
from lamina.ledger.governance_records import (
    Key,
    KeyChange,
    KeyEvent,
    LedgerFloors,
    PartySignature,
    PolicyChange,
    Role,
    policy_record_digest,
)
from lamina.ledger.signed_checkpoint import NoteKey, TreeSignature
from lamina.ledger.store.rows import StoredCheckpoint as Stored
from lamina.ledger.store.rows import StoreWriter
from lamina.ledger.verify.tree_checks import Trust
from lamina.ledger.verify.verifier import verify
from lamina.ledger.writer import Ledger

MINE = Trust(notes=(NoteKey(ORIGIN, LEDGER.public),))
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
def test_a_key_signs_once_an_older_one_vouched_for_it(where: str, event: KeyEvent) -> None:
    with create(where) as old, opened(where, OTHER) as new:
        old.append([event])
        with raises_code("ledger.key-may-not-sign"):
            new.checkpoint()  # not even the checkpoint over that very event
        new.append([admitted(1)])
        with raises_code("ledger.key-may-not-sign"):
            new.checkpoint()
        old.checkpoint()
        new.append([admitted(2)])
        new.checkpoint()
        old.append([admitted(3)])
        if event.change is KeyChange.ROTATE:
            with raises_code("ledger.key-may-not-sign"):
                old.checkpoint()
        else:
            old.checkpoint()


def test_a_replaced_key_signs_one_more_checkpoint(path: str) -> None:
    with create(path) as old:
        old.append([admitted(1), rotate(LEDGER, OTHER), admitted(2)])
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
        one.append([rotate(LEDGER, OTHER)])
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
        one.append([rotate(LEDGER, OTHER)])

        def further() -> None:
            two.append([admitted(1)])
            two.checkpoint()  # covers the replacement, and more

        meanwhile(one, monkeypatch, further)
        assert one.checkpoint() == two.latest()
        assert [int(text.split("\n")[1]) for text in one.checkpoints()] == [1, 3]


def test_a_key_that_comes_back_is_vouched_for_again(path: str) -> None:
    with create(path) as old:
        old.append([add(OTHER)])
        old.checkpoint()
        with opened(path, OTHER) as new:
            new.append([revoke(LEDGER)])
            with raises_code("ledger.key-may-not-sign"):
                old.checkpoint()
            new.checkpoint()
            old.append([add(LEDGER)])
            with raises_code("ledger.key-may-not-sign"):
                old.checkpoint()
            new.checkpoint()
            old.append([admitted(1)])
            old.checkpoint()


def test_what_is_asked_before_an_event_is_written(path: str) -> None:
    with create(path) as ledger:
        ledger.check_signs()
        ledger.check_signs([rotate(LEDGER, OTHER)])
        with raises_code("ledger.last-signing-key"):
            ledger.check_signs([add(OTHER), revoke(LEDGER)])
        ledger.append([add(OTHER)])
        ledger.checkpoint()
        with raises_code("ledger.key-may-not-sign"):
            ledger.check_signs([revoke(LEDGER)])
        assert ledger.size == 2
    with opened(path, THIRD) as other:
        with raises_code("ledger.key-may-not-sign"):
            other.check_signs()
        with raises_code("ledger.key-may-not-sign"):
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
        ([add(OTHER), revoke(LEDGER)], "ledger.last-signing-key"),  # nobody vouched for the other yet
        ([revoke(LEDGER, START + 1000)], "ledger.last-signing-key"),
    ],
)
def test_events_that_verify_would_refuse_are_not_written(path: str, events: list[KeyEvent], problem: str) -> None:
    with create(path) as ledger:
        with raises_code(problem):
            ledger.append(events)
        assert ledger.size == 1


def test_signatures_that_verify_would_refuse_are_not_written(path: str) -> None:
    change = PolicyChange(
        floors=LedgerFloors(clip_norm=200_000, noise_multiplier=500_000),
        presets=header().presets,
        policy=digest("stricter"),
        previous=policy_record_digest(header()),
    )
    twice = dataclasses.replace(change, presets=(*change.presets, change.presets[0]))
    with create(path) as ledger:
        for wrong in (
            signed_by(change, OTHER),
            signed_by(change, LEDGER, origin="other.example"),
            dataclasses.replace(change, signatures=(PartySignature(key=AUDITOR.public.id, signature=bytes(64)),)),
        ):
            with raises_code("ledger.policy-signature-invalid"):
                ledger.append([wrong])
        with raises_code("ledger.policy-class-twice"):
            ledger.append([twice])
        assert ledger.append([signed_by(change, AUDITOR)]) == [1]
        # a key that goes in the same batch signs nothing after that
        again = dataclasses.replace(change, previous=policy_record_digest(signed_by(change, AUDITOR)))
        with raises_code("ledger.policy-signature-invalid"):
            ledger.append([revoke(AUDITOR), signed_by(again, AUDITOR)])


def test_a_rotated_ledger_verifies_from_end_to_end(path: str) -> None:
    story = begin(path)
    story.sign()
    story.admit(contribution(n) for n in range(4))
    story.later(7200)
    now = int(story.clock.now)
    story.ledger.append([rotate(LEDGER, OTHER, now)])
    story.epoch(digest("run")[:16], [segment(0, read=story.ledger.size)])
    story.sign()  # the old key's last
    story.ledger.close()
    story.ledger = opened(path, OTHER, story.clock)
    story.later(3600)
    story.epoch(digest("run")[:16], [segment(1, read=story.ledger.size)])
    story.sign()
    story.ledger.append([revoke(LEDGER, now), add(THIRD, now)])
    story.sign()
    story.ledger.append([rotate(OTHER, key("fourth"), now + 7200)])
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
