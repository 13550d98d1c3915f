"""`Rule`: what the engine must know about one kind of layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lamina.engine.layout import Layout
from lamina.engine.unitgrad import UnitGrad
from lamina.errors import OwnershipError

NOTHING = torch.empty(0)  # the input of a rule that has none

Kept = Sequence[Tensor]
Params = Sequence[Tensor | None]


class Rule(ABC):
    """The computation of a layer and the shape of its per-contribution gradient.

    A rule is a pure description: it holds the geometry of its module (strides, groups, …), never
    data. The engine's one autograd Function calls `run` forward and, backward, `input_grad` and
    `unit_grads`. The leading axis of the input, of the output and of `g` counts rows.
    """

    @abstractmethod
    def run(self, x: Tensor, params: Params) -> tuple[Tensor, Kept]:
        """The output, and what the backward pass needs of the input."""

    @abstractmethod
    def input_grad(self, kept: Kept, params: Params, g: Tensor) -> Tensor:
        """The gradient of the input, as without privacy."""

    @abstractmethod
    def unit_grads(
        self, kept: Kept, g: Tensor, layout: Layout, need: Sequence[bool]
    ) -> list[UnitGrad | None]:
        """One `UnitGrad` per parameter, None where it is not needed."""


class Apply(Protocol):
    """Run a rule on the module's own parameters, seen by the engine."""

    def __call__(self, rule: Rule, x: Tensor, *names: str) -> Tensor: ...


class Site(ABC):
    """What replaces the `forward` of one module while the engine is attached.

    `parameters` lists the module's own parameters, by local name, that this site covers.
    """

    parameters: tuple[str, ...]

    @abstractmethod
    def forward(self, apply: Apply, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, with every covered parameter used through `apply`."""


def autocast(*tensors: Tensor | None) -> list[Tensor | None]:
    """What autocast would do to the arguments of a matrix product, done before they are kept."""
    if not torch.is_autocast_enabled("cpu"):
        return list(tensors)
    dtype = torch.get_autocast_dtype("cpu")
    return [t.to(dtype) if t is not None and t.dtype == torch.float32 else t for t in tensors]


def demand_rank(x: Tensor, least: int, what: str) -> None:
    """Refuse an input without a leading axis of rows."""
    if x.dim() < least:
        raise OwnershipError(
            "engine.got-input-shape",
            f"{what} got an input of shape {tuple(x.shape)}, which has no leading axis of examples",
            "keep the batch axis: x.unsqueeze(0) for one example",
        )
