"""`PerExampleLoss`: the losses that RUN.toml names, one number per example, with checks of shapes and labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lamina.errors import EngineError, PlanError

LOSSES: dict[str, Callable[..., Tensor]] = {
    "cross_entropy": F.cross_entropy,
    "bce": F.binary_cross_entropy_with_logits,
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "huber": F.huber_loss,
}
_LOSS_ARGUMENTS = {"cross_entropy": ("label_smoothing",), "huber": ("delta",)}


class PerExampleLoss(nn.Module):
    """loss[n] = mean over all other axes of ℓ(output[n], y[n]), with ℓ from torch.

    Nothing is summed over the batch, so a contribution's loss depends on that contribution alone. Messages give shapes
    without the first axis: how many examples were drawn is secret. It is a module so that its name and arguments are
    part of the run's settings, by which a replayed segment is compared.

    cross_entropy takes logits (N, classes, …), class axis second as in torch, and class numbers (N, …) or probabilities.
    -100 marks positions without a label: they count as loss 0, and the mean is still over all positions, so that the
    divisor does not depend on the data. bce takes a logit per label (no sigmoid in the model), y in [0, 1].
    """

    def __init__(self, name: str, **arguments: Any) -> None:
        super().__init__()
        takes = _LOSS_ARGUMENTS.get(name, ())
        for unknown in arguments.keys() - set(takes):
            problem = f"loss '{name}' takes no argument '{unknown}'"
            raise PlanError("cli.argument-not-known", problem, f"it takes {', '.join(takes) or 'none'}")
        self.name = self.__name__ = name  # the rehearsal recognises losses that need class numbers by __name__
        self.arguments = dict(arguments)

    def forward(self, output: Any, y: Any) -> Tensor:
        for what, value in (("the model's output", output), ("y", y)):
            if not isinstance(value, Tensor):
                problem = f"{what} is a {type(value).__name__}, not a tensor"
                remedy = 'write your own function of (output, y) and name it: loss = "package.module:function"'
                raise self._refusal("cli.loss-input-not-tensor", problem, remedy)
        if not output.dim() or not y.dim() or output.shape[0] != y.shape[0]:
            problem = "output and y differ in their first axis"
            raise self._refusal("cli.loss-rows-differ", problem, "give one row per example")
        target = self._class_numbers(output, y) if self.name == "cross_entropy" else self._target_like(output, y)
        losses = LOSSES[self.name](output, target, reduction="none", **self.arguments)
        return losses if losses.dim() == 1 else losses.flatten(1).mean(1)

    def _target_like(self, output: Tensor, y: Tensor) -> Tensor:
        """y in the shape and type of the output; axes of length 1 do not matter, anything else does."""
        if _example_shape(output) != _example_shape(y):
            raise self._shapes_differ(output, y, "make the last layer as wide as y")
        if self.name == "bce" and _has_values(y) and bool(((y < 0) | (y > 1)).any()):
            problem = "y has values outside 0 … 1"
            raise self._refusal("cli.loss-labels-outside-range", problem, "label the two classes 0 and 1")
        return y.reshape(output.shape).to(output.dtype)

    def _class_numbers(self, output: Tensor, y: Tensor) -> Tensor:
        """y as class numbers in the shape of the positions; probabilities in the shape of the output as they are."""
        if output.dim() < 2:
            problem = "the model gives one number per example, not one per class"
            remedy = 'give the model one output per class; or, for two classes and one output, use loss = "bce"'
            raise self._refusal("cli.loss-needs-class-scores", problem, remedy)
        if y.is_floating_point() and y.shape == output.shape:
            return y.to(output.dtype)
        if y.is_floating_point():
            problem = f"y is {y.dtype} of shape {_shape_text(y)} per example, not a class number"
            remedy = "give class numbers as integers, y.astype('int64'); without y under [data], the target is x itself"
            raise self._refusal("cli.loss-labels-not-integers", problem, remedy)
        classes, positions = output.shape[1], output.shape[2:]
        if _example_shape(y) != tuple(n for n in positions if n != 1):
            wanted = f"the first axis counts classes, so y must be {tuple(positions) or 'one number'}"
            raise self._shapes_differ(output, y, f"{wanted}; if classes come last: output.transpose(1, 2)")
        y = y.reshape(y.shape[0], *positions).long()
        if _has_values(y) and bool((((y < 0) | (y >= classes)) & (y != -100)).any()):
            problem = f"y has class numbers outside 0 … {classes - 1}"
            remedy = "number the classes from 0, and give the model one output for each"
            raise self._refusal("cli.loss-labels-outside-range", problem, remedy)
        return y

    def _shapes_differ(self, output: Tensor, y: Tensor, remedy: str) -> EngineError:
        problem = f"the model gives {_shape_text(output)} per example, y is {_shape_text(y)}"
        return self._refusal("cli.loss-shapes-differ", problem, remedy)

    def _refusal(self, code: str, problem: str, remedy: str) -> EngineError:
        return EngineError(code, f"loss '{self.name}': {problem}", remedy)


def _has_values(y: Tensor) -> bool:
    """False while a step is traced: `TargetCheck` looks at the targets of every batch before it reaches a graph."""
    return not isinstance(y, FakeTensor)


def _example_shape(t: Tensor) -> tuple[int, ...]:
    """The shape of one example without axes of length 1."""
    return tuple(n for n in t.shape[1:] if n != 1)


def _shape_text(t: Tensor) -> str:
    return str(tuple(t.shape[1:])) if t.dim() > 1 else "one number"
