"""`lamina plan`: what a policy costs on a model, before anything is trained."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from lamina.allocate import ALLOCATIONS, explained_plan
from lamina.allocate.registry import DEFAULT
from lamina.cli import allocations, named
from lamina.cli.explain.answer import Answer
from lamina.cli.explain.compare import compare
from lamina.cli.explain.picture import check_picture, draw
from lamina.cli.explain.words import asked
from lamina.cli.measuring import Wanted
from lamina.cli.notes import plan_notes
from lamina.cli.output import out, print_json, results_only
from lamina.plan import Clipping, LayerStack, Policy
from lamina.plan.opened import planned_sizes

_EXPLAIN, _MEASURE = "Explaining", "Measuring the layers (never on private data)"


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
            help=f"how C and S are chosen: {', '.join(ALLOCATIONS)}; with options: ladp:mode=budget,least=0.2",
            autocompletion=lambda: list(ALLOCATIONS),
        ),
    ] = DEFAULT,
    clipping: Annotated[
        str | None,
        typer.Option(
            help="box or joint; default: what the allocation prefers",
            autocompletion=lambda: [Clipping.BOX.value, Clipping.JOINT.value],
        ),
    ] = None,
    rho: Annotated[
        float | None,
        typer.Option(help="budget of every class in zCDP, ρ/T per step, instead of the policy's ε"),
    ] = None,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain", help="figures and bars of every layer, and why this plan", rich_help_panel=_EXPLAIN
        ),
    ] = False,
    compare_all: Annotated[
        bool,
        typer.Option(
            "--compare", help="every allocation side by side at the same ε", rich_help_panel=_EXPLAIN
        ),
    ] = False,
    among: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help="compare these only: flat,pareto,ladp:mode=budget", rich_help_panel=_EXPLAIN
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            help="draw the layers: FILE.html, or .png, .svg with matplotlib", rich_help_panel=_EXPLAIN
        ),
    ] = None,
    measure: Annotated[
        Path | None,
        typer.Option(help="a measure that was saved before", metavar="FILE", rich_help_panel=_MEASURE),
    ] = None,
    proxy: Annotated[
        str | None,
        typer.Option(
            help="measure now on: gaussian, public:nets:data, simulated:nets:data",
            metavar="PROXY",
            rich_help_panel=_MEASURE,
        ),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            "--input", metavar="SHAPE", help="one example, for gaussian: 12,256", rich_help_panel=_MEASURE
        ),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(
            help="as in RUN.toml; default: squared error to the input (autoencoders)",
            rich_help_panel=_MEASURE,
        ),
    ] = None,
    passes: Annotated[
        int, typer.Option(min=1, help="examples of the profile", rich_help_panel=_MEASURE)
    ] = 1000,
    radius: Annotated[
        float | None,
        typer.Option(
            help="public L2 bound on an example, for Δ; default: as large as the largest proxy example",
            rich_help_panel=_MEASURE,
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="of weights and proxy inputs", rich_help_panel=_MEASURE)
    ] = 0,
    save_measure: Annotated[
        Path | None,
        typer.Option(help="keep what was measured", metavar="FILE", rich_help_panel=_MEASURE),
    ] = None,
    template: Annotated[
        bool, typer.Option("--template", help="print an annotated policy.toml to start from, and exit")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Show clipping, noise, sigma and ε of every class and layer, before the first step.

    Spends nothing and reads no private data: what a plan costs follows from the policy, the shape of the model, the
    batch and the number of steps. Try other values until ε, noise and length suit you, then train. Writes only what
    --picture and --save-measure name.

    Examples:

      lamina plan --template > policy.toml     a policy to edit
      lamina plan policy.toml --epochs 20
      lamina plan policy.toml --model nets:build --batch 512 --steps 2000

    Which allocation? Look at the layers, then put all side by side at the same ε:

      lamina plan policy.toml --epochs 20 --explain
      lamina plan policy.toml --epochs 20 --compare
      lamina plan policy.toml --epochs 20 --among flat,pareto,ladp:mode=budget

    Some need to know the layers. Measure them once, on inputs that are nobody's:

      lamina plan policy.toml --epochs 20 --proxy gaussian --save-measure m.json
      lamina plan policy.toml --epochs 20 --measure m.json --compare
      lamina plan policy.toml --epochs 20 --measure m.json --allocate lsab

    S/N, the signal to noise of a layer, is b·n̂/(S·√d): b contributions expected in a step, n̂ the norm of a typical
    one after clipping (the threshold C where nothing was measured), S·√d the norm of the noise. An upper figure: as if
    all contributions pulled the same way.
    """
    if template:
        text = Policy.template_text()
        print_json({"template": text}) if as_json else sys.stdout.write(text)
        return
    if policy is None:
        raise typer.BadParameter("give the policy, or --template to get one", param_hint="policy.toml")
    if (steps is None) == (epochs is None):
        raise typer.BadParameter("give one of --steps and --epochs", param_hint="--steps")
    wanted = Wanted(
        file=measure, proxy=proxy, shape=shape, loss=loss, passes=passes, radius=radius, seed=seed, save=save_measure
    )  # fmt: skip
    wanted.check()
    if picture is not None:
        check_picture(picture)
    rules, chosen = Policy.load(policy), allocations.parse(allocate)
    with results_only():
        net = _seeded(model, seed)
        stack = LayerStack.from_model(net)
        known = wanted.of(model, net, stack)
    common: dict[str, Any] = {
        "batch": batch, "steps": steps, "epochs": epochs, "clipping": clipping, "rho": rho, "measure": known,
    }  # fmt: skip
    made, allocation = explained_plan(stack, rules, allocate=chosen, **common)
    sizes = planned_sizes(made, stack.shapes)
    notes = plan_notes(made, rules, asked(None, rho, rules.corpus.delta))
    rows = None
    if compare_all or among is not None:
        names = (
            allocations.parse_several(among) if among is not None else dict.fromkeys((*ALLOCATIONS, allocate))
        )
        rows = compare(
            lambda each: explained_plan(stack, rules, allocate=each, **common), names, known, sizes
        )
    answer = Answer(
        plan=made, allocation=allocation, measure=known, notes=notes, compared=rows, chosen=allocate, full=explain,
        sizes=sizes,
    )  # fmt: skip
    if picture is not None:
        draw(made, answer.layers, answer.why, picture)
    if as_json:
        print_json(answer.to_dict())
        return
    out.print(str(answer), markup=False, soft_wrap=True)
    for path in (picture, save_measure):
        if path is not None:
            out.print(f"written: {path}", markup=False, soft_wrap=True)


def _seeded(name: str, seed: int) -> torch.nn.Module:
    """The model with weights that the seed decides, so that what is measured on it can be measured again."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return named.model(name)
