"""What a verification starts from and carries along.

Trusted keys, the first finding, the report, and the keys and the policy in force after the leaves read.
"""

from __future__ import annotations

import os
import time as system
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from lamina.admit.key_ring import KeyRing, KeyStatus
from lamina.admit.keys import PublicKey, format_utc, read_small
from lamina.errors import EncodingError, LaminaError, LedgerError
from lamina.ledger import signed_checkpoint as notes
from lamina.ledger.governance_records import (
    Header,
    Key,
    KeyChange,
    KeyEvent,
    PartySignature,
    PolicyChange,
    Preset,
    Role,
    loosened,
    profile_exceeds,
    wrong_predecessor,
)
from lamina.ledger.records import KIND_NAMES, ContributionTerms, Leaf, Record
from lamina.ledger.signed_checkpoint import LedgerCheckpoint, Note, NoteKey

LEAF = "leaf"  # bytes at their place, whatever they say
CHECKPOINT = "checkpoint"  # a signature over the tree
TILE = "tile"  # a stored hash of the tree
STORE = "store"  # what a store keeps beside the leaves
KNOWN_CHECKPOINT = "seen"  # a checkpoint that was seen before
TRUSTED_KEYS = "trust"  # keys from outside the ledger


@dataclass(frozen=True, slots=True)
class Finding:
    """Where, what and why. `index` is a leaf; of a checkpoint it is the first leaf that it fails to vouch for."""

    index: int | None
    kind: str
    code: str
    reason: str

    def to_dict(self) -> dict[str, Any]:
        return {"index": self.index, "kind": self.kind, "code": self.code, "reason": self.reason}

    def __str__(self) -> str:
        place = "" if self.index is None else f"leaf {self.index} "
        return f"{place}({self.kind}): {self.reason} [{self.code}]"


class VerificationStopped(Exception):
    """Ends an audit. Never leaves this folder."""

    def __init__(self, problem: Finding) -> None:
        super().__init__(str(problem))
        self.problem = problem


def fail(index: int | None, kind: str | type[Record], code: str, reason: str) -> NoReturn:
    """This is the first thing that is wrong."""
    raise VerificationStopped(Finding(index, kind if isinstance(kind, str) else KIND_NAMES[kind], code, reason))


@dataclass(frozen=True, slots=True, kw_only=True)
class UnrecordedSpend:
    """What a run was charged or has reserved, and no leaf says yet: it counts against the bounds all the same.

    attempts  that are open, or whose process ended before it could record them
    budgets   that noise is to follow, charged as a whole before the first attempt
    reserved  whether the rest of its plan is kept free for it
    """

    run: bytes
    label: str
    attempts: int
    budgets: int = 0
    reserved: bool

    def to_dict(self) -> dict[str, Any]:
        return {
            "run": self.run.hex(),
            "label": self.label,
            "attempts": self.attempts,
            "budgets": self.budgets,
            "reserved": self.reserved,
        }

    def __str__(self) -> str:
        name = f"{self.run.hex()[:8]} {self.label!r}" if self.label else self.run.hex()[:8]
        told = [f"{self.attempts} attempt{'s' if self.attempts > 1 else ''}"] if self.attempts else []
        told += ["a whole budget"] if self.budgets else []
        return f"{name} ({', '.join([*told, *(['the rest of its plan'] if self.reserved else [])])})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What was found.

    verified     everything that could be checked is as it must be
    trusted      all of it is signed by keys that came from outside the ledger
    size, root   of the tree that the leaves make; of what the head claims if they could not all be read
    signed       leaves that a checkpoint covers
    problem      the first thing that is wrong
    counts       leaves by kind; `pruned` are gone
    notes        what was not, or could not be, checked
    held         by run, what is charged or reserved and in no leaf yet
    """

    verified: bool
    trusted: bool
    origin: str | None
    size: int
    root: bytes | None
    signed: int
    checkpoints: int
    attestations: int
    spends: int
    problem: Finding | None
    counts: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    held: tuple[UnrecordedSpend, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """For machines."""
        return {
            "verified": self.verified,
            "trusted": self.trusted,
            "origin": self.origin,
            "size": self.size,
            "root": None if self.root is None else self.root.hex(),
            "signed": self.signed,
            "checkpoints": self.checkpoints,
            "attestations": self.attestations,
            "spends": self.spends,
            "counts": self.counts,
            "notes": list(self.notes),
            "held": [each.to_dict() for each in self.held],
            "problem": None if self.problem is None else self.problem.to_dict(),
        }


_MOST_CHECKPOINT_BYTES = 1 << 20
_LEDGER_ROLE = "ledger"


@dataclass(frozen=True, slots=True)
class Trust:
    """Keys that count whatever a ledger says: a ring, verifier keys of signed notes, or one public key.

    They come from somewhere else than the ledger: from whoever answers for it, by another way. A ring also knows
    contributors, for ledgers that do not name their keys.
    """

    ring: KeyRing | None = None
    notes: tuple[NoteKey, ...] = ()
    plain: tuple[PublicKey, ...] = ()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trust:
        """Read a key ring (JSON), a public key (PEM), or a text of verifier keys, `name+id+key`, one a line."""
        path = Path(path)
        data = read_small(path, "the trusted keys", most=_MOST_CHECKPOINT_BYTES * 64)
        if data.lstrip().startswith(b"{"):
            return cls(ring=KeyRing.load(path))
        if data.lstrip().startswith(b"-----BEGIN"):
            return cls(plain=(PublicKey.load(path),))
        try:
            text = data.decode("utf-8")
            lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
            keys = tuple(NoteKey.parse(line) for line in lines)
        except (UnicodeDecodeError, EncodingError) as error:
            told = error.problem if isinstance(error, LaminaError) else "it is no text"
            raise LedgerError(
                "ledger.holds-no-keys-trust",
                f"'{path}' holds no keys to trust: {told}",
                "give a key ring, or verifier keys of the ledger, one a line",
            ) from None
        if not keys:
            raise LedgerError(
                "ledger.holds-no-keys", f"'{path}' holds no keys", "give a key ring, or verifier keys, one a line"
            )
        return cls(notes=keys)

    def keys(self, origin: str, now: int | None = None) -> list[PublicKey]:
        """Those of the ledger with that origin."""
        at = int(system.time()) if now is None else now
        mine = [*self.plain, *(each.key for each in self.notes if each.name == origin)]
        if self.ring is not None:
            mine += [
                e.key for e in self.ring if e.role == _LEDGER_ROLE and e.standing(at, e.valid_from) is KeyStatus.USABLE
            ]
        return mine


@dataclass(frozen=True, slots=True)
class KnownCheckpoint:
    """A checkpoint of the same ledger that was seen at another time, or by somebody else."""

    head: LedgerCheckpoint
    note: Note

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> KnownCheckpoint:
        """Read a file with a signed checkpoint."""
        return cls.parse(read_small(Path(path), "the checkpoint", most=_MOST_CHECKPOINT_BYTES))

    @classmethod
    def parse(cls, data: str | bytes) -> KnownCheckpoint:
        """Read a signed checkpoint."""
        return cls(*notes.parse_checkpoint(data))


def known_checkpoints(given: Iterable[str | bytes | KnownCheckpoint]) -> list[KnownCheckpoint]:
    """Checkpoints by size."""
    made = [each if isinstance(each, KnownCheckpoint) else KnownCheckpoint.parse(each) for each in given]
    return sorted(made, key=lambda each: each.head.size)


@dataclass(slots=True)
class _ReplayedKey:
    """A key, and what became of it."""

    key: Key
    public: PublicKey
    since: int = 0
    retired: int | None = None  # from then on it signs nothing new
    revoked: int | None = None  # from then on nothing counts that it ever signed

    def wrong(self, role: Role, at: int, issued: int) -> str | None:
        """Why it does not count at `at` for something signed at `issued`; None if it does."""
        if self.key.role is not role:
            return f"is for {self.key.role.name.lower()}, not for {role.name.lower()}"
        if self.revoked is not None and at >= self.revoked:
            return f"is revoked from {format_utc(self.revoked)}"
        if at < self.since or at < self.key.valid_from or issued < self.key.valid_from:
            return f"is valid from {format_utc(max(self.since, self.key.valid_from))}"
        if self.key.valid_until is not None and at >= self.key.valid_until:
            return f"was valid until {format_utc(self.key.valid_until)}"
        if self.retired is not None and issued >= self.retired:
            return f"was replaced at {format_utc(self.retired)}"
        return None


class ReplayedKeys:
    """The keys as they stand after the leaves that were read.

    `version` changes with every key event: whoever remembers an answer remembers it for a version.
    """

    def __init__(self, header: Header, ring: KeyRing | None = None) -> None:
        self._origin, self._ring = header.origin, ring
        self._states = {key.id: _ReplayedKey(key, key.public) for key in header.keys}
        self.version = 0

    def apply(self, leaf: Leaf) -> None:
        """Go on by one key event."""
        event = leaf.record
        assert isinstance(event, KeyEvent)
        target = self._states.get(event.target) if event.target is not None else None
        if event.target is not None and target is None:
            fail(leaf.seq, KeyEvent, "verify.key-not-ledger", f"key {event.target.hex()[:16]} is not one of the ledger")
        if event.key is not None:
            self._add(leaf.seq, event.key, event.effective, event.change, target)
        if target is not None and event.change is KeyChange.ROTATE:
            target.retired = _earlier_time(target.retired, event.effective)
        if target is not None and event.change is KeyChange.REVOKE:
            target.revoked = _earlier_time(target.revoked, event.effective)
        self.version += 1

    def _add(self, seq: int, key: Key, effective: int, change: KeyChange, target: _ReplayedKey | None) -> None:
        known = self._states.get(key.id)
        if known is not None and known.key.role is not key.role:
            fail(
                seq,
                KeyEvent,
                "verify.key-already-role",
                f"key {key.id.hex()[:16]} is for {known.key.role.name.lower()} already: one role a key",
            )
        if known is not None and change is KeyChange.ROTATE:
            fail(
                seq,
                KeyEvent,
                "verify.key-takes-over",
                f"key {key.id.hex()[:16]} takes over, and is one of the ledger already",
            )
        if target is not None and target.key.role is not key.role:
            fail(
                seq,
                KeyEvent,
                "verify.key-takes-over-2",
                f"a key for {key.role.name.lower()} takes over from one for {target.key.role.name.lower()}",
            )
        if key.role is Role.LEDGER and key.name != self._origin:
            fail(
                seq,
                KeyEvent,
                "verify.key-ledger-named",
                f"a key of the ledger is named {key.name!r}, not {self._origin!r}",
            )
        self._states[key.id] = _ReplayedKey(key, key.public, since=effective)

    # ----------------------------------------------------------------------------------- questions

    def contributor(self, kid: bytes, at: int, issued: int) -> PublicKey | str:
        """The key of an attestation that was used at `at` and claims to be signed at `issued`; or why there is none."""
        state = self._states.get(kid)
        if state is not None:
            wrong = state.wrong(Role.CONTRIBUTOR, at, issued)
            return state.public if wrong is None else f"key {kid.hex()[:16]} {wrong}"
        entry = None if self._ring is None else self._ring.get(kid)
        if entry is None:
            where = "the ledger" if self._ring is None else "the ledger nor the trusted keys"
            return f"key {kid.hex()[:16]} is not known to {where}"
        standing = entry.standing(at, issued)
        if entry.role != "contributor" or standing is not KeyStatus.USABLE:
            what = f"is for {entry.role}" if entry.role != "contributor" else f"is {standing.value}"
            return f"key {kid.hex()[:16]} {what}, by the trusted keys"
        return entry.key

    def contributor_problem(self, kid: bytes, at: int) -> str | None:
        """Why a contributor's key does not count at `at`, as far as that shows without the attestation."""
        state = self._states.get(kid)
        if state is None:
            return None
        # When it was signed is in the attestation: at the earliest when the key became valid.
        wrong = state.wrong(Role.CONTRIBUTOR, at, state.key.valid_from)
        return None if wrong is None else f"key {kid.hex()[:16]} {wrong}"

    def bars(self, kids: Iterable[bytes], first: int, last: int) -> bool:
        """Whether `barred` may have something to say of one of these at a time in [first, last]."""
        found = (self._states.get(kid) for kid in kids)
        return any(
            state is not None
            and any(state.wrong(Role.CONTRIBUTOR, at, state.key.valid_from) is not None for at in (first, last))
            for state in found
        )

    def revoked(self, kid: bytes, at: int) -> bool:
        """Whether nothing that it signed counts at `at`."""
        state = self._states.get(kid)
        return state is not None and state.revoked is not None and at >= state.revoked

    def signers(
        self, message: bytes, signatures: Iterable[PartySignature], roles: Iterable[Role], at: int
    ) -> tuple[set[bytes], str | None]:
        """Who of these roles signed the message; and what is wrong with the first signature that does not count."""
        allowed = tuple(roles)
        found: set[bytes] = set()
        for signed in signatures:
            state = self._states.get(signed.key)
            if state is None or state.key.role not in allowed:
                return (
                    found,
                    f"key {signed.key.hex()[:16]} is none of {' and '.join(r.name.lower() for r in allowed)}",
                )
            if (wrong := state.wrong(state.key.role, at, at)) is not None:
                return found, f"key {signed.key.hex()[:16]} {wrong}"
            if not state.public.verify(message, signed.signature):
                return found, f"the signature by {state.key.name!r} is not one of it"
            found.add(signed.key)
        return found, None

    def of_ledger(self) -> dict[bytes, _ReplayedKey]:
        """The keys that ever signed checkpoints, or may."""
        return {kid: state for kid, state in self._states.items() if state.key.role is Role.LEDGER}

    def witnesses(self) -> list[Key]:
        """The witnesses that were ever named and are not revoked."""
        return [s.key for s in self._states.values() if s.key.role is Role.WITNESS and s.revoked is None]


def _earlier_time(one: int | None, two: int) -> int:
    return two if one is None else min(one, two)


class PolicyInForce:
    """Floors and presets after the leaves that were read. `version` changes with them."""

    def __init__(self, header: Header) -> None:
        self._origin = header.origin
        self.floors, self.presets = header.floors, {each.cls: each for each in header.presets}
        self.version = 0
        self._last: Header | PolicyChange = header
        self._since: list[tuple[int, dict[str, Preset]]] = [(0, self.presets)]
        self._named = {each.id for each in header.keys}
        self.alone: list[int] = []  # changes that protect less, signed by somebody whom the ledger named later itself

    @classmethod
    def of(cls, header: Header, last: Header | PolicyChange) -> PolicyInForce:
        """Where only the last word counts: for who admits."""
        made = cls(header)
        made.floors, made.presets = last.floors, {each.cls: each for each in last.presets}
        made._since = [(0, made.presets)]
        return made

    def change(self, leaf: Leaf, keys: ReplayedKeys) -> None:
        """Go on by one policy change: floors only up, unless two signed."""
        new = leaf.record
        assert isinstance(new, PolicyChange)
        names = [each.cls for each in new.presets]
        if len(set(names)) < len(names):
            fail(leaf.seq, PolicyChange, "verify.class-named-twice", "a class is named twice")
        signers, wrong = keys.signers(new.message(self._origin), new.signatures, (Role.LEDGER, Role.AUDITOR), leaf.time)
        if wrong is not None:
            fail(leaf.seq, PolicyChange, "verify.signature-under-not", f"a signature under it does not count: {wrong}")
        looser = loosened(self.floors, self.presets.values(), new.floors, new.presets)
        if looser and len(signers) < 2:
            fail(
                leaf.seq,
                PolicyChange,
                "verify.two-parties-signed",
                f"{looser[0]}, and {len(signers)} of two parties signed that",
            )
        if (misfit := wrong_predecessor(new, self._last)) is not None:
            fail(leaf.seq, PolicyChange, "verify.change", misfit)
        if looser and len(signers & self._named) < 2:
            self.alone.append(leaf.seq)
        self.floors, self.presets = new.floors, {each.cls: each for each in new.presets}
        self.version += 1
        self._last = new
        self._since.append((leaf.seq, self.presets))

    def promised(self, cls: str, leaf: int) -> int:
        """The least noise multiplier that a class was promised after so many leaves, or later; 0 if none was.

        A segment is charged when it is opened, and what was promised then holds for it to its end.
        """
        found = [presets.get(cls) for presets in self._from(leaf)]
        return min(0 if each is None else each.noise_multiplier for each in found)

    def presets_since(self, cls: str, leaf: int) -> list[Preset]:
        """What a class was after so many leaves, and later: a run keeps the plan that it began with."""
        return [presets[cls] for presets in self._from(leaf) if cls in presets]

    def _from(self, leaf: int) -> list[dict[str, Preset]]:
        first = sum(seq < leaf for seq, _ in self._since) - 1
        return [presets for _, presets in self._since[max(first, 0) :]]

    def wrong(self, terms: ContributionTerms) -> str | None:
        """Why a contribution with these terms was not to be admitted; None if it was."""
        preset = self.presets.get(terms.cls)
        if preset is None:
            return f"class {terms.cls!r} is not one of the policy"
        if preset.public:
            if terms.clip_norm or terms.noise_multiplier:
                return f"class {terms.cls!r} is public, and it signed a bound, which nobody keeps there"
        elif (problem := self._bound(terms, preset)) is not None:
            return problem
        if terms.profile is not None and terms.profile != preset.profile:
            return profile_exceeds(preset.profile, terms.profile)
        return None

    def _bound(self, terms: ContributionTerms, preset: Preset) -> str | None:
        c, z = terms.clip_norm, terms.noise_multiplier
        if not z:
            return f"class {terms.cls!r} is private, and it signed no bound"
        if c < self.floors.clip_norm:
            return f"clip norm {_micro_text(c)} is below the floor of {_micro_text(self.floors.clip_norm)}"
        if z < self.floors.noise_multiplier:
            return (
                f"noise multiplier {_micro_text(z)} is below the floor of {_micro_text(self.floors.noise_multiplier)}"
            )
        if c > preset.clip_norm:
            return f"clip norm {_micro_text(c)} is above the {_micro_text(preset.clip_norm)} of class {terms.cls!r}"
        if z < preset.noise_multiplier:
            return f"noise multiplier {_micro_text(z)} is below the {_micro_text(preset.noise_multiplier)} of class {terms.cls!r}"
        return None


def _micro_text(micro: int) -> str:
    return f"{micro / 1e6:.9g}"
