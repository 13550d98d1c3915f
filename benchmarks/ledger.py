"""What a ledger costs: appends, proofs, replay, opening for a decision, verification, memory, disk, and pruning.

    python benchmarks/ledger.py [--leaves 1000000] [--batch 1000] [--postgres URL | --no-postgres] [--no-pruning]
                                [--fast-paths] [--out FILE]

Stores take turns, block by block, in one run, with two floors beside them: `disk` appends the same bytes to a file and
syncs after each batch, `rows` inserts the same leaves into a bare SQLite table with the same durability. A rate counts
the time inside `append`; `with_making` counts making the records as well. Without a URL the server of the tests is
started.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import apsw

from lamina import cbor
from lamina.codec import schema_of
from lamina.ledger import contribution_columns
from lamina.ledger import records as leaf_records
from lamina.ledger.governance_records import NO_POLICY, ClassBounds, Header, Key, LedgerFloors, Role, sign_header
from lamina.ledger.merkle import Frontier, leaf_hashes
from lamina.ledger.records import (
    ContributionBody,
    ContributionRecord,
    ContributionTerms,
    KeptContribution,
    Record,
    decode_leaf,
    encode_leaf,
    encode_record,
)
from lamina.ledger.retention import Retention
from lamina.ledger.verify.verifier import verify
from lamina.ledger.writer import Ledger
from lamina.sign.keys import PrivateKey

ORIGIN = "benchmark.example/ledger"
START = 1_800_000_000
TERMS = ContributionTerms("clinical", "ecg", 1_000_000, 4_310_000, "top 0.25")
CONTRIBUTOR = PrivateKey.generate().public
BLOCK = 10  # batches of one store before the next has its turn


class Appender:
    """One store: seconds, records, and the rate over the last tenth."""

    def __init__(self, name: str, append: Callable[[list[Record]], object]) -> None:
        self.name, self._append = name, append
        self.seconds, self.processor, self.making, self.records = 0.0, 0.0, 0.0, 0
        self.recent: list[tuple[int, float]] = []

    def block(self, batch: int) -> None:
        began = time.perf_counter()
        batches = [made(batch) for _ in range(BLOCK)]
        ready, processor = time.perf_counter(), time.process_time()
        for records in batches:
            self._append(records)
        ended = time.perf_counter()
        self.processor += time.process_time() - processor
        self.making += ready - began
        self.seconds += ended - ready
        self.records += batch * BLOCK
        self.recent.append((batch * BLOCK, ended - ready))

    def figures(self) -> dict[str, float]:
        last = self.recent[-max(1, len(self.recent) // 10) :]
        best = max(records / seconds for records, seconds in self.recent)
        return {
            "per_second": self.records / self.seconds,
            "per_processor_second": self.records / self.processor,
            "per_second_last_tenth": sum(n for n, _ in last) / sum(s for _, s in last),
            "per_second_best_block": best,
            "with_making": self.records / (self.seconds + self.making),
        }


def made(count: int) -> list[Record]:
    found: list[Record] = []
    for _ in range(count):
        some = os.urandom(64)
        found.append(
            ContributionRecord(
                descriptor=some[:32],
                attestation=some[32:64],
                key=CONTRIBUTOR.id,
                not_before=START - 1,
                expires=START + 10,
                terms=TERMS,
            )
        )
    return found


def header(key: PrivateKey) -> Header:
    owner = PrivateKey.generate()
    made = Header(
        origin=ORIGIN,
        accountant="pld",
        version="benchmark",
        delta=1e-5,
        floors=LedgerFloors(),
        presets=(ClassBounds(cls="clinical", clip_norm=1_000_000, noise_multiplier=1_000_000, profile="top 0.25"),),
        policy=NO_POLICY,
        retention=100,
        keys=(
            Key(name=ORIGIN, x=key.public.x, role=Role.LEDGER),
            Key(name="owner.example", x=owner.public.x, role=Role.GOVERNING),
            Key(name="hospital.example", x=CONTRIBUTOR.x, role=Role.CONTRIBUTOR),
        ),
    )
    return sign_header(made, [owner])


def disk_floor(path: Path) -> Callable[[list[Record]], object]:
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)

    def append(records: list[Record]) -> None:
        os.write(file, b"".join(part or b"" for record in records for part in encode_leaf(record, 70_000, START, 1)))
        os.fsync(file)

    return append


def rows_floor(path: Path) -> Callable[[list[Record]], object]:
    db = apsw.Connection(str(path))
    db.pragma("journal_mode", "wal")
    db.pragma("synchronous", "FULL")
    db.execute("CREATE TABLE leaf (seq INTEGER PRIMARY KEY, kind INTEGER, data BLOB, body BLOB)")
    at = 0

    def append(records: list[Record]) -> None:
        nonlocal at
        with db:
            rows = [(at + n, 2, *encode_leaf(record, at + n, START, 1)) for n, record in enumerate(records)]
            db.executemany("INSERT INTO leaf VALUES (?, ?, ?, ?)", rows)
        at += len(records)

    return append


def reading(ledger: Ledger) -> dict[str, float]:
    """Proofs from cold and from warm tiles, and a replay without signatures."""
    size, coin = ledger.size, random.Random(1)
    places = [coin.randrange(size) for _ in range(300)]
    found: dict[str, float] = {}
    for name in ("prove_cold_ms", "prove_warm_ms"):
        began = time.perf_counter()
        for seq in places:
            ledger.prove(seq, size)
        found[name] = (time.perf_counter() - began) / len(places) * 1e3
    began = time.perf_counter()
    for seq in places:
        ledger.consistent(seq, size)
    found["consistency_ms"] = (time.perf_counter() - began) / len(places) * 1e3
    found["proof_hashes"] = len(ledger.prove(places[0], size))
    began, frontier, part = time.perf_counter(), Frontier(), []
    for _, data in ledger.raw_leaves():
        decode_leaf(data)
        part.append(data.leaf)
        if len(part) == 4096:
            frontier.extend(leaf_hashes(part))
            part.clear()
    frontier.extend(leaf_hashes(part))
    found["replay_per_second"] = size / (time.perf_counter() - began)
    assert frontier.root() == ledger.root
    return found


def deciding(where: str, key: PrivateKey, clock: Callable[[], float]) -> dict[str, float]:
    """Open the ledger as a command that decides: hash all leaves, derive withdrawals, attempts and keys."""
    wall, processor = time.perf_counter(), time.process_time()
    with Ledger.open(where, key, clock=clock) as ledger, ledger.store.read() as rows:
        leaves = ledger.checked(rows)
        leaves.withdrawals(rows)
        leaves.attempts(rows)
        leaves.find(rows, [b"d" + bytes(15)])
    return {
        "deciding_seconds": time.perf_counter() - wall,
        "deciding_processor_seconds": time.process_time() - processor,
    }


def verifying(ledger: Ledger) -> dict[str, float]:
    """Replay everything but attestations, of which these records have none, as `lamina ledger verify` does."""
    wall, processor = time.perf_counter(), time.process_time()
    found = verify(ledger.store, signatures=False, now=START)
    assert found.verified, found.problem
    return {
        "verify_per_second": found.size / (time.perf_counter() - wall),
        "verify_per_processor_second": found.size / (time.process_time() - processor),
    }


def without_fast_paths(ledger: Ledger, key: PrivateKey, clock: Callable[[], float]) -> dict[str, float]:
    """Processor time with each fast path switched off, over that with it: a path stays if this is above 3.

    columns     contributions read one by one instead of as columns (contribution_columns.py)
    decoding    `decode_leaf` by the general decoder (records.py)
    encoding    `encode_record` by the general encoder
    """

    def seconds(work: Callable[[], object]) -> float:
        began = time.process_time()
        work()
        return time.process_time() - began

    def decide() -> object:
        return deciding(ledger.store.where, key, clock)

    def check() -> object:
        return verify(ledger.store, signatures=False, now=START)

    def decode() -> None:
        for _, data in ledger.raw_leaves():
            decode_leaf(data)

    def encode() -> None:
        for record in batch:
            encode_record(record)

    def encode_generally() -> None:
        for record in batch:
            assert isinstance(record, ContributionRecord)
            terms = record.terms
            kept = KeptContribution(
                descriptor=record.descriptor, expires=record.expires, cls=terms.cls, clip_norm=terms.clip_norm,
                noise_multiplier=terms.noise_multiplier, subject=record.subject,
            )  # fmt: skip
            body = ContributionBody(
                attestation=record.attestation, key=record.key, not_before=record.not_before, data_class=terms.data_class,
                profile=terms.profile, anchor=record.anchor,
            )  # fmt: skip
            for part in (kept, body):
                cbor.encode(schema_of(type(part)).to_cbor(part))

    batch = made(10_000)
    before = {work: seconds(work) for work in (decide, check, decode, encode)}
    found = {"encoding": seconds(encode_generally) / before[encode]}
    with patch.object(contribution_columns, "_FEWEST_ROWS", 1 << 62):
        found |= {
            "columns, deciding": seconds(decide) / before[decide],
            "columns, verify": seconds(check) / before[check],
        }
    with patch.object(leaf_records, "_read_contribution", lambda data: None):
        found["decoding"] = seconds(decode) / before[decode]
    return found


def megabytes_on_disk(ledger: Ledger) -> float:
    """SQLite: the file and its WAL; PostgreSQL: tables with their indexes."""
    if not ledger.store.remote:
        file = Path(ledger.store.name)
        return sum(each.stat().st_size for each in file.parent.glob(f"{file.name}*")) / 1e6
    with ledger.store.read() as rows:
        (found,) = rows._db.rows(
            "SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0)::int8 FROM pg_class c "
            "JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = ? AND c.relkind = 'r'",
            ledger.store.name.rpartition("#")[2],
        )
    return int(found[0]) / 1e6


def pruning(ledger: Ledger, clock: list[float]) -> dict[str, float]:
    clock[0] += 10_000
    retention = Retention(ledger)
    began = time.perf_counter()
    aggregate = retention.propose()
    assert aggregate is not None
    proposed = time.perf_counter()
    retention.prune(aggregate)
    pruned = time.perf_counter()
    ledger.store.compact()
    return {
        "propose_seconds": proposed - began,
        "prune_seconds": pruned - proposed,
        "mb_after": megabytes_on_disk(ledger),
    }


@contextmanager
def server(url: str | None, wanted: bool) -> Iterator[str | None]:
    if url is not None or not wanted:
        yield url
        return
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
    postgres = importlib.import_module("postgres")
    bin = postgres.binaries()
    if bin is None:
        yield None
        return
    started = postgres.Server(bin, on_disk=True)
    started.start()
    try:
        yield started.url(f"bench_{os.getpid()}")
    finally:
        started.stop("immediate")
        started.remove()


def measure(leaves: int, batch: int, url: str | None, folder: Path, prune: bool, fast_paths: bool) -> dict[str, Any]:
    key, clock = PrivateKey.generate(), [float(START)]
    ledgers = {"sqlite": Ledger.create(str(folder / "ledger.db"), header(key), key, clock=lambda: clock[0])}
    if url is not None:
        ledgers["postgres"] = Ledger.create(url, header(key), key, clock=lambda: clock[0])
    turns = [Appender(name, ledger.append) for name, ledger in ledgers.items()]
    turns += [Appender("rows", rows_floor(folder / "rows.db")), Appender("disk", disk_floor(folder / "disk"))]
    memory: dict[int, float] = {}
    sizes: dict[int, dict[str, float]] = {}
    marks = [10**n for n in range(3, 9)]
    while turns[0].records < leaves:
        for each in turns:
            each.block(batch)
        if marks and turns[0].records >= marks[0]:
            mark = marks.pop(0)
            memory[mark] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            sizes[mark] = {name: megabytes_on_disk(ledger) for name, ledger in ledgers.items()}
            shown = ", ".join(f"{each.name} {each.records / each.seconds:,.0f}/s" for each in turns)
            print(f"{turns[0].records:>10,}: {shown}; {memory[mark]:.0f} MB", file=sys.stderr)
    result: dict[str, Any] = {
        "leaves": leaves,
        "batch": batch,
        "load": os.getloadavg()[0],
        "append": {each.name: each.figures() for each in turns},
        "peak_memory_mb": memory,
        "size_mb": sizes,
    }
    gc.collect()
    for name, ledger in ledgers.items():
        began = time.perf_counter()
        ledger.checkpoint()
        result[name] = {"checkpoint_ms": (time.perf_counter() - began) * 1e3, **reading(ledger)}
        result[name] |= deciding(
            url if name == "postgres" and url else str(folder / "ledger.db"), key, lambda: clock[0]
        )
        result[name] |= verifying(ledger)
        if fast_paths and name == "sqlite":
            result[name]["without_fast_paths"] = without_fast_paths(ledger, key, lambda: clock[0])
        result[name] |= pruning(ledger, clock) if prune else {}
        ledger.close()
    return result


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--leaves", type=int, default=1_000_000)
    options.add_argument("--batch", type=int, default=1000)
    options.add_argument("--postgres", default=None)
    options.add_argument("--no-postgres", action="store_true")
    options.add_argument("--no-pruning", action="store_true")
    options.add_argument("--fast-paths", action="store_true")
    options.add_argument("--out", type=Path, default=None)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder, server(given.postgres, not given.no_postgres) as url:
        found = measure(given.leaves, given.batch, url, Path(folder), not given.no_pruning, given.fast_paths)
        text = json.dumps(found, indent=2)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
