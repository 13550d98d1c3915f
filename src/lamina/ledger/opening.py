"""Opening the ledger of a corpus: the one that is there, or a new one; and bringing its policy up to date."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from lamina.admit import files
from lamina.admit.files import locked
from lamina.admit.key import PrivateKey
from lamina.ledger import leaf
from lamina.ledger.at import Moved, append_at
from lamina.ledger.contract import NO_POLICY, Contract, slug
from lamina.ledger.errors import LedgerError
from lamina.ledger.ledger import Ledger
from lamina.ledger.records import NUMBERS, Header, PolicyChange, loosened
from lamina.ledger.records.header import YEAR
from lamina.ledger.records.policy import Signed
from lamina.ledger.store import make_store
from lamina.ledger.store.base import Reader
from lamina.ledger.view import head_of

__all__ = ["NO_POLICY", "Contract", "follow", "in_force", "ledger_key_beside", "open_or_create", "slug"]

_URLS = ("postgresql://", "postgres://")
Where = str | os.PathLike[str]


def ledger_key_beside(path: Where) -> Path:
    """Where the key of a ledger in a file is kept: x.db has x.pem beside it, also where x.db is a link to it."""
    found = Path(os.path.realpath(path))
    return found.with_name(f"{found.name.removesuffix('.db')}.pem")


def open_or_create(
    where: Where,
    contract: Contract,
    key: PrivateKey | None = None,
    *,
    retention: int = YEAR,
    clock: Callable[[], float] = time.time,
) -> Ledger:
    """The ledger of a corpus, at a path or in a database ("postgresql://…#schema"); made if there is none.

    key  signs its checkpoints. For a file it is the one beside it (`ledger_key_beside`), which is made with the ledger,
         mode 0600; a ledger whose key is not there is opened without. To make one in a database a key must be given

    Of several processes that make it at the same moment one does, and the others open it. A ledger of another origin
    is refused, and so is one that counts by another accountant or at another δ than the policy says.
    """
    remote = isinstance(where, str) and where.startswith(_URLS)
    place = str(where) if remote else os.path.realpath(where)
    if not remote and os.path.lexists(place) and not os.path.isfile(place):
        raise LedgerError(
            "ledger.no-file-no",
            f"'{place}' is no file, and no ledger",
            "give the path of one, or of one to be made",
        )
    if not _begun(place):
        with _alone(place, remote):
            key = _create(place, contract, key, remote, retention, clock)
    if key is None and not remote and ledger_key_beside(place).exists():
        key = PrivateKey.load(ledger_key_beside(place), None)
    ledger = Ledger.open(place, key, clock=clock)
    try:
        check_contract(ledger, contract)
        if ledger.signs:
            ledger.check_signs()
    except BaseException:
        ledger.close()
        raise
    return ledger


def follow(ledger: Ledger, contract: Contract, signatures: tuple[Signed, ...] = ()) -> bool:
    """Make the contract's floors, presets and policy those in force; whether anything had to be changed.

    Classes that the contract does not name stay as they are. What protects less than before needs the `signatures` of
    two parties (`Contract.change(in_force(ledger)).message(origin)` is what they sign).
    """
    while True:
        size, before = ledger.patiently(lambda: _standing(ledger))
        if contract.policy == NO_POLICY and before.policy != NO_POLICY:
            raise LedgerError(
                "ledger.ledger-under-policy",
                f"the ledger {ledger.name} is under a policy, and nothing here says which",
                "give the corpus its policy: Corpus(…, policy=Policy.load('policy.toml'))",
            )
        if (change := contract.change(before)) is None:
            return False
        change = replace(change, signatures=signatures)
        _refuse_looser(ledger, before, change)
        if ledger.signs:
            ledger.check_signs()
        try:
            append_at(ledger, size, [change])
        except Moved:
            continue
        except LedgerError:
            if in_force(ledger) == before:
                raise
            continue  # another process changed the policy first
        if ledger.signs:
            ledger.checkpoint()
        return True


def in_force(ledger: Ledger) -> Header | PolicyChange:
    """The last word on floors, presets and policy."""
    return ledger.patiently(lambda: _standing(ledger))[1]


def _standing(ledger: Ledger) -> tuple[int, Header | PolicyChange]:
    with ledger.store.read() as rows:
        return head_of(rows).size, last_policy(rows, ledger.header)


def last_policy(rows: Reader, header: Header) -> Header | PolicyChange:
    """The same inside a transaction."""
    found: Header | PolicyChange = header
    for _, data in rows.of_kind(NUMBERS[PolicyChange], 0, head_of(rows).size):
        record = leaf.decode(data).record
        assert isinstance(record, PolicyChange)
        found = record
    return found


def _refuse_looser(ledger: Ledger, before: Header | PolicyChange, change: PolicyChange) -> None:
    looser = loosened(before.floors, before.presets, change.floors, change.presets)
    if looser and not ledger.parties().allow(change, ledger.origin, ledger.now()):
        raise LedgerError(
            "ledger.policy-protect-less-ledger",
            f"the policy would protect less than the ledger {ledger.name} has promised: {'; '.join(looser)}",
            "keep what was promised, or have two parties sign the change: lamina ledger policy",
        )


# --------------------------------------------------------------------------------------- making


def _begun(place: str) -> bool:
    """Whether there is a ledger, and not only what a killed process left of making one."""
    remote = place.startswith(_URLS)
    if not remote and (not os.path.isfile(place) or not os.path.getsize(place)):
        return False
    try:
        store = make_store(place)
    except LedgerError as error:
        if remote and error.problem.startswith("there is no ledger"):
            return False
        if remote:
            raise
        store = make_store(place, create=True)  # a file without tables; anything else is refused again
    try:
        with store.read() as rows:
            return rows.head() is not None
    finally:
        store.close()


@contextmanager
def _alone(place: str, remote: bool) -> Iterator[None]:
    """Nobody else makes a ledger in this folder. A database sees to that itself."""
    if remote:
        yield
        return
    folder = Path(place).parent
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        yield


def _create(
    place: str,
    contract: Contract,
    key: PrivateKey | None,
    remote: bool,
    retention: int,
    clock: Callable[[], float],
) -> PrivateKey | None:
    """Make it, unless another process did meanwhile; the key, as far as it is known."""
    if _begun(place):
        return key
    if key is None:
        if remote:
            raise LedgerError(
                "ledger.no-ledger-database",
                "there is no ledger in that database yet, and no key to sign one",
                "give the key that will sign its checkpoints: lamina keys new makes one",
            )
        key = _key_beside(ledger_key_beside(place))
    try:
        Ledger.create(place, contract.header(key.public, retention=retention), key, clock=clock).close()
    except LedgerError:
        if not (remote and _begun(place)):  # else another machine was quicker
            raise
    return key


def _key_beside(path: Path) -> PrivateKey:
    """A new key; or one that is there already, for a ledger that was not made in the end."""
    if path.exists():
        return PrivateKey.load(path, None)
    key = PrivateKey.generate()
    files.replace(path.with_suffix(".pub"), key.public.pem(), "the public key", mode=0o644)
    key.save(path, None)
    return key


def check_contract(ledger: Ledger, contract: Contract) -> None:
    """LedgerError if the ledger is of another corpus, or counts in another way than its policy says."""
    header = ledger.header
    if header.origin != contract.origin:
        raise LedgerError(
            "ledger.ledger-not",
            f"the ledger {ledger.name} is of {header.origin!r}, not of {contract.origin!r}",
            "give the ledger of this corpus, or another place for a new one: one ledger, one corpus",
        )
    counted, asked = (header.accountant, header.delta), (contract.accountant, contract.delta)
    if contract.policy != NO_POLICY and counted != asked:
        raise LedgerError(
            "ledger.ledger-counts-delta",
            f"the ledger {ledger.name} counts by {counted[0]} at δ = {counted[1]:g} for good, "
            f"the policy says {asked[0]} at δ = {asked[1]:g}",
            "set accountant and delta of [corpus] to those of the ledger, or begin a ledger under another origin",
        )
