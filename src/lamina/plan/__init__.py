"""What is decided before a step is taken: layers, depth profiles, policy, the step plan, its coverage.

Names are imported when they are first used: what reads a model needs torch, and an auditor reads plans without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lamina.errors import needs_torch

if TYPE_CHECKING:
    from lamina.plan.coverage import Coverage, check_coverage
    from lamina.plan.depth_profile import PROFILE_SCHEMA, DepthProfile, ProfileKind
    from lamina.plan.heads_experts import Heads
    from lamina.plan.layer_stack import Layer, LayerStack
    from lamina.plan.policy import ClassPolicy, CorpusPolicy, NoisePolicy, Policy, PolicyFloors
    from lamina.plan.risk import RiskBound
    from lamina.plan.rules import (
        Choose,
        FollowBudget,
        FollowEnergy,
        FollowProxy,
        FollowQuantile,
        Injection,
        InjectionForm,
        Rule,
    )
    from lamina.plan.selection import ROOT, Slice
    from lamina.plan.step_plan import Clipping, PlannedClass, PlannedLayer, StepPlan

_HOME = {
    "coverage": ("Coverage", "check_coverage"),
    "depth_profile": ("PROFILE_SCHEMA", "DepthProfile", "ProfileKind"),
    "heads_experts": ("Heads",),
    "layer_stack": ("Layer", "LayerStack"),
    "policy": ("ClassPolicy", "CorpusPolicy", "NoisePolicy", "Policy", "PolicyFloors"),
    "risk": ("RiskBound",),
    "rules": ("Choose", "FollowBudget", "FollowEnergy", "FollowProxy", "FollowQuantile", "Injection", "InjectionForm", "Rule"),
    "selection": ("ROOT", "Slice"),
    "step_plan": ("Clipping", "PlannedClass", "PlannedLayer", "StepPlan"),
}  # fmt: skip

__all__ = [
    "Coverage", "check_coverage", "PROFILE_SCHEMA", "DepthProfile", "ProfileKind", "Heads", "Layer", "LayerStack",
    "ClassPolicy", "CorpusPolicy", "NoisePolicy", "Policy", "PolicyFloors", "Choose", "FollowBudget", "FollowEnergy",
    "FollowProxy", "FollowQuantile", "Injection", "InjectionForm", "RiskBound", "Rule", "ROOT", "Slice", "Clipping", "PlannedClass",
    "PlannedLayer", "StepPlan",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    for home, names in _HOME.items():
        if name in names:
            with needs_torch(f"lamina.plan.{name}"):
                return getattr(import_module(f"lamina.plan.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
