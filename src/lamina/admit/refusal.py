"""`Refusal`: who stays outside and why; `Refusals`: many of them, packed."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

from lamina.admit.packed import Packed
from lamina.admit.reason import CODES, REASONS, Reason

LONGEST = 255  # characters of an id or a detail that are shown


@dataclass(frozen=True, slots=True)
class Refusal:
    """One contribution that does not enter. `id` and `detail` are safe to print: see `plain`."""

    id: str
    reason: Reason
    detail: str = ""

    def to_dict(self) -> dict[str, Any]:
        """One entry of `refused` in `lamina admit --json`."""
        return {"id": self.id, "reason": self.reason.value, "detail": self.detail}

    def __str__(self) -> str:
        return f"{self.id}: {self.reason}" + (f" ({self.detail})" if self.detail else "")


class Refused(Exception):
    """How a check says no, inside this package: a verdict, not an error of ours."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


class Refusals(Sequence[Refusal]):
    """Refusals in the order of their source. A flood of a million of them takes a hundred megabytes, not a gigabyte."""

    def __init__(self) -> None:
        self._ids, self._details = Packed(), Packed()
        self._codes, self._places = bytearray(), array("q")
        self._order: list[int] | None = None

    def add(self, place: int, id: str, reason: Reason, detail: str = "") -> None:
        """Note a refusal; `place` is the position in the source."""
        self._ids.append(plain(id).encode())
        self._details.append(plain(detail).encode())
        self._codes.append(CODES[reason])
        self._places.append(place)
        self._order = None

    def __len__(self) -> int:
        return len(self._codes)

    @overload
    def __getitem__(self, index: int) -> Refusal: ...
    @overload
    def __getitem__(self, index: slice) -> list[Refusal]: ...
    def __getitem__(self, index: int | slice) -> Refusal | list[Refusal]:
        if self._order is None:
            self._order = sorted(range(len(self)), key=self._places.__getitem__)
        if isinstance(index, slice):
            return [self._at(row) for row in self._order[index]]
        return self._at(self._order[index])

    def _at(self, row: int) -> Refusal:
        return Refusal(self._ids[row].decode(), REASONS[self._codes[row]], self._details[row].decode())

    def __iter__(self) -> Iterator[Refusal]:
        return (self[index] for index in range(len(self)))

    def counts(self) -> dict[Reason, int]:
        """How many for each reason, in the order of `Reason`."""
        found = Counter(self._codes)
        return {reason: found[code] for code, reason in enumerate(REASONS) if found[code]}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


def plain(text: str) -> str:
    r"""Text from outside as it may be shown: printable, on one line, not endless.

    >>> plain("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    if len(text) > LONGEST:
        text = f"{text[: LONGEST - 1]}…"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
