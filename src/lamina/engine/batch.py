"""`Batch`, `rows`, `examples`: which example and which row of an activation belongs to which contribution."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lamina import validate
from lamina.errors import EngineError, OwnershipError

_BY_HAND = 1 << 40  # above every number of a step


class Draw:
    """One draw of a sampler: what is made from a batch (parts, copies with another x) carries the same.

    `seeded` is whether the coins came from a number that somebody chose; `ranks` over how many processes it is divided,
    and `rank` which of them has this part; `step` the number of the sample, or of a batch made by hand that is divided a
    checksum, by which ranks see that they divide the same one; `turn` whose turn it was, of how many (correlated noise).
    """

    def __init__(
        self, *, seeded: bool = False, ranks: int = 1, rank: int = 0, step: int = -1, turn: tuple[int, int] = (0, 1)
    ) -> None:  # fmt: skip
        self.seeded, self.ranks, self.rank, self.step, self.turn = seeded, ranks, rank, step, turn
        self._divided: dict[tuple[int, int], Draw] = {}

    def divided(self, rank: int, ranks: int, step: int) -> Draw:
        """The same draw, of which this process has the part of one rank."""
        if ranks == 1:
            return self
        made = Draw(seeded=self.seeded, ranks=ranks, rank=rank, step=step, turn=self.turn)
        return self._divided.setdefault((rank, ranks), made)


@dataclass(frozen=True, eq=False)
class Batch:
    """One sampled batch.

    `x`, `y`   tensors (or tuples and dicts of tensors) whose first axis counts examples
    `unit[n]`  the contribution (0 … P-1) of example n; default: every example is its own
    `cls[u]`   the index of contribution u's class in the plan; default: class 0
    `weight[n]` the weight of example n inside its contribution; 0 marks padding
    `scale[u]` in (0, 1]: thresholds of contribution u are its class's times this; default: 1
    `ceiling[u]` > 0: the largest norm that contribution u's clipped gradient may have; default: no limit of its own

    A contribution's gradient is the weighted mean over its examples, clipped once. `len` counts
    contributions, and may be 0. `first` and `last` tell the engine where a step begins and ends.
    `classified` is False where no class was given: a plan of several classes refuses such a batch.
    `plain` is True where every example is a contribution of its own, of weight 1.
    `draw` is charged once: another step needs another draw. `places` are those of the contributions in their draw, and not
    to be given: parts of one step that share a place are refused.
    """

    x: Any
    y: Any = None
    unit: Tensor | None = None
    cls: Tensor | None = None
    weight: Tensor | None = None
    scale: Tensor | None = None
    ceiling: Tensor | None = None
    first: bool = True
    last: bool = True
    draw: Draw = field(default_factory=Draw, repr=False)
    places: range | None = field(default=None, repr=False)
    classified: bool = field(init=False, default=True)
    plain: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        n = self.examples
        unit, units = _check_integers("unit", self.unit, n, default=lambda: torch.arange(n)), n
        if self.unit is not None:
            units = len(torch.unique(unit))
        if self.unit is not None and n and units != int(unit.max()) + 1:
            problem = f"unit has {units} different numbers up to {int(unit.max())}: some are missing"
            remedy = "number contributions 0 … P-1: torch.unique(ids, return_inverse=True)[1]"
            raise EngineError("engine.unit-has-gaps", problem, remedy)
        if self.cls is not None and len(self.cls) != units:
            problem = f"cls has {len(self.cls)} entries for {units} contributions"
            raise EngineError("engine.cls-wrong-length", problem, "give one class per contribution, not per example")
        places = range(units) if self.places is None else self.places
        if len(places) != units:
            problem = f"the batch has {units} contributions, and was made from a batch of {len(places)}"
            remedy = "change x and y, and leave contributions as they are"
            raise EngineError("engine.batch-of-other-size", problem, remedy)
        object.__setattr__(self, "places", places)
        object.__setattr__(self, "classified", self.cls is not None or units == 0)
        cls = _check_integers("cls", self.cls, units, default=lambda: torch.zeros(units, dtype=torch.long))
        weight = torch.ones(n) if self.weight is None else torch.as_tensor(self.weight, dtype=torch.float32).cpu()
        object.__setattr__(self, "plain", self.unit is None and self.weight is None)
        if self.weight is not None and (
            weight.shape != (n,) or not bool(torch.isfinite(weight).all() and (weight >= 0).all())
        ):
            problem = (
                f"weight has shape {tuple(weight.shape)} for {n} examples, or a value that is negative or not finite"
            )
            remedy = "give one weight >= 0 per example; 0 marks padding"
            raise EngineError("engine.weight-out-of-range", problem, remedy)
        scale = None if self.scale is None else _check_limits("scale", self.scale, units, most=1.0)
        ceiling = None if self.ceiling is None else _check_limits("ceiling", self.ceiling, units, most=math.inf)
        for name, value in (("unit", unit), ("cls", cls), ("weight", weight), ("scale", scale), ("ceiling", ceiling)):
            object.__setattr__(self, name, value)

    @property
    def examples(self) -> int:
        """The number of examples, padding included: the first axis of every tensor in x and y."""
        sizes = {t.shape[0] if t.dim() else -1 for t in pytree.tree_leaves((self.x, self.y)) if isinstance(t, Tensor)}
        if not sizes:
            problem = f"x is a {type(self.x).__name__} without tensors"
            raise EngineError("engine.batch-without-tensors", problem, "use torch.from_numpy(x) or torch.tensor(x)")
        if len(sizes) != 1 or -1 in sizes:
            problem = f"the tensors of x and y have first axes of lengths {sorted(sizes)}"
            raise EngineError("engine.first-axes-differ", problem, "make examples the first axis of every tensor")
        return sizes.pop()

    def __len__(self) -> int:
        assert self.cls is not None
        return len(self.cls)

    def split(self, parts: int) -> Iterator[Batch]:
        """Cut into at most `parts` microbatches. A contribution is never cut in two.

        How a batch is cut changes neither the clipped sum nor the noise: nothing is released before the
        part whose `last` is true, and by then all of it is there.
        """
        validate.whole(EngineError, "engine.split-parts", parts=parts)
        assert self.unit is not None
        parts = max(1, min(parts, len(self)))
        bounds = [len(self) * i // parts for i in range(parts + 1)]
        for i, (low, high) in enumerate(pairwise(bounds)):
            mine = (self.unit >= low) & (self.unit < high)
            ends = {"first": self.first and i == 0, "last": self.last and i == parts - 1}
            yield self._part(mine, slice(low, high), self.unit - low, **ends)

    def _part(self, examples_: Tensor, units: slice, unit: Tensor, **changes: Any) -> Batch:
        """Some examples and contributions; `unit` are the new numbers of contributions, by example of the whole."""
        assert self.cls is not None and self.weight is not None and self.places is not None
        rows = examples_.nonzero().flatten()
        x, y = take_rows((self.x, self.y), rows)
        return Batch(
            x,
            y,
            unit=unit[rows],
            cls=self.cls[units] if self.classified else None,
            weight=self.weight[rows],
            scale=None if self.scale is None else self.scale[units],
            ceiling=None if self.ceiling is None else self.ceiling[units],
            places=self.places[units],
            **{"first": self.first, "last": self.last, "draw": self.draw, **changes},
        )

    def to(self, device: torch.device | str) -> Batch:
        """The same batch with x and y on a device. What belongs to whom is always kept on the CPU."""
        x, y = to_device((self.x, self.y), device)
        weight, unit = (None, None) if self.plain else (self.weight, self.unit)
        return replace(self, x=x, y=y, unit=unit, weight=weight, cls=self.cls if self.classified else None)

    def shard(self, rank: int, size: int) -> Batch:
        """The contributions rank, rank + size, … of the batch: the part of one process where several take the step."""
        validate.whole(EngineError, "engine.shard", size=size)
        validate.whole(EngineError, "engine.shard", least=0, most=size - 1, rank=rank)
        if self.draw.ranks > 1:
            problem = f"the batch is the part of rank {self.draw.rank} of {self.draw.ranks} already"
            raise EngineError("engine.batch-divided-already", problem, "give it to engine.backward as it is")
        assert self.unit is not None
        drawn = self.draw.step
        for tensor in [self.unit, *pytree.tree_leaves((self.x, self.y))] if drawn < 0 else ():
            if isinstance(tensor, Tensor):
                raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
                drawn = _BY_HAND | zlib.crc32(raw.numpy().data, max(drawn, 0) & 0xFFFFFFFF)
        draw = self.draw.divided(rank, size, drawn)
        return self._part(self.unit % size == rank, slice(rank, None, size), self.unit // size, draw=draw)

    def views(self, count: int) -> Batch:
        """The same batch with every example `count` times in a row, for as many random views of it.

        Augmentation multiplicity (De et al., "Unlocking high-accuracy differentially private image classification through
        scale", 2022): the gradient of a contribution is the mean over its views, clipped once, so neither C nor the noise
        changes.
        """
        validate.whole(EngineError, "engine.views", views=count)
        if count == 1:
            return self
        assert self.unit is not None and self.weight is not None
        rows = torch.arange(self.examples).repeat_interleave(count)
        x, y = take_rows((self.x, self.y), rows)
        cls = self.cls if self.classified else None
        return replace(self, x=x, y=y, unit=self.unit[rows], cls=cls, weight=self.weight[rows])


def _check_limits(name: str, value: Any, size: int, *, most: float) -> Tensor:
    given = torch.as_tensor(value, dtype=torch.float64, device="cpu")
    if given.shape != (size,) or not bool(((given > 0) & (given <= most)).all()):
        problem = f"{name} has shape {tuple(given.shape)} for {size} contributions, or a value outside (0, {most:g}]"
        raise EngineError("engine.limit-out-of-range", problem, f"give one {name} in that range per contribution")
    return given


def check_is_batch(batch: Any) -> Batch:
    """Refuse anything but a `Batch`."""
    if not isinstance(batch, Batch):
        problem = f"the batch is a {type(batch).__name__}"
        raise EngineError("engine.not-a-batch", problem, "pass a lamina.Batch(x, y, cls=…)")
    return batch


def model_device(model: torch.nn.Module) -> torch.device:
    """Where a model takes its input: the device of its first parameter."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def to_device(tree: Any, device: torch.device | str) -> Any:
    return pytree.tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, tree)


def take_rows(tree: Any, rows: Tensor) -> Any:
    return pytree.tree_map(lambda t: t[rows] if isinstance(t, Tensor) else t, tree)


def _check_integers(name: str, value: Any, size: int, default: Callable[[], Tensor]) -> Tensor:
    if value is None:
        return default()
    try:
        value = torch.as_tensor(value)
    except (TypeError, ValueError):
        remedy = "turn class names into indices by plan.index('name')"
        raise EngineError("engine.indices-not-integers", f"{name} does not consist of integers", remedy) from None
    if value.dtype.is_floating_point or value.dtype == torch.bool or value.shape != (size,):
        problem = f"{name} has dtype {value.dtype} and shape {tuple(value.shape)}, must be {size} integers"
        raise EngineError("engine.indices-wrong-shape", problem, f"give {name} as a one-dimensional integer tensor")
    numbers: Tensor = value.long().cpu()
    if size and int(numbers.min()) < 0:
        raise EngineError("engine.index-negative", f"{name} contains {int(numbers.min())}", "count from 0")
    return numbers


_example_of_row: ContextVar[Tensor | None] = ContextVar("lamina_rows", default=None)
_example_count: ContextVar[int | None] = ContextVar("lamina_examples", default=None)


@contextmanager
def rows(owner: Tensor) -> Iterator[None]:
    """Say which example of the batch each leading row belongs to, for the layers called inside.

    Needed where the leading axis is not the batch's: flattened tokens, windows, the tokens that were routed to one
    expert. `owner[r]` is the example's index in the batch; -1 marks padding.

    >>> import torch, lamina
    >>> tokens = torch.randn(4 * 16, 8)                        # 4 examples of 16 tokens, flattened
    >>> with lamina.rows(torch.arange(4).repeat_interleave(16)):
    ...     y = torch.nn.Linear(8, 8)(tokens)
    """
    if owner.dim() != 1 or owner.dtype.is_floating_point or owner.dtype == torch.bool:
        problem = f"rows() got a tensor of shape {tuple(owner.shape)} and dtype {owner.dtype}"
        remedy = "give one integer per row: the index of its example in the batch"
        raise OwnershipError("engine.rows-not-integers", problem, remedy)
    token = _example_of_row.set(owner.detach().long().cpu())
    try:
        yield
    finally:
        _example_of_row.reset(token)


@contextmanager
def examples(count: int) -> Iterator[None]:
    """Say how many examples a forward pass carries, where its first argument does not show it."""
    token = _example_count.set(count)
    try:
        yield
    finally:
        _example_count.reset(token)


def current_rows() -> Tensor | None:
    return _example_of_row.get()


def current_examples() -> int | None:
    return _example_count.get()


@dataclass(frozen=True, eq=False)
class RowLayout:
    """The owner of every leading row of an activation.

    `owner[r]` is the contribution of row r, or -1 where the row is padding. `fold` brings a tensor
    with R leading rows into the form (P contributions, m rows each, …): the m rows then act like m
    more sequence positions of one sample (docs/theory.md, "Unit"). Padding and filler rows are set
    to zero with `where`, never by multiplication, because 0 · NaN is NaN.
    """

    owner: Tensor
    units: int

    @classmethod
    def one_each(cls, owner: Tensor) -> RowLayout:
        """Every row a contribution of its own, in order."""
        made = cls(owner, len(owner))
        vars(made).update(plain=len(owner) > 0, _per_unit=min(1, len(owner)), _padding=None)
        return made

    @property
    def rows(self) -> int:
        return len(self.owner)

    @cached_property
    def plain(self) -> bool:
        """Whether every row is a contribution of its own, in order."""
        return self._per_unit == 1 and self._padding is None

    @cached_property
    def _per_unit(self) -> int:
        """m if row r belongs to contribution r // m for every r, else 0."""
        if self.units == 0 or self.rows % self.units or self.rows == 0:
            return 0
        m = self.rows // self.units
        plain = torch.arange(self.units)
        if m > 1:
            plain = plain.repeat_interleave(m)
        return m if torch.equal(torch.where(self.owner < 0, plain, self.owner), plain) else 0

    @cached_property
    def _padding(self) -> Tensor | None:
        mask = self.owner < 0
        return mask if bool(mask.any()) else None

    @cached_property
    def _index(self) -> tuple[Tensor, Tensor]:
        """For a ragged layout: row numbers (P, M) and where they are filler."""
        counts = torch.bincount(self.owner[self.owner >= 0], minlength=self.units)
        width = max(1, int(counts.max()) if self.units else 1)
        order = torch.argsort(self.owner, stable=True)
        order = order[self.owner[order] >= 0]
        owner = self.owner[order]
        start = torch.cumsum(counts, 0) - counts
        index = torch.zeros(self.units, width, dtype=torch.long)
        filler = torch.ones(self.units, width, dtype=torch.bool)
        place = torch.arange(len(order)) - start[owner]
        index[owner, place] = order
        filler[owner, place] = False
        return index, filler

    @cached_property
    def segments(self) -> tuple[Tensor, Tensor]:
        """Row numbers in the order of their contributions, padding left out, and where each contribution begins (P + 1)."""
        if self._per_unit and self._padding is None:
            return torch.arange(self.rows), torch.arange(0, self.rows + 1, self._per_unit)
        kept = (self.owner >= 0).nonzero().flatten()
        owner, order = torch.sort(self.owner[kept], stable=True)
        return kept[order], torch.searchsorted(owner, torch.arange(self.units + 1))

    @cached_property
    def most_rows(self) -> int:
        """The number of rows of the contribution that has most, or 1."""
        return self._per_unit or max(1, int(self.segments[1].diff().max()) if self.units else 1)

    def fold(self, t: Tensor) -> Tensor:
        """(R, …) → (P, m, …)."""
        if self._per_unit:
            if self._padding is not None:
                t = t.masked_fill(self._padding.view(-1, *[1] * (t.dim() - 1)).to(t.device), 0)
            return t.unsqueeze(1) if self._per_unit == 1 else t.reshape(self.units, self._per_unit, *t.shape[1:])
        index, filler = self._index
        if self.rows == 0:
            return t.new_zeros(self.units, 1, *t.shape[1:])
        return t[index.to(t.device)].masked_fill(filler.view(*filler.shape, *[1] * (t.dim() - 1)).to(t.device), 0)

    def sum_rows(self, t: Tensor) -> Tensor:
        """(R, …) → (P, …): the sum over a contribution's rows."""
        return t if self.plain else self.fold(t).sum(1)

    def through(self, example_of_row: Tensor) -> RowLayout:
        """The layout of rows that each come from one example of this layout (-1: from none)."""
        known = example_of_row >= 0
        owner = torch.where(known, self.owner[example_of_row.clamp(min=0)], -1)
        return RowLayout(owner, self.units)
