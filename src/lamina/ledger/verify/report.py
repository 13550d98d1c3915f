"""The report of a verification: what was found, what was not checked, and what no leaf records yet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from lamina.errors import family_of
from lamina.ledger.governance_records import Header, Key
from lamina.ledger.key_state import GovernanceState
from lamina.ledger.schema import pluralize, program_version
from lamina.ledger.store.rows import RESERVATION_SEGMENT, WHOLE_BUDGET_SEGMENT, RunHold, StoreReader
from lamina.ledger.verify.tree_checks import Finding, Trust

if TYPE_CHECKING:
    from lamina.ledger.verify.verifier import LedgerReplay


@dataclass(frozen=True, slots=True, kw_only=True)
class UnrecordedSpend:
    """Charges and reservations of a run that no leaf records yet. They count against the bounds all the same.

    attempts  open attempts, or attempts whose process ended before it recorded them
    budgets   whole budgets of adaptive noise, charged before the first attempt
    reserved  whether the rest of its plan is reserved
    """

    run: bytes
    label: str
    attempts: int
    budgets: int = 0
    reserved: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"run": self.run.hex()}

    def __str__(self) -> str:
        name = f"{self.run.hex()[:8]} {self.label!r}" if self.label else self.run.hex()[:8]
        parts = [f"{self.attempts} attempt{'s' if self.attempts > 1 else ''}"] if self.attempts else []
        parts += ["a whole budget"] * (self.budgets > 0) + ["the rest of its plan"] * self.reserved
        return f"{name} ({', '.join(parts)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Report of a verification.

    verified     every check passed
    trusted      and a governing key from outside the ledger vouches for all of it, and auditors for what was pruned
    size, root   of the tree over the leaves; if not all could be read, the size that the head claims
    signed       number of leaves that checkpoints cover
    problem      the first finding
    counts       leaves by kind; `pruned` counts the contributions whose bodies are gone
    notes        what was not, or could not be, checked
    held         by run, what is charged or reserved and not yet recorded
    keys         every key that was added, rotated or revoked, and the keys that authorised it
    """

    verified: bool = False
    trusted: bool = False
    origin: str | None = None
    size: int = 0
    root: bytes | None = None
    signed: int = 0
    checkpoints: int = 0
    attestations: int = 0
    spends: int = 0
    problem: Finding | None
    counts: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    held: tuple[UnrecordedSpend, ...] = ()
    keys: tuple[dict[str, Any], ...] = ()

    @property
    def verdict(self) -> str:
        """In words: not verified, self-consistent, or trusted."""
        return "not verified" if not self.verified else "trusted" if self.trusted else "self-consistent"

    def to_dict(self) -> dict[str, Any]:
        root, held = None if self.root is None else self.root.hex(), [each.to_dict() for each in self.held]
        made = {"verdict": self.verdict, "root": root, "notes": list(self.notes), "held": held, "keys": list(self.keys)}
        found = self.problem and asdict(self.problem) | {"family": family_of(self.problem.code)}
        return asdict(self) | made | {"problem": found}


def unrecorded_spend(rows: StoreReader) -> tuple[UnrecordedSpend, ...]:
    """Charges and reservations that no leaf records yet, as the store states them (`check_open_rows`)."""
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


def report(replay: LedgerReplay, problem: Finding | None, trust: Trust | None) -> Verification:
    whole = replay.tree.size == replay.head.size
    checkpoints = replay.checkpoints
    return Verification(
        verified=problem is None,
        trusted=problem is None
        and bool(replay.pinned)
        and replay.attestations is not None
        and not replay.aggregates.not_countersigned
        and not replay.beyond_signed
        and not replay.epochs.unsure_epochs
        and not replay.unsure_exhaustions,
        origin=replay.header.origin,
        size=replay.head.size,
        root=replay.tree.root() if whole else None,
        signed=checkpoints.signed_size,
        checkpoints=checkpoints.count,
        attestations=0 if replay.attestations is None else replay.attestations.checked,
        spends=len(replay.epochs.claims),
        problem=problem,
        counts=replay.counts,
        notes=tuple(_report_notes(replay, trust)) if problem is None else (),
        held=replay.held,
        keys=tuple(_key_changes(replay.header, replay.keys)),
    )


def _key_changes(header: Header, keys: GovernanceState) -> Iterator[dict[str, Any]]:
    """Every key that the ledger names, by whose authority, in the order of the leaves."""
    owners = [each.key.hex() for each in header.signatures]
    for key in header.keys:
        yield {"index": 0, "change": "add", **_key_dict(key), "target": None, "by": owners}
    for seq, event, by in keys.additions:
        found = _key_dict(event.key or keys.get(event.target or b""))
        target = None if event.target is None else event.target.hex()
        change = {"index": seq, "change": event.change.name.lower()}
        yield change | found | {"target": target, "by": [one.hex() for one in by]}


def _key_dict(key: Key | None) -> dict[str, str | None]:
    return {} if key is None else {"key": key.id.hex(), "name": key.name, "role": key.role.name.lower()}


_RUNS_SHOWN = 5  # in a note


def _report_notes(replay: LedgerReplay, trust: Trust | None) -> Iterable[str]:
    size, good = replay.head.size, replay.checkpoints.signed_size
    if trust is None:
        yield "only keys that the ledger names itself were checked: give --trust with keys from elsewhere"
    elif not replay.pinned:
        yield "no trusted key governs the ledger: who may sign, and what it promises, is only its own word"
    if good < size:
        yield f"leaves [{good}, {size}) are not signed yet"
    if replay.attestations is None:
        yield "attestations were not checked"
    else:
        yield from replay.attestations.notes()
    if pruned := replay.contributions.pruned:
        forms = "contribution is pruned: its attestation", "contributions are pruned: their attestations"
        bodies = pluralize(pruned, *forms)
        yield f"{bodies} can no longer be checked"
    if count := replay.withdrawals.unsigned:
        yield f"{pluralize(count, 'withdrawal is', 'withdrawals are')} the word of the keeper alone: nobody signed"
    if count := replay.withdrawals.of_pruned:
        signed = pluralize(count, "withdrawal of a pruned contribution is", "withdrawals of pruned contributions are")
        yield f"{signed} signed by a contributor or an operator: whose contribution it was can no longer be checked"
    if count := replay.aggregates.not_countersigned:
        why = "" if trust is None else ": the ledger is self-consistent, and not trusted"
        yield f"{pluralize(count, 'aggregate is', 'aggregates are')} countersigned by nobody{why}"
    if count := replay.epochs.epochs_without_account:
        yield (
            f"{pluralize(count, 'epoch has', 'epochs have')} no account for a bound that an eligible contribution signed: "
            "only the ledger says that it was left out there"
        )
    if count := replay.epochs.unsure_epochs:
        charge = pluralize(count, "epoch charges", "epochs charge")
        yield f"{charge} too little, unless keys of pruned contributions were revoked, which nobody can see: not trusted"
    for wrong in replay.beyond_signed:
        yield f"{wrong}, if nobody was left out where only its class is charged: what the ledger says of it is not trusted"
    if count := replay.unsure_exhaustions:
        bounds = pluralize(count, "exhausted bound was", "exhausted bounds were")
        yield f"{bounds} scaled or left out because of attempts that no leaf shows to have been open then: not trusted"
    if found := replay.releases.without_end:
        leaves = ", ".join(map(str, found[:_RUNS_SHOWN])) + (", …" if len(found) > _RUNS_SHOWN else "")
        yield f"releases whose weights were not compared, because the end of a run is not recorded: leaves {leaves}"
    if found := replay.releases.without_manifest:
        leaves = ", ".join(map(str, found[:_RUNS_SHOWN])) + (", …" if len(found) > _RUNS_SHOWN else "")
        yield f"releases whose figures were not compared, because the manifest is not stored here: leaves {leaves}"
    if count := replay.unrecorded:
        yield (
            f"{pluralize(count, 'attempt was', 'attempts were')} left out by later generations: only the ledger says that a "
            "run was copied, or the ledger put back"
        )
    for cls, delta in sorted(replay.epochs.other_deltas()):
        yield f"a plan has class {cls!r} at δ = {delta:g}; every ε here is at the header's δ = {replay.header.delta:g}"
    if (begun_by := replay.header.version) != program_version():
        yield f"the header names {begun_by}, and every ε was computed again by {program_version()}"
    if replay.held:
        yield _unrecorded_note(replay.held)
    if not replay.open_signed:
        yield "not checked: open charges and reservations. The ledger key has not signed them, so one could be missing"


def _unrecorded_note(held: tuple[UnrecordedSpend, ...]) -> str:
    attempts, reserved = sum(each.attempts for each in held), sum(each.reserved for each in held)
    runs = ", ".join(map(str, held[:_RUNS_SHOWN]))
    more = f" and {len(held) - _RUNS_SHOWN} more" if len(held) > _RUNS_SHOWN else ""
    count = f"{pluralize(attempts, 'attempt is', 'attempts are')} open and {pluralize(reserved, 'plan')} reserved"
    return (
        f"{count}, as the store states: no leaf records them yet, and they count against the bounds: "
        f"{'run' if len(held) == 1 else 'runs'} {runs}{more}"
    )
