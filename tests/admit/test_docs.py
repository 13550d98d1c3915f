"""The page about admission: its code runs, and prints what it says it prints."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

from lamina.admit.admission import Admission

PAGE = Path(__file__).parents[2] / "docs" / "admission.md"


def test_every_block_of_the_page_runs_and_prints_what_follows_it() -> None:
    blocks = re.findall(r"```(python|text)\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert [kind for kind, _ in blocks] == ["python", "text", "python", "python"]
    names: dict[str, object] = {}
    printed = ""
    for kind, body in blocks:
        if kind == "text":
            assert body.strip() == printed.strip()
            continue
        with redirect_stdout(io.StringIO()) as out:
            exec(compile(body, str(PAGE), "exec"), names)
        printed = out.getvalue()
    for name in ("first", "again"):
        made = names[name]
        assert isinstance(made, Admission) and list(made.ids) == ["p001", "p003"]
