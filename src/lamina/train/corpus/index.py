"""The contributions of a corpus: what they are called, whose they are, what class they are of, who is still in."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamina.errors import CorpusError
from lamina.train.corpus.classes import DEFAULT
from lamina.train.corpus.grouping import Grouping, Labels, each
from lamina.train.corpus.keyed import keyed, put
from lamina.train.corpus.layout import Rows
from lamina.train.corpus.text import Texts


class Index:
    """One row per contribution. Rows never change; a withdrawal only takes away eligibility.

    Held: two texts, two to ten bytes of class and eligibility, 4 bytes of layout a contribution, and 8 each for a scale
    and a ceiling of their own where there are such; nothing else.
    """

    def __init__(
        self,
        examples: int,
        *,
        unit: Any = None,
        cls: Any = None,
        ids: Any = None,
        subject: Any = None,
        scale: Any = None,
        ceiling: Any = None,
    ) -> None:
        if not examples:
            raise CorpusError(
                "corpus.corpus-no-examples",
                "the corpus has no examples",
                "give at least one; an empty *batch* is fine",
            )
        grouping = Grouping(examples, unit, ids)
        self.layout, self.ids = grouping.layout, grouping.ids
        self.subjects = None if subject is None else Texts(each(grouping.spread("subject", subject)))
        self._check_subjects()
        self.named = cls is not None
        self.names, self._classes = _classes(grouping, DEFAULT if cls is None else cls)
        self.scale = _limits(grouping, "scale", scale, most=1.0)
        self.ceiling = _limits(grouping, "ceiling", ceiling, most=math.inf)
        self._eligible = np.ones(len(self.layout), dtype=np.bool_)
        self.revision = 0

    def _check_subjects(self) -> None:
        if self.subjects is None:
            return
        if (row := self.subjects.empty()) is not None:
            raise CorpusError(
                "corpus.contribution-empty-subject",
                f"contribution {self.ids[row]!r} has an empty subject tag",
                "tag every contribution, or none",
            )
        if (rows := self.subjects.repeat()) is not None:
            one, other = (self.ids[row] for row in rows)
            raise CorpusError(
                "corpus.contributions-same-subject",
                f"contributions {one!r} and {other!r} have the same subject tag: one person in two contributions has "
                "twice the influence that the guarantee is about",
                "make them one contribution: give the subject as unit=",
            )

    def __len__(self) -> int:
        return int(np.count_nonzero(self._eligible))

    def members(self, name: str) -> Rows:
        """The eligible rows of a class, in the order of the corpus."""
        if name not in self.names:
            raise CorpusError(
                "corpus.class-not-corpus",
                f"class {name!r} is not in the corpus",
                f"its classes are {', '.join(self.names)}",
            )
        return np.flatnonzero(self._eligible & (self._classes == self.names.index(name)))

    def find(self, ids: Iterable[str]) -> Rows:
        """Their rows; refused if one is unknown."""
        wanted = [str(one) for one in ids]
        found = self.ids.find(wanted)
        for one in wanted:
            if one not in found:
                raise CorpusError(
                    "corpus.contribution-not-corpus",
                    f"contribution {one!r} is not in the corpus, so nobody was withdrawn",
                    "ids are text: those given as ids=, or the units' values as text",
                )
        return np.array(sorted(set(found.values())), dtype=np.int64)

    def withdraw(self, rows: Rows) -> None:
        """Eligible no more."""
        self.revision += int(np.count_nonzero(self._eligible[rows]))
        self._eligible[rows] = False

    def order(self, key: bytes) -> bytes:
        """Over who is which row, withdrawn or not."""
        hasher = keyed(key, "lamina/order")
        put(hasher, [self.ids.data, self.ids.starts.astype("<i8").tobytes()])
        return hasher.digest()

    def digest(self, key: bytes, *extra: str) -> bytes:
        """Over ids, classes, subjects, scales and ceilings, layout and eligibility."""
        hasher = keyed(key, "lamina/members")
        put(hasher, [*extra, len(self.names), *self.names])
        for texts in (self.ids, self.subjects):
            put(hasher, ["none"] if texts is None else [texts.data, texts.starts.astype("<i8").tobytes()])
        put(hasher, [self._classes.astype("<u2").tobytes(), np.packbits(self._eligible).tobytes()])
        for limits in (self.scale, self.ceiling):
            put(hasher, ["none"] if limits is None else [limits.astype("<f8").tobytes()])
        self.layout.feed(hasher)
        return hasher.digest()


def _classes(grouping: Grouping, cls: Any) -> tuple[tuple[str, ...], NDArray[np.uint16]]:
    """Names in order of first appearance, and the number of each contribution's."""
    count = len(grouping.layout)
    if isinstance(cls, str):
        _check_name(cls)
        return (cls,), np.zeros(count, dtype=np.uint16)
    given: Labels = grouping.spread("cls", cls)
    known: dict[Any, int] = {}
    codes = np.fromiter(
        (known.setdefault(name, len(known)) for name in each(given)), dtype=np.int64, count=count
    )
    for name in known:
        _check_name(name)
    if len(known) > np.iinfo(np.uint16).max:
        raise CorpusError(
            "corpus.cls-names-classes",
            f"cls names {len(known)} classes",
            "a class is a group with one policy, not a person",
        )
    return tuple(known), codes.astype(np.uint16)


def _limits(grouping: Grouping, what: str, given: Any, *, most: float) -> NDArray[np.float64] | None:
    """One per contribution, in (0, most]; None where nobody has a limit of its own."""
    if given is None:
        return None
    try:
        values = np.array(list(each(grouping.spread(what, given))), dtype=np.float64)
    except (TypeError, ValueError):
        raise CorpusError(
            "corpus.not-made-numbers", f"{what} is not made of numbers", "give one per contribution"
        ) from None
    wrong = np.flatnonzero(~((values > 0) & (values <= most)))
    if len(wrong):
        row = int(wrong[0])
        raise CorpusError(
            "corpus.contribution-lie",
            f"{what} of contribution {grouping.ids[row]!r} is {float(values[row])!r}, must lie in (0, {most:g}]",
            "a stricter contribution has smaller thresholds, never none",
        )
    return values


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not name:
        raise CorpusError(
            "corpus.cls-names-class",
            f"cls names a class {name!r}",
            "a class is named by text, as in the policy: 'clinical'",
        )
