"""What resuming a pending segment means: a pure decision."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from open_charges import opened

from lamina.run.run_record import SegmentInputs
from lamina.run.segments import ResumeAction, decide_resume, replay_mismatches

PENDING = opened(3)
FACTS = SegmentInputs(**{f.name: getattr(PENDING, f.name) for f in fields(SegmentInputs)})


def test_all_the_same_is_replayed() -> None:
    assert decide_resume(PENDING, FACTS, newest=3) == (ResumeAction.REPLAY, ())


def test_a_newer_checkpoint_is_finished_whatever_changed() -> None:
    other = replace(FACTS, data=b"x" * 32, checkpoint=b"new checkpoint".ljust(32))
    assert decide_resume(PENDING, other, newest=4)[0] is ResumeAction.FINISH


@pytest.mark.parametrize("name", [f.name for f in fields(SegmentInputs)])
def test_every_single_fact_counts(name: str) -> None:
    value = getattr(FACTS, name)
    changed = value + 1 if isinstance(value, int) else value[:-1] + (b"!" if isinstance(value, bytes) else "!")
    action, reasons = decide_resume(PENDING, replace(FACTS, **{name: changed}), newest=3)
    assert action is ResumeAction.REDO
    assert len(reasons) == 1 and reasons[0]


def test_a_lost_seed_is_redone() -> None:
    assert decide_resume(replace(PENDING, seed=b""), FACTS, newest=3)[0] is ResumeAction.REDO
    assert replay_mismatches(replace(PENDING, seed=b""), FACTS) == ("their seed was erased",)
