"""The ledger inside a release folder: as a whole, or pruned to what the figures need.

The pruned form (`ledger.json`) contains whole leaves of every kind but contributions and withdrawals, the plans, and for all
other leaves the hashes of the largest subtrees of the Merkle tree that cover them, so that the root of the checkpoint can be
computed. The form that a ledger keeps after its retention period is not used for it: its leaves name contributions and
subjects by digests, which are pseudonyms.

    {"type": "urn:lamina:pruned-ledger:v1", "leaves": {"<leaf>": {"leaf": "<hex>", "body": "<hex>" or null}},
     "nodes": {"<level>/<index>": "<SHA-256>"}, "plans": ["<hex>"]}

Every leaf counts the epochs before it, and the last leaf is always shown. Therefore no hidden leaf is an epoch, and every charge
is shown. `PRUNED_LIMITS` states what is not shown.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Annotated, Any, Literal, Protocol, cast

from pydantic import Field

from lamina.account.charges import Account
from lamina.errors import EncodingError, LaminaError, LedgerError, NotVerified
from lamina.ledger.append_rules import Place, check_record
from lamina.ledger.governance_records import GoverningRecord, Header, PolicyChange, Role, Withdrawal
from lamina.ledger.key_state import GovernanceState, PolicyInForce
from lamina.ledger.merkle import leaf_hash, node_hash, root_at
from lamina.ledger.reader import LedgerReader
from lamina.ledger.records import ContributionRecord, Epoch, Leaf, Record, decode_kept, decode_leaf
from lamina.ledger.run_history import RecordedRuns
from lamina.ledger.run_records import RunBegin, RunEnd
from lamina.ledger.signed_checkpoint import verify_checkpoint
from lamina.ledger.store.rows import StoredLeaf
from lamina.ledger.verify.contribution_checks import AdmittedMembers, WithdrawalChecks
from lamina.ledger.verify.epoch_checks import EpochChecks
from lamina.ledger.verify.report import Verification
from lamina.ledger.verify.tree_checks import Finding, VerificationStopped
from lamina.release.schema import Digest, Document, LedgerHead, read_document
from lamina.sign.notes import NoteKey
from lamina.sign.signed_json import canonical_json, parse_json

ENCLOSED = {"pruned": "ledger.json", "full": "ledger.db"}  # form of the ledger → its file in a release
PRUNED_TYPE = "urn:lamina:pruned-ledger:v1"
MAX_LEDGER_BYTES = 1 << 30
ENCLOSED_LIMITS = ("The folder does not show that the ledger records this release, or what the ledger recorded later.",)
PRUNED_LIMITS = (
    *ENCLOSED_LIMITS,
    "A pruned ledger does not show contributions: how many signed which bound, their attestations, and withdrawals.",
    "A hidden leaf is no epoch, but it may be an end of a run or a change of keys or policy that no later leaf builds on.",
)
FULL_WARNING = "ledger.db names contributions, keys and subjects by pseudonyms. Copies of a release cannot be recalled after a withdrawal"
_HIDDEN = (ContributionRecord, Withdrawal)


class ReadableLedger(Protocol):
    """Source of the figures: a ledger, or the pruned ledger of a release."""

    @property
    def header(self) -> Header: ...
    @property
    def header_hash(self) -> bytes: ...
    @property
    def origin(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    def latest(self) -> str | None: ...
    def leaf(self, seq: int) -> Leaf: ...
    def of_kind(self, kind: type[Record], first: int = 0, stop: int | None = None) -> Iterator[Leaf]: ...
    def blob(self, digest: bytes) -> bytes | None: ...
    def root_at(self, size: int) -> bytes: ...
    def parties(self, before: int | None = None) -> GovernanceState: ...
    def bound_counts(self, before: int) -> Mapping[Account, int]: ...


Hex = Annotated[str, Field(pattern="^([0-9a-f]{2})*$")]


class _Entry(Document):
    leaf: Hex
    body: Hex | None


class _PrunedDocument(Document):
    """The content of ledger.json."""

    type: Literal[PRUNED_TYPE]  # type: ignore[valid-type]
    leaves: dict[str, _Entry]
    nodes: dict[str, Digest]
    plans: list[Hex]


def pruned_ledger(ledger: LedgerReader, size: int) -> bytes:
    """Return the pruned form of the first `size` leaves of a ledger."""
    leaves: dict[int, StoredLeaf] = {}
    plans: dict[bytes, None] = {}
    for seq, data in ledger.raw_leaves(0, size):
        kept = decode_kept(data.leaf)
        if kept.kind not in _HIDDEN:
            leaves[seq] = data
            record = decode_leaf(data).record
            plans |= {record.plan: None} if isinstance(record, Epoch) else {}
        elif seq == size - 1:
            leaves[seq] = StoredLeaf(data.leaf, None)
    found = {digest: ledger.blob(digest) for digest in plans}
    nodes = {f"{level}/{at}": ledger.node(level, at).hex() for level, at in _hidden_nodes(size, list(leaves))}
    shown = {
        str(seq): {"leaf": data.leaf.hex(), "body": None if data.body is None else data.body.hex()}
        for seq, data in leaves.items()
    }
    texts = [data.hex() for data in found.values() if data is not None]
    return canonical_json({"type": PRUNED_TYPE, "leaves": shown, "nodes": nodes, "plans": texts})


def _hidden_nodes(size: int, shown: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (level, index) of the largest complete subtrees of the first `size` leaves that contain no shown leaf."""
    at, rest = 0, list[tuple[int, int]]()
    for level in reversed(range(size.bit_length())):
        if size >> level & 1:
            rest.append((level, at >> level))
            at += 1 << level
    while rest:
        level, index = rest.pop()
        first = index << level
        place = bisect_left(shown, first)
        if place == len(shown) or shown[place] >= first + (1 << level):
            yield level, index
        elif level:
            rest += [(level - 1, 2 * index), (level - 1, 2 * index + 1)]


class PrunedLedger:
    """The pruned ledger of a release. `verify` must find no problem before anything else is used."""

    def __init__(self, data: bytes, head: LedgerHead) -> None:
        """Read the file. Raise NotVerified or EncodingError if it is not the ledger of this head."""
        found = read_document(_PrunedDocument, parse_json(data, "the pruned ledger"), "the pruned ledger", _MALFORMED)
        seqs = sorted(int(name) for name in found.leaves if name.isdecimal() and len(name) < 19)
        nodes = {f"{level}/{at}": (level, at) for level, at in _hidden_nodes(head.size, seqs)}
        if [*map(str, seqs)] != [
            *found.leaves
        ] or found.nodes.keys() != nodes.keys():  # a hash never stands for a shown leaf
            problem = "the pruned ledger does not have exactly the hashes of the leaves that it does not show, in order"
            raise EncodingError(_MALFORMED, problem, "fetch it again")
        shown = found.leaves.values()
        self._stored = {
            seq: StoredLeaf(bytes.fromhex(entry.leaf), None if entry.body is None else bytes.fromhex(entry.body))
            for seq, entry in zip(seqs, shown, strict=True)
        }
        self._nodes = {nodes[name]: bytes.fromhex(value) for name, value in found.nodes.items()}
        self._plans = {hashlib.sha256(plan).digest(): plan for plan in map(bytes.fromhex, found.plans)}
        self._head, self.name, self.size = head, "the ledger in the release", head.size
        if seqs[:1] != [0] or seqs[-1] != head.size - 1:
            problem = "the ledger in the release does not show its header or its last leaf, so epochs may be missing"
            raise NotVerified("release.ledger-end-hidden", problem, "make the release again")
        self.header_hash = leaf_hash(self._stored[0].leaf)
        if self.header_hash.hex() != head.header:
            problem = "the ledger in the release has another header than the manifest states"
            raise NotVerified("release.other-ledger", problem, "do not use it")
        if self.root_at(head.size).hex() != head.root:
            problem = "the leaves and hashes of the ledger in the release do not give the root of its checkpoint"
            raise NotVerified(
                "release.ledger-root-differs", problem, "a leaf was edited, removed or added: do not use it"
            )
        self._leaves: dict[int, Leaf] = {}
        epochs = 0
        for seq, each in self._stored.items():
            kept = decode_kept(each.leaf)
            if (kept.seq, kept.epoch) != (seq, epochs):
                problem = f"leaf {seq} of the ledger in the release counts {kept.epoch} epochs before it, but {epochs} are shown"
                raise NotVerified("release.ledger-epoch-hidden", problem, "an epoch was removed: do not use it")
            epochs += kept.kind is Epoch
            if kept.kind not in _HIDDEN:
                self._leaves[seq] = decode_leaf(each)
        header = self._leaves[0].record
        assert isinstance(header, Header)  # leaf 0 of this hash
        self.header, self.origin = header, header.origin

    def node(self, level: int, index: int) -> bytes:
        """Return the hash of a complete subtree."""
        if (level, index) in self._nodes:
            return self._nodes[level, index]
        if level == 0:
            return leaf_hash(self._stored[index].leaf)
        return node_hash(self.node(level - 1, 2 * index), self.node(level - 1, 2 * index + 1))

    def root_at(self, size: int) -> bytes:
        return root_at(self, size)

    def latest(self) -> str | None:
        return self._head.checkpoint

    def leaf(self, seq: int) -> Leaf:
        if seq in self._leaves:
            return self._leaves[seq]
        if seq not in self._stored:
            raise LedgerError("ledger.leaf-unknown", f"leaf {seq} is not in the pruned ledger", "use the whole ledger")
        kept = decode_kept(self._stored[seq].leaf)
        return Leaf(kept.kind, kept.seq, kept.time, kept.epoch, cast(Any, kept.contribution))

    def of_kind(self, kind: type[Record], first: int = 0, stop: int | None = None) -> Iterator[Leaf]:
        end = self.size if stop is None else stop
        return (leaf for seq, leaf in self._leaves.items() if leaf.kind is kind and first <= seq < end)

    def blob(self, digest: bytes) -> bytes | None:
        return self._plans.get(digest)

    def bound_counts(self, before: int) -> Mapping[Account, int]:
        """Nothing: contributions are hidden."""
        return {}

    def parties(self, before: int | None = None) -> GovernanceState:
        state = GovernanceState(self.header, self._stored[0].leaf)
        for seq, leaf in self._leaves.items():
            if seq and (before is None or seq < before):
                self._govern(state, leaf)
        return state

    def _govern(self, state: GovernanceState, leaf: Leaf) -> None:
        """Apply a governing record. That it follows a checkpoint of this ledger is not shown; its signatures are checked."""
        if isinstance(record := leaf.record, GoverningRecord):
            given = record.authorization
            root = None if given is None else given.root
            state.see(record, leaf.seq, leaf.time, self._stored[leaf.seq].leaf, lambda _: root)

    # ------------------------------------------------------------------------------------ verification

    @cached_property
    def verification(self) -> Verification:
        """Replay what is shown, by the checks of `lamina ledger verify`, and compute every spend again."""
        try:
            self._replay()
        except VerificationStopped as stopped:
            return Verification(problem=stopped.problem, size=self.size)
        except LaminaError as error:
            return Verification(problem=Finding(None, "ledger", error.code, error.problem), size=self.size)
        return Verification(verified=True, origin=self.origin, size=self.size, signed=self.size, problem=None)

    def _replay(self) -> None:
        state, policy, runs = (
            GovernanceState(self.header, self._stored[0].leaf),
            PolicyInForce(self.header),
            RecordedRuns(),
        )
        rows = cast(Any, SimpleNamespace(blob=self.blob))
        members = _HiddenMembers(policy, state, self._leaves.values())
        epochs = EpochChecks(self.header, rows, policy, WithdrawalChecks(rows, state, None), members)
        time = 0
        for seq, leaf in self._leaves.items():
            if leaf.time < time:
                raise VerificationStopped(
                    Finding(seq, "leaf", "verify.time-falls", "it is older than the leaf before it")
                )
            if not isinstance(leaf.record, GoverningRecord):  # `_govern` checks these
                place = Place(
                    rows=rows, header=self.header, seq=seq, time=leaf.time, governance=lambda: state,
                    root_of=lambda _: None, runs=lambda: runs,
                )  # fmt: skip
                check_record(leaf.record, place)
            match leaf.record:
                case Epoch() as epoch:
                    before = time if seq - 1 in self._leaves else leaf.time  # the leaf before it may be hidden
                    epochs.see(leaf, before, _AnyCheckpoint())
                    runs.see(epoch)
                case RunBegin() | RunEnd() as record:
                    runs.see(record)
                    if isinstance(record, RunBegin):
                        epochs.begins.setdefault(record.run, seq)
                    elif record.public_number:
                        epochs.see_public_number(seq, record)
                case record if seq:
                    self._govern(state, leaf)
                    if isinstance(record, PolicyChange):
                        policy.change(seq, record)
            time = leaf.time
        epochs.check_generations(())
        for claim in epochs.claims:
            if (wrong := claim.finding(self.header)) is not None:
                raise VerificationStopped(wrong)
        keys = [
            each.public for each in state.histories(Role.LEDGER) if state.why_not_signing(each.public.id, time) is None
        ]
        verify_checkpoint(self._head.checkpoint, [NoteKey(self.origin, key) for key in keys])


class _AnyCheckpoint(dict[bytes, int]):
    """Stands for the earlier checkpoints, which a pruned ledger does not contain."""

    def get(self, key: object, default: Any = None) -> int:
        return 0


class _HiddenMembers(AdmittedMembers):
    """Stands for the contributions, which a pruned ledger hides: each bound that an epoch charges may have been signed."""

    def __init__(self, policy: PolicyInForce, keys: GovernanceState, leaves: Any) -> None:
        super().__init__(policy, keys, {})
        epochs = (leaf.record for leaf in leaves if isinstance(leaf.record, Epoch))
        self._charged = sorted(
            {account.bound for epoch in epochs for account in epoch.accounts if account.bound.signed}
        )

    def bounds(self, cls: str, before: int) -> list[Account]:
        return [bound for bound in self._charged if bound.cls == cls]


_MALFORMED = "release.enclosed-ledger-malformed"
