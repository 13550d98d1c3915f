"""A step plan as strict JSON and as deterministic CBOR; both give back the same plan, bit for bit."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lamina import cbor
from lamina.errors import EncodingError, PlanError
from lamina.plan.rules import RULE_KINDS, Injection, NoiseKind, Rule
from lamina.plan.selection import Slice
from lamina.validate import distinct_fields, short_repr

if TYPE_CHECKING:
    from lamina.plan.step_plan import StepPlan


KIND, VERSION = "lamina.plan", 4
_MAX_BYTES = 1 << 26
_INF = "inf"  # JSON has no infinity; CBOR has, but one form for both is easier to read and to check


def to_json(plan: StepPlan) -> str:
    """One line of JSON; floats in the shortest form that reads back exactly."""
    return json.dumps(_plan_to_fields(plan), allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def from_json(text: str) -> dict[str, Any]:
    """The fields of a plan, from `to_json`."""
    try:
        return _read_plan(strict_json(text))
    except (ValueError, RecursionError) as error:
        raise PlanError("plan.not-json", f"the plan is not JSON: {error}", "give what StepPlan.to_json wrote") from None


def to_cbor(plan: StepPlan) -> bytes:
    """RFC 8949 deterministic encoding, with floats."""
    return cbor.encode(_plan_to_fields(plan), floats=True, null=True, max_size=_MAX_BYTES)


def from_cbor(data: bytes) -> dict[str, Any]:
    """The fields of a plan, from `to_cbor`."""
    try:
        return _read_plan(cbor.decode(data, floats=True, null=True, max_size=_MAX_BYTES))
    except EncodingError as error:
        remedy = "give what StepPlan.to_cbor wrote"
        raise PlanError("plan.not-cbor", f"the plan is not deterministic CBOR: {error}", remedy) from None


def rule_to_dict(rule: Rule) -> dict[str, Any]:
    """A rule as plain values."""
    kind = next((name for name, made in RULE_KINDS.items() if type(rule) is made), None)
    if kind is None:
        problem = f"the plan has a rule of the kind {type(rule).__name__}, which has no name"
        raise PlanError("plan.rule-unknown", problem, "make it known first: lamina.plan.rules.declare_rule")
    floats = {field.name for field in dataclasses.fields(rule) if field.type == "float"}
    state = {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule)}
    return {"kind": kind, **{name: float(v) if name in floats else _tuples_to_lists(v) for name, v in state.items()}}


def rule_from_dict(state: Any) -> Rule:
    """The rule that `rule_to_dict` described; anything else is refused."""
    kind = state.get("kind") if isinstance(state, Mapping) else None
    if not isinstance(kind, str) or kind not in RULE_KINDS:
        remedy = f"its kind must be one of {', '.join(RULE_KINDS)}"
        raise PlanError("plan.rule-unknown", f"a rule of the plan is {short_repr(state)}", remedy)
    given = {name: value for name, value in state.items() if name != "kind"}
    return RULE_KINDS[kind](**_read_fields(RULE_KINDS[kind], given, f"rule '{kind}'"))


def slice_to_dict(part: Slice) -> dict[str, Any]:
    """A slice as plain values."""
    return {name: _tuples_to_lists(value) for name, value in dataclasses.asdict(part).items()}


def _plan_to_fields(plan: StepPlan) -> dict[str, Any]:
    state = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    kind, bands = state.pop("noise_kind"), state.pop("bands")
    return {
        "kind": KIND,
        "version": VERSION,
        **state,
        "layers": [dataclasses.asdict(layer) for layer in plan.layers],
        "classes": [dataclasses.asdict(entry) for entry in plan.classes],
        "clip": [[_INF if math.isinf(c) else c for c in row] for row in plan.clip],
        "clipping": plan.clipping.value,
        "rules": [rule_to_dict(rule) for rule in plan.rules],
        "injection": plan.injection.to_dict(),
        "slices": [slice_to_dict(part) for part in plan.slices],
        "claimed": [_INF if math.isinf(e) else e for e in plan.claimed],
        **({} if kind is NoiseKind.GAUSSIAN else {"noise_kind": kind.value}),
        **({} if bands == 1 else {"bands": bands}),
    }


def _read_plan(data: Any) -> dict[str, Any]:
    """Check names and types of everything; what the values mean is checked by the plan itself."""
    from lamina.plan.step_plan import PlannedClass, PlannedLayer, StepPlan

    if not isinstance(data, dict) or data.get("kind") != KIND or data.get("version") != VERSION:
        remedy = "give a plan that this version of Lamina wrote"
        raise PlanError("plan.version-unknown", f"this is not a {KIND} of version {VERSION}", remedy)
    state = {key: value for key, value in data.items() if key not in ("kind", "version")}
    state = {"noise_kind": NoiseKind.GAUSSIAN.value, "bands": 1, **state}  # left out by plans of the ordinary noise
    for name in ("clip", "claimed"):
        state[name] = _inf_from_text(state.get(name))
    state = _read_fields(StepPlan, state, "the plan")
    return {
        **state,
        "layers": tuple(PlannedLayer(**_read_fields(PlannedLayer, row, "a layer")) for row in state["layers"]),
        "classes": tuple(PlannedClass(**_read_fields(PlannedClass, row, "a class")) for row in state["classes"]),
        "rules": tuple(map(rule_from_dict, state["rules"])),
        "injection": Injection(**_read_fields(Injection, state["injection"], "injection")),
        "slices": tuple(Slice(**_read_fields(Slice, row, "a slice")) for row in state["slices"]),
    }


def _read_fields(kind: type[Any], row: Any, where: str) -> dict[str, Any]:
    """A row with exactly the fields of a dataclass, each of its type."""
    fields = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    if not isinstance(row, dict) or set(row) != set(fields):
        found = sorted(map(short_repr, row)) if isinstance(row, dict) else type(row).__name__
        problem = f"{where} has fields {short_repr(found)}"
        raise PlanError("plan.fields-unexpected", problem, f"must be {sorted(fields)}")
    for name, value in row.items():
        word, fits = _TYPES[fields[name]]
        if not fits(value):
            problem = f"{name} of {where} is {short_repr(value)}, must be {word}"
            raise PlanError("plan.field-wrong-type", problem, "the plan is damaged: make it again")
    return row


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: type(value) is list and all(map(fits, value))


def _exactly(kind: type) -> Callable[[Any], bool]:
    return lambda value: type(value) is kind


_is_text, _is_int, _is_float = map(_exactly, (str, int, float))
_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {  # by a field's annotation: how it is written
    "str": ("text", _is_text),
    "Clipping": ("text", _is_text),
    "InjectionForm": ("text", _is_text),
    "NoiseKind": ("text", _is_text),
    "bool": ("true or false", _exactly(bool)),
    "int": ("a whole number", _is_int),
    "int | None": ("a whole number or null", lambda value: value is None or _is_int(value)),
    "float": ("a floating-point number", _is_float),
    "Injection": ("a table", _exactly(dict)),
    "tuple[str, ...]": ("a list of texts", _list_of(_is_text)),
    "tuple[float, ...]": ("a list of floating-point numbers", _list_of(_is_float)),
    "tuple[Range, ...]": ("a list of pairs [first, stop]", _list_of(lambda v: _list_of(_is_int)(v) and len(v) == 2)),
    "tuple[tuple[float, ...], ...]": ("a list of lists of floating-point numbers", _list_of(_list_of(_is_float))),
    **{f"tuple[{kind}, ...]": ("a list", _list_of(lambda _: True))
       for kind in ("PlannedLayer", "PlannedClass", "Rule", "Slice")},
}  # fmt: skip


def _tuples_to_lists(value: Any) -> Any:
    return [_tuples_to_lists(each) for each in value] if isinstance(value, tuple) else value


def _inf_from_text(value: Any) -> Any:
    if isinstance(value, list):
        return [_inf_from_text(each) for each in value]
    return math.inf if value == _INF else value


def strict_json(text: str) -> Any:
    """The value of a JSON text; ValueError for NaN, infinity and fields that occur twice."""

    def refuse(name: str) -> float:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse, object_pairs_hook=distinct_fields)
