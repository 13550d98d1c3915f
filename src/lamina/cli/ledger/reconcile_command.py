"""`lamina ledger reconcile`: what a deletion request comes to, as JSON and as a page; and the content anchor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from lamina.admit.keys import replace_file
from lamina.admit.signed_json import canonical_json
from lamina.cli.ledger.record_commands import DigestArgument
from lamina.cli.open_ledger import contribution_digest, open_view
from lamina.cli.terminal import JsonOption, LedgerArgument, option, print_answer
from lamina.ledger.reader import find_contributions
from lamina.release.reconciliation import anchor_record
from lamina.release.reconciliation import reconcile as reconciled
from lamina.report.pages import reconciliation_page


def reconcile(
    ledger: LedgerArgument,
    name: DigestArgument,
    out: Annotated[
        Path | None, option("folder for the files; default: none are written", "--output", "-o", metavar="DIR")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Reconcile a deletion request: every event, every released model and the ε attributable to one contribution.

    With --output it writes reconciliation.json, reconciliation.html (for whoever asked), and anchor.json: the content anchor of
    the contribution, with its receipt. The anchor, or a C2PA manifest (as JSON) that carries it as the assertion
    lamina.contribution, may be given wherever a DIGEST is asked for.

    Examples:

      lamina ledger reconcile ledger.db 9f86d081 -o request-17
      lamina ledger reconcile ledger.db anchor.json --json
    """
    with open_view(ledger) as book:
        leaf, *_ = find_contributions(book, contribution_digest(name))
        found, anchor = reconciled(book, leaf), anchor_record(book, leaf)
    written = []
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        page = reconciliation_page(found).encode()
        for file, data in {
            "reconciliation.json": canonical_json(found),
            "reconciliation.html": page,
            "anchor.json": canonical_json(anchor),
        }.items():
            replace_file(out / file, data, "the reconciliation", mode=0o644)
            written.append(str(out / file))
    lines = [
        found["statement"],
        *(f"  run {each['run'][:8]}: {each['steps']} steps, ε {each['epsilon']}" for each in found["runs"]),
    ]
    lines += [
        f"  model {each['name'] or 'of unknown name'}, released {each['time']}, manifest {each['manifest'][:16]}"
        for each in found["releases"]
    ]
    print_answer(
        {**found, "anchor": anchor, "files": written},
        "\n".join([*lines, *(f"  written: {each}" for each in written)]),
        as_json,
    )
