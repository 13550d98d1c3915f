"""A ledger as trainers write it: classes as a whole beside bounds, attempts given up, and what has no leaf yet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from build import (
    HOUR,
    RUNS,
    STRICT,
    USUAL,
    YEAR,
    Made,
    Story,
    begin,
    build,
    contribution,
    plan,
    segment,
    signed_by,
    spent,
)
from forge import sql
from making import AUDITOR, GOVERNING, LEDGER, ORIGIN, digest
from open_charges import SEGMENT_AS_TEXT, put_open_charge, put_run

from lamina.account.schedule import Event
from lamina.ledger.contribution_trace import trace_contribution
from lamina.ledger.records import ContributionTerms, Epoch, EpochAccount, Leaf, SegmentOutcome
from lamina.ledger.retention import Retention
from lamina.ledger.show import RecordFilter, describe_leaf, leaf_to_dict
from lamina.ledger.verify.tree_checks import Trust
from lamina.ledger.verify.verifier import verify
from lamina.sign.notes import NoteKey

CLASS = ContributionTerms("clinical", "ecg", 0, 0)  # the class as a whole
MINE = Trust(notes=(NoteKey(ORIGIN, LEDGER.public),), plain=(GOVERNING.public,))
DAY = 86_400


def two_bound_to(made: Story) -> list[Made]:
    """Both name this ledger, so that nothing is noted of that."""
    only = made.ledger.header_hash
    return [contribution(1, ledger=only), contribution(2, terms=STRICT, ledger=only)]


@pytest.fixture
def story(tmp_path: Path) -> Iterator[Story]:
    """Run one keeps the bounds that were signed; run two knows the class alone. Each attempt has an epoch."""
    made = begin(str(tmp_path / "a.db"))
    made.at["usual"], made.at["strict"] = made.admit(two_bound_to(made))
    made.later(HOUR)
    read = made.ledger.size
    both = {CLASS: 1.0, STRICT: 0.5}
    for index, generation, outcome in (
        (0, 0, SegmentOutcome.CLOSED),
        (1, 0, SegmentOutcome.ABANDONED),
        (1, 1, SegmentOutcome.CLOSED),
    ):
        made.epoch(RUNS[0], [segment(index, generation, read=made.ledger.size, outcome=outcome)], scales=both)
        made.later(HOUR)
    made.epoch(RUNS[1], [segment(0, read=read, outcome=SegmentOutcome.ABANDONED)], scales={CLASS: 1.0})
    made.sign()
    yield made
    made.ledger.close()


def test_it_verifies(story: Story) -> None:
    found = verify(story.ledger.store, trust=MINE)
    assert found.problem is None
    assert found.spends == 7
    assert (found.held, found.to_dict()["held"]) == ((), [])
    (note,) = found.notes  # of the usual bound in all of them, of the strict one in the last
    assert note.startswith("4 epochs have no account for a bound that an eligible contribution signed")


def test_who_is_charged_is_not_told_to_be_left_out(tmp_path: Path) -> None:
    made = begin(str(tmp_path / "b.db"))
    made.admit(two_bound_to(made))
    made.later(HOUR)
    read = made.ledger.size
    made.epoch(RUNS[0], [segment(0, read=read)], scales={CLASS: 1.0, USUAL: 1.0, STRICT: 0.5})
    made.sign()
    assert verify(made.ledger.store, trust=MINE).notes == ()
    made.ledger.close()


def test_show(story: Story) -> None:
    lines = [describe_leaf(leaf) for leaf in RecordFilter(kinds=("epoch",)).leaves(story.ledger)]
    assert len(lines) == 4
    assert "1 [10, 20) given up: clinical ε" in lines[1]
    assert "clinical@c=0.5,z=4 ε" in lines[1]
    assert "1.1 [10, 20): clinical" in lines[2]
    found = [leaf_to_dict(leaf) for leaf in RecordFilter(kinds=("epoch",), cls="clinical").leaves(story.ledger)]
    assert [len(each["accounts"]) for each in found] == [2, 2, 2, 1]
    assert found[1]["segments"][0]["outcome"] == "abandoned"


def test_a_line_does_not_grow_with_the_bounds() -> None:
    charge = (Event(sigma=4.0, q=0.02, steps=10),)
    signed = [
        EpochAccount(cls="clinical", clip_norm=n + 1, noise_multiplier=4_000_000, charges=charge, spend=n)
        for n in range(20)
    ]
    record = Epoch(
        run=RUNS[0],
        segments=(segment(0, read=1),),
        plan=digest("plan"),
        variance=(1.0,),
        accounts=(EpochAccount(cls="clinical", charges=charge, spend=99), *signed),
        state=digest("state"),
    )
    line = describe_leaf(Leaf(Epoch, 1, 0, 0, record))
    assert line.count("ε") == 5
    assert line.endswith("; and 16 more bounds")


def test_trace_of_who_has_an_account_and_who_has_none(story: Story) -> None:
    strict = trace_contribution(story.ledger, story.ledger.leaf(story.at["strict"]))
    assert [each.own for each in strict.epochs] == [True, True, True, False]
    assert [each.multiplier for each in strict.epochs] == [8.0, 8.0, 8.0, 4.0]
    assert strict.spend == spent((8.0, 30), (4.0, 10))
    assert (strict.shared, strict.unused) == (1, 0)
    usual = trace_contribution(story.ledger, story.ledger.leaf(story.at["usual"]))
    assert [each.own for each in usual.epochs] == [False] * 4
    assert usual.spend == spent((4.0, 40))  # with its class: a stricter account would tell too little
    assert usual.epochs[2].account == spent((4.0, 30))
    told = usual.to_dict()["epochs"]
    assert [each["own_account"] for each in told] == [False] * 4
    assert told[1]["segments"][0]["outcome"] == "abandoned"


# ------------------------------------------------------------------------------ what has no leaf yet


def test_what_is_held_is_told(story: Story) -> None:
    put_run(story.ledger, RUNS[0], "first")
    for run, index in ((RUNS[0], 2), (RUNS[0], 3), (RUNS[0], None), (RUNS[1], None)):
        put_open_charge(story.ledger, run, index, body=b"not read")
    put_open_charge(story.ledger, RUNS[1], 0, leaf=8)  # is in a leaf: not open any more
    unsigned = verify(story.ledger.store, trust=MINE).problem
    assert unsigned is not None and unsigned.code == "verify.open-rows-differ"
    story.ledger.accept()
    found = verify(story.ledger.store, trust=MINE)
    assert found.verified
    assert found.trusted
    assert {each.run: (each.label, each.attempts, each.reserved) for each in found.held} == {
        RUNS[0]: ("first", 2, True), RUNS[1]: ("", 0, True),
    }  # fmt: skip
    _, note = found.notes
    assert note.startswith("2 attempts are open and 2 plans reserved")
    assert f"{RUNS[0].hex()[:8]} 'first' (2 attempts, the rest of its plan)" in note
    assert f"{RUNS[1].hex()[:8]} (the rest of its plan)" in note
    assert {each["run"] for each in found.to_dict()["held"]} == {run.hex() for run in RUNS}


def test_rows_that_do_not_belong_there(story: Story, tmp_path: Path) -> None:
    put_open_charge(story.ledger, RUNS[0], 2)
    story.ledger.close()
    sql(str(tmp_path / "a.db"), SEGMENT_AS_TEXT)
    found = verify(str(tmp_path / "a.db"))
    assert found.problem is not None
    assert found.problem.kind == "store"


# ------------------------------------------------------------------------------ pruning


def test_plans_and_epochs_outlive_what_is_pruned(tmp_path: Path) -> None:
    """Only contributions go. So every plan stays, since an epoch refers to it, and every spend is computed again."""
    story = build(str(tmp_path / "a.db"))
    ledger = story.ledger
    epochs = [leaf.record for leaf in ledger.of_kind(Epoch)]
    assert len(epochs) == 3
    for record in epochs:
        assert isinstance(record, Epoch)
        assert ledger.blob(record.plan) is not None
    assert {record.plan for record in epochs} == {  # type: ignore[union-attr]
        plan().digest(), plan(50, noise=(0.0, 0.0, 5.0, 5.0)).digest(),
    }  # fmt: skip
    ledger.store.compact()
    found = verify(ledger.store, trust=MINE, seen=story.signed)
    assert found.trusted
    assert (found.counts["pruned"], found.counts["epoch"], found.spends) == (37, 3, 6)
    ledger.close()
    sql(str(tmp_path / "a.db"), "DELETE FROM blob WHERE digest = ?", plan().digest())
    lacking = verify(str(tmp_path / "a.db")).problem
    assert lacking is not None
    assert lacking.code == "verify.plan-missing"


def test_who_may_be_in_an_open_attempt_is_not_summed_up(tmp_path: Path) -> None:
    """What the attempt takes is in no leaf yet: a total would leave it out for good."""
    story = begin(str(tmp_path / "a.db"))
    now = int(story.clock.now)
    story.admit([contribution(1, expires=now + 10 * DAY), contribution(2, expires=now + 30 * DAY)])
    story.sign()
    story.later(2 * YEAR)
    whole = Retention(story.ledger).propose()
    assert whole is not None
    assert whole.count == 2
    put_run(story.ledger, RUNS[0], "open", now // DAY + 20)
    put_open_charge(story.ledger, RUNS[0], None)
    story.ledger.accept()  # the key signs the open rows, here and below
    assert Retention(story.ledger).propose() == whole  # a reservation has taken nothing
    put_open_charge(story.ledger, RUNS[0], 4)
    story.ledger.accept()
    part = Retention(story.ledger).propose()
    assert part is not None
    assert part.count == 1  # who expired before the run began
    Retention(story.ledger).prune(signed_by(part, AUDITOR))
    put_open_charge(story.ledger, RUNS[1])  # of a run of which no day is known
    story.ledger.accept()
    assert Retention(story.ledger).propose() is None
    with story.ledger.store.write() as rows:
        for run in RUNS:
            rows.drop_hold(run, 4 if run == RUNS[0] else 0)
    story.ledger.accept()
    rest = Retention(story.ledger).propose()
    assert rest is not None
    Retention(story.ledger).prune(signed_by(rest, AUDITOR))
    story.ledger.accept()  # the rows were written past the ledger
    assert verify(story.ledger.store, trust=MINE).trusted
    assert USUAL.cls in {each.cls for each in rest.classes}
    story.ledger.close()
