"""Programs that run as several ranks: forked after their imports, joined by a file, ended by a timeout.

A program calls `spread(run)` at its end; each rank then runs `run(rank, size)` and prints one JSON object (`answer`).
The parent never computes anything: a forked child must not inherit threads.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SUPPORT = Path(__file__).parent


def end_ranks(
    program: str, size: int, *arguments: str, kill: tuple[int, float] | None = None, timeout: float = 200
) -> list[tuple[int, str, str]]:
    """Run tests/support/PROGRAM as so many ranks: (exit code, output, errors) of each. `kill`: which rank, and when."""
    with tempfile.TemporaryDirectory() as folder:
        told = {"WORLD_SIZE": str(size), "RANKS_FOLDER": folder, "OMP_NUM_THREADS": "1"}
        told |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
        told |= {} if kill is None else {"RANKS_KILL": f"{kill[0]} {kill[1]}"}
        command = [sys.executable, str(SUPPORT / program), *arguments]
        process = subprocess.Popen(command, env={**os.environ, **told}, start_new_session=True)
        try:
            assert process.wait(timeout) == 0
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        codes = json.loads(Path(folder, "codes").read_text())
        texts = [[Path(folder, f"{kind}{rank}").read_text() for kind in ("out", "err")] for rank in range(size)]
    return [(code, out, err) for code, (out, err) in zip(codes, texts, strict=True)]


def run_ranks(program: str, size: int, *arguments: str, timeout: float = 200) -> list[dict[str, Any]]:
    """What each rank answers; all of them must end well."""
    ended = end_ranks(program, size, *arguments, timeout=timeout)
    assert all(code == 0 for code, _, _ in ended), "\n\n".join(err for _, _, err in ended)
    return [json.loads(out.splitlines()[-1]) for _, out, _ in ended]


def spread(run: Callable[[int, int], None]) -> None:
    """Fork the ranks of this program, and note how each of them ended."""
    size, folder = int(os.environ["WORLD_SIZE"]), os.environ["RANKS_FOLDER"]
    children = []
    for rank in range(size):
        if (child := os.fork()) == 0:
            _run_as(rank, size, folder, run)
        children.append(child)
    if "RANKS_KILL" in os.environ:  # "rank seconds": that rank, so long after it began
        rank, seconds = os.environ["RANKS_KILL"].split()
        time.sleep(float(seconds))
        os.kill(children[int(rank)], signal.SIGKILL)  # not waited for yet, so the number is its own
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    Path(folder, "codes").write_text(json.dumps(codes))


def _run_as(rank: int, size: int, folder: str, run: Callable[[int, int], None]) -> None:
    for number, kind in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{kind}{rank}", os.O_WRONLY | os.O_CREAT, 0o600), number)
    code = 1
    try:
        torch.set_num_threads(1)
        if size > 1:
            wait, store = timedelta(seconds=100), f"file://{folder}/store"
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=wait)
        run(rank, size)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def answer(value: dict[str, Any]) -> None:
    """Print what a rank found, and leave the group with the others."""
    print(json.dumps(value), flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
