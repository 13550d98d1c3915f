"""The keys of contributors in a ledger: whose signatures count, as a key ring has it, so that an auditor needs none.

ring           ledger
a key          KeyEvent ADD, before the first contribution that it signed
rotated        KeyEvent ROTATE: what the old key signed before stays good
revoked        KeyEvent REVOKE, from the instant that the ring says; again only if that moves to earlier

Labels of a ring are not written: they may be names of people or places.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from lamina.admit.keyring import KeyEntry, KeyRing
from lamina.admit.reason import Reason
from lamina.admit.times import shown
from lamina.ledger import leaf
from lamina.ledger.at import Moved, append_at
from lamina.ledger.ledger import Ledger
from lamina.ledger.records import NUMBERS, Change, Header, Key, KeyEvent, Role
from lamina.ledger.store.base import Reader
from lamina.ledger.view import head_of

_ROLE = "contributor"


@dataclass(slots=True)
class _Held:
    """A key of the ledger, and what became of it; the same rules as in `check.keys`."""

    key: Key
    since: int = 0
    retired: int | None = None
    revoked: int | None = None


@dataclass(slots=True)
class LedgerKeys:
    """The keys of a ledger after its first `size` leaves."""

    header: Header
    size: int = 0
    held: dict[bytes, _Held] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.held = {key.id: _Held(key) for key in self.header.keys}

    def follow(self, rows: Reader, size: int) -> None:
        """Go on to the first `size` leaves of what `rows` sees."""
        for _, data in rows.of_kind(NUMBERS[KeyEvent], self.size, size):
            event = leaf.decode(data).record
            assert isinstance(event, KeyEvent)
            self.apply(event)
        self.size = size

    def apply(self, event: KeyEvent) -> None:
        """Go on by one event."""
        if event.key is not None:
            self.held[event.key.id] = _Held(event.key, since=event.effective)
        target = self.held.get(event.target) if event.target is not None else None
        if target is not None and event.change is Change.ROTATE:
            target.retired = _earlier(target.retired, event.effective)
        if target is not None and event.change is Change.REVOKE:
            target.revoked = _earlier(target.revoked, event.effective)

    def holds(self, kid: bytes) -> bool:
        """Whether it names this key, for a contributor."""
        own = self.held.get(kid)
        return own is not None and own.key.role is Role.CONTRIBUTOR

    def after(self, more: Iterable[KeyEvent]) -> LedgerKeys:
        """The keys as they would be after these events."""
        made = LedgerKeys(self.header, self.size)
        made.held = {kid: replace(own) for kid, own in self.held.items()}
        for event in more:
            made.apply(event)
        return made

    def wrong(self, kid: bytes, at: int, issued: int) -> tuple[Reason, str] | None:
        """Why the ledger does not take what this key signed at `issued`, at the time `at`."""
        if (own := self.held.get(kid)) is None:
            return Reason.UNKNOWN_KEY, ""
        key, told = own.key, f"by the ledger, key {kid.hex()[:16]}"
        if key.role is not Role.CONTRIBUTOR:
            return Reason.WRONG_ROLE, f"{told} is for {key.role.name.lower()}"
        if own.revoked is not None and at >= own.revoked:
            return Reason.REVOKED_KEY, f"{told} is revoked from {shown(own.revoked)}"
        begins = max(own.since, key.valid_from)
        if at < begins or issued < key.valid_from:
            return Reason.EARLY_KEY, f"{told} is valid from {shown(begins)}"
        if key.valid_until is not None and at >= key.valid_until:
            return Reason.RETIRED_KEY, f"{told} was valid until {shown(key.valid_until)}"
        if own.retired is not None and issued >= own.retired:
            return Reason.RETIRED_KEY, f"{told} was replaced at {shown(own.retired)}"
        return None


def events(known: LedgerKeys, ring: KeyRing, kids: Iterable[bytes] = ()) -> list[KeyEvent]:
    """What the ledger does not say yet of the keys that it holds and of `kids`, in an order that it accepts.

    Nothing of keys that are no contributor's, by the ring or by the ledger.
    """
    wanted, now, found = set(kids), known.after(()), list[KeyEvent]()

    def say(event: KeyEvent) -> None:
        now.apply(event)
        found.append(event)

    for entry in _oldest_first(ring):  # whoever takes over comes after whom he replaces
        if entry.id in wanted and entry.id not in now.held:
            say(_added(entry))
        if not now.holds(entry.id):
            continue
        own = now.held[entry.id]
        heir = None if entry.replaced_by is None else ring.get(entry.replaced_by)
        if heir is not None and own.retired is None and heir.id not in now.held:
            say(_rotated(entry, heir))
        if entry.revoked_from is not None and (own.revoked is None or entry.revoked_from < own.revoked):
            say(KeyEvent(change=Change.REVOKE, target=entry.id, effective=entry.revoked_from))
    return found


def follow_ring(ledger: Ledger, ring: KeyRing, kids: Iterable[bytes] = ()) -> int:
    """Let the ledger say what the ring says of the keys that the ledger holds, and of `kids`; how many events.

    What is said already is not said again. With the ledger's key a checkpoint covers it.
    """
    wanted = list(kids)
    while True:
        known = ledger.patiently(lambda: _read(ledger))
        if not (found := events(known, ring, wanted)):
            return 0
        try:
            append_at(ledger, known.size, found)
        except Moved:
            continue
        if ledger.signs:
            ledger.checkpoint()
        return len(found)


def _read(ledger: Ledger) -> LedgerKeys:
    known = LedgerKeys(ledger.header)
    with ledger.store.read() as rows:
        known.follow(rows, head_of(rows).size)
    return known


def _oldest_first(ring: KeyRing) -> list[KeyEntry]:
    return sorted((entry for entry in ring if entry.role == _ROLE), key=lambda each: each.valid_from)


def _added(entry: KeyEntry) -> KeyEvent:
    return KeyEvent(change=Change.ADD, key=_key(entry), effective=entry.valid_from)


def _rotated(old: KeyEntry, heir: KeyEntry) -> KeyEvent:
    assert old.retired_from is not None
    return KeyEvent(change=Change.ROTATE, key=_key(heir), target=old.id, effective=old.retired_from)


def _key(entry: KeyEntry) -> Key:
    name = f"contributor-{entry.key.name[:8]}"
    return Key(name=name, x=entry.key.x, role=Role.CONTRIBUTOR, valid_from=entry.valid_from)


def _earlier(one: int | None, two: int) -> int:
    return two if one is None else min(one, two)
