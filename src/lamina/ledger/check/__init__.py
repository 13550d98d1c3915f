"""The auditor: a ledger is replayed from its first leaf, and whatever is not as it must be is named."""

from __future__ import annotations

from lamina.ledger.check.problem import Problem
from lamina.ledger.check.report import Verification
from lamina.ledger.check.trust import Seen, Trust
from lamina.ledger.check.verify import verify

__all__ = ["verify", "Verification", "Problem", "Trust", "Seen"]
