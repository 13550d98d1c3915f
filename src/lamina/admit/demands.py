"""What a policy demands of a descriptor, in the integers in which it is signed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any

from lamina.admit.descriptor import MICRO, Descriptor
from lamina.admit.reason import Reason
from lamina.admit.refusal import Refused
from lamina.admit.terms import floors_hash, preset, profile_text
from lamina.errors import LaminaError
from lamina.plan.policy import Policy
from lamina.plan.profile import DepthProfile

_REMEMBERED = 4096  # answers about signed profiles


@dataclass(frozen=True, slots=True)
class ClassDemand:
    """One class: its row in the policy, the most permissive bound that it admits in 1e-6, how deep it reaches.

    `bound` is None where the policy bounds no ε, (0, 0) for a public class.
    """

    row: int
    public: bool
    bound: tuple[int, int] | None
    profile: DepthProfile
    population: int | None


class Demands:
    """Floors, classes and the digests under which a descriptor may be signed.

    The floor that a contribution is held to is the higher of the one it was signed under and the one in force. Floors
    only rise, so that is the one in force, whichever of the digests it signed.
    """

    def __init__(self, policy: Policy) -> None:
        self.origin = policy.corpus.origin
        self.epoch = policy.corpus.epoch
        self.digests = frozenset(_digests(policy))
        floors = policy.corpus.floors
        self.clip_floor = max(1, _micro(floors.clip_norm, ROUND_FLOOR))  # a clip norm of 0 teaches nothing
        self.noise_floor = max(1, _micro(floors.noise_multiplier, ROUND_CEILING))
        self.classes = {
            name: ClassDemand(row, entry.public, _preset(policy, name), entry.profile, entry.population)
            for row, (name, entry) in enumerate(policy.classes.items())
        }
        self._profiles: dict[tuple[str, str], bool] = {}

    def check(self, descriptor: Descriptor) -> ClassDemand:
        """The descriptor's class, if audience, floors, bound and profile are as demanded. Refused otherwise."""
        if descriptor.policy not in self.digests:
            raise Refused(Reason.POLICY_MISMATCH, f"signed under {descriptor.policy.hex()[:16]}…")
        demand = self.classes.get(descriptor.admissibility)
        if demand is None:
            raise Refused(Reason.UNKNOWN_CLASS, f"class {descriptor.admissibility!r}")
        if demand.public:
            if descriptor.clip_norm or descriptor.noise_multiplier:
                raise Refused(Reason.PUBLIC_BOUND, f"class {descriptor.admissibility!r}")
        else:
            self._check_floors(descriptor)
            check_class(demand, descriptor)
        if descriptor.profile is not None and not self.allows(descriptor.profile, descriptor.admissibility):
            raise Refused(
                Reason.PROFILE_MISMATCH, f"signed {descriptor.profile}, the class reaches {demand.profile}"
            )
        return demand

    def _check_floors(self, descriptor: Descriptor) -> None:
        if descriptor.clip_norm < self.clip_floor:
            raise Refused(Reason.CLIP_BELOW_FLOOR, _compared(descriptor.clip_norm, self.clip_floor))
        if descriptor.noise_multiplier < self.noise_floor:
            raise Refused(Reason.NOISE_BELOW_FLOOR, _compared(descriptor.noise_multiplier, self.noise_floor))

    def allows(self, signed: str, cls: str) -> bool:
        """Whether all that the class reaches lies inside the profile that was signed."""
        known = self._profiles.get((cls, signed))
        if known is None:
            known = _contains(signed, self.classes[cls].profile)
            if len(self._profiles) >= _REMEMBERED:
                self._profiles.clear()
            self._profiles[cls, signed] = known
        return known


def check_class(demand: ClassDemand, descriptor: Descriptor) -> None:
    """The resolver's own refusals: a bound more permissive than the class."""
    if demand.bound is None:
        raise Refused(Reason.UNBOUNDED_CLASS, f"class {descriptor.admissibility!r}")
    clip, noise = demand.bound
    if descriptor.clip_norm > clip:
        raise Refused(Reason.CLIP_ABOVE_CLASS, _compared(descriptor.clip_norm, clip))
    if descriptor.noise_multiplier < noise:
        raise Refused(Reason.NOISE_BELOW_CLASS, _compared(descriptor.noise_multiplier, noise))


def _contains(signed: str, profile: DepthProfile) -> bool:
    if signed == profile_text(profile):  # a long profile is signed as a digest, which can only be compared
        return True
    try:
        return profile.within(_read(signed))
    except (LaminaError, ValueError, TypeError, ArithmeticError, RecursionError):
        return False


def _read(signed: str) -> DepthProfile:
    """A profile as it may be signed: the table of policy.toml in JSON, or its canonical text."""
    if signed.startswith("{"):
        return DepthProfile.parse(json.loads(signed, object_pairs_hook=_unambiguous))
    return DepthProfile.from_text(signed)


def _unambiguous(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice, and two readers may take another one each")
    return found


def _digests(policy: Policy) -> list[bytes]:
    """Of the floors in force and of each that was in force before."""
    found = [floors_hash(policy)]
    for floors in policy.corpus.earlier_floors:
        corpus = policy.corpus.model_copy(update={"floors": floors})
        found.append(floors_hash(policy.model_copy(update={"corpus": corpus})))
    return found


def _preset(policy: Policy, name: str) -> tuple[int, int] | None:
    if not policy.classes[name].public and policy.bound(name) is None:
        return None
    return preset(policy, name)


def _micro(value: float | None, rounding: str) -> int:
    return 0 if value is None else int((Decimal(repr(value)) * MICRO).to_integral_value(rounding))


def _compared(signed: int, bound: int) -> str:
    return f"signed {signed / MICRO:.9g}, the bound is {bound / MICRO:.9g}"
