"""Refusals in Python: one message, without the traceback of the library's error that it replaces."""

from __future__ import annotations

import ast
from pathlib import Path

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
