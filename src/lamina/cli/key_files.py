"""`lamina keys new, export, subject`: files with keys in them."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path
from typing import Annotated

import typer

from lamina.admit import files
from lamina.admit.key import PrivateKey, PublicKey
from lamina.admit.keyring import KeyRing
from lamina.cli.output import out, print_json
from lamina.cli.passphrase import PassphraseFile, passphrase
from lamina.errors import BadKey

Ring = Annotated[Path, typer.Option("--keys", metavar="FILE", help="the key ring")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object")]
RING = Path("keys.json")


def new(
    path: Annotated[Path, typer.Argument(metavar="KEY", help="the private key to write, such as alice.key")],
    no_passphrase: Annotated[
        bool,
        typer.Option("--no-passphrase", help="whoever can read the file can sign: for tests and machines"),
    ] = False,
    passphrase_file: PassphraseFile = None,
    as_json: Json = False,
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
        raise BadKey(
            "key.name-public-key", f"'{path}' is the name of a public key", "call the private one .key"
        )
    for file in (path, public):
        if file.exists():
            raise BadKey(
                "key.exists-not-overwritten",
                f"'{file}' exists and is not overwritten",
                "give another name, or move it away",
            )
    secret = None if no_passphrase else passphrase(passphrase_file, what=f"the new key '{path}'", new=True)
    key = PrivateKey.generate()
    key.save(path, secret)
    files.write_new(public, key.public.pem(), "the public key", mode=0o644)
    if as_json:
        print_json(
            {"id": key.public.name, "private": str(path), "public": str(public), "sealed": not no_passphrase}
        )
        return
    out.print(f"key {key.public.name}", markup=False, soft_wrap=True)
    out.print(f"  private  {path}   keep it; a copy in a safe place", markup=False, soft_wrap=True)
    out.print(f"  public   {public}   hand this one out", markup=False, soft_wrap=True)


def export(
    name: Annotated[str, typer.Argument(metavar="KEY", help="a public key file, or id or label in the ring")],
    form: Annotated[
        str, typer.Option("--format", help="pem or cose", autocompletion=lambda: ["pem", "cose"])
    ] = "pem",
    output: Annotated[Path | None, typer.Option(help="file to write; default: standard output")] = None,
    ring: Ring = RING,
    as_json: Json = False,
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
        files.write_new(output, data, "the public key", mode=0o644)
    if as_json:
        shown_as = data.decode("ascii") if form == "pem" else data.hex()
        print_json(
            {
                "id": key.name,
                "format": form,
                "key": shown_as,
                "output": None if output is None else str(output),
            }
        )
    elif output is not None:
        out.print(f"{output}: {key.name}", markup=False, soft_wrap=True)
    elif form == "pem":
        sys.stdout.write(data.decode("ascii"))
    elif sys.stdout.isatty():
        raise BadKey(
            "key.cose-key-binary",
            "a COSE key is binary, and standard output is a terminal",
            "give --output FILE",
        )
    else:
        sys.stdout.buffer.write(data)


def subject(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="the file to write")], as_json: Json = False
) -> None:
    """Make a secret key for subject tags: 32 random bytes, mode 0600.

    `lamina attest --subject-key FILE` signs a keyed tag of whom the data is about, so that two contributions about
    one person are noticed without naming anybody. Whoever has this key can test names against tags: keep it among
    those who sign, and use the same one for the whole corpus.

    Example:

      lamina keys subject subject.key
    """
    files.write_new(path, (secrets.token_hex(32) + "\n").encode("ascii"), "the subject key", mode=0o600)
    if as_json:
        print_json({"subject_key": str(path)})
    else:
        out.print(f"{path}: keep it secret, and a copy", markup=False, soft_wrap=True)
