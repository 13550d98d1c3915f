"""What resuming a pending segment means: a pure decision."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from lamina.train.journal import AttemptOpened, SegmentInputs
from lamina.train.segments import ResumeAction, decide_resume, replay_mismatches

FACTS = SegmentInputs(
    plan=b"p" * 32,
    settings=b"s" * 32,
    membership=b"m" * 32,
    checkpoint=b"c" * 32,
    data=b"d" * 32,
    world_size=1,
    threads=2,
    code="lamina 1",
)
PENDING = AttemptOpened(
    segment=3,
    generation=0,
    nonce=b"n" * 16,
    first=15,
    last=20,
    plan=FACTS.plan,
    settings=FACTS.settings,
    membership=FACTS.membership,
    checkpoint=FACTS.checkpoint,
    data=FACTS.data,
    world_size=1,
    threads=2,
    code="lamina 1",
    charges=(),
    eligibility=1,
    seed=bytes(range(32)),
)


def test_all_the_same_is_replayed() -> None:
    assert decide_resume(PENDING, FACTS, newest=3, copied=False) == (ResumeAction.REPLAY, ())


def test_a_newer_checkpoint_is_finished_whatever_changed() -> None:
    other = replace(FACTS, data=b"x" * 32, checkpoint=b"new checkpoint".ljust(32))
    assert decide_resume(PENDING, other, newest=4, copied=False)[0] is ResumeAction.FINISH


@pytest.mark.parametrize("name", [f.name for f in fields(SegmentInputs)])
def test_every_single_fact_counts(name: str) -> None:
    value = getattr(FACTS, name)
    changed = value + 1 if isinstance(value, int) else value[:-1] + (b"!" if isinstance(value, bytes) else "!")
    action, reasons = decide_resume(PENDING, replace(FACTS, **{name: changed}), newest=3, copied=False)
    assert action is ResumeAction.REDO
    assert len(reasons) == 1 and reasons[0]


def test_a_copy_or_a_lost_seed_is_redone() -> None:
    assert decide_resume(PENDING, FACTS, newest=3, copied=True)[0] is ResumeAction.REDO
    assert replay_mismatches(replace(PENDING, seed=b""), FACTS, copied=False) == ("their seed was erased",)
