"""`verify`: replay a ledger from leaf 0 and name the first thing that is wrong.

Needs its store, and neither payloads nor torch.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice

from lamina.errors import EncodingError, LedgerDamaged, StoreError
from lamina.ledger import records as leaves
from lamina.ledger.governance_records import Aggregate, Header, KeyEvent, PolicyChange, Release, Withdrawal
from lamina.ledger.merkle import Frontier, leaf_hashes
from lamina.ledger.records import KIND_NAMES, KIND_NUMBERS, ContributionRecord, Epoch, Leaf, Record
from lamina.ledger.show import pluralize
from lamina.ledger.store.interface import (
    RESERVATION_SEGMENT,
    WHOLE_BUDGET_SEGMENT,
    LedgerHead,
    RunHold,
    Store,
    StoreReader,
)
from lamina.ledger.store.open_store import make_store
from lamina.ledger.verify.contribution_checks import (
    AttestationChecks,
    ContributionChecks,
    WithdrawalChecks,
    check_position,
    other_kinds,
)
from lamina.ledger.verify.plan_checks import PlanChecks
from lamina.ledger.verify.record_checks import AggregateChecks, EpochChecks, check_release
from lamina.ledger.verify.replay_state import (
    LEAF,
    STORE,
    TRUSTED_KEYS,
    Finding,
    KnownCheckpoint,
    PolicyInForce,
    ReplayedKeys,
    Trust,
    UnrecordedSpend,
    Verification,
    VerificationStopped,
    fail,
    known_checkpoints,
)
from lamina.ledger.verify.tree_checks import (
    SIGNED_ANEW,
    AggregateTallies,
    CheckpointChecks,
    KnownCheckpointChecks,
    ReplayedTree,
)
from lamina.plan.depth_profile import PROFILE_SCHEMA


def read_head(rows: StoreReader) -> LedgerHead:
    found = rows.head()
    if found is None or found.size < 1:
        fail(
            None, STORE, "verify.ledger-no-head", "the ledger has no head: it was never begun, or its head was deleted"
        )
    return found


def read_header(rows: StoreReader) -> Header:
    data = rows.leaf(0)
    if data is None:
        fail(0, LEAF, "verify.not-every-ledger", "it is not there, and every ledger has a header: it was deleted")
    try:
        record = leaves.decode_leaf(data).record
    except EncodingError as error:
        fail(0, LEAF, "verify.not-encoding-record", f"it is not the one encoding of a record: {error.problem}")
    if not isinstance(record, Header):
        fail(0, type(record), "verify.ledger-begins-header-2", "a ledger begins with its header")
    return record


def read_aggregates(rows: StoreReader, head: LedgerHead) -> dict[int, Aggregate]:
    """What the store lists; whether it lists the right ones is seen when they are reached."""
    found: dict[int, Aggregate] = {}
    for seq, data in rows.of_kind(KIND_NUMBERS[Aggregate], 0, head.size):
        try:
            record = leaves.decode_leaf(data).record
        except EncodingError:
            continue  # named when it is reached
        if isinstance(record, Aggregate):
            found[seq] = record
    return found


_LAST_SEQ = 2**63 - 1


def check_head(rows: StoreReader, head: LedgerHead, frontier: Frontier, time: int, epoch: int) -> None:
    """The head is that of the leaves that were read."""
    beyond = next(rows.leaves(head.size, _LAST_SEQ), None)
    if beyond is not None:
        fail(
            beyond[0],
            LEAF,
            "verify.lies-beyond-leaves",
            f"it lies beyond the {head.size} leaves that the head counts: it was inserted",
        )
    try:
        stored = Frontier.decode(head.frontier)
    except EncodingError as error:
        fail(
            head.size - 1,
            STORE,
            "verify.edge-tree-head-not",
            f"the edge of the tree in the head cannot be read: {error.problem}",
        )
    if stored != frontier:
        fail(
            head.size - 1, STORE, "verify.edge-tree-head", "the edge of the tree in the head is not that of the leaves"
        )
    if (head.time, head.epoch) != (time, epoch):
        fail(
            head.size - 1,
            STORE,
            "verify.head-says-time",
            f"the head says time {head.time} and {head.epoch} epochs, the leaves {time} and {epoch}",
        )


def check_kinds(rows: StoreReader, size: int, others: Mapping[int, type[Record]]) -> None:
    """Every record that is not a contribution is found under its kind, and nothing else is."""
    for kind, number in KIND_NUMBERS.items():
        if kind is ContributionRecord:
            continue
        listed = {seq for seq, _ in rows.of_kind(number, 0, size)}
        real = {seq for seq, found in others.items() if found is kind}
        if wrong := sorted(listed ^ real):
            where = "not" if wrong[0] in real else "wrongly"
            fail(wrong[0], STORE, "verify.store-lists-leaf", f"the store lists this leaf {where} as {KIND_NAMES[kind]}")


def check_withdrawn(rows: StoreReader, withdrawals: Mapping[int, int]) -> None:
    """Whoever asks the store finds every withdrawal, and no other."""
    listed = dict(rows.withdrawals())
    for target in sorted(listed.keys() | withdrawals.keys()):
        if listed.get(target) != withdrawals.get(target):
            seq, stored = withdrawals.get(target), listed.get(target)
            reason = f"leaf {target} was withdrawn in leaf {stored} by the store, in leaf {seq} by the leaves"
            fail(target if seq is None else seq, STORE, "verify.check-withdrawn", reason)


def check_attempts(rows: StoreReader, attempts: Iterable[tuple[tuple[bytes, int, int], int]]) -> None:
    """Whoever asks the store finds the epoch of every attempt."""
    for (run, segment, generation), seq in attempts:
        if (found := rows.attempt(run, segment, generation)) != seq:
            name = f"segment {segment}, generation {generation} of run {run.hex()[:8]}"
            fail(seq, STORE, "verify.leaf-store", f"{name} is in leaf {found} by the store")


def unrecorded_spend(rows: StoreReader) -> tuple[UnrecordedSpend, ...]:
    """What runs hold of the bounds. It is the store's word: what it takes is for who writes, and is not read here."""
    labels = {run.id: run.label for run in rows.runs()}
    found: dict[bytes, list[RunHold]] = {}
    for hold in rows.holds():
        found.setdefault(hold.run, []).append(hold)
    return tuple(
        UnrecordedSpend(
            run=run,
            label=labels.get(run, ""),
            attempts=sum(hold.attempt for hold in holds),
            budgets=sum(hold.segment >= WHOLE_BUDGET_SEGMENT for hold in holds),
            reserved=any(hold.segment == RESERVATION_SEGMENT for hold in holds),
        )
        for run, holds in sorted(found.items())
    )


# `LedgerReplay`: one replay of a ledger, from leaf 0, in one view of its store.
#
#     rows of the store ──► places ──► hashes ──► records ──► tree ──► checkpoints
#                           in order   = tiles    by kind     roots    signed
#
# Leaves are taken in stretches that end where a checkpoint does, so that what is found first is what comes first.

LEAVES_AT_ONCE = 4096  # leaves that are in memory at a time
Progress = Callable[[int, int], None]


class LedgerReplay:
    """Reads every leaf once. `run` ends without an error or with `Bad`; what was seen until then stays in here."""

    def __init__(
        self,
        rows: StoreReader,
        *,
        trust: Trust | None,
        seen: Sequence[KnownCheckpoint],
        signatures: bool,
        now: int | None,
    ) -> None:
        self._rows = rows
        self.head = read_head(rows)
        self.header = read_header(rows)
        self._trust, self._seen = trust, KnownCheckpointChecks(seen, self.header.origin)
        self.keys = ReplayedKeys(self.header, None if trust is None else trust.ring)
        self.policy = PolicyInForce(self.header)
        self.attestations = AttestationChecks(self.header.origin, self.keys) if signatures else None
        self._tallies = AggregateTallies(read_aggregates(rows, self.head))
        self.tree = ReplayedTree(rows, self._tallies)
        self.contributions = ContributionChecks(self.policy, self.keys, self.attestations, self._tallies)
        self.withdrawals = WithdrawalChecks(rows)
        self.epochs = EpochChecks(
            self.header,
            PlanChecks(rows, self.policy),
            self.policy,
            self.withdrawals,
            self.contributions.longest_eligible,
        )
        self.aggregates = AggregateChecks(self.header, self.keys, self._tallies)
        trusted = None if trust is None else trust.keys(self.header.origin, now)
        self._known = bool(trusted)
        self.checkpoints = CheckpointChecks(self.header, list(rows.checkpoints()), trusted)
        self.others: dict[int, type[Record]] = {}
        self.pruned = 0
        self.held: tuple[UnrecordedSpend, ...] = ()
        self._time = self._epoch = 0
        signed, size = self.checkpoints.sizes(), self.head.size
        self._cuts = iter(sorted({*signed, *self._seen.sizes(signed, self._tallies, size), size}))
        self._cut = next(self._cuts)

    @property
    def counts(self) -> dict[str, int]:
        """Leaves by kind."""
        found = Counter(KIND_NAMES[kind] for kind in self.others.values())
        found[KIND_NAMES[ContributionRecord]] = self.contributions.count
        return {**{word: found[word] for word in KIND_NAMES.values()}, "pruned": self.pruned}

    # ----------------------------------------------------------------------------------- leaves

    def run(self, progress: Progress | None = None) -> None:
        """Replay."""
        self._reach()
        rows = self._rows.leaves(0, self.head.size)
        while part := list(islice(rows, LEAVES_AT_ONCE)):
            for first, data in _consecutive_rows(part):
                if first < self.tree.size:
                    fail(first, LEAF, "verify.twice", "it is there twice")
                self._skip_pruned(first)
                self._take(data)
            if progress is not None:
                progress(self.tree.size, self.head.size)
        self._skip_pruned(self.head.size)
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
            kind = _leaf_kind(data[wrong])
            fail(first + wrong, kind, "verify.hash-not-tree", "its hash is not the one in the tree: it was edited")
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
            leaf = leaves.decode_leaf(data)
        except EncodingError as error:
            fail(index, LEAF, "verify.not-encoding-record", f"it is not the one encoding of a record: {error.problem}")
        check_position(leaf, index, self._time, self._epoch)
        if (index == 0) != (leaf.kind is Header):
            fail(
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
                fail(
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

    def _skip_pruned(self, stop: int) -> None:
        """Leaves that are not there: an aggregate stands for them, or they were deleted."""
        while (first := self.tree.size) < stop:
            found = self._tallies.covering(first)
            if found is None:
                fail(
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
        check_head(self._rows, self.head, self.tree.frontier, self._time, self._epoch)
        self.checkpoints.finish(size)
        check_kinds(self._rows, size, self.others)
        check_withdrawn(self._rows, self.withdrawals.targets)
        check_attempts(self._rows, self.epochs.attempts.items())
        self.held = unrecorded_spend(self._rows)
        self._check_pruned()
        self._seen.finish(size, self.checkpoints.accepted().values())
        self._check_trust()

    def _check_pruned(self) -> None:
        """What stands for leaves that are gone was signed before they went."""
        unsigned = [
            seq for seq, kind in self.others.items() if kind is Aggregate and seq >= self.checkpoints.signed_size
        ]
        for seq in unsigned:
            tally = self._tallies.of(seq)
            if tally is not None and tally.present < tally.aggregate.count:
                fail(
                    seq,
                    Aggregate,
                    "verify.leaves-sums-up",
                    "leaves that it sums up are gone, and no checkpoint covers it",
                )

    def _check_trust(self) -> None:
        good, size = self.checkpoints.signed_size, self.head.size
        if self._trust is None and not self._seen:
            return
        if good < size:
            fail(
                good,
                TRUSTED_KEYS,
                "verify.no-checkpoint-covers",
                f"no checkpoint covers leaves [{good}, {size}): nobody has signed them yet",
            )
        if self._trust is not None and self.checkpoints.trusted < size:
            why = SIGNED_ANEW if self._known else f"none of the trusted keys is for a ledger, {self.header.origin!r}"
            fail(
                self.checkpoints.trusted,
                TRUSTED_KEYS,
                "verify.no-trusted-key",
                f"no trusted key signed the checkpoints from here on: {why}",
            )


def _consecutive_rows(rows: Sequence[tuple[int, bytes]]) -> Iterator[tuple[int, list[bytes]]]:
    """Rows in runs of consecutive leaves."""
    if rows and rows[-1][0] - rows[0][0] == len(rows) - 1:  # the keys of a table are distinct and sorted
        yield rows[0][0], [data for _, data in rows]
        return
    start = 0
    for at in chain((k for k in range(1, len(rows)) if rows[k][0] != rows[k - 1][0] + 1), [len(rows)]):
        yield rows[start][0], [data for _, data in rows[start:at]]
        start = at


def _leaf_kind(data: bytes) -> str:
    try:
        return KIND_NAMES[leaves.decode_leaf(data).kind]
    except EncodingError:
        return LEAF


_RUNS_SHOWN = 5  # that are named in a note


def verify(
    where: str | os.PathLike[str] | Store,
    *,
    trust: Trust | None = None,
    seen: Iterable[str | bytes | KnownCheckpoint] = (),
    signatures: bool = True,
    now: int | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Replay a ledger from leaf 0, and name the first thing that is wrong.

    Checked are: the form, order, hashes and times of all leaves; every checkpoint, its root and its signature; the
    bounds of contributions against floors and classes, and (unless `signatures` is false) their attestations; key
    events, policy changes, withdrawals, aggregates and releases; and every spend, computed anew from the plans by the
    header's accountant. What was pruned is held to what was kept of it.

    Without `trust` and `seen` that shows a ledger that is consistent in itself, signed by keys that it names itself:
    whoever can write all of it can make such a one. With `trust` the signatures must be of keys that came from
    elsewhere; with `seen` it must go on from every checkpoint that was seen before.
    """
    found = known_checkpoints(seen)
    if not isinstance(where, str | os.PathLike):
        return _verify_store(where, trust, found, signatures, now, progress)
    try:
        store = make_store(where, readonly=True)
    except LedgerDamaged as error:
        return _unreadable_report(Finding(None, STORE, "verify.verify", error.problem), 0)
    try:
        return _verify_store(store, trust, found, signatures, now, progress)
    finally:
        store.close()


def _verify_store(
    store: Store,
    trust: Trust | None,
    seen: list[KnownCheckpoint],
    signatures: bool,
    now: int | None,
    progress: Progress | None,
) -> Verification:
    try:
        with store.read() as rows:
            return _verify_rows(rows, trust, seen, signatures, now, progress)
    except (LedgerDamaged, StoreError) as error:
        return _unreadable_report(Finding(None, STORE, "verify.opened", error.problem), 0)


def _verify_rows(
    rows: StoreReader,
    trust: Trust | None,
    seen: list[KnownCheckpoint],
    signatures: bool,
    now: int | None,
    progress: Progress | None,
) -> Verification:
    audit: LedgerReplay | None = None
    problem: Finding | None = None
    try:
        audit = LedgerReplay(rows, trust=trust, seen=seen, signatures=signatures, now=now)
        audit.run(progress)
    except VerificationStopped as error:
        problem = error.problem
    except (TypeError, ValueError) as error:  # text or nothing where a store has bytes
        at = None if audit is None else audit.tree.size
        problem = Finding(at, STORE, "verify.row-holds-not", f"a row holds what does not belong there: {error}")
    if audit is None:
        assert problem is not None
        head = rows.head()
        return _unreadable_report(problem, 0 if head is None else head.size)
    problem = _first_finding(problem, audit.contributions.repeats.first(rows), _first_wrong_spend(audit, problem))
    return _report(audit, problem, trust)


def _first_wrong_spend(audit: LedgerReplay, problem: Finding | None) -> Finding | None:
    """The first spend that is not what the accountant finds; later ones than `problem` are not asked about."""
    for claim in audit.epochs.claims:
        if problem is not None and problem.index is not None and claim.seq >= problem.index:
            return None
        if (found := claim.problem(audit.header)) is not None:
            return found
    return None


def _first_finding(*found: Finding | None) -> Finding | None:
    real = [each for each in found if each is not None]
    return min(real, key=lambda each: 1 << 63 if each.index is None else each.index, default=None)


def _report(audit: LedgerReplay, problem: Finding | None, trust: Trust | None) -> Verification:
    whole = audit.tree.size == audit.head.size
    checkpoints = audit.checkpoints
    return Verification(
        verified=problem is None,
        trusted=problem is None and trust is not None,
        origin=audit.header.origin,
        size=audit.head.size,
        root=audit.tree.root() if whole else None,
        signed=checkpoints.signed_size,
        checkpoints=checkpoints.count,
        attestations=0 if audit.attestations is None else audit.attestations.checked,
        spends=len(audit.epochs.claims),
        problem=problem,
        counts=audit.counts,
        notes=tuple(_report_notes(audit, trust)) if problem is None else (),
        held=audit.held,
    )


def _report_notes(audit: LedgerReplay, trust: Trust | None) -> Iterable[str]:
    size, good = audit.head.size, audit.checkpoints.signed_size
    if trust is None:
        yield "the keys are the ledger's own word: give --trust with keys from elsewhere"
    if good < size:
        yield f"leaves [{good}, {size}) are not signed yet"
    if audit.attestations is None:
        yield "attestations were not checked"
    if audit.pruned:
        pruned = pluralize(audit.pruned, "contribution is", "contributions are")
        yield f"{pruned} pruned: only hashes are left"
    if audit.aggregates.alone:
        yield f"{pluralize(audit.aggregates.alone, 'aggregate is', 'aggregates are')} countersigned by nobody"
    if audit.epochs.epochs_without_account:
        yield (
            f"{pluralize(audit.epochs.epochs_without_account, 'epoch has', 'epochs have')} no account for a bound that an eligible "
            "contribution signed: that it was left out there is the ledger's word"
        )
    if audit.policy.alone:
        where = ", ".join(map(str, audit.policy.alone[:5]))
        yield (
            f"a policy that protects less (leaf {where}) was signed by a party that the header does not name: that it "
            "is another one than the ledger's keeper is the ledger's word"
        )
    if audit.held:
        yield _unrecorded_note(audit.held)


def _unrecorded_note(held: tuple[UnrecordedSpend, ...]) -> str:
    attempts, reserved = sum(each.attempts for each in held), sum(each.reserved for each in held)
    runs = ", ".join(map(str, held[:_RUNS_SHOWN]))
    more = f" and {len(held) - _RUNS_SHOWN} more" if len(held) > _RUNS_SHOWN else ""
    return (
        f"{pluralize(attempts, 'attempt is', 'attempts are')} held open and {pluralize(reserved, 'plan')} reserved, in no "
        f"leaf yet, and count against the bounds: of {'run' if len(held) == 1 else 'runs'} {runs}{more}"
    )


def _unreadable_report(problem: Finding, size: int) -> Verification:
    return Verification(
        verified=False,
        trusted=False,
        origin=None,
        size=size,
        root=None,
        signed=0,
        checkpoints=0,
        attestations=0,
        spends=0,
        problem=problem,
    )
