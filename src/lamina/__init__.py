"""Layer-wise differentially private training of PyTorch models.

The public names, in the order in which a run comes to be:

    stack  = lamina.LayerStack.from_model(model)
    policy = lamina.Policy.load("policy.toml")
    plan   = lamina.make_plan(stack, policy, batch=256, steps=1_000, epsilon={"clinical": 1.0})
    corpus = lamina.Corpus(x, y, unit=patient, cls=group, policy=policy)
    outcome = lamina.Trainer(model, optimizer, loss_fn, corpus, plan, folder="runs/first").fit()

or, with a loop of one's own:

    engine = lamina.Engine(model, plan)
    for batch in corpus.batches(plan):
        engine.backward(loss_fn(model(batch.x), batch.y) if len(batch) else None, batch)
        optimizer.step(); optimizer.zero_grad()

Whoever understands `StepPlan` (plan/step.py) can find everything else: docs/architecture.md.
"""

from __future__ import annotations

from lamina.allocate import make_plan
from lamina.engine import Batch, Engine, NoiseSource, SecureNoise, SeededNoise, examples, route, rows
from lamina.errors import LaminaError
from lamina.plan import Clipping, DepthProfile, LayerStack, Policy, StepPlan, fix
from lamina.sensitivity import Measure, measure
from lamina.train import Corpus, Evaluation, Outcome, SpendBook, Trainer, make_private

__version__ = "0.1.0"

__all__ = [
    "LayerStack", "DepthProfile", "Policy", "fix",
    "measure", "Measure", "make_plan", "StepPlan", "Clipping",
    "Engine", "Batch", "route", "rows", "examples",
    "make_private", "Corpus", "Trainer", "Evaluation", "Outcome", "SpendBook",
    "NoiseSource", "SecureNoise", "SeededNoise",
    "LaminaError",
]  # fmt: skip
