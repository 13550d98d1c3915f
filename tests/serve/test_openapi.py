"""The OpenAPI document is true: whatever is sent, no answer is a 5xx, and each has the status and shape that it says."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from served_net import Client
from starlette.testclient import TestClient

from lamina.serve.limits import Limits
from lamina.serve.openapi import openapi

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
DOCUMENT = openapi("0")
OPERATIONS = [(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods]
CASES = [(*each, GenerationMode.POSITIVE) for each in OPERATIONS]
CASES += [
    (path, method, GenerationMode.NEGATIVE)
    for path, method in OPERATIONS
    if {"requestBody", "parameters"} & DOCUMENT["paths"][path][method].keys() and path != "/v1/withdrawals"  # any bytes
]


@schemathesis.serializer("application/cose")
def as_it_is(context: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "replace")


@pytest.fixture
def served(client: Client, tmp_path: Path) -> TestClient:
    for name in ("withdrawals", "withdrawals/done", "withdrawals/refused"):
        (tmp_path / name).mkdir()
    return client(withdrawals=tmp_path / "withdrawals", limits=Limits(rate=1e9, timeout=60.0))


@pytest.mark.parametrize(("path", "method", "mode"), CASES)
def test_every_answer_is_as_the_document_says(served: TestClient, path: str, method: str, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_dict(DOCUMENT)
    schema.app = served.app
    found = schema[path][method.upper()]

    @given(case=found.as_strategy(generation_mode=mode))
    @settings(
        max_examples=15, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    def ask(case: Any) -> None:
        case.call_and_validate(checks=CHECKS, headers={"host": "localhost"}, base_url="http://localhost")

    ask()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def test_nearly_right_requests_are_4xx(served: TestClient, query: dict[str, Any]) -> None:
    """One place of a good request is replaced by anything at all."""
    good = {"query": {**query, "draws_on": {"layers": ["4"], "depth": [0, 1]}, "scope": "x"}, "inputs": [[0.5] * 4]}
    places = [("query",), ("inputs",), ("inputs", 0), ("inputs", 0, 1), ("query", "scope"), ("query", "rights")]
    places += [("query", "rights", name) for name in (*query["rights"], "accept_withdrawn")]
    places += [("query", "draws_on"), *(("query", "draws_on", n) for n in ("layers", "depth", "adapter"))]
    places += [("query", "draws_on", "generation_class"), ("query", "draws_on", "layers", 0)]

    @given(place=st.sampled_from(places), value=JSON)
    @settings(max_examples=300, deadline=None, database=None, derandomize=True)
    def ask(place: tuple[Any, ...], value: Any) -> None:
        body: Any = copy.deepcopy(good)
        inner = body
        for step in place[:-1]:
            inner = inner[step]
        inner[place[-1]] = value
        answer = served.post("/v1/infer", content=json.dumps(body), headers={"content-type": "application/json"})
        assert answer.status_code < 500, (body, answer.text)

    ask()
