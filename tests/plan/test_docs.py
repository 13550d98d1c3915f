"""The user page: its code runs, and prints what it says it prints."""

from __future__ import annotations

from pathlib import Path

import pages

PAGE = Path(__file__).parents[2] / "docs" / "plans.md"


def test_every_block_of_the_page_runs_and_prints_what_follows_it() -> None:
    assert pages.run(PAGE).count("python") == 8
