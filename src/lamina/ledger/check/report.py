"""`Verification`: what an audit of a ledger came to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lamina.ledger.check.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a run was charged or has reserved, and no leaf says yet: it counts against the bounds all the same.

    attempts  that are open, or whose process ended before it could record them
    budgets   that noise is to follow, charged as a whole before the first attempt
    reserved  whether the rest of its plan is kept free for it
    """

    run: bytes
    label: str
    attempts: int
    budgets: int = 0
    reserved: bool

    def to_dict(self) -> dict[str, Any]:
        return {
            "run": self.run.hex(),
            "label": self.label,
            "attempts": self.attempts,
            "budgets": self.budgets,
            "reserved": self.reserved,
        }

    def __str__(self) -> str:
        name = f"{self.run.hex()[:8]} {self.label!r}" if self.label else self.run.hex()[:8]
        told = [f"{self.attempts} attempt{'s' if self.attempts > 1 else ''}"] if self.attempts else []
        told += ["a whole budget"] if self.budgets else []
        return f"{name} ({', '.join([*told, *(['the rest of its plan'] if self.reserved else [])])})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What was found.

    verified     everything that could be checked is as it must be
    trusted      all of it is signed by keys that came from outside the ledger
    size, root   of the tree that the leaves make; of what the head claims if they could not all be read
    signed       leaves that a checkpoint covers
    problem      the first thing that is wrong
    counts       leaves by kind; `pruned` are gone
    notes        what was not, or could not be, checked
    held         by run, what is charged or reserved and in no leaf yet
    """

    verified: bool
    trusted: bool
    origin: str | None
    size: int
    root: bytes | None
    signed: int
    checkpoints: int
    attestations: int
    spends: int
    problem: Problem | None
    counts: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    held: tuple[Held, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """For machines."""
        return {
            "verified": self.verified,
            "trusted": self.trusted,
            "origin": self.origin,
            "size": self.size,
            "root": None if self.root is None else self.root.hex(),
            "signed": self.signed,
            "checkpoints": self.checkpoints,
            "attestations": self.attestations,
            "spends": self.spends,
            "counts": self.counts,
            "notes": list(self.notes),
            "held": [each.to_dict() for each in self.held],
            "problem": None if self.problem is None else self.problem.to_dict(),
        }
