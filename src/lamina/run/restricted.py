"""Test whether a class that reaches only a part of the model helps it: short seeded trainings on public or simulated data."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress as Bar
from torch import Tensor, nn
from torch.optim import Adam

from lamina.allocate.measure.example_gradients import example_count, take_examples
from lamina.engine.batch import Batch, model_device, to_device
from lamina.engine.engine import Engine
from lamina.engine.noise.source import SeededNoise
from lamina.engine.probe import preserve_global_generators, seed_global_generators
from lamina.engine.rules.proxy import Proxy
from lamina.plan.layer_stack import call_arguments
from lamina.plan.rules import PER_STEP_INJECTION
from lamina.plan.step_plan import StepPlan
from lamina.run.optimizer import HoldThenFall, private_rate, signal_to_noise

_STEPS, _ROWS, _SEEDS, _RATES = 40, 256, 3, (1.0, 0.1)
_QUIET_SECONDS = 2.0


def restricted_notes(
    model: nn.Module, plan: StepPlan, proxy: Proxy | None, *, progress: bool = False
) -> tuple[str, ...]:
    """Return a note for each restricted private class: whether it lowers the loss of held-out examples of the proxy.

    Copies of `model` take up to 40 steps of the plan's noise and batch (above 256 both are cut), with the class and without
    it, from three seeds and at the better of two rates. Nothing private is read; no stream of a run is drawn from.
    With `progress`, a terminal shows a bar of a longer trial.
    """
    notes, sliced = [], {part.cls for part in plan.slices}
    for k, entry in enumerate(plan.classes):
        if entry.public or not any(plan.clip[k]) or not (0 in plan.clip[k] or entry.name in sliced):
            continue
        if proxy is None or plan.rules or not all(each.population for each in plan.classes):
            needs = "labelled public or simulated data ([proxy] in RUN.toml, Trainer(proxy=…)), populations and fixed clip norms"
            reach = f"class {entry.name} reaches a part of the model"
            notes.append(f"{reach}; whether it helps is not assessable without {needs}")
            continue
        with _trial_bar(f"trial of class {entry.name}", 2 * len(_RATES) * _SEEDS, progress) as advance:
            mine, other = (_held_out_losses(model, each, proxy, advance) for each in (plan, _without(plan, k)))
        verdict = "helps" if all(a < b for a, b in zip(mine, other, strict=True)) else "DOES NOT HELP"
        losses = f"{sum(mine) / _SEEDS:.4g} with it, {sum(other) / _SEEDS:.4g} without it"
        better, worse = (
            "lower with it from every seed",
            "leave it out of data and plan (batch 0), or let it reach more layers",
        )
        trained, end = f"short trainings on {proxy.source}", better if verdict == "helps" else worse
        notes.append(f"class {entry.name} {verdict} in {trained}: held-out loss {losses}; {end}")
    return tuple(notes)


def _without(plan: StepPlan, k: int) -> StepPlan:
    """Return the plan in which a class reaches nothing, with at most the noise that the other private classes need.

    Of one class with thresholds C_i and layers of d_i numbers, Σ d_i·S_i² is least at S_i² ∝ C_i/√d_i (docs/allocations/pareto.md).
    """
    clip = tuple(tuple(0.0 for _ in row) if j == k else row for j, row in enumerate(plan.clip))
    left = replace(plan, clip=clip, slices=tuple(s for s in plan.slices if s.cls != plan.classes[k].name))
    others = [j for j, entry in enumerate(plan.classes) if not entry.public and any(clip[j])]
    sizes = [layer.size for layer in plan.layers]
    needed = [max((plan.sigma(j) * clip[j][i] for j in others), default=0.0) for i in range(len(sizes))]
    kept = replace(left, noise=tuple(s if c else 0.0 for s, c in zip(plan.noise, needed, strict=True)))
    spread = replace(left, noise=tuple((c / d**0.5) ** 0.5 for c, d in zip(needed, sizes, strict=True)))
    scale = max((plan.sigma(j) / spread.sigma(j) for j in others), default=1.0)
    spread = replace(spread, noise=tuple(scale * s for s in spread.noise))
    return min(kept, spread, key=lambda made: sum(d * s * s for d, s in zip(sizes, made.noise, strict=True)))


@contextmanager
def _trial_bar(what: str, trainings: int, wanted: bool) -> Iterator[Callable[[], None]]:
    """Yield a function to call after each training; a terminal shows a bar after two seconds."""
    console, begun = Console(stderr=True), time.monotonic()
    bar = Bar(console=console, transient=True)
    task = bar.add_task(what, total=trainings)

    def advance() -> None:
        bar.advance(task)
        if wanted and console.is_terminal and time.monotonic() - begun > _QUIET_SECONDS:
            bar.start()

    try:
        yield advance
    finally:
        if bar.live.is_started:
            bar.stop()


def _held_out_losses(model: nn.Module, plan: StepPlan, proxy: Proxy, advance: Callable[[], None]) -> list[float]:
    """Return the loss of a quarter of the proxy after training on the rest, by seed, at the rate with the smallest mean."""
    rate = private_rate(signal_to_noise(plan), steps := min(_STEPS, plan.steps))

    def trained(part: float, seed: int) -> float:
        loss = _trained(model, plan, proxy, part * rate, steps, seed)
        advance()
        return loss

    return min(([trained(part, seed) for seed in range(_SEEDS)] for part in _RATES), key=sum)


def _trained(model: nn.Module, plan: StepPlan, proxy: Proxy, rate: float, steps: int, seed: int) -> float:
    copied, generator = copy.deepcopy(model).train(), torch.Generator().manual_seed(seed)
    order = torch.randperm(example_count(proxy.x), generator=generator)
    people = torch.tensor([entry.population or 0 for entry in plan.classes], dtype=torch.float64)
    expected = people * torch.tensor([entry.sampling_rate for entry in plan.classes])
    cut = min(1.0, _ROWS / float(expected.sum()))
    held, rest = order.tensor_split([max(1, min(_ROWS, len(order) // 4))])
    parts = rest.tensor_split((len(rest) * people.cumsum(0) / people.sum())[:-1].round().long())
    pools = [part if len(part) else rest[:1] for part in parts]

    def losses(rows: Tensor) -> tuple[Tensor, Any, Any]:
        x, y = to_device(take_examples((proxy.x, proxy.y), rows), model_device(copied))
        args, named = call_arguments(x)
        return proxy.loss_fn(copied(*args, **named), x if y is None else y), x, y

    optimizer = Adam([p for p in copied.parameters() if p.requires_grad], lr=rate)
    schedule, noise = HoldThenFall(optimizer, steps), tuple(cut * s for s in plan.noise)
    short = replace(plan, steps=steps, noise=noise, injection=PER_STEP_INJECTION, bands=1)  # B cancels in Adam's step
    with preserve_global_generators(), torch.enable_grad(), Engine(copied, short, noise=SeededNoise(seed)) as engine:
        seed_global_generators(seed)
        engine.decline_probe()
        counts = [round(cut * float(b)) for b in expected]
        cls = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        for _ in range(steps if any(map(any, plan.clip)) else 0):  # 0: nobody is left
            drawn = [p[torch.randint(len(p), (n,), generator=generator)] for p, n in zip(pools, counts, strict=True)]
            found, x, y = losses(torch.cat(drawn))
            engine.backward(found, Batch(x, y, cls=cls))
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        with torch.no_grad():
            copied.eval()
            return float(losses(held)[0].mean())
