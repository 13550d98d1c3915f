"""Where ledgers are: a file, a database, or all that lie in a folder; and what runs have spent in each."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lamina.admit.register import Beside, Entry, Lost
from lamina.errors import RunError
from lamina.ledger.errors import LedgerError
from lamina.ledger.ledger import Ledger
from lamina.ledger.opening import Contract, check_contract, in_force
from lamina.ledger.records import loosened
from lamina.ledger.register import LedgerRegister
from lamina.ledger.store import make_store
from lamina.ledger.store.address import is_url as is_url
from lamina.ledger.store.address import without_password
from lamina.train.book import Book

SUFFIX = ".ledger.db"


def shown(where: str) -> str:
    """As it may be printed and written down: without a password.

    >>> shown("postgresql://me:secret@host/db#ward"), shown("postgresql:///db?host=/run&password=secret")
    ('postgresql://me@host/db#ward', 'postgresql:///db?host=/run')
    """
    return without_password(where) if is_url(where) else where


def ledgers_in(where: str) -> list[str]:
    """The ledger at a place; of a folder, all that lie in it, or the one that its run is recorded in."""
    if is_url(where):
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
def reading(where: str) -> Iterator[Book]:
    """What runs have spent there; nothing is changed."""
    with Ledger(make_store(_place(where), readonly=True), None) as ledger:
        yield Book(ledger)


class Onlooker(LedgerRegister):
    """Asks a ledger who is in it and who was withdrawn, and tells it nothing."""

    def enter(self, entries: Iterable[Entry], beside: Beside) -> Lost:
        return {}


@contextmanager
def onlooking(where: str, contract: Contract) -> Iterator[Onlooker | None]:
    """For the gate, where nothing may be written; None if there is no ledger yet."""
    if not is_there(where):
        yield None
        return
    with reading(where) as book:
        check_contract(book.ledger, contract)
        yield Onlooker(book.ledger)


@contextmanager
def writing(where: str) -> Iterator[Book]:
    """The same, to give back what a run has reserved. No key is needed: the next checkpoint covers what is recorded."""
    with Ledger.open(_place(where)) as ledger:
        yield Book(ledger)


def check_policy(ledger: Ledger, contract: Contract) -> None:
    """What a run under this policy would be refused for, before it is begun."""
    check_contract(ledger, contract)
    before = in_force(ledger)
    change = contract.change(before)
    looser = change and loosened(before.floors, before.presets, change.floors, change.presets)
    if looser:
        raise LedgerError(
            "cli.policy-protects-less",
            f"the policy protects less than the ledger {ledger.name} has promised: {'; '.join(looser)}",
            "keep what was promised, or have two parties sign the change: lamina ledger policy",
        )


def is_there(where: str) -> bool:
    """Whether there is a ledger yet."""
    if not is_url(where):
        return Path(where).exists()
    try:
        make_store(where, readonly=True).close()
    except LedgerError as error:
        if error.problem.startswith("there is no ledger"):
            return False
        raise
    return True


def _place(where: str) -> str:
    """A link in a run's folder leads to its ledger."""
    return where if is_url(where) else os.path.realpath(where)
