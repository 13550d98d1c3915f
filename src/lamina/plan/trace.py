"""The order in which a model's modules run, seen by one forward pass on an example input."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lamina.errors import PlanError


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """`ticks[path]` are the times at which the module at `path` was entered, counted from 0 at the root."""

    ticks: dict[str, tuple[int, ...]]

    @classmethod
    def run(cls, model: nn.Module, example: Any) -> Trace:
        """Run `model` once on `example` (a tensor, a tuple of arguments, or a dict of keyword arguments).

        Nothing of it stays: no gradient, evaluation mode, and modes, buffers, hooks and random state are
        put back. `example` should be public or made up.
        """
        paths: defaultdict[nn.Module, list[str]] = defaultdict(list)
        for path, module in model.named_modules(remove_duplicate=False):
            paths[module].append(path)
        entered: defaultdict[nn.Module, list[int]] = defaultdict(list)
        clock = iter(range(1 << 62))
        modes = {module: module.training for module in paths}
        buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        hooks = [
            module.register_forward_pre_hook(lambda module, _: entered[module].append(next(clock)))
            for module in paths
        ]
        try:
            model.eval()
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                call(model, example)
        except Exception as error:
            raise PlanError(
                "plan.forward-pass-example",
                f"the forward pass on the example failed: {type(error).__name__}: {error}",
                "give an example that model(...) accepts: a tensor, a tuple of arguments or a dict",
            ) from error
        finally:
            for hook in hooks:
                hook.remove()
            for module, mode in modes.items():
                module.training = mode
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
        return cls(ticks=dict(_share_out(paths, entered)))

    def calls(self, path: str) -> tuple[int, ...]:
        """When the module at `path` was entered; one never entered itself runs with its nearest ancestor."""
        while path not in self.ticks:
            path = path.rpartition(".")[0]
        return self.ticks[path]

    def first(self, path: str) -> int:
        """When the module at `path` was first entered."""
        return self.calls(path)[0]


def call(model: nn.Module, example: Any) -> None:
    """Run `model` on a tensor, a tuple of arguments, or a dict of keyword arguments."""
    if isinstance(example, Mapping):
        model(**example)
    elif isinstance(example, tuple):
        model(*example)
    else:
        model(example)


def _share_out(
    paths: Mapping[nn.Module, list[str]], entered: Mapping[nn.Module, list[int]]
) -> dict[str, tuple[int, ...]]:
    """Give a module registered under several paths its calls in turn, the surplus to the last path."""
    ticks: dict[str, tuple[int, ...]] = {}
    for module, names in paths.items():
        times = entered.get(module, [])
        for i, name in enumerate(names):
            mine = times[i:] if i == len(names) - 1 else times[i : i + 1]
            if mine:
                ticks[name] = tuple(mine)
    return ticks
