"""`lamina ledger statement, reconcile`: the signed statement for a contributor, and the answer to a deletion request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lamina.cli.command import KEY, LEDGER, Answer, command, option
from lamina.cli.open_ledger import DIGEST, contribution_digest, open_ledger, open_view
from lamina.cli.terminal import existing_ledger, print_note
from lamina.errors import LaminaError
from lamina.ledger.corpus_terms import ledger_key_path
from lamina.ledger.reader import find_contributions, find_leaf
from lamina.ledger.store.sqlite import is_postgres_url
from lamina.ledger.writer import Ledger
from lamina.release.contributor_statement import CONTRIBUTOR_STATEMENT, signed_size, statement_content
from lamina.release.letter import letter, letter_pdf
from lamina.release.reconciliation import RECONCILIATION, anchor_record
from lamina.release.reconciliation import reconcile as reconciled
from lamina.report.pages import letter_page, reconciliation_page
from lamina.sign.keys import replace_file
from lamina.sign.signed_json import canonical_json, sign_json


@command(keys=True)
def statement(
    ledger: str = LEDGER,
    name: str = DIGEST,
    key: Path | None = KEY,
    out: Path = option("folder for the files", "--output", "-o", metavar="DIR", default=Path("statement")),
) -> Answer:
    """Write a contributor's statement: the uses of one contribution, its privacy loss, and how to withdraw it.

    Writes statement.cose, signed by the ledger's key (default: the key beside the ledger), and its content as a letter of one
    page, letter.html and letter.pdf. The command signs a checkpoint and verifies the ledger first. The signed file contains
    receipts of the contribution, its epochs, the releases that may have learned from it, and its withdrawal.

    The contributor checks it without the ledger: lamina ledger receipt --check statement.cose --trust ledger.pub. If the
    ledger is also given, every fact is recomputed.

    Examples:

      lamina ledger statement ledger.db 9f86d081 --key ledger.key -o for-p001
      lamina ledger receipt --check for-p001/statement.cose --trust ledger.pub
      lamina ledger receipt ledger.db --check for-p001/statement.cose --trust ledger.pub
    """
    place = existing_ledger(ledger)
    if key is None and not is_postgres_url(place) and (beside := ledger_key_path(place)).exists():
        key = beside
    with open_ledger(ledger, key) as book:
        signer, size = book.signing_key(), signed_size(book)
        (leaf,) = find_contributions(book, str(find_leaf(book, contribution_digest(name))))
        content = statement_content(book, leaf.seq, size)
    page = letter(content)
    files = {
        "statement.cose": sign_json(content, signer, CONTRIBUTOR_STATEMENT),
        "letter.html": letter_page(page).encode(),
    }
    try:
        files["letter.pdf"] = letter_pdf(page)
    except LaminaError as error:
        print_note(f"no PDF: {error.problem}; {error.remedy}")
    written = _write(out, files)
    return Answer({**content, "files": written}, letter_text(page), *_listed(written))


def letter_text(page: dict[str, Any]) -> str:
    """Return the letter as text for a terminal."""
    lines = [page["summary"], *(f"  {name:<13} {value}" for name, value in page["facts"])]
    for section in page["sections"]:
        lines += ["", section["heading"], *(f"  {part}" for part in section["text"])]
    return "\n".join(lines)


def _write(out: Path, files: dict[str, bytes]) -> list[str]:
    out.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        replace_file(out / name, data, "the file", mode=0o600)
    return [str(out / name) for name in files]


def _listed(written: list[str]) -> list[str]:
    return [f"  written: {each}" for each in written]


@command(keys=True)
def reconcile(
    ledger: str = LEDGER,
    name: str = DIGEST,
    key: Path | None = KEY,
    out: Path | None = option("folder for the files; default: none are written", "--output", "-o", metavar="DIR"),
) -> Answer:
    """Reconcile a deletion request: every event, every released model and the ε attributable to one contribution.

    With --output it writes reconciliation.json, reconciliation.html (for the person who asked), and anchor.json: the content
    anchor of the contribution, with its receipt. Every DIGEST argument accepts the anchor, or a C2PA manifest (as JSON) that
    contains it as the assertion lamina.contribution. With --key, the ledger's key signs a checkpoint, and the reconciliation
    at that checkpoint: reconciliation.cose.

    Examples:

      lamina ledger reconcile ledger.db 9f86d081 -o request-17 --key ledger.key
      lamina ledger reconcile ledger.db anchor.json --json
    """
    with open_ledger(ledger, key) if key is not None else open_view(ledger) as book:
        size = signed_size(book) if isinstance(book, Ledger) else None
        leaf, *_ = find_contributions(book, contribution_digest(name))
        found, anchor = reconciled(book, leaf, size), anchor_record(book, leaf)
        signed = sign_json(found, book.signing_key(), RECONCILIATION) if isinstance(book, Ledger) else None
    written = []
    if out is not None:
        page = reconciliation_page(found).encode()
        files = {"reconciliation.json": canonical_json(found), "reconciliation.html": page}
        files |= {"anchor.json": canonical_json(anchor)} | ({} if signed is None else {"reconciliation.cose": signed})
        written = _write(out, files)
    lines = [found["statement"]]
    for each in found["runs"]:
        spent = "no ε is proven" if each["epsilon"] is None else f"ε {each['epsilon']}"
        lines.append(f"  run {each['run'][:8]}: {each['steps']} steps, {spent}")
    return Answer({**found, "anchor": anchor, "files": written}, *lines, *_listed(written))
