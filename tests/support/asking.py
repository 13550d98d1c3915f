"""The program, called as a user does, and what it answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from lamina.cli.app import main

Result = tuple[int, str, str]  # exit code, standard output, standard error
Call = Callable[..., Result]


def asker(capsys: pytest.CaptureFixture[str], *first: str) -> Call:
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


def succeeded(result: Result) -> str:
    """What the command printed; it succeeded."""
    assert result[0] == 0, result
    return result[1]


def refused(result: Result, *codes: str) -> str:
    """What was said; the command was refused with one of these codes (docs/errors/), and without a traceback."""
    assert result[0] == 1, result
    (code,) = re.findall(r"^code:\s+(\S+)$", result[2], re.MULTILINE)
    assert code in codes, result
    assert "Traceback" not in result[2]
    return result[2]
