"""Runs of the small problem that are stopped at a step, and what of two runs is compared."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import problem
import pytest
import torch

from lamina.cli.open_ledger import write_spend
from lamina.run.completion import complete_ledger
from lamina.run.run_output import Progress, RunFigures
from lamina.run.trainer import Trainer

LOOSE = {"clinical": 9.0, "sensitive": 9.0}


class Killed(BaseException):
    """Stands for the end of the process: nothing handles it."""


def die() -> None:
    raise Killed


class During(Progress):
    """Does something after a step or at the end of a segment, once each, and `each` after every step."""

    def __init__(
        self,
        steps: Mapping[int, Callable[[], Any]] | None = None,
        segments: Mapping[int, Callable[[], Any]] | None = None,
        each: Callable[[int], Any] | None = None,
    ) -> None:
        self._steps, self._segments = dict(steps or {}), dict(segments or {})
        self._each = each or _nothing

    def step(self, done: int, loss: float | None) -> None:
        self._each(done)
        self._steps.pop(done, _nothing)()

    def on_segment(self, now: RunFigures) -> None:
        self._segments.pop(now.step, _nothing)()


def _nothing(*_: object) -> None: ...


def killed(folder: Path, step: int, **options: Any) -> Trainer:
    """A run that was killed after this step."""
    trainer = problem.trainer(folder, progress=During({step: die}), **options)
    with pytest.raises(Killed):
        trainer.fit()
    return trainer


def copied(folder: Path, to: str) -> Path:
    """A copy of a run's folder beside it, its link to the ledger included."""
    return shutil.copytree(folder, folder.with_name(to), symlinks=True)


def lose_ledger(folder: Path) -> None:
    for path in folder.glob("tests.ledger.*"):
        path.unlink()


def complete(where: Path, *folders: Path) -> int:
    """What `lamina ledger complete` does; the number of records that were entered again."""
    with write_spend(str(where)) as book:
        return complete_ledger(book.ledger, folders)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: t.detach().clone() for name, t in trainer.model.state_dict().items()}


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def figures(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
    return found


def told(outcome: Any, words: str) -> bool:
    """Whether one of the notes has these words."""
    return any(words in note for note in outcome.notes)
