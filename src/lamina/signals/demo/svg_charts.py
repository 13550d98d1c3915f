"""The charts of the demo's report, drawn as SVG by hand: no script, no other file, nothing to load."""

from __future__ import annotations

import html
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lamina.signals.demo.patients import INPUT_SCALE, PatientGroup, Utility
from lamina.signals.ecg_simulator import CLASSES
from lamina.signals.heart_model import LEADS

COLOURS = {"without_sensitive": "#b9b4a7", "private": "#1f6f8b", "without_privacy": "#dd9f4a"}
SHOWN_LEADS = ("II", "V2", "V5")

_LEFT, _WIDE, _ROW = 120, 420, 62  # of the bars: margin, length from AUC 0.5 to 1, height of a group
_CELL, _HIGH = (200, 110), 2.5  # of a beat: width and height, millivolts above and below the line


def auc_bars(utility: Mapping[str, Utility], words: Mapping[str, str]) -> str:
    """AUC by class and on average, one bar for each training, from 0.5 (guessing) to 1."""
    groups = {
        "mean": {name: found.auc for name, found in utility.items()},
        **{k: {name: u.by_class[k] for name, u in utility.items()} for k in next(iter(utility.values())).by_class},
    }
    height = _ROW * len(groups) + 30
    drawn = [_line(_x(tick), 0, _x(tick), height - 24, "#ddd") for tick in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)]
    drawn += [_text(_x(tick), height - 8, f"{tick:.1f}", "middle") for tick in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)]
    for row, (title, figures) in enumerate(groups.items()):
        top = row * _ROW + 4
        drawn.append(_text(_LEFT - 10, top + 30, title, "end"))
        for i, (name, value) in enumerate(figures.items()):
            y, end = top + 17 * i, _x(max(value, 0.5))
            told = f"{words[name]}: {value:.3f}"
            drawn.append(
                f'<rect x="{_LEFT}" y="{y}" width="{end - _LEFT:.1f}" height="14" fill="{COLOURS[name]}">'
                f"<title>{html.escape(told)}</title></rect>"
            )
            drawn.append(_text(end + 5, y + 11, f"{value:.3f}", "start", 11))
    return _svg(_LEFT + _WIDE + 60, height, "AUC by class for three trainings", drawn)


@torch.no_grad()
def beat_curves(model: nn.Module, test: PatientGroup) -> str:
    """One simulated test patient of each class: a beat in some leads (grey), and what the model makes of it (blue)."""
    found = {name: (test.label == k).nonzero().flatten() for k, name in enumerate(CLASSES)}
    chosen = {name: int(rows[0]) for name, rows in found.items() if len(rows)}
    model.eval()
    drawn = []
    wide, high = _CELL
    for row, (name, patient) in enumerate(chosen.items()):
        x = test.x[patient, :1]
        rebuilt = (x - model(x)[0])[0] / INPUT_SCALE
        for column, lead in enumerate(SHOWN_LEADS):
            left, top, index = 100 + column * (wide + 16), row * (high + 10) + 22, LEADS.index(lead)
            drawn.append(_line(left, top + high / 2, left + wide, top + high / 2, "#e4e1d8"))
            drawn.append(_curve(x[0, index] / INPUT_SCALE, left, top, "#8a8579", 1.6))
            drawn.append(_curve(rebuilt[index], left, top, COLOURS["private"], 1.6))
            if row == 0:
                drawn.append(_text(left + wide / 2, 14, f"lead {lead}", "middle"))
        drawn.append(_text(90, row * (high + 10) + 22 + high / 2, name, "end"))
    width = 100 + len(SHOWN_LEADS) * (wide + 16)
    return _svg(width, len(chosen) * (high + 10) + 26, "beats of simulated patients and their reconstruction", drawn)


def bar_legend(words: Mapping[str, str]) -> str:
    """What the colours of the bars stand for."""
    return " ".join(
        f'<span class="key"><i style="background:{COLOURS[name]}"></i>{html.escape(text)}</span>'
        for name, text in words.items()
    )


def _x(auc: float) -> float:
    return _LEFT + _WIDE * (auc - 0.5) / 0.5


def _curve(signal: Tensor, left: float, top: float, colour: str, width: float) -> str:
    wide, high = _CELL
    step = wide / (len(signal) - 1)
    points = " ".join(
        f"{left + i * step:.1f},{top + high * (0.5 - max(-1.0, min(1.0, v / _HIGH)) / 2):.1f}"
        for i, v in enumerate(signal.tolist())
    )
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _text(x: float, y: float, text: str, anchor: str, size: int = 13) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{html.escape(text)}</text>'


def _svg(width: float, height: float, title: str, parts: list[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{html.escape(title)}" '
        f'style="max-width:{width:.0f}px;width:100%">{"".join(parts)}</svg>'
    )
