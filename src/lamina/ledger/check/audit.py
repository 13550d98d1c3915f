"""`Audit`: one replay of a ledger, from leaf 0, in one view of its store.

    rows of the store ──► places ──► hashes ──► records ──► tree ──► checkpoints
                          in order   = tiles    by kind     roots    signed

Leaves are taken in stretches that end where a checkpoint does, so that what is found first is what comes first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice

from lamina.errors import EncodingError
from lamina.ledger import leaf as leaves
from lamina.ledger.check import opening
from lamina.ledger.check import store as beside
from lamina.ledger.check.aggregates import Aggregates
from lamina.ledger.check.attestations import Attestations
from lamina.ledger.check.checkpoints import Checkpoints
from lamina.ledger.check.columns import other_kinds
from lamina.ledger.check.contributions import Contributions, check_place
from lamina.ledger.check.epochs import Epochs
from lamina.ledger.check.keys import Keys
from lamina.ledger.check.plans import Plans
from lamina.ledger.check.policy import PolicyInForce
from lamina.ledger.check.problem import LEAF, TRUST, bad
from lamina.ledger.check.releases import check_release
from lamina.ledger.check.report import Held
from lamina.ledger.check.seen import ANEW, SeenBefore
from lamina.ledger.check.tallies import Tallies
from lamina.ledger.check.tree import Tree
from lamina.ledger.check.trust import Seen, Trust
from lamina.ledger.check.withdrawals import Withdrawals
from lamina.ledger.hashing import leaf_hashes
from lamina.ledger.leaf import Leaf
from lamina.ledger.records import (
    WORDS,
    Admitted,
    Aggregate,
    Epoch,
    Header,
    KeyEvent,
    PolicyChange,
    Record,
    Release,
    Withdrawal,
)
from lamina.ledger.store.base import Reader
from lamina.plan.profile import PROFILE_SCHEMA

CHUNK = 4096  # leaves that are in memory at a time
Progress = Callable[[int, int], None]


class Audit:
    """Reads every leaf once. `run` ends without an error or with `Bad`; what was seen until then stays in here."""

    def __init__(
        self, rows: Reader, *, trust: Trust | None, seen: Sequence[Seen], signatures: bool, now: int | None
    ) -> None:
        self._rows = rows
        self.head = opening.head(rows)
        self.header = opening.header(rows)
        self._trust, self._seen = trust, SeenBefore(seen, self.header.origin)
        self.keys = Keys(self.header, None if trust is None else trust.ring)
        self.policy = PolicyInForce(self.header)
        self.attestations = Attestations(self.header.origin, self.keys) if signatures else None
        self._tallies = Tallies(opening.aggregates(rows, self.head))
        self.tree = Tree(rows, self._tallies)
        self.contributions = Contributions(self.policy, self.keys, self.attestations, self._tallies)
        self.withdrawals = Withdrawals(rows)
        self.epochs = Epochs(
            self.header, Plans(rows, self.policy), self.policy, self.withdrawals, self.contributions.living
        )
        self.aggregates = Aggregates(self.header, self.keys, self._tallies)
        trusted = None if trust is None else trust.keys(self.header.origin, now)
        self._known = bool(trusted)
        self.checkpoints = Checkpoints(self.header, list(rows.checkpoints()), trusted)
        self.others: dict[int, type[Record]] = {}
        self.pruned = 0
        self.held: tuple[Held, ...] = ()
        self._time = self._epoch = 0
        signed, size = self.checkpoints.sizes(), self.head.size
        self._cuts = iter(sorted({*signed, *self._seen.sizes(signed, self._tallies, size), size}))
        self._cut = next(self._cuts)

    @property
    def counts(self) -> dict[str, int]:
        """Leaves by kind."""
        found = Counter(WORDS[kind] for kind in self.others.values())
        found[WORDS[Admitted]] = self.contributions.count
        return {**{word: found[word] for word in WORDS.values()}, "pruned": self.pruned}

    # ----------------------------------------------------------------------------------- leaves

    def run(self, progress: Progress | None = None) -> None:
        """Replay."""
        self._reach()
        rows = self._rows.leaves(0, self.head.size)
        while part := list(islice(rows, CHUNK)):
            for first, data in _stretches(part):
                if first < self.tree.size:
                    bad(first, LEAF, "verify.twice", "it is there twice")
                self._skip(first)
                self._take(data)
            if progress is not None:
                progress(self.tree.size, self.head.size)
        self._skip(self.head.size)
        self._finish()

    def _take(self, data: Sequence[bytes]) -> None:
        """Leaves that follow each other, cut where a checkpoint is."""
        at = 0
        while at < len(data):
            stop = min(len(data), at + self._cut - self.tree.size)
            self._stretch(data[at:stop])
            at = stop
            self._reach()

    def _stretch(self, data: Sequence[bytes]) -> None:
        first, hashes = self.tree.size, leaf_hashes(data)
        wrong = self.tree.differs(hashes)
        self._records(first, data if wrong is None else data[:wrong])
        if wrong is not None:
            kind = _kind(data[wrong])
            bad(
                first + wrong,
                kind,
                "verify.hash-not-tree",
                "its hash is not the one in the tree: it was edited",
            )
        self.tree.extend(hashes)

    def _records(self, first: int, data: Sequence[bytes]) -> None:
        evidence = {}
        if self.attestations is not None and data:
            evidence = dict(self._rows.evidences(first, first + len(data)))
        at = 0
        for stop in chain(other_kinds(data), [len(data)]):
            if at < stop:
                block = data[at:stop]
                self._time = self.contributions.block(first + at, block, self._time, self._epoch, evidence)
            if stop < len(data):
                self._record(first + stop, data[stop])
            at = stop + 1

    def _record(self, index: int, data: bytes) -> None:
        try:
            leaf = leaves.decode(data)
        except EncodingError as error:
            bad(
                index,
                LEAF,
                "verify.not-encoding-record",
                f"it is not the one encoding of a record: {error.problem}",
            )
        check_place(leaf, index, self._time, self._epoch)
        if (index == 0) != (leaf.kind is Header):
            bad(
                index,
                leaf.kind,
                "verify.ledger-begins-header",
                "a ledger begins with its header" if index == 0 else "a header comes first and once",
            )
        self._see(leaf)
        self.others[index] = leaf.kind
        self._time, self._epoch = leaf.time, self._epoch + (leaf.kind is Epoch)

    def _see(self, leaf: Leaf) -> None:
        match leaf.record:
            case Header(profile_schema=version) if version != PROFILE_SCHEMA:
                bad(
                    0,
                    Header,
                    "verify.depth-profiles-schema",
                    f"depth profiles are of schema {version}, this program knows {PROFILE_SCHEMA}",
                )
            case KeyEvent():
                self.keys.apply(leaf)
                self.checkpoints.see(leaf)
            case PolicyChange():
                self.policy.change(leaf, self.keys)
            case Epoch():
                ended = leaf.time + self.header.epoch_clock  # at the latest: its time is rounded down
                self.epochs.see(
                    leaf,
                    self._time,
                    self.checkpoints.digests,
                    lambda bound, before: self.contributions.eligible(bound, before, ended),
                )
            case Withdrawal(target=target):
                self.withdrawals.see(leaf, 0 < target < leaf.seq and target not in self.others)
                self.contributions.gone(target)
            case Aggregate():
                self.aggregates.see(leaf, self.withdrawals.targets, self.epochs.spent)
            case Release():
                check_release(leaf, self.epochs.runs, self._rows)

    # ----------------------------------------------------------------------------------- what is gone

    def _skip(self, stop: int) -> None:
        """Leaves that are not there: an aggregate stands for them, or they were deleted."""
        while (first := self.tree.size) < stop:
            found = self._tallies.covering(first)
            if found is None:
                bad(
                    first,
                    LEAF,
                    "verify.not-no-aggregate",
                    "it is not there, and no aggregate stands for it: it was deleted",
                )
            end = min(stop, found[0].stop, self._cut)
            self._tallies.gone(first, end, self._time)
            self.tree.skip(end)
            self.pruned += end - first
            self._reach()

    # ----------------------------------------------------------------------------------- checkpoints

    def _reach(self) -> None:
        """The tree has come to the next size that somebody signed."""
        while self.tree.size == self._cut:
            size, root = self.tree.size, self.tree.root()
            self.checkpoints.reached(size, root, self._time, self.keys)
            self._seen.reached(size, root)
            self._cut = next(self._cuts, -1)

    def _finish(self) -> None:
        size = self.head.size
        beside.check_head(self._rows, self.head, self.tree.frontier, self._time, self._epoch)
        self.checkpoints.finish(size)
        beside.check_kinds(self._rows, size, self.others)
        beside.check_withdrawn(self._rows, self.withdrawals.targets)
        beside.check_attempts(self._rows, self.epochs.attempts.items())
        self.held = beside.held(self._rows)
        self._check_pruned()
        self._seen.finish(size, self.checkpoints.accepted().values())
        self._check_trust()

    def _check_pruned(self) -> None:
        """What stands for leaves that are gone was signed before they went."""
        unsigned = [
            seq for seq, kind in self.others.items() if kind is Aggregate and seq >= self.checkpoints.good
        ]
        for seq in unsigned:
            tally = self._tallies.of(seq)
            if tally is not None and tally.present < tally.aggregate.count:
                bad(
                    seq,
                    Aggregate,
                    "verify.leaves-sums-up",
                    "leaves that it sums up are gone, and no checkpoint covers it",
                )

    def _check_trust(self) -> None:
        good, size = self.checkpoints.good, self.head.size
        if self._trust is None and not self._seen:
            return
        if good < size:
            bad(
                good,
                TRUST,
                "verify.no-checkpoint-covers",
                f"no checkpoint covers leaves [{good}, {size}): nobody has signed them yet",
            )
        if self._trust is not None and self.checkpoints.trusted < size:
            why = ANEW if self._known else f"none of the trusted keys is for a ledger, {self.header.origin!r}"
            bad(
                self.checkpoints.trusted,
                TRUST,
                "verify.no-trusted-key",
                f"no trusted key signed the checkpoints from here on: {why}",
            )


def _stretches(rows: Sequence[tuple[int, bytes]]) -> Iterator[tuple[int, list[bytes]]]:
    """Rows in runs of consecutive leaves."""
    if rows and rows[-1][0] - rows[0][0] == len(rows) - 1:  # the keys of a table are distinct and sorted
        yield rows[0][0], [data for _, data in rows]
        return
    start = 0
    for at in chain((k for k in range(1, len(rows)) if rows[k][0] != rows[k - 1][0] + 1), [len(rows)]):
        yield rows[start][0], [data for _, data in rows[start:at]]
        start = at


def _kind(data: bytes) -> str:
    try:
        return WORDS[leaves.decode(data).kind]
    except EncodingError:
        return LEAF
