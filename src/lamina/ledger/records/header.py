"""`Header`: leaf 0, the contract under which everything after it is verified."""

from __future__ import annotations

from dataclasses import dataclass

from lamina.account import accountant
from lamina.errors import AccountingError
from lamina.ledger.errors import LedgerError
from lamina.ledger.records.fields import (
    ACCOUNTANT,
    COUNT,
    DIGEST,
    ORIGIN,
    SEQ,
    VERSION,
    Exact,
    Many,
    Part,
    Whole,
    check,
    define,
)  # fmt: skip
from lamina.ledger.records.keys import Key, Role
from lamina.ledger.records.policy import MOST_CLASSES, Floors, Preset

SCHEMA = 1
YEAR = 31_557_600  # seconds
MOST_KEYS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """The ledger that this one follows, as it was: its checkpoint in three fields."""

    origin: str
    size: int
    root: bytes

    def __post_init__(self) -> None:
        check(self)


define(Parent, {1: ("origin", ORIGIN), 2: ("size", SEQ), 3: ("root", DIGEST)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What fixes the verification of a ledger for any later auditor.

    origin          its name, which every checkpoint and every attestation carries
    schema          of the records
    accountant      that prices every spend, and the `version` of the program that does
    delta           δ at which every spend is stated
    floors, presets the policy in force at the beginning, and `policy`, the digest of it that contributors sign
    profile_schema  version of the language of depth profiles
    granularity     segments that an epoch closes at most
    cose_alg        the algorithm of attestations: -8 or -19, both Ed25519
    retention       seconds after which contributions may be summed up
    epoch_clock     seconds to which the time of an epoch is rounded down: when exactly a segment ended would tell
                    how long its steps took, and that depends on who was sampled
    keys            the signing parties
    witnesses       how many cosignatures a checkpoint needs
    parent          the ledger before this one, if there was one
    """

    origin: str
    schema: int = SCHEMA
    accountant: str
    version: str
    delta: float
    floors: Floors
    presets: tuple[Preset, ...]
    policy: bytes
    profile_schema: int = 1
    granularity: int = 1
    cose_alg: int = -8
    retention: int = YEAR
    epoch_clock: int = 3600
    keys: tuple[Key, ...]
    witnesses: int = 0
    parent: Parent | None = None

    def __post_init__(self) -> None:
        check(self)
        try:
            accountant(self.accountant)
        except AccountingError as error:
            raise LedgerError(
                "ledger.accountant-header", f"accountant of Header: {error.problem}", error.remedy
            ) from None
        _unique("class", [each.cls for each in self.presets])
        _unique("key", [each.id.hex() for each in self.keys])
        if not any(each.role is Role.LEDGER and each.name == self.origin for each in self.keys):
            raise LedgerError(
                "ledger.header-no-key",
                f"Header has no key with role ledger and name {self.origin!r}",
                "name the key that signs checkpoints",
            )
        named = sum(each.role is Role.WITNESS for each in self.keys)
        if self.witnesses > named:
            raise LedgerError(
                "ledger.header-asks-witnesses",
                f"Header asks for {self.witnesses} witnesses and names {named}",
                "name them, or ask for fewer",
            )


define(
    Header,
    {
        1: ("origin", ORIGIN),
        2: ("schema", Whole(SCHEMA, SCHEMA)),
        3: ("accountant", ACCOUNTANT),
        4: ("version", VERSION),
        5: ("delta", Exact(1e-300, 1 - 1e-9)),
        6: ("floors", Part(Floors)),
        7: ("presets", Many(Part(Preset), 1, MOST_CLASSES)),
        8: ("policy", DIGEST),
        9: ("profile_schema", COUNT),
        10: ("granularity", Whole(1, 1 << 20)),
        11: ("cose_alg", Whole(-19, -8)),
        12: ("retention", COUNT),
        13: ("epoch_clock", Whole(1, 86_400)),
        14: ("keys", Many(Part(Key), 1, MOST_KEYS)),
        15: ("witnesses", Whole(0, MOST_KEYS)),
        16: ("parent", Part(Parent)),
    },
    optional=[16],
)


def _unique(what: str, names: list[str]) -> None:
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise LedgerError(
            "ledger.header-names-twice", f"Header names {what} {sorted(twice)[0]!r} twice", "name each once"
        )
