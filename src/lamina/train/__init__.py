"""A private run: corpus, sampler, trainer, segments, journal, checkpoint, resume, and its place in the ledger.

What trains needs torch, and is imported when it is first asked for: `lamina.train.book` is read without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lamina.train.corpus import Corpus
    from lamina.train.corpus.sampler import Sampler
    from lamina.train.evaluation import Evaluation
    from lamina.train.gate import Gate
    from lamina.train.outcome import Outcome
    from lamina.train.private import make_private
    from lamina.train.trainer import Trainer

__all__ = ["Gate", "Corpus", "Sampler", "Trainer", "Evaluation", "Outcome", "make_private"]

_HOME = {
    "Gate": "gate",
    "Corpus": "corpus",
    "Sampler": "corpus.sampler",
    "Trainer": "trainer",
    "Evaluation": "evaluation",
    "Outcome": "outcome",
    "make_private": "private",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"lamina.train.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
