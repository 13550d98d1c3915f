"""The models are compared with the engine's oracle."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ENGINE = str(Path(__file__).parent.parent / "engine")
if ENGINE not in sys.path:
    sys.path.insert(0, ENGINE)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The models here are tiny: a second thread only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
