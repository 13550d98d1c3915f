"""What profiling found: a plain value that can be saved, read and printed."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamina.errors import PlanError
from lamina.sensitivity.kinds import Kind
from lamina.sensitivity.record_checks import AGAIN, check, made_of, no_duplicates, refuse_constant

KIND, VERSION = "lamina.profile", 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PreActivation:
    """What enters an activation: z over all passes and entries.

    mean, variance              of all entries, μ_l and σ_l² of the LSAB document
    ks                          Kolmogorov distance to N(mean, variance), from a sample of fixed size: assumption A3
    unit_means, unit_variances  of every unit (channel or feature); empty if there are too many
    """

    mean: float
    variance: float
    ks: float
    unit_means: tuple[float, ...] = ()
    unit_variances: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeProfile:
    """One operation on the proxy inputs.

    mean, variance  of all entries of its value
    before          of an activation: what enters it
    seen            of a normalisation: the mean variance (RMSNorm: mean square) that it divides by, per group
    jacobian        of attention and softmax: the mean norm of diag(a)-aaᵀ over rows a of weights
    peak            of the same: the mean of a_max(1-a_max), which the LSAB document takes for that norm (eq. 20)
    norms           of attention: mean spectral norms of weights, query, key, value; of a product of two
                    matrices: of its left and right factor
    """

    name: str
    operation: str
    kind: Kind
    module: str
    mean: float
    variance: float
    before: PreActivation | None = None
    seen: tuple[float, ...] = ()
    jacobian: float | None = None
    peak: float | None = None
    norms: tuple[float, ...] = ()

    @property
    def std(self) -> float:
        return math.sqrt(self.variance)

    @property
    def where(self) -> str:
        """The operation with its place in the model."""
        return f"{self.name} ({self.operation}{f' in {self.module}' if self.module else ''})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Statistics of a model's activations on proxy inputs; no patient's record was read for it.

    proxy            where the inputs came from: 'gaussian', 'public' or 'simulated', perhaps with a remark
    passes           how many inputs (made-up patients) went through the model, `batch` at a time
    initialisations  how often the weights were drawn anew, once per batch; 0: the model's own weights
    radius           public L2 radius to which each input was clipped: Δ₀ = 2·radius
    epsilon_n        what eq. 8 of the LSAB document adds to a variance
    """

    model: str
    proxy: str
    passes: int
    batch: int
    initialisations: int
    radius: float
    seed: int
    epsilon_n: float
    nodes: tuple[NodeProfile, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", tuple(self.nodes))
        check(self)

    def __getitem__(self, name: str) -> NodeProfile:
        for node in self.nodes:
            if node.name == name:
                return node
        raise PlanError(
            "measure.profile-no-node",
            f"the profile of {self.model} has no node {name!r}",
            "it belongs to another model, or to another version of it: profile this one",
        )

    @property
    def activations(self) -> tuple[NodeProfile, ...]:
        """The nodes with a pre-activation, in order."""
        return tuple(node for node in self.nodes if node.before is not None)

    def a3_failures(self, threshold: float = 0.1) -> tuple[NodeProfile, ...]:
        """The activations whose input is further from Gaussian than `threshold` (Kolmogorov distance)."""
        return tuple(
            node for node in self.activations if node.before is not None and node.before.ks > threshold
        )

    # ----------------------------------------------------------------------------------- how it is told

    def report(self, threshold: float = 0.1) -> str:
        """A table of pre-activations, normalisations and attentions; says where assumption A3 fails."""
        weights = (
            f"{self.initialisations} initialisations" if self.initialisations else "the model's own weights"
        )
        lines = [
            f"profile of {self.model}: {self.passes:,} passes on {self.proxy} inputs of norm ≤ {self.radius:g}, "
            f"{weights}",
            "",
        ]
        rows = [["node", "module", "kind", "mean", "std", "KS", "note"]]
        failed = {node.name for node in self.a3_failures(threshold)}
        for node in self.nodes:
            if node.before is not None:
                b = node.before
                note = "not Gaussian (A3 fails)" if node.name in failed else ""
                row = [f"{b.mean:.4g}", f"{math.sqrt(b.variance):.4g}", f"{b.ks:.3f}", note]
            elif node.seen:
                row = ["", f"{math.sqrt(sum(node.seen) / len(node.seen)):.4g}", "", "std that it divides by"]
            elif node.jacobian is not None:
                row = ["", "", "", f"‖diag(a)-aaᵀ‖ {node.jacobian:.3g}, printed {node.peak:.3g}"]
            else:
                continue
            rows.append([node.name, node.module, node.kind.value, *row])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for entry in rows:
            cells = [
                c.rjust(w) if 3 <= i <= 5 else c.ljust(w)
                for i, (c, w) in enumerate(zip(entry, widths, strict=True))
            ]
            lines.append("  ".join(cells).rstrip())
        total = len(self.activations)
        lines += [
            "",
            f"A3 (Gaussian pre-activations) fails at {len(failed)} of {total} activations (KS > {threshold:g})",
        ]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.report()

    # ----------------------------------------------------------------------------------- how it is kept

    def to_json(self) -> str:
        """Strict JSON from which `from_json` makes the same profile, bit for bit."""
        state = {"kind": KIND, "version": VERSION, **dataclasses.asdict(self)}
        return json.dumps(state, allow_nan=False, ensure_ascii=False, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Read what `to_json` wrote; unknown or missing keys, NaN and wrong types are refused."""
        try:
            data = json.loads(text, parse_constant=refuse_constant, object_pairs_hook=no_duplicates)
        except (ValueError, RecursionError) as error:
            raise PlanError("measure.profile-not-json", f"the profile is not JSON: {error}", AGAIN) from error
        if not isinstance(data, dict) or data.get("kind") != KIND or data.get("version") != VERSION:
            raise PlanError("measure.not-version", f"this is not a {KIND} of version {VERSION}", AGAIN)
        state = {key: value for key, value in data.items() if key not in ("kind", "version")}
        nodes = state.get("nodes")
        if isinstance(nodes, list):
            state["nodes"] = tuple(_node(node, f"nodes[{i}]") for i, node in enumerate(nodes))
        made: Profile = made_of(cls, state, "profile")
        return made

    def save(self, path: str | Path) -> None:
        """Write the JSON to a file."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a file that `save` wrote."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(
                "measure.profile-not-read",
                f"the profile {str(path)!r} cannot be read: {error}",
                "give a file that save wrote",
            ) from error


def _node(row: Any, where: str) -> Any:
    """One node from what JSON gave: the record within it first."""
    if isinstance(row, dict) and isinstance(row.get("before"), dict):
        row = {**row, "before": made_of(PreActivation, row["before"], f"{where}.before")}
    return made_of(NodeProfile, row, where)
