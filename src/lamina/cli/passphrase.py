"""Where the passphrase of a key comes from: a file, the environment, or a prompt; never the command line."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from lamina.admit.files import read_small
from lamina.admit.key import PrivateKey
from lamina.errors import BadKey

VARIABLE = "LAMINA_PASSPHRASE"
_MOST = 4096

PassphraseFile = Annotated[
    Path | None,
    typer.Option(
        "--passphrase-file",
        metavar="FILE",
        help=f"the passphrase is its first line; or set {VARIABLE}; default: ask",
    ),
]


def passphrase(file: Path | None, *, what: str, new: bool = False) -> bytes:
    """The passphrase, from the first place that has one; asked for twice if it is `new`."""
    if file is not None:
        found = read_small(file, "the passphrase file", most=_MOST).partition(b"\n")[0].removesuffix(b"\r")
    elif given := os.environ.get(VARIABLE):
        found = given.encode("utf-8", "surrogateescape")
    elif _is_terminal():
        asked = typer.prompt(f"Passphrase of {what}", hide_input=True, confirmation_prompt=new, err=True)
        found = str(asked).encode("utf-8")
    else:
        raise BadKey(
            "key.no-passphrase-nobody",
            f"there is no passphrase for {what}, and nobody to ask",
            f"set {VARIABLE} or give --passphrase-file" + (", or say --no-passphrase" if new else ""),
        )
    if not found:
        raise BadKey(
            "key.passphrase-empty-give",
            f"the passphrase of {what} is empty",
            "give one" + (", or say --no-passphrase" if new else ""),
        )
    return found


def open_key(path: Path, file: Path | None) -> PrivateKey:
    """A private key; the passphrase is asked for only if it has one."""
    sealed = PrivateKey.sealed(path)
    return PrivateKey.load(path, passphrase(file, what=f"'{path}'") if sealed else None)


def _is_terminal() -> bool:
    return sys.stdin.isatty()
