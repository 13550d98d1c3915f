"""Pages from templates: the report of a run as one HTML file that opens from disk, without a network."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from shlex import quote
from typing import Any

from lamina import __version__
from lamina.errors import LaminaError
from lamina.ledger.reader import LedgerReader
from lamina.ledger.store.sqlite import printable_location
from lamina.ledger.verify.tree_checks import Trust
from lamina.ledger.verify.verifier import verify
from lamina.plan.table import epsilon_text
from lamina.release.certificate import certify
from lamina.release.risk_statements import FIGURE_NAMES, per_hundred
from lamina.release.run_evidence import RunMetrics
from lamina.release.schema import NOT_REACHED
from lamina.report.charts import budget_chart, evaluation_chart, layer_chart, share_bars
from lamina.report.view import LedgerView
from lamina.validate import packaged_text


@cache
def environment() -> Any:
    """The templates; everything that is put into them is escaped."""
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError:
        problem = "pages need jinja2, which is not installed"
        raise LaminaError("report.jinja2-missing", problem, "pip install 'lamina[report]'") from None
    made = Environment(
        loader=PackageLoader("lamina.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    made.filters["epsilon"] = lambda value: "not proven" if value is None else epsilon_text(value)
    made.filters["percent"] = lambda rate: f"{per_hundred(rate)} %"
    made.filters["remains"] = lambda value: f"{math.floor(value * 1e4) / 1e4:.4f}"
    made.globals["version"] = __version__
    made.globals["figure_names"] = FIGURE_NAMES
    return made


def render(template: str, **values: Any) -> str:
    """A page. SVG of `charts` is put in as it is: every word in it was escaped when it was drawn."""
    from markupsafe import Markup

    charts = {name: Markup(drawn) for name, drawn in values.pop("charts", {}).items()}
    common = {"root": "", "pages": (), "here": "", "subtitle": "", "note": NOT_REACHED}
    text: str = environment().get_template(template).render(**common | values, charts=charts)
    return text


def run_report(folder: str | Path, ledger: LedgerReader, *, trust: Trust | None = None) -> str:
    """The report of a run: its certificate, budgets, layers, evaluations, withdrawals; the same bytes each time."""
    folder = Path(folder)
    facts = RunMetrics.load(folder)
    verification = verify(ledger.store, trust=trust)
    certificate = certify(folder, ledger, verification=verification).content
    view = LedgerView(ledger)
    view.follow()
    found = view.posture(facts.run.hex())
    head = view.head()
    place = printable_location(ledger.name)
    told: Mapping[str, str] = {
        "as of": certificate["issued"],
        "run": facts.run.hex(),
        "model": f"{certificate['model']['file']}, SHA-256 {certificate['model']['sha256'] or 'missing'}",
        "attested": "yes" if certificate["attested"] else "no: the ledger has no signed contributions for this run",
        "ledger": f"{view.origin}, {head['size']} leaves, {head['signed']} signed",
        "ledger root": head["root"],
        "accountant": f"{certificate['accountant']['name']} ({certificate['accountant']['version']})",
    }
    return _one_file(
        "report.html",
        title=f"Privacy report of {view.origin}",
        subtitle=f"run {facts.run.hex()[:8]}, {certificate['run']['steps']} of {certificate['run']['planned_steps']} steps",
        certificate=certificate,
        facts=list(told.items()),
        view=view,
        delta=ledger.header.delta,
        posture=None if found is None else found[0],
        verification=verification,
        evaluations=list(facts.evaluations),
        notes=facts.notes,
        commands=f"lamina ledger verify {quote(Path(place).name)} --trust owner.pub\n"
        f"lamina report {quote(folder.name)} --trust owner.pub",
        charts={
            "budget": budget_chart(view.classes),
            "layers": "" if found is None else layer_chart(found[0]),
            "shares": "" if found is None else share_bars(found[1]),
            "evaluation": evaluation_chart(facts.evaluations),
        },
    )


def reconciliation_page(found: Mapping[str, Any]) -> str:
    """What a deletion request comes to, for whoever asked."""
    subtitle = f"ledger {found['ledger']['origin']}, as of {found['as_of']}"
    title = "Reconciliation of a deletion request"
    return _one_file("reconciliation.html", title=title, subtitle=subtitle, found=found)


def letter_page(letter: Mapping[str, Any]) -> str:
    """Return the letter to a contributor."""
    return _one_file("letter.html", title="Statement about your contribution", letter=letter)


def _one_file(template: str, **values: Any) -> str:
    """Return a page with its stylesheet, which can be opened from disk."""
    from markupsafe import Markup

    return render(template, style=Markup(packaged_text("lamina.report", "templates/style.css")), **values)
