"""The answer of `lamina plan`, for people and for machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lamina.allocate import Allocation
from lamina.cli.explain.compare import Row, comparison
from lamina.cli.explain.figures import LayerFigures, layer_figures, total_noise, whole_signal_to_noise
from lamina.cli.explain.layers import layer_bars, layer_table
from lamina.cli.explain.words import rules_in_words, signal_note, why
from lamina.plan import StepPlan

if TYPE_CHECKING:
    from lamina.sensitivity import Measure


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A plan, the allocation behind it, and what else was asked: reasons (`full`), other policies (`compared`).

    `sizes`: how many numbers of each layer are reached; all of them if it is left out.
    """

    plan: StepPlan
    allocation: Allocation
    measure: Measure | None
    notes: tuple[str, ...]
    compared: Sequence[Row] | None
    chosen: str
    full: bool
    sizes: Sequence[int] | None = None

    @property
    def layers(self) -> tuple[LayerFigures, ...]:
        return layer_figures(self.plan, self.measure, self.sizes)

    @property
    def why(self) -> tuple[str, ...]:
        return why(self.plan, self.allocation, self.measure, self.sizes)

    def to_dict(self) -> dict[str, Any]:
        """The figures of the plan, and beside them what follows from a measure; null where there is none."""
        told = self.plan.to_dict()
        for entry, row in zip(told["layers"], self.layers, strict=True):
            entry |= {
                "delta_tight": row.tight,
                "delta_global": row.worst,
                "norm": row.norm,
                "signal_to_noise": row.signal_to_noise,
                "reached": row.reached if any(c > 0 for c in row.clip) else 0,
            }
        told |= {
            "total_noise": total_noise(self.plan, self.sizes),
            "signal_to_noise": whole_signal_to_noise(self.plan, self.measure, self.sizes),
            "proxy": None if self.measure is None else self.measure.proxy,
            "why": list(self.why),
            "notes": [*self.notes, *(self.measure.notes if self.measure is not None else ())],
        }
        if self.compared is not None:
            told["compare"] = [row.to_dict() for row in self.compared]
        return told

    def __str__(self) -> str:
        """The plan as ever; with `full` the layers in more columns, as bars, and why; then the comparison."""
        parts = [str(self.plan)]
        if self.full:
            head, _, classes = str(self.plan).split("\n\n", 2)
            reasons = "\n".join(f"- {reason}" for reason in self.why)
            parts = [
                head,
                layer_table(self.plan, self.layers),
                signal_note(self.measure),
                layer_bars(self.layers),
            ]
            parts += [classes, f"why this plan\n{reasons}"]
        notes = [f"note: {note}" for note in self.notes]
        if not self.full:
            notes = [*(f"rule: {rule}" for rule in rules_in_words(self.plan)), *notes]
        if self.measure is not None:
            notes += [f"note: measured: {note}" for note in self.measure.notes]
        if notes:
            parts[-1] += "\n" + "\n".join(notes)
        if self.compared is not None:
            parts.append(comparison(self.compared, self.chosen, self.measure))
        return "\n\n".join(parts)
