"""`lamina ledger prune`: contributions that are old are summed up."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from lamina import cbor
from lamina.admit import files
from lamina.admit.key import PrivateKey
from lamina.admit.times import shown, when
from lamina.cli.ledger.common import Json, KeyFile, Where, check_there, printed, say
from lamina.cli.output import columns, print_json
from lamina.cli.passphrase import PassphraseFile, open_key
from lamina.errors import EncodingError
from lamina.ledger import leaf as leaves
from lamina.ledger.errors import LedgerError
from lamina.ledger.ledger import Ledger
from lamina.ledger.records import Aggregate, Signed
from lamina.ledger.records.fields import schema
from lamina.ledger.retention import Retention
from lamina.ledger.show import counted, epsilon, plain

_MOST = 1 << 20


def prune(
    ledger: Where,
    key: KeyFile = None,
    before: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="only what was admitted before; default: all that is old enough"),
    ] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write the proposal, for auditors to countersign")
    ] = None,
    countersign: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="as an auditor, with your --key: check a proposal and sign it"),
    ] = None,
    apply: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="prune by this proposal, with the countersignatures it has"),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="do it; without this only what would go is shown")
    ] = False,
    passphrase_file: PassphraseFile = None,
    as_json: Json = False,
) -> None:
    """Sum up contributions whose time is over, and drop their records and attestations. Without --yes, only show it.

    What is older than the retention of the header, and expired, becomes totals by class: how many, how many withdrawn,
    the most that any of them lost. Hashes stay, so that every checkpoint still proves consistent with every later one.
    A single record is provable afterwards only by who kept its receipt: hand receipts out before.

    An aggregate is a claim once its inputs are gone. So an auditor can recompute and countersign it before.

    Examples:

      lamina ledger prune ledger.db --key ledger.key
      lamina ledger prune ledger.db --key ledger.key --yes
      lamina ledger prune ledger.db --key ledger.key --save proposal.cbor
      lamina ledger prune ledger.db --key auditor.key --countersign proposal.cbor
      lamina ledger prune ledger.db --key ledger.key --apply proposal.cbor --yes
    """
    if key is None:
        raise typer.BadParameter("give the ledger's, or an auditor's with --countersign", param_hint="--key")
    place = check_there(ledger)
    private = open_key(key, passphrase_file)
    with Ledger.open(place, private) as book:
        keeper = Retention(book)
        if countersign is not None:
            found = _countersigned(keeper, book, countersign, private)
            _print(ledger, found, None, as_json)
            return
        proposal = keeper.propose(None if before is None else when(before)) if apply is None else _load(apply)
        if proposal is not None and save is not None:
            files.replace(save, leaves.body(proposal), "the proposal", mode=0o644)
        seq = keeper.prune(proposal) if proposal is not None and yes else None
        if seq is not None:
            book.store.compact()
    _print(ledger, proposal, seq, as_json)


def _countersigned(keeper: Retention, book: Ledger, path: Path, key: PrivateKey) -> Aggregate:
    """The proposal with one more signature, if it is what this ledger says."""
    given = _load(path)
    mine = keeper.propose(given.horizon)
    if mine != dataclasses.replace(given, signatures=()):
        raise LedgerError(
            "cli.not-ledger-comes",
            f"'{path}' is not what this ledger comes to",
            "have it proposed again, and do not sign",
        )
    others = tuple(each for each in given.signatures if each.key != key.public.id)
    signed = Signed(key=key.public.id, signature=key.sign(given.message(book.origin)))
    made = dataclasses.replace(given, signatures=(*others, signed))
    files.replace(path, leaves.body(made), "the proposal", mode=0o644)
    return made


def _load(path: Path) -> Aggregate:
    data = files.read_small(path, "the proposal", most=_MOST)
    try:
        found = schema(Aggregate).value(cbor.decode(data, max_size=_MOST))
    except EncodingError as error:
        raise LedgerError(
            "cli.no-proposal", f"'{path}' is no proposal: {error.problem}", "write one with --save"
        ) from None
    assert isinstance(found, Aggregate)
    return found


def _print(ledger: str, found: Aggregate | None, seq: int | None, as_json: bool) -> None:
    if as_json:
        print_json(
            {"ledger": printed(ledger), "pruned": seq is not None, "index": seq, "proposal": _object(found)}
        )
        return
    if found is None:
        say("nothing is old enough to be summed up")
        return
    one = found.count == 1
    done = ("was" if one else "were") if seq is not None else "would be"
    where = "" if seq is None else f", in leaf {seq}"
    say(
        f"{counted(found.count, 'contribution')}, admitted before {shown(found.horizon)}, {done} summed up{where}"
    )
    rows = [["class", "contributions", "withdrawn", "ε at most"]]
    rows += [
        [each.cls, f"{each.count:,}", f"{each.withdrawn:,}", epsilon(each.spend)] for each in found.classes
    ]
    say(columns(rows))
    say(f"countersigned by {len(found.signatures)}" + ("" if seq is not None else "; --yes does it"))


def _object(found: Aggregate | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "count": found.count,
        "horizon": shown(found.horizon),
        "spans": [[span.first, span.stop] for span in found.spans],
        "classes": {
            each.cls: {"count": each.count, "withdrawn": each.withdrawn, "epsilon": plain(each.spend)}
            for each in found.classes
        },
        "countersigned": [each.key.hex() for each in found.signatures],
        "digest": found.digest.hex(),
    }
