"""How the demo's model leaves the house: certificate, page about the run, release folder, and two queries to its gate."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from lamina.ledger.corpus_terms import ledger_key_path
from lamina.ledger.writer import Ledger
from lamina.release.certificate import certify
from lamina.release.certificate_pdf import certificate_pdf
from lamina.release.gate import Decision, ReleaseGate
from lamina.release.maker import make_release
from lamina.release.query import Query
from lamina.report.pages import run_report
from lamina.sign.keys import PrivateKey

KEY_NAME, RELEASE_NAME = "release.key", "release"
_RIGHTS = {"classes": ["volunteer", "sensitive"], "max_epsilon": 4.0, "min_noise_multiplier": 0.0}
QUERIES = {
    "care.json": {"draws_on": {}, "rights": {**_RIGHTS, "purpose": "care"}},
    "advertising.json": {"draws_on": {}, "rights": {**_RIGHTS, "purpose": "advertising"}},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaving:
    """The papers of the demo's model, and what its gate said to each of QUERIES."""

    certificate: Path
    page: Path
    release: Path
    key: Path
    ledger: Path
    decisions: dict[str, Decision]

    def words(self) -> list[str]:
        """What the gate said, one line for each query."""
        return [
            f"{name}: {'allowed' if each.allowed else f'denied, {each.reasons[0].text}'}"
            for name, each in self.decisions.items()
        ]

    def commands(self) -> list[str]:
        """What to type, to see it oneself."""
        release, key = quote(str(self.release)), quote(str(self.key))
        asked = quote(str(self.release.parent / "queries" / "advertising.json"))
        ledger = quote(str(self.ledger))
        return [
            f"lamina release verify {release} --trust {key} --ledger {ledger}",
            f"lamina release ask {release} {asked} --trust {key} --ledger {ledger}",
        ]

    def machine(self) -> dict[str, Any]:
        return {name: each.to_dict() for name, each in self.decisions.items()}


def leave(place: Path, ledger_path: Path) -> Leaving:
    """Certify the run in PLACE/run, release its model, and ask the gate twice: once for care, once for advertising."""
    run, release = place / "run", place / RELEASE_NAME
    key = PrivateKey.generate()
    key.save(place / KEY_NAME, None)
    public = place / f"{KEY_NAME.removesuffix('.key')}.pub"
    public.write_bytes(key.public.pem())
    with Ledger.open(ledger_path, PrivateKey.load(ledger_key_path(ledger_path), None)) as ledger:
        certificate = certify(run, ledger)
        papers = {
            "certificate.json": certificate.json(),
            "certificate.cose": certificate.signed(key),
            "certificate.pdf": certificate_pdf(certificate, key.public.name),
        }
        for name, data in papers.items():
            (place / name).write_bytes(data)
        make_release(release, [run], ledger, key, name="ECG demo", pdf=True)
        page = place / "run.html"
        page.write_text(run_report(run, ledger), encoding="utf-8")
        (place / "queries").mkdir()
        for name, plain in QUERIES.items():
            (place / "queries" / name).write_text(f"{json.dumps(plain, indent=2)}\n", encoding="utf-8")
        gate = ReleaseGate(release, key.public, ledger=ledger)
        decisions = {name: gate.decide(Query.from_dict(plain)) for name, plain in QUERIES.items()}
    return Leaving(
        certificate=place / "certificate.pdf", page=page, release=release, key=public, ledger=ledger_path,
        decisions=decisions,
    )  # fmt: skip
