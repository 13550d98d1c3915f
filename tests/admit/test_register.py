"""What was admitted before: within one review, across reviews, and by somebody else at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lamina.admit.reason import Reason
from lamina.admit.register import Entry, MemoryRegister


def test_only_who_is_admitted_is_entered(desk: Any) -> None:
    """Who finds his class full may come again when there is room."""
    desk.policy = desk.policy_with(standard={"population": 1})
    register = MemoryRegister()
    first, second = desk.offer("a", "standard"), desk.offer("b", "standard")
    assert [r.reason for r in desk.gate(register=register).review([first, second]).refused] == [
        Reason.CLASS_FULL
    ]
    assert register.members("standard") == 1
    roomier = desk.policy_with(standard={"population": 2})
    assert len(desk.gate(register=register, policy=roomier).review([second])) == 1
    refused = desk.gate(register=register, policy=roomier).review([first, second]).refused
    assert [r.reason for r in refused] == [Reason.REPLAYED] * 2


def test_a_register_is_told_the_identity_of_each(desk: Any) -> None:
    told: list[Entry] = []

    class Listening(MemoryRegister):
        def enter(self, entries: Sequence[Entry]) -> Sequence[bool]:
            told.extend(entries)
            return super().enter(entries)

    admission = desk.gate(register=Listening()).review(
        [desk.offer("a"), desk.offer("b", "open", tag="07" * 32)]
    )
    assert told == [
        Entry(each.kid, each.cti, each.descriptor, each.tag, each.bound.cls) for each in admission
    ]
    assert told[1].tag == b"\7" * 32 and told[0].tag is None


def test_who_loses_a_race_is_refused(desk: Any) -> None:
    """Another gate admits the same contribution after this one asked, and before it entered it."""
    given = desk.offer("a")

    class Raced(MemoryRegister):
        def enter(self, entries: Sequence[Entry]) -> Sequence[bool]:
            super().enter(entries)
            return super().enter(entries)

    admission = desk.gate(register=Raced()).review([given])
    assert len(admission) == 0
    assert [r.reason for r in admission.refused] == [Reason.REPLAYED]


def test_a_register_may_be_told_later(desk: Any) -> None:
    """By whoever still has to open the payloads."""
    register = MemoryRegister()
    gate = desk.gate(register=register)
    admission = gate.review([desk.offer("a"), desk.offer("b")], enter=False)
    assert register.members("clinical") == 0
    admission.refuse({0: (Reason.UNREADABLE, "no table")})
    assert admission.enter() == 0
    assert register.members("clinical") == 1
    raced = gate.review([desk.offer("c")], enter=False)
    assert gate.review([*raced.source, desk.offer("d")]).to_dict()["admitted"] == 2
    assert raced.enter() == 1 and len(raced) == 0


def test_without_a_register_a_review_can_be_repeated(desk: Any) -> None:
    gate, given = desk.gate(), desk.offer("a")
    assert len(gate.review([given])) == len(gate.review([given])) == 1


def test_a_register_is_asked_in_parts(desk: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("lamina.admit.rows.AT_ONCE", 2)
    register = MemoryRegister()
    offered = [desk.offer(f"{i}") for i in range(5)]
    assert len(desk.gate(register=register).review(offered[:3])) == 3
    assert list(desk.gate(register=register).review(offered).ids) == ["3", "4"]
