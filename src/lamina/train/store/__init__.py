"""What survives a crash: the journal, the checkpoints, the lease, and files that are there whole or not at all."""

from __future__ import annotations

from lamina.train.store.checkpoint import Checkpoints, Snapshot
from lamina.train.store.journal import Journal
from lamina.train.store.lease import Lease

__all__ = ["Checkpoints", "Journal", "Lease", "Snapshot"]
