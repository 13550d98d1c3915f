"""Measure all workloads and put the result together."""

from __future__ import annotations

import datetime
import gc
import importlib.metadata
import importlib.util
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lamina.bench import memory, peers
from lamina.bench.result import ROUTED, Measured, assemble
from lamina.bench.timing import Step, Times, interleave
from lamina.bench.variants import BASELINE, LAMINA, ROUTING, build
from lamina.bench.workloads import WORKLOADS, Workload, workload

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How long to measure. `seconds` is for the whole benchmark; None measures every round."""

    workloads: tuple[str, ...] = tuple(WORKLOADS)
    rounds: int = 25
    minimum: int = 20
    seconds: float | None = None
    threads: int = 2
    peers: bool = True
    peer_memory: bool = True
    memory: bool = True

    @classmethod
    def quick(cls, workloads: tuple[str, ...] = tuple(WORKLOADS), threads: int = 2) -> Settings:
        """Under five minutes for all six: fewer rounds, wider limits, memory of Lamina only."""
        return cls(
            workloads=workloads, rounds=20, minimum=3, seconds=220.0, threads=threads, peer_memory=False
        )

    def variants(self, name: str) -> list[str]:
        """Everything timed on a workload, the baseline first."""
        routing = list(ROUTING) if name in ROUTED else []
        return [BASELINE, *LAMINA, *routing, *(peers.PEERS if self.peers else ())]


def run(settings: Settings, say: Say = lambda text: None) -> dict[str, Any]:
    """The result object of `lamina.bench.result`; `say` gets one line of progress at a time."""
    started = time.perf_counter()
    chosen = [workload(name) for name in settings.workloads]
    threads_before = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        peaks = _memory(settings, chosen, say)
        measured = []
        for index, each in enumerate(chosen):
            left = None
            if settings.seconds is not None:
                left = (settings.seconds - (time.perf_counter() - started)) / (len(chosen) - index)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # peers warn; the figures are what matters here
                measured.append(_one(settings, each, peaks, left, say))
    finally:
        torch.set_num_threads(threads_before)
    return assemble(measured, _about(settings, time.perf_counter() - started))


def _memory(settings: Settings, chosen: Iterable[Workload], say: Say) -> dict[tuple[str, str], int | str]:
    if not settings.memory:
        return {}
    with_peers = settings.peers and settings.peer_memory and peers.missing() is None
    variants = [BASELINE, *LAMINA, *(peers.PEERS if with_peers else ())]
    pairs = [(each.name, variant) for variant in variants for each in chosen if not each.missing()]
    say(f"peak memory: {len(pairs)} steps, each in a process of its own")
    seconds = None if settings.seconds is None else settings.seconds / 2
    return memory.measure(pairs, threads=settings.threads, seconds=seconds)


def _one(
    settings: Settings,
    each: Workload,
    peaks: dict[tuple[str, str], int | str],
    seconds: float | None,
    say: Say,
) -> Measured:
    reasons: dict[str, str] = {}
    bytes_of: dict[str, int] = {}
    for (name, variant), found in peaks.items():
        if name == each.name:
            if isinstance(found, int):
                bytes_of[variant] = found
            else:
                reasons[f"{variant} memory"] = found
    began = time.perf_counter()
    steps = _build(settings, each, reasons, say)
    times: Times | None = None
    if BASELINE in steps:
        budget = float("inf") if seconds is None else seconds - (time.perf_counter() - began)
        times = interleave(
            steps,
            rounds=settings.rounds,
            budget=budget,
            minimum=settings.minimum,
            tick=lambda done: say(f"{each.name}: round {done} of at most {settings.rounds}"),
        )
    steps.clear()
    gc.collect()
    return Measured(name=each.name, times=times, memory=bytes_of, reasons=reasons)


def _build(settings: Settings, each: Workload, reasons: dict[str, str], say: Say) -> dict[str, Step]:
    """Every variant that can run here, warmed up; `reasons` learns about the others."""
    steps: dict[str, Step] = {}
    for variant in settings.variants(each.name):
        problem = each.missing() or (peers.missing() if variant in peers.PEERS else None)
        if problem is None:
            say(f"{each.name}: building {variant}")
            try:
                steps[variant] = build(each, variant)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
        if problem is not None:
            reasons[variant] = problem
    return steps


def failures(result: dict[str, Any]) -> list[str]:
    """What Lamina itself could not do, one line each: a benchmark with such a line has failed."""
    own = {BASELINE, *LAMINA, *ROUTING}
    return [
        f"{name}: {variant}: {reason}"
        for name, found in result["workloads"].items()
        for variant, reason in found["reasons"].items()
        if variant in own and not WORKLOADS[name].missing()
    ]


def _about(settings: Settings, seconds: float) -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "threads": settings.threads,
        "cores": os.cpu_count(),
        "processor": _processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "opacus": _version("opacus"),
        "transformers": _version("transformers"),
        "rounds": settings.rounds,
        "time": "paired ratios within interleaved rounds; time_ratio = upper 95 % bootstrap limit of the median",
        "memory": "peak resident set of a step less parameters, AdamW moments and batch, in a process of its own",
    }


def _version(package: str) -> str | None:
    return importlib.metadata.version(package) if importlib.util.find_spec(package) else None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
