"""A run on signed contributions, and a release of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from release_fixtures import key, release, trained
from trained_run import Trained, copied_hospital_run

from lamina.release.maker import make_release
from lamina.release.query import GatePolicy
from lamina.sign.keys import PrivateKey

__all__ = ["key", "release", "trained"]


@pytest.fixture
def ward(tmp_path: Path) -> Trained:
    """A run on signed contributions."""
    return copied_hospital_run(tmp_path)


@pytest.fixture
def served(ward: Trained, key: PrivateKey, tmp_path: Path) -> Path:
    with ward.open() as ledger:
        make_release(tmp_path / "out", [ward.folder], ledger, key, gate=GatePolicy(unstated_purposes=True))
    return tmp_path / "out"
