"""A release of a small run, served in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from release_fixtures import key, release, trained
from served_net import Client, Net
from starlette.testclient import TestClient
from trained_run import Trained

from lamina.ledger.reader import LedgerReader
from lamina.release.gate import ReleaseGate
from lamina.serve.app import Service, make_app
from lamina.serve.inference import Inference, InputForm
from lamina.sign.keys import PrivateKey

__all__ = ["key", "release", "trained"]


@pytest.fixture
def client(release: Path, trained: Trained, key: PrivateKey) -> Iterator[Client]:
    """Makes a client of a service; its settings are those of `Service`."""
    with ExitStack() as opened:

        def make(*, model: Any = Net, form: InputForm | None = None, **settings: Any) -> TestClient:
            def reader() -> LedgerReader:
                return opened.enter_context(LedgerReader.read_only(trained.ledger))

            settings.setdefault("ledger", reader())
            gate = ReleaseGate(release, key.public, ledger=reader())
            inference = None if model is None else Inference(gate, model, form or InputForm())
            service = Service(**{"folder": release, "gate": gate, "inference": inference, **settings})
            opened.callback(service.close)
            return TestClient(make_app(service), base_url="http://localhost", raise_server_exceptions=True)

        yield make


@pytest.fixture
def query() -> dict[str, Any]:
    """A query to all layers that the gate allows."""
    rights = {"classes": ["clinical", "sensitive", "open"], "max_epsilon": 9, "min_noise_multiplier": 0}
    return {"rights": {**rights, "purpose": "care"}}
