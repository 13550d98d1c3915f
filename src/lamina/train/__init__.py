"""A private run: trainer, segments, journal, training checkpoints, resume, and what leaves the run.

These names need torch and are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lamina.errors import needs_torch

if TYPE_CHECKING:
    from lamina.train.optimizer import private_optimizer
    from lamina.train.pretrain import pretrain
    from lamina.train.private import make_private
    from lamina.train.publisher import Evaluation, Outcome
    from lamina.train.run_output import Callback, RunFigures
    from lamina.train.trainer import Trainer

__all__ = [
    "Trainer",
    "Evaluation",
    "Outcome",
    "Callback",
    "RunFigures",
    "make_private",
    "private_optimizer",
    "pretrain",
]

_HOME = {
    "Trainer": "trainer", "Evaluation": "publisher", "Outcome": "publisher", "make_private": "private",
    "Callback": "run_output", "RunFigures": "run_output", "pretrain": "pretrain",
    "private_optimizer": "optimizer",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOME:
        with needs_torch(f"lamina.train.{name}"):
            return getattr(import_module(f"lamina.train.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
