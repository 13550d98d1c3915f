"""Starts and ends of runs in every kind of store: once each, in order, the same for writer and verifier."""

from __future__ import annotations

import dataclasses

import cbor2
import pytest
from build import HOUR, STRICT, USUAL, begin, contribution, plan, segment
from making import LEDGER, digest, ended
from refusals import raises_code

from lamina.errors import EncodingError
from lamina.ledger import records
from lamina.ledger.records import SegmentOutcome
from lamina.ledger.run_records import OccurrenceCap, RunBegin, RunEnd, WeightsOrigin
from lamina.ledger.verify.verifier import verify
from lamina.ledger.writer import Ledger

RUN, OTHER = b"a" * 16, b"b" * 16


def test_a_run_begins_and_ends_in_every_kind_of_store(where: str) -> None:
    """A record that is appended twice is stored once, with a rounded time, and another process reads the same."""
    story = begin(where)
    ledger = story.ledger
    story.admit(contribution(n, terms=STRICT if n % 2 else USUAL) for n in range(6))
    start = RunBegin(run=RUN, weights=digest("start"))
    assert ledger.append([start]) == ledger.append([start])
    story.later(2 * HOUR + 17)
    story.epoch(RUN, [segment(0, read=ledger.size)])
    with raises_code("ledger.run-begun-twice"):
        ledger.append([dataclasses.replace(start, weights=digest("other"))])
    end = ended(RUN, plan=plan().digest())
    with raises_code("ledger.run-end-differs"):
        ledger.append([dataclasses.replace(end, steps=11)])
    story.later(61)
    assert ledger.append([end]) == ledger.append([end])
    with raises_code("ledger.run-ended-twice"):
        ledger.append([dataclasses.replace(end, probed=False)])
    last = ledger.leaf(ledger.size - 1)
    assert last.time % HOUR == 0 or last.time == ledger.leaf(ledger.size - 2).time
    story.sign()
    ledger.close()
    with Ledger.open(where, LEDGER, clock=story.clock) as again:
        assert again.append([end]) == [again.size - 1] and again.append([start]) != again.append([end])
        found = verify(again.store, now=int(story.clock.now))
        assert found.problem is None and found.counts["run-begin"] == found.counts["run-end"] == 1


def test_the_first_segment_reads_its_members_after_the_start_of_its_run(where: str) -> None:
    """A contribution that withdrew before the run began cannot be eligible by an older state of the ledger."""
    story = begin(where)
    story.admit(contribution(n, terms=STRICT if n % 2 else USUAL) for n in range(6))
    before = story.ledger.size
    story.ledger.append([RunBegin(run=RUN, weights=digest("start"))])
    story.epoch(RUN, [segment(0, read=before)])
    story.sign()
    found = verify(story.ledger.store, now=int(story.clock.now))
    assert found.problem is not None and found.problem.code == "verify.members-read-too-early"
    story.ledger.close()


def test_a_start_after_an_epoch_of_its_run_is_too_late(where: str) -> None:
    story = begin(where)
    story.admit(contribution(n, terms=STRICT if n % 2 else USUAL) for n in range(6))
    story.epoch(RUN, [segment(0, read=story.ledger.size)])
    with raises_code("ledger.run-begin-late"):
        story.ledger.append([RunBegin(run=RUN, weights=digest("start"))])
    story.ledger.close()


def test_a_run_that_goes_on_after_its_end_ends_again(where: str) -> None:
    story = begin(where)
    story.admit(contribution(n, terms=STRICT if n % 2 else USUAL) for n in range(6))
    story.epoch(RUN, [segment(0, read=story.ledger.size)])
    story.ledger.append([ended(RUN, plan=plan().digest())])
    story.epoch(RUN, [segment(1, read=story.ledger.size)])
    with raises_code("ledger.run-end-continued"):
        story.ledger.append([ended(RUN, plan=plan().digest(), probed=False)])
    story.ledger.append([ended(RUN, segment=1, steps=20, plan=plan().digest())])
    story.epoch(RUN, [segment(2, read=story.ledger.size, outcome=SegmentOutcome.ABANDONED)])
    with raises_code("ledger.run-end-unknown-segment"):
        story.ledger.append([ended(RUN, segment=2, steps=30, plan=plan().digest())])
    story.sign()
    assert verify(story.ledger.store, now=int(story.clock.now)).problem is None
    story.ledger.close()


def test_a_parent_is_a_run_with_these_weights(where: str) -> None:
    story = begin(where)
    story.admit(contribution(n, terms=STRICT if n % 2 else USUAL) for n in range(6))
    story.epoch(OTHER, [segment(0, read=story.ledger.size)])
    start = RunBegin(run=RUN, weights=bytes(32), origin=WeightsOrigin.RUN, parent=OTHER)
    with raises_code("ledger.run-parent-differs"):
        story.ledger.append([start])
    story.ledger.append([ended(OTHER, plan=plan().digest())])
    with raises_code("ledger.run-parent-differs"):
        story.ledger.append([dataclasses.replace(start, weights=digest("others"))])
    story.ledger.append([start])
    story.ledger.close()
    for change in ({"origin": None}, {"origin": WeightsOrigin.PUBLIC}, {"parent": None}, {"parent": RUN}):
        with raises_code("ledger.run-parent"):
            dataclasses.replace(start, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {13: [{1: "a", 2: 0}]}, {13: [{1: "b", 2: 1}, {1: "a", 2: 1}]}, {13: [{1: "a", 2: 2**60}]}, {4: 0}, {8: 1},
        {14: []}, {14: [{1: "model.safetensors", 2: bytes(31)}]}, {14: [{1: "../model.safetensors", 2: bytes(32)}]},
        {14: [{1: "model.safetensors", 2: bytes(32)}] * 2}, {15: 1}, {6: 0}, {7: 3}, {2: -1}, {1: bytes(15)},
    ],
    ids=str,
)  # fmt: skip
def test_an_end_is_read_strictly(change: dict[int, object]) -> None:
    """Records encoded with cbor2 are refused if Lamina's encoder could not write them."""
    good = records.encode_leaf(ended(RUN, caps=(OccurrenceCap(cls="a", most=3),)), 7, 1_800_000_000, 1)
    body = cbor2.loads(good.body or b"")
    assert isinstance(records.decode_leaf(good).record, RunEnd)
    data = cbor2.dumps({**body, **change}, canonical=True)
    leaf = cbor2.dumps({**cbor2.loads(good.leaf), 5: records.hashlib.sha256(data).digest()}, canonical=True)
    with pytest.raises(EncodingError):
        records.decode_leaf(records.StoredLeaf(leaf, data))
