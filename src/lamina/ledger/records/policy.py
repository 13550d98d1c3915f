"""`PolicyChange`: other floors or presets from here on. And what it may change."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from lamina import cbor
from lamina.ledger.records.fields import (
    CLASS,
    COUNT,
    DIGEST,
    KEY_ID,
    MICRO,
    PROFILE,
    SIGNATURE,
    Flag,
    Many,
    Part,
    check,
    define,
    schema,
)  # fmt: skip

MOST_CLASSES = 256
_CONTEXT = b"lamina/policy-change/1\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Floors:
    """The least that any private contribution must sign, in 1e-6; 0 is no floor."""

    clip_norm: int = 0
    noise_multiplier: int = 0

    def __post_init__(self) -> None:
        check(self)


define(Floors, {1: ("clip_norm", MICRO), 2: ("noise_multiplier", MICRO)})


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
        check(self)


define(
    Preset,
    {
        1: ("cls", CLASS),
        2: ("clip_norm", MICRO),
        3: ("noise_multiplier", MICRO),
        4: ("public", Flag()),
        5: ("profile", PROFILE),
        6: ("population", COUNT),
    },
    optional=[6],
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Signed:
    """A signature by the key with this id, over whatever the record that holds it says."""

    key: bytes
    signature: bytes

    def __post_init__(self) -> None:
        check(self)


define(Signed, {1: ("key", KEY_ID), 2: ("signature", SIGNATURE)})


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyChange:
    """The floors and presets that hold from here on, whole. Looser ones need the signatures of two keys.

    `policy` is the digest that contributors sign from now on (admit.terms.floors_hash).
    """

    floors: Floors
    presets: tuple[Preset, ...]
    policy: bytes
    signatures: tuple[Signed, ...] = ()

    def __post_init__(self) -> None:
        check(self)

    def message(self, origin: str) -> bytes:
        """What is signed: the change without signatures, for one ledger."""
        body = schema(PolicyChange).plain(replace(self, signatures=()))
        return _CONTEXT + cbor.encode([origin, body], max_size=1 << 20)


define(
    PolicyChange,
    {
        1: ("floors", Part(Floors)),
        2: ("presets", Many(Part(Preset), 1, MOST_CLASSES)),
        3: ("policy", DIGEST),
        4: ("signatures", Many(Part(Signed), 0, 16)),
    },
)


def loosened(
    floors: Floors, presets: Iterable[Preset], new_floors: Floors, new_presets: Iterable[Preset]
) -> list[str]:
    """In what a new table protects less than the old one: empty if it is as strict everywhere.

    A class that is new or gone protects nobody less: who signed for it is not admitted under another.
    """
    found = []
    if new_floors.clip_norm < floors.clip_norm:
        found.append("the floor of the clip norm falls")
    if new_floors.noise_multiplier < floors.noise_multiplier:
        found.append("the floor of the noise multiplier falls")
    old = {each.cls: each for each in presets}
    for new in new_presets:
        before = old.get(new.cls)
        if before is None:
            continue
        if new.public and not before.public:
            found.append(f"class {new.cls!r} becomes public")
        elif not before.public and new.clip_norm > before.clip_norm:
            found.append(f"the clip norm of class {new.cls!r} grows")
        elif not before.public and new.noise_multiplier < before.noise_multiplier:
            found.append(f"the noise multiplier of class {new.cls!r} falls")
        elif new.profile != before.profile:
            found.append(f"the depth profile of class {new.cls!r} is another one")
    return found
