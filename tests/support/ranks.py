"""Programs that run as several ranks: forked after their imports, joined by a file, ended by a timeout.

A program calls `spread(run)` at its end; each rank then runs `run(rank, size)` and prints one JSON object (`answer`).
The parent never computes anything: a forked child must not inherit threads.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SUPPORT = Path(__file__).parent


def end_ranks(program: str, size: int, *arguments: str, timeout: float = 200) -> list[tuple[int, str, str]]:
    """Run tests/support/PROGRAM as so many ranks: (exit code, output, errors) of each."""
    with tempfile.TemporaryDirectory() as folder:
        codes = _run_program(program, size, arguments, folder, timeout)
        texts = [[Path(folder, f"{kind}{rank}").read_text() for kind in ("out", "err")] for rank in range(size)]
    return [(code, out, err) for code, (out, err) in zip(codes, texts, strict=True)]


def kill_at_random(
    program: str, size: int, commands: Sequence[str], *, kills: int, seed: int, timeout: float = 200
) -> list[list[dict[str, Any]]]:
    """Run each command until one rank of it was killed, perhaps several times, at random instants; then let it finish.

    The first command is let finish at once: its duration is that of all. Returns what each rank of each command answered.
    Commands that are left over once `kills` ranks were killed are not run.
    """
    with tempfile.TemporaryDirectory() as folder:
        told = json.dumps({"commands": list(commands), "kills": kills, "seed": seed})
        found: list[list[dict[str, Any]]] = _run_program(program, size, (told,), folder, timeout, RANKS_KILLS=told)
    return found


def _run_program(
    program: str, size: int, arguments: Sequence[str], folder: str, timeout: float, **told: str
) -> list[Any]:
    """What `spread` answers in a process of its own, which is ended after a while."""
    told |= {"WORLD_SIZE": str(size), "RANKS_FOLDER": folder, "OMP_NUM_THREADS": "1"}
    told |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(SUPPORT / program), *arguments]
    process = subprocess.Popen(command, env={**os.environ, **told}, start_new_session=True)
    try:
        assert process.wait(timeout) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    answer: list[Any] = json.loads(Path(folder, "answer").read_text())
    return answer


def run_ranks(program: str, size: int, *arguments: str, timeout: float = 200) -> list[dict[str, Any]]:
    """What each rank answers; all of them must end well."""
    ended = end_ranks(program, size, *arguments, timeout=timeout)
    assert all(code == 0 for code, _, _ in ended), "\n\n".join(err for _, _, err in ended)
    return [json.loads(out.splitlines()[-1]) for _, out, _ in ended]


def spread(run: Callable[[int, int], None]) -> None:
    """Fork the ranks of this program, and note how each of them ended."""
    size, folder = int(os.environ["WORLD_SIZE"]), os.environ["RANKS_FOLDER"]
    if "RANKS_KILLS" in os.environ:
        answer: list[Any] = _kill(run, size, folder, **json.loads(os.environ["RANKS_KILLS"]))
    else:
        answer, _ = _generation(run, size, folder)
    Path(folder, "answer").write_text(json.dumps(answer))


def _generation(
    run: Callable[[int, int], None], size: int, folder: str, kill: tuple[int, float] | None = None
) -> tuple[list[int], float]:
    """Exit codes of ranks that run once, and seconds. `kill`: which rank, and when."""
    children, began = [], time.monotonic()
    for rank in range(size):
        if (child := os.fork()) == 0:
            _run_as(rank, size, folder, run)
        children.append(child)
    if kill is not None:
        time.sleep(kill[1])
        os.kill(children[kill[0]], signal.SIGKILL)  # not waited for yet, so the number is its own
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    Path(folder, "store").unlink(missing_ok=True)
    return codes, time.monotonic() - began


def _kill(
    run: Callable[[int, int], None], size: int, folder: str, commands: list[str], kills: int, seed: int
) -> list[Any]:
    chance, duration, done, answers = random.Random(seed), 0.0, 0, []
    for number, command in enumerate(commands):
        if done >= kills:
            break
        sys.argv[1:] = [command]
        for _ in range(chance.randint(1, 3) if number else 0):
            victim = chance.randrange(size)
            codes, _ = _generation(run, size, folder, (victim, chance.uniform(0.1 * duration, duration)))
            killed = codes[victim] == -signal.SIGKILL
            others = [code for rank, code in enumerate(codes) if rank != victim]
            assert all(code in ((0, 1) if killed else (0,)) for code in others)  # the others stop by themselves
            done += killed
            if done == kills:
                break
        codes, seconds = _generation(run, size, folder)
        assert codes == [0] * size, "\n\n".join(Path(folder, f"err{rank}").read_text() for rank in range(size))
        duration = duration or seconds
        texts = [Path(folder, f"out{rank}").read_text() for rank in range(size)]
        answers.append([json.loads(text.splitlines()[-1]) for text in texts])
    assert done == kills, "the runs end before a rank can be killed"
    return answers


def _run_as(rank: int, size: int, folder: str, run: Callable[[int, int], None]) -> None:
    for number, kind in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{kind}{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
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
