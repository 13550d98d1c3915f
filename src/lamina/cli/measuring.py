"""`--measure FILE` and `--proxy …`: what is known of a model's layers, read or measured now; never on private data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import typer
from torch import Tensor, nn

from lamina.cli import losses, named
from lamina.cli.output import err
from lamina.errors import EngineError, PlanError
from lamina.plan import LayerStack
from lamina.train.blame import user_code

if TYPE_CHECKING:
    from lamina.sensitivity import Measure

PROXIES = ("gaussian", "public", "simulated")
_HOW = "use gaussian, public:package.module:data or simulated:package.module:data, whose data() returns x or (x, y)"
_LABELLED = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
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
            raise typer.BadParameter(
                "give a saved measure or a proxy to measure on, not both", param_hint="--measure"
            )
        if self.proxy is None:
            for hint, value in (
                ("--input", self.shape),
                ("--loss", self.loss),
                ("--save-measure", self.save),
            ):
                if value is not None:
                    raise typer.BadParameter("it belongs to a measurement: give --proxy too", param_hint=hint)

    def of(self, name: str, model: nn.Module, stack: LayerStack) -> Measure | None:
        """The measure of this model, if one was asked for."""
        if self.file is None and self.proxy is None:
            return None
        from lamina.sensitivity import Measure

        if self.file is not None:
            found = Measure.load(self.file)
            found.check(stack)
            return found
        err.print(
            f"measuring {len(stack)} layers on the proxy '{self.proxy}' …", markup=False, soft_wrap=True
        )
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
        from lamina.sensitivity import measure

        source, _, data = str(self.proxy).partition(":")
        if source not in PROXIES or (source != "gaussian") != bool(data):
            raise PlanError("cli.proxy-not-known", f"proxy is '{self.proxy}', which is not known", _HOW)
        common: dict[str, Any] = {"passes": self.passes, "radius": self.radius, "seed": self.seed}
        if source == "gaussian":
            generator = torch.Generator().manual_seed(self.seed)
            example = torch.randn(2, *shape_of(self.shape, name), generator=generator)
            output = _output(model, example)
            if self.loss is None:
                _alike(output, example)
                return measure(model, stack, example=example, proxy="gaussian", **common)
            x = torch.randn(_LABELLED, *example.shape[1:], generator=generator)
            y = labels(self.loss, output, x, generator)
            proxy = "simulated: Gaussian inputs, labels at random"
            return measure(model, stack, x=x, y=y, losses_of=self._losses(model), proxy=proxy, **common)
        if self.shape is not None:
            raise PlanError(
                "cli.input-brings-own",
                f"input is '{self.shape}', and '{data}' brings its own",
                "leave --input out",
            )
        x, y = _pair(named.call(named.find(data, "proxy"), f"proxy '{data}'"), data)
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
        function = losses.loss(str(self.loss), {})

        def losses_of(x: Any, y: Any) -> Tensor:
            found: Tensor = function(model(x), y)
            return found

        return losses_of


def shape_of(text: str | None, model: str) -> tuple[int, ...]:
    """`12,256` as (12, 256); without it what a built-in model takes."""
    if text is None:
        if model in named.INPUTS:
            return named.INPUTS[model]
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


def labels(loss: str, output: Tensor, x: Tensor, generator: torch.Generator) -> Tensor:
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


def _output(model: nn.Module, example: Tensor) -> Tensor:
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


def _alike(output: Tensor, example: Tensor) -> None:
    if output.shape != example.shape:
        raise PlanError(
            "cli.model-gives-input",
            f"the model gives {tuple(output.shape[1:])} for an input of {tuple(example.shape[1:])}: it is no "
            "autoencoder, and its loss is unknown",
            "give --loss cross_entropy, bce, mse, … (labels are drawn at random), or --proxy public:nets:data",
        )


def _pair(found: Any, name: str) -> tuple[Any, Any]:
    if isinstance(found, tuple) and len(found) == 2:
        return tuple(torch.as_tensor(each) if each is not None else None for each in found)  # type: ignore[return-value]
    try:
        return torch.as_tensor(found), None
    except (TypeError, ValueError, RuntimeError) as error:
        raise EngineError(
            "cli.proxy-returned", f"proxy '{name}' returned a {type(found).__name__}", "return x or (x, y)"
        ) from error
