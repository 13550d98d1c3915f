"""Other people's COSE implementations, in environments of their own: `make interop` installs them."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PYCOSE = ROOT / ".venv-pycose" / "bin" / "python"
NODE_MODULES = HERE / "node_modules"

collect_ignore = ["pycose_peer.py", "cddl_peer.py"]  # runs over there, not here

Answer = dict[str, Any]


@dataclass(frozen=True)
class Peer:
    """Somebody else's verifier and signer, asked by JSON on standard input."""

    command: tuple[str, ...]

    def __call__(self, action: str, asked: Sequence[Answer]) -> list[Answer]:
        done = subprocess.run(
            self.command,
            input=json.dumps([{"action": action, **each} for each in asked]),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        answers = json.loads(done.stdout)
        assert len(answers) == len(asked)
        return list(answers)


@pytest.fixture(scope="session")
def pycose() -> Path:
    """Python with pycose."""
    if not (PYCOSE.parents[1] / ".done").exists():
        pytest.skip("pycose is not installed: make interop")
    return PYCOSE


def _pycose(request: pytest.FixtureRequest) -> Peer:
    python: Path = request.getfixturevalue("pycose")
    return Peer((str(python), str(HERE / "pycose_peer.py")))


def _auth0(request: pytest.FixtureRequest) -> Peer:
    node = shutil.which("node")
    if node is None or not (NODE_MODULES / ".done").exists():
        pytest.skip("@auth0/cose is not installed: make interop, with node and npm")
    return Peer((node, str(HERE / "auth0_peer.mjs")))


_PEERS: dict[str, Callable[[pytest.FixtureRequest], Peer]] = {"pycose": _pycose, "auth0": _auth0}


@pytest.fixture(scope="session", params=sorted(_PEERS))
def peer(request: pytest.FixtureRequest) -> Peer:
    return _PEERS[request.param](request)
