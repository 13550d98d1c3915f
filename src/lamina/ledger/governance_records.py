"""Records that govern a ledger: its header, keys, policy changes, withdrawals, releases and aggregates."""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

from lamina import cbor
from lamina.account.accountants import find_accountant
from lamina.admit.keys import PublicKey
from lamina.errors import AccountingError, BadKey, LaminaError, LedgerError
from lamina.ledger.schema import (
    ACCOUNTANT,
    CLASS,
    COUNT,
    DIGEST,
    KEY_ID,
    MICRO,
    ORIGIN,
    PROFILE,
    RUN,
    SEQ,
    SIGNATURE,
    SPEND,
    TIME,
    VERSION,
    Boolean,
    EnumMember,
    ExactFloat,
    FixedBytes,
    Integer,
    Nested,
    TupleOf,
    check_fields,
    define_schema,
    schema_of,
)
from lamina.plan.depth_profile import DepthProfile

_PROFILE_DIGEST = "sha256:"  # how a long profile is written


def parse_profile(text: str) -> DepthProfile:
    """A profile as a ledger holds it: canonical text, or the table of policy.toml in JSON."""
    return DepthProfile.parse(json.loads(text)) if text.startswith("{") else DepthProfile.from_text(text)


@lru_cache(maxsize=1024)
def profile_exceeds(profile: str, signed: str) -> str | None:
    """Whether a class with this profile reaches where the signed one does not; in words."""
    if profile == signed:
        return None
    if profile.startswith(_PROFILE_DIGEST) or signed.startswith(_PROFILE_DIGEST):
        return f"it signed the profile {signed[:80]}, its class has {profile[:80]}"
    try:
        inside = parse_profile(profile).within(parse_profile(signed))
    except (LaminaError, ValueError, TypeError, ArithmeticError, RecursionError):
        return f"profile {signed[:80]!r} or {profile[:80]!r} is of a schema that is not known"
    return None if inside else f"its class reaches {profile[:80]}, it signed {signed[:80]}"


class Role(enum.Enum):
    """What a key may sign. One key has one role."""

    LEDGER = 1  # checkpoints
    CONTRIBUTOR = 2  # attestations
    AUDITOR = 3  # aggregates, and looser policies
    WITNESS = 4  # cosignatures of checkpoints
    RELEASE = 5  # manifests and certificates


class KeyChange(enum.Enum):
    """What happens to a key."""

    ADD = 1
    ROTATE = 2
    REVOKE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key of the ledger: the 32 bytes of an Ed25519 point, under a name, in one role, for a time.

    Of a signed note the name is part of the key's identity; for a contributor it may be any short pseudonym.
    """

    name: str
    x: bytes
    role: Role
    valid_from: int = 0
    valid_until: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        try:
            PublicKey(self.x)
        except BadKey as error:
            raise LedgerError("ledger.key", f"x of Key {self.name!r}: {error.problem}", error.remedy) from None
        if self.valid_until is not None and self.valid_until <= self.valid_from:
            raise LedgerError(
                "ledger.key-valid-until",
                f"Key {self.name!r} is valid from {self.valid_from} until {self.valid_until}",
                "swap them",
            )

    @property
    def public(self) -> PublicKey:
        return PublicKey(self.x)

    @property
    def id(self) -> bytes:
        """Its COSE thumbprint."""
        return self.public.id

    def valid(self, time: int) -> bool:
        """Whether it counts at that time, as far as it says itself."""
        return self.valid_from <= time and (self.valid_until is None or time < self.valid_until)


define_schema(
    Key,
    {
        1: ("name", ORIGIN),
        2: ("x", FixedBytes(32)),
        3: ("role", EnumMember(Role)),
        4: ("valid_from", TIME),
        5: ("valid_until", TIME),
    },
    optional=[5],
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyEvent:
    """What happens to a key, from `effective` on.

    ADD     `key` begins to count
    ROTATE  `key` takes over from the key with id `target`; what that one signed before stays good
    REVOKE  nothing that `target` signs counts any more, whatever date it carries

    A rotation of the ledger's own key counts once a checkpoint that the old key signed covers this leaf.
    """

    change: KeyChange
    key: Key | None = None
    target: bytes | None = None
    effective: int

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.key is None) != (self.change is KeyChange.REVOKE):
            raise LedgerError(
                "ledger.keyevent-key-not",
                f"KeyEvent {self.change.name} and its key do not fit",
                "a new key for ADD and ROTATE only",
            )
        if (self.target is None) != (self.change is KeyChange.ADD):
            raise LedgerError(
                "ledger.keyevent-target-not",
                f"KeyEvent {self.change.name} and its target do not fit",
                "an old key unless it is ADD",
            )


define_schema(
    KeyEvent,
    {1: ("change", EnumMember(KeyChange)), 2: ("key", Nested(Key)), 3: ("target", KEY_ID), 4: ("effective", TIME)},
    optional=[2, 3],
)


MAX_CLASSES = 256
_POLICY_CHANGE_CONTEXT = b"lamina/policy-change/1\n"
_POLICY_DIGEST_CONTEXT = b"lamina/policy-in-force/1\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerFloors:
    """The least that any private contribution must sign, in 1e-6; 0 is no floor."""

    clip_norm: int = 0
    noise_multiplier: int = 0

    def __post_init__(self) -> None:
        check_fields(self)


define_schema(LedgerFloors, {1: ("clip_norm", MICRO), 2: ("noise_multiplier", MICRO)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A class: bounds that are more permissive than these are refused, in 1e-6.

    A bound is more permissive with a larger clip norm or a smaller noise multiplier. A public class has neither.
    `profile` says how deep its gradient may reach, `population` how many contributions it declares.
    """

    cls: str
    clip_norm: int
    noise_multiplier: int
    public: bool = False
    profile: str
    population: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)


define_schema(
    Preset,
    {
        1: ("cls", CLASS),
        2: ("clip_norm", MICRO),
        3: ("noise_multiplier", MICRO),
        4: ("public", Boolean()),
        5: ("profile", PROFILE),
        6: ("population", COUNT),
    },
    optional=[6],
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartySignature:
    """A signature by the key with this id, over whatever the record that holds it says."""

    key: bytes
    signature: bytes

    def __post_init__(self) -> None:
        check_fields(self)


define_schema(PartySignature, {1: ("key", KEY_ID), 2: ("signature", SIGNATURE)})


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyChange:
    """The floors and presets that hold from here on, whole. Looser ones need the signatures of two keys.

    `policy` is the digest that contributors sign from now on (admit.terms.floors_hash). `previous` is that of the
    record which it replaces (`in_force`), so that what was signed once cannot be adopted again after it was taken back.
    """

    floors: LedgerFloors
    presets: tuple[Preset, ...]
    policy: bytes
    signatures: tuple[PartySignature, ...] = ()
    previous: bytes

    def __post_init__(self) -> None:
        check_fields(self)

    def message(self, origin: str) -> bytes:
        """What is signed: the change without signatures, for one ledger."""
        body = schema_of(PolicyChange).plain(replace(self, signatures=()))
        return _POLICY_CHANGE_CONTEXT + cbor.encode([origin, body], max_size=1 << 20)


define_schema(
    PolicyChange,
    {
        1: ("floors", Nested(LedgerFloors)),
        2: ("presets", TupleOf(Nested(Preset), 1, MAX_CLASSES)),
        3: ("policy", DIGEST),
        4: ("signatures", TupleOf(Nested(PartySignature), 0, 16)),
        5: ("previous", DIGEST),
    },
)


def policy_record_digest(record: Any) -> bytes:
    """The digest of a header or change, by which the change after it names it. It never comes twice in a ledger."""
    body = schema_of(type(record)).plain(record)
    return hashlib.sha256(_POLICY_DIGEST_CONTEXT + cbor.encode(body, max_size=1 << 20)).digest()


def wrong_predecessor(change: PolicyChange, before: Any) -> str | None:
    """Why a change cannot follow this header or change; in words."""
    return (
        None if change.previous == policy_record_digest(before) else "it replaces another policy than the one in force"
    )


def loosened(
    floors: LedgerFloors, presets: Iterable[Preset], new_floors: LedgerFloors, new_presets: Iterable[Preset]
) -> list[str]:
    """In what a new table protects less than the old one: empty if it is as strict everywhere.

    A class that is new protects nobody less. A class that is public, or has no bound at all, promised nothing.
    """
    found = []
    if new_floors.clip_norm < floors.clip_norm:
        found.append("the floor of the clip norm falls")
    if new_floors.noise_multiplier < floors.noise_multiplier:
        found.append("the floor of the noise multiplier falls")
    new_presets = tuple(new_presets)
    old, named = {each.cls: each for each in presets}, {each.cls for each in new_presets}
    for cls, gone in old.items():
        if cls not in named and not gone.public and (gone.clip_norm or gone.noise_multiplier):
            found.append(f"class {cls!r} is left out, and could come back as anything")
    for new in new_presets:
        before = old.get(new.cls)
        if before is None or before.public or not (before.clip_norm or before.noise_multiplier):
            continue
        if new.public:
            found.append(f"class {new.cls!r} becomes public")
        elif new.clip_norm > before.clip_norm:
            found.append(f"the clip norm of class {new.cls!r} grows")
        elif new.noise_multiplier < before.noise_multiplier:
            found.append(f"the noise multiplier of class {new.cls!r} falls")
        elif profile_exceeds(new.profile, before.profile) is not None:
            found.append(f"the depth profile of class {new.cls!r} is not inside the one before")
    return found


SCHEMA_VERSION = 1
YEAR = 31_557_600  # seconds
MAX_KEYS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ParentLedger:
    """The ledger that this one follows, as it was: its checkpoint in three fields."""

    origin: str
    size: int
    root: bytes

    def __post_init__(self) -> None:
        check_fields(self)


define_schema(ParentLedger, {1: ("origin", ORIGIN), 2: ("size", SEQ), 3: ("root", DIGEST)})


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
    schema: int = SCHEMA_VERSION
    accountant: str
    version: str
    delta: float
    floors: LedgerFloors
    presets: tuple[Preset, ...]
    policy: bytes
    profile_schema: int = 1
    granularity: int = 1
    cose_alg: int = -8
    retention: int = YEAR
    epoch_clock: int = 3600
    keys: tuple[Key, ...]
    witnesses: int = 0
    parent: ParentLedger | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        try:
            find_accountant(self.accountant)
        except AccountingError as error:
            raise LedgerError(
                "ledger.accountant-header", f"accountant of Header: {error.problem}", error.remedy
            ) from None
        _check_unique("class", [each.cls for each in self.presets])
        _check_unique("key", [each.id.hex() for each in self.keys])
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


define_schema(
    Header,
    {
        1: ("origin", ORIGIN),
        2: ("schema", Integer(SCHEMA_VERSION, SCHEMA_VERSION)),
        3: ("accountant", ACCOUNTANT),
        4: ("version", VERSION),
        5: ("delta", ExactFloat(1e-300, 1 - 1e-9)),
        6: ("floors", Nested(LedgerFloors)),
        7: ("presets", TupleOf(Nested(Preset), 1, MAX_CLASSES)),
        8: ("policy", DIGEST),
        9: ("profile_schema", COUNT),
        10: ("granularity", Integer(1, 1 << 20)),
        11: ("cose_alg", Integer(-19, -8)),
        12: ("retention", COUNT),
        13: ("epoch_clock", Integer(1, 86_400)),
        14: ("keys", TupleOf(Nested(Key), 1, MAX_KEYS)),
        15: ("witnesses", Integer(0, MAX_KEYS)),
        16: ("parent", Nested(ParentLedger)),
    },
    optional=[16],
)


def _check_unique(what: str, names: list[str]) -> None:
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise LedgerError(
            "ledger.header-names-twice", f"Header names {what} {sorted(twice)[0]!r} twice", "name each once"
        )


class WithdrawalReason(enum.Enum):
    """Why; an enumeration, because free text in a ledger that is never erased would be personal data."""

    REQUEST = 1  # whoever contributed asked for it
    CONSENT = 2  # whoever the data is about withdrew consent
    LEGAL = 3  # a court or an authority ordered it
    DATA = 4  # the data is wrong
    KEY = 5  # the key that signed is revoked
    EXPIRED = 6  # the attestation is past its time
    POLICY = 7  # its class or bound is not admitted any more


class WithdrawalEffect(enum.Enum):
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
    reason: WithdrawalReason
    effect: WithdrawalEffect = WithdrawalEffect.FINISH
    run: bytes | None = None
    segment: int | None = None
    request: bytes | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.run is None) != (self.segment is None):
            raise LedgerError(
                "ledger.run-segment-withdrawal", "run and segment of Withdrawal do not fit", "give both, or neither"
            )


define_schema(
    Withdrawal,
    {
        1: ("target", SEQ),
        2: ("reason", EnumMember(WithdrawalReason)),
        3: ("effect", EnumMember(WithdrawalEffect)),
        4: ("run", RUN),
        5: ("segment", COUNT),
        6: ("request", DIGEST),
    },
    optional=[4, 5, 6],
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """The digest of the manifest, the runs whose training is in the model, and until when it may be served.

    Which contributions are in it follows from the epochs of those runs before this leaf.
    """

    manifest: bytes
    runs: tuple[bytes, ...]
    not_after: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)


define_schema(
    Release, {1: ("manifest", DIGEST), 2: ("runs", TupleOf(RUN, 0, 1024)), 3: ("not_after", TIME)}, optional=[3]
)


MAX_SPANS = 32_768
_AGGREGATE_CONTEXT = b"lamina/aggregate/1\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassTotal:
    """What is left of one class: how many contributions, how many of them withdrawn, and the most that any has lost.

    `spend` is in 1e-9, after the last epoch before the aggregate, over all runs.
    """

    cls: str
    count: int
    withdrawn: int
    spend: int

    def __post_init__(self) -> None:
        check_fields(self)
        if self.withdrawn > self.count:
            raise LedgerError(
                "ledger.class-withdrawn-contributions",
                f"class {self.cls!r} has {self.withdrawn} withdrawn of {self.count} contributions",
                "count again",
            )


define_schema(ClassTotal, {1: ("cls", CLASS), 2: ("count", COUNT), 3: ("withdrawn", COUNT), 4: ("spend", SPEND)})


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafSpan:
    """Leaves [first, stop)."""

    first: int
    stop: int

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.first < self.stop:
            raise LedgerError(
                "ledger.span-covers-leaves", f"a span covers leaves [{self.first}, {self.stop})", "give first < stop"
            )


define_schema(LeafSpan, {1: ("first", SEQ), 2: ("stop", SEQ)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregate:
    """Contributions that were admitted before `horizon`, and have expired, were summed up and their bodies dropped.

    `spans` are their leaves, every one of them a contribution. `digest` is SHA-256 over the leaf hashes in order. It
    stays checkable for whoever kept the bodies, and, while the tiles are there, for everybody. An auditor who
    recomputed the totals countersigns before the bodies go: afterwards this record is all that there is.
    """

    spans: tuple[LeafSpan, ...]
    horizon: int
    classes: tuple[ClassTotal, ...]
    digest: bytes
    signatures: tuple[PartySignature, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        if any(one.stop >= two.first for one, two in pairwise(self.spans)):
            raise LedgerError(
                "ledger.spans-aggregate-touch", "spans of Aggregate touch or are out of order", "join and sort them"
            )
        if self.count != sum(each.count for each in self.classes):
            raise LedgerError(
                "ledger.aggregate-over-leaves",
                f"Aggregate is over {self.count} leaves, its classes count others",
                "count again",
            )
        names = [each.cls for each in self.classes]
        if names != sorted(set(names)):
            raise LedgerError("ledger.aggregate-classes", f"Aggregate has classes {names}", "name each once, in order")

    @property
    def count(self) -> int:
        """How many leaves it stands for."""
        return sum(span.stop - span.first for span in self.spans)

    def message(self, origin: str) -> bytes:
        """What an auditor signs: the aggregate without signatures, for one ledger."""
        body = schema_of(Aggregate).plain(replace(self, signatures=()))
        return _AGGREGATE_CONTEXT + cbor.encode([origin, body], max_size=1 << 20)


define_schema(
    Aggregate,
    {
        1: ("spans", TupleOf(Nested(LeafSpan), 1, MAX_SPANS)),
        2: ("horizon", TIME),
        3: ("classes", TupleOf(Nested(ClassTotal), 1, MAX_CLASSES)),
        4: ("digest", DIGEST),
        5: ("signatures", TupleOf(Nested(PartySignature), 0, 16)),
    },
)
