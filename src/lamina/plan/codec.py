"""A step plan as strict JSON and as deterministic CBOR; both give back the same plan, bit for bit."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lamina import cbor
from lamina.errors import EncodingError, PlanError
from lamina.plan import rules

if TYPE_CHECKING:
    from lamina.plan.step_plan import StepPlan


KIND, VERSION = "lamina.plan", 3
_MAX_BYTES = 1 << 26
_INF = "inf"  # JSON has no infinity; CBOR has, but one form for both is easier to read and to check
_FIELDS = {
    "": {
        "layers",
        "classes",
        "clip",
        "noise",
        "batch",
        "steps",
        "clipping",
        "accountant",
        "allocation",
        "rules",
        "injection",
        "slices",
        "claimed",
    },
    "injection": {"form", "parts", "occurrences"},
    "slices": {"cls", "tensor", "axis", "length", "ranges"},
    "layers": {"name", "depth", "parameters", "size"},
    "classes": {"name", "population", "sampling_rate", "public", "delta", "unit", "profile", "purposes"},
}


def to_json(plan: StepPlan) -> str:
    """One line of JSON; floats in the shortest form that reads back exactly."""
    return json.dumps(_plan_to_fields(plan), allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def from_json(text: str) -> dict[str, Any]:
    """The fields of a plan, from `to_json`."""
    try:
        data = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise PlanError(
            "plan.plan-not-json", f"the plan is not JSON: {error}", "give what StepPlan.to_json wrote"
        ) from error
    return _check_fields(data)


def to_cbor(plan: StepPlan) -> bytes:
    """RFC 8949 deterministic encoding, with floats."""
    return cbor.encode(_plan_to_fields(plan), floats=True, null=True, max_size=_MAX_BYTES)


def from_cbor(data: bytes) -> dict[str, Any]:
    """The fields of a plan, from `to_cbor`."""
    try:
        return _check_fields(cbor.decode(data, floats=True, null=True, max_size=_MAX_BYTES))
    except EncodingError as error:
        raise PlanError(
            "plan.plan-not-deterministic",
            f"the plan is not deterministic CBOR: {error}",
            "give what StepPlan.to_cbor wrote",
        ) from error


def _plan_to_fields(plan: StepPlan) -> dict[str, Any]:
    state = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    return {
        "kind": KIND,
        "version": VERSION,
        **state,
        "layers": [dataclasses.asdict(layer) for layer in plan.layers],
        "classes": [dataclasses.asdict(entry) for entry in plan.classes],
        "clip": [[_INF if math.isinf(c) else c for c in row] for row in plan.clip],
        "clipping": plan.clipping.value,
        "rules": [rules.rule_to_dict(rule) for rule in plan.rules],
        "injection": plan.injection.to_plain(),
        "slices": [
            {**dataclasses.asdict(part), "ranges": [list(places) for places in part.ranges]} for part in plan.slices
        ],
        "claimed": [_INF if math.isinf(e) else e for e in plan.claimed],
    }


def _check_fields(data: Any) -> dict[str, Any]:
    """Check names and types of everything; the meaning is checked by the plan itself."""
    if not isinstance(data, dict) or data.get("kind") != KIND or data.get("version") != VERSION:
        raise PlanError(
            "plan.not-version", f"this is not a {KIND} of version {VERSION}", "give a plan that this version wrote"
        )
    state = {key: value for key, value in data.items() if key not in ("kind", "version")}
    _check_keys(state, "", "plan")
    _check_keys(state["injection"], "injection", "injection")
    for part in ("layers", "classes", "slices"):
        for row in _list(state[part], part):
            _check_keys(row, part, part)
    return {
        **state,
        "layers": [_read_layer(row) for row in state["layers"]],
        "classes": [_read_class(row) for row in state["classes"]],
        "clip": tuple(
            tuple(math.inf if c == _INF else _number(c, "clip") for c in _list(row, "clip"))
            for row in _list(state["clip"], "clip")
        ),
        "noise": tuple(_number(s, "noise") for s in _list(state["noise"], "noise")),
        "batch": _number(state["batch"], "batch"),
        "steps": _typed(state["steps"], int, "steps"),
        "clipping": _typed(state["clipping"], str, "clipping"),
        "accountant": _typed(state["accountant"], str, "accountant"),
        "allocation": _typed(state["allocation"], str, "allocation"),
        "rules": tuple(rules.rule_from_dict(rule) for rule in _list(state["rules"], "rules")),
        "injection": _read_injection(state["injection"]),
        "slices": [_read_slice(row) for row in state["slices"]],
        "claimed": tuple(math.inf if e == _INF else _number(e, "claimed") for e in _list(state["claimed"], "claimed")),
    }


def _read_layer(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": _typed(row["name"], str, "layers.name"),
        "depth": _number(row["depth"], "layers.depth"),
        "parameters": _strings(row["parameters"], "layers.parameters"),
        "size": _typed(row["size"], int, "layers.size"),
    }


def _read_class(row: Mapping[str, Any]) -> dict[str, Any]:
    population = row["population"]
    return {
        "name": _typed(row["name"], str, "classes.name"),
        "population": None if population is None else _typed(population, int, "classes.population"),
        "sampling_rate": _number(row["sampling_rate"], "classes.sampling_rate"),
        "public": _typed(row["public"], bool, "classes.public"),
        "delta": _number(row["delta"], "classes.delta"),
        "unit": _typed(row["unit"], str, "classes.unit"),
        "profile": _typed(row["profile"], str, "classes.profile"),
        "purposes": _strings(row["purposes"], "classes.purposes"),
    }


def _read_injection(row: Mapping[str, Any]) -> dict[str, Any]:
    cap = row["occurrences"]
    return {
        "form": _typed(row["form"], str, "injection.form"),
        "parts": _typed(row["parts"], int, "injection.parts"),
        "occurrences": None if cap is None else _typed(cap, int, "injection.occurrences"),
    }


def _read_slice(row: Mapping[str, Any]) -> dict[str, Any]:
    places = [_list(places, "slices.ranges") for places in _list(row["ranges"], "slices.ranges")]
    if any(len(pair) != 2 for pair in places):
        raise PlanError(
            "plan.slices-ranges-plan", f"slices.ranges of the plan is {row['ranges']!r}", "the plan is damaged"
        )
    return {
        "cls": _typed(row["cls"], str, "slices.cls"),
        "tensor": _typed(row["tensor"], str, "slices.tensor"),
        "axis": _typed(row["axis"], int, "slices.axis"),
        "length": _typed(row["length"], int, "slices.length"),
        "ranges": tuple((_typed(a, int, "slices.ranges"), _typed(b, int, "slices.ranges")) for a, b in places),
    }


def _check_keys(row: Any, part: str, where: str) -> None:
    if not isinstance(row, dict) or set(row) != _FIELDS[part]:
        found = sorted(map(str, row)) if isinstance(row, dict) else type(row).__name__
        raise PlanError("plan.fields", f"{where} has fields {found}", f"it must have {sorted(_FIELDS[part])}")


def _list(value: Any, where: str) -> list[Any]:
    return list(_typed(value, list, where))


def _strings(value: Any, where: str) -> tuple[str, ...]:
    return tuple(_typed(word, str, where) for word in _list(value, where))


def _number(value: Any, where: str) -> float:
    return float(_typed(value, float, where))


def _typed(value: Any, kind: type, where: str) -> Any:
    if type(value) is not kind:
        raise PlanError(
            "plan.plan-type",
            f"{where} of the plan is {value!r}, must be of type {kind.__name__}",
            "the plan is damaged",
        )
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key occurs twice")
    return made
