"""The activation profile as a plain value: saved, read, checked and printed."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamina.errors import PlanError
from lamina.sensitivity.trace import OperationKind

PROFILE_KIND, PROFILE_VERSION = "lamina.profile", 1


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
    kind: OperationKind
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
class ActivationProfile:
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
        check_profile(self)

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

    def non_gaussian(self, threshold: float = 0.1) -> tuple[NodeProfile, ...]:
        """The activations whose input is further from Gaussian than `threshold` (Kolmogorov distance)."""
        return tuple(node for node in self.activations if node.before is not None and node.before.ks > threshold)

    # ----------------------------------------------------------------------------------- how it is told

    def report(self, threshold: float = 0.1) -> str:
        """A table of pre-activations, normalisations and attentions; says where assumption A3 fails."""
        weights = f"{self.initialisations} initialisations" if self.initialisations else "the model's own weights"
        lines = [
            f"profile of {self.model}: {self.passes:,} passes on {self.proxy} inputs of norm ≤ {self.radius:g}, "
            f"{weights}",
            "",
        ]
        rows = [["node", "module", "kind", "mean", "std", "KS", "note"]]
        failed = {node.name for node in self.non_gaussian(threshold)}
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
                c.rjust(w) if 3 <= i <= 5 else c.ljust(w) for i, (c, w) in enumerate(zip(entry, widths, strict=True))
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
        state = {"kind": PROFILE_KIND, "version": PROFILE_VERSION, **dataclasses.asdict(self)}
        return json.dumps(state, allow_nan=False, ensure_ascii=False, indent=1)

    @classmethod
    def from_json(cls, text: str) -> ActivationProfile:
        """Read what `to_json` wrote; unknown or missing keys, NaN and wrong types are refused."""
        try:
            data = json.loads(text, parse_constant=refuse_constant, object_pairs_hook=no_duplicates)
        except (ValueError, RecursionError) as error:
            raise PlanError("measure.profile-not-json", f"the profile is not JSON: {error}", PROFILE_AGAIN) from error
        if not isinstance(data, dict) or data.get("kind") != PROFILE_KIND or data.get("version") != PROFILE_VERSION:
            raise PlanError(
                "measure.not-version", f"this is not a {PROFILE_KIND} of version {PROFILE_VERSION}", PROFILE_AGAIN
            )
        state = {key: value for key, value in data.items() if key not in ("kind", "version")}
        nodes = state.get("nodes")
        if isinstance(nodes, list):
            state["nodes"] = tuple(_node_from_json(node, f"nodes[{i}]") for i, node in enumerate(nodes))
        made: ActivationProfile = record_from_dict(cls, state, "profile")
        return made

    def save(self, path: str | Path) -> None:
        """Write the JSON to a file."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> ActivationProfile:
        """Read a file that `save` wrote."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(
                "measure.profile-not-read",
                f"the profile {str(path)!r} cannot be read: {error}",
                "give a file that save wrote",
            ) from error


def _node_from_json(row: Any, where: str) -> Any:
    """One node from what JSON gave: the record within it first."""
    if isinstance(row, dict) and isinstance(row.get("before"), dict):
        row = {**row, "before": record_from_dict(PreActivation, row["before"], f"{where}.before")}
    return record_from_dict(NodeProfile, row, where)


PROFILE_AGAIN = "give what Profile.save wrote, or profile the model again"


def record_from_dict(kind: type[Any], row: Any, where: str) -> Any:
    """One record from a dict that must have exactly its fields; every value of the right type."""
    fields = {f.name: f for f in dataclasses.fields(kind)}
    if not isinstance(row, Mapping) or set(row) != set(fields):
        found = sorted(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
        raise PlanError("measure.fields", f"{where} has fields {found}, must have {sorted(fields)}", PROFILE_AGAIN)
    made = {name: _typed_value(row[name], str(field.type), f"{where}.{name}") for name, field in fields.items()}
    return kind(**made)


def _typed_value(value: Any, annotation: str, where: str) -> Any:
    if dataclasses.is_dataclass(value) or (annotation == "PreActivation | None" and value is None):
        return value
    if annotation == "tuple[float, ...]":
        if not isinstance(value, list) or not all(type(v) is float for v in value):
            raise PlanError(
                "measure.profile-list-numbers",
                f"{where} of the profile is {value!r:.60}, must be a list of numbers",
                PROFILE_AGAIN,
            )
        return tuple(value)
    if annotation == "OperationKind":
        if value not in {kind.value for kind in OperationKind}:
            raise PlanError(
                "measure.profile-no-kind",
                f"{where} of the profile is {value!r}, which is no kind of operation",
                PROFILE_AGAIN,
            )
        return OperationKind(value)
    if annotation == "float | None" and value is None:
        return None
    expected = {"float": float, "float | None": float, "int": int, "str": str}.get(annotation, tuple)
    if type(value) is not expected:
        raise PlanError(
            "measure.profile-type",
            f"{where} of the profile is {value!r:.60}, must be of type {expected.__name__}",
            PROFILE_AGAIN,
        )
    return value


def check_profile(profile: ActivationProfile) -> None:
    """Numbers that make sense: finite, variances not negative, distances within [0, 1]."""
    for name, least in (("passes", 1), ("batch", 1), ("initialisations", 0)):
        if getattr(profile, name) < least:
            raise PlanError(
                "measure.profile-2",
                f"{name} of the profile is {getattr(profile, name)}, must be >= {least}",
                PROFILE_AGAIN,
            )
    for name in ("radius", "epsilon_n"):
        value = getattr(profile, name)
        if not (math.isfinite(value) and value > 0):
            raise PlanError(
                "measure.profile-finite", f"{name} of the profile is {value!r}, must be finite and > 0", PROFILE_AGAIN
            )
    if not profile.nodes or len({node.name for node in profile.nodes}) != len(profile.nodes):
        raise PlanError("measure.profile-no-nodes", "the profile has no nodes, or two of one name", PROFILE_AGAIN)
    for node in profile.nodes:
        _check_node(node)


def _check_node(node: NodeProfile) -> None:
    finite = [node.mean, *((node.before.mean, *node.before.unit_means) if node.before else ())]
    positive = [node.variance, *node.seen, *node.norms, *(x for x in (node.jacobian, node.peak) if x is not None)]
    if node.before is not None:
        positive += [node.before.variance, node.before.ks, *node.before.unit_variances]
        if len(node.before.unit_means) != len(node.before.unit_variances):
            raise PlanError(
                "measure.unit-means-unit",
                f"{node.where} has {len(node.before.unit_means)} unit means and "
                f"{len(node.before.unit_variances)} unit variances, must be as many",
                PROFILE_AGAIN,
            )
    if not all(map(math.isfinite, finite)) or not all(math.isfinite(x) and x >= 0 for x in positive):
        raise PlanError(
            "measure.statistic-not-finite",
            f"{node.where} has a statistic that is not finite, or a negative variance or norm",
            "check the weights for NaN and the proxy inputs for their size, then profile again",
        )
    if node.before is not None and node.before.ks > 1:
        raise PlanError(
            "measure.ks-distance",
            f"{node.where} has a KS distance of {node.before.ks}, must be at most 1",
            PROFILE_AGAIN,
        )


def refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key occurs twice")
    return made
