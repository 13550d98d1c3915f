"""The measure that `lamina plan` uses: a saved one, or one made now on public, simulated or Gaussian inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lamina.allocate.measure.measure import Measure, measure
from lamina.cli import by_name
from lamina.cli.command import misuse
from lamina.cli.run_file import RunFile
from lamina.cli.terminal import print_note
from lamina.engine.rules.proxy import Proxy
from lamina.errors import EngineError, PlanError
from lamina.plan.layer_stack import LayerStack, model_unchanged
from lamina.run.losses import PerExampleLoss
from lamina.run.run_output import user_code

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
    slopes: str = "empirical"
    radius: float | None = None
    seed: int = 0
    save: Path | None = None
    run: RunFile | None = None
    beside: Path | None = None

    def check(self) -> None:
        """Refuse options that do not go together."""
        if self.file is not None and self.proxy is not None:
            raise misuse("give --measure or --proxy, not both", "--measure")
        if self.proxy is None:
            asked: dict[str, object] = {"--input": self.shape, "--loss": self.loss, "--save-measure": self.save}
            asked |= {"--influence": self.influences, "--reinitialise": self.reinitialise}
            asked |= {"--gamma": self.gamma != "all", "--slopes": self.slopes != "empirical"}
            for hint, value in asked.items():
                if value:
                    raise misuse("needs --proxy", hint)

    def of(self, name: str, model: nn.Module, stack: LayerStack) -> Measure | None:
        """The measure of this model; None if no option asks for one."""
        if self.file is None and self.proxy is None:
            return None
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
        if source not in PROXIES[1:] or (function := self._loss_function()) is None:
            return None
        x, y = _as_pair(by_name.call_factory(by_name.import_by_name(data, "proxy"), f"proxy '{data}'"), data)
        return Proxy(source=f"{source}: {data}", x=x, y=y, loss_fn=function)

    def examples(self, name: str, model: nn.Module, count: int) -> tuple[Any, Any, str]:
        """The first x and y of the proxy, with labels at random for Gaussian inputs, and what they are."""
        source, _, data = self._source()
        if source != "gaussian":
            x, y = _as_pair(by_name.call_factory(by_name.import_by_name(data, "proxy"), f"proxy '{data}'"), data)
            return x[:count], x[:count] if y is None else y[:count], f"{source}: {data}"
        generator = torch.Generator().manual_seed(self.seed)
        x = torch.randn(count, *parse_shape(self.shape, name, self.run), generator=generator)
        function = self._loss_function()
        output = _model_output(model, x[:2], several=not isinstance(function, PerExampleLoss))
        return x, random_labels(function, output, x, generator), "simulated: Gaussian inputs, labels at random"

    def _source(self) -> tuple[str, str, str]:
        parts = str(self.proxy).partition(":")
        if parts[0] not in PROXIES or (parts[0] != "gaussian") != bool(parts[2]):
            raise PlanError("cli.proxy-not-known", f"proxy '{self.proxy}' is not known", _PROXY_HELP)
        return parts

    def _loss_function(self) -> Any:
        """Return the loss of --loss, or else of RUN.toml; None if there is neither."""
        if self.loss is not None:
            return by_name.make_loss(self.loss, {})
        if self.run is None:
            return None
        return by_name.make_loss(self.run.loss.name, self.run.loss.arguments, beside=self.beside)

    def _measured(self, name: str, model: nn.Module, stack: LayerStack) -> Measure:
        source, _, data = self._source()
        common: dict[str, Any] = {"passes": self.passes, "radius": self.radius, "seed": self.seed}
        common |= {"influences": self.influences, "reinitialise": self.reinitialise, "gamma": self.gamma}
        common |= {"slopes": self.slopes}
        if source == "gaussian":
            generator = torch.Generator().manual_seed(self.seed)
            example = torch.randn(2, *parse_shape(self.shape, name, self.run), generator=generator)
            function = self._loss_function()
            own = function is not None and not isinstance(function, PerExampleLoss)  # takes any output
            output = _model_output(model, example, several=own)
            if self.loss is None and isinstance(output, Tensor) and (function is None or output.shape == example.shape):
                _check_autoencoder(output, example)
                return measure(model, stack, example=example, proxy="gaussian", **common)
            x = torch.randn(_LABELLED_EXAMPLES, *example.shape[1:], generator=generator)
            y = random_labels(function, output, x, generator)
            proxy = "simulated: Gaussian inputs, labels at random"
            return measure(model, stack, x=x, y=y, losses_of=_losses(function, model, x, y), proxy=proxy, **common)
        if self.shape is not None:
            problem = f"--input is '{self.shape}', but '{data}' has a shape of its own"
            raise PlanError("cli.input-not-needed", problem, "leave --input out")
        x, y = _as_pair(by_name.call_factory(by_name.import_by_name(data, "proxy"), f"proxy '{data}'"), data)
        proxy = f"{source}: {data}"
        function = self._loss_function()
        if self.loss is None and y is None and (function is None or isinstance(function, PerExampleLoss)):
            return measure(model, stack, x=x, proxy=proxy, **common)
        if function is None:
            problem = f"proxy '{data}' returned (x, y), but no loss is given"
            raise PlanError("cli.proxy-needs-loss", problem, "give --loss cross_entropy, …")
        y = x if y is None else y
        return measure(model, stack, x=x, y=y, losses_of=_losses(function, model, x, y), proxy=proxy, **common)


def _losses(function: Any, model: nn.Module, x: Any, y: Any) -> Callable[[Any, Any], Tensor]:
    """Return the loss of each example as a function of x and y; a loss that fails on two examples is refused."""
    refused = "the loss fails on proxy data", "give a --loss that takes what the model returns, and labels that fit it"
    with model_unchanged(model), torch.no_grad(), user_code(*refused):
        function(model(x[:2]), y[:2])
    return lambda x, y: function(model(x), y)


def parse_shape(text: str | None, model: str, run: RunFile | None = None) -> tuple[int, ...]:
    """`12,256` as (12, 256); without it what a built-in model takes, with the channels and samples of RUN.toml."""
    if text is None:
        if model in by_name.BUILT_IN_MODELS:
            usual = by_name.BUILT_IN_MODELS[model].shape
            if run is None or run.model.factory != model or len(usual) != 2:
                return usual
            return tuple(run.model.args.get(name, n) for name, n in zip(("channels", "samples"), usual, strict=True))
        problem = f"the input shape of model '{model}' is not known"
        raise PlanError("cli.input-shape-missing", problem, "give --input, one example without the batch axis: 12,256")
    parts = text.replace("x", ",").split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        problem = f"--input is '{text}', must be whole numbers > 0"
        raise PlanError("cli.input-shape-malformed", problem, "give one example without the batch axis: --input 12,256")
    return tuple(map(int, parts))


def random_labels(function: Any, output: Any, x: Tensor, generator: torch.Generator) -> Tensor:
    """Return random labels that fit this loss and an output of this shape.

    A loss of one's own may have `random_labels(output, n, generator)`; otherwise its labels are Gaussian numbers in the
    shape of the output, or the inputs themselves where shapes agree or the output is no tensor.
    """
    if hasattr(function, "random_labels"):
        drawn: Tensor = function.random_labels(output, len(x), generator)
        return x if drawn is None else drawn
    if not isinstance(output, Tensor):
        return x
    loss = function.name if isinstance(function, PerExampleLoss) else ""
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
        remedy = "give a loss that takes it, --loss lamina.signals:SignalLoss; or measure it in Python: lamina.allocate.measure.measure"
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
