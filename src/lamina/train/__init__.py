"""A private run: corpus, sampler, trainer, segments, journal, checkpoint, resume, spend book."""

from __future__ import annotations

from lamina.train.book import SpendBook
from lamina.train.corpus import Corpus
from lamina.train.corpus.sampler import Sampler
from lamina.train.evaluation import Evaluation
from lamina.train.gate import Gate
from lamina.train.outcome import Outcome
from lamina.train.private import make_private
from lamina.train.trainer import Trainer

__all__ = ["Gate", "Corpus", "Sampler", "Trainer", "Evaluation", "Outcome", "SpendBook", "make_private"]
