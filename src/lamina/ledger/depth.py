"""Depth profiles as a ledger holds them: which of two reaches deeper."""

from __future__ import annotations

import json
from functools import lru_cache

from lamina.errors import LaminaError
from lamina.plan.profile import DepthProfile

_DIGEST = "sha256:"  # how a long profile is written


def read_profile(text: str) -> DepthProfile:
    """A profile as a ledger holds it: canonical text, or the table of policy.toml in JSON."""
    return DepthProfile.parse(json.loads(text)) if text.startswith("{") else DepthProfile.from_text(text)


@lru_cache(maxsize=1024)
def deeper(profile: str, signed: str) -> str | None:
    """Whether a class with this profile reaches where the signed one does not; in words."""
    if profile == signed:
        return None
    if profile.startswith(_DIGEST) or signed.startswith(_DIGEST):
        return f"it signed the profile {signed[:80]}, its class has {profile[:80]}"
    try:
        inside = read_profile(profile).within(read_profile(signed))
    except (LaminaError, ValueError, TypeError, ArithmeticError, RecursionError):
        return f"profile {signed[:80]!r} or {profile[:80]!r} is of a schema that is not known"
    return None if inside else f"its class reaches {profile[:80]}, it signed {signed[:80]}"
