"""`Entering`: one batch of contributions on its way into a ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from lamina.admit.descriptor import Descriptor
from lamina.admit.reason import Reason
from lamina.admit.refusal import Refused
from lamina.admit.register import MEANWHILE, REFUSED, Beside, Entry, Known, Lost, full
from lamina.ledger import ring
from lamina.ledger.at import append_at
from lamina.ledger.check.policy import PolicyInForce
from lamina.ledger.errors import LedgerError
from lamina.ledger.ledger import Ledger
from lamina.ledger.opening import last_policy
from lamina.ledger.presence import Presence, token
from lamina.ledger.records import Admitted, KeyEvent, Record, Terms
from lamina.ledger.store.base import Reader, Writer
from lamina.ledger.view import head_of


class _Signed(NamedTuple):
    """A contribution as it will stand in the ledger, and the bytes that go beside it."""

    record: Admitted
    attestation: bytes


class Entering:
    """Decided by what the ledger says, then written if it still says so; both may be repeated.

    `lost` are the rows that may not enter, and why.
    """

    def __init__(self, ledger: Ledger, presence: Presence, entries: Sequence[Entry], beside: Beside) -> None:
        self._ledger, self._presence, self._entries, self._beside = ledger, presence, entries, beside
        self._read: dict[int, _Signed | tuple[Reason, str]] = {}  # by row: a source is read once
        self._size = 0
        self._events: list[KeyEvent] = []
        self._new: list[Entry] = []
        self.lost: Lost = {}

    def decide(self) -> None:
        """Who is new and may enter, by the leaves so far."""
        self.lost, self._new, self._events = {}, [], []
        now = self._ledger.now()
        with self._ledger.store.read() as rows:
            self._size = head_of(rows).size
            new = self._unknown(rows)
            if new:
                self._choose(rows, new, now)

    def _unknown(self, rows: Reader) -> list[Entry]:
        new = []
        for entry, known in zip(self._entries, self._presence.look(rows, self._entries), strict=True):
            if known in REFUSED:
                detail = "" if known is Known.WITHDRAWN else MEANWHILE
                self.lost[entry.row] = REFUSED[known], detail
            elif known is Known.NEW:
                new.append(entry)
        return new

    def _choose(self, rows: Reader, new: Sequence[Entry], now: int) -> None:
        header = self._ledger.header
        judge = PolicyInForce.of(header, last_policy(rows, header))
        keys = self._presence.keys(rows)
        missing = {entry.kid for entry in new if not keys.holds(entry.kid)}
        events = ring.events(keys, self._beside.keys, missing) if missing else []
        keys = keys.after(events) if events else keys
        wanted = Counter(entry.cls for entry in new)
        room = {
            cls: self._presence.room(rows, cls, places, count, now)
            for cls, count in wanted.items()
            if (places := self._beside.places[cls]) is not None
        }
        for entry in new:
            if (why := self._wrong(entry, keys, now)) is not None:
                self.lost[entry.row] = why
            elif not room.get(entry.cls, 1):
                self.lost[entry.row] = full(entry.cls, self._beside.places[entry.cls])
            else:
                _check(judge, self._signed(entry).record.terms, self._ledger)
                self._new.append(entry)
                if entry.cls in room:
                    room[entry.cls] -= 1
        if self._new:
            self._events = events

    def _wrong(self, entry: Entry, keys: ring.LedgerKeys, now: int) -> tuple[Reason, str] | None:
        if now >= entry.expires:
            return Reason.EXPIRED, ""
        if (why := keys.wrong(entry.kid, now, entry.issued)) is not None:
            return why
        if entry.row not in self._read:
            try:
                self._read[entry.row] = _signed(entry, self._beside)
            except Refused as refused:
                self._read[entry.row] = refused.reason, refused.detail
        found = self._read[entry.row]
        return None if isinstance(found, _Signed) else found

    def _signed(self, entry: Entry) -> _Signed:
        found = self._read[entry.row]
        assert isinstance(found, _Signed)
        return found

    def write(self) -> None:
        """Append them, with keys that the ledger does not hold yet, and their tokens; Moved if it said more by now."""
        if not self._new:
            return
        signed = [self._signed(entry) for entry in self._new]
        records: list[Record] = [*self._events, *(each.record for each in signed)]
        tokens = [token(entry) for entry in self._new]
        blobs = [each.attestation for each in signed]

        def note(rows: Writer) -> None:
            rows.add_tokens(sorted(set(tokens) - rows.tokens(tokens)))

        append_at(self._ledger, self._size, records, blobs, note)


def _signed(entry: Entry, beside: Beside) -> _Signed:
    found = beside.evidence(entry)
    signed = Descriptor.decode(found.descriptor)
    return _Signed(
        Admitted(
            descriptor=entry.descriptor,
            attestation=entry.attestation,
            key=entry.kid,
            not_before=signed.not_before,
            expires=signed.expires,
            terms=_terms(
                signed.admissibility,
                signed.data_class,
                signed.clip_norm,
                signed.noise_multiplier,
                signed.profile,
            ),
            anchor=signed.anchor,
            subject=entry.tag,
        ),
        found.attestation,
    )


_terms = lru_cache(maxsize=4096)(Terms)


def _check(judge: PolicyInForce, terms: Terms, ledger: Ledger) -> None:
    if (wrong := judge.wrong(terms)) is not None:
        raise LedgerError(
            "ledger.ledger-under-another",
            f"the ledger {ledger.name} is under another policy than the gate: {wrong}",
            "bring it up to date first: lamina admit --ledger does, or lamina.ledger.opening.follow",
        )
