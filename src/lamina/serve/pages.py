"""The dashboard: pages about a release or a run and its ledger. They work without JavaScript and are better with it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from lamina.errors import LaminaError, RunError
from lamina.ledger.reader import LedgerReader, find_contributions
from lamina.ledger.verify.report import Verification
from lamina.ledger.verify.tree_checks import Trust
from lamina.ledger.verify.verifier import verify
from lamina.release.certificate import certify
from lamina.release.query import Query
from lamina.release.reconciliation import reconcile
from lamina.report.charts import budget_chart, layer_chart, share_bars
from lamina.report.pages import environment, render
from lamina.report.view import PAGE_ROWS, LedgerView
from lamina.serve.app import Service
from lamina.sign.keys import format_utc
from lamina.sign.signed_json import parse_json

_CHUNK = 20_000  # leaves that are counted at a time
_PAGES = (
    ("/", "Overview"), ("/budget", "Budgets"), ("/layers", "Layers"), ("/contributions", "Contributions"),
    ("/withdrawals", "Withdrawals"), ("/gate", "Gate"), ("/verification", "Verification"),
)  # fmt: skip


@dataclass
class BackgroundVerification:
    """One verification of the ledger at a time, in a thread, and how far it is."""

    ledger: LedgerReader
    trust: Trust | None
    seen: tuple[str, ...] = ()  # checkpoints that the ledger must go on from
    done: int = 0
    total: int = 0
    running: bool = False
    result: Verification | None = None
    at: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        """Begin, unless one is running."""
        with self._lock:
            if self.running:
                return
            own = self.ledger.another()  # a verification is one long view: others must not wait for it
            self.running, self.done, self.total = True, 0, own.size
        threading.Thread(target=self._run, args=(own,), daemon=True, name="verification").start()

    def _run(self, own: LedgerReader) -> None:
        try:
            with own:
                self.result = verify(own.store, trust=self.trust, seen=self.seen, progress=self._progress)
            self.at = format_utc(int(time.time()))
        finally:
            self.running = False

    def _progress(self, done: int, total: int) -> None:
        self.done, self.total = done, total

    def to_dict(self) -> dict[str, Any]:
        found = self.result
        verdict = None if found is None else found.verdict
        return {"running": self.running, "done": self.done, "total": self.total, "verdict": verdict, "at": self.at}


class Dashboard:
    """The pages of one service."""

    def __init__(self, service: Service, trust: Trust | None) -> None:
        assert service.ledger is not None
        self.service, self.ledger = service, service.ledger
        self.view = LedgerView(self.ledger)
        seen: tuple[str, ...] = ()
        if service.gate is not None:
            manifest = service.gate.manifest
            seen = (manifest.ledger.checkpoint,)
            in_header = manifest.signer.id in {each.id for each in self.ledger.header.keys}
            if trust is not None and trust.plain == (manifest.signer,) and not in_header:
                trust = None  # a release key signs no ledger: through the manifest it vouches for this checkpoint alone
        self.checking = BackgroundVerification(self.ledger, trust, seen)
        self.counted = threading.Event()
        self._certified: dict[str, Any] | None = None
        self._certified_by: Verification | None = None
        for name in (made := environment()).list_templates(
            ["html"]
        ):  # compiled here: the first page does not wait for it
            made.get_template(name)
        threading.Thread(target=self._count, args=(self.ledger.another(),), daemon=True, name="counting").start()
        self.checking.start()

    def _count(self, own: LedgerReader) -> None:
        with own:
            while not self.view.follow(_CHUNK, own):
                pass
        self.counted.set()

    def page(self, template: str, here: str, **values: Any) -> Response:
        """A page with what all of them have."""
        if self.counted.is_set():
            self.view.follow(_CHUNK)
        title = dict(_PAGES).get(here, "Contribution")
        text = render(
            template, title=title, here=here, subtitle=f"ledger {self.ledger.origin}",
            pages=[{"path": path, "name": name} for path, name in _PAGES if path != "/gate" or self.service.gate is not None],
            view=self.view, delta=self.ledger.header.delta, counted=self.counted.is_set(), checking=self.checking, **values,
        )  # fmt: skip
        return Response(text, media_type="text/html; charset=utf-8")

    # ------------------------------------------------------------------------------------ pages

    def overview(self, request: Request) -> Response:
        gate = self.service.gate
        release = None if gate is None else {
            "name": gate.manifest.predicate.name, "not_after": format_utc(gate.manifest.not_after),
            "signer": gate.manifest.signer.name, "digest": gate.manifest.digest,
        }  # fmt: skip
        return self.page(
            "overview.html", "/", certificate=self._certificate(), release=release, head=self.view.head(),
            recent=list(self.view.recent(12)),
        )  # fmt: skip

    def _certificate(self) -> dict[str, Any] | None:
        """Of a release as it was signed; of a run by the newest verification of its ledger, if the run has begun."""
        result = self.checking.result
        if self.service.gate is not None:
            if self._certified is None:
                self._certified = parse_json(self.service.papers()["certificate"], "the certificate")
        elif result is not None and result is not self._certified_by:
            try:
                self._certified = dict(certify(self.service.folder, self.ledger, verification=result).content)
            except RunError:
                self._certified = None
            self._certified_by = result
        return self._certified

    def budget(self, request: Request) -> Response:
        return self.page("budget.html", "/budget", charts={"budget": budget_chart(self.view.classes)})

    def layers(self, request: Request) -> Response:
        if self.service.gate is not None:
            runs = self.service.gate.manifest.predicate.runs
        else:
            runs = list(self.view.runs)
        found = self.view.posture(runs[-1]) if runs else None
        drawn = {} if found is None else {"layers": layer_chart(found[0]), "shares": share_bars(found[1])}
        posture, plan = (None, None) if found is None else found
        return self.page("layers.html", "/layers", posture=posture, plan=plan, charts=drawn)

    def contributions(self, request: Request) -> Response:
        asked, problem, following = request.query_params.get("find", "").strip(), "", None
        rows: list[dict[str, Any]] = []
        first = _number(request.query_params.get("from", "0"))
        if asked:
            try:
                found = find_contributions(self.ledger, asked)[:PAGE_ROWS]
                rows = [self.view.row(leaf) for leaf in found]
            except LaminaError as error:  # its text names the file
                problem = f"{error.problem}. {error.remedy}".replace(f" {self.ledger.name}", "")
        else:
            rows, following = self.view.rows(first)
        return self.page(
            "contributions.html", "/contributions", rows=rows, asked=asked, problem=problem, first=first,
            following=following, before=max(0, first - PAGE_ROWS) if first else None,
        )  # fmt: skip

    def contribution(self, request: Request) -> Response:
        leaf = find_contributions(self.ledger, str(_number(request.path_params["seq"])))[0]
        return self.page("contribution.html", "", found=reconcile(self.ledger, leaf))

    def withdrawals(self, request: Request) -> Response:
        return self.page("withdrawals.html", "/withdrawals")

    def gate(self, request: Request) -> Response:
        """The query tester: a form that is sent as a query string, and what the gate says."""
        gate, given = self.service.gate, request.query_params
        assert gate is not None
        decision, problem = None, ""
        if "purpose" in given:
            try:
                decision = self.service.ask_gate(Query.from_dict(_query_of_form(given))).to_dict()
            except LaminaError as error:
                problem = f"{error.problem}. {error.remedy}"
        names = list(gate.manifest.posture.classes)
        chosen = given.getlist("classes") if "purpose" in given else names
        return self.page(
            "gate.html", "/gate", decision=decision, problem=problem, names=names, chosen=chosen, given=dict(given),
            adapters=sorted({each.name for each in gate.manifest.posture.adapters}),
            generation_classes=list(gate.manifest.gate.generation_classes), decided=list(self.service.recent)[::-1],
        )  # fmt: skip

    def verification(self, request: Request) -> Response:
        return self.page("verification.html", "/verification", result=self.checking.result)

    def verify_again(self, request: Request) -> Response:
        self.checking.start()
        return RedirectResponse("/verification", 303)

    def verification_state(self, request: Request) -> Response:
        return JSONResponse(self.checking.to_dict())


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else 0


def _query_of_form(given: Any) -> dict[str, Any]:
    """The fields of the form as a query; what is left empty is not in it."""
    draws: dict[str, Any] = {name: given[name] for name in ("adapter", "generation_class") if given.get(name)}
    if layers := [part.strip() for part in given.get("layers", "").split(",") if part.strip()]:
        draws["layers"] = layers

    def number(name: str, default: float | None) -> float | None:
        try:
            return float(given[name]) if given.get(name) else default
        except ValueError:
            return float("nan")  # which the query refuses by name

    rights = {
        "classes": given.getlist("classes"),
        "max_epsilon": number("max_epsilon", None),
        "min_noise_multiplier": number("min_noise_multiplier", 0.0),
        "purpose": given.get("purpose", ""),
        "accept_withdrawn": given.get("accept_withdrawn") == "yes",
    }
    if given.get("max_tpr"):
        rights["max_tpr"] = {"of": given.get("of"), "fpr": number("fpr", None), "tpr": number("max_tpr", None)}
    return {"draws_on": draws, "rights": rights} | ({"scope": given["scope"]} if given.get("scope") else {})


@cache
def _static(name: str) -> bytes:
    return resources.files("lamina.report").joinpath(f"templates/{name}").read_bytes()


def _file(name: str, kind: str) -> Callable[[Request], Response]:
    def serve(request: Request) -> Response:
        return Response(_static(name), media_type=kind)

    return serve


def pages(service: Service, trust: Trust | None = None) -> list[BaseRoute]:
    """The routes of the pages; none without a ledger. They are guarded as the rest is: keys, limits, headers."""
    if service.ledger is None:
        return []
    made = Dashboard(service, trust)
    routes: list[BaseRoute] = [
        Route("/", made.overview),
        Route("/budget", made.budget),
        Route("/layers", made.layers),
        Route("/contributions", made.contributions),
        Route("/contributions/{seq}", made.contribution),
        Route("/withdrawals", made.withdrawals),
        Route("/verification", made.verification),
        Route("/verification", made.verify_again, methods=["POST"]),
        Route("/verification/state", made.verification_state),
        Route("/static/style.css", _file("style.css", "text/css")),
        Route("/static/verification.js", _file("verification.js", "text/javascript")),
    ]
    return [*routes, Route("/gate", made.gate)] if service.gate is not None else routes
