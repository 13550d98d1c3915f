"""The document's figures, drawn from what was measured: PNG for pages and PDF for print."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lamina.errors import RunError
from lamina.study.bounds import bounds_of
from lamina.study.cells import Cell, ResultStore, StudySize, column
from lamina.study.methods import METHODS
from lamina.study.statistics import interval
from lamina.study.tables import ARCHITECTURES, TABLE8, architecture_cell, no_cells, over_seeds

# Okabe and Ito's colours, which colour-blind readers can tell apart; markers and dashes repeat what they say.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "x")
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), "-")
COMPARED = ("none", "flat", "uniform", "quantile", "lsab")
DATA_SETS = (("ecg", "12-lead ECG"), ("cgm", "glucose"), ("waves", "ECG, ABP and PPG"))

Axes = Any  # matplotlib is imported when a figure is drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyFigure:
    """A figure of two or three panels. `panels` draws on axes."""

    name: str
    title: str
    why: str
    width: int  # panels
    cells: Callable[[StudySize], list[Cell]]
    panels: Callable[[Sequence[Axes], ResultStore], None]

    def draw(self, store: ResultStore, folder: Path) -> list[Path]:
        """Write NAME.png and NAME.pdf."""
        try:
            import matplotlib as mpl
        except ImportError:
            problem = "figures need matplotlib, which is not installed"
            raise RunError("study.no-matplotlib", problem, "pip install 'lamina[study]'") from None
        mpl.use("Agg")
        import matplotlib.pyplot as plt

        settings: dict[Any, Any] = {"font.size": 9, "axes.grid": True, "grid.alpha": 0.3}
        settings |= {"axes.spines.top": False, "axes.spines.right": False}
        with plt.rc_context(settings):
            size = (4.2 * self.width, 3.4)
            figure, axes = plt.subplots(1, self.width, figsize=size, layout="constrained", squeeze=False)
            self.panels(list(axes[0]), store)
            figure.suptitle(f"{self.title}\n{self._inputs(store.size)}", fontsize=9)
            paths = [folder / f"{self.name}.png", folder / f"{self.name}.pdf"]
            figure.savefig(paths[0], dpi=160)
            figure.savefig(paths[1], metadata={"CreationDate": None})
            plt.close(figure)
        return paths

    def markdown(self, size: StudySize) -> str:
        inputs = "" if self.cells(size) else f"{self._inputs(size)}.\n\n"
        return f"## {self.title}\n\n![{self.title}]({self.name}.png)\n\n{inputs}{self.why}\n"

    def _inputs(self, size: StudySize) -> str:
        return size.describe(trained=bool(self.cells(size)))


def _label(axes: Axes, x: str, y: str, title: str = "") -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if title:
        axes.set_title(title, fontsize=9)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7)


def _style(i: int) -> dict[str, Any]:
    return {"color": COLOURS[i % 7], "marker": MARKERS[i % 7], "linestyle": DASHES[i % 7], "markersize": 4}


def _line(axes: Axes, i: int, label: str, x: Sequence[float], groups: Sequence[Sequence[float]]) -> None:
    """Means with 95 % limits; where a group is empty, nothing is drawn."""
    found = [(at, interval(list(values))) for at, values in zip(x, groups, strict=True)]
    known = [(at, each) for at, each in found if each is not None]
    if known:
        low = [each.mean - each.low if math.isfinite(each.low) else 0.0 for _, each in known]
        high = [each.high - each.mean if math.isfinite(each.high) else 0.0 for _, each in known]
        means = [each.mean for _, each in known]
        axes.errorbar([at for at, _ in known], means, [low, high], label=label, capsize=2, **_style(i))


# ------------------------------------------------------------------------------------------------ Figures 1, 3 and 4: Δ


def _figure1(axes: Sequence[Axes], store: ResultStore) -> None:
    for panel, activation in zip(axes, ("relu", "gelu"), strict=True):
        layers = bounds_of(activation, 12, store.size.passes).layers
        for i, name in enumerate(("LSAB (local constants)", "global constants", "as printed, with γ")):
            panel.semilogy(range(1, len(layers) + 1), [each[i] for each in layers], label=name, **_style(i))
        _label(panel, "layer", "Δ (input of norm 1)", activation)


def _figure3(axes: Sequence[Axes], store: ResultStore) -> None:
    depths = range(2, 17, 2)
    found = [bounds_of("gelu", depth, store.size.passes) for depth in depths]
    for i, (name, row) in enumerate((("local", 0), ("global", 1))):
        axes[0].semilogy(depths, [each.layers[-1][row] for each in found], label=f"{name} constants", **_style(i))
        kept = [math.sqrt(sum(layer[row] ** 2 for layer in each.layers)) for each in found]
        axes[1].plot(depths, [each.layers[-1][row] / norm for each, norm in zip(found, kept, strict=True)],
                     label=f"C ∝ Δ, {name}", **_style(i))  # fmt: skip
    _label(axes[0], "layers", "Δ (input of norm 1)", "Δ of the last layer")
    _label(axes[1], "layers", "last layer's share of the clip norm", "thresholds in proportion to Δ")


def _figure4(axes: Sequence[Axes], store: ResultStore) -> None:
    x = np.linspace(-4, 4, 400)
    density = np.exp(-0.5 * x**2) / math.sqrt(2 * math.pi)
    axes[0].fill_between(x, density, alpha=0.2, color="#999999", label="density of a standard Gaussian")
    cdf = 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    axes[0].plot(x, (x > 0).astype(float), label="ReLU′", color=COLOURS[0])
    axes[0].plot(x, cdf + x * density, label="GELU′", color=COLOURS[1], linestyle="--")
    _label(axes[0], "pre-activation", "slope", "slopes and where inputs lie")
    for i, activation in enumerate(("relu", "gelu")):
        layers = bounds_of(activation, 12, store.size.passes).layers
        ratios = [each[0] / each[1] for each in layers]
        axes[1].semilogy(range(1, len(layers) + 1), ratios, label=activation, **_style(i))
    _label(axes[1], "layer", "Δ tight / Δ global", "tightness over depth")


# ------------------------------------------------------------------------------------------- Figures 2, 5, 6, 7: training


def _figure2_cells(size: StudySize) -> list[Cell]:
    return [
        Cell(method=method, data=data, epsilon=epsilon, seed=seed, **_pair(data))
        for data, _ in DATA_SETS
        for method in COMPARED
        for epsilon in (size.epsilons if method != "none" else (1.0,))
        for seed in size.seeds
    ]


def _pair(data: str) -> dict[str, Any]:
    """The architecture of a data set in the document's Table 4."""
    name, depth, activation = {
        "ecg": ("residual", 12, "gelu"), "cgm": ("stacked", 8, "relu"), "waves": ("transformer", 8, "silu")
    }[data]  # fmt: skip
    return {"architecture": name, "depth": depth, "activation": activation}


def _figure2(axes: Sequence[Axes], store: ResultStore) -> None:
    for panel, (data, title) in zip(axes, DATA_SETS, strict=True):

        def found(method: str, epsilon: float, data: str = data) -> list[float]:
            return column(over_seeds(store, Cell(method=method, data=data, epsilon=epsilon, **_pair(data))), "mse")

        for i, method in enumerate(COMPARED):
            if method == "none":
                if (values := interval(found("none", 1.0))) is not None:
                    panel.axhline(values.mean, color="#777777", linewidth=1, label="no privacy")
                continue
            _line(panel, i, METHODS[method].title, store.size.epsilons, [found(method, e) for e in store.size.epsilons])
        panel.set_xscale("log")
        panel.set_xticks(store.size.epsilons, [f"{epsilon:g}" for epsilon in store.size.epsilons])
        panel.set_xticks([], minor=True)
        _label(panel, "true ε (δ = 1e-5, per patient)", "error of reconstruction (MSE)", title)
        if panel is not axes[0] and (legend := panel.get_legend()) is not None:
            legend.remove()  # it is the same, and would hide something


DEPTH_METHODS = ("lsab", "flat", "uniform")
STRATEGIES = ("lsab", "lsab-equal", "pareto", "flat")


def _figure5_cells(size: StudySize) -> list[Cell]:
    deep = [Cell(method=m, depth=d, seed=s) for m in DEPTH_METHODS for d in size.depths for s in size.seeds]
    return deep + [Cell(method=m, seed=s) for m in STRATEGIES for s in size.seeds]


def _figure5(axes: Sequence[Axes], store: ResultStore) -> None:
    depths = store.size.depths
    for i, method in enumerate(DEPTH_METHODS):
        groups = [column(over_seeds(store, Cell(method=method, depth=d)), "auc") for d in depths]
        _line(axes[0], i, METHODS[method].title, depths, groups)
    _label(axes[0], "layers of the residual autoencoder", "AUC", "depth")
    _bars(axes[1], store, STRATEGIES, "mse", "error of reconstruction (MSE)")


def _bars(axes: Axes, store: ResultStore, methods: Sequence[str], name: str, label: str) -> None:
    groups = [column(over_seeds(store, Cell(method=m)), name) for m in methods]
    found = [(METHODS[m].title, each) for m, values in zip(methods, groups, strict=True) if (each := interval(values))]
    half = [each.high - each.mean if math.isfinite(each.high) else 0.0 for _, each in found]
    titles, means = [title for title, _ in found], [each.mean for _, each in found]
    axes.barh(titles, means, xerr=half, color=COLOURS[0], alpha=0.75, capsize=2)
    axes.invert_yaxis()
    _label(axes, label, "")


def _figure6_cells(size: StudySize) -> list[Cell]:
    rest = [architecture_cell(*each, method) for each in ARCHITECTURES for method in ("lsab", "lsab-equal")]
    return [replace(cell, seed=s) for cell in [Cell(method=m) for m in TABLE8] + rest for s in size.seeds]


def _figure6(axes: Sequence[Axes], store: ResultStore) -> None:
    _bars(axes[0], store, TABLE8, "mse", "error of reconstruction (MSE)")
    names = [name for name, _, _ in ARCHITECTURES]
    for i, method in enumerate(("lsab", "lsab-equal")):
        groups = [column(over_seeds(store, architecture_cell(*each, method)), "mse") for each in ARCHITECTURES]
        _line(axes[1], i, METHODS[method].title, list(range(len(names))), groups)
    axes[1].set_xticks(range(len(names)), names, rotation=20)
    _label(axes[1], "architecture", "error of reconstruction (MSE)")


SHARES = (0.25, 0.5, 1.0)
ATTACKED = ("none", "flat", "uniform", "lsab")


def _figure7_cells(size: StudySize) -> list[Cell]:
    timed = [Cell(method=m, seed=size.seeds[0], share=share) for m in ("none", "lsab") for share in SHARES]
    return timed + [Cell(method=m, seed=s) for m in ATTACKED for s in size.seeds]


def _figure7(axes: Sequence[Axes], store: ResultStore) -> None:
    seed, people = store.size.seeds[0], [round(share * store.size.patients) for share in SHARES]
    for i, method in enumerate(("none", "lsab")):
        found = [store.get(Cell(method=method, seed=seed, share=share)) or {} for share in SHARES]
        for kind, style in (("train_seconds", "-"), ("profile_seconds", ":")):
            if method == "none" and kind == "profile_seconds":
                continue
            values = [each.get(kind) for each in found]
            if all(value is not None for value in values):
                label = f"{METHODS[method].title}: {'training' if kind == 'train_seconds' else 'profiling'}"
                axes[0].plot(people, values, label=label, color=COLOURS[i], marker=MARKERS[i], linestyle=style)
    axes[0].set_xticks(people, [f"{count:,}" for count in people])
    _label(axes[0], "patients", "processor seconds for the same number of passes", "time")
    _bars(axes[1], store, ATTACKED, "mia", "AUC of the membership attack (0.5: guessing)")
    axes[1].axvline(0.5, color="#777777", linewidth=1)


FIGURES = {
    figure.name: figure
    for figure in (
        StudyFigure(
            name="figure1", title="Figure 1. Δ by layer", width=2, cells=no_cells, panels=_figure1,
            why="Local constants are smaller than global ones, and the gap grows with depth, as the document says. It is a fact "
                "about activations, not about gradients: no noise is saved by it.",
        ),
        StudyFigure(
            name="figure2", title="Figure 2. Error over ε on three kinds of data", width=3, cells=_figure2_cells, panels=_figure2,
            why="The document shows LSAB ahead everywhere; here all methods have the same true ε.",
        ),
        StudyFigure(
            name="figure3", title="Figure 3. Δ and thresholds over depth", width=2, cells=no_cells, panels=_figure3,
            why="The document's budget falls with Δ. With clipping to C the budget is what was declared, at any depth; Δ only "
                "says how the clip norm is divided among layers.",
        ),
        StudyFigure(
            name="figure4", title="Figure 4. Slopes, and tightness over depth", width=2, cells=no_cells, panels=_figure4,
            why="The slopes are as the document has them.",
        ),
        StudyFigure(
            name="figure5", title="Figure 5. Depth, and how noise is placed (ε = 1)", width=2, cells=_figure5_cells, panels=_figure5,
            why="Right: with the same thresholds, one S against the least Σ m·S²; and the same without boxes.",
        ),
        StudyFigure(
            name="figure6", title="Figure 6. Parts of LSAB left out (ε = 1)", width=2, cells=_figure6_cells, panels=_figure6,
            why="The document's ablation has each part help in the same order everywhere; intervals show what can be said here.",
        ),
        StudyFigure(
            name="figure7", title="Figure 7. Time, and membership inference (ε = 1)", width=2, cells=_figure7_cells, panels=_figure7,
            why="Time is of this machine. Profiling does not depend on the number of patients, because it never reads one.",
        ),
    )
}  # fmt: skip
