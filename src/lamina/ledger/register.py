"""`LedgerRegister`: the ledger as the gate's memory. Who is admitted becomes a leaf, with what was signed beside it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

from lamina.admit.key import PrivateKey
from lamina.admit.register import Beside, Entry, Known, Lost, Register
from lamina.ledger import ring
from lamina.ledger.at import Moved
from lamina.ledger.entering import Entering
from lamina.ledger.errors import LedgerError
from lamina.ledger.ledger import Ledger
from lamina.ledger.opening import Contract, check_contract, follow, open_or_create
from lamina.ledger.presence import Presence
from lamina.ledger.view import head_of
from lamina.plan.policy import Policy

BATCH = 1000  # contributions that are entered together: one transaction, one sync
_TRIES = 1000  # how often others may be quicker than one batch


class LedgerRegister:
    """A `Register` over an open ledger; of any number of gates, in any number of processes.

    Whoever is there by the same attestation stands and takes no new place; whoever was withdrawn stays out. Each batch
    is decided by what the ledger says at that moment, and appended only if nothing was appended in between: no class
    ever holds more than it declares, and nobody is in twice. A kill leaves whole batches; admitting
    again completes them.

    The policy of the gate must be in force in the ledger (`opening.follow`). With the ledger's key a checkpoint covers
    all of it in the end.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._presence = Presence(ledger)

    def look(self, entries: Sequence[Entry]) -> Sequence[Known]:
        def once() -> Sequence[Known]:
            with self.ledger.store.read() as rows:
                return self._presence.look(rows, entries)

        return self.ledger.patiently(once)

    def members(self, cls: str) -> int:
        def once() -> int:
            now = self.ledger.now()
            with self.ledger.store.read() as rows:
                return self._presence.standing(rows, cls, now)

        return self.ledger.patiently(once)

    def enter(self, entries: Iterable[Entry], beside: Beside) -> Lost:
        ring.follow_ring(self.ledger, beside.keys)
        lost: Lost = {}
        rest = iter(entries)
        while part := list(islice(rest, BATCH)):
            lost |= self._enter(part, beside)
        if self.ledger.signs and not self.ledger.patiently(lambda: _covered(self.ledger)):
            self.ledger.checkpoint()
        return lost

    def _enter(self, entries: Sequence[Entry], beside: Beside) -> Lost:
        """One batch. What somebody else appends in between makes it begin again."""
        batch = Entering(self.ledger, self._presence, entries, beside)
        for _ in range(_TRIES):
            self.ledger.patiently(batch.decide)
            try:
                batch.write()
            except Moved:
                continue
            return batch.lost
        raise LedgerError(
            "ledger.others-written-times",
            f"others have written {_TRIES} times while {len(entries)} contributions waited",
            "try again later",
        )


@contextmanager
def registered(
    ledger: Ledger | Register | str | os.PathLike[str],
    policy: Policy,
    *,
    key: PrivateKey | None = None,
    clock: Callable[[], float] = time.time,
) -> Iterator[Register]:
    """A register of whatever is given: a place where a ledger is or will be, an open ledger, or a register.

    A ledger follows the policy first. One that was opened here is closed in the end.
    """
    if not isinstance(ledger, Ledger | str | os.PathLike):
        yield ledger
        return
    contract = Contract.of_policy(policy)
    opened = ledger if isinstance(ledger, Ledger) else open_or_create(ledger, contract, key, clock=clock)
    try:
        check_contract(opened, contract)
        follow(opened, contract)
        yield LedgerRegister(opened)
    finally:
        if opened is not ledger:
            opened.close()


def _covered(ledger: Ledger) -> bool:
    with ledger.store.read() as rows:
        signed = rows.checkpoint()
        return signed is not None and signed.size == head_of(rows).size
