"""Makes `oracle` importable from every test of the engine, and prints the worst errors seen if asked."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if str(Path(__file__).parent) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """The models here are tiny: a second thread only waits. Tests of the noise use both."""
    if request.path.name.startswith("test_noise"):
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """LAMINA_WORST=1 prints, per test file, the largest relative difference between engine and oracle."""
    oracle = sys.modules.get("oracle")
    if oracle is None or os.environ.get("LAMINA_WORST") != "1":
        return
    terminalreporter.section("largest relative difference between engine and oracle")
    for family, worst in sorted(oracle.WORST.items()):
        terminalreporter.line(f"{family:<40} {worst:.1e}")
