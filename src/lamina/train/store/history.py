"""What happened in a run, in order: the records of a journal without the disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lamina.errors import RunError
from lamina.train.store.records import Close, Done, GivenUp, Moved, Open, Record, Start


class History:
    """Records in the order in which they may come:

    one Start, first; an Open of a segment only with a higher generation than all earlier ones of that segment (a
    lost checkpoint makes a run go back to earlier segments); a Close or a GivenUp only for the last Open, once, with
    its nonce.
    So at most one Open is pending, and every other seed is of no use to anybody but an attacker.
    """

    def __init__(self) -> None:
        self._records: list[Record] = []
        self._closed: set[tuple[int, int, bytes]] = set()
        self._given_up: dict[tuple[int, int, bytes], bool] = {}  # attempt → whether it was charged
        self._generations: dict[int, int] = {}  # segment → its highest generation

    @property
    def start(self) -> Start:
        """The first record: the run's name and salt."""
        first = self._records[0]
        assert isinstance(first, Start)
        return first

    @property
    def records(self) -> tuple[Record, ...]:
        return tuple(self._records)

    @property
    def opens(self) -> tuple[Open, ...]:
        return tuple(record for record in self._records if isinstance(record, Open))

    def closed(self, record: Open) -> bool:
        """Whether this very attempt (segment, generation, nonce) has its Close."""
        return record.key in self._closed

    def void(self, record: Open) -> bool:
        """Whether the attempt was given up before it was charged: nothing was drawn."""
        return self._given_up.get(record.key) is False

    @property
    def pending(self) -> Open | None:
        """The last Open if it was neither closed nor given up; its seed is b"" if it was erased."""
        last = self._last(Open)
        if not isinstance(last, Open) or last.key in self._closed or last.key in self._given_up:
            return None
        return last

    @property
    def done(self) -> Done | None:
        """The end of the run, unless it was opened again after it."""
        last = self._last(Open, Done)
        return last if isinstance(last, Done) else None

    def _last(self, *kinds: type[Record]) -> Record | None:
        return next((record for record in reversed(self._records) if isinstance(record, kinds)), None)

    @property
    def lost(self) -> int:
        """Attempts that the ledger has and the journal has not, as far as it knows."""
        last = self._last(Moved)
        return last.lost if isinstance(last, Moved) else 0

    def lives(self) -> Iterator[tuple[Open, str]]:
        """Every attempt, with the life of the run that it was made in: another one begins with each move."""
        life = _life(self.start)
        for record in self._records:
            if isinstance(record, Moved):
                life = _life(record)
            elif isinstance(record, Open) and not self.void(record):
                yield record, life

    @property
    def life(self) -> str:
        """The one that it is in."""
        last = self._last(Start, Moved)
        assert isinstance(last, Start | Moved)
        return _life(last)

    def _last_place(self) -> int:
        last = self._last(Start, Moved)
        assert isinstance(last, Start | Moved)
        return last.place

    def _check(self, record: Record) -> None:
        """RunError if the record may not come now."""
        if isinstance(record, Start) != (not self._records):
            raise RunError(
                "train.start-first-record",
                "a Start is the first record of a journal, and only the first",
                "start a new run",
            )
        if isinstance(record, Open) and record.generation <= self._generations.get(record.segment, -1):
            raise RunError(
                "train.open-segment-generation",
                f"an Open of segment {record.segment} has generation {record.generation}, "
                f"generation {self._generations[record.segment]} was there before",
                "count the generation up for every new attempt",
            )
        pending = self.pending
        if isinstance(record, Close | GivenUp) and (pending is None or record.key != pending.key):
            raise RunError(
                "train.segment-generation-no",
                f"a {type(record).__name__} of segment {record.segment}, generation {record.generation} has no such "
                "open segment",
                "close the last Open, once, with its nonce",
            )

    def _add(self, record: Record) -> None:
        self._records.append(record)
        if isinstance(record, Open):
            self._generations[record.segment] = record.generation
        if isinstance(record, Close):
            self._closed.add(record.key)
        if isinstance(record, GivenUp):
            self._given_up[record.key] = record.charged

    def _forget_seed(self, index: int) -> None:
        record = self._records[index]
        assert isinstance(record, Open)
        self._records[index] = replace(record, seed=b"")


def _life(begun: Start | Moved) -> str:
    """A copy lies in another place; a state that was put back has forgotten more than any before it."""
    return f"{begun.place} {begun.lost if isinstance(begun, Moved) else 0}"
