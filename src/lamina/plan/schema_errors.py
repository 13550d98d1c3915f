"""From a schema's complaint to a message that names file, key, value, bound and remedy."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError

from lamina.errors import PlanError
from lamina.plan.naming import suggestion

_BOUNDS = {
    "greater_than": "must be > {gt}",
    "greater_than_equal": "must be >= {ge}",
    "less_than": "must be < {lt}",
    "less_than_equal": "must be <= {le}",
    "literal_error": "is not available; accepted: {expected}",
    "finite_number": "must be finite",
    "string_too_short": "must not be empty",
    "string_pattern_mismatch": "must be letters, digits, '_', '-' or '.'",
    "too_short": "must not be empty",
    "float_type": "must be a number",
    "int_type": "must be a whole number without quotes or decimal point",
    "string_type": "must be text in quotes",
    "bool_type": "must be true or false",
    "tuple_type": "must be a list",
    "model_type": "must be a table",
    "dict_type": "must be a table",
    "mapping_type": "must be a table",
}


def explain(error: ValidationError, schema: type[BaseModel], source: str) -> PlanError:
    """All complaints in one PlanError."""
    problems, remedies = [], []
    for item in error.errors(include_url=False):
        problem, remedy = _one(dict(item), schema)
        problems.append(problem)
        remedies.append(remedy)
    return PlanError("plan.explain", f"{source}: {'; '.join(problems)}", "; ".join(dict.fromkeys(remedies)))


def _one(item: dict[str, Any], schema: type[BaseModel]) -> tuple[str, str]:
    path = [str(part) for part in item["loc"] if part != "[key]"]
    key = ".".join(path)
    kind, value, context = item["type"], item["input"], item.get("ctx", {})
    if kind == "missing":
        return f"{key} is missing", f"add it under [{'.'.join(path[:-1]) or path[0]}]"
    if kind == "extra_forbidden":
        known = _keys(schema, path[:-1])
        hint = suggestion(path[-1], known)
        return f"{key} is not a known key{hint}", f"accepted here: {', '.join(known)}"
    if kind in _BOUNDS:
        return f"{key} is {value!r}, {_BOUNDS[kind].format(**context)}", f"change {key}"
    message = str(context["error"]) if "error" in context else str(item["msg"])
    if kind == "value_error" and isinstance(value, dict | BaseModel):
        return f"{key}: {message}", f"correct [{key}]"
    return f"{key} is {value!r}: {message}", f"correct {key}"


def _keys(schema: type[BaseModel], path: list[str]) -> list[str]:
    """The keys that the schema accepts at `path`; names of classes are free, so they are stepped over."""
    for part in path:
        for name, field in schema.model_fields.items():
            if part in (name, field.alias):
                inner = _model_in(field.annotation)
                schema = inner or schema
    return [field.alias or name for name, field in schema.model_fields.items()]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model named in a field's type, if there is one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        found = _model_in(inner)
        if found is not None:
            return found
    return None
