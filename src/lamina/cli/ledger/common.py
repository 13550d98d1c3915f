"""What the commands of a ledger share: where it is, and with which key it is opened."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from lamina.admit.files import read_small
from lamina.admit.key import PrivateKey
from lamina.cli.ledgers import is_url, shown
from lamina.cli.output import out
from lamina.cli.passphrase import open_key
from lamina.ledger.ledger import Ledger
from lamina.ledger.view import View

Where = Annotated[str, typer.Argument(metavar="LEDGER", help="ledger.db, or postgresql://…/database#schema")]
LEAF = "number of any leaf; or a contribution, by its digest (the first 8 digits or more) or its folder"
DIGEST = "digest of its descriptor or content anchor, or the first 8 digits or more; its folder; or its leaf"
Json = Annotated[bool, typer.Option("--json", help="print one JSON object")]
KeyFile = Annotated[
    Path | None,
    typer.Option("--key", metavar="FILE", help="the private key that signs; asks for its passphrase"),
]
Output = Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="write it there")]


def is_file(where: str) -> bool:
    """Whether it is kept in a file."""
    return not is_url(where)


def printed(where: str) -> str:
    """Where it is, as it may be printed: without a password."""
    return shown(where)


def check_there(where: str) -> str:
    """Where it is, with links followed; misuse, if there is none."""
    if not is_file(where):
        return where
    if not Path(where).is_file():
        raise typer.BadParameter(f"there is no ledger '{where}'", param_hint="LEDGER")
    return os.path.realpath(where)


def looked_at(where: str) -> View:
    """The ledger, to be read and not changed: also a copy that cannot be written, and by a user who may only look."""
    return View.read_only(check_there(where))


@contextmanager
def opened(
    where: str,
    key: Path | None = None,
    passphrase_file: Path | None = None,
    *,
    signer: PrivateKey | None = None,
) -> Iterator[Ledger]:
    """The ledger, to be read and appended to; with a key (a file, or one that is open) also to be signed."""
    place = check_there(where)
    with Ledger.open(place, signer if key is None else open_key(key, passphrase_file)) as ledger:
        yield ledger


def named(name: str) -> str:
    """A contribution as the ledger knows it: a folder with a descriptor.cbor, or that file, by the file's digest."""
    path = Path(name)
    path = path / "descriptor.cbor" if path.is_dir() else path
    if path.name != "descriptor.cbor" or not path.is_file():
        return name
    return hashlib.sha256(read_small(path, "the descriptor")).hexdigest()


def say(text: str) -> None:
    """A line as it is: never wrapped, never marked up."""
    out.print(text, markup=False, soft_wrap=True)
