"""`lamina ledger receipt`: a proof that a contributor keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lamina.admit import files
from lamina.admit.times import shown
from lamina.cli.ledger.common import LEAF, Json, looked_at, named, printed, say
from lamina.cli.output import print_json
from lamina.errors import LaminaError
from lamina.ledger import leaf as leaves
from lamina.ledger import receipt as receipts
from lamina.ledger.check import Trust
from lamina.ledger.errors import LedgerError, NotVerified
from lamina.ledger.find import find_one
from lamina.ledger.note import NoteKey
from lamina.ledger.proof_text import ProofText
from lamina.ledger.receipt import Receipt
from lamina.ledger.show import in_words

_MOST = 1 << 20
_LEAF, _COSE, _TEXT = ".leaf", ".cose", ".tlog-proof"


def receipt(
    ledger: Annotated[
        str | None,
        typer.Argument(metavar="LEDGER", help="ledger.db, or postgresql://…/database#schema"),
    ] = None,
    name: Annotated[
        str | None,
        typer.Argument(metavar="LEAF", help=LEAF),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="PREFIX", help="beginning of the names of the files")
    ] = Path("receipt"),
    check: Annotated[
        Path | None,
        typer.Option(metavar="PREFIX", help="check a receipt instead; needs --trust and no ledger"),
    ] = None,
    trust: Annotated[
        Path | None, typer.Option(metavar="KEYS", help="for --check: the keys of the ledger, from elsewhere")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a receipt: proof, under the newest checkpoint, that a record is in the ledger.

    Three files: PREFIX.leaf, the record itself; PREFIX.cose, a COSE receipt (RFC 9942); and PREFIX.tlog-proof, the same
    as C2SP text with the cosignatures of witnesses. Keep them: after pruning, only who kept a receipt can prove a
    record.

    Examples:

      lamina ledger receipt ledger.db 9f86d081 -o mine
      lamina ledger receipt --check mine --trust ledger.pub
    """
    if check is not None:
        if trust is None:
            raise typer.BadParameter("whose signature must it have?", param_hint="--trust")
        _check(check, Trust.load(trust), as_json)
        return
    if ledger is None or name is None:
        raise typer.BadParameter("give a ledger and a leaf, or --check", param_hint="LEDGER")
    with looked_at(ledger) as book:
        seq = find_one(book, named(name))
        parts = {_LEAF: book.raw(seq), _COSE: book.receipt(seq), _TEXT: book.proof_text(seq).encode("utf-8")}
    written = {suffix[1:]: str(_named(output, suffix)) for suffix in parts}
    for suffix, data in parts.items():
        files.write_new(_named(output, suffix), data, "the receipt", mode=0o644)
    size = Receipt.decode(parts[_COSE]).size
    if as_json:
        print_json({"ledger": printed(ledger), "index": seq, "size": size, "files": written})
    else:
        say(f"receipt of leaf {seq} of {size:,}: {', '.join(written.values())}")


def _check(prefix: Path, trust: Trust, as_json: bool) -> None:
    """Both proofs, by keys of the origin that they name."""
    leaf, cose, text = (
        files.read_small(_named(prefix, s), "the receipt", most=_MOST) for s in (_LEAF, _COSE, _TEXT)
    )
    try:
        found, proof = Receipt.decode(cose), ProofText.parse(text)
        record = leaves.decode(leaf)
    except LaminaError as error:
        raise NotVerified(
            "cli.no-receipt", f"'{prefix}' is no receipt: {error.problem}", "ask the ledger for it again"
        ) from None
    keys = trust.keys(found.origin)
    if not any(receipts.verify(cose, leaf, key, found.origin) for key in keys):
        raise NotVerified(
            "cli.receipt-not-signed",
            f"the receipt of {found.origin!r} is not signed by a trusted key, or not of this leaf",
            _ASK,
        )
    named = [NoteKey(found.origin, key) for key in dict.fromkeys(keys)]
    head = proof.verify(leaf, named, origin=found.origin)
    if proof.index != found.index or record.seq != found.index:
        raise NotVerified(
            "cli.proofs-leaves", f"the proofs are of leaves {found.index} and {proof.index}", _ASK
        )
    if as_json:
        print_json({"verified": True, "origin": found.origin, "index": found.index, "size": head.size})
    else:
        say(f"verified: leaf {found.index} of {head.size:,} in {found.origin}, {shown(record.time)}")
        say(f"  {in_words(record)}")


_ASK = "ask the ledger for the receipt again, and whoever answers for it for its keys"


def _named(prefix: Path, suffix: str) -> Path:
    if not prefix.name:
        raise LedgerError(
            "cli.no-beginning-name", f"'{prefix}' is no beginning of a name", "give one, like mine"
        )
    return prefix.with_name(prefix.name + suffix)
