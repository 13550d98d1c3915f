"""The layers of a plan in figures: what clipping keeps, signal to noise; as a table, as bars and as a picture."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lamina.cli.command import table
from lamina.errors import LaminaError, PlanError
from lamina.plan.step_plan import Clipping, StepPlan
from lamina.plan.table import at_least, at_most, clip_text, layer_shares
from lamina.validate import packaged_text

if TYPE_CHECKING:
    from lamina.allocate.measure.measure import Measure


# The signal of layer l is what a step's clipped sum would be if all contributions pulled the same way,
#
#     signal_l = Σ_k b_k·n̂_kl,      b_k = q_k·N_k contributions of class k expected in a step,
#
# with n̂_kl the norm that a typical contribution has at layer l after clipping:
#
#     box          min(n_l, C[k,l])
#     joint        n_l·min(1, r_k/‖(n_j/S_j)_j‖),   r_k = ‖(C[k,j]/S_j)_j‖, over the layers that it reaches
#     elementwise  the mean gradient instead of the sum: min(n_l, c_l·√d_l), c_l = C_l/(2√d_l), and b = 1
#     no measure   C[k,l] (elementwise C_l/2): as if every contribution were at its bound
#
# n_l is the typical norm of an example's gradient on the proxy. The noise of layer l has the norm S_l·√d_l, and
#
#     signal to noise = signal_l/(S_l·√d_l):
#
# an upper figure at the first step. Gradients that disagree cancel, and they shrink as the model learns.
#
# `sizes` are the d_l that count: the numbers that some class reaches (plan/selection.py), where slices leave others
# out. Norms were measured on whole layers, and are taken to shrink by √(d_l/size).

Array = NDArray[np.float64]
ReachedSizes = Sequence[int] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerFigures:
    """One row of `lamina plan --explain`. None: nothing was measured, or the layer has no noise."""

    name: str
    depth: float
    size: int
    reached: int
    clip: tuple[float, ...]
    noise: float
    share: float
    tight: float | None
    worst: float | None
    norm: float | None
    signal_to_noise: float | None


def layer_figures(plan: StepPlan, measure: Measure | None, sizes: ReachedSizes = None) -> tuple[LayerFigures, ...]:
    """A row for each layer, in the order of the plan."""
    ratio, numbers = signal_to_noise(plan, measure, sizes), _reached_sizes(plan, sizes)
    bounds = measure if measure is not None and measure.has_bounds else None
    return tuple(
        LayerFigures(
            name=layer.name, depth=layer.depth, size=layer.size, reached=numbers[i], noise=plan.noise[i], share=share,
            clip=tuple(row[i] for row in plan.clip),
            tight=None if bounds is None else bounds.tight[i], worst=None if bounds is None else bounds.worst[i],
            norm=None if measure is None else measure.norms[i], signal_to_noise=ratio[i],
        )
        for i, (layer, share) in enumerate(zip(plan.layers, layer_shares(plan), strict=True))
    )  # fmt: skip


def signal_to_noise(plan: StepPlan, measure: Measure | None, sizes: ReachedSizes = None) -> tuple[float | None, ...]:
    """signal_l/(S_l·√d_l) of every layer; None where there is no noise."""
    found = zip(layer_signal(plan, measure, sizes).tolist(), plan.noise, _reached_sizes(plan, sizes), strict=True)
    ratio = plan.noise_kind.std_ratio
    return tuple(up / (ratio * s * math.sqrt(d)) if s > 0 else None for up, s, d in found)


def whole_signal_to_noise(plan: StepPlan, measure: Measure | None, sizes: ReachedSizes = None) -> float | None:
    """‖signal‖/√(Σ_l d_l S_l²) over the layers with noise."""
    noise, up = np.array(plan.noise), layer_signal(plan, measure, sizes)
    power = _noise_power(plan, sizes)
    return float(np.linalg.norm(up[noise > 0]) / math.sqrt(power)) if power > 0 else None


def total_noise(plan: StepPlan, sizes: ReachedSizes = None) -> float:
    """Σ_l d_l S_l², times (b/B)²: what a plan divides by another B counts as the optimiser sees it."""
    return _noise_power(plan, sizes) * (float(expected_contributions(plan).sum()) / plan.batch) ** 2


def kept_norm(plan: StepPlan, measure: Measure, sizes: ReachedSizes = None) -> tuple[float | None, ...]:
    """The part of a typical contribution's norm that clipping keeps, by class; None for a class that is not clipped."""
    found: list[float | None] = []
    n = _reached_norms(plan, measure, sizes)
    for k, entry in enumerate(plan.classes):
        reach = np.array(plan.clip[k]) > 0
        whole = float(np.linalg.norm(n[reach]))
        found.append(None if entry.public or not whole else float(np.linalg.norm(_typical_norms(plan, k, n)) / whole))
    return tuple(found)


def expected_contributions(plan: StepPlan) -> Array:
    """b_k, the contributions of each class that a step expects."""
    return np.array([entry.sampling_rate * (entry.population or 0) for entry in plan.classes])


def layer_signal(plan: StepPlan, measure: Measure | None, sizes: ReachedSizes = None) -> Array:
    """Σ_k b_k·n̂_kl by layer. A public class counts only where its norms were measured."""
    n = None if measure is None else _reached_norms(plan, measure, sizes)
    rows = [_typical_norms(plan, k, n) for k in range(len(plan.classes))]
    if plan.clipping is Clipping.ELEMENTWISE:
        return np.asarray(np.max(rows, axis=0))
    return np.asarray(expected_contributions(plan) @ np.array(rows))


def _typical_norms(plan: StepPlan, k: int, n: Array | None) -> Array:
    """n̂_kl: the norms of a typical contribution of class k after clipping."""
    c, s = np.array(plan.clip[k]), np.array(plan.noise)
    reach = c > 0
    if plan.classes[k].public:
        return np.zeros(len(c)) if n is None else np.where(reach, n, 0.0)
    if plan.clipping is Clipping.ELEMENTWISE:
        c = c / 2
    if n is None:
        return c
    if plan.clipping is not Clipping.JOINT:
        return np.asarray(np.minimum(n, c))
    length = float(np.linalg.norm(n[reach] / s[reach]))
    return np.asarray(np.where(reach, n, 0.0) * min(1.0, plan.joint(k) / length if length else 1.0))


def _noise_power(plan: StepPlan, sizes: ReachedSizes) -> float:
    power = math.fsum(d * s * s for d, s in zip(_reached_sizes(plan, sizes), plan.noise, strict=True))
    return power * plan.noise_kind.std_ratio**2


def _reached_sizes(plan: StepPlan, sizes: ReachedSizes) -> tuple[int, ...]:
    return tuple(layer.size for layer in plan.layers) if sizes is None else tuple(sizes)


def _reached_norms(plan: StepPlan, measure: Measure, sizes: ReachedSizes) -> Array:
    part = np.array(_reached_sizes(plan, sizes)) / np.array([layer.size for layer in plan.layers])
    return np.asarray(np.array(measure.norms) * np.sqrt(part))


_BAR_WIDTH = 14


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
        bounds = [three_digits(value, up=True) for value in (row.tight, row.worst)]
        cells += [*bounds, three_digits(row.norm)] if measured else []
        cells += [clip_text(plan, k, i) for k in range(len(plan.classes))]
        noise = at_least(row.noise) if row.noise else "none"
        lines.append([*cells, noise, percent_text(row.share), three_digits(row.signal_to_noise)])
    return table(lines)


def layer_bars(rows: Sequence[LayerFigures]) -> str:
    """Bars from input to output: share of the budget, noise S, signal to noise, Δ where it was measured."""
    columns = [["layer", *(row.name for row in rows)]]
    for title, values, _ in _series(rows):
        texts = [
            percent_text(value or 0.0) if title == "share" else three_digits(value, up="Δ" in title) for value in values
        ]
        wide, most = max(map(len, texts)), max(value or 0.0 for value in values)
        bars = [text_bar(value or 0.0, most).ljust(_BAR_WIDTH) for value in values]
        columns.append([title, *(f"{text:>{wide}} {bar}" for text, bar in zip(texts, bars, strict=True))])
    return table(list(zip(*columns, strict=True)), left=len(columns))


def text_bar(value: float, most: float, wide: int = _BAR_WIDTH) -> str:
    """A bar whose length is value/most of `wide` characters; one at least for what is not 0.

    >>> text_bar(1.0, 2.0, 4), text_bar(0.0, 1.0, 4)
    ('██', '')
    """
    return "█" * max(1, round(wide * min(1.0, value / most))) if value > 0 and most > 0 else ""


def three_digits(value: float | None, *, up: bool = False) -> str:
    """Three digits of what protects or helps, rounded down; of a sensitivity `up`; "-" where there is none."""
    return "-" if value is None else at_most(value, 3) if up else at_least(value, 3)


def percent_text(share: float) -> str:
    """A share of the budget."""
    return f"{100 * share:.1f} %"


PICTURE_SUFFIXES = (".png", ".svg", ".pdf", ".html")


def check_picture(path: Path) -> None:
    """Refuse a file name without a known format, before anything is computed."""
    if path.suffix.lower() not in PICTURE_SUFFIXES:
        problem = f"picture '{path}' has no known format"
        raise PlanError("cli.picture-format-not-known", problem, f"end it in {', '.join(PICTURE_SUFFIXES)}")


def draw_plan(plan: StepPlan, rows: Sequence[LayerFigures], reasons: Sequence[str], path: Path) -> None:
    """Write the picture; the suffix says which kind. HTML needs nothing installed, the others matplotlib."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix.lower() == ".html":
            path.write_text(_html_page(plan, rows, reasons), encoding="utf-8")
        else:
            _plot(plan, rows, path)
    except OSError as error:
        problem = f"the picture '{path}' cannot be written: {error}"
        raise PlanError("cli.file-not-writable", problem, "name a file that can be written") from None


def _plot(plan: StepPlan, rows: Sequence[LayerFigures], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        problem = "matplotlib is not installed"
        remedy = "pip install 'lamina[plot]', or --picture FILE.html, which needs nothing"
        raise LaminaError("cli.matplotlib-missing", problem, remedy) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    series, places = _series(rows), range(len(rows))
    size = (max(6.0, 0.35 * len(rows) + 2), 2.0 * len(series) + 1)
    figure, axes = plt.subplots(len(series), 1, figsize=size, sharex=True, layout="constrained")
    for axis, (title, values, colour) in zip(axes, series, strict=True):
        axis.bar(places, [value or 0.0 for value in values], color=colour)
        axis.set_ylabel(title)
        axis.grid(axis="y", alpha=0.25)
        if title != "share":
            axis.set_yscale("log")
    axes[2].axhline(1.0, color="black", linewidth=0.8)
    axes[-1].set_xticks(list(places), [row.name for row in rows], rotation=60, ha="right", fontsize=7)
    axes[-1].set_xlabel("layers, from input to output")
    figure.suptitle(_title(plan), fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _series(rows: Sequence[LayerFigures]) -> list[tuple[str, list[float | None], str]]:
    """Title, figures and colour of what is drawn of every layer."""
    shown: list[tuple[str, list[float | None], str]] = [
        ("share", [row.share for row in rows], "#1f6f8b"),
        ("noise S", [row.noise for row in rows], "#8c2d04"),
        ("S/N", [row.signal_to_noise for row in rows], "#0b6e4f"),
    ]
    if any(row.tight is not None for row in rows):
        shown.append(("Δ tight", [row.tight for row in rows], "#1f6f8b"))
        shown.append(("Δ global", [row.worst for row in rows], "#b9b4a7"))
    return shown


def _title(plan: StepPlan) -> str:
    return f"{plan.allocation}, {plan.clipping.value} clipping, {plan.steps:,} steps"


def _html_page(plan: StepPlan, rows: Sequence[LayerFigures], reasons: Sequence[str]) -> str:
    series = _series(rows)
    head = "<th>layer</th><th>parameters</th>" + "".join(f'<th colspan="2">{title}</th>' for title, *_ in series)
    lines = []
    for i, row in enumerate(rows):
        cells = [f"<td>{html.escape(row.name)}</td><td>{row.size:,}</td>"]
        for title, values, colour in series:
            width = 100 * (values[i] or 0.0) / (max(value or 0.0 for value in values) or 1.0)
            text = percent_text(row.share) if title == "share" else three_digits(values[i], up="Δ" in title)
            bar = f'<td class="bar"><i style="width:{width:.1f}%;background:{colour}"></i></td>'
            cells.append(f"<td>{text}</td>{bar}")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return packaged_text("lamina.cli", "plan_template.html").format(
        title=html.escape(_title(plan)),
        head=head,
        rows="\n".join(lines),
        reasons="".join(f"<li>{html.escape(reason)}</li>" for reason in reasons),
        plan=html.escape(str(plan)),
    )
