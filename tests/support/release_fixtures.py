"""Fixtures of every test of what leaves the house: a release key, a run, a release of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from trained_run import Trained, copied_run

from lamina.release.maker import make_release
from lamina.release.query import GatePolicy
from lamina.sign.keys import PrivateKey


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
    gate = GatePolicy(generation_classes={"head": {"layers": ["4"]}})
    with trained.open() as ledger:
        make_release(tmp_path / "release", [trained.folder], ledger, key, gate=gate)
    return tmp_path / "release"
