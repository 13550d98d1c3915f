"""`Contract`: what the header of a ledger, or a change of its policy, says of a corpus."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from importlib.metadata import version

from lamina.account import order_of
from lamina.admit.descriptor import MICRO
from lamina.admit.key import PublicKey
from lamina.admit.terms import floors_hash, micro, preset, profile_text
from lamina.ledger.errors import LedgerError
from lamina.ledger.records import Floors, Header, Key, PolicyChange, Preset, Role, in_force
from lamina.plan.policy import Policy
from lamina.plan.step import PlannedClass, StepPlan

NO_POLICY = hashlib.sha256(b"lamina/no policy\n").digest()

_DELTA = 1e-6  # of a plan that owes nobody noise: nothing is ever stated at it
_ORIGIN = re.compile(r"[!-*,-~]{1,255}")
_LONGEST = 100  # characters of a slug
_PROFILE = 1024  # bytes


@dataclass(frozen=True, kw_only=True)
class Contract:
    """Origin, accountant and δ, which a ledger has for good; floors, presets and policy, which may change.

    `policy` is the digest that contributors sign (admit.terms.floors_hash); NO_POLICY where there is none.
    """

    origin: str
    accountant: str
    delta: float
    floors: Floors
    presets: tuple[Preset, ...]
    policy: bytes

    def __post_init__(self) -> None:
        if not isinstance(self.origin, str) or _ORIGIN.fullmatch(self.origin) is None:
            raise LedgerError(
                "ledger.origin-not-name",
                f"the origin {self.origin!r} cannot name a ledger: a signed note takes 1 to 255 printable ASCII "
                "characters, no blank and no '+'",
                f'call the corpus something like origin = "{slug(str(self.origin))}", and sign for that',
            )

    @classmethod
    def of_policy(cls, policy: Policy) -> Contract:
        """A corpus under a policy: what each class promises, in the integers in which it is signed."""
        corpus = policy.corpus
        return cls(
            origin=corpus.origin,
            accountant=corpus.accountant,
            delta=corpus.delta,
            floors=Floors(
                clip_norm=_micro(corpus.floors.clip_norm, ROUND_FLOOR),
                noise_multiplier=_micro(corpus.floors.noise_multiplier, ROUND_CEILING),
            ),
            presets=tuple(_preset(policy, name) for name in policy.classes),
            policy=floors_hash(policy),
        )

    @classmethod
    def of_plan(cls, plan: StepPlan, origin: str) -> Contract:
        """A corpus without a policy: its classes are the plan's, and promise nothing.

        A plan that follows its budget has an accountant of its own; a ledger of several runs counts by RDP then. Of
        several δ the smallest holds, at which every ε is largest.
        """
        return cls(
            origin=origin,
            accountant=plan.accountant if order_of(plan.accountant) is None else "rdp",
            delta=min((each.delta for each in plan.classes if each.delta > 0), default=_DELTA),
            floors=Floors(),
            presets=tuple(map(_planned, plan.classes)),
            policy=NO_POLICY,
        )

    def header(self, key: PublicKey, *, retention: int) -> Header:
        """Leaf 0 of a ledger whose checkpoints this key signs."""
        return Header(
            origin=self.origin,
            accountant=self.accountant,
            version=f"lamina {version('lamina')}; dp-accounting {version('dp-accounting')}",
            delta=self.delta,
            floors=self.floors,
            presets=self.presets,
            policy=self.policy,
            retention=retention,
            keys=(Key(name=self.origin, x=key.x, role=Role.LEDGER),),
        )

    def change(self, now: Header | PolicyChange) -> PolicyChange | None:
        """What makes it the policy in force; None if it is. Classes that it does not name stay as they are."""
        presets = _joined(now.presets, self.presets)
        if (self.floors, presets, self.policy) == (now.floors, now.presets, now.policy):
            return None
        return PolicyChange(floors=self.floors, presets=presets, policy=self.policy, previous=in_force(now))


def slug(origin: str) -> str:
    """An origin as part of a file name.

    >>> slug("example.org/ECG"), slug("St. Elsewhere, cardiology")
    ('example.org-ecg', 'st.-elsewhere-cardiology')
    """
    digest = hashlib.sha256(origin.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    text = re.sub(r"[^a-z0-9._-]+", "-", origin.lower()).strip("-.")
    if len(text) > _LONGEST:
        return f"{text[: _LONGEST - 13]}-{digest}"
    return text or f"corpus-{digest}"


def _joined(old: Sequence[Preset], new: Sequence[Preset]) -> tuple[Preset, ...]:
    named = {each.cls: each for each in new}
    known = {each.cls for each in old}
    return (*(named.get(each.cls, each) for each in old), *(each for each in new if each.cls not in known))


def _preset(policy: Policy, name: str) -> Preset:
    entry = policy.classes[name]
    if not entry.public and policy.bound(name) is None:
        bound = micro(entry.clip_norm, ROUND_FLOOR), 0
    else:
        bound = preset(policy, name)
    return Preset(
        cls=name,
        clip_norm=bound[0],
        noise_multiplier=bound[1],
        public=entry.public,
        profile=profile_text(entry.profile),
        population=entry.population,
    )


def _planned(entry: PlannedClass) -> Preset:
    words = entry.profile
    if not words.isprintable() or not 0 < len(words.encode()) <= _PROFILE:
        words = f"sha256:{hashlib.sha256(words.encode()).hexdigest()}"
    return Preset(
        cls=entry.name,
        clip_norm=0,
        noise_multiplier=0,
        public=entry.public,
        profile=words,
        population=entry.population,
    )


def _micro(value: float | None, rounding: str) -> int:
    """A floor as the gate holds contributions to it."""
    return 0 if value is None else int((Decimal(repr(value)) * MICRO).to_integral_value(rounding))
