"""Models, losses, optimisers, schedules and allocations by the names that RUN.toml and the command line use.

The help of commands lists these names, so this module imports torch only in its functions.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from lamina.errors import LaminaError, PlanError
from lamina.plan.depth_profile import DepthProfile
from lamina.plan.selection import did_you_mean
from lamina.validate import parse_toml

if TYPE_CHECKING:
    from torch import nn, optim

    from lamina.allocate.problem import Allocator


class BuiltInModel(NamedTuple):
    """A class of `lamina.signals`, its arguments, and the shape of one example without the batch axis."""

    name: str
    arguments: Mapping[str, Any] = {}
    shape: tuple[int, ...] = (12, 256)


BUILT_IN_MODELS = {
    "residual": BuiltInModel("ResidualAutoencoder"),
    "transformer": BuiltInModel("TransformerAutoencoder", {"features": 48}, (64, 48)),
    "mlp": BuiltInModel("MLPAutoencoder", shape=(864,)),
    "stacked-ae": BuiltInModel("StackedAE"),
    "conv-ae": BuiltInModel("ConvAE"),
    "res-ae": BuiltInModel("ResAE"),
    "trans-ae": BuiltInModel("TransAE"),
    "vae": BuiltInModel("VAE"),
}


def make_model(name: str, arguments: Mapping[str, Any] | None = None, *, beside: Path | None = None) -> nn.Module:
    """A model by its built-in name, or made by `package.module:factory`."""
    from torch import nn

    found: Any
    if (built_in := BUILT_IN_MODELS.get(name)) is not None:
        found = getattr(importlib.import_module("lamina.signals"), built_in.name)
        arguments = {**built_in.arguments, **(arguments or {})}
    else:
        found = import_by_name(name, "model", beside=beside, built_in=tuple(BUILT_IN_MODELS))
    if isinstance(found, nn.Module):
        if arguments:
            problem = f"model '{name}' is an object, so it takes no args"
            raise PlanError("cli.model-takes-no-args", problem, "name its class, or remove args")
        return found
    made = call_factory(found, f"model '{name}'", arguments)
    if not isinstance(made, nn.Module):
        problem = f"model '{name}' made a {type(made).__name__}"
        raise PlanError("cli.model-not-module", problem, "return a torch.nn.Module")
    return made


def import_by_name(name: str, what: str, *, beside: Path | None = None, built_in: tuple[str, ...] = ()) -> Any:
    """Import `package.module:name`, searched first in `beside`, then in the current folder."""
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        known = f", or one of {', '.join(built_in)}" if built_in else ""
        problem = f"{what} '{name}' is not {'built in' if built_in else 'of the form package.module:name'}{did_you_mean(name, built_in)}"
        raise PlanError("cli.name-not-importable", problem, f"use package.module:name{known}")
    from lamina.run.run_output import user_code

    folders = _make_importable(beside)
    try:
        with user_code(f"{what} '{name}' cannot be imported", "correct the line; or --debug for the whole traceback"):
            found = importlib.import_module(module)
    except LaminaError as error:
        missing = error.__cause__
        if isinstance(missing, ModuleNotFoundError) and f"{module}.".startswith(f"{missing.name}."):
            problem = f"{what} '{name}': no module '{missing.name}' in {' or '.join(folders)}, and none is installed"
            remedy = "put the file there, or correct the name before the colon"
            raise PlanError("cli.module-not-found", problem, remedy) from None
        raise
    for part in attribute.split("."):
        if not hasattr(found, part):
            problem = f"{what} '{name}': '{module}' has no '{attribute}'{did_you_mean(part, dir(found))}"
            raise PlanError("cli.attribute-not-found", problem, "correct the name after the colon")
        found = getattr(found, part)
    return found


def call_factory(factory: Any, what: str, arguments: Mapping[str, Any] | None = None) -> Any:
    """`factory(**arguments)`; arguments that do not fit are refused before it runs."""
    given = dict(arguments or {})
    if not callable(factory):
        problem = f"{what} is a {type(factory).__name__}"
        raise PlanError("cli.factory-not-callable", problem, "name a function or a class")
    check_arguments(factory, what, given)
    from lamina.run.run_output import user_code

    with user_code(f"{what} cannot be made", "correct the line; or --debug for the whole traceback"):
        return factory(**given)


def check_arguments(factory: Callable[..., Any], what: str, given: Mapping[str, Any], *, taken: int = 0) -> None:
    """Refuse arguments that `factory` does not take; the first `taken` are given by position."""
    try:
        signature = inspect.signature(factory)
        signature.bind_partial(*[None] * taken, **given)  # names what is unknown before what is missing
        signature.bind(*[None] * taken, **given)
    except TypeError as error:
        remedy = f"it takes {', '.join(parameter_names(factory)[taken:]) or 'no arguments'}"
        raise PlanError("cli.arguments-do-not-fit", f"{what}: {error}", remedy) from None
    except ValueError:
        return  # written in C: it will say so itself


def parameter_names(factory: Any) -> list[str]:
    """The parameters of a function, as far as they are known."""
    try:
        found = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in found if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]


def _make_importable(beside: Path | None) -> list[str]:
    """Put the folder of the run file, then the current folder, on the search path."""
    folders = list(dict.fromkeys([*([] if beside is None else [str(beside.resolve())]), str(Path.cwd())]))
    for folder in reversed(folders):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    importlib.invalidate_caches()  # a file written a moment ago counts
    return [f"'{folder}'" for folder in folders]


_MAX_LISTS = 32  # lists inside each other, or beside each other, in an option

_OPTION_TYPES = {
    bool: ("true or false", "true"),
    int: ("a whole number", "10"),
    float: ("a number", "0.5"),
    str: ("a word", "word"),
}  # of an option of an allocation: its name, and an example


def allocation_with_options(name: str, options: Mapping[str, Any] | None = None) -> Allocator:
    """The allocation of that name with these options: fields of its dataclass, anything else is refused.

    >>> allocation_with_options("ladp", {"mode": "budget"}).name
    'ladp-budget'
    """
    from lamina.allocate.make_plan import ALLOCATIONS, find_allocation

    find_allocation(name)
    policy: Any = ALLOCATIONS[name]
    takes = [field.name for field in dataclasses.fields(policy)]
    options = options or {}
    for key in options:
        if key not in takes:
            problem = f"allocation '{name}' has no option '{key}'{did_you_mean(key, takes)}"
            remedy = f"it takes {', '.join(takes)}" if takes else f"it takes none: write '{name}' alone"
            raise PlanError("cli.allocation-option-not-known", problem, remedy)
    kinds = typing.get_type_hints(type(policy))
    made = {key: _checked_option(name, key, kinds[key], value) for key, value in options.items()}
    changed: Allocator = dataclasses.replace(policy, **made)
    return changed


def parse_allocation(text: str) -> Allocator:
    """`NAME`, or `NAME:key=value,key=value`. Values are read as TOML; a word needs no quotes, a list may hold words.

    >>> parse_allocation("ladp:sensitive=[head,encoder.*],thresholds=[1,4]").thresholds
    (1.0, 4.0)
    """
    name, colon, rest = text.strip().partition(":")
    if not colon:
        return allocation_with_options(name)
    allocation_with_options(name)  # refuses an unknown name first
    options: dict[str, Any] = {}
    for part in _split_at_commas(rest):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (key and equals and value):
            problem = f"'{part}' in '{text}' is not an option"
            raise PlanError("cli.allocation-option-malformed", problem, f"write {name}:key=value,key=value")
        if key in options:
            raise PlanError("cli.allocation-option-repeated", f"option '{key}' is in '{text}' twice", "give it once")
        options[key] = _parse_value(value)
    return allocation_with_options(name, options)


def split_allocations(text: str) -> tuple[str, ...]:
    """Allocations separated by commas, each with its options; none of them is checked here.

    >>> split_allocations("flat,ladp:mode=budget,least=0.2,uniform")
    ('flat', 'ladp:mode=budget,least=0.2', 'uniform')
    """
    found: list[str] = []
    for part in _split_at_commas(text):
        head, equals, _ = part.partition("=")
        if equals and ":" not in head and found:
            found[-1] += f",{part}"
        else:
            found.append(part)
    return tuple(found)


def _checked_option(name: str, key: str, kind: Any, value: Any) -> Any:
    """The value in the type that the allocation takes; ranges are checked by the allocation itself."""
    if key == "sensitive":  # names, patterns or indices of layers, or a depth profile as in a policy.toml
        if isinstance(value, Mapping):
            return DepthProfile.parse(value)
        return tuple(value) if isinstance(value, list | tuple) else (value,)
    if key == "candidates" and isinstance(value, Mapping):
        return tuple((each, tuple(row) if isinstance(row, Sequence) else row) for each, row in value.items())
    if isinstance(value, list):
        return tuple(value)
    plain = {inner for inner in (kind, *typing.get_args(kind)) if inner in _OPTION_TYPES}
    taken = {type(value)} | ({float} if type(value) is int else set())
    if plain and not taken & plain:
        words, examples = zip(*(_OPTION_TYPES[each] for each in plain), strict=True)
        problem = f"{key} of '{name}' is {value!r}, must be {' or '.join(words)}"
        raise PlanError("cli.allocation-option-type", problem, f"write {key}={examples[0]}")
    return value


def _parse_value(text: str) -> Any:
    """A TOML value; a list of words without quotes; or else the text itself."""
    if "\n" not in text:
        try:
            return parse_toml(f"value = {text}")["value"]
        except ValueError:
            pass
    if text.startswith("[") and text.endswith("]") and text.count("[") <= _MAX_LISTS:
        return [_parse_value(part) for part in _split_at_commas(text[1:-1])]
    return text


def _split_at_commas(text: str) -> list[str]:
    """Split at commas outside brackets."""
    parts, depth = [""], 0
    for sign in text:
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts]


def make_loss(name: str, arguments: Mapping[str, Any], *, beside: Any = None) -> Any:
    """A loss by its built-in name, or `package.module:name` of a function of (output, y).

    A class, and anything that has arguments, is called once to make the loss.
    """
    from lamina.run.losses import LOSSES, PerExampleLoss

    if name in LOSSES:
        return PerExampleLoss(name, **arguments)
    found = import_by_name(name, "loss", beside=beside, built_in=tuple(LOSSES))
    if isinstance(found, type) or arguments:
        found = call_factory(found, f"loss '{name}'", arguments)
    if not callable(found):
        problem = f"loss '{name}' is a {type(found).__name__}"
        raise PlanError("cli.loss-not-callable", problem, "name a function of (output, y)")
    return found


OPTIMIZERS = {
    "adam": "Adam", "adamw": "AdamW", "sgd": "SGD", "rmsprop": "RMSprop", "adagrad": "Adagrad", "adadelta": "Adadelta",
    "adamax": "Adamax", "nadam": "NAdam", "radam": "RAdam", "asgd": "ASGD", "adafactor": "Adafactor",
}  # fmt: skip
"""Classes of torch.optim by their names in RUN.toml."""

SCHEDULERS = {
    "cosine": "CosineAnnealingLR", "one_cycle": "OneCycleLR", "linear": "LinearLR", "constant": "ConstantLR",
    "step": "StepLR", "multi_step": "MultiStepLR", "exponential": "ExponentialLR", "polynomial": "PolynomialLR",
}  # fmt: skip
"""Classes of torch.optim.lr_scheduler by their names in RUN.toml."""

_REFUSED_OPTIMIZERS = {
    "lbfgs": "uses several gradients in one step, and each of them would cost ε",
    "plateau": "follows the loss, and no budget pays for reading the private loss",
    "reducelronplateau": "follows the loss, and no budget pays for reading the private loss",
}


def make_optimizer(name: str, arguments: Mapping[str, Any], model: nn.Module) -> optim.Optimizer | Literal["auto"]:
    """Return a torch optimiser of the model's parameters with these arguments; "auto" is returned for the trainer."""
    if name == "auto":
        check_arguments(lambda: None, "optimizer 'auto'", arguments)
        return "auto"
    kind = _look_up(name, "optimizer", OPTIMIZERS, "torch.optim")
    made: optim.Optimizer = _construct(kind, f"optimizer '{name}'", arguments, list(model.parameters()))
    return made


def make_scheduler(name: str, arguments: Mapping[str, Any], over: optim.Optimizer, steps: int) -> Any:
    """A torch schedule that is stepped so often. Its length is the run's by default."""
    kind = _look_up(name, "scheduler", SCHEDULERS, "torch.optim.lr_scheduler")
    lengths: dict[str, dict[str, Any]] = {
        "cosine": {"T_max": steps},
        "linear": {"total_iters": steps},
        "polynomial": {"total_iters": steps},
        "one_cycle": {"total_steps": steps, "max_lr": [group["lr"] for group in over.param_groups]},
    }
    return _construct(kind, f"scheduler '{name}'", {**lengths.get(name, {}), **arguments}, over)


def _look_up(name: str, what: str, known: Mapping[str, str], module: str) -> Any:
    if name in known:
        return getattr(importlib.import_module(module), known[name])
    if reason := _REFUSED_OPTIMIZERS.get(name.lower()):
        raise PlanError("cli.optimizer-not-private", f"{what} '{name}' {reason}", f"use one of {', '.join(known)}")
    problem = f"{what} '{name}' is not known{did_you_mean(name, list(known))}"
    raise PlanError("cli.optimizer-not-known", problem, f"use one of {', '.join(known)}")


def _construct(kind: Callable[..., Any], what: str, arguments: Mapping[str, Any], *given: Any) -> Any:
    from lamina.run.run_output import user_code

    plain = {name: tuple(value) if isinstance(value, list) else value for name, value in arguments.items()}
    check_arguments(kind, what, plain, taken=len(given))
    with user_code(f"{what} cannot be made", "correct its arguments; torch's documentation names their ranges"):
        return kind(*given, **plain)
