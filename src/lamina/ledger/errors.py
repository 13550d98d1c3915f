"""What goes wrong with a ledger, or with evidence from one."""

from __future__ import annotations

from lamina.errors import LaminaError


class LedgerError(LaminaError):
    """A ledger that cannot do what is asked of it, or is not what it claims to be."""


class NotVerified(LedgerError):
    """Evidence that does not hold: a signature, a proof, or a quorum that is not there."""
