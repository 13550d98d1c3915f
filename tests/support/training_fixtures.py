"""Fixtures of every test that trains: one thread, and every ledger that a test leaves verifies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from run_state import number_seeds

from lamina.ledger.verify.verifier import verify


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The models here are tiny: a second thread only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _every_ledger_verifies(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test did to its runs, what they leave in a ledger is what an auditor would find."""
    if "tmp_path" not in request.fixturenames or "spend" in request.path.parts:
        yield
        return
    folder = request.getfixturevalue("tmp_path")
    yield
    for path in folder.rglob("*.ledger.db"):
        problem = verify(path, signatures=False).problem
        assert problem is None, problem


@pytest.fixture
def known_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seed of an attempt is a function of how many were opened before: two runs can be compared."""
    number_seeds(monkeypatch)
