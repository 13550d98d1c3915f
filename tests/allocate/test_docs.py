"""The pages about policies: their code runs, prints what they say it prints, and every policy has one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import pages
from lamina.allocate.make_plan import ALLOCATIONS

FOLDER = Path(__file__).parents[2] / "docs" / "allocations"
PAGES = sorted(path for path in FOLDER.glob("*.md") if path.name not in ("index.md", "utility.md"))


def run(page: Path, names: dict[str, Any]) -> int:
    """Run the page's blocks; how many there were."""
    return pages.run(page, names).count("python")


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    """What the first page defines."""
    names: dict[str, Any] = {}
    assert run(FOLDER / "index.md", names) == 1
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_a_page_runs(page: Path, example: dict[str, Any]) -> None:
    assert run(page, dict(example)) >= 1
    assert "[utility](utility.md)" in page.read_text(encoding="utf-8")  # what became of it on real data


def test_every_policy_has_a_page() -> None:
    first = (FOLDER / "index.md").read_text(encoding="utf-8")
    assert {path.stem for path in PAGES} == {name.partition("-")[0] for name in ALLOCATIONS}
    assert all(f"`{name}`" in first for name in ALLOCATIONS)
    assert all(f"]({path.name})" in first for path in PAGES)
