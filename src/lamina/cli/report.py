"""Write a page about a run: is it private, what did each class spend and what remains, who reached which layer.

Spends nothing. One HTML file that opens from disk with no network, on a phone and on paper. It holds public figures only, and the
same run and ledger give the same bytes.

Examples:

  lamina report runs/first
  lamina report runs/first --trust owner.pub -o first.html --json
"""

from __future__ import annotations

from pathlib import Path

from lamina.cli.certify import RUN, RUN_LEDGER, TRUST, run_ledger
from lamina.cli.command import Answer, command, option
from lamina.ledger.reader import LedgerReader
from lamina.ledger.verify.tree_checks import Trust
from lamina.report.pages import run_report
from lamina.sign.keys import replace_file


@command()
def report(
    run: Path = RUN,
    ledger: str | None = RUN_LEDGER,
    trust: Trust | None = TRUST,
    out: Path | None = option("the file; default: RUN/report.html", "--output", "-o"),
) -> Answer:
    with LedgerReader.read_only(run_ledger(run, ledger)) as reader:
        page = run_report(run, reader, trust=trust)
    path = run / "report.html" if out is None else out
    replace_file(path, page.encode(), "the report", mode=0o644)
    return Answer({"report": str(path)}, f"report: {path}")
