"""A process that works on a ledger until it is killed, and what must be true of the ledger afterwards.

The worker is a fork that writes a line after each thing that returned. Nothing of it is shared with the test but that
file: it is killed with SIGKILL in the middle of whatever it does then.
"""

from __future__ import annotations

import os
import random
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from making import LEDGER, START, admitted, digest, epoch

from lamina.ledger import retention, signed_checkpoint
from lamina.ledger.governance_records import Aggregate
from lamina.ledger.merkle import TILE_WIDTH, Frontier, leaf_hash
from lamina.ledger.records import ContributionRecord, KeptContribution, decode_leaf
from lamina.ledger.retention import Retention
from lamina.ledger.store.rows import StoredLeaf
from lamina.ledger.writer import Ledger

LIFE = 40  # seconds for which a contribution of the worker is valid


def work(where: str, acknowledged: Path, seed: int) -> None:
    """Append, sign and prune, for ever. A second passes with each leaf, so that old ones are ready to be pruned."""
    retention._LEAVES_PER_TRANSACTION = 40  # more of what happens rarely
    out = os.open(acknowledged, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    coin = random.Random(seed)
    now = [float(START)]
    ledger = Ledger.open(where, LEDGER, clock=lambda: now[0])
    while True:
        size = ledger.size
        now[0] = START + size
        deed = coin.choice(["append", "append", "sign", "prune"])
        if deed == "append":
            batch: list[Any] = [
                admitted(n, expires=START + n + LIFE, not_before=START - 1)
                for n in range(size, size + coin.choice([1, 7, 90, 300]))
            ]
            if coin.random() < 0.3:
                batch.append(epoch(size))
            seqs = ledger.append(batch)
            os.write(out, b"appended %d %d\n" % (seqs[0], seqs[-1] + 1))
        elif deed == "sign":
            found = signed_checkpoint.parse_checkpoint(ledger.checkpoint())[0]
            os.write(out, b"signed %d %s\n" % (found.size, found.root.hex().encode()))
        elif (aggregate := Retention(ledger).propose()) is not None:
            seq = Retention(ledger).prune(aggregate)
            os.write(out, b"pruned %d\n" % seq)


def kill_after(seconds: float, target: Callable[[], None], ready: Path) -> None:
    """Run `target` in a fork; once `ready` has grown, wait, and kill it."""
    before = ready.stat().st_size if ready.exists() else 0
    child = os.fork()
    if child == 0:
        try:
            target()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(3)
    deadline = time.monotonic() + 60
    while (ready.stat().st_size if ready.exists() else 0) <= before:
        ended, status = os.waitpid(child, os.WNOHANG)
        assert not ended, f"the worker ended by itself, with {status}"
        assert time.monotonic() < deadline, "the worker does nothing"
        time.sleep(0.001)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"the worker ended by itself, with {status}"


def check(ledger: Ledger, acknowledged: Path) -> None:
    """Head, rows and root agree, and nothing that was acknowledged is lost."""
    size, there = ledger.size, dict(ledger.raw_leaves())
    pruned = {
        seq
        for leaf in ledger.of_kind(Aggregate)
        if isinstance(leaf.record, Aggregate)
        for span in leaf.record.spans
        for seq in range(span.first, span.stop)
    }
    assert there.keys() == set(range(size))
    assert {seq for seq, data in there.items() if data.body is None} <= pruned
    _check_tree(ledger, there, size)
    signed = {found.size: found.root for found, _ in map(signed_checkpoint.parse_checkpoint, ledger.checkpoints())}
    assert max(signed) <= size
    for at, root in signed.items():
        assert ledger.root_at(at) == root
    records = {seq: decode_leaf(data).record for seq, data in there.items()}
    for line in acknowledged.read_text().splitlines():
        word, first, *rest = line.split()
        if word == "appended":
            assert int(rest[0]) <= size
            for seq in range(int(first), int(rest[0])):
                if isinstance(record := records[seq], ContributionRecord | KeptContribution):
                    assert record.descriptor == digest("descriptor", seq)
        elif word == "signed":
            assert signed[int(first)].hex() == rest[0]
        else:
            assert isinstance(records[int(first)], Aggregate)
    found = {
        record.descriptor: seq
        for seq, record in records.items()
        if isinstance(record, ContributionRecord | KeptContribution)
    }
    assert ledger.known(list(found)) == found


def _check_tree(ledger: Ledger, there: dict[int, StoredLeaf], size: int) -> None:
    """Every leaf hash is in its tile; tiles and edge give one root."""
    with ledger.store.read() as rows:
        for index in range(-(-size // TILE_WIDTH)):
            tile = rows.tile(0, index)
            places = range(index * TILE_WIDTH, min(size, (index + 1) * TILE_WIDTH))
            assert tile == b"".join(leaf_hash(there[seq].leaf) for seq in places)
        head = rows.head()
        assert head is not None
        assert Frontier.decode(head.frontier).size == size
        assert rows.leaf(size) is None
    assert ledger.root_at(size) == ledger.root
