"""What a run says: progress, callbacks and the log; warnings, and errors in the user's own code by file and line.

Never a loss, a norm or a batch size; the text of an error or warning on private data is withheld. Progress is a bar on a
terminal; elsewhere it is one line per segment without times, because what goes to a file stays there and how long a step
takes depends on who was sampled.
"""

from __future__ import annotations

import csv
import io
import json
import math
import sys
import sysconfig
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from torch import nn

from lamina.errors import LaminaError, RunError
from lamina.plan.table import epsilon_text
from lamina.run.run_files import write_atomically
from lamina.validate import one_of, visible


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFigures:
    """Where a run stands between two segments: what is public, or paid for.

    step, steps  steps done, and steps that the plan has
    epsilon      by private class: what the run was charged so far, redone segments included
    evaluation   the figures on public or simulated data at this step; empty if there was no evaluation
    noise        by layer: S, the standard deviation of the noise of the next step, in units of the clipped sum. Where a
                 rule of the plan moves it, it does so by what was released
    """

    step: int
    steps: int
    epsilon: Mapping[str, float]
    evaluation: Mapping[str, float] = field(default_factory=dict)
    noise: Mapping[str, float] = field(default_factory=dict)


class Callback:
    """Told between the segments of a run, where it stands; override what you need.

    Never given, because no budget pays for it: the training loss, gradient norms, clipped fractions, batch sizes, who
    was sampled, how long a step took. A run that is resumed tells where it stands once more.

    stop  set it to end the run after this segment, as patience does; what was charged stays charged
    """

    stop = False

    def on_segment(self, now: RunFigures) -> None:
        """A segment was closed: charged, checkpointed and recorded."""

    def on_evaluation(self, now: RunFigures) -> None:
        """The model was evaluated, also before the first step; comes before `on_segment` of the same step."""


class LogFile(Callback):
    """A row for each closed segment and evaluation: log.csv, or log.jsonl with one JSON object per line.

    Columns: step, steps, epsilon_CLASS, eval_FIGURE. Steps that are done again replace their rows.
    """

    def __init__(self, folder: Path, form: str) -> None:
        self.form = one_of(RunError, "train.log-form", ("csv", "jsonl"), log=form)
        self.path = folder / f"log.{form}"
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
            self._rows = list(csv.DictReader(lines)) if form == "csv" else [json.loads(line) for line in lines]
            _ = [int(row["step"]) for row in self._rows]
        except (OSError, ValueError, LookupError, TypeError) as error:
            problem = f"'{self.path}' is not the log of a run: {type(error).__name__}"
            raise RunError("train.log-unreadable", problem, "move it away") from None

    def on_segment(self, now: RunFigures) -> None:
        row: dict[str, Any] = {"step": now.step, "steps": now.steps}
        row |= {f"epsilon_{name}": value for name, value in now.epsilon.items()}
        row |= {f"eval_{name}": value for name, value in now.evaluation.items()}
        self._rows = [old for old in self._rows if int(old["step"]) < now.step] + [row]
        text = io.StringIO()
        if self.form == "csv":
            table = csv.DictWriter(text, list(dict.fromkeys(name for each in self._rows for name in each)))
            table.writeheader()
            table.writerows(self._rows)
        else:
            text.writelines(json.dumps(each, ensure_ascii=False) + "\n" for each in self._rows)
        write_atomically(self.path, text.getvalue().encode(), mode=0o644)

    on_evaluation = on_segment


class RunStopped(KeyboardInterrupt):
    """A run that the user stopped with Ctrl-C. Where nothing catches it, its text is shown and no traceback."""

    @classmethod
    def told(cls, text: str) -> RunStopped:
        """Return the exception, and let Python show its text alone."""
        before = sys.excepthook

        def show(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            if isinstance(error, cls):
                print(error, file=sys.stderr)
            else:
                before(kind, error, trace)

        sys.excepthook = show
        return cls(text)

    def _render_traceback_(self) -> list[str]:  # what notebooks show
        return [str(self)]


class Progress(Callback):
    """What a screen shows: this one shows nothing; subclasses override what they show."""

    def begin(self, done: int, total: int) -> None: ...

    def step(self, done: int, loss: float | None) -> None: ...

    def note(self, text: str) -> None: ...

    def end(self) -> None: ...


class LogProgress(Progress):
    """For logs: at most some twenty lines, at the ends of segments."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._total = 0
        self._shown = 0
        self._evaluation = ""

    def begin(self, done: int, total: int) -> None:
        self._total, self._shown = total, done

    def on_segment(self, now: RunFigures) -> None:
        if self._shown < now.step and (now.step == self._total or (now.step - self._shown) * 20 >= self._total):
            self._shown = now.step
            told = f"step {now.step} of {self._total}, {_epsilon_text(now.epsilon)}{self._evaluation}"
            self._console.print(told, markup=False, soft_wrap=True)
            self._evaluation = ""

    def on_evaluation(self, now: RunFigures) -> None:
        self._evaluation = f", {evaluation_text(now.evaluation)}"

    def note(self, text: str) -> None:
        self._console.print(f"note: {visible(text)}", markup=False, soft_wrap=True)


class TerminalProgress(Progress):
    """For a terminal: a bar with ε, the last evaluation and the time that is left."""

    def __init__(self, console: Console) -> None:
        texts = [TextColumn(f"{{task.fields[{name}]}}") for name in ("spent", "evaluation", "loss")]
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), *texts)
        self._bar = Bar(*columns, console=console)
        self._task = self._bar.add_task("private training", total=1, spent="", evaluation="", loss="")
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

    def on_segment(self, now: RunFigures) -> None:
        self._bar.update(self._task, completed=now.step, spent=escape(_epsilon_text(now.epsilon)))

    def on_evaluation(self, now: RunFigures) -> None:
        self._bar.update(self._task, evaluation=escape(evaluation_text(now.evaluation)))

    def note(self, text: str) -> None:
        self._bar.console.print(f"note: {visible(text)}", markup=False, soft_wrap=True)

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


def _epsilon_text(spent: Mapping[str, float]) -> str:
    """'ε 1.310' of one class, 'ε clinical 1.310, registry 0.200' of several."""
    if len(spent) == 1:
        return f"ε {epsilon_text(next(iter(spent.values())), 3)}"
    return f"ε {', '.join(f'{name} {epsilon_text(value, 3)}' for name, value in spent.items()) or 'nothing private'}"


def evaluation_text(figures: Mapping[str, float]) -> str:
    """Figures on public or simulated data for people: 'acc 0.517, loss 1.204'."""
    return ", ".join(f"{name} {value:.4g}" for name, value in figures.items())


_SITE_PACKAGES = sysconfig.get_path("purelib")
_LAMINA, _TORCH = str(Path(__file__).parents[1]), str(Path(str(torch.__file__)).parent)
_NOT_USER_CODE = (_LAMINA, _TORCH, f"{_SITE_PACKAGES}/typer", "<frozen ")
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def user_line(error: BaseException) -> str | None:
    """`file:line, in function` of the deepest line of the user's that the error came through, or None.

    A traceback begins where the error was caught, so callers above that point are never blamed. An installed
    package counts as the user's only if nothing else does.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_NOT_USER_CODE)]
    own = [f for f in frames if not f.filename.startswith(_LIBRARIES)]
    installed = [f for f in frames if "site-packages" in f.filename]
    for frame in (own or installed)[-1:]:
        return f"{frame.filename}:{frame.lineno}, in {frame.name}"
    return None


@contextmanager
def user_code(what: str, remedy: str) -> Iterator[None]:
    """Turn what the user's code raises inside into a LaminaError that names its line; ours passes as it is.

    Only for code that has not seen private data: the text of the error is repeated.
    """
    try:
        yield
    except LaminaError:
        raise
    except Exception as error:
        where = user_line(error)
        problem = f"{what}: {type(error).__name__}: {first_lines(error)}"
        raise LaminaError("train.user-code-failed", f"{problem} (at {where})" if where else problem, remedy) from error


class WithheldError(RunError):
    """An error while a step worked on private examples: it names the line and withholds the text.

    Texts like "mat1 and mat2 shapes cannot be multiplied (17x4 and 5x3)" hold the size of the batch, others a value.
    `original` is the error itself, for a screen inside.
    """

    original: Exception


def withhold_text(error: Exception, model: nn.Module, *, inside: bool = False) -> WithheldError:
    """What may be said about an error in the middle of training: its type, its lines and its layer; all of it `inside`."""
    name = failing_layer(error, model)
    parts = [f"in layer '{name}'" if name else "", f"at {where}" if (where := user_line(error)) else ""]
    remedy = "correct the line or the data; inside=True (--inside) shows the text on a terminal"
    if isinstance(error, LaminaError) and error.remedy:
        remedy = error.remedy
    what = " ".join([f"training stopped with {type(error).__name__}", *filter(None, parts)])
    text = first_lines(error) if inside else "withheld, because it may hold sizes or values of a private batch"
    remedy += "; then go on with the same folder: whoever fails alone is left out, and the steps are charged again"
    withheld = WithheldError("train.error-text-withheld", f"{what}; its text is {text}", remedy)
    withheld.original = error
    return withheld.with_traceback(error.__traceback__)


def failing_layer(error: BaseException, model: nn.Module) -> str | None:
    """The name of the innermost module whose forward pass the error came through."""
    found = _innermost_module_call(error)
    return None if found is None else next((n for n, m in model.named_modules() if m is found[0] and n), None)


def failing_layer_and_input(error: BaseException, model: nn.Module) -> str | None:
    """The failing layer with its kind and the shapes of its input. For input that is not private."""
    found = _innermost_module_call(error)
    name = failing_layer(error, model)
    if found is None or not name:
        return None
    module, given = found
    tensors = [t for t in given if isinstance(t, torch.Tensor)]
    shapes = ", ".join(f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for t in tensors)
    return f"layer '{name}', {module}, was given {shapes or 'no tensor'}".replace("\n", " ")


def _innermost_module_call(error: BaseException) -> tuple[nn.Module, tuple[Any, ...]] | None:
    """The last call of a module in the traceback, with its arguments, as torch's own frame holds them."""
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "_call_impl" and isinstance(frame.f_locals.get("self"), nn.Module):
            found = frame.f_locals["self"], tuple(frame.f_locals.get("args", ()))
    return found


def first_lines(error: BaseException, most: int = 3) -> str:
    """The first lines of an error's text; torch appends pages to some."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return " ".join(line.strip() for line in lines[:most]) or "no message"


@contextmanager
def hide_warning_texts(say: Callable[[str], None], *, inside: bool) -> Iterator[None]:
    """Show kind and line of a warning, once each; its text may hold the size of a batch and is shown only `inside`."""
    seen = set()

    def show(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any, **__: Any) -> None:
        if (category, filename, lineno) not in seen:
            seen.add((category, filename, lineno))
            text = str(message) if inside else "text withheld: it may hold sizes of a private batch"
            say(f"warning: {category.__name__} at {filename}:{lineno} ({text})")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
