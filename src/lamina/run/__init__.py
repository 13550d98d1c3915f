"""A private run: the corpus and its sampling, trainer, segments, checkpoints, resume, and published files.

These names need torch and are imported on first use: `lamina attest` reads tables without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lamina.errors import needs_torch

if TYPE_CHECKING:
    from lamina.run.admitted import Gate
    from lamina.run.corpus import Corpus
    from lamina.run.optimizer import private_optimizer
    from lamina.run.pretrain import pretrain
    from lamina.run.private import make_private
    from lamina.run.publisher import Evaluation, Outcome
    from lamina.run.run_output import Callback, RunFigures
    from lamina.run.sampler import Sampler
    from lamina.run.trainer import Trainer

__all__ = [
    "Gate",
    "Corpus",
    "Sampler",
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
    "Gate": "admitted", "Corpus": "corpus", "Sampler": "sampler",
    "Trainer": "trainer", "Evaluation": "publisher", "Outcome": "publisher", "make_private": "private",
    "Callback": "run_output", "RunFigures": "run_output", "pretrain": "pretrain",
    "private_optimizer": "optimizer",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOME:
        with needs_torch(f"lamina.run.{name}"):
            return getattr(import_module(f"lamina.run.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
