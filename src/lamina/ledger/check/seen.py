"""Checkpoints that were seen before: a ledger goes on from every one of them, or it is not the one that was seen."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from lamina.admit.key import PublicKey
from lamina.ledger.check.checkpoints import signature
from lamina.ledger.check.problem import SEEN, Bad, Problem, bad
from lamina.ledger.check.tallies import Tallies
from lamina.ledger.check.trust import Seen
from lamina.ledger.note import NoteKey

ANEW = "the ledger was signed anew, or this is another"


class SeenBefore:
    """Compares the tree with what was seen, as it comes to those sizes."""

    def __init__(self, seen: Sequence[Seen], origin: str) -> None:
        self._seen, self._origin = list(seen), origin
        self._sizes: set[int] = set()
        self._agreed = 0  # leaves up to which the ledger is what was seen
        self._forked: Problem | None = None

    def __bool__(self) -> bool:
        return bool(self._seen)

    def sizes(self, signed: Collection[int], tallies: Tallies, size: int) -> set[int]:
        """Where the tree is to be looked at. Amid leaves that are gone it can be known only where it was signed."""
        asked = {each.head.size for each in self._seen}
        hidden = {each for each in asked.difference(signed) if each and tallies.within(each - 1, each)}
        self._sizes = {each for each in asked - hidden if each <= size}
        return self._sizes

    def reached(self, size: int, root: bytes) -> None:
        """The tree has this root at this size."""
        for each in self._seen:
            if each.head.size != size or self._forked is not None:
                continue
            if each.head.root == root:
                self._agreed = size
            else:
                self._forked = Problem(
                    self._agreed,
                    SEEN,
                    "verify.another-root-ledger",
                    f"{_told(size)} has another root: the ledger was forked",
                )

    def finish(self, size: int, keys: Iterable[PublicKey]) -> None:
        """All leaves were read. `keys` are those whose signatures count."""
        accepted = [NoteKey(self._origin, key) for key in keys]
        for each in self._seen:
            seen = each.head.size
            if each.head.origin != self._origin:
                bad(
                    None,
                    SEEN,
                    "verify.another-ledger",
                    f"{_told(seen)} is of another ledger, {each.head.origin!r}",
                )
            if not any(signature(each.note, key) for key in accepted):
                bad(
                    None,
                    SEEN,
                    "verify.signed-no-key",
                    f"{_told(seen)} is signed by no key of this ledger: {ANEW}",
                )
            if seen > size:
                bad(
                    size,
                    SEEN,
                    "verify.leaves-seen-ledger",
                    f"{seen} leaves were seen, {size} are there: the ledger was rolled back",
                )
        if self._forked is not None:
            raise Bad(self._forked)
        for each in self._seen:
            if each.head.size not in self._sizes:
                bad(
                    self._agreed,
                    SEEN,
                    "verify.never-signed-ledger",
                    f"{_told(each.head.size)} was never signed here: the ledger was forked",
                )


def _told(size: int) -> str:
    return f"the checkpoint of {size} leaves that was seen"
