"""Occurrences: how often the attempts of a run, and of its copies, may have used one contribution under a cap.

A contribution occurs at most `cap` times along the weights of a run. Attempts hang together as a tree: each goes on
from the weights that another one left, and what was given up, lost, or done by a copy is a branch of its own. The most
occurrences over all branches, none with more than the cap along its way, are

    Σ over paths of min(cap, steps of the path),

where the tree is cut into paths such that each goes on into its longest branch: what occurs before a fork is lost to
every branch after it, so that the worst case occurs as late as it can.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest

from lamina.ledger.records import Outcome, Segment


class _Attempt:
    """`paths[i]` of the paths below, with this attempt at the beginning of the longest, have more than i steps."""

    def __init__(self, before: _Attempt | None, steps: int) -> None:
        self.before, self.steps = before, steps
        self.after: list[_Attempt] = []
        self.paths: tuple[int, ...] = ()

    def changed(self, cap: int) -> bool:
        """Count again; whether it made a difference."""
        below = [each.paths for each in self.after]
        found = below[0] if len(below) == 1 else tuple(map(sum, zip_longest(*below, fillvalue=0)))
        if len(found) < cap:
            found += (1,) * min(self.steps, cap - len(found))
        earlier, self.paths = self.paths, found
        return found != earlier


class Occurrences:
    """The attempts of a run under one plan, in the order of their epochs."""

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self._root = _Attempt(None, 0)
        self._closed: dict[tuple[int, int], _Attempt] = {}

    def add(self, segments: Iterable[Segment]) -> None:
        for each in segments:
            before = self._closed.get((each.index - 1, each.after or 0), self._root)
            made = _Attempt(before, each.last - each.first)
            before.after.append(made)
            if each.outcome is Outcome.CLOSED:
                self._closed[each.index, each.generation] = made
            above: _Attempt | None = made
            while above is not None and above.changed(self._cap):
                above = above.before

    @property
    def most(self) -> int:
        """Of one contribution, over all attempts."""
        return sum(self._root.paths)
