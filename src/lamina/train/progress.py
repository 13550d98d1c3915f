"""Shows how far a run is: steps, time left, ε so far. Never a loss, a norm or a batch size.

On a terminal a bar; elsewhere one line per segment without times, because what goes to a file stays there and how
long a step takes depends on who was sampled.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from lamina.errors import RunError
from lamina.plan.table import epsilon_text


class Progress:
    """Where a run reports to: this one shows nothing; subclasses override what they show."""

    def begin(self, done: int, total: int) -> None: ...

    def step(self, done: int, loss: float | None) -> None: ...

    def segment(self, done: int, spent: Mapping[str, float]) -> None: ...

    def note(self, text: str) -> None: ...

    def end(self) -> None: ...


class LogProgress(Progress):
    """For logs: at most some twenty lines, at the ends of segments."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._total = 0
        self._shown = 0

    def begin(self, done: int, total: int) -> None:
        self._total, self._shown = total, done

    def segment(self, done: int, spent: Mapping[str, float]) -> None:
        if done == self._total or (done - self._shown) * 20 >= self._total:
            self._shown = done
            self._console.print(f"step {done} of {self._total}, {_spent_text(spent)}", markup=False, soft_wrap=True)

    def note(self, text: str) -> None:
        self._console.print(f"note: {text}", markup=False, soft_wrap=True)


class TerminalProgress(Progress):
    """For a terminal: a bar with ε and the time that is left."""

    def __init__(self, console: Console) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[spent]}"),
            TextColumn("{task.fields[loss]}"),
        )
        self._bar = Bar(*columns, console=console)
        self._task = self._bar.add_task("private training", total=1, spent="", loss="")
        self._shown = 0.0
        self._mean: float | None = None

    def begin(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total)
        self._bar.start()

    def step(self, done: int, loss: float | None) -> None:
        if loss is not None and math.isfinite(loss):
            self._mean = loss if self._mean is None else 0.95 * self._mean + 0.05 * loss
        now = time.monotonic()
        if now - self._shown > 0.1:
            self._shown = now
            text = "" if self._mean is None else f"raw loss {self._mean:.4g} (inside only)"
            self._bar.update(self._task, completed=done, loss=text)

    def segment(self, done: int, spent: Mapping[str, float]) -> None:
        self._bar.update(self._task, completed=done, spent=escape(_spent_text(spent)))

    def note(self, text: str) -> None:
        self._bar.console.print(f"note: {text}", markup=False, soft_wrap=True)

    def end(self) -> None:
        self._bar.stop()


def make_progress(*, wanted: bool, inside: bool) -> Progress:
    """A bar where standard error is a terminal, lines where it is a file."""
    console = Console(stderr=True, highlight=False)
    if inside and not console.is_terminal:
        problem = "inside=True shows the raw private loss, and standard error is written to a file, not a terminal"
        remedy = "run in a terminal, or leave inside out and evaluate on public data"
        raise RunError("train.inside-needs-terminal", problem, remedy)
    if not wanted:
        return Progress()
    return TerminalProgress(console) if console.is_terminal else LogProgress(console)


def _spent_text(spent: Mapping[str, float]) -> str:
    figures = ", ".join(f"{name} {epsilon_text(value, 3)}" for name, value in spent.items())
    return f"ε so far: {figures or 'nothing private'}"
