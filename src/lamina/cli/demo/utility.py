"""How good a model is, measured on simulated patients whom no training saw."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata
from torch import nn

from lamina.cli.demo.patients import Group
from lamina.data import CLASSES


@dataclass(frozen=True, slots=True, kw_only=True)
class Utility:
    """`auc` is the mean over classes of `by_class`, each class against the rest, one score per patient.

    `error` is the fraction of the signal's variance that the reconstruction leaves; the mean beat leaves 1.
    """

    auc: float
    by_class: dict[str, float]
    error: float


@torch.no_grad()
def measure(model: nn.Module, test: Group) -> Utility:
    """A patient's score for a class is the mean over windows of its log probability. Leaves the model's mode alone."""
    training = model.training
    model.eval()
    residual, logits = model(test.x.flatten(0, 1))
    model.train(training)
    score = logits.log_softmax(1).unflatten(0, test.x.shape[:2]).mean(1).numpy()
    label = test.label.numpy()
    present = [k for k in range(len(CLASSES)) if 0 < (label == k).sum() < len(label)]
    by_class = {CLASSES[k]: auc(score[:, k], label == k) for k in present}
    total = (test.x - test.x.mean((0, 1))).square().mean()
    return Utility(
        auc=_mean(by_class.values()), by_class=by_class, error=float(residual.square().mean() / total)
    )


def auc(score: Sequence[float] | NDArray[np.floating], positive: NDArray[np.bool_]) -> float:
    """The probability that a positive scores above a negative, ties counting half (Mann and Whitney, 1947).

    >>> auc([0.1, 0.4, 0.35, 0.8], np.array([False, False, True, True]))
    0.75
    """
    ranks = rankdata(score)
    n = int(positive.sum())
    above = ranks[positive].sum() - n * (n + 1) / 2
    return float(above / (n * (len(positive) - n)))


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))
