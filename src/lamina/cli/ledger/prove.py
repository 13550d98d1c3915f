"""`lamina ledger prove`: proofs that others check."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from lamina.admit import files
from lamina.cli.ledger.common import LEAF, Json, Output, Where, looked_at, named, printed, say
from lamina.cli.output import print_json
from lamina.ledger import checkpoint as notes
from lamina.ledger.errors import LedgerError
from lamina.ledger.find import find_one
from lamina.ledger.hashing import leaf_hash
from lamina.ledger.proof_text import ProofText
from lamina.ledger.show import counted
from lamina.ledger.text import encode64
from lamina.ledger.view import View


def prove(
    ledger: Where,
    name: Annotated[
        str | None,
        typer.Argument(metavar="LEAF", help=LEAF),
    ] = None,
    old: Annotated[
        int | None,
        typer.Option("--from", metavar="SIZE", help="prove that the ledger goes on from this size"),
    ] = None,
    size: Annotated[
        int | None, typer.Option(metavar="SIZE", help="in the checkpoint of so many leaves; default: newest")
    ] = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Prove that a leaf is in the ledger, or that a later checkpoint goes on from an earlier one.

    An inclusion proof is printed as C2SP tlog-proof text, with its checkpoint. A consistency proof (--from) is printed
    as a C2SP witness takes it: the old size, the proof, the new checkpoint. Both grow with the logarithm of the ledger.

    Examples:

      lamina ledger prove ledger.db 17
      lamina ledger prove ledger.db 9f86d081 -o mine.tlog-proof
      lamina ledger prove ledger.db --from 1000
    """
    if (name is None) == (old is None):
        raise typer.BadParameter("give a leaf, or --from SIZE", param_hint="LEAF")
    with looked_at(ledger) as book:
        signed = _checkpoint(book, size)
        found = _consistency(book, old, signed) if old is not None else _inclusion(book, str(name), signed)
    if output is not None:
        files.replace(output, found["text"].encode("utf-8"), "the proof", mode=0o644)
    if as_json:
        print_json({"ledger": printed(ledger), **found})
    elif output is not None:
        hashes = counted(len(found["path"]), "hash", "hashes")
        say(f"{output}: {hashes}, under the checkpoint of {counted(found['size'], 'leaf', 'leaves')}")
    else:
        sys.stdout.write(found["text"])


def _checkpoint(book: View, size: int | None) -> str:
    for text in book.checkpoints() if size is not None else [book.latest()]:
        if text is not None and size in (None, notes.parse(text)[0].size):
            return text
    raise LedgerError(
        "cli.ledger-no-checkpoint",
        f"the ledger {book.name} has no checkpoint"
        + ("" if size is None else f" of {counted(size, 'leaf', 'leaves')}"),
        "sign one: lamina ledger checkpoint --key",
    )


def _inclusion(book: View, name: str, signed: str) -> dict[str, Any]:
    seq = find_one(book, named(name))
    head, _ = notes.parse(signed)
    hash = leaf_hash(book.raw(seq))
    if seq >= head.size:
        raise LedgerError(
            "cli.leaf-not-under",
            f"leaf {seq} is not under the checkpoint of {counted(head.size, 'leaf', 'leaves')}",
            "sign a newer one",
        )
    path = book.prove(seq, head.size)
    return {
        "index": seq,
        "size": head.size,
        "root": head.root.hex(),
        "leaf_hash": hash.hex(),
        "path": [each.hex() for each in path],
        "text": ProofText(seq, tuple(path), signed).encode(),
    }


def _consistency(book: View, old: int, signed: str) -> dict[str, Any]:
    head, _ = notes.parse(signed)
    if not 0 <= old <= head.size:
        raise LedgerError(
            "cli.checkpoint-not-go",
            f"the checkpoint has {counted(head.size, 'leaf', 'leaves')}, and does not go on from {old}",
            "give a size that it has reached",
        )
    path = book.consistent(old, head.size)
    lines = [f"old {old}", *map(encode64, path)]
    return {
        "from": old,
        "size": head.size,
        "root": head.root.hex(),
        "path": [each.hex() for each in path],
        "text": "\n".join(lines) + "\n\n" + signed,
    }
