"""What a trainer refuses before anything is spent.

Arguments, depth profiles, and a rehearsal on simulated input.
"""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, OneCycleLR, StepLR
from torch.utils import _pytree as pytree

from lamina.allocate.problem import FAR_ABOVE, untuned_clip_norm
from lamina.engine.batch import Batch
from lamina.engine.budget import refuse_filter
from lamina.engine.distributed import Ranks
from lamina.engine.engine import Engine
from lamina.engine.guards.checked_batch import check_losses
from lamina.engine.simulated_input import simulate, simulate_for
from lamina.errors import LaminaError, PlanError, RunError
from lamina.ledger.run_records import DECLARED_ORIGINS
from lamina.plan.charges import SignedAccount
from lamina.plan.layer_stack import LayerStack
from lamina.plan.policy import Policy
from lamina.plan.profile_reach import Reach
from lamina.plan.rules import Choose, FollowBudget
from lamina.plan.selection import complement_ranges
from lamina.plan.signed_bounds import REMAINING_FACTORS
from lamina.plan.step_plan import Clipping, StepPlan
from lamina.release.run_evidence import RunMetrics
from lamina.run.corpus import Corpus, ProbeArgument
from lamina.run.loss_advice import WRONG_SHAPE, LossAdvice
from lamina.run.publisher import Evaluation
from lamina.run.run_output import Callback
from lamina.run.sampler import Sampler
from lamina.validate import one_of


def check_trainer_arguments(model: Any, loss_fn: Any, corpus: Any, plan: Any) -> None:
    """Refuse arguments of the wrong kind."""
    check_model(model)
    if not isinstance(plan, StepPlan):
        remedy = "make one: lamina.make_plan(stack, policy, …)"
        raise RunError("corpus.plan-not-a-plan", f"the plan is a {type(plan).__name__}", remedy)
    _check_loss(loss_fn)
    if not isinstance(corpus, Corpus):
        remedy = "make a corpus and say what a contribution is: lamina.Corpus(x, y, unit=…) or Corpus(dataset, unit=…)"
        raise RunError("train.data-not-a-corpus", f"the data is a {type(corpus).__name__}", remedy)


def check_model(model: Any) -> None:
    """Refuse a model that is not a module of torch, with what to give instead."""
    if isinstance(model, nn.Module):
        return
    problem, remedy = f"the model is a {type(model).__name__}", "give a torch.nn.Module (after lamina.fix: its .model)"
    if isinstance(model, type):
        problem, remedy = f"the model is the class {model.__name__}, not an instance of it", f"give {model.__name__}(…)"
    elif isinstance(model, str):
        problem = f"the model is the text {model!r}"
        remedy = "make the module, such as torchvision.models.resnet18(weights=None), then lamina.fix(module).model"
    elif any(each.__module__.startswith(("sklearn.", "xgboost.", "lightgbm.")) for each in type(model).__mro__):
        problem += ", which does not learn by gradients of single examples"
        remedy = "give a torch.nn.Module; torch.nn.Linear is logistic regression, lamina.recipes.tabular makes a model for a table"
    raise RunError("train.model-not-a-module", problem, remedy)


def unwrap_prepared(thing: Any) -> Any:
    """Return the optimiser or scheduler inside the wrapper of `Accelerator.prepare`; other objects are returned unchanged.

    The wrapper hides the code that a resumed run compares, and skips steps inside of `accelerator.accumulate`.
    """
    wrapped = type(thing).__module__.startswith("accelerate.")
    return getattr(thing, "optimizer", None) or getattr(thing, "scheduler", thing) if wrapped else thing


_VANISHING_RATE = 1e-6  # of the first learning rate


def check_scheduler(scheduler: Any, plan: StepPlan, interval: str) -> int:
    """After how many private steps the scheduler is stepped; one that does not fit the run's length is refused."""
    if scheduler is not None and "metrics" in inspect.signature(scheduler.step).parameters:
        problem = f"{type(scheduler).__name__} follows the private loss, which is a release without a budget"
        remedy = "use a schedule that is fixed in advance, such as CosineAnnealingLR"
        remedy += ": it is stepped once per private step"
        raise RunError("train.scheduler-follows-loss", problem, remedy)
    if scheduler is not None and not hasattr(scheduler, "step"):
        problem = f"the scheduler is a {type(scheduler).__name__}"
        raise RunError("train.scheduler-not-a-scheduler", problem, "give a torch.optim.lr_scheduler")
    every = steps_per_interval(plan, interval)
    times, problem, remedy = plan.steps // every, "", "a larger step_size, or gamma nearer to 1"
    if isinstance(scheduler, OneCycleLR) and scheduler.total_steps < times:
        problem, remedy = f"ends after total_steps={scheduler.total_steps}", f"total_steps={times}"
    elif isinstance(scheduler, CosineAnnealingLR) and scheduler.T_max < times:
        problem, remedy = f"has T_max={scheduler.T_max}, after which the rate rises again", f"T_max={times}"
    elif isinstance(scheduler, StepLR) and scheduler.gamma ** (times // scheduler.step_size) < _VANISHING_RATE:
        problem = f"has step_size={scheduler.step_size} and gamma={scheduler.gamma}: the rate vanishes"
    elif isinstance(scheduler, ExponentialLR) and scheduler.gamma**times < _VANISHING_RATE:
        problem = f"has gamma={scheduler.gamma}: the rate vanishes"
    if problem:
        problem = f"{type(scheduler).__name__} {problem}; the run steps it {times:,} times, once per {interval}"
        epochs = 'interval="epoch", if it counts epochs; otherwise ' if interval == "step" else ""
        raise RunError("train.scheduler-does-not-fit", problem, f"give {epochs}{remedy}")
    return every


def steps_per_interval(plan: StepPlan, interval: str) -> int:
    """1 for "step"; for "epoch" those of a pass over the declared populations: ⌈ΣN_k / Σb_k⌉, as `make_plan` counts."""
    if one_of(RunError, "train.interval-unknown", ("step", "epoch"), interval=interval) == "step":
        return 1
    if any(entry.population is None for entry in plan.classes):
        problem = 'interval="epoch" is given, and the plan declares no population for some class'
        raise RunError("train.epoch-unknown", problem, 'use interval="step"')
    populations = [entry.population or 0 for entry in plan.classes]
    batch = math.fsum(n * entry.sampling_rate for n, entry in zip(populations, plan.classes, strict=True))
    return max(1, math.ceil(sum(populations) / batch - 1e-9))


def check_trainer_options(folder: Any, evaluate: Any, max_occurrences: Any, callbacks: Sequence[Any]) -> None:
    """Refuse options of the wrong kind."""
    for callback in callbacks:
        if not isinstance(callback, Callback):
            remedy = "give objects of a subclass of lamina.Callback, with on_segment or on_evaluation"
            raise RunError("train.callback-not-a-callback", f"a callback is a {type(callback).__name__}", remedy)
    if not isinstance(folder, str | os.PathLike) or not str(folder) or "\0" in str(folder):
        raise RunError("train.folder-not-a-path", f"folder is {folder!r}", 'give a path: folder="runs/first"')
    if evaluate is not None and not isinstance(evaluate, Evaluation):
        remedy = 'say which data it reads: lamina.Evaluation(function=…, on="public")'
        raise RunError("train.evaluate-not-an-evaluation", f"evaluate is a {type(evaluate).__name__}", remedy)
    if max_occurrences is not None and not isinstance(max_occurrences, Mapping):
        problem = f"max_occurrences is {max_occurrences!r}"
        raise RunError("corpus.max-occurrences-not-by-class", problem, 'give it by class: {"clinical": 50}')


def check_class_names(plan: StepPlan, **given: Mapping[str, Any]) -> None:
    """Refuse names that are no class of the plan: a typo must not lift a bound."""
    known = [entry.name for entry in plan.classes]
    for what, values in given.items():
        for name in values:
            if name not in known:
                problem = f"{what} names class {name!r}, which the plan does not have"
                raise RunError("corpus.class-not-in-plan", problem, f"its classes are {', '.join(known)}")


def epsilon_bounds_of_policy(corpus: Corpus, plan: StepPlan) -> dict[str, float]:
    """The ε that the corpus's policy allows each class of the plan, over all runs."""
    if corpus.policy is None:
        return {}
    names = [entry.name for entry in plan.classes if not entry.public and entry.name in corpus.policy.classes]
    found = {name: corpus.policy.bound(name) for name in names}
    return {name: bound for name, bound in found.items() if bound is not None}


def check_optimizer(model: nn.Module, optimizer: Any) -> None:
    """Refuse an optimiser that cannot perform the steps of a private run of this model."""
    if not isinstance(optimizer, Optimizer):
        remedy = 'give "auto", or a torch optimiser: torch.optim.Adam(model.parameters(), lr=1e-3)'
        raise RunError("train.optimizer-not-an-optimizer", f"the optimiser is a {type(optimizer).__name__}", remedy)
    if isinstance(optimizer, LBFGS):
        problem = "LBFGS takes several gradients per step, and each would be a release"
        remedy = "use an optimiser that takes one gradient per step: SGD, Adam, AdamW"
        raise RunError("train.optimizer-several-gradients", problem, remedy)
    mine = {id(p) for p in model.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(id(p) in mine for p in held):
        remedy = "make it after the model is final (after lamina.fix or fully_shard): Adam(model.parameters())"
        raise RunError("train.optimizer-of-other-model", "the optimiser holds none of the model's parameters", remedy)
    strangers = sum(id(p) not in mine for p in held)
    if strangers:
        problem = f"the optimiser holds {strangers} tensors that are not the model's"
        remedy = "put everything that learns into one module, so that its coverage can be checked"
        raise RunError("train.optimizer-has-foreign-tensors", problem, remedy)


def _check_loss(loss_fn: Any) -> None:
    if not callable(loss_fn):
        problem = f"loss_fn is a {type(loss_fn).__name__}"
        raise RunError("train.loss-not-callable", problem, "give a function of (output, y)")
    reduction = getattr(loss_fn, "reduction", "none")
    if reduction != "none":
        name = type(loss_fn).__name__
        problem = f"{name} has reduction='{reduction}': one loss for the whole batch, which cannot be clipped"
        raise RunError("train.loss-reduced", problem, f"use {name}(reduction='none'): one loss per example")


MOST_EXAMPLES_COMPILED = 512  # in one graph: `MOST_CONTRIBUTIONS` of engine/execute/compiled.py


def check_compiled(
    corpus: Corpus, plan: StepPlan, engine: Engine | None, ranks: Ranks, *, parts: int, views: int
) -> None:
    """Refuse to compile the steps of a run in which most batches would not fit the graph."""
    from lamina.engine.execute.compiled import unsupported_plan  # torch's tracing is slow to import

    problem, remedy = unsupported_plan(plan), "leave compiled out"
    if engine is not None and engine.compiled is None:
        problem, remedy = "the engine that is given does not compile", "make it with compiled=True, or leave it out"
    elif not ranks.alone:
        problem = f"{ranks.size} ranks take the steps together"
    elif views > 1 or bool((corpus.layout.sizes(corpus.eligible) > 1).any()):
        problem = "contributions have several examples" + (", by views" if views > 1 else "")
    elif part_sizes(plan, parts)[0] > MOST_EXAMPLES_COMPILED:
        problem = f"a part of a batch has some {part_sizes(plan, parts)[0]} contributions, and a graph takes 512"
        remedy = "give microbatches, so that a part has fewer; or leave compiled out"
    if problem:
        raise RunError("train.compiled-misplaced", f"compiled is true, and {problem}", remedy)


def part_sizes(plan: StepPlan, parts: int) -> tuple[int, ...]:
    """The expected size of a part of a batch, and sizes far below and above it: they depend on the plan alone."""
    usual = max(2, round(plan.batch / parts))
    spread = math.ceil(6 * math.sqrt(usual))
    return usual, max(2, usual - spread), min(MOST_EXAMPLES_COMPILED, usual + spread)


def declared_start(given: str | os.PathLike[str] | None, beside: Path = Path()) -> str | None:
    """Return the declared origin of the starting weights: "untrained", "public", or the id of a run, from an id or a folder."""
    text = None if given is None else os.fspath(given)
    if text is None or text in DECLARED_ORIGINS or re.fullmatch("[0-9a-f]{32}", text):
        return text
    if not (folder := beside / text).joinpath("metrics.json").is_file():
        problem = f"starting_weights is {text!r}, which is no folder of a run and no id of 32 hex digits"
        raise RunError("train.starting-weights-unknown", problem, 'give "untrained", "public", or runs/NAME')
    return RunMetrics.load(folder).run.hex()


def refuse_taken_options(where: str, options: Mapping[str, Any], taken: Mapping[str, str]) -> None:
    """Refuse options of a run that something else than its caller sets: `taken` says what to give instead."""
    if found := sorted(options.keys() & taken.keys()):
        raise RunError("train.option-taken", f"{found[0]} is given, and {where} sets it", taken[found[0]])


def check_filters(plan: StepPlan, filters: Mapping[str, Any]) -> None:
    """Refuse filters beside an adaptive budget, which has a filter of its own, in its own units."""
    if filters and plan.rule(FollowBudget) is not None:
        problem = "filters are given, and the plan adapts its noise under a filter of its own"
        remedy = "leave filters out, or plan with a fixed sigma: LADP(mode='shares')"
        raise RunError("train.filters-with-adaptive-noise", problem, remedy)
    for name, each in filters.items():
        refuse_filter(plan, name, each)


def check_accounts_signed(signed: Sequence[SignedAccount], further: Sequence[SignedAccount]) -> None:
    """Refuse a further account of a class whose members signed theirs: an auditor would find nobody who signed it."""
    classes = {each.cls for each in signed}
    if unsigned := [each for each in further if each.cls in classes]:
        problem = f"nobody signed the bound of account {unsigned[0].name!r}"
        problem += ", and its class has members who signed theirs"
        raise RunError("train.account-not-signed", problem, "leave it out, or admit contributions that sign it")


def remaining_factors(corpus: Corpus, plan: StepPlan, further: Sequence[SignedAccount]) -> tuple[float, ...]:
    """The factors that the policy allows for exhausted bounds; none: a run that exceeds one is refused, as a whole.

    Refuses what a smaller threshold, or leaving somebody out, is not known to make cheaper for them.
    """
    chosen = "refuse" if corpus.policy is None else corpus.policy.corpus.exhausted
    unproven = {
        "the plan moves clip norms or noise by rules": bool(plan.rules) or not plan.scales,
        "occurrences are charged one by one": plan.injection.occurrences is not None,
        "accounts are given, and nobody knows whose they are": bool(further),
    }
    if chosen != "refuse" and any(unproven.values()):
        problem = f"the policy has exhausted = {chosen!r}, and {next(why for why, holds in unproven.items() if holds)}"
        remedy = 'use exhausted = "refuse" under [corpus], or leave that out'
        raise RunError("train.exhausted-not-provable", problem, remedy)
    return REMAINING_FACTORS[chosen]


def check_caps(corpus: Corpus, plan: StepPlan, caps: Mapping[str, int]) -> None:
    """Refuse caps that the sampler refuses, and caps beside a choice, which draws without counting."""
    Sampler(corpus, plan, seed=bytes(32), max_occurrences=caps or None)
    if caps and plan.rule(Choose) is not None:
        problem = "max_occurrences is given, and the plan makes choices whose draws are not counted"
        remedy = "leave max_occurrences out, or plan without choices"
        raise RunError("train.max-occurrences-with-choices", problem, remedy)


DEPTH_NOT_COMPARED = (
    "the depth of the plan's layers was not compared with the policy: they were read with other options"
)


def check_depth_profiles(model: nn.Module, policy: Policy | None, plan: StepPlan) -> str | None:
    """Refuse a plan in which a class trains what its profile excludes.

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
    openings = {part.tensor: part for part in reach.openings}
    for i, layer in enumerate(plan.layers):
        for name in layer.parameters if plan.clip[k][i] > 0 else ():
            mine, allowed = plan.slice(k, name), openings.get(name)
            if not reach.layers[layer_of[name]]:
                free = mine is not None and not mine.ranges
            elif allowed is None:
                free = True
            else:
                closed, ours = complement_ranges(allowed.ranges, allowed.length), () if mine is None else mine.ranges
                free = mine is not None and not any(first < b and a < stop for first, stop in ours for a, b in closed)
            if not free:
                problem = f"class {plan.classes[k].name!r} trains {name!r}, outside its profile ({reach.words})"
                raise RunError("train.class-outside-profile", problem, "make the plan under the policy of the data")


SEEDED_NOTE = "not private: samples and noise came from a seed that somebody chose"
NOT_PROBED_NOTE = "not probed: ε holds only if examples do not influence each other in augmentation, model and loss"
RAW_SHOWN_NOTE = "raw losses of private data were given to a progress of the user's own: no certificate is signed"


def raw_shown_before(folder: Path) -> bool:
    """Whether an earlier session of the run in a folder gave raw losses away, even if it got to no checkpoint."""
    path = folder / "metrics.json"
    return path.is_file() and RAW_SHOWN_NOTE.encode() in path.read_bytes()


def rehearse(
    engine: Engine, losses_of: Callable[[Any, Any], Tensor], corpus: Corpus, *, probe: ProbeArgument, advice: LossAdvice
) -> list[str]:
    """Try one step without noise, optimiser or charge; then the engine's independence probe. Returns notes.

    On public examples, where `probe` has them; otherwise on simulated ones: of the data only shapes and types are used.
    """
    x, y = probe if isinstance(probe, tuple) else corpus.no_examples()
    engine.model.train()
    try:
        with advice.watch():
            if not isinstance(probe, tuple):
                x, y = simulate_for(losses_of, x, y)
            losses = losses_of(x, y)
        if advice.broadcasts and (told := advice.advise(x, y)):
            raise RunError("train.model-or-loss-failed", *told)
        check_losses(losses, Batch(x, y).examples)
    except LaminaError as error:
        if error.code == WRONG_SHAPE and (told := advice.advise(x, y)):
            raise RunError("train.model-or-loss-failed", *told) from None
        raise
    except Exception as error:  # the model and the loss are the user's: say what they were given
        if told := advice.advise(*((x, y) if Batch(x, y).examples else simulate(x, y, 6))):
            raise RunError("train.model-or-loss-failed", *told) from error
        shapes, kind = _types_of(x), "the inputs themselves" if y is None else _types_of(y)
        which = "public" if isinstance(probe, tuple) else "simulated"
        problem = f"model or loss failed on {which} examples: {type(error).__name__}: {error}"
        remedy = f"{_remedy_for(error, x, y)}. (x is {shapes}; targets are {kind})"
        raise RunError("train.model-or-loss-failed", problem, remedy) from error
    notes = _large_clip_norms(engine, losses, x, y)
    engine.clipped_sums(losses, Batch(x, y, cls=torch.zeros(Batch(x, y).examples, dtype=torch.long)))
    if probe is False:
        engine.decline_probe()
    else:
        engine.probe(losses_of, x, y)
    return notes


def _large_clip_norms(engine: Engine, losses: Tensor, x: Any, y: Any) -> list[str]:
    """A note for each private class whose clip norm lies far above the gradients of simulated or public examples."""
    plan, notes = engine.plan, []
    if plan.rules or plan.clipping is Clipping.ELEMENTWISE:
        return []
    for k, entry in enumerate(plan.classes):
        if entry.public or not any(plan.clip[k]):
            continue
        batch = Batch(x, y, cls=torch.full((Batch(x, y).examples,), k))
        typical = float(engine.proxy_norms(losses, batch).median())
        if 0 < FAR_ABOVE * typical < plan.norm(k):
            notes.append(
                f"the clip norm of class {entry.name}, {plan.norm(k):.3g}, is {plan.norm(k) / typical:.2g} times the gradient of "
                f"a typical simulated example: it scales the noise up and clips nearly nobody; try "
                f"clip_norm = {untuned_clip_norm(typical):g}"
            )
    return notes


def _types_of(tree: Any) -> str:
    return ", ".join(f"{t.dtype} {tuple(t.shape)}" for t in pytree.tree_leaves(tree) if isinstance(t, Tensor))


def _remedy_for(error: Exception, x: Any, y: Any) -> str:
    """What to do about the usual causes of an error."""
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
    return "correct the model or the loss; if it takes only data of its own kind, give public examples: probe=(x, y)"
