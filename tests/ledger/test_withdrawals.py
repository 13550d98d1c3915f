"""Withdrawals by every channel: once each, for a reason, with what was lost until then; nothing is erased."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from build import ALICE, BOB, RUNS, STRICT, USUAL, Story, begin, contribution, segment
from making import LEDGER, Clock, digest
from refusals import raises_code

from lamina.errors import LedgerError, StoreError
from lamina.ledger import withdrawal as boxes
from lamina.ledger.governance_records import Withdrawal, WithdrawalEffect, WithdrawalReason
from lamina.ledger.verify.verifier import verify
from lamina.ledger.withdrawal import WithdrawalInbox, withdraw
from lamina.ledger.withdrawal_request import parse_effect, parse_reason
from lamina.ledger.writer import Ledger


@pytest.fixture
def story(where: str) -> Iterator[Story]:
    """Six contributions, two with one anchor; one epoch."""
    made = begin(where)
    many = [contribution(n, (ALICE, BOB)[n % 2], STRICT if n == 3 else USUAL) for n in range(4)]
    shared = [contribution(n, anchor=digest("anchor")) for n in (4, 5)]
    made.at["first"] = made.admit([*many, *shared])[0]
    made.epoch(RUNS[0], [segment(0, read=made.ledger.size)])
    made.sign()
    yield made
    made.ledger.close()


def named(story: Story, number: int) -> str:
    return story.ledger.leaf(story.at["first"] + number).record.descriptor.hex()  # type: ignore[union-attr]


def test_by_hand(story: Story) -> None:
    ledger, size = story.ledger, story.ledger.size
    before = [data for _, data in ledger.raw_leaves()]
    (found,) = withdraw(
        ledger, named(story, 1), WithdrawalReason.CONSENT, effect=WithdrawalEffect.ABANDON, request=digest("request")
    )
    assert (found.leaf.seq, found.again) == (size, False)
    record = ledger.leaf(size).record
    assert record == Withdrawal(target=story.at["first"] + 1, reason=WithdrawalReason.CONSENT, effect=WithdrawalEffect.ABANDON,
                                request=digest("request"))  # fmt: skip
    assert [data for _, data in ledger.raw_leaves()][:size] == before  # nothing is erased
    assert found.lost.spend == story.spending.spend(USUAL.bound)  # reconciled
    told = found.to_dict()
    assert (told["reason"], told["effect"], told["epochs"]) == ("consent", "abandon", 1)
    assert told["epsilon"] == found.lost.spend / 1e9
    found_again = verify(ledger.store)
    assert found_again.verified
    assert found_again.signed == size + 1  # a key was there, so a checkpoint covers it


def test_again_changes_nothing(story: Story) -> None:
    ledger = story.ledger
    (first,) = withdraw(ledger, named(story, 1), WithdrawalReason.CONSENT)
    size, root = ledger.size, ledger.root
    for reason in (WithdrawalReason.CONSENT, WithdrawalReason.LEGAL):
        (again,) = withdraw(ledger, named(story, 1), reason)
        assert (again.leaf.seq, again.again) == (first.leaf.seq, True)
    assert (ledger.size, ledger.root) == (size, root)
    assert again.to_dict()["reason"] == "consent"  # the one that was given first


def test_all_that_share_an_anchor(story: Story) -> None:
    ledger = story.ledger
    withdraw(ledger, str(story.at["first"] + 4), WithdrawalReason.DATA)
    found = withdraw(ledger, digest("anchor").hex(), WithdrawalReason.REQUEST)
    assert [each.again for each in found] == [True, False]
    assert ledger.withdrawals().keys() == {story.at["first"] + 4, story.at["first"] + 5}


def test_the_next_segment_is_without_it(story: Story) -> None:
    ledger = story.ledger
    (found,) = withdraw(ledger, named(story, 0), WithdrawalReason.REQUEST)
    story.epoch(RUNS[0], [segment(1, read=ledger.size)])
    story.sign()
    assert verify(ledger.store).verified
    (after,) = withdraw(ledger, named(story, 0), WithdrawalReason.REQUEST)
    assert after.lost == found.lost
    assert after.lost.epochs == 1


def test_without_a_key_it_is_signed_later(story: Story, where: str) -> None:
    with Ledger.open(where, clock=story.clock) as ledger:
        withdraw(ledger, named(story, 0), WithdrawalReason.REQUEST)
        found = verify(ledger.store)
    assert found.verified
    assert found.signed == found.size - 1


def test_nobody_to_withdraw(story: Story) -> None:
    for name in (digest("nobody").hex(), "0", "999", "nonsense"):
        with pytest.raises(LedgerError):
            withdraw(story.ledger, name, WithdrawalReason.REQUEST)
    assert story.ledger.withdrawals() == {}


def test_reasons_are_an_enumeration() -> None:
    assert parse_reason("consent") is WithdrawalReason.CONSENT
    assert parse_effect("abandon") is WithdrawalEffect.ABANDON
    with raises_code("ledger.reason-unknown"):
        parse_reason("because")
    with raises_code("ledger.effect-unknown"):
        parse_effect("erase")


# ------------------------------------------------------------------------------ a folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "inbox"
    made.mkdir()
    return made


def put(folder: Path, name: str, content: object, age: float = 60.0) -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    os.utime(path, (time.time() - age, time.time() - age))
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_file())


def test_files_become_records_once(story: Story, folder: Path) -> None:
    put(folder, "b.json", {"withdraw": named(story, 1), "reason": "consent"})
    put(folder, "a.json", {"withdraw": named(story, 0), "reason": "legal", "effect": "abandon",
                           "request": digest("request").hex()})  # fmt: skip
    put(folder, "notes.txt", "not for us")
    put(folder, ".hidden.json", "{}")
    box = WithdrawalInbox(story.ledger, folder)
    taken = list(box.take())
    assert [each.name for each in taken] == ["a.json", "b.json"]
    assert names(folder) == [".hidden.json", "notes.txt"]
    assert names(folder / "done") == ["a.answer.json", "a.json", "b.answer.json", "b.json"]
    assert names(folder / "refused") == []
    first = story.ledger.leaf(taken[0].withdrawn[0].leaf.seq).record
    assert first == Withdrawal(target=story.at["first"], reason=WithdrawalReason.LEGAL, effect=WithdrawalEffect.ABANDON,
                               request=digest("request"))  # fmt: skip
    answer = json.loads((folder / "done" / "a.answer.json").read_text())
    assert answer["withdrawn"][0]["index"] == taken[0].withdrawn[0].leaf.seq
    size = story.ledger.size
    assert list(box.take()) == []
    # The same file again, and the same under another name: moved aside, and nothing is appended.
    put(folder, "a.json", {"withdraw": named(story, 0), "reason": "legal"})
    put(folder, "c.json", {"withdraw": named(story, 0), "reason": "data"})
    again = list(box.take())
    assert [each.withdrawn[0].again for each in again] == [True, True]
    assert story.ledger.size == size
    assert "a.2.json" in names(folder / "done")
    assert verify(story.ledger.store).verified


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "not JSON"),
        ("[1, 2", "not JSON"),
        ("[]", "must have the fields"),
        ({"withdraw": "ab" * 32}, "must have the fields"),
        ({"withdraw": "ab" * 32, "reason": "consent", "comment": "free text"}, "must have the fields"),
        ('{"withdraw": "a", "withdraw": "b", "reason": "consent"}', "twice"),
        ({"withdraw": "ab" * 32, "reason": "because"}, "reason is 'because'"),
        ({"withdraw": "ab" * 32, "reason": "consent", "effect": "erase"}, "effect is 'erase'"),
        ({"withdraw": "ab" * 32, "reason": "consent"}, "no contribution"),
        ({"withdraw": "17", "reason": "consent"}, "64 hex digits"),
        ({"withdraw": "ab" * 32, "reason": "consent", "request": "xyz"}, "64 hex digits"),
        ({"withdraw": 17, "reason": "consent"}, "no text"),
        ({"withdraw": None, "reason": "consent"}, "no text"),
        ("x" * 20_000, "more than"),
        ("[" * 5_000, "not JSON"),
    ],
)
def test_bad_files_are_moved_aside_with_a_reason(story: Story, folder: Path, content: object, reason: str) -> None:
    put(folder, "a.json", content)
    put(folder, "z.json", {"withdraw": named(story, 0), "reason": "consent"})
    taken = list(WithdrawalInbox(story.ledger, folder).take())
    assert reason in taken[0].refused
    assert not taken[1].refused  # one bad file stops no other
    assert names(folder) == []
    assert names(folder / "refused") == ["a.answer.json", "a.json"]
    assert reason in json.loads((folder / "refused" / "a.answer.json").read_text())["refused"]


def test_links_and_folders_are_not_followed(story: Story, folder: Path, tmp_path: Path) -> None:
    secret = put(tmp_path, "secret", {"withdraw": named(story, 0), "reason": "consent"})
    (folder / "link.json").symlink_to(secret)
    (folder / "folder.json").mkdir()
    os.mkfifo(folder / "pipe.json")
    taken = list(WithdrawalInbox(story.ledger, folder).take())
    assert [("no plain file" in each.refused) for each in taken] == [True, True, True]
    assert story.ledger.withdrawals() == {}
    assert secret.exists()


def test_a_file_that_is_still_written_is_left_alone(story: Story, folder: Path) -> None:
    put(folder, "a.json", '{"withdraw": "', age=0.0)
    assert list(WithdrawalInbox(story.ledger, folder).take()) == []
    assert names(folder) == ["a.json"]
    put(folder, "a.json", {"withdraw": named(story, 0), "reason": "consent"}, age=0.0)
    assert len(list(WithdrawalInbox(story.ledger, folder).take())) == 1


def test_trouble_with_the_ledger_leaves_the_files(story: Story, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(folder, "a.json", {"withdraw": named(story, 0), "reason": "consent"})

    def full(*_: object, **__: object) -> None:
        raise StoreError("store.full", "no space left", "free some")

    monkeypatch.setattr(boxes, "withdraw", full)
    with pytest.raises(StoreError):
        list(WithdrawalInbox(story.ledger, folder).take())
    assert names(folder) == ["a.json"]
    monkeypatch.undo()
    assert len(list(WithdrawalInbox(story.ledger, folder).take())) == 1


def test_a_kill_between_record_and_move(story: Story, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(folder, "a.json", {"withdraw": named(story, 0), "reason": "consent"})

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for place in ("replace", "rename"):
        if place == "replace":
            monkeypatch.setattr(boxes.keys, "replace_file", killed)
        else:
            monkeypatch.setattr(boxes.os, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            list(WithdrawalInbox(story.ledger, folder).take())
        monkeypatch.undo()
        assert names(folder) == ["a.json"]
    size = story.ledger.size
    (taken,) = WithdrawalInbox(story.ledger, folder).take()
    assert taken.withdrawn[0].again
    assert story.ledger.size == size
    assert names(folder / "done") == ["a.answer.json", "a.json"]


def _look(where: str, folder: str) -> None:
    with Ledger.open(where, LEDGER, clock=Clock()) as ledger:
        for _ in range(3):
            list(WithdrawalInbox(ledger, folder).take())


def _folder_of_thirty(where: str, folder: Path) -> None:
    story = begin(where)
    made = [contribution(n) for n in range(30)]
    story.admit(made)
    story.sign()
    for number, one in enumerate(made):
        put(folder, f"{number}.json", {"withdraw": one.record.descriptor.hex(), "reason": "request"})
    story.ledger.close()


def _all_out_once(where: str, folder: Path) -> None:
    assert names(folder) == []
    assert len(names(folder / "done")) == 60
    with Ledger.open(where) as ledger:
        assert sum(1 for _ in ledger.of_kind(Withdrawal)) == len(ledger.withdrawals()) == 30
        assert verify(ledger.store).verified


def test_two_look_into_one_folder(where: str, folder: Path) -> None:
    _folder_of_thirty(where, folder)
    both = [threading.Thread(target=_look, args=(where, str(folder))) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join()
    _all_out_once(where, folder)


@pytest.mark.slow
def test_two_processes_look_into_one_folder(where: str, folder: Path) -> None:
    _folder_of_thirty(where, folder)
    context = multiprocessing.get_context("spawn")
    both = [context.Process(target=_look, args=(where, str(folder))) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(120)
    assert [process.exitcode for process in both] == [0, 0]
    _all_out_once(where, folder)


def test_a_folder_that_is_not_there(story: Story, tmp_path: Path) -> None:
    with raises_code("ledger.folder-missing"):
        WithdrawalInbox(story.ledger, tmp_path / "nowhere")
