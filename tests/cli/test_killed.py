"""`lamina train` killed from outside, as a machine or a scheduler would, and started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lamina.cli.explain import NOT_SIGNED
from lamina.ledger.reader import LedgerReader
from lamina.ledger.records import Epoch
from lamina.ledger.verify.verifier import verify
from lamina.plan.step_plan import StepPlan
from lamina.train.journal import Journal

COMMAND = [sys.executable, "-c", "import sys; from lamina.cli import main; main(sys.argv[1:])"]


def _train(project: Any, *words: str) -> list[str]:
    return [*COMMAND, "train", str(project.folder / "first.toml"), *words]


def _wait_for_an_open_segment(journal: Path, process: subprocess.Popen[bytes]) -> None:
    for _ in range(3000):
        if journal.exists() and journal.stat().st_size:
            try:
                if Journal.load(journal).opens:
                    return
            except Exception:  # the other process is writing it at this moment
                pass
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.01)
    pytest.fail("no segment was opened")


def test_a_killed_command_goes_on_and_costs_what_was_planned(project: Any) -> None:
    run = project.run.replace("steps = 6", "steps = 300").replace("segment = 2", "segment = 60")
    project.write("first.toml", run)
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": project.folder}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    first = subprocess.Popen(_train(project, "--json"), env=environment, **quiet)
    try:
        _wait_for_an_open_segment(project.folder / "runs" / "first" / "journal", first)
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    again = subprocess.run(
        _train(project, "--json"), env=environment, cwd=project.folder, capture_output=True, text=True, check=False
    )
    assert again.returncode == 0, again.stderr
    found = json.loads(again.stdout)
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
