"""Which keys count and which policy is in force after some leaves of a ledger, and what may change them next."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from lamina.admit.key_ring import KeyStatus
from lamina.admit.keys import PrivateKey, format_utc
from lamina.errors import LedgerError
from lamina.ledger.governance_records import (
    Header,
    Key,
    KeyChange,
    KeyEvent,
    PartySignature,
    PolicyChange,
    Role,
    loosened,
    wrong_predecessor,
)
from lamina.ledger.records import KIND_NUMBERS, decode_leaf
from lamina.ledger.store.rows import StoreReader, head_of


@dataclass(slots=True)
class KeyHistory:
    """A key of the ledger, and what became of it."""

    key: Key
    since: int = 0
    replaced: int | None = None  # from then on it signs nothing new
    revoked: int | None = None  # from then on nothing counts that it ever signed

    def problem(self, at: int, issued: int) -> tuple[KeyStatus, str] | None:
        """Why the key does not count at `at` for something signed at `issued`; None if it does."""
        key = self.key
        if self.revoked is not None and at >= self.revoked:
            return KeyStatus.REVOKED, f"is revoked from {format_utc(self.revoked)}"
        if at < self.since or at < key.valid_from or issued < key.valid_from:
            return KeyStatus.NOT_YET, f"is valid from {format_utc(max(self.since, key.valid_from))}"
        if key.valid_until is not None and at >= key.valid_until:
            return KeyStatus.RETIRED, f"was valid until {format_utc(key.valid_until)}"
        if self.replaced is not None and issued >= self.replaced:
            return KeyStatus.RETIRED, f"was replaced at {format_utc(self.replaced)}"
        return None


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
        for _, data in rows.of_kind(KIND_NUMBERS[KeyEvent], self.size, size):
            event = decode_leaf(data).record
            assert isinstance(event, KeyEvent)
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
        made: KeyState = object.__new__(KeyState)
        made.origin, made.size = self.origin, self.size
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

    def usable(self, kid: bytes, role: Role, time: int) -> Key | None:
        """The key with that id, if it counts in this role at that time of the ledger."""
        key = self.get(kid)
        return None if key is None or key.role is not role or self.problem_with(kid, time) is not None else key

    def problem_with(self, kid: bytes, time: int) -> str | None:
        """Why the key with that id does not count at that time, whatever its role; None if it does."""
        if (known := self._keys.get(kid)) is None:
            return "is not in the ledger"
        return None if (found := known.problem(time, time)) is None else found[1]

    def why_not_signing(self, kid: bytes, time: int) -> str | None:
        """Why that key may not sign the next checkpoint, if the last leaf is of that time; None if it may."""
        known = self._keys.get(kid)
        if known is None or known.key.role is not Role.LEDGER or known.key.name != self.origin:
            return "is not a checkpoint key of the ledger"
        if kid in self._uncovered_keys:
            return "was added by a key event that no checkpoint of an older key covers yet"
        last = kid in self._uncovered_rotations  # it may still sign over its replacement
        found = (replace(known, replaced=None) if last else known).problem(time, time)
        return None if found is None else found[1]

    def signers(
        self, message: bytes, signatures: Iterable[PartySignature], roles: tuple[Role, ...], time: int
    ) -> set[bytes]:
        """Ids of the keys in one of these roles whose signature of the message holds."""
        found = set()
        for signed in signatures:
            keys = (self.usable(signed.key, role, time) for role in roles)
            key = next((key for key in keys if key is not None), None)
            if key is not None and key.public.verify(message, signed.signature):
                found.add(signed.key)
        return found

    # ----------------------------------------------------------------------------------- what may follow

    def check_event(self, event: KeyEvent, now: int) -> None:
        """LedgerError unless the event may come next: about a known key, in its one role, and some key still signs."""
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
        if event.change is KeyChange.REVOKE and target is not None and target.role is Role.LEDGER:
            others, time = (kid for kid in self._keys if kid != event.target), max(now, event.effective)
            if all(self.why_not_signing(kid, time) is not None for kid in others):
                problem = f"key {target.id.hex()[:16]} is the last that signs checkpoints of {self.origin!r}"
                remedy = "rotate to a new key, sign a checkpoint with the old one, then revoke it with the new one"
                raise LedgerError("ledger.last-signing-key", problem, remedy)

    def check_policy_change(self, change: PolicyChange, before: Header | PolicyChange, now: int) -> None:
        """LedgerError unless the change may follow `before`: every signature holds, and two if it protects less."""
        names = [each.cls for each in change.presets]
        if len(set(names)) < len(names):
            raise LedgerError("ledger.policy-class-twice", "the policy names a class twice", "name each once")
        good = self.signers(change.message(self.origin), change.signatures, (Role.LEDGER, Role.AUDITOR), now)
        looser = loosened(before.floors, before.presets, change.floors, change.presets)
        if looser and len(good) < 2:
            problem = f"the policy protects less than {self.origin!r} has promised: {'; '.join(looser)}"
            remedy = "keep what was promised, or have two parties sign the change: lamina ledger policy"
            raise LedgerError("ledger.policy-loosened", problem, remedy)
        if (wrong := wrong_predecessor(change, before)) is not None:
            problem = f"cannot change the policy: {wrong}"
            raise LedgerError("ledger.policy-wrong-predecessor", problem, "make the change again, and have that signed")
        for signed in change.signatures:
            if signed.key not in good:
                problem = f"the signature of the policy by key {signed.key.hex()[:16]} does not count"
                remedy = "leave it out, or give one by a ledger key or an auditor, over this very change"
                raise LedgerError("ledger.policy-signature-invalid", problem, remedy)


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
        problem = f"key {key.public.name[:16]} cannot sign for the ledger {keys.origin!r}: it {wrong}"
        remedy = "give the key that the header or a key event names; the one before it signs over that event first"
        raise LedgerError("ledger.key-may-not-sign", problem, remedy)


def last_policy_record(rows: StoreReader, header: Header, size: int | None = None) -> Header | PolicyChange:
    """The header or policy change in force after the first `size` leaves; of all leaves without a size."""
    last: Header | PolicyChange = header
    for _, data in rows.of_kind(KIND_NUMBERS[PolicyChange], 0, head_of(rows).size if size is None else size):
        record = decode_leaf(data).record
        assert isinstance(record, PolicyChange)
        last = record
    return last
