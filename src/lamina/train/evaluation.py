"""`Evaluation`: what may be looked at during a private run, figures on public or simulated data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from lamina.corpus.example_sources import preserve_global_generators, seed_global_generators
from lamina.errors import RunError
from lamina.validate import one_of, whole


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Figures of the model on data that is not protected, computed between segments.

    function  model -> {name: number}; called with the model in evaluation mode, without gradients
    on        "public" or "simulated": which data the function reads. A figure on private data is a release that
              no budget paid for, and choosing by it another one, so "private" is refused
    every     after so many segments
    best      keep the weights with the largest value of this figure as best.safetensors; "-name" for the smallest
    patience  stop after so many evaluations without a new best

    The weights of a closed segment are private already, so whatever is computed from them and public data, early
    stopping and best checkpoint included, is post-processing and costs nothing.
    """

    function: Callable[[nn.Module], Mapping[str, float]]
    on: str
    every: int = 1
    best: str | None = None
    patience: int | None = None

    def __post_init__(self) -> None:
        if not callable(self.function):
            problem = f"the evaluation's function is a {type(self.function).__name__}"
            raise RunError("train.evaluation-not-callable", problem, "give a function of the model")
        remedy = 'a figure on private data is a release without a budget: evaluate on="public" or on="simulated" data'
        one_of(RunError, "train.evaluation-on-private-data", ("public", "simulated"), on=self.on, remedy=remedy)
        whole(RunError, "train.not-a-count", every=self.every)
        if self.patience is not None:
            whole(RunError, "train.not-a-count", patience=self.patience)
            if self.best is None:
                problem = "patience is given without best"
                raise RunError("train.patience-without-best", problem, 'name a figure: best="auc"')

    def due(self, segments: int, *, last: bool) -> bool:
        return last or segments % self.every == 0

    def run(self, model: nn.Module) -> dict[str, float]:
        """The figures, checked; neither the model's mode nor the random generators are changed."""
        modes = {module: module.training for module in model.modules()}
        try:
            model.eval()
            before = [(t.data_ptr(), t._version) for t in model.state_dict(keep_vars=True).values()]
            with torch.no_grad(), preserve_global_generators():
                seed_global_generators(0)  # never where the private steps left them
                figures = self.function(model)
            if before != [(t.data_ptr(), t._version) for t in model.state_dict(keep_vars=True).values()]:
                problem = "the evaluation changed the model's weights"
                raise RunError("train.evaluation-changed-model", problem, "evaluate a copy: copy.deepcopy(model)")
        finally:
            for module, mode in modes.items():
                module.training = mode
        if not isinstance(figures, Mapping) or not figures:
            problem = f"the evaluation returned a {type(figures).__name__}"
            raise RunError("train.evaluation-not-figures", problem, 'return figures by name: {"auc": 0.91}')
        figures = {str(name): float(value) for name, value in figures.items()}
        for name, value in figures.items():
            if not math.isfinite(value):
                problem = f"the evaluation's figure {name!r} is {value}"
                raise RunError("train.evaluation-not-finite", problem, "return finite numbers")
        if self.best is not None and (best := self.best.removeprefix("-")) not in figures:
            problem = f"the evaluation has no figure {best!r}, which best names"
            raise RunError("train.evaluation-without-best", problem, f"choose one of {', '.join(figures)}")
        return figures

    def score(self, figures: Mapping[str, float]) -> float:
        """Larger is better."""
        assert self.best is not None
        value = figures[self.best.removeprefix("-")]
        return -value if self.best.startswith("-") else value

    def stops(self, scores: list[float]) -> bool:
        """Whether patience ran out: the best lies more than `patience` evaluations back."""
        return self.patience is not None and len(scores) - 1 - scores.index(max(scores)) >= self.patience
