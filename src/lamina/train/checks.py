"""What a trainer refuses before anything is spent, with messages for someone who does this for the first time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset

from lamina.errors import RunError
from lamina.plan import Choose, FollowBudget, StepPlan
from lamina.train.corpus import Corpus
from lamina.train.corpus.sampler import Sampler
from lamina.train.evaluation import Evaluation


def check_parts(model: Any, optimizer: Any, loss_fn: Any, corpus: Any, plan: Any, scheduler: Any) -> None:
    """Whether the things given are of the right kind."""
    if not isinstance(model, nn.Module):
        raise RunError(
            "train.model",
            f"the model is a {_kind(model)}",
            "give a torch.nn.Module (of lamina.fix: its .model)",
        )
    if not isinstance(plan, StepPlan):
        raise RunError(
            "train.plan",
            f"the plan is a {type(plan).__name__}",
            "make one: lamina.make_plan(stack, policy, …)",
        )
    _check_optimizer(model, optimizer)
    _check_loss(loss_fn)
    _check_corpus(corpus)
    if isinstance(scheduler, ReduceLROnPlateau):
        raise RunError(
            "train.reducelronplateau-follows-loss",
            "ReduceLROnPlateau follows a loss, and the private loss is a release that no budget paid for",
            "use a schedule that is fixed in advance (CosineAnnealingLR, OneCycleLR), stepped once per private step",
        )
    if scheduler is not None and not hasattr(scheduler, "step"):
        raise RunError(
            "train.scheduler",
            f"the scheduler is a {type(scheduler).__name__}",
            "give a torch.optim.lr_scheduler",
        )


def check_options(folder: Any, evaluate: Any, max_occurrences: Any) -> None:
    """Whether the options are of the right kind."""
    if not isinstance(folder, str | os.PathLike) or not str(folder) or "\0" in str(folder):
        raise RunError(
            "train.folder", f"folder is {folder!r}", 'say where the run lives: folder="runs/first"'
        )
    if evaluate is not None and not isinstance(evaluate, Evaluation):
        raise RunError(
            "train.evaluate",
            f"evaluate is a {type(evaluate).__name__}",
            'say which data it looks at: lamina.Evaluation(function=…, on="public")',
        )
    if max_occurrences is not None and not isinstance(max_occurrences, Mapping):
        raise RunError(
            "train.max-occurrences",
            f"max_occurrences is {max_occurrences!r}",
            'give it by class: {"clinical": 50}',
        )


def check_names(plan: StepPlan, **given: Mapping[str, Any]) -> None:
    """Whether what is given by class names classes of the plan: a typo must not lift a bound."""
    known = [entry.name for entry in plan.classes]
    for what, values in given.items():
        for name in values:
            if name not in known:
                raise RunError(
                    "train.names-class-plan",
                    f"{what} names class {name!r}, which the plan does not have",
                    f"its classes are {', '.join(known)}",
                )


def policy_bounds(corpus: Corpus, plan: StepPlan) -> dict[str, float]:
    """The ε that the corpus's policy allows each class of the plan, over all runs."""
    if corpus.policy is None:
        return {}
    names = [entry.name for entry in plan.classes if not entry.public and entry.name in corpus.policy.classes]
    found = {name: corpus.policy.bound(name) for name in names}
    return {name: bound for name, bound in found.items() if bound is not None}


def count(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RunError(
            "train.whole-number", f"{name} is {value!r}, must be a whole number >= 1", "correct it"
        )
    return value


def _check_optimizer(model: nn.Module, optimizer: Any) -> None:
    if not isinstance(optimizer, Optimizer):
        raise RunError(
            "train.optimiser",
            f"the optimiser is a {type(optimizer).__name__}",
            "give a torch optimiser: torch.optim.Adam(model.parameters(), lr=1e-3)",
        )
    if isinstance(optimizer, LBFGS):
        raise RunError(
            "train.lbfgs-asks-several",
            "LBFGS asks for several gradients in one step, and each of them would be a release",
            "use an optimiser that takes one gradient per step: SGD, Adam, AdamW",
        )
    mine = {id(p) for p in model.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(id(p) in mine for p in held):
        raise RunError(
            "train.optimiser-holds-none",
            "the optimiser holds none of the model's parameters",
            "make it after the model is in its final form (after lamina.fix): Adam(model.parameters())",
        )
    strangers = sum(id(p) not in mine for p in held)
    if strangers:
        raise RunError(
            "train.optimiser-holds-tensors",
            f"the optimiser holds {strangers} tensors that are not the model's",
            "train everything that learns as one module, so that its coverage can be checked",
        )


def _check_loss(loss_fn: Any) -> None:
    if not callable(loss_fn):
        raise RunError(
            "train.loss-fn", f"loss_fn is a {type(loss_fn).__name__}", "give a function of (output, y)"
        )
    reduction = getattr(loss_fn, "reduction", "none")
    if reduction != "none":
        name = type(loss_fn).__name__
        raise RunError(
            "train.reduction-number-whole",
            f"{name} has reduction='{reduction}': one number for the whole batch, in which nobody can be clipped",
            f"use {name}(reduction='none'): one loss per example",
        )


def _check_corpus(corpus: Any) -> None:
    if isinstance(corpus, Corpus):
        return
    refuse_loader(corpus)
    if isinstance(corpus, Dataset):
        raise RunError(
            "train.data",
            f"the data is a {type(corpus).__name__}",
            "say what a contribution is: lamina.Corpus(dataset, unit=…)",
        )
    raise RunError(
        "train.data", f"the data is a {type(corpus).__name__}", "make a corpus: lamina.Corpus(x, y, unit=…)"
    )


def refuse_loader(data: Any) -> None:
    """The most common mistake."""
    if isinstance(data, DataLoader):
        raise RunError(
            "train.data-dataloader-shuffles",
            "the data is a DataLoader, which shuffles and cuts batches of one size: that is not Poisson sampling, and "
            "its privacy is not what the plan says",
            "give the data itself: lamina.Corpus(loader.dataset); batches are drawn for you",
        )


def _kind(value: Any) -> str:
    return (
        f"class {value.__name__}, not an instance of it" if isinstance(value, type) else type(value).__name__
    )


def check_filters(plan: StepPlan, filters: Mapping[str, Any]) -> None:
    """A plan that follows its budget has a filter of its own, in its own units."""
    if filters and plan.rule(FollowBudget) is not None:
        raise RunError(
            "train.filters-given-noise",
            "filters are given, and the noise of the plan follows its budget under a filter of its own",
            "leave filters out, or plan with a fixed sigma: LADP(mode='shares')",
        )


def check_caps(corpus: Corpus, plan: StepPlan, caps: Mapping[str, int]) -> None:
    """Caps that the sampler will take, and no choice beside them: it would draw without counting."""
    Sampler(corpus, plan, seed=bytes(32), max_occurrences=caps or None)
    if caps and plan.rule(Choose) is not None:
        raise RunError(
            "train.max-occurrences-given",
            "max_occurrences is given, and the plan chooses by an exponential mechanism, whose draws are not counted",
            "leave out max_occurrences, or plan without choices",
        )
