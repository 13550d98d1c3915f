"""`Gate`: who is admitted to a corpus, decided before any batch exists."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sized
from pathlib import Path

from lamina.admit.admission import Admission, Progress
from lamina.admit.cache import Cache, Kept
from lamina.admit.clock import Clock
from lamina.admit.demands import Demands
from lamina.admit.examine import MAX_PAYLOAD, Examiner, Verdict, check_id
from lamina.admit.keyring import KeyRing
from lamina.admit.lapse import Standings
from lamina.admit.parts import AT_ONCE
from lamina.admit.pool import examined
from lamina.admit.refusal import Refusal, Refusals, Refused, plain
from lamina.admit.register import Register
from lamina.admit.rows import Rows, unpack
from lamina.admit.settle import Settlement
from lamina.admit.source import Contribution, FolderContributions
from lamina.errors import AdmissionError
from lamina.plan.policy import Policy


class Gate:
    """Admits contributions under a policy, by the keys of a ring.

    clock        seconds since 1970; must not go back
    register     what was admitted before; without it only replays within one review are seen
    processes    how many examine at the same time. What is admitted does not depend on it
    max_payload  bytes of a payload that are looked at

    A contribution enters if every check of `Examiner` and of `Settlement` passes; what cannot be checked does not.
    Each refusal has a `Reason` (docs/admission.md), and one bad contribution stops no other.
    """

    def __init__(
        self,
        policy: Policy,
        keys: KeyRing,
        *,
        clock: Callable[[], float] = time.time,
        register: Register | None = None,
        processes: int = 1,
        max_payload: int = MAX_PAYLOAD,
    ) -> None:
        if isinstance(processes, bool) or not isinstance(processes, int) or not 1 <= processes <= 256:
            raise AdmissionError(
                "admit.processes", f"processes is {processes!r}, must be 1 to 256", "one per core is enough"
            )
        self.policy = policy
        self.keys = keys
        self.demands = Demands(policy)
        self.clock = Clock(clock)
        self.register = register
        self._processes = processes
        self._max_payload = max_payload
        self._cache = Cache()
        self._examiner = self.examiner()

    def examiner(self) -> Examiner:
        """What looks at single contributions, by the keys as they are now."""
        return Examiner(self.demands, self.keys, self._max_payload)

    # ----------------------------------------------------------------------------------- many

    def review(
        self,
        contributions: Iterable[Contribution] | str | Path,
        *,
        progress: Progress | None = None,
        enter: bool = True,
    ) -> Admission:
        """Examine all of them, in their order. A path is a folder of contributions.

        Without `enter` the register is asked, but told nothing until `Admission.enter`.
        """
        if isinstance(contributions, str | Path):
            contributions = FolderContributions(contributions)
        examiner, now = self.examiner(), self.clock.now()
        rows, refusals = Rows(), Refusals()
        for place, (id, verdict) in enumerate(self.verdicts(contributions, examiner, now, progress)):
            if isinstance(verdict, bytes):
                rows.add(place, id, verdict)
            else:
                refusals.add(place, id, *verdict)
        lapsed = Standings(self.keys, examiner.kids).lapsed(rows.table, self.clock.now())
        Settlement(rows, refusals, examiner.kids, self.demands).settle(lapsed, self.register)
        admission = Admission(self, contributions, rows, refusals, examiner.kids, now)
        if enter:
            admission.enter()
        return admission

    def verdicts(
        self,
        contributions: Iterable[Contribution],
        examiner: Examiner,
        now: int,
        progress: Progress | None = None,
    ) -> Iterator[tuple[str, Verdict]]:
        """(id, verdict) of each contribution by itself."""
        found = examined(contributions, examiner, now, self._processes)
        if progress is None:
            yield from found
            return
        total = len(contributions) if isinstance(contributions, Sized) else None
        for done, each in enumerate(found, start=1):
            yield each
            if done % AT_ONCE == 0 or done == total:
                progress(done, total)

    # ----------------------------------------------------------------------------------- one

    def check(self, contribution: Contribution) -> Refusal | None:
        """Why this contribution may not be used now; None if it may, as far as it alone is concerned.

        An attestation that was verified in this epoch is not verified again; the payload is read again. Whether
        somebody was admitted before, about the same person or in the last place of its class, is for `review` to say.
        """
        now, version = self.clock.now(), self.keys.version
        kept = self._cache.get(contribution.attestation, contribution.descriptor, now, version)
        try:
            if kept is not None:
                check_id(contribution.id)
                self._examiner.check_payload(contribution.payload, kept.nonce, kept.commitment)
                return None
        except Refused as refused:
            return Refusal(plain(contribution.id), refused.reason, plain(refused.detail))
        if self._examiner.version != version:
            self._examiner = self.examiner()
        verdict = self._examiner.examine(contribution, now)
        if not isinstance(verdict, bytes):
            return Refusal(plain(contribution.id), verdict[0], plain(verdict[1]))
        self._remember(contribution, verdict, now)
        return None

    def _remember(self, given: Contribution, verdict: bytes, now: int) -> None:
        assert given.attestation is not None and given.descriptor is not None
        row = unpack(verdict)
        entry = self.keys.get(self._examiner.kids[int(row["key"])])
        ends = [now + self.policy.corpus.epoch, int(row["expires"])]
        if entry is not None and entry.revoked_from is not None:
            ends.append(entry.revoked_from)
        nonce, commitment = row["nonce"].tobytes(), row["commitment"].tobytes()
        kept = Kept(min(ends), given.descriptor, nonce, commitment)
        self._cache.put(given.attestation, kept, self._examiner.version)
