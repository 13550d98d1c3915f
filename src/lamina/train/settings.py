"""What a run was told, as one digest: a replayed segment must have been told the same."""

from __future__ import annotations

import functools
import hashlib
import json
import platform
from collections.abc import Mapping
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer


def settings(
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: Any,
    functions: Mapping[str, Any],
    options: Mapping[str, Any],
) -> bytes:
    """SHA-256 over optimiser, scheduler, loss and options as given, and over the user's own code that they run.

    Code is compared by its bytecode, so that an edited loss or `forward` does not pass for the old one. What
    neither can see (a changed library, a file that the model reads) is the user's to keep.
    """
    kinds = sorted({type(m) for m in model.modules()}, key=lambda kind: kind.__qualname__)
    told = {
        "optimizer": [_name(optimizer), [_hyperparameters(group) for group in optimizer.param_groups]],
        "scheduler": None if scheduler is None else [_name(scheduler), _plain(scheduler.state_dict())],
        "functions": {name: _function(function) for name, function in functions.items()},
        "model": [[kind.__qualname__, _function(kind.forward)] for kind in kinds],
        "options": _plain(options),
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).digest()


def code_version() -> str:
    """Versions and processor: sums of floats are the same again only where all of these are."""
    from lamina import __version__

    return (
        f"lamina {__version__}; torch {torch.__version__}; numpy {np.__version__}; "
        f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    )


def _hyperparameters(group: Mapping[str, Any]) -> Any:
    return _plain({name: value for name, value in group.items() if name != "params"})


def _plain(value: Any) -> Any:
    """Something that prints the same in every process."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), value.detach().double().flatten().tolist()]
    return _name(value)


def _name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _function(function: Any) -> Any:
    """A function by its code, an object that is called by its class's code and its plain attributes."""
    if function is None:
        return None
    if isinstance(function, functools.partial):
        return ["partial", _function(function.func), _plain(function.args), _plain(function.keywords)]
    code = getattr(function, "__code__", None)
    if code is not None:
        return [function.__qualname__, _bytecode(code)]
    call = type(function).forward if isinstance(function, nn.Module) else type(function).__call__
    code = getattr(call, "__code__", None)
    public = {k: v for k, v in vars(function).items() if k[0] != "_"} if hasattr(function, "__dict__") else {}
    return [_name(function), _plain(public), _bytecode(code) if code else None]


def _bytecode(code: CodeType) -> list[Any]:
    return [
        code.co_code.hex(),
        list(code.co_names),
        [_bytecode(c) if isinstance(c, CodeType) else _plain(c) for c in code.co_consts],
    ]
