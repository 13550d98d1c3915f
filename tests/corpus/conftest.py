"""Tests of corpora."""

from __future__ import annotations

from training_fixtures import _every_ledger_verifies, _one_thread

__all__ = ["_every_ledger_verifies", "_one_thread"]
