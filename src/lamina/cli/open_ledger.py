"""Where a ledger is, and how commands open it: a file, a database, or every ledger of a folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from lamina.admit.keys import PrivateKey, read_small
from lamina.admit.verdicts import EntryContext, RefusedRows, RegisterEntry
from lamina.cli.terminal import open_private_key, out
from lamina.errors import LedgerError, RunError
from lamina.ledger.admission_batch import LedgerRegister
from lamina.ledger.corpus_terms import CorpusTerms, check_corpus_terms, policy_in_force
from lamina.ledger.governance_records import loosened
from lamina.ledger.reader import LedgerReader
from lamina.ledger.store.open_store import is_postgres_url, make_store, without_password
from lamina.ledger.writer import Ledger
from lamina.spend.spend_ledger import SpendLedger

SUFFIX = ".ledger.db"


def printable_location(where: str) -> str:
    """As it may be printed and written down: without a password.

    >>> printable_location("postgresql://me:secret@host/db#ward"), printable_location("postgresql:///db?host=/run&password=secret")
    ('postgresql://me@host/db#ward', 'postgresql:///db?host=/run')
    """
    return without_password(where) if is_postgres_url(where) else where


def find_ledgers(where: str) -> list[str]:
    """The ledger at a place; of a folder, all that lie in it, or the one that its run is recorded in."""
    if is_postgres_url(where):
        return [where]
    path = Path(where)
    if path.is_dir():
        beside = sorted(str(each) for each in path.glob(f"*{SUFFIX}") if each.is_file())
        found = beside or [str(path / "ledger.db")] * (path / "ledger.db").is_file()
    else:
        found = [where] * path.is_file()
    if found:
        return found
    if (path / "spend.db").exists():
        raise RunError(
            "cli.holds-no-ledger",
            f"'{where}' holds no ledger, but a spend book (spend.db) of an earlier version, which is not read any more",
            "read it with that version; what it says was spent, new runs must leave unspent of the policy's ε",
        )
    raise RunError(
        "cli.no-ledger",
        f"there is no ledger in '{where}'" if path.is_dir() else f"there is no ledger '{where}'",
        f"give a ledger, or a folder with NAME{SUFFIX} in it; runs make theirs beside their folders",
    )


@contextmanager
def read_spend(where: str) -> Iterator[SpendLedger]:
    """What runs have spent there; nothing is changed."""
    with Ledger(make_store(_resolve_link(where), readonly=True), None) as ledger:
        yield SpendLedger(ledger)


class ReadOnlyRegister(LedgerRegister):
    """Asks a ledger who is in it and who was withdrawn, and tells it nothing."""

    def enter(self, entries: Iterable[RegisterEntry], beside: EntryContext) -> RefusedRows:
        return {}


@contextmanager
def read_only_register(where: str, contract: CorpusTerms) -> Iterator[ReadOnlyRegister | None]:
    """For the gate, where nothing may be written; None if there is no ledger yet."""
    if not ledger_exists(where):
        yield None
        return
    with read_spend(where) as book:
        check_corpus_terms(book.ledger, contract)
        yield ReadOnlyRegister(book.ledger)


@contextmanager
def write_spend(where: str) -> Iterator[SpendLedger]:
    """The same, to give back what a run has reserved. No key is needed: the next checkpoint covers what is recorded."""
    with Ledger.open(_resolve_link(where)) as ledger:
        yield SpendLedger(ledger)


def check_policy_not_looser(ledger: Ledger, contract: CorpusTerms) -> None:
    """What a run under this policy would be refused for, before it is begun."""
    check_corpus_terms(ledger, contract)
    before = policy_in_force(ledger)
    change = contract.change(before)
    looser = change and loosened(before.floors, before.presets, change.floors, change.presets)
    if looser:
        raise LedgerError(
            "cli.policy-protects-less",
            f"the policy protects less than the ledger {ledger.name} has promised: {'; '.join(looser)}",
            "keep what was promised, or have two parties sign the change: lamina ledger policy",
        )


def ledger_exists(where: str) -> bool:
    """Whether there is a ledger yet."""
    if not is_postgres_url(where):
        return Path(where).exists()
    try:
        make_store(where, readonly=True).close()
    except LedgerError as error:
        if error.problem.startswith("there is no ledger"):
            return False
        raise
    return True


def _resolve_link(where: str) -> str:
    """A link in a run's folder leads to its ledger."""
    return where if is_postgres_url(where) else os.path.realpath(where)


LedgerArgument = Annotated[str, typer.Argument(metavar="LEDGER", help="ledger.db, or postgresql://…/database#schema")]
LEAF_HELP = "number of any leaf; or a contribution, by its digest (the first 8 digits or more) or its folder"
DIGEST_HELP = "digest of its descriptor or content anchor, or the first 8 digits or more; its folder; or its leaf"
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON object")]
KeyOption = Annotated[
    Path | None, typer.Option("--key", metavar="FILE", help="the private key that signs; asks for its passphrase")
]
OutputOption = Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="write it there")]


def is_file_ledger(where: str) -> bool:
    """Whether it is kept in a file."""
    return not is_postgres_url(where)


def existing_ledger(where: str) -> str:
    """Where it is, with links followed; misuse, if there is none."""
    if not is_file_ledger(where):
        return where
    if not Path(where).is_file():
        raise typer.BadParameter(f"there is no ledger '{where}'", param_hint="LEDGER")
    return os.path.realpath(where)


def open_view(where: str) -> LedgerReader:
    """The ledger, to be read and not changed: also a copy that cannot be written, and by a user who may only look."""
    return LedgerReader.read_only(existing_ledger(where))


@contextmanager
def open_ledger(
    where: str, key: Path | None = None, passphrase_file: Path | None = None, *, signer: PrivateKey | None = None
) -> Iterator[Ledger]:
    """The ledger, to be read and appended to; with a key (a file, or one that is open) also to be signed."""
    place = existing_ledger(where)
    with Ledger.open(place, signer if key is None else open_private_key(key, passphrase_file)) as ledger:
        yield ledger


def contribution_digest(name: str) -> str:
    """A contribution as the ledger knows it: a folder with a descriptor.cbor, or that file, by the file's digest."""
    path = Path(name)
    path = path / "descriptor.cbor" if path.is_dir() else path
    if path.name != "descriptor.cbor" or not path.is_file():
        return name
    return hashlib.sha256(read_small(path, "the descriptor")).hexdigest()


def print_line(text: str) -> None:
    """A line as it is: never wrapped, never marked up."""
    out.print(text, markup=False, soft_wrap=True)
