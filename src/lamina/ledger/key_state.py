"""Which keys count and which policy is in force after some leaves of a ledger, and what may change them next.

One rule for who writes and who verifies: what `check_event` and `check_policy_change` refuse is neither appended nor,
where it stands in a ledger, passed by a verification.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from lamina.admit.keys import PrivateKey, PublicKey, format_utc
from lamina.errors import LedgerError
from lamina.ledger.governance_records import (
    Aggregate,
    Header,
    Key,
    KeyChange,
    KeyEvent,
    PartySignature,
    PolicyChange,
    Preset,
    Role,
    loosened,
    policy_record_digest,
    profile_exceeds,
)
from lamina.ledger.records import KIND_NUMBERS, ContributionTerms, Epoch, decode_leaf
from lamina.ledger.store.rows import StoreReader, head_of

R = TypeVar("R", KeyEvent, PolicyChange, Epoch, Aggregate)


def records_of(rows: StoreReader, kind: type[R], first: int, stop: int) -> Iterator[R]:
    """The records of one kind in leaves [first, stop)."""
    for _, data in rows.of_kind(KIND_NUMBERS[kind], first, stop):
        record = decode_leaf(data).record
        assert isinstance(record, kind)
        yield record


def retention_in_force(header: Header) -> int:
    """Seconds for which the body of a contribution is kept after it was admitted."""
    return header.retention


class Violation(NamedTuple):
    """A broken rule, before it is known which leaf broke it."""

    code: str
    reason: str


@dataclass(slots=True)
class KeyHistory:
    """A key of the ledger, and what became of it."""

    key: Key
    since: int = 0
    replaced: int | None = None  # from then on it signs nothing new
    revoked: int | None = None  # from then on nothing counts that it ever signed
    public: PublicKey = field(init=False)

    def __post_init__(self) -> None:
        self.public = self.key.public

    def problem(self, at: int, issued: int) -> Violation | None:
        """Why the key does not count at `at` for something signed at `issued`; None if it does."""
        key = self.key
        if self.revoked is not None and at >= self.revoked:
            return Violation("verify.key-revoked", f"is revoked from {format_utc(self.revoked)}")
        if at < self.since or at < key.valid_from or issued < key.valid_from:
            since = format_utc(max(self.since, key.valid_from))
            return Violation("verify.key-not-yet-valid", f"is valid from {since}")
        if key.valid_until is not None and at >= key.valid_until:
            return Violation("verify.key-expired", f"was valid until {format_utc(key.valid_until)}")
        if self.replaced is not None and issued >= self.replaced:
            return Violation("verify.key-replaced", f"was replaced at {format_utc(self.replaced)}")
        return None

    def contributor_problem(self, at: int, issued: int | None = None) -> Violation | None:
        """The same of a contributor's key, which is named. Without `issued`, as far as that shows without it."""
        name, role = f"key {self.key.id.hex()[:16]}", self.key.role
        if role is not Role.CONTRIBUTOR:
            return Violation("verify.key-wrong-role", f"{name} has role {role.name.lower()}, not contributor")
        # Only the attestation says when it was signed: at the earliest when the key became valid.
        wrong = self.problem(at, self.key.valid_from if issued is None else issued)
        return None if wrong is None else Violation(wrong.code, f"{name} {wrong.reason}")


class KeyState:
    """The keys of a ledger after its first `size` leaves.

    A key of the ledger that an event names signs nothing until a checkpoint that an older key signed covers that event
    (`covered`): otherwise whoever can write could make a key the ledger's own. A key that was replaced still signs the
    first checkpoint that covers its replacement.
    """

    def __init__(self, header: Header) -> None:
        self.origin, self.size = header.origin, 0
        self._keys = {key.id: KeyHistory(key) for key in header.keys}
        self._uncovered_keys: set[bytes] = set()  # named by an event that no checkpoint covers
        self._uncovered_rotations: set[bytes] = set()  # replaced by such an event

    def follow(self, rows: StoreReader, size: int) -> None:
        """Apply the key events up to the first `size` leaves of what `rows` sees."""
        for event in records_of(rows, KeyEvent, self.size, size):
            self.apply(event)
        self.size = max(size, self.size)

    def apply(self, event: KeyEvent) -> None:
        """Apply one key event. An event about a key that is not there changes nothing."""
        if (key := event.key) is not None:
            known = self._keys.get(key.id)
            if key.role is Role.LEDGER and (known is None or known.replaced is not None or known.revoked is not None):
                self._uncovered_keys.add(key.id)  # also one that comes back: its thief could have written that
            self._keys[key.id] = KeyHistory(key, since=event.effective)
            self._uncovered_rotations.discard(key.id)
        if event.target is None or (target := self._keys.get(event.target)) is None:
            return
        if event.change is KeyChange.ROTATE:
            if target.replaced is None:
                self._uncovered_rotations.add(event.target)
            target.replaced = _earlier(target.replaced, event.effective)
        else:
            target.revoked = _earlier(target.revoked, event.effective)

    def covered(self) -> None:
        """A checkpoint covers all that was applied."""
        self._uncovered_keys.clear()
        self._uncovered_rotations.clear()

    def after(self, events: Iterable[KeyEvent]) -> KeyState:
        """The keys as they would be after these events."""
        made = copy(self)
        made._keys = {kid: replace(each) for kid, each in self._keys.items()}
        made._uncovered_keys, made._uncovered_rotations = set(self._uncovered_keys), set(self._uncovered_rotations)
        for event in events:
            made.apply(event)
        return made

    # ----------------------------------------------------------------------------------- questions

    def history(self, kid: bytes) -> KeyHistory | None:
        """The key with that id and what became of it, whether it counts or not."""
        return self._keys.get(kid)

    def get(self, kid: bytes) -> Key | None:
        """The key with that id, whether it counts or not."""
        return None if (known := self._keys.get(kid)) is None else known.key

    def all(self) -> tuple[Key, ...]:
        """Every key that was ever named."""
        return tuple(each.key for each in self._keys.values())

    def problem_with(self, kid: bytes, time: int) -> str | None:
        """Why the key with that id does not count at that time, whatever its role; None if it does."""
        if (known := self._keys.get(kid)) is None:
            return "is not in the ledger"
        return None if (found := known.problem(time, time)) is None else found.reason

    def histories(self, role: Role) -> list[KeyHistory]:
        """The keys of a role that were ever named, and what became of each."""
        return [each for each in self._keys.values() if each.key.role is role]

    def vouched_for(self, kid: bytes) -> bool:
        """Whether the header names the key, or a checkpoint of an older key covers the event that does."""
        return kid not in self._uncovered_keys

    def why_not_signing(self, kid: bytes, time: int) -> Violation | None:
        """Why that key may not sign the next checkpoint, if the last leaf is of that time; None if it may."""
        known = self._keys.get(kid)
        if known is None or known.key.role is not Role.LEDGER or known.key.name != self.origin:
            return Violation("verify.checkpoint-key-unknown", "is not a checkpoint key of the ledger")
        if not self.vouched_for(kid):
            reason = "was added by a key event that no checkpoint of an older key covers yet"
            return Violation("verify.checkpoint-key-unvouched", reason)
        last = kid in self._uncovered_rotations  # it may still sign over its replacement
        return (replace(known, replaced=None) if last else known).problem(time, time)

    def signers(
        self, message: bytes, signatures: Iterable[PartySignature], roles: tuple[Role, ...], time: int
    ) -> tuple[set[bytes], Violation | None]:
        """Who of these roles signed the message; and what is wrong with the first signature that does not count."""
        found: set[bytes] = set()
        for signed in signatures:
            known, name = self._keys.get(signed.key), f"key {signed.key.hex()[:16]}"
            if known is None or known.key.role not in roles:
                allowed = " or ".join(role.name.lower() for role in roles)
                return found, Violation("verify.signer-wrong-role", f"{name} is no {allowed}")
            if (wrong := known.problem(time, time)) is not None:
                return found, Violation(wrong.code, f"{name} {wrong.reason}")
            if not known.public.verify(message, signed.signature):
                return found, Violation("verify.signature-invalid", f"{known.key.name!r} did not sign this text")
            found.add(signed.key)
        return found, None

    # ----------------------------------------------------------------------------------- what may follow

    def check_event(self, event: KeyEvent) -> None:
        """LedgerError unless the event is about a known key, in its one role."""
        target = None if event.target is None else self.get(event.target)
        if event.target is not None and target is None:
            problem = f"the ledger has no key {event.target.hex()[:16]}"
            raise LedgerError("ledger.key-unknown", problem, "list its keys: lamina ledger key LEDGER")
        if (new := event.key) is not None:
            known, role, name = self.get(new.id), new.role.name.lower(), f"key {new.id.hex()[:16]}"
            if known is not None and known.role is not new.role:
                problem = f"{name} has role {known.role.name.lower()} and cannot become {role}"
                raise LedgerError("ledger.key-role-changed", problem, "make another key: one key has one role")
            if known is not None and event.change is KeyChange.ROTATE:
                problem = f"{name} is in the ledger already and cannot replace another key"
                raise LedgerError("ledger.rotation-to-known-key", problem, "make a new key, or revoke the old one")
            if target is not None and target.role is not new.role:
                problem = f"{name} with role {role} cannot replace a key with role {target.role.name.lower()}"
                raise LedgerError("ledger.rotation-changes-role", problem, "give the new key the role of the old one")
            if new.role is Role.LEDGER and new.name != self.origin:
                problem = f"a key with role ledger is named {new.name!r}"
                raise LedgerError("ledger.ledger-key-name", problem, f"name it like the ledger: {self.origin!r}")

    def check_still_signed(self, event: KeyEvent, now: int) -> None:
        """LedgerError if the event revokes the last key that signs checkpoints."""
        target = None if event.target is None else self.get(event.target)
        if event.change is KeyChange.REVOKE and target is not None and target.role is Role.LEDGER:
            others, time = (kid for kid in self._keys if kid != event.target), max(now, event.effective)
            if all(self.why_not_signing(kid, time) is not None for kid in others):
                problem = f"key {target.id.hex()[:16]} is the last that signs checkpoints of {self.origin!r}"
                remedy = "rotate to a new key, sign a checkpoint with the old one, then revoke it with the new one"
                raise LedgerError("ledger.last-signing-key", problem, remedy)

    def check_policy_change(self, change: PolicyChange, before: Header | PolicyChange, now: int) -> set[bytes]:
        """LedgerError unless the change may follow `before`; if it protects less, who signed that: two at least."""
        names = [each.cls for each in change.presets]
        if len(set(names)) < len(names):
            raise LedgerError("ledger.policy-class-twice", "the policy names a class twice", "name each once")
        roles = (Role.LEDGER, Role.AUDITOR)
        signers, wrong = self.signers(change.message(self.origin), change.signatures, roles, now)
        if wrong is not None:
            problem = f"a signature of the policy does not count: {wrong.reason}"
            remedy = "leave it out, or give one by a ledger key or an auditor, over this very change"
            raise LedgerError("ledger.policy-signature-invalid", problem, remedy)
        looser = loosened(before.floors, before.presets, change.floors, change.presets)
        if looser and len(signers) < 2:
            problem = f"the policy protects less than {self.origin!r} has promised: {'; '.join(looser)}"
            remedy = "keep what was promised, or have two parties sign the change: lamina ledger policy"
            raise LedgerError("ledger.policy-loosened", problem, remedy)
        if change.previous != policy_record_digest(before):
            problem = "cannot change the policy: it replaces another policy than the one in force"
            raise LedgerError("ledger.policy-wrong-predecessor", problem, "make the change again, and have that signed")
        return signers if looser else set()


def _earlier(one: int | None, two: int) -> int:
    return two if one is None else min(one, two)


def key_state_at(rows: StoreReader, header: Header, size: int) -> KeyState:
    """The keys after so many leaves, with what the last checkpoint covers."""
    last, found = rows.checkpoint(), KeyState(header)
    found.follow(rows, min(size, 0 if last is None else last.size))
    found.covered()
    found.follow(rows, size)
    return found


def check_key_may_sign(keys: KeyState, key: PrivateKey, time: int) -> None:
    """LedgerError unless the key may sign the next checkpoint, if the last leaf is of that time."""
    if (wrong := keys.why_not_signing(key.public.id, time)) is not None:
        problem = f"key {key.public.name[:16]} cannot sign for the ledger {keys.origin!r}: it {wrong.reason}"
        remedy = "give the key that the header or a key event names; the one before it signs over that event first"
        raise LedgerError("ledger.key-may-not-sign", problem, remedy)


def last_policy_record(rows: StoreReader, header: Header, size: int | None = None) -> Header | PolicyChange:
    """The header or policy change in force after the first `size` leaves; of all leaves without a size."""
    changes = records_of(rows, PolicyChange, 0, head_of(rows).size if size is None else size)
    return next(iter(deque(changes, maxlen=1)), header)


class PolicyInForce:
    """Floors and class presets after the leaves read so far. `version` changes with them."""

    def __init__(self, header: Header, current: PolicyChange | Header | None = None) -> None:
        """`current` skips the changes in between: for admission, where only the newest policy counts."""
        self._last = current or header
        self.floors, self.presets = self._last.floors, {each.cls: each for each in self._last.presets}
        self.version = 0
        self._since: list[tuple[int, dict[str, Preset]]] = [(0, self.presets)]
        self._header_keys = {each.id for each in header.keys}
        self.loosened_by_unnamed: list[int] = []  # leaves that protect less, signed by a key that the header lacks

    def change(self, seq: int, new: PolicyChange, keys: KeyState, time: int) -> None:
        """Apply one policy change: stricter, or signed by two parties; LedgerError if it is neither."""
        signers = keys.check_policy_change(new, self._last, time)
        if signers and len(signers & self._header_keys) < 2:
            self.loosened_by_unnamed.append(seq)
        self.floors, self.presets, self._last = new.floors, {each.cls: each for each in new.presets}, new
        self.version += 1
        self._since.append((seq, self.presets))

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
