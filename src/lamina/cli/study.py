"""`lamina study`: the document's tables and figures, measured again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic

from lamina.cli.terminal import err, print_json, print_line, print_note, stderr_is_terminal
from lamina.study.runner import find_size, run_study
from lamina.study.tasks import SIMULATED

NOTE_SECONDS = 10.0  # between two lines of progress where standard error is no terminal


def show_study(
    names: Sequence[str], *, size: str, data: Path | None, folder: Path, workers: int, as_json: bool
) -> None:
    """`lamina study` (options and help: torch_commands.py)."""
    chosen = find_size(size)
    print_note(chosen.describe())
    with err.status("measuring") as status:
        say = status.update if stderr_is_terminal() else _seldom(print_note)
        source = SIMULATED if data is None else str(data)
        written = run_study(names, chosen, folder, source=source, workers=workers, say=say)
    if as_json:
        print_json({"size": chosen.name, "evidence": chosen.evidence, "files": [str(path) for path in written]})
        return
    print_line(f"{'read' if chosen.evidence else 'quick: not evidence; read'} {written[0]}")
    for path in written[1:]:
        print_note(f"wrote {path}")


def _seldom(say: Callable[[str], None]) -> Callable[[str], None]:
    """Passes on the first text, and then at most one every `NOTE_SECONDS`."""
    last = -math.inf

    def maybe(text: str) -> None:
        nonlocal last
        now = monotonic()
        if now - last >= NOTE_SECONDS:
            last = now
            say(text)

    return maybe
