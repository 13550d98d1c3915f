"""`Part`: how one tensor is shared out among the heads of an attention, or among experts."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lamina.plan.slices import Range, joined

Piece = tuple[int, int, tuple[int, ...]]
"""[first, stop) and the numbers of those whom these places serve."""


class PartKind(enum.Enum):
    """What a tensor is shared out among."""

    HEADS = "heads"
    EXPERTS = "experts"


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """`tensor` along `axis`, which has `length` places, belongs piece by piece to heads (or experts) of `group`.

    group   the name of the module that has them: an attention, a list of experts
    count   how many there are; heads are query heads
    pieces  whom places serve: rows of a query projection one head, rows of a key projection all query heads of their
            group. Places in no piece serve all of them, or nobody knows whom; they belong to none
    """

    kind: PartKind
    group: str
    count: int
    tensor: str
    axis: int
    length: int
    pieces: tuple[Piece, ...]

    def open_to(self, chosen: Collection[int]) -> tuple[Range, ...]:
        """The places that serve none but the chosen: a shared thing is reached only if all of its uses are."""
        return joined(
            (first, stop) for first, stop, users in self.pieces if all(user in chosen for user in users)
        )

    @property
    def whole(self) -> bool:
        """Whether the tensor is one piece."""
        return len(self.pieces) == 1 and self.pieces[0][:2] == (0, self.length)


@dataclass(frozen=True, kw_only=True, slots=True)
class Unread:
    """A module that looks as if it had heads, or experts, and why they are not known."""

    module: str
    kind: PartKind
    why: str


def one_after_another(count: int, width: int, serves: Sequence[tuple[int, ...]] | None = None) -> list[Piece]:
    """`count` pieces of `width` places, for one user each or for those that `serves` lists."""
    return [(i * width, (i + 1) * width, serves[i] if serves is not None else (i,)) for i in range(count)]


def blocks(*rows: Sequence[Piece]) -> list[Piece]:
    """Rows of pieces, one row after the other."""
    made: list[Piece] = []
    for row in rows:
        start = made[-1][1] if made else 0
        made += [(start + first, start + stop, users) for first, stop, users in row]
    return made


def common(one: Iterable[Range], other: Iterable[Range]) -> tuple[Range, ...]:
    """The places that are in both."""
    pairs = ((max(a, c), min(b, d)) for a, b in one for c, d in other)
    return joined(pair for pair in pairs if pair[0] < pair[1])


def settled(
    found: Iterable[Part], uses: Mapping[str, tuple[str, ...]], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Part, ...]:
    """Parts by the tensors' own names, one axis for each tensor.

    `found` names a tensor by any of its uses. A tied tensor has the parts of all of its uses, and belongs to none where
    it is also used otherwise, or cut along two axes.
    """
    by_use: defaultdict[str, list[Part]] = defaultdict(list)
    for part in found:
        by_use[part.tensor].append(part)
    made: list[Part] = []
    for name, names in uses.items():
        parts = [replace(part, tensor=name) for use in names for part in by_use.get(use, ())]
        for kind in PartKind:
            mine = [part for part in parts if part.kind is kind]
            if mine and any(all(part.kind is not kind for part in by_use.get(use, ())) for use in names):
                parts.append(replace(mine[0], pieces=()))
        made += _along_one_axis(parts, shapes[name])
    return tuple(dict.fromkeys(made))


def _along_one_axis(parts: list[Part], shape: tuple[int, ...]) -> list[Part]:
    cut = list(dict.fromkeys(part.axis for part in parts if part.pieces and not part.whole))
    axis = cut[0] if cut else (parts[0].axis if parts else 0)
    length = shape[axis] if shape else 1
    made = []
    for part in parts:
        if part.whole:
            pieces: tuple[Piece, ...] = ((0, length, part.pieces[0][2]),)
        else:
            pieces = part.pieces if len(cut) <= 1 else ()
        made.append(replace(part, axis=axis, length=length, pieces=pieces))
    return made
