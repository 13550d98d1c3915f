"""Header, governing records (keys, policy, terms) with their authorization, withdrawals, releases and aggregates."""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

from lamina import cbor
from lamina.account.accountants import find_accountant
from lamina.admit.signing import SECONDS_PER_YEAR
from lamina.admit.terms import hash_of_floors
from lamina.codec import (
    READ_REMEDY,
    FieldType,
    bytes_up_to,
    check_fields,
    enum_member,
    exact_float_in,
    fixed_bytes,
    integer,
    ledger_record,
    nested,
    one_of,
    schema_of,
    stored,
    tuple_of,
)
from lamina.errors import AccountingError, BadKey, EncodingError, LaminaError, LedgerError
from lamina.ledger.schema import (
    ACCOUNTANT,
    BOOLEAN,
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
    STATEMENT,
    TIME,
    VERSION,
)
from lamina.plan.depth_profile import DepthProfile
from lamina.plan.policy import AboutPolicy
from lamina.plan.risk import RiskBound
from lamina.sign.keys import ALGORITHMS, PrivateKey, PublicKey
from lamina.validate import short_repr

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
    AUDITOR = 3  # aggregates
    WITNESS = 4  # cosignatures of checkpoints
    RELEASE = 5  # manifests and certificates
    GOVERNING = 6  # the header and governing records
    OPERATOR = 7  # withdrawals for contributors who asked in another way


class WithdrawalRule(enum.Enum):
    """Who may withdraw a contribution."""

    KEEPER = 1  # whoever keeps the ledger, with a signed request or without
    SIGNED = 2  # who contributed it, or an operator who has a request of theirs: signed in both cases


class KeyChange(enum.Enum):
    """What happens to a key."""

    ADD = 1
    ROTATE = 2
    REVOKE = 3


_public_key = lru_cache(maxsize=4096)(PublicKey)  # checking a point takes time, and most leaves name the same keys


@ledger_record()
class Key:
    """A key of the ledger: the 32 bytes of an Ed25519 point, under a name, in one role, for a time.

    Of a signed note the name is part of the key's identity; for a contributor it may be any short pseudonym.
    """

    name: str = stored(1, ORIGIN)
    x: bytes = stored(2, fixed_bytes(32))
    role: Role = stored(3, enum_member(Role))
    valid_from: int = stored(4, TIME, default=0)
    valid_until: int | None = stored(5, TIME, default=None)

    def __post_init__(self) -> None:
        check_fields(self)
        try:
            _public_key(self.x)
        except BadKey as error:
            raise LedgerError("ledger.key-not-valid", f"key {self.name!r}: {error.problem}", error.remedy) from None
        if self.valid_until is not None and self.valid_until <= self.valid_from:
            problem = f"key {self.name!r} is valid from {self.valid_from} until {self.valid_until}"
            raise LedgerError("ledger.key-validity-empty", problem, "swap them")

    @property
    def public(self) -> PublicKey:
        return _public_key(self.x)

    @property
    def id(self) -> bytes:
        """Its COSE thumbprint."""
        return self.public.id


@ledger_record()
class KeyEvent:
    """What happens to a key, from `effective` on.

    ADD     `key` begins to count
    ROTATE  `key` takes over from the key with id `target`; what that one signed before stays good
    REVOKE  nothing that `target` signs counts any more, whatever date it carries
    """

    change: KeyChange = stored(1, enum_member(KeyChange))
    key: Key | None = stored(2, nested(Key), default=None)
    target: bytes | None = stored(3, KEY_ID, default=None)
    effective: int = stored(4, TIME)

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.key is None) != (self.change is KeyChange.REVOKE):
            problem = f"a key event {self.change.name} {'has no' if self.key is None else 'has a'} new key"
            raise LedgerError("ledger.key-event-key", problem, "give one for ADD and ROTATE")
        if (self.target is None) != (self.change is KeyChange.ADD):
            problem = f"a key event {self.change.name} {'has no' if self.target is None else 'has an'} old key"
            raise LedgerError("ledger.key-event-target", problem, "give one for ROTATE and REVOKE")


@ledger_record()
class PartySignature:
    """A signature by the key with this id, over whatever the record that holds it says."""

    key: bytes = stored(1, KEY_ID)
    signature: bytes = stored(2, SIGNATURE)


_SIGNATURES = tuple_of(nested(PartySignature), 0, 16)


@ledger_record()
class Authorization:
    """Leave for one change of one ledger: counts once, in any later leaf until it expires.

    header      hash of leaf 0, which is the identity of the ledger
    previous    hash of the leaf of the governing record before it; of leaf 0 for the first
    size, root  a checkpoint of the ledger that it follows: with another history it is worth nothing
    expires     the leaf must be older than that
    signatures  by governing keys, over all of this and the change (`governing_message`)
    """

    header: bytes = stored(1, DIGEST)
    previous: bytes = stored(2, DIGEST)
    size: int = stored(3, SEQ)
    root: bytes = stored(4, DIGEST)
    expires: int = stored(5, TIME)
    signatures: tuple[PartySignature, ...] = stored(6, _SIGNATURES, default=())


MAX_KEY_EVENTS = 4096


@ledger_record()
class KeyEvents:
    """What happens to keys, in this order."""

    events: tuple[KeyEvent, ...] = stored(1, tuple_of(nested(KeyEvent), 1, MAX_KEY_EVENTS))
    authorization: Authorization | None = stored(2, nested(Authorization), default=None)


MAX_CLASSES = 256
MAX_KEYS = 1024


@ledger_record()
class LedgerFloors:
    """The least that any private contribution must sign, in 1e-6; 0 is no floor."""

    clip_norm: int = stored(1, MICRO, default=0)
    noise_multiplier: int = stored(2, MICRO, default=0)


_RATE = exact_float_in(1e-300, 1 - 1e-9)


def _read_risk(stored: object) -> RiskBound:
    try:
        of, fpr, tpr = stored if type(stored) is list else ()  # type: ignore[misc]
        return RiskBound(of=of, fpr=_RATE.from_cbor(fpr), tpr=_RATE.from_cbor(tpr))
    except (TypeError, ValueError):
        raise EncodingError("ledger.risk-malformed", f"{short_repr(stored)} is not a risk bound", READ_REMEDY) from None


RISK = FieldType(
    "a RiskBound",
    lambda value: type(value) is RiskBound,
    lambda value: [value.of, _RATE.to_cbor(value.fpr), _RATE.to_cbor(value.tpr)],
    _read_risk,
)


@ledger_record()
class ClassBounds:
    """A class: bounds that are more permissive than these are refused, in 1e-6.

    A bound is more permissive with a larger clip norm or a smaller noise multiplier. A public class has neither.
    `profile` says how deep its gradient may reach, `population` how many contributions it declares, `risk` what an attack
    on all that the class is ever charged may find.
    """

    cls: str = stored(1, CLASS)
    clip_norm: int = stored(2, MICRO)
    noise_multiplier: int = stored(3, MICRO)
    public: bool = stored(4, BOOLEAN, default=False)
    profile: str = stored(5, PROFILE)
    population: int | None = stored(6, COUNT, default=None)
    risk: RiskBound | None = stored(7, RISK, default=None)

    @property
    def promises(self) -> bool:
        """Return whether the class has any bound."""
        return not self.public and bool(self.clip_norm or self.noise_multiplier or self.risk)


NO_POLICY = hashlib.sha256(b"lamina/no policy\n").digest()


def check_policy_digest(origin: str, floors: LedgerFloors, policy: bytes) -> None:
    """LedgerError unless `policy`, which contributors sign, is the digest of these floors, or of having no policy."""
    stated = hash_of_floors(origin, floors.clip_norm, floors.noise_multiplier)
    if policy != stated and (policy != NO_POLICY or floors != LedgerFloors()):
        problem = f"contributors sign the policy {policy.hex()[:16]}, the floors of this record are {stated.hex()[:16]}"
        raise LedgerError("ledger.policy-digest-differs", problem, "state the floors that contributors sign")


@ledger_record()
class PolicyChange:
    """The floors and presets that hold from here on, whole. `policy` is the digest that contributors sign from now on."""

    floors: LedgerFloors = stored(1, nested(LedgerFloors))
    presets: tuple[ClassBounds, ...] = stored(2, tuple_of(nested(ClassBounds), 1, MAX_CLASSES))
    policy: bytes = stored(3, DIGEST)
    authorization: Authorization | None = stored(4, nested(Authorization), default=None)

    def __post_init__(self) -> None:
        check_fields(self)
        names = [each.cls for each in self.presets]
        if len(set(names)) < len(names):
            raise LedgerError("ledger.policy-class-twice", "the policy names a class twice", "name each once")


About = tuple[tuple[str, str], ...]  # names and texts of [about], in order of the names


def _is_about(value: Any, *, removable: bool = False) -> bool:
    """Return whether this is a map of names and texts of [about] in order of the names; `removable` allows empty texts."""
    try:
        found = dict(value)
        AboutPolicy(**{name: text for name, text in found.items() if text or not removable})
    except (TypeError, ValueError):
        return False
    known = found and found.keys() <= AboutPolicy.model_fields.keys()
    return bool(known) and all(type(each) is str for each in found.values()) and value == tuple(sorted(found.items()))


def _read_about(stored: Any) -> About:
    if type(stored) is not dict or not all(type(name) is str for name in stored):
        raise EncodingError("ledger.about-malformed", "the owner's texts are not a map of names", READ_REMEDY)
    return tuple(sorted(stored.items()))


ABOUT = FieldType("texts of [about] in policy.toml, in order of their names", _is_about, dict, _read_about)
ABOUT_CHANGE = FieldType(f"{ABOUT.expected}, or ''", partial(_is_about, removable=True), dict, _read_about)


@ledger_record()
class TermsChange:
    """A change of terms: required cosignatures, retention, who may withdraw, or texts of [about].

    What is left out stays. Of `about`, an empty text removes the one that was stated.
    """

    witnesses: int | None = stored(1, integer(0, MAX_KEYS), default=None)
    retention: int | None = stored(2, COUNT, default=None)
    authorization: Authorization | None = stored(3, nested(Authorization), default=None)
    withdraw: WithdrawalRule | None = stored(4, enum_member(WithdrawalRule), default=None)
    about: About | None = stored(5, ABOUT_CHANGE, default=None)

    def __post_init__(self) -> None:
        check_fields(self)
        if all(each is None for each in (self.witnesses, self.retention, self.withdraw, self.about)):
            raise LedgerError("ledger.terms-change-empty", "the change of terms changes nothing", "give one of them")


GoverningRecord = KeyEvents | PolicyChange | TermsChange
GOVERNING_KINDS: dict[int, type[GoverningRecord]] = {5: KeyEvents, 7: PolicyChange, 9: TermsChange}  # in a leaf
_GOVERNING_CONTEXT = b"lamina/governing-record/1\n"
_HEADER_CONTEXT = b"lamina/header/1\n"


def governing_message(record: GoverningRecord) -> bytes:
    """What governing keys sign: kind, change and authorization without the signatures."""
    assert record.authorization is not None
    bare = replace(record, authorization=replace(record.authorization, signatures=()))
    kind = next(number for number, each in GOVERNING_KINDS.items() if each is type(record))
    return _GOVERNING_CONTEXT + cbor.encode([kind, schema_of(type(record)).to_cbor(bare)], max_size=1 << 20)


def loosened(
    floors: LedgerFloors, presets: Iterable[ClassBounds], new_floors: LedgerFloors, new_presets: Iterable[ClassBounds]
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
        if cls not in named and gone.promises:
            found.append(f"class {cls!r} is left out, and could come back as anything")
    for new in new_presets:
        before = old.get(new.cls)
        if before is None or not before.promises:
            continue
        if new.public:
            found.append(f"class {new.cls!r} becomes public")
        elif new.clip_norm > before.clip_norm:
            found.append(f"the clip norm of class {new.cls!r} grows")
        elif new.noise_multiplier < before.noise_multiplier:
            found.append(f"the noise multiplier of class {new.cls!r} falls")
        elif before.risk is not None and not (new.risk is not None and new.risk.implies(before.risk)):
            found.append(f"the risk bound of class {new.cls!r} rises ({before.risk})")
        elif profile_exceeds(new.profile, before.profile) is not None:
            found.append(f"the depth profile of class {new.cls!r} is not inside the one before")
    return found


SCHEMA_VERSION = 2


@ledger_record()
class ParentLedger:
    """The ledger that this one follows, as it was: its checkpoint in three fields."""

    origin: str = stored(1, ORIGIN)
    size: int = stored(2, SEQ)
    root: bytes = stored(3, DIGEST)


@ledger_record()
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
    keys            the signing parties; the governing ones among them decide about all later changes
    witnesses       how many cosignatures a checkpoint needs
    parent          the ledger before this one, if there was one
    signatures      by every governing key that it names: nobody can put a key into a header without its holder
    withdraw        who may withdraw; None: the keeper
    other_people    the owner's statement why it holds other people than the ledgers beside which it was created
    about           what the owner states about data and model: [about] of policy.toml
    """

    origin: str = stored(1, ORIGIN)
    schema: int = stored(2, integer(SCHEMA_VERSION, SCHEMA_VERSION), default=SCHEMA_VERSION)
    accountant: str = stored(3, ACCOUNTANT)
    version: str = stored(4, VERSION)
    delta: float = stored(5, exact_float_in(1e-300, 1 - 1e-9))
    floors: LedgerFloors = stored(6, nested(LedgerFloors))
    presets: tuple[ClassBounds, ...] = stored(7, tuple_of(nested(ClassBounds), 1, MAX_CLASSES))
    policy: bytes = stored(8, DIGEST)
    profile_schema: int = stored(9, COUNT, default=1)
    granularity: int = stored(10, integer(1, 1 << 20), default=1)
    cose_alg: int = stored(11, one_of(*ALGORITHMS), default=-8)
    retention: int = stored(12, COUNT, default=SECONDS_PER_YEAR)
    epoch_clock: int = stored(13, integer(1, 86_400), default=3600)
    keys: tuple[Key, ...] = stored(14, tuple_of(nested(Key), 1, MAX_KEYS))
    witnesses: int = stored(15, integer(0, MAX_KEYS), default=0)
    parent: ParentLedger | None = stored(16, nested(ParentLedger), default=None)
    signatures: tuple[PartySignature, ...] = stored(17, _SIGNATURES, default=())
    withdraw: WithdrawalRule | None = stored(18, enum_member(WithdrawalRule), default=None)
    other_people: str | None = stored(19, STATEMENT, default=None)
    about: About | None = stored(20, ABOUT, default=None)

    def __post_init__(self) -> None:
        check_fields(self)
        try:
            find_accountant(self.accountant)
        except AccountingError as error:
            problem = f"accountant of the header: {error.problem}"
            raise LedgerError("ledger.accountant-unknown", problem, error.remedy) from None
        _check_unique("class", [each.cls for each in self.presets])
        _check_unique("key", [each.id.hex() for each in self.keys])
        if not any(each.role is Role.LEDGER and each.name == self.origin for each in self.keys):
            problem = f"the header has no key with role ledger and name {self.origin!r}"
            raise LedgerError("ledger.header-no-signing-key", problem, "add the key that signs checkpoints")
        if not any(each.role is Role.GOVERNING for each in self.keys):
            problem = "the header names no governing key"
            raise LedgerError("ledger.header-no-governing-key", problem, "name one that its owner keeps elsewhere")
        named = sum(each.role is Role.WITNESS for each in self.keys)
        if self.witnesses > named:
            problem = f"the header requires {self.witnesses} witnesses and names {named}"
            raise LedgerError("ledger.header-too-few-witnesses", problem, "name more, or require fewer")

    def message(self) -> bytes:
        """What its governing keys sign: all of it but the signatures."""
        body = schema_of(Header).to_cbor(replace(self, signatures=()))
        return _HEADER_CONTEXT + cbor.encode(body, max_size=1 << 20)


def sign_header(header: Header, keys: Iterable[PrivateKey]) -> Header:
    """The header with the signatures of these keys added."""
    made = {each.key: each for each in header.signatures}
    message = header.message()
    made |= {key.public.id: PartySignature(key=key.public.id, signature=key.sign(message)) for key in keys}
    return replace(header, signatures=tuple(made.values()))


def parse_proposal(data: bytes) -> Header | GoverningRecord:
    """The header or governing record of which these bytes are what is signed; EncodingError if there is none."""
    context, _, body = data.partition(b"\n")
    try:
        found = cbor.decode(body, max_size=1 << 20)
        header = context + b"\n" == _HEADER_CONTEXT
        kind, plain = (Header, found) if header else (GOVERNING_KINDS[found[0]], found[1])
        record = schema_of(kind).from_cbor(plain)
        same = (record.message() if isinstance(record, Header) else governing_message(record)) == data
    except (EncodingError, AssertionError, TypeError, ValueError, LookupError):
        same = False
    if not same:
        raise EncodingError("ledger.proposal-malformed", "this is not a proposal of a header or a governing record")
    assert isinstance(record, Header | GoverningRecord)
    return record


def _check_unique(what: str, names: list[str]) -> None:
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise LedgerError("ledger.header-name-twice", f"the header names {what} {sorted(twice)[0]!r} twice")


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


MAX_REQUEST_BYTES = 4096


@ledger_record()
class Withdrawal:
    """The contribution in leaf `target` is in no segment that opens after this leaf.

    `run` and `segment` name the first segment without it in a run that was at work. `signed` is the request that a
    contributor or an operator signed (`withdrawal_request`); without it, the keeper of the ledger alone withdrew.
    `request` is the digest of it or, of an operator's, of what the contributor handed in.
    """

    target: int = stored(1, SEQ)
    reason: WithdrawalReason = stored(2, enum_member(WithdrawalReason))
    effect: WithdrawalEffect = stored(3, enum_member(WithdrawalEffect), default=WithdrawalEffect.FINISH)
    run: bytes | None = stored(4, RUN, default=None)
    segment: int | None = stored(5, COUNT, default=None)
    request: bytes | None = stored(6, DIGEST, default=None)
    signed: bytes | None = stored(7, bytes_up_to(MAX_REQUEST_BYTES), default=None)

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.run is None) != (self.segment is None):
            problem = "a withdrawal has only one of run and segment"
            raise LedgerError("ledger.withdrawal-run-segment", problem, "give both, or neither")


@ledger_record()
class Release:
    """The digest of the manifest, the runs whose training is in the model, and until when it may be served.

    Which contributions are in it follows from the epochs of those runs before this leaf.
    """

    manifest: bytes = stored(1, DIGEST)
    runs: tuple[bytes, ...] = stored(2, tuple_of(RUN, 0, 1024))
    not_after: int | None = stored(3, TIME, default=None)


MAX_SPANS = 32_768
_AGGREGATE_CONTEXT = b"lamina/aggregate/1\n"


@ledger_record()
class ClassTotal:
    """What is left of one class: how many contributions, how many of them withdrawn, and the most that any has lost.

    `spend` is in 1e-9, after the last epoch before the aggregate, over all runs.
    """

    cls: str = stored(1, CLASS)
    count: int = stored(2, COUNT)
    withdrawn: int = stored(3, COUNT)
    spend: int = stored(4, SPEND)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.withdrawn > self.count:
            problem = f"class {self.cls!r} has {self.withdrawn} withdrawn of {self.count} contributions"
            raise LedgerError("ledger.aggregate-count", problem)


@ledger_record()
class LeafSpan:
    """Leaves [first, stop)."""

    first: int = stored(1, SEQ)
    stop: int = stored(2, SEQ)

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.first < self.stop:
            problem = f"a span covers leaves [{self.first}, {self.stop})"
            raise LedgerError("ledger.span-empty", problem, "give first < stop")


@ledger_record()
class Aggregate:
    """Contributions that were admitted before `horizon`, and have expired, were summed up and their bodies dropped.

    `spans` are their leaves, every one of them a contribution, and `digest` is SHA-256 over the leaf hashes in order: a
    countersignature counts for these leaves alone. An auditor who checked their attestations countersigns before the
    bodies go: afterwards nobody can.
    """

    spans: tuple[LeafSpan, ...] = stored(1, tuple_of(nested(LeafSpan), 1, MAX_SPANS))
    horizon: int = stored(2, TIME)
    classes: tuple[ClassTotal, ...] = stored(3, tuple_of(nested(ClassTotal), 1, MAX_CLASSES))
    digest: bytes = stored(4, DIGEST)
    signatures: tuple[PartySignature, ...] = stored(5, _SIGNATURES, default=())

    def __post_init__(self) -> None:
        check_fields(self)
        if any(one.stop >= two.first for one, two in pairwise(self.spans)):
            problem = "the spans of an aggregate touch or are out of order"
            raise LedgerError("ledger.spans-not-sorted", problem, "join and sort them")
        if self.count != sum(each.count for each in self.classes):
            problem = f"the aggregate covers {self.count} leaves, but its classes count another number"
            raise LedgerError("ledger.aggregate-count", problem)
        names = [each.cls for each in self.classes]
        if names != sorted(set(names)):
            problem = f"the classes of the aggregate are {names}"
            raise LedgerError("ledger.aggregate-classes", problem, "name each once, in order")

    @property
    def count(self) -> int:
        """How many leaves it stands for."""
        return sum(span.stop - span.first for span in self.spans)

    def message(self, origin: str) -> bytes:
        """What an auditor signs: the aggregate without signatures, for one ledger."""
        body = schema_of(Aggregate).to_cbor(replace(self, signatures=()))
        return _AGGREGATE_CONTEXT + cbor.encode([origin, body], max_size=1 << 20)
