"""Tests of the book share ledgers and plans (keeping.py)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if str(Path(__file__).parent) not in sys.path:  # last: other folders have files of the same names
    sys.path.extend([str(Path(__file__).parent), str(Path(__file__).parents[2] / "ledger")])

from keeping import passing_book

from lamina.spend.spend_ledger import SpendLedger


@pytest.fixture
def book() -> Iterator[SpendLedger]:
    with passing_book() as made:
        yield made
