"""What goes wrong below a ledger."""

from __future__ import annotations

from lamina.ledger.errors import LedgerError


class StoreError(LedgerError):
    """A disk or a server that does not do what it must. What was acknowledged is there; what was asked now is not."""


class StoreLost(StoreError):
    """The server went away. Whether the last transaction was committed is not known; the ledger finds out."""


class StoreBusy(LedgerError):
    """Another writer holds the ledger for too long. Nothing was written."""


class Damaged(LedgerError):
    """A store that holds something else than what was written into it."""


class Pruned(LedgerError):
    """What was summed up at the retention horizon and is not there any more."""
