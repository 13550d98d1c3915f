"""`lamina study`: data that cannot be read, and progress where nobody looks at a terminal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from asking import Call, refused, succeeded

from lamina.cli import study
from lamina.study import runner


def test_data_that_is_not_there_is_named(lamina: Call) -> None:
    Path("empty").mkdir()
    for folder in ("nope", "empty"):
        for name in ("table5", "table1"):
            said = refused(lamina("study", name, "--data", folder), "study.data-not-readable")
            assert f"'{folder}'" in said and "ptbxl_database.csv" in said


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_in_a_pipe_is_a_line_now_and_then(
    lamina: Call, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    now = 0.0

    def measured(*given: Any, say: Callable[[str], None], **more: Any) -> list[Path]:
        nonlocal now
        for done in range(1, 31):
            now += 1.0  # second a training
            say(f"{done} of 30")
        return [Path("study.md")]

    monkeypatch.setattr(runner, "run_study", measured)
    monkeypatch.setattr(study, "stderr_is_terminal", lambda: terminal)
    monkeypatch.setattr(study, "monotonic", lambda: now)
    result = lamina("study")
    succeeded(result)
    told = [line for line in result[2].splitlines() if line.endswith("of 30")]
    assert told == ([] if terminal else ["1 of 30", "11 of 30", "21 of 30"])
