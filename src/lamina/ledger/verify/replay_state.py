"""State of a verification: trusted keys, the report, and the keys and policy in force after the leaves read so far."""

from __future__ import annotations

import os
import time as system
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

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

# Kinds of findings that are not about a record of a known kind
LEAF = "leaf"
CHECKPOINT = "checkpoint"
TILE = "tile"
STORE = "store"
KNOWN_CHECKPOINT = "seen"
TRUSTED_KEYS = "trust"


@dataclass(frozen=True, slots=True)
class Finding:
    """The first thing that is wrong. `index` is a leaf; for a checkpoint, the first leaf that it fails to cover."""

    index: int | None
    kind: str
    code: str
    reason: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        leaf = "" if self.index is None else f"leaf {self.index} "
        return f"{leaf}({self.kind}): {self.reason} [{self.code}]"


class Violation(NamedTuple):
    """A broken rule, before it is known which leaf broke it."""

    code: str
    reason: str


class VerificationStopped(Exception):
    """Ends a replay with its first finding. Never leaves this folder."""

    def __init__(self, problem: Finding) -> None:
        super().__init__(str(problem))
        self.problem = problem


def fail(index: int | None, kind: str | type[Record], code: str, reason: str) -> NoReturn:
    """Stop the replay with this finding."""
    raise VerificationStopped(Finding(index, kind if isinstance(kind, str) else KIND_NAMES[kind], code, reason))


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
    trusted      and keys from outside the ledger signed all of it
    size, root   of the tree over the leaves; if not all could be read, the size that the head claims
    signed       number of leaves that checkpoints cover
    problem      the first finding
    counts       leaves by kind; `pruned` counts leaves that are gone
    notes        what was not, or could not be, checked
    held         by run, what is charged or reserved and not yet recorded
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
        return {
            **{name: getattr(self, name) for name in ("verified", "trusted", "origin", "size")},
            "root": None if self.root is None else self.root.hex(),
            **{name: getattr(self, name) for name in ("signed", "checkpoints", "attestations", "spends", "counts")},
            "notes": list(self.notes),
            "held": [each.to_dict() for each in self.held],
            "problem": None if self.problem is None else self.problem.to_dict(),
        }


_MOST_CHECKPOINT_BYTES = 1 << 20
_LEDGER_ROLE = "ledger"


@dataclass(frozen=True, slots=True)
class Trust:
    """Keys that an auditor trusts: a key ring, verifier keys of signed notes, or one public key.

    They come from whoever answers for the ledger, by another way than the ledger itself. A ring also holds keys of
    contributors, for ledgers that do not name them.
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
            lines = [line.strip() for line in data.decode("utf-8").splitlines() if not line.startswith("#")]
            keys = tuple(NoteKey.parse(line) for line in lines if line)
        except (UnicodeDecodeError, EncodingError) as error:
            why = error.problem if isinstance(error, LaminaError) else "not UTF-8 text"
            raise _no_keys(path, f": {why}") from None
        if not keys:
            raise _no_keys(path)
        return cls(notes=keys)

    def keys(self, origin: str, now: int | None = None) -> list[PublicKey]:
        """The trusted keys for the ledger with that origin."""
        at = int(system.time()) if now is None else now
        mine = [*self.plain, *(each.key for each in self.notes if each.name == origin)]
        if self.ring is not None:
            mine += [
                e.key for e in self.ring if e.role == _LEDGER_ROLE and e.standing(at, e.valid_from) is KeyStatus.USABLE
            ]
        return mine


def _no_keys(path: Path, why: str = "") -> LedgerError:
    remedy = "give a key ring (JSON), a public key (PEM), or verifier keys of the ledger, one a line"
    return LedgerError("verify.no-trusted-keys", f"'{path}' holds no keys to trust{why}", remedy)


@dataclass(frozen=True, slots=True)
class KnownCheckpoint:
    """A checkpoint of the same ledger that was kept earlier, or by somebody else."""

    head: LedgerCheckpoint
    note: Note

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> KnownCheckpoint:
        """Read a file with a signed checkpoint."""
        return cls.parse(read_small(Path(path), "the checkpoint", most=_MOST_CHECKPOINT_BYTES))

    @classmethod
    def parse(cls, data: str | bytes) -> KnownCheckpoint:
        return cls(*notes.parse_checkpoint(data))


def known_checkpoints(given: Iterable[str | bytes | KnownCheckpoint]) -> list[KnownCheckpoint]:
    """The checkpoints, sorted by size."""
    made = [each if isinstance(each, KnownCheckpoint) else KnownCheckpoint.parse(each) for each in given]
    return sorted(made, key=lambda each: each.head.size)


@dataclass(slots=True)
class _ReplayedKey:
    """A key and its history."""

    key: Key
    public: PublicKey
    since: int = 0
    retired: int | None = None  # from then on it signs nothing new
    revoked: int | None = None  # from then on nothing that it ever signed counts

    def violation(self, role: Role, at: int, issued: int) -> Violation | None:
        """Why it does not count at `at` for something signed at `issued`; None if it does."""
        key = self.key
        if key.role is not role:
            return self._violation(
                "verify.key-wrong-role", f"has role {key.role.name.lower()}, not {role.name.lower()}"
            )
        if self.revoked is not None and at >= self.revoked:
            return self._violation("verify.key-revoked", f"is revoked from {format_utc(self.revoked)}")
        if at < self.since or at < key.valid_from or issued < key.valid_from:
            return self._violation(
                "verify.key-not-yet-valid", f"is valid from {format_utc(max(self.since, key.valid_from))}"
            )
        if key.valid_until is not None and at >= key.valid_until:
            return self._violation("verify.key-expired", f"was valid until {format_utc(key.valid_until)}")
        if self.retired is not None and issued >= self.retired:
            return self._violation("verify.key-replaced", f"was replaced at {format_utc(self.retired)}")
        return None

    def _violation(self, code: str, reason: str) -> Violation:
        return Violation(code, f"key {self.key.id.hex()[:16]} {reason}")

    def contributor_violation(self, at: int) -> Violation | None:
        # Only the attestation says when it was signed: at the earliest when the key became valid.
        return self.violation(Role.CONTRIBUTOR, at, self.key.valid_from)


class ReplayedKeys:
    """The keys of a ledger after the leaves read so far."""

    def __init__(self, header: Header, ring: KeyRing | None = None) -> None:
        self._origin, self._ring = header.origin, ring
        self._keys = {key.id: _ReplayedKey(key, key.public) for key in header.keys}

    def apply(self, leaf: Leaf) -> None:
        """Check and apply one key event."""
        event = leaf.record
        assert isinstance(event, KeyEvent)
        target = self._keys.get(event.target) if event.target is not None else None
        if event.target is not None and target is None:
            reason = f"the ledger has no key {event.target.hex()[:16]}"
            fail(leaf.seq, KeyEvent, "verify.key-unknown", reason)
        if event.key is not None:
            self._add(leaf.seq, event.key, event.effective, event.change, target)
        if target is not None and event.change is KeyChange.ROTATE:
            target.retired = min(event.effective, event.effective if target.retired is None else target.retired)
        if target is not None and event.change is KeyChange.REVOKE:
            target.revoked = min(event.effective, event.effective if target.revoked is None else target.revoked)

    def _add(self, seq: int, key: Key, effective: int, change: KeyChange, target: _ReplayedKey | None) -> None:
        known, name, role = self._keys.get(key.id), f"key {key.id.hex()[:16]}", key.role.name.lower()
        if known is not None and known.key.role is not key.role:
            reason = f"{name} has role {known.key.role.name.lower()} already and cannot become {role}"
            fail(seq, KeyEvent, "verify.key-role-changed", reason)
        if known is not None and change is KeyChange.ROTATE:
            fail(seq, KeyEvent, "verify.rotation-to-known-key", f"{name} replaces another key, but is not new")
        if target is not None and target.key.role is not key.role:
            reason = f"{name} with role {role} replaces a key with role {target.key.role.name.lower()}"
            fail(seq, KeyEvent, "verify.rotation-changes-role", reason)
        if key.role is Role.LEDGER and key.name != self._origin:
            reason = f"{name} of the ledger is named {key.name!r}, not {self._origin!r}"
            fail(seq, KeyEvent, "verify.ledger-key-name", reason)
        self._keys[key.id] = _ReplayedKey(key, key.public, since=effective)

    def contributor(self, kid: bytes, at: int, issued: int) -> PublicKey | Violation:
        """The key of an attestation that was used at `at` and claims to be signed at `issued`; or why it is invalid."""
        name = f"key {kid.hex()[:16]}"
        if (known := self._keys.get(kid)) is not None:
            return known.violation(Role.CONTRIBUTOR, at, issued) or known.public
        entry = None if self._ring is None else self._ring.get(kid)
        if entry is None:
            where = "the ledger" if self._ring is None else "the ledger or among the trusted keys"
            return Violation("verify.key-unknown", f"{name} is not in {where}")
        if entry.role != "contributor":
            return Violation("verify.key-wrong-role", f"{name} has role {entry.role} among the trusted keys")
        if (status := entry.standing(at, issued)) is not KeyStatus.USABLE:
            return Violation("verify.trusted-key-unusable", f"{name} is {status.value} among the trusted keys")
        return entry.key

    def contributor_violation(self, kid: bytes, at: int) -> Violation | None:
        """Why a contributor's key does not count at `at`, as far as that shows without the attestation."""
        known = self._keys.get(kid)
        return None if known is None else known.contributor_violation(at)

    def any_violation(self, kids: Iterable[bytes], first: int, last: int) -> bool:
        """Whether `contributor_violation` may object to one of these keys at a time in [first, last]."""
        return any(self.contributor_violation(kid, at) is not None for kid in kids for at in (first, last))

    def revoked(self, kid: bytes, at: int) -> bool:
        """Whether nothing that it signed counts at `at`."""
        known = self._keys.get(kid)
        return known is not None and known.revoked is not None and at >= known.revoked

    def signers(
        self, message: bytes, signatures: Iterable[PartySignature], roles: tuple[Role, ...], at: int
    ) -> tuple[set[bytes], Violation | None]:
        """Who of these roles signed the message; and what is wrong with the first signature that does not count."""
        found: set[bytes] = set()
        for signed in signatures:
            known = self._keys.get(signed.key)
            if known is None or known.key.role not in roles:
                allowed = " or ".join(role.name.lower() for role in roles)
                return found, Violation("verify.signer-wrong-role", f"key {signed.key.hex()[:16]} is no {allowed}")
            if (wrong := known.violation(known.key.role, at, at)) is not None:
                return found, wrong
            if not known.public.verify(message, signed.signature):
                return found, Violation("verify.signature-invalid", f"{known.key.name!r} did not sign this text")
            found.add(signed.key)
        return found, None

    def of_ledger(self) -> dict[bytes, _ReplayedKey]:
        """The keys that ever signed checkpoints, or may."""
        return {kid: each for kid, each in self._keys.items() if each.key.role is Role.LEDGER}

    def witnesses(self) -> list[Key]:
        """The witnesses that were ever named and are not revoked."""
        return [each.key for each in self._keys.values() if each.key.role is Role.WITNESS and each.revoked is None]


class PolicyInForce:
    """Floors and class presets after the leaves read so far. `version` changes with them."""

    def __init__(self, header: Header, current: PolicyChange | Header | None = None) -> None:
        """`current` skips the changes in between: for admission, where only the newest policy counts."""
        self._origin, self._last = header.origin, current or header
        self.floors, self.presets = self._last.floors, {each.cls: each for each in self._last.presets}
        self.version = 0
        self._since: list[tuple[int, dict[str, Preset]]] = [(0, self.presets)]
        self._header_keys = {each.id for each in header.keys}
        self.loosened_by_unnamed: list[int] = []  # leaves that protect less, signed by a key that the header lacks

    def change(self, leaf: Leaf, keys: ReplayedKeys) -> None:
        """Check and apply one policy change: stricter, or signed by two parties."""
        new = leaf.record
        assert isinstance(new, PolicyChange)
        names = [each.cls for each in new.presets]
        if len(set(names)) < len(names):
            fail(leaf.seq, PolicyChange, "verify.policy-class-twice", "the policy names a class twice")
        signers, wrong = keys.signers(new.message(self._origin), new.signatures, (Role.LEDGER, Role.AUDITOR), leaf.time)
        if wrong is not None:
            fail(leaf.seq, PolicyChange, wrong.code, f"a signature of the policy does not count: {wrong.reason}")
        looser = loosened(self.floors, self.presets.values(), new.floors, new.presets)
        if looser and len(signers) < 2:
            reason = f"{looser[0]}; that needs signatures of two parties, and has {len(signers)}"
            fail(leaf.seq, PolicyChange, "verify.policy-loosened-without-two", reason)
        if (misfit := wrong_predecessor(new, self._last)) is not None:
            fail(leaf.seq, PolicyChange, "verify.policy-wrong-predecessor", misfit)
        if looser and len(signers & self._header_keys) < 2:
            self.loosened_by_unnamed.append(leaf.seq)
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
        """The presets of a class after so many leaves, and later: a run keeps the plan that it began with."""
        return [presets[cls] for presets in self._from(leaf) if cls in presets]

    def _from(self, leaf: int) -> list[dict[str, Preset]]:
        first = sum(seq < leaf for seq, _ in self._since) - 1
        return [presets for _, presets in self._since[max(first, 0) :]]

    def violation(self, terms: ContributionTerms) -> Violation | None:
        """Why a contribution with these terms must not be admitted; None if it may."""
        if (wrong := self.bound_violation(terms.cls, terms.clip_norm, terms.noise_multiplier)) is not None:
            return wrong
        if terms.profile is not None and (deeper := profile_exceeds(self.presets[terms.cls].profile, terms.profile)):
            return Violation("verify.profile-exceeded", deeper)
        return None

    def bound_violation(self, cls: str, c: int, z: int) -> Violation | None:
        """Why the policy does not admit clip norm c and noise multiplier z (in 1e-6) in a class; None if it does."""
        preset, name, floors = self.presets.get(cls), f"class {cls!r}", self.floors
        if preset is None:
            return Violation("verify.class-unknown", f"{name} is not in the policy")
        if preset.public:
            reason = f"{name} is public, but the contribution signed a bound"
            return Violation("verify.bound-of-public-class", reason) if c or z else None
        if not z:
            return Violation("verify.no-bound-signed", f"{name} is private, but the contribution signed no bound")
        clip, noise = f"clip norm {c / 1e6:.9g} is", f"noise multiplier {z / 1e6:.9g} is"
        if c < floors.clip_norm:
            return Violation("verify.clip-norm-below-floor", f"{clip} below the floor, {floors.clip_norm / 1e6:.9g}")
        if z < floors.noise_multiplier:
            return Violation(
                "verify.noise-below-floor", f"{noise} below the floor, {floors.noise_multiplier / 1e6:.9g}"
            )
        if c > preset.clip_norm:
            return Violation(
                "verify.clip-norm-above-class", f"{clip} above that of {name}, {preset.clip_norm / 1e6:.9g}"
            )
        if z < preset.noise_multiplier:
            reason = f"{noise} below that of {name}, {preset.noise_multiplier / 1e6:.9g}"
            return Violation("verify.noise-below-class", reason)
        return None
