"""Sign, admit and train on simulated ECG under differential privacy; show its cost and its use.

Two hospitals sign for their patients. Sixty volunteers gave their recordings to the public: they train every layer of a residual
autoencoder with a classifier. Five hundred sensitive patients reach only the top quarter of its layers, at ε = 3 each; fifty of
them signed a stricter bound. Six contributions are refused: expired, changed, copied, unsigned, too permissive, or signed by a
stranger. A signed ledger records who was admitted and what was spent; it is verified at the end. A table compares the private
model with one without these patients, and with one without privacy.

Spends: nothing real, the patients are simulated. Every call makes a new folder with a ledger.

Shows: ε so far, never the private loss: a loss without noise would reveal private data that no budget paid for.

Examples:

  lamina demo                     two minutes; the report is in runs/demo
  lamina demo --folder try --json one object for machines
"""

from __future__ import annotations

from pathlib import Path

from lamina.cli.command import Answer, command, option
from lamina.cli.terminal import progress_bar, say


@command()
def demo(
    folder: Path = option("where the report goes; a number is added if it exists", default=Path("runs/demo")),
    quick: bool = option("", hidden=True),
) -> Answer:
    from lamina.signals.demo.hospitals import make_new_folder
    from lamina.signals.demo.result import run_demo

    place = make_new_folder(folder)
    found = run_demo(place, quick=quick, say=say, progress_bar=progress_bar)
    return Answer(found.machine(place), found.table(place))
