"""Time and peak memory of a private step: the whole measurement, with its files.

    python benchmarks/step.py [--quick] [--only resae --only tfae] [--out benchmarks/results]

Writes step.json (the object that `lamina bench --json` prints) and step.png. See docs/performance.md.
"""

from __future__ import annotations

import sys

from lamina.cli import main

if __name__ == "__main__":
    main(["bench", "--out", "benchmarks/results", *sys.argv[1:]])
