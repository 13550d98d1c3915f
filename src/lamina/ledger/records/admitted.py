"""`Admitted`: a contribution was let in, under the bound that it signed."""

from __future__ import annotations

from dataclasses import dataclass, field

from lamina import cbor
from lamina.admit.times import LAST
from lamina.ledger.errors import LedgerError
from lamina.ledger.records.fields import (
    CLASS,
    DATA_CLASS,
    DIGEST,
    KEY_ID,
    MICRO,
    PROFILE,
    TIME,
    Part,
    check,
    define,
    schema,
)  # fmt: skip

# A number as CBOR writes it, in its shortest form only: for patterns over the bytes of leaves.
UINT = rb"([\x00-\x17]|\x18[\x18-\xff]|\x19[\x01-\xff].|\x1a(?!\x00\x00).{4}|\x1b(?!\x00{4}).{8})"


@dataclass(frozen=True, slots=True)
class Terms:
    """What many contributions have in common: their class and bound.

    cls               admissibility class
    data_class        what the data is
    clip_norm         c, signed, in 1e-6
    noise_multiplier  z, signed, over the whole participation, in 1e-6
    profile           how deep it may reach, by its class; absent: the whole stack
    """

    cls: str
    data_class: str
    clip_norm: int
    noise_multiplier: int
    profile: str | None = None
    encoded: bytes = field(init=False, repr=False, compare=False)  # in CBOR, made once for many contributions

    def __post_init__(self) -> None:
        check(self)
        object.__setattr__(self, "encoded", cbor.encode(schema(Terms).plain(self)))
        if (self.clip_norm == 0) != (self.noise_multiplier == 0):
            raise LedgerError(
                "ledger.terms-clip-norm",
                f"Terms have clip_norm {self.clip_norm} and noise_multiplier {self.noise_multiplier}",
                "both are 0 in a public class, neither elsewhere",
            )

    @property
    def bound(self) -> tuple[str, int, int]:
        """What names its account in an epoch."""
        return (self.cls, self.clip_norm, self.noise_multiplier)


define(
    Terms,
    {
        1: ("cls", CLASS),
        2: ("data_class", DATA_CLASS),
        3: ("clip_norm", MICRO),
        4: ("noise_multiplier", MICRO),
        5: ("profile", PROFILE),
    },
    optional=[5],
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """One contribution, by digests: nothing here leads to its content, or to its contributor without a key ring.

    descriptor   SHA-256 of the descriptor: its identity. A nonce that is not published keeps it from being guessed
    attestation  SHA-256 of the attestation, whose bytes the store keeps until they are pruned
    key          id of the key that signed
    not_before, expires   its time, as signed
    anchor       its digest in a content-anchoring system, if it has one
    subject      keyed tag of who it is about, if it has one: in a ledger once, for good
    """

    descriptor: bytes
    attestation: bytes
    key: bytes
    not_before: int
    expires: int
    terms: Terms
    anchor: bytes | None = None
    subject: bytes | None = None

    def __post_init__(self) -> None:
        d, a, k, start, end = self.descriptor, self.attestation, self.key, self.not_before, self.expires
        if not (
            type(d) is type(a) is type(k) is bytes
            and len(d) == len(a) == len(k) == 32
            and type(start) is type(end) is int
            and 0 <= start < end <= LAST
            and type(self.terms) is Terms
            and (self.anchor is None or (type(self.anchor) is bytes and len(self.anchor) == 32))
            and (self.subject is None or (type(self.subject) is bytes and len(self.subject) == 32))
        ):
            _explain(self)

    @property
    def bound(self) -> tuple[str, int, int]:
        """What names its account in an epoch."""
        return self.terms.bound


define(
    Admitted,
    {
        1: ("descriptor", DIGEST),
        2: ("attestation", DIGEST),
        3: ("key", KEY_ID),
        4: ("not_before", TIME),
        5: ("expires", TIME),
        6: ("terms", Part(Terms)),
        7: ("anchor", DIGEST),
        8: ("subject", DIGEST),
    },
    optional=[7, 8],
)


def _explain(record: Admitted) -> None:
    check(record)
    raise LedgerError(
        "ledger.admitted-valid-until",
        f"Admitted is valid from {record.not_before} until {record.expires}",
        "not_before comes before expires",
    )
