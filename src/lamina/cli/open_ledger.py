"""Where a ledger is, and how commands open it: a file, a database, or every ledger of a folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lamina.admit.keys import PrivateKey, read_small
from lamina.admit.verdicts import EntryContext, RefusedRows, RegisterEntry
from lamina.cli.terminal import existing_ledger, open_private_key
from lamina.errors import LedgerError, RunError
from lamina.ledger.admission_batch import LedgerRegister
from lamina.ledger.corpus_terms import CorpusTerms, check_corpus_terms, policy_in_force
from lamina.ledger.governance_records import loosened
from lamina.ledger.reader import LedgerReader
from lamina.ledger.store.sqlite import is_postgres_url, ledger_exists, make_store
from lamina.ledger.writer import Ledger
from lamina.spend.spend_ledger import SpendLedger

SUFFIX = ".ledger.db"


def find_ledgers(where: str) -> list[str]:
    """The ledger at a path; for a folder, all ledgers in it, or the ledger of its run."""
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
    problem = f"'{where}' has no ledger"
    remedy = f"give a ledger, or a folder with NAME{SUFFIX} in it; runs write theirs beside their folders"
    raise RunError("cli.ledger-missing", problem, remedy)


@contextmanager
def read_spend(where: str) -> Iterator[SpendLedger]:
    """What runs have spent, read-only."""
    with Ledger(make_store(_resolve_link(where), readonly=True), None) as ledger:
        yield SpendLedger(ledger)


class ReadOnlyRegister(LedgerRegister):
    """Looks up in a ledger who is admitted and who was withdrawn, and records nothing."""

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
    """What runs have spent, to give back a reservation. Needs no key: the next checkpoint covers it."""
    with Ledger.open(_resolve_link(where)) as ledger:
        yield SpendLedger(ledger)


def check_policy_not_looser(ledger: Ledger, contract: CorpusTerms) -> None:
    """Refuse a policy that a run would be refused for, before the run begins."""
    check_corpus_terms(ledger, contract)
    before = policy_in_force(ledger)
    change = contract.change(before)
    looser = change and loosened(before.floors, before.presets, change.floors, change.presets)
    if looser:
        problem = f"this policy protects less than the ledger {ledger.name} promises: {'; '.join(looser)}"
        remedy = "keep what was promised, or have two governing keys sign the change: lamina ledger policy"
        raise LedgerError("cli.policy-protects-less", problem, remedy)


def _resolve_link(where: str) -> str:
    """A link in a run's folder leads to its ledger."""
    return where if is_postgres_url(where) else os.path.realpath(where)


LEAF_HELP = "number of a leaf; or a contribution, by its folder or its digest (the first 8 digits or more)"
DIGEST_HELP = "a contribution: digest of its descriptor or anchor (the first 8 digits or more), its folder, or its leaf"


def open_view(where: str) -> LedgerReader:
    """The ledger, read-only: also a read-only copy, or by a user who may not write."""
    return LedgerReader.read_only(existing_ledger(where))


@contextmanager
def open_ledger(
    where: str, key: Path | None = None, passphrase_file: Path | None = None, *, signer: PrivateKey | None = None
) -> Iterator[Ledger]:
    """The ledger, to append to; with a key (a file, or an open one) also to sign."""
    place = existing_ledger(where)
    with Ledger.open(place, signer if key is None else open_private_key(key, passphrase_file)) as ledger:
        yield ledger


def contribution_digest(name: str) -> str:
    """The digest of a folder's descriptor.cbor, or of that file; any other name as it is."""
    path = Path(name)
    path = path / "descriptor.cbor" if path.is_dir() else path
    if path.name != "descriptor.cbor" or not path.is_file():
        return name
    return hashlib.sha256(read_small(path, "the descriptor")).hexdigest()
