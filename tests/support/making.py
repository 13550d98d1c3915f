"""Records and ledgers for tests: plain, deterministic, and as varied as a test needs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from lamina.account.schedule import Event
from lamina.admit.terms import hash_of_floors
from lamina.ledger.governance_records import (
    ClassBounds,
    GoverningRecord,
    Header,
    Key,
    KeyEvent,
    KeyEvents,
    LedgerFloors,
    Role,
    sign_header,
)
from lamina.ledger.key_state import signed_record
from lamina.ledger.records import ContributionRecord, ContributionTerms, Epoch, EpochAccount, Segment, SegmentOutcome
from lamina.ledger.run_records import WEIGHTS, FileDigest, NoiseOrigin, RunEnd, SamplingScheme
from lamina.ledger.schema import program_version
from lamina.ledger.writer import Ledger
from lamina.sign.keys import PrivateKey

ORIGIN = "clinic.example/ledger"
START = 1_800_000_000
RUN = bytes(range(16))
TERMS = ContributionTerms("clinical", "ecg", 1_000_000, 4_000_000, "top 0.25")


def key(name: str) -> PrivateKey:
    """A key that is the same in every run and process."""
    return PrivateKey(Ed25519PrivateKey.from_private_bytes(digest("key", name)))


def digest(*parts: object) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()


LEDGER, AUDITOR, WITNESS, OTHER = (key(name) for name in ("ledger", "auditor", "witness", "other"))
GOVERNING, SECOND = key("governing"), key("second governing")
CONTRIBUTORS = [key(f"contributor {n}") for n in range(7)]
PARTIES = (
    Key(name=ORIGIN, x=LEDGER.public.x, role=Role.LEDGER),
    Key(name="auditor.example", x=AUDITOR.public.x, role=Role.AUDITOR),
    Key(name="witness.example", x=WITNESS.public.x, role=Role.WITNESS),
    Key(name="owner.example", x=GOVERNING.public.x, role=Role.GOVERNING),
)
TWO_OWNERS = (*PARTIES, Key(name="second.example", x=SECOND.public.x, role=Role.GOVERNING))


def owned(header: Header) -> Header:
    """The header, signed by the owners that it names."""
    named = {each.id for each in header.keys}
    return sign_header(header, [one for one in (GOVERNING, SECOND) if one.public.id in named])


def authorised(ledger: Ledger, change: GoverningRecord | KeyEvent | list[KeyEvent], *keys: PrivateKey) -> Any:
    """The change as the next governing record, signed by the owner or by these keys."""
    if not isinstance(change, GoverningRecord):
        change = KeyEvents(events=tuple(change) if isinstance(change, list) else (change,))
    return signed_record(ledger.propose(change), keys or (GOVERNING,))


class Clock:
    """A clock that a test sets."""

    def __init__(self, now: float = START) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def header(**changes: Any) -> Header:
    given: dict[str, Any] = {
        "origin": ORIGIN,
        "accountant": "pld",
        "version": program_version(),
        "delta": 1e-5,
        "floors": LedgerFloors(clip_norm=100_000, noise_multiplier=500_000),
        "presets": (
            ClassBounds(
                cls="clinical", clip_norm=1_000_000, noise_multiplier=1_000_000, profile="top 0.25", population=1000
            ),
            ClassBounds(cls="open", clip_norm=0, noise_multiplier=0, public=True, profile="all layers"),
        ),
        "policy": hash_of_floors(ORIGIN, 100_000, 500_000),
        "retention": 1000,
        "keys": (
            *PARTIES,
            *(
                Key(name=f"contributor-{n}", x=one.public.x, role=Role.CONTRIBUTOR)
                for n, one in enumerate(CONTRIBUTORS)
            ),
        ),
    }
    return owned(Header(**{**given, **changes}))


def admitted(number: int, **changes: Any) -> ContributionRecord:
    given: dict[str, Any] = {
        "descriptor": digest("descriptor", number),
        "attestation": hashlib.sha256(attestation(number)).digest(),
        "key": CONTRIBUTORS[number % 7].public.id,
        "not_before": START - 1000,
        "expires": START + 500,
        "terms": TERMS,
    }
    return ContributionRecord(**{**given, **changes})


def attestation(number: int) -> bytes:
    return b"attestation %d" % number


def segment(index: int = 0, generation: int = 0, **changes: Any) -> Segment:
    given: dict[str, Any] = {
        "index": index,
        "generation": generation,
        "nonce": digest("nonce", index, generation)[:16],
        "first": 10 * index,
        "last": 10 * index + 10,
        "eligibility": 1,
        "outcome": SegmentOutcome.CLOSED,
    }
    return Segment(**{**given, **changes})


def epoch(index: int = 0, generation: int = 0, **changes: Any) -> Epoch:
    given: dict[str, Any] = {
        "run": RUN,
        "segments": (segment(index, generation),),
        "plan": hashlib.sha256(b"plan").digest(),
        "variance": (0.1, 1.0, 1e-300),
        "accounts": (
            EpochAccount(
                cls="clinical",
                clip_norm=1_000_000,
                noise_multiplier=4_000_000,
                charges=(Event(sigma=4.31, q=0.0128, steps=10),),
                spend=1000 * (index + 1),
            ),
        ),
        "state": digest("state", index),
    }
    return Epoch(**{**given, **changes})


def create(where: str, clock: Callable[[], float] | None = None, **changes: Any) -> Ledger:
    return Ledger.create(where, header(**changes), LEDGER, clock=clock or Clock())


def reopen(where: str, clock: Callable[[], float] | None = None) -> Ledger:
    return Ledger.open(where, LEDGER, clock=clock or Clock())


def batches(first: int, stop: int, size: int) -> Iterator[list[ContributionRecord]]:
    for at in range(first, stop, size):
        yield [admitted(n) for n in range(at, min(at + size, stop))]


def ended(run: bytes, **changes: Any) -> RunEnd:
    """The end of a run after its first segment, with weights of zeroes."""
    weights = FileDigest(name=WEIGHTS, sha256=bytes(32))
    made = RunEnd(
        run=run, segment=0, generation=0, steps=10, plan=bytes(32), noise=NoiseOrigin.SYSTEM,
        sampling=SamplingScheme.POISSON, public_number=False, probed=True, covered=True, raw_figures=False,
        hardened=False, caps=(), files=(weights,),
    )  # fmt: skip
    return replace(made, **changes)
