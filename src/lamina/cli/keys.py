"""Make signing keys, and maintain the ring of trusted keys. Spends nothing.

A contributor makes a key and hands out its .pub file. Whoever is responsible for the corpus adds it to a key ring, after checking
whose it is: compare ids by telephone, not by the mail that brought the file. A ring is JSON and holds public keys only. Keep it
apart from the data that it verifies.

After rotate, earlier signatures of the old key stay valid. Revoke a key that was lost or stolen: from then on nothing that it
signed is admitted, whatever its date, because a thief can write any date.

Examples:

  lamina keys new alice.key                     contributor: alice.key and alice.pub
  lamina keys add alice.pub --label alice       gate: trust it
  lamina keys list
  lamina keys rotate alice alice2.pub           from now on
  lamina keys revoke alice --at 2026-03-01
  lamina keys export alice --format cose --output alice.cose
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lamina.cli.command import Answer, argument, as_json, command, group, misuse, option, passphrase_file, table
from lamina.cli.terminal import read_passphrase
from lamina.errors import BadKey
from lamina.sign import keys
from lamina.sign.key_ring import ROLES, KeyEntry, KeyRing
from lamina.sign.keys import ALGORITHMS, P256Key, PrivateKey, PublicKey, format_utc, parse_time

RING = option("file of the key ring", "--keys", default=Path("keys.json"))
AT = option("when it takes effect: 2026-03-01, or 2026-03-01T12:00Z; default: now", "--at", metavar="TIME")


@command("new", keys=True)
def new_key(
    path: Path = argument("KEY", "the private key to write, such as alice.key"),
    no_passphrase: bool = option("do not encrypt the key: whoever reads the file can sign"),
    kind: str = option(
        "ed25519; or p256, for model-signing bundles alone", "--type", choices=["ed25519", "p256"], default="ed25519"
    ),
) -> Answer:
    """Make a key: KEY (private, mode 0600, encrypted) and the same name with .pub (public).

    An existing file is never overwritten. The passphrase is asked for, or read from --passphrase-file or
    LAMINA_PASSPHRASE; it is never given on the command line, where others can see it.

    Examples:

      lamina keys new alice.key
      lamina keys new robot.key --passphrase-file /run/secrets/robot
      lamina keys new bundle.key --type p256          for lamina release make --bundle-key
    """
    if no_passphrase and passphrase_file.get() is not None:
        raise misuse("a passphrase, or --no-passphrase", "--passphrase-file")
    public = path.with_suffix(".pub")
    if public == path:
        raise BadKey("key.private-named-pub", f"'{path}' is the name of a public key", "name the private key .key")
    for file in (path, public):
        if file.exists():
            problem = f"'{file}' exists and is not overwritten"
            raise BadKey("key.file-exists", problem, "give another name, or move it away")
    secret = None if no_passphrase else read_passphrase(f"the new key '{path}'", new=True)
    key = P256Key.generate() if kind == "p256" else PrivateKey.generate()
    key.save(path, secret)
    data, name = (key.public_pem, key.id) if isinstance(key, P256Key) else (key.public.pem(), key.public.name)
    keys.write_new(public, data, "the public key", mode=0o644)
    made = {"id": name, "private": str(path), "public": str(public), "sealed": not no_passphrase}
    secret_file = f"  private  {path}   keep it secret, with a copy in a safe place"
    return Answer(made, f"key {name}", secret_file, f"  public   {public}   give this one to others")


@command("export")
def export_key(
    name: str = argument("KEY", "a public key file, or id or label in the ring"),
    form: str = option("pem or cose", "--format", choices=["pem", "cose"], default="pem"),
    output: Path | None = option("file to write; default: standard output"),
    ring: Path = RING,
) -> Answer | None:
    """Write a public key for others: PEM (openssl reads it) or COSE_Key (RFC 9052).

    Private keys are not exported; copy the file.

    Examples:

      lamina keys export alice
      lamina keys export alice.pub --format cose --output alice.cose
    """
    key = PublicKey.load(name) if Path(name).is_file() else KeyRing.load(ring).find(name).key
    data = key.pem() if form == "pem" else key.cose()
    if output is not None:
        keys.write_new(output, data, "the public key", mode=0o644)
    shown_as = data.decode("ascii") if form == "pem" else data.hex()
    made = {"id": key.name, "format": form, "key": shown_as, "output": None if output is None else str(output)}
    if output is not None or as_json.get():
        return Answer(made, f"{output}: {key.name}")
    if form == "pem":
        return Answer(made, shown_as, raw=True)
    if sys.stdout.isatty():
        problem = "a COSE key is binary, and standard output is a terminal"
        raise BadKey("key.cose-to-terminal", problem, "give --output FILE")
    sys.stdout.buffer.write(data)
    return None


@command("subject")
def new_subject_key(path: Path = argument("FILE", "the file to write")) -> Answer:
    """Make a secret key for subject tags: 32 random bytes, mode 0600.

    `lamina attest --subject-key FILE` signs a keyed tag of the person that the data is about, so that two contributions
    about one person are found without naming anybody. Whoever has this key can test names against tags: share it only
    with those who sign, and use one key for the whole corpus.

    Example:

      lamina keys subject subject.key
    """
    keys.write_new(path, (secrets.token_hex(32) + "\n").encode("ascii"), "the subject key", mode=0o600)
    return Answer({"subject_key": str(path)}, f"{path}: keep it secret, and a copy")


def key_json(entry: KeyEntry, now: int) -> dict[str, Any]:
    """As machines read it."""
    times = {
        name: None if (instant := getattr(entry, name)) is None else format_utc(instant)
        for name in ("added", "valid_from", "retired_from", "revoked_from")
    }
    return {
        "id": entry.key.name,
        "label": entry.label,
        "role": entry.role,
        "algorithms": list(entry.algorithms),
        **times,
        "replaced_by": None if entry.replaced_by is None else entry.replaced_by.hex(),
        "standing": entry.standing(now).value,
    }


def _keys_answer(ring: KeyRing, path: Path, entries: Iterable[KeyEntry]) -> Answer:
    """These keys of a ring, one line each."""
    rows = [key_json(each, int(time.time())) for each in entries]
    names = ("id", "label", "role", "added", "valid_from", "standing", "retired_from", "revoked_from")
    shown = [["id", "label", "role", "added", "valid from", "now", "retired from", "revoked from"]]
    shown += [[field_text(row[name])[: 16 if name == "id" else None] for name in names] for row in rows]
    text = table(shown, left=len(names)) if rows else f"'{path}' has no keys."
    return Answer({"ring": str(path), "version": ring.version.hex(), "keys": rows}, text)


def field_text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else "-" if value is None else str(value)


@command("list")
def list_keys(ring: Path = RING) -> Answer:
    """Show the keys of a ring, and whether each is valid now.

    Examples:

      lamina keys list
      lamina keys list --keys trusted.json --json
    """
    opened = KeyRing.load(ring)
    return _keys_answer(opened, ring, opened)


@command("show")
def show_key(name: str = argument("KEY", "a public key file, or id or label in the ring"), ring: Path = RING) -> Answer:
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
    listed = {"id": key.name, "x": key.x.hex(), **(figures or {"ring": f"not in '{ring}'"})}
    lines = [[word.replace("_", " "), field_text(value)] for word, value in listed.items()]
    return Answer({"id": key.name, "x": key.x.hex(), "ring": figures}, table(lines, left=2))


@command("add")
def add_key(
    path: Path = argument("FILE", "a public key, PEM or COSE"),
    label: str | None = option("name of the owner; default: the name of the file"),
    role: str = option("what the key may sign", choices=ROLES, default=ROLES[0]),
    valid_from: str | None = option("refuse signatures made before this time; default: 1970", metavar="TIME"),
    algorithm: int | None = option("accept only this COSE algorithm: -8 (EdDSA) or -19 (Ed25519); default: both"),
    quorum: int | None = option("with role witness: how many witnesses must have cosigned; default: all", min=0),
    ring: Path = RING,
) -> Answer:
    """Trust a public key. Makes the ring if there is none.

    Weak keys (points of small or mixed order) are refused. For a witness the label is the name under which it cosigns.

    Examples:

      lamina keys add alice.pub --label alice
      lamina keys add ledger.pub --role ledger --valid-from 2026-01-01
      lamina keys add owner.pub --role governing --keys trusted.json
    """
    if quorum is not None and role != "witness":
        raise misuse("is for witnesses", "--quorum")
    if algorithm is not None and algorithm not in ALGORITHMS:
        raise misuse(f"{algorithm} is not one of {', '.join(map(str, ALGORITHMS))}")
    key = PublicKey.load(path)
    since, algorithms = 0 if valid_from is None else parse_time(valid_from), (algorithm,) if algorithm else ALGORITHMS
    with KeyRing.editing(ring, create=True) as opened:
        named = path.stem if label is None else label
        entry = opened.add(key, label=named, role=role, valid_from=since, algorithms=algorithms, added=int(time.time()))
        opened.quorum = opened.quorum if quorum is None else quorum
    return _keys_answer(opened, ring, [entry])


@command("rotate")
def rotate_key(
    old: str = argument("OLD", "id or label of the key to replace"),
    new: Path = argument("NEW", "file of the new public key"),
    at: str | None = AT,
    label: str | None = option("label of the new key; default: that of the old key"),
    ring: Path = RING,
) -> Answer:
    """Replace a key by a new one.

    What the old key signed before that time stays valid; what it signs later is refused. The new key is valid from then
    on. If somebody else may have the old key, revoke it too.

    Examples:

      lamina keys rotate alice alice2.pub
      lamina keys rotate 3f9c21aa alice2.pub --at 2026-06-01
    """
    key = PublicKey.load(new)
    with KeyRing.editing(ring) as opened:
        retiring = opened.find(old)
        added = opened.rotate(retiring.id, key, at=_parse_time_or_now(at), label=label, added=int(time.time()))
    return _keys_answer(opened, ring, [opened.find(retiring.key.name), added])


@command("revoke")
def revoke_key(
    name: str = argument("KEY", "id or label in the ring"), at: str | None = AT, ring: Path = RING
) -> Answer:
    """Stop trusting a key from a time on, for good.

    Every admission and every epoch after that refuses all that the key ever signed. A revocation can be moved to an
    earlier time, never to a later one.

    Examples:

      lamina keys revoke alice
      lamina keys revoke 3f9c21aa --at 2026-03-01T12:00Z
    """
    with KeyRing.editing(ring) as opened:
        revoked = opened.revoke(opened.find(name).id, at=_parse_time_or_now(at))
    return _keys_answer(opened, ring, [revoked])


def _parse_time_or_now(at: str | None) -> int:
    return int(time.time()) if at is None else parse_time(at)


app = group(__doc__, new_key, list_keys, show_key, add_key, rotate_key, revoke_key, export_key, new_subject_key)
