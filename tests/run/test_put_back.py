"""A run's folder is put back to an older state where it lies: it has done more than it remembers."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import problem
import pytest
from refusals import raises_code
from run_state import attempts
from stopping import During, Killed, die

from lamina.ledger.records import Epoch, SegmentOutcome
from lamina.ledger.verify.verifier import verify
from lamina.plan.rules import FollowBudget
from lamina.plan.step_plan import StepPlan

LOOSE = {"clinical": 500.0, "sensitive": 500.0}


def quiet(plan: StepPlan) -> StepPlan:
    return replace(plan, noise=tuple(4 * s for s in plan.noise))


def options(kind: str) -> dict[str, Any]:
    if kind == "capped":
        given = problem.parts("capped")
        return {**given, "plan": quiet(given["plan"])}
    plan = quiet(problem.plan(problem.net()))
    if kind == "followed":
        plan = replace(plan, rules=(FollowBudget(order=16),), accountant="rdp@16")
    return {"plan": plan}


def put_back(folder: Path, saved: Path) -> None:
    """The same files, the same inodes, what was in them before."""
    before = {path.relative_to(saved) for path in saved.rglob("*")}
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.relative_to(folder) not in before:
            path.unlink()
    for path in saved.rglob("*"):
        if path.is_file() and not path.is_symlink():
            (folder / path.relative_to(saved)).write_bytes(path.read_bytes())


def stopped(folder: Path, step: int, **given: Any) -> None:
    with pytest.raises(Killed):
        problem.trainer(folder, progress=During(segments={step: die}), bounds=LOOSE, **given).fit()


def refused(folder: Path, **given: Any) -> None:
    with raises_code("train.folder-behind-ledger"):
        problem.trainer(folder, bounds=LOOSE, **given).fit()


@pytest.mark.parametrize("kind", ["exact", "capped"])
def test_it_is_refused_or_pays_for_what_it_does_again(tmp_path: Path, kind: str) -> None:
    """Twice, and once more after a stop that loses nothing: what it knows to have lost it does not pay again."""
    given, folder, saved = options(kind), tmp_path / "a", tmp_path / "saved"
    stopped(folder, 5, **given)
    shutil.copytree(folder, saved, symlinks=True)
    stopped(folder, 15, **given)
    put_back(folder, saved)
    refused(folder, **given)
    stopped(folder, 10, **given, take_over=True)
    before = attempts(folder)
    stopped(folder, 15, **given)  # nothing was put back
    (more,) = attempts(folder)[len(before) :]
    assert (more.first, more.last) == (10, 15)
    assert kind == "exact" or not any(more.events.values())  # the cap was paid when it was restored
    put_back(folder, saved)
    refused(folder, **given)
    made = problem.trainer(folder, bounds=LOOSE, **given, take_over=True)
    outcome = made.fit()
    assert any("took over the run" in note for note in outcome.notes)
    found = verify(tmp_path / "tests.ledger.db", signatures=False)
    assert found.problem is None, found.problem
    assert found.held == ()
    total = made.spend.total("clinical", delta=1e-5)
    assert total.spent == pytest.approx(made.spend.spent(*made.spend.labels(), "clinical", delta=1e-5))


def test_all_that_took_over_share_one_adaptive_budget(tmp_path: Path) -> None:
    """The budget was charged when the run began: what is done again is taken from it, and the run ends earlier."""
    given, folder, saved = options("followed"), tmp_path / "a", tmp_path / "saved"
    stopped(folder, 5, **given)
    shutil.copytree(folder, saved, symlinks=True)
    stopped(folder, 10, **given)
    put_back(folder, saved)
    refused(folder, **given)
    made = problem.trainer(folder, bounds=LOOSE, **given, take_over=True)
    outcome = made.fit()
    assert 10 < outcome.steps < given["plan"].steps
    assert any("its budget allows no more" in each for each in outcome.notes)
    found = verify(tmp_path / "tests.ledger.db", signatures=False)
    assert found.problem is None and found.held == (), found.problem
    assert made.spend.total("clinical", delta=1e-5).runs[0].steps == given["plan"].steps


def test_what_it_was_at_is_given_up(tmp_path: Path) -> None:
    """A segment was open that the older state does not know: nobody will go on with it, and it is recorded so."""
    given, folder, saved = options("exact"), tmp_path / "a", tmp_path / "saved"
    stopped(folder, 5, **given)
    shutil.copytree(folder, saved, symlinks=True)
    with pytest.raises(Killed):
        problem.trainer(folder, progress=During({8: die}), bounds=LOOSE, **given).fit()
    put_back(folder, saved)
    refused(folder, **given)
    made = problem.trainer(folder, bounds=LOOSE, **given, take_over=True)
    made.fit()
    found = [leaf.record.segments[0] for leaf in made.ledger.of_kind(Epoch)]  # type: ignore[union-attr]
    assert [(s.index, s.generation) for s in found if s.outcome is SegmentOutcome.ABANDONED] == [(1, 0)]
    assert verify(tmp_path / "tests.ledger.db", signatures=False).held == ()
