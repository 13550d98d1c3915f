"""Pages that are written from the code are what the code would write now; codes are used as one refusal each."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    found = importlib.util.spec_from_file_location("make_pages", ROOT / "docs" / "make_pages.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["errors.md", "architecture.md"])
def test_written_pages_are_current(pages: ModuleType, name: str) -> None:
    there = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert there == pages.PAGES[name](), "run make docs"


def test_every_code_that_a_test_expects_exists(pages: ModuleType) -> None:
    known = set(pages.error_codes())
    for path in (ROOT / "tests").rglob("test_*.py"):
        for arguments in re.findall(r"raises_code\(((?:\"[^\"]+\"(?:,\s*)?)+)\)", path.read_text(encoding="utf-8")):
            for code in re.findall(r"\"([^\"]+)\"", arguments):
                assert code in known, f"{path.name}: {code}"
