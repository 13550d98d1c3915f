"""`torchrun -m lamina train RUN.toml`: one run, one answer, and an exit code that says how it went."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from lamina.ledger.verify.verifier import verify

LAUNCH = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "lamina", "train"]


THREADS_AT_EXIT = """
import atexit, os, sys
def show():
    if "RANK" in os.environ:
        names = [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
        sys.stderr.write(f"threads at exit: {sorted(name for name in names if 'gloo' in name)}\\n")
atexit.register(show)
"""


def torchrun(project: Any, *words: str) -> tuple[int, str, str]:
    """Exit code, output and errors; every rank also says which threads of gloo are left when it ends."""
    project.write("sitecustomize.py", THREADS_AT_EXIT)
    path = os.pathsep.join(filter(None, [str(project.folder), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path}
    command = [sys.executable, *LAUNCH, str(project.folder / "first.toml"), *words]
    ended = subprocess.run(command, cwd=project.folder, env=environment, capture_output=True, text=True, timeout=240)
    return ended.returncode, ended.stdout, ended.stderr


def test_two_processes_train_one_run(project: Any) -> None:
    project.write("first.toml", f'{project.run}\n[evaluate]\nfunction = "{project.module}:evaluate"\non = "public"\n')
    code, out, err = torchrun(project, "--json")
    assert code == 0, err
    found = json.loads(out)  # one object: rank 1 says nothing
    assert found["steps"] == 6 and found["private"] and found["classes"]["clinical"]["epsilon"] <= 2.0
    assert err.count("step 6 of 6") == 1
    assert err.count("threads at exit: []") == 2  # one that is left may abort the process: Python has ended around it
    assert verify(project.folder / "runs" / "test.ledger.db").problem is None


@pytest.mark.slow
def test_a_refusal_is_said_once_and_ends_all_processes(project: Any) -> None:
    project.write("first.toml", project.run.replace("epsilon = 2.0", "epsilon = 9.0"))
    code, out, err = torchrun(project)
    assert code == 1 and out == ""
    assert err.count("allocate.above-policy-bound") == 1
    assert not (project.folder / "runs").exists()
