"""`lamina ledger verify`: whether a ledger is what it claims to be."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from lamina.cli.bars import bar
from lamina.cli.ledger.common import Json, Where, check_there, is_file, printed, say
from lamina.cli.output import complain, err, print_json, refusal
from lamina.ledger.check import Seen, Trust, Verification
from lamina.ledger.check import verify as audit
from lamina.ledger.errors import LedgerError
from lamina.ledger.show import counted
from lamina.ledger.store import make_store

_MANY = {"policy": "policies", "pruned": "pruned"}


def verify(
    ledger: Where,
    trust: Annotated[
        Path | None,
        typer.Option(
            metavar="KEYS",
            help="keys from elsewhere: a key ring, a public key, or verifier keys, one a line",
        ),
    ] = None,
    seen: Annotated[
        list[Path] | None,
        typer.Option(metavar="CHECKPOINT", help="a checkpoint that you kept; may be given several times"),
    ] = None,
    no_signatures: Annotated[
        bool, typer.Option("--no-signatures", help="leave attestations unchecked: faster by far")
    ] = False,
    as_json: Json = False,
) -> None:
    """Replay a ledger from its first leaf, and name the first record that is wrong, and why.

    Checked are form, order, hashes and times; every checkpoint and its signature; every attestation; bounds against
    floors and classes; keys, policies, withdrawals, aggregates and releases; and every ε, computed anew from the
    recorded plans by the accountant of the header. Neither data nor models are needed.

    A ledger names its own keys, so whoever can write all of it can sign all of it anew. With --trust its signatures
    must be of keys that you have from elsewhere: keep these beside, never inside, the ledger. With --seen it must go on
    from a checkpoint that you kept: one that was rolled back or forked does not.

    Exit code 0 if it is verified, 1 if it is not, 2 if there is nothing to verify, or a database cannot be reached.

    Examples:

      lamina ledger verify runs/first/ledger.db
      lamina ledger verify ledger.db --trust keys.json --seen last.checkpoint
      lamina ledger verify ledger.db --no-signatures --json
    """
    place = check_there(ledger)
    trusted = None if trust is None else Trust.load(trust)
    known = [Seen.load(path) for path in seen or ()]
    if not is_file(ledger):
        _reach(place, as_json)
    with bar("replaying") as tick:
        found = audit(place, trust=trusted, seen=known, signatures=not no_signatures, progress=tick)
    if as_json:
        print_json({"ledger": printed(ledger), **found.to_dict()})
    else:
        say(page(printed(ledger), found))
    if found.problem is not None:
        err.print(f"[bold red]not verified:[/] {escape(str(found.problem))}", soft_wrap=True)
        raise typer.Exit(1)


def _reach(place: str, as_json: bool) -> None:
    """A server that is away is no ledger that is wrong."""
    try:
        make_store(place, readonly=True).close()
    except LedgerError as error:
        complain(error)
        if as_json:
            print_json(refusal(error))
        raise typer.Exit(2) from None


def page(name: str, found: Verification) -> str:
    """For people."""
    state = "not verified" if not found.verified else "verified and trusted" if found.trusted else "verified"
    lines = [f"{name}: {state}"]
    if found.origin is not None:
        kinds = ", ".join(
            counted(count, word, _MANY.get(word)) for word, count in found.counts.items() if count
        )
        lines += [f"  origin       {found.origin}", f"  leaves       {found.size:,}: {kinds}"]
    if found.root is not None:
        lines.append(f"  root         {found.root.hex()}")
    if found.verified:
        covered = counted(found.signed, "leaf", "leaves")
        lines.append(
            f"  checkpoints  {found.checkpoints:,}"
            + (f"; the newest covers {covered}" * bool(found.checkpoints))
        )
        checked = f"{counted(found.attestations, 'attestation')}, {counted(found.spends, 'figure')} of ε"
        lines.append(f"  checked      {checked}")
    return "\n".join([*lines, *(f"  note         {note}" for note in found.notes)])
