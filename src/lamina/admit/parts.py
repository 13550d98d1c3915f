"""`Parts`: what is offered, some at a time, so that several processes can share the work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lamina.admit.packed import Packed
from lamina.admit.reason import Reason
from lamina.admit.source import Contribution, Source
from lamina.errors import AdmissionError

AT_ONCE = 128  # contributions in a part
AT_MOST = 1 << 22  # bytes of payloads that are held at the same time, if one does not have more already

Part = range | list[Contribution]  # places among the names of a source, or what was read here


class Parts:
    """The contributions in parts. A `Source` is asked for its names here, and for the rest where it is examined."""

    def __init__(self, contributions: Iterable[Contribution] | Source) -> None:
        self._given = contributions
        self._source = contributions if isinstance(contributions, Source) else None
        self._names = Packed() if self._source is None else self._source.names()

    @property
    def named(self) -> bool:
        """Whether a part takes a few bytes only, because whoever examines it reads it."""
        return self._source is not None

    def __iter__(self) -> Iterator[Part]:
        if self._source is None:
            return gathered(self._given)  # type: ignore[arg-type]
        count = len(self._names)
        return (range(start, min(start + AT_ONCE, count)) for start in range(0, count, AT_ONCE))

    def ids(self, part: Part) -> list[str]:
        """Of all contributions of a part."""
        return [self._name(each) if isinstance(each, int) else each.id for each in part]

    def held(self, part: Part) -> Iterator[Contribution]:
        """The contributions of a part, read if they are not. What its source fails to give says so."""
        return (self._read(self._name(each)) if isinstance(each, int) else each for each in part)

    def _name(self, place: int) -> str:
        return self._names[place].decode("utf-8", "surrogateescape")

    def _read(self, id: str) -> Contribution:
        assert self._source is not None
        try:
            found = self._source.get(id)
            if not isinstance(found, Contribution):
                raise TypeError(f"{type(found).__name__} instead of a contribution")
        except Exception as error:
            return Contribution(id, trouble=(Reason.CHECK_FAILED, type(error).__name__))
        return found


def gathered(contributions: Iterable[Contribution]) -> Iterator[list[Contribution]]:
    """In lists that are bounded in number and in bytes."""
    part: list[Contribution] = []
    size = 0
    for given in contributions:
        if not isinstance(given, Contribution):
            raise AdmissionError(
                "admit.number-part",
                f"number {len(part)} of a part is a {type(given).__name__}",
                "give lamina.admit Contributions",
            )
        part.append(given)
        size += len(given.payload) if isinstance(given.payload, bytes) else 0
        if len(part) >= AT_ONCE or size >= AT_MOST:
            yield part
            part, size = [], 0
    if part:
        yield part
