"""Contributions: admitted in their time, under a bound that the policy allowed, by a key that counted, once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lamina.admit.times import shown
from lamina.errors import EncodingError
from lamina.ledger import leaf as leaves
from lamina.ledger.check.attestations import Attestations
from lamina.ledger.check.columns import Columns, Ints, columns
from lamina.ledger.check.keys import Keys
from lamina.ledger.check.policy import PolicyInForce
from lamina.ledger.check.problem import LEAF, bad
from lamina.ledger.check.repeats import Repeats
from lamina.ledger.check.tallies import Tallies
from lamina.ledger.clock import SKEW
from lamina.ledger.leaf import Leaf
from lamina.ledger.records import Admitted, Preset, Terms

Bound = tuple[str, int, int]


class Living(NamedTuple):
    """The contribution of a bound that stays eligible longest: as long as it does, somebody has this bound."""

    seq: int
    expires: int
    key: bytes


class Contributions:
    """Contributions as they come, block by block. Nothing is kept of single ones but eight bytes of each digest."""

    def __init__(
        self, policy: PolicyInForce, keys: Keys, attestations: Attestations | None, tallies: Tallies
    ) -> None:
        self._policy, self._keys, self._attestations = policy, keys, attestations
        self._tallies = tallies
        self.repeats = Repeats()
        self.living: dict[Bound, Living] = {}
        self.count = 0
        self._judged: tuple[int, dict[Terms, str | None]] = (-1, {})

    def block(
        self, first: int, data: Sequence[bytes], time: int, epoch: int, evidence: Mapping[int, bytes]
    ) -> int:
        """Leaves that follow each other, the first of them at `first`; the time of the last one."""
        times = np.empty(len(data), dtype=np.int64)
        suspect = np.zeros(len(data), dtype=np.bool_)
        groups: list[Columns] = []
        alone: Ints = np.empty(0, dtype=np.int64)
        for group in columns(data):
            if isinstance(group, Columns):
                groups.append(group)
                times[group.rows] = group.time
                suspect[group.rows] = self._suspect(group, first, epoch)
            else:
                alone = group
        read: dict[int, Leaf] = {}
        for row in alone.tolist():
            try:
                read[row] = leaves.decode(data[row])
            except EncodingError as error:
                self._upto(row, first, data, times, suspect, read, time, epoch)
                bad(first + row, LEAF, "verify.block", error.problem)
            times[row], suspect[row] = read[row].time, True
        self._upto(len(data), first, data, times, suspect, read, time, epoch)
        self._attested(first, data, read, evidence)
        for group in groups:
            self._keep(group, data)
        for row, found in read.items():
            self._keep_one(row, found)
        self.count += len(data)
        return int(times[-1])

    def _upto(
        self,
        stop: int,
        first: int,
        data: Sequence[bytes],
        times: Ints,
        suspect: np.ndarray[tuple[int], np.dtype[np.bool_]],
        read: Mapping[int, Leaf],
        time: int,
        epoch: int,
    ) -> None:
        """Look closely at the suspects before `stop`; time must not fall anywhere."""
        before = np.concatenate(([time], times[: max(stop - 1, 0)]))
        for row in np.flatnonzero(suspect[:stop] | (times[:stop] < before)).tolist():
            found = read.get(row) or leaves.decode(data[row])
            self.check(found, first + row, int(before[row]), epoch)

    def check(self, leaf: Leaf, index: int, time: int, epoch: int) -> None:
        """One contribution by itself: everything that `_suspect` asks of many, in words."""
        record = leaf.record
        assert isinstance(record, Admitted)
        check_place(leaf, index, time, epoch)
        if leaf.time + SKEW < record.not_before:
            bad(
                index,
                Admitted,
                "verify.admitted-valid",
                f"admitted at {shown(leaf.time)}, valid from {shown(record.not_before)}",
            )
        if leaf.time >= record.expires + SKEW:
            bad(
                index,
                Admitted,
                "verify.admitted-expired",
                f"admitted at {shown(leaf.time)}, expired at {shown(record.expires)}",
            )
        if (wrong := self._judge(record.terms)) is not None:
            bad(index, Admitted, "verify.check-2", wrong)
        if (wrong := self._keys.barred(record.key, leaf.time)) is not None:
            bad(index, Admitted, "verify.check-2", wrong)

    def _suspect(self, group: Columns, first: int, epoch: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Of which leaves `check` would find something wrong; perhaps of a few others too."""
        if not len(group.rows):
            return np.zeros(0, dtype=np.bool_)
        times = int(group.time.min()), int(group.time.max())
        if self._judge(group.terms) is not None or self._keys.bars(group.kids, *times):
            return np.ones(len(group.rows), dtype=np.bool_)
        found: np.ndarray[tuple[int], np.dtype[np.bool_]] = (
            (group.seq != group.rows + first)
            | (group.epoch != epoch)
            | (group.time + SKEW < group.not_before)
            | (group.time >= group.expires + SKEW)
        )
        return found

    def _judge(self, terms: Terms) -> str | None:
        if self._judged[0] != self._policy.version:
            self._judged = (self._policy.version, {})
        known = self._judged[1]
        if terms not in known:
            known[terms] = self._policy.wrong(terms)
        return known[terms]

    # ----------------------------------------------------------------------------------- signatures

    def _attested(
        self, first: int, data: Sequence[bytes], read: Mapping[int, Leaf], evidence: Mapping[int, bytes]
    ) -> None:
        if self._attestations is None:
            return
        for row, one in enumerate(data):
            leaf = read.get(row) or leaves.decode(one)
            self.repeats.token(first + row, self._attestations.check(leaf, evidence.get(first + row)))

    # ----------------------------------------------------------------------------------- what is kept

    def _keep(self, group: Columns, data: Sequence[bytes]) -> None:
        if not len(group.rows):
            return
        self.repeats.columns(group)
        self._tallies.columns(group)
        if group.terms.noise_multiplier:
            row = int(np.argmax(group.expires))
            known = self.living.get(group.terms.bound)
            if known is None or int(group.expires[row]) > known.expires:
                record = leaves.decode(data[int(group.rows[row])]).record
                assert isinstance(record, Admitted)
                self._live(int(group.seq[row]), record)

    def _keep_one(self, row: int, leaf: Leaf) -> None:
        record = leaf.record
        assert isinstance(record, Admitted)
        self.repeats.one(leaf.seq, record)
        self._tallies.one(leaf.seq, leaf.time, record)
        if record.terms.noise_multiplier:
            self._live(leaf.seq, record)

    def _live(self, seq: int, record: Admitted) -> None:
        known = self.living.get(record.bound)
        if known is None or record.expires > known.expires:
            self.living[record.bound] = Living(seq, record.expires, record.key)

    def eligible(self, bound: Bound, before: int, time: int) -> bool:
        """Whether somebody of that class, with that bound if it is one, is surely eligible.

        Admitted before that leaf, and at that time neither expired nor signed by a revoked key nor below the policy.
        """
        cls, clip, noise = bound
        found = (
            (self.living.get(bound),) if noise else [own for key, own in self.living.items() if key[0] == cls]
        )
        preset = self._policy.presets.get(cls)
        if preset is None or (noise and not self._allowed(preset, clip, noise)):
            return False
        return any(
            own is not None
            and own.seq < before
            and own.expires > time
            and not self._keys.revoked(own.key, time)
            for own in found
        )

    def _allowed(self, preset: Preset, clip: int, noise: int) -> bool:
        floors = self._policy.floors
        least = max(floors.noise_multiplier, preset.noise_multiplier)
        return floors.clip_norm <= clip <= preset.clip_norm and noise >= least

    def gone(self, seq: int) -> None:
        """A contribution was withdrawn. Whether another with its bound is left is not remembered."""
        for bound, known in list(self.living.items()):
            if known.seq == seq:
                del self.living[bound]


def check_place(leaf: Leaf, index: int, time: int, epoch: int) -> None:
    """Every leaf: it says where it stands, its time does not fall, and it counts the epochs before it."""
    if leaf.seq != index:
        bad(
            index,
            leaf.kind,
            "verify.says-leaf-moved",
            f"it says that it is leaf {leaf.seq}: it was moved here, or others were taken out",
        )
    if leaf.time < time:
        bad(
            index,
            leaf.kind,
            "verify.leaf-before-back",
            f"it is of {shown(leaf.time)}, the leaf before it of {shown(time)}: it was back-dated",
        )
    if leaf.epoch != epoch:
        bad(
            index,
            leaf.kind,
            "verify.comes-after-epochs",
            f"it comes after {leaf.epoch} epochs by its own count, {epoch} are before it",
        )
