"""Time and peak memory of a step.

Interleaved rounds with paired ratios, and the resident set in a process of its own.
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
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from lamina.bench.step_variants import build_step
from lamina.bench.workloads import Workload, find_workload

# Interleaved timing and paired ratios with bootstrap limits.
#
# The machine's speed drifts by more than the differences to be measured. So every round runs every variant once, in an
# order drawn anew, and a ratio is taken within the round; only ratios are averaged, never times.

_WARM_STEPS, _WARM_SECONDS = 26, 0.5

Step = Callable[[], None]
StepTimes = Mapping[str, NDArray[np.float64]]  # seconds per step; entry r of every variant belongs to round r


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedRatio:
    """Median of paired ratios with a two-sided 95 % bootstrap interval [low, high]."""

    median: float
    low: float
    high: float
    rounds: int

    def as_json(self) -> dict[str, float | int]:
        return {name: round(value, 4) for name, value in asdict(self).items()}


def paired_ratio(
    above: NDArray[np.float64], below: NDArray[np.float64], *, draws: int = 4_000, seed: int = 0
) -> PairedRatio:
    """Median of above/below per round; limits by resampling rounds.

    >>> import numpy as np
    >>> paired_ratio(np.full(20, 3.0), np.full(20, 2.0))
    PairedRatio(median=1.5, low=1.5, high=1.5, rounds=20)
    """
    ratios = above / below
    generator = np.random.default_rng(seed)
    index = generator.integers(0, len(ratios), size=(draws, len(ratios)))
    medians = np.median(ratios[index], axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return PairedRatio(median=float(np.median(ratios)), low=float(low), high=float(high), rounds=len(ratios))


def interleave(
    steps: Mapping[str, Step], *, rounds: int, budget: float, minimum: int = 5, slice_seconds: float = 0.05,
    tick: Callable[[int], None] | None = None, clock: Callable[[], float] = time.perf_counter,
) -> StepTimes:  # fmt: skip
    """`rounds` rounds of every step, or as many as `budget` seconds allow, at least `minimum`.

    A step shorter than `slice_seconds` is repeated within its turn, each variant by a count of its own, so that the
    clock and the first touch of cold caches do not decide. `clock` times the steps, `budget` is in seconds of the day.
    """
    repeats = {name: _repeats(step, slice_seconds, clock) for name, step in steps.items()}
    generator = np.random.default_rng(0)
    names = sorted(steps)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    started = time.perf_counter()
    collecting = gc.isenabled()
    gc.disable()
    try:
        for done in range(rounds):
            if done >= minimum and time.perf_counter() - started > budget:
                break
            for name in generator.permutation(names):
                step, count = steps[name], repeats[name]
                begin = clock()
                for _ in range(count):
                    step()
                seconds[name].append((clock() - begin) / count)
            gc.collect()
            if tick is not None:
                tick(done + 1)
    finally:
        if collecting:
            gc.enable()
    return {name: np.asarray(values) for name, values in seconds.items()}


def _repeats(step: Step, slice_seconds: float, clock: Callable[[], float]) -> int:
    """How often to repeat a step so that a turn lasts about `slice_seconds`, after a warm-up.

    Lamina looks closer at its first 24 steps than at later ones: short steps are warmed up until these are over.
    """
    begin = time.perf_counter()
    for _ in range(_WARM_STEPS):
        step()
        if time.perf_counter() - begin > _WARM_SECONDS:
            break
    begin = clock()
    step()
    return max(1, min(50, int(slice_seconds / max(clock() - begin, 1e-6))))


# Peak memory of one step, each measurement in a process of its own.
#
# What is counted: the most memory that is resident during a step, less the parameters, the optimiser's state and the
# batch, which every method needs. What is left holds gradients, activations, whatever a method keeps per sample *or
# from step to step*, noise, and buffers outside torch, which a count of torch's own allocations would miss.
#
#     peak = high-water mark of the resident set in a step of a second instance
#            - resident set before that instance was built        (so code, threads and caches are warm and not counted)
#            - its parameters, 2 AdamW moments, buffers and batch (known exactly)
#
# Linux only: the mark is reset through /proc/self/clear_refs. glibc is told to give every block above 64 KiB back to
# the kernel at once, and huge pages are off; the median of several steps is taken.
#
# `python -m lamina.bench.step_cost WORKLOAD:VARIANT …` imports once, then forks for each measurement before any
# parallel work has begun, and prints one JSON line per measurement.

MEASURED_STEPS = 3
_PR_SET_THP_DISABLE = 41
_ALLOCATOR_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "0",
    "MALLOC_TOP_PAD_": "0",
    "MALLOC_ARENA_MAX": "1",
}


def memory_unsupported_reason() -> str | None:
    """Why memory cannot be measured here, or None."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        return f"the peak of the resident set cannot be reset here ({error})"
    return None


def measure_memory(
    pairs: Iterable[tuple[str, str]], *, threads: int, seconds: float | None = None
) -> dict[tuple[str, str], int | str]:
    """Bytes for each (workload, variant), as far as `seconds` allow; a text says why there is none."""
    wanted = list(pairs)
    if problem := memory_unsupported_reason():
        return dict.fromkeys(wanted, problem)
    command = [sys.executable, "-m", "lamina.bench.step_cost", *(f"{w}:{v}" for w, v in wanted)]
    environment = {**os.environ, **_ALLOCATOR_ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}
    missing = "the measuring process ended early"
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
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
    each = find_workload(workload_name)
    known = state_bytes(each)
    first = build_step(each, variant)
    first()
    empty = _settled_resident_bytes()
    step = build_step(each, variant)  # the first instance stays alive, so nothing of it can be used again
    step()
    peaks = []
    for _ in range(MEASURED_STEPS):
        _settled_resident_bytes()
        Path("/proc/self/clear_refs").write_text("5")
        step()
        peaks.append(_proc_status("VmHWM") - empty - known)
    return int(statistics.median(peaks))


def state_bytes(each: Workload) -> int:
    """Parameters, two AdamW moments of each trainable one, buffers, and the batch."""
    model = each.model()
    batch = {id(t): t for t in each.example()}  # an autoencoder's target is its input
    fixed = [*model.parameters(), *model.buffers(), *batch.values()]
    return sum(t.nbytes for t in fixed) + 2 * sum(p.nbytes for p in model.parameters() if p.requires_grad)


def _settled_resident_bytes() -> int:
    """The resident set after everything that is free has gone back to the kernel."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return _proc_status("VmRSS")


def _proc_status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def _measure_in_child(workload_name: str, variant: str) -> None:
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
                _measure_in_child(workload_name, variant)
                status = 0
            finally:
                os._exit(status)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(sys.argv[1:])
