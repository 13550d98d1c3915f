"""`lamina ledger key`: whose signatures count in a ledger."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from lamina.admit.key import PublicKey
from lamina.admit.times import shown, when
from lamina.cli.ledger.common import Json, KeyFile, Where, check_there, is_file, opened, printed, say
from lamina.cli.output import columns, print_json
from lamina.cli.passphrase import PassphraseFile, open_key
from lamina.ledger import checkpoint as notes
from lamina.ledger.errors import LedgerError
from lamina.ledger.ledger import Ledger
from lamina.ledger.parties import Parties
from lamina.ledger.records import Change, Key, KeyEvent, Role
from lamina.ledger.show import counted

_ROLES = {role.name.lower(): role for role in Role}
_NAMES = {"list": 0, "add": 1, "rotate": 2, "revoke": 1}  # of keys that each takes
_SHORT = 8  # hex digits of an id that are enough to name a key


def key(
    ledger: Where,
    action: Annotated[
        str,
        typer.Argument(
            metavar="ACTION", help="list, add, rotate or revoke", autocompletion=lambda: list(_NAMES)
        ),
    ] = "list",
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY", help="add: NEW.pub; rotate: OLD NEW.pub; revoke: OLD, by id, name or file"
        ),
    ] = None,
    role: Annotated[
        str | None,
        typer.Option(
            help=f"of a key that is added: {', '.join(_ROLES)}", autocompletion=lambda: list(_ROLES)
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="of the new key; default: the ledger's, the old key's, or that of the file"),
    ] = None,
    at: Annotated[str | None, typer.Option(metavar="TIME", help="from then on; default: now")] = None,
    key: KeyFile = None,
    passphrase_file: PassphraseFile = None,
    as_json: Json = False,
) -> None:
    """List the keys of a ledger; or let one in, take over, or out. With --key, the ledger's own, which signs that.

    add: a key counts from now on, in one role. ledger signs checkpoints, contributor attestations, auditor aggregates
    and looser policies, witness checkpoints it has seen, release manifests and certificates.

    rotate: a new key takes over in the same role. What the old one signed stays good. If it is the ledger's, the old
    key signs the checkpoint over that, here and now, and nothing after: a new key counts once an older one vouched.

    revoke: from now on nothing that it signed counts, whatever date it carries. The ledger's last key cannot go: let
    another take over first, and revoke the old one with the new one.

    Examples:

      lamina ledger key ledger.db
      lamina ledger key ledger.db add auditor.pub --role auditor --name auditor.example --key ledger.key
      lamina ledger key ledger.db rotate 3f9c21aa new.pub --key ledger.key
      lamina ledger key ledger.db revoke auditor.example --key ledger.key
    """
    given = names or []
    if action not in _NAMES:
        raise typer.BadParameter(f"{action!r} is not one of {', '.join(_NAMES)}", param_hint="ACTION")
    if len(given) != _NAMES[action]:
        takes = {"list": "no key", "add": "NEW.pub", "rotate": "OLD NEW.pub", "revoke": "OLD"}[action]
        raise typer.BadParameter(f"{action} takes {takes}", param_hint="KEY")
    if (action == "add") != (role is not None) or (role is not None and role not in _ROLES):
        raise typer.BadParameter(f"with add, one of {', '.join(_ROLES)}; else none", param_hint="--role")
    if action == "list":
        with opened(ledger) as book:
            _print_list(ledger, book, as_json)
        return
    if key is None:
        raise typer.BadParameter(
            "give the ledger's own key: it signs what happens to keys", param_hint="--key"
        )
    check_there(ledger)
    private = open_key(key, passphrase_file)
    with opened(ledger, signer=private) as book:
        event = _event(book, action, given, role, name, book.now() if at is None else when(at))
        if event.change is Change.REVOKE and event.target == private.public.id:
            raise LedgerError(
                "cli.key-not-sign",
                f"key {private.public.name[:16]} cannot sign that it is revoked itself",
                "let another take over (rotate), and revoke this one with the new key",
            )
        book.check_signs([event])
        (seq,) = book.append([event])
        size = notes.parse(book.checkpoint())[0].size
    _print(ledger, seq, size, event, as_json)


def _event(
    book: Ledger, action: str, given: list[str], role: str | None, name: str | None, at: int
) -> KeyEvent:
    parties = book.parties()
    if action == "add":
        kind = _ROLES[str(role)]
        called = name or (book.origin if kind is Role.LEDGER else Path(given[0]).stem)
        new = Key(name=called, x=PublicKey.load(given[0]).x, role=kind)
        return KeyEvent(change=Change.ADD, key=new, effective=at)
    old = find(parties, given[0])
    if action == "revoke":
        return KeyEvent(change=Change.REVOKE, target=old.id, effective=at)
    new = Key(name=name or old.name, x=PublicKey.load(given[1]).x, role=old.role)
    return KeyEvent(change=Change.ROTATE, key=new, target=old.id, effective=at)


def find(parties: Parties, name: str) -> Key:
    """A key of the ledger by its id, or the beginning of it, its name, or its file."""
    keys = parties.all()
    if Path(name).is_file():
        public = PublicKey.load(name)
        found = [each for each in keys if each.id == public.id]
    else:
        begins = name.lower() if len(name) >= _SHORT else "none"
        found = [each for each in keys if each.id.hex().startswith(begins)]
        found = found or [each for each in keys if each.name == name]
    if len(found) != 1:
        which = "no key" if not found else f"{len(found)} keys"
        raise LedgerError(
            "cli.means-ledger",
            f"{name!r} means {which} of the ledger",
            f"give the id, or its first {_SHORT} hex digits or more: lamina ledger key LEDGER lists them",
        )
    return found[0]


# ------------------------------------------------------------------------------------ what is printed


def _print_list(ledger: str, book: Ledger, as_json: bool) -> None:
    parties, now = book.parties(), book.as_of()
    found = [(each, parties.wrong(each.id, now)) for each in parties.all()]
    if as_json:
        keys = [{**_object(each), "counts": wrong is None, "why_not": wrong} for each, wrong in found]
        print_json({"ledger": printed(ledger), "origin": book.origin, "keys": keys})
        return
    rows = [["id", "role", "name", "state"]]
    rows += [
        [each.id.hex()[:16], each.role.name.lower(), each.name, wrong or "counts"] for each, wrong in found
    ]
    say(columns(rows, left=4))


def _object(found: Key) -> dict[str, Any]:
    return {"id": found.id.hex(), "name": found.name, "role": found.role.name.lower(), "x": found.x.hex()}


def _print(ledger: str, seq: int, size: int, event: KeyEvent, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "ledger": printed(ledger),
                "index": seq,
                "change": event.change.name.lower(),
                "key": None if event.key is None else _object(event.key),
                "target": None if event.target is None else event.target.hex(),
                "effective": shown(event.effective),
                "checkpoint": size,
            }
        )
        return
    new = (
        ""
        if event.key is None
        else f" {event.key.id.hex()[:16]} ({event.key.role.name.lower()} {event.key.name})"
    )
    old = "" if event.target is None else f" {'for ' if event.key else ''}{event.target.hex()[:16]}"
    say(f"leaf {seq}: {event.change.name.lower()}{new}{old} from {shown(event.effective)}")
    say(f"signed, in the checkpoint of {counted(size, 'leaf', 'leaves')}")
    if event.change is Change.ROTATE and event.key is not None and event.key.role is Role.LEDGER:
        say("from now on the new key signs: give it to who keeps, trains and admits" + _beside(ledger))


def _beside(ledger: str) -> str:
    """Where runs look for the key of a ledger in a file."""
    from lamina.ledger.opening import ledger_key_beside

    if not is_file(ledger) or not ledger_key_beside(ledger).exists():
        return ""
    return (
        f", and put it in the place of {os.path.relpath(ledger_key_beside(ledger))}, where runs look for it"
    )
