"""`lamina bench`: what a private step costs here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from lamina.bench.benchmark import BenchSettings, draw_benchmark, lamina_failures, run_benchmark
from lamina.bench.step_variants import PEERS, opacus_missing
from lamina.bench.workloads import WORKLOADS, find_workload
from lamina.cli.terminal import err, out, print_json, print_refusal, refusal_json
from lamina.errors import LaminaError


def bench(
    quick: Annotated[bool, typer.Option("--quick", help="about five minutes; fewer rounds, wider limits")] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(help=f"one of {', '.join(WORKLOADS)}; may be repeated", autocompletion=lambda: list(WORKLOADS)),
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="rounds per workload, all of them measured")] = None,
    threads: Annotated[int, typer.Option(help="torch threads")] = 2,
    to: Annotated[Path | None, typer.Option("--out", help="folder for step.json and step.png")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Measure time and peak memory of a private step here, against the plain step and Opacus.

    Spends no privacy: the data is made up. Writes only with --out.

    Ratios are paired within interleaved rounds. time_ratio is the upper 95 % bootstrap limit; a peer that cannot run
    is null, with its reason beside it.

    Examples:

      lamina bench --quick
      lamina bench --only residual --out results
    """
    names = tuple(find_workload(name).name for name in only or WORKLOADS)
    settings = BenchSettings.quick(names, threads) if quick else BenchSettings(workloads=names, threads=threads)
    if rounds is not None:
        if rounds < 1:
            raise typer.BadParameter("must be 1 or more", param_hint="--rounds")
        settings = BenchSettings(workloads=names, threads=threads, rounds=rounds, minimum=rounds)
    if reason := opacus_missing():
        err.print(f"peers are left out: {reason}", markup=False)
    with err.status("measuring") as status:
        result = run_benchmark(settings, say=status.update)
    if to is not None:
        _write(result, to)
    problems = lamina_failures(result)
    refused = LaminaError(
        "cli.lamina-could-not",
        "Lamina could not run every workload: " + "; ".join(problems),
        "see the reasons beside the figures",
    )
    if as_json:
        print_json(result | (refusal_json(refused) if problems else {}))  # one object, also where it failed
    else:
        out.print(_table(result))
        out.print(_summary_lines(result))
    if problems:
        print_refusal(refused)
        raise typer.Exit(1)


def main(arguments: list[str]) -> None:
    """The same command for `benchmarks/step.py`."""
    from lamina.cli.app import main as program

    program(["bench", *arguments])


def _write(result: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "step.json"
    path.write_text(json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    err.print(f"wrote {path}", markup=False)
    try:
        err.print(f"wrote {draw_benchmark(result, folder / 'step.png')}", markup=False)
    except LaminaError as error:
        err.print(f"no picture: {error}", markup=False)


def _table(result: dict[str, Any]) -> Table:
    table = Table("time / plain step", *result["workloads"], box=None)
    rows = {"Lamina box (upper limit)": ("box", "high"), "Lamina box": ("box", "median")}
    rows |= {"Lamina joint": ("joint", "median"), **{name: (name, "median") for name in PEERS}}
    for label, (variant, field) in rows.items():
        times = [(w["detail"].get(variant) or {}).get("time") for w in result["workloads"].values()]
        table.add_row(label, *(_ratio_text(time and time[field]) for time in times))
    for label, variant in (("memory, box", "box"), ("memory, joint", "joint")):
        ratios = [(w["detail"].get(variant) or {}).get("memory_ratio") for w in result["workloads"].values()]
        table.add_row(label, *(_ratio_text(ratio) for ratio in ratios))
    return table


def _summary_lines(result: dict[str, Any]) -> str:
    routing = result["routing"]
    lines = [
        f"box:   median {_ratio_text(result['median_time_ratio'])}, worst {_ratio_text(result['worst_time_ratio'])}, "
        f"memory at most {_ratio_text(result['worst_memory_ratio'])}",
        f"joint: median {_ratio_text(result['joint']['median_time_ratio'])}, "
        f"worst {_ratio_text(result['joint']['worst_time_ratio'])}, "
        f"memory at most {_ratio_text(result['joint']['worst_memory_ratio'])}",
        f"routing: mask overhead {_ratio_text(routing['mask_overhead'])}, "
        f"restricted to the top 25 % {_ratio_text(routing['restricted_ratio'])} of the full private step",
    ]
    for name, found in result["workloads"].items():
        lines += [f"{name}, {what}: {reason}" for what, reason in found["reasons"].items()]
    return "\n".join(lines).replace("[", r"\[")


def _ratio_text(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
