"""`Withdrawal`: a contribution is out from here on. Nothing is erased by it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from lamina.ledger.errors import LedgerError
from lamina.ledger.records.fields import COUNT, DIGEST, RUN, SEQ, OneOf, check, define


class Reason(enum.Enum):
    """Why; an enumeration, because free text in a ledger that is never erased would be personal data."""

    REQUEST = 1  # whoever contributed asked for it
    CONSENT = 2  # whoever the data is about withdrew consent
    LEGAL = 3  # a court or an authority ordered it
    DATA = 4  # the data is wrong
    KEY = 5  # the key that signed is revoked
    EXPIRED = 6  # the attestation is past its time
    POLICY = 7  # its class or bound is not admitted any more


class Effect(enum.Enum):
    """What becomes of a segment that is open at that moment. Charged it is in both cases."""

    FINISH = 1  # it is finished with the contribution in it
    ABANDON = 2  # it is given up and done again without


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrawal:
    """The contribution in leaf `target` is in no segment that opens after this leaf.

    `run` and `segment` name the first segment without it in a run that was at work; `request` is the digest of a
    signed request, if there is one.
    """

    target: int
    reason: Reason
    effect: Effect = Effect.FINISH
    run: bytes | None = None
    segment: int | None = None
    request: bytes | None = None

    def __post_init__(self) -> None:
        check(self)
        if (self.run is None) != (self.segment is None):
            raise LedgerError(
                "ledger.run-segment-withdrawal",
                "run and segment of Withdrawal do not fit",
                "give both, or neither",
            )


define(
    Withdrawal,
    {
        1: ("target", SEQ),
        2: ("reason", OneOf(Reason)),
        3: ("effect", OneOf(Effect)),
        4: ("run", RUN),
        5: ("segment", COUNT),
        6: ("request", DIGEST),
    },
    optional=[4, 5, 6],
)
