"""`lamina ledger checkpoint`: sign what is there, and hand checkpoints out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from lamina.admit import files
from lamina.cli.ledger.common import Json, KeyFile, Output, Where, looked_at, opened, printed, say
from lamina.cli.output import print_json
from lamina.cli.passphrase import PassphraseFile
from lamina.ledger import checkpoint as notes
from lamina.ledger.errors import LedgerError
from lamina.ledger.show import counted
from lamina.ledger.view import View

_MOST = 1 << 20


def checkpoint(
    ledger: Where,
    key: KeyFile = None,
    cosigned: Annotated[
        Path | None, typer.Option(metavar="FILE", help="add the signatures of this copy, back from a witness")
    ] = None,
    size: Annotated[
        int | None, typer.Option(min=0, help="the checkpoint of so many leaves; default: newest")
    ] = None,
    output: Output = None,
    passphrase_file: PassphraseFile = None,
    as_json: Json = False,
) -> None:
    """Print a checkpoint: size and root of the ledger, signed. With --key, sign what is there first.

    Keep one, outside the ledger: with lamina ledger verify --seen it shows later that nothing before it was changed or
    taken away. The form is a C2SP signed note, which other programs read.

    Examples:

      lamina ledger checkpoint ledger.db --key ledger.key
      lamina ledger checkpoint ledger.db > last.checkpoint
      lamina ledger checkpoint ledger.db --cosigned from-witness.txt
    """
    if key is not None or cosigned is not None:
        with opened(ledger, key, passphrase_file) as book:
            if key is not None:
                book.checkpoint()
            if cosigned is not None:
                given = files.read_small(cosigned, "the checkpoint", most=_MOST)
                book.cosigned(given.decode("utf-8", "replace"))
    with looked_at(ledger) as view:
        text, leaves = _found(view, size), view.size
    head, note = notes.parse(text)
    if output is not None:
        files.replace(output, text.encode("utf-8"), "the checkpoint", mode=0o644)
    if as_json:
        print_json(
            {
                "ledger": printed(ledger),
                "origin": head.origin,
                "size": head.size,
                "root": head.root.hex(),
                "unsigned": leaves - head.size if size is None else None,
                "signers": [each.name for each in note.signatures],
                "checkpoint": text,
            }
        )
    elif output is not None:
        signers = ", ".join(each.name for each in note.signatures)
        say(f"{output}: {counted(head.size, 'leaf', 'leaves')}, signed by {signers}")
    else:
        sys.stdout.write(text)


def _found(book: View, size: int | None) -> str:
    if size is None:
        found = book.latest()
    else:
        found = next((text for text in book.checkpoints() if notes.parse(text)[0].size == size), None)
    if found is None:
        which = (
            "has no checkpoint" if size is None else f"has no checkpoint of {counted(size, 'leaf', 'leaves')}"
        )
        raise LedgerError("cli.ledger", f"the ledger {book.name} {which}", "sign one: --key")
    return found
