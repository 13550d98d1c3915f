"""`lamina study`: the document's tables and figures, measured again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lamina.cli.terminal import err, print_json, print_line, print_note
from lamina.study.runner import find_size, run_study
from lamina.study.tasks import SIMULATED


def show_study(
    names: Sequence[str], *, size: str, data: Path | None, folder: Path, workers: int, as_json: bool
) -> None:
    """`lamina study` (options and help: torch_commands.py)."""
    chosen = find_size(size)
    print_note(chosen.describe())
    with err.status("measuring") as status:
        written = run_study(
            names, chosen, folder, source=SIMULATED if data is None else str(data), workers=workers, say=status.update
        )
    if as_json:
        print_json({"size": chosen.name, "evidence": chosen.evidence, "files": [str(path) for path in written]})
        return
    print_line(f"{'read' if chosen.evidence else 'quick: not evidence; read'} {written[0]}")
    for path in written[1:]:
        print_note(f"wrote {path}")
