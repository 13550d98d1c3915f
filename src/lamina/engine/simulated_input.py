"""Simulated examples for the probe: shapes and types of the data, values that nobody contributed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

IGNORED = -100  # the label that losses of torch ignore
_COUNTS = (6, 7, 9, 11)  # the first that is no length of a sequence: which axis is the batch's is then clear
_COPIES = ("contiguous", "clone", "long", "int", "to", "type", "reshape", "flatten", "__getitem__", "pad", "repeat",
           "roll", "flip", "clamp", "masked_fill", "where")  # fmt: skip


class WatchLookups(TorchFunctionMode):
    """Notes how many entries the smallest table has that a tensor of whole numbers is looked up in.

    Tables are embeddings, and the outputs from which a loss takes the entry of a label (cross entropy, `gather`,
    `output[rows, y]`). `sizes` is by leaf of (x, y). Tensors are known by their storage, copies of them too. What is
    computed from them is not followed.
    """

    def __init__(self, tree: Any) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.numbers: set[int] = set()  # the leaves that are turned into floating point
        self._looked_up_by: dict[int, set[str]] = {}
        whole = ((i, t) for i, t in enumerate(pytree.tree_leaves(tree)) if isinstance(t, Tensor) and _is_whole(t))
        self._known: dict[int | None, tuple[int, Tensor]] = {_storage(t): (i, t) for i, t in whole}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _COPIES and args and isinstance(out, Tensor) and _is_whole(out):
            source = next((known for a in args if (known := self._of(a)) is not None), None)
            if source is not None and _storage(out) not in (None, *self._known):
                self._known[_storage(out)] = source, out  # kept, so that its storage is not used again
        if name in ("float", "to", "type", "double") and isinstance(out, Tensor) and out.is_floating_point():
            self.numbers |= {leaf for leaf in (self._of(args[0]),) if leaf is not None}
        looked_up, table = _lookup(name, args, kwargs)
        leaf = self._of(looked_up)
        if leaf is not None and table > 0:
            self.sizes[leaf] = min(table, self.sizes.get(leaf, table))
            ignores = name in ("cross_entropy", "nll_loss") and kwargs.get("ignore_index", IGNORED) == IGNORED
            self._looked_up_by.setdefault(leaf, set()).add("ignores" if ignores and len(args) < 5 else name)
        return out

    @property
    def labels(self) -> set[int]:
        """The leaves that are only looked up by losses that ignore -100."""
        return {leaf for leaf, names in self._looked_up_by.items() if names == {"ignores"}}

    @property
    def ids(self) -> set[int]:
        """The leaves that are only looked up in embeddings."""
        return {leaf for leaf, names in self._looked_up_by.items() if names <= {"embedding", "embedding_bag"}}

    def simulate(self, x: Any, y: Any, count: int) -> tuple[Any, Any]:
        """`simulate` with what was watched."""
        return simulate(x, y, count, self.sizes, ids=self.ids, labels=self.labels, numbers=self.numbers)

    def _of(self, t: Any) -> int | None:
        known = self._known.get(_storage(t)) if isinstance(t, Tensor) and _is_whole(t) else None
        return None if known is None else known[0]


def _lookup(name: str, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, int]:
    """What a call looks up, and the size of the table that it looks it up in; (None, 0) of other calls."""

    def given(place: int, key: str) -> Any:
        return args[place] if len(args) > place else kwargs.get(key)

    first = given(0, "input")
    if name in ("embedding", "embedding_bag"):
        return first, len(given(1, "weight"))
    if name in ("cross_entropy", "nll_loss", "multi_margin_loss"):
        return given(1, "target"), first.shape[min(1, first.dim() - 1)]
    if name in ("gather", "take_along_dim", "index_select", "scatter", "scatter_"):
        pair = given(1, "dim"), given(2, "index")
        index, dim = pair if name == "take_along_dim" and isinstance(pair[0], Tensor) else pair[::-1]
        return index, first.shape[dim] if isinstance(dim, int) else 0
    if name == "one_hot":
        return first, given(1, "num_classes") or 0
    if name == "__getitem__" and isinstance(args[1], Tensor):
        return args[1], len(first)
    at = args[1] if name == "__getitem__" else ()
    if isinstance(at, tuple) and at and all(isinstance(i, Tensor | slice) for i in at):
        place = next((i for i, t in reversed(list(enumerate(at))) if isinstance(t, Tensor)), 0)
        return at[place], first.shape[place]
    return None, 0


def simulate(
    x: Any, y: Any, count: int, tables: Mapping[int, int] | None = None, *,
    ids: Collection[int] = (), labels: Collection[int] = (), numbers: Collection[int] = (),
) -> tuple[Any, Any]:  # fmt: skip
    """`count` examples with the shapes and types of (x, y); of their values nothing is read.

    floating point  normal; as target uniform in 0 … 1
    whole numbers   uniform below the size of their table, where `tables` has it by leaf; otherwise 0 or 1. Without
                    `tables` 0: every table has that entry. Of type uint8, and of `numbers`, up to 255. Perhaps lengths: 1, one of them 2
    sequences       end with padding, 0 in `ids`, and -100 in `labels`, in all examples but the last but one
    masks           1, then 0, the later examples longer: of type bool, or called so
    """
    generator = torch.Generator().manual_seed(0)

    def one(leaf: int, path: Any, t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        shape, label = (count, *t.shape[1:]), path[0] == pytree.SequenceKey(1)
        if not label and ("mask" in pytree.keystr(path).lower() or t.dtype == torch.bool):
            return _masks(shape).to(t.dtype)
        if t.is_floating_point():
            make = torch.rand if label else torch.randn
            return make(shape, generator=generator, dtype=torch.float32).to(t.dtype)
        if not label and t.dim() == 1 and tables is not None and leaf not in tables:
            lengths = t.new_ones(shape)  # perhaps
            lengths[-2] = 2 if longest > 1 else 1
            return lengths
        unknown = 256 if t.dtype == torch.uint8 or (leaf in numbers and not label) else 2
        table = 1 if tables is None and _is_whole(t) else (tables or {}).get(leaf, unknown)
        made = torch.randint(table, shape, generator=generator).to(t.dtype)
        if table == unknown == 256:
            made[torch.arange(count) != count - 2] //= 2  # the largest is not in every half
        if (leaf in ids or leaf in labels) and made.dim() == 2 and table > 2 and shape[1] > 1:
            if leaf in ids:
                made[made == 0] = 1
            end, last_but_one = made[:, (shape[1] + 1) // 2 :], made[-2].clone()
            end[:] = 0 if leaf in ids else IGNORED
            made[-2] = last_but_one
        return made

    longest = min((t.shape[1] for t in pytree.tree_leaves(x) if isinstance(t, Tensor) and t.dim() > 1), default=1)
    paths, spec = pytree.tree_flatten_with_path((x, y))
    made: tuple[Any, Any] = pytree.tree_unflatten([one(i, path, t) for i, (path, t) in enumerate(paths)], spec)
    return made


def _masks(shape: tuple[int, ...]) -> Tensor:
    """Along the last axis some 1, then some 0: in every example both, in the last one most 1."""
    count, length = shape[0], shape[-1] if len(shape) > 1 else 1
    ones = 1 + torch.arange(count) * max(length - 2, 0) // (count - 1)
    masks = torch.arange(length) < ones[:, None]
    return masks.view(count, *[1] * (len(shape) - 2), -1).expand(shape).clone() if len(shape) > 1 else masks[:, 0]


def simulate_for(losses_of: Callable[[Any, Any], Tensor], x: Any, y: Any) -> tuple[Any, Any]:
    """Simulated examples like (x, y) for a function that computes losses: it is watched on the first of them."""
    count = simulated_count(x, y)
    given = simulate(x, y, count)
    watch = WatchLookups(given)
    with watch:
        losses_of(*given)
    return watch.simulate(x, y, count)


def simulated_count(x: Any, y: Any) -> int:
    tensors = (t for t in pytree.tree_leaves((x, y)) if isinstance(t, Tensor))
    lengths = {size for t in tensors if t.dim() > 2 or not t.is_floating_point() for size in t.shape[1:]}
    return next((n for n in _COUNTS if n not in lengths), _COUNTS[0])


def _is_whole(t: Tensor) -> bool:
    return not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)


def _storage(t: Tensor) -> int | None:
    return None if torch._C._functorch.is_functorch_wrapped_tensor(t) else t.untyped_storage().data_ptr()
