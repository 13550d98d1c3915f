"""`TargetCheck`: which examples model and loss can take, each judged by itself against a public output."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from lamina.engine.batch import Batch, model_device, to_device
from lamina.engine.probe import preserve_global_generators
from lamina.run.corpus import Corpus
from lamina.run.example_sources import ExampleSource, Rows

MAX_ROWS, MAX_NUMBERS = 256, 1 << 22  # of the public output, and of the input that it is made from
_ROWS_MORE = 32  # the loss is tried on a multiple of these rows
_SIZES_KEPT = 3  # sizes for which public values are kept
TARGETS_NOT_COMPARED = (
    "targets were not compared with the model's output: model or loss cannot be run on inputs and targets that are all "
    "0, or all 1. A target that the loss cannot take will stop the run"
)


class TargetCheck:
    """Finds examples that model and loss cannot take, each by itself: a fact about its contribution and nobody else.

    targets    y is finite, and the loss of a public output against it can be computed, on the CPU (on an accelerator a
               label out of range ends the process); for BCE it is in 0 … 1
    token ids  lie inside every table in which they are looked up

    The public output is the model's own for an input that is 0 (or 1) throughout, so only the answer depends on private
    data. Several examples are tried at once, and each alone where that fails: the loss is per example, so the answer is
    the same. Where model or loss cannot be run on public values, the answer of the loss is `unknown`.
    """

    def __init__(
        self, model: nn.Module, loss_fn: Callable[[Any, Any], Any], output_of: Callable[[Any], Any],
        source: ExampleSource,
    ) -> None:  # fmt: skip
        self._loss_fn, self._fill, self._rows, self.unknown = loss_fn, 0, MAX_ROWS, True
        self._public: dict[int, tuple[Any, Any]] = {}  # output and targets, by the number of rows
        self._tables: dict[int, int] = {}
        x, y = source.fetch(np.empty(0, dtype=np.int64))
        device = model_device(model)
        with _quietly(), preserve_global_generators():
            for fill in (0, 1):
                try:
                    with _NoteTables(given := to_device(_filled(x, 1, fill), device)) as noted:
                        one = output_of(given)
                    self._tables = noted.sizes
                    most = max(t.numel() for t in pytree.tree_leaves((one, given)) if isinstance(t, Tensor))
                    self._rows, self._fill = max(1, min(MAX_ROWS, MAX_NUMBERS // most)), fill
                    two = output_of(to_device(_filled(x, 2, fill), device))
                    self._one, self._two = to_device((one, two), "cpu")
                    self._target = to_device(_filled(x if y is None else y, 1, fill), "cpu")
                    self._public.clear()  # of the other value
                    targets = self._public_rows(self._rows)[1]
                except Exception:  # the model is the user's; the rehearsal says what is wrong with it
                    continue
                if self._computes(targets, torch.arange(self._rows)):
                    self.unknown = False
                    break

    def _public_rows(self, count: int) -> tuple[Any, Any]:
        """Output and targets of so many equal examples, from the outputs for one and for two."""

        def repeated(one: Any, two: Any) -> Any:
            if not isinstance(one, Tensor):
                return one
            doubled = [n == 2 * m for m, n in zip(one.shape, two.shape, strict=True)]
            return one.repeat([count if here else 1 for here in doubled])

        if count not in self._public:
            if len(self._public) == _SIZES_KEPT:
                self._public.pop(next(iter(self._public)))
            targets = _filled(self._target, count, self._fill)
            self._public[count] = pytree.tree_map(repeated, self._one, self._two), targets
        return self._public[count]

    def unfit(self, x: Any, y: Any) -> Tensor:
        """(n,) which examples model and loss cannot take. A loss that draws leaves the global generators elsewhere."""
        size = next(len(t) for t in pytree.tree_leaves(x) if isinstance(t, Tensor))
        found = torch.zeros(size, dtype=torch.bool)
        for t in pytree.tree_leaves(y):
            if isinstance(t, Tensor) and t.is_floating_point():
                found |= ~t.isfinite().reshape(size, -1).all(1).cpu()
        for i, t in enumerate(pytree.tree_leaves(x)):
            if (table := self._tables.get(i)) is not None:
                found |= ((t < 0) | (t >= table)).reshape(size, -1).any(1).cpu()
        target = x if y is None else y
        if self.unknown or _shapes(target) != _shapes(self._target):  # augmentation may cut x, where it is the target
            return found
        with _quietly():
            for rows in (~found).nonzero().flatten().split(self._rows):
                if not self._computes(target, rows):
                    found[[int(row) for row in rows if not self._computes(target, row.view(1))]] = True
        return found

    def _computes(self, target: Any, rows: Tensor) -> bool:
        """Whether the loss of the public output can be computed against these rows, and some public ones behind them."""
        output, targets = self._public_rows(min(self._rows, -(-len(rows) // _ROWS_MORE) * _ROWS_MORE))

        def joined(t: Any, public: Any) -> Any:
            if not isinstance(t, Tensor):
                return t
            mine = (t if len(rows) == len(t) else t[rows]).cpu()  # all of them are in order
            return torch.cat([mine, public[len(rows) :]]) if len(public) > len(rows) else mine.clone()

        given = pytree.tree_map(joined, target, targets)
        output = pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), output)  # a loss may write to it
        try:
            with _BinaryTargets():
                self._loss_fn(output, given)
        except Exception:  # of whatever kind: the loss is the user's
            return False
        return True

    def unfit_contributions(self, corpus: Corpus) -> Rows:
        """The eligible contributions, by row, of which model and loss cannot take an example.

        Of data with a version, which nobody wants to be read at every start, the first 1,024 examples are looked at.
        """
        units, most = corpus.eligible, None if corpus.version is None else 1024
        rows, owner = corpus.layout.rows_of(units)[:most], np.repeat(units, corpus.layout.sizes(units))
        found = []
        for start in range(0, len(rows), self._rows):
            with preserve_global_generators():  # a Dataset may draw from them, and a loss
                unfit = self.unfit(*corpus.source.fetch(rows[start : start + self._rows]))
            found.append(owner[start : start + self._rows][unfit.numpy()])
        return np.unique(np.concatenate(found)) if found else units[:0]

    def mask(self, batch: Batch) -> Batch:
        """The batch with an empty slot in place of each contribution of which an example is unfit.

        An empty slot has public values and weight 0: its clipped gradient is exactly 0 in every sum, it counts in no
        choice and no quantile, and the losses of others do not see it. Every batch is judged anew: augmentation, or
        whoever holds the arrays, may have changed what was fit at the start. The caller seeds the generators after it.
        """
        if not len(batch) or not bool((bad := self.unfit(batch.x, batch.y)).any()):
            return batch
        unit, weight = cast(Tensor, batch.unit), cast(Tensor, batch.weight)
        empty = torch.isin(unit, unit[bad])
        x, y = pytree.tree_map_only(
            Tensor, lambda t: t.masked_fill(empty.view(-1, *[1] * (t.dim() - 1)).to(t.device), self._fill),
            (batch.x, batch.y),
        )  # fmt: skip
        return replace(batch, x=x, y=y, weight=torch.where(empty, 0.0, weight))


class _BinaryTargets(TorchFunctionMode):
    """Refuses targets outside 0 … 1 of the one loss for them in torch that does not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.binary_cross_entropy_with_logits and not bool(((args[1] >= 0) & (args[1] <= 1)).all()):
            raise ValueError("targets outside 0 … 1")
        return func(*args, **(kwargs or {}))


@contextmanager
def _quietly() -> Iterator[None]:
    """Without gradients and without warnings."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _filled(tree: Any, rows: int, fill: int) -> Any:
    """As many rows of the same shapes and types, of one value."""
    return pytree.tree_map(lambda t: t.new_full((rows, *t.shape[1:]), fill) if isinstance(t, Tensor) else t, tree)


def _shapes(tree: Any) -> Any:
    """Of one example."""
    return pytree.tree_map(lambda t: t.shape[1:] if isinstance(t, Tensor) else None, tree)


class _NoteTables(TorchFunctionMode):
    """Notes, for each leaf of x, the size of the smallest table in which the leaf itself is looked up.

    Only the lookup counts: the position tables of BART and Whisper are called with ids but look up positions.
    """

    def __init__(self, x: Any) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self._leaves = [(i, t) for i, t in enumerate(pytree.tree_leaves(x)) if isinstance(t, Tensor)]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        looked_up, table = None, None
        if func is F.embedding:
            looked_up, table = [*args, *(kwargs or {}).values()][:2]
        elif func is Tensor.__getitem__ and isinstance(args[0], nn.Parameter):
            table, looked_up = args
        if isinstance(looked_up, Tensor):
            for i, t in self._leaves:
                if (looked_up.data_ptr(), looked_up.numel()) == (t.data_ptr(), t.numel()):
                    self.sizes[i] = min(len(cast(Tensor, table)), self.sizes.get(i, 1 << 62))
        return func(*args, **(kwargs or {}))
