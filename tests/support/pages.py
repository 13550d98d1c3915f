"""A page of the documentation, run: every python block, each held against the text block that may follow it."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any


def run(page: Path, names: dict[str, Any] | None = None, *, whole: bool = False) -> list[str]:
    """The kinds of blocks that it has, in order. `whole`: what is printed is nothing but what the page says."""
    blocks = re.findall(r"```(python|text)\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    names = {} if names is None else names
    printed = ""
    for kind, body in blocks:
        if kind == "text":
            assert body.strip() == printed.strip() if whole else body.strip() in printed
            continue
        with redirect_stdout(io.StringIO()) as out:
            exec(compile(body, str(page), "exec"), names)
        printed = out.getvalue()
    return [kind for kind, _ in blocks]
