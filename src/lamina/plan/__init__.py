"""What is decided before a step is taken: layers, depth profiles, policy, the step plan, its coverage.

What reads a model needs torch, and is imported when it is first asked for: an auditor reads plans without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lamina.plan.injection import Form, Injection
from lamina.plan.policy import ClassPolicy, Corpus, Floors, Noise, Policy
from lamina.plan.profile import PROFILE_SCHEMA, DepthProfile, Kind
from lamina.plan.rescale import effective_sigma, radius, rescale
from lamina.plan.rules import Choose, FollowBudget, FollowEnergy, FollowQuantile, Rule
from lamina.plan.slices import Slice
from lamina.plan.step import Clipping, PlannedClass, PlannedLayer, StepPlan

if TYPE_CHECKING:
    from lamina.plan.attention import Heads
    from lamina.plan.coverage import Coverage, check_coverage
    from lamina.plan.stack import ROOT, Layer, LayerStack

__all__ = [
    "LayerStack", "Layer", "ROOT",
    "DepthProfile", "Kind", "PROFILE_SCHEMA", "Heads",
    "Policy", "Corpus", "Floors", "ClassPolicy", "Noise",
    "StepPlan", "PlannedLayer", "PlannedClass", "Clipping", "Slice", "Injection", "Form",
    "Rule", "FollowEnergy", "FollowQuantile", "Choose", "FollowBudget",
    "rescale", "effective_sigma", "radius",
    "Coverage", "check_coverage",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in ("LayerStack", "Layer", "ROOT"):
        from lamina.plan import stack

        return getattr(stack, name)
    if name == "Heads":
        from lamina.plan.attention import Heads

        return Heads
    if name in ("Coverage", "check_coverage"):
        from lamina.plan import coverage

        return getattr(coverage, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
