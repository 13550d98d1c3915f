"""One cell of the study: plan, private training, and the figures of the result.

Noise and sampling come from the cell's seed, so that a cell can be repeated: these models are measurements, never
releases. Their ε is that of the same training with secret randomness.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn

from lamina.account.accountants import calibrate, find_accountant
from lamina.account.schedule import Event
from lamina.allocate.make_plan import make_plan
from lamina.allocate.measure.measure import Measure, measure
from lamina.allocate.paper import ReproductionWarning
from lamina.allocate.problem import untuned_clip_norm
from lamina.engine.batch import Batch
from lamina.engine.engine import Engine
from lamina.engine.noise.source import SeededNoise
from lamina.errors import BudgetExceeded, LaminaError
from lamina.plan.layer_stack import LayerStack
from lamina.plan.policy import Policy
from lamina.plan.step_plan import StepPlan
from lamina.run.optimizer import private_rate, signal_to_noise
from lamina.run.pretrain import pretrain
from lamina.study.cells import DELTA, Cell, Result, StudySize
from lamina.study.methods import FEDAVG, LAPLACE, METHODS, NOBODY, OPACUS, PLAIN, Method
from lamina.study.statistics import macro_auc, membership_inference
from lamina.study.tasks import Part, Task, load_task

CLASS, RESTRICTED = "patients", "restricted"
WEIGHT_DECAY = 1e-4  # the document's Table 3, as AdamW and the cosine
LOCAL_STEPS, LOCAL_RATE = 4, 0.02  # of a client in DP-FedAvg
PRETRAINED_RATE = (
    0.05  # of the rule's, which is for first weights: as the preset autoencoder-pretrained found on simulators
)

# What the streams of a seed are for
_SAMPLES, _CHOICES, _DROPOUT, _NOISE = 10_000, 20_000, 30_000, 40_000


def run_cell(cell: Cell, size: StudySize, source: str) -> Result:
    """Train and measure a cell; a method that cannot be run with this model says why, as `refused`."""
    method, whole = METHODS[cell.method], size
    size = replace(size, steps=max(1, round(cell.share * size.steps)))  # as many passes over fewer patients
    task = load_task(cell.data, size, source, cell.seed, cell.share)
    place = (cell.data, cell.architecture, cell.depth, cell.activation, cell.seed, whole, source)
    seen, clip, profiling = measured_model(*place, method.gamma)
    began = time.process_time()
    try:
        model = build(task, cell, whole, source)
        if method.trained_by == NOBODY:
            figures: Result = {"steps": 0, "epsilon": None, "rho": None}
        elif method.trained_by == LAPLACE:
            figures = _train_pure(model, method, task, size, cell)
        elif method.trained_by == PLAIN:
            figures = _train_plain(model, task, size, cell.seed)
        elif method.trained_by == OPACUS:
            figures = _train_opacus(model, task, size, cell, clip)
        elif method.trained_by == FEDAVG:
            figures = _train_fedavg(model, task, size, cell)
        else:
            plan = _make_plan(model, method, task, size, cell.epsilon, seen if method.allocate else None, clip)
            figures = _train_private(model, plan, task, cell.seed, size, routed=method.routed)
    except LaminaError as error:
        return {"refused": f"{error.problem} [{error.code}]"}
    trained = time.process_time()
    return {
        "clip_norm": clip,
        **figures,
        **_judge(model, task),
        "delta_tight": seen.tight[-1] if seen.has_bounds else None,
        "delta_worst": _finite(seen.worst[-1]) if seen.has_bounds else None,
        "delta_printed": seen.printed[-1] if seen.has_bounds else None,
        "profile_seconds": profiling,
        "train_seconds": trained - began,
    }


def build(task: Task, cell: Cell, size: StudySize, source: str) -> nn.Module:
    """The model of a cell with the first weights of its seed, or with those that simulated patients give it."""
    torch.manual_seed(cell.seed)
    model = task.model(cell.architecture, depth=cell.depth, activation=cell.activation, width=size.width)
    if size.pretrain:
        place = (cell.data, cell.architecture, cell.depth, cell.activation, cell.seed, size, source)
        model.load_state_dict(_pretrained(*place))
    return model


@lru_cache(maxsize=4)
def _pretrained(
    data: str, architecture: str, depth: int, activation: str, seed: int, size: StudySize, source: str
) -> dict[str, Tensor]:
    """Weights after `size.pretrain` steps on the simulated patients of the proxy: no private data is read."""
    task = load_task(data, size, source, seed, 1.0)
    torch.manual_seed(seed)
    model = task.model(architecture, depth=depth, activation=activation, width=size.width)
    proxy = task.proxy
    pretrain(
        model, task.losses, proxy.x, proxy.y, proxy=f"simulated: {data}", steps=size.pretrain, seed=seed, progress=False
    )
    return model.state_dict()


def _rate(size: StudySize, signal: float) -> float:
    """The size's learning rate; or the default rule's for this signal-to-noise ratio of a step."""
    if size.rate is not None:
        return size.rate
    return private_rate(signal, size.steps) * (PRETRAINED_RATE if size.pretrain else 1.0)


@lru_cache(maxsize=4)
def measured_model(
    data: str, architecture: str, depth: int, activation: str, seed: int, size: StudySize, source: str, gamma: str
) -> tuple[Measure, float, float]:
    """What the proxy says of a model at its first weights, the clip norm that needs no tuning, and the seconds it took."""
    began = time.process_time()
    task = load_task(data, size, source, seed, 1.0)
    cell = Cell(method="none", data=data, architecture=architecture, depth=depth, activation=activation, seed=seed)
    model, proxy = build(task, cell, size, source), task.proxy
    stack = LayerStack.from_model(model)
    some = slice(0, size.passes)
    seen = measure(
        model, stack, x=proxy.x[some], y=proxy.y[some], losses_of=lambda x, y: task.losses(model(x), y),
        passes=size.passes, seed=seed, proxy="simulated", examples=min(size.passes, 256), draws=8, gamma=gamma,
    )  # fmt: skip
    clip = untuned_clip_norm(_typical_norm(model, task, _rate(size, 1.0)))
    return seen, clip, time.process_time() - began


def _typical_norm(model: nn.Module, task: Task, rate: float) -> float:
    """The median norm of a proxy patient's gradient: at the first weights, or after a short training, whichever is less."""
    stack, policy = LayerStack.from_model(model), _policy(1000, "pld")
    plan = make_plan(stack, policy, batch=10, steps=1, allocate="flat", epsilon=8.0)
    part = task.proxy.take_patients(64)
    model.eval()  # dropout would make the norms depend on chance

    def median() -> float:
        with Engine(model, plan, noise=SeededNoise(0)) as engine:
            batch = part.batch()
            return float(engine.proxy_norms(task.losses(model(batch.x), batch.y), batch).median())

    first = median()
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for _ in range(30):
        optimizer.zero_grad()
        task.losses(model(part.x), part.y).mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    return min(first, median())


def _policy(population: int, accountant: str, restricted: int = 0, kind: str = "gaussian") -> Policy:
    text = f'[noise]\nkind = "{kind}"\n'
    text += f'[corpus]\norigin = "study"\ndelta = {DELTA}\naccountant = "{accountant}"\n'
    text += f'[class.{CLASS}]\npopulation = {population}\nunit = "patient"\nclip_norm = 1e6\n'
    if restricted:
        text += f'[class.{RESTRICTED}]\npopulation = {restricted}\nunit = "patient"\nclip_norm = 1e6\n'
        text += "profile = { top = 0.25 }\n"
    return Policy.parse(text)


def _make_plan(
    model: nn.Module, method: Method, task: Task, size: StudySize, epsilon: float, seen: Measure | None, clip: float
) -> StepPlan:
    people = task.train.patients
    half = people // 2 if method.routed else 0
    assert method.allocate is not None
    return make_plan(
        LayerStack.from_model(model), _policy(people - half, method.accountant, half), batch=min(size.batch, people),
        steps=size.steps, allocate=method.allocate(), epsilon=epsilon, clip_norm=clip,
        measure=None if method.routed else seen,
    )  # fmt: skip


def _train_private(model: nn.Module, plan: StepPlan, task: Task, seed: int, size: StudySize, *, routed: bool) -> Result:
    """Poisson batches of whole patients; the second half of them is restricted, if the method routes."""
    part, rates = task.train, {each.name: each.sampling_rate for each in plan.classes}
    restricted = torch.arange(part.patients) >= part.patients - part.patients // 2
    rate = torch.full((part.patients,), rates[CLASS])
    if routed:
        rate[restricted] = rates[RESTRICTED]
    samples, choices = (torch.Generator().manual_seed(base + seed) for base in (_SAMPLES, _CHOICES))
    optimizer, schedule = _optimizer(model, plan.steps, _rate(size, signal_to_noise(plan)))

    def drawn(generator: torch.Generator) -> Batch:
        chosen = (torch.rand(part.patients, generator=generator) < rate).nonzero().flatten()
        return part.batch(chosen, restricted[chosen].long() if routed else None)

    def losses(batch: Batch) -> Tensor | None:
        return task.losses(model(batch.x), batch.y) if len(batch) else None

    torch.manual_seed(_DROPOUT + seed)
    model.train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReproductionWarning)  # the table says what is true of a printed method
        engine = Engine(model, plan, noise=SeededNoise(_NOISE + seed, threads=1))
    with engine:
        for _ in range(plan.steps):
            batch = drawn(samples)
            try:
                if engine.choice_due:
                    asked = drawn(choices)
                    engine.choose(losses(asked), asked)
                engine.backward(losses(batch), batch)
            except BudgetExceeded:
                break
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        taken = engine.budget.taken
    names = [each.name for each in plan.classes]
    return {
        "steps": taken,
        "epsilon": max(_true_epsilon(plan.schedule(name)) for name in names),
        "rho": max(plan.rho(name) for name in names),
        "claimed": max(plan.claimed) if plan.claimed else None,
        "noise_power": math.sqrt(sum(layer.size * s * s for layer, s in zip(plan.layers, plan.noise, strict=True)))
        / plan.batch,
    }


def _train_pure(model: nn.Module, method: Method, task: Task, size: StudySize, cell: Cell) -> Result:
    """Laplace noise on the classifier of the code, priced by pure composition: ε = Σ_t log(1 + q(e^ε₀ − 1)).

    Its weight and bias are one layer, of which √(‖w‖₁² + ‖b‖₁²) ≤ C: together they move by √2·C in L1, under noise of scale
    b = √(π/2)·sigma·C, so ε₀ = 2/(√π·sigma).
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("classifier"))
    people = task.train.patients
    q = min(size.batch, people) / people
    step = math.log1p(math.expm1(cell.epsilon / size.steps) / q)
    assert method.allocate is not None
    stack = LayerStack.from_model(model)
    clip = untuned_clip_norm(_typical_norm(model, task, _rate(size, 1.0)))
    plan = make_plan(
        stack, _policy(people, method.accountant, kind="laplace"), batch=min(size.batch, people), steps=size.steps,
        allocate=method.allocate(), noise_multiplier=2.0 / (math.sqrt(math.pi) * step), clip_norm=clip,
    )  # fmt: skip
    figures = _train_private(model, plan, task, cell.seed, size, routed=False)
    return figures | {"clip_norm": clip, "epsilon": size.steps * math.log1p(q * math.expm1(step)), "rho": None}


def _true_epsilon(schedule: tuple[Event, ...]) -> float:
    """By the tightest accountant, with Poisson sampling, whatever the plan was priced with."""
    return find_accountant("pld").epsilon(schedule, DELTA)


def _optimizer(
    model: nn.Module, steps: int, rate: float
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=rate, weight_decay=WEIGHT_DECAY
    )
    cosine = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: 0.5 * (1 + math.cos(math.pi * min(t, steps) / steps))
    )
    return optimizer, cosine


def _poisson(part: Part, expected: int, seed: int) -> Callable[[], Tensor]:
    generator, rate = torch.Generator().manual_seed(_SAMPLES + seed), min(1.0, expected / part.patients)
    return lambda: (torch.rand(part.patients, generator=generator) < rate).nonzero().flatten()


def _train_plain(model: nn.Module, task: Task, size: StudySize, seed: int) -> Result:
    optimizer, schedule = _optimizer(model, size.steps, _rate(size, math.inf))
    _take_steps(model, task, task.train, size, seed, optimizer, schedule)
    return {"steps": size.steps, "epsilon": None, "rho": None}


def _take_steps(
    model: nn.Module, task: Task, part: Part, size: StudySize, seed: int, optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
) -> None:  # fmt: skip
    """Train on Poisson batches; a batch of nobody makes no step (Opacus' optimiser cannot make one of noise alone)."""
    drawn = _poisson(part, size.batch, seed)
    torch.manual_seed(_DROPOUT + seed)
    model.train()
    for _ in range(size.steps):
        batch = part.batch(drawn())
        if len(batch):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Full backward hook")  # of Opacus
                task.losses(model(batch.x), batch.y).mean().backward()
            optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def _train_opacus(model: nn.Module, task: Task, size: StudySize, cell: Cell, clip: float) -> Result:
    """Opacus' own gradients and optimiser, flat clip, on the first window of each patient: its unit is one example."""
    try:
        from opacus.grad_sample import GradSampleModule
        from opacus.optimizers import DPOptimizer
    except ImportError:
        return {"refused": "opacus is not installed: pip install 'lamina[study]'"}
    part = task.train.first_windows()
    rate = min(1.0, size.batch / part.patients)
    sigma = calibrate(cell.epsilon, delta=DELTA, q=rate, steps=size.steps)
    wrapped = GradSampleModule(model, strict=False)
    signal = rate * part.patients / sigma / math.sqrt(sum(p.numel() for p in model.parameters()))
    inner, schedule = _optimizer(model, size.steps, _rate(size, signal))
    optimizer = DPOptimizer(
        inner, noise_multiplier=sigma, max_grad_norm=clip, expected_batch_size=rate * part.patients,
        generator=torch.Generator().manual_seed(_NOISE + cell.seed),
    )  # fmt: skip
    _take_steps(wrapped, task, part, size, cell.seed, optimizer, schedule)
    wrapped.to_standard_module()
    event = Event(sigma=sigma, q=rate, steps=size.steps)
    return {"steps": size.steps, "epsilon": _true_epsilon((event,)), "rho": 0.5 * size.steps / sigma**2}


def _train_fedavg(model: nn.Module, task: Task, size: StudySize, cell: Cell) -> Result:
    """Patients as clients (McMahan et al. 2018): local SGD, the update clipped as a whole, noise on their sum.

    Clients have equally many windows, so that all of a round are trained at once.
    """
    part, proxy = task.train, task.proxy
    rate, model = min(1.0, size.batch / part.patients), model.eval()
    sigma = calibrate(cell.epsilon, delta=DELTA, q=rate, steps=size.steps)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}

    def client_loss(local: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        output = torch.func.functional_call(model, local, (x,))
        return task.losses(output, y).mean()

    def update(x: Tensor, y: Tensor, given: dict[str, Tensor]) -> Tensor:
        local = given
        for _ in range(LOCAL_STEPS):
            gradient = torch.func.grad(client_loss)(local, x, y)
            local = {name: value - LOCAL_RATE * gradient[name] for name, value in local.items()}
        return torch.cat([(local[name] - given[name]).flatten() for name in given])

    updates = torch.func.vmap(update, in_dims=(0, 0, None), randomness="different", chunk_size=32)
    clip = untuned_clip_norm(float(updates(*proxy.by_patient(torch.arange(64)), weights).norm(dim=1).median()))
    noise = torch.Generator().manual_seed(_NOISE + cell.seed)
    drawn = _poisson(part, size.batch, cell.seed)
    for _ in range(size.steps):
        chosen = drawn()
        moved = torch.zeros(sum(value.numel() for value in weights.values()))
        if len(chosen):
            found = updates(*part.by_patient(chosen), weights)
            moved += (found * (clip / found.norm(dim=1).clamp(min=clip))[:, None]).sum(0)
        moved += torch.randn(moved.shape, generator=noise) * (sigma * clip)
        parts = (moved / (rate * part.patients)).split([value.numel() for value in weights.values()])
        weights = {n: v + p.view(v.shape) for (n, v), p in zip(weights.items(), parts, strict=True)}
    model.load_state_dict(weights, strict=False)
    event = Event(sigma=sigma, q=rate, steps=size.steps)
    spent = {"epsilon": _true_epsilon((event,)), "rho": 0.5 * size.steps / sigma**2}
    return {"steps": size.steps, "clip_norm": clip, **spent}


def _judge(model: nn.Module, task: Task) -> Result:
    """Error and AUC on the test patients, and the attack that looks at the loss of each patient."""
    model.eval()
    with torch.no_grad():
        scores, error = task.figures(model, task.test)
        both = min(task.train.patients, task.held_out.patients)
        lost = [task.patient_losses(model, part.take_patients(both)) for part in (task.train, task.held_out)]
    if not (np.isfinite(error) and all(np.isfinite(each).all() for each in lost)):
        return {"refused": "the trained model is not finite"}
    attack = membership_inference(*lost)
    return {"mse": float(error), "auc": macro_auc(scores, task.test.labels()), "mia": attack.auc, "mia_p": attack.p}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
