"""Tests of runs share one small problem (tests/support/problem.py) and one way to kill it (killing.py)."""

from __future__ import annotations

from training_fixtures import _every_ledger_verifies, _one_thread, known_seeds

__all__ = ["_every_ledger_verifies", "_one_thread", "known_seeds"]
