"""The terms of a policy: what contributors sign, and what the gate requires of what they signed."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from functools import lru_cache
from typing import Any, cast

from lamina import cbor
from lamina.account.gaussian_rdp import epsilon_of_noise_multiplier
from lamina.account.schedule import bisect_int
from lamina.admit.attestation import MAX_MICRO, MAX_PROFILE, MICRO, Descriptor
from lamina.admit.reasons import Case, Stage, examine
from lamina.errors import AdmissionError, LaminaError
from lamina.plan.depth_profile import DepthProfile
from lamina.plan.policy import ClassPolicy, Policy, PolicyFloors
from lamina.plan.risk import gaussian_noise_multiplier
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
class ClassTerms:
    """One class: its row in the policy, the most permissive bound that it admits in 1e-6, how deep it reaches.

    `bound` is None where the policy has no bound on ε or risk, (0, 0) for a public class.
    """

    row: int
    public: bool
    bound: tuple[int, int] | None
    profile: DepthProfile
    population: int | None


class PolicyTerms:
    """Floors, classes and the digests under which a descriptor may be signed.

    A contribution must keep the higher of the floor it was signed under and the floor in force. Floors only rise, so
    that is the one in force, whichever of the digests it signed.
    """

    origin: str
    ledger: bytes | None  # the only ledger for which contributions may be signed
    digests: frozenset[bytes]
    clip_floor: int
    noise_floor: int
    classes: Mapping[str, ClassTerms]
    profile_allows: Callable[[str | None, str], bool]

    def __init__(self, policy: Policy) -> None:
        self.origin = policy.corpus.origin
        self.ledger = policy.corpus.ledger_hash
        accepted = (policy.corpus.floors, *policy.corpus.earlier_floors)
        self.digests = frozenset(_floors_hash(self.origin, each) for each in accepted)
        floors = policy.corpus.floors
        self.clip_floor = max(1, _scaled(floors.clip_norm or 0.0, ROUND_FLOOR))  # a clip norm of 0 teaches nothing
        self.noise_floor = max(1, _scaled(floors.noise_multiplier or 0.0, ROUND_CEILING))
        self.classes = {
            name: ClassTerms(
                row, entry.public,
                preset(policy, name) if entry.public or entry.risk or policy.bound(name) is not None else None,
                entry.profile, entry.population,
            )
            for row, (name, entry) in enumerate(policy.classes.items())
        }  # fmt: skip
        self.profile_allows = lru_cache(maxsize=4096)(self._profile_allows)

    def check(self, descriptor: Descriptor) -> None:
        """Raise ContributionRefused unless the policy admits what was signed."""
        case = Case(cast(Any, None), 0, self)
        case.signed = descriptor
        examine(case, Stage.POLICY)

    def _profile_allows(self, signed: str | None, cls: str) -> bool:
        """Return whether everything that the class reaches lies inside the signed profile, if one was signed."""
        profile = self.classes[cls].profile
        if signed is None or signed == profile_text(
            profile
        ):  # a long profile is signed as a digest, which can only be compared
            return True
        try:
            if signed.startswith("{"):  # the table of policy.toml in JSON
                return profile.within(DepthProfile.parse(json.loads(signed, object_pairs_hook=distinct_fields)))
            return profile.within(DepthProfile.from_text(signed))
        except (LaminaError, ValueError, TypeError, ArithmeticError, RecursionError):
            return False
