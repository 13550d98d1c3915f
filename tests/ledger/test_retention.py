"""Pruning: bodies go, proofs stay, an auditor may look first, and a kill in between changes nothing."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator

import pytest
from build import signed_by
from keyless import EPOCH, WITHDRAWAL, deleted, put_back, replaced, rows_of, tables_of
from making import (
    AUDITOR,
    LEDGER,
    ORIGIN,
    OTHER,
    START,
    Clock,
    admitted,
    attestation,
    batches,
    create,
    digest,
    epoch,
    reopen,
)
from refusals import raises_code

from lamina.ledger import receipt, retention, signed_checkpoint
from lamina.ledger.governance_records import Aggregate, ClassTotal, LeafSpan, Withdrawal, WithdrawalReason
from lamina.ledger.merkle import leaf_hash, verify_consistency, verify_inclusion
from lamina.ledger.records import ContributionRecord, ContributionTerms, KeptContribution
from lamina.ledger.retention import Retention
from lamina.ledger.writer import Ledger

LATER = START + 5000  # contributions of the tests expire at START + 500, the header keeps them for 1000 seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ledger(where: str, clock: Clock) -> Iterator[Ledger]:
    """Leaves 1–299 and 301–700 are old contributions, 300 an epoch, 701 a withdrawal of 7, 702–705 are new."""
    with create(where, clock) as made:
        for batch in batches(1, 300, 100):
            made.append(batch, [attestation(n) for n in range(made.size, made.size + len(batch))])
        made.append([epoch(0)])
        made.checkpoint()
        for batch in batches(301, 701, 150):
            made.append(batch)
            made.checkpoint()
        made.append([Withdrawal(target=7, reason=WithdrawalReason.CONSENT)])
        clock.now = LATER
        made.append([admitted(n, expires=LATER + 9) for n in range(702, 706)])
        made.checkpoint()
        yield made


def proposed(ledger: Ledger) -> Aggregate:
    found = Retention(ledger).propose()
    assert found is not None
    return found


def bodies(ledger: Ledger) -> set[int]:
    """The leaves whose bodies are there. All leaves are."""
    found = dict(ledger.raw_leaves())
    assert found.keys() == set(range(ledger.size))
    return {seq for seq, data in found.items() if data.body is not None}


def test_the_proposal_sums_up_what_is_old_and_expired(ledger: Ledger) -> None:
    old = [data.leaf for seq, data in ledger.raw_leaves() if seq in {*range(1, 300), *range(301, 701)}]
    assert proposed(ledger) == Aggregate(
        spans=(LeafSpan(first=1, stop=300), LeafSpan(first=301, stop=701)),
        horizon=LATER - 1000,
        classes=(ClassTotal(cls="clinical", count=699, withdrawn=1, spend=1000),),
        digest=hashlib.sha256(b"".join(map(leaf_hash, old))).digest(),
    )
    assert ledger.size == 706  # nothing was changed


def test_pruned_bodies_are_gone_and_every_proof_still_holds(ledger: Ledger, where: str, clock: Clock) -> None:
    trees = [signed_checkpoint.parse_checkpoint(text)[0] for text in ledger.checkpoints()]
    whole = dict(ledger.raw_leaves())
    receipts = dict(Retention(ledger).receipts(proposed(ledger)))
    assert receipts.keys() == {*range(1, 300), *range(301, 701)}
    seq = Retention(ledger).prune(proposed(ledger))
    assert seq == 706
    for each in (ledger, reopen(where, clock)):
        assert bodies(each) == {0, 300, *range(701, 707)}
        assert not any(each.evidence(gone) for gone in range(1, 700))
        for gone in (1, 299, 301, 700):
            kept, record = each.leaf(gone).record, admitted(gone)
            assert isinstance(kept, KeptContribution)
            assert (kept.descriptor, kept.expires, kept.bound) == (record.descriptor, record.expires, record.bound)
            assert each.find(record.descriptor) == [gone]
        assert each.find(admitted(702).descriptor) == [702]
        head = each.tree()
        for old in [*trees, signed_checkpoint.parse_checkpoint(each.latest() or "")[0]]:
            assert each.root_at(old.size) == old.root
            for new in trees:
                if old.size <= new.size:
                    proof = each.consistent(old.size, new.size)
                    assert verify_consistency(old.size, new.size, proof, old.root, new.root)
            assert verify_consistency(old.size, head.size, each.consistent(old.size), old.root, head.root)
        for seq in (0, 1, 255, 256, 300, 701, 706):
            assert verify_inclusion(leaf_hash(each.raw(seq).leaf), seq, head.size, each.prove(seq), head.root)
        for gone in (1, 255, 256, 299, 301, 700):
            assert each.raw(gone).leaf == whole[gone].leaf
            assert receipt.verify_receipt(receipts[gone], whole[gone].leaf, LEDGER.public, ORIGIN)
            assert receipt.verify_receipt(each.receipt(gone), whole[gone].leaf, LEDGER.public, ORIGIN)
        each.close()


def test_a_ledger_that_goes_on_is_pruned_again(where: str, clock: Clock) -> None:
    """Whatever was pruned, every tile is there, and every leaf and every old root can be proven."""
    with create(where, clock) as ledger:
        for stop in (900, 1024, 1300):
            ledger.append([admitted(n) for n in range(ledger.size, stop)])
            ledger.checkpoint()
        ledger.append([epoch(0)])
        ledger.append([admitted(n) for n in range(1301, 2500)])
        clock.now = LATER
        Retention(ledger).prune(proposed(ledger))
        assert bodies(ledger) == {0, 1300, 2500}
        ledger.append([admitted(n, expires=LATER + 9) for n in range(ledger.size, 2700)])
        ledger.checkpoint()
        clock.now = LATER + 5000
        again = proposed(ledger)
        assert again.spans == (LeafSpan(first=2501, stop=2700),)
        Retention(ledger).prune(again)
        assert bodies(ledger) == {0, 1300, 2500, 2700}
        head = ledger.tree()
        for seq in (0, 300, 1600, 2700):
            assert verify_inclusion(leaf_hash(ledger.raw(seq).leaf), seq, head.size, ledger.prove(seq), head.root)
        for text in ledger.checkpoints():
            old = signed_checkpoint.parse_checkpoint(text)[0]
            assert ledger.root_at(old.size) == old.root


def test_what_has_not_expired_stays_also_in_between(where: str, clock: Clock) -> None:
    with create(where, clock) as ledger:
        ledger.append([admitted(n, expires=LATER + 9 if n % 3 == 0 else START + 1) for n in range(1, 10)])
        clock.now = LATER
        first = proposed(ledger)
        assert first.spans == (LeafSpan(first=1, stop=3), LeafSpan(first=4, stop=6), LeafSpan(first=7, stop=9))
        Retention(ledger).prune(first)
        assert Retention(ledger).propose() is None
        with raises_code("ledger.already-admitted"):
            ledger.append([admitted(3, expires=LATER + 10)])  # an attestation that is still good is found
        clock.now = LATER + 9
        second = proposed(ledger)
        assert second.spans == (LeafSpan(first=3, stop=4), LeafSpan(first=6, stop=7), LeafSpan(first=9, stop=10))
        Retention(ledger).prune(second)
        assert bodies(ledger) == {0, 10, 11}
        with raises_code("ledger.already-admitted"):
            ledger.append([admitted(3, expires=LATER + 1000)])  # nor is it ever admitted again


def test_classes_are_summed_apart(where: str, clock: Clock) -> None:
    with create(where, clock) as ledger:
        free = ContributionTerms("open", "ecg", 0, 0)
        ledger.append([admitted(1), admitted(2, terms=free), admitted(3), epoch(0), epoch(4), epoch(1)])
        clock.now = LATER
        assert proposed(ledger).classes == (
            ClassTotal(cls="clinical", count=2, withdrawn=0, spend=5000),
            ClassTotal(cls="open", count=1, withdrawn=0, spend=0),
        )


def test_many_spans_take_several_aggregates(where: str, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "MAX_SPANS", 2)
    with create(where, clock) as ledger:
        ledger.append([admitted(n, expires=LATER + 9 if n % 2 else START + 1) for n in range(1, 8)])
        clock.now = LATER
        rounds = []
        while (aggregate := Retention(ledger).propose()) is not None:
            rounds.append([span.first for span in aggregate.spans])
            Retention(ledger).prune(aggregate)
        assert rounds == [[2, 4], [6]]


# ----------------------------------------------------------------------------------- who may prune what, and when


def test_nothing_is_pruned_before_its_time(where: str, clock: Clock) -> None:
    with create(where, clock) as ledger:
        ledger.append([admitted(1), admitted(2, expires=START + 3000)])
        assert Retention(ledger).propose() is None
        clock.now = START + 1000
        assert Retention(ledger).propose() is None  # admitted at the horizon, not before it
        clock.now = START + 1001
        assert proposed(ledger).spans == (LeafSpan(first=1, stop=2),)
        with raises_code("ledger.horizon-too-late"):
            Retention(ledger).propose(before=START + 2)
        assert Retention(ledger).propose(before=START) is None
        early = dataclasses.replace(proposed(ledger), horizon=START + 2)
        with raises_code("ledger.horizon-too-late"):
            Retention(ledger).prune(early)


def test_a_pruned_subject_does_not_come_back(where: str, clock: Clock) -> None:
    subject = digest("subject")
    with create(where, clock) as ledger:
        ledger.append([admitted(1, subject=subject)])
        clock.now = LATER
        Retention(ledger).prune(proposed(ledger))
        with raises_code("ledger.already-admitted"):
            ledger.append([admitted(2, subject=subject, expires=LATER + 9)])
        with raises_code("ledger.withdrawal-target"):
            ledger.append([Withdrawal(target=1, reason=WithdrawalReason.DATA)])
    with reopen(where, clock) as ledger, raises_code("ledger.already-admitted"):
        ledger.append([admitted(2, subject=subject, expires=LATER + 9)])


def test_an_auditor_countersigns_what_is_then_pruned(ledger: Ledger) -> None:
    aggregate = signed_by(proposed(ledger), AUDITOR)
    seq = Retention(ledger).prune(aggregate)
    assert ledger.leaf(seq).record == aggregate


def test_signatures_that_do_not_count_are_refused(ledger: Ledger) -> None:
    aggregate = proposed(ledger)
    for bad in (
        signed_by(aggregate, OTHER),
        signed_by(aggregate, LEDGER),
        signed_by(aggregate, AUDITOR, AUDITOR),
        signed_by(aggregate, AUDITOR, OTHER),
        signed_by(aggregate, AUDITOR, origin="other.example"),
        dataclasses.replace(
            aggregate, signatures=signed_by(dataclasses.replace(aggregate, horizon=1), AUDITOR).signatures
        ),
    ):
        with raises_code("ledger.aggregate-signature-invalid"):
            Retention(ledger).prune(bad)
    assert ledger.size == 706
    assert isinstance(ledger.leaf(1).record, ContributionRecord)


def test_an_aggregate_that_is_not_true_is_refused(ledger: Ledger) -> None:
    aggregate = proposed(ledger)
    (total,) = aggregate.classes
    for wrong in (
        dataclasses.replace(aggregate, digest=bytes(32)),
        dataclasses.replace(aggregate, classes=(dataclasses.replace(total, spend=999),)),
        dataclasses.replace(aggregate, classes=(dataclasses.replace(total, withdrawn=0),)),
        dataclasses.replace(aggregate, horizon=aggregate.horizon - 4000),
        Aggregate(
            spans=(LeafSpan(first=1, stop=2),),
            horizon=aggregate.horizon,
            classes=(dataclasses.replace(total, count=1),),
            digest=aggregate.digest,
        ),
    ):
        with raises_code("ledger.proposal-outdated"):
            Retention(ledger).prune(wrong)
    ledger.append([Withdrawal(target=8, reason=WithdrawalReason.DATA)])
    with raises_code("ledger.proposal-outdated"):
        Retention(ledger).prune(aggregate)
    assert isinstance(ledger.leaf(1).record, ContributionRecord)


def test_a_ledger_that_grows_while_it_is_pruned_is_not_pruned(
    ledger: Ledger, where: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    aggregate = proposed(ledger)
    whole = ledger.append_aggregate

    def after_somebody_else(*arguments: object) -> list[int]:
        with reopen(where, clock) as other:
            other.append([epoch(1)])
        return whole(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ledger, "append_aggregate", after_somebody_else)
    with raises_code("ledger.proposal-outdated"):
        Retention(ledger).prune(aggregate)
    assert [type(found.record).__name__ for found in ledger.leaves(705)] == ["ContributionRecord", "Epoch"]
    assert isinstance(ledger.leaf(1).record, ContributionRecord)


def test_pruning_needs_the_key(ledger: Ledger, where: str, clock: Clock) -> None:
    with Ledger.open(where, clock=clock) as other, raises_code("ledger.opened-without-key"):
        Retention(other)


def test_a_key_that_may_not_sign_prunes_nothing(ledger: Ledger, where: str, clock: Clock) -> None:
    aggregate, size = proposed(ledger), ledger.size
    with Ledger.open(where, AUDITOR, clock=clock) as other:
        with raises_code("ledger.key-may-not-sign"):
            Retention(other).prune(aggregate)
        assert other.size == size


# ----------------------------------------------------------------------------------- a stop in the middle


class Stop(Exception):
    """The process ends here, as far as the test goes."""


@pytest.mark.parametrize("at", range(1, 8))
def test_a_pruning_that_stopped_goes_on(where: str, clock: Clock, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped before each of its transactions: in between the ledger is whole, and the end is the same."""
    monkeypatch.setattr(retention, "_LEAVES_PER_TRANSACTION", 300)
    with create(where, clock) as ledger:
        ledger.append([admitted(n) for n in range(1, 700)])
        clock.now = LATER
        aggregate, roots = (
            proposed(ledger),
            [signed_checkpoint.parse_checkpoint(text)[0] for text in ledger.checkpoints()],
        )
        through, count = ledger.transact, 0

        def counted(work: object) -> object:
            nonlocal count
            count += 1
            if count == at:
                raise Stop
            return through(work)  # type: ignore[arg-type]

        monkeypatch.setattr(ledger, "transact", counted)
        try:
            Retention(ledger).prune(aggregate)
            assert at == 7, "there are fewer transactions than the test thinks"
        except Stop:
            assert at < 7
    with reopen(where, clock) as again:
        left = bodies(again)
        there = again.size == 701
        assert there == (at > 1)
        if not there:
            assert left == set(range(700))
            return
        latest = signed_checkpoint.parse_checkpoint(again.latest() or "")[0]
        assert latest.size == 701 or left == set(range(701))  # nothing goes before the aggregate is signed
        for old in roots:
            assert again.root_at(old.size) == old.root
        assert Retention(again).propose() is None  # what is summed up already is not summed up again
        Retention(again).resume()
        assert bodies(again) == {0, 700}
        assert again.find(admitted(5).descriptor) == [5]
        again.store.compact()
        assert again.size == 701


@pytest.mark.parametrize("hide", [replaced, deleted])
@pytest.mark.parametrize("kind", [WITHDRAWAL, EPOCH])
def test_nothing_is_pruned_while_the_store_hides_a_record(
    ledger: Ledger, where: str, clock: Clock, hide: Callable[[str, int], str], kind: int
) -> None:
    """The aggregate is signed and the bodies are deleted, so a wrong aggregate could never be corrected."""
    honest = proposed(ledger)
    before = tables_of(where, "leaf")
    rows_of(where, hide(where, kind))
    assert tables_of(where, "leaf") != before
    with (
        raises_code("ledger.leaf-not-allowed", "ledger.leaf-missing", "ledger.head-inconsistent"),
        reopen(where, clock) as again,
    ):
        Retention(again).prune(honest)
    put_back(where, before)
    with reopen(where, clock) as again:
        assert proposed(again) == honest
        assert ledger.leaf(Retention(again).prune(honest)).record == honest


def test_nothing_is_pruned_where_the_leaves_are_not_those_of_the_tree(ledger: Ledger, where: str, clock: Clock) -> None:
    """A withdrawal is replaced by another leaf during pruning. The aggregate must still count the signed leaves."""
    rows_of(
        where,
        "UPDATE leaf SET data = (SELECT data FROM leaf WHERE seq = 300), body = (SELECT body FROM leaf WHERE seq = 300) "
        "WHERE seq = 701",
    )
    with reopen(where, clock) as again, raises_code("ledger.leaf-not-allowed"):
        Retention(again).propose()
