"""Tests of spend share ledgers and plans (tests/support/keeping.py)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from keeping import passing_book
from training_fixtures import _every_ledger_verifies, _one_thread

from lamina.ledger.spend_ledger import SpendLedger

__all__ = ["_every_ledger_verifies", "_one_thread"]


@pytest.fixture
def book() -> Iterator[SpendLedger]:
    with passing_book() as made:
        yield made
