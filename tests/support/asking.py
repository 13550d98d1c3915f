"""The program, called as a user does, and what it answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from lamina.cli.app import main

Result = tuple[int, str, str]  # exit code, standard output, standard error


def asker(capsys: pytest.CaptureFixture[str], *first: str) -> Callable[..., Result]:
    """Calls `lamina FIRST …`."""

    def run(*words: str) -> Result:
        with pytest.raises(SystemExit) as caught:
            main([*first, *words])
        printed, code = capsys.readouterr(), caught.value.code
        return code if isinstance(code, int) else 0, printed.out, printed.err

    return run


def answer(result: Result, code: int = 0) -> dict[str, Any]:
    """The one JSON object that was printed."""
    assert result[0] == code, result
    found = json.loads(result[1])
    assert isinstance(found, dict)
    return found
