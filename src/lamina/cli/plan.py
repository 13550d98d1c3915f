"""`lamina plan`: what a policy costs on a model, before anything is trained."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from lamina.allocate import ALLOCATIONS, make_plan
from lamina.cli import named
from lamina.cli.notes import plan_notes
from lamina.cli.output import out, print_json, results_only
from lamina.plan import Clipping, LayerStack, Policy


def plan(
    policy: Annotated[
        Path | None,
        typer.Argument(metavar="policy.toml", help="classes, populations, budgets, depth profiles"),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            help=f"package.module:factory, or built in: {', '.join(named.BUILT_IN)}",
            autocompletion=lambda: list(named.BUILT_IN),
        ),
    ] = "residual",
    batch: Annotated[int, typer.Option(help="expected contributions per step, all classes together")] = 256,
    steps: Annotated[int | None, typer.Option(help="steps; or give --epochs")] = None,
    epochs: Annotated[float | None, typer.Option(help="passes over the declared populations")] = None,
    allocate: Annotated[
        str,
        typer.Option(
            help=f"how C and S are chosen: {', '.join(ALLOCATIONS)}", autocompletion=lambda: list(ALLOCATIONS)
        ),
    ] = "pareto",
    clipping: Annotated[
        str | None,
        typer.Option(
            help="box or joint; default: what the allocation prefers",
            autocompletion=lambda: [form.value for form in Clipping],
        ),
    ] = None,
    template: Annotated[
        bool, typer.Option("--template", help="print an annotated policy.toml to start from, and exit")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Show clipping, noise, sigma and ε of every class and layer, before the first step.

    Spends nothing, writes nothing and reads no data: what a plan costs follows from the policy, the shape of the
    model, the batch and the number of steps. Try other values until ε, noise and length suit you, then train.

    Examples:

      lamina plan --template > policy.toml     a policy to edit
      lamina plan policy.toml --epochs 20
      lamina plan policy.toml --model nets:build --batch 512 --steps 2000
    """
    if template:
        text = Policy.template_text()
        print_json({"template": text}) if as_json else sys.stdout.write(text)
        return
    if policy is None:
        raise typer.BadParameter("give the policy, or --template to get one", param_hint="policy.toml")
    if (steps is None) == (epochs is None):
        raise typer.BadParameter("give one of --steps and --epochs", param_hint="--steps")
    rules = Policy.load(policy)
    with results_only():
        net = named.model(model)
    made = make_plan(
        LayerStack.from_model(net),
        rules,
        batch=batch,
        steps=steps,
        epochs=epochs,
        allocate=allocate,
        clipping=clipping,
    )
    notes = plan_notes(made, rules)
    if as_json:
        print_json({**made.to_dict(), "notes": list(notes)})
        return
    out.print(str(made), markup=False, soft_wrap=True)
    for note in notes:
        out.print(f"note: {note}", markup=False, soft_wrap=True)
