"""What resuming a pending segment means: a pure decision."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from lamina.train.resume import Action, Facts, decide, mismatches
from lamina.train.store.records import Open

FACTS = Facts(
    plan=b"p" * 32,
    settings=b"s" * 32,
    membership=b"m" * 32,
    checkpoint=b"c" * 32,
    data=b"d" * 32,
    world_size=1,
    threads=2,
    code="lamina 1",
)
PENDING = Open(
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
    assert decide(PENDING, FACTS, newest=3, copied=False) == (Action.REPLAY, ())


def test_a_newer_checkpoint_is_finished_whatever_changed() -> None:
    other = replace(FACTS, data=b"x" * 32, checkpoint=b"new checkpoint".ljust(32))
    assert decide(PENDING, other, newest=4, copied=False)[0] is Action.FINISH


@pytest.mark.parametrize("name", [f.name for f in fields(Facts)])
def test_every_single_fact_counts(name: str) -> None:
    value = getattr(FACTS, name)
    changed = (
        value + 1 if isinstance(value, int) else value[:-1] + (b"!" if isinstance(value, bytes) else "!")
    )
    action, reasons = decide(PENDING, replace(FACTS, **{name: changed}), newest=3, copied=False)
    assert action is Action.REDO
    assert len(reasons) == 1 and reasons[0]


def test_a_copy_or_a_lost_seed_is_redone() -> None:
    assert decide(PENDING, FACTS, newest=3, copied=True)[0] is Action.REDO
    assert mismatches(replace(PENDING, seed=b""), FACTS, copied=False) == ("its seed is gone",)
