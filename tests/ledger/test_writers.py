"""Several writers: they take turns, or one is told to wait; there is one ledger at the end, and no fork on the way."""

from __future__ import annotations

import threading

import pytest
from forks import in_processes
from making import LEDGER, Clock, admitted, create, epoch, reopen

from lamina.errors import StoreBusy
from lamina.ledger import signed_checkpoint
from lamina.ledger.merkle import verify_consistency
from lamina.ledger.records import ContributionRecord
from lamina.ledger.store.sqlite import SqliteStore
from lamina.ledger.writer import Ledger

BATCHES, EACH = 12, 25


def write(where: str, number: int) -> None:
    """Own batches, an epoch of an own run, and a checkpoint after each; the same first batch as everybody."""
    with reopen(where) as ledger:
        shared = ledger.append([admitted(n) for n in range(10)])
        assert shared == sorted(set(shared))
        for batch in range(BATCHES):
            first = 10_000 * (number + 1) + EACH * batch
            seqs = ledger.append(
                [*(admitted(n) for n in range(first, first + EACH)), epoch(batch, run=bytes([number]) * 16)]
            )
            assert seqs == list(range(seqs[0], seqs[0] + EACH + 1))
            ledger.checkpoint()


def test_processes_that_append_at_once_make_one_ledger(where: str) -> None:
    create(where).close()
    in_processes(*(lambda number=number: write(where, number) for number in range(3)))
    with reopen(where) as ledger:
        records = [leaf.record for leaf in ledger.leaves()]
        assert len(records) == 1 + 10 + 3 * BATCHES * (EACH + 1) == ledger.size
        assert [leaf.seq for leaf in ledger.leaves()] == list(range(ledger.size))
        found = [record.descriptor for record in records if isinstance(record, ContributionRecord)]
        assert len(set(found)) == len(found) == 10 + 3 * BATCHES * EACH
        numbers = [leaf.epoch for leaf in ledger.leaves()]
        assert numbers == sorted(numbers)
        assert numbers[-1] in (3 * BATCHES, 3 * BATCHES - 1)
        head = ledger.tree()
        for text in ledger.checkpoints():  # every one that was ever signed is the beginning of the head
            old = signed_checkpoint.parse_checkpoint(text)[0]
            assert verify_consistency(old.size, head.size, ledger.consistent(old.size), old.root, head.root)


def test_threads_may_share_a_ledger(where: str) -> None:
    with create(where) as ledger:
        failed: list[BaseException] = []

        def run(number: int) -> None:
            try:
                for batch in range(6):
                    first = 1000 * number + 10 * batch
                    ledger.append([admitted(n) for n in range(first, first + 10)])
                    ledger.checkpoint()
                    assert len(ledger.known([admitted(first + 3).descriptor])) == 1
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
        assert ledger.size == 1 + 4 * 6 * 10
        assert ledger.root_at(ledger.size) == ledger.root


def test_a_writer_that_does_not_let_go_keeps_others_out_for_a_while_only(tmp_path: object) -> None:
    where = f"{tmp_path}/ledger.db"
    with create(where) as ledger, Ledger(SqliteStore(where, patience=0.1), LEDGER, clock=Clock()) as other:
        with ledger.store.write(), pytest.raises(StoreBusy):
            other.append([admitted(1)])
        assert other.append([admitted(1)]) == [1]
