"""`LedgerFollower`: verifies what other processes append to a ledger, and states how fresh the ledger is.

The follower relies only on leaves and signatures. It hashes every leaf, from leaf 0 on, into its own tree. That tree must
have the root of the newest checkpoint, which a ledger key in force must have signed. The ledger may therefore grow, also
by being replaced with a longer copy of itself. A shorter ledger, a fork and an unreadable ledger are refused.

Freshness is a signed time: that of the newest leaf under the checkpoint, or of a later cosignature of the checkpoint by
a ledger key in force (`lamina ledger heartbeat`) or a witness. The follower's own clock is no evidence about the ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from lamina.errors import LedgerDamaged, NotVerified
from lamina.ledger.governance_records import GoverningRecord, Role, Withdrawal
from lamina.ledger.key_state import GovernanceState, checkpoint_roots
from lamina.ledger.merkle import Frontier, leaf_hashes
from lamina.ledger.reader import LedgerReader
from lamina.ledger.records import CONTRIBUTION_STARTS, Leaf, decode_kept, decode_leaf
from lamina.ledger.signed_checkpoint import LedgerCheckpoint, parse_checkpoint
from lamina.ledger.store.rows import StoredLeaf, StoreReader, head_of
from lamina.ledger.verify.tree_checks import Trust, note_signed_by
from lamina.sign.notes import NoteKey

T = TypeVar("T")
UseLeaves = Callable[[Sequence[Leaf], Sequence[Leaf]], None]  # withdrawals under the checkpoint, and later ones
_RESTORE = "restore the newest copy of the ledger, and find out who replaced it"
_SIGN = "sign it: lamina ledger checkpoint LEDGER --key KEY"


@dataclass(slots=True)
class _HashedLeaves:
    """The leaves read so far: their tree, the governing state after them, and the time of the last leaf."""

    frontier: Frontier
    state: GovernanceState
    time: int = 0

    def copy(self) -> _HashedLeaves:
        return _HashedLeaves(self.frontier.copy(), self.state.after(()), self.time)

    def read(self, rows: StoreReader, stop: int) -> list[Leaf]:
        """Read on until `stop` leaves were read; return the withdrawals among the new leaves."""
        found: list[Leaf] = []
        for first, leaves in rows.kept_blocks(self.frontier.size, stop):
            for data, leaf in _decided_by(rows, first, leaves):
                if isinstance(leaf.record, GoverningRecord):
                    self.state.see(leaf.record, leaf.seq, leaf.time, data, checkpoint_roots(rows))
                else:
                    found.append(leaf)
            self.frontier.extend(leaf_hashes(leaves))
            self.time = decode_kept(leaves[-1]).time
        self.state.size = stop
        return found


def _decided_by(rows: StoreReader, first: int, leaves: Sequence[bytes]) -> Iterator[tuple[bytes, Leaf]]:
    """Yield the withdrawals and governing records among these leaves."""
    for seq, data in enumerate(leaves, start=first):
        if data[:3] in CONTRIBUTION_STARTS or not issubclass(decode_kept(data).kind, Withdrawal | GoverningRecord):
            continue
        stored = rows.leaf(seq)
        leaf = decode_leaf(StoredLeaf(data, None if stored is None else stored.body))
        if leaf.seq != seq:
            problem = f"leaf {seq} of the ledger states the number {leaf.seq}"
            raise LedgerDamaged("ledger.leaf-misplaced", problem, _RESTORE)
        yield data, leaf


class LedgerFollower:
    """A verifying reader of a ledger that other processes extend. Not thread-safe.

    ledger  the ledger to read; it is opened again if its file was replaced or the last look failed
    trust   if its key ring names ledger keys (or witnesses), only those ledger keys (or witnesses) count
    known   a checkpoint of the ledger that was verified elsewhere: the ledger must continue it

    time    the newest signed time: all withdrawals up to it are known
    """

    def __init__(self, ledger: LedgerReader, trust: Trust, known: LedgerCheckpoint) -> None:
        self.time = 0
        self._ledger, self._trust, self._known = ledger, trust, known
        self._verified = _HashedLeaves(Frontier(), GovernanceState(ledger.header, ledger.raw(0).leaf))
        self._seen = (0, "")  # number of leaves, signed or not, and checkpoint at the last look
        self._failed = False  # whether the last look raised an error

    def look(self, use: UseLeaves, now: float) -> None:
        """Verify what is new, and pass its withdrawals to `use`. If `use` raises, the next look passes them again.

        Withdrawals that no checkpoint covers yet are passed again whenever something is new.
        """
        reopen, self._failed = self._failed or self._ledger.store.replaced(), True
        if reopen:
            self._ledger.reopen()
        with self._ledger.store.read() as rows:
            stored, leaves = rows.checkpoint(), head_of(rows).size
            if stored is None:
                raise NotVerified("ledger.not-signed", "the ledger has no checkpoint", _SIGN)
            if (leaves, stored.text) != self._seen:
                self._advance(rows, stored.text, leaves, use, int(now))
                self._seen = leaves, stored.text
        self._failed = False

    def _advance(self, rows: StoreReader, text: str, leaves: int, use: UseLeaves, now: int) -> None:
        # 1. The newest checkpoint belongs to this ledger, and its tree is not smaller than the one verified before.
        tree, note = parse_checkpoint(text)
        least = max(self._verified.frontier.size, self._known.size)
        if tree.origin != self._ledger.origin or tree.extensions:
            problem = f"the newest checkpoint of the ledger belongs to {tree.origin!r}, or has further lines"
            raise NotVerified("ledger.checkpoint-wrong-origin", problem, _RESTORE)
        if tree.size < least:
            problem = f"the ledger is signed up to {tree.size} leaves, but {least} were verified before"
            raise NotVerified("ledger.shorter-than-seen", problem, _RESTORE)

        # 2. The leaves have the roots that were signed: new ones continue the tree that was verified before.
        found, withdrawals = self._verified.copy(), list[Leaf]()
        for signed in sorted((self._known, tree), key=lambda each: each.size):
            if signed.size >= found.frontier.size:
                withdrawals += found.read(rows, signed.size)
                if found.frontier.root() != signed.root:
                    problem = f"the first {signed.size} leaves of the ledger are not those that were signed"
                    raise NotVerified("ledger.forked-from-seen", problem, _RESTORE)

        # 3. A ledger key that may sign at this place signed the checkpoint.
        state, time = found.state, found.time
        state.covered(rows.checkpoint_before(tree.size))
        keys = self._counting({each.public.id: each.public for each in state.histories(Role.LEDGER)})
        signing = (key for kid, key in keys.items() if state.why_not_signing(kid, time) is None)
        if not any(note_signed_by(note, NoteKey(tree.origin, key)) for key in signing):
            problem = f"no ledger key that may sign here signed the checkpoint of {tree.size} leaves"
            raise NotVerified("ledger.not-signed", problem, _SIGN)

        # 4. The newest signed time is that of the last leaf, or of a cosignature by a key in force.
        times = self._counting(state.cosigned(note, time, role=Role.LEDGER))
        by_ring = self._trust.names(Role.WITNESS)
        times |= self._trust.cosigned(note, time, now) if by_ring else state.cosigned(note, time)

        # 5. Withdrawals count from here on. Unsigned ones count too: they can only deny more.
        tail = (leaf for block in rows.kept_blocks(tree.size, leaves) for _, leaf in _decided_by(rows, *block))
        use(withdrawals, [leaf for leaf in tail if isinstance(leaf.record, Withdrawal)])
        self._verified, self.time = found, max(time, *times.values(), 0)

    def _counting(self, keys: Mapping[bytes, T]) -> dict[bytes, T]:
        """Return the ledger keys that count: if the key ring names ledger keys, only those."""
        if not self._trust.names(Role.LEDGER):
            return dict(keys)
        trusted = {key.id for key in self._trust.keys(self._ledger.origin)}
        return {kid: each for kid, each in keys.items() if kid in trusted}
