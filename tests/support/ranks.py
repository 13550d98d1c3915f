"""Programs that run as several ranks: started by `run_ranks`, joined by a file, ended by a timeout.

A program calls `joined()` first, and prints one JSON object at its end (`answer`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SUPPORT = Path(__file__).parent


def start_ranks(program: str, size: int, *arguments: str, store: Path) -> list[subprocess.Popen[str]]:
    """One process per rank of tests/support/PROGRAM, which meet in a new file `store`."""
    made = []
    for rank in range(size):
        told = {"RANK": str(rank), "WORLD_SIZE": str(size), "RANKS_STORE": str(store), "OMP_NUM_THREADS": "1"}
        told |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
        command = [sys.executable, str(SUPPORT / program), *arguments]
        pipe = subprocess.PIPE
        made.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env={**os.environ, **told}))
    return made


def end_ranks(processes: list[subprocess.Popen[str]], timeout: float = 200) -> list[tuple[int, str, str]]:
    """(exit code, output, errors) of every rank; whoever does not end in time is killed."""
    try:
        found = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    return [(process.returncode, out, err) for process, (out, err) in zip(processes, found, strict=True)]


def run_ranks(program: str, size: int, *arguments: str) -> list[dict[str, Any]]:
    """What each rank answers; all of them must end well."""
    with tempfile.TemporaryDirectory() as folder:
        ended = end_ranks(start_ranks(program, size, *arguments, store=Path(folder) / "store"))
    for code, _, err in ended:
        assert code == 0, "\n\n".join(each[2] for each in ended) or err
    return [json.loads(out.splitlines()[-1]) for _, out, _ in ended]


def joined() -> tuple[int, int]:
    """Join the group that this process was started in; (rank, size)."""
    torch.set_num_threads(1)
    rank, size, store = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["RANKS_STORE"]
    if size > 1:
        wait = timedelta(seconds=100)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=wait)
    return rank, size


def answer(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
