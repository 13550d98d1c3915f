"""Pages that are written from the code are what the code would write now; codes are used as one refusal each."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from lamina.errors import _FAMILIES, _SHARED, family_of

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    found = importlib.util.spec_from_file_location("make_pages", ROOT / "docs" / "make_pages.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_written_pages_are_current(pages: ModuleType) -> None:
    written = pages.pages()
    for name, text in written.items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == text, f"{name}: run make docs"
    there = {f"errors/{path.name}" for path in (ROOT / "docs" / "errors").iterdir()}
    assert there == {name for name in written if name.startswith("errors/")}, "run make docs"


def listed() -> dict[str, str]:
    """The page of every code, read from docs/errors/."""
    found: dict[str, str] = {}
    for page in sorted((ROOT / "docs" / "errors").glob("*.md")):
        for code in re.findall(r"^([a-z]+\.[a-z0-9.-]+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            assert code not in found, f"{code} is on two pages"
            found[code] = page.stem
    return found


def test_every_code_in_the_source_is_on_the_page_of_its_family() -> None:
    """Codes are found by their place in the text here, and in the syntax tree by docs/make_pages.py."""
    found = {
        code
        for path in (ROOT / "src" / "lamina").rglob("*.py")
        for code in re.findall(
            r"\b(?:raise \w+|fail|wrong|Violation|whole|number|positive)\((?:\w+, )*\s*\"([a-z]+\.[a-z0-9-]+)\"",
            re.sub(r"(?m)^\s*(?:>>>|#).*", "", path.read_text(encoding="utf-8")),
        )
    }
    known = listed()
    assert len(found) > 1000
    for code in found:
        assert known.get(code) == family_of(code), code


def test_families_are_listed_and_none_is_tiny() -> None:
    sizes = Counter(listed().values())
    index = (ROOT / "docs" / "errors" / "index.md").read_text(encoding="utf-8")
    table = dict(re.findall(r"\| \[`[a-z.]+`\]\(([a-z.]+)\.md\) \|.*\| (\d+) \|", index))
    assert {family: int(size) for family, size in table.items()} == sizes
    assert {*_FAMILIES, *_SHARED.values()} <= {*sizes} and min(sizes.values()) >= 3


def test_every_code_that_a_test_expects_exists(pages: ModuleType) -> None:
    known = set(pages.error_codes())
    for path in (ROOT / "tests").rglob("test_*.py"):
        for arguments in re.findall(r"raises_code\(((?:\"[^\"]+\"(?:,\s*)?)+)\)", path.read_text(encoding="utf-8")):
            for code in re.findall(r"\"([^\"]+)\"", arguments):
                assert code in known, f"{path.name}: {code}"


def test_every_page_that_the_source_names_exists() -> None:
    for path in (ROOT / "src" / "lamina").rglob("*.*"):
        if path.suffix in (".py", ".toml", ".html", ".h", ".c"):
            for name in re.findall(r"docs/([a-z_/-]+\.md)", path.read_text(encoding="utf-8")):
                assert (ROOT / "docs" / name).exists(), f"{path.name} names docs/{name}"
