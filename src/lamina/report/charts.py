"""Charts of pages: budgets over time, classes by layer, shares by layer, evaluations over steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lamina.plan.step_plan import StepPlan
from lamina.plan.table import epsilon_text, layer_shares
from lamina.release.posture import Posture, merge_neighbours
from lamina.release.schema import Layer
from lamina.report import svg
from lamina.report.view import ClassView

_MAX_ROWS = 40  # layers of a chart; of a deeper model neighbours are drawn together
_POINTS = 400  # of a line
_LEFT, _LABELS = 52.0, 210.0  # margins for figures, and for names of layers


def _lines_chart(
    title: str, lines: Mapping[str, Sequence[svg.Point]], bounds: Mapping[str, float], *,
    marks: Sequence[float], across: Sequence[float], below: str, left: str,
) -> str:  # fmt: skip
    """Return lines over numbers from 0 on, each with its bound as a dashed line, and their names below.

    `marks` and `across` are the numbers on the two axes, `left` and `below` what they count.
    """
    top, wide, high = 14.0, 560.0, 240.0
    last, most = max(points[-1][0] for points in lines.values()) or 1, marks[-1]

    def at(x: float, y: float) -> svg.Point:
        return _LEFT + wide * x / last, top + high * (1 - min(y, most) / most)

    drawn = [svg.line(at(0, mark), at(last, mark)) for mark in marks]
    drawn += [svg.text(_LEFT - 6, at(0, mark)[1] + 4, f"{mark:g}", anchor="end", quiet=True) for mark in marks]
    drawn += [svg.text(at(x, 0)[0], top + high + 18, f"{x:g}", anchor="middle", quiet=True) for x in across]
    drawn += [svg.text(_LEFT + wide / 2, top + high + 38, below, anchor="middle"), svg.text(4, top, left)]
    for number, (name, points) in enumerate(lines.items()):
        colour, dash = svg.COLOURS[number % len(svg.COLOURS)], svg.DASHES[number % len(svg.DASHES)]
        kept = [*points[:: max(1, len(points) // _POINTS)], points[-1]]
        said = f"{name}: {left} {epsilon_text(points[-1][1])}".replace("  ", " ")
        drawn.append(svg.polyline([at(*each) for each in kept], colour, dash=dash, title=said))
        if (bound := bounds.get(name)) is not None and bound <= most:
            drawn.append(svg.line(at(0, bound), at(last, bound), colour=colour, dash="3 5", width=1.2))
    names, height = svg.legend(_LEFT, top + high + 62, wide, list(lines))
    return svg.picture(_LEFT + wide + 20, top + high + 52 + height, title, [*drawn, *names])


def budget_chart(classes: Mapping[str, ClassView]) -> str:
    """Return ε of every private class after each epoch, with its bound as a dashed line."""
    shown = [each for each in classes.values() if each.points and not each.public and math.isfinite(each.epsilon)]
    if not shown:
        return ""
    bounds = {
        each.name: each.bound for each in shown if each.bound is not None and each.bound < 20 * (each.epsilon + 1)
    }
    last = max(each.points[-1][0] for each in shown)
    return _lines_chart(
        "ε of every class over the segments that the ledger records",
        {each.name: [(0.0, 0.0), *((float(epoch), epsilon) for epoch, _, epsilon in each.points)] for each in shown},
        bounds,
        marks=svg.ticks(max([each.epsilon for each in shown] + [*bounds.values()]) * 1.02),
        across=[mark for mark in svg.ticks(last) if mark == round(mark) and mark <= last],
        below="segments recorded in the ledger, all runs together",
        left="ε",
    )


def evaluation_chart(evaluations: Sequence[Mapping[str, object]]) -> str:
    """Return figures on public or simulated data by step; one line each, if they lie between 0 and 1."""
    lines: dict[str, list[svg.Point]] = {}
    for each in evaluations:
        figures, step = each.get("figures"), each.get("step")
        if isinstance(figures, Mapping) and isinstance(step, int):
            for name, value in figures.items():
                if isinstance(value, int | float) and 0 <= value <= 1:
                    lines.setdefault(svg.shortened(str(name), 60), []).append((float(step), float(value)))
    lines = {name: points for name, points in lines.items() if len(points) > 1}
    if not lines:
        return ""
    last = max(points[-1][0] for points in lines.values()) or 1
    return _lines_chart(
        "figures on public data over the steps", lines, {}, marks=(0, 0.25, 0.5, 0.75, 1),
        across=[mark for mark in svg.ticks(last) if mark <= last], below=f"step (last: {last:g})", left="",
    )  # fmt: skip


def layer_chart(posture: Posture) -> str:
    """Return depth × classes, the output on top: the classes that reached each layer, and how much noise it had."""

    def same(each: Layer) -> tuple[object, ...]:
        return each.classes, each.noise_std

    names, groups = list(posture.classes), merge_neighbours(posture.layers, same, _MAX_ROWS)[::-1]
    cell, row, roof = max(24.0, min(110.0, 380.0 / max(1, len(names)))), 20.0, 46.0
    wide, end = cell * len(names), roof + len(groups) * row
    most = max((each.noise_std for each in posture.layers), default=1.0) or 1.0
    gable = f"{_LABELS - 10},{roof - 4} {_LABELS + wide / 2},6 {_LABELS + wide + 10},{roof - 4}"
    drawn = [
        f'<polygon points="{gable}" class="roof"/>',
        svg.text(_LABELS + wide / 2, roof - 12, "output", anchor="middle", quiet=True),
        svg.text(_LABELS + wide + 24, roof - 10, "noise S", quiet=True),
    ]
    for r, group in enumerate(groups):
        y, label = roof + r * row, _label([each.name for each in group])
        drawn.append(svg.text(_LABELS - 12, y + 14, label, anchor="end"))
        for c, name in enumerate(names):
            here = any(name in each.classes for each in group)
            said = f"class {name} {'reached' if here else 'did not reach'} {label}"
            fill = svg.COLOURS[c % len(svg.COLOURS)] if here else 'class="empty"'
            drawn.append(svg.bar(_LABELS + c * cell + 1.5, y + 1.5, cell - 3, row - 3, fill=fill, title=said))
        least = min(each.noise_std for each in group)
        drawn.append(svg.bar(_LABELS + wide + 24, y + 5, 90.0 * least / most, 10))
        noise = f"{least:.3g}" if least else "none"
        drawn.append(svg.text(_LABELS + wide + 30 + 90.0 * least / most, y + 14, noise, quiet=True))
    drawn += [
        svg.text(_LABELS + (c + 0.5) * cell, end + 14, str(c + 1), anchor="middle", quiet=True)
        for c in range(len(names))
    ]
    drawn.append(svg.text(_LABELS - 12, end + 14, "input", anchor="end", quiet=True))
    legend, height = svg.legend(12, end + 40, _LABELS + wide + 140, names, numbered=True)
    title = "which class reached which layer, from the output down to the input"
    return svg.picture(_LABELS + wide + 170, end + 30 + height, title, [*drawn, *legend])


def share_bars(plan: StepPlan) -> str:
    """Return the part of the privacy budget that each layer takes."""
    shares, row, wide = layer_shares(plan), 20.0, 360.0
    size = max(1, -(-len(shares) // _MAX_ROWS))
    rows = [
        (_label([each.name for each in plan.layers[at : at + size]]), math.fsum(shares[at : at + size]))
        for at in range(0, len(shares), size)
    ][::-1]
    most = max((share for _, share in rows), default=1.0) or 1.0
    drawn = []
    for r, (name, share) in enumerate(rows):
        y, width = r * row + 4, wide * share / most
        drawn.append(svg.text(_LABELS - 8, y + 11, name, anchor="end"))
        drawn.append(svg.bar(_LABELS, y, width, 12, title=f"{name}: {100 * share:.2f} %"))
        drawn.append(svg.text(_LABELS + width + 6, y + 11, f"{100 * share:.1f} %", quiet=True))
    title = "part of the privacy budget that each layer takes"
    return svg.picture(_LABELS + wide + 70, len(rows) * row + 10, title, drawn)


def _label(names: Sequence[str]) -> str:
    return svg.shortened(names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}")
