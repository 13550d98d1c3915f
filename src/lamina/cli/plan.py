"""`lamina plan`: what a policy costs on a model, before anything is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import typer
from torch import Tensor, nn

from lamina.allocate.make_plan import ALLOCATIONS, DEFAULT_ALLOCATION, explained_plan
from lamina.cli import by_name
from lamina.cli.explain import PlanExplanation, bands_note, compare_allocations, plan_notes, requested_epsilon
from lamina.cli.layer_figures import check_picture, draw_plan
from lamina.cli.run_file import RunFile
from lamina.cli.terminal import print_json, print_line, print_note, results_only
from lamina.cli.train import plan_arguments, read_proxy
from lamina.engine.proxy_shares import Proxy
from lamina.errors import EngineError, LaminaError, PlanError
from lamina.plan.layer_stack import LayerStack
from lamina.plan.policy import Policy
from lamina.plan.selection import planned_noised_sizes
from lamina.run.restricted import restricted_notes
from lamina.run.run_output import user_code
from lamina.sign.keys import read_small
from lamina.validate import parse_toml

if TYPE_CHECKING:
    from lamina.allocate.measure.measure import Measure


PROXIES = ("gaussian", "public", "simulated")
_PROXY_HELP = (
    "use gaussian, public:package.module:data or simulated:package.module:data, whose data() returns x or (x, y)"
)
_LABELLED_EXAMPLES = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureOptions:
    """Which measure the command uses: a saved `file`, or one made now on a `proxy` (see the options of `plan`)."""

    file: Path | None = None
    proxy: str | None = None
    shape: str | None = None
    loss: str | None = None
    passes: int = 1000
    influences: bool = False
    reinitialise: int = 0
    gamma: str = "all"
    radius: float | None = None
    seed: int = 0
    save: Path | None = None

    def check(self) -> None:
        """Refuse options that do not go together."""
        if self.file is not None and self.proxy is not None:
            raise typer.BadParameter("give --measure or --proxy, not both", param_hint="--measure")
        if self.proxy is None:
            asked: dict[str, object] = {"--input": self.shape, "--loss": self.loss, "--save-measure": self.save}
            asked |= {"--influence": self.influences, "--reinitialise": self.reinitialise}
            asked |= {"--gamma": None if self.gamma == "all" else self.gamma}
            for hint, value in asked.items():
                if value:
                    raise typer.BadParameter("needs --proxy", param_hint=hint)

    def of(self, name: str, model: nn.Module, stack: LayerStack) -> Measure | None:
        """The measure of this model; None if no option asks for one."""
        if self.file is None and self.proxy is None:
            return None
        from lamina.allocate.measure.measure import Measure

        if self.file is not None:
            found = Measure.load(self.file)
            found.check(stack)
            return found
        print_note(f"measuring {len(stack)} layers on the proxy '{self.proxy}' …")
        made = self._measured(name, model, stack)
        if self.save is not None:
            try:
                made.save(self.save)
            except OSError as error:
                problem = f"the measure cannot be written to '{self.save}': {error}"
                raise PlanError("cli.file-not-writable", problem, "name a file in a folder that exists") from None
        return made

    def labelled(self) -> Proxy | None:
        """Return the proxy's examples with their loss for trial trainings; None for Gaussian inputs, whose labels are random."""
        source, _, data = str(self.proxy).partition(":")
        if source not in PROXIES[1:] or self.loss is None:
            return None
        x, y = _as_pair(by_name.call_factory(by_name.import_by_name(data, "proxy"), f"proxy '{data}'"), data)
        return Proxy(source=f"{source}: {data}", x=x, y=y, loss_fn=by_name.make_loss(self.loss, {}))

    def _measured(self, name: str, model: nn.Module, stack: LayerStack) -> Measure:
        from lamina.allocate.measure.measure import measure

        source, _, data = str(self.proxy).partition(":")
        if source not in PROXIES or (source != "gaussian") != bool(data):
            raise PlanError("cli.proxy-not-known", f"proxy '{self.proxy}' is not known", _PROXY_HELP)
        common: dict[str, Any] = {"passes": self.passes, "radius": self.radius, "seed": self.seed}
        common |= {"influences": self.influences, "reinitialise": self.reinitialise, "gamma": self.gamma}
        if source == "gaussian":
            generator = torch.Generator().manual_seed(self.seed)
            example = torch.randn(2, *parse_shape(self.shape, name), generator=generator)
            own = self.loss is not None and ":" in self.loss  # a function of one's own takes any output
            output = _model_output(model, example, several=own)
            if self.loss is None:
                _check_autoencoder(output, example)
                return measure(model, stack, example=example, proxy="gaussian", **common)
            x = torch.randn(_LABELLED_EXAMPLES, *example.shape[1:], generator=generator)
            y = random_labels(self.loss, output, x, generator) if isinstance(output, Tensor) else x
            proxy = "simulated: Gaussian inputs, labels at random"
            return measure(model, stack, x=x, y=y, losses_of=self._losses(model), proxy=proxy, **common)
        if self.shape is not None:
            problem = f"--input is '{self.shape}', but '{data}' has a shape of its own"
            raise PlanError("cli.input-not-needed", problem, "leave --input out")
        x, y = _as_pair(by_name.call_factory(by_name.import_by_name(data, "proxy"), f"proxy '{data}'"), data)
        proxy = f"{source}: {data}"
        if self.loss is None and y is None:
            return measure(model, stack, x=x, proxy=proxy, **common)
        if self.loss is None:
            problem = f"proxy '{data}' returned (x, y), but no loss is given"
            raise PlanError("cli.proxy-needs-loss", problem, "give --loss cross_entropy, …")
        y = x if y is None else y
        return measure(model, stack, x=x, y=y, losses_of=self._losses(model), proxy=proxy, **common)

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
        problem = f"the input shape of model '{model}' is not known"
        raise PlanError("cli.input-shape-missing", problem, "give --input, one example without the batch axis: 12,256")
    parts = text.replace("x", ",").split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        problem = f"--input is '{text}', must be whole numbers > 0"
        raise PlanError("cli.input-shape-malformed", problem, "give one example without the batch axis: --input 12,256")
    return tuple(map(int, parts))


def random_labels(loss: str, output: Tensor, x: Tensor, generator: torch.Generator) -> Tensor:
    """Random labels that fit a loss of this name and an output of this shape."""
    n, inner = len(x), output.shape[1:]
    if loss == "cross_entropy":
        if not inner:
            problem = "the model gives one number per example, not one per class"
            raise PlanError("cli.loss-needs-class-scores", problem, "use --loss bce or mse")
        return torch.randint(inner[0], (n, *inner[1:]), generator=generator)
    if loss == "bce":
        return torch.randint(2, (n, *inner), generator=generator).float()
    return x if inner == x.shape[1:] else torch.randn(n, *inner, generator=generator)


def _model_output(model: nn.Module, example: Tensor, *, several: bool) -> Any:
    training = model.training
    refused = f"the model does not take an input of shape {tuple(example.shape[1:])}"
    with user_code(refused, "give the shape of one example without the batch axis: --input 12,256"), torch.no_grad():
        output = model.eval()(example)
    model.train(training)
    if not (several or isinstance(output, Tensor)):
        problem = f"the model gives a {type(output).__name__}, not a tensor"
        remedy = "give a loss that takes it, --loss lamina.models:SignalLoss; or measure it in Python: lamina.allocate.measure.measure"
        raise PlanError("cli.output-not-tensor", problem, remedy)
    return output


def _check_autoencoder(output: Tensor, example: Tensor) -> None:
    if output.shape != example.shape:
        problem = f"the model gives {tuple(output.shape[1:])} for an input of {tuple(example.shape[1:])}, so its loss is not known"
        remedy = "give --loss cross_entropy, bce, mse, … (labels are drawn at random), or --proxy public:nets:data"
        raise PlanError("cli.proxy-needs-loss", problem, remedy)


def _as_pair(found: Any, name: str) -> tuple[Any, Any]:
    if isinstance(found, tuple) and len(found) == 2:
        return tuple(torch.as_tensor(each) if each is not None else None for each in found)  # type: ignore[return-value]
    try:
        return torch.as_tensor(found), None
    except (TypeError, ValueError, RuntimeError):
        problem = f"proxy '{name}' returned a {type(found).__name__}"
        raise EngineError("cli.proxy-returns-wrong-type", problem, "return x or (x, y)") from None


def show_plan(
    path: Path, *, model: str | None, batch: int | None, steps: int | None, epochs: float | None, allocate: str | None,
    clipping: str | None, rho: float | None, explain: bool, compare_all: bool, among: str | None, picture: Path | None,
    measure: Path | None, proxy: str | None, shape: str | None, loss: str | None, passes: int, radius: float | None,
    influences: bool, reinitialise: int, gamma: str,
    seed: int, save_measure: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """`lamina plan policy.toml`, or RUN.toml (options and help: torch_commands.py)."""
    wanted = MeasureOptions(
        file=measure, proxy=proxy, shape=shape, loss=loss, passes=passes, radius=radius, seed=seed, save=save_measure,
        influences=influences, reinitialise=reinitialise, gamma=gamma,
    )  # fmt: skip
    wanted.check()
    if picture is not None:
        check_picture(picture)
    file, beside = run_file_or_none(path), path.resolve().parent
    if file is None and steps is None and epochs is None:
        if not path.exists():
            raise typer.BadParameter(f"there is no file '{path}'", param_hint="policy.toml")
        raise typer.BadParameter("give one of --steps and --epochs", param_hint="--steps")
    rules = Policy.load(path if file is None else beside / file.policy)
    common: dict[str, Any] = {"batch": 256} if file is None else plan_arguments(file, beside, rules)
    if steps is not None or epochs is not None:
        common |= {"steps": steps, "epochs": epochs}
    if rho is not None:
        common |= {"rho": rho, "epsilon": None, "noise_multiplier": None}
    given = {"batch": batch, "clipping": clipping, "allocate": allocate and by_name.parse_allocation(allocate)}
    common |= {name: value for name, value in given.items() if value is not None}
    chosen = common.pop("allocate", None) or by_name.parse_allocation(DEFAULT_ALLOCATION)
    allocate = allocate or (DEFAULT_ALLOCATION if file is None else file.allocate.name)
    name, arguments = (model or "residual", {}) if model or file is None else (file.model.factory, file.model.args)
    with results_only():
        net = _seeded_model(name, arguments, None if file is None else beside, seed)
        stack = LayerStack.from_model(net)
        known = wanted.of(name, net, stack) or common.get("measure")
    common["measure"] = known
    made, allocation = explained_plan(stack, rules, allocate=chosen, **common)
    sizes = planned_noised_sizes(made, stack.shapes)
    asked = requested_epsilon(common.get("epsilon"), common.get("rho"), rules.corpus.delta)
    notes = () if common.get("noise_multiplier") else (*plan_notes(made, rules, asked), *bands_note(made))
    with results_only():
        labelled = wanted.labelled()
        if labelled is None and file is not None and file.proxy is not None:
            loss_fn = by_name.make_loss(file.loss.name, file.loss.arguments, beside=beside)
            labelled = read_proxy(file.proxy, loss_fn, beside)
        notes = (*notes, *restricted_notes(net, made, labelled))
    if model is None and file is None:
        notes = (
            *notes,
            f"the model is the built-in '{name}': --model package.module:factory, or RUN.toml, plans yours",
        )
    rows = None
    if compare_all or among is not None:
        names = by_name.split_allocations(among) if among is not None else dict.fromkeys((*ALLOCATIONS, allocate))
        rows = compare_allocations(lambda a: explained_plan(stack, rules, allocate=a, **common), names, known, sizes)
    answer = PlanExplanation(
        plan=made, allocation=allocation, measure=known, notes=notes, compared=rows, chosen=allocate, full=explain,
        sizes=sizes,
    )  # fmt: skip
    if picture is not None:
        draw_plan(made, answer.layers, answer.why, picture)
    if as_json:
        print_json(answer.to_dict())
        return
    print_line(str(answer))
    for written in (picture, save_measure):
        if written is not None:
            print_line(f"written: {written}")


def run_file_or_none(path: Path) -> RunFile | None:
    """A RUN.toml, which names its policy; None for a policy, or what is neither."""
    found: dict[str, Any] = {}
    with suppress(LaminaError, ValueError):
        found = parse_toml(read_small(path, "the file", most=1 << 20).decode("utf-8"))
    return RunFile.load(path) if "policy" in found else None


def _seeded_model(name: str, arguments: Mapping[str, Any], beside: Path | None, seed: int) -> torch.nn.Module:
    """The model with weights drawn from the seed, so that a measurement can be repeated."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return by_name.make_model(name, arguments, beside=beside)
