"""`Ledger`: what was admitted, spent, withdrawn and released, in an order that nobody can change unseen."""

from __future__ import annotations

import hashlib
import os
import time as system
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from lamina import cbor
from lamina.admit.key import PrivateKey
from lamina.ledger import allowed
from lamina.ledger import checkpoint as notes
from lamina.ledger.appending import Batch, Stand
from lamina.ledger.clock import next_time
from lamina.ledger.errors import LedgerError
from lamina.ledger.frontier import Frontier
from lamina.ledger.lookup import Tail
from lamina.ledger.parties import Parties
from lamina.ledger.receipt import Seal
from lamina.ledger.records import Aggregate, Header, KeyEvent, Record
from lamina.ledger.signing import check_signs, standing
from lamina.ledger.store import make_store
from lamina.ledger.store.base import Head, LastBatch, Signed, Store, Writer
from lamina.ledger.store.errors import Damaged, StoreLost
from lamina.ledger.view import View, head_of

T = TypeVar("T")
Clock = Callable[[], float]
DAY = 86_400
PATIENCE = 60.0  # seconds for which a server that went away is waited for


class Ledger(View):
    """An append-only record over a store. Several may be open on one store, in any number of processes.

    Promises. A record that `append` returned for is durable, and its place never changes. What a checkpoint says was
    committed before it was signed, and no two checkpoints of one size differ. Every state that a reader can see has
    head, leaves and tiles that agree, whatever was killed when.

    Nothing about the ledger is remembered between calls but its header and tiles, which only grow: each transaction
    reads the head under the writer's lock. So writers take turns and cannot fork it.
    """

    def __init__(
        self, store: Store, key: PrivateKey | None, *, clock: Clock = system.time, patience: float = PATIENCE
    ) -> None:
        super().__init__(store)
        self._key, self._clock, self._patience = key, clock, patience
        self._id = os.urandom(16)  # names this writer in the store

    @classmethod
    def create(
        cls,
        where: str | os.PathLike[str],
        header: Header,
        key: PrivateKey,
        *,
        clock: Clock = system.time,
        patience: float = PATIENCE,
    ) -> Ledger:
        """A new ledger, in a new file or in a database ("postgresql://…"), with its header as leaf 0."""
        batch, empty, now = Batch([header], ()), Head(0, 0, 0, 0, Frontier().encode()), next_time(0, clock())
        check_signs(Parties(header), key, now)
        store = make_store(where, create=True)
        try:
            with store.write() as rows:
                if rows.head() is not None:
                    raise LedgerError(
                        "ledger.ledger-already",
                        f"there is a ledger already in {store.name}",
                        "open it, or give another place",
                    )
                batch.write(rows, Stand(empty, now, header.epoch_clock, None, Tail()))
            made = cls(store, key, clock=clock, patience=patience)
            made.checkpoint()
        except BaseException:
            store.close()
            raise
        return made

    @classmethod
    def open(
        cls,
        where: str | os.PathLike[str],
        key: PrivateKey | None = None,
        *,
        clock: Clock = system.time,
        patience: float = PATIENCE,
    ) -> Ledger:
        """A ledger that is there. Without a key it is read and appended to, but signs no checkpoint."""
        store = make_store(where)
        try:
            return cls(store, key, clock=clock, patience=patience)
        except BaseException:
            store.close()
            raise

    @property
    def signs(self) -> bool:
        """Whether it was opened with a key."""
        return self._key is not None

    # ----------------------------------------------------------------------------------- appending

    def append(self, records: Sequence[Record], blobs: Iterable[bytes] = ()) -> list[int]:
        """Append records, all or none, durably; the leaf of each, in order.

        `blobs` are the bytes of which records hold the digest: attestations, plans, manifests, requests. A
        contribution, segment or withdrawal that is in the ledger already, with the same content, is not appended again:
        its leaf is the one that it has. With another content it is refused.
        """
        allowed.refuse_reserved(records)
        return self._append(records, blobs)

    def append_with(
        self, records: Sequence[Record], blobs: Iterable[bytes], more: Callable[[Writer, list[int]], None]
    ) -> list[int]:
        """`append`, and what `more` writes beside, in one transaction; if it raises, nothing was appended."""
        allowed.refuse_reserved(records)
        return self._append(records, blobs, more)

    def append_aggregate(self, record: Aggregate, more: Callable[[Writer, list[int]], None]) -> list[int]:
        """For `Retention`: append an aggregate, with what it writes beside."""

        def whole(rows: Writer, seqs: list[int]) -> None:
            self._index(rows)
            more(rows, seqs)

        return self._append([record], (), whole)

    def _append(
        self,
        records: Sequence[Record],
        blobs: Iterable[bytes] = (),
        more: Callable[[Writer, list[int]], None] | None = None,
    ) -> list[int]:
        """`more` writes beside the records, in their transaction."""
        batch = Batch(records, blobs)
        token = os.urandom(16)

        def work(rows: Writer) -> list[int]:
            last = rows.batch(self._id) if self.store.remote else None
            if last is not None and last.token == token:
                return list(cbor.decode(last.seqs, max_size=1 << 30))  # committed, and the answer was lost
            head = head_of(rows)
            now = next_time(head.time, self._clock())
            allowed.check(
                rows,
                batch.others,
                self.header,
                head.size,
                now,
                lambda: standing(rows, self.header, head.size),
            )
            signed = rows.checkpoint()
            previous = None if signed is None else digest_of(signed.text)
            seqs = batch.write(rows, Stand(head, now, self.header.epoch_clock, previous, self._tail))
            if more is not None:
                more(rows, seqs)
            if self.store.remote:
                if last is None:
                    rows.forget_writers(now // DAY - 1)
                rows.put_batch(self._id, LastBatch(token, cbor.encode(seqs, max_size=1 << 30)), now // DAY)
            return seqs

        if not batch.records:
            return []
        with self._turn:
            seqs = self.transact(work)
            if batch.grown:
                self._tail.grow(batch.grown, batch.stop)
        return seqs

    def _index(self, rows: Writer) -> None:
        """Put the keys of all leaves into the store's index: the leaves that have them may go."""
        head = head_of(rows)
        if head.indexed < head.size:
            self._tail.index(rows, ())
            rows.put_head(head._replace(indexed=head.size))

    # ----------------------------------------------------------------------------------- checkpoints

    def checkpoint(self) -> str:
        """Sign what is committed, and publish it; what was signed at this size before is given again.

        Commit, then sign, then publish: the first transaction forces everything that it read to the disk, also what a
        process left that was killed before its own commit returned. Only then is there a signature.
        """
        if (key := self._key) is None:
            raise LedgerError(
                "ledger.ledger-opened-without",
                "the ledger was opened without its key",
                "open it with the key that signs checkpoints",
            )

        def settle(rows: Writer) -> tuple[Head, Signed | None, Signed | None]:
            head, last = head_of(rows), rows.checkpoint()
            if (there := rows.checkpoint(head.size)) is None:
                check_signs(standing(rows, self.header, head.size), key, head.time)
                rows.put_meta("signing", head.size.to_bytes(8, "big"))
            return head, there, last

        head, there, before = self.transact(settle)
        if there is not None:
            return there.text
        tree = self._tree(head)
        seal = Seal.sign(tree, key)
        signed = Signed(tree.size, tree.signed(key), seal.kid + seal.signature)

        def publish(rows: Writer) -> str:
            last = rows.checkpoint()
            if last is not None and last.size > tree.size:  # another process was quicker, and went further
                return last.text
            if last is not None and last.size == tree.size:
                if notes.parse(last.text)[0] != tree:
                    raise Damaged(
                        "ledger.two-checkpoints-leaves",
                        f"two checkpoints of {tree.size} leaves differ",
                        "find out who signed the other",
                    )
                return last.text
            if last != before:  # a checkpoint came between, and may cover that this key was replaced
                check_signs(standing(rows, self.header, tree.size), key, head.time)
            rows.put_checkpoint(signed)
            return signed.text

        return self.transact(publish)

    def check_signs(self, after: Iterable[KeyEvent] = ()) -> None:
        """LedgerError unless these key events may come next, and its key may sign the checkpoint over them."""
        if (key := self._key) is None:
            raise LedgerError(
                "ledger.ledger-opened-without",
                "the ledger was opened without its key",
                "open it with the key that signs checkpoints",
            )
        with self.store.read() as rows:
            head = head_of(rows)
            parties, now = standing(rows, self.header, head.size), next_time(head.time, self._clock())
        for event in after:
            allowed.check_event(event, parties, now)
            parties.apply(event)
        check_signs(parties, key, now)

    def cosigned(self, text: str) -> str:
        """Add the signatures of a copy of a checkpoint, as it came back from a witness; all that there are now."""
        found, _ = notes.parse(text)

        def add(rows: Writer) -> str:
            there = rows.checkpoint(found.size)
            if there is None:
                raise LedgerError(
                    "ledger.no-checkpoint-leaves",
                    f"no checkpoint of {found.size} leaves was signed here",
                    "give one of this ledger",
                )
            all_signed = notes.joined(there.text, text)
            rows.put_checkpoint(there._replace(text=all_signed))
            return all_signed

        return self.transact(add)

    # ----------------------------------------------------------------------------------- inside

    def now(self) -> int:
        """The time that a leaf would get."""
        with self.store.read() as rows:
            return next_time(head_of(rows).time, self._clock())

    def as_of(self) -> int:
        """The same for who only looks: a clock that is behind is no reason to refuse that."""
        with self.store.read() as rows:
            return max(head_of(rows).time, int(self._clock()))

    def transact(self, work: Callable[[Writer], T]) -> T:
        """One transaction; again, if the server went away in the middle, until patience ends."""

        def once() -> T:
            with self.store.write() as rows:
                return work(rows)

        return self.patiently(once)

    def patiently(self, work: Callable[[], T]) -> T:
        """What may be done again from the beginning: again, while the server is away, until patience ends."""
        give_up, pause = system.monotonic() + self._patience, 0.05
        while True:
            try:
                return work()
            except StoreLost:
                if system.monotonic() + pause > give_up:
                    raise
                system.sleep(pause)
                pause = min(2 * pause, 2.0)


def digest_of(text: str) -> bytes:
    """What an epoch says of the checkpoint before it: SHA-256 of what was signed, without the signatures."""
    _, note = notes.parse(text)
    return hashlib.sha256(note.text.encode()).digest()
