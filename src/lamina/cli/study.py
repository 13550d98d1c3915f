"""Measure the tables and figures of the LSAB-zCDP document again, on simulated patients or on your data.

Every method has the same true ε, first weights, samples and optimiser. The page that is written has the document's figures beside
the measured ones, and the reason for every difference. Interrupt it at any time: the same command goes on where it was.

Spends nothing of a ledger: noise comes from seeds, so that a result can be repeated. Such models are measurements; never release
one that was trained on private data. The folder holds figures that were computed from --data.

Examples:

  lamina study                            all of it, quick: shows that it runs
  lamina study table5 --size full         one table, five seeds
  lamina study table5 --data ptb-xl       your records: docs/signals.md says what is read
"""

from __future__ import annotations

import math
from pathlib import Path
from time import monotonic

from lamina.cli.command import Answer, argument, command, option
from lamina.cli.terminal import err, print_note, stderr_is_terminal
from lamina.study.cells import SIZES

NOTE_SECONDS = 10.0  # between two lines of progress where standard error is no terminal


@command()
def study(
    names: list[str] = argument(
        "NAMES", "all, or any of table1, assumptions, table5 to table9, figure1 to figure7; default: all", default=None
    ),
    size: str = option(
        "quick: minutes, not evidence; full: models that learn, hours; scratch: without pre-training, an hour or two; paper: the "
        "document's own size, days",
        default="quick",
        choices=SIZES,
    ),
    data: Path | None = option(
        "folder with PTB-XL, OhioT1DM or MIMIC-III waveforms, or with their slices; default: simulated patients",
        metavar="DIR",
    ),
    folder: Path = option(
        "where results, tables and figures go; what is there already is not measured again", default=Path("runs/study")
    ),
    workers: int = option("trainings at a time, one thread each", default=2, min=1, max=64),
) -> Answer:
    from lamina.study.runner import ALL, find_size, run_study
    from lamina.study.tasks import SIMULATED

    chosen = find_size(size)
    print_note(chosen.describe())
    with err.status("measuring") as status:
        say = status.update if stderr_is_terminal() else _Seldom()
        source = SIMULATED if data is None else str(data)
        page, *others = run_study(names or [ALL], chosen, folder, source=source, workers=workers, say=say)
    facts = {"size": chosen.name, "evidence": chosen.evidence, "files": [str(path) for path in (page, *others)]}
    for path in others:
        print_note(f"wrote {path}")
    return Answer(facts, f"{'read' if chosen.evidence else 'quick: not evidence; read'} {page}")


class _Seldom:
    """Prints the first text, and then at most one every `NOTE_SECONDS`."""

    last = -math.inf

    def __call__(self, text: str) -> None:
        if (now := monotonic()) - self.last >= NOTE_SECONDS:
            self.last = now
            print_note(text)
