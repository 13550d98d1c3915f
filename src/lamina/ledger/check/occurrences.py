"""Occurrences: how often the attempts of a run, and of its copies, may have used one contribution under a cap.

A contribution occurs at most `cap` times along the weights of a run. Attempts hang together as a tree: each goes on
from the weights that another one left, and what was given up, lost, or done by a copy is a branch of its own. The most
occurrences over all branches, none with more than the cap along its way, are

    Σ over lines of min(cap, steps of the line),

where the tree is cut into lines such that each goes on into its longest branch: what occurs before a fork is lost to
every branch after it, so that the worst case occurs as late as it can. Steps under another plan count nothing here.
"""

from __future__ import annotations

from collections.abc import Iterable

from lamina.ledger.records import Outcome, Segment


class _Line:
    """Attempts that go on from each other, the first one from `before`; `start` and `tip` count steps from the root."""

    def __init__(self, before: _Attempt | None) -> None:
        self.before = before
        self.start = self.tip = 0 if before is None else before.depth
        self.attempts: list[_Attempt] = []

    def take(self, attempts: Iterable[_Attempt]) -> None:
        for each in attempts:
            each.line, each.at = self, len(self.attempts)
            self.attempts.append(each)


class _Attempt:
    """The steps from the root to its end, its line, and its place there."""

    def __init__(self, depth: int, line: _Line) -> None:
        self.depth, self.at = depth, 0
        self.line = line


class Occurrences:
    """The attempts of a run in the order of their epochs. `most` is what they come to under one plan."""

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self._closed: dict[tuple[int, int], _Attempt] = {}
        self.most = 0

    def add(self, segments: Iterable[Segment], *, counts: bool = True) -> None:
        """`counts`: whether they were attempts under the plan."""
        for each in segments:
            before = self._closed.get((each.index - 1, each.after or 0))
            if before is not None and before.line.attempts[-1] is before:
                line = before.line
            else:
                line = _Line(before)
            made = _Attempt(line.tip + (each.last - each.first if counts else 0), line)
            line.take([made])
            if each.outcome is Outcome.CLOSED:
                self._closed[each.index, each.generation] = made
            self.most -= self._of(line)
            line.tip = made.depth
            self.most += self._of(line)
            self._straighten(line)

    def _straighten(self, line: _Line) -> None:
        """A branch that is longer than what it branched off from changes places with it, unless both have `cap`."""
        while line.before is not None:
            above = line.before.line
            if line.tip <= above.tip or above.tip - line.start >= self._cap:
                return
            self.most -= self._of(line) + self._of(above)
            mine, rest = line.attempts, above.attempts[line.before.at + 1 :]
            del above.attempts[line.before.at + 1 :]
            line.attempts = []
            above.take(mine)
            line.take(rest)
            above.tip, line.tip = line.tip, above.tip
            self.most += self._of(line) + self._of(above)
            line = above

    def _of(self, line: _Line) -> int:
        return min(self._cap, line.tip - line.start)
