"""`pretrain`: learn from public or simulated data first, which costs nothing, and let private data change the rest.

`private_subspace`: let them change a layer only along directions that public or simulated data use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from lamina import validate
from lamina.engine.batch import model_device, take_rows, to_device
from lamina.engine.engine import is_attached
from lamina.engine.probe import preserve_global_generators
from lamina.errors import RunError
from lamina.plan.depth_profile import DepthProfile
from lamina.plan.layer_stack import LayerStack, call_arguments


def pretrain(
    model: nn.Module, loss_fn: Callable[[Any, Any], Tensor], x: Any, y: Any = None, *, proxy: str, steps: int = 1000,
    batch: int = 128, lr: float = 1e-3, seed: int = 0, private_top: float | None = None, progress: bool = True,
) -> list[float]:  # fmt: skip
    """Train `model` in place on public or simulated examples, with Adam, and a learning rate that falls as a cosine.

    loss_fn      as for `Trainer`: (output, y), or (output, x) without y, gives one loss per example
    proxy        where x comes from: 'public' or 'simulated', a remark may follow ("simulated: ECG")
    private_top  afterwards freeze all but the top share of the depth, so that private contributions reach that band alone:
                 fewer numbers are noised. Worth it where the simulation is good; default: everything stays trainable
    progress     show a bar with the loss where standard error is a terminal; elsewhere nothing is shown

    Returns the mean loss of every step. No step of it is private or needs to be: never give it private data. Equal
    arguments give equal weights.
    """
    _check_public(proxy)
    validate.whole(RunError, "train.not-a-count", steps=steps)
    validate.whole(RunError, "train.not-a-count", batch=batch)
    validate.positive(RunError, "train.lr-not-positive", lr=lr)
    rows = _count_rows(x)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator, losses, mode = torch.Generator().manual_seed(seed), [], model.training
    model.train()
    with preserve_global_generators(), torch.enable_grad(), _bar(shown=progress) as bar:
        torch.manual_seed(seed)
        task = bar.add_task("pre-training", total=steps, loss="")
        for _ in range(steps):
            drawn = torch.randint(rows, (min(batch, rows),), generator=generator)
            part_x, part_y = to_device(take_rows((x, y), drawn), model_device(model))
            args, named = call_arguments(part_x)
            loss = loss_fn(model(*args, **named), part_x if y is None else part_y).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(float(loss.detach()))
            bar.update(task, advance=1, loss=f"loss {losses[-1]:.4g}")
    optimizer.zero_grad()
    model.train(mode)
    if private_top is not None:
        stack = LayerStack.from_model(model)
        tensors = dict(model.named_parameters())
        for layer, kept in zip(stack, DepthProfile.top(private_top).resolve(stack), strict=True):
            for name in () if kept else layer.parameters:
                tensors[name].requires_grad_(False)
    return losses


def _bar(*, shown: bool) -> Bar:
    """A bar on a terminal. The loss is of public data, so it may be seen."""
    console, loss = Console(stderr=True, highlight=False), TextColumn("{task.fields[loss]}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), loss)
    return Bar(*columns, console=console, disable=not (shown and console.is_terminal))


class SubspaceLinear(nn.Module):
    """base(x) + up · core(down · (x - mean)): `core` is trained, rank · (rank + 1) numbers; all else stays as it is.

    mean, down  of the layer's inputs on public data: down · (x - mean) are their first principal components, of variance 1
    up          principal directions of the loss's gradient by the layer's output on public data, times the scale
    """

    mean: Tensor
    down: Tensor
    up: Tensor

    def __init__(self, base: nn.Linear, mean: Tensor, down: Tensor, up: Tensor) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.core = nn.Linear(len(down), len(down), bias=base.bias is not None).to(base.weight)
        for tensor in self.core.parameters():
            nn.init.zeros_(tensor)
        for name, fixed in (("mean", mean), ("down", down), ("up", up)):
            self.register_buffer(name, fixed.to(base.weight))

    def forward(self, input: Tensor) -> Tensor:  # called as a Linear, perhaps by keyword
        out: Tensor = self.base(input) + F.linear(self.core(F.linear(input - self.mean, self.down)), self.up)
        return out

    @property
    def weight(self) -> Tensor:
        """Of one Linear that does the same. The fast path of nn.TransformerEncoderLayer reads it in evaluation."""
        return self.base.weight + self._change()

    @property
    def bias(self) -> Tensor | None:
        """Of one Linear that does the same."""
        if self.base.bias is None:
            return None
        return self.base.bias + self.up @ self.core.bias - self._change() @ self.mean

    def _change(self) -> Tensor:
        return self.up @ self.core.weight @ self.down

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """The layer itself, which from now on does the same alone."""
        weight, bias = self.weight, self.bias
        self.base.weight.copy_(weight)
        if bias is not None:
            self.base.bias.copy_(bias)
        return self.base


def private_subspace(
    model: nn.Module, loss_fn: Callable[[Any, Any], Tensor], x: Any, y: Any = None, *, proxy: str,
    layers: Sequence[str], rank: int, scale: float,
) -> None:  # fmt: skip
    """Freeze `model` but for rank · (rank + 1) numbers in each of `layers`, in place, before private training.

    x, y, proxy  public or simulated examples and where they come from, as for `pretrain`
    layers       names of Linear layers: each becomes a `SubspaceLinear`, and gives at first what it gave before
    rank         directions of a layer's inputs and of its outputs along which it may change
    scale        length of the output's directions: Adam moves every number by about the learning rate, whatever it does

    Of a layer's thousands of numbers most change nothing that matters, and all of them are noised. Directions in which
    inputs vary and outputs count are much the same on simulated data, so noise is spent on those alone. They follow from
    public data and the present weights: nothing is spent on them. `merge_subspace` makes plain layers of it again. What it
    gives, with `layers`, `rank` and `scale` of a preset: docs/utility.md.
    """
    _check_public(proxy)
    validate.whole(RunError, "train.not-a-count", rank=rank)
    validate.positive(RunError, "train.subspace-scale-not-positive", scale=scale)
    if is_attached(model):
        problem = "an engine is attached to the model, and would not know the new layers"
        remedy = "call private_subspace before make_private, Engine or Trainer, or engine.detach() first"
        raise RunError("train.subspace-while-attached", problem, remedy)
    modules = _check_layers(model, layers)
    found = _moments(model, loss_fn, x, y, {name: modules[name] for name in layers})
    made = {name: _subspace(modules[name], *moments, rank, scale, name) for name, moments in found.items()}
    model.requires_grad_(False)
    for name, layer in made.items():
        layer.core.requires_grad_(True)
        model.set_submodule(name, layer)


def merge_subspace(model: nn.Module) -> None:
    """Replace every `SubspaceLinear` of `model` by one Linear that does the same: names and shapes are as before."""
    if is_attached(model):
        problem = "an engine is attached to the model, and sees that its frozen tensors change"
        raise RunError("train.merge-while-attached", problem, "call engine.detach() first; a Trainer does so by itself")
    for name, layer in list(model.named_modules()):
        if isinstance(layer, SubspaceLinear):
            model.set_submodule(name, layer.merged())


def _check_layers(model: nn.Module, layers: Sequence[str]) -> dict[str, nn.Module]:
    """The modules of `model` by name, after it was checked that `layers` are Linear layers of their own."""
    modules = dict(model.named_modules())
    if there := [name for name, module in modules.items() if isinstance(module, SubspaceLinear)]:
        problem = f"the model has a subspace in {', '.join(map(repr, there))}, which a second call would freeze"
        remedy = "name all layers in one call, or call lamina.merge_subspace(model) first"
        raise RunError("train.subspace-there-already", problem, remedy)
    linear = [name for name, module in modules.items() if name and isinstance(module, nn.Linear)]
    remedy = f"name Linear layers: {', '.join(linear)}"
    if isinstance(layers, str) or not layers:
        raise RunError("train.subspace-not-linear", f"layers is {layers!r}, not a list of names", remedy)
    places = Counter(id(t) for module in modules.values() for t in module._parameters.values())
    modules_at = Counter(id(m) for _, m in model.named_modules(remove_duplicate=False))
    for name in layers:
        if name not in linear:
            problem = f"layer {name!r} is {type(modules[name]).__name__ if name in modules else 'not in the model'}"
            raise RunError("train.subspace-not-linear", problem, remedy)
        layer = modules[name]
        if modules_at[id(layer)] > 1 or any(places[id(p)] > 1 for p in layer.parameters()):
            problem = f"layer {name!r}, or a tensor of it, is in the model in several places, and would change in one"
            raise RunError("train.subspace-shared", problem, "name other layers, or untie it")
    return modules


def _check_public(proxy: str) -> None:
    if not isinstance(proxy, str) or proxy.partition(":")[0].strip() not in ("public", "simulated"):
        problem = f"the model is to learn from data called {proxy!r}"
        remedy = "give public or simulated data and say so: proxy='simulated: ECG'; private data go to lamina.Trainer"
        raise RunError("train.pretrain-not-public", problem, remedy)


def _count_rows(x: Any) -> int:
    tensors = [t for t in pytree.tree_leaves(x) if isinstance(t, Tensor) and t.dim()]
    if not tensors or not len(tensors[0]):
        found = f"a tensor of shape {tuple(tensors[0].shape)}" if tensors else f"a {type(x).__name__} without rows"
        remedy = "give a tensor, or a tuple or dict of tensors, with one row per example"
        raise RunError("train.pretrain-no-examples", f"x is {found}, and holds no examples", remedy)
    return len(tensors[0])


def _moments(
    model: nn.Module, loss_fn: Callable[[Any, Any], Tensor], x: Any, y: Any, layers: dict[str, nn.Module]
) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """By layer: mean and covariance of its inputs, and the second moment of the loss's gradient by its outputs."""
    rows = _count_rows(x)
    passed: list[tuple[str, Tensor, Tensor]] = []

    def note(name: str, given: tuple[Any, ...], named: dict[str, Any], out: Tensor) -> None:
        passed.append((name, (given[0] if given else named["input"]).detach(), out))

    hooks = [
        layer.register_forward_hook(lambda _, *call, name=name: note(name, *call), with_kwargs=True)
        for name, layer in layers.items()
    ]
    frozen = [p for layer in layers.values() for p in layer.parameters() if not p.requires_grad]
    for p in frozen:
        p.requires_grad_(True)  # so that there is a gradient by the layer's outputs
    sums: dict[str, list[Any]] = {name: [0, 0.0, 0.0, 0.0] for name in layers}
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        for chosen in torch.arange(rows).split(256):
            passed.clear()
            part_x, part_y = to_device(take_rows((x, y), chosen), model_device(model))
            args, named = call_arguments(part_x)
            with torch.enable_grad():
                loss = loss_fn(model(*args, **named), part_x if y is None else part_y).sum()
            if unused := set(layers) - {name for name, _, _ in passed}:
                problem = f"the model gives its output without calling layer {min(unused)!r}"
                raise RunError("train.subspace-not-linear", problem, "name layers that the model calls as modules")
            gradients = torch.autograd.grad(loss, [out for _, _, out in passed])
            for (name, given, _), gradient in zip(passed, gradients, strict=True):
                a, g = (t.flatten(0, -2).cpu().double() for t in (given, gradient))  # which a device may not have
                found = (len(a), a.sum(0), a.T @ a, g.T @ g)
                sums[name] = [total + more for total, more in zip(sums[name], found, strict=True)]
    finally:
        for module, mode in modes.items():
            module.training = mode
        for hook in hooks:
            hook.remove()
        for p in frozen:
            p.requires_grad_(False)
    for name, (_, _, both, gradient) in sums.items():
        if not (both.isfinite().all() and gradient.isfinite().all()):
            problem = f"on public data inputs of layer {name!r}, or gradients by its outputs, are NaN or infinite"
            raise RunError("train.subspace-not-finite", problem, "leave NaN and infinite values out of x and y")
    means = {name: (total / n, both / n, gradient) for name, (n, total, both, gradient) in sums.items()}
    return {name: (mean, both - torch.outer(mean, mean), g) for name, (mean, both, g) in means.items()}


def _subspace(
    base: nn.Module, mean: Tensor, covariance: Tensor, gradients: Tensor, rank: int, scale: float, name: str
) -> SubspaceLinear:
    assert isinstance(base, nn.Linear)
    if base.bias is None:  # nothing could take up the mean
        mean, covariance = torch.zeros_like(mean), covariance + torch.outer(mean, mean)
    spread, inputs = torch.linalg.eigh(covariance)
    weight, outputs = torch.linalg.eigh(gradients)
    rounding = 1e-12 * float(mean.square().sum())  # what is left of the covariance where all inputs are alike
    enough = min(int((spread > max(1e-9 * float(spread[-1]), rounding)).sum()), int((weight > 1e-9 * weight[-1]).sum()))
    if not enough:
        problem = f"all inputs of layer {name!r} are alike on public data, or the loss does not depend on its outputs"
        raise RunError("train.subspace-no-directions", problem, "give public data that differ, or name other layers")
    if rank > enough:
        problem = f"rank is {rank}, public data move layer {name!r} in {enough} directions"
        raise RunError("train.subspace-rank-too-large", problem, f"choose at most {enough}, or give more public data")
    down = (inputs[:, -rank:] / spread[-rank:].sqrt()).T
    return SubspaceLinear(base, mean, down, scale * outputs[:, -rank:])
