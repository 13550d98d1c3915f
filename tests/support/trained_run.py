"""A run that was trained, and its ledger, for tests of what leaves the house."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import lamina
from lamina.admit.keys import PrivateKey
from lamina.ledger.corpus_terms import ledger_key_path
from lamina.ledger.writer import Ledger


@dataclass(frozen=True)
class Trained:
    """Where a run and its ledger are."""

    folder: Path
    outcome: lamina.Outcome
    name: str = "example.org-ecg.ledger.db"

    @property
    def ledger(self) -> Path:
        return self.folder.parent / self.name

    def open(self) -> Ledger:
        """The ledger, to append to and sign."""
        return Ledger.open(self.ledger, PrivateKey.load(ledger_key_path(self.ledger), None))
