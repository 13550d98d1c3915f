"""One bound, one ledger: what names a ledger is admitted by that one alone, and a policy that names one admits into no other."""

from __future__ import annotations

from pathlib import Path

import pytest
from clinic import Clinic, check, policy, reasons
from making import GOVERNING, LEDGER, START
from refusals import raises_code

from lamina.admit.gate import AdmissionGate
from lamina.ledger.admission_batch import LedgerRegister, open_register
from lamina.ledger.corpus_terms import CorpusTerms, open_or_create
from lamina.ledger.records import ContributionRecord
from lamina.ledger.verify.verifier import verify
from lamina.ledger.writer import Ledger


@pytest.fixture
def two(tmp_path: Path) -> tuple[Clinic, Clinic]:
    """Two ledgers of one origin."""
    found = Clinic(str(tmp_path / "one.db")), Clinic(str(tmp_path / "two.db"))
    found[1].clock.now += 1  # another header leaf
    return found


def header_of(clinic: Clinic) -> bytes:
    with clinic.open() as ledger:
        return ledger.header_hash


def test_what_names_no_ledger_is_in_both_and_both_say_so(two: tuple[Clinic, Clinic]) -> None:
    for clinic in two:
        assert len(clinic.admit(clinic.offers(0, 3))) == 3
        (note,) = [each for each in verify(clinic.where, now=START + 3600).notes if "no ledger" in each]
        assert note.startswith("3 contributions name no ledger")


def test_what_names_a_ledger_is_in_that_one_alone(two: tuple[Clinic, Clinic]) -> None:
    one, other = two
    given = [one.offer("a", ledger=header_of(one)), one.offer("b")]
    assert len(one.admit(given)) == 2
    found = other.admit(given)
    assert list(found.ids) == ["b"] and reasons(found) == {"a": "other-ledger"}
    check(one.where)
    check(other.where)
    assert not any("2 contributions name" in each for each in verify(one.where, now=START + 3600).notes)


def test_an_admission_is_not_carried_into_another_ledger(two: tuple[Clinic, Clinic]) -> None:
    one, other = two
    admission = one.admit([one.offer("a", ledger=header_of(one)), one.offer("b")])
    with other.open() as ledger:
        lost = admission.enter_into(LedgerRegister(ledger))
        assert {admission.ids[row]: str(why) for row, (why, _) in lost.items()} == {"a": "other-ledger"}


def test_the_writer_refuses_it_too(two: tuple[Clinic, Clinic]) -> None:
    """Whoever does not go through a gate."""
    one, other = two
    given = one.offer("a", ledger=header_of(one))
    one.admit([given])
    with one.open() as ledger:
        (leaf,) = ledger.of_kind(ContributionRecord)
        evidence = ledger.evidence(leaf.seq)
    other.admit([other.offer("b")])  # her key is there
    with other.open() as ledger:
        size = ledger.size
        with raises_code("ledger.attestation-of-other-ledger"):
            ledger.append([leaf.record], [evidence])
        assert ledger.size == size


def test_a_policy_that_names_a_ledger(two: tuple[Clinic, Clinic]) -> None:
    one, other = two
    header, elsewhere = header_of(one), header_of(other)
    one.policy = other.policy = policy(ledger=header.hex())
    given = [one.offer("a", ledger=header), one.offer("b"), one.offer("c", ledger=elsewhere)]
    found = one.admit(given)
    assert list(found.ids) == ["a"] and reasons(found) == {"b": "not-bound", "c": "other-ledger"}
    assert not any("no ledger" in each for each in verify(one.where, now=START + 3600).notes)
    with raises_code("ledger.not-the-named-ledger"):
        other.open()
    opened = Ledger.open(other.where, LEDGER, clock=other.clock)
    with opened, raises_code("ledger.not-the-named-ledger"), open_register(opened, other.policy):
        pass
    gate = AdmissionGate(one.policy, one.keys, clock=one.clock)  # without any ledger the policy decides
    assert reasons(gate.review(given)) == {"b": "not-bound", "c": "other-ledger"}


def test_a_ledger_of_one_s_own_has_the_terms_of_the_policy(tmp_path: Path) -> None:
    terms = CorpusTerms.of_policy(policy(retention=30, granularity=2))
    with open_or_create(tmp_path / "new.db", terms) as ledger:
        header = ledger.header
        assert (header.retention, header.granularity, header.witnesses) == (30 * 86_400, 2, 0)
    with open_or_create(tmp_path / "new.db", CorpusTerms.of_policy(policy(retention=1))) as ledger:
        assert ledger.header == header  # read when it is made; later changes are governing records
    with raises_code("ledger.witnesses-missing"):
        open_or_create(tmp_path / "other.db", CorpusTerms.of_policy(policy(witnesses=1)))
    assert not list(tmp_path.glob("other*"))


def test_a_policy_that_names_a_ledger_makes_none(tmp_path: Path) -> None:
    terms = CorpusTerms.of_policy(policy(ledger="00" * 32))
    with raises_code("ledger.named-ledger-missing"):
        open_or_create(tmp_path / "new.db", terms, LEDGER, governing=GOVERNING)
    assert not list(tmp_path.iterdir())
