"""A real browser for tests of pages: Debian's Chromium through Playwright, with axe for accessibility."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

AXE = Path(__file__).parents[1] / "interop" / "node_modules" / "axe-core" / "axe.min.js"
WIDTHS = {"desktop": 1280, "phone": 390}


@dataclass
class Browser:
    """One page in a browser. `errors` are what it wrote to its console, `requests` what it asked the network for."""

    page: Any
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def overflow(self) -> int:
        """Pixels by which the page is wider than its window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - window.innerWidth"))

    def serious(self) -> list[str]:
        """What axe finds that is serious or worse."""
        self.page.evaluate(AXE.read_text(encoding="utf-8"))
        found = self.page.evaluate("axe.run().then(r => r.violations)")
        return [
            f"{each['id']}: {node['html'][:120]}"
            for each in found
            if each["impact"] in ("serious", "critical")
            for node in each["nodes"]
        ]


@contextmanager
def browse(width: str = "desktop", scheme: str = "light") -> Iterator[Browser]:
    """A fresh window."""
    chromium = shutil.which("chromium")
    if chromium is None or not AXE.is_file():
        pytest.skip("Chromium or axe-core is not installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        program = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        try:
            page = program.new_page(viewport={"width": WIDTHS[width], "height": 900}, color_scheme=scheme)
            made = Browser(page)
            page.on("console", lambda message: made.errors.append(message.text) if message.type == "error" else None)
            page.on("pageerror", lambda error: made.errors.append(str(error)))
            page.on("request", lambda request: made.requests.append(request.url))
            yield made
        finally:
            program.close()
