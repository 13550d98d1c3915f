"""The page about admission: its code runs, and prints what it says it prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pages
from lamina.admit.admission import Admission

PAGE = Path(__file__).parents[2] / "docs" / "admission.md"


def test_every_block_of_the_page_runs_and_prints_what_follows_it() -> None:
    names: dict[str, Any] = {}
    assert pages.run(PAGE, names, whole=True) == ["python", "text", "python", "python"]
    for name in ("first", "again"):
        made = names[name]
        assert isinstance(made, Admission) and list(made.ids) == ["p001", "p003"]
