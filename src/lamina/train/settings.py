"""What a run was told, as one digest: a replayed segment must have been told the same."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from lamina.train.describe import Describe


def settings(
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: Any,
    functions: Mapping[str, Any],
    options: Mapping[str, Any],
    given: Iterable[Mapping[str, Any]],
    schedule: Any,
) -> bytes:
    """SHA-256 over optimiser, scheduler, loss, model and options as given, and over the user's code that they run.

    Functions count by bytecode, defaults, closures and what they are bound to; modules by name, class, attributes,
    methods and the types of their tensors; objects by class and attributes (`Describe`). `given` and `schedule` are
    the optimiser's and scheduler's settings before the first step. What none of this can see (a changed library, a file
    that the model reads) is the user's to keep.
    """
    words = Describe()
    for part in (
        words.kind(type(optimizer)),
        [dict(group) for group in given],
        None if scheduler is None else [words.kind(type(scheduler)), _functions(scheduler), schedule],
        dict(functions),
        model,
        dict(options),
    ):
        words.values = part is not model  # the model's weights are the checkpoint's, and change
        words.feed(part)
    return hashlib.sha256(words.text().encode()).digest()


def _functions(scheduler: Any) -> list[Any]:
    """LambdaLR and its kin keep functions that their state leaves out."""
    return [value for name, value in sorted(vars(scheduler).items()) if "lambda" in name or callable(value)]


def code_version() -> str:
    """Versions and processor: sums of floats are the same again only where all of these are."""
    from lamina import __version__

    return (
        f"lamina {__version__}; torch {torch.__version__}; numpy {np.__version__}; "
        f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    )
