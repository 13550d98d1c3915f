"""The policy in force: what a contribution may have signed when it was admitted, and how the policy may change."""

from __future__ import annotations

import json
from functools import lru_cache

from lamina.errors import LaminaError
from lamina.ledger.check.keys import Keys
from lamina.ledger.check.problem import bad
from lamina.ledger.leaf import Leaf
from lamina.ledger.records import Header, PolicyChange, Preset, Role, Terms, loosened
from lamina.plan.profile import DepthProfile

_DIGEST = "sha256:"  # how a long profile is written


class PolicyInForce:
    """Floors and presets after the leaves that were read. `version` changes with them."""

    def __init__(self, header: Header) -> None:
        self._origin = header.origin
        self.floors, self.presets = header.floors, {each.cls: each for each in header.presets}
        self.ever = {
            cls: [preset] for cls, preset in self.presets.items()
        }  # a run may be older than the policy
        self.version = 0

    def change(self, leaf: Leaf, keys: Keys) -> None:
        """Go on by one policy change: floors only up, unless two signed."""
        new = leaf.record
        assert isinstance(new, PolicyChange)
        names = [each.cls for each in new.presets]
        if len(set(names)) < len(names):
            bad(leaf.seq, PolicyChange, "a class is named twice")
        signers, wrong = keys.signers(
            new.message(self._origin), new.signatures, (Role.LEDGER, Role.AUDITOR), leaf.time
        )
        if wrong is not None:
            bad(leaf.seq, PolicyChange, f"a signature under it does not count: {wrong}")
        looser = loosened(self.floors, self.presets.values(), new.floors, new.presets)
        if looser and len(signers) < 2:
            bad(leaf.seq, PolicyChange, f"{looser[0]}, and {len(signers)} of two parties signed that")
        self.floors, self.presets = new.floors, {each.cls: each for each in new.presets}
        for each in new.presets:
            self.ever.setdefault(each.cls, []).append(each)
        self.version += 1

    def wrong(self, terms: Terms) -> str | None:
        """Why a contribution with these terms was not to be admitted; None if it was."""
        preset = self.presets.get(terms.cls)
        if preset is None:
            return f"class {terms.cls!r} is not one of the policy"
        if preset.public:
            if terms.clip_norm or terms.noise_multiplier:
                return f"class {terms.cls!r} is public, and it signed a bound, which nobody keeps there"
        elif (problem := self._bound(terms, preset)) is not None:
            return problem
        if terms.profile is not None and terms.profile != preset.profile:
            return deeper(preset.profile, terms.profile)
        return None

    def _bound(self, terms: Terms, preset: Preset) -> str | None:
        c, z = terms.clip_norm, terms.noise_multiplier
        if not z:
            return f"class {terms.cls!r} is private, and it signed no bound"
        if c < self.floors.clip_norm:
            return f"clip norm {_plain(c)} is below the floor of {_plain(self.floors.clip_norm)}"
        if z < self.floors.noise_multiplier:
            return (
                f"noise multiplier {_plain(z)} is below the floor of {_plain(self.floors.noise_multiplier)}"
            )
        if c > preset.clip_norm:
            return f"clip norm {_plain(c)} is above the {_plain(preset.clip_norm)} of class {terms.cls!r}"
        if z < preset.noise_multiplier:
            return f"noise multiplier {_plain(z)} is below the {_plain(preset.noise_multiplier)} of class {terms.cls!r}"
        return None


@lru_cache(maxsize=1024)
def deeper(profile: str, signed: str) -> str | None:
    """Whether a class with this profile reaches where the signed one does not; in words."""
    if profile.startswith(_DIGEST) or signed.startswith(_DIGEST):
        return f"it signed the profile {signed[:80]}, its class has {profile[:80]}"
    try:
        inside = read_profile(profile).within(read_profile(signed))
    except (LaminaError, ValueError, TypeError, ArithmeticError, RecursionError):
        return f"profile {signed[:80]!r} or {profile[:80]!r} is of a schema that is not known"
    return None if inside else f"its class reaches {profile[:80]}, it signed {signed[:80]}"


def read_profile(text: str) -> DepthProfile:
    """A profile as a ledger holds it: canonical text, or the table of policy.toml in JSON."""
    return DepthProfile.parse(json.loads(text)) if text.startswith("{") else DepthProfile.from_text(text)


def _plain(micro: int) -> str:
    return f"{micro / 1e6:.9g}"
