"""`Recorded`: what the epochs of a ledger charged, by account and by run."""

from __future__ import annotations

from collections.abc import Iterator

from lamina.account.pooled import Kind
from lamina.ledger import leaf
from lamina.ledger.records import NUMBERS, Epoch, Header
from lamina.ledger.spend import Spending, summed
from lamina.ledger.store.base import Reader
from lamina.train.book.account import name_of

Attempt = tuple[int, int]  # segment, generation


class Recorded:
    """Read once, and on from there: leaves do not change. `spending` is what `verify` would find."""

    def __init__(self, header: Header) -> None:
        self._header = header
        self._begin()

    def _begin(self) -> None:
        self._upto = 0
        self.epochs = 0
        self.spending = Spending(self._header)
        self._runs: dict[bytes, dict[str, dict[Kind, int]]] = {}
        self._attempts: dict[bytes, dict[Attempt, dict[str, int]]] = {}
        self._scales: dict[tuple[bytes, bytes], dict[str, float]] = {}

    def follow(self, rows: Reader, size: int) -> None:
        """Up to `size` leaves, which are committed."""
        if size < self._upto:  # another ledger was put in its place
            self._begin()
        for _, data in rows.of_kind(NUMBERS[Epoch], self._upto, size):
            record = leaf.decode(data).record
            assert isinstance(record, Epoch)
            self._add(record)
        self._upto = size

    def _add(self, epoch: Epoch) -> None:
        self.epochs += 1
        self.spending.add(epoch.accounts)
        run = self._runs.setdefault(epoch.run, {})
        last = epoch.segments[-1]
        steps = self._attempts.setdefault(epoch.run, {}).setdefault((last.index, last.generation), {})
        for account in epoch.accounts:
            name = name_of(account.bound)
            self._scales.setdefault((epoch.run, epoch.plan), {})[name] = account.scale
            events = run.setdefault(name, {})
            for kind, count in summed(account.charges).items():
                events[kind] = events.get(kind, 0) + count
                steps[name] = steps.get(name, 0) + count

    def names(self) -> list[str]:
        """Every account that was charged."""
        return [name_of(bound) for bound in self.spending.bounds()]

    def scales(self, run: bytes, plan: bytes) -> dict[str, float]:
        """Every account that a run charged under a plan, with the scale of its thresholds."""
        return dict(self._scales.get((run, plan), {}))

    def of_run(self, run: bytes, name: str) -> dict[Kind, int]:
        """What one run was charged for an account."""
        return dict(self._runs.get(run, {}).get(name, {}))

    def attempts(self, name: str) -> Iterator[tuple[bytes, int, int, int]]:
        """(run, segment, generation, steps) of every attempt that charged the account."""
        for run, found in self._attempts.items():
            for (segment, generation), steps in found.items():
                if name in steps:
                    yield run, segment, generation, steps[name]
