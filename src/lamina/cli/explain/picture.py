"""A plan drawn along the depth: share of the budget, noise, signal to noise, and Δ where it was measured."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lamina.cli.explain.figures import LayerFigures
from lamina.cli.explain.layers import number, percent
from lamina.errors import LaminaError, PlanError
from lamina.plan import StepPlan

SUFFIXES = (".png", ".svg", ".pdf", ".html")
_BLUE, _GREY, _GREEN, _BROWN = "#1f6f8b", "#b9b4a7", "#0b6e4f", "#8c2d04"


def check_picture(path: Path) -> None:
    """Refuse a name that says no format, before anything is computed."""
    if path.suffix.lower() not in SUFFIXES:
        raise PlanError(
            "cli.picture-names-no",
            f"picture is '{path}', which names no format",
            f"end it in {', '.join(SUFFIXES)}",
        )


def draw(plan: StepPlan, rows: Sequence[LayerFigures], reasons: Sequence[str], path: Path) -> None:
    """Write the picture; the suffix says which kind. HTML needs nothing installed, the others matplotlib."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix.lower() == ".html":
            path.write_text(_page(plan, rows, reasons), encoding="utf-8")
        else:
            _plot(plan, rows, path)
    except OSError as error:
        raise PlanError(
            "cli.picture-not-written",
            f"the picture '{path}' cannot be written: {error}",
            "name a file that can be",
        ) from error


def _plot(plan: StepPlan, rows: Sequence[LayerFigures], path: Path) -> None:
    try:
        import matplotlib
    except ImportError as error:
        raise LaminaError(
            "cli.matplotlib-not-installed",
            "matplotlib is not installed",
            "pip install 'lamina[plot]', or --picture FILE.html, which needs nothing",
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    measured = any(row.tight is not None for row in rows)
    panels = 4 if measured else 3
    places = range(len(rows))
    figure, axes = plt.subplots(
        panels,
        1,
        figsize=(max(6.0, 0.35 * len(rows) + 2), 2.0 * panels + 1),
        sharex=True,
        layout="constrained",
    )
    for axis, title, values, colour in zip(axes, *_series(rows), strict=False):
        axis.bar(places, values, color=colour)
        axis.set_ylabel(title)
    axes[2].axhline(1.0, color="black", linewidth=0.8)
    _stretch(axes[1], [row.noise for row in rows])
    _stretch(axes[2], [row.signal_to_noise or 0.0 for row in rows])
    if measured:
        axes[3].plot(places, [row.worst for row in rows], "o-", color=_GREY, label="global")
        axes[3].plot(places, [row.tight for row in rows], "o-", color=_BLUE, label="tight")
        axes[3].set_yscale("log")
        axes[3].set_ylabel("Δ")
        axes[3].legend(fontsize=8)
    for axis in axes:
        axis.grid(axis="y", alpha=0.25)
    axes[-1].set_xticks(list(places), [row.name for row in rows], rotation=60, ha="right", fontsize=7)
    axes[-1].set_xlabel("layers, from input to output")
    figure.suptitle(_title(plan), fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _series(rows: Sequence[LayerFigures]) -> tuple[tuple[str, ...], tuple[list[float], ...], tuple[str, ...]]:
    return (
        ("share of the budget", "noise S", "signal to noise"),
        (
            [row.share for row in rows],
            [row.noise for row in rows],
            [row.signal_to_noise or 0.0 for row in rows],
        ),
        (_BLUE, _BROWN, _GREEN),
    )


def _stretch(axis: Any, values: Sequence[float]) -> None:
    """A logarithmic axis where bars differ by more than a factor of 30."""
    some = [value for value in values if value > 0]
    if some and max(some) > 30 * min(some):
        axis.set_yscale("log")


def _title(plan: StepPlan) -> str:
    return f"{plan.allocation}, {plan.clipping.value} clipping, {plan.steps:,} steps"


# ------------------------------------------------------------------------------------ one page, nothing to load

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Lamina plan</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; color: #1b1b1b }}
table {{ border-collapse: collapse }}
td, th {{ padding: .15rem .6rem; border-bottom: 1px solid #e4e1d8; text-align: right; white-space: nowrap }}
td:first-child, th:first-child {{ text-align: left }}
.bar {{ width: 9rem; text-align: left }} .bar i {{ display: block; height: .9em }}
pre {{ background: #f5f5f2; padding: 1rem; overflow-x: auto; font-size: .8rem }}
</style></head><body>
<h1>{title}</h1>
<table><tr>{head}</tr>
{rows}
</table>
<h2>Why this plan</h2>
<ul>{reasons}</ul>
<h2>The plan</h2>
<pre>{plan}</pre>
</body></html>
"""


def _page(plan: StepPlan, rows: Sequence[LayerFigures], reasons: Sequence[str]) -> str:
    shown: list[tuple[str, list[float], list[str], str]] = [
        (title, values, [percent(v) if title.startswith("share") else number(v) for v in values], colour)
        for title, values, colour in zip(*_series(rows), strict=True)
    ]
    for title, found, colour in (
        ("Δ tight", [row.tight for row in rows], _BLUE),
        ("Δ global", [row.worst for row in rows], _GREY),
    ):
        values = [value for value in found if value is not None]
        if values:
            shown.append((title, values, [number(value) for value in values], colour))
    head = "<th>layer</th><th>parameters</th>" + "".join(
        f'<th colspan="2">{title}</th>' for title, *_ in shown
    )
    lines = []
    for i, row in enumerate(rows):
        cells = [f"<td>{html.escape(row.name)}</td><td>{row.size:,}</td>"]
        for _, values, told, colour in shown:
            width = 100 * values[i] / (max(values) or 1.0)
            cells.append(f"<td>{told[i]}</td>")
            cells.append(f'<td class="bar"><i style="width:{width:.1f}%;background:{colour}"></i></td>')
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return _PAGE.format(
        title=html.escape(_title(plan)),
        head=head,
        rows="\n".join(lines),
        reasons="".join(f"<li>{html.escape(reason)}</li>" for reason in reasons),
        plan=html.escape(str(plan)),
    )
