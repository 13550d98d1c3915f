"""Where a ledger is, and how commands open it: a file, a database, or every ledger of a folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lamina.admit.contribution_sources import DESCRIPTOR_FILE, Contribution, FolderContributions
from lamina.admit.register import EntryContext, RefusedRows
from lamina.admit.rows import Admitted
from lamina.cli.command import Answer, argument
from lamina.cli.terminal import existing_ledger, open_private_key, print_note
from lamina.errors import LedgerError, RunError
from lamina.ledger.admission_batch import LedgerRegister
from lamina.ledger.contribution_trace import leaf_differences
from lamina.ledger.corpus_terms import CorpusTerms, check_corpus_terms, ledger_key_path, policy_in_force
from lamina.ledger.governance_records import loosened
from lamina.ledger.neighbours import LEDGER_SUFFIX
from lamina.ledger.newest_state import refuse_rolled_back
from lamina.ledger.reader import LedgerReader
from lamina.ledger.records import ContributionRecord, KeptContribution
from lamina.ledger.spend_ledger import SpendLedger
from lamina.ledger.store.sqlite import is_postgres_url, ledger_exists, make_store
from lamina.ledger.writer import Ledger
from lamina.release.reconciliation import anchor_file, read_anchor
from lamina.sign.keys import PrivateKey


def default_place() -> str:
    """The folder runs if ledgers are in it; otherwise the current folder."""
    return "runs" if any(Path("runs").glob(f"*{LEDGER_SUFFIX}")) or Path("runs/ledger.db").is_file() else "."


def find_ledgers(where: str) -> list[str]:
    """The ledger at a path; for a folder, all ledgers in it, or the ledger of its run."""
    if is_postgres_url(where):
        return [where]
    path = Path(where)
    if path.is_dir():
        beside = sorted(str(each) for each in path.glob(f"*{LEDGER_SUFFIX}") if each.is_file())
        found = beside or [str(path / "ledger.db")] * (path / "ledger.db").is_file()
    else:
        found = [where] * path.is_file()
    if found:
        return found
    problem = f"'{where}' has no ledger"
    remedy = f"give a ledger, or a folder with NAME{LEDGER_SUFFIX} in it; runs write their ledger beside their folder"
    raise RunError("cli.ledger-missing", problem, remedy)


@contextmanager
def read_spend(where: str) -> Iterator[SpendLedger]:
    """What runs have spent, read-only."""
    place = _resolve_link(where)
    with Ledger(make_store(place, readonly=True), None) as ledger:
        refuse_older(ledger, place)
        yield SpendLedger(ledger)
        for note in ledger.notes:
            print_note(f"note: {note}")


def refuse_older(ledger: LedgerReader, place: str) -> None:
    """Raise LedgerError if a ledger file is older than the state that lies beside its key."""
    if not is_postgres_url(place):
        refuse_rolled_back(ledger, ledger_key_path(place))


class ReadOnlyRegister(LedgerRegister):
    """Looks up in a ledger who is admitted and who was withdrawn, and records nothing."""

    def enter(self, entries: Iterable[Admitted], beside: EntryContext) -> RefusedRows:
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
def write_spend(where: str, key: PrivateKey | None = None) -> Iterator[SpendLedger]:
    """Open a ledger to release a reservation. The key signs what stays open; default: the key beside the ledger."""
    place = _resolve_link(where)
    if key is None and not is_postgres_url(place) and (beside := ledger_key_path(place)).exists():
        key = PrivateKey.load(beside, None)
    with Ledger.open(place, key) as ledger:
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
DIGEST = argument("DIGEST", DIGEST_HELP)


def open_view(where: str) -> LedgerReader:
    """The ledger, read-only: also a read-only copy, or by a user who may not write."""
    return LedgerReader.read_only(existing_ledger(where))


@contextmanager
def open_ledger(where: str, key: Path | None = None, *, signer: PrivateKey | None = None) -> Iterator[Ledger]:
    """The ledger, to append to; with a key (a file, or an open one) also to sign."""
    place = existing_ledger(where)
    with Ledger.open(place, signer if key is None else open_private_key(key)) as ledger:
        if not ledger.signs:
            refuse_older(ledger, place)
        yield ledger
        for note in ledger.notes:
            print_note(f"note: {note}")


def contribution_digest(name: str) -> str:
    """The digest of a folder's descriptor.cbor, of that file, or in a content anchor or C2PA manifest; others as they are."""
    if (path := Path(name)).suffix and path.name != DESCRIPTOR_FILE and os.path.isfile(path):
        return read_anchor(anchor_file(path))
    given = contributor_folder(name)
    return name if given is None or given.descriptor is None else hashlib.sha256(given.descriptor).hexdigest()


def contributor_folder(name: str | Path) -> Contribution | None:
    """What a contributor has in its folder, given by it or by its descriptor.cbor; None for any other name."""
    path = Path(os.path.abspath(name))
    path = path.parent if path.name == DESCRIPTOR_FILE else path
    return FolderContributions(path.parent).get(path.name) if (path / DESCRIPTOR_FILE).is_file() else None


def compared(facts: dict[str, Any], name: str | Path | None, record: object, *lines: str) -> Answer:
    """Answer about a contribution. If it was given by its folder, what differs there is stated, and the answer is not ok."""
    given = None if name is None else contributor_folder(name)
    if given is None or not isinstance(record, ContributionRecord | KeptContribution):
        return Answer(facts, *lines)
    differences = leaf_differences(record, given)
    state = f"NOT equal: {', '.join(differences)}" if differences else "equal to the leaf"
    return Answer(facts | {"differences": differences}, *lines, f"  folder     {state}", ok=not differences)
