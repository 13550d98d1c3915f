"""`lamina keys`: make signing keys, and keep the ring of those whose signatures count."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from lamina.admit import keys
from lamina.admit.key_ring import ROLES, KeyEntry, KeyRing, KeyStatus
from lamina.admit.keys import ALGORITHMS, PrivateKey, PublicKey, format_utc, parse_time
from lamina.cli.terminal import PassphraseOption, columns, help_text, out, print_json, read_passphrase
from lamina.errors import BadKey

RingOption = Annotated[Path, typer.Option("--keys", metavar="FILE", help="the key ring")]
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON object")]
DEFAULT_RING = Path("keys.json")


def new_key(
    path: Annotated[Path, typer.Argument(metavar="KEY", help="the private key to write, such as alice.key")],
    no_passphrase: Annotated[
        bool, typer.Option("--no-passphrase", help="whoever can read the file can sign: for tests and machines")
    ] = False,
    passphrase_file: PassphraseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make an Ed25519 key: KEY (private, mode 0600, encrypted) and the same name with .pub (public).

    An existing file is never overwritten. The passphrase is asked for, or read from --passphrase-file or
    LAMINA_PASSPHRASE; it is never given on the command line, where others can see it.

    Examples:

      lamina keys new alice.key
      lamina keys new robot.key --passphrase-file /run/secrets/robot
    """
    if no_passphrase and passphrase_file is not None:
        raise typer.BadParameter("a passphrase, or --no-passphrase", param_hint="--passphrase-file")
    public = path.with_suffix(".pub")
    if public == path:
        raise BadKey("key.name-public-key", f"'{path}' is the name of a public key", "call the private one .key")
    for file in (path, public):
        if file.exists():
            raise BadKey(
                "key.exists-not-overwritten",
                f"'{file}' exists and is not overwritten",
                "give another name, or move it away",
            )
    secret = None if no_passphrase else read_passphrase(passphrase_file, what=f"the new key '{path}'", new=True)
    key = PrivateKey.generate()
    key.save(path, secret)
    keys.write_new(public, key.public.pem(), "the public key", mode=0o644)
    if as_json:
        print_json({"id": key.public.name, "private": str(path), "public": str(public), "sealed": not no_passphrase})
        return
    out.print(f"key {key.public.name}", markup=False, soft_wrap=True)
    out.print(f"  private  {path}   keep it; a copy in a safe place", markup=False, soft_wrap=True)
    out.print(f"  public   {public}   hand this one out", markup=False, soft_wrap=True)


def export_key(
    name: Annotated[str, typer.Argument(metavar="KEY", help="a public key file, or id or label in the ring")],
    form: Annotated[str, typer.Option("--format", help="pem or cose", autocompletion=lambda: ["pem", "cose"])] = "pem",
    output: Annotated[Path | None, typer.Option(help="file to write; default: standard output")] = None,
    ring: RingOption = DEFAULT_RING,
    as_json: JsonOption = False,
) -> None:
    """Write a public key for others: PEM (openssl reads it) or COSE_Key (RFC 9052).

    Private keys are not exported; copy the file.

    Examples:

      lamina keys export alice
      lamina keys export alice.pub --format cose --output alice.cose
    """
    if form not in ("pem", "cose"):
        raise typer.BadParameter(f"{form!r} is neither pem nor cose", param_hint="--format")
    key = PublicKey.load(name) if Path(name).is_file() else KeyRing.load(ring).find(name).key
    data = key.pem() if form == "pem" else key.cose()
    if output is not None:
        keys.write_new(output, data, "the public key", mode=0o644)
    if as_json:
        shown_as = data.decode("ascii") if form == "pem" else data.hex()
        print_json({"id": key.name, "format": form, "key": shown_as, "output": None if output is None else str(output)})
    elif output is not None:
        out.print(f"{output}: {key.name}", markup=False, soft_wrap=True)
    elif form == "pem":
        sys.stdout.write(data.decode("ascii"))
    elif sys.stdout.isatty():
        raise BadKey(
            "key.cose-key-binary", "a COSE key is binary, and standard output is a terminal", "give --output FILE"
        )
    else:
        sys.stdout.buffer.write(data)


def new_subject_key(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="the file to write")], as_json: JsonOption = False
) -> None:
    """Make a secret key for subject tags: 32 random bytes, mode 0600.

    `lamina attest --subject-key FILE` signs a keyed tag of whom the data is about, so that two contributions about
    one person are noticed without naming anybody. Whoever has this key can test names against tags: keep it among
    those who sign, and use the same one for the whole corpus.

    Example:

      lamina keys subject subject.key
    """
    keys.write_new(path, (secrets.token_hex(32) + "\n").encode("ascii"), "the subject key", mode=0o600)
    if as_json:
        print_json({"subject_key": str(path)})
    else:
        out.print(f"{path}: keep it secret, and a copy", markup=False, soft_wrap=True)


def key_json(entry: KeyEntry, now: int) -> dict[str, Any]:
    """As machines read it."""

    def time_of(instant: int | None) -> str | None:
        return None if instant is None else format_utc(instant)

    return {
        "id": entry.key.name,
        "label": entry.label,
        "role": entry.role,
        "algorithms": list(entry.algorithms),
        "valid_from": format_utc(entry.valid_from),
        "retired_from": time_of(entry.retired_from),
        "replaced_by": None if entry.replaced_by is None else entry.replaced_by.hex(),
        "revoked_from": time_of(entry.revoked_from),
        "standing": entry.standing(now).value,
    }


def key_table(ring: KeyRing, now: int) -> str:
    """One line per key; empty for an empty ring."""
    rows = [["id", "label", "role", "valid from", "now"]]
    for each in ring:
        rows.append([each.key.name[:16], each.label, each.role, format_utc(each.valid_from), each.standing(now).value])
    return columns(rows, left=5) if len(ring) else ""


def field_text(value: Any) -> str:
    """A value of a row for people."""
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "-" if value is None else str(value)


def print_changed_keys(ring: KeyRing, path: Path, entries: list[KeyEntry], as_json: bool) -> None:
    """What a key event has changed."""
    now = int(time.time())
    if as_json:
        rows = [key_json(each, now) for each in entries]
        print_json({"ring": str(path), "version": ring.version.hex(), "keys": rows})
        return
    for each in entries:
        out.print(f"{each.label} ({each.role}) {each.key.name}", markup=False, soft_wrap=True)
        out.print(f"  {_validity_text(each, now)}", markup=False, soft_wrap=True)
    out.print(f"{path}: {len(ring)} keys", markup=False, soft_wrap=True)


def _validity_text(entry: KeyEntry, now: int) -> str:
    parts = [f"valid from {format_utc(entry.valid_from)}"]
    if entry.retired_from is not None:
        parts.append(f"retired from {format_utc(entry.retired_from)}")
    if entry.revoked_from is not None:
        parts.append(f"revoked from {format_utc(entry.revoked_from)}")
    standing = entry.standing(now)
    return ", ".join(parts) + ("" if standing is KeyStatus.USABLE else f" ({standing.value} now)")


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

app = typer.Typer(no_args_is_help=True, help=help_text(_HELP))

AtOption = Annotated[
    str | None, typer.Option("--at", metavar="TIME", help="2026-03-01, or 2026-03-01T12:00Z; default: now")
]


def list_keys(ring: RingOption = DEFAULT_RING, as_json: JsonOption = False) -> None:
    """Show the keys of a ring, and what each is worth now.

    Examples:

      lamina keys list
      lamina keys list --keys trusted.json --json
    """
    opened, now = KeyRing.load(ring), int(time.time())
    if as_json:
        print_json(
            {"ring": str(ring), "version": opened.version.hex(), "keys": [key_json(each, now) for each in opened]}
        )
        return
    out.print(key_table(opened, now) or f"'{ring}' has no keys.", markup=False, soft_wrap=True)


def show_key(
    name: Annotated[str, typer.Argument(metavar="KEY", help="a public key file, or id or label in the ring")],
    ring: RingOption = DEFAULT_RING,
    as_json: JsonOption = False,
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
    figures = None if known is None else key_json(known, int(time.time()))
    if as_json:
        print_json({"id": key.name, "x": key.x.hex(), "ring": figures})
        return
    listed = {"id": key.name, "x": key.x.hex(), **(figures or {"ring": f"not in '{ring}'"})}
    lines = [[word.replace("_", " "), field_text(value)] for word, value in listed.items()]
    out.print(columns(lines, left=2), markup=False, soft_wrap=True)


def add_key(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="a public key, PEM or COSE")],
    label: Annotated[str | None, typer.Option(help="whose key it is; default: the name of the file")] = None,
    role: Annotated[
        str, typer.Option(help=f"one of {', '.join(ROLES)}: a key has one role", autocompletion=lambda: list(ROLES))
    ] = ROLES[0],
    valid_from: Annotated[
        str | None, typer.Option("--valid-from", metavar="TIME", help="refuse what is signed earlier; default: 1970")
    ] = None,
    algorithm: Annotated[
        int | None, typer.Option(help="accept this name of Ed25519 only: -8 or -19; default: both")
    ] = None,
    ring: RingOption = DEFAULT_RING,
    as_json: JsonOption = False,
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
            valid_from=0 if valid_from is None else parse_time(valid_from),
            algorithms=ALGORITHMS if algorithm is None else (algorithm,),
        )
    print_changed_keys(opened, ring, [entry], as_json)


def rotate_key(
    old: Annotated[str, typer.Argument(metavar="OLD", help="id or label of the key that retires")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="public key file of the one that takes over")],
    at: AtOption = None,
    label: Annotated[str | None, typer.Option(help="of the new key; default: as the old one")] = None,
    ring: RingOption = DEFAULT_RING,
    as_json: JsonOption = False,
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
        added = opened.rotate(retiring.id, key, at=_parse_time_or_now(at), label=label)
    print_changed_keys(opened, ring, [opened.find(retiring.key.name), added], as_json)


def revoke_key(
    name: Annotated[str, typer.Argument(metavar="KEY", help="id or label in the ring")],
    at: AtOption = None,
    ring: RingOption = DEFAULT_RING,
    as_json: JsonOption = False,
) -> None:
    """Stop trusting a key from an instant on, for good.

    At every admission and every epoch after it, all that the key ever signed is refused. A revocation can be moved to
    an earlier instant, never to a later one.

    Examples:

      lamina keys revoke alice
      lamina keys revoke 3f9c21aa --at 2026-03-01T12:00Z
    """
    with KeyRing.editing(ring) as opened:
        revoked = opened.revoke(opened.find(name).id, at=_parse_time_or_now(at))
    print_changed_keys(opened, ring, [revoked], as_json)


_COMMANDS: dict[str, Callable[..., None]] = {
    "new": new_key,
    "list": list_keys,
    "show": show_key,
    "add": add_key,
    "rotate": rotate_key,
    "revoke": revoke_key,
    "export": export_key,
    "subject": new_subject_key,
}
for _name, _command in _COMMANDS.items():
    app.command(_name, help=help_text(_command.__doc__))(_command)


def _parse_time_or_now(at: str | None) -> int:
    return int(time.time()) if at is None else parse_time(at)
