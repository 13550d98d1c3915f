"""`lamina plan`: what a policy costs on a model, before anything is trained."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from torch import nn

from lamina import models
from lamina.allocate import ALLOCATIONS, make_plan
from lamina.cli.output import out, print_json
from lamina.errors import LaminaError, PlanError
from lamina.plan import LayerStack, Policy

BUILT_IN: dict[str, Callable[[], nn.Module]] = {
    "residual": models.ResidualAutoencoder,
    "transformer": lambda: models.TransformerAutoencoder(48),
    "mlp": models.MLPAutoencoder,
}


def plan(
    policy: Annotated[
        Path, typer.Argument(help="policy.toml: classes, populations, budgets, depth profiles")
    ],
    model: Annotated[
        str, typer.Option(help="package.module:factory, or built in: residual, transformer, mlp")
    ] = "residual",
    batch: Annotated[int, typer.Option(help="expected contributions per step, all classes together")] = 256,
    steps: Annotated[int | None, typer.Option(help="steps; or give --epochs")] = None,
    epochs: Annotated[float | None, typer.Option(help="passes over the declared populations")] = None,
    allocate: Annotated[
        str, typer.Option(help=f"how C and S are chosen: {', '.join(ALLOCATIONS)}")
    ] = "pareto",
    clipping: Annotated[
        str | None, typer.Option(help="box or joint; default: what the allocation prefers")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Show clipping, noise, sigma and ε of every class and layer. Nothing is trained and nothing is spent.

    Example: lamina plan policy.toml --model mypackage.nets:build --batch 256 --epochs 20
    """
    if (steps is None) == (epochs is None):
        raise PlanError("the length of the training is not clear", "give one of --steps and --epochs")
    made = make_plan(
        LayerStack.from_model(load(model)),
        Policy.load(policy),
        batch=batch,
        steps=steps,
        epochs=epochs,
        allocate=allocate,
        clipping=clipping,
    )
    if as_json:
        print_json(made.to_dict())
    else:
        out.print(str(made), markup=False, soft_wrap=True)


def load(name: str) -> nn.Module:
    """A model by its built-in name or from `package.module:factory`, which is called without arguments."""
    if name in BUILT_IN:
        return BUILT_IN[name]()
    module, colon, factory = name.partition(":")
    if not colon:
        raise PlanError(
            f"model '{name}' is not built in", f"use package.module:factory, or one of {', '.join(BUILT_IN)}"
        )
    if "" not in sys.path:
        sys.path.insert(0, "")  # modules of the folder that the command is called in
    try:
        made = getattr(importlib.import_module(module), factory)()
    except Exception as error:  # the factory is the user's: whatever it raises is told, not traced
        raise LaminaError(
            f"model '{name}' cannot be made: {type(error).__name__}: {error}",
            "the module must be importable from this folder, the factory callable without arguments",
        ) from error
    if not isinstance(made, nn.Module):
        raise PlanError(f"model '{name}' made a {type(made).__name__}", "return a torch.nn.Module")
    return made
