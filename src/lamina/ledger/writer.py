"""`Ledger`: append records and sign checkpoints. And the conditional append, which refuses if others appended first."""

from __future__ import annotations

import hashlib
import os
import time as system
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import TypeVar

from lamina import cbor
from lamina.errors import LedgerDamaged, LedgerError, StoreLost
from lamina.ledger import signed_checkpoint as checkpoints
from lamina.ledger.append import AppendBatch, AppendContext, check_may_follow
from lamina.ledger.append_rules import Place
from lamina.ledger.checked_leaves import AttemptName, CheckedLeaves, WriterMark, leaf_not_allowed
from lamina.ledger.governance_records import Aggregate, GoverningRecord, Header, KeyEvent, KeyEvents, Release, Role
from lamina.ledger.key_state import (
    G,
    GovernanceState,
    KeyState,
    check_header_signed,
    check_key_may_sign,
    checkpoint_roots,
    signed_record,
)
from lamina.ledger.merkle import Frontier
from lamina.ledger.newest_state import NewestState, NewestStateFile
from lamina.ledger.open_rows import OpenHead, held_digests, open_digest
from lamina.ledger.reader import LedgerReader
from lamina.ledger.records import KIND_NAMES, ContributionRecord, Epoch, Record, decode_leaf
from lamina.ledger.run_records import RunBegin, RunEnd
from lamina.ledger.schema import next_leaf_time
from lamina.ledger.signed_checkpoint import TreeSignature
from lamina.ledger.store.rows import (
    MAX_BATCH_BYTES,
    LedgerHead,
    Store,
    StoredCheckpoint,
    StoreReader,
    StoreWriter,
    WriterBatch,
    head_of,
)
from lamina.ledger.store.sqlite import make_store
from lamina.ledger.verify.verifier import verify_rows
from lamina.sign import notes
from lamina.sign.keys import PrivateKey, format_utc

T = TypeVar("T")
Clock = Callable[[], float]
DAY_SECONDS = 86_400
_RESERVED_KINDS = {Header, Aggregate}
KEPT_BY_KEY = Release | Aggregate | RunBegin | RunEnd  # signed over only if a holder of the key wrote them
_NOT_CHECKED = "not checked: open charges and reservations. The ledger key has not signed them, so one could be missing"
RETRY_SECONDS = 60.0  # seconds for which a server that went away is waited for


class Ledger(LedgerReader):
    """An append-only record over a store. Several may be open on one store, in any number of processes.

    Promises. A record that `append` returned for is durable, and its place never changes. What a checkpoint says was
    committed before it was signed, and no two checkpoints of one size differ. Every state that a reader can see has
    head, leaves and tiles that agree, whatever was killed when.

    Each transaction reads the head under the writer's lock, so writers take turns and cannot fork it. Between calls
    it remembers the header, tiles and the facts of the checked leaves, which only grow: about 50 bytes for each leaf.
    """

    def __init__(
        self, store: Store, key: PrivateKey | None, *, governing: PrivateKey | None = None, clock: Clock = system.time,
        patience: float = RETRY_SECONDS,
    ) -> None:  # fmt: skip
        super().__init__(store)
        self._key, self._governing, self._clock, self._patience = key, governing, clock, patience
        self._id = os.urandom(16)  # names this writer in the store
        self._kept = None if key is None else NewestStateFile(key.path, self.header_hash)
        self._compared = False  # whether the ledger was compared with what is kept beside the key
        self._restores: frozenset[AttemptName] = frozenset()
        self._restoring = False  # whether epochs that the ledger lacks are being entered again
        self.notes: list[str] = []  # messages for the user

    @classmethod
    def create(
        cls, where: str | os.PathLike[str], header: Header, key: PrivateKey, *, governing: PrivateKey | None = None,
        clock: Clock = system.time, patience: float = RETRY_SECONDS,
    ) -> Ledger:  # fmt: skip
        """A new ledger, in a new file or in a database ("postgresql://…"), with its header as leaf 0.

        The header is signed by every governing key that it names (`governance_records.sign_header`).
        """
        check_header_signed(header)
        batch, empty = AppendBatch([header], ()), LedgerHead(0, 0, 0, Frontier().encode())
        now = next_leaf_time(0, clock())
        check_key_may_sign(KeyState(header), key, now)
        store = make_store(where, create=True)
        try:
            with store.write() as rows:
                if rows.head() is not None:
                    problem = f"{store.name} holds a ledger already"
                    raise LedgerError("ledger.already-exists", problem, "open it, or give another path")
                batch.write(rows, AppendContext(empty, now, header.epoch_clock, None))
                OpenHead.sign(header.origin, 1, 1, batch.frontier.root(), open_digest(rows), key).write(rows)
            made = cls(store, key, governing=governing, clock=clock, patience=patience)
            made.checkpoint()
        except BaseException:
            store.close()
            raise
        return made

    @classmethod
    def open(
        cls, where: str | os.PathLike[str], key: PrivateKey | None = None, *, governing: PrivateKey | None = None,
        clock: Clock = system.time, patience: float = RETRY_SECONDS,
    ) -> Ledger:  # fmt: skip
        """Open an existing ledger. Without a key it can be read and appended to, but signs no checkpoint.

        With a `governing` key, which belongs into other hands than the first unless the ledger is only for oneself,
        it authorises changes of keys, policy and terms by itself.
        """
        store = make_store(where)
        try:
            return cls(store, key, governing=governing, clock=clock, patience=patience)
        except BaseException:
            store.close()
            raise

    @property
    def signs(self) -> bool:
        """Whether it was opened with a key."""
        return self._key is not None

    def signing_key(self) -> PrivateKey:
        """The key that it was opened with; LedgerError if there is none."""
        if self._key is None:
            problem = f"the ledger {self.name} was opened without its key"
            raise LedgerError("ledger.opened-without-key", problem, "open it with the key that signs checkpoints")
        return self._key

    # ----------------------------------------------------------------------------------- checked leaves and open rows

    def checked(self, rows: StoreReader) -> CheckedLeaves:
        leaves = super().checked(rows)
        if not self._compared and self._kept is not None and self._kept.path is not None:
            self._kept.compared()
            newest, last = self._kept.load(), rows.checkpoint()
            try:
                self._restoring = not newest.check(self.name, self._kept.path, rows, leaves, self._restores)
            except LedgerError as error:
                with self._newer_view(leaves, error) as (view, checked):
                    newest.check(self.name, self._kept.path, view, checked, frozenset())
            if last is not None and last.size > newest.size and not self._restoring:
                root = checkpoints.parse_checkpoint(last.text)[0].root
                self._keep(NewestState.of(rows, leaves, last.size, root))
        self._compared = True
        return leaves

    @contextmanager
    def completing(self, attempts: Iterable[AttemptName]) -> Iterator[None]:
        """Let the ledger lack these attempts, which are entered again inside; afterwards its state is kept as the newest."""
        self._restores = frozenset(attempts)
        yield
        if self._restoring:
            self._restoring = False
            self.accept("what was missing was entered again from receipts of runs")

    @property
    def lacks_records(self) -> bool:
        """Whether it lacks attempts that `completing` lets it lack."""
        with self.store.read() as rows:
            self.checked(rows)
        return self._restoring

    def accept(self, why: str = "accepted by the holder of the key") -> str:
        """Accept the ledger as it is: sign its open rows, and keep its newest checkpoint instead of what was kept before.

        An operator does this after reviewing the ledger. Its leaves are not changed. Returns the line that is kept
        about it in the file beside the key.
        """
        before = NewestState() if self._kept is None else self._kept.load()
        self._compared = True
        if self._kept is not None:
            self._kept.compared()

        def work(rows: StoreWriter) -> NewestState:
            leaves, last = self.checked(rows), rows.checkpoint()
            found = self._seal(rows, None, self.governance(rows))
            if last is None:
                return found
            root = checkpoints.parse_checkpoint(last.text)[0].root
            return NewestState.of(rows, leaves, last.size, root).joined(found)

        found = self.transact(work)
        line = f"{format_utc(self.now())}: {found.size} signed leaves instead of {before.size}, {why}"
        self._keep(replace(found, accepted=(*before.accepted, line)), anew=True)
        return line

    def check_open(self, rows: StoreReader) -> OpenHead | None:
        """Return the head over the open rows; raise LedgerDamaged if they differ from what the ledger key signed last.

        If they are unsigned, a holder of the key is refused too. Without the key, it returns None and leaves a note.
        """
        leaves, keys = self.checked(rows), self.governance(rows)
        head = _open_head(rows, keys, leaves)
        if self._kept is not None and self._kept.path is not None and not self._restoring:
            kept = self._kept.load()
            try:
                kept.check_open(self.name, self._kept.path, head)
            except LedgerDamaged as error:
                with self._newer_view(leaves, error) as (view, fresh):
                    kept.check_open(self.name, self._kept.path, _open_head(view, keys, fresh))
        if head is None and self.signs:
            problem = f"the ledger key has not signed the open charges and reservations of the ledger {self.name}"
            remedy = (
                "if they were written without the key, review them with lamina spend, and sign them: "
                "lamina ledger checkpoint LEDGER --key KEY --accept; otherwise restore the ledger from a copy"
            )
            raise LedgerDamaged("ledger.open-rows-unsigned", problem, remedy)
        if head is None and _NOT_CHECKED not in self.notes:
            self.notes.append(_NOT_CHECKED)
        return head

    @contextmanager
    def _newer_view(self, leaves: CheckedLeaves, error: LedgerError) -> Iterator[tuple[StoreReader, CheckedLeaves]]:
        """The ledger as it is now, with its leaves; raises `error` if they do not continue the given ones.

        A view that was opened before another process wrote is older than what that process keeps beside the key.
        """
        size, root = leaves.size, leaves.root()
        with self.another() as ledger, ledger.store.read() as view:
            fresh = ledger.checked(view)
            if not fresh.extends(view, size, root):
                raise error
            yield view, fresh

    def change_open(self, work: Callable[[StoreWriter], T]) -> T:
        """Run a transaction that changes open rows. They are checked before the change and signed after it."""

        def once(rows: StoreWriter) -> tuple[T, NewestState]:
            before, keys = self.check_open(rows), self.governance(rows)
            done = work(rows)
            return done, self._seal(rows, before, keys)

        done, newest = self.transact(once)
        self._keep(newest)
        return done

    def _seal(self, rows: StoreWriter, before: OpenHead | None, keys: GovernanceState) -> NewestState:
        """Sign the open rows as they are now, unless the head `before` covers them; without a key, remove the head."""
        if self._key is None:
            OpenHead.remove(rows)
            return NewestState()
        head, digest = head_of(rows), open_digest(rows)
        if before is not None and before.size == head.size and before.holds(keys, digest):
            return NewestState(open=before, held=held_digests(rows))
        settled = keys.after(())
        settled.covered(head.size)  # a replaced key still signs the checkpoint over its replacement, but no open rows
        check_key_may_sign(settled, self._key, head.time)
        tree, kept = self._tree(head), None if self._kept is None else self._kept.load().open
        counter = 1 + max(0 if each is None else each.counter for each in (before, kept))
        made = OpenHead.sign(self.origin, counter, tree.size, tree.root, digest, self._key)
        made.write(rows)
        return NewestState(open=made, held=held_digests(rows))

    def _keep(self, state: NewestState, *, anew: bool = False) -> None:
        if self._kept is None or self._restoring:
            return
        wrong = self._kept.keep(state, anew=anew)
        note = f"the newest checkpoint of the ledger is not kept beside its key, so a rollback will not be noticed: {wrong}"
        if wrong is not None and note not in self.notes:
            self.notes.append(note)

    # ----------------------------------------------------------------------------------- governing

    def governance(self, rows: StoreReader | None = None) -> GovernanceState:
        """Keys, policy and terms after all leaves, each of which this writer has checked."""
        if rows is not None:
            return self._checked.follow(rows, head_of(rows))
        with self.store.read() as view:
            return self._checked.follow(view, head_of(view))

    @property
    def governs(self) -> bool:
        """Whether it was opened with a governing key that counts now."""
        if self._governing is None:
            return False
        standing = self.governance().standing(Role.GOVERNING, self.now())
        return self._governing.public.id in {key.id for key in standing}

    def propose(self, change: G, rows: StoreReader | None = None, *, days: int = 1) -> G:
        """The change as the next governing record, for governing keys to sign."""
        if rows is None:
            with self.store.read() as view:
                return self.propose(change, view, days=days)
        return self.governance(rows).proposed(change, rows, int(self._clock()) + days * DAY_SECONDS)

    def authorise(self, change: G, rows: StoreReader | None = None) -> G:
        """The same, signed by the governing key that it was opened with; LedgerError if there is none."""
        if self._governing is None:
            problem = f"the ledger {self.name} has an owner, whose governing key is not here"
            remedy = "ask its owner: lamina ledger key, policy or terms with --propose, then lamina ledger sign"
            raise LedgerError("ledger.governing-key-missing", problem, remedy)
        return signed_record(self.propose(change, rows), [self._governing])

    def govern(self, change: GoverningRecord) -> int:
        """Append an authorised change, and sign a checkpoint over it if there is a key for that; its leaf."""
        if self.signs:
            self.check_signs(change.events if isinstance(change, KeyEvents) else ())
        (seq,) = self.append([change if change.authorization is not None else self.authorise(change)])
        if self.signs:
            self.checkpoint()
        return seq

    def govern_by(self, decide: Callable[[GovernanceState], GoverningRecord | None]) -> int | None:
        """Authorise and append what `decide` makes of keys, policy and terms; decided again if they change meanwhile."""

        def decided() -> GoverningRecord | None:
            with self.store.read() as rows:
                change = decide(self.governance(rows))
                return None if change is None else self.authorise(change, rows)

        while (change := self.retry_while_lost(decided)) is not None:
            try:
                return self.govern(change)
            except LedgerError as error:
                if error.code != "ledger.authorised-out-of-turn":
                    raise
        return None

    # ----------------------------------------------------------------------------------- appending

    def append(self, records: Sequence[Record], blobs: Iterable[bytes] = ()) -> list[int]:
        """Append records, all or none, durably; the leaf of each, in order.

        `blobs` are the bytes of which records hold the digest: attestations, plans, manifests, requests. A
        contribution, segment or withdrawal that is in the ledger already, with the same content, is not appended again:
        its leaf is the one that it has. With another content it is refused.
        """
        _refuse_reserved(records)
        return self._append(records, blobs)

    def append_with(
        self, records: Sequence[Record], blobs: Iterable[bytes], also_write: Callable[[StoreWriter, list[int]], None]
    ) -> list[int]:
        """`append`, and `also_write` in the same transaction; if it raises, nothing was appended."""
        _refuse_reserved(records)
        return self._append(records, blobs, also_write)

    def append_aggregate(self, record: Aggregate, also_write: Callable[[StoreWriter, list[int]], None]) -> list[int]:
        """For `Retention`: append an aggregate."""
        return self._append([record], (), also_write)

    def _append(
        self, records: Sequence[Record], blobs: Iterable[bytes],
        also_write: Callable[[StoreWriter, list[int]], None] | None = None,
    ) -> list[int]:  # fmt: skip
        batch = AppendBatch(records, blobs)
        token, before, sealed = os.urandom(16), list[LedgerHead](), list[NewestState]()

        def work(rows: StoreWriter) -> list[int]:
            last = rows.batch(self._id) if self.store.remote else None
            if last is not None and last.token == token:
                return list(cbor.decode(last.seqs, max_size=MAX_BATCH_BYTES))  # committed, and the answer was lost
            head = head_of(rows)
            now = next_leaf_time(head.time, self._clock())
            before.append(head)
            governance = cache(lambda: self._checked.follow(rows, head))
            if self._key is not None and any(isinstance(each, KEPT_BY_KEY) for each in batch.others):
                check_key_may_sign(governance(), self._key, now)
                self._vouch(rows, head.size, now)  # otherwise no mark is set, and nobody signs over the record later
            signed = rows.checkpoint() if batch.others else None  # only epochs name it
            previous = None if signed is None else checkpoint_digest(signed.text)

            def check_new(at: Sequence[int]) -> None:
                if len(batch.others) < len(batch.records):
                    self._checked.check_next(batch.records, at, governance(), now)
                if batch.others:
                    place = Place(
                        rows=rows, header=self.header, seq=head.size, time=now, governance=governance,
                        root_of=checkpoint_roots(rows),
                    )  # fmt: skip
                    others = [one for one in map(batch.records.__getitem__, at) if type(one) is not ContributionRecord]
                    check_may_follow(others, place, lambda: self.checked(rows))

            epochs = any(isinstance(each, Epoch | RunBegin) for each in batch.others)
            opened = self.check_open(rows) if epochs or any(type(each) is Aggregate for each in batch.others) else None
            here = head, now, self.header.epoch_clock, previous, self.header_hash
            seqs = batch.write(rows, AppendContext(*here, check_new, lambda: self.checked(rows)))
            if self._key is not None and batch.after is not None:
                self._mark(rows, head, batch.frontier, governance(), now)
            if also_write is not None:
                also_write(rows, seqs)
            if epochs:
                sealed.append(self._seal(rows, opened, governance()))
            if self.store.remote:
                if last is None:
                    rows.forget_writers(now // DAY_SECONDS - 1)
                written = WriterBatch(token, cbor.encode(seqs, max_size=MAX_BATCH_BYTES))
                rows.put_batch(self._id, written, now // DAY_SECONDS)
            return seqs

        if not batch.records:
            return []
        with self.store.turn:
            seqs = self.transact(work)
            if batch.after is not None:
                new = batch.frontier, batch.hashes, batch.placed, batch.new_keys
                self._checked.wrote(before[-1], batch.after, *new)
            if sealed:
                self._keep(sealed[-1])
        return seqs

    def _mark(self, rows: StoreWriter, head: LedgerHead, tree: Frontier, keys: GovernanceState, now: int) -> None:
        """Say in the store that all leaves so far may be signed over, if they may."""
        key = self.signing_key()
        if self._checked.vouched == head.size and keys.why_not_signing(key.public.id, now) is None:
            WriterMark.sign(self.origin, tree, key).write(rows)

    def _vouch(self, rows: StoreReader, size: int, now: int) -> None:
        """Look at leaves that were written without the key; LedgerError if they may not be signed over."""
        if self._checked.vouched < size:
            check_unvouched(rows, self._checked.vouched, size, now)
            self._checked.vouched = size

    # ----------------------------------------------------------------------------------- checkpoints

    def checkpoint(self) -> str:
        """Sign what is committed, and publish it; what was signed at this size before is given again.

        Commit, then sign, then publish: the first transaction forces everything that it read to the disk, also what a
        process left that was killed before its own commit returned. Only then is there a signature.
        """
        key = self.signing_key()

        counted = list[NewestState]()

        def settle(rows: StoreWriter) -> tuple[LedgerHead, StoredCheckpoint | None, StoredCheckpoint | None]:
            head, last = head_of(rows), rows.checkpoint()
            leaves, keys = self.checked(rows), self.governance(rows)
            if self._kept is not None and self._kept.path is not None:
                counted.append(NewestState.of(rows, leaves, head.size, leaves.root()))
            if (there := rows.checkpoint(head.size)) is None:
                check_key_may_sign(keys, key, head.time)
                now = next_leaf_time(head.time, self._clock())  # nothing is signed that lies in the future
                self._vouch(rows, head.size, now)
                rows.put_meta("signing", head.size.to_bytes(8, "big"))
            return head, there, last

        head, there, before = self.transact(settle)
        if there is not None:
            return there.text
        tree = self._tree(head)
        seal = TreeSignature.sign(tree, key)
        signed = StoredCheckpoint(tree.size, tree.signed(key), seal.kid + seal.signature)

        def publish(rows: StoreWriter) -> str:
            last = rows.checkpoint()
            if last is not None and last.size > tree.size:  # another process was quicker, and went further
                return last.text
            if last is not None and last.size == tree.size:
                if checkpoints.parse_checkpoint(last.text)[0] != tree:
                    problem = f"two checkpoints of {tree.size} leaves differ"
                    raise LedgerDamaged("ledger.checkpoints-differ", problem, "find out who signed the other one")
                return last.text
            if last != before:  # a checkpoint came between, and may cover that this key was replaced
                check_key_may_sign(self.checked(rows).governance_at(rows, tree.size), key, head.time)
            rows.put_checkpoint(signed)
            return signed.text

        text = self.transact(publish)
        if counted:
            self._keep(counted[-1])
        return text

    def check_signs(self, after: Iterable[KeyEvent] = ()) -> None:
        """LedgerError unless these key events may come next, and its key may sign the checkpoint over them."""
        key = self.signing_key()
        with self.store.read() as rows:
            head = head_of(rows)
            keys, now = self.governance(rows).after(()), next_leaf_time(head.time, self._clock())
        for event in after:
            keys.check_event(event)
            keys.check_still_signed(event, now)
            keys.apply_event(event, head.size)
        check_key_may_sign(keys, key, now)

    def cosigned(self, text: str) -> str:
        """Add the signatures of a copy of a checkpoint, as it came back from a witness; all that there are now."""
        found, _ = checkpoints.parse_checkpoint(text)

        def add(rows: StoreWriter) -> str:
            there = rows.checkpoint(found.size)
            if there is None:
                problem = f"the ledger {self.name} has no checkpoint of {found.size} leaves"
                raise LedgerError("ledger.checkpoint-unknown", problem, "give a checkpoint of this ledger")
            all_signed = checkpoints.merge_signatures(there.text, text)
            rows.put_checkpoint(there._replace(text=all_signed))
            return all_signed

        return self.transact(add)

    def heartbeat(self, witness: PrivateKey | None = None) -> tuple[str, int]:
        """Cosign the newest checkpoint with the present time. Return the checkpoint and that time; add no leaf.

        Followers take that time as the age of the ledger (following.py), so an idle ledger stays fresh. The ledger key
        first signs a checkpoint over all leaves; a `witness` cosigns the newest existing one. A later heartbeat
        replaces an earlier one by the same key. Raises LedgerError if the ledger does not continue what is kept beside
        the key that it was opened with, so that a copy from a backup does not become fresh.
        """
        if witness is None:
            self.checkpoint()
        key = self.signing_key() if witness is None else witness

        def renew(rows: StoreWriter) -> tuple[str, int]:
            head, last = head_of(rows), rows.checkpoint()
            self.checked(rows)
            keys, now = self.governance(rows), int(self._clock())
            next_leaf_time(head.time, now)  # LedgerError if the clock is behind
            if last is None:
                problem = f"the ledger {self.name} has no checkpoint that could be cosigned"
                raise LedgerError("ledger.no-checkpoint", problem, "sign one: lamina ledger checkpoint --key")
            known, name = keys.history(key.public.id), self.origin
            if witness is None:
                check_key_may_sign(keys, key, now)
            elif known is None or known.key.role is not Role.WITNESS or known.problem(now, now) is not None:
                problem = f"key {key.public.name[:16]} is neither a ledger key nor a witness of {self.origin!r} now"
                remedy = "give the ledger's key, or that of a witness: lamina ledger key LEDGER lists them"
                raise LedgerError("ledger.key-may-not-cosign", problem, remedy)
            else:
                name = known.key.name
            note = checkpoints.parse_checkpoint(last.text)[1]
            earlier = notes.WitnessQuorum(0, (notes.WitnessKey(name, key.public),)).cosigned(note).get(name, 0)
            if earlier > now:
                problem = f"the checkpoint was cosigned at {format_utc(earlier)}, but the clock shows {format_utc(now)}"
                raise LedgerError("ledger.clock-behind", problem, "set the clock of this machine")
            text = note.with_signatures(notes.make_cosignature(note.text, name, key, now)).encode()
            rows.put_checkpoint(last._replace(text=text))
            return text, now

        return self.transact(renew)

    # ----------------------------------------------------------------------------------- inside

    def now(self) -> int:
        """The time that a leaf would get."""
        with self.store.read() as rows:
            return next_leaf_time(head_of(rows).time, self._clock())

    def reading_time(self) -> int:
        """The same for who only looks: a clock that is behind is no reason to refuse that."""
        with self.store.read() as rows:
            return max(head_of(rows).time, int(self._clock()))

    def transact(self, work: Callable[[StoreWriter], T]) -> T:
        """One transaction; again, if the server went away in the middle, until patience ends."""

        def once() -> T:
            with self.store.write() as rows:
                if self._compared and not self._restoring and self._kept is not None and self._kept.changed():
                    self._compared, self._restores = False, frozenset()  # another process signed something newer
                    self.checked(rows)
                return work(rows)

        return self.retry_while_lost(once)

    def retry_while_lost(self, work: Callable[[], T]) -> T:
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


def _open_head(rows: StoreReader, keys: KeyState, leaves: CheckedLeaves) -> OpenHead | None:
    newest = max(leaves.last(Epoch), leaves.last(RunBegin))
    return OpenHead.check(rows, keys, newest, partial(leaves.extends, rows), partial(leaves.leaf, rows))


def checkpoint_digest(text: str) -> bytes:
    """What an epoch says of the checkpoint before it: SHA-256 of what was signed, without the signatures."""
    _, note = checkpoints.parse_checkpoint(text)
    return hashlib.sha256(note.text.encode()).digest()


def _refuse_reserved(records: Sequence[Record]) -> None:
    for record in records:
        if type(record) in _RESERVED_KINDS:
            problem = f"a {type(record).__name__} cannot be appended"
            raise LedgerError("ledger.record-reserved", problem, "create writes the header, and prune aggregates")


def check_unvouched(rows: StoreReader, first: int, size: int, now: int) -> None:
    """LedgerError unless leaves from `first` on, which nobody wrote who has the ledger's key, may be signed over.

    All of the ledger must verify. Some records nobody but the keeper writes; and leave for a change that has ended by
    the signer's clock has ended, whatever the time of the leaf says.
    """
    for seq, data in rows.leaves(first, size):
        kind, *_, record = decode_leaf(data)
        why = "only who has the key of the ledger writes it" if isinstance(record, KEPT_BY_KEY) else ""
        if isinstance(record, GoverningRecord) and record.authorization is not None:
            why = "leave for the change has ended meanwhile" if now >= record.authorization.expires else ""
        if why:
            raise leaf_not_allowed(seq, KIND_NAMES[kind], why)
    if (found := verify_rows(rows, now=now, cosigned=False).problem) is not None:
        reason = f"{found.reason} [{found.code}]"
        raise leaf_not_allowed(first if found.index is None else found.index, found.kind, reason)


class ConcurrentAppend(Exception):
    """Somebody else appended something meanwhile. Nothing was written: decide again."""


def append_if_size(ledger: Ledger, size: int, records: Sequence[Record], blobs: Iterable[bytes] = ()) -> list[int]:
    """Make the records the leaves from `size` on; ConcurrentAppend if others stand there.

    Records that others appended meanwhile with the same content count as ours: what holds of the ledger is the same.
    """

    def check_size(rows: StoreWriter, seqs: list[int]) -> None:
        if head_of(rows).size != size + len(records):
            raise ConcurrentAppend

    try:
        return ledger.append_with(records, blobs, check_size)
    except LedgerError as error:
        if type(error) is LedgerError and ledger.size != size:  # refused, perhaps, for what others appended meanwhile
            raise ConcurrentAppend from error
        raise
