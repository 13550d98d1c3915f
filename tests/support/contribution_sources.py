"""Sources of contributions that are asked by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from lamina.admit.contribution_sources import Contribution
from lamina.admit.rows import PackedTexts


class NamedSource:
    """A source of what is given; or of what `get` makes of each id."""

    def __init__(
        self, given: Sequence[Contribution | str], get: Callable[[str], Contribution | None] | None = None
    ) -> None:
        self.given = {each if isinstance(each, str) else each.id: each for each in given}
        self._get = get

    def names(self) -> PackedTexts:
        return PackedTexts(self.given)

    def get(self, id: str) -> Contribution:
        return self.given[id] if self._get is None else self._get(id)  # type: ignore[return-value]

    def __iter__(self) -> Iterator[Contribution]:
        raise AssertionError("it is asked by name")
