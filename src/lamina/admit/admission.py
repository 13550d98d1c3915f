"""`Admission`: who was admitted, what each signed, and whether that still holds."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lamina.admit.bound import Bound, Bounds
from lamina.admit.keyring import KeyRing
from lamina.admit.lapse import STANDS, Codes, Lapse, Standings
from lamina.admit.reason import CODES, REASONS, Reason
from lamina.admit.refusal import Refusal, Refusals
from lamina.admit.register import Beside, Lost, Register
from lamina.admit.report import summary, table
from lamina.admit.resolution import Resolution
from lamina.admit.resolver import Caps, resolve
from lamina.admit.rows import PROFILED, TAGGED, Ids, Rows, name_of, unpack
from lamina.admit.source import Contribution, Reader
from lamina.plan.step import StepPlan

if TYPE_CHECKING:
    from lamina.admit.gate import Gate

Progress = Callable[[int, int | None], None]  # how many are examined, of how many if that is known


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """One admitted contribution, as a ledger records it. Neither nonce nor payload is part of it."""

    row: int
    id: str
    descriptor: bytes  # SHA-256 of its bytes: the identity of the contribution
    attestation: bytes  # SHA-256 of its bytes
    kid: bytes
    cti: bytes
    bound: Bound
    profile: str  # where its class may reach
    profile_signed: bool  # False: attestation only, depth is the policy's alone
    tag: bytes | None = field(repr=False)
    not_before: int
    expires: int
    items: int


class Admission:
    """The contributions that a gate let in, as columns over rows 0 … n-1, in the order of their source.

    `refused` says who was not let in and why. `recheck` says who has to leave; nobody comes back.
    """

    def __init__(
        self,
        gate: Gate,
        source: Iterable[Contribution],
        rows: Rows,
        refused: Refusals,
        kids: Sequence[bytes],
        verified: int,
    ) -> None:
        self.refused = refused
        self.source = source
        self.kids = tuple(kids)
        self.classes = tuple(gate.demands.classes)
        self.ids = Ids(rows.ids)
        self._gate = gate
        self._rows = rows
        self._verified = verified  # when the signatures of all who stand were
        self._left = np.full(len(rows), STANDS, dtype=np.uint8)

    # ----------------------------------------------------------------------------------- who

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        """What the rows and their ids take."""
        return self._rows.nbytes

    @property
    def columns(self) -> NDArray[Any]:
        """All that is kept, (n,) of `rows.ROW`. The nonces in it are secret."""
        view = self._rows.table.view()
        view.flags.writeable = False
        return view

    @property
    def cls(self) -> NDArray[np.uint16]:
        """(n,) the class of each row, which counts in `classes`."""
        return self.columns["cls"]

    @cached_property
    def _bounds(self) -> tuple[Bounds, NDArray[np.int32]]:
        found = (self.columns[name] for name in ("cls", "clip_norm", "noise_multiplier"))
        return Bounds.distinct(self.classes, *found)

    @property
    def bounds(self) -> Bounds:
        """The distinct bounds that were signed."""
        return self._bounds[0]

    @property
    def bound(self) -> NDArray[np.int32]:
        """(n,) the bound of each row, which counts in `bounds`."""
        return self._bounds[1]

    @property
    def standing(self) -> NDArray[np.bool_]:
        """(n,) who has not had to leave."""
        return np.equal(self._left, STANDS)

    @property
    def left(self) -> list[Refusal]:
        """Who had to leave, and why."""
        return [
            Refusal(self.ids[row], REASONS[self._left[row]])
            for row in np.flatnonzero(~self.standing).tolist()
        ]

    @property
    def untagged(self) -> int:
        """How many of private classes carry no subject tag: nobody can tell whether two are about one person."""
        private = np.array([not each.public for each in self._gate.demands.classes.values()], dtype=np.bool_)
        return int(np.count_nonzero(private[self.cls] & ((self.columns["flags"] & TAGGED) == 0)))

    def profile(self, name: str) -> str:
        """How deep a class may reach, in words: the same for all its contributions."""
        return str(self._gate.policy.classes[name].profile)

    def __getitem__(self, row: int) -> Admitted:
        found = self.columns[row]
        row %= len(self)
        bound = self.bounds[int(self.bound[row])]
        return Admitted(
            row=row,
            id=self.ids[row],
            descriptor=found["descriptor"].tobytes(),
            attestation=found["attestation"].tobytes(),
            kid=self.kids[int(found["key"])],
            cti=found["cti"].tobytes(),
            bound=bound,
            profile=self.profile(bound.cls),
            profile_signed=bool(found["flags"] & PROFILED),
            tag=found["tag"].tobytes() if found["flags"] & TAGGED else None,
            not_before=int(found["not_before"]),
            expires=int(found["expires"]),
            items=int(found["items"]),
        )

    def __iter__(self) -> Iterator[Admitted]:
        return (self[row] for row in range(len(self)))

    @cached_property
    def _by_name(self) -> tuple[NDArray[Any], NDArray[np.int64]]:
        names = np.ascontiguousarray(self.columns["name"]).view("S16")
        order = np.argsort(names)
        return names[order], order

    def row_of(self, id: str) -> int | None:
        """The row of an id, if it was admitted."""
        names, order = self._by_name
        wanted = np.frombuffer(name_of(id), dtype="S16")[0]
        at = int(np.searchsorted(names, wanted))
        return int(order[at]) if at < len(names) and names[at] == wanted else None

    # ----------------------------------------------------------------------------------- what they brought

    def holds(self, row: int, payload: bytes) -> bool:
        """Whether these bytes are what the contribution committed to.

        For whoever loads them: between admission and use a file may have been exchanged.
        """
        found = self.columns[row]
        digest = hashlib.sha256(found["nonce"].tobytes() + payload).digest()
        return hmac.compare_digest(digest, found["commitment"].tobytes())

    # ----------------------------------------------------------------------------------- whether it still holds

    def recheck(
        self,
        now: float | None = None,
        keys: KeyRing | None = None,
        *,
        progress: Progress | None = None,
    ) -> Lapse:
        """Who has to leave now, and why; told once. `keys` replaces the gate's ring.

        Within an epoch windows and keys are looked at, for all rows at once. What was verified more than an epoch ago
        is read and verified again from the source; a source that can be read only once lets nobody stay.
        """
        gate = self._gate
        current = gate.clock.now() if now is None else gate.clock.see(now)
        if keys is not None:
            gate.keys = keys
        codes = Standings(gate.keys, self.kids).lapsed(self._rows.table, current)
        over = self.standing & (codes == STANDS)
        if self._verified + gate.policy.corpus.epoch <= current and over.any():
            codes[over] = self._verified_again(over, current, progress)[over]
            self._verified = current
        rows = np.flatnonzero((codes != STANDS) & self.standing)
        self._left[rows] = codes[rows]
        return Lapse(rows, codes[rows])

    def _verified_again(self, over: NDArray[np.bool_], now: int, progress: Progress | None) -> Codes:
        """For the rows that are `over`, what the source says of them now."""
        codes = np.full(len(self), CODES[Reason.GONE], dtype=np.uint8)
        if isinstance(self.source, Iterator):
            codes[:] = CODES[Reason.NOT_REPEATED]
            return codes
        table = self._rows.table
        examiner = self._gate.examiner()
        for id, verdict in self._gate.verdicts(self.source, examiner, now, progress):
            row = self.row_of(id)
            if row is None or not over[row] or codes[row] == STANDS:
                continue
            if not isinstance(verdict, bytes):
                codes[row] = CODES[verdict[0]]
                continue
            found, kept = unpack(verdict), table[row]
            same = all(found[name] == kept[name] for name in ("descriptor", "attestation"))
            codes[row] = STANDS if same else CODES[Reason.CHANGED]
        return codes

    @property
    def places(self) -> NDArray[np.int64]:
        """(n,) where in its source each row was."""
        return self._rows.places.copy()

    def refuse(self, found: Mapping[int, tuple[Reason, str]]) -> None:
        """Take rows out before anything is made of them: what was signed is right, what was brought cannot be used."""
        for row, (reason, detail) in found.items():
            self.refused.add(int(self._rows.places[row]), self.ids[row], reason, detail)
        stays = np.ones(len(self), dtype=np.bool_)
        stays[list(found)] = False
        self._rows.keep(stays)
        self._left = self._left[stays]
        for name in ("_bounds", "_by_name"):
            self.__dict__.pop(name, None)

    def enter(self) -> int:
        """Tell the gate's register who is admitted. Who may not enter after all is refused: how many."""
        lost = {} if (register := self._gate.register) is None else self.enter_into(register)
        self.refuse(lost)
        return len(lost)

    def enter_into(self, register: Register) -> Lost:
        """Tell a register who is admitted and has not left; the rows that may not enter, and why.

        They stay rows of this admission: leave them out. May be repeated at any time, and changes nothing then.
        """
        gate, reader = self._gate, Reader(self.source)
        places = {name: demand.population for name, demand in gate.demands.classes.items()}
        beside = Beside(
            lambda row: reader.read(self.ids[row], int(self._rows.places[row])), gate.keys, places
        )
        parts = self._rows.entries(np.flatnonzero(self.standing), self.kids, self.classes)
        return register.enter((entry for _, entries in parts for entry in entries), beside)

    def dismiss(self, rows: NDArray[np.int64], reason: Reason) -> None:
        """Let these rows leave, e.g. because a plan cannot keep what they signed."""
        self._left[rows[self.standing[rows]]] = CODES[reason]

    # ----------------------------------------------------------------------------------- what it comes to

    def resolve(self, plan: StepPlan, *, max_occurrences: Caps = None) -> Resolution:
        """The resolver's answer for `bounds`: scale and ceiling of row i are at `bound[i]`. Scale 0: dismiss it."""
        return resolve(self.bounds, self._gate.policy, plan, max_occurrences=max_occurrences)

    def table(self) -> str:
        """For people."""
        return table(self)

    def to_dict(self) -> dict[str, Any]:
        """For machines: {"admitted": n, "refused": [{"id", "reason", "detail"}], "reasons", "classes"}."""
        return summary(self)

    def __repr__(self) -> str:
        return f"Admission({len(self)} admitted, {len(self.refused)} refused)"
