"""Prints the worst errors seen by the oracle if asked; `oracle` is importable from every test (pyproject)."""

from __future__ import annotations

import os
import sys
from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """LAMINA_WORST=1 prints, per test file, the largest relative difference between engine and oracle."""
    oracle = sys.modules.get("oracle")
    if oracle is None or os.environ.get("LAMINA_WORST") != "1":
        return
    terminalreporter.section("largest relative difference between engine and oracle")
    for family, worst in sorted(oracle.WORST.items()):
        terminalreporter.line(f"{family:<40} {worst:.1e}")
