"""`AttemptTree`: the most occurrences of one contribution in a run whose plan caps them. Writer and verifier share it."""

from __future__ import annotations

from collections.abc import Iterable

from lamina.ledger.records import Segment, SegmentOutcome


class _AttemptLine:
    """Attempts that continue each other, the first one from `before`; `start` and `tip` count steps from the root."""

    def __init__(self, before: _TreeAttempt | None) -> None:
        self.before = before
        self.start = self.tip = 0 if before is None else before.depth
        self.attempts: list[_TreeAttempt] = []

    def take(self, attempts: Iterable[_TreeAttempt]) -> None:
        for each in attempts:
            each.line, each.at = self, len(self.attempts)
            self.attempts.append(each)


class _TreeAttempt:
    """Its steps from the root to its end, its line, and its index there."""

    def __init__(self, depth: int, line: _AttemptLine) -> None:
        self.depth, self.line, self.at = depth, line, 0


class AttemptTree:
    """The most occurrences of one contribution over all attempts of a run and its copies, under a cap.

    A contribution occurs at most `cap` times along the weights of a run. Attempts form a tree: each continues from the
    weights that another one left; attempts that were abandoned, lost, or made by a copy are branches. The most
    occurrences over all branches, none with more than the cap along its path, are

        Σ over lines of min(cap, steps of the line),

    where the tree is cut into lines such that each continues into its longest branch: what occurs before a fork is lost
    to every branch after it, so the worst case occurs as late as possible. Steps under another plan do not count.
    """

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self._closed: dict[tuple[int, int], _TreeAttempt] = {}
        self.most = 0

    def add(self, segments: Iterable[Segment], *, counts: bool = True) -> None:
        """Add attempts in the order of their epochs. `counts`: whether they were made under the plan."""
        for each in segments:
            before = self._closed.get((each.index - 1, each.after or 0))
            if before is not None and before.line.attempts[-1] is before:
                line = before.line
            else:
                line = _AttemptLine(before)
            made = _TreeAttempt(line.tip + (each.last - each.first if counts else 0), line)
            line.take([made])
            if each.outcome is SegmentOutcome.CLOSED:
                self._closed[each.index, each.generation] = made
            self.most -= self._of(line)
            line.tip = made.depth
            self.most += self._of(line)
            self._swap_longer_branch(line)

    def _swap_longer_branch(self, line: _AttemptLine) -> None:
        """Swap a branch with the rest of the line that it left, if it is longer, unless both have `cap`."""
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

    def _of(self, line: _AttemptLine) -> int:
        return min(self._cap, line.tip - line.start)
