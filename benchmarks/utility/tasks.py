"""The tasks: a model, a loss per example, a figure of merit, and how long the private run is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scipy.stats import rankdata
from torch import Tensor, nn
from torch.nn import functional as F

from lamina.recipes.signals import autoencoder, nmse

from .data import Part, Split, digits, mnist, ptbxl, simulated

DELTA = 1e-5


@dataclass(frozen=True, kw_only=True)
class Task:
    """One row block of the table.

    figure(output, part) is what is reported; `higher` says which way is better. `scale` turns it into the unit of the
    table. Batches are Poisson samples of `batch` expected contributions; learning rates in `rates` are in units of one
    clipped gradient: a step of SGD moves the weights by rate/C times the noised mean. `clips` × `rates` is the grid
    that every policy is tuned on, `tries` how many seeds each of its points gets. `usual` is the clip norm and rate at
    which the layers are measured, before anything is tuned. `adam`: Adam instead of SGD, with the rate as it is.
    """

    name: str
    title: str
    epsilon: float
    steps: int
    batch: int
    unit: str
    metric: str
    higher: bool
    scale: float
    model: Callable[[], nn.Module]
    losses: Callable[[Tensor, Tensor, Tensor], Tensor]
    figure: Callable[[Tensor, Part], float]
    real: Callable[[], Split]
    proxy: Callable[[Path], Split]
    stand_in: str
    clips: tuple[float, ...]
    rates: tuple[float, ...]
    tries: int
    usual: tuple[float, float]
    adam: bool = False


# ------------------------------------------------------------------------------------------------------- models


def digit_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 10))


def beat_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(480, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 1), nn.Flatten(0))


# --------------------------------------------------------------------------------------------- losses and figures


def cross_entropy(output: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y, reduction="none")


def binary(output: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, y.to(output.dtype), reduction="none")


def reconstruction(output: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return (output - x).square().mean(1)


def accuracy(output: Tensor, part: Part) -> float:
    return float((output.argmax(1) == part.y).double().mean())


def auc(output: Tensor, part: Part) -> float:
    """Area under the ROC curve; records of one patient count one by one."""
    ill = part.y.numpy() > 0.5
    above = rankdata(output.numpy())[ill].sum() - ill.sum() * (ill.sum() + 1) / 2
    return float(above / (ill.sum() * (~ill).sum()))


def lost_power(output: Tensor, part: Part) -> float:
    return nmse(output, part.x)


# ---------------------------------------------------------------------------------------------------------- data


def single_leads(split: Split) -> Split:
    """Median beats of twelve leads as twelve examples of 40 samples of the same contribution."""

    def part(p: Part) -> Part:
        return Part(x=p.x.reshape(-1, 40), y=p.y.repeat_interleave(12), unit=p.unit.repeat_interleave(12))

    return Split(train=part(split.train), test=part(split.test))


def _beats(name: str, epsilon: float, rates: tuple[float, ...]) -> Task:
    return Task(
        name=name,
        title=f"PTB-XL slice, MLP on median beats, ε = {epsilon:g}",
        epsilon=epsilon,
        steps=150,
        batch=256,
        unit="patient",
        metric="AUC",
        higher=True,
        scale=1.0,
        model=beat_mlp,
        losses=binary,
        figure=auc,
        real=ptbxl,
        proxy=simulated,
        stand_in="simulated: ECG, median beats",
        clips=(0.1, 0.5, 2.5),
        rates=rates,
        tries=2,
        usual=(0.5, 0.2),
    )


TASKS = {
    task.name: task
    for task in (
        Task(
            name="mnist",
            title="MNIST, MLP, ε = 1",
            epsilon=1.0,
            steps=300,
            batch=1024,
            unit="image",
            metric="accuracy, %",
            higher=True,
            scale=100.0,
            model=digit_mlp,
            losses=cross_entropy,
            figure=accuracy,
            real=mnist,
            proxy=lambda folder: digits(),
            stand_in="public: digits of scikit-learn",
            clips=(0.3, 1.0, 3.0),
            rates=(0.8, 1.6, 3.2, 6.4),
            tries=1,
            usual=(1.0, 1.6),
        ),
        _beats("ptbxl3", 3.0, rates=(0.1, 0.2, 0.4, 0.8)),
        _beats("ptbxl8", 8.0, rates=(0.2, 0.4, 0.8, 1.6)),
        Task(
            name="autoencoder",
            title="PTB-XL slice, autoencoder of 12 layers on single-lead beats, ε = 1",
            epsilon=1.0,
            steps=200,
            batch=256,
            unit="patient",
            metric="NMSE",
            higher=False,
            scale=1.0,
            model=autoencoder,
            losses=reconstruction,
            figure=lost_power,
            real=lambda: single_leads(ptbxl()),
            proxy=lambda folder: single_leads(simulated(folder)),
            stand_in="simulated: ECG, median beats",
            clips=(0.02, 0.1, 0.5),
            rates=(0.0075, 0.015, 0.03, 0.06),
            tries=1,
            usual=(0.1, 0.015),
        ),
    )
}
