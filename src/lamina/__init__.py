"""Layer-wise differentially private training of PyTorch models.

The public names, in the order in which a run comes to be:

    stack  = lamina.LayerStack.from_model(model)
    policy = lamina.Policy.load("policy.toml")
    plan   = lamina.make_plan(stack, policy, batch=256, steps=1_000, epsilon={"clinical": 1.0})
    corpus = lamina.Gate(policy, "keys.json").admit("contributions")     # or lamina.Corpus(x, y, unit=patient, …)
    outcome = lamina.Trainer(model, "auto", loss_fn, corpus, plan, folder="runs/first").fit()

or, with a loop of one's own:

    engine = lamina.Engine(model, plan)
    for batch in corpus.batches(plan):
        engine.backward(loss_fn(model(batch.x), batch.y) if len(batch) else None, batch)
        optimizer.step(); optimizer.zero_grad()

Whoever understands `StepPlan` (plan/step_plan.py) can find everything else: docs/architecture.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lamina.errors import LaminaError, needs_torch

if TYPE_CHECKING:
    from lamina.allocate.make_plan import make_plan
    from lamina.allocate.measure.measure import Measure, measure
    from lamina.engine import Batch, Engine, NoiseSource, SecureNoise, SeededNoise, examples, rows
    from lamina.engine.reference import route
    from lamina.ledger.writer import Ledger
    from lamina.plan import Clipping, DepthProfile, LayerStack, Policy, StepPlan
    from lamina.plan.coverage import fix
    from lamina.release import Certificate, Query, ReleaseGate, Rights, certify, make_release, verify_release
    from lamina.release.utility import Figure
    from lamina.run import (
        Callback,
        Corpus,
        Evaluation,
        Gate,
        Outcome,
        RunFigures,
        Trainer,
        make_private,
        private_optimizer,
    )
    from lamina.run.pretrain import merge_subspace, pretrain, private_subspace
    from lamina.sign.key_ring import KeyRing
    from lamina.sign.keys import PrivateKey, PublicKey

__version__ = "0.1.0"

__all__ = [
    "LayerStack", "DepthProfile", "Policy", "fix",
    "measure", "Measure", "make_plan", "StepPlan", "Clipping",
    "Engine", "Batch", "route", "rows", "examples",
    "PrivateKey", "PublicKey", "KeyRing", "Gate",
    "make_private", "private_optimizer", "pretrain", "private_subspace", "merge_subspace",
    "Corpus", "Trainer", "Evaluation", "Figure", "Callback", "RunFigures", "Outcome", "Ledger",
    "certify", "Certificate", "make_release", "verify_release", "ReleaseGate", "Query", "Rights",
    "NoiseSource", "SecureNoise", "SeededNoise",
    "LaminaError",
]  # fmt: skip

# Where each name lives. They are imported when first asked for: `import lamina.ledger` must not need torch.
_HOME = {
    "lamina.plan": ("LayerStack", "DepthProfile", "Policy", "StepPlan", "Clipping"),
    "lamina.plan.coverage": ("fix",),
    "lamina.allocate.measure": ("measure", "Measure"),
    "lamina.allocate": ("make_plan",),
    "lamina.sign.keys": ("PrivateKey", "PublicKey"),
    "lamina.sign.key_ring": ("KeyRing",),
    "lamina.engine": (
        "Engine", "Batch", "route", "rows", "examples", "NoiseSource", "SecureNoise", "SeededNoise",
    ),
    "lamina.ledger.writer": ("Ledger",),
    "lamina.release": (
        "certify", "Certificate", "make_release", "verify_release", "ReleaseGate", "Query", "Rights",
    ),
    "lamina.release.utility": ("Figure",),
    "lamina.run": ("Gate", "Corpus", "make_private", "private_optimizer", "Trainer", "Evaluation", "Callback", "RunFigures", "Outcome"),
    "lamina.run.pretrain": ("pretrain", "private_subspace", "merge_subspace"),
}  # fmt: skip


_MODULES = ("signals", "recipes")  # that pages name as lamina.signals and lamina.recipes


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        with needs_torch(f"lamina.{name}"):
            return import_module(f"lamina.{name}")
    for home, names in _HOME.items():
        if name in names:
            with needs_torch(f"lamina.{name}"):
                return globals().setdefault(name, getattr(import_module(home), name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
