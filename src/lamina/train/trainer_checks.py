"""What a trainer refuses before anything is spent.

Arguments, depth profiles, and a rehearsal of one step on simulated input.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset

from lamina.corpus.corpus import Corpus
from lamina.corpus.sampler import Sampler
from lamina.engine.batch import Batch
from lamina.engine.engine import Engine
from lamina.errors import LaminaError, PlanError, RunError
from lamina.plan.layer_stack import LayerStack
from lamina.plan.policy import Policy
from lamina.plan.profile_reach import Reach
from lamina.plan.rules import Choose, FollowBudget
from lamina.plan.selection import complement_ranges
from lamina.plan.step_plan import StepPlan
from lamina.train.evaluation import Evaluation


def check_trainer_arguments(model: Any, optimizer: Any, loss_fn: Any, corpus: Any, plan: Any, scheduler: Any) -> None:
    """Whether the things given are of the right kind."""
    if not isinstance(model, nn.Module):
        problem = f"the model is a {_type_text(model)}"
        raise RunError("train.model", problem, "give a torch.nn.Module (of lamina.fix: its .model)")
    if not isinstance(plan, StepPlan):
        problem = f"the plan is a {type(plan).__name__}"
        raise RunError("train.plan", problem, "make one: lamina.make_plan(stack, policy, …)")
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
        problem = f"the scheduler is a {type(scheduler).__name__}"
        raise RunError("train.scheduler", problem, "give a torch.optim.lr_scheduler")


def check_trainer_options(folder: Any, evaluate: Any, max_occurrences: Any) -> None:
    """Whether the options are of the right kind."""
    if not isinstance(folder, str | os.PathLike) or not str(folder) or "\0" in str(folder):
        raise RunError("train.folder", f"folder is {folder!r}", 'say where the run lives: folder="runs/first"')
    if evaluate is not None and not isinstance(evaluate, Evaluation):
        remedy = 'say which data it looks at: lamina.Evaluation(function=…, on="public")'
        raise RunError("train.evaluate", f"evaluate is a {type(evaluate).__name__}", remedy)
    if max_occurrences is not None and not isinstance(max_occurrences, Mapping):
        problem = f"max_occurrences is {max_occurrences!r}"
        raise RunError("train.max-occurrences", problem, 'give it by class: {"clinical": 50}')


def check_class_names(plan: StepPlan, **given: Mapping[str, Any]) -> None:
    """Whether what is given by class names classes of the plan: a typo must not lift a bound."""
    known = [entry.name for entry in plan.classes]
    for what, values in given.items():
        for name in values:
            if name not in known:
                problem = f"{what} names class {name!r}, which the plan does not have"
                raise RunError("train.names-class-plan", problem, f"its classes are {', '.join(known)}")


def epsilon_bounds_of_policy(corpus: Corpus, plan: StepPlan) -> dict[str, float]:
    """The ε that the corpus's policy allows each class of the plan, over all runs."""
    if corpus.policy is None:
        return {}
    names = [entry.name for entry in plan.classes if not entry.public and entry.name in corpus.policy.classes]
    found = {name: corpus.policy.bound(name) for name in names}
    return {name: bound for name, bound in found.items() if bound is not None}


def check_count(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RunError("train.whole-number", f"{name} is {value!r}, must be a whole number >= 1", "correct it")
    return value


def _check_optimizer(model: nn.Module, optimizer: Any) -> None:
    if not isinstance(optimizer, Optimizer):
        remedy = "give a torch optimiser: torch.optim.Adam(model.parameters(), lr=1e-3)"
        raise RunError("train.optimiser", f"the optimiser is a {type(optimizer).__name__}", remedy)
    if isinstance(optimizer, LBFGS):
        problem = "LBFGS asks for several gradients in one step, and each of them would be a release"
        remedy = "use an optimiser that takes one gradient per step: SGD, Adam, AdamW"
        raise RunError("train.lbfgs-asks-several", problem, remedy)
    mine = {id(p) for p in model.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(id(p) in mine for p in held):
        remedy = "make it after the model is in its final form (after lamina.fix): Adam(model.parameters())"
        raise RunError("train.optimiser-holds-none", "the optimiser holds none of the model's parameters", remedy)
    strangers = sum(id(p) not in mine for p in held)
    if strangers:
        problem = f"the optimiser holds {strangers} tensors that are not the model's"
        remedy = "train everything that learns as one module, so that its coverage can be checked"
        raise RunError("train.optimiser-holds-tensors", problem, remedy)


def _check_loss(loss_fn: Any) -> None:
    if not callable(loss_fn):
        raise RunError("train.loss-fn", f"loss_fn is a {type(loss_fn).__name__}", "give a function of (output, y)")
    reduction = getattr(loss_fn, "reduction", "none")
    if reduction != "none":
        name = type(loss_fn).__name__
        problem = f"{name} has reduction='{reduction}': one number for the whole batch, in which nobody can be clipped"
        raise RunError("train.reduction-number-whole", problem, f"use {name}(reduction='none'): one loss per example")


def _check_corpus(corpus: Any) -> None:
    if isinstance(corpus, Corpus):
        return
    refuse_loader(corpus)
    if isinstance(corpus, Dataset):
        problem = f"the data is a {type(corpus).__name__}"
        raise RunError("train.data", problem, "say what a contribution is: lamina.Corpus(dataset, unit=…)")
    raise RunError("train.data", f"the data is a {type(corpus).__name__}", "make a corpus: lamina.Corpus(x, y, unit=…)")


def refuse_loader(data: Any) -> None:
    """The most common mistake."""
    if isinstance(data, DataLoader):
        raise RunError(
            "train.data-dataloader-shuffles",
            "the data is a DataLoader, which shuffles and cuts batches of one size: that is not Poisson sampling, and "
            "its privacy is not what the plan says",
            "give the data itself: lamina.Corpus(loader.dataset); batches are drawn for you",
        )


def _type_text(value: Any) -> str:
    return f"class {value.__name__}, not an instance of it" if isinstance(value, type) else type(value).__name__


def check_filters(plan: StepPlan, filters: Mapping[str, Any]) -> None:
    """A plan that follows its budget has a filter of its own, in its own units."""
    if filters and plan.rule(FollowBudget) is not None:
        problem = "filters are given, and the noise of the plan follows its budget under a filter of its own"
        remedy = "leave filters out, or plan with a fixed sigma: LADP(mode='shares')"
        raise RunError("train.filters-given-noise", problem, remedy)


def check_caps(corpus: Corpus, plan: StepPlan, caps: Mapping[str, int]) -> None:
    """Caps that the sampler will take, and no choice beside them: it would draw without counting."""
    Sampler(corpus, plan, seed=bytes(32), max_occurrences=caps or None)
    if caps and plan.rule(Choose) is not None:
        raise RunError(
            "train.max-occurrences-given",
            "max_occurrences is given, and the plan chooses by an exponential mechanism, whose draws are not counted",
            "leave out max_occurrences, or plan without choices",
        )


DEPTH_NOT_COMPARED = (
    "the plan's layers were read with options of their own (an order, groups, heads), so that their depth could not be "
    "held against the policy again"
)


def check_depth_profiles(model: nn.Module, policy: Policy | None, plan: StepPlan) -> str | None:
    """Refuse a plan in which a class moves what its profile excludes.

    Returns a note where that cannot be seen from model and policy alone.
    """
    if policy is None:
        return None
    stack = LayerStack.from_model(model)
    layer_of = {name: i for i, layer in enumerate(stack) for name in layer.parameters}
    same = {layer.parameters: layer.depth for layer in stack}
    compared = all(same.get(layer.parameters, layer.depth) == layer.depth for layer in plan.layers)
    for k, entry in enumerate(plan.classes):
        profile = policy.classes[entry.name].profile if entry.name in policy.classes else None
        if profile is None or profile.whole:
            continue
        try:
            reach = profile.reach(stack)
        except PlanError:
            compared = False
            continue
        if compared:
            _check_class_depth(plan, k, reach, layer_of)
    return None if compared else DEPTH_NOT_COMPARED


def _check_class_depth(plan: StepPlan, k: int, reach: Reach, layer_of: dict[str, int]) -> None:
    open_places = {part.tensor: part for part in reach.openings}
    for i, layer in enumerate(plan.layers):
        for name in layer.parameters if plan.clip[k][i] > 0 else ():
            mine, allowed = plan.slice(k, name), open_places.get(name)
            if not reach.layers[layer_of[name]]:
                free = mine is not None and not mine.ranges
            elif allowed is None:
                free = True
            else:
                closed = complement_ranges(allowed.ranges, allowed.length)
                free = mine is not None and not any(
                    first < b and a < stop for first, stop in mine.ranges for a, b in closed
                )
            if not free:
                raise RunError(
                    "train.class-moves-plan",
                    f"class {plan.classes[k].name!r} moves {name!r} in the plan, outside of its profile in the policy "
                    f"({reach.words})",
                    "make the plan under the policy that the data was admitted under",
                )


_REHEARSAL_EXAMPLES = 6


def rehearse(engine: Engine, losses_of: Callable[[Any, Any], Tensor], corpus: Corpus, *, probe: bool) -> None:
    """One step without noise, optimiser or charge; then the engine's independence probe.

    The input has the shapes and types of the first examples; floating-point values are simulated. Labels and
    tokens are taken as they are, because a model accepts no others.
    """
    rows = np.arange(min(_REHEARSAL_EXAMPLES, len(corpus.source)), dtype=np.int64)
    x, y = corpus.source.fetch(rows)
    x = pytree.tree_map(_simulate_floats, x)
    if y is None:
        kind = "the inputs themselves"
    else:
        kind = ", ".join(f"{t.dtype} {tuple(t.shape)}" for t in pytree.tree_leaves(y) if isinstance(t, Tensor))
    engine.model.train()
    try:
        losses = losses_of(x, y)
    except LaminaError:
        raise
    except Exception as error:  # the model and the loss are the user's: say what they were given
        shapes = ", ".join(f"{t.dtype} {tuple(t.shape)}" for t in pytree.tree_leaves(x) if isinstance(t, Tensor))
        problem = f"model or loss failed on {len(rows)} examples: {type(error).__name__}: {error}"
        remedy = f"{_remedy_for(error, x, y)}. (x is {shapes}; targets are {kind})"
        raise RunError("train.model-loss-failed", problem, remedy) from error
    engine.clipped_sums(losses, Batch(x, y, cls=torch.zeros(len(rows), dtype=torch.long)))
    if probe and len(rows) >= 4:
        engine.probe(losses_of, x, y)


def check_class_labels(corpus: Corpus, loss_fn: Any, output_of: Callable[[Any], Any]) -> None:
    """Class labels must be 0 … C-1 for a loss that uses them as indices."""
    y = getattr(corpus.source, "y", None)
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__).lower()
    by_index = isinstance(loss_fn, nn.CrossEntropyLoss | nn.NLLLoss) or name in ("cross_entropy", "nll_loss")
    if not by_index or y is None:
        return
    try:
        with torch.no_grad():
            output = output_of(pytree.tree_map(_simulate_floats, corpus.source.fetch(np.arange(1))[0]))
    except Exception:  # the rehearsal comes next, and says what is wrong with the model
        return
    if not isinstance(output, Tensor) or output.dim() < 2:
        return
    labels = y.detach().cpu().numpy() if isinstance(y, Tensor) else np.asarray(y)
    if labels.dtype.kind not in "iu" or not labels.size:
        return
    low, high, classes = int(labels.min()), int(labels.max()), output.shape[1]
    ignored = getattr(loss_fn, "ignore_index", -100)
    if (low < 0 and low != ignored) or high >= classes:
        raise RunError(
            "train.labels-run-model",
            f"labels run from {low} to {high}, the model has {classes} outputs, for labels 0 to {classes - 1}",
            "number the labels from 0: numpy.unique(labels, return_inverse=True)[1]; or give the model more outputs",
        )


def _simulate_floats(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        generator = torch.Generator().manual_seed(0)
        return torch.randn(value.shape, generator=generator, dtype=torch.float32).to(value.dtype)
    return value


def _remedy_for(error: Exception, x: Any, y: Any) -> str:
    """What is usually behind it."""
    text = str(error)
    if "out of bounds" in text:
        return "number labels 0 … C-1, C the model's outputs: numpy.unique(labels, return_inverse=True)[1]"
    if isinstance(x, Tensor) and not x.is_floating_point() and "dtype" in text and "mat" in text:
        return "give x as floating point: x.astype('float32')"
    if "Double" in text or "double" in text:
        return "input is float32: use model.float(), or Corpus(…, dtype=torch.float64)"
    if isinstance(y, Tensor):
        if "expected scalar type Long" in text or "not implemented for 'Float'" in text:
            return "class labels are whole numbers: y.astype('int64')"
        if y.dim() == 2 and not y.is_floating_point():
            return "give class numbers, not one-hot rows: y.argmax(1), or y[:, 0] for a single column"
        if "target" in text.lower() and "size" in text.lower():
            return "output and y have different shapes: y[:, None], or output.squeeze(1) in the loss"
        if "found dtype" in text or "same dtype" in text:
            return "mse and bce want y as floating point: y.astype('float32')"
    if isinstance(x, Mapping) and "argument" in text:
        return f"x is passed as keywords {', '.join(map(str, x))}: these must be the names in forward()"
    if "shape" in text or "size" in text:
        return "the first axis counts examples; the others must be what the first layer expects"
    return "correct the model or the loss"
