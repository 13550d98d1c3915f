"""`lamina ledger withdraw`: a contribution leaves."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Annotated

import typer

from lamina.admit.files import read_small
from lamina.cli.ledger.common import DIGEST, Json, KeyFile, Where, named, opened, printed, say
from lamina.cli.output import print_json
from lamina.cli.passphrase import PassphraseFile
from lamina.ledger.inbox import Inbox, Taken
from lamina.ledger.records import Admitted
from lamina.ledger.show import counted, epsilon
from lamina.ledger.withdrawals import EFFECTS, REASONS, Withdrawn, effect_of, reason_of
from lamina.ledger.withdrawals import withdraw as append

_MOST = 1 << 24


def withdraw(
    ledger: Where,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="DIGEST",
            help=DIGEST,
        ),
    ] = None,
    reason: Annotated[
        str | None, typer.Option(help=f"one of {', '.join(REASONS)}", autocompletion=lambda: list(REASONS))
    ] = None,
    effect: Annotated[
        str, typer.Option(help="finish or abandon an open segment; charged it is in both cases")
    ] = "finish",
    request: Annotated[
        Path | None, typer.Option(metavar="FILE", help="a signed request; its digest goes into the record")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="take up withdrawals that lie there as JSON files")
    ] = None,
    watch: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="with --folder: look again and again, until stopped"),
    ] = None,
    key: KeyFile = None,
    passphrase_file: PassphraseFile = None,
    as_json: Json = False,
) -> None:
    """Withdraw a contribution: it is in no segment that opens after this. Nothing is erased.

    What it has lost until then is shown, and the releases that it is in. A withdrawal stops further loss; it does not
    unlearn. With --key a checkpoint covers the record at once; otherwise the next one does.

    With --folder, every file NAME.json there that holds {"withdraw": "64 hex digits", "reason": "consent"} becomes a
    record, exactly once, and is moved to done/; one that cannot be is moved to refused/, with the reason beside it.

    Examples:

      lamina ledger withdraw ledger.db 9f86d081 --reason consent
      lamina ledger withdraw ledger.db 9f86d081 --reason legal --key ledger.key
      lamina ledger withdraw ledger.db --folder withdrawals --watch 10
    """
    if (name is None) == (folder is None):
        raise typer.BadParameter("give a digest, or --folder", param_hint="DIGEST")
    if effect not in EFFECTS:
        raise typer.BadParameter(f"{effect!r} is not one of {', '.join(EFFECTS)}", param_hint="--effect")
    if name is not None and reason not in REASONS:
        raise typer.BadParameter(f"give one of {', '.join(REASONS)}", param_hint="--reason")
    with opened(ledger, key, passphrase_file) as book:
        if key is not None:
            book.check_signs()
        if folder is not None:
            _take(Inbox(book, folder), ledger, watch, as_json)
            return
        digest = (
            None
            if request is None
            else hashlib.sha256(read_small(request, "the request", most=_MOST)).digest()
        )
        found = append(
            book, named(str(name)), reason_of(str(reason)), effect=effect_of(effect), request=digest
        )
        signed = book.signs
        with book.store.read() as rows:
            still = sum(hold.segment >= 0 for hold in rows.holds())
    if as_json:
        print_json(
            {"ledger": printed(ledger), "signed": signed, "withdrawn": [each.to_dict() for each in found]}
        )
        return
    for each in found:
        say(_told(each))
    if still:
        say(f"{counted(still, 'open segment')} may add to that: lamina ledger trace tells it once recorded")
    if not signed:
        say("not signed yet: lamina ledger checkpoint --key, or the next epoch")


def _told(found: Withdrawn) -> str:
    again = "was out already: " if found.again else ""
    known, signed, record = found.lost, found.lost.signed, found.target.record
    assert isinstance(record, Admitted)
    lost = f"ε {epsilon(known.spend)}" + (
        "" if signed is None else f" of the {epsilon(signed)} that was signed"
    )
    lines = [
        f"{again}contribution {record.descriptor.hex()}",
        f"  withdrawn    leaf {found.target.seq}, by leaf {found.leaf.seq}",
        f"  lost so far  {lost}, in {counted(known.epochs, 'epoch')}",
    ]
    for release in known.releases:
        lines.append(f"  is in        the release of leaf {release.seq}")
    return "\n".join(lines)


def _take(inbox: Inbox, ledger: str, watch: float | None, as_json: bool) -> None:
    taken: list[Taken] = []
    try:
        while True:
            for each in inbox.take():
                taken.append(each)
                if not as_json:
                    leaves = ", ".join(str(one.leaf.seq) for one in each.withdrawn)
                    say(
                        f"{each.name}: {f'refused: {each.refused}' if each.refused else f'withdrawn in leaf {leaves}'}"
                    )
            if watch is None:
                break
            time.sleep(watch)
    except KeyboardInterrupt:
        pass
    if as_json:
        print_json({"ledger": printed(ledger), "files": [each.to_dict() for each in taken]})
    if any(each.refused for each in taken):
        raise typer.Exit(1)
