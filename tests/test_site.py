"""The documentation site: it builds without a warning, has no dead link, loads nothing from elsewhere, and is searched offline."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest
from browser import browse

ROOT = Path(__file__).parents[1]
LOADING = {("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src"), ("source", "src")}


class Links(HTMLParser):
    """What a page links to and loads, and the places in it that a link may name."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[tuple[str, str, str]] = []
        self.anchors = {""}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            if name in ("href", "src") and value:
                self.links.append((tag, name, value))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Links]:
    return {path: Links(path) for path in site.rglob("*.html") if path.name != "404.html"}


def test_no_link_is_dead(site: Path, pages: dict[Path, Links]) -> None:
    for path, page in pages.items():
        for _, _, link in page.links:
            target, anchor = urldefrag(link)
            if ":" in target or target.startswith("//"):
                continue
            there = (path.parent / unquote(target)).resolve() if target else path
            assert there.is_file(), f"{path.name} links to {link}"
            if there in pages:
                assert unquote(anchor) in pages[there].anchors, f"{path.name} links to {link}"


def test_no_page_loads_anything_from_elsewhere(site: Path, pages: dict[Path, Links]) -> None:
    for path, page in pages.items():
        loaded = [link for tag, name, link in page.links if (tag, name) in LOADING]
        assert loaded and not [link for link in loaded if re.match(r"\w+:|//", link)], path.name
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(\s*[\"']?(https?:)?//", style.read_text(encoding="utf-8")), style.name


def test_lists_and_tables_are_rendered(pages: dict[Path, Links]) -> None:
    """A list needs an empty line before it, and a table too; otherwise it becomes part of the paragraph."""
    for path in pages:
        for paragraph in re.findall(r"<p>(.*?)</p>", path.read_text(encoding="utf-8"), re.DOTALL):
            assert not re.search(r"^([-*] |\d+\. |\|)", paragraph, re.MULTILINE), f"{path.name}: {paragraph[:200]}"


def test_every_page_is_in_the_navigation(site: Path, pages: dict[Path, Links]) -> None:
    start = site / "index.html"
    reached = {start}

    def reach(path: Path) -> Iterator[Path]:
        yield from ((path.parent / unquote(urldefrag(link)[0])).resolve() for _, _, link in pages[path].links)

    waiting = [start]
    while waiting:
        for each in reach(waiting.pop()):
            if each in pages and each not in reached:
                reached.add(each)
                waiting.append(each)
    assert reached == set(pages)


def test_search_works_in_pages_opened_from_disk(site: Path) -> None:
    with browse() as browser:
        browser.page.goto((site / "index.html").as_uri())
        browser.page.locator("input.md-search__input").click()
        browser.page.keyboard.type("withdrawal")
        results = browser.page.locator(".md-search-result__link")
        results.first.wait_for()
        assert results.count() > 0
        assert all(url.startswith("file:") for url in browser.requests), browser.requests
        assert browser.errors == []
