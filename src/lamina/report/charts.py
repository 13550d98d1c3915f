"""Charts as SVG: budgets over time, the house of layers, noise and shares by layer. No script, nothing to load.

Colours are those of Okabe and Ito, which people with any colour vision can tell apart; lines differ in dashes too, and
every chart has its figures in words (`<title>`), so that a screen reader and a printer show the same.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

from lamina.plan.step_plan import StepPlan
from lamina.plan.table import epsilon_text, layer_shares
from lamina.release.posture import LayerPosture, Posture
from lamina.report.view import ClassView

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#B8A500", "#7A7A7A")
_DASHES = ("", "7 3", "2 3", "9 3 2 3")
_MAX_ROWS = 40  # layers of a chart; of a deeper model neighbours are drawn together
_POINTS = 400  # of a line


def svg(width: float, height: float, title: str, drawn: Sequence[str]) -> str:
    """An SVG in a box that scrolls where the page is narrow, so that its words stay readable; `title` is read aloud."""
    return (
        f'<div class="scroll" tabindex="0"><svg class="chart" width="{width:g}" '
        f'viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{html.escape(title)}">{"".join(drawn)}</svg></div>'
    )


def _text(x: float, y: float, words: str, anchor: str = "start", size: float = 12, quiet: bool = False) -> str:
    kind = "quiet" if quiet else "ink"
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" font-size="{size:g}" text-anchor="{anchor}">{html.escape(words)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, extra: str = 'class="grid"') -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {extra}/>'


def ticks(most: float, count: int = 5) -> list[float]:
    """Round numbers from 0 to at least `most`.

    >>> ticks(2.3), ticks(0.7)
    ([0.0, 0.5, 1.0, 1.5, 2.0, 2.5], [0.0, 0.2, 0.4, 0.6, 0.8])
    """
    if most <= 0 or not math.isfinite(most):
        most = 1.0
    raw = most / count
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= raw * 0.999)
    return [round(step * i, 12) for i in range(math.ceil(most / step - 1e-9) + 1)]


def budget_chart(classes: Mapping[str, ClassView]) -> str:
    """ε of every private class after each epoch, with its bound as a dashed line."""
    shown = [each for each in classes.values() if each.points and not each.public]
    finite = [each for each in shown if math.isfinite(each.epsilon)]
    if not finite:
        return ""
    left, top, wide, high = 52.0, 14.0, 520.0, 240.0
    epochs = max(each.points[-1][0] for each in finite)
    bounds = [each.bound for each in finite if each.bound is not None and each.bound < 20 * (each.epsilon + 1)]
    marks = ticks(max([each.epsilon for each in finite] + bounds) * 1.02)
    most = marks[-1]

    def at(epoch: float, epsilon: float) -> tuple[float, float]:
        return left + wide * epoch / epochs, top + high * (1 - min(epsilon, most) / most)

    drawn = [_line(left, at(0, mark)[1], left + wide, at(0, mark)[1]) for mark in marks]
    drawn += [_text(left - 6, at(0, mark)[1] + 4, f"{mark:g}", "end", 11, quiet=True) for mark in marks]
    drawn += [
        _text(at(mark, 0)[0], top + high + 18, f"{mark:g}", "middle", 11, quiet=True)
        for mark in ticks(epochs)
        if mark == round(mark) and mark <= epochs
    ]
    below = "segments recorded in the ledger, all runs together"
    drawn += [_text(left + wide / 2, top + high + 36, below, "middle", 12), _text(4, top - 2, "ε", "start", 13)]
    labels: list[tuple[float, str, str]] = []
    for number, each in enumerate(finite):
        colour, dash = COLOURS[number % len(COLOURS)], _DASHES[number % len(_DASHES)]
        points = [(0, 0.0), *((epoch, epsilon) for epoch, _, epsilon in each.points)]
        stride = max(1, len(points) // _POINTS)
        kept = [*points[::stride], points[-1]]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(epoch, value) for epoch, value in kept))
        said = f"class {each.name}: ε {epsilon_text(each.epsilon)}"
        drawn.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.4" stroke-dasharray="{dash}">'
            f"<title>{html.escape(said)}</title></polyline>"
        )
        if each.bound is not None and each.bound <= most:
            y = at(0, each.bound)[1]
            drawn.append(_line(left, y, left + wide, y, f'stroke="{colour}" stroke-dasharray="3 5" stroke-width="1.2"'))
        labels.append((at(0, each.epsilon)[1], each.name, colour))
    at_y = -1e9
    for y, name, colour in sorted(labels):
        at_y = max(y, at_y + 14)
        drawn.append(f'<rect x="{left + wide + 6}" y="{at_y - 5:.1f}" width="9" height="9" rx="2" fill="{colour}"/>')
        drawn.append(_text(left + wide + 19, at_y + 4, name, "start", 12))
    return svg(left + wide + 150, top + high + 44, "ε of every class over the segments that the ledger records", drawn)


def _groups(layers: Sequence[LayerPosture]) -> list[list[LayerPosture]]:
    size = max(1, -(-len(layers) // _MAX_ROWS))
    return [list(layers[at : at + size]) for at in range(0, len(layers), size)]


def _label(group: Sequence[LayerPosture]) -> str:
    name = group[0].name if len(group) == 1 else f"{group[0].name} … {group[-1].name}"
    return name if len(name) <= 30 else f"…{name[-29:]}"


def house_of_layers(posture: Posture) -> str:
    """Depth × classes, the output on top: who reached which layer; on the right how much noise it had."""
    names, groups = list(posture.classes), _groups(posture.layers)[::-1]
    left, cell, row = 210.0, max(46.0, min(110.0, 380.0 / max(1, len(names)))), 20.0
    roof, wide = 46.0, cell * len(names)
    most = max((each.noise_std for each in posture.layers), default=1.0) or 1.0
    drawn = [
        f'<polygon points="{left - 10},{roof - 4} {left + wide / 2},{6} {left + wide + 10},{roof - 4}" class="roof"/>',
        _text(left + wide / 2, roof - 12, "output", "middle", 11, quiet=True),
        _text(left + wide + 24, roof - 10, "noise S", "start", 11, quiet=True),
    ]
    for r, group in enumerate(groups):
        y = roof + r * row
        drawn.append(_text(left - 12, y + 14, _label(group), "end", 11))
        for c, name in enumerate(names):
            here = any(name in each.classes for each in group)
            said = f"class {name} {'reached' if here else 'did not reach'} {_label(group)}"
            fill = f'fill="{COLOURS[c % len(COLOURS)]}"' if here else 'class="empty"'
            drawn.append(
                f'<rect x="{left + c * cell + 1.5:.1f}" y="{y + 1.5:.1f}" width="{cell - 3:.1f}" height="{row - 3:.1f}" '
                f'rx="2" {fill}><title>{html.escape(said)}</title></rect>'
            )
        least = min(each.noise_std for each in group)
        width = 90.0 * least / most
        drawn.append(
            f'<rect x="{left + wide + 24:.1f}" y="{y + 5:.1f}" width="{max(width, 0.5):.1f}" height="10" class="bar"/>'
        )
        noise = f"{least:.3g}" if least else "none"
        drawn.append(_text(left + wide + 30 + width, y + 14, noise, "start", 10, quiet=True))
    end = roof + len(groups) * row
    drawn.append(_text(left + wide / 2, end + 14, "input", "middle", 11, quiet=True))
    for c, name in enumerate(names):
        shown = name if len(name) <= 12 else f"{name[:11]}…"
        drawn.append(_text(left + (c + 0.5) * cell, end + 32, shown, "middle", 11))
    return svg(left + wide + 170, end + 42, "which class reached which layer, from the output down to the input", drawn)


def share_bars(plan: StepPlan) -> str:
    """The part of the privacy budget that each layer takes."""
    shares = layer_shares(plan)
    size = max(1, -(-len(shares) // _MAX_ROWS))
    rows = [
        (plan.layers[at].name if size == 1 else f"{plan.layers[at].name} …", math.fsum(shares[at : at + size]))
        for at in range(0, len(shares), size)
    ][::-1]
    most = max((share for _, share in rows), default=1.0) or 1.0
    left, row, wide = 210.0, 18.0, 360.0
    drawn = []
    for r, (name, share) in enumerate(rows):
        y, width = r * row + 4, wide * share / most
        drawn.append(_text(left - 8, y + 11, name if len(name) <= 30 else f"…{name[-29:]}", "end", 11))
        drawn.append(
            f'<rect x="{left}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="12" class="bar">'
            f"<title>{html.escape(name)}: {100 * share:.2f} %</title></rect>"
        )
        drawn.append(_text(left + width + 6, y + 11, f"{100 * share:.1f} %", "start", 10, quiet=True))
    return svg(left + wide + 70, len(rows) * row + 10, "part of the privacy budget that each layer takes", drawn)


def evaluation_chart(evaluations: Sequence[Mapping[str, object]]) -> str:
    """Figures on public or simulated data by step; one line each, if they lie between 0 and 1."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for each in evaluations:
        figures, step = each.get("figures"), each.get("step")
        if isinstance(figures, Mapping) and isinstance(step, int):
            for name, value in figures.items():
                if isinstance(value, int | float) and 0 <= value <= 1:
                    lines.setdefault(str(name), []).append((step, float(value)))
    lines = {name: points for name, points in lines.items() if len(points) > 1}
    if not lines:
        return ""
    left, top, wide, high = 44.0, 10.0, 480.0, 180.0
    last = max(points[-1][0] for points in lines.values()) or 1
    drawn = []
    for mark in (0, 0.25, 0.5, 0.75, 1):
        y = top + high * (1 - mark)
        drawn += [_line(left, y, left + wide, y), _text(left - 6, y + 4, f"{mark:g}", "end", 11, quiet=True)]
    drawn.append(_text(left + wide / 2, top + high + 30, f"step (last: {last})", "middle", 12))
    for number, (name, points) in enumerate(lines.items()):
        colour, dash = COLOURS[number % len(COLOURS)], _DASHES[number % len(_DASHES)]
        path = " ".join(f"{left + wide * s / last:.1f},{top + high * (1 - v):.1f}" for s, v in points)
        drawn.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.2" stroke-dasharray="{dash}"/>'
        )
        drawn.append(_text(left + wide + 6, top + high * (1 - points[-1][1]) + 4, name, "start", 11))
    return svg(left + wide + 110, top + high + 40, "figures on public data over the steps", drawn)
