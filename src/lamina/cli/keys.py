"""`lamina keys`: make keys, and keep the ring of those whose signatures count."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from lamina.admit.key import ALGORITHMS, PublicKey
from lamina.admit.keyring import ROLES, KeyRing
from lamina.admit.times import when
from lamina.cli import key_files
from lamina.cli.key_files import RING, Json, Ring
from lamina.cli.key_table import report, row, table, told
from lamina.cli.output import columns, folded, out, print_json

_HELP = """Make signing keys, and keep the ring of those whose signatures count. Spends nothing.

A contributor makes a key and hands out its .pub file; whoever answers for the corpus adds it to a ring, after making
sure whose it is: compare ids by telephone, not by the mail that brought the file. A ring holds public keys only and
is readable JSON; keep it beside, never inside, what it is used to verify.

A key that takes over (rotate) leaves earlier signatures good. A key that was lost or stolen is revoked: from that
instant nothing that it signed is admitted, whatever date it carries, because a thief can write any date.

Examples:

  lamina keys new alice.key                     contributor: alice.key and alice.pub
  lamina keys add alice.pub --label alice       gate: trust it
  lamina keys list
  lamina keys rotate alice alice2.pub           from now on
  lamina keys revoke alice --at 2026-03-01
  lamina keys export alice --format cose --output alice.cose
"""

app = typer.Typer(no_args_is_help=True, help=folded(_HELP))

At = Annotated[
    str | None, typer.Option("--at", metavar="TIME", help="2026-03-01, or 2026-03-01T12:00Z; default: now")
]


def _list(ring: Ring = RING, as_json: Json = False) -> None:
    """Show the keys of a ring, and what each is worth now.

    Examples:

      lamina keys list
      lamina keys list --keys trusted.json --json
    """
    opened, now = KeyRing.load(ring), int(time.time())
    if as_json:
        print_json(
            {"ring": str(ring), "version": opened.version.hex(), "keys": [row(each, now) for each in opened]}
        )
        return
    out.print(table(opened, now) or f"'{ring}' has no keys.", markup=False, soft_wrap=True)


def _show(
    name: Annotated[str, typer.Argument(metavar="KEY", help="a public key file, or id or label in the ring")],
    ring: Ring = RING,
    as_json: Json = False,
) -> None:
    """Show one key: its id (COSE key thumbprint, RFC 9679) and what the ring says of it.

    Examples:

      lamina keys show alice.pub
      lamina keys show alice
    """
    if Path(name).is_file():
        key = PublicKey.load(name)
        known = KeyRing.load(ring).get(key.id) if ring.exists() else None
    else:
        known = KeyRing.load(ring).find(name)
        key = known.key
    figures = None if known is None else row(known, int(time.time()))
    if as_json:
        print_json({"id": key.name, "x": key.x.hex(), "ring": figures})
        return
    listed = {"id": key.name, "x": key.x.hex(), **(figures or {"ring": f"not in '{ring}'"})}
    lines = [[word.replace("_", " "), told(value)] for word, value in listed.items()]
    out.print(columns(lines, left=2), markup=False, soft_wrap=True)


def _add(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="a public key, PEM or COSE")],
    label: Annotated[str | None, typer.Option(help="whose key it is; default: the name of the file")] = None,
    role: Annotated[
        str,
        typer.Option(
            help=f"one of {', '.join(ROLES)}: a key has one role", autocompletion=lambda: list(ROLES)
        ),
    ] = ROLES[0],
    valid_from: Annotated[
        str | None,
        typer.Option("--valid-from", metavar="TIME", help="refuse what is signed earlier; default: 1970"),
    ] = None,
    algorithm: Annotated[
        int | None, typer.Option(help="accept this name of Ed25519 only: -8 or -19; default: both")
    ] = None,
    ring: Ring = RING,
    as_json: Json = False,
) -> None:
    """Trust a public key. The ring is made if there is none.

    Weak keys (points of small or mixed order) are refused.

    Examples:

      lamina keys add alice.pub --label alice
      lamina keys add ledger.pub --role ledger --valid-from 2026-01-01
    """
    if algorithm is not None and algorithm not in ALGORITHMS:
        raise typer.BadParameter(f"{algorithm} is not one of {', '.join(map(str, ALGORITHMS))}")
    key = PublicKey.load(path)
    with KeyRing.editing(ring, create=True) as opened:
        entry = opened.add(
            key,
            label=path.stem if label is None else label,
            role=role,
            valid_from=0 if valid_from is None else when(valid_from),
            algorithms=ALGORITHMS if algorithm is None else (algorithm,),
        )
    report(opened, ring, [entry], as_json)


def _rotate(
    old: Annotated[str, typer.Argument(metavar="OLD", help="id or label of the key that retires")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="public key file of the one that takes over")],
    at: At = None,
    label: Annotated[str | None, typer.Option(help="of the new key; default: as the old one")] = None,
    ring: Ring = RING,
    as_json: Json = False,
) -> None:
    """Let a new key take over from an old one.

    What the old key signed before that instant stays good; what it signs later is refused, and the new key counts
    from then on. If the old key may be in other hands, revoke it too.

    Examples:

      lamina keys rotate alice alice2.pub
      lamina keys rotate 3f9c21aa alice2.pub --at 2026-06-01
    """
    key = PublicKey.load(new)
    with KeyRing.editing(ring) as opened:
        retiring = opened.find(old)
        added = opened.rotate(retiring.id, key, at=_when(at), label=label)
    report(opened, ring, [opened.find(retiring.key.name), added], as_json)


def _revoke(
    name: Annotated[str, typer.Argument(metavar="KEY", help="id or label in the ring")],
    at: At = None,
    ring: Ring = RING,
    as_json: Json = False,
) -> None:
    """Stop trusting a key from an instant on, for good.

    At every admission and every epoch after it, all that the key ever signed is refused. A revocation can be moved to
    an earlier instant, never to a later one.

    Examples:

      lamina keys revoke alice
      lamina keys revoke 3f9c21aa --at 2026-03-01T12:00Z
    """
    with KeyRing.editing(ring) as opened:
        revoked = opened.revoke(opened.find(name).id, at=_when(at))
    report(opened, ring, [revoked], as_json)


_COMMANDS: dict[str, Callable[..., None]] = {
    "new": key_files.new,
    "list": _list,
    "show": _show,
    "add": _add,
    "rotate": _rotate,
    "revoke": _revoke,
    "export": key_files.export,
    "subject": key_files.subject,
}
for _name, _command in _COMMANDS.items():
    app.command(_name, help=folded(_command.__doc__))(_command)


def _when(at: str | None) -> int:
    return int(time.time()) if at is None else when(at)
