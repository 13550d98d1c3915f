"""`Sums`: the clipped sums of a step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.engine.noise.mechanism import COUNTS, NO_NOISE, StepNoise, sum_dtype

if TYPE_CHECKING:
    from lamina.engine.execute.collectors import JointCollector


class Sums(dict[str, Tensor]):
    """Clipped gradients, added up by tensor. Each sum begins as 0 when it is first asked for. Nothing here is noised.

    noise     of the step; with grids, whole units of them are added up
    streamed  whether each sum is given away as soon as it is complete
    examples  how many were added, where the clipper counts them
    later     adds a layer when it is asked to, if the clipper waited for the whole norm
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], noise: StepNoise = NO_NOISE, memory: SumMemory | None = None
    ) -> None:
        super().__init__()
        self.tensors, self.noise, self.grids, self._memory = tensors, noise, noise.grids, memory or SumMemory({})
        self.streamed = False
        self.examples = 0
        self.later: JointCollector | None = None

    def __missing__(self, name: str) -> Tensor:
        p = self.tensors[name]
        dtype = torch.int64 if name in self.grids else sum_dtype(p.dtype)
        self[name] = made = self._memory.zeros(name, p, dtype)
        return made

    def take(self, name: str) -> Tensor:
        """A sum that nobody adds to any more."""
        found = self[name]
        del self[name]
        return found

    def whole(self) -> dict[str, Tensor]:
        """The sum of every tensor."""
        return {name: self[name] for name in self.tensors}

    @property
    def counts(self) -> Tensor | None:
        """(L,) Σ (bit - ½) over contributions, where a rule of the plan asks for it."""
        return self.get(COUNTS)

    def adopt(self, made: Mapping[str, Tensor]) -> None:
        """Add sums that were computed elsewhere, and whose memory nobody else uses."""
        begun: Sequence[str] = [name for name in made if name in self]
        self.update({name: t for name, t in made.items() if name not in self})
        if begun:
            torch._foreach_add_([self[name] for name in begun], [made[name] for name in begun])


_MIN_KEPT_ELEMENTS = 1 << 12  # a few pages
_MAX_SMALL_BYTES, _MAX_KEPT_BYTES = 6 << 20, 4 << 20  # of a small model; of what is kept of its sums
_OWN_REFERENCES = 3  # to a storage: `_kept`, the argument of `_free`, and that of getrefcount


class SumMemory:
    """The memory of released sums of a small model, used again once nobody holds them.

    Fresh pages cost 1 ms of a step of 23 ms (`mlp_b256` of the benchmark). A large model keeps none: a step needs memory
    for its activations, too, and takes longer.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.keeps: set[str] = set()
        left = _MAX_KEPT_BYTES
        if sum(p.nbytes for p in tensors.values()) <= _MAX_SMALL_BYTES:
            for name, p in sorted(tensors.items(), key=lambda item: -item[1].numel()):
                if p.nbytes <= left and p.numel() >= _MIN_KEPT_ELEMENTS and p.is_cpu:
                    self.keeps.add(name)
                    left -= p.nbytes
        self._kept: dict[str, tuple[torch.UntypedStorage, torch.dtype, torch.Size, tuple[int, ...]]] = {}
        self._holders: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", lambda _: 2)

    def _free(self, storage: torch.UntypedStorage) -> bool:
        """Whether neither this process (as a tensor or as the storage itself) nor another one holds it."""
        return (
            self._holders(storage._cdata) == 1
            and sys.getrefcount(storage) <= _OWN_REFERENCES
            and not storage.is_shared()
        )

    def zeros(self, name: str, p: Tensor, dtype: torch.dtype) -> Tensor:
        """A sum for a tensor, 0."""
        kept = self._kept.get(name)
        if kept is not None and kept[1:3] == (dtype, p.shape) and self._free(kept[0]):
            return torch.empty(0, dtype=dtype).set_(kept[0], 0, p.shape, kept[3]).zero_()
        made = torch.zeros_like(p, dtype=dtype, memory_format=torch.contiguous_format)
        if name in self.keeps and type(made) is Tensor:
            self._kept[name] = made.untyped_storage(), dtype, p.shape, made.stride()
        return made
