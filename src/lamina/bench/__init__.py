"""What a private step costs, measured against the plain step and against peers (`lamina bench`, `make bench`).

This folder sits just below `cli` in the import order. It is part of the package, not of `benchmarks/`, so that
`lamina bench` works wherever Lamina is installed; `benchmarks/step.py` is the same run with files written.
"""

from __future__ import annotations
