"""`PolicyChange`: other floors or presets from here on. And what it may change."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from lamina import cbor
from lamina.ledger.depth import deeper
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
_IN_FORCE = b"lamina/policy-in-force/1\n"


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

    `policy` is the digest that contributors sign from now on (admit.terms.floors_hash). `previous` is that of the
    record which it replaces (`in_force`), so that what was signed once cannot be adopted again after it was taken back.
    """

    floors: Floors
    presets: tuple[Preset, ...]
    policy: bytes
    signatures: tuple[Signed, ...] = ()
    previous: bytes

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
        5: ("previous", DIGEST),
    },
)


def in_force(record: Any) -> bytes:
    """The digest of a header or change, by which the change after it names it. It never comes twice in a ledger."""
    body = schema(type(record)).plain(record)
    return hashlib.sha256(_IN_FORCE + cbor.encode(body, max_size=1 << 20)).digest()


def misplaced(change: PolicyChange, before: Any) -> str | None:
    """Why a change cannot follow this header or change; in words."""
    return None if change.previous == in_force(before) else "it replaces another policy than the one in force"


def loosened(
    floors: Floors, presets: Iterable[Preset], new_floors: Floors, new_presets: Iterable[Preset]
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
        elif deeper(new.profile, before.profile) is not None:
            found.append(f"the depth profile of class {new.cls!r} is not inside the one before")
    return found
