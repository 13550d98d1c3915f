"""A small private run, and a release of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from trained_run import Trained, copied_run, hospital_run

from lamina.admit.keys import PrivateKey
from lamina.release.manifest import GatePolicy, make_release


@pytest.fixture(scope="session")
def key() -> PrivateKey:
    """The release key."""
    return PrivateKey.generate()


@pytest.fixture
def trained(tmp_path: Path) -> Trained:
    """A run and its ledger, which a test may change."""
    return copied_run(tmp_path)


@pytest.fixture
def release(trained: Trained, key: PrivateKey, tmp_path: Path) -> Path:
    """A release of it."""
    out = tmp_path / "release"
    with trained.open() as ledger:
        make_release(
            out, [trained.folder], ledger, key, gate=GatePolicy(generation_classes={"head": {"layers": ["4"]}})
        )
    return out


@pytest.fixture
def ward(tmp_path: Path) -> Trained:
    """A run on signed contributions."""
    return hospital_run(tmp_path)


@pytest.fixture
def served(ward: Trained, key: PrivateKey, tmp_path: Path) -> Path:
    with ward.open() as ledger:
        make_release(tmp_path / "out", [ward.folder], ledger, key, gate=GatePolicy(unstated_purposes=True))
    return tmp_path / "out"
