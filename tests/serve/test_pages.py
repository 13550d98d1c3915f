"""The dashboard in a real browser, over a real server: every page at two widths, search, verification, query tester."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from browser import Browser, browse
from starlette.testclient import TestClient
from trained_run import Trained, copied_hospital_run, copied_run

from lamina.ledger.governance_records import WithdrawalReason
from lamina.ledger.reader import LedgerReader
from lamina.ledger.verify.tree_checks import Trust
from lamina.ledger.withdrawal import withdraw
from lamina.release.gate import ReleaseGate
from lamina.release.maker import make_release
from lamina.release.query import GatePolicy
from lamina.serve.app import Service, make_app
from lamina.serve.pages import pages
from lamina.sign.keys import PrivateKey

PATHS = ("/", "/budget", "/layers", "/contributions", "/withdrawals", "/gate", "/verification")
EVIL = "<img src=x onerror=alert(1)>'\"{{7*7}}"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Trained]]:
    """The address of a running service, and the run behind it."""
    folder, key = tmp_path_factory.mktemp("served"), PrivateKey.generate()
    ward = copied_hospital_run(folder)
    with ward.open() as ledger:
        withdraw(ledger, str(ward.someone("sensitive")), WithdrawalReason.CONSENT)
        gate = GatePolicy(unstated_purposes=True, generation_classes={"head": {"layers": ["4"]}})
        make_release(folder / "out", [ward.folder], ledger, key, name=EVIL, gate=gate)
    trust = Trust(plain=(key.public,))
    with ExitStack() as opened:

        def reader() -> LedgerReader:
            return opened.enter_context(LedgerReader.read_only(ward.ledger))

        service = Service(
            folder=folder / "out", ledger=reader(), gate=ReleaseGate(folder / "out", trust, ledger=reader())
        )
        server = uvicorn.Server(
            uvicorn.Config(make_app(service, pages(service, None)), port=0, log_level="error", lifespan="off")
        )
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.02)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://localhost:{port}", ward
        server.should_exit = True
        thread.join(10)


def wait_for_verification(browser: Browser) -> None:
    browser.page.wait_for_selector("#verdict .good", timeout=30_000)


@pytest.mark.parametrize(("width", "scheme"), [("desktop", "dark"), ("phone", "light")])
def test_every_page(served: tuple[str, Trained], width: str, scheme: str) -> None:
    address, _ = served
    with browse(width, scheme) as browser:
        for path in PATHS:
            browser.page.goto(address + path)
            assert browser.page.locator("nav a").count() == len(PATHS), path
            assert browser.page.locator("nav a[aria-current]").count() == 1, path
            assert browser.overflow() <= 0, path
            assert browser.serious() == [], path
            assert browser.page.locator("img").count() == 0, path
        assert browser.errors == []
        assert {url.removeprefix(address)[:1] for url in browser.requests} == {"/"}  # nothing from elsewhere


def test_the_keyboard_reaches_everything(served: tuple[str, Trained]) -> None:
    with browse() as browser:
        browser.page.goto(served[0] + "/")
        browser.page.keyboard.press("Tab")
        assert browser.page.evaluate("document.activeElement.className") == "skip"
        browser.page.keyboard.press("Tab")
        browser.page.keyboard.press("Tab")
        browser.page.keyboard.press("Enter")
        browser.page.wait_for_url("**/budget")


def test_search_and_a_contribution(served: tuple[str, Trained]) -> None:
    address, ward = served
    seq = ward.someone("sensitive")
    with browse() as browser:
        browser.page.goto(address + "/contributions")
        digest = browser.page.locator("tbody tr").nth(3).locator("a").inner_text().removesuffix("…")
        browser.page.fill("#find", digest)
        with browser.page.expect_navigation(wait_until="load"):
            browser.page.click("text=Find >> nth=-1")
        browser.page.locator("tbody tr").first.wait_for()
        assert browser.page.locator("tbody tr").count() == 1
        browser.page.goto(f"{address}/contributions/{seq}")
        assert "consent" in browser.page.inner_text("main")
        browser.page.goto(address + "/contributions?find=" + "ab" * 32)
        assert browser.page.locator("[role=alert]").count() == 1
        assert browser.errors == []


def test_verification_shows_its_progress(served: tuple[str, Trained]) -> None:
    with browse() as browser:
        browser.page.goto(served[0] + "/verification")
        wait_for_verification(browser)
        browser.page.click("button")
        wait_for_verification(browser)
        assert "self-consistent" in browser.page.inner_text("#verdict")
        assert browser.errors == []


def test_the_query_tester(served: tuple[str, Trained]) -> None:
    with browse() as browser:
        browser.page.goto(served[0] + "/gate")
        browser.page.fill("#purpose", "care")
        browser.page.click("text=Ask the gate")
        assert "denied" in browser.page.inner_text("#decision")
        assert "withdrew" in browser.page.inner_text("#decision")
        browser.page.check("[name=accept_withdrawn]")
        browser.page.click("text=Ask the gate")
        assert "allowed" in browser.page.inner_text("#decision")
        browser.page.fill("#max_tpr", "0.0101")
        browser.page.click("text=Ask the gate")
        assert "risk-too-large" in browser.page.inner_text("#decision")
        assert browser.page.input_value("#max_tpr") == "0.0101"
        browser.page.fill("#max_tpr", "")
        browser.page.fill("#max_epsilon", "lots")
        browser.page.click("text=Ask the gate")
        assert browser.page.locator("[role=alert]").count() == 1
        browser.page.fill("#max_epsilon", "1")
        browser.page.fill("#purpose", EVIL)
        browser.page.click("text=Ask the gate")
        assert browser.page.input_value("#purpose") == EVIL and "49" not in browser.page.input_value("#purpose")
        assert browser.page.locator("img").count() == 0 and browser.errors == []


def test_without_javascript_it_says_the_same(served: tuple[str, Trained]) -> None:
    """Plain requests: no page needs a script."""
    import urllib.request

    for path in PATHS:
        with urllib.request.urlopen(served[0] + path) as answer:
            text = answer.read().decode()
            policy = answer.headers["content-security-policy"]
        assert "script-src 'self'" in policy and "unsafe" not in policy
        assert "<script>" not in text and " onclick" not in text and "style=" not in text
        assert "&lt;img src=x" in text or path != "/"


def test_a_run_has_pages_without_a_gate(tmp_path: Path) -> None:
    trained = copied_run(tmp_path)
    with LedgerReader.read_only(trained.ledger) as ledger:
        service = Service(folder=trained.folder, ledger=ledger)
        client = TestClient(make_app(service, pages(service)), base_url="http://localhost")
        assert client.get("/gate").status_code == 404
        found: Any = client.get("/verification/state").json()
        for _ in range(500):
            if not found["running"]:
                break
            time.sleep(0.02)
            found = client.get("/verification/state").json()
        assert found["verdict"] == "self-consistent"
        for path in PATHS[:5]:
            assert client.get(path).status_code == 200, path
        assert "Is this model private?" in client.get("/").text
        missing = client.get("/contributions?find=" + "ab" * 32).text
        assert 'role="alert"' in missing and str(tmp_path) not in missing
        for path in ("/contributions/999999", "/contributions/x", "/contributions?from=-1", "/contributions?find=%00"):
            assert client.get(path).status_code < 500, path


def verified(client: TestClient) -> str:
    """The first page once no verification is running."""
    for _ in range(1000):
        if not client.get("/verification/state").json()["running"]:
            break
        time.sleep(0.02)
    return client.get("/").text


def test_a_release_key_neither_vouches_for_the_ledger_nor_speaks_against_it(
    trained: Trained, key: PrivateKey, tmp_path: Path
) -> None:
    older = tmp_path / "older"
    older.mkdir()
    before = copied_run(older).ledger
    with trained.open() as ledger:
        make_release(tmp_path / "first", [trained.folder], ledger, key)  # a leaf more
        make_release(tmp_path / "out", [trained.folder], ledger, key)
    for place, verdict in ((trained.ledger, "self-consistent"), (before, "not verified")):
        with LedgerReader.read_only(place) as ledger:
            service = Service(folder=tmp_path / "out", ledger=ledger, gate=ReleaseGate(tmp_path / "out", key.public))
            client = TestClient(
                make_app(service, pages(service, Trust(plain=(key.public,)))), base_url="http://localhost"
            )
            assert verdict in verified(client).partition("The evidence")[2].partition("</p>")[0]
            service.close()


def test_the_certificate_of_a_run_is_by_the_newest_verification(tmp_path: Path) -> None:
    trained = copied_run(tmp_path)
    with LedgerReader.read_only(trained.ledger) as ledger:
        service = Service(folder=trained.folder, ledger=ledger)
        client = TestClient(make_app(service, pages(service)), base_url="http://localhost")
        assert (
            '<span class="badge good">private for: clinical, sensitive; not protected: open (declared public; declared population: 10)'
            in verified(client)
        )
        metrics = trained.folder / "metrics.json"
        metrics.write_text(metrics.read_text().replace('"probed": true', '"probed": false'))
        client.post("/verification")
        assert '<span class="badge bad">not private</span>' in verified(client)
        metrics.unlink()  # as before a run has written anything: no certificate, and no path of ours in a refusal
        client.post("/verification")
        assert "No run here has a signed record yet" in verified(client)
