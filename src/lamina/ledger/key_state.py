"""Which keys of a ledger count, after its header and key events; and which key may sign the next checkpoint."""

from __future__ import annotations

from collections.abc import Iterable

from lamina.admit.keys import PrivateKey, format_utc
from lamina.errors import LedgerError
from lamina.ledger.governance_records import Header, Key, KeyChange, KeyEvent, PartySignature, PolicyChange, Role
from lamina.ledger.records import KIND_NUMBERS, decode_leaf
from lamina.ledger.store.interface import StoreReader


class KeyState:
    """The keys of a ledger as they stand after some of its leaves.

    A key of the ledger that an event names signs nothing until a checkpoint that an older key signed covers that event
    (`covered`): otherwise whoever can write could make a key the ledger's own. A key that was replaced still signs the
    first checkpoint that covers its replacement.
    """

    def __init__(self, header: Header, events: Iterable[KeyEvent] = ()) -> None:
        self.origin = header.origin
        self._keys: dict[bytes, Key] = {key.id: key for key in header.keys}
        self._from: dict[bytes, int] = {}
        self._replaced: dict[bytes, int] = {}  # from then on it signs nothing new
        self._revoked: dict[bytes, int] = {}
        self._waiting: set[bytes] = set()  # nobody has vouched for them
        self._uncovered_rotations: set[bytes] = set()  # replaced, and no checkpoint covers that
        for event in events:
            self.apply(event)

    def apply(self, event: KeyEvent) -> None:
        """Go on by one key event. An event about a key that is not there changes nothing."""
        if event.key is not None:
            self._name(event.key, event.effective, event.change)
        if event.target is None:
            return
        gone = self._replaced if event.change is KeyChange.ROTATE else self._revoked
        if event.change is KeyChange.ROTATE and event.target not in self._replaced:
            self._uncovered_rotations.add(event.target)
        gone[event.target] = min(gone.get(event.target, event.effective), event.effective)

    def _name(self, key: Key, effective: int, change: KeyChange) -> None:
        out = key.id in self._replaced or key.id in self._revoked
        if key.role is Role.LEDGER and (key.id not in self._keys or out):
            self._waiting.add(key.id)  # also one that comes back: its thief could have written that
        self._keys[key.id] = key
        self._from[key.id] = effective
        if change is KeyChange.ADD:
            self._replaced.pop(key.id, None)
            self._revoked.pop(key.id, None)
            self._uncovered_rotations.discard(key.id)

    def covered(self) -> None:
        """A checkpoint covers all that was applied."""
        self._waiting.clear()
        self._uncovered_rotations.clear()

    # ----------------------------------------------------------------------------------- questions

    def get(self, kid: bytes) -> Key | None:
        """The key with that id, whether it counts or not."""
        return self._keys.get(kid)

    def all(self) -> tuple[Key, ...]:
        """Every key that was ever named."""
        return tuple(self._keys.values())

    def usable(self, kid: bytes, role: Role, time: int) -> Key | None:
        """The key with that id, if it counts in this role at that time of the ledger."""
        key = self._keys.get(kid)
        return None if key is None or key.role is not role or self.wrong(kid, time) is not None else key

    def wrong(self, kid: bytes, time: int) -> str | None:
        """Why the key with that id does not count at that time, whatever its role; None if it does."""
        return self._gone(kid, time, (self._revoked, "revoked"), (self._replaced, "replaced"))

    def why_not_signing(self, kid: bytes, time: int) -> str | None:
        """Why that key may not sign the next checkpoint, if the last leaf is of that time; None if it may."""
        key = self._keys.get(kid)
        if key is None or key.role is not Role.LEDGER or key.name != self.origin:
            return "is not one that signs its checkpoints"
        if kid in self._waiting:
            return "is named by a key event that no checkpoint of an older key covers yet"
        if kid in self._uncovered_rotations:  # this one is its last
            return self._gone(kid, time, (self._revoked, "revoked"))
        return self.wrong(kid, time)

    def _gone(self, kid: bytes, time: int, *ends: tuple[dict[bytes, int], str]) -> str | None:
        key = self._keys.get(kid)
        if key is None:
            return "is not one of the ledger"
        if (since := max(self._from.get(kid, 0), key.valid_from)) > time:
            return f"counts from {format_utc(since)} on"
        if key.valid_until is not None and time >= key.valid_until:
            return f"was valid until {format_utc(key.valid_until)}"
        for gone, word in ends:
            if kid in gone and time >= gone[kid]:
                return f"was {word} at {format_utc(gone[kid])}"
        return None

    def signers(
        self, message: bytes, signatures: Iterable[PartySignature], roles: Iterable[Role], time: int
    ) -> set[bytes]:
        """Ids of the keys in one of these roles whose signature of the message holds."""
        found, allowed = set(), tuple(roles)
        for signed in signatures:
            keys = (self.usable(signed.key, role, time) for role in allowed)
            key = next((key for key in keys if key is not None), None)
            if key is not None and key.public.verify(message, signed.signature):
                found.add(signed.key)
        return found

    def signed_by_two(self, change: PolicyChange, origin: str, time: int) -> bool:
        """Whether two parties signed a policy change, as a looser one needs."""
        return len(self.signers(change.message(origin), change.signatures, (Role.LEDGER, Role.AUDITOR), time)) >= 2


def key_state_at(rows: StoreReader, header: Header, size: int) -> KeyState:
    """The keys after so many leaves, with what the last checkpoint covers."""
    last, found = rows.checkpoint(), KeyState(header)
    covered = 0 if last is None else last.size
    for seq, data in rows.of_kind(KIND_NUMBERS[KeyEvent], 0, size):
        if seq >= covered:
            break
        found.apply(_decode_key_event(data))
    found.covered()
    for _, data in rows.of_kind(KIND_NUMBERS[KeyEvent], covered, size):
        found.apply(_decode_key_event(data))
    return found


def check_key_may_sign(parties: KeyState, key: PrivateKey, time: int) -> None:
    """LedgerError unless the key may sign the next checkpoint, if the last leaf is of that time."""
    if (wrong := parties.why_not_signing(key.public.id, time)) is not None:
        raise LedgerError(
            "ledger.key-no-key",
            f"key {key.public.name[:16]} is no key of the ledger {parties.origin!r} at this time: it {wrong}",
            "give the key that its header or a key event names; the one before it signs over that event first",
        )


def _decode_key_event(data: bytes) -> KeyEvent:
    record = decode_leaf(data).record
    assert isinstance(record, KeyEvent)
    return record
