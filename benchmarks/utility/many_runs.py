"""Many private trainings of one small network at once: settings × seeds as one batched computation.

The arithmetic of a step is that of `lamina.Engine` under a flat plan: Poisson sample, gradient of each example clipped to C
over all layers together, sum, Gaussian noise of standard deviation σ·C per coordinate, division by the expected batch. All
settings of one seed share first weights, samples and noise, so that they are paired. `defaults validate` compares it
with the engine. Networks are linear layers with tanh between them: per-example norms then follow from activations and
output gradients (‖a‖² + 1)·‖g‖², and no per-example gradient is stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to train: `rate` is the largest learning rate, `sigma` the noise multiplier, `clip` the clip norm C.

    schedule   "cosine" to zero, "constant", "warm": a linear warm-up over a tenth of the steps, then a cosine; or "flat0.5":
               constant, then falling to zero over the last half of the steps along a line
    optimizer  a key of OPTIMIZERS
    """

    optimizer: str
    rate: float
    clip: float
    sigma: float
    schedule: str = "cosine"


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """Data and network: `sizes` of its layers; loss "ce" (y: classes), "mse" (y: targets) or "auto" (targets are x)."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    sizes: tuple[int, ...]
    loss: str

    @property
    def parameters(self) -> int:
        return sum((a + 1) * b for a, b in pairwise(self.sizes))


def first_weights(sizes: Sequence[int], seed: int) -> Tensor:
    """The weights that torch.nn.Linear draws, layer by layer: weight (out × in), then bias, flattened."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [torch.nn.Linear(a, b) for a, b in pairwise(sizes)]
    return torch.cat([t.detach().flatten() for layer in layers for t in (layer.weight, layer.bias)])


def _views(flat: Tensor, sizes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """(weight, bias) of each layer as views of the flat parameters (R, K, P)."""
    found, at = [], 0
    for a, b in pairwise(sizes):
        weight = flat[..., at : at + a * b].unflatten(-1, (b, a))
        found.append((weight, flat[..., at + a * b : at + a * b + b]))
        at += a * b + b
    return found


def _forward(flat: Tensor, sizes: Sequence[int], x: Tensor) -> list[Tensor]:
    """Inputs of every layer and the output, each (R, K, B, width); the first is (R, B, width)."""
    acts: list[Tensor] = [x]
    for i, (weight, bias) in enumerate(_views(flat, sizes)):
        r, k, out, width = weight.shape
        if i == 0:
            z = (x @ weight.reshape(r, k * out, width).mT).unflatten(-1, (k, out)).transpose(1, 2)
        else:
            z = acts[-1] @ weight.mT
        z = z + bias.unsqueeze(2)
        acts.append(torch.tanh(z) if i < len(sizes) - 2 else z)
    return acts


def _clipped_sum(flat: Tensor, problem: Problem, x: Tensor, y: Tensor, real: Tensor, clip: Tensor) -> Tensor:
    """Σ g·min(1, C/‖g‖) over the examples that `real` (R, B) marks: (R, K, P)."""
    acts = _forward(flat, problem.sizes, x)
    output = acts[-1]
    if problem.loss == "ce":
        delta = torch.softmax(output, -1)
        delta = delta - F.one_hot(y, output.shape[-1]).to(output.dtype).unsqueeze(1)
    else:
        target = x if problem.loss == "auto" else y
        delta = 2.0 * (output - target.unsqueeze(1)) / output.shape[-1]
    views = _views(flat, problem.sizes)
    deltas: list[Tensor] = []
    for i in reversed(range(len(views))):
        deltas.insert(0, delta)
        if i:
            delta = (delta @ views[i][0]) * (1.0 - acts[i].square())
    square = torch.zeros(output.shape[:3])
    for i, d in enumerate(deltas):
        a = acts[i].square().sum(-1) + 1.0
        square += (a.unsqueeze(1) if i == 0 else a) * d.square().sum(-1)
    weight = (clip[None, :, None] / square.sqrt().clamp_min(1e-30)).clamp_max(1.0) * real.unsqueeze(1)
    parts: list[Tensor] = []
    for i, d in enumerate(deltas):
        d = d * weight.unsqueeze(-1)
        if i == 0:
            r, k, b, out = d.shape
            summed = (d.transpose(1, 2).reshape(r, b, k * out).mT @ acts[0]).unflatten(1, (k, out))
        else:
            summed = d.mT @ acts[i]
        parts += [summed.flatten(2), d.sum(2)]
    return torch.cat(parts, -1)


# ---------------------------------------------------------------------------------------------------- optimisers

Step = Callable[[Tensor, Tensor, Tensor, int], None]
"""(parameters to change in place, noised gradient, learning rates (K,), step from 0)."""


def _sgd(theta: Tensor, noise: Tensor) -> Step:
    def step(theta: Tensor, g: Tensor, rate: Tensor, t: int) -> None:
        theta.sub_(rate[None, :, None] * g)

    return step


def _momentum(theta: Tensor, noise: Tensor) -> Step:
    v = torch.zeros_like(theta)

    def step(theta: Tensor, g: Tensor, rate: Tensor, t: int) -> None:
        v.mul_(0.9).add_(g)
        theta.sub_(rate[None, :, None] * v)

    return step


def _adam_with(*, beta2: float = 0.999, corrected: float | None = None) -> Callable[[Tensor, Tensor], Step]:
    """Adam; `corrected`: the variance of the noise is subtracted from v (DP-AdamBC), down to so many of its deviations."""

    def make(theta: Tensor, noise: Tensor) -> Step:
        m, v, s2 = torch.zeros_like(theta), torch.zeros_like(theta), noise.square()[None, :, None]

        def step(theta: Tensor, g: Tensor, rate: Tensor, t: int) -> None:
            m.mul_(0.9).add_(g, alpha=0.1)
            v.mul_(beta2).addcmul_(g, g, value=1.0 - beta2)
            second = v / (1.0 - beta2 ** (t + 1))
            if corrected is not None:
                second = torch.maximum(second - s2, corrected**2 * s2)
            theta.sub_(rate[None, :, None] / (1.0 - 0.9 ** (t + 1)) * m / (second.sqrt() + 1e-8))

        return step

    return make


def _known_scale(theta: Tensor, noise: Tensor) -> Step:
    """Momentum over the known size of the noise: Adam's denominator without estimating it."""
    m = torch.zeros_like(theta)

    def step(theta: Tensor, g: Tensor, rate: Tensor, t: int) -> None:
        m.mul_(0.9).add_(g, alpha=0.1)
        theta.sub_((rate / noise)[None, :, None] / (1.0 - 0.9 ** (t + 1)) * m)

    return step


def _dog_with(first: float, *, weighted: bool) -> Callable[[Tensor, Tensor], Step]:
    """DoG (Ivgi et al. 2023) or DoWG (Khaled et al. 2023): distance over gradients; `rate` multiplies it."""

    def make(theta: Tensor, noise: Tensor) -> Step:
        start, total = theta.clone(), torch.zeros(theta.shape[:2])
        far = first * (1.0 + theta.norm(dim=-1))

        def step(theta: Tensor, g: Tensor, rate: Tensor, t: int) -> None:
            far.copy_(torch.maximum(far, (theta - start).norm(dim=-1)))
            total.add_(g.square().sum(-1) * (far.square() if weighted else 1.0))
            size = (far.square() if weighted else far) / total.sqrt()
            theta.sub_((rate * size)[..., None] * g)

        return step

    return make


def _prodigy_with(*, prodigy: bool, first: float = 1e-6) -> Callable[[Tensor, Tensor], Step]:
    """Prodigy (Mishchenko and Defazio 2024), or D-Adaptation's Adam (Defazio and Mishchenko 2023)."""
    beta2 = 0.999
    root = math.sqrt(beta2)

    def make(theta: Tensor, noise: Tensor) -> Step:
        start, m, v, s = theta.clone(), *(torch.zeros_like(theta) for _ in range(3))
        top, d = torch.zeros(theta.shape[:2]), torch.full(theta.shape[:2], first)

        def step(theta: Tensor, g: Tensor, rate: Tensor, t: int) -> None:
            dd = d[..., None]
            m.mul_(0.9).add_(0.1 * dd * g)
            v.mul_(beta2).add_((1.0 - beta2) * dd.square() * g.square())
            if prodigy:
                top.mul_(root).add_((1.0 - root) * rate * d.square() * (g * (start - theta)).sum(-1))
                s.mul_(root).add_((1.0 - root) * rate[None, :, None] * dd.square() * g)
                found = top / s.abs().sum(-1).clamp_min(1e-30)
            else:
                top.add_((1.0 - root) * rate * d * (g * s / (v.sqrt() / dd + 1e-8)).sum(-1))
                s.mul_(root).add_((1.0 - root) * rate[None, :, None] * dd * g)
                top_now = top / (1.0 - root)
                found = top_now / s.abs().sum(-1).clamp_min(1e-30)
            theta.sub_(rate[None, :, None] * dd * m / (v.sqrt() + dd * 1e-8))
            d.copy_(torch.maximum(d, found))

        return step

    return make


OPTIMIZERS: dict[str, Callable[[Tensor, Tensor], Step]] = {
    "sgd": _sgd,
    "momentum": _momentum,
    "adam": _adam_with(),
    "adam-bc": _adam_with(corrected=0.3),
    "known-scale": _known_scale,
    "dog": _dog_with(1e-6, weighted=False),
    "dog-far": _dog_with(1e-2, weighted=False),
    "dowg": _dog_with(1e-6, weighted=True),
    "dowg-far": _dog_with(1e-2, weighted=True),
    "prodigy": _prodigy_with(prodigy=True),
    "d-adapt-adam": _prodigy_with(prodigy=False),
}


def _falling(schedule: str, t: int, steps: int) -> float:
    if schedule == "constant":
        return 1.0
    if schedule.startswith("flat"):
        return min(1.0, (1.0 - t / steps) / float(schedule[4:]))
    half = 0.5 * (1.0 + math.cos(math.pi * t / steps))
    return half * min(1.0, (t + 1) / max(1.0, 0.1 * steps)) if schedule == "warm" else half


# -------------------------------------------------------------------------------------------------------- training


def train_all(
    problem: Problem, settings: Sequence[Setting], *, batch: int, steps: int, seeds: int, ema: float = 0.99
) -> tuple[Tensor, Tensor]:
    """Test errors (seeds, settings) of the last weights, and of their moving average. Settings keep their order."""
    errors, averaged = torch.empty(seeds, len(settings)), torch.empty(seeds, len(settings))
    for name in dict.fromkeys(each.optimizer for each in settings):
        index = [i for i, each in enumerate(settings) if each.optimizer == name]
        found = _train(problem, [settings[i] for i in index], name, batch, steps, seeds, ema)
        errors[:, index], averaged[:, index] = found
    return errors, averaged


def _train(
    problem: Problem, settings: Sequence[Setting], optimizer: str, batch: int, steps: int, seeds: int, ema: float
) -> tuple[Tensor, Tensor]:
    n, k = len(problem.x), len(settings)
    theta = torch.stack([first_weights(problem.sizes, seed) for seed in range(seeds)])
    theta = theta.unsqueeze(1).repeat(1, k, 1)
    average = theta.clone()
    clip = torch.tensor([each.clip for each in settings])
    spread = torch.tensor([each.sigma * each.clip for each in settings]) / batch
    coins = [torch.Generator().manual_seed(10_000 + seed) for seed in range(seeds)]
    noises = [torch.Generator().manual_seed(20_000 + seed) for seed in range(seeds)]
    update = OPTIMIZERS[optimizer](theta, spread)
    for t in range(steps):
        drawn = [(torch.rand(n, generator=g) < batch / n).nonzero().flatten() for g in coins]
        most = max(1, *(len(rows) for rows in drawn))
        index = torch.stack([F.pad(rows, (0, most - len(rows))) for rows in drawn])
        real = torch.stack([F.pad(torch.ones(len(rows)), (0, most - len(rows))) for rows in drawn])
        g = _clipped_sum(theta, problem, problem.x[index], problem.y[index], real, clip) / batch
        noise = torch.stack([torch.randn(problem.parameters, generator=each) for each in noises])
        g.add_(spread[None, :, None] * noise.unsqueeze(1))
        rate = torch.tensor([each.rate * _falling(each.schedule, t, steps) for each in settings])
        update(theta, g, rate, t)
        average.lerp_(theta, 1.0 - min(ema, (1 + t) / (10 + t)))
    return _errors(theta, problem), _errors(average, problem)


def _errors(theta: Tensor, problem: Problem) -> Tensor:
    """1 - accuracy, or squared error over the variance (regression) or power (autoencoder) of the target; at most 1e3."""
    found = torch.empty(theta.shape[:2])
    for r in range(theta.shape[0]):
        for part in torch.arange(theta.shape[1]).split(16):
            output = _forward(theta[r : r + 1, part], problem.sizes, problem.test_x[None])[-1][0]
            if problem.loss == "ce":
                error = (output.argmax(-1) != problem.test_y).float().mean(-1)
            else:
                target = problem.test_x if problem.loss == "auto" else problem.test_y
                centre = 0.0 if problem.loss == "auto" else target.mean(0)
                error = (output - target).square().sum((1, 2)) / (target - centre).square().sum()
            found[r, part] = error.nan_to_num(1e3, 1e3, 1e3).clamp_max(1e3)
    return found
