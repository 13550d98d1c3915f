"""What a policy change changes, in words."""

from __future__ import annotations

from typing import Any

from lamina.ledger import show
from lamina.ledger.records import Floors, Header, PolicyChange, Preset, loosened
from lamina.ledger.show import counted, plain
from lamina.ledger.spend import signed_spend

Policy = Header | PolicyChange


def differences(old: Policy, new: Policy) -> list[str]:
    """One line for each thing that becomes another."""
    lines = [
        f"floor of the {word}: {number(before)} → {number(after)}"
        for word, before, after in (
            ("clip norm", old.floors.clip_norm, new.floors.clip_norm),
            ("noise multiplier", old.floors.noise_multiplier, new.floors.noise_multiplier),
        )
        if before != after
    ]
    known = {each.cls: each for each in old.presets}
    for preset in new.presets:
        if preset.cls not in known:
            lines.append(f"class {preset.cls} is new: {in_words(preset)}")
        elif known[preset.cls] != preset:
            lines.append(f"class {preset.cls}: {in_words(known[preset.cls])} → {in_words(preset)}")
    named = {each.cls for each in new.presets}
    lines += [f"class {each.cls} is gone" for each in old.presets if each.cls not in named]
    if old.policy != new.policy:
        lines.append(f"what contributors sign: {old.policy.hex()[:16]} → {new.policy.hex()[:16]}")
    return lines


def looser(old: Policy, new: Policy) -> list[str]:
    """In what it protects less."""
    return loosened(old.floors, old.presets, new.floors, new.presets)


def in_words(preset: Preset) -> str:
    """A class, in a line."""
    if preset.public:
        bound = "public"
    elif preset.noise_multiplier:
        bound = (
            f"clip norm ≤ {number(preset.clip_norm)}, noise multiplier ≥ {number(preset.noise_multiplier)}"
        )
    else:
        bound = f"clip norm ≤ {number(preset.clip_norm)}, no bound on ε" if preset.clip_norm else "no promise"
    people = "" if preset.population is None else f", {counted(preset.population, 'contribution')}"
    return f"{bound}, {preset.profile}{people}"


def as_object(policy: Policy, delta: float) -> dict[str, Any]:
    """A policy for machines: plain numbers; ε at most over all runs, null where there is no bound."""
    return {
        "floors": _floors(policy.floors),
        "classes": {
            each.cls: {
                "clip_norm": each.clip_norm / 1e6,
                "noise_multiplier": each.noise_multiplier / 1e6,
                "epsilon": plain(signed_spend(z, delta)) if (z := each.noise_multiplier) else None,
                "public": each.public,
                "profile": each.profile,
                "population": each.population,
            }
            for each in policy.presets
        },
        "policy": policy.policy.hex(),
    }


def _floors(floors: Floors) -> dict[str, float]:
    return {"clip_norm": floors.clip_norm / 1e6, "noise_multiplier": floors.noise_multiplier / 1e6}


def number(micro: int) -> str:
    """A norm or multiplier of a policy."""
    return show.number(micro) if micro else "none"
