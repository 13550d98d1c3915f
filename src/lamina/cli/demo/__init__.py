"""`lamina demo`: a short private training on simulated ECG, from policy to ε, in one minute."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from lamina.cli.demo.page import write_page
from lamina.cli.demo.training import Demo, Outcome
from lamina.cli.output import err, out, print_json, round_up


def demo(
    folder: Annotated[Path, typer.Option(help="where the report goes")] = Path("runs/demo"),
    steps: Annotated[int, typer.Option(min=1, help="training steps")] = 120,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Train a small autoencoder on simulated ECG under differential privacy, and show what it cost.

    Two classes of patients: 'clinical' trains every layer, 'sensitive' only the top quarter. The screen shows ε, never
    the private loss: an un-noised loss would be a release that nobody paid for.
    """
    started = time.perf_counter()
    err.print("simulating patients, making the plan …")
    prepared = Demo.prepare(steps=steps)
    plan = prepared.plan
    screen = err if as_json else out
    screen.print(str(plan), markup=False, soft_wrap=True)
    screen.print()
    names = [entry.name for entry in plan.classes]
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("ε so far: {task.fields[spent]}"))
    with Progress(*columns, TimeRemainingColumn(), console=err) as bar:
        task = bar.add_task("private training", total=plan.steps, spent="–")

        def tick(done: int, spent: dict[str, float] | None) -> None:
            bar.update(task, completed=done)
            if spent is not None:
                bar.update(task, spent=", ".join(f"{name} {round_up(spent[name], 2)}" for name in names))

        outcome = prepared.train(tick)
    seconds = time.perf_counter() - started
    report = write_page(folder, plan, outcome, seconds)
    if as_json:
        print_json(_result(folder, report, seconds, outcome))
        return
    for name in names:
        out.print(
            f"ε of class {name}: {round_up(outcome.epsilon[name])} at δ = {plan.delta(name):g}, per patient"
        )
    out.print(
        f"reconstruction on fresh simulated (public) patients: error {outcome.error_before:.3f} before, "
        f"[bold]{outcome.error_after:.3f}[/] after (fraction of the variance; the mean signal gives 1)"
    )
    out.print(f"noise {'secure' if outcome.private else 'seeded: NOT PRIVATE'}; {seconds:.0f} s")
    out.print(f"report: {report}", markup=False)


def _result(folder: Path, report: Path, seconds: float, outcome: Outcome) -> dict[str, object]:
    """Keys that machines read; null where the capability does not exist yet."""
    return {
        "folder": str(folder),
        "seconds": round(seconds, 2),
        "ledger": None,
        "certificate": None,
        "report": str(report),
        "release": None,
        "private": outcome.private,
        "epsilon": outcome.epsilon,
        "error_before": outcome.error_before,
        "error_after": outcome.error_after,
    }
