"""Drawing SVG: the primitives of every picture. No script, nothing to load, and every text is escaped here.

Colours are those of Okabe and Ito, which people with any colour vision can tell apart. Lines differ in dashes too, columns
have numbers, and figures are repeated in words (`<title>`), so that a screen reader and a printer show the same. No text is
smaller than 12 pixels, so that a picture on a sheet of A4 keeps to 7 pt.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#B8A500", "#7A7A7A")
DASHES = ("", "7 3", "2 3", "9 3 2 3")
_LETTER = 0.62  # largest mean width of a letter, in sizes of the text

Point = tuple[float, float]


def picture(width: float, height: float, title: str, drawn: Sequence[str]) -> str:
    """Return an SVG in a box that scrolls where the page is narrow, so that its words stay readable; `title` is read aloud."""
    return (
        f'<div class="scroll" tabindex="0"><svg class="chart" width="{width:g}" viewBox="0 0 {width:g} {height:g}" '
        f'role="img" aria-label="{html.escape(title)}">{"".join(drawn)}</svg></div>'
    )


def text(x: float, y: float, words: str, *, anchor: str = "start", size: float = 12, quiet: bool = False) -> str:
    """Return words; `anchor` is start, middle or end."""
    kind = "quiet" if quiet else "ink"
    place = f'x="{x:.1f}" y="{y:.1f}" class="{kind}" font-size="{size:g}" text-anchor="{anchor}"'
    return f"<text {place}>{html.escape(words)}</text>"


def line(start: Point, end: Point, *, colour: str | None = None, dash: str = "", width: float = 1) -> str:
    """Return a straight line; without a colour, one of a grid."""
    look = 'class="grid"' if colour is None else f'stroke="{colour}" stroke-dasharray="{dash}" stroke-width="{width:g}"'
    return f'<line x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}" {look}/>'


def polyline(points: Sequence[Point], colour: str, *, dash: str = "", width: float = 2.2, title: str = "") -> str:
    """Return a line through points."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    look = f'fill="none" stroke="{colour}" stroke-width="{width:g}" stroke-dasharray="{dash}"'
    return f'<polyline points="{path}" {look}>{_title(title)}</polyline>'


def bar(x: float, y: float, width: float, height: float, *, fill: str = 'class="bar"', title: str = "") -> str:
    """Return a rectangle; `fill` is a class of the style sheet or a colour."""
    look = fill if fill.startswith("class=") else f'fill="{fill}"'
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}" rx="2" {look}>'
        f"{_title(title)}</rect>"
    )


def _title(words: str) -> str:
    return f"<title>{html.escape(words)}</title>" if words else ""


def legend(
    x: float, y: float, width: float, names: Sequence[str], *, numbered: bool = False
) -> tuple[list[str], float]:
    """Return names with their colours in rows of this width from (x, y) on, and the height of all rows. No name is cut."""
    drawn, left, top = [], x, y
    for number, name in enumerate(names):
        words = f"{number + 1} {name}" if numbered else name
        wide = 30 + _LETTER * 12 * len(words)
        if left > x and left + wide > x + width:
            left, top = x, top + 18
        drawn += [bar(left, top - 9, 10, 10, fill=COLOURS[number % len(COLOURS)]), text(left + 15, top, words)]
        left += wide
    return drawn, top - y + 18 if names else 0.0


def ticks(most: float, count: int = 5) -> list[float]:
    """Return round numbers from 0 to at least `most`.

    >>> ticks(2.3), ticks(0.7)
    ([0.0, 0.5, 1.0, 1.5, 2.0, 2.5], [0.0, 0.2, 0.4, 0.6, 0.8])
    """
    if most <= 0 or not math.isfinite(most):
        most = 1.0
    raw = most / count
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= raw * 0.999)
    return [round(step * i, 12) for i in range(math.ceil(most / step - 1e-9) + 1)]


def shortened(name: str, most: int = 30) -> str:
    """Return the end of a long name, where names of layers differ."""
    return name if len(name) <= most else f"…{name[1 - most :]}"
