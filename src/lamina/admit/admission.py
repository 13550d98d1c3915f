"""`Admission`: the contributions that the gate admitted, as columns; cross checks, and revalidation later."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lamina.admit import reasons
from lamina.admit.attestation import window_rules
from lamina.admit.contribution_sources import Contribution, read_signed_bytes
from lamina.admit.reasons import CONTRIBUTOR_ROLE, REASON_OF_KEY_STATUS, REASONS, Reason
from lamina.admit.register import REASON_OF_STATUS, EntryContext, RefusedRows, Register, RegisterStatus, class_full
from lamina.admit.resolver import Caps, Resolution, resolve
from lamina.admit.rows import (
    TAGGED,
    Admitted,
    AdmittedRows,
    BoundColumns,
    Refusal,
    Refusals,
    id_hash,
    is_repeat,
    unpack_row,
)
from lamina.admit.terms import PolicyTerms
from lamina.plan.step_plan import StepPlan
from lamina.plan.table import align_columns
from lamina.sign.key_ring import KeyRing, key_rules

if TYPE_CHECKING:
    from lamina.admit.gate import AdmissionGate


STILL_VALID = 0xFF  # in a column of reasons: none

ReasonCodes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Revalidation:
    """Rows of an admission that may no longer be used, and why."""

    rows: NDArray[np.int64]
    codes: ReasonCodes

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def reasons(self) -> list[Reason]:
        """One for each row."""
        return [REASONS[code] for code in self.codes]

    def __iter__(self) -> Iterator[tuple[int, Reason]]:
        return zip(self.rows.tolist(), self.reasons, strict=True)


def revalidate_rows(table: NDArray[Any], keys: KeyRing, kids: Sequence[bytes], now: int) -> ReasonCodes:
    """For each row the code of a reason, or STILL_VALID; the same rules as for one contribution."""
    codes = np.full(len(table), STILL_VALID, dtype=np.uint8)
    entries = [keys.get(kid) for kid in kids]
    unknown = np.array([entry is None for entry in entries], dtype=np.bool_)
    other_role = np.array([entry is None or entry.role != CONTRIBUTOR_ROLE for entry in entries], dtype=np.bool_)
    times = np.array([(0, 0, 0) if entry is None else entry.times for entry in entries], dtype=np.int64).reshape(-1, 3)
    key = table["key"]
    rules = key_rules(now, table["issued"], *times[key].T)
    found = (
        (reasons.UNKNOWN_KEY, unknown[key]),
        (reasons.WRONG_ROLE, other_role[key]),
        *((REASON_OF_KEY_STATUS[status], holds) for status, holds in rules),
        (reasons.EXPIRED, window_rules(now, table["not_before"], table["expires"])[1]),
    )
    for reason, holds in reversed(found):  # of several that hold, the first counts
        codes[holds] = reason.code
    return codes


RowMask = NDArray[np.bool_]


class CrossChecks:
    """Checks rows against each other, in the order of their source: of two that exclude each other, the first stays.

    One that the register knows comes before all that are new.

    Each rule looks only at those that passed the rules before, so a refused row never displaces another.
    """

    def __init__(self, rows: AdmittedRows, refusals: Refusals, kids: Sequence[bytes], checks: PolicyTerms) -> None:
        self._rows = rows
        self._refusals = refusals
        self._kids = kids
        self._populations = {name: each.population for name, each in checks.classes.items()}
        self._stays: RowMask = np.ones(len(rows), dtype=np.bool_)
        self._known = np.full(len(rows), _STATUS_CODE[RegisterStatus.NEW], dtype=np.uint8)

    def apply(self, lapsed: NDArray[np.uint8], register: Register | None) -> None:
        """Drop the rows that may not enter. `lapsed` has a reason for those that expired while others were examined."""
        for code in np.unique(lapsed[lapsed != STILL_VALID]):
            self._drop(np.flatnonzero(lapsed == code), REASONS[code])
        self._drop_repeated(("key", "cti"), reasons.REPLAYED)
        self._drop_repeated(("descriptor",), reasons.REPLAYED)
        if register is not None:
            self._ask(register)
        self._drop_by_status(RegisterStatus.REVOKED)
        self._drop_by_status(RegisterStatus.WITHDRAWN)
        self._drop_by_status(RegisterStatus.REPLAYED)
        self._drop_ids_of_several()
        self._drop_repeated(("name",), reasons.DUPLICATE_ID)
        self._drop_repeated(("content",), reasons.DUPLICATE_PAYLOAD)
        self._drop_repeated(("tag",), reasons.DUPLICATE_SUBJECT, (self._rows.table["flags"] & TAGGED) > 0)
        self._drop_by_status(RegisterStatus.REPRESENTED)
        self._drop_beyond_population(register)
        self._rows.keep(self._stays)

    def _drop(self, rows: NDArray[np.int64], reason: Reason, detail: str = "") -> None:
        for row, place in zip(rows.tolist(), self._rows.places[rows].tolist(), strict=True):
            self._refusals.add(place, self._rows.ids[row], reason, detail)
        self._stays[rows] = False

    def _drop_repeated(self, columns: tuple[str, ...], reason: Reason, among: RowMask | None = None) -> None:
        rows = np.flatnonzero(self._stays if among is None else self._stays & among)
        rows = rows[np.argsort(self._known[rows] != _STATUS_CODE[RegisterStatus.SAME], kind="stable")]
        table = self._rows.table
        keys = np.empty(len(rows), dtype=[(name, table.dtype[name]) for name in columns])
        for name in columns:
            keys[name] = table[name][rows]
        self._drop(rows[is_repeat(keys)], reason)

    def _drop_ids_of_several(self) -> None:
        """Of ids that look alike and are of several contributors nobody stays whom the register does not know.

        Whoever chooses a name chooses where it stands in the order, which must not decide between two people.
        """
        rows, table = np.flatnonzero(self._stays), self._rows.table
        names = table["name"][rows].view("S16")
        alike: dict[bytes, list[int]] = {}
        for row in rows[np.isin(names, names[is_repeat(names)])].tolist():
            alike.setdefault(table["name"][row].tobytes(), []).append(row)
        for group in alike.values():
            known = any(self._known[row] == _STATUS_CODE[RegisterStatus.SAME] for row in group)
            if not known and len({int(table["key"][row]) for row in group}) > 1:
                for row, other in zip(group, group[1:] + group[:1], strict=True):
                    detail = f"like {self._rows.ids[other]!r}, which another key signed"
                    self._drop(np.array([row]), reasons.DUPLICATE_ID, detail)

    def _ask(self, register: Register) -> None:
        for rows, entries in self._rows.entries(np.flatnonzero(self._stays), self._kids, list(self._populations)):
            self._known[rows] = [_STATUS_CODE[each] for each in register.look(entries)]

    def _drop_by_status(self, known: RegisterStatus) -> None:
        detail = "in the ledger, whatever the ring says" if known is RegisterStatus.REVOKED else ""
        self._drop(np.flatnonzero(self._stays & (self._known == _STATUS_CODE[known])), REASON_OF_STATUS[known], detail)

    def _drop_beyond_population(self, register: Register | None) -> None:
        """Keep the first so many of each class. Those admitted before keep their place; new ones take what is left."""
        for row, (name, population) in enumerate(self._populations.items()):
            if population is None:
                continue
            ours = self._stays & (self._rows.table["cls"] == row)
            same = np.flatnonzero(ours & (self._known == _STATUS_CODE[RegisterStatus.SAME]))
            new = np.flatnonzero(ours & (self._known == _STATUS_CODE[RegisterStatus.NEW]))
            before = register.members(name) if register is not None and len(new) else 0
            for late in (same[population:], new[max(0, population - before) :]):
                self._drop(late, *class_full(name, population))


_STATUS_CODE = {known: code for code, known in enumerate(RegisterStatus)}


REFUSALS_SHOWN = 20  # in the table

Progress = Callable[[int, int | None], None]  # how many are examined, of how many if that is known


class Admission:
    """The contributions that a gate admitted, as columns over rows 0 … n-1, in the order of their source.

    `refused` says which were not admitted and why. `recheck` says which have to leave; none comes back.
    """

    def __init__(
        self,
        gate: AdmissionGate,
        source: Iterable[Contribution],
        rows: AdmittedRows,
        refused: Refusals,
        kids: Sequence[bytes],
        verified: int,
    ) -> None:
        self.refused = refused
        self.source = source
        self.kids = tuple(kids)
        self.classes = tuple(gate.terms.classes)
        self.ids = rows.ids
        self._gate = gate
        self._rows = rows
        self._verified = verified  # when the signatures were
        self._left = np.full(len(rows), STILL_VALID, dtype=np.uint8)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        """What the rows and their ids take."""
        return self._rows.nbytes

    @property
    def columns(self) -> NDArray[Any]:
        """All rows, (n,) of `ROW_DTYPE`. The nonces in them are secret."""
        view = self._rows.table.view()
        view.flags.writeable = False
        return view

    @property
    def cls(self) -> NDArray[np.uint16]:
        """(n,) the class of each row, which counts in `classes`."""
        return self.columns["cls"]

    @cached_property
    def _bounds(self) -> tuple[BoundColumns, NDArray[np.int32]]:
        found = (self.columns[name] for name in ("cls", "clip_norm", "noise_multiplier"))
        return BoundColumns.distinct(self.classes, *found)

    @property
    def bounds(self) -> BoundColumns:
        """The distinct bounds that were signed."""
        return self._bounds[0]

    @property
    def bound(self) -> NDArray[np.int32]:
        """(n,) the bound of each row, which counts in `bounds`."""
        return self._bounds[1]

    @property
    def standing(self) -> NDArray[np.bool_]:
        """(n,) who has not had to leave."""
        return np.equal(self._left, STILL_VALID)

    @property
    def left(self) -> list[Refusal]:
        """Who had to leave, and why."""
        return [Refusal(self.ids[row], REASONS[self._left[row]]) for row in np.flatnonzero(~self.standing).tolist()]

    @property
    def untagged(self) -> int:
        """How many of private classes carry no subject tag: nobody can tell whether two are about one person."""
        private = np.array([not each.public for each in self._gate.terms.classes.values()], dtype=np.bool_)
        return int(np.count_nonzero(private[self.cls] & ((self.columns["flags"] & TAGGED) == 0)))

    def profile(self, name: str) -> str:
        """How deep a class may reach, in words: the same for all its contributions."""
        return str(self._gate.policy.classes[name].profile)

    def __getitem__(self, row: int) -> Admitted:
        found = self.columns[row]
        return self._rows.admitted(row % len(self), found, self.kids, self.classes)

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
        wanted = np.frombuffer(id_hash(id), dtype="S16")[0]
        at = int(np.searchsorted(names, wanted))
        found = int(order[at]) if at < len(names) and names[at] == wanted else None
        return None if found is None or self.ids[found] != id else found  # not one that looks like it

    def holds(self, row: int, payload: bytes) -> bool:
        """Whether these bytes are what the contribution committed to.

        For whoever loads them: between admission and use a file may have been exchanged.
        """
        found = self.columns[row]
        digest = hashlib.sha256(found["nonce"].tobytes() + payload).digest()
        return hmac.compare_digest(digest, found["commitment"].tobytes())

    def recheck(
        self, now: float | None = None, keys: KeyRing | None = None, *, progress: Progress | None = None
    ) -> Revalidation:
        """Which rows have to leave now, and why; each is reported once. `keys` replaces the gate's ring.

        Within an epoch this checks validity and keys, for all rows at once. What was verified more than an epoch ago
        is read from the source and verified again; if the source can be read only once, all have to leave.
        """
        gate = self._gate
        current = gate.clock.now() if now is None else gate.clock.advance_to(now)
        if keys is not None:
            gate.keys = keys
        codes = revalidate_rows(self._rows.table, gate.keys, self.kids, current)
        over = self.standing & (codes == STILL_VALID)
        if self._verified + gate.policy.corpus.epoch <= current and over.any():
            codes[over] = self._verify_again(over, current, progress)[over]
            self._verified = current
        rows = np.flatnonzero((codes != STILL_VALID) & self.standing)
        self._left[rows] = codes[rows]
        return Revalidation(rows, codes[rows])

    def _verify_again(self, over: NDArray[np.bool_], now: int, progress: Progress | None) -> ReasonCodes:
        """Reads and verifies the rows that are `over` again."""
        codes = np.full(len(self), reasons.GONE.code, dtype=np.uint8)
        if isinstance(self.source, Iterator):
            codes[:] = reasons.NOT_REPEATED.code
            return codes
        table = self._rows.table
        examiner = self._gate.examiner()
        for id, verdict in self._gate.verdicts(self.source, examiner, now, progress):
            row = self.row_of(id)
            if row is None or not over[row] or codes[row] == STILL_VALID:
                continue
            if not isinstance(verdict, bytes):
                codes[row] = verdict[0].code
                continue
            found, kept = unpack_row(verdict), table[row]
            same = all(found[name] == kept[name] for name in ("descriptor", "attestation"))
            codes[row] = STILL_VALID if same else reasons.CHANGED.code
        return codes

    @property
    def places(self) -> NDArray[np.int64]:
        """(n,) the position of each row in its source."""
        return self._rows.places.copy()

    def refuse(self, found: Mapping[int, tuple[Reason, str]]) -> None:
        """Drop rows before anything is made of them, e.g. because a payload cannot be used."""
        for row, (reason, detail) in found.items():
            self.refused.add(int(self._rows.places[row]), self.ids[row], reason, detail)
        stays = np.ones(len(self), dtype=np.bool_)
        stays[list(found)] = False
        self._rows.keep(stays)
        self._left = self._left[stays]
        for name in ("_bounds", "_by_name"):
            self.__dict__.pop(name, None)

    def enter(self) -> int:
        """Note the admitted rows in the gate's register; drop those that may not enter after all. Returns how many."""
        lost = {} if (register := self._gate.register) is None else self.enter_into(register)
        self.refuse(lost)
        return len(lost)

    def enter_into(self, register: Register) -> RefusedRows:
        """Note in a register the rows that were admitted and have not left. Returns those that may not enter, and why.

        They stay rows of this admission: leave them out. Repeating the call changes nothing.
        """
        gate = self._gate
        places = {name: each.population for name, each in gate.terms.classes.items()}

        def read(row: int) -> tuple[bytes, bytes]:
            return read_signed_bytes(self.source, self.ids[row], int(self._rows.places[row]))

        beside = EntryContext(read, gate.keys, places)
        parts = self._rows.entries(np.flatnonzero(self.standing), self.kids, self.classes)
        return register.enter((entry for _, entries in parts for entry in entries), beside)

    def dismiss(self, rows: NDArray[np.int64], reason: Reason) -> None:
        """Make these rows leave, e.g. because a plan cannot keep what they signed."""
        self._left[rows[self.standing[rows]]] = reason.code

    def resolve(self, plan: StepPlan, *, max_occurrences: Caps = None) -> Resolution:
        """The resolver's answer for `bounds`: scale and ceiling of row i are at `bound[i]`. Scale 0: dismiss it."""
        return resolve(self.bounds, self._gate.policy, plan, max_occurrences=max_occurrences)

    def count_by_class(self) -> dict[str, int]:
        """How many of each class are admitted."""
        counts = np.bincount(self.cls, minlength=len(self.classes))
        return {name: int(counts[row]) for row, name in enumerate(self.classes)}

    def table(self) -> str:
        """For people: one line per class, one per reason, and the first refusals by id."""
        counts, refused = self.count_by_class(), self.refused
        distinct = np.bincount(self.bounds.cls, minlength=len(self.classes))
        classes = [["class", "reaches", "admitted", "bounds"]]
        for row, name in enumerate(self.classes):
            classes.append([name, self.profile(name), f"{counts[name]:,}", f"{int(distinct[row]):,}"])
        lines = [f"{len(self):,} admitted, {len(refused):,} refused", "", *align_columns(classes, left=2)]
        if self.untagged:
            lines.append(
                f"{self.untagged:,} without a subject tag: each contribution is protected, but nobody can tell whether two "
                "are about one person (lamina attest --subject-key signs a tag)"
            )
        if refused:
            rows = [["refused for", "", "how many"]]
            rows += [[str(reason), reason.meaning, f"{n:,}"] for reason, n in refused.counts().items()]
            lines += ["", *align_columns(rows, left=2), ""]
            rows = [[r.id, str(r.reason), r.detail] for r in refused[:REFUSALS_SHOWN]]
            lines += _first_rows(["id", "reason", "detail"], rows, len(refused))
        if left := self.left:
            rows = [[r.id, str(r.reason)] for r in left[:REFUSALS_SHOWN]]
            lines += ["", *_first_rows(["had to leave", "reason"], rows, len(left))]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """For machines: {"admitted": n, "refused": [{"id", "reason", "detail"}], "reasons", "classes"}."""
        left = self.left
        return {
            "admitted": len(self),
            "refused": [refusal.to_dict() for refusal in self.refused],
            "reasons": {reason.word: count for reason, count in self.refused.counts().items()},
            "classes": self.count_by_class(),
            "untagged": self.untagged,
            **({"left": [refusal.to_dict() for refusal in left]} if left else {}),
        }

    def __repr__(self) -> str:
        return f"Admission({len(self)} admitted, {len(self.refused)} refused)"


def _first_rows(head: list[str], rows: list[list[str]], total: int) -> list[str]:
    more = [f"… and {total - len(rows):,} more"] if total > len(rows) else []
    return [*align_columns([head, *rows], left=len(head)), *more]
