"""The demo's report: one self-contained HTML page with public figures only."""

from __future__ import annotations

import html
from pathlib import Path

from lamina.cli.demo.training import Outcome
from lamina.cli.output import round_up
from lamina.plan import StepPlan

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Lamina demo</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1b1b1b }}
table {{ border-collapse: collapse }}
td, th {{ padding: .25rem .8rem; border-bottom: 1px solid #ddd; text-align: left }}
pre {{ background: #f5f5f2; padding: 1rem; overflow-x: auto; font-size: .8rem }}
</style></head><body>
<h1>A private training on simulated ECG</h1>
<p>Reconstruction error on fresh simulated patients, as a fraction of the variance:
{before:.3f} before training, <strong>{after:.3f}</strong> after. {seconds:.0f} seconds.</p>
<h2>What it cost</h2>
<table><tr><th>class</th><th>ε</th><th>δ</th><th>unit</th><th>reaches</th></tr>{rows}</table>
<p>Adjacency: one contribution added or removed. Assumes Poisson sampling with secret coins, which this run used.
Noise: {noise}. Not covered: tuning of the demo's settings (done on simulated data), floating-point effects of the
unhardened noise.</p>
<h2>The plan</h2>
<pre>{plan}</pre>
<p>No private loss, batch size or gradient norm is in this report: none of them was paid for.</p>
</body></html>
"""


def write_page(folder: Path, plan: StepPlan, outcome: Outcome, seconds: float) -> Path:
    """Write report.html and plan.json into the folder; the path of the report."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = "".join(
        "<tr>"
        + "".join(
            f"<td>{html.escape(cell)}</td>"
            for cell in (
                entry.name,
                round_up(outcome.epsilon[entry.name]),
                f"{entry.delta:g}",
                entry.unit,
                entry.profile,
            )
        )
        + "</tr>"
        for entry in plan.classes
    )
    page = _PAGE.format(
        before=outcome.error_before,
        after=outcome.error_after,
        seconds=seconds,
        rows=rows,
        noise="from a cryptographically secure stream" if outcome.private else "seeded, so NOT PRIVATE",
        plan=html.escape(str(plan)),
    )
    (folder / "plan.json").write_text(plan.to_json(), encoding="utf-8")
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path
