"""Withdrawals and searches where somebody without a key edited the store: the leaves answer, or the store is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from build import ALICE, BOB, CAROL, Story, begin, contribution
from keyless import binary, edit, rows_of
from making import LEDGER, START, Clock, admitted, create, digest
from refusals import raises_code

from lamina.errors import LedgerDamaged
from lamina.ledger.admission_batch import MembershipIndex
from lamina.ledger.contribution_trace import trace_contribution
from lamina.ledger.governance_records import WithdrawalReason
from lamina.ledger.reader import LedgerReader, find_contributions, find_leaf
from lamina.ledger.records import ContributionRecord
from lamina.ledger.withdrawal import WithdrawalInbox, check_withdrawal, withdraw, withdraw_signed
from lamina.ledger.withdrawal_request import sign_withdrawal
from lamina.ledger.writer import Ledger
from lamina.release.reconciliation import reconcile

ANCHOR = digest("shared anchor")
WHO = (ALICE, BOB, CAROL, ALICE)


@pytest.fixture
def story(where: str) -> Iterator[Story]:
    """Four contributions with one anchor, of three people."""
    made = begin(where)
    made.at["first"], *_ = made.admit([contribution(n, who, anchor=ANCHOR) for n, who in enumerate(WHO)])
    made.sign()
    yield made
    made.ledger.close()


def descriptor(story: Story, number: int) -> bytes:
    record = story.ledger.leaf(story.at["first"] + number).record
    assert isinstance(record, ContributionRecord)
    return record.descriptor


def request(story: Story, number: int) -> bytes:
    return sign_withdrawal(
        descriptor(story, number), "consent", WHO[number], ledger=story.ledger.header_hash, time=int(story.clock.now)
    )


def fresh(story: Story, where: str) -> Ledger:
    return Ledger.open(where, LEDGER, clock=story.clock)


@pytest.mark.parametrize("running", [False, True])
def test_a_signed_request_counts(story: Story, where: str, tmp_path: Path, running: bool) -> None:
    """By call, through the service's check, and from a folder; in a new process, and in one that searched before."""
    last, now = len(WHO) - 1, int(story.clock.now)
    folder = tmp_path / "in"
    folder.mkdir()
    signed = [request(story, n) for n in range(len(WHO))]
    with fresh(story, where) as ledger, LedgerReader(ledger.store.another()) as service:
        if running:
            assert len(find_contributions(ledger, ANCHOR.hex())) == len(WHO)
            assert check_withdrawal(signed[0], service, now=now).withdraw == descriptor(story, 0)
        assert check_withdrawal(signed[last], service, now=now).withdraw == descriptor(story, last)
        (one,) = withdraw_signed(ledger, signed[last])
        assert one.target.seq == story.at["first"] + last
        (folder / "a.cose").write_bytes(signed[0])
        plain = {"withdraw": descriptor(story, 1).hex(), "reason": "consent"}
        (folder / "b.json").write_text(json.dumps(plain))
        assert [(each.refused, len(each.withdrawn)) for each in WithdrawalInbox(ledger, folder).take()] == [("", 1)] * 2
        assert len(ledger.withdrawals()) == 3


def test_an_anchor_finds_all_of_its_contributions(story: Story, where: str) -> None:
    everyone = list(range(story.at["first"], story.at["first"] + len(WHO)))
    with fresh(story, where) as ledger:
        assert ledger.find(ANCHOR) == everyone
        for name in (ANCHOR.hex(), ANCHOR.hex()[:12]):
            found = find_contributions(ledger, name)
            assert [leaf.seq for leaf in found] == everyone
        assert find_leaf(ledger, descriptor(story, 3).hex()[:10]) == everyone[3]
        assert trace_contribution(ledger, found[3]).leaf.seq == everyone[3]
        assert reconcile(ledger, found[3])["contribution"]["index"] == everyone[3]
        out = withdraw(ledger, ANCHOR.hex(), WithdrawalReason.REQUEST)
        assert [each.target.seq for each in out] == everyone


BODIES = {
    "deleted": "UPDATE leaf SET body = NULL WHERE seq = {0}",
    "replaced": "UPDATE leaf SET body = (SELECT body FROM leaf WHERE seq = {0} + 1) WHERE seq = {0}",
}


@pytest.mark.parametrize("statement", BODIES.values(), ids=BODIES.keys())
@pytest.mark.parametrize("running", [False, True])
def test_a_contribution_without_its_body_is_not_taken_for_a_pruned_one(
    story: Story, where: str, tmp_path: Path, statement: str, running: bool
) -> None:
    """Otherwise its contributor's request were refused, its anchor forgotten, and any contributor could withdraw it."""
    folder, now, signed = tmp_path / "in", int(story.clock.now), request(story, 0)
    folder.mkdir()
    stranger = sign_withdrawal(descriptor(story, 0), "consent", CAROL, ledger=story.ledger.header_hash, time=now)
    names = (descriptor(story, 0).hex(), ANCHOR.hex(), ANCHOR.hex()[:9], str(story.at["first"]))
    (folder / "a.cose").write_bytes(signed)
    with fresh(story, where) as ledger:
        if running:
            assert len(ledger.find(descriptor(story, 0))) == 1
        edit(where, statement.format(story.at["first"]))
        with raises_code("ledger.leaf-not-allowed"):
            check_withdrawal(signed, ledger, now=now)
        for data in (signed, stranger):
            with raises_code("ledger.leaf-not-allowed"):
                withdraw_signed(ledger, data)
        for name in names:
            with raises_code("ledger.leaf-not-allowed"):
                withdraw(ledger, name, WithdrawalReason.REQUEST)
        with raises_code("ledger.leaf-not-allowed"):
            list(WithdrawalInbox(ledger, folder).take())
    assert [path.name for path in folder.iterdir() if path.is_file()] == ["a.cose"]


DAMAGES = {
    "a leaf that was changed": "UPDATE leaf SET data = (SELECT data FROM leaf WHERE seq = 0) WHERE seq = {0}",
    "a leaf that is missing": "DELETE FROM leaf WHERE seq = {0}",
    "a head": "UPDATE head SET size = size - 1",
}


@pytest.mark.parametrize("statement", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_ledger_refuses_no_file(story: Story, where: str, tmp_path: Path, statement: str) -> None:
    """Somebody who can edit the store must not make the operator move requests to refused/."""
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.cose").write_bytes(request(story, 0))
    (folder / "b.json").write_text(json.dumps({"withdraw": descriptor(story, 1).hex(), "reason": "consent"}))
    edit(where, statement.format(story.at["first"] + 2))
    with pytest.raises(LedgerDamaged), fresh(story, where) as ledger:
        list(WithdrawalInbox(ledger, folder).take())
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == ["a.cose", "b.json"]


def test_members_are_counted_once_after_a_moment_of_damage(where: str) -> None:
    """The leaves are read again then, in other groups than before; a class must not seem to have free places."""
    clock = Clock()
    with create(where, clock) as ledger:
        index = MembershipIndex(ledger)

        def counted() -> int:
            with ledger.store.read() as rows:
                return index.count_members(rows, "clinical", START)

        for n in range(20):
            ledger.append([admitted(n)])
            assert counted() == n + 1
        ledger.checkpoint()
        ((frontier,),) = rows_of(where, "SELECT frontier FROM head")
        edit(where, "UPDATE head SET frontier = (SELECT data FROM leaf WHERE seq = 0)")
        with raises_code("ledger.tree-differs"):
            counted()
        edit(where, f"UPDATE head SET frontier = {binary(where, frontier)}")
        ledger.append([admitted(n) for n in range(20, 25)])
        assert counted() == 25
