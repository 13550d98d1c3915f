"""Refusals in Python: one message, without the traceback of the library's error that it replaces."""

from __future__ import annotations

import ast
import copy
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

import lamina.run.payloads
import lamina.run.run_output
import lamina.serve.inference
import lamina.signals.signal
from lamina.cli.terminal import refusal_json
from lamina.errors import LaminaError
from lamina.release.verifier import ReleaseProblem
from lamina.serve.limits import RequestRefused

SOURCE = Path(__file__).parents[1] / "src" / "lamina"
OF_THE_USER = {  # what failed is the user's own code, and its lines are in the traceback
    "plan.example-failed", "plan.model-not-copyable", "sensitivity.model-not-traceable", "allocate.sensitive-predicate",
    "train.user-code-failed", "train.model-or-loss-failed",
}  # fmt: skip
NEVER_SEEN = {"ValueError", "FileExistsError"}  # caught by whoever calls


def test_a_refusal_shows_no_other_traceback() -> None:
    """`raise … from error` prints two tracebacks; ruff (B904) asks for a `from` in every `except`."""
    chained = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in sorted(SOURCE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.cause, ast.Name)
        if ast.unparse(node.exc.func) not in NEVER_SEEN
        if not OF_THE_USER & {each.value for each in node.exc.args if isinstance(each, ast.Constant)}
    ]
    assert not chained, chained


def subclasses(kind: type[LaminaError]) -> Iterator[type[LaminaError]]:
    yield kind
    for each in kind.__subclasses__():
        yield from subclasses(each)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("kind", dict.fromkeys(subclasses(LaminaError)), ids=lambda kind: kind.__name__)
def test_a_refusal_crosses_to_another_process(kind: type[LaminaError], protocol: int) -> None:
    """A worker whose refusal cannot be unpickled breaks the whole pool."""
    made = kind("study.cell-failed", "a problem", "a remedy") if kind is not RequestRefused else answered()
    made.add_note("a note")
    for found in (pickle.loads(pickle.dumps(made, protocol)), copy.copy(made)):  # noqa: S301
        assert type(found) is kind and str(found) == str(made) and found.args == made.args
        assert vars(found) == vars(made) and (found.code, found.remedy) == (made.code, "a remedy")


@pytest.mark.parametrize(
    ("code", "family"),
    [
        ("ledger.key-unknown", "ledger.governance"),
        ("ledger.already-admitted", "ledger"),
        ("plan.policy-invalid", "plan.policy"),
        ("plan.tensor-frozen", "plan.profile"),
        ("bench.not-compiled", "study"),
        ("store.busy", "store"),
        ("acme.no-licence", "acme"),  # from outside
        ("policy.key-unknown", "policy"),
        ("led.key-unknown", "led"),
        ("ledger.zebra", "ledger"),
    ],
)
def test_every_refusal_has_a_family(code: str, family: str) -> None:
    class FromOutside(LaminaError):
        """An error of another package."""

    for kind in (LaminaError, FromOutside):
        assert kind(code, "a problem").family == family
    assert refusal_json(LaminaError(code, "a problem"))["family"] == family


def test_a_problem_of_a_release_has_a_family() -> None:
    told = ReleaseProblem(code="release.file-missing", file="weights", reason="it is missing").to_dict()
    assert told == {
        "code": "release.file-missing",
        "family": "release.verify",
        "file": "weights",
        "reason": "it is missing",
    }


def answered() -> RequestRefused:
    return RequestRefused(429, "serve.too-many", "a problem", "a remedy", headers={"Retry-After": "1"}, more={"n": 2})


def test_the_subclasses_of_other_modules_are_among_them() -> None:
    outside = (
        lamina.run.payloads.PayloadChanged, lamina.signals.signal.DataFileError, lamina.serve.inference.InputsRefused,
        lamina.run.run_output.WithheldError, RequestRefused,
    )  # fmt: skip
    assert {*outside} <= {*subclasses(LaminaError)}
