"""What was admitted before: within one review, across reviews, and by somebody else at the same time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from memory_register import MemoryRegister

from lamina.admit import reasons
from lamina.admit.reasons import ContributionRefused, Reason
from lamina.admit.register import EntryContext, RefusedRows, RegisterStatus
from lamina.admit.rows import Admitted


def test_only_who_is_admitted_is_entered(desk: Any) -> None:
    """Who finds his class full may come again when there is room."""
    desk.policy = desk.policy_with(standard={"population": 1})
    register = MemoryRegister()
    first, second = desk.offer("a", "standard"), desk.offer("b", "standard")
    assert [r.reason for r in desk.gate(register=register).review([first, second]).refused] == [reasons.CLASS_FULL]
    assert register.members("standard") == 1
    roomier = desk.policy_with(standard={"population": 2})
    assert len(desk.gate(register=register, policy=roomier).review([second])) == 1
    assert len(desk.gate(register=register, policy=roomier).review([first, second])) == 2
    assert register.members("standard") == 2


def test_the_same_again_stands_and_takes_no_place(desk: Any) -> None:
    """Also in a class that is full. Twice in one review it is a replay all the same."""
    desk.policy = desk.policy_with(standard={"population": 2})
    gate = desk.gate(register=MemoryRegister())
    given = [desk.offer("a", "standard"), desk.offer("b", "standard", tag="07" * 32)]
    for _ in range(2):
        again = gate.review(given)
        assert list(again.ids) == ["a", "b"] and not again.refused
    late = gate.review([desk.offer("c", "standard"), *given])
    assert list(late.ids) == ["a", "b"]
    assert [r.reason for r in late.refused] == [reasons.CLASS_FULL]
    assert [r.reason for r in gate.review([*given, given[0]]).refused] == [reasons.REPLAYED]
    assert gate.register.members("standard") == 2


def test_a_register_is_told_the_identity_of_each(desk: Any) -> None:
    told: list[Admitted] = []

    class Listening(MemoryRegister):
        def enter(self, entries: Iterable[Admitted], beside: EntryContext) -> RefusedRows:
            told.extend(entries)
            self.beside = beside
            return super().enter(told, beside)

    given = [desk.offer("a"), desk.offer("b", "open", tag="07" * 32)]
    register = Listening()
    admission = desk.gate(register=register).review(given)
    assert told == list(admission)
    assert told[1].tag == b"\7" * 32 and told[0].tag is None
    assert register.beside.places == {"clinical": 1000, "standard": 1000, "open": None}
    assert register.beside.keys is desk.keys
    assert register.beside.evidence(told[1]) == (given[1].descriptor, given[1].attestation)


def test_evidence_is_what_was_examined(desk: Any) -> None:
    given = [desk.offer("a"), desk.offer("b")]
    admission = desk.gate().review(given)
    found: list[Reason] = []

    class Asking(MemoryRegister):
        def enter(self, entries: Iterable[Admitted], beside: EntryContext) -> RefusedRows:
            for entry in entries:
                with pytest.raises(ContributionRefused) as caught:
                    beside.evidence(entry)
                found.append(caught.value.reason)
            return {}

    given[0] = desk.offer("a")  # another one by now
    given.pop()
    admission.enter_into(Asking())
    assert found == [reasons.CHANGED, reasons.GONE]


def test_who_loses_a_race_is_refused(desk: Any) -> None:
    """Another gate admits somebody after this one asked, and before it entered: the person, the last place."""
    desk.policy = desk.policy_with(standard={"population": 1})
    other = desk.gate()
    theirs = [desk.offer("x", tag="07" * 32), desk.offer("y", "standard")]

    class Raced(MemoryRegister):
        raced = False

        def enter(self, entries: Iterable[Admitted], beside: EntryContext) -> RefusedRows:
            if not self.raced:
                self.raced, other.register = True, self
                assert len(other.review(theirs)) == 2
            return super().enter(entries, beside)

    ours = [desk.offer("a", tag="07" * 32), desk.offer("b", "standard"), desk.offer("c")]
    admission = desk.gate(register=Raced()).review(ours)
    assert list(admission.ids) == ["c"]
    assert [(r.reason, r.detail) for r in admission.refused] == [
        (reasons.DUPLICATE_SUBJECT, "admitted by another process meanwhile"),
        (reasons.CLASS_FULL, "class 'standard' has a population of 1"),
    ]


def test_a_register_may_be_told_later(desk: Any) -> None:
    """By whoever still has to open the payloads."""
    register = MemoryRegister()
    gate = desk.gate(register=register)
    admission = gate.review([desk.offer("a"), desk.offer("b")], enter=False)
    assert register.members("clinical") == 0
    admission.refuse({0: (reasons.UNREADABLE, "no table")})
    assert admission.enter() == 0
    assert register.members("clinical") == 1
    raced = gate.review([desk.offer("c")], enter=False)
    assert gate.review([*raced.source, desk.offer("d")]).to_dict()["admitted"] == 2
    assert raced.enter() == 0 and len(raced) == 1  # by the very same attestation: it stands
    assert register.members("clinical") == 3


def test_who_has_left_is_not_entered(desk: Any) -> None:
    register = MemoryRegister()
    admission = desk.gate().review([desk.offer("a", expires=desk.NOW + 10), desk.offer("b")])
    desk.now += 10
    admission.recheck()
    assert admission.enter_into(register) == {}
    assert register.members("clinical") == 1


def test_without_a_register_a_review_can_be_repeated(desk: Any) -> None:
    gate, given = desk.gate(), desk.offer("a")
    assert len(gate.review([given])) == len(gate.review([given])) == 1


def test_a_register_is_asked_in_parts(desk: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("lamina.admit.rows.REGISTER_BATCH", 2)
    asked: list[list[RegisterStatus]] = []

    class Asked(MemoryRegister):
        def look(self, entries: Any) -> Any:
            asked.append(list(super().look(entries)))
            return asked[-1]

    register = Asked()
    offered = [desk.offer(f"{i}") for i in range(5)]
    assert len(desk.gate(register=register).review(offered[:3])) == 3
    asked.clear()
    assert len(desk.gate(register=register).review(offered)) == 5
    assert asked == [[RegisterStatus.SAME] * 2, [RegisterStatus.SAME, RegisterStatus.NEW], [RegisterStatus.NEW]]
    assert register.members("clinical") == 5
