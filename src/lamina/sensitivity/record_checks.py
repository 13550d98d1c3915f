"""What a profile must be: exactly its fields, of the right types, finite, of one length where they belong together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lamina.errors import PlanError
from lamina.sensitivity.kinds import Kind

if TYPE_CHECKING:
    from lamina.sensitivity.record import NodeProfile, Profile

AGAIN = "give what Profile.save wrote, or profile the model again"


def made_of(kind: type[Any], row: Any, where: str) -> Any:
    """One record from a dict that must have exactly its fields; every value of the right type."""
    fields = {f.name: f for f in dataclasses.fields(kind)}
    if not isinstance(row, Mapping) or set(row) != set(fields):
        found = sorted(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
        raise PlanError("measure.fields", f"{where} has fields {found}, must have {sorted(fields)}", AGAIN)
    made = {name: _typed(row[name], str(field.type), f"{where}.{name}") for name, field in fields.items()}
    return kind(**made)


def _typed(value: Any, annotation: str, where: str) -> Any:
    if dataclasses.is_dataclass(value) or (annotation == "PreActivation | None" and value is None):
        return value
    if annotation == "tuple[float, ...]":
        if not isinstance(value, list) or not all(type(v) is float for v in value):
            raise PlanError(
                "measure.profile-list-numbers",
                f"{where} of the profile is {value!r:.60}, must be a list of numbers",
                AGAIN,
            )
        return tuple(value)
    if annotation == "Kind":
        if value not in {kind.value for kind in Kind}:
            raise PlanError(
                "measure.profile-no-kind",
                f"{where} of the profile is {value!r}, which is no kind of operation",
                AGAIN,
            )
        return Kind(value)
    if annotation == "float | None" and value is None:
        return None
    expected = {"float": float, "float | None": float, "int": int, "str": str}.get(annotation, tuple)
    if type(value) is not expected:
        raise PlanError(
            "measure.profile-type",
            f"{where} of the profile is {value!r:.60}, must be of type {expected.__name__}",
            AGAIN,
        )
    return value


def check(profile: Profile) -> None:
    """Numbers that make sense: finite, variances not negative, distances within [0, 1]."""
    for name, least in (("passes", 1), ("batch", 1), ("initialisations", 0)):
        if getattr(profile, name) < least:
            raise PlanError(
                "measure.profile-2",
                f"{name} of the profile is {getattr(profile, name)}, must be >= {least}",
                AGAIN,
            )
    for name in ("radius", "epsilon_n"):
        value = getattr(profile, name)
        if not (math.isfinite(value) and value > 0):
            raise PlanError(
                "measure.profile-finite", f"{name} of the profile is {value!r}, must be finite and > 0", AGAIN
            )
    if not profile.nodes or len({node.name for node in profile.nodes}) != len(profile.nodes):
        raise PlanError("measure.profile-no-nodes", "the profile has no nodes, or two of one name", AGAIN)
    for node in profile.nodes:
        _check_node(node)


def _check_node(node: NodeProfile) -> None:
    finite = [node.mean, *((node.before.mean, *node.before.unit_means) if node.before else ())]
    positive = [
        node.variance,
        *node.seen,
        *node.norms,
        *(x for x in (node.jacobian, node.peak) if x is not None),
    ]
    if node.before is not None:
        positive += [node.before.variance, node.before.ks, *node.before.unit_variances]
        if len(node.before.unit_means) != len(node.before.unit_variances):
            raise PlanError(
                "measure.unit-means-unit",
                f"{node.where} has {len(node.before.unit_means)} unit means and "
                f"{len(node.before.unit_variances)} unit variances, must be as many",
                AGAIN,
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
            AGAIN,
        )


def refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key occurs twice")
    return made
