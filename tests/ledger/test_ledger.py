"""The ledger: places, time, repeats, checkpoints, proofs; on both stores."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from build import policy_digest
from making import (
    AUDITOR,
    GOVERNING,
    LEDGER,
    ORIGIN,
    OTHER,
    RUN,
    SECOND,
    START,
    TWO_OWNERS,
    WITNESS,
    Clock,
    admitted,
    attestation,
    authorised,
    batches,
    create,
    digest,
    epoch,
    header,
    reopen,
    segment,
)
from refusals import raises_code

from lamina.errors import LedgerError
from lamina.ledger import receipt, records, signed_checkpoint
from lamina.ledger.governance_records import (
    Aggregate,
    ClassTotal,
    Header,
    Key,
    KeyChange,
    KeyEvent,
    LeafSpan,
    LedgerFloors,
    PolicyChange,
    Release,
    Role,
    Withdrawal,
    WithdrawalReason,
)
from lamina.ledger.merkle import EMPTY_ROOT, leaf_hash, node_hash, verify_consistency, verify_inclusion
from lamina.ledger.reader import LedgerReader
from lamina.ledger.receipt import TlogProof
from lamina.ledger.records import ContributionRecord, Epoch, SegmentOutcome
from lamina.ledger.schema import next_leaf_time, rounded_epoch_time
from lamina.ledger.writer import Ledger, checkpoint_digest
from lamina.sign.keys import CLOCK_SKEW
from lamina.sign.notes import NoteKey


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ledger(where: str, clock: Clock) -> Iterator[Ledger]:
    with create(where, clock) as made:
        yield made


def root_of(leaves: list[bytes]) -> bytes:
    """RFC 6962 §2.1, as it is written there."""
    if not leaves:
        return EMPTY_ROOT
    if len(leaves) == 1:
        return leaf_hash(leaves[0])
    k = 1
    while 2 * k < len(leaves):
        k *= 2
    return node_hash(root_of(leaves[:k]), root_of(leaves[k:]))


# ----------------------------------------------------------------------------------- places and time


def test_a_new_ledger_is_its_header_signed(ledger: Ledger, where: str) -> None:
    assert ledger.size == 1
    first = ledger.leaf(0)
    assert first == records.Leaf(Header, 0, START, 0, header())
    assert ledger.root == leaf_hash(ledger.raw(0).leaf)
    signed = ledger.latest()
    assert signed is not None
    found = signed_checkpoint.verify_checkpoint(signed, [NoteKey(ORIGIN, LEDGER.public)])
    assert (found.origin, found.size, found.root) == (ORIGIN, 1, ledger.root)
    with raises_code("ledger.already-exists"):
        Ledger.create(where, header(), LEDGER, clock=Clock())
    with reopen(where) as again:
        assert again.header == header()
        assert again.tree() == ledger.tree()


def test_records_get_their_index_time_and_epoch(ledger: Ledger, clock: Clock) -> None:
    clock.now = START + 10.9
    assert ledger.append([admitted(1), admitted(2)]) == [1, 2]
    clock.now = START + 7300
    assert ledger.append(
        [admitted(3, expires=START + 8000), epoch(0), epoch(1), admitted(4, expires=START + 8000)]
    ) == [3, 4, 5, 6]
    clock.now = START + 7200 + 3599
    assert ledger.append([epoch(2)]) == [7]
    places = [(each.seq, each.time - START, each.epoch) for each in ledger.leaves()]
    # An epoch is of the full hour before it, but never before the leaf before it.
    assert places == [
        (0, 0, 0), (1, 10, 0), (2, 10, 0), (3, 7300, 0), (4, 7300, 0), (5, 7300, 1), (6, 7300, 2), (7, 7300, 2),
    ]  # fmt: skip
    clock.now = START + 3 * 3600 + 1800
    ledger.append([epoch(3)])
    assert ledger.leaf(8).time == START + 3 * 3600
    assert START % 3600 == 0


def test_the_root_is_the_root_of_the_leaves(ledger: Ledger) -> None:
    for stop in (2, 3, 4, 9, 30, 300, 301, 700):
        ledger.append([admitted(n) for n in range(ledger.size, stop)])
        data = [raw.leaf for _, raw in ledger.raw_leaves()]
        assert len(data) == ledger.size == stop
        assert ledger.root == root_of(data)
    assert ledger.root_at(300) == root_of(data[:300])


def test_a_clock_a_little_behind_is_the_last_time_and_further_behind_is_refused(ledger: Ledger, clock: Clock) -> None:
    clock.now = START + 1000
    ledger.append([admitted(1, expires=START + 1001)])
    clock.now = START + 1000 - CLOCK_SKEW
    ledger.append([admitted(2, expires=START + 1001)])
    assert [each.time - START for each in ledger.leaves(1)] == [1000, 1000]
    clock.now = START + 1000 - CLOCK_SKEW - 1
    with raises_code("ledger.clock-behind"):
        ledger.append([admitted(3)])
    clock.now = float("nan")
    with raises_code("ledger.clock-invalid"):
        ledger.append([admitted(3)])
    assert ledger.size == 3


def test_time_by_itself() -> None:
    assert next_leaf_time(0, 5.9) == 5
    assert next_leaf_time(100, 50) == 100
    assert rounded_epoch_time(0, 86_399, 86_400) == 0
    assert rounded_epoch_time(7, 7, 1) == 7


# ----------------------------------------------------------------------------------- all or nothing, once or refused


def test_a_batch_with_one_bad_record_is_not_appended(ledger: Ledger) -> None:
    before = ledger.tree()
    for bad in (
        header(),
        "text",
        Withdrawal(target=7, reason=WithdrawalReason.DATA),
        Withdrawal(target=0, reason=WithdrawalReason.DATA),
    ):
        with pytest.raises(LedgerError):
            ledger.append([admitted(1), bad])  # type: ignore[list-item]
    assert ledger.append([]) == []
    assert ledger.tree() == before
    assert ledger.find(admitted(1).descriptor) == []


def test_an_aggregate_is_only_written_by_pruning(ledger: Ledger) -> None:
    total = ClassTotal(cls="clinical", count=1, withdrawn=0, spend=0)
    with raises_code("ledger.record-reserved"):
        ledger.append([Aggregate(spans=(LeafSpan(first=1, stop=2),), horizon=1, classes=(total,), digest=bytes(32))])


def test_a_contribution_is_in_a_ledger_once(ledger: Ledger, where: str) -> None:
    assert ledger.append([admitted(1), admitted(2)]) == [1, 2]
    with reopen(where) as other:
        assert other.append([admitted(3), admitted(1), admitted(4)]) == [3, 1, 4]  # the same again is found again
    assert ledger.size == 5
    with raises_code("ledger.already-admitted"):
        ledger.append([admitted(5), admitted(1, expires=START + 9999)])
    with raises_code("ledger.already-admitted"):
        ledger.append([admitted(4, attestation=bytes(32))])
    with raises_code("ledger.batch-repeats"):
        ledger.append([admitted(6), admitted(6)])
    assert ledger.size == 5
    assert ledger.known([admitted(n).descriptor for n in range(8)]) == {admitted(n).descriptor: n for n in (1, 2, 3, 4)}


def test_a_subject_is_in_a_ledger_once_and_an_anchor_often(ledger: Ledger) -> None:
    subject, anchor = digest("subject"), digest("anchor")
    one = admitted(1, subject=subject, anchor=anchor)
    assert ledger.append([one, admitted(2, anchor=anchor)]) == [1, 2]
    assert ledger.append([one]) == [1]
    with raises_code("ledger.already-admitted"):
        ledger.append([admitted(3, subject=subject)])
    with raises_code("ledger.batch-repeats"):
        ledger.append([admitted(3, subject=digest(1)), admitted(4, subject=digest(1))])
    assert ledger.append([admitted(5, anchor=anchor)]) == [3]
    assert ledger.find(anchor) == [1, 2, 3]
    assert ledger.find(subject) == [1]
    assert ledger.find(digest("nobody")) == []


def test_contributions_of_several_writers_are_found(where: str, clock: Clock) -> None:
    anchor = digest("anchor")
    with create(where, clock) as one, reopen(where, clock) as two:
        for number, batch in enumerate(batches(1, 201, 10)):
            writer = (one, two)[number % 2]
            writer.append([dataclasses.replace(each, anchor=anchor) for each in batch])
            for reader in (one, two):
                for n in (1, 10 * number + 1, 10 * number + 10):
                    assert reader.find(admitted(n).descriptor) == [n]
                assert reader.find(anchor) == list(range(1, reader.size))
        with raises_code("ledger.already-admitted"):
            one.append([admitted(77, anchor=None)])
        with reopen(where, clock) as three:
            assert len(three.find(anchor)) == 200


def test_a_batch_says_nothing_twice(ledger: Ledger) -> None:
    ledger.append([admitted(1)])
    out = Withdrawal(target=1, reason=WithdrawalReason.DATA)
    for twice in ([epoch(0), epoch(0)], [epoch(0), epoch(0, state=digest("other"))], [out, out]):
        with raises_code("ledger.batch-repeats"):
            ledger.append(twice)
    assert ledger.size == 2


def test_an_epoch_is_of_leaves_that_are_there(ledger: Ledger) -> None:
    ledger.append([epoch(0)])
    with raises_code("ledger.segment-from-future"):
        ledger.append([epoch(1, segments=(segment(1, eligibility=3),))])


def test_an_epoch_closes_as_many_segments_as_the_header_says(where: str) -> None:
    with create(where, granularity=2) as ledger:
        lost = segment(1, outcome=SegmentOutcome.ABANDONED)
        ledger.append([epoch(0, segments=(segment(0), lost, segment(1, 1)))])
        with raises_code("ledger.epoch-too-many-segments"):
            ledger.append([epoch(2, segments=(segment(2), segment(3), segment(4)))])


def test_what_a_ledger_remembers_is_bounded(where: str) -> None:
    with create(where) as ledger:
        for batch in batches(1, 1001, 40):
            ledger.append(batch)
        assert len(ledger._checked._hashes) == 16 * ledger.size  # of each leaf a part of its hash
        assert vars(ledger).keys() == {
            "store", "header", "header_hash", "_nodes", "_key", "_governing", "_clock", "_patience", "_id",
            "_checked", "_kept", "_compared", "_restores", "_restoring", "notes",
        }  # fmt: skip


def test_a_segment_is_closed_once(ledger: Ledger, where: str, clock: Clock) -> None:
    assert ledger.append([epoch(0), epoch(1)]) == [1, 2]
    ledger.checkpoint()
    clock.now += 5000
    assert ledger.append([epoch(1)]) == [2]  # also after a checkpoint, which a new one would name
    with reopen(where, clock) as other:
        assert other.append([epoch(0), epoch(2)]) == [1, 3]
    nonce = segment(1, nonce=bytes(16))
    for changed in (
        epoch(1, segments=(nonce,)),  # a copy of the run
        epoch(1, state=digest("other")),
        epoch(1, segments=(segment(1, outcome=SegmentOutcome.ABANDONED),)),
        epoch(1, segments=(segment(1), segment(5, outcome=SegmentOutcome.ABANDONED))),
        epoch(0, segments=(segment(0), segment(1, outcome=SegmentOutcome.ABANDONED))),
    ):
        with raises_code("ledger.segment-already-closed"):
            ledger.append([changed])
    assert ledger.append([epoch(1, 1), epoch(1, run=bytes(16))]) == [4, 5]  # another generation, another run


def test_a_withdrawal_is_of_a_contribution_that_is_there_and_once(ledger: Ledger) -> None:
    ledger.append([admitted(1), admitted(2), epoch(0)])
    asked = Withdrawal(target=2, reason=WithdrawalReason.REQUEST, request=hashlib.sha256(b"letter").digest())
    assert ledger.append([asked], [b"letter"]) == [4]
    assert ledger.evidence(4) == b"letter"
    assert ledger.append([asked]) == [4]
    with raises_code("ledger.already-withdrawn"):
        ledger.append([Withdrawal(target=2, reason=WithdrawalReason.DATA)])
    for target in (0, 3, 4, 5, 2**50):
        with raises_code("ledger.withdrawal-target"):
            ledger.append([Withdrawal(target=target, reason=WithdrawalReason.DATA)])
    assert (ledger.withdrawn(2), ledger.withdrawn(1)) == (4, None)
    assert ledger.withdrawals() == {2: 4}
    assert isinstance(ledger.leaf(2).record, ContributionRecord)  # nothing is erased


# ----------------------------------------------------------------------------------- bytes beside the leaves


def test_bytes_are_kept_by_their_digest(ledger: Ledger) -> None:
    manifest = Release(manifest=hashlib.sha256(b"manifest").digest(), runs=(RUN,))
    ledger.append(
        [admitted(1), admitted(2), epoch(0), manifest], [attestation(1), attestation(2), b"plan", b"manifest"]
    )
    assert [ledger.evidence(seq) for seq in range(5)] == [None, attestation(1), attestation(2), None, None]
    assert ledger.blob(epoch().plan) == b"plan"
    assert ledger.blob(manifest.manifest) == b"manifest"
    with raises_code("ledger.blob-unreferenced"):
        ledger.append([admitted(3)], [b"something else"])
    ledger.append([epoch(1)], [b"plan"])  # the same plan again
    assert ledger.size == 6


def test_leaves_are_found_by_kind(ledger: Ledger) -> None:
    ledger.append([admitted(1), epoch(0), admitted(2), epoch(1)])
    assert [each.seq for each in ledger.of_kind(Epoch)] == [2, 4]
    assert [each.seq for each in ledger.of_kind(ContributionRecord)] == [1, 3]
    assert [each.seq for each in ledger.of_kind(ContributionRecord, 2, 4)] == [3]
    assert [each.seq for each in ledger.leaves(1, 3)] == [1, 2]
    for seq in (-1, 5, 2**63):
        with raises_code("ledger.leaf-unknown"):
            ledger.leaf(seq)


# ----------------------------------------------------------------------------------- checkpoints and proofs


def test_a_checkpoint_is_of_what_is_committed_and_of_each_size_one(ledger: Ledger, where: str) -> None:
    ledger.append([admitted(1)])
    one = ledger.checkpoint()
    assert ledger.checkpoint() == one == ledger.latest()
    with reopen(where) as other:
        assert other.checkpoint() == one
        other.append([admitted(2)])
    two = ledger.checkpoint()
    sizes = [signed_checkpoint.parse_checkpoint(text)[0].size for text in ledger.checkpoints()]
    assert sizes == [1, 2, 3]
    assert signed_checkpoint.verify_checkpoint(two, [NoteKey(ORIGIN, LEDGER.public)]).root == ledger.root


def test_an_epoch_names_the_checkpoint_before_it(ledger: Ledger) -> None:
    first = ledger.latest()
    ledger.append([epoch(0), epoch(1)])
    second = ledger.checkpoint()
    ledger.append([epoch(2)])
    assert first is not None
    named = [each.record.previous for each in ledger.of_kind(Epoch) if isinstance(each.record, Epoch)]
    assert named == [checkpoint_digest(first), checkpoint_digest(first), checkpoint_digest(second)]
    with raises_code("ledger.epoch-wrong-previous"):
        ledger.append([epoch(3, previous=bytes(32))])
    # Cosignatures come later, and change nothing of what was named.
    assert checkpoint_digest(
        signed_checkpoint.add_cosignature(second, WITNESS, START, "witness.example")
    ) == checkpoint_digest(second)


def test_cosignatures_are_kept(ledger: Ledger) -> None:
    signed = ledger.checkpoint()
    copy = signed_checkpoint.add_cosignature(signed, WITNESS, START + 5, "witness.example")
    assert ledger.cosigned(copy) == ledger.latest() == copy
    assert ledger.checkpoint() == copy
    strange = signed_checkpoint.LedgerCheckpoint(ORIGIN, 1, digest("fork")).signed(LEDGER)
    with pytest.raises(LedgerError):
        ledger.cosigned(strange)
    with raises_code("ledger.checkpoint-unknown"):
        ledger.cosigned(signed_checkpoint.LedgerCheckpoint(ORIGIN, 9, digest("fork")).signed(LEDGER))


def test_a_ledger_is_not_made_with_another_key(where: str) -> None:
    with raises_code("ledger.key-may-not-sign"):
        Ledger.create(where, header(), OTHER, clock=Clock())
    with raises_code("store.no-ledger"):
        reopen(where)


def test_an_auditor_reads_without_being_able_to_write(ledger: Ledger, where: str) -> None:
    ledger.append([admitted(1)])
    ledger.checkpoint()
    with LedgerReader.read_only(where) as view:
        assert view.tree() == ledger.tree()
        assert view.find(admitted(1).descriptor) == [1]
        assert view.receipt(1) == ledger.receipt(1)
        with raises_code("store.opened-read-only"):
            Ledger(view.store, LEDGER, clock=Clock()).append([admitted(2)])


def test_another_key_signs_nothing(ledger: Ledger, where: str) -> None:
    ledger.append([admitted(1)])
    for key in (OTHER, AUDITOR):
        with Ledger.open(where, key, clock=Clock()) as other, raises_code("ledger.key-may-not-sign"):
            other.checkpoint()
    with Ledger.open(where, clock=Clock()) as other:
        assert not other.signs
        with raises_code("ledger.opened-without-key"):
            other.checkpoint()
        assert other.append([admitted(2)]) == [2]


def test_keys_are_added_rotated_and_revoked(ledger: Ledger, where: str, clock: Clock) -> None:
    new = Key(name=ORIGIN, x=OTHER.public.x, role=Role.LEDGER)
    event = KeyEvent(change=KeyChange.ROTATE, key=new, target=LEDGER.public.id, effective=START + 100)
    ledger.append([authorised(ledger, event, LEDGER)])  # it lets another take over from itself
    ledger.checkpoint()
    with Ledger.open(where, OTHER, clock=clock) as other:
        other.append([admitted(1)])
        with raises_code("ledger.key-may-not-sign"):
            other.checkpoint()  # too early
        clock.now = START + 100
        other.append([admitted(2)])
        other.checkpoint()
        ledger.append([admitted(3)])
        with raises_code("ledger.key-may-not-sign"):
            ledger.checkpoint()
        parties = other.parties()
        assert parties.problem_with(LEDGER.public.id, START + 99) is None
        assert parties.problem_with(LEDGER.public.id, START + 100) is not None
        assert other.parties(1).problem_with(OTHER.public.id, START + 100) is not None
        gone = KeyEvent(change=KeyChange.REVOKE, target=AUDITOR.public.id, effective=START)
        other.append([authorised(other, gone)])
        assert other.parties().problem_with(AUDITOR.public.id, START) is not None
        back = KeyEvent(change=KeyChange.ADD, key=header().keys[1], effective=START + 200)
        with raises_code("ledger.key-was-revoked"):
            other.append([authorised(other, back)])
        third = Key(name="auditor.example/2", x=SECOND.public.x, role=Role.AUDITOR)
        other.append([authorised(other, KeyEvent(change=KeyChange.ADD, key=third, effective=START + 200))])
        assert other.parties().problem_with(third.id, START + 199) is not None
        assert other.parties().problem_with(third.id, START + 200) is None


def test_a_looser_policy_needs_two_owners(where: str) -> None:
    higher, lower = LedgerFloors(clip_norm=200_000, noise_multiplier=500_000), header().floors
    stricter = PolicyChange(floors=higher, presets=header().presets, policy=policy_digest(higher))
    looser = dataclasses.replace(stricter, floors=lower, policy=policy_digest(lower))
    with create(where, keys=TWO_OWNERS) as ledger:
        ledger.append([authorised(ledger, stricter)])
        for keys, code in (
            ([GOVERNING], "ledger.policy-loosened"),
            ([GOVERNING, GOVERNING], "ledger.policy-loosened"),
            ([GOVERNING, OTHER], "ledger.authorising-signature-invalid"),
            ([GOVERNING, AUDITOR], "ledger.authorising-signature-invalid"),
            ([GOVERNING, LEDGER], "ledger.authorising-signature-invalid"),
        ):
            with raises_code(code):
                ledger.append([authorised(ledger, looser, *keys)])
        good = authorised(ledger, looser, GOVERNING, SECOND)
        assert ledger.append([good]) == [2]
        with raises_code("ledger.authorised-out-of-turn"):
            ledger.append([good])  # not a second time
        assert ledger.append([authorised(ledger, looser)]) == [3]  # it changes nothing
        with raises_code("ledger.several-governing-records"):
            ledger.append([authorised(ledger, stricter), authorised(ledger, looser)])
        assert ledger.size == 4


def test_proofs_and_receipts_hold(ledger: Ledger) -> None:
    for batch in batches(1, 600, 100):
        ledger.append(batch)
        ledger.checkpoint()
    trees = [signed_checkpoint.parse_checkpoint(text)[0] for text in ledger.checkpoints()]
    head = ledger.tree()
    for old in trees:
        assert ledger.root_at(old.size) == old.root
        assert verify_consistency(old.size, head.size, ledger.consistent(old.size), old.root, head.root)
    for seq in (0, 1, 255, 256, 599):
        data = ledger.raw(seq).leaf
        assert verify_inclusion(leaf_hash(data), seq, head.size, ledger.prove(seq), head.root)
        assert receipt.verify_receipt(ledger.receipt(seq), data, LEDGER.public, ORIGIN)
        assert not receipt.verify_receipt(ledger.receipt(seq), data + b"x", LEDGER.public, ORIGIN)
        proof = TlogProof.parse(ledger.proof_text(seq))
        assert proof.verify(data, [NoteKey(ORIGIN, LEDGER.public)]) == head
    assert verify_inclusion(leaf_hash(ledger.raw(1).leaf), 1, 101, ledger.prove(1, 101), trees[1].root)
    ledger.append([admitted(600)])
    with raises_code("ledger.not-covered"):
        ledger.receipt(600)
    with raises_code("ledger.size-not-reached"):
        ledger.prove(1, 602)


# ----------------------------------------------------------------------------------- what opening notices


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM leaf WHERE seq = 5",
        "DELETE FROM head",
        "DELETE FROM leaf WHERE seq = 0",
        "DELETE FROM tile",
        "UPDATE head SET size = 5",
        "UPDATE head SET size = 7",
        "UPDATE head SET time = 5",
        "INSERT INTO leaf SELECT 6, data, body FROM leaf WHERE seq = 5",
        "UPDATE leaf SET (data, body) = (SELECT data, body FROM leaf WHERE seq = 4) WHERE seq = 5",
        "UPDATE tile SET data = (SELECT frontier FROM head)",
    ],
)
def test_opening_notices_a_head_that_does_not_fit(where: str, damage: str) -> None:
    with create(where) as ledger:
        ledger.append([admitted(n) for n in range(1, 6)])
        with ledger.store.write() as rows:
            rows._db.rows(damage)  # type: ignore[attr-defined]
    with pytest.raises(LedgerError):
        reopen(where)


def test_damage_below_is_noticed_by_the_append_that_meets_it(where: str) -> None:
    with create(where) as ledger:
        ledger.append([admitted(n) for n in range(1, 6)])
        with ledger.store.write() as rows:
            rows._db.rows("DELETE FROM tile")  # type: ignore[attr-defined]
        with raises_code("ledger.tile-missing"):
            ledger.append([admitted(6)])
        assert ledger.size == 6


def test_an_empty_store_is_no_ledger(tmp_path: Path) -> None:
    (tmp_path / "x.db").touch()
    with pytest.raises(LedgerError):
        reopen(str(tmp_path / "x.db"))
    with create(str(tmp_path / "x.db")) as ledger:
        assert ledger.size == 1
