"""Losses by name, each reduced to one number per example whatever the shape of the output."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from lamina.cli import named
from lamina.errors import EngineError, PlanError


class PerExample(nn.Module, ABC):
    """loss[n] = mean over all other axes of ℓ(output[n], y[n]).

    Sums over the batch never occur, so a contribution's loss depends on that contribution alone. Messages name
    shapes without the first axis: how many examples were drawn is nobody's business. A module, so that its
    arguments are part of what a run was told and a replayed segment is compared by them.
    """

    takes: tuple[str, ...] = ()

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        unknown = [name for name in arguments if name not in self.takes]
        if unknown:
            raise PlanError(
                "cli.loss-no-argument",
                f"loss '{self.title}' has no argument '{unknown[0]}'",
                f"it takes {', '.join(self.takes) or 'none'}",
            )
        self.arguments = dict(arguments)
        self.__name__ = self.title  # by which the rehearsal knows losses that need class numbers

    @property
    def title(self) -> str:
        return next((name for name, kind in LOSSES.items() if kind is type(self)), type(self).__name__)

    def forward(self, output: Any, y: Any) -> Tensor:
        output, y = self._tensor("the model's output", output), self._tensor("y", y)
        if not output.dim() or not y.dim() or len(output) != len(y):
            raise EngineError(
                "cli.loss-output-not",
                f"loss '{self.title}': output and y do not have the same first axis",
                "give it one row per example",
            )
        losses = self.elementwise(output, y)
        return losses if losses.dim() == 1 else losses.flatten(1).mean(1)

    @abstractmethod
    def elementwise(self, output: Tensor, y: Tensor) -> Tensor:
        """The loss before anything is averaged."""

    def _tensor(self, what: str, value: Any) -> Tensor:
        if isinstance(value, Tensor):
            return value
        raise EngineError(
            "cli.loss-not-tensor",
            f"loss '{self.title}': {what} is a {type(value).__name__}, not a tensor",
            'write your own, package.module:function of (output, y), and name it: loss = "package.module:function"',
        )

    def _alike(self, output: Tensor, y: Tensor) -> Tensor:
        """y in the shape and type of the output; axes of length 1 do not matter, anything else does."""
        if _inner(output) != _inner(y):
            raise EngineError(
                "cli.loss-model-gives",
                f"loss '{self.title}': the model gives {_shape(output)} per example, y is {_shape(y)}",
                "make the last layer as wide as y",
            )
        return y.reshape(output.shape).to(output.dtype)


class SquaredError(PerExample):
    """(output - y)²"""

    def elementwise(self, output: Tensor, y: Tensor) -> Tensor:
        return (output - self._alike(output, y)) ** 2


class AbsoluteError(PerExample):
    """|output - y|"""

    def elementwise(self, output: Tensor, y: Tensor) -> Tensor:
        return (output - self._alike(output, y)).abs()


class Huber(PerExample):
    """½(output - y)² where that is below `delta`, linear beyond."""

    takes = ("delta",)

    def elementwise(self, output: Tensor, y: Tensor) -> Tensor:
        return F.huber_loss(output, self._alike(output, y), reduction="none", **self.arguments)


class BinaryCrossEntropy(PerExample):
    """Of a logit per label (no sigmoid in the model), y in [0, 1]."""

    def elementwise(self, output: Tensor, y: Tensor) -> Tensor:
        y = self._alike(output, y)
        if bool(((y < 0) | (y > 1)).any()):
            raise EngineError(
                "cli.loss-values-outside",
                f"loss '{self.title}': y has values outside 0 … 1",
                "label the two kinds 0 and 1",
            )
        return F.binary_cross_entropy_with_logits(output, y, reduction="none")


class CrossEntropy(PerExample):
    """Of logits (N, classes, …), class axis second as in torch, against class numbers (N, …) or probabilities.

    -100 marks positions without a label: they count as loss 0, and the mean is still over all positions, so
    that the divisor does not depend on the data.
    """

    takes = ("label_smoothing",)

    def elementwise(self, output: Tensor, y: Tensor) -> Tensor:
        if output.dim() < 2:
            raise EngineError(
                "cli.loss-model-gives-number",
                f"loss '{self.title}': the model gives one number per example, not one per class",
                'end the model with as many outputs as there are classes; for two classes and one output, loss = "bce"',
            )
        if y.is_floating_point():
            if y.shape != output.shape:
                raise EngineError(
                    "cli.loss-shape-per",
                    f"loss '{self.title}': y is {y.dtype} of shape {_shape(y)} per example, not a class number",
                    "give class numbers as integers: y.astype('int64')",
                )
            return F.cross_entropy(output, y.to(output.dtype), reduction="none", **self.arguments)
        return F.cross_entropy(output, self._numbers(output, y), reduction="none", **self.arguments)

    def _numbers(self, output: Tensor, y: Tensor) -> Tensor:
        classes, positions = output.shape[1], output.shape[2:]
        if y.shape[1:] != positions:
            if _inner(y) != tuple(n for n in positions if n != 1):
                raise EngineError(
                    "cli.loss-model-gives",
                    f"loss '{self.title}': the model gives {_shape(output)} per example, y is {_shape(y)}",
                    f"the first of these axes counts classes, so y must be {tuple(positions) or 'one number'}; "
                    "output.transpose(1, 2) if the classes come last",
                )
            y = y.reshape(len(y), *positions)
        y = y.long()
        if bool((((y < 0) | (y >= classes)) & (y != -100)).any()):
            raise EngineError(
                "cli.loss-class-numbers",
                f"loss '{self.title}': y has class numbers outside 0 … {classes - 1}",
                "number the classes from 0, and give the model one output for each of them",
            )
        return y


LOSSES: dict[str, type[PerExample]] = {
    "cross_entropy": CrossEntropy,
    "bce": BinaryCrossEntropy,
    "mse": SquaredError,
    "l1": AbsoluteError,
    "huber": Huber,
}


def loss(name: str, arguments: Mapping[str, Any], *, beside: Any = None) -> Any:
    """A loss by its built-in name, or `package.module:name`: a function of (output, y), or what makes one.

    A class, and anything that is given arguments, is called once to make the loss.
    """
    if name in LOSSES:
        return LOSSES[name](**arguments)
    found = named.find(name, "loss", beside=beside, built_in=tuple(LOSSES))
    if isinstance(found, type) or arguments:
        found = named.call(found, f"loss '{name}'", arguments)
    if not callable(found):
        raise PlanError(
            "cli.loss", f"loss '{name}' is a {type(found).__name__}", "name a function of (output, y)"
        )
    return found


def _inner(t: Tensor) -> tuple[int, ...]:
    """The shape of one example without axes of length 1."""
    return tuple(n for n in t.shape[1:] if n != 1)


def _shape(t: Tensor) -> str:
    return str(tuple(t.shape[1:])) if t.dim() > 1 else "one number"
