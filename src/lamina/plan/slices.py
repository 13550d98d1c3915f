"""`Slice`: of one tensor, the part that a class may move: the rows of its heads, the experts it may train."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from lamina.errors import PlanError

Range = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """Class `cls` moves `tensor` only at `ranges` along `axis`, which has `length` places.

    Elsewhere its gradient is 0 before it is measured, so the threshold C[k,l] bounds what is left. `ranges` are
    [first, stop), in order, apart from each other; none at all: the class moves nothing of this tensor, though it
    reaches others of the same layer. A class without a slice for a tensor moves all of it.
    """

    cls: str
    tensor: str
    axis: int
    length: int
    ranges: tuple[Range, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranges", tuple((first, stop) for first, stop in self.ranges))
        last = -1
        for first, stop in self.ranges:
            if not last < first < stop <= self.length:
                raise PlanError(
                    "plan.slice-class-ranges",
                    f"slice of {self.tensor!r} for class {self.cls!r} has ranges {list(self.ranges)} of {self.length}",
                    "give [first, stop) in order, apart from each other",
                )
            last = stop
        if self.axis < 0 or self.length < 1:
            raise PlanError(
                "plan.slice-class-axis",
                f"slice of {self.tensor!r} for class {self.cls!r} has axis {self.axis} of length {self.length}",
                "count axes from 0",
            )

    @property
    def size(self) -> int:
        """How many places are open."""
        return sum(stop - first for first, stop in self.ranges)


@lru_cache(maxsize=64)
def by_place(slices: tuple[Slice, ...]) -> Mapping[tuple[str, str], Slice]:
    """By class and tensor."""
    return {(part.cls, part.tensor): part for part in slices}


def joined(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The same places as ranges in order, apart from each other."""
    made: list[Range] = []
    for first, stop in sorted(ranges):
        if made and first <= made[-1][1]:
            made[-1] = (made[-1][0], max(made[-1][1], stop))
        elif first < stop:
            made.append((first, stop))
    return tuple(made)


def outside(ranges: Iterable[Range], length: int) -> tuple[Range, ...]:
    """The places that `ranges` leave out."""
    made, last = [], 0
    for first, stop in joined(ranges):
        if last < first:
            made.append((last, first))
        last = stop
    return (*made, (last, length)) if last < length else tuple(made)
