"""The page about a run: complete, inert, the same each time; in a real browser at two widths, light and dark."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from browser import browse
from making import RUN, admitted, attestation, create
from release_forger import RUN_END, append, cut, last, seed_of
from trained_run import Trained, copied_run

from lamina.ledger.corpus_terms import ledger_key_path
from lamina.ledger.governance_records import Release
from lamina.ledger.reader import LedgerReader
from lamina.release.certificate import certify
from lamina.report.charts import budget_chart, evaluation_chart, layer_chart
from lamina.report.pages import run_report
from lamina.report.svg import ticks
from lamina.report.view import ClassView, LedgerView

EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{7*7}}"


@pytest.fixture
def trained(tmp_path: Path) -> Trained:
    return copied_run(tmp_path)


def page_of(trained: Trained) -> str:
    with LedgerReader.read_only(trained.ledger) as ledger:
        return run_report(trained.folder, ledger)


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


def test_it_says_what_the_certificate_says(trained: Trained) -> None:
    page = page_of(trained)
    with LedgerReader.read_only(trained.ledger) as ledger:
        found = certify(trained.folder, ledger).content
    for words in (found["run"]["id"], found["model"]["sha256"], found["ledger"]["root"], "Is this model private?"):
        assert words in page
    for name in found["classes"]:
        assert name in page
    assert "not private" not in page


def test_the_same_bytes_and_nothing_to_load(trained: Trained) -> None:
    page = page_of(trained)
    assert page == page_of(trained)
    parsed = _Tags()
    parsed.feed(page)
    assert not {"script", "img", "iframe"} & set(parsed.tags) and parsed.tags.count("link") == 1  # an empty icon
    assert not [each for each in parsed.attributes if each[0].startswith("on") or each[0] == "src"]
    assert all((value or "").startswith(("#", "data:,")) for name, value in parsed.attributes if name == "href")


def test_a_run_that_is_not_private_says_so(trained: Trained) -> None:
    """Its end in the ledger, written by hand, states that the noise came from a chosen seed."""
    seed, body = seed_of(ledger_key_path(trained.ledger)), last(trained.ledger, RUN_END)
    cut(trained.ledger, RUN_END, seed)
    append(trained.ledger, RUN_END, {**body, 6: 2}, seed)
    page = page_of(trained)
    assert "not private" in page and "seed that somebody chose" in page


def test_names_and_notes_stay_text(trained: Trained) -> None:
    path = trained.folder / "metrics.json"
    facts = json.loads(path.read_text())
    facts["notes"] = [EVIL]
    facts["evaluations"] = [{"step": step, "figures": {EVIL: 0.5}} for step in (1, 2)]
    path.write_text(json.dumps(facts))
    page = page_of(trained)
    parsed = _Tags()
    parsed.feed(page)
    assert not {"script", "img"} & set(parsed.tags) and "{{7*7}}" in page and "&lt;script&gt;" in page


def test_charts_escape_names(trained: Trained) -> None:
    with LedgerReader.read_only(trained.ledger) as ledger:
        view = LedgerView(ledger)
        view.follow()
        found = view.posture(trained.outcome.run)
    assert found is not None
    evil = ClassView(name=EVIL, public=False, profile="", population=1, bound=1.0, points=[(1, 0, 0.5)])
    for drawn in (budget_chart({EVIL: evil}), evaluation_chart([{"step": s, "figures": {EVIL: 0.1}} for s in (1, 2)])):
        assert "<script" not in drawn and "<img" not in drawn
    assert layer_chart(found[0]).count("<rect") == 2 * 3 + 2 + 3  # cells and noise of two rows, colours of names


def test_no_name_of_a_class_is_cut(trained: Trained) -> None:
    """Names stand below the picture, in as many rows as they need; no text is smaller than 12 pixels."""
    names = [f"ward-{at}-of-a-hospital-that-has-a-very-long-name-for-each-ward" for at in range(12)]
    one: dict[str, Any] = {"public": False, "profile": "", "population": 1, "bound": None, "points": [(1, 0, 0.5)]}
    views = {name: ClassView(name=name, **one) for name in names}
    with LedgerReader.read_only(trained.ledger) as ledger:
        found = LedgerView(ledger).posture(trained.outcome.run)
    assert found is not None
    posture = found[0].model_copy(update={"classes": dict.fromkeys(names, found[0].classes["clinical"])})
    for drawn in (budget_chart(views), layer_chart(posture)):
        width, height = (float(each) for each in re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', drawn)[0])
        texts = re.findall(r'<text x="([\d.]+)" y="([\d.]+)"[^>]* font-size="(\d+)"[^>]*>([^<]*)<', drawn)
        assert all(any(text.endswith(name) for *_, text in texts) for name in names)
        assert all(float(y) < height and int(size) >= 12 for _, y, size, _ in texts)
        ends = [float(x) + 7 * len(text) for x, _, _, text in texts if any(map(text.endswith, names))]
        assert max(ends) < width


@pytest.mark.parametrize(("epochs", "marks"), [(1, "01"), (3, "0123"), (7, "0246"), (10, "0246810"), (12, "0510")])
def test_epochs_are_marked_where_they_are(epochs: int, marks: str) -> None:
    points = [(at, 0, 0.1 * at) for at in range(epochs + 1)]
    one = ClassView(name="c", public=False, profile="", population=1, bound=None, points=points)
    drawn = budget_chart({"c": one})
    texts = re.findall(
        r'<text x="([\d.]+)" y="[\d.]+" class="quiet" font-size="12" text-anchor="middle">([^<]*)<', drawn
    )
    assert "".join(text for _, text in texts) == marks
    assert all(float(x) == pytest.approx(52 + 560 * int(text) / epochs, abs=0.06) for x, text in texts)


def test_leaves_count_once_however_many_pages_are_made(trained: Trained) -> None:
    with LedgerReader.read_only(trained.ledger) as ledger:
        alone = LedgerView(ledger)
        alone.follow()
        for _ in range(5):
            view, start = LedgerView(ledger), threading.Barrier(6)

            def follow(view: LedgerView = view, start: threading.Barrier = start) -> None:
                start.wait()
                view.follow()

            threads = [threading.Thread(target=follow) for _ in range(6)]
            for each in threads:
                each.start()
            for each in threads:
                each.join()
            assert (view.epochs, view.run_list()) == (alone.epochs, alone.run_list())


def test_pages_lead_past_a_stretch_without_contributions(tmp_path: Path) -> None:
    with create(str(tmp_path / "ledger.db")) as ledger:
        ledger.append([admitted(i) for i in range(3)], [attestation(i) for i in range(3)])
        papers = [b"manifest %d" % i for i in range(30)]
        ledger.append([Release(manifest=hashlib.sha256(each).digest(), runs=(RUN,)) for each in papers], papers)
        ledger.append([admitted(3)], [attestation(3)])
        view, found = LedgerView(ledger), list[int]()
        first: int | None = 0
        while first is not None:
            rows, first = view.rows(first, 1)
            found += [row["index"] for row in rows]
    assert found == [1, 2, 3, 34]


def test_ticks_reach_what_they_must() -> None:
    for most in (1e-9, 0.3, 1.0, 7.7, 123.0, 9e6):
        assert ticks(most)[-1] >= most * 0.999 and 3 <= len(ticks(most)) <= 12


@pytest.mark.parametrize(("width", "scheme"), [("desktop", "light"), ("phone", "dark")])
def test_in_a_browser(trained: Trained, tmp_path: Path, width: str, scheme: str) -> None:
    path = tmp_path / "report.html"
    long = "elsewhere.example/cardiology-of-three-hospitals"  # a name without a blank has to break on a phone
    path.write_text(page_of(trained).replace("example.org/ecg", long), encoding="utf-8")
    with browse(width, scheme) as browser:
        browser.page.goto(path.as_uri())
        assert browser.errors == [] and len(browser.requests) == 1
        assert browser.overflow() <= 0
        assert browser.page.locator("svg").count() == 3
        assert browser.serious() == []
        browser.page.emulate_media(media="print")
        browser.page.set_viewport_size({"width": 794, "height": 1123})  # A4
        assert browser.overflow() <= 0
