"""`verify`: replay a ledger from leaf 0 and report the first thing that is wrong. Needs neither payloads nor torch."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from time import time as system_time

from lamina.errors import EncodingError, LedgerDamaged, LedgerError, StoreError
from lamina.ledger.append_rules import Place, check_record
from lamina.ledger.checked_leaves import admission_token
from lamina.ledger.contribution_columns import other_kinds
from lamina.ledger.governance_records import (
    Aggregate,
    GoverningRecord,
    Header,
    PolicyChange,
    Release,
    Withdrawal,
    check_policy_digest,
)
from lamina.ledger.key_state import GovernanceState, KeyState, PolicyInForce, leaf_bytes
from lamina.ledger.merkle import Frontier, TileNodes, leaf_hashes, root_at
from lamina.ledger.open_rows import OpenHead
from lamina.ledger.records import (
    KIND_NAMES,
    LAST_SEQ,
    LEAF_STARTS,
    ContributionRecord,
    Epoch,
    Leaf,
    Record,
    decode_leaf,
    kind_name,
)
from lamina.ledger.run_history import RecordedRuns
from lamina.ledger.run_records import RunBegin, RunRecord
from lamina.ledger.store.rows import LeafBlock, LedgerHead, Store, StoredLeaf, StoreReader, tile_reader
from lamina.ledger.store.sqlite import make_store
from lamina.ledger.verify.contribution_checks import (
    AdmittedMembers,
    AttestationChecks,
    ContributionChecks,
    WithdrawalChecks,
    check_position,
)
from lamina.ledger.verify.epoch_checks import EpochChecks, check_time_rounded
from lamina.ledger.verify.release_checks import ReleaseChecks
from lamina.ledger.verify.report import UnrecordedSpend, Verification, report, unrecorded_spend
from lamina.ledger.verify.tree_checks import (
    LEAF,
    SIGNED_ANEW,
    STORE,
    TRUSTED_KEYS,
    AggregateChecks,
    AggregateTallies,
    CheckpointChecks,
    Finding,
    KnownCheckpoint,
    KnownCheckpointChecks,
    ReplayedTree,
    Trust,
    VerificationStopped,
    fail,
    fail_unreadable,
    known_checkpoints,
)
from lamina.plan.depth_profile import PROFILE_SCHEMA
from lamina.sign.keys import CLOCK_SKEW


def read_head(rows: StoreReader) -> LedgerHead:
    found = rows.head()
    if found is None or found.size < 1:
        reason = "the ledger has no head: it was never started, or its head was deleted"
        fail(None, STORE, "verify.head-missing", reason)
    return found


def read_header(rows: StoreReader) -> Header:
    data = rows.leaf(0)
    if data is None:
        fail(0, LEAF, "verify.header-missing", "the ledger has no header: leaf 0 was deleted")
    leaf = _decode(0, data)
    if not isinstance(leaf.record, Header):
        fail(0, leaf.kind, "verify.header-missing", "the ledger does not begin with a header")
    return leaf.record


def _decode(index: int, data: StoredLeaf) -> Leaf:
    try:
        return decode_leaf(data)
    except EncodingError as error:
        fail_unreadable(index, error)


def read_aggregates(rows: StoreReader, head: LedgerHead) -> dict[int, Aggregate]:
    """Return the aggregates by leaf: the leaves that they cover come before them."""
    found: dict[int, Aggregate] = {}
    for seq, data in rows.beginning(LEAF_STARTS[Aggregate], 0, head.size):
        try:
            record = decode_leaf(data).record
        except EncodingError:
            continue  # reported when it is reached
        if isinstance(record, Aggregate):
            found[seq] = record
    return found


@contextmanager
def _broken_rules(seq: int, kind: type[Record]) -> Iterator[None]:
    """Stop the replay at this leaf if it breaks a rule of the ledger."""
    try:
        yield
    except LedgerError as error:
        fail(seq, kind, error.code, error.problem)


def check_head(rows: StoreReader, head: LedgerHead, frontier: Frontier, time: int, epoch: int) -> None:
    """Check that the head in the store matches the leaves."""
    if (beyond := next(rows.leaves(head.size, LAST_SEQ), None)) is not None:
        reason = f"the head counts {head.size} leaves, this one comes after them: it was inserted"
        fail(beyond[0], LEAF, "verify.leaf-beyond-head", reason)
    if head.frontier != frontier.encode():
        reason = "the tree frontier in the head is not that of the leaves"
        fail(head.size - 1, STORE, "verify.head-differs", reason)
    if (head.time, head.epoch) != (time, epoch):
        reason = f"the head says time {head.time} and {head.epoch} epochs, the leaves say {time} and {epoch}"
        fail(head.size - 1, STORE, "verify.head-differs", reason)


def check_attempts(rows: StoreReader, attempts: Mapping[tuple[bytes, int, int], int]) -> None:
    """Check that the store lists the epoch of every attempt, and no other."""
    listed = {each[:3]: each.seq for each in rows.attempts()}
    for attempt in sorted(listed.keys() | attempts.keys()):
        if (found := listed.get(attempt)) != (seq := attempts.get(attempt)):
            run, segment, generation = attempt
            name = f"segment {segment}, generation {generation} of run {run.hex()[:8]}"
            reason = f"the store says that {name} is in leaf {found}, the leaves say {seq}"
            fail(seq, STORE, "verify.attempt-index-differs", reason)


def check_open_rows(rows: StoreReader, keys: KeyState, size: int, newest: int) -> bool:
    """Check the signed head over open charges and reservations; False if they are unsigned."""

    def extends(count: int, root: bytes) -> bool:
        return count <= size and root_at(TileNodes(tile_reader(rows)), count) == root

    try:
        found = OpenHead.check(rows, keys, newest, extends, lambda seq: StoredLeaf(leaf_bytes(rows, seq), None))
        return found is not None
    except LedgerDamaged as error:
        if error.code != "ledger.open-rows-differ":
            raise
        fail(None, STORE, "verify.open-rows-differ", error.problem)


def check_tokens(rows: StoreReader, found: ContributionChecks) -> None:
    """Check that the store lists the token of every attestation that was admitted, and no others but of pruned ones."""
    real = {admission_token(pair[:32], pair[32:]): seq for pair, seq in found.repeats.tokens.items()}
    listed = rows.all_tokens()
    if missing := real.keys() - listed:
        reason = "the store does not list the token of its attestation, which could be admitted again"
        fail(min(real[each] for each in missing), STORE, "verify.token-index-differs", reason)
    if len(listed) - len(real) > found.pruned:
        fail(None, STORE, "verify.token-index-differs", "the store lists tokens of attestations that are not there")


Progress = Callable[[int, int], None]
_WITH_FINDINGS_OF_THEIR_OWN = {Withdrawal, Aggregate}  # their checks apply the same rules, and say more


class LedgerReplay:
    """One replay of a ledger, in one view of its store. What was read stays here when a finding stops it.

    1. Sizes of rows, head, header, and the signatures of its owners (`__init__`).
    2. Every leaf in order, none missing (`run`), in stretches that end where a checkpoint does, so that the first finding
       is of the first leaf:
       a. its hash is that in the tree (`_stretch`);
       b. a block of contributions is checked as columns (`ContributionChecks`), any other leaf by itself (`_record`): its
          encoding, its place, the append rule of its kind, and what the kind asks beyond that (`_see`);
       c. a checkpoint of this size has this root, and a key signed it that may (`_reach`).
    3. What the store lists agrees with the leaves (`_finish`).
    4. What no leaf shows by itself: generations, exhausted bounds, pruned bodies.
    5. Known checkpoints and trusted keys.
    6. The signed head over open rows.
    Afterwards (`verify_rows`): repeated contributions, and every ε, computed again.
    """

    def __init__(
        self,
        rows: StoreReader,
        *,
        trust: Trust | None,
        seen: Sequence[KnownCheckpoint],
        signatures: bool,
        now: int | None,
        cosigned: bool = True,
    ) -> None:
        if (wrong := rows.too_long()) is not None:
            fail(None, STORE, "verify.row-too-long", wrong)
        self._rows, self._latest = rows, (int(system_time()) if now is None else now) + CLOCK_SKEW
        self.head = read_head(rows)
        self.header = read_header(rows)
        self._trust, self._seen = trust, KnownCheckpointChecks(seen, self.header.origin)
        with _broken_rules(0, Header):
            self.keys = GovernanceState(self.header, leaf_bytes(rows, 0))
        self.policy = PolicyInForce(self.header)
        ring = None if trust is None else trust.contributors()
        checks = AttestationChecks(self.header.origin, self.keys.header_hash, self.keys, ring)
        self.attestations = checks if signatures else None
        self._tallies = AggregateTallies(read_aggregates(rows, self.head))
        self.tree = ReplayedTree(rows, self._tallies)
        self.withdrawals = WithdrawalChecks(rows, self.keys, ring)
        self._members = AdmittedMembers(self.policy, self.keys, self.withdrawals.targets)
        self.contributions = ContributionChecks(
            self.policy, self.keys, self.attestations, self._tallies, ring, self._members, self._latest
        )
        self.epochs = EpochChecks(self.header, rows, self.policy, self.withdrawals, self._members)
        self.runs = RecordedRuns()
        self.releases = ReleaseChecks(self.header, rows)
        self.aggregates = AggregateChecks(self.header, self.keys, self._tallies)
        self.pinned: set[bytes] = set() if trust is None else trust.governing(self.header, now)
        self.beyond_signed: list[str] = []
        self.unsure_exhaustions = 0  # bounds that were scaled or left out before the leaves show why
        trusted = None  # the ledger's own keys count
        if trust is not None:
            mine = [each for each in trust.keys(self.header.origin, now) if each.id not in self.pinned]
            trusted = mine if mine or not self.pinned else None
        self._known, stored, at = trusted, list(rows.checkpoints()), self._latest - CLOCK_SKEW
        self.checkpoints = CheckpointChecks(self.header, stored, trusted, trust, at, cosigned=cosigned)
        self.others: dict[int, type[Record]] = {}
        self.held: tuple[UnrecordedSpend, ...] = ()
        self.open_signed = True  # whether the ledger key signed what is open
        self.unrecorded = 0
        self._time = self._epoch = 0
        signed, size = self.checkpoints.sizes(), self.head.size
        self._cuts = iter(sorted({*signed, *self._seen.sizes(size), size}))
        self._cut = next(self._cuts)

    @property
    def counts(self) -> dict[str, int]:
        """Leaves by kind."""
        found = Counter(KIND_NAMES[kind] for kind in self.others.values())
        found[KIND_NAMES[ContributionRecord]] = self.contributions.count
        return {**{word: found[word] for word in KIND_NAMES.values()}, "pruned": self.contributions.pruned}

    def run(self, progress: Progress | None = None) -> None:
        """Replay all leaves; raises VerificationStopped at the first finding."""
        # 2. Every leaf in order, none missing.
        self._reach()
        for seqs, block in self._rows.blocks(0, self.head.size):
            for first, data in _consecutive_leaves(seqs, block):
                self._refuse_gap(first)
                self._take(data)
            if progress is not None:
                progress(self.tree.size, self.head.size)
        self._refuse_gap(self.head.size)
        self._finish()

    def _refuse_gap(self, stop: int) -> None:
        if (first := self.tree.size) < stop:
            fail(first, LEAF, "verify.leaf-missing", "it is missing: it was deleted")

    def _take(self, data: LeafBlock) -> None:
        """Read consecutive leaves, in stretches up to the next checkpoint."""
        at = 0
        while at < len(data):
            stop = min(len(data), at + self._cut - self.tree.size)
            self._stretch(data.part(at, stop))
            at = stop
            self._reach()

    def _stretch(self, data: LeafBlock) -> None:
        first, hashes = self.tree.size, leaf_hashes(data.leaves)
        wrong = self.tree.differs(hashes)
        self._records(first, data if wrong is None else data.part(0, wrong))
        if wrong is not None:
            kind, reason = kind_name(data.leaves[wrong]) or LEAF, "its hash is not the one in the tree: it was edited"
            fail(first + wrong, kind, "verify.leaf-edited", reason)
        self.tree.extend(hashes)

    def _records(self, first: int, data: LeafBlock) -> None:
        evidence = {}
        if self.attestations is not None and len(data):
            evidence = dict(self._rows.evidences(first, first + len(data)))
        at = 0
        for stop in chain(other_kinds(data), [len(data)]):
            if at < stop:
                block = data.part(at, stop)
                self._time = self.contributions.block(first + at, block, self._time, self._epoch, evidence)
            if stop < len(data):
                self._record(first + stop, data[stop])
            at = stop + 1

    def _record(self, index: int, data: StoredLeaf) -> None:
        leaf = _decode(index, data)
        check_position(leaf, index, self._time, self._epoch, self._latest)
        with _broken_rules(leaf.seq, leaf.kind):
            if leaf.kind not in _WITH_FINDINGS_OF_THEIR_OWN:
                check_record(leaf.record, self._place(leaf))
        self._see(leaf, data.leaf)
        self.others[index] = leaf.kind
        self._time, self._epoch = leaf.time, self._epoch + (leaf.kind is Epoch)

    def _place(self, leaf: Leaf) -> Place:
        return Place(
            rows=self._rows, header=self.header, seq=leaf.seq, time=leaf.time, governance=lambda: self.keys,
            root_of=self.checkpoints.roots.get, runs=lambda: self.runs,
        )  # fmt: skip

    def _see(self, leaf: Leaf, data: bytes) -> None:
        if isinstance(record := leaf.record, Header):
            with _broken_rules(leaf.seq, leaf.kind):
                check_policy_digest(self.header.origin, record.floors, record.policy)
        match leaf.record:
            case Header(profile_schema=version) if version != PROFILE_SCHEMA:
                reason = f"depth profiles have schema {version}, this program knows {PROFILE_SCHEMA}"
                fail(0, Header, "verify.profile-schema-unknown", reason)
            case change if isinstance(change, GoverningRecord):
                self.keys.apply(change, leaf.seq, data)
                if isinstance(change, PolicyChange):
                    self.policy.change(leaf.seq, change)
            case Epoch() as epoch:
                plan = self.epochs.see(leaf, self._time, self.checkpoints.digests)
                self.runs.see(epoch)
                self.releases.charge(epoch, plan)
            case change if isinstance(change, RunRecord):
                check_time_rounded(leaf, self._time, self.header.epoch_clock)
                self.runs.see(change)
                if isinstance(change, RunBegin):
                    self.epochs.begins.setdefault(change.run, leaf.seq)
                elif change.public_number:
                    self.epochs.see_public_number(leaf.seq, change)
            case Withdrawal(target=target):
                self.withdrawals.see(leaf, 0 < target < leaf.seq and target not in self.others)
            case Aggregate():
                self.aggregates.see(leaf, self.withdrawals.targets, self.epochs.spent, self._members.of_class)
            case Release():
                self.releases.see(leaf, self.epochs.runs, self.runs.ends)

    def _reach(self) -> None:
        """Check the checkpoints of this tree size, if there are any."""
        while self.tree.size == self._cut:
            size, root = self.tree.size, self.tree.root()
            self.checkpoints.reached(size, root, self._time, self.keys)
            self._seen.reached(size, root)
            self._cut = next(self._cuts, -1)

    def _finish(self) -> None:
        # 3. What the store lists agrees with the leaves.
        size = self.head.size
        check_head(self._rows, self.head, self.tree.frontier, self._time, self._epoch)
        self.checkpoints.finish(size)
        check_attempts(self._rows, self.epochs.attempts)
        if self.attestations is not None:
            check_tokens(self._rows, self.contributions)
        # 4. What no leaf shows by itself.
        self.held = unrecorded_spend(self._rows)
        held = [(each.run, each.segment, each.generation) for each in self._rows.holds() if each.attempt]
        self.unrecorded = self.epochs.check_generations(held if self._trust is None else ())
        self.beyond_signed = self.epochs.beyond_signed()
        self.unsure_exhaustions = self.epochs.check_exhausted(any(each.attempts or each.budgets for each in self.held))
        self._check_pruned()
        # 5. Known checkpoints and trusted keys.
        self._seen.finish(size, self.checkpoints.accepted(self.keys).values())
        self._check_trust()
        # 6. The signed head over open rows.
        newest = max((seq for seq, kind in self.others.items() if kind in (Epoch, RunBegin)), default=-1)
        self.open_signed = check_open_rows(self._rows, self.keys, size, newest)

    def _check_pruned(self) -> None:
        """Check that a checkpoint covers every aggregate of which bodies are gone."""
        for seq in (seq for seq, kind in self.others.items() if kind is Aggregate):
            tally = self._tallies.of(seq)
            if tally is not None and tally.pruned and seq >= self.checkpoints.signed_size:
                reason = "bodies of its leaves are pruned, and no checkpoint covers it"
                fail(seq, Aggregate, "verify.pruned-without-checkpoint", reason)

    def _check_trust(self) -> None:
        good, size = self.checkpoints.signed_size, self.head.size
        if self._trust is None and not self._seen:
            return
        if good < size:
            reason = f"no checkpoint covers leaves [{good}, {size}): nobody has signed them yet"
            fail(good, TRUSTED_KEYS, "verify.leaves-unsigned", reason)
        if self._known is not None and self.checkpoints.trusted < size:
            if not self._known:
                reason = f"none of the trusted keys is for ledger {self.header.origin!r}"
                fail(self.checkpoints.trusted, TRUSTED_KEYS, "verify.no-trusted-key-for-ledger", reason)
            reason = f"no trusted key signed the checkpoints from here on: {SIGNED_ANEW}"
            fail(self.checkpoints.trusted, TRUSTED_KEYS, "verify.trusted-signature-missing", reason)


def _consecutive_leaves(seqs: Sequence[int], block: LeafBlock) -> Iterator[tuple[int, LeafBlock]]:
    """The block in parts without gaps."""
    start = 0
    if seqs[-1] - seqs[0] != len(seqs) - 1:  # the keys of a table are distinct and sorted
        for at in range(1, len(seqs)):
            if seqs[at] != seqs[at - 1] + 1:
                yield seqs[start], block.part(start, at)
                start = at
    yield seqs[start], block.part(start, len(seqs))


def verify(
    where: str | os.PathLike[str] | Store,
    *,
    trust: Trust | None = None,
    seen: Iterable[str | bytes | KnownCheckpoint] = (),
    signatures: bool = True,
    now: int | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Replay a ledger from leaf 0 and report the first thing that is wrong.

    It checks the form, order, hashes and times of all leaves; every checkpoint, its root and its signature; the bounds
    of contributions against floors and classes, and (unless `signatures` is false) their attestations; key events,
    policy changes, withdrawals, aggregates and releases; and every spend, computed again from the plans by the header's
    accountant. Bodies may be missing only of contributions that an aggregate stands for.

    Without `trust` and `seen` this shows that a ledger is consistent in itself and signed by keys that it names itself:
    whoever can write all of it can make such a ledger. With `trust` keys from elsewhere must have signed it; with
    `seen` it must continue every checkpoint that was kept before. `now` is the time of the verifier, by default that of
    the clock: leaves must not be of later.
    """
    known = known_checkpoints(seen)
    opened: Store | None = None
    try:
        store = opened = make_store(where, readonly=True) if isinstance(where, str | os.PathLike) else where
        with store.read() as rows:
            return verify_rows(rows, trust, known, signatures, now, progress)
    except (LedgerDamaged, StoreError) as error:
        if opened is None and not isinstance(error, LedgerDamaged):
            raise
        return Verification(problem=Finding(None, STORE, "verify.store-unreadable", error.problem))
    finally:
        if opened is not None and opened is not where:
            opened.close()


def verify_rows(
    rows: StoreReader, trust: Trust | None = None, seen: Sequence[KnownCheckpoint] = (), signatures: bool = True,
    now: int | None = None, progress: Progress | None = None, *, cosigned: bool = True,
) -> Verification:  # fmt: skip
    """`verify`, in a view of a store or inside a transaction. The newest checkpoint may have to be `cosigned` or not."""
    replay: LedgerReplay | None = None
    problem: Finding | None = None
    try:
        replay = LedgerReplay(rows, trust=trust, seen=seen, signatures=signatures, now=now, cosigned=cosigned)
        replay.run(progress)
    except VerificationStopped as error:
        problem = error.problem
    except (TypeError, ValueError, LedgerDamaged) as error:  # text or nothing where a store has bytes
        if isinstance(error, LedgerDamaged) and error.code != "store.row-wrong-type":
            raise
        at = None if replay is None else replay.tree.size
        what = error.problem if isinstance(error, LedgerDamaged) else f"a row of the store holds a wrong type: {error}"
        problem = Finding(at, STORE, "verify.row-wrong-type", what)
    if replay is None:
        return Verification(problem=problem)
    found = (problem, replay.contributions.repeats.first(rows), _first_wrong_spend(replay, problem))
    real = [each for each in found if each is not None]
    return report(replay, min(real, key=lambda f: 1 << 63 if f.index is None else f.index, default=None), trust)


def _first_wrong_spend(replay: LedgerReplay, problem: Finding | None) -> Finding | None:
    """The first spend that the accountant does not confirm; those after `problem` are not computed."""
    for claim in replay.epochs.claims:
        if problem is not None and problem.index is not None and claim.seq >= problem.index:
            return None
        if (found := claim.finding(replay.header)) is not None:
            return found
    return None
