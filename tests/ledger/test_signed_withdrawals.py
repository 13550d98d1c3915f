"""Withdrawals that somebody signed: what a request allows, and what no writer appends and every verifier names."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from build import ALICE, BOB, BOBBY, CAROL, YEAR, Story, begin, build, contribution, signed_by
from making import AUDITOR, GOVERNING, LEDGER, OTHER, SECOND, START, TWO_OWNERS, authorised, digest, key
from refusals import raises_code

from lamina import cbor
from lamina.ledger import append
from lamina.ledger import withdrawal as boxes
from lamina.ledger.governance_records import (
    Key,
    KeyChange,
    KeyEvent,
    Role,
    TermsChange,
    Withdrawal,
    WithdrawalEffect,
    WithdrawalReason,
    WithdrawalRule,
)
from lamina.ledger.records import KINDS
from lamina.ledger.retention import Retention
from lamina.ledger.show import describe_leaf, leaf_to_dict
from lamina.ledger.verify.verifier import verify
from lamina.ledger.withdrawal import WithdrawalInbox, withdraw, withdraw_signed
from lamina.ledger.withdrawal_request import REQUEST_TYPE, parse_request, sign_withdrawal, withdrawal_violation
from lamina.sign.signed_json import sign_json

DESK = key("desk")  # an operator
KEYS = (*TWO_OWNERS, Key(name="desk.example", x=DESK.public.x, role=Role.OPERATOR))
LETTER = digest("letter")
WHO = (ALICE, BOB, ALICE, CAROL, ALICE)  # by number of the contribution
CONSENT, LEGAL = WithdrawalReason.CONSENT, WithdrawalReason.LEGAL


def started(where: str, rule: WithdrawalRule | None = WithdrawalRule.SIGNED) -> Story:
    """Five contributions, in a ledger that takes signed requests alone."""
    story = begin(where, withdraw=rule, keys=KEYS)
    story.at["first"] = story.admit([contribution(n, who) for n, who in enumerate(WHO)])[0]
    story.sign()
    return story


@pytest.fixture
def story(where: str) -> Iterator[Story]:
    made = started(where)
    yield made
    made.ledger.close()


def asked(story: Story, number: int, who: Any = None, **changes: Any) -> bytes:
    """The request of who contributed, or of another, as it should be but for the changes."""
    given = {"reason": "consent", "ledger": story.ledger.header_hash, "time": int(story.clock.now), **changes}
    found = story.ledger.leaf(story.at["first"] + number).record
    return sign_withdrawal(found.descriptor, given.pop("reason"), who or WHO[number], **given)  # type: ignore[union-attr]


def recorded(story: Story, number: int, data: bytes | None, **changes: Any) -> Withdrawal:
    """The record that a keeper would write for this request."""
    given: dict[str, Any] = {"target": story.at["first"] + number, "reason": CONSENT, "signed": data}
    return Withdrawal(**{**given, "request": None if data is None else hashlib.sha256(data).digest(), **changes})


def rotate(story: Story, old: Any, new: Any) -> None:
    named = Key(name="next", x=new.public.x, role=Role.CONTRIBUTOR)
    story.govern(
        KeyEvent(change=KeyChange.ROTATE, key=named, target=old.public.id, effective=int(story.clock.now)), GOVERNING
    )


def revoke(story: Story, old: Any) -> None:
    story.govern(KeyEvent(change=KeyChange.REVOKE, target=old.public.id, effective=int(story.clock.now)))


def after(change: Callable[[Story], None], seconds: int, make: Callable[[Story], Withdrawal]) -> Any:
    def act(story: Story) -> Withdrawal:
        change(story)
        story.later(seconds)
        return make(story)

    return act


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


ATTACKS: dict[str, tuple[Callable[[Story], Withdrawal], str]] = {
    "nobody": (lambda s: recorded(s, 0, None), "withdrawal-not-signed"),
    "a digest alone": (lambda s: recorded(s, 0, None, request=LETTER), "withdrawal-not-signed"),
    "another contributor": (lambda s: recorded(s, 0, asked(s, 0, BOB)), "withdrawal-not-by-contributor"),
    "a stranger": (lambda s: recorded(s, 0, asked(s, 0, OTHER)), "withdrawal-not-by-contributor"),
    "the keeper as the contributor": (lambda s: recorded(s, 0, asked(s, 0, LEDGER)), "withdrawal-not-by-contributor"),
    "an operator without a letter": (lambda s: recorded(s, 0, asked(s, 0, DESK)), "withdrawal-not-by-contributor"),
    "a forged signature": (lambda s: recorded(s, 0, flipped(asked(s, 0))), "withdrawal-signature-invalid"),
    "another ledger": (lambda s: recorded(s, 0, asked(s, 0, ledger=digest("x"))), "withdrawal-request-other-ledger"),
    "another contribution": (lambda s: recorded(s, 2, asked(s, 0)), "withdrawal-request-other-contribution"),
    "another reason": (lambda s: recorded(s, 0, asked(s, 0), reason=LEGAL), "withdrawal-request-differs"),
    "another effect": (
        lambda s: recorded(s, 0, asked(s, 0), effect=WithdrawalEffect.ABANDON), "withdrawal-request-differs",
    ),
    "another digest": (lambda s: recorded(s, 0, asked(s, 0), request=LETTER), "withdrawal-request-swapped"),
    "another letter": (
        lambda s: recorded(s, 0, asked(s, 0, DESK, request=LETTER), request=digest("x")), "withdrawal-request-swapped",
    ),
    "signed later": (lambda s: recorded(s, 0, asked(s, 0, time=START + 4000)), "withdrawn-before-request"),
    "the keeper as an operator": (
        lambda s: recorded(s, 0, asked(s, 0, LEDGER, request=LETTER), request=LETTER), "signer-wrong-role",
    ),
    "a contributor as an operator": (
        lambda s: recorded(s, 0, asked(s, 0, ALICE, request=LETTER), request=LETTER), "signer-wrong-role",
    ),
    "an operator nobody named": (
        lambda s: recorded(s, 0, asked(s, 0, OTHER, request=LETTER), request=LETTER), "signer-wrong-role",
    ),
    "an operator's forged signature": (
        lambda s: recorded(s, 0, flipped(asked(s, 0, DESK, request=LETTER)), request=LETTER),
        "withdrawal-signature-invalid",
    ),
    "a message of another type": (
        lambda s: recorded(s, 0, sign_json({}, ALICE, "application/x")), "withdrawal-request-malformed",
    ),
    "no message": (lambda s: recorded(s, 0, b"please"), "withdrawal-request-malformed"),
    "a key that was replaced": (
        after(lambda s: rotate(s, BOB, BOBBY), 60, lambda s: recorded(s, 1, asked(s, 1))), "key-replaced",
    ),
    "a key that was revoked": (
        after(lambda s: revoke(s, CAROL), 60, lambda s: recorded(s, 3, asked(s, 3, time=START))), "key-revoked",
    ),
    "an operator who was revoked": (
        after(lambda s: revoke(s, DESK), 60,
              lambda s: recorded(s, 0, asked(s, 0, DESK, request=LETTER, time=START), request=LETTER)),
        "key-revoked",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_what_no_request_allows(story: Story, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer refuses it; a keeper with another program appends it, and a verifier names it."""
    make, code = ATTACKS[name]
    record = make(story)
    size = story.ledger.size
    with raises_code("ledger.withdrawal-not-signed" if record.signed is None else "ledger.withdrawal-not-allowed"):
        story.ledger.append([record])
    assert story.ledger.size == size
    monkeypatch.setattr(KINDS[Withdrawal], "check", None)
    story.ledger.append([record])
    monkeypatch.undo()
    problem = verify(story.ledger.store, now=int(story.clock.now)).problem
    assert problem is not None
    assert (problem.index, problem.kind, problem.code) == (size, "withdrawal", f"verify.{code}")
    describe_leaf(story.ledger.leaf(size))  # what cannot be verified can still be shown


def test_a_signed_request_is_used_once(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    data = asked(story, 0)
    (first,) = withdraw_signed(story.ledger, data)
    (again,) = withdraw_signed(story.ledger, data)
    assert (again.leaf.seq, again.again, first.again) == (first.leaf.seq, True, False)
    assert story.ledger.append([first.leaf.record]) == [first.leaf.seq]  # type: ignore[list-item]
    monkeypatch.setattr(append, "find_repeated_withdrawal", lambda *given: None)
    story.ledger.append([first.leaf.record])  # type: ignore[list-item]
    problem = verify(story.ledger.store, now=START).problem
    assert problem is not None and problem.code == "verify.withdrawn-twice"


def test_who_may_withdraw(story: Story) -> None:
    """The contributor, who took over from its key, an operator, a governing key; also with a request of before."""
    ledger = story.ledger
    early = asked(story, 1)
    withdraw_signed(ledger, asked(story, 0))
    story.later(60)
    rotate(story, BOB, BOBBY)
    story.later(60)
    withdraw_signed(ledger, early)  # signed while the key was in force
    (by_desk,) = withdraw(ledger, str(story.at["first"] + 2), LEGAL, request=LETTER, operator=DESK)
    (by_owner,) = withdraw(ledger, str(story.at["first"] + 4), LEGAL, request=LETTER, operator=SECOND)
    (late,) = story.admit([contribution(9, BOBBY, at=int(story.clock.now))])
    rotate(story, BOBBY, key("bob's third"))
    story.later(60)
    descriptor = ledger.leaf(late).record.descriptor  # type: ignore[union-attr]
    header, now = ledger.header_hash, int(story.clock.now)
    withdraw_signed(ledger, sign_withdrawal(descriptor, "data", key("bob's third"), ledger=header, time=now))
    withdraw_signed(ledger, asked(story, 3))
    revoke(story, CAROL)
    revoke(story, ALICE)  # what is recorded before stays good
    story.sign()
    found = verify(ledger.store, now=now)
    assert found.verified, found.problem
    assert not [note for note in found.notes if "withdrawal" in note]
    told = [leaf_to_dict(leaf) for leaf in ledger.of_kind(Withdrawal)]
    assert [each["by"] for each in told] == ["contributor"] * 2 + ["operator"] * 2 + ["contributor"] * 2
    assert by_desk.leaf.record.request == LETTER  # type: ignore[union-attr]
    assert "signed by the operator" in describe_leaf(by_owner.leaf)
    with raises_code("ledger.operator-without-request"):
        withdraw(ledger, str(story.at["first"]), LEGAL, operator=DESK)


def test_an_anchor_cannot_stand_in_for_a_descriptor(where: str) -> None:
    """Whoever names the digest of another's descriptor as an anchor does not get in the way of the other's request."""
    story = started(where)
    victim = story.ledger.leaf(story.at["first"]).record
    story.admit([contribution(9, BOB, anchor=victim.descriptor)])  # type: ignore[union-attr]
    (found,) = withdraw_signed(story.ledger, asked(story, 0))
    assert found.target.seq == story.at["first"]
    with raises_code("ledger.request-of-no-contribution"):
        header = story.ledger.header_hash
        withdraw_signed(story.ledger, sign_withdrawal(digest("none"), "data", ALICE, ledger=header, time=START))
    story.ledger.close()


# ------------------------------------------------------------------------------ the rule


def test_the_keeper_alone_where_the_terms_say_so(where: str) -> None:
    story = started(where, None)
    ledger = story.ledger
    assert ledger.parties().withdraw is WithdrawalRule.KEEPER
    (found,) = withdraw(ledger, str(story.at["first"]), CONSENT)
    assert found.to_dict()["by"] == "keeper"
    assert describe_leaf(found.leaf).endswith("by the keeper alone")
    withdraw_signed(ledger, asked(story, 1))
    with raises_code("ledger.withdrawal-not-allowed"):  # a false signature is worse than none
        ledger.append([recorded(story, 2, asked(story, 2, BOB))])
    story.govern(TermsChange(withdraw=WithdrawalRule.SIGNED))  # one owner is enough for the stricter rule
    with raises_code("ledger.withdrawal-not-signed"):
        withdraw(ledger, str(story.at["first"] + 2), CONSENT)
    for keys, code in (((GOVERNING,), "ledger.second-signature-missing"), ((GOVERNING, SECOND), None)):
        change = TermsChange(withdraw=WithdrawalRule.KEEPER)
        if code is None:
            story.govern(change, *keys)
        else:
            with raises_code(code):
                story.govern(change, *keys)
    withdraw(ledger, str(story.at["first"] + 2), CONSENT)
    story.sign()
    notes = verify(ledger.store, now=START).notes
    assert [note for note in notes if note.startswith("2 withdrawals are the word of the keeper alone")]
    ledger.close()


def test_a_withdrawal_stands_alone_beside_a_change_of_the_rule(story: Story) -> None:
    both = [authorised(story.ledger, TermsChange(retention=2 * YEAR)), recorded(story, 0, asked(story, 0))]
    with raises_code("ledger.withdrawal-beside-governing-record"):
        story.ledger.append(both)


def test_a_request_is_kept_when_the_contribution_is_pruned(tmp_path: Path) -> None:
    """Its body, and with it whose key signed, is gone; all else is still verified."""
    story = started(str(tmp_path / "ledger.db"))
    ledger = story.ledger
    (found,) = withdraw_signed(ledger, asked(story, 0))
    story.later(2 * YEAR)
    proposal = Retention(ledger).propose()
    assert proposal is not None
    Retention(ledger).prune(signed_by(proposal, AUDITOR))
    now = int(story.clock.now)
    checked = verify(ledger.store, now=now)
    assert checked.verified, checked.problem
    assert [note for note in checked.notes if note.startswith("1 withdrawal of a pruned contribution is signed")]
    kept, state = ledger.leaf(story.at["first"]).record, ledger.parties()
    record = found.leaf.record
    assert isinstance(record, Withdrawal)
    at = found.leaf.time
    assert withdrawal_violation(record, kept, at, state) is None  # type: ignore[arg-type]
    for who, code in ((OTHER, "verify.key-unknown"), (LEDGER, "verify.key-wrong-role")):
        data = sign_withdrawal(kept.descriptor, "consent", who, ledger=ledger.header_hash, time=at)  # type: ignore[union-attr]
        wrong = withdrawal_violation(recorded(story, 0, data), kept, at, state)  # type: ignore[arg-type]
        assert wrong is not None and wrong.code == code
    with raises_code("ledger.withdrawal-target"):
        ledger.append([recorded(story, 1, asked(story, 4), target=story.at["first"] + 4)])
    ledger.close()


def test_a_ledger_of_before_has_the_same_bytes(tmp_path: Path) -> None:
    """A header and records that say nothing of the rule or of a request have no field for it."""
    story = build(str(tmp_path / "ledger.db"))
    assert story.ledger.header.withdraw is None
    assert story.ledger.parties().withdraw is WithdrawalRule.KEEPER
    assert verify(story.ledger.store, now=int(story.clock.now)).verified
    plain = leaf_to_dict(story.ledger.leaf(story.at["withdrawal"]))
    assert (plain["signed"], plain["by"]) == (None, "keeper")
    story.ledger.close()


# ------------------------------------------------------------------------------ against a second opinion


def test_random_requests_against_a_second_opinion(tmp_path: Path) -> None:
    """A rule written down again, from what was done to each request, agrees on all of 400."""
    story, draw = started(str(tmp_path / "ledger.db")), random.Random(7)
    story.later(600)
    rotate(story, BOB, BOBBY)
    revoke(story, CAROL)
    story.later(600)
    turned = START + 600
    state, now, ledger = story.ledger.parties(), int(story.clock.now), story.ledger.header_hash
    people = {
        "alice": ALICE,
        "bob": BOB,
        "bobby": BOBBY,
        "carol": CAROL,
        "desk": DESK,
        "ledger": LEDGER,
        "other": OTHER,
    }
    owners = ("alice", "bob", "alice", "carol", "alice")
    counts = {True: 0, False: 0}
    for _ in range(400):
        number, who = draw.randrange(5), draw.choice(list(people))
        if draw.random() < 0.6:
            who = draw.choice((owners[number], "desk"))
        letter = LETTER if draw.random() < (0.9 if who == "desk" else 0.1) else None
        about = number if draw.random() < 0.85 else draw.randrange(5)
        there = ledger if draw.random() < 0.9 else digest("elsewhere")
        at = draw.choice((START, turned - 1, turned, now, now + 119, now + 4000))
        forged, reason = draw.random() < 0.1, CONSENT if draw.random() < 0.9 else LEGAL
        data = asked(story, about, people[who], ledger=there, time=at, request=letter)
        data = flipped(data) if forged else data
        swapped = draw.random() < 0.1
        request = digest("x") if swapped else letter or hashlib.sha256(data).digest()
        record = recorded(story, number, data, reason=reason, request=request)
        if letter is not None:
            signer = who == "desk"
        else:  # Carol is revoked, Bob signs no more, and Bobby signs for him
            mine = {who} if who != "bobby" else {"bob", "bobby"}
            signer = owners[number] in mine and who != "carol" and (who != "bob" or at < turned)
        good = (
            signer and about == number and there == ledger and at <= now + 120
            and not forged and not swapped and reason is CONSENT
        )  # fmt: skip
        target = story.ledger.leaf(record.target).record
        found = withdrawal_violation(record, target, now, state)  # type: ignore[arg-type]
        assert (found is None) == good, (who, number, about, letter, at - now, forged, swapped, found)
        counts[good] += 1
    assert min(counts.values()) > 60
    story.ledger.close()


# ------------------------------------------------------------------------------ a folder


def put(folder: Path, name: str, content: bytes, age: float = 60.0) -> None:
    (folder / name).write_bytes(content)
    os.utime(folder / name, (time.time() - age, time.time() - age))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_file())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "inbox"
    made.mkdir()
    return made


def test_signed_files_become_records_and_others_are_refused(story: Story, folder: Path) -> None:
    descriptor = story.ledger.leaf(story.at["first"] + 1).record.descriptor.hex()  # type: ignore[union-attr]
    put(folder, "a.cose", asked(story, 0))
    put(folder, "b.json", json.dumps({"withdraw": descriptor, "reason": "consent"}).encode())
    put(folder, "c.cose", asked(story, 2, BOB))
    put(folder, "d.cose", b"half of it")
    put(folder, "e.cose", asked(story, 3)[:40], age=0.0)
    put(folder, "f.cose", asked(story, 4, DESK, request=LETTER))
    taken = {each.name: each for each in WithdrawalInbox(story.ledger, folder).take()}
    assert {name for name, each in taken.items() if not each.refused} == {"a.cose", "f.cose"}
    assert names(folder) == ["e.cose"]  # somebody is still writing it
    assert names(folder / "refused") == [
        "b.answer.json", "b.json", "c.cose", "c.cose.answer.json", "d.cose", "d.cose.answer.json",
    ]  # fmt: skip
    assert story.ledger.withdrawals().keys() == {story.at["first"], story.at["first"] + 4}
    put(folder, "b.cose", asked(story, 1))  # beside the answer to b.json
    assert [each.refused for each in WithdrawalInbox(story.ledger, folder).take()] == [""]
    put(folder, "b.json", json.dumps({"withdraw": descriptor, "reason": "consent"}).encode())
    assert [each.withdrawn[0].again for each in WithdrawalInbox(story.ledger, folder).take()] == [True]
    assert verify(story.ledger.store, now=int(story.clock.now)).verified


def test_a_kill_between_the_record_and_the_file(story: Story, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(folder, "a.cose", asked(story, 3))

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for target, name in ((boxes, "_append"), (boxes.keys, "replace_file"), (boxes.os, "rename")):
        monkeypatch.setattr(target, name, killed)
        with pytest.raises(KeyboardInterrupt):
            list(WithdrawalInbox(story.ledger, folder).take())
        monkeypatch.undo()
        assert names(folder) == ["a.cose"]
    size = story.ledger.size
    revoke(story, CAROL)  # meanwhile; the record was there before
    (taken,) = WithdrawalInbox(story.ledger, folder).take()
    assert taken.withdrawn[0].again and story.ledger.size == size + 1
    assert names(folder / "done") == ["a.cose", "a.cose.answer.json"]
    assert verify(story.ledger.store, now=int(story.clock.now)).verified


# ------------------------------------------------------------------------------ the message


@pytest.mark.parametrize("kid", [7, "alice", [1], {}])
def test_a_key_is_named_by_bytes(kid: Any) -> None:
    """Whoever sends something else gets a refusal, and no service or verifier falls over it."""
    message = cbor.decode(sign_json({}, ALICE, REQUEST_TYPE), tags=(18,))
    header = cbor.decode(message.value[0])
    protected = cbor.encode({**header, 4: kid})
    data = cbor.encode(cbor.Tag(number=18, value=[protected, *message.value[1:]]), tags=(18,))
    with raises_code("release.cose-malformed"):
        parse_request(data)


def test_no_byte_of_a_request_can_be_changed(tmp_path: Path) -> None:
    story = started(str(tmp_path / "ledger.db"))
    data, state, target = asked(story, 0), story.ledger.parties(), story.ledger.leaf(story.at["first"]).record
    draw = random.Random(3)
    for place in range(len(data)):
        wrong = data[:place] + bytes([data[place] ^ draw.randrange(1, 256)]) + data[place + 1 :]
        found = withdrawal_violation(recorded(story, 0, wrong), target, START, state)  # type: ignore[arg-type]
        assert found is not None and found.code.startswith("verify."), place
    assert withdrawal_violation(recorded(story, 0, data), target, START, state) is None  # type: ignore[arg-type]
    story.ledger.close()


def test_a_request_says_what_it_was_made_of() -> None:
    data = sign_withdrawal(
        digest("d"), "legal", ALICE, ledger=digest("l"), effect="abandon", time=START, request=LETTER
    )
    found = parse_request(data)
    assert (found.withdraw, found.ledger, found.time, found.handed_in) == (digest("d"), digest("l"), START, LETTER)
    assert (found.reason, found.effect, found.signer) == (LEGAL, WithdrawalEffect.ABANDON, "operator")
    assert found.record(7) == Withdrawal(
        target=7, reason=LEGAL, effect=WithdrawalEffect.ABANDON, request=LETTER, signed=data
    )
    assert len(data) < 700
    for wrong in ({"request": "ab"}, {"ledger": "x" * 64}, {"request": None}):
        plain = {"withdraw": "0" * 64, "reason": "data", "effect": "finish", "ledger": "0" * 64}
        with raises_code("ledger.request-malformed"):
            parse_request(sign_json({**plain, "time": "2026-01-01T00:00:00Z", **wrong}, ALICE, REQUEST_TYPE))
    with raises_code("ledger.field-invalid"):
        dataclasses.replace(found.record(7), signed=bytes(4097))
