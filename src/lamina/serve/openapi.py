"""The service described in OpenAPI 3.1: requests by the models that validate them. A test compares every answer with it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from lamina.release.query import QueryDocument

_HEX = {"type": "string", "pattern": "^[0-9a-f]*$"}
_HASH = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
_COUNT = {"type": "integer", "minimum": 0}
_TEXT = {"type": "string"}


def _object(required: dict[str, Any], optional: dict[str, Any] | None = None, *, closed: bool = True) -> dict[str, Any]:
    fields = {**required, **(optional or {})}
    return {"type": "object", "properties": fields, "required": list(required), "additionalProperties": not closed}


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def _list(items: dict[str, Any], **limits: int) -> dict[str, Any]:
    return {"type": "array", "items": items, **limits}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _request(model: type[BaseModel]) -> dict[str, Any]:
    """Return the schemas of the model that validates a request and of its parts, by name."""
    made = model.model_json_schema(ref_template="#/components/schemas/{model}")
    return {**made.pop("$defs", {}), "Query": made}


_REASON = _object({"code": _TEXT, "class": _nullable(_TEXT), "text": _TEXT, "layers": _list(_TEXT)})
_DECISION = {
    "allowed": {"type": "boolean"},
    "reasons": _list(_ref("Reason")),
    "layers_drawn_on": _COUNT,
    "withdrawals_as_of": _TEXT,
    "manifest": _HASH,
    "note": _TEXT,
}
_INPUTS = {"type": "array", "minItems": 1, "description": "nested lists of numbers; the first axis counts the inputs"}
_LEAF = _object({"index": _COUNT, "hash": _HASH, "leaf": _HEX, "body": _nullable(_HEX), "record": {"type": "object"}})
_PROBLEM_TEXTS = dict.fromkeys(("type", "title", "detail", "code", "family", "remedy"), _TEXT)
_PROBLEM = _object({**_PROBLEM_TEXTS, "status": _COUNT}, closed=False)
_SCHEMAS = {
    "Problem": _PROBLEM,
    **_request(QueryDocument),
    "Reason": _REASON,
    "Decision": _object(_DECISION),
    "Leaf": _LEAF,
    "Withdrawal": _object({"name": _TEXT, "state": {"enum": ["pending", "done", "refused"]}}, {"request": _HASH}),
    "Head": _object(
        {"origin": _TEXT, "size": _COUNT, "root": _HASH, "header": _HASH, "signed": _nullable(_COUNT)}
    ),
    "Leaves": _object({"from": _COUNT, "to": _COUNT, "size": _COUNT, "leaves": _list(_ref("Leaf"))}),
    "Proof": _object(
        {"index": _COUNT, "size": _COUNT, "root": _HASH, "leaf_hash": _HASH, "path": _list(_HASH), "text": _TEXT}
    ),
    "Consistency": _object(
        {"old": _COUNT, "new": _COUNT, "path": _list(_HASH), "old_root": _HASH, "new_root": _HASH}
    ),
}  # fmt: skip

_ALWAYS = (401, 408, 421, 429, 503)  # of every path but /healthz


def _answer(schema: dict[str, Any], kind: str = "application/json") -> dict[str, Any]:
    return {"description": "done", "content": {kind: {"schema": schema}}}


def _operation(
    summary: str, answers: dict[int, dict[str, Any]], refused: tuple[int, ...] = (), *,
    body: tuple[str, dict[str, Any]] | None = None, parameters: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:  # fmt: skip
    problem = {"description": "refused", "content": {"application/problem+json": {"schema": _ref("Problem")}}}
    refused = (*refused, *((413, 415) if body else ()))
    responses = {**dict.fromkeys((*refused, *_ALWAYS), problem), **answers}
    ordered = {str(status): responses[status] for status in sorted(responses)}
    found: dict[str, Any] = {"summary": summary, "responses": ordered}
    if body is not None:
        found["requestBody"] = {"required": True, "content": {body[0]: {"schema": body[1]}}}
    if parameters:
        found["parameters"] = parameters
    return found


def _parameter(name: str, where: str, schema: dict[str, Any], *, required: bool = False) -> dict[str, Any]:
    return {"name": name, "in": where, "required": required or where == "path", "schema": schema}


def _read(
    summary: str, answer: dict[str, Any], refused: tuple[int, ...] = (), *parameters: dict[str, Any]
) -> dict[str, Any]:
    return {"get": _operation(summary, {200: answer}, refused, parameters=list(parameters))}


def openapi(version: str) -> dict[str, Any]:
    """The document."""
    number = {"type": "integer", "minimum": 0, "maximum": 10**18 - 1}
    seq, first, stop = (_parameter(n, w, number) for n, w in (("seq", "path"), ("from", "query"), ("to", "query")))
    old, new = _parameter("old", "query", number, required=True), _parameter("new", "query", number)
    name = _parameter("name", "path", {"type": "string", "pattern": "^[0-9a-f]{32}$"})
    paper = _parameter("name", "path", {"enum": ["manifest", "certificate"]})
    json, cose, binary = "application/json", "application/cose", {"type": "string", "format": "binary"}
    query, found = {"query": _ref("Query")}, (400, 404)
    text, taken = _answer(_TEXT, "text/plain"), _answer(_ref("Withdrawal"))
    answered = _answer(_object({"outputs": {}, "decision": _ref("Decision")}))
    paths: dict[str, dict[str, Any]] = {
        "/v1/decide": {
            "post": _operation(
                "Whether the gate allows a query", {200: _answer(_ref("Decision"))}, found, body=(json, _object(query))
            )
        },
        "/v1/infer": {
            "post": _operation(
                "The model's answer, if the gate allows the query; 403 has every reason",
                {200: answered}, (400, 403, 404, 422), body=(json, _object({**query, "inputs": _INPUTS})),
            )
        },
        "/v1/withdrawals": {
            "post": _operation(
                "Withdraw a contribution: a COSE_Sign1 message that the contributor's key signed",
                {202: taken, 200: taken}, (400, 403, 404), body=(cose, binary),
            )
        },
        "/v1/withdrawals/{name}": _read("What became of it", taken, (404,), name),
        "/v1/ledger/head": _read("Size and root", _answer(_ref("Head")), (404,)),
        "/v1/ledger/checkpoint": _read("The newest signed checkpoint, a C2SP note", text, (404,)),
        "/v1/ledger/leaves": _read("Leaves in [from, to), at most 1000", _answer(_ref("Leaves")), found, first, stop),
        "/v1/ledger/leaves/{seq}": _read("A leaf: its bytes, hash and record", _answer(_ref("Leaf")), found, seq),
        "/v1/ledger/proof/{seq}": _read(
            "That a leaf is in the newest checkpoint; `text` is a C2SP tlog-proof", _answer(_ref("Proof")), found, seq
        ),
        "/v1/ledger/consistency": _read(
            "That the tree of `new` leaves begins with that of `old`", _answer(_ref("Consistency")), found, old, new
        ),
        "/v1/ledger/receipt/{seq}": _read("A COSE receipt (RFC 9942)", _answer(binary, cose), found, seq),
        "/v1/release/{name}": _read(
            "Manifest (DSSE envelope) or certificate, as they are in the release", _answer({"type": "object"}), (404,), paper
        ),
        "/v1/openapi.json": _read("This document", _answer({"type": "object"})),
        "/healthz": _read("Whether it runs", _answer(_object({"status": _TEXT}))),
        "/metrics": _read("For Prometheus", text),
    }  # fmt: skip
    schemes = {"key": {"type": "http", "scheme": "bearer"}, "password": {"type": "http", "scheme": "basic"}}
    about = {"title": "Lamina", "version": version, "description": "A released model behind its gate, and its ledger."}
    return {
        "openapi": "3.1.0",
        "info": about,
        "paths": paths,
        "components": {"schemas": _SCHEMAS, "securitySchemes": schemes},
        "security": [{}, {"key": []}, {"password": []}],
    }
