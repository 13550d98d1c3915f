"""`python benchmarks/utility`: runs the folder as the package that it is."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # a dependency may bring its own `benchmarks`
    import_module("utility.command").main()
