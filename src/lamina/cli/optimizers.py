"""Optimisers and schedules by name. Only those that take one gradient per step and look at no loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn, optim
from torch.optim import lr_scheduler

from lamina.cli.named import check_arguments
from lamina.errors import PlanError
from lamina.plan.naming import suggestion
from lamina.train.blame import user_code

OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "adam": optim.Adam,
    "adamw": optim.AdamW,
    "sgd": optim.SGD,
    "rmsprop": optim.RMSprop,
    "adagrad": optim.Adagrad,
    "adadelta": optim.Adadelta,
    "adamax": optim.Adamax,
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
    "asgd": optim.ASGD,
    "adafactor": optim.Adafactor,
}

SCHEDULERS: dict[str, Callable[..., Any]] = {
    "cosine": lr_scheduler.CosineAnnealingLR,
    "one_cycle": lr_scheduler.OneCycleLR,
    "linear": lr_scheduler.LinearLR,
    "constant": lr_scheduler.ConstantLR,
    "step": lr_scheduler.StepLR,
    "multi_step": lr_scheduler.MultiStepLR,
    "exponential": lr_scheduler.ExponentialLR,
    "polynomial": lr_scheduler.PolynomialLR,
}

_REFUSED = {
    "lbfgs": "asks for several gradients in one step, and each of them would be a release",
    "plateau": "follows a loss, and the private loss is a release that no budget paid for",
    "reducelronplateau": "follows a loss, and the private loss is a release that no budget paid for",
}


def optimizer(name: str, arguments: Mapping[str, Any], model: nn.Module) -> optim.Optimizer:
    """A torch optimiser over the model's parameters, with any further argument that it takes."""
    kind = _known(name, "optimizer", OPTIMIZERS)
    made: optim.Optimizer = _made(kind, f"optimizer '{name}'", arguments, list(model.parameters()))
    return made


def scheduler(name: str, arguments: Mapping[str, Any], over: optim.Optimizer, steps: int) -> Any:
    """A torch schedule, stepped once per private step. Where it has a length, that is the run's by default."""
    kind = _known(name, "scheduler", SCHEDULERS)
    lengths: dict[str, dict[str, Any]] = {
        "cosine": {"T_max": steps},
        "linear": {"total_iters": steps},
        "polynomial": {"total_iters": steps},
        "one_cycle": {"total_steps": steps, "max_lr": [group["lr"] for group in over.param_groups]},
    }
    return _made(kind, f"scheduler '{name}'", {**lengths.get(name, {}), **arguments}, over)


def _known(name: str, what: str, known: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    if name in known:
        return known[name]
    if reason := _REFUSED.get(name.lower()):
        raise PlanError("cli.use", f"{what} '{name}' {reason}", f"use one of {', '.join(known)}")
    raise PlanError(
        "cli.not-known",
        f"{what} '{name}' is not known{suggestion(name, list(known))}",
        f"use one of {', '.join(known)}",
    )


def _made(kind: Callable[..., Any], what: str, arguments: Mapping[str, Any], *given: Any) -> Any:
    plain = {name: tuple(value) if isinstance(value, list) else value for name, value in arguments.items()}
    check_arguments(kind, what, plain, taken=len(given))
    with user_code(
        f"{what} cannot be made", "correct its arguments; torch's documentation names their ranges"
    ):
        return kind(*given, **plain)
