"""Everything that runs on the pretend device, in a process of its own.

Autograd counts the devices at the first backward pass of a process, so that a device must be there before it; and no other
test should see one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("file", ["engine/device_steps.py", pytest.param("run/device_runs.py", marks=pytest.mark.slow)])
def test_on_the_pretend_device(file: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"tests/{file}"]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=inherited, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-20_000:]
