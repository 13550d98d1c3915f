"""`Parties`: whose signatures count, by the header and the key events after it."""

from __future__ import annotations

from collections.abc import Iterable

from lamina.ledger.records import Change, Header, Key, KeyEvent, PolicyChange, Role, Signed


class Parties:
    """The keys of a ledger as they stand after some of its leaves."""

    def __init__(self, header: Header, events: Iterable[KeyEvent] = ()) -> None:
        self._keys: dict[bytes, Key] = {key.id: key for key in header.keys}
        self._from: dict[bytes, int] = {}
        self._until: dict[bytes, int] = {}
        for event in events:
            self.apply(event)

    def apply(self, event: KeyEvent) -> None:
        """Go on by one key event. An event about a key that is not there changes nothing."""
        if event.key is not None:
            self._keys[event.key.id] = event.key
            self._from[event.key.id] = event.effective
            if event.change is Change.ADD:
                self._until.pop(event.key.id, None)
        if event.target is not None:
            until = self._until.get(event.target, event.effective)
            self._until[event.target] = min(until, event.effective)

    def usable(self, kid: bytes, role: Role, time: int) -> Key | None:
        """The key with that id, if it counts in this role at that time of the ledger."""
        key = self._keys.get(kid)
        if key is None or key.role is not role or not key.valid(time):
            return None
        if time < self._from.get(kid, 0) or time >= self._until.get(kid, time + 1):
            return None
        return key

    def signers(
        self, message: bytes, signatures: Iterable[Signed], roles: Iterable[Role], time: int
    ) -> set[bytes]:
        """Ids of the keys in one of these roles whose signature of the message holds."""
        found = set()
        for signed in signatures:
            keys = (self.usable(signed.key, role, time) for role in roles)
            key = next((key for key in keys if key is not None), None)
            if key is not None and key.public.verify(message, signed.signature):
                found.add(signed.key)
        return found

    def allow(self, change: PolicyChange, origin: str, time: int) -> bool:
        """Whether two parties signed a policy change, as a looser one needs."""
        return (
            len(self.signers(change.message(origin), change.signatures, (Role.LEDGER, Role.AUDITOR), time))
            >= 2
        )
