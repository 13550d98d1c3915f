"""One picture of a benchmark result: bars of time and memory per workload, logarithmic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lamina.errors import LaminaError

_SHOWN = {
    "box": "Lamina, box",
    "joint": "Lamina, joint",
    "opacus_hooks": "Opacus hooks",
    "opacus_per_layer": "Opacus per layer",
    "opacus_ghost": "Opacus ghost",
}
_COLOURS = ("#0b6e4f", "#6bbf9c", "#8c2d04", "#d94801", "#fdae6b")


def draw(result: dict[str, Any], path: Path) -> Path:
    """Write a PNG (or SVG, PDF by suffix) and return its path."""
    try:
        import matplotlib
    except ImportError as error:
        raise LaminaError(
            "bench.matplotlib-not-installed", "matplotlib is not installed", "pip install 'lamina[plot]'"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    workloads = list(result["workloads"])
    figure, axes = plt.subplots(2, 1, figsize=(9.5, 7.5), sharex=True, layout="constrained")
    width = 0.8 / len(_SHOWN)
    for row, axis in enumerate(axes):
        for position, (variant, label) in enumerate(_SHOWN.items()):
            heights = [_height(result["workloads"][name], variant, row) for name in workloads]
            places = [index + (position - (len(_SHOWN) - 1) / 2) * width for index in range(len(workloads))]
            bars = axis.bar(places, heights, width, label=label, color=_COLOURS[position])
            axis.bar_label(bars, [f"{h:.2g}" if h else "–" for h in heights], fontsize=6, padding=1)
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_yscale("log")
        axis.grid(axis="y", which="both", alpha=0.25)
    axes[0].set_ylabel("time of a step / plain step")
    axes[1].set_ylabel("peak memory / plain step")
    axes[0].legend(ncols=len(_SHOWN), fontsize=7, loc="upper center")
    axes[1].set_xticks(range(len(workloads)), workloads)
    about = result["about"]
    figure.suptitle(
        f"Cost of a private step: medians, {about['threads']} threads, torch {about['torch']}", fontsize=10
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _height(found: dict[str, Any], variant: str, row: int) -> float:
    detail = found["detail"].get(variant) or {}
    if row == 1:
        return float(detail.get("memory_ratio") or 0.0)
    return float((detail.get("time") or {}).get("median") or 0.0)
