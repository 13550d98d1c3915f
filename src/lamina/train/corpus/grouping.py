"""From what a user says about examples to what holds for contributions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lamina.errors import CorpusError
from lamina.train.corpus.layout import Layout, Rows
from lamina.train.corpus.text import Texts

Labels = Sequence[Any] | NDArray[Any]
CHUNK = 1 << 15


class Grouping:
    """Contributions in order of first appearance. Needed while a corpus is made; it keeps `layout` and `ids`.

    `unit` names the contribution of each example; without it every example is its own. `ids` names the
    contributions; by default they are called by the unit's value.
    """

    def __init__(self, examples: int, unit: Any = None, ids: Any = None) -> None:
        self._examples = examples
        self._units: Labels = range(examples)
        if unit is None:
            self.layout = Layout(np.arange(examples))
        else:
            labels = labels_of("unit", unit)
            if len(labels) != examples:
                raise CorpusError(
                    "corpus.unit-entries-examples",
                    f"unit has {len(labels)} entries for {examples} examples",
                    _unit_remedy(labels, examples),
                )
            codes, self._units = _numbered(labels)
            self.layout = Layout(codes)
        self.ids = Texts(each(self._units))
        if ids is not None:
            self.ids = Texts(each(self.spread("ids", ids)))
        self._check_ids(given=ids is not None)

    def _check_ids(self, given: bool) -> None:
        if (row := self.ids.empty()) is not None:
            raise CorpusError(
                "corpus.contribution-empty-id",
                f"contribution {row} has an empty id",
                "give every contribution a name",
            )
        if (rows := self.ids.repeat()) is not None:
            remedy = "give every contribution its own id"
            if given and self.layout.trivial:
                remedy = (
                    "if it is one patient with several examples, give unit=ids; otherwise use distinct ids"
                )
            raise CorpusError(
                "corpus.id-names-two", f"id {self.ids[rows[0]]!r} names two contributions", remedy
            )

    def spread(self, what: str, given: Any) -> Labels:
        """One value per contribution: from a dict by unit or id, or a sequence by example or by contribution.

        By contribution means in order of first appearance. Where that is not also the sorted order, somebody may
        have meant the other one, so that is refused.
        """
        if isinstance(given, Mapping):
            return self._from_mapping(what, given)
        values = labels_of(what, given)
        count = len(self.layout)
        if len(values) == self._examples:
            return values if self.layout.trivial else self._agreed(what, values)
        if len(values) != count:
            raise CorpusError(
                "corpus.entries-contributions-examples",
                f"{what} has {len(values)} entries for {count} contributions and {self._examples} examples",
                f"give one per example, one per contribution, or a dict from unit to {what}",
            )
        if not _ascending(self._units):
            raise CorpusError(
                "corpus.entry-per-contribution",
                f"{what} has one entry per contribution, but contributions do not appear in sorted order, so it is "
                "not clear which is whose",
                f"give one per example, or a dict from unit to {what}",
            )
        return values

    def _from_mapping(self, what: str, given: Mapping[Any, Any]) -> list[Any]:
        by_id = len(self.layout) > 0 and next(each(self._units)) not in given
        keys = list(self.ids) if by_id else list(each(self._units))
        for key in keys:
            if key not in given:
                raise CorpusError(
                    "corpus.no-entry-contribution",
                    f"{what} has no entry for contribution {key!r}",
                    "give every contribution one",
                )
        if len(given) != len(keys):
            stranger = next(iter(set(given) - set(keys)))
            raise CorpusError(
                "corpus.entry-no-examples",
                f"{what} has an entry for {stranger!r}, which has no examples",
                "leave it out",
            )
        return [given[key] for key in keys]

    def _agreed(self, what: str, values: Labels) -> Labels:
        """The value that all examples of a contribution have."""
        every = np.arange(len(self.layout))
        order, sizes = self.layout.rows_of(every), self.layout.sizes(every)
        firsts = order[np.cumsum(sizes) - sizes]
        owner = np.repeat(every, sizes)
        if isinstance(values, np.ndarray):
            wrong = np.flatnonzero(values[order] != values[firsts[owner]])
            at = int(wrong[0]) if len(wrong) else None
        else:
            told = zip(order.tolist(), firsts[owner].tolist(), strict=True)
            at = next((i for i, (one, first) in enumerate(told) if values[one] != values[first]), None)
        if at is not None:
            row = int(owner[at])
            one, other = (_plain(values[int(i)]) for i in (firsts[row], order[at]))
            raise CorpusError(
                "corpus.contribution-example-another",
                f"{what} of contribution {self.ids[row]!r} is {one!r} for one example and {other!r} for another",
                f"a contribution has one {what}: correct it, or make two contributions of it with unit=",
            )
        return values[firsts] if isinstance(values, np.ndarray) else [values[i] for i in firsts.tolist()]


def labels_of(what: str, given: Any) -> Labels:
    """A flat array, or a list, of values that name something; none of them missing."""
    if isinstance(given, torch.Tensor):
        given = given.detach().cpu().numpy()
    if hasattr(given, "to_numpy"):
        given = given.to_numpy()
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise CorpusError(
            "corpus.give-sequence-per", f"{what} is {given!r}", f"give {what} as a sequence, one per example"
        )
    if isinstance(given, np.ndarray) and given.ndim != 1:
        raise CorpusError(
            "corpus.shape", f"{what} has shape {given.shape}", f"give {what} as one flat sequence"
        )
    if isinstance(given, np.ndarray) and given.dtype != object:
        gaps = given != given if given.dtype.kind in "fcmM" else np.zeros(1, dtype=np.bool_)
        _refuse_gap(what, int(gaps.argmax()) if gaps.any() else None)
        return given
    values = list(given)
    if any(isinstance(value, torch.Tensor) for value in values):  # equal tensors are different keys
        raise CorpusError(
            "corpus.list-tensors", f"{what} is a list of tensors", f"give one tensor: torch.stack({what})"
        )
    _refuse_gap(what, next((i for i, value in enumerate(values) if _is_gap(value)), None))
    return values


def _refuse_gap(what: str, position: int | None) -> None:
    if position is not None:
        raise CorpusError(
            "corpus.missing-position",
            f"{what} is missing at position {position}",
            f"give every example a {what}",
        )


def _is_gap(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _numbered(labels: Labels) -> tuple[Rows, Labels]:
    """Numbers in order of first appearance, and the labels in that order."""
    if isinstance(labels, np.ndarray) and labels.dtype.kind in "biuf":
        values, first, codes = np.unique(labels, return_index=True, return_inverse=True)
        order = np.argsort(first)
        rank = np.empty(len(order), dtype=np.int64)
        rank[order] = np.arange(len(order))
        return rank[codes], values[order]
    known: dict[Any, int] = {}
    numbers = (known.setdefault(label, len(known)) for label in each(labels))
    try:
        return np.fromiter(numbers, dtype=np.int64, count=len(labels)), list(known)
    except TypeError:
        raise CorpusError(
            "corpus.unit-values-not",
            "unit has values that cannot be compared",
            "use numbers or text, such as the id of a patient",
        ) from None


def each(labels: Labels) -> Iterator[Any]:
    """One by one, as Python's own kinds, without holding all of them as objects at once."""
    for start in range(0, len(labels), CHUNK):
        part = labels[start : start + CHUNK]
        yield from part.tolist() if isinstance(part, np.ndarray) else part


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _ascending(values: Labels) -> bool:
    try:
        return isinstance(values, range) or all(a < b for a, b in pairwise(each(values)))
    except TypeError:
        return False


def _unit_remedy(labels: Labels, examples: int) -> str:
    try:
        if sum(each(labels)) == examples:
            return "it seems to count the examples of each: unit=np.repeat(np.arange(len(counts)), counts)"
    except TypeError:
        pass  # names, not counts
    if len(labels) and examples % len(labels) == 0:
        times = examples // len(labels)
        return (
            "unit names the contribution of every example, not every contribution once: with "
            f"{times} examples each, end to end, it is np.repeat(unit, {times})"
        )
    return "unit names the contribution of every example: give as many entries as there are examples"
