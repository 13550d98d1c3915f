"""What is decided before a step is taken: layers, depth profiles, policy, the step plan, its coverage.

What reads a model needs torch, and is imported when it is first asked for: an auditor reads plans without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lamina.plan.depth_profile import PROFILE_SCHEMA, DepthProfile, ProfileKind
from lamina.plan.policy import ClassPolicy, CorpusPolicy, NoisePolicy, Policy, PolicyFloors
from lamina.plan.rules import (
    Choose,
    FollowBudget,
    FollowEnergy,
    FollowQuantile,
    Injection,
    InjectionForm,
    Rule,
    clip_radius,
    effective_sigma,
    rescale_noise,
)
from lamina.plan.selection import Slice
from lamina.plan.step_plan import Clipping, PlannedClass, PlannedLayer, StepPlan

if TYPE_CHECKING:
    from lamina.plan.coverage import Coverage, check_coverage
    from lamina.plan.heads_experts import Heads
    from lamina.plan.layer_stack import Layer, LayerStack
    from lamina.plan.selection import ROOT

__all__ = [
    "LayerStack", "Layer", "ROOT",
    "DepthProfile", "ProfileKind", "PROFILE_SCHEMA", "Heads",
    "Policy", "CorpusPolicy", "PolicyFloors", "ClassPolicy", "NoisePolicy",
    "StepPlan", "PlannedLayer", "PlannedClass", "Clipping", "Slice", "Injection", "InjectionForm",
    "Rule", "FollowEnergy", "FollowQuantile", "Choose", "FollowBudget",
    "rescale_noise", "effective_sigma", "clip_radius",
    "Coverage", "check_coverage",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in ("LayerStack", "Layer", "ROOT"):
        from lamina.plan import layer_stack

        return getattr(layer_stack, name)
    if name == "Heads":
        from lamina.plan.heads_experts import Heads

        return Heads
    if name in ("Coverage", "check_coverage"):
        from lamina.plan import coverage

        return getattr(coverage, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
