"""What an audit finds: the first thing that is not as it must be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from lamina.ledger.records import WORDS, Record

LEAF = "leaf"  # bytes at their place, whatever they say
CHECKPOINT = "checkpoint"  # a signature over the tree
TILE = "tile"  # a stored hash of the tree
STORE = "store"  # what a store keeps beside the leaves
SEEN = "seen"  # a checkpoint that was seen before
TRUST = "trust"  # keys from outside the ledger


@dataclass(frozen=True, slots=True)
class Problem:
    """Where, what and why. `index` is a leaf; of a checkpoint it is the first leaf that it fails to vouch for."""

    index: int | None
    kind: str
    code: str
    reason: str

    def to_dict(self) -> dict[str, Any]:
        return {"index": self.index, "kind": self.kind, "code": self.code, "reason": self.reason}

    def __str__(self) -> str:
        place = "" if self.index is None else f"leaf {self.index} "
        return f"{place}({self.kind}): {self.reason} [{self.code}]"


class Bad(Exception):
    """Ends an audit. Never leaves this folder."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


def bad(index: int | None, kind: str | type[Record], code: str, reason: str) -> NoReturn:
    """This is the first thing that is wrong."""
    raise Bad(Problem(index, kind if isinstance(kind, str) else WORDS[kind], code, reason))
