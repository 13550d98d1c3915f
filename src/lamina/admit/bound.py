"""`Bound`: what contributions sign, and what they are held to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

from lamina.account import epsilon_of_multiplier
from lamina.admit.descriptor import MICRO

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Bound:
    """A class, a clip norm c and a noise multiplier z, both in 1e-6.

    "Over all my occurrences, no worse than one Gaussian release of norm c with multiplier z." Both are 0 in a public
    class, where nothing is bounded.
    """

    cls: str
    clip_norm: int
    noise_multiplier: int

    @property
    def c(self) -> float:
        """The clip norm in plain units."""
        return self.clip_norm / MICRO

    @property
    def z(self) -> float:
        """The noise multiplier in plain units."""
        return self.noise_multiplier / MICRO

    def epsilon(self, delta: float) -> float:
        """The ε that was signed, at that δ: exact, μ = 1/z. Infinite where nothing is bounded."""
        return epsilon_of_multiplier(self.z, delta) if self.noise_multiplier else math.inf


class Bounds(Sequence[Bound]):
    """Distinct bounds as columns: `cls` counts in `names`. A corpus in which everybody signs another one has many."""

    def __init__(self, names: Sequence[str], cls: Ints, clip_norm: Ints, noise_multiplier: Ints) -> None:
        self.names = tuple(names)
        self.cls, self.clip_norm, self.noise_multiplier = cls, clip_norm, noise_multiplier

    @classmethod
    def of(cls, bounds: Sequence[Bound]) -> Bounds:
        """Columns of given bounds."""
        if isinstance(bounds, Bounds):
            return bounds
        names = tuple(dict.fromkeys(bound.cls for bound in bounds))
        return cls(
            names,
            np.array([names.index(bound.cls) for bound in bounds], dtype=np.int64),
            np.array([bound.clip_norm for bound in bounds], dtype=np.int64),
            np.array([bound.noise_multiplier for bound in bounds], dtype=np.int64),
        )

    @classmethod
    def distinct(
        cls, names: Sequence[str], row: Ints, clip: Ints, noise: Ints
    ) -> tuple[Bounds, NDArray[np.int32]]:
        """Each bound once, sorted by class, c and z, and where each of the given ones is."""
        order = np.lexsort((noise, clip, row))
        columns = [np.asarray(column)[order].astype(np.int64) for column in (row, clip, noise)]
        new = np.ones(len(order), dtype=np.bool_)
        if len(order):
            new[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
        index = np.empty(len(order), dtype=np.int32)
        index[order] = np.cumsum(new, dtype=np.int32) - 1
        return cls(names, *(column[new] for column in columns)), index

    def __len__(self) -> int:
        return len(self.cls)

    @overload
    def __getitem__(self, index: int) -> Bound: ...
    @overload
    def __getitem__(self, index: slice) -> list[Bound]: ...
    def __getitem__(self, index: int | slice) -> Bound | list[Bound]:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        return Bound(
            self.names[int(self.cls[index])], int(self.clip_norm[index]), int(self.noise_multiplier[index])
        )

    def __iter__(self) -> Iterator[Bound]:
        return (self[row] for row in range(len(self)))
