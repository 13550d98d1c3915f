"""`lamina bench`: what a private step costs here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from lamina.bench.benchmark import BenchSettings, draw_benchmark, lamina_failures, run_benchmark
from lamina.bench.step_variants import PEERS, opacus_missing
from lamina.bench.workloads import WORKLOADS, find_workload
from lamina.cli.terminal import columns, err, print_json, print_line, print_note, print_refusal, refusal_json
from lamina.errors import LaminaError


def show_benchmark(
    *, quick: bool, only: list[str] | None, rounds: int | None, threads: int, processor_time: bool, to: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    """`lamina bench` (options and help: torch_commands.py)."""
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
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "step.json"
    path.write_text(json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    print_note(f"wrote {path}")
    try:
        print_note(f"wrote {draw_benchmark(result, folder / 'step.png')}")
    except LaminaError as error:
        print_note(f"no picture: {error}")


def _table(result: dict[str, Any]) -> str:
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
