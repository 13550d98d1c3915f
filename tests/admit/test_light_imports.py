"""`lamina keys`, `lamina attest` and `lamina admit` import neither torch nor scipy: hospitals run them without."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lamina.admit.signing import attest_folder
from lamina.plan.policy import Policy
from lamina.sign.key_ring import KeyRing
from lamina.sign.keys import PrivateKey

POLICY = """
[corpus]
origin = "clinic.example/ecg"
delta = 1e-5
[class.sensitive]
epsilon = 2.0
population = 100
"""
SCRIPT = """
import sys
from lamina.cli import main
try:
    main(sys.argv[1:])
finally:
    print([name for name in ("torch", "scipy") if name in sys.modules])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A policy, a key, a ring and one signed contribution."""
    (tmp_path / "policy.toml").write_text(POLICY)
    (tmp_path / "data" / "p1").mkdir(parents=True)
    (tmp_path / "data" / "p1" / "payload.csv").write_text("a,b\n1,2\n")
    (tmp_path / "data" / "contributions.csv").write_text("id,class\np1,sensitive\n")
    key, ring = PrivateKey.generate(), KeyRing()
    key.save(tmp_path / "h.key", None)
    ring.add(key.public, label="h")
    ring.save(tmp_path / "keys.json")
    assert len(list(attest_folder(tmp_path / "data", key, Policy.load(tmp_path / "policy.toml"), "sensitive"))) == 1
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        "keys list",
        "keys new other.key --no-passphrase",
        "attest policy.toml data --key h.key",
        "admit policy.toml data",
    ],
)
def test_neither_torch_nor_scipy_is_imported(folder: Path, command: str) -> None:
    line = [sys.executable, "-c", SCRIPT, *command.split()]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
