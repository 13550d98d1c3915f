"""Who may be learned from: contributions from arrays, files and folders, admitted or not, and how they are sampled.

These names need torch and are imported on first use: `lamina attest` reads tables without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lamina.errors import needs_torch

if TYPE_CHECKING:
    from lamina.corpus.admitted import Gate
    from lamina.corpus.corpus import Corpus
    from lamina.corpus.sampler import Sampler

__all__ = ["Gate", "Corpus", "Sampler"]

_HOME = {"Gate": "admitted", "Corpus": "corpus", "Sampler": "sampler"}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        with needs_torch(f"lamina.corpus.{name}"):
            return getattr(import_module(f"lamina.corpus.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
