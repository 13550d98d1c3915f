"""Layer-wise differentially private training of PyTorch models.

The public names, in the order in which a step comes to be:

    stack  = lamina.LayerStack.from_model(model)
    policy = lamina.Policy.load("policy.toml")
    plan   = lamina.make_plan(stack, policy, batch=256, steps=1_000, allocate="pareto", epsilon={"clinical": 1.0})
    engine = lamina.Engine(model, plan)
    for batch in batches:
        engine.backward(loss_fn(model(batch.x), batch.y), batch)
        optimizer.step(); optimizer.zero_grad()

Whoever understands `StepPlan` (plan/step.py) can find everything else: docs/architecture.md.
"""

from __future__ import annotations

from lamina.allocate import make_plan
from lamina.engine import Batch, Engine, NoiseSource, SecureNoise, SeededNoise, examples, route, rows
from lamina.errors import LaminaError
from lamina.plan import Clipping, DepthProfile, LayerStack, Policy, StepPlan, fix

__version__ = "0.1.0"

__all__ = [
    "LayerStack", "DepthProfile", "Policy", "fix",
    "make_plan", "StepPlan", "Clipping",
    "Engine", "Batch", "route", "rows", "examples",
    "NoiseSource", "SecureNoise", "SeededNoise",
    "LaminaError",
]  # fmt: skip
