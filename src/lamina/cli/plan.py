"""`lamina plan`: what a policy costs on a model, before anything is trained.

With what is known or measured of its layers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from torch import Tensor, nn

from lamina.allocate.make_plan import ALLOCATIONS, DEFAULT_ALLOCATION, explained_plan
from lamina.cli import by_name
from lamina.cli.explain import PlanExplanation, compare_allocations, plan_notes, requested_epsilon
from lamina.cli.layer_figures import check_picture, draw_plan
from lamina.cli.terminal import err, out, print_json, results_only
from lamina.errors import EngineError, PlanError
from lamina.plan.layer_stack import LayerStack
from lamina.plan.policy import Policy
from lamina.plan.selection import planned_noised_sizes
from lamina.plan.step_plan import Clipping
from lamina.train.user_errors import user_code

if TYPE_CHECKING:
    from lamina.sensitivity.measure import Measure


PROXIES = ("gaussian", "public", "simulated")
_PROXY_HELP = (
    "use gaussian, public:package.module:data or simulated:package.module:data, whose data() returns x or (x, y)"
)
_LABELLED_EXAMPLES = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureOptions:
    """What was asked for on the command line; `of` finds or makes it.

    file    a measure that was saved before
    proxy   gaussian: made-up inputs of shape `shape`; public:… or simulated:… with a function that returns the data
    shape   of one example, without the batch axis; built-in models know theirs
    loss    as in a RUN.toml; without one, mean squared error of the output to the input
    save    where to keep what was measured
    """

    file: Path | None = None
    proxy: str | None = None
    shape: str | None = None
    loss: str | None = None
    passes: int = 1000
    radius: float | None = None
    seed: int = 0
    save: Path | None = None

    def check(self) -> None:
        """Refuse combinations that mean nothing, as misuse of the command."""
        if self.file is not None and self.proxy is not None:
            raise typer.BadParameter("give a saved measure or a proxy to measure on, not both", param_hint="--measure")
        if self.proxy is None:
            for hint, value in (("--input", self.shape), ("--loss", self.loss), ("--save-measure", self.save)):
                if value is not None:
                    raise typer.BadParameter("it belongs to a measurement: give --proxy too", param_hint=hint)

    def of(self, name: str, model: nn.Module, stack: LayerStack) -> Measure | None:
        """The measure of this model, if one was asked for."""
        if self.file is None and self.proxy is None:
            return None
        from lamina.sensitivity.measure import Measure

        if self.file is not None:
            found = Measure.load(self.file)
            found.check(stack)
            return found
        err.print(f"measuring {len(stack)} layers on the proxy '{self.proxy}' …", markup=False, soft_wrap=True)
        made = self._measured(name, model, stack)
        if self.save is not None:
            try:
                made.save(self.save)
            except OSError as error:
                raise PlanError(
                    "cli.measure-not-written",
                    f"the measure cannot be written to '{self.save}': {error}",
                    "name a file in a folder that exists",
                ) from error
        return made

    def _measured(self, name: str, model: nn.Module, stack: LayerStack) -> Measure:
        from lamina.sensitivity.measure import measure

        source, _, data = str(self.proxy).partition(":")
        if source not in PROXIES or (source != "gaussian") != bool(data):
            raise PlanError("cli.proxy-not-known", f"proxy is '{self.proxy}', which is not known", _PROXY_HELP)
        common: dict[str, Any] = {"passes": self.passes, "radius": self.radius, "seed": self.seed}
        if source == "gaussian":
            generator = torch.Generator().manual_seed(self.seed)
            example = torch.randn(2, *parse_shape(self.shape, name), generator=generator)
            output = _model_output(model, example)
            if self.loss is None:
                _check_autoencoder(output, example)
                return measure(model, stack, example=example, proxy="gaussian", **common)
            x = torch.randn(_LABELLED_EXAMPLES, *example.shape[1:], generator=generator)
            y = random_labels(self.loss, output, x, generator)
            proxy = "simulated: Gaussian inputs, labels at random"
            return measure(model, stack, x=x, y=y, losses_of=self._losses(model), proxy=proxy, **common)
        if self.shape is not None:
            raise PlanError(
                "cli.input-brings-own", f"input is '{self.shape}', and '{data}' brings its own", "leave --input out"
            )
        x, y = _as_pair(by_name.call_factory(by_name.import_by_name(data, "proxy"), f"proxy '{data}'"), data)
        proxy = f"{source}: {data}"
        if self.loss is None and y is None:
            return measure(model, stack, x=x, proxy=proxy, **common)
        if self.loss is None:
            raise PlanError(
                "cli.proxy-returned-no",
                f"proxy '{data}' returned (x, y), and no loss is given",
                "give --loss cross_entropy, …",
            )
        return measure(
            model, stack, x=x, y=x if y is None else y, losses_of=self._losses(model), proxy=proxy, **common
        )  # fmt: skip

    def _losses(self, model: nn.Module) -> Callable[[Any, Any], Tensor]:
        """One loss per example, by a name of RUN.toml."""
        function = by_name.make_loss(str(self.loss), {})

        def losses_of(x: Any, y: Any) -> Tensor:
            found: Tensor = function(model(x), y)
            return found

        return losses_of


def parse_shape(text: str | None, model: str) -> tuple[int, ...]:
    """`12,256` as (12, 256); without it what a built-in model takes."""
    if text is None:
        if model in by_name.MODEL_INPUT_SHAPES:
            return by_name.MODEL_INPUT_SHAPES[model]
        raise PlanError(
            "cli.input-model-no",
            f"the input of model '{model}' has no known shape",
            "give --input, one example without the batch axis: 12,256",
        )
    parts = text.replace("x", ",").split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise PlanError(
            "cli.input-whole-numbers",
            f"input is '{text}', must be whole numbers > 0",
            "one example without the batch axis: --input 12,256",
        )
    return tuple(map(int, parts))


def random_labels(loss: str, output: Tensor, x: Tensor, generator: torch.Generator) -> Tensor:
    """Random labels that a loss of this name takes for an output of this shape; made up like the inputs."""
    n, inner = len(x), output.shape[1:]
    if loss == "cross_entropy":
        if not inner:
            raise PlanError(
                "cli.model-gives-number",
                "the model gives one number per example, not one per class",
                "use --loss bce or mse",
            )
        return torch.randint(inner[0], (n, *inner[1:]), generator=generator)
    if loss == "bce":
        return torch.randint(2, (n, *inner), generator=generator).float()
    return x if inner == x.shape[1:] else torch.randn(n, *inner, generator=generator)


def _model_output(model: nn.Module, example: Tensor) -> Tensor:
    training = model.training
    with (
        user_code(
            f"the model does not take an input of shape {tuple(example.shape[1:])}",
            "give the shape of one example without the batch axis: --input 12,256",
        ),
        torch.no_grad(),
    ):
        output = model.eval()(example)
    model.train(training)
    if not isinstance(output, Tensor):
        raise PlanError(
            "cli.model-gives-not",
            f"the model gives a {type(output).__name__}, not a tensor",
            "measure it in Python: lamina.sensitivity.measure(model, stack, x=…, losses_of=…).save(FILE)",
        )
    return output


def _check_autoencoder(output: Tensor, example: Tensor) -> None:
    if output.shape != example.shape:
        raise PlanError(
            "cli.model-gives-input",
            f"the model gives {tuple(output.shape[1:])} for an input of {tuple(example.shape[1:])}: it is no "
            "autoencoder, and its loss is unknown",
            "give --loss cross_entropy, bce, mse, … (labels are drawn at random), or --proxy public:nets:data",
        )


def _as_pair(found: Any, name: str) -> tuple[Any, Any]:
    if isinstance(found, tuple) and len(found) == 2:
        return tuple(torch.as_tensor(each) if each is not None else None for each in found)  # type: ignore[return-value]
    try:
        return torch.as_tensor(found), None
    except (TypeError, ValueError, RuntimeError) as error:
        raise EngineError(
            "cli.proxy-returned", f"proxy '{name}' returned a {type(found).__name__}", "return x or (x, y)"
        ) from error


_EXPLAIN_PANEL, _MEASURE_PANEL = "Explaining", "Measuring the layers (never on private data)"


def plan(
    policy: Annotated[
        Path | None, typer.Argument(metavar="policy.toml", help="classes, populations, budgets, depth profiles")
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            help=f"package.module:factory, or built in: {', '.join(by_name.BUILT_IN_MODELS)}",
            autocompletion=lambda: list(by_name.BUILT_IN_MODELS),
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
    ] = DEFAULT_ALLOCATION,
    clipping: Annotated[
        str | None,
        typer.Option(
            help="box or joint; default: what the allocation prefers",
            autocompletion=lambda: [Clipping.BOX.value, Clipping.JOINT.value],
        ),
    ] = None,
    rho: Annotated[
        float | None, typer.Option(help="budget of every class in zCDP, ρ/T per step, instead of the policy's ε")
    ] = None,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain", help="figures and bars of every layer, and why this plan", rich_help_panel=_EXPLAIN_PANEL
        ),
    ] = False,
    compare_all: Annotated[
        bool,
        typer.Option("--compare", help="every allocation side by side at the same ε", rich_help_panel=_EXPLAIN_PANEL),
    ] = False,
    among: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help="compare these only: flat,pareto,ladp:mode=budget", rich_help_panel=_EXPLAIN_PANEL
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(help="draw the layers: FILE.html, or .png, .svg with matplotlib", rich_help_panel=_EXPLAIN_PANEL),
    ] = None,
    measure: Annotated[
        Path | None,
        typer.Option(help="a measure that was saved before", metavar="FILE", rich_help_panel=_MEASURE_PANEL),
    ] = None,
    proxy: Annotated[
        str | None,
        typer.Option(
            help="measure now on: gaussian, public:nets:data, simulated:nets:data",
            metavar="PROXY",
            rich_help_panel=_MEASURE_PANEL,
        ),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            "--input", metavar="SHAPE", help="one example, for gaussian: 12,256", rich_help_panel=_MEASURE_PANEL
        ),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(
            help="as in RUN.toml; default: squared error to the input (autoencoders)", rich_help_panel=_MEASURE_PANEL
        ),
    ] = None,
    passes: Annotated[int, typer.Option(min=1, help="examples of the profile", rich_help_panel=_MEASURE_PANEL)] = 1000,
    radius: Annotated[
        float | None,
        typer.Option(
            help="public L2 bound on an example, for Δ; default: as large as the largest proxy example",
            rich_help_panel=_MEASURE_PANEL,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="of weights and proxy inputs", rich_help_panel=_MEASURE_PANEL)] = 0,
    save_measure: Annotated[
        Path | None, typer.Option(help="keep what was measured", metavar="FILE", rich_help_panel=_MEASURE_PANEL)
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
    wanted = MeasureOptions(
        file=measure, proxy=proxy, shape=shape, loss=loss, passes=passes, radius=radius, seed=seed, save=save_measure
    )  # fmt: skip
    wanted.check()
    if picture is not None:
        check_picture(picture)
    rules, chosen = Policy.load(policy), by_name.parse_allocation(allocate)
    with results_only():
        net = _seeded_model(model, seed)
        stack = LayerStack.from_model(net)
        known = wanted.of(model, net, stack)
    common: dict[str, Any] = {
        "batch": batch, "steps": steps, "epochs": epochs, "clipping": clipping, "rho": rho, "measure": known,
    }  # fmt: skip
    made, allocation = explained_plan(stack, rules, allocate=chosen, **common)
    sizes = planned_noised_sizes(made, stack.shapes)
    notes = plan_notes(made, rules, requested_epsilon(None, rho, rules.corpus.delta))
    rows = None
    if compare_all or among is not None:
        names = by_name.split_allocations(among) if among is not None else dict.fromkeys((*ALLOCATIONS, allocate))
        rows = compare_allocations(
            lambda each: explained_plan(stack, rules, allocate=each, **common), names, known, sizes
        )
    answer = PlanExplanation(
        plan=made, allocation=allocation, measure=known, notes=notes, compared=rows, chosen=allocate, full=explain,
        sizes=sizes,
    )  # fmt: skip
    if picture is not None:
        draw_plan(made, answer.layers, answer.why, picture)
    if as_json:
        print_json(answer.to_dict())
        return
    out.print(str(answer), markup=False, soft_wrap=True)
    for path in (picture, save_measure):
        if path is not None:
            out.print(f"written: {path}", markup=False, soft_wrap=True)


def _seeded_model(name: str, seed: int) -> torch.nn.Module:
    """The model with weights that the seed decides, so that what is measured on it can be measured again."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return by_name.make_model(name)
