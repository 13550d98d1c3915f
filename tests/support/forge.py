"""A hand that writes into the store of a ledger behind its back: clumsy, or with the ledger's own key."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from keyless import rows_of
from making import AUDITOR, GOVERNING, LEDGER, OTHER, SECOND, START

from lamina.ledger import append, merkle
from lamina.ledger import records as leaves
from lamina.ledger.governance_records import (
    Authorization,
    GoverningRecord,
    Header,
    KeyEvent,
    KeyEvents,
    PartySignature,
    sign_header,
)
from lamina.ledger.key_state import signed_record
from lamina.ledger.merkle import Frontier, leaf_hash, leaf_hashes
from lamina.ledger.records import Epoch, Leaf, Record
from lamina.ledger.signed_checkpoint import LedgerCheckpoint, TreeSignature
from lamina.ledger.store.rows import AttemptRow, LedgerHead, StoredCheckpoint, StoredLeaf, StoreWriter, tile_reader
from lamina.ledger.store.sqlite import SqliteStore
from lamina.ledger.writer import checkpoint_digest
from lamina.sign.keys import PrivateKey

KNOWN = (GOVERNING, SECOND, LEDGER, AUDITOR, OTHER)
sql = rows_of


def leaf(path: str, seq: int) -> StoredLeaf:
    return StoredLeaf(*sql(path, "SELECT data, body FROM leaf WHERE seq = ?", seq)[0])


def all_leaves(path: str) -> list[StoredLeaf]:
    return [StoredLeaf(*row) for row in sql(path, "SELECT data, body FROM leaf ORDER BY seq")]


def changed(data: StoredLeaf, **changes: Any) -> StoredLeaf:
    """The leaf with other fields of its record; seq, time and epoch of the leaf itself by these names."""
    old = leaves.decode_leaf(data)
    place = {name: changes.pop(name, getattr(old, name)) for name in ("seq", "time", "epoch")}
    return leaves.encode_leaf(dataclasses.replace(old.record, **changes), **place)


Change = Callable[[list[StoredLeaf]], list[StoredLeaf]]


def rewritten(path: str, change: Change, key: PrivateKey | None = LEDGER, *, chained: bool = True) -> None:
    """Replace the leaves, and make everything else fit them: tree, tiles, head and indexes.

    With a key, every checkpoint is signed anew, epochs name the new ones, and governing records are authorised anew by
    whoever signed them: what an operator can do who has all the keys and no scruples. Without one the old checkpoints
    stay.
    """
    kept = [StoredCheckpoint(*row) for row in sql(path, "SELECT size, text, seal FROM checkpoint ORDER BY size")]
    data = change(all_leaves(path))
    for table in ("leaf", "tile", "head", "attempt", "token", *(["checkpoint"] if key else [])):
        sql(path, f"DELETE FROM {table}")
    sql(path, "DELETE FROM meta WHERE name = 'open'")  # or sign it anew: the rows that it covers stay as they are
    origin = next(one.record.origin for one in map(read, data) if one and isinstance(one.record, Header))
    store = SqliteStore(path)
    with store.write() as rows:
        frontier, previous, tree, last = Frontier(), None, None, b""
        for size in sorted({*(one.size for one in kept if one.size <= len(data)), len(data)}):
            first = frontier.size
            for at in range(first, size) if key is not None and chained else ():
                data[at] = _authorised(_chained(data[at], previous), leaf_hash(data[0].leaf), last, tree)
                last = leaf_hash(data[at].leaf) if _governs(data[at]) or not at else last
            rows.put_tiles(
                merkle.grow_tiles(frontier, leaf_hashes([one.leaf for one in data[first:size]]), tile_reader(rows))
            )
            if key is not None:
                tree = LedgerCheckpoint(origin, size, frontier.root())
                seal = TreeSignature.sign(tree, key)
                rows.put_checkpoint(StoredCheckpoint(size, tree.signed(key), seal.kid + seal.signature))
                previous = checkpoint_digest(tree.signed(key))
        _fill(rows, data, frontier)
    store.close()


def _chained(data: StoredLeaf, previous: bytes | None) -> StoredLeaf:
    found = read(data)
    return changed(data, previous=previous) if found is not None and found.kind is Epoch else data


def _governs(data: StoredLeaf) -> bool:
    found = read(data)
    return found is not None and isinstance(found.record, GoverningRecord)


def _authorised(data: StoredLeaf, header: bytes, last: bytes, tree: LedgerCheckpoint | None) -> StoredLeaf:
    """A governing record as the next one, signed by the keys that its authorization names."""
    found = read(data)
    if found is not None and isinstance(found.record, Header):
        names = {each.key for each in found.record.signatures}
        return changed(
            data, signatures=sign_header(found.record, [one for one in KNOWN if one.public.id in names]).signatures
        )
    if found is None or not isinstance(found.record, GoverningRecord) or found.record.authorization is None:
        return data
    assert tree is not None
    given = found.record.authorization
    names = {each.key for each in given.signatures}
    fresh = Authorization(header=header, previous=last, size=tree.size, root=tree.root, expires=given.expires)
    bare = dataclasses.replace(found.record, authorization=fresh)
    return changed(
        data, authorization=signed_record(bare, [one for one in KNOWN if one.public.id in names]).authorization
    )


def asked(change: Any, *keys: PrivateKey) -> Any:
    """A governing record that `rewritten` lets these keys authorise; the owner, if none is given."""
    if isinstance(change, KeyEvent):
        change = KeyEvents(events=(change,))
    names = tuple(PartySignature(key=one.public.id, signature=bytes(64)) for one in keys or (GOVERNING,))
    blank = Authorization(
        header=bytes(32), previous=bytes(32), size=0, root=bytes(32), expires=START + 10**9, signatures=names
    )
    return dataclasses.replace(change, authorization=blank)


def _fill(rows: StoreWriter, data: list[StoredLeaf], frontier: Frontier) -> None:
    """Leaves, what the store lists of them, and the head."""
    found = [read(one) for one in data]
    rows.add("leaf", [(seq, *each) for seq, each in enumerate(data)])
    attempts: dict[tuple[bytes, int, int], int] = {}
    for seq, one in enumerate(found):
        if one is not None and isinstance(one.record, Epoch):
            attempts = {**dict.fromkeys(one.record.attempts, seq), **attempts}
    rows.add("attempt", [AttemptRow(*attempt, seq) for attempt, seq in attempts.items()])
    tokens = {token for _, evidence in rows.evidences(0, len(data)) for token in append.tokens_of(evidence)}
    rows.add("token", [(token,) for token in sorted(tokens)])
    last = next(one for one in reversed(found) if one is not None)
    epochs = sum(one is not None and one.kind is Epoch for one in found)
    rows.put_head(LedgerHead(len(data), last.time, epochs, frontier.encode()))


def read(data: StoredLeaf) -> Leaf | None:
    try:
        return leaves.decode_leaf(data)
    except Exception:
        return None


def replacing(seq: int, **changes: Any) -> Change:
    """Another content of one leaf."""

    def change(data: list[StoredLeaf]) -> list[StoredLeaf]:
        return [changed(one, **changes) if at == seq else one for at, one in enumerate(data)]

    return change


def relinked(data: list[StoredLeaf]) -> list[StoredLeaf]:
    """Numbers of leaves as they come, and the count of epochs."""
    made, epochs = [], 0
    for seq, one in enumerate(data):
        made.append(changed(one, seq=seq, epoch=epochs))
        epochs += leaves.decode_leaf(one).kind is Epoch
    return made


def appended(record: Record, seq: int | None = None) -> Change:
    """One more leaf, at the end or before `seq`, with everything after it moved on."""

    def change(data: list[StoredLeaf]) -> list[StoredLeaf]:
        at = len(data) if seq is None else seq
        time = leaves.decode_leaf(data[at - 1]).time
        return relinked([*data[:at], leaves.encode_leaf(record, at, time, 0), *data[at:]])

    return change


def sealed(path: str, key: PrivateKey, seal: PrivateKey | None = None) -> None:
    """Sign all that is there with whatever key, and ask nobody; the seal may be another's."""
    sql(path, "DELETE FROM checkpoint WHERE size = (SELECT size FROM head)")
    store = SqliteStore(path)
    with store.write() as rows:
        head = rows.head()
        assert head is not None
        origin = leaves.decode_leaf(rows.leaf(0)).record  # type: ignore[arg-type]
        assert isinstance(origin, Header)
        tree = LedgerCheckpoint(origin.origin, head.size, Frontier.decode(head.frontier).root())
        made = TreeSignature.sign(tree, seal or key)
        rows.put_checkpoint(StoredCheckpoint(head.size, tree.signed(key), made.kid + made.signature))
    store.close()
