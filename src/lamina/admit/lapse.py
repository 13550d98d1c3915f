"""Who has to leave: windows that ended, keys that were revoked, for all rows at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamina.admit.examine import ROLE
from lamina.admit.keyring import KeyRing
from lamina.admit.reason import CODES, REASONS, Reason
from lamina.admit.times import LAST

STANDS = 0xFF  # in a column of reasons: none

Codes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Lapse:
    """Rows of an admission that may no longer be used, and why."""

    rows: NDArray[np.int64]
    codes: Codes

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def reasons(self) -> list[Reason]:
        """One for each row."""
        return [REASONS[code] for code in self.codes]

    def __iter__(self) -> Iterator[tuple[int, Reason]]:
        return zip(self.rows.tolist(), self.reasons, strict=True)


class Standings:
    """What the keys of a ring are worth, as columns over `kids`."""

    def __init__(self, keys: KeyRing, kids: Sequence[bytes]) -> None:
        entries = [keys.get(kid) for kid in kids]
        self._known = np.array([entry is not None for entry in entries], dtype=np.bool_)
        self._role = np.array([entry is not None and entry.role == ROLE for entry in entries], dtype=np.bool_)
        never = LAST + 1
        self._from, self._retired, self._revoked = (
            np.array(
                [never if entry is None or (at := getattr(entry, name)) is None else at for entry in entries],
                dtype=np.int64,
            )
            for name in ("valid_from", "retired_from", "revoked_from")
        )

    def lapsed(self, table: NDArray[Any], now: int) -> Codes:
        """For each row the code of a reason, or STANDS; the same rules as for one contribution."""
        codes = np.full(len(table), STANDS, dtype=np.uint8)
        key, issued = table["key"], table["issued"]
        begins = self._from[key]
        for reason, holds in (  # the last one that holds is the one that is told
            (Reason.EXPIRED, now >= table["expires"]),
            (Reason.RETIRED_KEY, issued >= self._retired[key]),
            (Reason.EARLY_KEY, (now < begins) | (issued < begins)),
            (Reason.REVOKED_KEY, now >= self._revoked[key]),
            (Reason.WRONG_ROLE, ~self._role[key]),
            (Reason.UNKNOWN_KEY, ~self._known[key]),
        ):
            codes[holds] = CODES[reason]
        return codes
