"""The demo's training: two classes of simulated patients, one small autoencoder, one plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lamina.allocate import make_plan
from lamina.cli.demo.coins import poisson_sample
from lamina.data import ECGSimulator
from lamina.engine import Batch, Engine
from lamina.models import ResidualAutoencoder
from lamina.plan import LayerStack, Policy, StepPlan

WINDOWS = 2  # per patient
SCALE = 4.0  # 1 / (0.25 mV): a public constant, never a statistic of the patients
POLICY = """
[corpus]
origin = "lamina demo, simulated"
delta = 1e-5

[class.clinical]
population = 3000
epsilon = 3.0
unit = "patient"

[class.sensitive]
population = 1000
epsilon = 1.0
unit = "patient"
profile = { top = 0.25 }
"""

Tick = Callable[[int, dict[str, float] | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What may be shown: ε per class, and the error on public data. No private loss, no batch sizes."""

    epsilon: dict[str, float]
    error_before: float
    error_after: float
    private: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """Everything that is ready before the first step."""

    plan: StepPlan
    model: nn.Module
    patients: dict[str, Tensor]  # class -> (population, WINDOWS, leads, samples)
    public: Tensor

    @classmethod
    def prepare(cls, *, steps: int) -> Demo:
        policy = Policy.parse(POLICY, source="the demo's policy")
        simulator = ECGSimulator(samples=128)
        torch.manual_seed(0)
        model = ResidualAutoencoder(12, (16, 16), kernel=5, groups=4)
        plan = make_plan(
            LayerStack.from_model(model), policy, batch=200, steps=steps, allocate="pareto", clipping="joint"
        )
        patients = {}
        for seed, entry in enumerate(plan.classes):
            assert entry.population is not None
            drawn = simulator.draw(patients=entry.population, windows=WINDOWS, seed=seed)
            patients[entry.name] = SCALE * torch.from_numpy(drawn.x).unflatten(0, (entry.population, WINDOWS))
        public = SCALE * torch.from_numpy(simulator.draw(patients=300, windows=1, seed=1_000).x)
        return cls(plan=plan, model=model, patients=patients, public=public)

    def train(self, tick: Tick) -> Outcome:
        """All steps of the plan. `tick` hears the number of steps done and, now and then, ε so far."""
        before = self.error()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=4e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=self.plan.steps)
        every = max(1, self.plan.steps // 10)
        with Engine(self.model, self.plan) as engine:
            self.model.train()
            for done in range(1, self.plan.steps + 1):
                batch = self.sample()
                engine.backward(self.losses(batch) if len(batch) else None, batch)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                priced = done % every == 0 or done == self.plan.steps
                tick(done, self.spent(engine) if priced else None)
            spent = self.spent(engine)
            private = engine.private
        return Outcome(epsilon=spent, error_before=before, error_after=self.error(), private=private)

    def sample(self) -> Batch:
        """One Poisson sample of patients per class, with all windows of each."""
        rows = {
            e.name: poisson_sample(len(self.patients[e.name]), e.sampling_rate) for e in self.plan.classes
        }
        x = torch.cat([self.patients[name][torch.from_numpy(index)] for name, index in rows.items()])
        cls = torch.from_numpy(np.repeat(np.arange(len(rows)), [len(index) for index in rows.values()]))
        unit = torch.arange(len(x)).repeat_interleave(WINDOWS)
        return Batch(x.flatten(0, 1), unit=unit, cls=cls)

    def losses(self, batch: Batch) -> Tensor:
        return _squared_error(self.model(batch.x), batch.x)

    def spent(self, engine: Engine) -> dict[str, float]:
        return {entry.name: engine.epsilon(entry.name) for entry in self.plan.classes}

    @torch.no_grad()
    def error(self) -> float:
        """Unexplained fraction of the variance on public, simulated patients."""
        self.model.eval()
        left = _squared_error(self.model(self.public), self.public).mean()
        total = _squared_error(self.public.mean(0, keepdim=True).expand_as(self.public), self.public).mean()
        return float(left / total)


def _squared_error(y: Tensor, target: Tensor) -> Tensor:
    """One loss per window."""
    return F.mse_loss(y, target, reduction="none").flatten(1).mean(1)
