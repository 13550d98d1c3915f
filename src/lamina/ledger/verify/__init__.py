"""The auditor: a ledger is replayed from its first leaf, and whatever is not as it must be is named."""

from __future__ import annotations

from lamina.ledger.verify.report import Verification
from lamina.ledger.verify.tree_checks import Finding, KnownCheckpoint, Trust
from lamina.ledger.verify.verifier import verify

__all__ = ["verify", "Verification", "Finding", "Trust", "KnownCheckpoint"]
