"""`lamina bench`: what a private step costs here."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from lamina.cli.options import JsonOption, option
from lamina.cli.terminal import columns, err, print_json, print_line, print_note, print_refusal, refusal_json
from lamina.errors import LaminaError


def _workload_names() -> Iterable[str]:
    from lamina.bench.workloads import WORKLOADS

    return WORKLOADS


def bench(
    quick: Annotated[bool, option("about five minutes; fewer rounds, wider limits", "--quick")] = False,
    only: Annotated[
        list[str] | None,
        option("a workload, such as resae; repeatable; a wrong name lists all", choices=_workload_names),
    ] = None,
    rounds: Annotated[int | None, option("rounds per workload, all of them measured")] = None,
    threads: Annotated[int, option("torch threads")] = 2,
    processor_time: Annotated[
        bool,
        option("compare processor time, not the clock: for a busy machine, best with --threads 1", "--processor-time"),
    ] = False,
    to: Annotated[Path | None, option("folder for step.json and step.png", "--out")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure time and peak memory of a private step on this machine, against an ordinary step and Opacus.

    Spends nothing: the data is made up. Writes only with --out.

    Ratios are paired within interleaved rounds. time_ratio is the upper 95 % bootstrap limit. A peer that cannot run is
    null, with the reason beside it.

    Examples:

      lamina bench --quick
      lamina bench --only resae --out results
    """
    if rounds is not None and rounds < 1:
        raise typer.BadParameter("must be 1 or more", param_hint="--rounds")
    from lamina.bench.benchmark import BenchSettings, lamina_failures, run_benchmark
    from lamina.bench.step_variants import opacus_missing
    from lamina.bench.workloads import WORKLOADS, find_workload

    names = tuple(find_workload(name).name for name in only or WORKLOADS)
    settings = BenchSettings.quick(names, threads) if quick else BenchSettings(workloads=names, threads=threads)
    if rounds is not None:
        settings = BenchSettings(workloads=names, threads=threads, rounds=rounds, minimum=rounds)
    settings = replace(settings, processor_time=processor_time)
    if reason := opacus_missing():
        print_note(f"peers are left out: {reason}")
    with err.status("measuring") as status:
        result = run_benchmark(settings, say=status.update)
    if to is not None:
        _write(result, to)
    problems = lamina_failures(result)
    refused = LaminaError(
        "bench.workload-failed",
        "Lamina could not run every workload: " + "; ".join(problems),
        "see the reasons beside the figures",
    )
    if as_json:
        print_json(result | (refusal_json(refused) if problems else {}))  # one object, also where it failed
    else:
        print_line(f"{_table(result)}\n{_summary_lines(result)}")
    if problems:
        print_refusal(refused)
        raise typer.Exit(1)


def _write(result: dict[str, Any], folder: Path) -> None:
    from lamina.bench.benchmark import draw_benchmark

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "step.json"
    path.write_text(json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    print_note(f"wrote {path}")
    try:
        print_note(f"wrote {draw_benchmark(result, folder / 'step.png')}")
    except LaminaError as error:
        print_note(f"no picture: {error}")


def _table(result: dict[str, Any]) -> str:
    from lamina.bench.step_variants import PEERS

    table = [["time / plain step", *result["workloads"]]]
    rows = {"Lamina box (upper limit)": ("box", "high"), "Lamina box": ("box", "median")}
    rows |= {"Lamina joint": ("joint", "median"), "box, torch rules": ("box_torch", "median")}
    rows |= {"joint, torch rules": ("joint_torch", "median"), "box, compiled": ("box_compiled", "median")}
    rows |= {name: (name, "median") for name in PEERS}
    for label, (variant, field) in rows.items():
        times = [(w["detail"].get(variant) or {}).get("time") for w in result["workloads"].values()]
        table.append([label, *(_ratio_text(time and time[field]) for time in times)])
    for label, variant in (("memory, box", "box"), ("memory, joint", "joint")):
        ratios = [(w["detail"].get(variant) or {}).get("memory_ratio") for w in result["workloads"].values()]
        table.append([label, *map(_ratio_text, ratios)])
    return columns(table)


def _summary_lines(result: dict[str, Any]) -> str:
    routing = result["routing"]
    lines = [
        f"{name} median {_ratio_text(found['median_time_ratio'])}, worst {_ratio_text(found['worst_time_ratio'])}, "
        f"memory at most {_ratio_text(found['worst_memory_ratio'])}"
        for name, found in (("box:  ", result), ("joint:", result["joint"]))
    ]
    lines.append(
        f"routing: mask overhead {_ratio_text(routing['mask_overhead'])}, "
        f"restricted to the top 25 % {_ratio_text(routing['restricted_ratio'])} of the full private step"
    )
    lines.append(
        f"patients of one to six records: {_ratio_text(result['units']['ratio'])} of the step with each record by itself"
    )
    lines.append(f"kernels: {result['about']['kernels']}; load of the machine {result['about']['load']}")
    for name, found in result["workloads"].items():
        lines += [f"{name}, {what}: {reason}" for what, reason in found["reasons"].items()]
    return "\n".join(lines)


def _ratio_text(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
