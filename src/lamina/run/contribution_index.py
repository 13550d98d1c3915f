"""The contributions of a corpus: examples, id, class, subject, scale of each, and whether it is eligible."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lamina.admit.rows import PackedTexts
from lamina.errors import CorpusError
from lamina.plan.policy import Policy
from lamina.run.example_sources import Rows, keyed_hasher
from lamina.run.table_files import Hasher, hash_parts

CHUNK = 1 << 15


class ExampleLayout:
    """The examples of contributions 0 … P-1.

    Two arrays at most: where the examples of each contribution begin, and, unless contributions lie end to end
    already, the examples in that order. They are of 32 bits where these suffice.

    >>> ExampleLayout(np.array([0, 1, 0])).rows_of(np.array([0, 1]))
    array([0, 2, 1])
    """

    def __init__(self, codes: Rows) -> None:
        self._narrow = np.int32 if len(codes) < 1 << 31 else np.int64
        sizes = np.bincount(codes)
        self._starts: NDArray[Any] = np.concatenate([[0], np.cumsum(sizes)]).astype(self._narrow)
        self._order: NDArray[Any] | None = None
        if not bool((codes[1:] >= codes[:-1]).all()):
            self._order = np.argsort(codes, kind="stable").astype(self._narrow)

    def __len__(self) -> int:
        return len(self._starts) - 1

    @property
    def examples(self) -> int:
        return int(self._starts[-1])

    @property
    def one_example_each(self) -> bool:
        """Whether every example is a contribution of its own."""
        return len(self) == self.examples and self._order is None

    def sizes(self, rows: Rows) -> Rows:
        """The number of examples of these contributions."""
        sizes: Rows = (self._starts[rows + 1] - self._starts[rows]).astype(np.int64)
        return sizes

    def rows_of(self, rows: Rows) -> Rows:
        """The examples of these contributions, contribution after contribution."""
        sizes = self.sizes(rows)
        before = np.cumsum(sizes) - sizes
        at = np.repeat(self._starts[rows] - before, sizes) + np.arange(int(sizes.sum()))
        found: Rows = (at if self._order is None else self._order[at]).astype(np.int64, copy=False)
        return found

    def feed(self, hasher: Hasher) -> None:
        """Into a digest: the same for the same assignment, whatever the width of the arrays."""
        for array in (self._starts, np.empty(0, np.int64) if self._order is None else self._order):
            hash_parts(hasher, [len(array)])
            for start in range(0, len(array), 1 << 20):
                hasher.update(array[start : start + (1 << 20)].astype("<i8").tobytes())


DEFAULT_CLASS = "data"  # what the class of a corpus is called that names none
CLASS_REMEDY = "give cls=: one name for all, a name per example, or a dict from unit to name"


def default_class(cls: Any, policy: Policy | None) -> Any:
    """`cls` as given; without it, the only class of the policy."""
    if cls is not None or policy is None:
        return cls
    if len(policy.classes) > 1:
        problem = f"the policy has classes {', '.join(policy.classes)}, and cls is not given"
        raise CorpusError("corpus.class-not-given", problem, CLASS_REMEDY)
    return next(iter(policy.classes))


def check_classes(names: Sequence[str] | None, known: Sequence[str], whose: str) -> None:
    """Every class of the corpus is known to the policy or plan. None: no class was named, the only one is meant."""
    if names is None:
        if len(known) > 1:
            problem = f"the {whose} has classes {', '.join(known)}, and cls is not given"
            raise CorpusError("corpus.class-not-given", problem, CLASS_REMEDY)
        return
    for name in names:
        if name not in known:
            problem = f"the corpus has class {name!r}, which the {whose} does not have"
            remedy = f"name one of {', '.join(known)} in cls=, or add [class.{name}] to the policy"
            if whose == "plan":
                remedy = f"leave its contributions out of the data, or give {name} a batch above 0 in the plan"
            raise CorpusError("corpus.class-unknown", problem, remedy)


def declared_origin(origin: str | None, policy: Policy | None) -> str | None:
    """The origin that spending is recorded under; the policy's, if there is one."""
    declared = None if policy is None else policy.corpus.origin
    if origin == "":
        problem = "origin is empty"
        raise CorpusError("corpus.origin-empty", problem, "name the place that the data comes from, or leave it out")
    if origin is not None and declared is not None and origin != declared:
        problem = f"origin is {origin!r}, the policy says {declared!r}: spending would be recorded in two places"
        raise CorpusError("corpus.origin-not-of-policy", problem, "leave origin out")
    return origin or declared


Labels = Sequence[Any] | NDArray[Any]
_UNIT_REMEDY = "name the contribution of every example; if they lie end to end, unit=np.repeat(names, counts)"


class Grouping:
    """Contributions in order of first appearance. Needed while a corpus is made; it keeps `layout` and `ids`.

    `unit` names the contribution of each example; without it every example is its own. `ids` names the
    contributions; by default they are called by the unit's value.
    """

    def __init__(self, examples: int, unit: Any = None, ids: Any = None) -> None:
        self._examples = examples
        self._units: Labels = range(examples)
        if unit is None:
            self.layout = ExampleLayout(np.arange(examples))
        else:
            labels = check_labels("unit", unit)
            if len(labels) != examples:
                problem = f"unit has {len(labels)} entries for {examples} examples"
                raise CorpusError("corpus.unit-wrong-length", problem, _UNIT_REMEDY)
            codes, self._units = _number_by_appearance(labels)
            self.layout = ExampleLayout(codes)
        self.ids = PackedTexts(python_values(self._units))
        if ids is not None:
            self.ids = PackedTexts(python_values(self.per_contribution("ids", ids)))
        self._check_ids(given=ids is not None)

    def _check_ids(self, given: bool) -> None:
        if (row := self.ids.empty()) is not None:
            problem = f"contribution {row} has an empty id"
            raise CorpusError("corpus.id-empty", problem, "give every contribution a name")
        if (rows := self.ids.repeat()) is not None:
            remedy = "give every contribution its own id"
            if given and self.layout.one_example_each:
                remedy = "if it is one patient with several examples, give unit=ids; otherwise use distinct ids"
            raise CorpusError("corpus.id-repeated", f"id {self.ids[rows[0]]!r} names two contributions", remedy)

    def per_contribution(self, what: str, given: Any) -> Labels:
        """One value per contribution: from a dict by unit or id, or a sequence by example or by contribution.

        By contribution means in order of first appearance. Where that is not also the sorted order, somebody may
        have meant the other one, so that is refused.
        """
        if isinstance(given, Mapping):
            return self._from_mapping(what, given)
        values = check_labels(what, given)
        count = len(self.layout)
        if len(values) == self._examples:
            return values if self.layout.one_example_each else self._agreed(what, values)
        if len(values) != count:
            problem = f"{what} has {len(values)} entries for {count} contributions and {self._examples} examples"
            remedy = f"give one per example, one per contribution, or a dict from unit to {what}"
            raise CorpusError("corpus.column-wrong-length", problem, remedy)
        if not _is_sorted(self._units):
            problem = f"{what} has one entry per contribution, and contributions do not appear in sorted order"
            remedy = f"say whose each entry is: give one per example, or a dict from unit to {what}"
            raise CorpusError("corpus.column-order-ambiguous", problem, remedy)
        return values

    def _from_mapping(self, what: str, given: Mapping[Any, Any]) -> list[Any]:
        by_id = len(self.layout) > 0 and next(python_values(self._units)) not in given
        keys = list(self.ids) if by_id else list(python_values(self._units))
        for key in keys:
            if key not in given:
                problem = f"{what} has no entry for contribution {key!r}"
                raise CorpusError("corpus.entry-missing", problem, "give every contribution one")
        if len(given) != len(keys):
            stranger = next(iter(set(given) - set(keys)))
            problem = f"{what} has an entry for {stranger!r}, which has no examples"
            raise CorpusError("corpus.entry-without-examples", problem, "leave it out")
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
            pairs = zip(order.tolist(), firsts[owner].tolist(), strict=True)
            at = next((i for i, (one, first) in enumerate(pairs) if values[one] != values[first]), None)
        if at is not None:
            row = int(owner[at])
            pair = (values[int(i)] for i in (firsts[row], order[at]))
            one, other = (value.item() if isinstance(value, np.generic) else value for value in pair)
            problem = f"{what} of contribution {self.ids[row]!r} is {one!r} for one example and {other!r} for another"
            remedy = f"a contribution has one {what}: correct it, or make two contributions of it with unit="
            raise CorpusError("corpus.column-contradicts-itself", problem, remedy)
        return values[firsts] if isinstance(values, np.ndarray) else [values[i] for i in firsts.tolist()]


def check_labels(what: str, given: Any) -> Labels:
    """A flat array, or a list, of values that name something; none of them missing."""
    if isinstance(given, torch.Tensor):
        given = given.detach().cpu().numpy()
    if hasattr(given, "to_numpy"):
        given = given.to_numpy()
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        problem = f"{what} is {given!r}"
        raise CorpusError("corpus.column-not-a-sequence", problem, f"give {what} as a sequence, one per example")
    if isinstance(given, np.ndarray) and given.ndim != 1:
        problem = f"{what} has shape {given.shape}"
        raise CorpusError("corpus.column-not-flat", problem, f"give {what} as one flat sequence")
    if isinstance(given, np.ndarray) and given.dtype != object:
        gaps = given != given if given.dtype.kind in "fcmM" else np.zeros(1, dtype=np.bool_)
        _refuse_missing(what, int(gaps.argmax()) if gaps.any() else None)
        return given
    values = list(given)
    if any(isinstance(value, torch.Tensor) for value in values):  # equal tensors are different keys
        problem = f"{what} is a list of tensors"
        raise CorpusError("corpus.list-of-tensors", problem, f"give one tensor: torch.stack({what})")
    missing = (each is None or (isinstance(each, float) and math.isnan(each)) for each in values)
    _refuse_missing(what, next((i for i, gone in enumerate(missing) if gone), None))
    return values


def _refuse_missing(what: str, position: int | None) -> None:
    if position is not None:
        problem = f"{what} is missing at position {position}"
        raise CorpusError("corpus.value-missing", problem, f"give every example a {what}")


def _number_by_appearance(labels: Labels) -> tuple[Rows, Labels]:
    """Numbers in order of first appearance, and the labels in that order."""
    if isinstance(labels, np.ndarray) and labels.dtype.kind in "biuf":
        values, first, codes = np.unique(labels, return_index=True, return_inverse=True)
        order = np.argsort(first)
        rank = np.empty(len(order), dtype=np.int64)
        rank[order] = np.arange(len(order))
        return rank[codes], values[order]
    known: dict[Any, int] = {}
    numbers = (known.setdefault(label, len(known)) for label in python_values(labels))
    try:
        return np.fromiter(numbers, dtype=np.int64, count=len(labels)), list(known)
    except TypeError:
        remedy = "use numbers or text, such as the id of a patient"
        raise CorpusError("corpus.unit-not-hashable", "unit has values that cannot be used as names", remedy) from None


def python_values(labels: Labels) -> Iterator[Any]:
    """One by one, as Python's own kinds, without holding all of them as objects at once."""
    for start in range(0, len(labels), CHUNK):
        part = labels[start : start + CHUNK]
        yield from part.tolist() if isinstance(part, np.ndarray) else part


def _is_sorted(values: Labels) -> bool:
    try:
        return isinstance(values, range) or all(a < b for a, b in pairwise(python_values(values)))
    except TypeError:
        return False


class ContributionIndex:
    """One row per contribution. Rows never change; a withdrawal only takes away eligibility.

    Held: two texts, two to ten bytes of class and eligibility, 4 bytes of layout a contribution, and 8 each for a scale
    and a ceiling of their own where there are such; nothing else.
    """

    def __init__(
        self, examples: int, *, unit: Any = None, cls: Any = None, ids: Any = None, subject: Any = None,
        scale: Any = None, ceiling: Any = None,
    ) -> None:  # fmt: skip
        if not examples:
            problem = "the corpus has no examples"
            raise CorpusError("corpus.no-examples", problem, "give at least one; an empty *batch* is fine")
        grouping = Grouping(examples, unit, ids)
        self.layout, self.ids = grouping.layout, grouping.ids
        tags = () if subject is None else python_values(grouping.per_contribution("subject", subject))
        self.subjects = None if subject is None else PackedTexts(tags)
        self._check_subjects()
        self.named = cls is not None
        self.names, self._classes = _classes_of_contributions(grouping, DEFAULT_CLASS if cls is None else cls)
        self.scale = _limits_of_contributions(grouping, "scale", scale, most=1.0)
        self.ceiling = _limits_of_contributions(grouping, "ceiling", ceiling, most=math.inf)
        self._eligible = np.ones(len(self.layout), dtype=np.bool_)
        self.revision = 0

    def _check_subjects(self) -> None:
        if self.subjects is None:
            return
        if (row := self.subjects.empty()) is not None:
            problem = f"contribution {self.ids[row]!r} has an empty subject tag"
            raise CorpusError("corpus.subject-empty", problem, "tag every contribution, or none")
        if (rows := self.subjects.repeat()) is not None:
            one, other = (self.ids[row] for row in rows)
            problem = f"contributions {one!r} and {other!r} have the same subject: ε protects one contribution, not two"
            remedy = "make them one contribution: give the subject as unit="
            raise CorpusError("corpus.subject-repeated", problem, remedy)

    def __len__(self) -> int:
        return int(np.count_nonzero(self._eligible))

    @property
    def eligible(self) -> Rows:
        """All eligible rows, in the order of the corpus."""
        return np.flatnonzero(self._eligible)

    def members(self, name: str) -> Rows:
        """The eligible rows of a class, in the order of the corpus."""
        if name not in self.names:
            problem = f"class {name!r} is not in the corpus"
            raise CorpusError("corpus.class-not-in-corpus", problem, f"its classes are {', '.join(self.names)}")
        return np.flatnonzero(self._eligible & (self._classes == self.names.index(name)))

    def find(self, ids: Iterable[str]) -> Rows:
        """Their rows; refused if one is unknown."""
        wanted = [str(one) for one in ids]
        found = self.ids.find(wanted)
        for one in wanted:
            if one not in found:
                problem = f"contribution {one!r} is not in the corpus, so nobody was withdrawn"
                remedy = "ids are text: those given as ids=, or the units' values as text"
                raise CorpusError("corpus.contribution-unknown", problem, remedy)
        return np.array(sorted(set(found.values())), dtype=np.int64)

    def withdraw(self, rows: Rows) -> None:
        """Eligible no more."""
        self.revision += int(np.count_nonzero(self._eligible[rows]))
        self._eligible[rows] = False

    def order(self, key: bytes) -> bytes:
        """Over who is which row, withdrawn or not."""
        hasher = keyed_hasher(key, "lamina/order")
        hash_parts(hasher, [self.ids.data, self.ids.starts.astype("<i8").tobytes()])
        return hasher.digest()

    def digest(self, key: bytes, *extra: str) -> bytes:
        """Over ids, classes, subjects, scales and ceilings, layout and eligibility."""
        hasher = keyed_hasher(key, "lamina/members")
        hash_parts(hasher, [*extra, len(self.names), *self.names])
        for texts in (self.ids, self.subjects):
            hash_parts(hasher, ["none"] if texts is None else [texts.data, texts.starts.astype("<i8").tobytes()])
        hash_parts(hasher, [self._classes.astype("<u2").tobytes(), np.packbits(self._eligible).tobytes()])
        for limits in (self.scale, self.ceiling):
            hash_parts(hasher, ["none"] if limits is None else [limits.astype("<f8").tobytes()])
        self.layout.feed(hasher)
        return hasher.digest()


def _classes_of_contributions(grouping: Grouping, cls: Any) -> tuple[tuple[str, ...], NDArray[np.uint16]]:
    """Names in order of first appearance, and the number of each contribution's."""
    count = len(grouping.layout)
    if isinstance(cls, str):
        _check_class_name(cls)
        return (cls,), np.zeros(count, dtype=np.uint16)
    given: Labels = grouping.per_contribution("cls", cls)
    known: dict[Any, int] = {}
    numbers = (known.setdefault(name, len(known)) for name in python_values(given))
    codes = np.fromiter(numbers, dtype=np.int64, count=count)
    for name in known:
        _check_class_name(name)
    if len(known) > np.iinfo(np.uint16).max:
        problem = f"cls names {len(known)} classes"
        raise CorpusError("corpus.too-many-classes", problem, "a class is a group with one policy, not a person")
    return tuple(known), codes.astype(np.uint16)


def _limits_of_contributions(grouping: Grouping, what: str, given: Any, *, most: float) -> NDArray[np.float64] | None:
    """One per contribution, in (0, most]; None where nobody has a limit of its own."""
    if given is None:
        return None
    try:
        values = np.array(list(python_values(grouping.per_contribution(what, given))), dtype=np.float64)
    except (TypeError, ValueError):
        problem = f"{what} is not made of numbers"
        raise CorpusError("corpus.limit-not-a-number", problem, "give one per contribution") from None
    wrong = np.flatnonzero(~((values > 0) & (values <= most)))
    if len(wrong):
        row = int(wrong[0])
        problem = f"{what} of contribution {grouping.ids[row]!r} is {float(values[row])!r}, must be in (0, {most:g}]"
        remedy = "a stricter contribution has smaller thresholds, never none"
        raise CorpusError("corpus.limit-out-of-range", problem, remedy)
    return values


def _check_class_name(name: Any) -> None:
    if not isinstance(name, str) or not name:
        problem = f"cls names a class {name!r}"
        remedy = "a class is named by text, as in the policy: 'clinical'"
        raise CorpusError("corpus.class-name-not-text", problem, remedy)
