"""What time it is: whole seconds that never run backwards."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from lamina.admit.times import LAST, shown
from lamina.errors import AdmissionError


class Clock:
    """A clock that is believed only as long as it goes forward.

    Set back, it would let in again what had expired or was signed with a key revoked since.
    """

    def __init__(self, source: Callable[[], float]) -> None:
        self._source = source
        self._latest = 0
        self._lock = threading.Lock()

    def now(self) -> int:
        """The current second. AdmissionError: it is before one that was seen."""
        return self.see(self._source())

    def see(self, seconds: float) -> int:
        """Take `seconds` for the current time."""
        if not isinstance(seconds, int | float) or not 0 <= seconds <= LAST:
            raise AdmissionError("admit.clock-says", f"the clock says {seconds!r}", "give seconds since 1970")
        current = math.floor(seconds)
        with self._lock:
            if current < self._latest:
                raise AdmissionError(
                    "admit.clock-went-back",
                    f"the clock went back from {shown(self._latest)} to {shown(current)}; nothing is admitted by it",
                    "set the clock right",
                )
            self._latest = current
        return current
