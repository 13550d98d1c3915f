"""Attempts as a journal records them."""

from __future__ import annotations

import random

from lamina.account.charges import Charge, stored_charge
from lamina.run.journal import AttemptOpened


def charge(**other: object) -> Charge:
    plain: dict[str, object] = {"cls": "sensitive", "sigma": 4.31, "q": 0.0128, "steps": 50, "delta": 1e-5}
    return stored_charge(**{"accountant": "pld", **plain, **other})  # type: ignore[arg-type]


def opened(segment: int, generation: int = 0, /, **other: object) -> AttemptOpened:
    """The same for the same numbers; any field may be given."""
    rng = random.Random(f"{segment} {generation}")
    digests = {name: rng.randbytes(32) for name in ("plan", "settings", "membership", "checkpoint", "data")}
    plain: dict[str, object] = {
        "segment": segment,
        "generation": generation,
        "nonce": rng.randbytes(16),
        "first": 50 * segment,
        "last": 50 * segment + 50,
        "world_size": 1,
        "threads": 2,
        "code": "lamina 0.1.0",
        "charges": (charge(), charge(cls="ärzte")),
        "eligibility": 7,
        "variance": (0.25, 1e-300),
        "scales": {"sensitive@c=1,z=2": 0.25},
        "seed": rng.randbytes(32),
        **digests,
    }
    return AttemptOpened(**{**plain, **other})  # type: ignore[arg-type]
