"""What to do about a segment that was opened: finish it, replay it, or do it again and pay.

Same noise on another batch gives the difference away; fresh noise on the same step is a second release. So a
segment that never reached its checkpoint is *replayed*, seed and all, if nothing that its outcome depends on has
changed: it is then the same random variable, charged once. Otherwise it is *redone* as a new generation with a
fresh seed, and paid for again; the old charge stays. docs/runs.md has the protocol.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields

from lamina.train.store.records import Open


class Action(enum.Enum):
    """What resuming a pending segment means."""

    FINISH = "its checkpoint is there: close it"
    REPLAY = "everything matches: the same seed again, nothing is charged"
    REDO = "something changed: a fresh seed, charged again"


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """All that the outcome of a segment depends on, apart from its seed. Field names are those of `Open`."""

    plan: bytes
    settings: bytes
    membership: bytes
    checkpoint: bytes
    data: bytes
    world_size: int
    threads: int
    code: str


_WORDS = {
    "plan": "the plan changed",
    "settings": "optimiser, scheduler, loss or options changed",
    "membership": "contributions were added or withdrawn",
    "checkpoint": "the segment began at another checkpoint",
    "data": "the data changed",
    "world_size": "the number of ranks changed",
    "threads": "the number of threads changed",
    "code": "another version of the program or another kind of processor",
}


def mismatches(pending: Open, facts: Facts, *, copied: bool, disowned: bool = False) -> tuple[str, ...]:
    """In words: why a pending segment cannot be replayed. Empty if it can."""
    found = [_WORDS[f.name] for f in fields(facts) if getattr(pending, f.name) != getattr(facts, f.name)]
    if copied:
        found.append("the run's folder was copied or restored from a copy")
    if disowned:
        found.append("the ledger records them as given up")
    if not pending.seed:
        found.append("its seed is gone")
    return tuple(found)


def decide(
    pending: Open, facts: Facts, *, newest: int, copied: bool, disowned: bool = False
) -> tuple[Action, tuple[str, ...]]:
    """`newest` counts the closed segments of the newest checkpoint."""
    if newest > pending.segment:
        return Action.FINISH, ()
    reasons = mismatches(pending, facts, copied=copied, disowned=disowned)
    return (Action.REDO, reasons) if reasons else (Action.REPLAY, ())
