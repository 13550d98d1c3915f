"""Who may be learned from, and how they are sampled: contributions, their examples, Poisson coins."""

from __future__ import annotations

from lamina.train.corpus.corpus import Corpus
from lamina.train.corpus.sampler import Sampler
from lamina.train.corpus.source import Source

__all__ = ["Corpus", "Sampler", "Source"]
