"""What a policy asks a contributor to sign: whose corpus, which class, which bound, how deep, for how long."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from functools import lru_cache

from lamina import cbor
from lamina.account import epsilon_of_multiplier
from lamina.admit.descriptor import MAX_MICRO, MAX_PROFILE, MICRO, Descriptor
from lamina.errors import AdmissionError
from lamina.plan.policy import ClassPolicy, Policy
from lamina.plan.profile import DepthProfile


def floors_hash(policy: Policy) -> bytes:
    """SHA-256 over the origin and the floors of a corpus.

    Classes and depth profiles are not in it: a corpus may adopt routing, or add a class, without new credentials.
    """
    floors = policy.corpus.floors.model_dump(exclude_none=True)
    return hashlib.sha256(
        cbor.encode({"origin": policy.corpus.origin, "floors": floors}, floats=True)
    ).digest()


def preset(policy: Policy, cls: str) -> tuple[int, int]:
    """(clip norm, noise multiplier) of a class, in 1e-6: the most permissive bound that it admits.

    c is rounded down. z is the least for which one Gaussian release costs no more ε than the class may spend, so it is
    rounded to the strict side too. (0, 0) for a public class.
    """
    entry = _class(policy, cls)
    if entry.public:
        return 0, 0
    bound = policy.bound(cls)
    if bound is None:
        raise AdmissionError(
            "admit.class-bounds-no",
            f"class {cls!r} bounds no ε, so there is nothing to sign",
            f"give class.{cls} an epsilon or a noise_multiplier, or the corpus a floor",
        )
    return micro(entry.clip_norm, ROUND_FLOOR), _multiplier(bound, policy.corpus.delta)


def micro(value: float, rounding: str) -> int:
    """A number of a policy or of the command line in units of 1e-6, as it was written: 0.29 is 290,000."""
    scaled = Decimal(repr(float(value))) * MICRO
    result = int(scaled.to_integral_value(rounding)) if scaled.is_finite() else 0
    if not 0 < result <= MAX_MICRO:
        raise AdmissionError(
            "admit.not-signed-units",
            f"{value!r} cannot be signed in units of 1e-6",
            "give a number from 1e-6 to 1e9",
        )
    return result


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
class Terms:
    """What is common to all contributions that are signed in one go. `make` fills it in from a policy."""

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
        nothing = bytes(32)  # what cannot be signed for any payload is refused before the first
        self.descriptor(contributor=nothing, nonce=bytes(16), commitment=nothing, items=1)

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
    ) -> Terms:
        """The terms of class `name`, or stricter ones: a smaller clip norm, a larger noise multiplier.

        With `profile` the depth that the class has today is signed too, if it is restricted at all; the contribution
        is then refused by a policy that lets it reach elsewhere. Without, depth is left to the policy.
        """
        entry = _class(policy, name)
        clip, noise = _bound(policy, name, clip_norm, noise_multiplier)
        restricted = profile and not entry.profile.whole
        return cls(
            audience=policy.corpus.origin,
            policy=floors_hash(policy),
            admissibility=name,
            data_class=data_class if data_class is not None else _slug(name),
            clip_norm=clip,
            noise_multiplier=noise,
            not_before=not_before,
            expires=expires,
            profile=profile_text(entry.profile) if restricted else None,
        )

    def within(self, not_before: int, expires: int) -> Terms:
        """The same in another window."""
        return replace(self, not_before=not_before, expires=expires)

    def descriptor(
        self, *, contributor: bytes, nonce: bytes, commitment: bytes, items: int, anchor: bytes | None = None
    ) -> Descriptor:
        """These terms for one payload."""
        return Descriptor(
            contributor=contributor,
            data_class=self.data_class,
            admissibility=self.admissibility,
            clip_norm=self.clip_norm,
            noise_multiplier=self.noise_multiplier,
            not_before=self.not_before,
            expires=self.expires,
            profile=self.profile,
            commitment=commitment,
            items=items,
            nonce=nonce,
            policy=self.policy,
            audience=self.audience,
            anchor=anchor,
        )


def _bound(policy: Policy, name: str, c: float | None, z: float | None) -> tuple[int, int]:
    """The class's preset, or what was asked for if it is stricter and above the floors."""
    clip, noise = preset(policy, name)
    if policy.classes[name].public:
        if c is not None or z is not None:
            raise AdmissionError(
                "admit.class-public-no",
                f"class {name!r} is public and has no bound",
                "leave clip norm and multiplier out",
            )
        return clip, noise
    if c is not None and (asked := micro(c, ROUND_FLOOR)) > clip:
        raise AdmissionError(
            "admit.clip-norm-above",
            f"clip norm {c:g} is above {clip / MICRO:g}, which class {name!r} allows",
            "sign a smaller one",
        )
    if c is not None:
        clip = asked
        floor = policy.corpus.floors.clip_norm
        if floor is not None and clip / MICRO < floor:
            raise AdmissionError(
                "admit.clip-norm-below",
                f"clip norm {c:g} is below the floor of {floor:g}",
                "sign a larger one",
            )
    if z is not None:
        if (wanted := micro(z, ROUND_CEILING)) < noise:
            raise AdmissionError(
                "admit.noise-multiplier-below",
                f"noise multiplier {z:g} is below {noise / MICRO:g}, which class {name!r} asks for",
                "sign a larger one",
            )
        noise = wanted
    return clip, noise


@lru_cache(maxsize=256)
def _multiplier(bound: float, delta: float) -> int:
    low, high = 0, 1  # ε(low) is above the bound, ε(high) not
    while epsilon_of_multiplier(high / MICRO, delta) > bound:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if epsilon_of_multiplier(middle / MICRO, delta) > bound:
            low = middle
        else:
            high = middle
    if high > MAX_MICRO:
        raise AdmissionError(
            "admit.epsilon-delta-needs",
            f"ε = {bound:g} at δ = {delta:g} needs more noise than can be signed",
            "allow more ε",
        )
    return high


def _class(policy: Policy, name: str) -> ClassPolicy:
    if name not in policy.classes:
        raise AdmissionError(
            "admit.policy-no-class",
            f"the policy has no class {name!r}",
            f"its classes are {', '.join(policy.classes)}",
        )
    return policy.classes[name]


def _slug(name: str) -> str:
    """The data class when none is given: the admissibility class in its letters."""
    return re.sub(r"[^a-z0-9-]", "-", name.lower())[:64]
