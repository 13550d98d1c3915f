"""The terms that a policy asks contributors to sign, the policy checks, and all checks of one contribution."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from functools import lru_cache
from pathlib import Path

from lamina import cbor
from lamina.account.gaussian_rdp import epsilon_of_noise_multiplier
from lamina.account.schedule import bisect_int
from lamina.admit.attestation import (
    MAX_ATTESTATION,
    MAX_DESCRIPTOR,
    MAX_MICRO,
    MAX_PROFILE,
    MICRO,
    Attestation,
    Descriptor,
    window_rules,
)
from lamina.admit.contribution_sources import Contribution, open_with_size
from lamina.admit.verdicts import ContributionRefused, Reason, pack_row
from lamina.errors import AdmissionError, EncodingError, LaminaError, UnknownSchema, WrongAlgorithm
from lamina.plan.depth_profile import DepthProfile
from lamina.plan.policy import ClassPolicy, Policy, PolicyFloors
from lamina.plan.risk import gaussian_noise_multiplier
from lamina.sign.key_ring import KeyEntry, KeyRing, KeyStatus
from lamina.sign.keys import CLOCK_SKEW, format_utc
from lamina.validate import distinct_fields


def floors_hash(policy: Policy) -> bytes:
    """SHA-256 over the origin and the floors of a corpus.

    Classes and depth profiles are not in it: a corpus may adopt routing, or add a class, without new credentials.
    """
    return _floors_hash(policy.corpus.origin, policy.corpus.floors)


def _floors_hash(origin: str, floors: PolicyFloors) -> bytes:
    return hash_of_floors(
        origin, _scaled(floors.clip_norm or 0.0, ROUND_FLOOR), _scaled(floors.noise_multiplier or 0.0, ROUND_CEILING)
    )


def hash_of_floors(origin: str, clip_norm: int, noise_multiplier: int) -> bytes:
    """The same from floors in 1e-6, in which contributions are held to them and a ledger states them; 0 is no floor."""
    floors = {"clip_norm": clip_norm / MICRO, "noise_multiplier": noise_multiplier / MICRO}
    content = {"origin": origin, "floors": {name: value for name, value in floors.items() if value}}
    return hashlib.sha256(cbor.encode(content, floats=True)).digest()


def preset(policy: Policy, cls: str) -> tuple[int, int]:
    """(clip norm, noise multiplier) of a class, in 1e-6: the most permissive bound that it admits.

    c is rounded down. z is the least for which one Gaussian release costs no more ε than the class may spend, and keeps
    its risk bound, so it is rounded to the strict side too. (0, 0) for a public class.
    """
    entry = _class_policy(policy, cls)
    if entry.public:
        return 0, 0
    noise = class_multiplier(policy, cls)
    if entry.risk is not None:
        noise = max(noise, to_micro(gaussian_noise_multiplier(entry.risk), ROUND_CEILING))
    if not noise:
        problem = f"class {cls!r} has no bound on ε or risk, so there is nothing to sign"
        remedy = f"give class.{cls} an epsilon, a noise_multiplier or a risk, or the corpus a floor"
        raise AdmissionError("admit.class-without-bound", problem, remedy)
    return to_micro(entry.clip_norm, ROUND_FLOOR), noise


def class_multiplier(policy: Policy, cls: str) -> int:
    """Return z for the ε that a class may spend, in 1e-6; 0 if it is public or has no bound on ε.

    A risk bound has no part in it: a plan that keeps the risk of one Gaussian release may cost another ε.
    """
    bound = None if _class_policy(policy, cls).public else policy.bound(cls)
    return 0 if bound is None else _least_multiplier(bound, policy.corpus.delta)


def to_micro(value: float, rounding: str) -> int:
    """A number of a policy or of the command line in units of 1e-6, as it was written: 0.29 is 290,000."""
    result = _scaled(float(value), rounding)
    if not 0 < result <= MAX_MICRO:
        problem = f"{value!r} cannot be signed in units of 1e-6"
        raise AdmissionError("admit.bound-not-signable", problem, "give a number from 1e-6 to 1e9")
    return result


def _scaled(value: float, rounding: str) -> int:
    exact = Decimal(repr(value)) * MICRO
    return int(exact.to_integral_value(rounding)) if exact.is_finite() else MAX_MICRO + 1


def profile_text(profile: DepthProfile) -> str:
    """A depth profile as it is signed: its canonical text, or the digest of a long one.

    >>> profile_text(DepthProfile.top(0.25))
    'top=0.25'
    """
    text = profile.text()
    encoded = text.encode("utf-8")
    if len(encoded) <= MAX_PROFILE and text.isprintable():
        return text
    return f"sha256:{hashlib.sha256(encoded).hexdigest()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SigningTerms:
    """What all contributions that are signed together have in common. `make` fills it in from a policy."""

    audience: str
    policy: bytes
    admissibility: str
    data_class: str
    clip_norm: int
    noise_multiplier: int
    not_before: int
    expires: int
    profile: str | None = None

    def __post_init__(self) -> None:
        zeros = bytes(32)  # refuse what cannot be signed for any payload before the first is signed
        self.descriptor(contributor=zeros, nonce=bytes(16), commitment=zeros, items=1)

    @classmethod
    def make(
        cls,
        policy: Policy,
        name: str,
        *,
        not_before: int,
        expires: int,
        data_class: str | None = None,
        clip_norm: float | None = None,
        noise_multiplier: float | None = None,
        profile: bool = True,
    ) -> SigningTerms:
        """The terms of class `name`, or stricter ones: a smaller clip norm, a larger noise multiplier.

        Without `data_class` it is the name of the class, in the letters that are allowed.
        With `profile` the depth of the class, if it is restricted, is signed too: a policy that lets the class reach
        elsewhere will refuse the contribution. Without it, depth is left to the policy.
        """
        entry = _class_policy(policy, name)
        clip, noise = _requested_bound(policy, name, clip_norm, noise_multiplier)
        restricted = profile and not entry.profile.whole
        return cls(
            audience=policy.corpus.origin,
            policy=floors_hash(policy),
            admissibility=name,
            data_class=re.sub("[^a-z0-9-]", "-", name.lower())[:64] if data_class is None else data_class,
            clip_norm=clip,
            noise_multiplier=noise,
            not_before=not_before,
            expires=expires,
            profile=profile_text(entry.profile) if restricted else None,
        )

    def descriptor(
        self, *, contributor: bytes, nonce: bytes, commitment: bytes, items: int, anchor: bytes | None = None
    ) -> Descriptor:
        """These terms for one payload."""
        terms = {each.name: getattr(self, each.name) for each in fields(self)} | {"items": items, "anchor": anchor}
        return Descriptor(contributor=contributor, nonce=nonce, commitment=commitment, **terms)


def _requested_bound(policy: Policy, name: str, c: float | None, z: float | None) -> tuple[int, int]:
    """The class's preset, or what was asked for if it is stricter and above the floors."""
    clip, noise = preset(policy, name)
    if policy.classes[name].public:
        if c is not None or z is not None:
            problem = f"class {name!r} is public and has no bound"
            raise AdmissionError("admit.bound-for-public-class", problem, "leave clip norm and noise multiplier out")
        return clip, noise
    if c is not None:
        if (asked := to_micro(c, ROUND_FLOOR)) > clip:
            problem = f"clip norm {c:g} is above {clip / MICRO:g}, the most in class {name!r}"
            raise AdmissionError("admit.clip-norm-above-class", problem, "sign a smaller one")
        clip, floor = asked, policy.corpus.floors.clip_norm
        if floor is not None and clip / MICRO < floor:
            problem = f"clip norm {c:g} is below the floor of {floor:g}"
            raise AdmissionError("admit.clip-norm-below-floor", problem, "sign a larger one")
    if z is not None:
        if (asked := to_micro(z, ROUND_CEILING)) < noise:
            problem = f"noise multiplier {z:g} is below {noise / MICRO:g}, the least in class {name!r}"
            raise AdmissionError("admit.noise-below-class", problem, "sign a larger one")
        noise = asked
    return clip, noise


@lru_cache(maxsize=256)
def _least_multiplier(bound: float, delta: float) -> int:
    def enough(noise: int) -> bool:
        return epsilon_of_noise_multiplier(noise / MICRO, delta) <= bound

    if not enough(MAX_MICRO):
        problem = f"ε = {bound:g} at δ = {delta:g} needs more noise than can be signed"
        raise AdmissionError("admit.epsilon-too-small", problem, "allow more ε")
    return bisect_int(enough, 0, MAX_MICRO)[1]


def _class_policy(policy: Policy, name: str) -> ClassPolicy:
    if name not in policy.classes:
        remedy = f"its classes are {', '.join(policy.classes)}"
        raise AdmissionError("admit.class-unknown", f"the policy has no class {name!r}", remedy)
    return policy.classes[name]


@dataclass(frozen=True, slots=True)
class ClassRequirements:
    """One class: its row in the policy, the most permissive bound that it admits in 1e-6, how deep it reaches.

    `bound` is None where the policy has no bound on ε or risk, (0, 0) for a public class.
    """

    row: int
    public: bool
    bound: tuple[int, int] | None
    profile: DepthProfile
    population: int | None


class PolicyChecks:
    """PolicyFloors, classes and the digests under which a descriptor may be signed.

    A contribution must keep the higher of the floor it was signed under and the floor in force. PolicyFloors only rise, so
    that is the one in force, whichever of the digests it signed.
    """

    def __init__(self, policy: Policy) -> None:
        self.origin = policy.corpus.origin
        self.epoch = policy.corpus.epoch
        self.ledger = policy.corpus.ledger_hash
        accepted = (policy.corpus.floors, *policy.corpus.earlier_floors)
        self.digests = frozenset(_floors_hash(self.origin, each) for each in accepted)
        floors = policy.corpus.floors
        self.clip_floor = max(1, _scaled(floors.clip_norm or 0.0, ROUND_FLOOR))  # a clip norm of 0 teaches nothing
        self.noise_floor = max(1, _scaled(floors.noise_multiplier or 0.0, ROUND_CEILING))
        self.classes = {
            name: ClassRequirements(
                row, entry.public,
                preset(policy, name) if entry.public or entry.risk or policy.bound(name) is not None else None,
                entry.profile, entry.population,
            )
            for row, (name, entry) in enumerate(policy.classes.items())
        }  # fmt: skip
        self.profile_allows = lru_cache(maxsize=4096)(self._profile_allows)

    def check(self, descriptor: Descriptor) -> ClassRequirements:
        """The requirements of the descriptor's class, if it meets them. ContributionRefused otherwise."""
        if descriptor.policy not in self.digests:
            raise ContributionRefused(Reason.POLICY_MISMATCH, f"signed under {descriptor.policy.hex()[:16]}…")
        required = self.classes.get(descriptor.admissibility)
        if required is None:
            raise ContributionRefused(Reason.UNKNOWN_CLASS, f"class {descriptor.admissibility!r}")
        if required.public is not descriptor.public:
            reason = Reason.PUBLIC_BOUND if required.public else Reason.PUBLIC_CLAIM
            raise ContributionRefused(reason, f"class {descriptor.admissibility!r}")
        if not required.public:
            self._check_bound(descriptor, required.bound)
        if descriptor.profile is not None and not self.profile_allows(descriptor.profile, descriptor.admissibility):
            detail = f"it signed {descriptor.profile}, the class reaches {required.profile}"
            raise ContributionRefused(Reason.PROFILE_MISMATCH, detail)
        return required

    def _check_bound(self, descriptor: Descriptor, most_permissive: tuple[int, int] | None) -> None:
        """Not below the floors, and not more permissive than the class."""
        clip, noise = descriptor.clip_norm, descriptor.noise_multiplier
        if clip < self.clip_floor:
            raise _beyond_limit(Reason.CLIP_BELOW_FLOOR, clip, self.clip_floor)
        if noise < self.noise_floor:
            raise _beyond_limit(Reason.NOISE_BELOW_FLOOR, noise, self.noise_floor)
        if most_permissive is None:
            raise ContributionRefused(Reason.UNBOUNDED_CLASS, f"class {descriptor.admissibility!r}")
        if clip > most_permissive[0]:
            raise _beyond_limit(Reason.CLIP_ABOVE_CLASS, clip, most_permissive[0])
        if noise < most_permissive[1]:
            raise _beyond_limit(Reason.NOISE_BELOW_CLASS, noise, most_permissive[1])

    def _profile_allows(self, signed: str, cls: str) -> bool:
        """Whether everything that the class reaches lies inside the signed profile."""
        profile = self.classes[cls].profile
        if signed == profile_text(profile):  # a long profile is signed as a digest, which can only be compared
            return True
        try:
            if signed.startswith("{"):  # the table of policy.toml in JSON
                return profile.within(DepthProfile.parse(json.loads(signed, object_pairs_hook=distinct_fields)))
            return profile.within(DepthProfile.from_text(signed))
        except (LaminaError, ValueError, TypeError, ArithmeticError, RecursionError):
            return False


def _beyond_limit(reason: Reason, signed: int, limit: int) -> ContributionRefused:
    return ContributionRefused(reason, f"signed {signed / MICRO:.9g}, the limit is {limit / MICRO:.9g}")


MAX_PAYLOAD = 1 << 36
MAX_ID = 255  # bytes
CONTRIBUTOR_ROLE = "contributor"

Verdict = bytes | tuple[Reason, str]  # a row (`ROW_DTYPE`), or why not

_READ_CHUNK, _MIN_READ = 1 << 20, 1 << 12
REASON_OF_KEY_STATUS = {
    KeyStatus.REVOKED: Reason.REVOKED_KEY,
    KeyStatus.RETIRED: Reason.RETIRED_KEY,
    KeyStatus.NOT_YET: Reason.EARLY_KEY,
}


@dataclass(slots=True)
class _Examination:
    """A contribution on its way through the checks, and what they found."""

    given: Contribution
    signed: Descriptor = field(init=False)
    claims: Attestation = field(init=False)
    entry: KeyEntry = field(init=False)
    row: bytes = field(init=False)
    refused: tuple[Reason, str] | None = None


class Examiner:
    """Checks one contribution at a time, the cheap checks first: no signature is verified for an unknown key.

    size, presence · strict encoding, schema · key: known, role, status, algorithm · signature · claims · audience ·
    window · policy, class, floors, bound, profile · payload
    """

    def __init__(self, policy_checks: PolicyChecks, keys: KeyRing, max_payload: int = MAX_PAYLOAD) -> None:
        self._policy_checks = policy_checks
        self._keys = keys
        self._max_payload = max_payload
        self.version = keys.version
        self.kids = tuple(sorted(entry.id for entry in keys))  # what the column `key` counts in
        self._rows = {kid: row for row, kid in enumerate(self.kids)}

    def examine(self, given: Contribution, now: int) -> Verdict:
        """A row if it may be admitted at the second `now`, as far as it alone is concerned."""
        (verdict,) = self.examine_all([given], now)
        return verdict

    def examine_all(self, offered: Sequence[Contribution], now: int) -> list[Verdict]:
        """The same for each of them, one step for all before the next.

        That changes no verdict and saves a fifth of the time: signatures, files and parsing each fill the processor's
        cache with something else.
        """
        cases = [_Examination(given) for given in offered]
        for step in (self._read, self._verify, self._check_content):
            for case in cases:
                if case.refused is not None:
                    continue
                try:
                    step(case, now)
                except ContributionRefused as refused:
                    case.refused = refused.reason, refused.detail
                except Exception as error:
                    case.refused = Reason.CHECK_FAILED, type(error).__name__
        return [case.row if case.refused is None else case.refused for case in cases]

    def _read(self, case: _Examination, now: int) -> None:
        given = case.given
        check_id(given.id)
        if given.read_error is not None:
            raise ContributionRefused(*given.read_error)
        case.signed, case.claims = _decode_signed(*_require_parts(given))
        case.entry = self._key(case.claims, now)

    def _verify(self, case: _Examination, now: int) -> None:
        key = case.entry.key
        if not case.claims.signed_by(key, case.signed.digest()):
            raise ContributionRefused(Reason.BAD_SIGNATURE, f"key {key.name[:16]}…")

    def _check_content(self, case: _Examination, now: int) -> None:
        given, signed, claims = case.given, case.signed, case.claims
        if differs := claims.mismatch(signed):
            raise ContributionRefused(Reason.MISMATCH, differs)
        if signed.audience != self._policy_checks.origin:
            raise ContributionRefused(Reason.WRONG_AUDIENCE, f"it was signed for {signed.audience!r}")
        if (only := self._policy_checks.ledger) is not None and claims.ledger != only:
            if claims.ledger is None:
                raise ContributionRefused(Reason.NOT_BOUND, f"the policy names the ledger {only.hex()[:16]}…")
            raise other_ledger(claims.ledger, only)
        _check_window(signed, claims, now)
        required = self._policy_checks.check(signed)
        content = self.check_payload(given.payload, signed.nonce, signed.commitment)
        assert given.attestation is not None
        digest = hashlib.sha256(given.attestation).digest()
        case.row = pack_row(given.id, signed, claims, digest, content, self._rows[case.entry.id], required.row)

    def _key(self, claims: Attestation, now: int) -> KeyEntry:
        entry = self._keys.get(claims.kid)
        if entry is None:
            raise ContributionRefused(Reason.UNKNOWN_KEY, f"key {claims.kid.hex()[:16]}…")
        if entry.role != CONTRIBUTOR_ROLE:
            raise ContributionRefused(Reason.WRONG_ROLE, f"key {entry.label!r} is for {entry.role}")
        standing = entry.standing(now, claims.iat)
        if standing is not KeyStatus.USABLE:
            raise ContributionRefused(REASON_OF_KEY_STATUS[standing], f"key {entry.label!r}")
        if claims.alg not in entry.algorithms:
            detail = f"{claims.alg}, key {entry.label!r} is for {entry.algorithms}"
            raise ContributionRefused(Reason.WRONG_ALGORITHM, detail)
        return entry

    def check_payload(self, payload: bytes | Path | None, nonce: bytes, commitment: bytes) -> int:
        """Check that it is what was signed; ContributionRefused otherwise. Returns what is the same for equal payloads.

        That is Python's keyed hash, which means nothing outside this process and its workers: 64 bits at 4 GB/s.
        """
        if isinstance(payload, bytes):
            if len(payload) > self._max_payload:
                raise ContributionRefused(Reason.TOO_LARGE, f"payload of {len(payload)} bytes")
            found, mark = hashlib.sha256(nonce + payload).digest(), 0
            for start in range(0, len(payload), _READ_CHUNK):
                mark = hash((mark, payload[start : start + _READ_CHUNK]))
        elif payload is not None:
            found, mark = self._digests_of(payload, nonce)
        else:
            raise ContributionRefused(Reason.NO_PAYLOAD)
        if found != commitment:
            raise ContributionRefused(Reason.PAYLOAD_MISMATCH)
        return mark

    def _digests_of(self, path: Path, nonce: bytes) -> tuple[bytes, int]:
        """With the nonce and without. Read once, from one open file: what is measured is what is hashed."""
        hasher, mark, size = hashlib.sha256(nonce), 0, 0
        try:
            file, length = open_with_size(path)
        except FileNotFoundError:
            raise ContributionRefused(Reason.NO_PAYLOAD) from None
        try:
            if length > self._max_payload:
                raise ContributionRefused(Reason.TOO_LARGE, f"payload of {length} bytes")
            at_once = min(length + _MIN_READ, _READ_CHUNK)  # a file of a few bytes takes no megabyte
            while part := os.read(file, at_once):
                hasher.update(part)
                mark = hash((mark, part))
                size += len(part)
                if size > self._max_payload:
                    raise ContributionRefused(Reason.TOO_LARGE, "the payload grew while it was read")
                if len(part) < at_once and size == length:
                    break  # all that was there; should it grow now, that is as if it grew later
        except OSError as error:
            raise ContributionRefused(Reason.UNREADABLE, f"payload: {error.strerror}") from None
        finally:
            os.close(file)
        return hasher.digest(), mark


def other_ledger(signed: bytes, ledger: bytes) -> ContributionRefused:
    """The refusal of what was signed for another ledger."""
    return ContributionRefused(Reason.OTHER_LEDGER, f"it names {signed.hex()[:16]}…, this is {ledger.hex()[:16]}…")


def check_id(id: str) -> None:
    """An id is printable text of 1 to 255 bytes."""
    if not id or not id.isprintable() or len(id.encode()) > MAX_ID:
        raise ContributionRefused(Reason.BAD_ID)


def _require_parts(given: Contribution) -> tuple[bytes, bytes]:
    descriptor, attestation = given.descriptor, given.attestation
    for what, data, most in (("descriptor", descriptor, MAX_DESCRIPTOR), ("attestation", attestation, MAX_ATTESTATION)):
        if data is not None and len(data) > most:
            raise ContributionRefused(Reason.TOO_LARGE, f"{what} of more than {most} bytes")
    if attestation is None:
        raise ContributionRefused(Reason.NO_ATTESTATION)
    if descriptor is None:
        raise ContributionRefused(Reason.NO_DESCRIPTOR)
    if given.payload is None:
        raise ContributionRefused(Reason.NO_PAYLOAD)
    return descriptor, attestation


def _decode_signed(descriptor: bytes, attestation: bytes) -> tuple[Descriptor, Attestation]:
    try:
        return Descriptor.decode(descriptor), Attestation.decode(attestation)
    except UnknownSchema as error:
        raise ContributionRefused(Reason.UNKNOWN_SCHEMA, error.problem) from None
    except WrongAlgorithm as error:
        raise ContributionRefused(Reason.WRONG_ALGORITHM, error.problem) from None
    except (EncodingError, AdmissionError) as error:
        raise ContributionRefused(Reason.MALFORMED, error.problem) from None


def _check_window(signed: Descriptor, claims: Attestation, now: int) -> None:
    early, expired = window_rules(now, signed.not_before, signed.expires)
    if early:
        raise ContributionRefused(Reason.NOT_YET_VALID, f"valid from {format_utc(signed.not_before)}")
    if now + CLOCK_SKEW < claims.iat:
        raise ContributionRefused(Reason.NOT_YET_VALID, f"its signing time {format_utc(claims.iat)} is in the future")
    if expired:
        raise ContributionRefused(Reason.EXPIRED, f"expired at {format_utc(signed.expires)}")
