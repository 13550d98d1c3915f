"""Measure time and peak memory of a private step on this machine, against an ordinary step and Opacus.

Spends nothing: the data is made up. Writes only with --out.

Ratios are paired within interleaved rounds. time_ratio is the upper 95 % bootstrap limit. A peer that cannot run is null, with the
reason beside it.

Examples:

  lamina bench --quick
  lamina bench --only resae --out results
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lamina.cli.command import Answer, command, option, table
from lamina.cli.terminal import err, print_note, print_refusal, refusal_json
from lamina.errors import LaminaError


def _workload_names() -> Iterable[str]:
    from lamina.bench.workloads import WORKLOADS

    return WORKLOADS


@command()
def bench(
    quick: bool = option("about five minutes; fewer rounds, wider limits"),
    only: list[str] = option("a workload, such as resae; repeatable; a wrong name lists all", suggest=_workload_names),
    rounds: int | None = option("rounds per workload, all of them measured", min=1),
    threads: int = option("torch threads", default=2),
    processor_time: bool = option("compare processor time, not the clock: for a busy machine, best with --threads 1"),
    to: Path | None = option("folder for step.json and step.png", "--out", metavar="DIR"),
) -> Answer:
    from lamina.bench.benchmark import QUICK, BenchSettings, draw_benchmark, lamina_failures, run_benchmark
    from lamina.bench.step_variants import opacus_missing
    from lamina.bench.workloads import WORKLOADS, find_workload

    names = tuple(find_workload(name).name for name in only or WORKLOADS)
    length: dict[str, Any] = dict(QUICK) if quick else {}
    length = length if rounds is None else {"rounds": rounds, "minimum": rounds}
    if reason := opacus_missing():
        print_note(f"peers are left out: {reason}")
    with err.status("measuring") as status:
        settings = BenchSettings(workloads=names, threads=threads, processor_time=processor_time, **length)
        result = run_benchmark(settings, say=status.update)
    if to is not None:
        to.mkdir(parents=True, exist_ok=True)
        text = json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False)
        (to / "step.json").write_text(f"{text}\n", encoding="utf-8")
        print_note(f"wrote {to / 'step.json'}")
        try:
            print_note(f"wrote {draw_benchmark(result, to / 'step.png')}")
        except LaminaError as error:
            print_note(f"no picture: {error}")
    if problems := lamina_failures(result):
        problem = f"Lamina could not run every workload: {'; '.join(problems)}"
        refused = LaminaError("bench.workload-failed", problem, "see the reasons beside the figures")
        print_refusal(refused)
        result |= refusal_json(refused)  # one object, also where it failed
    return Answer(result, _ratios(result), *_summary(result), ok=not problems)


def _ratios(result: dict[str, Any]) -> str:
    from lamina.bench.benchmark import VARIANT_LABELS

    rows = [["time / plain step", *result["workloads"]]]
    figures = [("Lamina, box (upper limit)", "box", "high")]
    figures += [(label, variant, "median") for variant, label in VARIANT_LABELS.items()]
    for label, variant, field in figures:
        times = [(w["detail"].get(variant) or {}).get("time") for w in result["workloads"].values()]
        rows.append([label, *(_text(time and time[field]) for time in times)])
    for variant in ("box", "joint"):
        ratios = [(w["detail"].get(variant) or {}).get("memory_ratio") for w in result["workloads"].values()]
        rows.append([f"memory, {variant}", *map(_text, ratios)])
    return table(rows)


def _summary(result: dict[str, Any]) -> Iterator[str]:
    for name, found in (("box:  ", result), ("joint:", result["joint"])):
        times = f"median {_text(found['median_time_ratio'])}, worst {_text(found['worst_time_ratio'])}"
        yield f"{name} {times}, memory at most {_text(found['worst_memory_ratio'])}"
    mask, top = _text(result["routing"]["mask_overhead"]), _text(result["routing"]["restricted_ratio"])
    yield f"routing: mask overhead {mask}, restricted to the top 25 % {top} of the full private step"
    yield f"patients of one to six records: {_text(result['units']['ratio'])} of the step with each record by itself"
    yield f"kernels: {result['about']['kernels']}; load of the machine {result['about']['load']}"
    for name, found in result["workloads"].items():
        yield from (f"{name}, {what}: {reason}" for what, reason in found["reasons"].items())


def _text(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
