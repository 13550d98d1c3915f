"""`lamina train` killed from outside, as a machine or a scheduler would, and started again."""

from __future__ import annotations

from typing import Any

import pytest

from lamina.cli.explain import NOT_SIGNED
from lamina.ledger.reader import LedgerReader
from lamina.ledger.records import Epoch
from lamina.ledger.verify.verifier import verify
from lamina.plan.step_plan import StepPlan


def test_a_killed_command_goes_on_and_costs_what_was_planned(project: Any) -> None:
    run = project.run.replace("steps = 6", "steps = 300").replace("segment = 2", "segment = 60")
    project.write("first.toml", run)
    options = project.train_killed_in_a_segment(project.folder / "first.toml")
    found = project.train_again(project.folder / "first.toml", options)
    plan = StepPlan.from_cbor((project.folder / "runs" / "first" / "plan.cbor").read_bytes())
    assert found["steps"] == 300 and found["notes"] == [NOT_SIGNED]
    assert found["classes"]["clinical"]["epsilon"] == pytest.approx(plan.epsilon("clinical"), rel=1e-12)
    checked = verify(found["ledger"])
    assert checked.problem is None and checked.signed == checked.size
    with LedgerReader.read_only(found["ledger"]) as ledger:
        segments = [each for leaf in ledger.of_kind(Epoch) for each in leaf.record.segments]
        assert [(each.first, each.last) for each in segments] == [(i, i + 60) for i in range(0, 300, 60)]
        with ledger.store.read() as rows:
            assert rows.holds() == []  # nothing is reserved or open any more
