"""The rehearsal: everything that could fail in a step is tried on simulated input before anything is spent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lamina.engine import Batch, Engine
from lamina.errors import LaminaError, RunError
from lamina.train.corpus import Corpus

_EXAMPLES = 6


def rehearse(engine: Engine, losses_of: Callable[[Any, Any], Tensor], corpus: Corpus, *, probe: bool) -> None:
    """One step without noise, optimiser or charge; then the engine's independence probe.

    The input has the shapes and types of the first examples; floating-point values are simulated. Labels and
    tokens are taken as they are, because a model accepts no others.
    """
    rows = np.arange(min(_EXAMPLES, len(corpus.source)), dtype=np.int64)
    x, y = corpus.source.fetch(rows)
    x = pytree.tree_map(_simulated, x)
    if y is None:
        kind = "the inputs themselves"
    else:
        kind = ", ".join(
            f"{t.dtype} {tuple(t.shape)}" for t in pytree.tree_leaves(y) if isinstance(t, Tensor)
        )
    engine.model.train()
    try:
        losses = losses_of(x, y)
    except LaminaError:
        raise
    except Exception as error:  # the model and the loss are the user's: say what they were given
        shapes = ", ".join(
            f"{t.dtype} {tuple(t.shape)}" for t in pytree.tree_leaves(x) if isinstance(t, Tensor)
        )
        raise RunError(
            "train.model-loss-failed",
            f"model or loss failed on {len(rows)} examples: {type(error).__name__}: {error}",
            f"{_hint(error, x, y)}. (x is {shapes}; targets are {kind})",
        ) from error
    engine.clipped_sums(losses, Batch(x, y, cls=torch.zeros(len(rows), dtype=torch.long)))
    if probe and len(rows) >= 4:
        engine.probe(losses_of, x, y)


def check_labels(corpus: Corpus, loss_fn: Any, output_of: Callable[[Any], Any]) -> None:
    """Class labels must be 0 … C-1 for a loss that uses them as indices."""
    y = getattr(corpus.source, "y", None)
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__).lower()
    by_index = isinstance(loss_fn, nn.CrossEntropyLoss | nn.NLLLoss) or name in ("cross_entropy", "nll_loss")
    if not by_index or y is None:
        return
    try:
        with torch.no_grad():
            output = output_of(pytree.tree_map(_simulated, corpus.source.fetch(np.arange(1))[0]))
    except Exception:  # the rehearsal comes next, and says what is wrong with the model
        return
    if not isinstance(output, Tensor) or output.dim() < 2:
        return
    labels = y.detach().cpu().numpy() if isinstance(y, Tensor) else np.asarray(y)
    if labels.dtype.kind not in "iu" or not labels.size:
        return
    low, high, classes = int(labels.min()), int(labels.max()), output.shape[1]
    ignored = getattr(loss_fn, "ignore_index", -100)
    if (low < 0 and low != ignored) or high >= classes:
        raise RunError(
            "train.labels-run-model",
            f"labels run from {low} to {high}, the model has {classes} outputs, for labels 0 to {classes - 1}",
            "number the labels from 0: numpy.unique(labels, return_inverse=True)[1]; or give the model more outputs",
        )


def _simulated(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        generator = torch.Generator().manual_seed(0)
        return torch.randn(value.shape, generator=generator, dtype=torch.float32).to(value.dtype)
    return value


def _hint(error: Exception, x: Any, y: Any) -> str:
    """What is usually behind it."""
    text = str(error)
    if "out of bounds" in text:
        return "number labels 0 … C-1, C the model's outputs: numpy.unique(labels, return_inverse=True)[1]"
    if isinstance(x, Tensor) and not x.is_floating_point() and "dtype" in text and "mat" in text:
        return "give x as floating point: x.astype('float32')"
    if "Double" in text or "double" in text:
        return "input is float32: use model.float(), or Corpus(…, dtype=torch.float64)"
    if isinstance(y, Tensor):
        if "expected scalar type Long" in text or "not implemented for 'Float'" in text:
            return "class labels are whole numbers: y.astype('int64')"
        if y.dim() == 2 and not y.is_floating_point():
            return "give class numbers, not one-hot rows: y.argmax(1), or y[:, 0] for a single column"
        if "target" in text.lower() and "size" in text.lower():
            return "output and y have different shapes: y[:, None], or output.squeeze(1) in the loss"
        if "found dtype" in text or "same dtype" in text:
            return "mse and bce want y as floating point: y.astype('float32')"
    if isinstance(x, Mapping) and "argument" in text:
        return f"x is passed as keywords {', '.join(map(str, x))}: these must be the names in forward()"
    if "shape" in text or "size" in text:
        return "the first axis counts examples; the others must be what the first layer expects"
    return "correct the model or the loss"
