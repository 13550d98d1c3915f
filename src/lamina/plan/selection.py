"""Parts of a model: layers by name pattern, heads and experts by number, slices of tensors and their sizes."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache, wraps
from inspect import signature
from itertools import takewhile
from math import prod
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

from lamina.errors import LaminaError, PlanError

if TYPE_CHECKING:
    from lamina.plan.layer_stack import Layer, LayerStack
    from lamina.plan.step_plan import StepPlan


ROOT = "(root)"
"""The name of the layer, or block, of tensors that the model itself owns."""


def block_depth(block: int, blocks: int) -> float:
    """Where a block lies in a model: 0 is the input, 1 the output, and the only block of a model that has one."""
    return min(1.0, block / (blocks - 1)) if blocks > 1 else 1.0


def name_prefixes(name: str) -> Iterator[str]:
    """A dotted name and every prefix of it."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def common_path(*paths: Sequence[str]) -> list[str]:
    """The parts with which all of the paths begin."""
    return [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))]


def matches_pattern(pattern: str, name: str) -> bool:
    """Whether a pattern means this name, or a module above it."""
    return any(fnmatchcase(part, pattern) for part in name_prefixes(name))


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """'; did you mean …?' for a name that is not among the known ones, or nothing."""
    close = get_close_matches(name, known, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


_P = ParamSpec("_P")
_R = TypeVar("_R")


def known_keywords(error: type[LaminaError], code: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorate a function that refuses keywords it does not take, and suggests the one that is meant."""

    def decorated(function: Callable[_P, _R]) -> Callable[_P, _R]:
        known = [name for name in signature(function).parameters if name != "self"]
        called = function.__qualname__.removesuffix(".__init__")

        @wraps(function)
        def checked(*args: _P.args, **given: _P.kwargs) -> _R:
            for name in given:
                if name not in known:
                    problem = f"{called} takes no {name!r}{did_you_mean(name, known)}"
                    raise error(code, problem, f"it takes {', '.join(known)}")
            return function(*args, **given)

        return checked

    return decorated


def match_layers(names: Sequence[str | int], stack: LayerStack) -> tuple[bool, ...]:
    """Which layers are meant; a name, pattern or index that means none is refused.

    A layer with a tied tensor is meant by its own name or index, or by patterns that mean all of its uses: 'vision.*'
    does not mean a tensor that the language tower uses too.
    """
    patterns = [name for name in names if isinstance(name, str)]
    reached = [False] * len(stack)
    for index in (_layer_index(name, stack) for name in names if isinstance(name, int)):
        reached[index] = True
    for i, layer in enumerate(stack):
        if any(pattern == layer.name for pattern in patterns):
            reached[i] = True
        elif any(matches_pattern(pattern, layer.name) for pattern in patterns):
            reached[i] |= all(
                any(matches_pattern(pattern, use) for pattern in patterns) for use in _names_outside_layer(layer)
            )
    for pattern in patterns:
        _check_pattern_matched(pattern, stack, reached)
    return tuple(reached)


def _names_outside_layer(layer: Layer) -> list[str]:
    """Tensors of a layer, or other names of them, that are not below the module that it is named after."""
    inside = f"{layer.name}."
    named_after = any(name.startswith(inside) for name in layer.parameters)
    others = [name for name in layer.parameters if not name.startswith(inside)] if named_after else []
    return [*others, *layer.aliases]


def _layer_index(index: int, stack: LayerStack) -> int:
    if not -len(stack) <= index < len(stack):
        problem = f"profile names layer {index}, but the layers are 0 to {len(stack) - 1}"
        raise PlanError("plan.layer-unknown", problem, "-1 is the last layer")
    return index % len(stack)


def _check_pattern_matched(pattern: str, stack: LayerStack, reached: Sequence[bool]) -> None:
    """Refuse a pattern that means no layer, or only ones that are used elsewhere too."""
    known = [layer.name for layer in stack]
    if any(matches_pattern(pattern, name) for name in known):
        return
    shared = [
        i for i, layer in enumerate(stack) if any(matches_pattern(pattern, use) for use in _names_outside_layer(layer))
    ]
    if any(reached[i] for i in shared):
        return
    if shared:
        problem = f"profile names {pattern!r}, which shares a tensor with layer {known[shared[0]]!r}"
        remedy = f"name {known[shared[0]]!r} if the class may reach every use of it"
        raise PlanError("plan.layer-shared", problem, remedy)
    for tensor in stack.frozen:
        if matches_pattern(pattern, tensor):
            problem = f"profile names {pattern!r}, but tensor {tensor!r} is frozen"
            raise PlanError("plan.layer-frozen", problem, "leave it out, or make it trainable before the stack is made")
    problem = f"the model has no layer {pattern!r}{did_you_mean(pattern, known)}"
    raise PlanError("plan.layer-unknown", problem, "print the stack to see its layers")


EVERYWHERE = "*"
_MAX_NUMBERS = 1 << 16


@dataclass(frozen=True, slots=True)
class PartMask:
    """Numbers, counted from 0, of heads or experts, by `fnmatch` pattern of the module that has them.

    `rows` are (pattern, numbers) in order of the patterns; one row of pattern "*" is the same everywhere. A module that
    no pattern means has none.
    """

    rows: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def parse(cls, value: Any, what: str) -> PartMask:
        """From the form of policy.toml: a list of numbers, or a table from patterns to lists. `what` they are."""
        example = f'write {what} = [0, 1], or {what} = {{ "*.3.*" = [0, 1] }} for the modules that a pattern means'
        if isinstance(value, PartMask):
            return value
        if isinstance(value, Mapping):
            if not value or not all(isinstance(pattern, str) and pattern for pattern in value):
                problem = f"profile {what} is {dict(value)!r}, must map patterns to numbers"
                raise PlanError("plan.profile-parts", problem, example)
            if EVERYWHERE in value and len(value) > 1:
                problem = f"profile {what} has the pattern '*' beside others, which it matches too"
                raise PlanError("plan.profile-parts-overlap", problem, "let one pattern match each module")
            rows = value
        else:
            rows = {EVERYWHERE: value}
        return cls(tuple((pattern, _parse_numbers(rows[pattern], what, example)) for pattern in sorted(rows)))

    @property
    def everywhere(self) -> tuple[int, ...] | None:
        """The numbers, if they are the same everywhere."""
        return self.rows[0][1] if self.rows[0][0] == EVERYWHERE else None

    def plain(self) -> list[int] | dict[str, list[int]]:
        """The form of policy.toml; `parse` reads it back."""
        if self.everywhere is not None:
            return list(self.everywhere)
        return {pattern: list(numbers) for pattern, numbers in self.rows}

    def of(self, module: str, what: str) -> frozenset[int]:
        """The numbers at the module of this name: none if no pattern means it."""
        found = {numbers: pattern for pattern, numbers in self.rows if matches_pattern(pattern, module)}
        if len(found) > 1:
            first, second = sorted(found.values())[:2]
            problem = f"profile {what}: {module!r} matches {first!r} and {second!r}, with other numbers"
            raise PlanError("plan.profile-parts-overlap", problem, "let one pattern match each module")
        return frozenset(next(iter(found), ()))

    def __str__(self) -> str:
        if self.everywhere is not None:
            return ", ".join(map(str, self.everywhere))
        return "; ".join(f"{', '.join(map(str, numbers))} of {pattern}" for pattern, numbers in self.rows)


def _parse_numbers(value: Any, what: str, example: str) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise PlanError("plan.profile-parts", f"profile {what} is {value!r}, must be a list of numbers", example)
    for number in value:
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < _MAX_NUMBERS:
            problem = f"profile {what} holds {number!r}, must be whole numbers from 0"
            raise PlanError("plan.profile-parts", problem, example)
    return tuple(sorted(set(value)))


Range = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """Class `cls` moves `tensor` only at `ranges` along `axis`, which has `length` places.

    Elsewhere its gradient is 0 before it is measured, so the threshold C[k,l] bounds what is left. `ranges` are
    [first, stop), in order, apart from each other; none at all: the class moves nothing of this tensor, though it
    reaches others of the same layer. A class without a slice for a tensor moves all of it.
    """

    cls: str
    tensor: str
    axis: int
    length: int
    ranges: tuple[Range, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranges", tuple((first, stop) for first, stop in self.ranges))
        last, where = -1, f"slice of {self.tensor!r} for class {self.cls!r}"
        for first, stop in self.ranges:
            if not last < first < stop <= self.length:
                problem = f"{where} has ranges {list(self.ranges)} of {self.length}"
                raise PlanError("plan.slice-ranges", problem, "give [first, stop) in order, apart from each other")
            last = stop
        if self.axis < 0 or self.length < 1:
            problem = f"{where} has axis {self.axis} of length {self.length}"
            raise PlanError("plan.slice-axis", problem, "count axes from 0")

    @property
    def size(self) -> int:
        """How many places are open."""
        return sum(stop - first for first, stop in self.ranges)


@lru_cache(maxsize=64)
def slices_by_class_and_tensor(slices: tuple[Slice, ...]) -> Mapping[tuple[str, str], Slice]:
    """By class and tensor."""
    return {(part.cls, part.tensor): part for part in slices}


def merge_ranges(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The same places as ranges in order, apart from each other."""
    made: list[Range] = []
    for first, stop in sorted(ranges):
        if made and first <= made[-1][1]:
            made[-1] = (made[-1][0], max(made[-1][1], stop))
        elif first < stop:
            made.append((first, stop))
    return tuple(made)


def join_spans(spans: Iterable[Range], blocks: int) -> tuple[Range, ...]:
    """Runs of blocks in order, apart from each other; (0, 0) lies before the first block, (blocks, blocks) after the last.

    >>> join_spans([(12, 12), (0, 0), (2, 3), (1, 2)], 12)
    ((0, 0), (1, 3), (12, 12))
    """
    given = list(spans)
    made = merge_ranges(given)
    ends = {(end, end) for end in (0, blocks) if (end, end) in given and not any(a <= end <= b for a, b in made)}
    return tuple(sorted({*made, *ends}))


def complement_ranges(ranges: Iterable[Range], length: int) -> tuple[Range, ...]:
    """The places that `ranges` leave out."""
    made, last = [], 0
    for first, stop in merge_ranges(ranges):
        if last < first:
            made.append((last, first))
        last = stop
    return (*made, (last, length)) if last < length else tuple(made)


Piece = tuple[int, int, tuple[int, ...]]
"""[first, stop) and the numbers of those whom these places serve."""


class PartKind(enum.Enum):
    """What a tensor is shared out among."""

    HEADS = "heads"
    EXPERTS = "experts"


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPart:
    """`tensor` along `axis`, which has `length` places, belongs piece by piece to heads (or experts) of `group`.

    group   the name of the module that has them: an attention, a list of experts
    count   how many there are; heads are query heads
    pieces  whom places serve: rows of a query projection one head, rows of a key projection all query heads of their
            group. Places in no piece serve all of them, or nobody knows whom; they belong to none
    """

    kind: PartKind
    group: str
    count: int
    tensor: str
    axis: int
    length: int
    pieces: tuple[Piece, ...]

    def ranges_serving_only(self, chosen: Collection[int]) -> tuple[Range, ...]:
        """The places that serve none but the chosen: a shared thing is reached only if all of its uses are."""
        return merge_ranges(
            (first, stop) for first, stop, users in self.pieces if all(user in chosen for user in users)
        )

    @property
    def whole(self) -> bool:
        """Whether the tensor is one piece."""
        return len(self.pieces) == 1 and self.pieces[0][:2] == (0, self.length)


@dataclass(frozen=True, kw_only=True, slots=True)
class UnreadModule:
    """A module that looks as if it had heads, or experts, and why they are not known."""

    module: str
    kind: PartKind
    why: str


def consecutive_pieces(count: int, width: int, serves: Sequence[tuple[int, ...]] | None = None) -> list[Piece]:
    """`count` pieces of `width` places, for one user each or for those that `serves` lists."""
    return [(i * width, (i + 1) * width, serves[i] if serves is not None else (i,)) for i in range(count)]


def concatenate_pieces(*rows: Sequence[Piece]) -> list[Piece]:
    """Rows of pieces, one row after the other."""
    made: list[Piece] = []
    for row in rows:
        start = made[-1][1] if made else 0
        made += [(start + first, start + stop, users) for first, stop, users in row]
    return made


def intersect_ranges(one: Iterable[Range], other: Iterable[Range]) -> tuple[Range, ...]:
    """The places that are in both."""
    pairs = ((max(a, c), min(b, d)) for a, b in one for c, d in other)
    return merge_ranges(pair for pair in pairs if pair[0] < pair[1])


def resolve_tied_parts(
    found: Iterable[TensorPart], uses: Mapping[str, tuple[str, ...]], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[TensorPart, ...]:
    """Parts by the tensors' own names, one axis for each tensor.

    `found` names a tensor by any of its uses. A tied tensor has the parts of all of its uses, and belongs to none where
    it is also used otherwise, or cut along two axes.
    """
    by_use: defaultdict[str, list[TensorPart]] = defaultdict(list)
    for part in found:
        by_use[part.tensor].append(part)
    made: list[TensorPart] = []
    for name, names in uses.items():
        parts = [replace(part, tensor=name) for use in names for part in by_use.get(use, ())]
        for kind in PartKind:
            mine = [part for part in parts if part.kind is kind]
            if mine and any(all(part.kind is not kind for part in by_use.get(use, ())) for use in names):
                parts.append(replace(mine[0], pieces=()))
        made += _parts_along_one_axis(parts, shapes[name])
    return tuple(dict.fromkeys(made))


def _parts_along_one_axis(parts: list[TensorPart], shape: tuple[int, ...]) -> list[TensorPart]:
    cut = list(dict.fromkeys(part.axis for part in parts if part.pieces and not part.whole))
    axis = cut[0] if cut else (parts[0].axis if parts else 0)
    length = shape[axis] if shape else 1
    made = []
    for part in parts:
        if part.whole:
            pieces: tuple[Piece, ...] = ((0, length, part.pieces[0][2]),)
        else:
            pieces = part.pieces if len(cut) <= 1 else ()
        made.append(replace(part, axis=axis, length=length, pieces=pieces))
    return made


Shapes = Mapping[str, Sequence[int]]


class _SizedLayer(Protocol):
    @property
    def parameters(self) -> tuple[str, ...]: ...

    @property
    def size(self) -> int: ...


def noised_sizes(
    layers: Iterable[_SizedLayer], reach: Mapping[str, Sequence[bool]], slices: Iterable[Slice], shapes: Shapes
) -> tuple[int, ...]:
    """d_l of each layer, without the places that the slices of all classes leave out.

    reach   by class, which layers it reaches; a layer that none reaches counts whole
    shapes  of tensors, by name; only those with slices are looked up
    """
    parts = {(part.tensor, part.cls): part for part in slices}
    cut = {tensor for tensor, _ in parts}
    sizes = []
    for i, layer in enumerate(layers):
        who = [cls for cls, row in reach.items() if row[i]]
        size = layer.size
        for tensor in layer.parameters if who else ():
            found = [parts[tensor, cls] for cls in who if (tensor, cls) in parts] if tensor in cut else []
            if found and len(found) == len(who):
                length = found[0].length
                places = merge_ranges(places for part in found for places in part.ranges)
                size -= prod(shapes[tensor]) // length * (length - sum(stop - first for first, stop in places))
        sizes.append(size)
    return tuple(sizes)


def planned_noised_sizes(plan: StepPlan, shapes: Shapes) -> tuple[int, ...]:
    """The same of a plan; `shapes` from the model or from `LayerStack.shapes`."""
    reach = {entry.name: [c > 0 for c in row] for entry, row in zip(plan.classes, plan.clip, strict=True)}
    return noised_sizes(plan.layers, reach, plan.slices, shapes)
