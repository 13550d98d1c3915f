"""Things by name: `package.module:name`, looked up beside the run file and in the folder of the command."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from lamina import models
from lamina.errors import LaminaError, PlanError
from lamina.plan.naming import suggestion
from lamina.train.blame import user_code

BUILT_IN: dict[str, Callable[..., nn.Module]] = {
    "residual": models.ResidualAutoencoder,
    "transformer": partial(models.TransformerAutoencoder, features=48),
    "mlp": models.MLPAutoencoder,
}
INPUTS: dict[str, tuple[int, ...]] = {"residual": (12, 256), "transformer": (64, 48), "mlp": (864,)}
"""One example of each, without the batch axis."""


def model(name: str, arguments: Mapping[str, Any] | None = None, *, beside: Path | None = None) -> nn.Module:
    """A model by its built-in name, or made by `package.module:factory`."""
    found = (
        BUILT_IN[name] if name in BUILT_IN else find(name, "model", beside=beside, built_in=tuple(BUILT_IN))
    )
    if isinstance(found, nn.Module):
        if arguments:
            raise PlanError(
                "cli.model-model-already",
                f"model '{name}' is a model already, and args are given",
                "name its class, or drop args",
            )
        return found
    made = call(found, f"model '{name}'", arguments)
    if not isinstance(made, nn.Module):
        raise PlanError(
            "cli.model-made", f"model '{name}' made a {type(made).__name__}", "return a torch.nn.Module"
        )
    return made


def find(name: str, what: str, *, beside: Path | None = None, built_in: tuple[str, ...] = ()) -> Any:
    """What `package.module:name` stands for. `beside` is searched first, then the folder of the command."""
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        known = f", or one of {', '.join(built_in)}" if built_in else ""
        raise PlanError(
            "cli.not",
            f"{what} '{name}' is not {'built in' if built_in else 'of the form package.module:name'}"
            f"{suggestion(name, built_in)}",
            f"use package.module:name{known}",
        )
    folders = _make_importable(beside)
    try:
        with user_code(
            f"{what} '{name}' cannot be imported", "correct the line; or --debug for the whole traceback"
        ):
            found = importlib.import_module(module)
    except LaminaError as error:
        missing = error.__cause__
        if isinstance(missing, ModuleNotFoundError) and _is_above(missing.name, module):
            raise PlanError(
                "cli.no-module-nor",
                f"{what} '{name}': there is no module '{missing.name}' in {' or '.join(folders)}, nor installed",
                "put the file there, or correct the name before the colon",
            ) from error
        raise
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise PlanError(
                "cli.no",
                f"{what} '{name}': '{module}' has no '{attribute}'{suggestion(part, dir(found))}",
                "correct the name after the colon",
            )
        found = getattr(found, part)
    return found


def call(factory: Any, what: str, arguments: Mapping[str, Any] | None = None) -> Any:
    """`factory(**arguments)`, with arguments that do not fit told before it runs."""
    given = dict(arguments or {})
    if not callable(factory):
        raise PlanError(
            "cli.name-function-class", f"{what} is a {type(factory).__name__}", "name a function or a class"
        )
    check_arguments(factory, what, given)
    with user_code(f"{what} cannot be made", "correct the line; or --debug for the whole traceback"):
        return factory(**given)


def check_arguments(
    factory: Callable[..., Any], what: str, given: Mapping[str, Any], *, taken: int = 0
) -> None:
    """Refuse arguments that `factory` does not take; the first `taken` are given by position."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return  # written in C: it will say so itself
    accepted = parameters(factory)[taken:]
    remedy = f"it takes {', '.join(accepted) or 'no arguments'}"
    if not any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        for name in given:
            if name not in accepted:
                raise PlanError(
                    "cli.takes-no-argument",
                    f"{what} takes no argument '{name}'{suggestion(name, accepted)}",
                    remedy,
                )
    try:
        signature.bind(*[None] * taken, **given)
    except TypeError as error:
        raise PlanError("cli.check-arguments", f"{what}: {error}", remedy) from error


def parameters(factory: Any) -> list[str]:
    """The names of what a function takes, as far as it tells."""
    try:
        found = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in found if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]


def _make_importable(beside: Path | None) -> list[str]:
    """Put the folder of the command, and before it the folder of the run file, on the search path."""
    folders = [str(Path.cwd())] if beside is None else [str(beside.resolve()), str(Path.cwd())]
    folders = list(dict.fromkeys(folders))
    for folder in reversed(folders):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    importlib.invalidate_caches()  # a file written a moment ago counts
    return [f"'{folder}'" for folder in folders]


def _is_above(missing: str | None, module: str) -> bool:
    """Whether the missing module is the one that was named, or a package around it."""
    return missing is not None and (module == missing or module.startswith(missing + "."))
