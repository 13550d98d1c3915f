"""The ledger as the gate's register: once, for good, never more than declared, and an auditor finds it in order."""

from __future__ import annotations

import copy
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from clinic import ALICE, BOB, HOUR, Clinic, admitted, check, digest_of, policy, reasons, write
from forge import sql
from forks import in_processes
from making import GOVERNING, LEDGER, START, digest, key
from refusals import raises_code

from lamina.admit import reasons as why_not
from lamina.admit.contribution_sources import Contribution
from lamina.admit.gate import AdmissionGate
from lamina.ledger import admission_batch, signed_checkpoint
from lamina.ledger.admission_batch import AdmissionBatch, LedgerRegister, append_key_ring, open_register
from lamina.ledger.corpus_terms import CorpusTerms, open_or_create
from lamina.ledger.governance_records import KeyChange, KeyEvents, WithdrawalReason
from lamina.ledger.records import ContributionRecord
from lamina.ledger.retention import Retention
from lamina.ledger.verify.verifier import verify
from lamina.ledger.withdrawal import withdraw
from lamina.ledger.writer import Ledger
from lamina.sign.key_ring import KeyRing


@pytest.fixture
def clinic(where: str) -> Clinic:
    return Clinic(where)


@pytest.fixture
def small(tmp_path: Path) -> Clinic:
    """In a file: what does not depend on the kind of store."""
    return Clinic(str(tmp_path / "ledger.db"))


def out(clinic: Clinic, given: Contribution) -> None:
    with clinic.open() as ledger:
        withdraw(ledger, digest_of(given).hex(), WithdrawalReason.REQUEST)


def test_whoever_expires_while_a_batch_is_decided_is_not_written(clinic: Clinic, monkeypatch: Any) -> None:
    """The time of a leaf is taken when it is written."""
    write, late = AdmissionBatch.write, [HOUR + 1, 0]

    def slow(batch: AdmissionBatch) -> None:
        clinic.clock.now += late.pop(0) if late else 0
        write(batch)

    monkeypatch.setattr(AdmissionBatch, "write", slow)
    found = clinic.admit([clinic.offer("short", life=HOUR), clinic.offer("long")])
    assert list(found.ids) == ["long"] and reasons(found) == {"short": "expired"}
    check(clinic.where)


# ------------------------------------------------------------------------------------------------ what is written


def test_who_is_admitted_is_a_leaf_with_what_was_signed(clinic: Clinic) -> None:
    given = [
        clinic.offer("a", subject="one", anchor=digest("anchor")),
        clinic.offer("b", "standard", who=BOB),
        clinic.offer("c", "open"),
    ]
    admission = clinic.admit(given)
    assert len(admission) == 3
    with clinic.open() as ledger:
        found = admitted(ledger)
        assert [each.descriptor for each in found] == [digest_of(one) for one in given]
        first, second, third = found
        assert (first.terms.cls, first.terms.profile, first.terms.data_class) == ("clinical", "top=0.25", "clinical")
        assert first.bound == ("clinical", 1_000_000, admission[0].account.noise_micro)
        assert (first.subject, first.anchor) == (admission[0].tag, digest("anchor"))
        assert (second.key, second.terms.profile, second.subject) == (BOB.public.id, None, None)
        assert third.bound == ("open", 0, 0)
        assert (first.not_before, first.expires) == (START - HOUR, START + 100 * HOUR)
        for leaf in ledger.of_kind(ContributionRecord):
            assert ledger.evidence(leaf.seq) == given[leaf.seq - ledger.size + 3].attestation
        latest = ledger.latest()
        assert latest is not None and signed_checkpoint.parse_checkpoint(latest)[0].size == ledger.size
    check(clinic.where)


def test_the_same_again_is_admitted_and_writes_nothing(clinic: Clinic, tmp_path: Path) -> None:
    folder = write(tmp_path / "people", [*clinic.offers(0, 30), clinic.offer("z", subject="z")])
    assert len(clinic.admit(folder)) == 31
    with clinic.open() as ledger:
        size, root = ledger.size, ledger.root
    for _ in range(2):
        again = clinic.admit(folder)
        assert len(again) == 31 and not again.refused
    write(folder, clinic.offers(30, 35))
    assert len(clinic.admit(folder)) == 36
    with clinic.open() as ledger:
        assert ledger.size == size + 5 and ledger.root_at(size) == root
    check(clinic.where)


def test_nobody_takes_a_place_twice(clinic: Clinic) -> None:
    """A full class is full for others, and not for who is in it."""
    clinic.policy = policy(clinical={"population": 10})
    given = clinic.offers(0, 12)
    first = clinic.admit(given)
    assert reasons(first) == {"p0010": "class-full", "p0011": "class-full"}
    assert reasons(clinic.admit(given)) == reasons(first)
    clinic.policy = policy(clinical={"population": 11})
    assert reasons(clinic.admit(given)) == {"p0011": "class-full"}
    with clinic.open() as ledger:
        assert LedgerRegister(ledger).members("clinical") == len(admitted(ledger)) == 11
        assert LedgerRegister(ledger).members("standard") == 0
    check(clinic.where)


def test_a_smaller_class_keeps_its_first(small: Clinic) -> None:
    small.admit(small.offers(0, 12))
    small.policy = policy(clinical={"population": 10})
    assert reasons(small.admit(small.offers(0, 13))) == dict.fromkeys(["p0010", "p0011", "p0012"], "class-full")


def test_who_expired_gives_up_the_place(small: Clinic) -> None:
    small.policy = policy(clinical={"population": 5})
    assert len(small.admit([*small.offers(0, 3, life=HOUR), *small.offers(3, 5)])) == 5
    assert reasons(small.admit(small.offers(5, 6))) == {"p0005": "class-full"}
    small.clock.now += HOUR
    assert reasons(small.admit(small.offers(5, 9))) == {"p0008": "class-full"}
    check(small.where)


def test_another_attestation_of_the_same_is_a_replay(clinic: Clinic) -> None:
    given = clinic.offer("a")
    clinic.admit([given])
    assert reasons(clinic.admit([clinic.resigned(given, START - 30)])) == {"a": "replayed"}
    assert reasons(clinic.admit([clinic.offer("a", "standard")])) == {"a": "replayed"}  # the same token
    with clinic.open() as ledger:
        assert len(admitted(ledger)) == 1


def test_a_person_is_there_once(clinic: Clinic) -> None:
    clinic.admit([clinic.offer("a", subject="one")])
    again = [clinic.offer("a", subject="one"), clinic.offer("b", "standard", subject="one")]
    assert reasons(clinic.admit(again)) == {"b": "duplicate-subject"}


def test_a_token_outlives_its_leaf(small: Clinic) -> None:
    """What was pruned is not found by its descriptor any more. It is not admitted again for that."""
    small.policy = policy()
    contract = CorpusTerms.of_policy(small.policy)
    open_or_create(small.where, contract, LEDGER, governing=GOVERNING, retention=10, clock=small.clock).close()
    small.admit([small.offer("a", life=HOUR), small.offer("b")])
    small.clock.now += 2 * HOUR
    with small.open() as ledger:
        proposal = Retention(ledger).propose()
        assert proposal is not None
        Retention(ledger).prune(proposal)
        assert len(admitted(ledger)) == 1
    late = small.offer("a")  # the same nonce, another window
    assert reasons(small.admit([late])) == {"a": "replayed"}


# ------------------------------------------------------------------------------------------------ withdrawals


def test_who_was_withdrawn_stays_out_for_good(clinic: Clinic) -> None:
    given = clinic.offers(0, 4)
    clinic.admit(given)
    out(clinic, given[1])
    again = clinic.admit(given)
    assert reasons(again) == {"p0001": "withdrawn"} and len(again) == 3
    assert reasons(clinic.admit([clinic.resigned(given[1], START - 10)])) == {"p0001": "withdrawn"}
    check(clinic.where)


def test_a_place_that_was_given_up_is_free(small: Clinic) -> None:
    small.policy = policy(clinical={"population": 3})
    given = small.offers(0, 4)
    small.admit(given)
    out(small, given[0])
    assert reasons(small.admit(given)) == {"p0000": "withdrawn"}
    with small.open() as ledger:
        assert LedgerRegister(ledger).members("clinical") == 3


def test_who_is_withdrawn_between_question_and_entry(clinic: Clinic) -> None:
    given = clinic.offers(0, 3)
    clinic.admit(given)
    with clinic.open() as ledger:
        admission = clinic.gate(ledger).review(given, enter=False)
        assert len(admission) == 3
        out(clinic, given[2])
        assert admission.enter_into(LedgerRegister(ledger)) == {2: (why_not.WITHDRAWN, "")}
        assert len(admission) == 3  # it is for who asked to leave them out
        assert admission.enter() == 1 and list(admission.ids) == ["p0000", "p0001"]


# ------------------------------------------------------------------------------------------------ another ledger


def test_an_admission_can_be_entered_later_and_elsewhere(clinic: Clinic, tmp_path: Path) -> None:
    admission = clinic.gate().review(clinic.offers(0, 7))
    with clinic.open() as ledger:
        assert admission.enter_into(LedgerRegister(ledger)) == {}
        size = ledger.size
        assert admission.enter_into(LedgerRegister(ledger)) == {}
        assert ledger.size == size and len(admitted(ledger)) == 7
    check(clinic.where)


def test_who_has_left_is_not_entered(small: Clinic) -> None:
    admission = small.gate().review([*small.offers(0, 2, life=HOUR), *small.offers(2, 4)])
    small.clock.now += HOUR
    admission.recheck()
    with small.open() as ledger:
        assert admission.enter_into(LedgerRegister(ledger)) == {}
        assert len(admitted(ledger)) == 2


def test_who_expired_before_it_was_entered_is_lost(small: Clinic) -> None:
    admission = small.gate().review([*small.offers(0, 1, life=HOUR), *small.offers(2, 4)])
    small.clock.now += HOUR
    with small.open() as ledger:
        assert admission.enter_into(LedgerRegister(ledger)) == {0: (why_not.EXPIRED, "")}


def test_a_ledger_under_another_policy_takes_nobody(small: Clinic) -> None:
    with small.open() as ledger:
        small.policy = policy(standard={"noise_multiplier": 1.0})
        admission = small.gate().review([small.offer("a", "standard")])
        with raises_code("ledger.policy-differs"):
            admission.enter_into(LedgerRegister(ledger))
        assert ledger.size == 1


# ------------------------------------------------------------------------------------------------ changes on the way


def test_what_changed_after_it_was_examined_does_not_enter(small: Clinic, tmp_path: Path) -> None:
    given = small.offers(0, 4)
    folder = write(tmp_path / "people", given)
    admission = small.gate().review(folder)
    (folder / "p0000" / "descriptor.cbor").write_bytes(given[1].descriptor or b"")
    (folder / "p0001" / "attestation.cose").write_bytes(small.resigned(given[1], START - 1).attestation or b"")
    (folder / "p0002" / "attestation.cose").unlink()
    with small.open() as ledger:
        lost = admission.enter_into(LedgerRegister(ledger))
        assert {row: reason for row, (reason, _) in lost.items()} == {
            0: why_not.CHANGED,
            1: why_not.CHANGED,
            2: why_not.GONE,
        }
        assert [each.descriptor for each in admitted(ledger)] == [digest_of(given[3])]
    check(small.where)


class Passed:
    """Contributions that can be passed over as often as one likes, and not asked for one by one."""

    def __init__(self, given: list[Contribution]) -> None:
        self.given = given

    def __iter__(self) -> Any:
        return iter(self.given)


def test_sources_are_read_again_without_payloads(small: Clinic, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(admission_batch, "ADMISSION_BATCH_SIZE", 2)
    with small.open() as ledger:
        for source in (Passed(small.offers(0, 5)), iter(small.offers(5, 6))):
            with raises_code("admit.source-read-once"):
                small.gate(ledger).review(source)
        folder = write(tmp_path / "people", small.offers(6, 8))
        admission = small.gate(ledger).review(folder, enter=False)
        (folder / "p0006" / "payload.bin").unlink()  # the ledger does not ask for it
        assert admission.enter() == 0
        assert len(admitted(ledger)) == 2


# ------------------------------------------------------------------------------------------------ keys


def events(ledger: Ledger) -> list[tuple[KeyChange, bytes]]:
    found = (leaf.record for leaf in ledger.of_kind(KeyEvents))
    return [
        (each.change, each.target or (each.key.id if each.key is not None else b""))
        for record in found
        if isinstance(record, KeyEvents)
        for each in record.events
    ]


def test_a_key_comes_before_its_first_contribution_and_once(clinic: Clinic) -> None:
    clinic.admit(clinic.offers(0, 2))
    clinic.admit([*clinic.offers(2, 4), clinic.offer("b", who=BOB)])
    with clinic.open() as ledger:
        assert events(ledger) == [(KeyChange.ADD, ALICE.public.id), (KeyChange.ADD, BOB.public.id)]
        kinds = [leaf.kind.__name__ for leaf in ledger.leaves()]
        assert kinds == ["Header", "KeyEvents", *["ContributionRecord"] * 2, "KeyEvents", *["ContributionRecord"] * 3]
        assert b"alice" not in b"".join(
            data.leaf + (data.body or b"") for _, data in ledger.raw_leaves()
        )  # labels are nobody's business
    check(clinic.where)


def test_a_revocation_in_the_ledger_holds_under_an_older_ring(clinic: Clinic) -> None:
    given, older = [*clinic.offers(0, 2), clinic.offer("b", who=BOB)], copy.deepcopy(clinic.keys)
    clinic.admit(given)
    clinic.clock.now += HOUR
    clinic.keys.revoke(BOB.public.id, at=START + HOUR)
    clinic.admit(given)
    clinic.keys = older
    again = [*given, clinic.offer("c", who=BOB)]
    with Ledger.open(clinic.where, LEDGER, clock=clinic.clock) as ledger:  # before anything is written, too
        assert reasons(clinic.gate(ledger).review(again, enter=False)) == {"b": "revoked-key", "c": "revoked-key"}
    assert reasons(clinic.admit(again)) == {"b": "revoked-key", "c": "revoked-key"}
    check(clinic.where)


def test_who_is_not_enrolled_in_an_owned_ledger_is_told_whom_to_ask(clinic: Clinic) -> None:
    clinic.admit(clinic.offers(0, 2))
    given = [*clinic.offers(0, 3), clinic.offer("b", who=BOB)]
    with Ledger.open(clinic.where, LEDGER, clock=clinic.clock) as ledger:
        size = ledger.size
        (refused,) = clinic.gate(ledger).review(given).refused
        assert (refused.id, refused.reason.word) == ("b", "unknown-key") and "owner enrols it" in refused.detail
        assert ledger.size == size + 1
        clinic.keys.revoke(ALICE.public.id, at=int(clinic.clock.now))
        assert append_key_ring(ledger, clinic.keys) == 0  # what the ring says, only the owner can write
    check(clinic.where)


def test_a_revocation_is_recorded_once_and_an_earlier_one_again(clinic: Clinic) -> None:
    given = [*clinic.offers(0, 2), clinic.offer("b", who=BOB)]
    clinic.admit(given)
    clinic.clock.now += HOUR
    clinic.keys.revoke(BOB.public.id, at=START + HOUR)
    for _ in range(2):
        assert reasons(clinic.admit(given)) == {"b": "revoked-key"}
    with clinic.open() as ledger:
        assert events(ledger)[2:] == [(KeyChange.REVOKE, BOB.public.id)]
        clinic.keys.revoke(BOB.public.id, at=START + 5)
        assert append_key_ring(ledger, clinic.keys) == 1
        assert append_key_ring(ledger, clinic.keys) == 0
        assert len(events(ledger)) == 4
    check(clinic.where)


def test_a_revocation_is_recorded_even_if_nobody_is_left(small: Clinic) -> None:
    small.admit(small.offers(0, 2))
    small.clock.now += HOUR
    small.keys.revoke(ALICE.public.id, at=START + HOUR)
    assert len(small.admit(small.offers(0, 2))) == 0
    with small.open() as ledger:
        assert events(ledger)[-1] == (KeyChange.REVOKE, ALICE.public.id)


def test_a_ledger_remembers_a_revocation_that_a_ring_forgot(small: Clinic) -> None:
    old = Clinic(small.where).keys
    small.admit(small.offers(0, 2))
    small.keys.revoke(ALICE.public.id, at=START)
    small.admit(small.offers(0, 2))
    small.keys = old
    lost = small.admit([*small.offers(2, 4), small.offer("b", who=BOB)])
    assert reasons(lost) == {"p0002": "revoked-key", "p0003": "revoked-key"}
    assert "in the ledger" in lost.refused[0].detail
    check(small.where)


def test_a_key_that_took_over_is_rotated(clinic: Clinic) -> None:
    later, last = key("alice 2"), key("alice 3")
    clinic.admit(clinic.offers(0, 2))
    clinic.clock.now += 2 * HOUR
    clinic.keys.rotate(ALICE.public.id, later.public, at=START + HOUR)
    clinic.keys.rotate(later.public.id, last.public, at=START + HOUR + 10)
    new = clinic.offer("c", who=last, issued=START + 2 * HOUR)
    forged = clinic.offer("d", issued=START + HOUR)
    assert reasons(clinic.admit([*clinic.offers(0, 4), new, forged])) == {"d": "retired-key"}
    with clinic.open() as ledger:
        assert events(ledger) == [
            (KeyChange.ADD, ALICE.public.id),
            (KeyChange.ROTATE, ALICE.public.id),
            (KeyChange.ROTATE, later.public.id),
        ]
        assert len(admitted(ledger)) == 5
    check(clinic.where)


def test_a_new_key_may_be_known_before_the_one_that_it_replaced(small: Clinic) -> None:
    later = key("alice 2")
    small.keys.rotate(ALICE.public.id, later.public, at=START - HOUR // 2)
    small.admit([small.offer("n", who=later, issued=START)])
    small.admit(small.offers(0, 2))
    with small.open() as ledger:
        assert events(ledger) == [(KeyChange.ADD, later.public.id), (KeyChange.ADD, ALICE.public.id)]
    check(small.where)


def test_a_key_of_the_ledger_signs_no_contributions(small: Clinic) -> None:
    small.keys.add(LEDGER.public, label="both", valid_from=START - 10 * HOUR)
    found = small.admit([small.offer("a", who=LEDGER), small.offer("b")])
    assert reasons(found) == {"a": "wrong-role"} and list(found.ids) == ["b"]
    assert "has role ledger" in found.refused[0].detail
    check(small.where)


def test_a_key_that_the_ring_has_lost_meanwhile_stops_nobody(small: Clinic) -> None:
    gate = small.gate()
    admission = gate.review([small.offer("a", who=BOB), small.offer("b")])
    gate.keys = KeyRing()
    gate.keys.add(ALICE.public, label="alice", valid_from=START - 10 * HOUR)
    with small.open() as ledger:
        assert admission.enter_into(LedgerRegister(ledger)) == {0: (why_not.UNKNOWN_KEY, "")}
        assert len(admitted(ledger)) == 1


# ------------------------------------------------------------------------------------------------ several at once


def test_gates_at_once_never_exceed_a_class_and_enter_nobody_twice(
    clinic: Clinic, monkeypatch: Any, tmp_path: Path
) -> None:
    """Three processes, overlapping contributions, small batches, 50 places."""
    monkeypatch.setattr(admission_batch, "ADMISSION_BATCH_SIZE", 5)
    clinic.policy = policy(clinical={"population": 50})
    clinic.open().close()

    def work(number: int) -> None:
        mine = clinic.offers(20 * number, 20 * number + 60)
        admission = clinic.admit(mine)
        (tmp_path / f"{number}").write_text("\n".join(admission.ids))
        assert {each.reason for each in admission.refused} <= {why_not.CLASS_FULL}

    in_processes(*(lambda number=number: work(number) for number in range(3)))
    with clinic.open() as ledger:
        found = [each.descriptor for each in admitted(ledger)]
        assert len(found) == len(set(found)) == 50
        inside = {digest_of(one): one.id for one in clinic.offers(0, 100)}
        entered = {inside[each] for each in found}
        told = {name for number in range(3) for name in (tmp_path / f"{number}").read_text().split()}
        assert told == entered  # who is told to be in is in, and nobody else
        assert len(events(ledger)) == 1
    check(clinic.where)


def test_a_batch_is_decided_again_when_somebody_was_quicker(clinic: Clinic, monkeypatch: Any) -> None:
    """Between decision and entry another gate takes all places but one, a person, and one of ours as it is."""
    clinic.policy = policy(clinical={"population": 3})
    ours = [clinic.offer("a"), clinic.offer("b", "standard", subject="one"), clinic.offer("c"), clinic.offer("d")]
    theirs = [clinic.offer("x"), clinic.offer("y", "standard", subject="one"), clinic.offer("c")]
    write_real, calls = admission_batch.AdmissionBatch.write, []

    def write_late(self: Any) -> None:
        calls.append(self)
        if len(calls) == 1:
            assert len(AdmissionGate(clinic.policy, clinic.keys, clock=clinic.clock).review(theirs)) == 3
            clinic.admit(theirs)
        write_real(self)

    monkeypatch.setattr(admission_batch.AdmissionBatch, "write", write_late)
    admission = clinic.admit(ours)
    assert list(admission.ids) == ["a", "c"]
    assert reasons(admission) == {"b": "duplicate-subject", "d": "class-full"}
    assert len(calls) == 3
    check(clinic.where)


def test_a_kill_between_batches_is_completed_by_the_same_again(
    clinic: Clinic, monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr(admission_batch, "ADMISSION_BATCH_SIZE", 10)
    folder = write(tmp_path / "people", clinic.offers(0, 45))
    clinic.open().close()
    write_real, count = admission_batch.AdmissionBatch.write, [0]

    def die(self: Any) -> None:
        count[0] += 1
        if count[0] == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        write_real(self)

    child = os.fork()
    if child == 0:
        admission_batch.AdmissionBatch.write = die  # type: ignore[method-assign]
        clinic.admit(folder)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    with clinic.open() as ledger:
        assert len(admitted(ledger)) == 20
        assert signed_checkpoint.parse_checkpoint(ledger.latest() or "")[0].size == 1
    assert len(clinic.admit(folder)) == 45
    with clinic.open() as ledger:
        found = [each.descriptor for each in admitted(ledger)]
        assert found == [digest_of(one) for one in clinic.offers(0, 45)]
    check(clinic.where)


# ------------------------------------------------------------------------------------------------ what is given


def test_a_register_of_a_place_a_ledger_or_itself(small: Clinic) -> None:
    with open_register(small.where, small.policy, clock=small.clock) as one:
        assert isinstance(one, LedgerRegister) and one.ledger.signs
        opened = one.ledger
        with open_register(opened, small.policy) as two, open_register(two, small.policy) as three:
            assert isinstance(two, LedgerRegister) and two.ledger is opened and three is two
        assert opened.size == 1  # still open
    wider = policy(clinical={"population": 1000})
    with open_register(small.where, wider, clock=small.clock) as one:
        assert isinstance(one, LedgerRegister) and one.ledger.size == 2
    with (
        raises_code("ledger.wrong-origin"),
        open_register(small.where, policy(origin="other.example/ecg"), clock=small.clock),
    ):
        pass


def test_a_store_that_hides_tokens_admits_nobody_twice(tmp_path: Path) -> None:
    clinic = Clinic(str(tmp_path / "ledger.db"))
    given = clinic.offers(0, 12)
    clinic.admit(given)
    sql(clinic.where, "DELETE FROM token")
    clinic.admit(given)
    with clinic.open() as ledger:
        assert len(admitted(ledger)) == 12
    problem = verify(clinic.where).problem
    assert problem is not None and problem.code == "verify.token-index-differs"
