"""Run the benchmark over all workloads, put the result together, and draw it."""

from __future__ import annotations

import contextlib
import datetime
import gc
import importlib.metadata
import importlib.util
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lamina.bench import step_cost, step_variants
from lamina.bench.step_cost import PairedRatio, Step, StepTimes, interleave, paired_ratio
from lamina.bench.step_variants import BASELINE, COMPILED, LAMINA, PEERS, ROUTING, TORCH_RULES, UNITS, build_step
from lamina.bench.workloads import WORKLOADS, Workload, find_workload
from lamina.engine import native
from lamina.errors import LaminaError

# The outcome of a benchmark as one JSON object. The keys are a contract: machines read them.
#
# `time_ratio` is the *upper* 95 % bootstrap limit of Lamina's box step over the plain step, so noise cannot flatter it;
# a peer's figure is its median. `memory_ratio` is the quotient of the peaks. Everything else is under `detail`.

ROUTING_WORKLOADS = ("resae", "tfae")  # the two deep workloads on which routing is measured
UNIT_WORKLOADS = ("resae", "cnn")  # on which patients of one to six records are compared with records by themselves


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadResult:
    """What was found on one workload; `reasons` says for each missing variant why it is missing."""

    name: str
    times: StepTimes | None
    memory: Mapping[str, int]
    reasons: Mapping[str, str] = field(default_factory=dict)
    compile_seconds: float | None = None

    def time(self, variant: str, baseline: str = BASELINE) -> PairedRatio | None:
        if self.times is None or not {variant, baseline} <= self.times.keys():
            return None
        return paired_ratio(self.times[variant], self.times[baseline])

    def upper(self, variant: str, baseline: str = BASELINE) -> float | None:
        ratio = self.time(variant, baseline)
        return None if ratio is None else round(ratio.high, 4)

    def memory_ratio(self, variant: str) -> float | None:
        if variant not in self.memory or BASELINE not in self.memory:
            return None
        return round(self.memory[variant] / self.memory[BASELINE], 4)

    def as_json(self) -> dict[str, Any]:
        detail: dict[str, Any] = {
            name: {
                "milliseconds": round(1_000 * statistics.median(values.tolist()), 3),
                "time": None if (ratio := self.time(name)) is None else ratio.as_json(),
                "peak_bytes": self.memory.get(name),
                "memory_ratio": self.memory_ratio(name),
            }
            for name, values in sorted((self.times or {}).items())
        }
        return {
            "time_ratio": self.upper("box"),
            "memory_ratio": self.memory_ratio("box"),
            "joint": {"time_ratio": self.upper("joint"), "memory_ratio": self.memory_ratio("joint")},
            "torch_rules": {name: self.upper(f"{name}_torch") for name in LAMINA},
            "compiled": {
                "time_ratio": self.upper("box_compiled"),
                "joint": self.upper("joint_compiled"),
                "of_torch_rules": self.upper("box_compiled", "box_torch"),
                "compile_seconds": self.compile_seconds,
            },
            "peers": {name: None if (r := self.time(name)) is None else round(r.median, 4) for name in PEERS},
            "reasons": dict(self.reasons),
            "detail": detail,
        }


def benchmark_json(measured: list[WorkloadResult], about: Mapping[str, Any]) -> dict[str, Any]:
    """The whole result. A figure that could not be measured anywhere is null."""
    overhead = _largest_known([m.upper("masked", "box") for m in measured])
    return {
        **_summary_json(measured, "box"),
        "joint": _summary_json(measured, "joint"),
        "torch_rules": _summary_json(measured, "box_torch"),
        "compiled": {**_summary_json(measured, "box_compiled"), "joint": _summary_json(measured, "joint_compiled")},
        "units": {
            "ratio": _largest_known([m.upper("patients", "box") for m in measured]),
            "detail": {
                m.name: None if (ratio := m.time("patients", "box")) is None else ratio.as_json()
                for m in measured
                if m.name in UNIT_WORKLOADS
            },
        },
        "workloads": {m.name: m.as_json() for m in measured},
        "routing": {
            "mask_overhead": None if overhead is None else round(overhead - 1, 4),
            "restricted_ratio": _largest_known([m.upper("restricted", "box") for m in measured]),
            "detail": {
                m.name: {
                    "mask": None if (mask := m.time("masked", "box")) is None else mask.as_json(),
                    "restricted": None if (top := m.time("restricted", "box")) is None else top.as_json(),
                }
                for m in measured
                if m.name in ROUTING_WORKLOADS
            },
        },
        "about": dict(about),
    }


def _summary_json(measured: list[WorkloadResult], variant: str) -> dict[str, float | None]:
    times = [t for m in measured if (t := m.upper(variant)) is not None]
    return {
        "median_time_ratio": round(statistics.median(times), 4) if times else None,
        "worst_time_ratio": max(times, default=None),
        "worst_memory_ratio": _largest_known([m.memory_ratio(variant) for m in measured]),
    }


def _largest_known(values: list[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


ReportProgress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """How long to measure. `seconds` is for the whole benchmark; None measures every round.

    With `processor_time` a step's time is what it used of all cores: for a machine that other work shares.
    """

    workloads: tuple[str, ...] = tuple(WORKLOADS)
    rounds: int = 25
    minimum: int = 20
    seconds: float | None = None
    threads: int = 2
    peer_memory: bool = True
    memory: bool = True
    compiled: bool = True
    processor_time: bool = False

    def variants(self, name: str) -> list[str]:
        """Everything timed on a workload, the baseline first."""
        routing = list(ROUTING) if name in ROUTING_WORKLOADS else []
        units = list(UNITS) if name in UNIT_WORKLOADS else []
        compiled = list(COMPILED) if self.compiled else []
        return [BASELINE, *LAMINA, *TORCH_RULES, *compiled, *units, *routing, *PEERS]


QUICK: Mapping[str, Any] = {"rounds": 20, "minimum": 3, "seconds": 220.0, "peer_memory": False, "compiled": False}
"""Under five minutes for all six: fewer rounds, wider limits, memory of Lamina only, no compiled step."""


def run_benchmark(settings: BenchSettings, say: ReportProgress = lambda text: None) -> dict[str, Any]:
    """The result object of `lamina.bench.benchmark`; `say` gets one line of progress at a time."""
    started = time.perf_counter()
    chosen = [find_workload(name) for name in settings.workloads]
    threads_before = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        peaks = _measure_peaks(settings, chosen, say)
        measured = []
        for index, each in enumerate(chosen):
            left = None
            if settings.seconds is not None:
                left = (settings.seconds - (time.perf_counter() - started)) / (len(chosen) - index)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # peers warn; the figures are what matters here
                measured.append(_measure_workload(settings, each, peaks, left, say))
    finally:
        torch.set_num_threads(threads_before)
    return benchmark_json(measured, _about_json(settings, time.perf_counter() - started))


def _measure_peaks(
    settings: BenchSettings, chosen: Iterable[Workload], say: ReportProgress
) -> dict[tuple[str, str], int | str]:
    if not settings.memory:
        return {}
    with_peers = settings.peer_memory and step_variants.opacus_missing() is None
    variants = [BASELINE, *LAMINA, *(step_variants.PEERS if with_peers else ())]
    pairs = [(each.name, variant) for variant in variants for each in chosen if not each.missing()]
    say(f"peak memory: {len(pairs)} steps, each in a process of its own")
    seconds = None if settings.seconds is None else settings.seconds / 2
    return step_cost.measure_memory(pairs, threads=settings.threads, seconds=seconds)


def _measure_workload(
    settings: BenchSettings, each: Workload, peaks: dict[tuple[str, str], int | str], seconds: float | None,
    say: ReportProgress,
) -> WorkloadResult:  # fmt: skip
    mine = {variant: found for (name, variant), found in peaks.items() if name == each.name}
    bytes_of = {variant: found for variant, found in mine.items() if isinstance(found, int)}
    reasons = {f"{variant} memory": found for variant, found in mine.items() if isinstance(found, str)}
    began = time.perf_counter()
    steps, compiling = _build_steps(settings, each, reasons, say)
    times: StepTimes | None = None
    if BASELINE in steps:
        budget = float("inf") if seconds is None else seconds - (time.perf_counter() - began)
        times = interleave(
            steps,
            rounds=settings.rounds,
            budget=budget,
            minimum=settings.minimum,
            tick=lambda done: say(f"{each.name}: round {done} of at most {settings.rounds}"),
            clock=time.process_time if settings.processor_time else time.perf_counter,
        )
    steps.clear()
    gc.collect()
    return WorkloadResult(name=each.name, times=times, memory=bytes_of, reasons=reasons, compile_seconds=compiling)


def _build_steps(
    settings: BenchSettings, each: Workload, reasons: dict[str, str], say: ReportProgress
) -> tuple[dict[str, Step], float | None]:
    """Every variant that can run here, warmed up, and the seconds of compiling; `reasons` learns about the others."""
    steps: dict[str, Step] = {}
    compiling = None
    for variant in settings.variants(each.name):
        problem = each.missing() or (step_variants.opacus_missing() if variant in step_variants.PEERS else None)
        if problem is None:
            say(f"{each.name}: building {variant}")
            began = time.perf_counter()
            try:
                steps[variant] = build_step(each, variant)
                compiling = round(time.perf_counter() - began, 1) if variant == "box_compiled" else compiling
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
        if problem is not None:
            reasons[variant] = problem
    return steps, compiling


def lamina_failures(result: dict[str, Any]) -> list[str]:
    """What Lamina itself could not do, one line each: a benchmark with such a line has failed."""
    own = {BASELINE, *LAMINA, *TORCH_RULES, *UNITS, *ROUTING}
    return [
        f"{name}: {variant}: {reason}"
        for name, found in result["workloads"].items()
        for variant, reason in found["reasons"].items()
        if variant in own and not WORKLOADS[name].missing()
    ]


def _about_json(settings: BenchSettings, seconds: float) -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "threads": settings.threads,
        "cores": os.cpu_count(),
        "processor": _processor(),
        "kernels": native.missing() or native.kind(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "opacus": _version("opacus"),
        "transformers": _version("transformers"),
        "rounds": settings.rounds,
        "clock": "processor" if settings.processor_time else "wall",
        "time": "paired ratios within interleaved rounds; time_ratio = upper 95 % bootstrap limit of the median",
        "memory": "peak resident set of a step less parameters, AdamW moments and batch, in a process of its own",
    }


def _version(package: str) -> str | None:
    return importlib.metadata.version(package) if importlib.util.find_spec(package) else None


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


VARIANT_LABELS = {
    "box": "Lamina, box",
    "joint": "Lamina, joint",
    "box_torch": "Lamina, box, torch rules",
    "joint_torch": "Lamina, joint, torch rules",
    "box_compiled": "Lamina, box, compiled",
    "joint_compiled": "Lamina, joint, compiled",
    "opacus_hooks": "Opacus hooks",
    "opacus_per_layer": "Opacus per layer",
    "opacus_ghost": "Opacus ghost",
}
_COLOURS = ("#0b6e4f", "#6bbf9c", "#5b7f95", "#a8c0cc", "#3f4a8a", "#9aa3d6", "#8c2d04", "#d94801", "#fdae6b")


def draw_benchmark(result: dict[str, Any], path: Path) -> Path:
    """Write a PNG (or SVG, PDF by suffix) and return its path."""
    try:
        import matplotlib
    except ImportError:
        problem = "matplotlib is not installed"
        raise LaminaError("bench.matplotlib-missing", problem, "pip install 'lamina[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    workloads = list(result["workloads"])
    figure, axes = plt.subplots(2, 1, figsize=(9.5, 8.5), sharex=True, layout="constrained")
    width = 0.8 / len(VARIANT_LABELS)
    for row, axis in enumerate(axes):
        for position, (variant, label) in enumerate(VARIANT_LABELS.items()):
            heights = [_bar_height(result["workloads"][name], variant, row) for name in workloads]
            places = [index + (position - (len(VARIANT_LABELS) - 1) / 2) * width for index in range(len(workloads))]
            bars = axis.bar(places, heights, width, label=label, color=_COLOURS[position])
            axis.bar_label(bars, [f"{h:.3g}" if h else "–" for h in heights], fontsize=6, padding=2, rotation=90)
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_yscale("log")
        axis.grid(axis="y", which="both", alpha=0.25)
    axes[0].set_ylabel("time of a step / plain step")
    axes[1].set_ylabel("peak memory / plain step")
    figure.legend(*axes[0].get_legend_handles_labels(), ncols=4, fontsize=8, loc="outside lower center")
    axes[1].set_xticks(range(len(workloads)), workloads)
    about = result["about"]
    figure.suptitle(f"Cost of a private step: medians, {about['threads']} threads, torch {about['torch']}", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _bar_height(found: dict[str, Any], variant: str, row: int) -> float:
    detail = found["detail"].get(variant) or {}
    if row == 1:
        return float(detail.get("memory_ratio") or 0.0)
    return float((detail.get("time") or {}).get("median") or 0.0)
