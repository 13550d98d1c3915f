"""A release of a small run, served in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from served_net import Client, Net
from starlette.testclient import TestClient
from trained_run import Trained, copied_run

from lamina.admit.keys import PrivateKey
from lamina.ledger.reader import LedgerReader
from lamina.release.gate import ReleaseGate
from lamina.release.manifest import GatePolicy, make_release
from lamina.serve.app import Service, make_app
from lamina.serve.inference import Inference, InputForm


@pytest.fixture(scope="session")
def key() -> PrivateKey:
    """The release key."""
    return PrivateKey.generate()


@pytest.fixture
def trained(tmp_path: Path) -> Trained:
    return copied_run(tmp_path)


@pytest.fixture
def release(trained: Trained, key: PrivateKey, tmp_path: Path) -> Path:
    with trained.open() as ledger:
        gate = GatePolicy(generation_classes={"head": {"layers": ["4"]}})
        make_release(tmp_path / "release", [trained.folder], ledger, key, gate=gate)
    return tmp_path / "release"


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
