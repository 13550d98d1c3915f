"""The tables of a ledger, and how older ones become them. One step per version; a step is never changed again.

leaf        the leaves that are there: index, kind, bytes
tile        hashes of the tree, by level·2^56 + index
head        one row: where the ledger stands. In PostgreSQL whoever writes holds its lock
checkpoint  every checkpoint that was signed, with its signatures
evidence    bytes of which a leaf holds the digest, by the leaf's index
blob        bytes that several leaves may refer to, by their digest
known       keys under which leaves are found, but those of the last ones: see lookup.Tail
attempt     (run, segment, generation) of every epoch: each at most once
withdrawn   contributions that were withdrawn
pruning     aggregates, and whether what they stand for is gone
writer      the last batch of each writer: whether a commit whose answer was lost took place
run         runs that reserved or were charged
held        what has no leaf: the reservation of a run's plan, and attempts that are open
terms       the bound at which an account was last found to have room
token       (key, token) of attestations that were admitted, hashed: none is admitted twice
meta        version of the tables
"""

from __future__ import annotations

from lamina.ledger.errors import LedgerError
from lamina.ledger.store.rows import Database

# {number}, {bytes}, {sorted}: what the dialects call a 64-bit integer, bytes, and a table kept in order of its key
STEPS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE leaf (seq {number} PRIMARY KEY, kind INTEGER NOT NULL, data {bytes} NOT NULL)",
        "CREATE INDEX leaf_kind ON leaf (kind, seq) WHERE kind <> 2",
        "CREATE TABLE tile (id {number} PRIMARY KEY, data {bytes} NOT NULL)",
        "CREATE TABLE head (id INTEGER PRIMARY KEY CHECK (id = 1), size {number} NOT NULL, time {number} NOT NULL, "
        "epoch {number} NOT NULL, indexed {number} NOT NULL, frontier {bytes} NOT NULL)",
        "CREATE TABLE checkpoint (size {number} PRIMARY KEY, text TEXT NOT NULL, seal {bytes} NOT NULL)",
        "CREATE TABLE evidence (seq {number} PRIMARY KEY, data {bytes} NOT NULL)",
        "CREATE TABLE blob (digest {bytes} PRIMARY KEY, data {bytes} NOT NULL)",
        "CREATE TABLE known (key {bytes} NOT NULL, seq {number} NOT NULL, PRIMARY KEY (key, seq)) {sorted}",
        "CREATE TABLE attempt (run {bytes} NOT NULL, segment {number} NOT NULL, generation {number} NOT NULL, "
        "seq {number} NOT NULL, PRIMARY KEY (run, segment, generation)) {sorted}",
        "CREATE TABLE withdrawn (target {number} PRIMARY KEY, seq {number} NOT NULL)",
        "CREATE TABLE pruning (seq {number} PRIMARY KEY, done INTEGER NOT NULL)",
        "CREATE TABLE writer (id {bytes} PRIMARY KEY, token {bytes} NOT NULL, seqs {bytes} NOT NULL, "
        "day {number} NOT NULL) {sorted}",
        "CREATE TABLE meta (name TEXT PRIMARY KEY, value {bytes} NOT NULL) {sorted}",
    ),
    (
        "CREATE TABLE run (id {bytes} PRIMARY KEY, label TEXT NOT NULL, day {number} NOT NULL, "
        "finished INTEGER NOT NULL) {sorted}",
        "CREATE TABLE held (run {bytes} NOT NULL, segment {number} NOT NULL, generation {number} NOT NULL, "
        "nonce {bytes} NOT NULL, leaf {number}, body {bytes} NOT NULL, "
        "PRIMARY KEY (run, segment, generation)) {sorted}",
        "CREATE TABLE terms (account TEXT PRIMARY KEY, body {bytes} NOT NULL) {sorted}",
        "CREATE TABLE token (key {bytes} PRIMARY KEY) {sorted}",
    ),
)
VERSION = len(STEPS)


def migrate(db: Database, found: int, words: dict[str, str]) -> int:
    """Bring tables of version `found` (0: there are none) up to date, inside a transaction; the new version."""
    if found > VERSION:
        raise LedgerError(
            "store.ledger-tables-version",
            f"the ledger has tables of version {found}, this program knows {VERSION}",
            "open it with a newer program",
        )
    for step in STEPS[found:]:
        for statement in step:
            db.rows(statement.format(**words).strip())
    return VERSION
