"""`LossAdvice`: the line that makes a loss of torch fit the output of a model and its targets."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_BCE, _CE = "binary_cross_entropy_with_logits", "cross_entropy"
_ELEMENTWISE = (_BCE, "binary_cross_entropy", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
WRONG_SHAPE = "engine.losses-wrong-shape"


class LossAdvice:
    """Watches which loss of torch is called, and with what; then says what does not fit, and the line that does.

    `output_of` computes the model's output from x.
    """

    def __init__(self, output_of: Callable[[Any], Any]) -> None:
        self._output_of = output_of
        self._called: list[tuple[str, Tensor, Tensor]] = []

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Note calls of losses."""
        self._called.clear()
        with _NoteLosses(self._called), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using a target size", UserWarning)  # refused below
            yield

    @property
    def broadcasts(self) -> bool:
        """Whether output and target of a loss by elements have different shapes, so that it compares all with all."""
        return any(name in _ELEMENTWISE and output.shape != y.shape for name, output, y in self._called)

    def advise(self, x: Any, y: Any) -> tuple[str, str] | None:
        """Return the mismatch and its remedy, or None if no loss of torch was called or the mismatch is unknown."""
        if not self._called:
            return None
        target = y if isinstance(y, Tensor) else x if y is None and isinstance(x, Tensor) else None
        try:
            with torch.no_grad():
                output = self._output_of(x)
        except Exception:  # the model is the user's: then it is not the loss that fails
            return None
        if not isinstance(output, Tensor) or not isinstance(target, Tensor):
            return None
        name = self._called[-1][0]
        line = _fitting_line(name, output, target)
        if line is None:
            return None
        problem = f"{name} does not fit: the model gives {_text(output)}, the target is {_text(target)}"
        remedy = f"give loss_fn={line}  # import torch.nn.functional as F" if line.startswith("lambda") else line
        return problem, remedy


class _NoteLosses(TorchFunctionMode):
    """Notes the losses of torch.nn.functional that are called with two tensors."""

    def __init__(self, called: list[tuple[str, Tensor, Tensor]]) -> None:
        super().__init__()
        self._called = called

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _ELEMENTWISE or name in (_CE, "nll_loss"):
            given = [*args, *(kwargs or {}).values()][:2]
            if len(given) == 2 and all(isinstance(each, Tensor) for each in given):
                self._called.append((name, *given))
        return func(*args, **(kwargs or {}))


def _fitting_line(name: str, output: Tensor, y: Tensor) -> str | None:
    """A loss function of (output, y) that takes these; or a sentence where only the model can be changed."""
    rows, one_label = len(y), y.numel() == len(y)
    one_output = output.numel() == rows
    if name not in _ELEMENTWISE:  # by class
        if one_output and one_label:
            return _line(_BCE, "output.flatten()", "y.flatten().float()")
        if output.dim() == 2 and one_label:
            return _line(name, "output", "y.flatten().long()")
        if output.shape == y.shape and name == _CE:
            return _line(name, "output", "y.float()", ".flatten(1).mean(1)" if output.dim() > 2 else "")
        if output.dim() > 2 and output.shape[:-1] == y.shape:
            return _line(name, "output.movedim(-1, 1)", "y.long()", ".flatten(1).mean(1)")
        if output.dim() > 2 and output.shape[:1] + output.shape[2:] == y.shape:
            return _line(name, "output", "y.long()", ".flatten(1).mean(1)")
        return None
    if output.numel() == y.numel():
        mean = "" if output.dim() == 1 else ".mean(1)" if output.dim() == 2 else ".flatten(1).mean(1)"
        return _line(name, "output", "y.view(output.shape).float()", mean)
    if name == _BCE and output.dim() == 2 and one_label:
        return _line(_CE, "output", "y.flatten().long()")
    return f"Give the model one output for each of the {y[:1].numel()} numbers of a target"


def _line(name: str, output: str, y: str, mean: str = "") -> str:
    return f"lambda output, y: F.{name}({output}, {y}, reduction='none'){mean}"


def _text(t: Tensor) -> str:
    """float32 (n, 1): the first axis counts examples."""
    return f"{str(t.dtype).removeprefix('torch.')} ({', '.join(['n', *map(str, t.shape[1:])])}{',' if t.dim() == 1 else ''})"
