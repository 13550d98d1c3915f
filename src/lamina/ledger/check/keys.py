"""Whose signatures count, at every moment of a ledger: by its header, its key events, and a ring from outside."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lamina.admit.key import PublicKey
from lamina.admit.keyring import KeyRing, Standing
from lamina.admit.times import shown
from lamina.ledger.check.problem import bad
from lamina.ledger.leaf import Leaf
from lamina.ledger.records import Change, Header, Key, KeyEvent, Role, Signed


@dataclass(slots=True)
class _State:
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
            return f"is revoked from {shown(self.revoked)}"
        if at < self.since or at < self.key.valid_from or issued < self.key.valid_from:
            return f"is valid from {shown(max(self.since, self.key.valid_from))}"
        if self.key.valid_until is not None and at >= self.key.valid_until:
            return f"was valid until {shown(self.key.valid_until)}"
        if self.retired is not None and issued >= self.retired:
            return f"was replaced at {shown(self.retired)}"
        return None


class Keys:
    """The keys as they stand after the leaves that were read.

    `version` changes with every key event: whoever remembers an answer remembers it for a version.
    """

    def __init__(self, header: Header, ring: KeyRing | None = None) -> None:
        self._origin, self._ring = header.origin, ring
        self._states = {key.id: _State(key, key.public) for key in header.keys}
        self.version = 0

    def apply(self, leaf: Leaf) -> None:
        """Go on by one key event."""
        event = leaf.record
        assert isinstance(event, KeyEvent)
        target = self._states.get(event.target) if event.target is not None else None
        if event.target is not None and target is None:
            bad(
                leaf.seq,
                KeyEvent,
                "verify.key-not-ledger",
                f"key {event.target.hex()[:16]} is not one of the ledger",
            )
        if event.key is not None:
            self._add(leaf.seq, event.key, event.effective, event.change, target)
        if target is not None and event.change is Change.ROTATE:
            target.retired = _earlier(target.retired, event.effective)
        if target is not None and event.change is Change.REVOKE:
            target.revoked = _earlier(target.revoked, event.effective)
        self.version += 1

    def _add(self, seq: int, key: Key, effective: int, change: Change, target: _State | None) -> None:
        known = self._states.get(key.id)
        if known is not None and known.key.role is not key.role:
            bad(
                seq,
                KeyEvent,
                "verify.key-already-role",
                f"key {key.id.hex()[:16]} is for {known.key.role.name.lower()} already: one role a key",
            )
        if known is not None and change is Change.ROTATE:
            bad(
                seq,
                KeyEvent,
                "verify.key-takes-over",
                f"key {key.id.hex()[:16]} takes over, and is one of the ledger already",
            )
        if target is not None and target.key.role is not key.role:
            bad(
                seq,
                KeyEvent,
                "verify.key-takes-over-2",
                f"a key for {key.role.name.lower()} takes over from one for {target.key.role.name.lower()}",
            )
        if key.role is Role.LEDGER and key.name != self._origin:
            bad(
                seq,
                KeyEvent,
                "verify.key-ledger-named",
                f"a key of the ledger is named {key.name!r}, not {self._origin!r}",
            )
        self._states[key.id] = _State(key, key.public, since=effective)

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
        if entry.role != "contributor" or standing is not Standing.USABLE:
            what = f"is for {entry.role}" if entry.role != "contributor" else f"is {standing.value}"
            return f"key {kid.hex()[:16]} {what}, by the trusted keys"
        return entry.key

    def barred(self, kid: bytes, at: int) -> str | None:
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
            and any(
                state.wrong(Role.CONTRIBUTOR, at, state.key.valid_from) is not None for at in (first, last)
            )
            for state in found
        )

    def revoked(self, kid: bytes, at: int) -> bool:
        """Whether nothing that it signed counts at `at`."""
        state = self._states.get(kid)
        return state is not None and state.revoked is not None and at >= state.revoked

    def signers(
        self, message: bytes, signatures: Iterable[Signed], roles: Iterable[Role], at: int
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

    def of_ledger(self) -> dict[bytes, _State]:
        """The keys that ever signed checkpoints, or may."""
        return {kid: state for kid, state in self._states.items() if state.key.role is Role.LEDGER}

    def witnesses(self) -> list[Key]:
        """The witnesses that were ever named and are not revoked."""
        return [s.key for s in self._states.values() if s.key.role is Role.WITNESS and s.revoked is None]


def _earlier(one: int | None, two: int) -> int:
    return two if one is None else min(one, two)
