"""The layers of a plan for a terminal: a table of figures, and bars along the depth."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lamina.cli.explain.figures import LayerFigures
from lamina.cli.output import columns
from lamina.plan import StepPlan
from lamina.plan.table import threshold

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_WIDE = 14
_SPAN = 1000.0


def layer_table(plan: StepPlan, rows: Sequence[LayerFigures]) -> str:
    """One row per layer: parameters, Δ tight and global, typical norm, C by class, S, share, signal to noise."""
    measured = any(row.norm is not None for row in rows)
    head = ["layer", "depth", "parameters"]
    head += ["Δ tight", "Δ global", "norm n"] if measured else []
    head += [f"C {entry.name}" for entry in plan.classes] + ["noise S", "share", "S/N"]
    lines = [head]
    for i, row in enumerate(rows):
        reached = f"{row.reached:,} of " if row.reached != row.size else ""
        cells = [row.name, f"{row.depth:.2f}", f"{reached}{row.size:,}"]
        cells += [number(row.tight), number(row.worst), number(row.norm)] if measured else []
        cells += [threshold(plan, k, i) for k in range(len(plan.classes))]
        cells += [
            f"{row.noise:.4g}" if row.noise else "none",
            percent(row.share),
            number(row.signal_to_noise),
        ]
        lines.append(cells)
    return columns(lines)


def layer_bars(rows: Sequence[LayerFigures]) -> str:
    """Bars from input to output: share of the budget, noise S, signal to noise, Δ where it was measured.

    Lengths are in proportion; where figures differ by more than a thousand, in proportion to their logarithm.
    """
    shown: list[tuple[str, list[float | None], list[str]]] = [
        ("share", [row.share for row in rows], [percent(row.share) for row in rows]),
        ("noise S", [row.noise for row in rows], [number(row.noise) for row in rows]),
        ("S/N", [row.signal_to_noise for row in rows], [number(row.signal_to_noise) for row in rows]),
    ]
    if any(row.tight is not None for row in rows):
        shown.append(("Δ tight", [row.tight for row in rows], [number(row.tight) for row in rows]))
    titles = ["layer"]
    table: list[list[str]] = [[row.name] for row in rows]
    for title, values, told in shown:
        if title != "share" and (logs := _logarithms(values)) is not None:
            title, values = f"{title} (log)", logs
        most = max((value for value in values if value is not None), default=0.0)
        wide = max(map(len, told))
        titles.append(title)
        for cells, value, text in zip(table, values, told, strict=True):
            cells.append(f"{text.rjust(wide)} {bar(value or 0.0, most)}".ljust(wide + 1 + _WIDE))
    return columns([titles, *table], left=len(titles))


def _logarithms(values: Sequence[float | None]) -> list[float | None] | None:
    """Orders of magnitude above a tenth of the least, where figures differ by more than a thousand."""
    some = [value for value in values if value is not None and value > 0]
    if not some or max(some) <= _SPAN * min(some):
        return None
    return [
        math.log10(10 * value / min(some)) if value is not None and value > 0 else None for value in values
    ]


def bar(value: float, most: float, wide: int = _WIDE) -> str:
    """A bar whose length is value/most of `wide` characters, in eighths.

    >>> bar(1.0, 2.0, 4), bar(0.0, 1.0, 4)
    ('██', '')
    """
    if not most > 0 or not value > 0:
        return ""
    eighths = max(1, round(8 * wide * min(1.0, value / most)))
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8]).rstrip()


def number(value: float | None) -> str:
    """A figure of three digits; "-" where there is none."""
    return "-" if value is None else f"{value:.3g}"


def percent(share: float) -> str:
    """A share of the budget."""
    return f"{100 * share:.1f} %"
