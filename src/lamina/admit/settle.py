"""Who of those that passed by themselves may enter together: no replay, no subject twice, no class beyond its size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lamina.admit.demands import Demands
from lamina.admit.lapse import STANDS
from lamina.admit.reason import REASONS, Reason
from lamina.admit.refusal import Refusals
from lamina.admit.register import REFUSED, Known, Register, full
from lamina.admit.rows import TAGGED, Rows, repeated

Mask = NDArray[np.bool_]


class Settlement:
    """Settles rows in the order of their source: of two that exclude each other, the first stays.

    Each rule looks at those whom the rules before it left, so whoever is refused takes nobody's place.
    """

    def __init__(self, rows: Rows, refusals: Refusals, kids: Sequence[bytes], demands: Demands) -> None:
        self._rows = rows
        self._refusals = refusals
        self._kids = kids
        self._names = list(demands.classes)
        self._places = [demand.population for demand in demands.classes.values()]
        self._stays: Mask = np.ones(len(rows), dtype=np.bool_)
        self._known = np.full(len(rows), _KNOWN[Known.NEW], dtype=np.uint8)

    def settle(self, lapsed: NDArray[np.uint8], register: Register | None) -> None:
        """Drop from the rows who may not enter. `lapsed` says who ran out while the others were examined."""
        for code in np.unique(lapsed[lapsed != STANDS]):
            self._drop(np.flatnonzero(lapsed == code), REASONS[code])
        self._drop_repeated(("key", "cti"), Reason.REPLAYED)
        self._drop_repeated(("descriptor",), Reason.REPLAYED)
        if register is not None:
            self._ask(register)
        self._drop_known(Known.WITHDRAWN)
        self._drop_known(Known.REPLAYED)
        self._drop_repeated(("name",), Reason.DUPLICATE_ID)
        self._drop_repeated(("tag",), Reason.DUPLICATE_SUBJECT, (self._rows.table["flags"] & TAGGED) > 0)
        self._drop_known(Known.REPRESENTED)
        self._fill(register)
        self._rows.keep(self._stays)

    def _drop(self, rows: NDArray[np.int64], reason: Reason, detail: str = "") -> None:
        for row, place in zip(rows.tolist(), self._rows.places[rows].tolist(), strict=True):
            self._refusals.add(place, self._rows.ids[row].decode(), reason, detail)
        self._stays[rows] = False

    def _drop_repeated(self, columns: tuple[str, ...], reason: Reason, among: Mask | None = None) -> None:
        rows = np.flatnonzero(self._stays if among is None else self._stays & among)
        table = self._rows.table
        keys = np.empty(len(rows), dtype=[(name, table.dtype[name]) for name in columns])
        for name in columns:
            keys[name] = table[name][rows]
        self._drop(rows[repeated(keys)], reason)

    def _ask(self, register: Register) -> None:
        for rows, entries in self._rows.entries(np.flatnonzero(self._stays), self._kids, self._names):
            self._known[rows] = [_KNOWN[each] for each in register.look(entries)]

    def _drop_known(self, known: Known) -> None:
        self._drop(np.flatnonzero(self._stays & (self._known == _KNOWN[known])), REFUSED[known])

    def _fill(self, register: Register | None) -> None:
        """The first so many of each class. Who stands already keeps his place; the others take those that are left."""
        for row, (name, places) in enumerate(zip(self._names, self._places, strict=True)):
            if places is None:
                continue
            ours = self._stays & (self._rows.table["cls"] == row)
            same = np.flatnonzero(ours & (self._known == _KNOWN[Known.SAME]))
            new = np.flatnonzero(ours & (self._known == _KNOWN[Known.NEW]))
            before = register.members(name) if register is not None and len(new) else 0
            for late in (same[places:], new[max(0, places - before) :]):
                self._drop(late, *full(name, places))


_KNOWN = {known: code for code, known in enumerate(Known)}
