"""Peak memory of one step, each measurement in a process of its own.

What is counted: the most memory that is resident during a step, less the parameters, the optimiser's state and the
batch, which every method needs. What is left holds gradients, activations, whatever a method keeps per sample *or
from step to step*, noise, and buffers outside torch, which a count of torch's own allocations would miss.

    peak = high-water mark of the resident set in a step of a second instance
           - resident set before that instance was built        (so code, threads and caches are warm and not counted)
           - its parameters, 2 AdamW moments, buffers and batch (known exactly)

Linux only: the mark is reset through /proc/self/clear_refs. glibc is told to give every block above 64 KiB back to the
kernel at once, and huge pages are off; the median of several steps is taken.

`python -m lamina.bench.memory WORKLOAD:VARIANT …` imports once, then forks for each measurement before any parallel
work has begun, and prints one JSON line per measurement.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import statistics
import subprocess
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

import torch

from lamina.bench.variants import build
from lamina.bench.workloads import Workload, workload

STEPS = 3
_PR_SET_THP_DISABLE = 41
_ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "0",
    "MALLOC_TOP_PAD_": "0",
    "MALLOC_ARENA_MAX": "1",
}


def supported() -> str | None:
    """Why memory cannot be measured here, or None."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        return f"the peak of the resident set cannot be reset here ({error})"
    return None


def measure(
    pairs: Iterable[tuple[str, str]], *, threads: int, seconds: float | None = None
) -> dict[tuple[str, str], int | str]:
    """Bytes for each (workload, variant), as far as `seconds` allow; a text says why there is none."""
    wanted = list(pairs)
    if problem := supported():
        return dict.fromkeys(wanted, problem)
    command = [sys.executable, "-m", "lamina.bench.memory", *(f"{w}:{v}" for w, v in wanted)]
    environment = {**os.environ, **_ALLOCATOR, "OMP_NUM_THREADS": str(threads)}
    missing = "the measuring process ended early"
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        printed, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        missing = f"not measured: the {seconds:.0f} s for memory were over"
        os.killpg(process.pid, signal.SIGKILL)  # the session is the measuring process and its forks
        printed, _ = process.communicate()
    found: dict[tuple[str, str], int | str] = dict.fromkeys(wanted, missing)
    for line in printed.splitlines():
        record = json.loads(line)
        found[record["workload"], record["variant"]] = record.get("bytes") or record["reason"]
    return found


def peak_of_step(workload_name: str, variant: str) -> int:
    """Bytes, in this process: call it in a fresh one."""
    each = workload(workload_name)
    known = state_bytes(each)
    first = build(each, variant)
    first()
    empty = _settled()
    step = build(each, variant)  # the first instance stays alive, so nothing of it can be used again
    step()
    peaks = []
    for _ in range(STEPS):
        _settled()
        Path("/proc/self/clear_refs").write_text("5")
        step()
        peaks.append(_status("VmHWM") - empty - known)
    return int(statistics.median(peaks))


def state_bytes(each: Workload) -> int:
    """Parameters, two AdamW moments of each trainable one, buffers, and the batch."""
    model = each.model()
    batch = {id(t): t for t in each.example()}  # an autoencoder's target is its input
    fixed = [*model.parameters(), *model.buffers(), *batch.values()]
    return sum(t.nbytes for t in fixed) + 2 * sum(p.nbytes for p in model.parameters() if p.requires_grad)


def _settled() -> int:
    """The resident set after everything that is free has gone back to the kernel."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return _status("VmRSS")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def _in_child(workload_name: str, variant: str) -> None:
    record: dict[str, object] = {"workload": workload_name, "variant": variant}
    try:
        ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            record["bytes"] = peak_of_step(workload_name, variant)
    except Exception as error:
        record["reason"] = f"{type(error).__name__}: {error}"
    print(json.dumps(record), flush=True)


def main(arguments: list[str]) -> None:
    for package in ("transformers", "opacus.optimizers"):
        with contextlib.suppress(ImportError):
            importlib.import_module(package)  # once, here, instead of in every child
    for argument in arguments:
        workload_name, variant = argument.split(":")
        child = os.fork()
        if child == 0:
            status = 1
            try:
                _in_child(workload_name, variant)
                status = 0
            finally:
                os._exit(status)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(sys.argv[1:])
