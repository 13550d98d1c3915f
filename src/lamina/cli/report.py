"""`lamina report`: what a run cost and reached, as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from lamina.cli.certify import LedgerOption, RunArgument, TrustOption, run_ledger
from lamina.cli.options import JsonOption, option
from lamina.cli.terminal import print_answer
from lamina.ledger.reader import LedgerReader
from lamina.ledger.verify.tree_checks import Trust
from lamina.report.pages import run_report
from lamina.sign.keys import replace_file


def report(
    run: RunArgument,
    ledger: LedgerOption = None,
    trust: TrustOption = None,
    out: Annotated[Path | None, option("the file; default: RUN/report.html", "--output", "-o", metavar="FILE")] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a page about a run: is it private, what did each class spend and what remains, who reached which layer.

    Spends nothing. One HTML file that opens from disk with no network, on a phone and on paper. It holds public figures only,
    and the same run and ledger give the same bytes.

    Examples:

      lamina report runs/first
      lamina report runs/first --trust owner.pub -o first.html --json
    """
    with LedgerReader.read_only(run_ledger(run, ledger)) as reader:
        page = run_report(run, reader, trust=None if trust is None else Trust.load(trust))
    path = run / "report.html" if out is None else out
    replace_file(path, page.encode(), "the report", mode=0o644)
    print_answer({"report": str(path)}, f"report: {path}", as_json)
